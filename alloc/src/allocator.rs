//! The allocator: one lock around the state, the device outside of it.

use crate::core::Fit;
use crate::reclaim::Reclaim;
use crate::state::{Geometry, Need, State};
use crate::streams::{PENDING_ASKED_FROM, Pending};
use crate::types::{ArenaId, Block, BlockId, BlockInfo, Freed, Request};
use crate::{ALIGN_BYTES_MAX, AllocError, Config, Stats, report};
use dormouse_device::{AddressRange, Device, DeviceError};
use dormouse_timeline::{Gauge, Lane, Timeline};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

/// A gauge is recorded when it has moved this far since it last was: the ring is for what a
/// person can see, and small blocks come and go a million times a second.
const GAUGE_STEP_BYTES: u64 = 1 << 20;

/// A caching allocator on one device. All methods are any-thread (I4, I5).
///
/// Dropping it waits for streams and unmaps the cached pages. Blocks nobody freed stay mapped for as long as the device
/// lives: somebody may still be using them.
#[derive(Debug)]
pub struct Allocator<D: Device> {
    pub(crate) device: Arc<D>,
    config: Config,
    timeline: Arc<Timeline>,
    /// The device's address space: [`Allocator::contains`] needs no lock.
    space: AddressRange,
    page_bytes: usize,
    pub(crate) is_stream_ordered: bool,
    /// By slot. Taken before `state`, never while `state` is held.
    pub(crate) streams: Mutex<Vec<D::Stream>>,
    pub(crate) state: Mutex<Locked<D>>,
    /// Held by whoever trims or collects: others that need room wait for the outcome rather than report a
    /// shortage that is about to end. Taken before `state`, never while `state` is held.
    pub(crate) ladder: Mutex<()>,
    reclaim: Mutex<Option<Weak<dyn Reclaim>>>,
}

/// The state, what is pending, and the gauges as they were last recorded.
#[derive(Debug)]
pub(crate) struct Locked<D: Device> {
    pub(crate) state: State,
    /// Oldest first.
    pub(crate) pending: Vec<Pending<D>>,
    /// From how many on even a request that the cache meets asks after them.
    pub(crate) pending_asked_at: usize,
    /// What the device last refused to do about an event.
    pub(crate) said: Option<DeviceError>,
    gauge_awake_bytes: u64,
    gauge_mapped_bytes: u64,
}

/// Locks, whatever became of the thread that held the lock before: every change of the state is
/// complete or has not begun where something can fail.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<D: Device> Allocator<D> {
    /// An allocator for all of `device`'s address space. The device must be nobody else's to map.
    ///
    /// # Errors
    /// `BadConfig` for a value out of range, or an address space of no granule or page.
    pub fn new(
        device: Arc<D>,
        config: Config,
        timeline: Arc<Timeline>,
    ) -> Result<Self, AllocError> {
        let page_bytes = device.page_bytes();
        config.validate(page_bytes)?;
        let space = device.address_space();
        let geometry = geometry(space, &config, page_bytes)?;
        let is_stream_ordered = device.is_stream_ordered();
        let locked = Locked {
            state: State::new(geometry, config.budget_bytes, is_stream_ordered, config.moves_pages),
            pending: Vec::new(),
            pending_asked_at: PENDING_ASKED_FROM,
            said: None,
            gauge_awake_bytes: 0,
            gauge_mapped_bytes: 0,
        };
        device.limit_parked(config.budget_bytes);
        Ok(Self {
            device,
            config,
            timeline,
            space,
            page_bytes,
            is_stream_ordered,
            streams: Mutex::new(Vec::new()),
            state: Mutex::new(locked),
            ladder: Mutex::new(()),
            reclaim: Mutex::new(None),
        })
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &Arc<D> {
        &self.device
    }

    /// The settings it was made with (the budget may have been changed since).
    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Hands out a block, going down the ladder as far as it takes.
    ///
    /// # Errors
    /// `OutOfMemory` with its report; `BadRequest`; `UnknownArena`; `UnknownStream`;
    /// `TooManyRanges`; `Device` where the device refused to map for a reason that more room would not mend.
    pub fn allocate(&self, request: &Request) -> Result<Block, AllocError> {
        let need = self.need(request)?;
        self.allocate_or_climb(request, &need)
    }

    /// Frees the block that starts at `address`. Never blocks and never waits (I4).
    ///
    /// `stream` is the key of the stream its last use was on: see the crate page.
    ///
    /// # Errors
    /// `NotABlock`, `NotBlockStart`, `Doomed` (freed twice), `UnknownStream`.
    pub fn free(&self, address: usize, stream: u64) -> Result<Freed, AllocError> {
        let (freed, leaving) = self.change(|state| state.free(address, stream))?;
        self.leave(leaving);
        Ok(freed)
    }

    /// Whether `address` lies in the device's space. Two compares, no lock.
    #[inline]
    #[must_use]
    pub fn contains(&self, address: usize) -> bool {
        self.space.contains(address)
    }

    /// The block around `address`, unless it is freed. O(1).
    #[must_use]
    pub fn lookup(&self, address: usize) -> Option<BlockInfo> {
        lock(&self.state).state.lookup(address)
    }

    /// The block `id` names, doomed ones included. O(1).
    ///
    /// # Errors
    /// `StaleBlock` where that block is gone.
    pub fn info(&self, id: BlockId) -> Result<BlockInfo, AllocError> {
        lock(&self.state).state.info(id)
    }

    /// Gives `owner_key` a say in when the block around `address` may be reused.
    ///
    /// # Errors
    /// `NotABlock`; `Doomed`; `AlreadyClaimed`: one owner at a time.
    pub fn claim(&self, address: usize, owner_key: u64) -> Result<BlockInfo, AllocError> {
        self.change(|state| state.claim(address, owner_key))
    }

    /// Gives that say up. A block that was doomed meanwhile is freed, as by `finish_free`.
    ///
    /// # Errors
    /// `StaleBlock`; `WrongState` for a block that is unclaimed, or asleep and still its user's.
    pub fn unclaim(&self, id: BlockId) -> Result<(), AllocError> {
        let leaving = self.change(|state| state.unclaim(id))?;
        self.leave(leaving);
        Ok(())
    }

    /// The claimant of a doomed block is done with it: it is freed on its stream. Where it is
    /// asleep its range is unmapped by then (the span forgotten), where awake still mapped.
    ///
    /// # Errors
    /// `StaleBlock`; `WrongState` for a block its user has not freed.
    pub fn finish_free(&self, id: BlockId) -> Result<(), AllocError> {
        let leaving = self.change(|state| state.finish_free(id))?;
        self.leave(leaving);
        Ok(())
    }

    /// The pages of a claimed block are gone; its addresses stay its own. Call it after they are.
    ///
    /// # Errors
    /// `StaleBlock`; `WrongState` for a block that is unclaimed or asleep already.
    pub fn set_asleep(&self, id: BlockId) -> Result<(), AllocError> {
        self.change(|state| state.set_asleep(id))
    }

    /// An asleep block has pages again. Takes its (granule-rounded) size out of what
    /// `reserve_awake` reserved.
    ///
    /// # Errors
    /// `StaleBlock`; `WrongState` for a block that is not asleep; `NotReserved` where less is
    /// reserved than the block needs.
    pub fn set_awake(&self, id: BlockId) -> Result<(), AllocError> {
        self.change(|state| state.set_awake(id))
    }

    /// Gives room back that `reserve_awake` reserved and no `set_awake` took.
    ///
    /// # Errors
    /// `NotReserved` for more than is reserved.
    pub fn unreserve_awake(&self, bytes: u64) -> Result<(), AllocError> {
        self.change(|state| state.unreserve_awake(bytes))
    }

    /// Whom to ask for room. The allocator does not keep it alive.
    pub fn set_reclaim(&self, reclaim: Weak<dyn Reclaim>) {
        *lock(&self.reclaim) = Some(reclaim);
    }

    pub(crate) fn reclaim(&self) -> Option<Arc<dyn Reclaim>> {
        lock(&self.reclaim).as_ref().and_then(Weak::upgrade)
    }

    /// Opens an arena: a pool of its own.
    ///
    /// # Errors
    /// `TooManyArenas` at [`crate::ARENAS_MAX`].
    pub fn arena_create(&self) -> Result<ArenaId, AllocError> {
        self.change(State::arena_create)
    }

    /// Closes an arena. Its blocks live on; its segments go to others as they come free. An
    /// arena that is closed already is left alone.
    pub fn arena_close(&self, arena: ArenaId) {
        self.change(|state| state.arena_close(arena));
    }

    /// All figures, of one moment.
    #[must_use]
    pub fn stats(&self) -> Stats {
        lock(&self.state).state.stats
    }

    /// Makes every peak what it is now.
    pub fn reset_peaks(&self) {
        self.change(|state| state.stats.reset_peaks());
    }

    /// Every block, doomed ones included, in no particular order.
    #[must_use]
    pub fn blocks(&self) -> Vec<BlockInfo> {
        lock(&self.state).state.blocks()
    }

    /// What was never freed, in at most 12 lines; `None` where nothing is, or the report was not
    /// asked for.
    #[must_use]
    pub fn leak_report(&self) -> Option<String> {
        if self.config.leak_report { report::leaks(self.blocks()) } else { None }
    }

    /// Walks everything and checks the invariants and every figure. Slow: for tests and debugging.
    ///
    /// # Errors
    /// What is wrong, in words.
    pub fn check(&self) -> Result<(), String> {
        let locked = lock(&self.state);
        locked.state.check()?;
        Self::check_pending(&locked)
    }

    /// Changes the state, and records the gauges where they have moved.
    #[inline]
    pub(crate) fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut locked = lock(&self.state);
        let result = change(&mut locked.state);
        self.record_gauges(&mut locked);
        result
    }

    /// Recording is lock-free and allocates nothing, so it may happen under the lock, which
    /// keeps the recorded values in order.
    #[inline]
    pub(crate) fn record_gauges(&self, locked: &mut Locked<D>) {
        let awake = locked.state.stats.active_bytes.current;
        if awake.abs_diff(locked.gauge_awake_bytes) >= GAUGE_STEP_BYTES {
            locked.gauge_awake_bytes = awake;
            self.timeline.gauge(Gauge::DeviceAwake, awake);
        }
        let mapped = locked.state.stats.mapped_bytes.current;
        if mapped.abs_diff(locked.gauge_mapped_bytes) >= GAUGE_STEP_BYTES {
            locked.gauge_mapped_bytes = mapped;
            self.timeline.gauge(Gauge::DeviceMapped, mapped);
        }
    }

    /// A request in units. A size that overflows is as large as can be: it fits nowhere.
    #[inline]
    fn need(&self, request: &Request) -> Result<Need, AllocError> {
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
        let (unit_bytes, align) = if request.whole_pages && bytes > page_bytes / 2 {
            (page_bytes, align.max(page_bytes))
        } else {
            (granule_bytes, align)
        };
        let rounded = bytes.checked_next_multiple_of(unit_bytes).unwrap_or(usize::MAX);
        let units = u32::try_from(rounded / granule_bytes).unwrap_or(u32::MAX);
        let align_units = u32::try_from(align / granule_bytes).unwrap_or(u32::MAX).max(1);
        Ok(Need { fit: Fit { units, align_units }, bytes: rounded as u64 })
    }
}

impl<D: Device> Drop for Allocator<D> {
    fn drop(&mut self) {
        self.trim(u64::MAX);
        let leaked = self.stats().allocations.current;
        if self.config.leak_report && leaked > 0 {
            let name = self.timeline.intern("alloc: blocks never freed");
            self.timeline.instant(Lane::Notice, name, leaked);
        }
    }
}

/// The most granules an allocator counts: at 512 bytes 2 TiB of addresses, the rest is not used.
const UNITS_MAX: usize = (u32::MAX - 1) as usize;

/// The granules that lie wholly inside `space`, from the start of a page on.
fn geometry(
    space: AddressRange,
    config: &Config,
    page_bytes: usize,
) -> Result<Geometry, AllocError> {
    let granule_bytes = config.granule_bytes;
    let bad = AllocError::BadConfig {
        field: "the device's address space",
        value: space.bytes as u64,
        accepted: "at least one granule, and one page",
    };
    let Some(base) = space.start.checked_next_multiple_of(granule_bytes.max(page_bytes)) else {
        return Err(bad);
    };
    let page_units = (page_bytes / granule_bytes).max(1);
    let units = (space.end().saturating_sub(base) / granule_bytes).min(UNITS_MAX);
    let units = units / page_units * page_units;
    // None of them is more than `UNITS_MAX`, but the segments' size: that of a space no request fits.
    let small = |units: usize| u32::try_from(units).unwrap_or(u32::MAX);
    match small(units) {
        0 => Err(bad),
        units => Ok(Geometry {
            base,
            granule_bytes,
            page_units: small(page_units),
            units,
            segment_units: small(config.segment_bytes / granule_bytes),
        }),
    }
}
