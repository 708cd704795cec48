//! The state that the pool and its background thread share, and its device calls.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

use dormouse_device::sync::{Mutex, MutexGuard};
use dormouse_device::{AddressRange, Device, DeviceError};
use dormouse_timeline::{Gauge, Timeline};

use super::pool::PinnedBuffer;
use super::slab::{PinLimit, PinnedSlab, SlabObserver};
use super::slabs::{Piece, SlabGrowth, Slabs};
use super::{PinnedError, UNIT_BYTES};

/// The state behind the short lock.
#[derive(Debug)]
pub(super) struct PoolState<D: Device> {
    pub(super) slabs: Slabs,
    /// The cap as it was set; that of `slabs` is whole units.
    pub(super) cap_bytes: u64,
    /// By slot.
    pub(super) memory: Vec<Option<PinnedSlab<D>>>,
    pub(super) pinned_total: u64,
    pub(super) background_error: Option<PinnedError>,
}

/// The state that the pool and its background thread share.
#[derive(Debug)]
pub(super) struct Shared<D: Device> {
    /// Identifies the buffers of this pool.
    pub(super) number: u64,
    pub(super) device: Arc<D>,
    pub(super) timeline: Arc<Timeline>,
    pub(super) observer: Option<Arc<dyn SlabObserver>>,
    pub(super) limit: OnceLock<Arc<dyn PinLimit>>,
    pub(super) state: Mutex<PoolState<D>>,
    /// Held while slabs are pinned, or unpinned under pressure: other requests wait for the result. Taken
    /// before `state`; frees never take it.
    pub(super) slow: Mutex<()>,
    /// Whether the background thread was notified of work.
    pub(super) has_work: AtomicBool,
}

impl<D: Device> Shared<D> {
    pub(super) fn state(&self) -> MutexGuard<'_, PoolState<D>> {
        self.state.lock()
    }

    /// Pins a slab for `units` and takes them, under the slow lock. `None` at the cap or the limit.
    pub(super) fn grow(
        &self,
        units: u32,
        is_bounce: bool,
    ) -> Result<Option<PinnedBuffer>, DeviceError> {
        let limit = if is_bounce { u64::MAX } else { self.limit_units() };
        let (growth, unpinned) = {
            let mut state = self.state();
            let growth = state.slabs.grow(units, is_bounce, limit);
            let Some(growth) = growth else { return Ok(None) };
            let unpinned = state.take_memory(&growth.given_up);
            (growth, unpinned)
        };
        drop(unpinned);
        let (growth, pinned) = match self.pin(growth.units) {
            Err(refused) => self.pin_least(growth, units, refused),
            pinned => (growth, pinned),
        };
        let memory = pinned.inspect_err(|_| self.state().slabs.not_grown(&growth))?;
        let Some((mut state, slot)) = self.keep(&growth, memory) else { return Ok(None) };
        state.background_error = None;
        let piece = state.slabs.take_grown(slot, units);
        Ok(piece.map(|piece| self.buffer(&state, piece)))
    }

    /// Returns the most units that may be pinned now, beside the cap.
    fn limit_units(&self) -> u64 {
        let Some(limit) = self.limit.get() else { return u64::MAX };
        let pinned_bytes = to_bytes(self.state().slabs.figures().pinned);
        limit.limit_bytes(pinned_bytes) / UNIT_BYTES as u64
    }

    /// Adds the pinned memory of `growth`. At the limit of ranges it is unpinned, without the lock: the
    /// observer makes system calls.
    fn keep(
        &self,
        growth: &SlabGrowth,
        memory: PinnedSlab<D>,
    ) -> Option<(MutexGuard<'_, PoolState<D>>, u32)> {
        let mut state = self.state();
        let units = u32::try_from(memory.range().bytes / UNIT_BYTES).unwrap_or(growth.units);
        let Some(slot) = state.slabs.grown(growth, units) else {
            drop(state);
            drop(memory);
            return None;
        };
        state.pinned_total += u64::from(units);
        if state.memory.len() <= slot as usize {
            state.memory.resize_with(slot as usize + 1, || None);
        }
        state.memory[slot as usize] = Some(memory);
        Some((state, slot))
    }

    /// After the device has refused `growth`: unpins all idle slabs and pins only `units`. Fails with
    /// `refused` if neither changes anything.
    fn pin_least(
        &self,
        growth: SlabGrowth,
        units: u32,
        refused: DeviceError,
    ) -> (SlabGrowth, Result<PinnedSlab<D>, DeviceError>) {
        let (least, unpinned) = {
            let mut state = self.state();
            let least = state.slabs.shrink(&growth, units);
            let unpinned = state.take_memory(&least.given_up);
            (least, unpinned)
        };
        if unpinned.is_empty() && least.units == growth.units {
            return (least, Err(refused));
        }
        drop(unpinned);
        let pinned = self.pin(least.units);
        (least, pinned)
    }

    fn pin(&self, units: u32) -> Result<PinnedSlab<D>, DeviceError> {
        PinnedSlab::pin(&self.device, units as usize * UNIT_BYTES, self.observer.as_ref())
    }

    /// One run of the background thread: unpins surplus slabs, and pins one in advance.
    pub(super) fn work(&self) {
        let _slow = self.slow.lock();
        self.has_work.store(false, Ordering::Release);
        let (growth, unpinned) = {
            let mut state = self.state();
            let surplus = state.slabs.give_up_surplus();
            let unpinned = state.take_memory(&surplus);
            (state.slabs.grow_in_background(), unpinned)
        };
        drop(unpinned);
        let Some(growth) = growth else { return };
        let pinned = match self.allows(&growth) {
            true => self.pin(growth.units).map_err(PinnedError::from),
            false => Err(self.full(growth.units)),
        };
        match pinned {
            Ok(memory) => drop(self.keep(&growth, memory)),
            Err(error) => {
                let mut state = self.state();
                state.slabs.not_grown(&growth);
                state.background_error = Some(error);
            }
        }
    }

    /// Whether the limit allows a growth that unpins nothing.
    fn allows(&self, growth: &SlabGrowth) -> bool {
        let limit = self.limit_units();
        let pinned = self.state().slabs.figures().pinned;
        pinned + u64::from(growth.units) <= limit
    }

    /// The error of a refused request. Its cap is what the limit leaves of the pool's.
    pub(super) fn full(&self, units: u32) -> PinnedError {
        let limit_bytes = self.limit_units().saturating_mul(UNIT_BYTES as u64);
        let state = self.state();
        let figures = state.slabs.figures();
        PinnedError::Full {
            asked_bytes: to_bytes(units.into()),
            used_bytes: to_bytes(figures.used),
            pinned_bytes: to_bytes(figures.pinned),
            cap_bytes: state.cap_bytes.min(limit_bytes),
        }
    }

    pub(super) fn buffer(&self, state: &PoolState<D>, piece: Piece) -> PinnedBuffer {
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
    /// Takes the memory of removed slabs, to be dropped without the lock.
    pub(super) fn take_memory(&mut self, slots: &[u32]) -> Vec<PinnedSlab<D>> {
        slots.iter().filter_map(|&slot| self.memory[slot as usize].take()).collect()
    }
}

pub(super) fn to_bytes(units: u64) -> u64 {
    units * UNIT_BYTES as u64
}

#[cfg(test)]
mod tests {
    use std::sync::Weak;

    use dormouse_device::host::{HostConfig, HostDevice};

    use super::super::slabs::SlabFigures;
    use super::*;

    /// For each unpinned slab: whether the state could be locked meanwhile.
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
    fn slab_beyond_the_limit_of_ranges_is_unpinned_without_the_lock() {
        let device = Arc::new(HostDevice::new(HostConfig::new(1 << 20, 1 << 20)).unwrap());
        let watching = Arc::new(Watching::default());
        let state = PoolState {
            // No ranges at all.
            slabs: Slabs::new(1 << 20, true, 0),
            cap_bytes: 1 << 32,
            memory: Vec::new(),
            pinned_total: 0,
            background_error: None,
        };
        let shared = Arc::new(Shared {
            number: 0,
            device,
            timeline: Arc::new(Timeline::new(64)),
            observer: Some(Arc::clone(&watching) as Arc<dyn SlabObserver>),
            limit: OnceLock::new(),
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
