//! Trimming: unmaps cached pages, for the budget and for blocks about to wake.
//!
//! Pages leave once they are quiet (I8): of each stream a mark behind their last free is complete, or it was found
//! idle after it. A trim queries the streams, with the state unlocked: at once if one was busy or unknown when it was last
//! queried, otherwise if the pages that are known to be quiet do not suffice. Quiet ranges are removed from their lists
//! and unmapped, or put back.

use crate::AllocError;
use crate::allocator::{Allocator, Locked};
use crate::core::Fit;
use crate::patience::BRIEF_WAIT_MAX;
use crate::state::{Priority, State, StreamSet, TrimPurpose};
use crate::streams::WaitMode;
use crate::types::Request;
use dormouse_device::sync::MutexGuard;
use dormouse_device::{AddressRange, Device};
use std::time::Instant;

/// Limit of the trims for one request between two calls of `Reclaim`. One suffices, unless other threads
/// empty the cache meanwhile or the device is full within the budget.
const TRIM_ROUNDS_MAX: u32 = 64;
/// From this round on the bytes to wait for double each round: the bytes collected so far may be parts of
/// pages, and the last rounds must wait for everything.
const WAIT_GROWS_FROM: u32 = TRIM_ROUNDS_MAX / 2;
/// Limit of the waits of one trim. One suffices, unless other threads take the pages or the device refuses to
/// unmap them.
const TRIM_WAITS_MAX: u32 = 64;
/// Failed unmap calls after which a trim ends.
pub const TRIM_REFUSALS_MAX: usize = 4;
/// Limit of the ranges that are unmapped before the state is locked again.
const TRIM_BATCH_MAX: usize = 64;
/// Bytes of idle pages trimmed at a time for waking blocks: runs of many blocks, which keep the sizes
/// that the next layer requests.
const REUSE_STEP_BYTES: u64 = 32 << 20;

/// Parameters of a trim.
#[derive(Clone, Copy)]
pub(crate) struct Trim<'a> {
    pub(crate) purpose: TrimPurpose,
    pub(crate) wait_mode: WaitMode,
    /// Slot of the stream of the request, if any.
    pub(crate) stream: Option<u32>,
    /// Only the large page that this request would split.
    pub(crate) split: Option<(&'a Request, Fit)>,
}

/// Result of one step of the ladder.
#[derive(Default, PartialEq, Eq)]
pub(crate) struct RoomMade {
    /// Bytes of pending blocks that became cached.
    pub(crate) collected_bytes: u64,
    /// Bytes of cached ranges that were unmapped.
    pub(crate) trimmed_bytes: u64,
}

impl RoomMade {
    pub(crate) fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// A range in transit.
struct TrimRange {
    index: u32,
    range: AddressRange,
    stream: u32,
}

impl TrimRange {
    fn of(state: &State, index: u32) -> Self {
        let (range, stream) = (state.address_range(index), state.stream_of(index));
        Self { index, range, stream }
    }
}

impl<D: Device> Allocator<D> {
    /// Unmaps at least `target_bytes` of cached ranges, or all except those of kept arenas, and releases
    /// the device's parked pages. Returns the unmapped bytes, up to one granule more than the target. Waits
    /// for streams if the quiet ranges do not suffice.
    pub fn trim(&self, target_bytes: u64) -> u64 {
        let ladder = self.ladder.lock();
        let trimmed_bytes = self.trim_all(&ladder, target_bytes);
        self.device.release_parked();
        trimmed_bytes
    }

    /// Unmaps cached pages beyond [`Config::margin`](crate::Config::margin) of what is in use now, and releases
    /// the device's parked pages. Returns the unmapped bytes. Does nothing while another thread trims or maps for
    /// a request. Waits for streams, if the device is stream-ordered, and for nothing else.
    pub fn trim_beyond_margin(&self) -> u64 {
        let Some(ladder) = self.ladder.try_lock() else { return 0 };
        let over_bytes = self.state.lock().state.over_margin_bytes();
        if over_bytes == 0 {
            return 0;
        }
        let trimmed_bytes = self.trim_all(&ladder, over_bytes);
        self.device.release_parked();
        trimmed_bytes
    }

    /// Returns the time for [`Allocator::trim_unused`]: the number of frees. From the first call on, the allocator
    /// notes when each page was last freed, one word at each free, and huge blocks have pools of their own.
    pub fn watch_unused(&self) -> u64 {
        let mut locked = self.state.lock();
        if self.is_stream_ordered {
            locked.state.keep_times();
        }
        locked.state.frees()
    }

    /// Unmaps at most `bytes_max` of cached pages that no block has used since the time `since`, which
    /// [`Allocator::watch_unused`] returned, and that are known to be quiet; releases the device's parked pages.
    /// Returns the unmapped bytes. Does nothing without stream order or
    /// [`Config::moves_pages`](crate::Config::moves_pages), nor while another thread trims or maps for a request. Never
    /// waits for a stream.
    pub fn trim_unused(&self, since: u64, bytes_max: u64) -> u64 {
        if !self.is_stream_ordered || !self.config().moves_pages {
            return 0;
        }
        let Some(ladder) = self.ladder.try_lock() else { return 0 };
        let (purpose, wait_mode) = (TrimPurpose::Unused { since }, WaitMode::Poll);
        let trim = Trim { purpose, wait_mode, stream: None, split: None };
        let trimmed_bytes = self.trim_once(&ladder, bytes_max, trim);
        self.device.release_parked();
        trimmed_bytes
    }

    /// Unmaps all cached pages if there are more than `bytes`, and releases the device's parked pages. Returns the
    /// unmapped bytes. Does nothing while a lock of the allocator is held, so it cannot wait for its own thread.
    pub fn try_trim_above(&self, bytes: u64) -> u64 {
        let Some(ladder) = self.ladder.try_lock() else { return 0 };
        let Some(locked) = self.state.try_lock() else { return 0 };
        let is_above = locked.state.stats.cached_bytes.current > bytes;
        drop(locked);
        if !is_above {
            return 0;
        }
        let trimmed_bytes = self.trim_all(&ladder, u64::MAX);
        self.device.release_parked();
        trimmed_bytes
    }

    /// `trim` under the ladder lock.
    fn trim_all(&self, ladder: &MutexGuard<'_, ()>, target_bytes: u64) -> u64 {
        let (purpose, wait_mode) = (TrimPurpose::Release, self.strongest_wait());
        let trim = Trim { purpose, wait_mode, stream: None, split: None };
        let (mut given_bytes, mut is_exhausted) = (0, false);
        for round in 0..TRIM_ROUNDS_MAX {
            // Blocks may have been freed into the thread cache while the device was called.
            let emptied_bytes = self.state.lock().state.flush_thread_cache();
            if is_exhausted && emptied_bytes == 0 {
                break;
            }
            let made = self.collect_or_trim(ladder, target_bytes - given_bytes, trim, round);
            given_bytes += made.trimmed_bytes;
            if given_bytes >= target_bytes {
                break;
            }
            // One trim suffices if nothing can be pending or busy.
            is_exhausted = made.is_nothing() || !self.is_stream_ordered;
        }
        given_bytes
    }

    /// Returns whether this thread may wait: never without stream order or on a thread of the runtime.
    pub(crate) fn strongest_wait(&self) -> WaitMode {
        let may_wait = self.is_stream_ordered && !dormouse_device::is_runtime_thread();
        if may_wait { WaitMode::Wait } else { WaitMode::Poll }
    }

    /// Locks the ladder. A thread of the runtime does not wait for a holder that may be waiting for a
    /// stream; without stream order no holder waits.
    fn lock_ladder(&self) -> Option<MutexGuard<'_, ()>> {
        let may_wait = !self.is_stream_ordered || !dormouse_device::is_runtime_thread();
        if may_wait { Some(self.ladder.lock()) } else { self.ladder.try_lock() }
    }

    /// One trim. The state is unlocked during device calls. A range that cannot be unmapped is set aside until
    /// the end, so that it is not tried again. Only pages that are known to be quiet are trimmed. If they do not
    /// suffice, the trim queries the streams, then waits for more, as far as its [`WaitMode`] allows.
    pub(crate) fn trim_once(
        &self,
        _ladder: &MutexGuard<'_, ()>,
        target_bytes: u64,
        trim: Trim<'_>,
    ) -> u64 {
        let asks = self.is_stream_ordered && target_bytes > 0;
        let mut unasked = asks.then(|| self.query_marks());
        // Streams that were all idle are queried only if what is known to be quiet does not suffice.
        if self.state.lock().state.must_query_streams()
            && let Some(busy) = unasked.take()
        {
            self.query_streams(busy);
        }
        let (mut silent, mut waits, mut deadline) = (StreamSet::EMPTY, 0, None);
        let mut locked = self.state.lock();
        let mut given_bytes = 0;
        let mut refused = Vec::new();
        while given_bytes < target_bytes && refused.len() < TRIM_REFUSALS_MAX {
            let left_bytes = target_bytes - given_bytes;
            let parts = self.begin_trims(&mut locked, left_bytes, trim);
            if parts.is_empty() {
                if let Some(busy) = unasked.take() {
                    drop(locked);
                    self.query_streams(busy);
                    locked = self.state.lock();
                    continue;
                }
                let ends = locked.ends_to_wait_for(left_bytes, trim, silent);
                if ends.is_empty() || waits == TRIM_WAITS_MAX {
                    break;
                }
                drop(locked);
                waits += 1;
                if trim.wait_mode == WaitMode::Briefly {
                    deadline.get_or_insert_with(|| Instant::now() + BRIEF_WAIT_MAX);
                }
                let unended = self.wait_for_frees(&ends, deadline);
                unended.iter().for_each(|slot| silent.insert(slot));
                locked = self.state.lock();
                if deadline.is_some() && !unended.is_empty() {
                    break;
                }
                continue;
            }
            drop(locked);
            let refusals_max = TRIM_REFUSALS_MAX - refused.len();
            let unmapped = self.device.during(|| self.unmap_parts(&parts, refusals_max));
            locked = self.state.lock();
            for (part, is_unmapped) in parts.iter().zip(unmapped) {
                match is_unmapped {
                    Some(true) => given_bytes += locked.finish_trim(part, trim),
                    Some(false) => {
                        locked.state.stats.unmap_refusals += 1;
                        refused.push(part.index);
                    }
                    None => locked.state.cancel_trim(part.index),
                }
            }
        }
        for index in refused {
            locked.state.cancel_trim(index);
        }
        self.record_gauges(&mut locked);
        self.unlock(locked);
        given_bytes
    }

    /// Removes ranges of `bytes` in total from the lists, one at a time without stream order.
    fn begin_trims(&self, locked: &mut Locked<D>, bytes: u64, trim: Trim<'_>) -> Vec<TrimRange> {
        let parts_max = if self.is_stream_ordered { TRIM_BATCH_MAX } else { 1 };
        if let TrimPurpose::Unused { since } = trim.purpose {
            let begun = locked.state.begin_unused(since, bytes, parts_max);
            return begun.into_iter().map(|index| TrimRange::of(&locked.state, index)).collect();
        }
        let mut parts: Vec<TrimRange> = Vec::new();
        let mut taken_bytes = 0;
        while parts.len() < parts_max && taken_bytes < bytes {
            let state = &mut locked.state;
            let begun = match trim.split {
                Some((request, fit)) => state.begin_split(request, fit),
                None => state.begin_trim(bytes - taken_bytes, trim.purpose),
            };
            let Some(index) = begun else { break };
            let part = TrimRange::of(state, index);
            taken_bytes += part.range.bytes as u64;
            parts.push(part);
        }
        parts
    }

    /// Unmaps `parts`, until `refusals_max` errors. Returns for each part whether it was unmapped; `None` if it was
    /// not tried.
    fn unmap_parts(&self, parts: &[TrimRange], refusals_max: usize) -> Vec<Option<bool>> {
        let mut refusals = 0;
        let mut unmap = |part: &TrimRange| {
            if refusals == refusals_max {
                return None;
            }
            let is_unmapped = self.device.unmap(part.range).is_ok();
            refusals += usize::from(!is_unmapped);
            Some(is_unmapped)
        };
        parts.iter().map(&mut unmap).collect()
    }

    /// Reserves room for `bytes` (whole granules) of pages to stage for asleep blocks. Idle cached pages,
    /// which serve no open pool, are unmapped for it even within the budget: the device can then reuse
    /// them for the staging. Never calls `Reclaim`: the caller chooses what sleeps.
    ///
    /// On a stream-ordered device with [`Config::moves_pages`](crate::Config::moves_pages) free pages of any pool
    /// move before the mapped total exceeds the most ever in use. If too few are quiet, it waits for those freed
    /// first, on whatever stream, as long as twice as many are free: the device then has work left.
    ///
    /// On a thread of the runtime it does not wait and may fail earlier; the thread that waits for the
    /// wake then tries again.
    ///
    /// # Errors
    /// `NoRoom`. Nothing is reserved.
    pub fn reserve_awake(&self, bytes: u64) -> Result<(), AllocError> {
        self.move_to_wake(bytes);
        if self.try_reserve(&mut self.state.lock(), bytes, Priority::Normal).is_ok() {
            if self.device.memory_info().parked_bytes < bytes {
                self.trim_idle(bytes.max(REUSE_STEP_BYTES));
            }
            return Ok(());
        }
        let Some(ladder) = self.lock_ladder() else { return Err(self.no_room(bytes)) };
        // The cache is not trimmed for a size that never fits.
        if bytes > self.state.lock().state.stats.budget_bytes {
            return Err(self.no_room(bytes));
        }
        self.state.lock().state.stats.retries += 1;
        let (purpose, wait_mode) = (TrimPurpose::ForRequest, self.strongest_wait());
        let trim = Trim { purpose, wait_mode, stream: None, split: None };
        let (excess_bytes, _) = self.try_with_trims(&ladder, trim, |mut locked, _| {
            let reserved = self.try_reserve(&mut locked, bytes, Priority::OnLadder);
            let excess_bytes = reserved.err().unwrap_or(0);
            (excess_bytes, excess_bytes)
        });
        if excess_bytes == 0 { Ok(()) } else { Err(self.no_room(bytes)) }
    }

    /// Whether the device has work left after a wait for the `bytes` that were freed first: as many were freed
    /// behind them.
    fn leaves_work(&self, bytes: u64) -> bool {
        self.state.lock().state.stats.cached_bytes.current / 2 >= bytes
    }

    /// Moves free pages for a wake of `bytes`, as for a request.
    fn move_to_wake(&self, bytes: u64) {
        if !self.is_stream_ordered {
            return;
        }
        let over_bytes = self.state.lock().state.over_goal_bytes(bytes);
        if over_bytes == 0 {
            return;
        }
        // If the ladder is held, memory is being freed already.
        let Some(ladder) = self.ladder.try_lock() else { return };
        let may_wait = self.leaves_work(over_bytes) && self.strongest_wait() == WaitMode::Wait;
        let wait_mode = if may_wait { WaitMode::Briefly } else { WaitMode::Poll };
        self.trim_once(
            &ladder,
            over_bytes,
            Trim { purpose: TrimPurpose::Release, wait_mode, stream: None, split: None },
        );
    }

    /// Runs `attempt` under the ladder lock until it misses no bytes, and makes room in between, as long as
    /// room can be made. `attempt` gets whether it is the last one, and returns its result and the missing
    /// bytes. Returns the last result, and the room made.
    pub(crate) fn try_with_trims<T>(
        &self,
        ladder: &MutexGuard<'_, ()>,
        trim: Trim<'_>,
        mut attempt: impl FnMut(MutexGuard<'_, Locked<D>>, bool) -> (T, u64),
    ) -> (T, RoomMade) {
        let (mut rounds, mut is_exhausted, mut total) = (0, false, RoomMade::default());
        // A trimmed range may be one that the request would have covered: the shortage stays the same.
        let (mut target_bytes, mut missing_before) = (0_u64, u64::MAX);
        let result = loop {
            let mut locked = self.state.lock();
            // Blocks of the thread cache can serve or be trimmed, also those freed since the last step.
            is_exhausted &= locked.state.flush_thread_cache() == 0;
            let is_last = is_exhausted || rounds == TRIM_ROUNDS_MAX;
            let (result, missing_bytes) = attempt(locked, is_last);
            if is_last || missing_bytes == 0 {
                break result;
            }
            let is_no_less = missing_bytes >= missing_before;
            target_bytes =
                if is_no_less { target_bytes.saturating_mul(2) } else { 0 }.max(missing_bytes);
            missing_before = missing_bytes;
            let made = self.collect_or_trim(ladder, target_bytes, trim, rounds);
            total.collected_bytes += made.collected_bytes;
            total.trimmed_bytes += made.trimmed_bytes;
            // One more attempt after a step without effect: the state was unlocked before it.
            is_exhausted = made.is_nothing();
            rounds += 1;
        };
        self.state.lock().state.release_held_back();
        (result, total)
    }

    fn no_room(&self, asked_bytes: u64) -> AllocError {
        let stats = self.state.lock().state.stats;
        AllocError::NoRoom {
            asked_bytes,
            mapped_bytes: stats.mapped_bytes.current,
            staged_bytes: stats.staged_bytes.current,
            budget_bytes: stats.budget_bytes,
        }
    }

    /// Trims idle pages within the budget. Does not wait for a holder of the ladder that may wait for a stream.
    fn trim_idle(&self, target_bytes: u64) {
        let ladder =
            if self.is_stream_ordered { self.ladder.try_lock() } else { self.lock_ladder() };
        let Some(ladder) = ladder else { return };
        let trim = Trim {
            purpose: TrimPurpose::Reuse,
            wait_mode: WaitMode::Poll,
            stream: None,
            split: None,
        };
        self.trim_once(&ladder, target_bytes, trim);
    }

    fn try_reserve(
        &self,
        locked: &mut Locked<D>,
        bytes: u64,
        priority: Priority,
    ) -> Result<(), u64> {
        locked.state.reserve_awake(bytes, priority)?;
        self.record_gauges(locked);
        Ok(())
    }

    /// One step towards room for `bytes`: collects completed pending blocks, which may serve directly; if there
    /// are none, trims quiet ranges; if there are none either, waits (with [`WaitMode::Wait`]) for pending
    /// blocks, as far as cached ranges are not enough, and for the streams of cached ranges. `round` is the
    /// number of the step.
    pub(crate) fn collect_or_trim(
        &self,
        ladder: &MutexGuard<'_, ()>,
        bytes: u64,
        trim: Trim<'_>,
        round: u32,
    ) -> RoomMade {
        let look = Trim { wait_mode: WaitMode::Poll, ..trim };
        let wait_bytes = wait_bytes(bytes, round);
        let mut made = self.make_room(ladder, 0, bytes, look);
        if trim.wait_mode == WaitMode::Wait && made.is_nothing() {
            let cached_bytes = self.state.lock().state.stats.cached_bytes.current;
            let pending_bytes = wait_bytes.saturating_sub(cached_bytes);
            made = self.make_room(ladder, pending_bytes, bytes, trim);
        }
        if trim.wait_mode == WaitMode::Wait && made.is_nothing() {
            // Cached ranges could not be unmapped: their streams cannot be queried.
            made.collected_bytes = self.collect(ladder, WaitMode::Wait, wait_bytes);
        }
        made
    }

    /// Collects pending blocks, waiting up to `pending_bytes`; trims if none were collected.
    fn make_room(
        &self,
        ladder: &MutexGuard<'_, ()>,
        pending_bytes: u64,
        bytes: u64,
        trim: Trim<'_>,
    ) -> RoomMade {
        let collected_bytes = self.collect(ladder, trim.wait_mode, pending_bytes);
        let trimmed_bytes =
            if collected_bytes > 0 { 0 } else { self.trim_once(ladder, bytes, trim) };
        RoomMade { collected_bytes, trimmed_bytes }
    }

    /// Sets the budget, and trims cached pages beyond it.
    ///
    /// Awake blocks beyond a lowered budget stay; allocations fail until they fit.
    ///
    /// # Errors
    /// `BadConfig` for 0.
    pub fn set_budget(&self, bytes: u64) -> Result<(), AllocError> {
        if bytes == 0 {
            let accepted = "at least 1";
            return Err(AllocError::BadConfig { field: "budget_bytes", value: 0, accepted });
        }
        let ladder = self.ladder.lock();
        self.device.limit_parked(bytes);
        let excess_bytes = {
            let mut locked = self.state.lock();
            locked.state.stats.budget_bytes = bytes;
            let excess_bytes = locked.state.excess_bytes(0, Priority::OnLadder);
            if excess_bytes > 0 {
                // Reopened by the next request within the budget.
                locked.state.close_thread_cache();
            }
            excess_bytes
        };
        self.trim_all(&ladder, excess_bytes);
        Ok(())
    }
}

/// Returns the pending bytes to wait for in `round`, if `bytes` are missing.
const fn wait_bytes(bytes: u64, round: u32) -> u64 {
    // The shift is below the number of rounds, and so of bits.
    bytes.saturating_mul(1 << round.saturating_sub(WAIT_GROWS_FROM))
}

impl<D: Device> Locked<D> {
    /// Returns what a trim may wait for, for `bytes` of pages.
    fn ends_to_wait_for(
        &mut self,
        bytes: u64,
        trim: Trim<'_>,
        except: StreamSet,
    ) -> Vec<(u32, u64)> {
        let only = match trim.wait_mode {
            WaitMode::OwnStream if trim.stream.is_some() => trim.stream,
            WaitMode::Briefly | WaitMode::Wait => None,
            WaitMode::Poll | WaitMode::OwnStream => return Vec::new(),
        };
        if trim.wait_mode == WaitMode::Briefly && !self.patience.may_wait() {
            return Vec::new();
        }
        self.state.ends_of_pages(bytes, trim.purpose, only, except)
    }

    /// Completes the trim of an unmapped range. Returns its bytes.
    fn finish_trim(&mut self, part: &TrimRange, trim: Trim<'_>) -> u64 {
        let bytes = self.state.finish_trim(part.index);
        if trim.purpose == TrimPurpose::ForRequest {
            self.state.hold_back(bytes);
        }
        let is_foreign = trim.stream.is_some_and(|stream| stream != part.stream);
        self.state.stats.cross_stream_trims += u64::from(is_foreign);
        bytes
    }
}
