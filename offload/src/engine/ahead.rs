//! Waking ahead of need: pages are staged by an I/O thread, while whoever asked goes on.

use std::io;
use std::sync::Arc;

use dormouse_device::Device;

use super::Engine;
use crate::desk::{Moving, Priority};
use crate::error::OffloadError;
use crate::ids::RegionId;
use crate::nvme::Request;
use crate::residency::{Action, Actions, Step};

impl<D: Device> Engine<D> {
    /// As [`Engine::wake`], for those needed later: when it returns room is theirs as it is there, and
    /// an I/O thread maps their pages, in this order, and starts their copies.
    pub(crate) fn wake_ahead(&self, ids: &[RegionId]) {
        let mut begun = Vec::new();
        for &id in ids {
            let Some(actions) = self.begin_wake(id) else { continue };
            if actions == [Action::Start(Step::Stage)] && self.reserve(id).is_ok() {
                begun.push((id, actions));
            } else {
                // Where there was no room it finds none, and fails as any wake does.
                self.carry_on(id, actions);
            }
        }
        if !begun.is_empty() {
            self.stage_aside(begun);
        }
        self.pump();
    }

    fn stage_aside(&self, begun: Vec<(RegionId, Actions)>) {
        let Some(engine) = self.me.upgrade() else {
            return begun.into_iter().for_each(|(id, actions)| self.carry_on(id, actions));
        };
        // Ahead of the reads that it leads to: it is what the next of them wait for.
        if let Err(job) = self.pool.submit(Priority::Read, Box::new(Staging { engine, begun })) {
            job.finish(); // shut down meanwhile
        }
    }

    /// Room for the pages of a region that wakes.
    pub(super) fn reserve(&self, id: RegionId) -> Result<(), OffloadError> {
        let bytes = self.body(id, |b| Some(b.away_bytes())).ok_or_else(|| self.stale(id))?;
        self.allocator.reserve_awake(bytes)?;
        self.table.with(id, |e| e.body.is_reserved = true);
        Ok(())
    }
}

/// Wakes that have begun, whose carrier an I/O thread becomes: a transfer of nothing.
struct Staging<D: Device> {
    engine: Arc<Engine<D>>,
    begun: Vec<(RegionId, Actions)>,
}

impl<D: Device> Moving for Staging<D> {
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
        for (id, actions) in self.begun {
            self.engine.carry_on(id, actions);
        }
        self.engine.pump();
    }
}
