//! The pool: one short lock around the bookkeeping, the device outside of it.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use dormouse_device::sync::Mutex;
use dormouse_device::{AddressRange, Device};
use dormouse_timeline::Timeline;

use super::background::BackgroundThread;
use super::pending::PendingBuffer;
use super::shared::{PoolState, Shared, to_bytes};
use super::slab::{PinnedSlab, SlabObserver};
use super::slabs::{Piece, RANGES_MAX, Slabs};
use super::{CAP_BYTES_MAX, PinnedConfig, PinnedError, UNIT_BYTES};

/// Pending buffers that a request queries before it pins.
pub const LOOKS_MAX: usize = 256;
/// The number of pending buffers from which every request queries some.
pub const PINNED_PENDING_ASKED_FROM: usize = 64;
/// Limit of the events of one buffer.
pub const EVENTS_MAX: usize = 64;
/// Limit of the waits of one request.
pub const WAIT_ROUNDS_MAX: u32 = 1 << 16;

/// Number of pools created: it distinguishes the buffers of different pools.
static POOLS: AtomicU64 = AtomicU64::new(0);

/// How a request may obtain memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinMode {
    /// Within the cap, without waiting.
    Now,
    /// Within the cap; waits for the events of pending buffers.
    Wait,
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
    /// Bytes in buffers, pending and bounce buffers included.
    pub used_bytes: u64,
    /// Peak since the last reset.
    pub peak_used_bytes: u64,
    /// Of these, bytes of freed buffers whose events have not completed.
    pub pending_bytes: u64,
    /// Pinned bytes.
    pub pinned_bytes: u64,
    /// Peak since the last reset.
    pub peak_pinned_bytes: u64,
    /// Bytes of idle slabs.
    pub idle_bytes: u64,
    /// Limit of the pinned bytes.
    pub cap_bytes: u64,
    /// Number of buffers, pending ones included.
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
/// Dropping it waits for the events of pending buffers. The memory of buffers that are not freed stays
/// pinned: it may be in use.
#[derive(Debug)]
pub struct PinnedPool<D: Device> {
    shared: Arc<Shared<D>>,
    keeps: bool,
    background: Option<BackgroundThread>,
}

impl<D: Device> PinnedPool<D> {
    /// Creates a pool of `device`'s pinned memory. Pins nothing.
    ///
    /// # Errors
    /// `BadConfig`; `Thread` if the background thread cannot be started.
    pub fn new(
        device: Arc<D>,
        config: PinnedConfig,
        timeline: Arc<Timeline>,
    ) -> Result<Self, PinnedError> {
        Self::with_observer(device, config, timeline, None)
    }

    /// [`PinnedPool::new`] with an observer of the slabs.
    ///
    /// # Errors
    /// As `new`.
    pub fn with_observer(
        device: Arc<D>,
        config: PinnedConfig,
        timeline: Arc<Timeline>,
        observer: Option<Arc<dyn SlabObserver>>,
    ) -> Result<Self, PinnedError> {
        config.validate()?;
        let state = PoolState {
            slabs: Slabs::new(cap_units(config.cap_bytes), config.keeps),
            cap_bytes: config.cap_bytes,
            memory: Vec::new(),
            pending: VecDeque::new(),
            pending_units: 0,
            pinned_total: 0,
            background_error: None,
        };
        let shared = Arc::new(Shared {
            // Relaxed: a count.
            number: POOLS.fetch_add(1, Ordering::Relaxed),
            device,
            timeline,
            observer,
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
    /// `Full` if the cap is reached (for [`PinMode::Wait`]: even with every pending buffer freed);
    /// `BadSize`; `Device` if the device fails to pin memory or to query an event; `TooManyRanges`.
    pub fn allocate(&self, bytes: usize, room: PinMode) -> Result<PinnedBuffer, PinnedError> {
        let units = units(bytes)?;
        let (buffer, is_behind) = {
            let mut state = self.shared.state();
            let piece = state.slabs.take(units, room == PinMode::Bounce);
            let buffer = piece.map(|piece| self.shared.hand_out(&state, piece));
            let is_behind = state.pending.len() >= PINNED_PENDING_ASKED_FROM;
            self.notify_background(&state);
            (buffer, is_behind)
        };
        match buffer {
            Some(buffer) => {
                if is_behind && let Some(_slow) = self.shared.slow.try_lock() {
                    // After an error they stay pending; the request that needs them reports it.
                    let _ = self.shared.collect(LOOKS_MAX / PINNED_PENDING_ASKED_FROM);
                }
                Ok(buffer)
            }
            None => self.take_slowly(units, room),
        }
    }

    /// Frees a buffer that is no longer in use. Never waits (P4).
    ///
    /// # Errors
    /// `NotOut` for a buffer that is freed, or of another pool.
    pub fn free(&self, buffer: PinnedBuffer) -> Result<(), PinnedError> {
        self.must_be_own(buffer)?;
        let given_up = {
            let mut state = self.shared.state();
            state.slabs.give(buffer.piece).ok_or(not_out(buffer))?;
            self.shared.gauge(&state);
            self.drop_surplus(&mut state)
        };
        drop(given_up);
        Ok(())
    }

    /// Frees a buffer that is in use until `events` have completed: its memory is not reused before.
    /// Never waits (P4).
    ///
    /// # Errors
    /// `NotOut`; `TooManyEvents`. The buffer is not freed then.
    pub fn free_after(
        &self,
        buffer: PinnedBuffer,
        events: Vec<D::Event>,
    ) -> Result<(), PinnedError> {
        if events.len() > EVENTS_MAX {
            return Err(PinnedError::TooManyEvents { seen: events.len(), accepted: EVENTS_MAX });
        }
        if events.is_empty() {
            return self.free(buffer);
        }
        self.must_be_own(buffer)?;
        let mut state = self.shared.state();
        let mut piece = buffer.piece;
        state.slabs.hold(&mut piece).ok_or(not_out(buffer))?;
        state.pending_units += u64::from(piece.units);
        state.pending.push_back(PendingBuffer { piece, events });
        Ok(())
    }

    /// Unpins all idle slabs, after collecting completed buffers, and resets the usage level that sizes
    /// new slabs. Returns the unpinned bytes.
    ///
    /// # Errors
    /// `Device` if an event cannot be queried; idle slabs are unpinned regardless.
    pub fn trim(&self) -> Result<u64, PinnedError> {
        let _slow = self.shared.slow.lock();
        let seen = self.shared.collect(usize::MAX);
        let given_up = {
            let mut state = self.shared.state();
            let slots = state.slabs.trim();
            state.take_memory(&slots)
        };
        let bytes = given_up.iter().map(|memory| memory.range().bytes as u64).sum();
        drop(given_up);
        seen.map(|_| bytes)
    }

    /// Sets the cap. Buffers stay; idle slabs beyond the cap are unpinned.
    pub fn set_cap(&self, bytes: u64) {
        let _slow = self.shared.slow.lock();
        let given_up = {
            let mut state = self.shared.state();
            state.cap_bytes = bytes;
            state.slabs.set_cap(cap_units(bytes));
            let slots = state.slabs.give_up_surplus();
            state.take_memory(&slots)
        };
        drop(given_up);
    }

    /// Returns the statistics.
    #[must_use]
    pub fn usage(&self) -> PinnedUsage {
        let state = self.shared.state();
        let figures = state.slabs.figures();
        PinnedUsage {
            used_bytes: to_bytes(figures.used),
            peak_used_bytes: to_bytes(figures.peak_used),
            pending_bytes: to_bytes(state.pending_units),
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

    /// Checks the bookkeeping: for tests.
    ///
    /// # Errors
    /// A description of the violation.
    pub fn check(&self) -> Result<(), String> {
        let state = self.shared.state();
        state.slabs.check()?;
        let pending: u64 = state.pending.iter().map(|p| u64::from(p.piece.units)).sum();
        // Those being looked at are in nobody's list.
        if pending > state.pending_units {
            return Err(format!("{pending} units pending, {} on the books", state.pending_units));
        }
        Ok(())
    }

    fn must_be_own(&self, buffer: PinnedBuffer) -> Result<(), PinnedError> {
        if buffer.pool == self.shared.number { Ok(()) } else { Err(not_out(buffer)) }
    }

    fn take_slowly(&self, units: u32, room: PinMode) -> Result<PinnedBuffer, PinnedError> {
        let shared = &*self.shared;
        let is_bounce = room == PinMode::Bounce;
        let mut refused = None;
        for _ in 0..WAIT_ROUNDS_MAX {
            let slow = shared.slow.lock();
            // A refusal to say is the answer only where nothing else helps.
            let mut seen = shared.collect(LOOKS_MAX);
            if let Some(buffer) = shared.take_now(units, is_bounce, false) {
                return Ok(buffer);
            }
            if !shared.state().slabs.has_ranges() {
                return Err(PinnedError::TooManyRanges { limit: RANGES_MAX });
            }
            match shared.grow(units, is_bounce) {
                Ok(Some(buffer)) => {
                    self.notify_background(&shared.state());
                    return Ok(buffer);
                }
                Ok(None) => {}
                Err(error) => refused = Some(error),
            }
            seen = seen.and(shared.collect(usize::MAX));
            if let Some(buffer) = shared.take_now(units, is_bounce, true) {
                return Ok(buffer);
            }
            if seen.as_ref().is_ok_and(|&count| count > 0) {
                continue;
            }
            let awaited = shared.awaited(units).filter(|_| room == PinMode::Wait);
            let Some(event) = awaited else {
                seen?;
                return Err(refused.map_or_else(|| shared.full(units), PinnedError::Device));
            };
            // Nobody else need wait for this.
            drop(slow);
            shared.device.synchronize(&event)?;
        }
        Err(shared.full(units))
    }

    /// Idle slabs that should not be: the caller's to give back where nothing is kept, which costs
    /// nothing there. Else the thread's, or the next request's that needs room.
    fn drop_surplus(&self, state: &mut PoolState<D>) -> Vec<PinnedSlab<D>> {
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
        for pending in std::mem::take(&mut state.pending) {
            let is_over =
                pending.events.iter().all(|event| self.shared.device.synchronize(event).is_ok());
            // Where the device does not say, a reader may be running: it stays.
            if is_over {
                let given = state.slabs.give(pending.piece);
                debug_assert!(given.is_some(), "{:?} was pending", pending.piece);
            }
        }
        for slot in state.slabs.slots_in_use() {
            if let Some(memory) = state.memory[slot as usize].take() {
                memory.leak();
            }
        }
    }
}

fn units(bytes: usize) -> Result<u32, PinnedError> {
    let units = u32::try_from(bytes.max(1).div_ceil(UNIT_BYTES)).ok();
    units
        .filter(|&units| to_bytes(units.into()) <= CAP_BYTES_MAX)
        .ok_or(PinnedError::BadSize { asked_bytes: bytes, accepted_bytes: CAP_BYTES_MAX })
}

fn cap_units(bytes: u64) -> u64 {
    bytes.min(CAP_BYTES_MAX) / UNIT_BYTES as u64
}

fn not_out(buffer: PinnedBuffer) -> PinnedError {
    PinnedError::NotOut { start: buffer.start(), bytes: buffer.bytes() }
}
