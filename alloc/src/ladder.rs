//! The out-of-memory ladder: trim, reclaim, report. Every step is bounded.
//!
//! On a stream-ordered device completed uses are collected before `Reclaim` is called, and the others
//! are waited for after it: putting memory to sleep is work, waiting is idle time.
//!
//! Two locks. `state` guards the bookkeeping and is held briefly. `ladder` is held during a trim, so that
//! another thread does not mistake pages in transit (in no list, still in the budget) for a shortage: it
//! waits for the ladder, then tries again. Trimmed bytes are held back for the request that trimmed
//! them. A request is refused only if at one moment nothing could be trimmed and it fitted into no gap
//! of its pool or of the pool for the other kind of blocks (small, large) of its stream. `free` takes
//! `state` only (I4).
//! Neither is held while `Reclaim` runs; `state` is not held while the device is called (I5).

use crate::AllocError;
use crate::allocator::{Allocator, Locked};
use crate::reclaim::Reclaimed;
use crate::report::{Cause, OutOfMemory, TOP_HOLDERS_MAX, Tried, holders};
use crate::state::{Attempt, Need, Priority};
use crate::streams::WaitMode;
use crate::trim::{TRIM_ROUNDS_MAX, Trim, TrimPurpose};
use crate::types::{Block, Request};
use dormouse_device::sync::MutexGuard;
use dormouse_device::{Device, DeviceError};

/// Limit of the [`crate::Reclaim`] calls for one request.
pub const RECLAIM_ROUNDS_MAX: u32 = 8;

/// What one attempt came to.
enum AttemptOutcome {
    Block(Block),
    Short(Shortage),
}

/// Why an attempt failed, and how much would help.
struct Shortage {
    cause: Cause,
    /// Bytes that would have to be unmapped.
    bytes: u64,
    device: Option<DeviceError>,
}

impl Shortage {
    fn because(cause: Cause, bytes: u64) -> Self {
        Self { cause, bytes, device: None }
    }
}

impl<D: Device> Allocator<D> {
    /// The whole ladder for one request.
    #[inline]
    pub(crate) fn allocate_or_climb(
        &self,
        request: &Request,
        need: &Need,
    ) -> Result<Block, AllocError> {
        let mut locked = self.state.lock();
        let is_plain = request.arena.is_none() && need.fit.align_units == 1;
        if is_plain
            && !locked.are_many_pending()
            && let Some(block) = locked.state.allocate_cached(request, need)
        {
            self.record_awake(&mut locked);
            return Ok(block);
        }
        if !locked.pending.is_empty() {
            locked = self.collect_before(locked, request, need);
        }
        match self.attempt(locked, request, need, Priority::Normal)? {
            AttemptOutcome::Block(block) => Ok(block),
            AttemptOutcome::Short(shortage) => self.climb(request, need, shortage),
        }
    }

    /// Has cached pages of `bytes` leave that no stream uses: as many as there are. Returns the bytes.
    #[cold]
    fn move_away(&self, bytes: u64, request: &Request) -> u64 {
        // The holder of the ladder already frees memory; saving memory is not urgent here.
        let Some(ladder) = self.ladder.try_lock() else { return 0 };
        let stream = self.state.lock().state.slot_of(request.stream).ok();
        let trim = Trim { keep: TrimPurpose::Move, wait_mode: WaitMode::Poll, stream };
        self.trim_once(&ladder, bytes, trim)
    }

    /// One attempt: a cached range as it is, or a bare one mapped with the lock released.
    #[inline]
    fn attempt(
        &self,
        mut locked: MutexGuard<'_, Locked<D>>,
        request: &Request,
        need: &Need,
        priority: Priority,
    ) -> Result<AttemptOutcome, AllocError> {
        let mapping = match locked.state.attempt(request, need, priority)? {
            Attempt::Cached(index) => {
                let block = locked.state.publish(index, request, need, false);
                self.record_gauges(&mut locked);
                return Ok(AttemptOutcome::Block(block));
            }
            Attempt::Bare(mapping) => mapping,
            Attempt::OverBudget(bytes) => {
                return Ok(AttemptOutcome::Short(Shortage::because(Cause::Budget, bytes)));
            }
            // Only whole segments make runs of addresses longer, so everything has to go.
            Attempt::NoAddresses => {
                return Ok(AttemptOutcome::Short(Shortage::because(Cause::AddressSpace, u64::MAX)));
            }
        };
        // The range is in no list, and no lookup finds it.
        let range = locked.state.pages_to_map(&mapping);
        drop(locked);
        let mapped = self.device.during(|| {
            let is_short = mapping.move_bytes > 0
                && self.move_away(mapping.move_bytes, request) < mapping.move_bytes;
            let is_given_up = is_short && mapping.is_choice;
            (!is_given_up).then(|| self.device.map(range, request.fill))
        });
        let mut locked = self.state.lock();
        let Some(mapped) = mapped else {
            locked.state.cancel_map(mapping);
            locked.state.pause_filling();
            return self.attempt(locked, request, need, priority);
        };
        match mapped {
            Ok(()) => {
                let block = locked.state.complete_map(mapping, request, need);
                self.record_gauges(&mut locked);
                Ok(AttemptOutcome::Block(block))
            }
            Err(error) => {
                locked.state.cancel_map(mapping);
                shortage_of_device(error, need).map(AttemptOutcome::Short)
            }
        }
    }

    /// Trims and reclaims in turns until the request fits or nothing more can be freed.
    #[cold]
    fn climb(
        &self,
        request: &Request,
        need: &Need,
        mut shortage: Shortage,
    ) -> Result<Block, AllocError> {
        let mut tried = Tried::default();
        if self.is_impossible(need) {
            tried.impossible = true;
            return Err(self.report(request, shortage, tried));
        }
        {
            let mut locked = self.state.lock();
            locked.state.stats.retries += 1;
            locked.last_error = None;
        }
        tracing::debug!(
            target: "alloc",
            bytes = request.bytes,
            missing_bytes = shortage.bytes,
            cause = ?shortage.cause,
            "allocation retried after making room"
        );
        let mut exhausted = false;
        for round in 0..=RECLAIM_ROUNDS_MAX {
            match self.attempt_with_trims(request, need, WaitMode::Poll, &mut tried)? {
                AttemptOutcome::Block(block) => return Ok(block),
                AttemptOutcome::Short(now) => shortage = now,
            }
            // Sleeping blocks keep their addresses: `Reclaim` cannot help.
            let helpless = shortage.cause == Cause::AddressSpace;
            if exhausted || helpless || round == RECLAIM_ROUNDS_MAX {
                break;
            }
            match self.call_reclaim(shortage.bytes, &mut tried) {
                // Once more even after nothing: somebody may have freed something meanwhile.
                Some(reclaimed) => exhausted = reclaimed.is_nothing(),
                None => break,
            }
        }
        if self.strongest_wait() == WaitMode::Wait {
            match self.attempt_with_trims(request, need, WaitMode::Wait, &mut tried)? {
                AttemptOutcome::Block(block) => return Ok(block),
                AttemptOutcome::Short(now) => shortage = now,
            }
        }
        Err(self.report(request, shortage, tried))
    }

    /// Whether the request does not fit even into an empty allocator.
    fn is_impossible(&self, need: &Need) -> bool {
        let locked = self.state.lock();
        locked.state.page_bytes_for(need) > locked.state.stats.budget_bytes
            || !locked.state.could_ever_fit(need)
    }

    /// Attempts under the ladder's lock, making room between them, until there is none to be made.
    fn attempt_with_trims(
        &self,
        request: &Request,
        need: &Need,
        wait_mode: WaitMode,
        tried: &mut Tried,
    ) -> Result<AttemptOutcome, AllocError> {
        let ladder = self.ladder.lock();
        let mut locked = self.state.lock();
        let stream = locked.state.slot_of(request.stream).ok();
        let trim = Trim { keep: TrimPurpose::ForRequest, wait_mode, stream };
        let waits_before = locked.state.stats.stream_waits;
        let (mut rounds, mut is_exhausted) = (0, false);
        let outcome = loop {
            // What is in the thread cache may serve, or leave; what came into it after the last step too.
            is_exhausted &= locked.state.flush_thread_cache() == 0;
            let is_last = is_exhausted || rounds == TRIM_ROUNDS_MAX;
            let priority = if is_last { Priority::LastResort } else { Priority::OnLadder };
            let outcome = self.attempt(locked, request, need, priority);
            let Ok(AttemptOutcome::Short(shortage)) = &outcome else { break outcome };
            if is_last {
                break outcome;
            }
            let made = self.collect_or_trim(&ladder, shortage.bytes, trim, rounds);
            tried.trimmed_bytes += made.trimmed_bytes;
            tried.collected_bytes += made.collected_bytes;
            // After a step that gave nothing, once more: the state was unlocked before it.
            is_exhausted = made.is_nothing();
            rounds += 1;
            locked = self.state.lock();
        };
        let mut locked = self.state.lock();
        locked.state.release_held_back();
        // Whoever waits has the ladder: these were ours.
        tried.stream_waits += locked.state.stats.stream_waits - waits_before;
        outcome
    }

    /// Asks `Reclaim`, where there is one. No lock is held (I5).
    fn call_reclaim(&self, bytes: u64, tried: &mut Tried) -> Option<Reclaimed> {
        let reclaim = self.reclaim()?;
        self.state.lock().state.stats.reclaims += 1;
        let reclaimed = reclaim.reclaim(bytes);
        tried.reclaim_rounds += 1;
        tried.reclaimed_bytes = tried.reclaimed_bytes.saturating_add(reclaimed.freed_bytes);
        tried.in_flight_bytes = reclaimed.in_flight_bytes;
        tracing::debug!(
            target: "alloc",
            bytes,
            freed_bytes = reclaimed.freed_bytes,
            in_flight_bytes = reclaimed.in_flight_bytes,
            round = tried.reclaim_rounds,
            "memory reclaimed"
        );
        Some(reclaimed)
    }

    /// The report of a request that could not be met.
    fn report(&self, request: &Request, shortage: Shortage, tried: Tried) -> AllocError {
        let mut locked = self.state.lock();
        locked.state.stats.ooms += 1;
        locked.state.settle_thread_cache();
        let stats = locked.state.stats;
        let last_error = locked.last_error.take();
        let (largest_cached_bytes, largest_bare_bytes) = locked.state.largest_bytes();
        let kept_bytes = locked.state.kept_bytes();
        let blocks = locked.state.blocks();
        drop(locked);
        tracing::info!(
            target: "alloc",
            bytes = request.bytes,
            cause = ?shortage.cause,
            budget_bytes = stats.budget_bytes,
            mapped_bytes = stats.mapped_bytes.current,
            trimmed_bytes = tried.trimmed_bytes,
            reclaimed_bytes = tried.reclaimed_bytes,
            "allocation refused"
        );
        let mut holders = holders(&blocks);
        let holders_left_out = holders.len().saturating_sub(TOP_HOLDERS_MAX);
        holders.truncate(TOP_HOLDERS_MAX);
        AllocError::OutOfMemory(Box::new(OutOfMemory {
            cause: shortage.cause,
            asked_bytes: request.bytes as u64,
            align_bytes: request.align as u64,
            budget_bytes: stats.budget_bytes,
            mapped_bytes: stats.mapped_bytes.current,
            awake_bytes: stats.active_bytes.current - stats.pending_bytes.current,
            pending_bytes: stats.pending_bytes.current,
            cached_bytes: stats.cached_bytes.current,
            kept_bytes,
            staged_bytes: stats.staged_bytes.current,
            asleep_bytes: stats.asleep_bytes.current,
            largest_cached_bytes,
            largest_bare_bytes,
            holders,
            holders_left_out,
            tried,
            device: shortage.device.or(last_error),
        }))
    }
}

/// A full device is a shortage like any other; whatever else it says is not for us to mend.
fn shortage_of_device(error: DeviceError, need: &Need) -> Result<Shortage, AllocError> {
    let DeviceError::OutOfMemory { asked_bytes, mapped_bytes, capacity_bytes, .. } = error else {
        return Err(AllocError::Device(error));
    };
    let missing = asked_bytes.saturating_add(mapped_bytes).saturating_sub(capacity_bytes);
    // A device that does not say how much is missing may need all of it.
    let bytes = if missing == 0 { need.bytes } else { missing.min(need.bytes) };
    Ok(Shortage { cause: Cause::Device, bytes, device: Some(error) })
}
