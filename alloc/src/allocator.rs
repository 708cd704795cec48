//! The allocator: one lock around the state, device calls outside of it.

use crate::core::Fit;
use crate::history::{HistoryAction, HistoryOptions, MemoryReading, Operations};
use crate::ladder::Reclaim;
use crate::marks::Marks;
use crate::patience::Patience;
use crate::run_ahead::RunAhead;
use crate::state::{Geometry, Need, State};
use crate::stats::Amount;
use crate::streams::{PENDING_ASKED_FROM, PendingRelease};
use crate::thread_cache::{CLASS_UNITS_MAX, ThreadCache, ThreadShard, class_round};
use crate::tier_history::TierHistory;
use crate::types::{ArenaId, Block, BlockId, BlockInfo, Freed, Request};
use crate::{ALIGN_BYTES_MAX, AllocError, Config, Stats};
use dormouse_device::sync::{Mutex, MutexGuard};
use dormouse_device::{AddressRange, Device, DeviceError, Fill};
use dormouse_timeline::{Gauge, Timeline};
use std::sync::{Arc, Weak};

/// A gauge is recorded after a change by this amount, or by this part of the budget if that is more.
const GAUGE_STEP_BYTES: u64 = 1 << 20;
const GAUGE_STEP_DIVISOR: u64 = 1 << 10;

/// A caching allocator on one device. All methods are any-thread (I4, I5).
///
/// Dropping it waits for streams and unmaps the cached pages. Blocks that are not freed, and the pages of
/// open kept arenas, stay mapped for the life of the device: they may still be in use.
#[derive(Debug)]
pub struct Allocator<D: Device> {
    pub(crate) device: Arc<D>,
    config: Config,
    thread_cache: Option<Arc<ThreadCache>>,
    timeline: Arc<Timeline>,
    /// Address of unit 0.
    base: usize,
    granule_log: u32,
    granule_mask: usize,
    /// The largest small block.
    small_bytes_max: usize,
    page_bytes: usize,
    pub(crate) is_stream_ordered: bool,
    /// By slot. Taken before `state`, never while `state` is held.
    pub(crate) streams: Mutex<Vec<D::Stream>>,
    pub(crate) state: Mutex<Locked<D>>,
    /// Held while trimming or collecting: other requests wait for the result instead of reporting a
    /// shortage that is about to end. Taken before `state`, never while `state` is held.
    pub(crate) ladder: Mutex<()>,
    pub(crate) reclaim: Mutex<Option<Weak<dyn Reclaim>>>,
    host_tier: TierHistory,
    file_tier: TierHistory,
}

/// The state behind the lock. At every point that can fail, a change of it is complete or has not begun.
#[derive(Debug)]
pub(crate) struct Locked<D: Device> {
    pub(crate) state: State,
    /// Oldest first.
    pub(crate) pending: Vec<PendingRelease<D>>,
    /// The number of pending blocks from which every request queries them.
    pub(crate) pending_asked_at: usize,
    /// By slot of the stream.
    pub(crate) marks: Vec<Marks<D::Event>>,
    /// By slot of the stream.
    pub(crate) run_ahead: Vec<RunAhead<D::Event>>,
    pub(crate) patience: Patience,
    /// The last error of an event call.
    pub(crate) last_error: Option<DeviceError>,
    /// Change after which a gauge is recorded again.
    gauge_step_bytes: u64,
    /// The last recorded gauges.
    awake_gauge_bytes: u64,
    mapped_gauge_bytes: u64,
    /// The highest recorded gauges.
    awake_gauge_peak_bytes: u64,
    mapped_gauge_peak_bytes: u64,
}

const fn gauge_step_bytes(budget_bytes: u64) -> u64 {
    let part_bytes = budget_bytes / GAUGE_STEP_DIVISOR;
    if part_bytes > GAUGE_STEP_BYTES { part_bytes } else { GAUGE_STEP_BYTES }
}

/// A block of up to this fraction of a page shares its page even with [`Request::whole_pages`]: a page of
/// its own would cost more memory than its sleep saves.
pub const WHOLE_PAGES_DIVISOR: usize = 32;

impl<D: Device> Allocator<D> {
    /// Creates an allocator for the whole address space of `device`. No other caller may map there.
    ///
    /// # Errors
    /// `BadConfig` for a value out of range, or an address space smaller than a granule or page.
    pub fn new(
        device: Arc<D>,
        config: Config,
        timeline: Arc<Timeline>,
    ) -> Result<Self, AllocError> {
        let page_bytes = device.page_bytes();
        config.validate(page_bytes)?;
        let space = device.address_space();
        let geometry = geometry(space, &config, page_bytes, device.large_page_bytes())?;
        let is_stream_ordered = device.is_stream_ordered();
        let thread_cache = || Arc::new(ThreadCache::new(geometry.units, geometry.granule_bytes));
        let thread_cache = config.thread_cache.then(thread_cache);
        let state = State::new(
            geometry,
            config.budget_bytes,
            is_stream_ordered,
            config.moves_pages.then_some(config.margin),
            thread_cache.clone(),
        );
        let locked = Locked {
            state,
            pending: Vec::new(),
            pending_asked_at: PENDING_ASKED_FROM,
            marks: Vec::new(),
            run_ahead: Vec::new(),
            patience: Patience::default(),
            last_error: None,
            gauge_step_bytes: gauge_step_bytes(config.budget_bytes),
            awake_gauge_bytes: 0,
            mapped_gauge_bytes: 0,
            awake_gauge_peak_bytes: 0,
            mapped_gauge_peak_bytes: 0,
        };
        device.limit_parked(config.budget_bytes);
        Ok(Self {
            device,
            base: geometry.base,
            granule_log: geometry.granule_bytes.ilog2(),
            granule_mask: geometry.granule_bytes - 1,
            small_bytes_max: CLASS_UNITS_MAX as usize * geometry.granule_bytes,
            config,
            thread_cache,
            timeline,
            page_bytes,
            is_stream_ordered,
            streams: Mutex::new(Vec::new()),
            state: Mutex::new(locked),
            ladder: Mutex::new(()),
            reclaim: Mutex::new(None),
            host_tier: TierHistory::default(),
            file_tier: TierHistory::default(),
        })
    }

    /// Returns the device.
    #[must_use]
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// Returns the configuration (the budget may have been changed since).
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Allocates a block: from the thread cache, from cached pages, from newly mapped pages, or by
    /// running the out-of-memory ladder.
    ///
    /// # Errors
    /// `OutOfMemory` with its report; `NoAddresses`; `BadRequest`; `UnknownArena`; `UnknownStream`;
    /// `TooManyRanges`; `Device` if mapping failed for a reason other than a lack of memory.
    pub fn allocate(&self, request: &Request) -> Result<Block, AllocError> {
        if let Some(block) = self.allocate_from_cache(request) {
            return Ok(block);
        }
        let need = self.need(request)?;
        self.allocate_or_climb(request, &need)
    }

    /// Allocates from cached pages only: the address of a block of `bytes` (not 0) on `stream`, with
    /// no other requirements. `shard` is the calling thread's. `None` if [`Self::allocate`] is needed.
    #[inline]
    #[must_use]
    pub fn try_allocate(&self, shard: ThreadShard, bytes: usize, stream: u64) -> Option<usize> {
        let last_unit = (bytes - 1) >> self.granule_log;
        let units = u32::try_from(last_unit).ok()?.checked_add(1)?;
        let is_small = self.thread_cache.is_some() && self.is_small_size(bytes);
        let units = if is_small { class_round(units) } else { units };
        let request = Request { stream, ..Request::new(bytes) };
        let bytes = u64::from(units) << self.granule_log;
        let need = Need { fit: Fit { units, align_units: 1 }, bytes, is_small };
        let mut locked = self.state.lock();
        if locked.are_many_pending() {
            return None;
        }
        if is_small
            && locked.state.is_recording()
            && let Some(unit) = locked.state.allocate_recorded(shard, request.bytes, stream)
        {
            return Some(self.base + ((unit as usize) << self.granule_log));
        }
        let block = locked.state.allocate_cached(&request, &need)?;
        self.record_awake(&mut locked);
        Some(block.range.start)
    }

    /// Allocates from the thread cache only: the address of a block of `bytes`
    /// (see [`Self::is_small_size`]) on `stream`, with no other requirements. Never waits.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as `ThreadCache::allocate`")]
    #[must_use]
    pub fn allocate_small(&self, shard: ThreadShard, bytes: usize, stream: u64) -> Option<usize> {
        debug_assert!(self.is_small_size(bytes), "{bytes} bytes");
        let thread_cache = self.thread_cache.as_ref()?;
        // Not 0, and at most the largest class.
        let cached = thread_cache.allocate(shard, bytes as u32, stream)?;
        Some(self.base + ((cached.unit as usize) << self.granule_log))
    }

    #[inline]
    fn allocate_from_cache(&self, request: &Request) -> Option<Block> {
        let thread_cache = self.thread_cache.as_ref().filter(|_| self.is_small(request))?;
        let shard = ThreadShard::current();
        // Not 0, and at most the largest class.
        let cached = thread_cache.allocate(shard, request.bytes as u32, request.stream)?;
        let generation = thread_cache.ownership().generation(cached.unit)?;
        let id = BlockId { index: cached.word.index(), generation };
        let start = self.base + ((cached.unit as usize) << self.granule_log);
        let bytes = request.bytes + cached.word.slack_bytes() as usize;
        Some(Block { id, range: AddressRange::new(start, bytes), zeroed: false })
    }

    /// Whether a block of `bytes` may come from the thread cache.
    #[inline]
    #[must_use]
    pub fn is_small_size(&self, bytes: usize) -> bool {
        bytes.wrapping_sub(1) < self.small_bytes_max
    }

    /// Whether the block of `request` may come from the thread cache, and go there when freed.
    #[inline]
    fn is_small(&self, request: &Request) -> bool {
        let Request { bytes, align, arena, scope, tag, fill, whole_pages, .. } = *request;
        let is_small = self.is_small_size(bytes) && align.is_power_of_two();
        let is_plain = arena.is_none() && scope == 0 && tag == 0 && !whole_pages;
        is_small && is_plain && align >> self.granule_log <= 1 && fill == Fill::Any
    }

    /// Frees the block that starts at `address`. Never blocks (I4).
    ///
    /// `stream` is the key of the stream of its last use: see Streams on the crate page.
    ///
    /// # Errors
    /// `NotABlock`; `NotBlockStart`; `FreeDeferred` (freed twice); `UnknownStream`.
    pub fn free(&self, address: usize, stream: u64) -> Result<Freed, AllocError> {
        if self.free_small(address, stream) || self.try_free(address, stream) {
            return Ok(Freed::Done);
        }
        let (freed, pending) = self.change(|state| state.free(address, stream))?;
        self.make_pending(pending);
        Ok(freed)
    }

    /// Frees the block that starts at `address` if it is unclaimed and `stream`, its own, is the only
    /// one that uses it. `false` if [`Self::free`] is needed. Never waits.
    #[inline]
    #[must_use]
    pub fn try_free(&self, address: usize, stream: u64) -> bool {
        let offset = address.wrapping_sub(self.base);
        let Ok(unit) = u32::try_from(offset >> self.granule_log) else { return false };
        if offset & self.granule_mask != 0 {
            return false;
        }
        let mut locked = self.state.lock();
        if locked.state.is_recording() && locked.state.free_recorded(unit, stream) {
            return true;
        }
        let is_freed = locked.state.try_free(unit, stream);
        self.record_awake(&mut locked);
        self.unlock(locked);
        is_freed
    }

    /// Frees the block that starts at `address` into the thread cache. `false` if the block is not
    /// cacheable or its bin is full. Never waits.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as `ThreadCache::free`")]
    #[must_use]
    pub fn free_small(&self, address: usize, stream: u64) -> bool {
        let Some(thread_cache) = &self.thread_cache else { return false };
        let offset = address.wrapping_sub(self.base);
        let is_start = offset & self.granule_mask == 0;
        is_start && thread_cache.free(offset >> self.granule_log, stream)
    }

    /// Gives up the addresses behind the last segment, for good: no request uses them from now on. Returns the end of
    /// those left. Cached pages keep the addresses of their segment; [`Self::trim`] unmaps them. From the first call on
    /// a request that finds no addresses fails with `NoAddresses`, and nothing is trimmed or reclaimed for it.
    #[must_use = "the device still has the addresses"]
    pub fn cut_addresses(&self) -> usize {
        let units = self.state.lock().state.cut_space();
        self.base + ((units as usize) << self.granule_log)
    }

    /// Whether `address` is in the device's address space. Two compares, no lock.
    #[inline]
    #[must_use]
    pub fn contains(&self, address: usize) -> bool {
        self.device.address_space().contains(address)
    }

    /// Returns the block around `address`, unless it is freed. O(1).
    #[must_use]
    pub fn lookup(&self, address: usize) -> Option<BlockInfo> {
        self.state.lock().state.lookup(address)
    }

    /// [`Self::lookup`] that never waits: `None` if the lock is held. In a forked child, a thread of the
    /// parent may have held it, and the child's copy of the state is then never whole again.
    #[must_use]
    pub fn try_lookup(&self, address: usize) -> Option<Option<BlockInfo>> {
        Some(self.state.try_lock()?.state.lookup(address))
    }

    /// Returns the block with `id`, also if its free is deferred. O(1).
    ///
    /// # Errors
    /// `StaleBlock` if the block no longer exists.
    pub fn info(&self, id: BlockId) -> Result<BlockInfo, AllocError> {
        self.state.lock().state.info(id)
    }

    /// Claims the block around `address` for `owner_key`: it is not reused before the claim ends.
    ///
    /// # Errors
    /// `NotABlock`; `FreeDeferred`; `AlreadyClaimed`; `WrongState` for a block of a kept
    /// arena.
    pub fn claim(&self, address: usize, owner_key: u64) -> Result<BlockInfo, AllocError> {
        self.change(|state| state.claim(address, owner_key))
    }

    /// Ends the claim. A block with a deferred free is freed, as by `finish_free`.
    ///
    /// # Errors
    /// `StaleBlock`; `WrongState` for a block that is unclaimed, or asleep and not freed.
    pub fn unclaim(&self, id: BlockId) -> Result<(), AllocError> {
        let pending = self.change(|state| state.unclaim(id))?;
        self.make_pending(pending);
        Ok(())
    }

    /// Completes a deferred free: the block is freed on its stream. The range of an asleep block is
    /// unmapped by then (the span forgotten), that of an awake block is mapped.
    ///
    /// # Errors
    /// `StaleBlock`; `WrongState` for a block that is not freed.
    pub fn finish_free(&self, id: BlockId) -> Result<(), AllocError> {
        let pending = self.change(|state| state.finish_free(id))?;
        self.make_pending(pending);
        Ok(())
    }

    /// Marks a claimed block as asleep. Called after its pages are unmapped.
    ///
    /// # Errors
    /// `StaleBlock`; `WrongState` for a block that is unclaimed or asleep.
    pub fn set_asleep(&self, id: BlockId) -> Result<(), AllocError> {
        self.change(|state| state.set_asleep(id))
    }

    /// Marks an asleep block as awake. Uses the bytes of its pages from the reservation of
    /// `reserve_awake`.
    ///
    /// # Errors
    /// `StaleBlock`; `WrongState` for a block that is not asleep; `NotReserved` if less is reserved than
    /// the block needs.
    pub fn set_awake(&self, id: BlockId) -> Result<(), AllocError> {
        self.change(|state| state.set_awake(id))
    }

    /// Returns unused bytes of the reservation of `reserve_awake`.
    ///
    /// # Errors
    /// `NotReserved` for more than is reserved.
    pub fn unreserve_awake(&self, bytes: u64) -> Result<(), AllocError> {
        self.change(|state| state.unreserve_awake(bytes))
    }

    /// Sets the [`Reclaim`] to call under memory pressure. The allocator does not keep it alive.
    pub fn set_reclaim(&self, reclaim: Weak<dyn Reclaim>) {
        *self.reclaim.lock() = Some(reclaim);
    }

    /// Opens an arena: a separate pool.
    ///
    /// # Errors
    /// `TooManyArenas` at [`crate::ARENAS_MAX`].
    pub fn arena_create(&self) -> Result<ArenaId, AllocError> {
        self.change(|state| state.arena_create(false))
    }

    /// Opens a kept arena: see Kept arenas on the crate page.
    ///
    /// # Errors
    /// `TooManyArenas` at [`crate::ARENAS_MAX`].
    pub fn arena_create_kept(&self) -> Result<ArenaId, AllocError> {
        self.change(|state| state.arena_create(true))
    }

    /// Closes an arena. Its blocks stay valid; its segments are released as they become free, those of a
    /// kept arena after all streams have passed an event. Never waits. Idempotent.
    pub fn arena_close(&self, arena: ArenaId) {
        let closing = self.change(|state| state.arena_close(arena));
        self.make_pending(closing);
    }

    /// Returns how many more bytes can be in use, awake or reserved to wake, without raising the most ever in use
    /// or reaching the budget: a sixteenth of the smaller one is left to requests.
    #[must_use]
    pub fn spare_bytes(&self) -> u64 {
        let mut locked = self.state.lock();
        locked.state.settle_thread_cache();
        locked.state.spare_bytes()
    }

    /// Resets every peak to the current value, except that of the interval.
    pub fn reset_peaks(&self) {
        let mut locked = self.state.lock();
        let Locked { state, .. } = &mut *locked;
        state.settle_thread_cache();
        state.earlier_peaks.reset(&mut state.stats);
        self.record_gauges(&mut locked);
        locked.awake_gauge_peak_bytes = locked.awake_gauge_bytes;
        locked.mapped_gauge_peak_bytes = locked.mapped_gauge_bytes;
        self.unlock(locked);
    }

    /// Returns all blocks, those with a deferred free included, in no particular order.
    #[must_use]
    pub fn blocks(&self) -> Vec<BlockInfo> {
        self.state.lock().state.blocks()
    }

    /// Returns the bytes of unclaimed blocks by [`crate::Request::tag`], without those of no tag.
    #[must_use]
    pub fn tagged_bytes(&self) -> Vec<(u32, u64)> {
        self.state.lock().state.tagged_bytes()
    }

    /// Returns what pinned host memory holds of sleeping blocks.
    #[must_use]
    pub fn host_tier(&self) -> &TierHistory {
        &self.host_tier
    }

    /// Returns what a file holds of sleeping blocks. Addresses are offsets in it.
    #[must_use]
    pub fn file_tier(&self) -> &TierHistory {
        &self.file_tier
    }

    /// Starts the history, also of the tiers, or changes its options; the newest events are kept unless `forgets`. The thread cache is
    /// closed while it is on.
    pub fn start_history(&self, options: HistoryOptions, forgets: bool) {
        self.change(|state| state.start_history(options, forgets));
        self.host_tier.start(options, forgets);
        self.file_tier.start(options, forgets);
    }

    /// Ends the history and forgets its events.
    pub fn stop_history(&self) {
        self.change(State::stop_history);
        self.host_tier.stop();
        self.file_tier.stop();
    }

    /// Starts the log of operations, for a caller that takes them in time ([`Self::take_operations`]). It begins with an
    /// allocation for each live block. The thread cache is closed while it is on.
    pub fn start_log(&self) {
        self.change(State::start_log);
    }

    /// Ends the log of operations. Those not taken are forgotten.
    pub fn stop_log(&self) {
        self.change(State::stop_log);
    }

    /// Swaps the operations of the log for `taken`, which is empty and gives its capacity. `false`: the log is off.
    pub fn take_operations(&self, taken: &mut Operations) -> bool {
        debug_assert!(taken.events.is_empty() && taken.lost == 0, "the log would begin with these");
        self.state.lock().state.take_operations(taken)
    }

    /// Records in the history that a request of `bytes` found no memory while the device had `free_bytes`.
    pub fn note_out_of_memory(&self, bytes: u64, free_bytes: usize) {
        self.state.lock().state.note(HistoryAction::OutOfMemory, free_bytes, bytes);
    }

    /// Records a remark on the block around `address` in the history: the context of the calling thread.
    pub fn annotate(&self, address: usize) {
        self.state.lock().state.annotate(address);
    }

    /// Returns all mapped memory and, `with_events`, the history, of one moment. Requests wait meanwhile.
    #[must_use]
    pub fn read_memory(&self, with_events: bool) -> MemoryReading {
        self.state.lock().state.reading(with_events)
    }

    /// Unlocks the state, and marks streams if that is due.
    #[inline]
    pub(crate) fn unlock(&self, locked: MutexGuard<'_, Locked<D>>) {
        let is_mark_due = locked.state.is_mark_due();
        drop(locked);
        if is_mark_due {
            self.mark_frees();
        }
    }

    /// Changes the state, records changed gauges, and marks streams if that is due.
    #[inline]
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut locked = self.state.lock();
        let result = change(&mut locked.state);
        self.record_gauges(&mut locked);
        self.unlock(locked);
        result
    }

    /// Records changed gauges. Lock-free and without allocation; the caller's lock keeps the values in
    /// order.
    pub(crate) fn record_gauges(&self, locked: &mut Locked<D>) {
        self.record_awake(locked);
        let mapped_bytes = locked.state.stats.mapped_bytes.current;
        if mapped_bytes.abs_diff(locked.mapped_gauge_bytes) >= locked.gauge_step_bytes {
            self.mapped_moved(locked);
        }
    }

    /// Returns the timeline on which the levels are recorded.
    pub const fn timeline(&self) -> &Arc<Timeline> {
        &self.timeline
    }

    /// Records the gauges as they are, to the byte, and their peaks if those were missed by less than a step. For
    /// phase edges and dumps.
    pub fn record_levels(&self) {
        let mut locked = self.state.lock();
        locked.state.settle_thread_cache();
        let Stats { active_bytes, mapped_bytes, .. } = &locked.state.stats;
        let (awake_bytes, mapped_bytes) = (*active_bytes, *mapped_bytes);
        if awake_bytes.current != locked.awake_gauge_bytes
            || awake_bytes.peak > locked.awake_gauge_peak_bytes
        {
            self.awake_moved(&mut locked);
        }
        if mapped_bytes.current != locked.mapped_gauge_bytes
            || mapped_bytes.peak > locked.mapped_gauge_peak_bytes
        {
            self.mapped_moved(&mut locked);
        }
    }

    /// Records the peak of awake bytes if it has not been recorded or equals the current value. The engine calls it before
    /// it changes an owner's level, so that the owner's bytes are part of the recorded peak.
    pub fn record_peak(&self) {
        let mut locked = self.state.lock();
        locked.state.settle_thread_cache();
        let Amount { current, peak, .. } = locked.state.stats.active_bytes;
        if peak > locked.awake_gauge_peak_bytes || peak == current {
            self.awake_moved(&mut locked);
        }
    }

    /// Records the gauge of awake bytes, if it changed.
    #[inline]
    pub(crate) fn record_awake(&self, locked: &mut Locked<D>) {
        let awake_bytes = locked.state.stats.active_bytes.current;
        if awake_bytes.abs_diff(locked.awake_gauge_bytes) >= locked.gauge_step_bytes {
            self.awake_moved(locked);
        }
    }

    #[cold]
    #[inline(never)]
    fn awake_moved(&self, locked: &mut Locked<D>) {
        let Stats { active_bytes, budget_bytes, .. } = locked.state.stats;
        // The budget may have changed.
        locked.gauge_step_bytes = gauge_step_bytes(budget_bytes);
        let peak_bytes = &mut locked.awake_gauge_peak_bytes;
        self.record_level(Gauge::DeviceAwake, active_bytes, peak_bytes);
        locked.awake_gauge_bytes = active_bytes.current;
    }

    #[cold]
    #[inline(never)]
    fn mapped_moved(&self, locked: &mut Locked<D>) {
        let mapped_bytes = locked.state.stats.mapped_bytes;
        let peak_bytes = &mut locked.mapped_gauge_peak_bytes;
        self.record_level(Gauge::DeviceMapped, mapped_bytes, peak_bytes);
        locked.mapped_gauge_bytes = mapped_bytes.current;
    }

    /// Records a level, and before it a new maximum that it has fallen from since the last record: the peaks of the
    /// timeline are those of the statistics, to the byte.
    fn record_level(&self, gauge: Gauge, amount: Amount, recorded_peak_bytes: &mut u64) {
        if amount.peak > *recorded_peak_bytes && amount.peak > amount.current {
            self.timeline.gauge(gauge, amount.peak);
        }
        *recorded_peak_bytes = amount.peak.max(*recorded_peak_bytes);
        self.timeline.gauge(gauge, amount.current);
    }

    /// Converts a request to units. A size that overflows becomes the maximum, which never fits.
    #[inline]
    pub(crate) fn need(&self, request: &Request) -> Result<Need, AllocError> {
        let Request { bytes, align, .. } = *request;
        if bytes == 0 {
            let accepted = "at least 1";
            return Err(AllocError::BadRequest { field: "bytes", value: 0, accepted });
        }
        if !align.is_power_of_two() || align > ALIGN_BYTES_MAX {
            let accepted = "a power of two up to 2^30";
            return Err(AllocError::BadRequest { field: "align", value: align as u64, accepted });
        }
        let granule_bytes = self.config.granule_bytes;
        let page_bytes = granule_bytes.max(self.page_bytes);
        let (unit_bytes, align) = if request.whole_pages && bytes > page_bytes / WHOLE_PAGES_DIVISOR
        {
            (page_bytes, align.max(page_bytes))
        } else {
            (granule_bytes, align)
        };
        let rounded = bytes.checked_next_multiple_of(unit_bytes).unwrap_or(usize::MAX);
        let units = u32::try_from(rounded / granule_bytes).unwrap_or(u32::MAX);
        let is_small = self.thread_cache.is_some() && self.is_small(request);
        let units = if is_small { class_round(units) } else { units };
        let align_units = u32::try_from(align / granule_bytes).unwrap_or(u32::MAX).max(1);
        Ok(Need { fit: Fit { units, align_units }, bytes: rounded as u64, is_small })
    }
}

impl<D: Device> Drop for Allocator<D> {
    fn drop(&mut self) {
        self.trim(u64::MAX);
    }
}

/// Limit of the granules, 2 TiB of addresses at 512 bytes; further addresses are not used.
const UNITS_MAX: usize = (u32::MAX - 1) as usize;

/// Returns the granules inside `space`, from the start of a page on.
fn geometry(
    space: AddressRange,
    config: &Config,
    page_bytes: usize,
    large_page_bytes: usize,
) -> Result<Geometry, AllocError> {
    let granule_bytes = config.granule_bytes;
    let bad = AllocError::BadConfig {
        field: "address space of the device",
        value: space.bytes as u64,
        accepted: "at least one granule and one page",
    };
    let align_bytes = granule_bytes.max(page_bytes).max(large_page_bytes);
    let Some(base) = space.start.checked_next_multiple_of(align_bytes) else {
        return Err(bad);
    };
    let page_units = (page_bytes / granule_bytes).max(1);
    let units = (space.end().saturating_sub(base) / granule_bytes).min(UNITS_MAX);
    let units = units / page_units * page_units;
    // Only the size of a segment can exceed `UNITS_MAX`; then no request fits.
    let small = |units: usize| u32::try_from(units).unwrap_or(u32::MAX);
    match small(units) {
        0 => Err(bad),
        units => Ok(Geometry {
            base,
            granule_bytes,
            page_units: small(page_units),
            large_units: small((large_page_bytes / granule_bytes).max(1)),
            units,
            segment_units: small(config.segment_bytes / granule_bytes),
        }),
    }
}
