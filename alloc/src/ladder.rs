//! The out-of-memory ladder: trim, reclaim, report. Every step is bounded.
//!
//! On a stream-ordered device completed uses are collected before `Reclaim` is called, and the others
//! are waited for after it: putting memory to sleep is work, waiting is idle time.
//!
//! The `ladder` lock is held during a trim, so that another thread does not mistake pages in transit (in no
//! list, still in the budget) for a shortage: it waits for the ladder, then tries again. Trimmed bytes are
//! held back for the request that trimmed them. A request is refused only if at one moment nothing could
//! be trimmed and it fitted into no gap of its pool or of those of the other kinds (small, large or huge
//! blocks).

use crate::AllocError;
use crate::allocator::{Allocator, Locked};
use crate::report::{Cause, OutOfMemory, TOP_HOLDERS_MAX, Tried, holders};
use crate::state::{Attempt, Need, Priority, TrimPurpose};
use crate::streams::WaitMode;
use crate::trim::Trim;
use crate::types::{Block, Request};
use dormouse_device::sync::MutexGuard;
use dormouse_device::{Device, DeviceError};
use std::fmt::Debug;
use std::sync::Weak;

/// Limit of the [`crate::Reclaim`] calls for one request.
pub const RECLAIM_ROUNDS_MAX: u32 = 8;

/// A request within the budget waits for other streams if at most this part of the maximum use is missing: 1/16.
const TOP_UP_DIVISOR: u64 = 16;

/// Result of a [`Reclaim`] call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Reclaimed {
    /// Bytes unmapped during the call.
    pub freed_bytes: u64,
    /// Bytes in the course of being unmapped at the end of the call.
    pub in_flight_bytes: u64,
}

impl Reclaimed {
    /// Whether a further call would free nothing.
    #[must_use]
    pub fn is_nothing(self) -> bool {
        self == Self::default()
    }
}

/// Puts awake memory to sleep when the allocator is out of memory.
///
/// Any-thread. Called with no lock of the allocator held: an implementation may call the allocator. It
/// may wait for its own I/O threads only: the calling thread may hold any lock of the program.
pub trait Reclaim: Send + Sync + Debug {
    /// Unmaps about `bytes_needed` bytes, as far as possible.
    fn reclaim(&self, bytes_needed: u64) -> Reclaimed;

    /// Names the owner of blocks with this tag and scope, for a report. `None`: unknown.
    fn owner_name(&self, tag: u32, scope: u64) -> Option<String> {
        let _unknown = (tag, scope);
        None
    }

    /// Returns what the program does at the moment, for a report. `None`: unknown.
    fn activity(&self) -> Option<String> {
        None
    }
}

/// Why an attempt failed.
struct Shortage {
    cause: Cause,
    /// Bytes to unmap.
    bytes: u64,
    device: Option<DeviceError>,
}

impl<D: Device> Allocator<D> {
    /// Allocates a block, with the ladder if necessary.
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
        if let Some(limit) = self.config().run_ahead
            && let Some(limit_bytes) = locked.state.run_ahead_bytes(limit, request, need)
        {
            locked = self.limit_run_ahead(locked, request, need.bytes, limit_bytes);
        }
        let found = self.attempt(locked, request, need, Priority::Normal)?;
        found.or_else(|shortage| self.climb(request, need, shortage))
    }

    /// Unmaps up to `bytes` of quiet cached pages. Unless the place is a choice, waits for the stream of the
    /// request if they do not suffice, then briefly for other streams if little is missing. Returns the unmapped bytes.
    #[cold]
    fn move_away(&self, bytes: u64, request: &Request, is_choice: bool) -> u64 {
        // If the ladder is held, memory is being freed already.
        let Some(ladder) = self.ladder.try_lock() else { return 0 };
        let stream = self.state.lock().state.slot_of(request.stream).ok();
        let may_wait = !is_choice && stream.is_some() && self.strongest_wait() == WaitMode::Wait;
        let move_with = |wait_mode, bytes| {
            self.trim_once(
                &ladder,
                bytes,
                Trim { purpose: TrimPurpose::Move, wait_mode, stream, split: None },
            )
        };
        if !may_wait {
            return move_with(WaitMode::Poll, bytes);
        }
        let moved_bytes = move_with(WaitMode::OwnStream, bytes);
        let missing_bytes = bytes.saturating_sub(moved_bytes);
        // Streams that take turns would otherwise wait for each other at each turn.
        let is_little = missing_bytes <= self.state.lock().state.high_bytes() / TOP_UP_DIVISOR;
        if missing_bytes == 0 || !is_little {
            return moved_bytes;
        }
        moved_bytes + move_with(WaitMode::Briefly, missing_bytes)
    }

    /// Unmaps the large page that the request would split, if it is quiet. Otherwise the request grows elsewhere.
    #[cold]
    fn split_large<'a>(
        &'a self,
        locked: MutexGuard<'a, Locked<D>>,
        request: &Request,
        need: &Need,
    ) -> MutexGuard<'a, Locked<D>> {
        let stream = locked.state.slot_of(request.stream).ok();
        drop(locked);
        // If the ladder is held, memory is being freed already.
        if let Some(ladder) = self.ladder.try_lock() {
            let (purpose, wait_mode) = (TrimPurpose::Move, WaitMode::Poll);
            let split = Some((request, need.fit));
            self.trim_once(&ladder, 1, Trim { purpose, wait_mode, stream, split });
        }
        self.state.lock()
    }

    /// One attempt: a cached range, or a bare one that is mapped without the lock.
    #[inline]
    fn attempt<'a>(
        &'a self,
        mut locked: MutexGuard<'a, Locked<D>>,
        request: &Request,
        need: &Need,
        priority: Priority,
    ) -> Result<Result<Block, Shortage>, AllocError> {
        let short = |cause, bytes| Ok(Err(Shortage { cause, bytes, device: None }));
        if priority == Priority::Normal && locked.state.must_split(request, need) {
            locked = self.split_large(locked, request, need);
        }
        let mapping = match locked.state.attempt(request, need, priority)? {
            Attempt::Cached(index) => {
                let block = locked.state.publish(index, request, need, false);
                self.record_gauges(&mut locked);
                return Ok(Ok(block));
            }
            Attempt::Bare(mapping) => mapping,
            Attempt::OverBudget(bytes) => return short(Cause::Budget, bytes),
            // Only whole free segments make address ranges longer, so everything is trimmed.
            Attempt::NoAddresses => return short(Cause::AddressSpace, u64::MAX),
        };
        // The range is in no list, and lookups do not find it.
        let (range, large) = locked.state.pages_to_map(&mapping);
        drop(locked);
        let mapped = self.device.during(|| {
            let is_short = mapping.move_bytes > 0
                && self.move_away(mapping.move_bytes, request, mapping.is_choice)
                    < mapping.move_bytes;
            let is_given_up = is_short && mapping.is_choice;
            (!is_given_up).then(|| match large {
                Some(large) => self.device.map_large(range, large, request.fill),
                None => self.device.map(range, request.fill),
            })
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
                Ok(Ok(block))
            }
            Err(error) => {
                locked.state.cancel_map(mapping);
                shortage_of_device(error, need).map(Err)
            }
        }
    }

    /// Trims and reclaims in turn until the request fits or nothing more can be freed.
    #[cold]
    fn climb(
        &self,
        request: &Request,
        need: &Need,
        mut shortage: Shortage,
    ) -> Result<Block, AllocError> {
        if shortage.cause == Cause::AddressSpace
            && let Some(space_bytes) = self.state.lock().state.cut_space_bytes()
        {
            // Others serve what a cut space cannot: the ladder would cost more than it finds.
            return Err(AllocError::NoAddresses { asked_bytes: need.bytes, space_bytes });
        }
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
                Ok(block) => return Ok(block),
                Err(now) => shortage = now,
            }
            // Asleep blocks keep their addresses: `Reclaim` cannot help.
            let helpless = shortage.cause == Cause::AddressSpace;
            if exhausted || helpless || round == RECLAIM_ROUNDS_MAX {
                break;
            }
            match self.call_reclaim(shortage.bytes, &mut tried) {
                // One more attempt even if nothing was freed: another thread may have freed memory.
                Some(reclaimed) => exhausted = reclaimed.is_nothing(),
                None => break,
            }
        }
        if self.strongest_wait() == WaitMode::Wait {
            match self.attempt_with_trims(request, need, WaitMode::Wait, &mut tried)? {
                Ok(block) => return Ok(block),
                Err(now) => shortage = now,
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

    /// Attempts with the ladder held, and makes room in between, until no more room can be made.
    fn attempt_with_trims(
        &self,
        request: &Request,
        need: &Need,
        wait_mode: WaitMode,
        tried: &mut Tried,
    ) -> Result<Result<Block, Shortage>, AllocError> {
        let ladder = self.ladder.lock();
        let (stream, waits_before) = {
            let state = &self.state.lock().state;
            (state.slot_of(request.stream).ok(), state.stats.stream_waits)
        };
        let trim = Trim { purpose: TrimPurpose::ForRequest, wait_mode, stream, split: None };
        let (outcome, made) = self.try_with_trims(&ladder, trim, |locked, is_last| {
            let priority = if is_last { Priority::LastResort } else { Priority::OnLadder };
            let outcome = self.attempt(locked, request, need, priority);
            let missing_bytes = match &outcome {
                Ok(Err(shortage)) => shortage.bytes,
                _ => 0,
            };
            (outcome, missing_bytes)
        });
        tried.trimmed_bytes += made.trimmed_bytes;
        tried.collected_bytes += made.collected_bytes;
        // Only the holder of the ladder waits.
        tried.stream_waits += self.state.lock().state.stats.stream_waits - waits_before;
        outcome
    }

    /// Calls `Reclaim`, if one is set. No lock is held (I5).
    fn call_reclaim(&self, bytes: u64, tried: &mut Tried) -> Option<Reclaimed> {
        let reclaim = self.reclaim.lock().as_ref().and_then(Weak::upgrade)?;
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

    /// Creates the report of a refused request.
    fn report(&self, request: &Request, shortage: Shortage, tried: Tried) -> AllocError {
        let mut locked = self.state.lock();
        locked.state.stats.ooms += 1;
        locked.state.log_out_of_memory(request);
        let stats = locked.state.settled_stats();
        let last_error = locked.last_error.take();
        let (largest_cached_bytes, largest_bare_bytes) = locked.state.largest_bytes();
        let kept_bytes = locked.state.kept_bytes();
        // Without a list of all blocks, for which there may be no memory.
        let mut holders = holders(locked.state.live_blocks());
        drop(locked);
        let holders_left_out = holders.len().saturating_sub(TOP_HOLDERS_MAX);
        holders.truncate(TOP_HOLDERS_MAX);
        let runtime = self.reclaim.lock().as_ref().and_then(Weak::upgrade);
        let name = |tag, scope| runtime.as_ref().and_then(|known| known.owner_name(tag, scope));
        for holder in &mut holders {
            holder.name = name(holder.tag, holder.scope);
        }
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
        AllocError::OutOfMemory(Box::new(OutOfMemory {
            cause: shortage.cause,
            asked_bytes: request.bytes as u64,
            align_bytes: request.align as u64,
            asked_for: name(request.tag, request.scope),
            activity: runtime.as_ref().and_then(|known| known.activity()),
            stats,
            kept_bytes,
            largest_cached_bytes,
            largest_bare_bytes,
            holders,
            holders_left_out,
            tried,
            device: shortage.device.or(last_error),
        }))
    }
}

/// Converts a full device to a shortage. Other errors are returned.
fn shortage_of_device(error: DeviceError, need: &Need) -> Result<Shortage, AllocError> {
    let DeviceError::OutOfMemory { asked_bytes, mapped_bytes, capacity_bytes, .. } = error else {
        return Err(AllocError::Device(error));
    };
    let missing = asked_bytes.saturating_add(mapped_bytes).saturating_sub(capacity_bytes);
    // If the device does not report how much is missing, it may be all.
    let bytes = if missing == 0 { need.bytes } else { missing.min(need.bytes) };
    Ok(Shortage { cause: Cause::Device, bytes, device: Some(error) })
}
