//! The pool: one short lock around the bookkeeping, device calls outside of it.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

use dormouse_device::sync::Mutex;
use dormouse_device::{AddressRange, Device};
use dormouse_timeline::Timeline;

use super::background::BackgroundThread;
use super::shared::{PoolState, Shared, to_bytes};
use super::slab::{PinLimit, PinnedSlab, SlabObserver};
use super::slabs::{Piece, RANGES_MAX, Slabs};
use super::{CAP_BYTES_MAX, PinnedConfig, PinnedError, UNIT_BYTES};

/// Number of pools created: it distinguishes the buffers of different pools.
static POOLS: AtomicU64 = AtomicU64::new(0);

/// How a request may obtain memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinMode {
    /// Within the cap.
    Now,
    /// Beyond the cap if necessary: for bounce buffers, which a load needs to complete.
    Bounce,
}

/// An allocated buffer. A plain id: freeing it twice is an error and harmless.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a dropped buffer is never freed"]
pub struct PinnedBuffer {
    pub(super) range: AddressRange,
    pub(super) piece: Piece,
    /// Number of the pool.
    pub(super) pool: u64,
}

impl PinnedBuffer {
    /// Returns its memory: the requested size, rounded up to [`UNIT_BYTES`].
    #[must_use]
    pub const fn range(&self) -> AddressRange {
        self.range
    }

    /// Returns its first address, a multiple of [`UNIT_BYTES`].
    #[must_use]
    pub const fn start(&self) -> usize {
        self.range.start
    }

    /// Returns its length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.range.bytes
    }
}

/// Memory statistics of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PinnedUsage {
    /// Bytes in buffers, bounce buffers included.
    pub used_bytes: u64,
    /// Peak since the last reset.
    pub peak_used_bytes: u64,
    /// Pinned bytes.
    pub pinned_bytes: u64,
    /// Peak since the last reset.
    pub peak_pinned_bytes: u64,
    /// Bytes of idle slabs.
    pub idle_bytes: u64,
    /// Limit of the pinned bytes.
    pub cap_bytes: u64,
    /// Number of buffers.
    pub buffers: u64,
    /// Number of slabs.
    pub slabs: u64,
    /// Total of all bytes pinned so far.
    pub pinned_in_all_bytes: u64,
    /// Why pinning in advance is suspended, until a request pins successfully.
    pub background_error: Option<PinnedError>,
}

/// Pinned host memory of one device. All methods are any-thread.
///
/// The memory of buffers that are not freed stays pinned when it is dropped: it may be in use.
#[derive(Debug)]
pub struct PinnedPool<D: Device> {
    pub(super) shared: Arc<Shared<D>>,
    keeps: bool,
    background: Option<BackgroundThread>,
}

impl<D: Device> PinnedPool<D> {
    /// Creates a pool of `device`'s pinned memory, with an optional observer of its slabs. Pins nothing.
    ///
    /// # Errors
    /// `BadConfig`; `Thread` if the background thread cannot be started.
    pub fn new(
        device: Arc<D>,
        config: PinnedConfig,
        timeline: Arc<Timeline>,
        observer: Option<Arc<dyn SlabObserver>>,
    ) -> Result<Self, PinnedError> {
        if config.prepares && !config.keeps {
            let accepted = "0 without keeps";
            return Err(PinnedError::BadConfig { field: "prepares", value: 1, accepted });
        }
        let state = PoolState {
            slabs: Slabs::new(cap_units(config.cap_bytes), config.keeps, RANGES_MAX),
            cap_bytes: config.cap_bytes,
            memory: Vec::new(),
            pinned_total: 0,
            background_error: None,
        };
        let shared = Arc::new(Shared {
            // Relaxed: a count.
            number: POOLS.fetch_add(1, Ordering::Relaxed),
            device,
            timeline,
            observer,
            limit: OnceLock::new(),
            state: Mutex::new(state),
            slow: Mutex::new(()),
            has_work: AtomicBool::new(false),
        });
        let background =
            if config.prepares { Some(BackgroundThread::start(&shared)?) } else { None };
        Ok(Self { shared, keeps: config.keeps, background })
    }

    /// Allocates a buffer of at least `bytes`.
    ///
    /// # Errors
    /// `Full` if the cap is reached, or the [limit](PinnedPool::limit_by) allows no more now; `BadSize`; `Device` if the
    /// device fails to pin memory; `TooManyRanges`.
    pub fn allocate(&self, bytes: usize, mode: PinMode) -> Result<PinnedBuffer, PinnedError> {
        let units = u32::try_from(bytes.max(1).div_ceil(UNIT_BYTES)).ok();
        let units = units
            .filter(|&units| to_bytes(units.into()) <= CAP_BYTES_MAX)
            .ok_or(PinnedError::BadSize { asked_bytes: bytes, accepted_bytes: CAP_BYTES_MAX })?;
        let is_bounce = mode == PinMode::Bounce;
        let buffer = self.take(units, is_bounce);
        buffer.map_or_else(|| self.allocate_slowly(units, is_bounce), Ok)
    }

    /// Takes a piece of a pinned slab.
    fn take(&self, units: u32, is_bounce: bool) -> Option<PinnedBuffer> {
        let mut state = self.shared.state();
        let piece = state.slabs.take(units, is_bounce);
        self.notify_background(&state);
        piece.map(|piece| self.shared.buffer(&state, piece))
    }

    fn allocate_slowly(&self, units: u32, is_bounce: bool) -> Result<PinnedBuffer, PinnedError> {
        let shared = &*self.shared;
        let _slow = shared.slow.lock();
        // Another thread may have pinned memory meanwhile.
        if let Some(buffer) = self.take(units, is_bounce) {
            return Ok(buffer);
        }
        if !shared.state().slabs.has_ranges() {
            return Err(PinnedError::TooManyRanges { limit: RANGES_MAX });
        }
        let grown = shared.grow(units, is_bounce);
        if let Ok(Some(buffer)) = grown {
            self.notify_background(&shared.state());
            return Ok(buffer);
        }
        {
            let mut state = shared.state();
            if let Some(piece) = state.slabs.take_any(units, is_bounce) {
                return Ok(shared.buffer(&state, piece));
            }
        }
        Err(grown.map_or_else(PinnedError::Device, |_| shared.full(units)))
    }

    /// Has `limit` asked before a slab is pinned, except for a bounce. Only the first call has an effect.
    pub fn limit_by(&self, limit: Arc<dyn PinLimit>) {
        // Set already: it stays.
        let _first = self.shared.limit.set(limit);
    }

    /// Frees a buffer that is no longer in use. Never waits (P4).
    ///
    /// # Errors
    /// `NotOut` for a buffer that is freed, or of another pool.
    pub fn free(&self, buffer: PinnedBuffer) -> Result<(), PinnedError> {
        let not_out = PinnedError::NotOut { start: buffer.start(), bytes: buffer.bytes() };
        if buffer.pool != self.shared.number {
            return Err(not_out);
        }
        let unpinned = {
            let mut state = self.shared.state();
            state.slabs.give(buffer.piece).ok_or(not_out)?;
            self.shared.gauge(&state);
            self.take_surplus(&mut state)
        };
        drop(unpinned);
        Ok(())
    }

    /// Sets the cap. Buffers stay; idle slabs beyond the cap are unpinned.
    pub fn set_cap(&self, bytes: u64) {
        let _slow = self.shared.slow.lock();
        let unpinned = {
            let mut state = self.shared.state();
            state.cap_bytes = bytes;
            state.slabs.set_cap(cap_units(bytes));
            let slots = state.slabs.give_up_surplus();
            state.take_memory(&slots)
        };
        drop(unpinned);
    }

    /// Returns the statistics.
    #[must_use]
    pub fn usage(&self) -> PinnedUsage {
        let state = self.shared.state();
        let figures = state.slabs.figures();
        PinnedUsage {
            used_bytes: to_bytes(figures.used),
            peak_used_bytes: to_bytes(figures.peak_used),
            pinned_bytes: to_bytes(figures.pinned),
            peak_pinned_bytes: to_bytes(figures.peak_pinned),
            idle_bytes: to_bytes(figures.idle),
            cap_bytes: state.cap_bytes,
            buffers: u64::from(figures.pieces),
            slabs: u64::from(figures.slabs),
            pinned_in_all_bytes: to_bytes(state.pinned_total),
            background_error: state.background_error.clone(),
        }
    }

    /// Resets the peaks to the current values.
    pub fn reset_peaks(&self) {
        self.shared.state().slabs.reset_peaks();
    }

    /// Takes the memory of surplus idle slabs, for the caller to unpin, if nothing is kept: that costs
    /// nothing on such a device. Otherwise notifies the background thread.
    fn take_surplus(&self, state: &mut PoolState<D>) -> Vec<PinnedSlab<D>> {
        if !state.slabs.has_surplus() {
            return Vec::new();
        }
        if let Some(background) = &self.background {
            self.shared.has_work.store(true, Ordering::Release);
            background.call();
        }
        if self.keeps {
            return Vec::new();
        }
        let slots = state.slabs.give_up_surplus();
        state.take_memory(&slots)
    }

    fn notify_background(&self, state: &PoolState<D>) {
        let Some(background) = &self.background else { return };
        if state.background_error.is_none()
            && state.slabs.units_to_prepare().is_some()
            && !self.shared.has_work.swap(true, Ordering::AcqRel)
        {
            background.call();
        }
    }
}

impl<D: Device> Drop for PinnedPool<D> {
    fn drop(&mut self) {
        if let Some(background) = self.background.take() {
            background.stop();
        }
        let mut state = self.shared.state();
        for slot in state.slabs.slots_in_use() {
            if let Some(memory) = state.memory[slot as usize].take() {
                memory.leak();
            }
        }
    }
}

fn cap_units(bytes: u64) -> u64 {
    bytes.min(CAP_BYTES_MAX) / UNIT_BYTES as u64
}
