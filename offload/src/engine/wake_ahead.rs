//! Waking ahead of need: pages are staged by an I/O thread, while whoever asked goes on.

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
    /// As [`Engine::wake`], for those needed later: when it returns room is theirs as it is there, and
    /// an I/O thread maps their pages, in this order, and starts their copies. Where freed memory is in
    /// no stream's hands that thread takes the room as well, since to take the pages of what was freed
    /// away costs as much as to map them. Until then it is promised: other wakes leave it, an allocation
    /// may be quicker, and the wake then fails as it would have done behind it.
    pub(crate) fn wake_ahead(&self, ids: &[RegionId]) {
        let mut begun = Vec::new();
        for &id in ids {
            let Some(actions) = self.table.feed(id, Input::Wake).actions() else { continue };
            let is_staged = actions == [Action::Start(RegionStep::Stage)];
            if is_staged && (self.promise(id) || self.reserve(id).is_ok()) {
                begun.push((id, actions));
            } else {
                // Where there was no room it finds none, and fails as any wake does.
                self.execute(id, actions);
            }
        }
        if !begun.is_empty() {
            self.stage_in_background(begun);
        }
        self.pump();
    }

    /// Leaves it to an I/O thread to reserve room for a region, unless one has found none before.
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
        // Ahead of the reads that it leads to: it is what the next of them wait for.
        if let Err(job) = self.pool.submit(Priority::Read, Box::new(Staging { engine, begun })) {
            job.finish(); // shut down meanwhile
        }
    }

    /// Room for the pages of a region that wakes. It is promised no more, whatever comes of it.
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
    /// A thread is at one of them.
    is_served: bool,
}

impl Stagings {
    /// The next, for a thread that clears `is_served` when it is through ([`StagingGuard`]); `None` where another is.
    fn next(&mut self) -> Option<(RegionId, Actions)> {
        if self.is_served {
            return None;
        }
        let next = self.waiting.pop_front();
        self.is_served = next.is_some();
        next
    }
}

/// Has `stage` called for what waits. By one thread at a time, since the allocator lets one make room
/// at a time and turns others of ours away: that one goes on with what others leave.
fn stage_serially(stagings: &Mutex<Stagings>, stage: impl Fn(RegionId, Actions)) {
    let next = || lock(stagings).next();
    while let Some((id, actions)) = next() {
        let _guard = StagingGuard(stagings);
        stage(id, actions);
    }
}

/// The turn of a thread, which ends with it even where that panics.
struct StagingGuard<'a>(&'a Mutex<Stagings>);

impl Drop for StagingGuard<'_> {
    fn drop(&mut self) {
        lock(self.0).is_served = false;
    }
}

/// Wakes that have begun, whose executor an I/O thread becomes: a transfer of nothing.
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
    fn loom_what_one_thread_leaves_another_stages() {
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
    fn a_thread_that_dies_leaves_the_rest_to_others() {
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
