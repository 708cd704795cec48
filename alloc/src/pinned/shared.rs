//! What the pool and its thread share: the books, and what is done about them with the device.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dormouse_device::sync::{Mutex, MutexGuard};
use dormouse_device::{AddressRange, Device, DeviceError};
use dormouse_timeline::{Gauge, Timeline};

use super::pending::{self, PendingBuffer};
use super::pool::PinnedBuffer;
use super::slab::{PinnedSlab, SlabObserver};
use super::slabs::{Piece, SlabFigures, SlabGrowth, Slabs};
use super::{PinnedError, UNIT_BYTES};

/// What the short lock guards.
#[derive(Debug)]
pub(super) struct PoolState<D: Device> {
    pub(super) slabs: Slabs,
    /// The cap as it was given; that of `slabs` is whole units.
    pub(super) cap_bytes: u64,
    /// By slot.
    pub(super) memory: Vec<Option<PinnedSlab<D>>>,
    pub(super) pending: VecDeque<PendingBuffer<D>>,
    pub(super) pending_units: u64,
    pub(super) pinned_total: u64,
    pub(super) background_error: Option<PinnedError>,
}

/// What the pool and its thread share.
#[derive(Debug)]
pub(super) struct Shared<D: Device> {
    /// Tells the buffers of this pool from those of others.
    pub(super) number: u64,
    pub(super) device: Arc<D>,
    pub(super) timeline: Arc<Timeline>,
    pub(super) observer: Option<Arc<dyn SlabObserver>>,
    pub(super) state: Mutex<PoolState<D>>,
    /// Held by whoever pins, unpins under pressure, or looks at events: others that need room wait
    /// for the outcome rather than be refused. Taken before `state`; frees never take it.
    pub(super) slow: Mutex<()>,
    /// Mirrors "the thread has something to do", so that a take need not ask twice.
    pub(super) has_work: AtomicBool,
}

impl<D: Device> Shared<D> {
    pub(super) fn state(&self) -> MutexGuard<'_, PoolState<D>> {
        self.state.lock()
    }

    /// Under the slow lock: pins for `units` and cuts them off. `None` at the cap.
    pub(super) fn grow(
        &self,
        units: u32,
        is_bounce: bool,
    ) -> Result<Option<PinnedBuffer>, DeviceError> {
        let (growth, given_up) = {
            let mut state = self.state();
            let Some(growth) = state.slabs.grow(units, is_bounce) else { return Ok(None) };
            let given_up = state.take_memory(&growth.given_up);
            (growth, given_up)
        };
        drop(given_up);
        let (growth, pinned) = match self.pin(growth.units) {
            Err(refused) => self.pin_least(growth, units, refused),
            pinned => (growth, pinned),
        };
        let memory = match pinned {
            Ok(memory) => memory,
            Err(refused) => {
                self.state().slabs.not_grown(&growth);
                return Err(refused);
            }
        };
        let Some((mut state, slot)) = self.keep(&growth, memory) else { return Ok(None) };
        state.background_error = None;
        let piece = state.slabs.take_grown(slot, units);
        Ok(piece.map(|piece| self.hand_out(&state, piece)))
    }

    /// Takes the memory that `growth` got into the books. At the limit of ranges it goes, and
    /// without their lock: whoever is told of that makes system calls.
    fn keep(
        &self,
        growth: &SlabGrowth,
        memory: PinnedSlab<D>,
    ) -> Option<(MutexGuard<'_, PoolState<D>>, u32)> {
        let mut state = self.state();
        match state.keep(growth, memory) {
            Ok(slot) => Some((state, slot)),
            Err(memory) => {
                drop(state);
                drop(memory);
                None
            }
        }
    }

    /// After a refusal: idle slabs may be what the system lacks, and less may do. The refusal
    /// stands where there is neither.
    fn pin_least(
        &self,
        growth: SlabGrowth,
        units: u32,
        refused: DeviceError,
    ) -> (SlabGrowth, Result<PinnedSlab<D>, DeviceError>) {
        let (least, given_up) = {
            let mut state = self.state();
            let least = state.slabs.shrink(&growth, units);
            let given_up = state.take_memory(&least.given_up);
            (least, given_up)
        };
        if given_up.is_empty() && least.units == growth.units {
            return (least, Err(refused));
        }
        drop(given_up);
        let pinned = self.pin(least.units);
        (least, pinned)
    }

    fn pin(&self, units: u32) -> Result<PinnedSlab<D>, DeviceError> {
        PinnedSlab::pin(&self.device, units as usize * UNIT_BYTES, self.observer.as_ref())
    }

    /// What the thread does when called: surplus goes, and what is worth preparing is pinned.
    pub(super) fn work(&self) {
        let _slow = self.slow.lock();
        self.has_work.store(false, Ordering::Release);
        let (growth, given_up) = {
            let mut state = self.state();
            let surplus = state.slabs.give_up_surplus();
            let given_up = state.take_memory(&surplus);
            (state.slabs.grow_in_background(), given_up)
        };
        drop(given_up);
        let Some(growth) = growth else { return };
        match self.pin(growth.units) {
            Ok(memory) => {
                self.keep(&growth, memory);
            }
            Err(error) => {
                let mut state = self.state();
                state.slabs.not_grown(&growth);
                state.background_error = Some(error.into());
            }
        }
    }

    pub(super) fn take_now(&self, units: u32, is_bounce: bool, any: bool) -> Option<PinnedBuffer> {
        let mut state = self.state();
        let piece = match any {
            true => state.slabs.take_any(units, is_bounce),
            false => state.slabs.take(units, is_bounce),
        };
        piece.map(|piece| self.hand_out(&state, piece))
    }

    /// Under the slow lock: looks at up to `looks_max` pending buffers, each once, and takes those
    /// back whose readers are done. Returns how many.
    pub(super) fn collect(&self, looks_max: usize) -> Result<usize, PinnedError> {
        let mut looked = pending::next(&mut self.state().pending, looks_max);
        if looked.is_empty() {
            return Ok(0);
        }
        let (mut over, mut refused) = (Vec::new(), None);
        looked.retain_mut(|pending| {
            let is_over = pending.is_over(&self.device).unwrap_or_else(|error| {
                refused = Some(error);
                false
            });
            if is_over {
                over.push(pending.piece);
            }
            !is_over
        });
        let mut state = self.state();
        state.pending.extend(looked);
        for &piece in &over {
            state.pending_units -= u64::from(piece.units);
            // It was out until now: `give_after` saw to that.
            let given = state.slabs.give(piece);
            debug_assert!(given.is_some(), "{piece:?} was pending");
        }
        self.gauge(&state);
        refused.map_or(Ok(over.len()), |error| Err(error.into()))
    }

    /// An event to wait for, where a request of `units` would fit with all pending buffers back.
    pub(super) fn awaited(&self, units: u32) -> Option<D::Event> {
        let state = self.state();
        let SlabFigures { used, .. } = state.slabs.figures();
        let others = used - state.pending_units;
        if others + u64::from(units) > state.slabs.cap() {
            return None;
        }
        state.pending.front()?.events.last().cloned()
    }

    pub(super) fn full(&self, units: u32) -> PinnedError {
        let state = self.state();
        let figures = state.slabs.figures();
        PinnedError::Full {
            asked_bytes: to_bytes(units.into()),
            used_bytes: to_bytes(figures.used),
            pending_bytes: to_bytes(state.pending_units),
            pinned_bytes: to_bytes(figures.pinned),
            cap_bytes: state.cap_bytes,
        }
    }

    pub(super) fn hand_out(&self, state: &PoolState<D>, piece: Piece) -> PinnedBuffer {
        self.gauge(state);
        let memory = state.memory.get(piece.slab as usize).and_then(Option::as_ref);
        // Every slab has its memory from `keep` to `take_memory`.
        let start = memory.map_or(0, |memory| memory.range().start);
        let offset = piece.start as usize * UNIT_BYTES;
        let range = AddressRange::new(start + offset, piece.units as usize * UNIT_BYTES);
        PinnedBuffer { range, piece, pool: self.number }
    }

    pub(super) fn gauge(&self, state: &PoolState<D>) {
        self.timeline.gauge(Gauge::HostUsed, to_bytes(state.slabs.figures().used));
    }
}

impl<D: Device> PoolState<D> {
    /// Takes the memory that `growth` got, or gives it back at the limit of ranges.
    fn keep(&mut self, growth: &SlabGrowth, memory: PinnedSlab<D>) -> Result<u32, PinnedSlab<D>> {
        let units = u32::try_from(memory.range().bytes / UNIT_BYTES).unwrap_or(growth.units);
        let Some(slot) = self.slabs.grown(growth, units) else { return Err(memory) };
        self.pinned_total += u64::from(units);
        if self.memory.len() <= slot as usize {
            self.memory.resize_with(slot as usize + 1, || None);
        }
        self.memory[slot as usize] = Some(memory);
        Ok(slot)
    }

    /// The memory of slabs that were given up, to be dropped without the lock.
    pub(super) fn take_memory(&mut self, slots: &[u32]) -> Vec<PinnedSlab<D>> {
        slots.iter().filter_map(|&slot| self.memory[slot as usize].take()).collect()
    }
}

pub(super) fn to_bytes(units: u64) -> u64 {
    units * UNIT_BYTES as u64
}

#[cfg(test)]
mod tests {
    use std::sync::{OnceLock, Weak};

    use dormouse_device::host::{HostConfig, HostDevice};

    use super::*;

    /// For each slab that went: whether the books could be had meanwhile.
    #[derive(Debug, Default)]
    struct Watching {
        shared: OnceLock<Weak<Shared<HostDevice>>>,
        went: Mutex<Vec<bool>>,
    }

    impl SlabObserver for Watching {
        fn on_pin(&self, _: AddressRange) {}

        fn on_unpin(&self, _: AddressRange) {
            let shared = self.shared.get().and_then(Weak::upgrade).unwrap();
            self.went.lock().push(shared.state.try_lock().is_some());
        }
    }

    #[test]
    fn a_slab_that_the_books_have_no_room_for_goes_without_their_lock() {
        let device = Arc::new(HostDevice::new(HostConfig::new(1 << 20, 1 << 20)).unwrap());
        let watching = Arc::new(Watching::default());
        let state = PoolState {
            // Not even room for the line of one slab.
            slabs: Slabs::limited(1 << 20, true, 0),
            cap_bytes: 1 << 32,
            memory: Vec::new(),
            pending: VecDeque::new(),
            pending_units: 0,
            pinned_total: 0,
            background_error: None,
        };
        let shared = Arc::new(Shared {
            number: 0,
            device,
            timeline: Arc::new(Timeline::new(64)),
            observer: Some(Arc::clone(&watching) as Arc<dyn SlabObserver>),
            state: Mutex::new(state),
            slow: Mutex::new(()),
            has_work: AtomicBool::new(false),
        });
        watching.shared.set(Arc::downgrade(&shared)).unwrap();
        assert_eq!(shared.grow(1, false).unwrap(), None);
        assert_eq!(*watching.went.lock(), [true]);
        assert_eq!(shared.state().slabs.figures(), SlabFigures::default());
    }
}
