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

/// Pending buffers that a request looks at before it pins, and that one looks at in passing.
pub const LOOKS_MAX: usize = 256;
/// From how many pending buffers on even a request that needs none looks at some.
pub const PINNED_PENDING_ASKED_FROM: usize = 64;
/// The most events that guard one buffer.
pub const EVENTS_MAX: usize = 64;
/// How many times a request waits for a reader and tries again.
pub const WAIT_ROUNDS_MAX: u32 = 1 << 16;

/// Pools made so far: two may cut their slabs the same way, and a buffer of one is not the other's.
static POOLS: AtomicU64 = AtomicU64::new(0);

/// How a request may find room.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PinMode {
    /// Under the cap, now.
    Now,
    /// Under the cap, once readers of buffers that were given back are done.
    Wait,
    /// Beyond the cap where need be: for bounce buffers, without which a load could not finish.
    Bounce,
}

/// A buffer in a caller's hands. A plain name: giving it back twice is an error, not a danger.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a buffer that is dropped is never given back"]
pub struct PinnedBuffer {
    pub(super) range: AddressRange,
    pub(super) piece: Piece,
    /// Number of its pool.
    pub(super) pool: u64,
}

impl PinnedBuffer {
    /// Its memory: what was asked for, rounded up to [`UNIT_BYTES`].
    #[must_use]
    pub const fn range(&self) -> AddressRange {
        self.range
    }

    /// Where it starts, a multiple of [`UNIT_BYTES`].
    #[must_use]
    pub const fn start(&self) -> usize {
        self.range.start
    }

    /// Its length.
    #[must_use]
    pub const fn bytes(&self) -> usize {
        self.range.bytes
    }
}

/// Figures of a pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PinnedUsage {
    /// Bytes in buffers, pending and bounce buffers included.
    pub used_bytes: u64,
    /// The most since the last reset.
    pub peak_used_bytes: u64,
    /// Of these, bytes given back whose readers' events have not been seen complete.
    pub pending_bytes: u64,
    /// Bytes pinned.
    pub pinned_bytes: u64,
    /// The most since the last reset.
    pub peak_pinned_bytes: u64,
    /// Bytes in slabs that nothing is in.
    pub idle_bytes: u64,
    /// The limit of what is pinned.
    pub cap_bytes: u64,
    /// Buffers out, pending ones included.
    pub buffers: u64,
    /// Slabs pinned.
    pub slabs: u64,
    /// Every byte ever pinned: what the device was asked for.
    pub pinned_in_all_bytes: u64,
    /// Why nothing is pinned ahead of need any more, until a request's own pinning succeeds.
    pub background_error: Option<PinnedError>,
}

/// Pinned host memory of one device. All methods are any-thread.
///
/// Dropping it waits for the readers of pending buffers. Memory of buffers nobody gave back stays
/// pinned: somebody may be using it.
#[derive(Debug)]
pub struct PinnedPool<D: Device> {
    shared: Arc<Shared<D>>,
    keeps: bool,
    background: Option<BackgroundThread>,
}

impl<D: Device> PinnedPool<D> {
    /// A pool of `device`'s pinned memory: nothing is pinned yet.
    ///
    /// # Errors
    /// `BadConfig`; `Thread` where the one that pins ahead of need cannot be started.
    pub fn new(
        device: Arc<D>,
        config: PinnedConfig,
        timeline: Arc<Timeline>,
    ) -> Result<Self, PinnedError> {
        Self::with_observer(device, config, timeline, None)
    }

    /// [`PinnedPool::new`], with somebody who is told of the memory of its slabs.
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

    /// Hands out a buffer of at least `bytes`.
    ///
    /// # Errors
    /// `Full`, where the cap has no room (and, for [`PinMode::Wait`], would have none with every
    /// pending buffer back); `BadSize`; `Device` where the device refuses to pin, or to say
    /// whether a reader is done; `TooManyRanges`.
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
                    // A refusal to say leaves them pending; whoever needs them is told.
                    let _ = self.shared.collect(LOOKS_MAX / PINNED_PENDING_ASKED_FROM);
                }
                Ok(buffer)
            }
            None => self.take_slowly(units, room),
        }
    }

    /// Takes a buffer back that nobody uses any more. Never waits (P4).
    ///
    /// # Errors
    /// `NotOut` for one that was given back before, or is another pool's.
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

    /// Takes a buffer back whose last readers are done when `events` have completed: its bytes
    /// serve nobody before that. Never waits (P4).
    ///
    /// # Errors
    /// `NotOut`; `TooManyEvents`: the buffer is still the caller's.
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

    /// Gives every idle slab back to the device, those of readers seen done included, and forgets
    /// how much was in use once. Returns their bytes.
    ///
    /// # Errors
    /// `Device` where it does not say whether a reader is done; what was idle is gone all the same.
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

    /// Sets the cap. What is in buffers stays; idle slabs beyond it go.
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

    /// Its figures.
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

    /// Makes the peaks what is there now.
    pub fn reset_peaks(&self) {
        self.shared.state().slabs.reset_peaks();
    }

    /// Walks the books and checks that they add up: for tests.
    ///
    /// # Errors
    /// What is wrong, in words.
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
