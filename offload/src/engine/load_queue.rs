//! The limit on bounce buffers of loads: wakes from the file that pass through host memory, on a device that cannot read
//! the file itself and for regions of several blocks.
//!
//! A bounce buffer may exceed the host tier's budget, as a load must be able to finish. Two loads are always under way, so
//! that one is read while the other is copied in; more only if all fit the limit on bytes that fall asleep. A region
//! that is read ahead has a host copy within the tier's budget, and is not limited here.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dormouse_device::Device;

use super::Engine;
use super::transfers::bounce_bytes;
use crate::ids::RegionId;
use crate::table::Launched;
use dormouse_residency::region::StepOutcome;
use dormouse_storage::sync::lock;

/// Loads under way whatever their bytes.
const LOADS_MIN: u32 = 2;

/// A load that waits for its bounce buffer.
#[derive(Debug)]
struct WaitingLoad {
    id: RegionId,
    bytes: u64,
    cancel: Arc<AtomicBool>,
}

impl WaitingLoad {
    fn is_cancelled(&self) -> bool {
        // Relaxed: a hint; the request itself is under the table's lock.
        self.cancel.load(Ordering::Relaxed)
    }
}

/// Loads, first come first served.
#[derive(Debug, Default)]
pub(super) struct LoadQueue {
    /// Loads that have a bounce buffer, and their bytes.
    under_way: u32,
    bytes: u64,
    waiting: VecDeque<WaitingLoad>,
}

impl LoadQueue {
    fn fits(&self, bytes: u64, bytes_max: u64) -> bool {
        self.under_way < LOADS_MIN || self.bytes.saturating_add(bytes) <= bytes_max
    }

    fn begin(&mut self, bytes: u64) {
        self.under_way += 1;
        self.bytes += bytes;
    }

    /// Returns true if the load may start now; otherwise queues it.
    fn take(&mut self, load: WaitingLoad, bytes_max: u64) -> bool {
        let may_start = self.waiting.is_empty() && self.fits(load.bytes, bytes_max);
        if may_start {
            self.begin(load.bytes);
        } else {
            self.waiting.push_back(load);
        }
        may_start
    }

    /// Removes a load that was cancelled while it waited.
    fn next_cancelled(&mut self) -> Option<RegionId> {
        let at = self.waiting.iter().position(WaitingLoad::is_cancelled)?;
        self.waiting.remove(at).map(|load| load.id)
    }

    /// Removes the first load that waits, with its bytes, if it may start now.
    fn next(&mut self, bytes_max: u64) -> Option<(RegionId, u64)> {
        let bytes = self.waiting.front()?.bytes;
        let next = self.fits(bytes, bytes_max).then(|| self.waiting.pop_front()).flatten()?;
        self.begin(bytes);
        Some((next.id, bytes))
    }

    /// Whether [`LoadQueue::next`] returns a load.
    fn has_next(&self, bytes_max: u64) -> bool {
        self.waiting.front().is_some_and(|first| self.fits(first.bytes, bytes_max))
    }

    fn end(&mut self, bytes: u64) {
        debug_assert!(bytes <= self.bytes && self.under_way > 0, "{bytes} of {}", self.bytes);
        self.under_way = self.under_way.saturating_sub(1);
        self.bytes = self.bytes.saturating_sub(bytes);
    }
}

impl<D: Device> Engine<D> {
    /// Starts a read of the extent for a wake or a promotion, once there is room for its bounce buffer if it needs one.
    pub(super) fn start_read(&self, id: RegionId) -> Launched {
        let load = self.table.with(id, |e| {
            let bytes = bounce_bytes(e)? as u64;
            Some(WaitingLoad { id, bytes, cancel: Arc::clone(&e.data.cancel) })
        });
        if let Some(load) = load.flatten() {
            let bytes = load.bytes;
            if !lock(&self.loads).take(load, self.tuning.inflight_bytes_max()) {
                return Launched::InFlight;
            }
            self.table.with(id, |e| e.data.load_bytes = Some(bytes));
        }
        self.read(id)
    }

    /// Ends the loads that were cancelled while they waited. Never waits.
    pub(super) fn end_cancelled_loads(&self) {
        // Ends: each turn removes one.
        while let Some(id) = { lock(&self.loads).next_cancelled() } {
            self.end_step(id, StepOutcome::Cancelled);
        }
    }

    /// Ends cancelled loads, and starts those that there is room for.
    pub(super) fn serve_loads(&self) {
        self.end_cancelled_loads();
        // Ends: each turn removes one.
        while let Some((id, bytes)) = self.next_load() {
            self.table.with(id, |e| e.data.load_bytes = Some(bytes));
            self.table.watched(|| {
                if let Launched::Over(outcome) = self.read(id) {
                    self.end_step(id, outcome);
                }
            });
        }
    }

    fn next_load(&self) -> Option<(RegionId, u64)> {
        lock(&self.loads).next(self.tuning.inflight_bytes_max())
    }

    /// Whether a load that waits may start.
    pub(super) fn has_load_to_start(&self) -> bool {
        lock(&self.loads).has_next(self.tuning.inflight_bytes_max())
    }

    /// Ends a load, if it is one, whose bounce buffer was given back. The caller serves the queues.
    pub(super) fn end_load(&self, bytes: Option<u64>) {
        bytes.into_iter().for_each(|bytes| lock(&self.loads).end(bytes));
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Loads start in order, two always and more within the limit, and all of them but those that are cancelled.
        #[test]
        fn loads_start_in_order_within_the_limit(
            loads in proptest::collection::vec((1..100_u64, any::<bool>()), 1..60),
            bytes_max in 1..300_u64,
            ends in proptest::collection::vec(any::<u16>(), 61),
        ) {
            let (mut queue, mut started, mut under_way) = (LoadQueue::default(), Vec::new(), Vec::new());
            let mut wanted: Vec<u32> = Vec::new();
            let mut cancelled = Vec::new();
            for (index, &(bytes, is_cancelled)) in (0..).zip(&loads) {
                let id = RegionId { index, generation: 1 };
                let cancel = Arc::new(AtomicBool::new(false));
                let load = WaitingLoad { id, bytes, cancel: Arc::clone(&cancel) };
                if queue.take(load, bytes_max) {
                    started.push(index);
                    under_way.push(bytes);
                } else if is_cancelled {
                    cancel.store(true, Ordering::Relaxed);
                    cancelled.push(index);
                    continue;
                }
                wanted.push(index);
            }
            let left = std::iter::from_fn(|| queue.next_cancelled());
            prop_assert_eq!(left.map(|id| id.index).collect::<Vec<_>>(), cancelled);
            for end in ends {
                let held: u64 = under_way.iter().sum();
                prop_assert_eq!(queue.bytes, held);
                prop_assert!(held <= bytes_max || under_way.len() <= 2, "{:?}", under_way);
                prop_assert!(under_way.len() >= 2 || queue.waiting.is_empty());
                if under_way.is_empty() {
                    break;
                }
                queue.end(under_way.swap_remove(end as usize % under_way.len()));
                while queue.has_next(bytes_max) {
                    let (next, bytes) = queue.next(bytes_max).unwrap();
                    prop_assert_eq!(bytes, loads[next.index as usize].0);
                    started.push(next.index);
                    under_way.push(bytes);
                }
            }
            prop_assert_eq!(started, wanted);
        }
    }
}
