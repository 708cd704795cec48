//! What happens when a request does not fit: trim, reclaim, report. Bounded at every step.
//!
//! Two locks. `state` guards the figures and is held for moments. `ladder` is held by whoever
//! trims, so that pages on their way out (in no list, still in the budget) are not mistaken for a
//! shortage by another thread: that one waits at the ladder, then looks again. What was trimmed is
//! held back for whoever trimmed it, so that nobody quicker takes it: a request is only refused
//! where at one moment nothing was cached and it did not fit. `free` takes `state` only (I4).
//! Neither is held while `Reclaim` runs; `state` is not held while the device maps or unmaps (I5).

use crate::AllocError;
use crate::allocator::{Allocator, Locked, lock};
use crate::reclaim::Reclaimed;
use crate::report::{Cause, OutOfMemory, TOP_HOLDERS_MAX, Tried, holders};
use crate::state::{Attempt, Need, TrimFrom, Who};
use crate::types::{Block, Request};
use dormouse_device::{Device, DeviceError};
use std::sync::MutexGuard;

/// How often [`crate::Reclaim`] is asked for one request.
pub const RECLAIM_ROUNDS_MAX: u32 = 8;
/// How often cached pages are trimmed for one request between two calls of `Reclaim`. Once is
/// enough, unless other threads empty the cache meanwhile or the device is full below the budget.
pub const TRIM_ROUNDS_MAX: u32 = 64;
/// How many ranges the device may refuse to unmap before a trim gives up.
pub const TRIM_REFUSALS_MAX: usize = 4;

/// Whose room it is that a trim makes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Keep {
    Mine,
    Nobodys,
    /// Nobody's: there is room, and the pages are to be used again.
    Pages,
}

impl Keep {
    const fn from(self) -> TrimFrom {
        if matches!(self, Self::Pages) { TrimFrom::Idle } else { TrimFrom::Anywhere }
    }
}

/// Idle pages are trimmed for use in waking blocks by so many bytes at a time: runs of many blocks,
/// which keep the sizes that the next layer's blocks want.
const REUSE_STEP_BYTES: u64 = 32 << 20;

/// What one attempt came to.
enum Outcome {
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
        match self.attempt(lock(&self.state), request, need, Who::Anybody)? {
            Outcome::Block(block) => Ok(block),
            Outcome::Short(shortage) => self.climb(request, need, shortage),
        }
    }

    /// One attempt: a cached range as it is, or a bare one mapped with the lock released.
    fn attempt(
        &self,
        mut locked: MutexGuard<'_, Locked>,
        request: &Request,
        need: &Need,
        who: Who,
    ) -> Result<Outcome, AllocError> {
        let index = match locked.state.attempt(request, need, who)? {
            Attempt::Cached(index) => {
                let block = locked.state.publish(index, request, false);
                self.record_gauges(&mut locked);
                return Ok(Outcome::Block(block));
            }
            Attempt::Bare(index) => index,
            Attempt::OverBudget(bytes) => {
                return Ok(Outcome::Short(Shortage::because(Cause::Budget, bytes)));
            }
            // Only whole segments make runs of addresses longer, so everything has to go.
            Attempt::NoAddresses => {
                return Ok(Outcome::Short(Shortage::because(Cause::AddressSpace, u64::MAX)));
            }
        };
        // Nobody else knows of this range: it is in no list, and no lookup finds it.
        let range = locked.state.address_range(index);
        drop(locked);
        let mapped = self.device.map(range, request.fill);
        let mut locked = lock(&self.state);
        match mapped {
            Ok(()) => {
                let block = locked.state.complete_map(index, request);
                self.record_gauges(&mut locked);
                Ok(Outcome::Block(block))
            }
            Err(error) => {
                locked.state.cancel_map(index);
                shortage_of_device(error, need).map(Outcome::Short)
            }
        }
    }

    /// Trim and reclaim in turns until the request fits or nobody has anything left to give.
    #[cold]
    fn climb(
        &self,
        request: &Request,
        need: &Need,
        mut shortage: Shortage,
    ) -> Result<Block, AllocError> {
        let mut tried = Tried::default();
        if self.is_hopeless(need) {
            tried.hopeless = true;
            return Err(self.report(request, shortage, tried));
        }
        lock(&self.state).state.stats.retries += 1;
        let mut exhausted = false;
        for round in 0..=RECLAIM_ROUNDS_MAX {
            match self.attempt_with_trims(request, need, &mut tried)? {
                Outcome::Block(block) => return Ok(block),
                Outcome::Short(now) => shortage = now,
            }
            // Sleeping blocks keep their addresses: nobody can help there.
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
        Err(self.report(request, shortage, tried))
    }

    /// Whether the request could not be met with everything else gone. Then nobody is bothered.
    fn is_hopeless(&self, need: &Need) -> bool {
        let locked = lock(&self.state);
        need.bytes > locked.state.stats.budget_bytes || !locked.state.could_ever_fit(need)
    }

    /// Attempts under the ladder's lock, trimming between them, until a trim gives nothing.
    fn attempt_with_trims(
        &self,
        request: &Request,
        need: &Need,
        tried: &mut Tried,
    ) -> Result<Outcome, AllocError> {
        let ladder = lock(&self.ladder);
        let mut locked = lock(&self.state);
        let mut rounds = 0;
        let outcome = loop {
            let outcome = self.attempt(locked, request, need, Who::OnLadder);
            locked = lock(&self.state);
            let Ok(Outcome::Short(shortage)) = &outcome else { break outcome };
            if rounds == TRIM_ROUNDS_MAX {
                break outcome;
            }
            let trimmed_bytes;
            (locked, trimmed_bytes) = self.trim_locked(&ladder, locked, shortage.bytes, Keep::Mine);
            tried.trimmed_bytes += trimmed_bytes;
            // After a trim that gave nothing, once more: the state was unlocked before it.
            rounds = if trimmed_bytes == 0 { TRIM_ROUNDS_MAX } else { rounds + 1 };
        };
        locked.state.let_go();
        outcome
    }

    /// Asks `Reclaim`, where there is one. No lock is held (I5).
    fn call_reclaim(&self, bytes: u64, tried: &mut Tried) -> Option<Reclaimed> {
        let reclaim = self.reclaim()?;
        lock(&self.state).state.stats.reclaims += 1;
        let reclaimed = reclaim.reclaim(bytes);
        tried.reclaim_rounds += 1;
        tried.reclaimed_bytes = tried.reclaimed_bytes.saturating_add(reclaimed.freed_bytes);
        tried.in_flight_bytes = reclaimed.in_flight_bytes;
        Some(reclaimed)
    }

    /// Unmaps cached ranges until `target_bytes` are given back or none is left, and has the device
    /// keep none of their pages. Returns the bytes given back: whole granules, so it may be up to
    /// one granule more than asked.
    pub fn trim(&self, target_bytes: u64) -> u64 {
        let ladder = lock(&self.ladder);
        let trimmed = self.trim_locked(&ladder, lock(&self.state), target_bytes, Keep::Nobodys).1;
        self.device.release_parked();
        trimmed
    }

    /// `trim` for whoever has the ladder. The state is unlocked around each device call. A range
    /// the device refuses to unmap is set aside until the end, so that it is not tried again.
    fn trim_locked<'a>(
        &'a self,
        _ladder: &MutexGuard<'_, ()>,
        mut locked: MutexGuard<'a, Locked>,
        target_bytes: u64,
        keep: Keep,
    ) -> (MutexGuard<'a, Locked>, u64) {
        let mut given_bytes = 0;
        let mut refused = Vec::new();
        while given_bytes < target_bytes && refused.len() < TRIM_REFUSALS_MAX {
            let left_bytes = target_bytes - given_bytes;
            let Some(index) = locked.state.begin_trim(left_bytes, keep.from()) else { break };
            let range = locked.state.address_range(index);
            drop(locked);
            let unmapped = self.device.unmap(range);
            locked = lock(&self.state);
            match unmapped {
                Ok(()) => {
                    let bytes = locked.state.finish_trim(index);
                    given_bytes += bytes;
                    if keep == Keep::Mine {
                        locked.state.hold_back(bytes);
                    }
                }
                Err(_) => {
                    locked.state.stats.unmap_refusals += 1;
                    refused.push(index);
                }
            }
        }
        for index in refused {
            locked.state.cancel_trim(index);
        }
        self.record_gauges(&mut locked);
        (locked, given_bytes)
    }

    /// Reserves room for `bytes` (whole granules) of pages about to be staged for asleep blocks.
    /// Idle cached pages, which no open pool serves requests from, leave for it even where the
    /// budget has room for both: the device then has pages at hand for the staging, and nothing
    /// grows. Never calls `Reclaim`: who wakes decides who sleeps.
    ///
    /// # Errors
    /// `NoRoom`. Nothing is reserved then.
    pub fn reserve_awake(&self, bytes: u64) -> Result<(), AllocError> {
        if self.try_reserve(&mut lock(&self.state), bytes, Who::Anybody).is_ok() {
            if self.device.memory_info().parked_bytes < bytes {
                let ladder = lock(&self.ladder);
                let target_bytes = bytes.max(REUSE_STEP_BYTES);
                drop(self.trim_locked(&ladder, lock(&self.state), target_bytes, Keep::Pages));
            }
            return Ok(());
        }
        let ladder = lock(&self.ladder);
        let mut locked = lock(&self.state);
        // What can never fit is not worth the cache.
        let hopeless = bytes > locked.state.stats.budget_bytes;
        locked.state.stats.retries += u64::from(!hopeless);
        let mut rounds = if hopeless { TRIM_ROUNDS_MAX } else { 0 };
        let reserved = loop {
            let reserved = self.try_reserve(&mut locked, bytes, Who::OnLadder);
            let Err(excess_bytes) = reserved else { break true };
            if rounds == TRIM_ROUNDS_MAX {
                break false;
            }
            let trimmed_bytes;
            (locked, trimmed_bytes) = self.trim_locked(&ladder, locked, excess_bytes, Keep::Mine);
            rounds = if trimmed_bytes == 0 { TRIM_ROUNDS_MAX } else { rounds + 1 };
        };
        locked.state.let_go();
        if reserved {
            return Ok(());
        }
        let stats = &locked.state.stats;
        Err(AllocError::NoRoom {
            asked_bytes: bytes,
            mapped_bytes: stats.mapped_bytes.current,
            staged_bytes: stats.staged_bytes.current,
            budget_bytes: stats.budget_bytes,
        })
    }

    fn try_reserve(&self, locked: &mut Locked, bytes: u64, who: Who) -> Result<(), u64> {
        locked.state.reserve_awake(bytes, who)?;
        self.record_gauges(locked);
        Ok(())
    }

    /// Changes the budget, and trims what the new one does not cover as far as the cache goes.
    ///
    /// What is awake past a lowered budget stays; until it fits again, nothing is handed out.
    ///
    /// # Errors
    /// `BadConfig` for 0.
    pub fn set_budget(&self, bytes: u64) -> Result<(), AllocError> {
        if bytes == 0 {
            let accepted = "at least 1";
            return Err(AllocError::BadConfig { field: "budget_bytes", value: 0, accepted });
        }
        let ladder = lock(&self.ladder);
        self.device.limit_parked(bytes);
        let mut locked = lock(&self.state);
        locked.state.stats.budget_bytes = bytes;
        let excess_bytes = locked.state.excess_bytes(0, Who::OnLadder);
        drop(self.trim_locked(&ladder, locked, excess_bytes, Keep::Nobodys));
        Ok(())
    }

    /// The report of a request that could not be met.
    fn report(&self, request: &Request, shortage: Shortage, tried: Tried) -> AllocError {
        let mut locked = lock(&self.state);
        locked.state.stats.ooms += 1;
        let stats = locked.state.stats;
        let (largest_cached_bytes, largest_bare_bytes) = locked.state.largest_bytes();
        let blocks = locked.state.blocks();
        drop(locked);
        let mut holders = holders(&blocks);
        let holders_left_out = holders.len().saturating_sub(TOP_HOLDERS_MAX);
        holders.truncate(TOP_HOLDERS_MAX);
        AllocError::OutOfMemory(Box::new(OutOfMemory {
            cause: shortage.cause,
            asked_bytes: request.bytes as u64,
            align_bytes: request.align as u64,
            budget_bytes: stats.budget_bytes,
            mapped_bytes: stats.mapped_bytes.current,
            awake_bytes: stats.active_bytes.current,
            cached_bytes: stats.cached_bytes.current,
            staged_bytes: stats.staged_bytes.current,
            asleep_bytes: stats.asleep_bytes.current,
            largest_cached_bytes,
            largest_bare_bytes,
            holders,
            holders_left_out,
            tried,
            device: shortage.device,
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
