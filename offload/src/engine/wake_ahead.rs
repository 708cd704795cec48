//! Wakes ahead of need: an I/O thread stages the pages.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;

use dormouse_device::Device;

use super::Engine;
use super::region_data::PageReservation;
use crate::error::OffloadError;
use crate::ids::RegionId;
use dormouse_residency::region::{Action, Actions, Input, RegionStep};
use dormouse_storage::Request;
use dormouse_storage::sync::{Mutex, lock};
use dormouse_storage::{Priority, TransferJob};

impl<D: Device> Engine<D> {
    /// As [`Engine::wake`], for regions needed later. Room is reserved here and now; an I/O thread maps the
    /// pages in this order and starts the copies. On devices that are not stream-ordered that thread also
    /// reserves the room, since unmapping freed pages costs as much as mapping. Until then the room is
    /// promised: other wakes leave it, but an allocation may take it, and the wake then fails.
    pub(crate) fn wake_ahead(&self, ids: &[RegionId]) {
        let mut begun = Vec::new();
        for &id in ids {
            let Some(actions) = self.table.feed(id, Input::Wake).actions() else { continue };
            let is_staged = actions == [Action::Start(RegionStep::Stage)];
            if is_staged && (self.promise(id) || self.reserve(id).is_ok()) {
                begun.push((id, actions));
            } else {
                // Without room it fails as any wake does.
                self.execute(id, actions);
            }
        }
        if !begun.is_empty() {
            self.stage_in_background(begun);
        }
        self.pump();
    }

    /// Leaves the reservation to an I/O thread, unless one has found no room before.
    fn promise(&self, id: RegionId) -> bool {
        let promised = |reservation: &mut PageReservation| {
            let is_first = *reservation == PageReservation::None;
            if is_first {
                *reservation = PageReservation::Promised;
            }
            is_first
        };
        !self.device.is_stream_ordered()
            && self.table.with(id, |e| promised(&mut e.data.reservation)).unwrap_or(false)
    }

    fn stage_in_background(&self, begun: Vec<(RegionId, Actions)>) {
        let Some(engine) = self.me.upgrade() else {
            return begun.into_iter().for_each(|(id, actions)| self.execute(id, actions));
        };
        // Ahead of the reads that it leads to, which the next ones wait for.
        if let Err(job) = self.pool.submit(Priority::Read, Box::new(Staging { engine, begun })) {
            job.finish(); // the pool is shut down
        }
    }

    /// Reserves room for the pages of a region that wakes, and ends its promise.
    pub(super) fn reserve(&self, id: RegionId) -> Result<(), OffloadError> {
        let bytes = self.body(id, |b| Some(b.away_bytes())).ok_or_else(|| self.stale(id))?;
        let reserved = self.allocator.reserve_awake(bytes);
        let is_reserved = reserved.is_ok();
        self.table.with(id, |e| match e.data.reservation {
            _ if is_reserved => e.data.reservation = PageReservation::Reserved,
            PageReservation::Promised => e.data.reservation = PageReservation::Refused,
            PageReservation::None
            | PageReservation::Refused
            | PageReservation::Reserved
            | PageReservation::Lost => {}
        });
        Ok(reserved?)
    }
}

/// Wakes that have begun, to be staged one after the other.
#[derive(Debug, Default)]
pub(super) struct Stagings {
    waiting: VecDeque<(RegionId, Actions)>,
    /// A thread is staging one.
    is_served: bool,
}

impl Stagings {
    /// Returns the next one, unless another thread is staging. [`StagingGuard`] ends the turn.
    fn next(&mut self) -> Option<(RegionId, Actions)> {
        if self.is_served {
            return None;
        }
        let next = self.waiting.pop_front();
        self.is_served = next.is_some();
        next
    }
}

/// Stages what waits, on one thread at a time: the allocator lets only one of our threads make room, and
/// that one takes what others leave.
fn stage_serially(stagings: &Mutex<Stagings>, stage: impl Fn(RegionId, Actions)) {
    let next = || lock(stagings).next();
    while let Some((id, actions)) = next() {
        let _guard = StagingGuard(stagings);
        stage(id, actions);
    }
}

/// Ends a thread's turn, also if it panics.
struct StagingGuard<'a>(&'a Mutex<Stagings>);

impl Drop for StagingGuard<'_> {
    fn drop(&mut self) {
        lock(self.0).is_served = false;
    }
}

/// A job without transfers that makes an I/O thread the executor of wakes that have begun.
struct Staging<D: Device> {
    engine: Arc<Engine<D>>,
    begun: Vec<(RegionId, Actions)>,
}

impl<D: Device> TransferJob for Staging<D> {
    fn next_request(&mut self) -> Option<(u32, Request)> {
        None
    }

    fn answer(&mut self, _name: u32, _result: io::Result<usize>) {
        debug_assert!(false, "nothing was asked");
    }

    fn is_over(&self) -> bool {
        true
    }

    fn finish(self: Box<Self>) {
        let engine = &self.engine;
        lock(&engine.staging).waiting.extend(self.begun);
        stage_serially(&engine.staging, |id, actions| engine.execute(id, actions));
        engine.pump();
    }
}

#[cfg(test)]
#[cfg(loom)]
mod model {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use loom::thread;

    use super::*;

    /// Each is staged once, by whichever thread, and never two at a time.
    #[test]
    fn loom_each_wake_is_staged_once_and_one_at_a_time() {
        loom::model(|| {
            let stagings = Arc::new(Mutex::new(Stagings::default()));
            // Not loom's: what they show must hold in whatever order the lock is had.
            let (staged, at_once) = (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
            let serve = || {
                let (stagings, staged, at_once) =
                    (Arc::clone(&stagings), Arc::clone(&staged), Arc::clone(&at_once));
                move || {
                    let id = RegionId { index: 0, generation: 1 };
                    lock(&stagings).waiting.push_back((id, Actions::default()));
                    stage_serially(&stagings, |_, _| {
                        assert_eq!(at_once.fetch_add(1, Ordering::SeqCst), 0);
                        thread::yield_now();
                        at_once.fetch_sub(1, Ordering::SeqCst);
                        staged.fetch_add(1, Ordering::SeqCst);
                    });
                }
            };
            let other = thread::spawn(serve());
            serve()();
            other.join().unwrap();
            assert_eq!(staged.load(Ordering::SeqCst), 2);
        });
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;

    #[test]
    fn a_panic_while_staging_leaves_the_rest_to_other_threads() {
        let stagings = Mutex::new(Stagings::default());
        for index in 0..3 {
            let id = RegionId { index, generation: 1 };
            lock(&stagings).waiting.push_back((id, Actions::default()));
        }
        let dies =
            catch_unwind(AssertUnwindSafe(|| stage_serially(&stagings, |_, _| panic!("told to"))));
        assert!(dies.is_err());
        let staged = Mutex::new(Vec::new());
        stage_serially(&stagings, |id, _| lock(&staged).push(id.index));
        assert_eq!(*lock(&staged), [1, 2]);
    }
}
