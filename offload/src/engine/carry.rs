//! Carrying actions out: the only place that moves a region's belongings about.

use std::sync::Arc;

use dormouse_device::{Device, Fill, Sealed};
use dormouse_timeline::Lane;

use super::counters::bump;
use super::{Body, Engine};
use crate::error::OffloadError;
use crate::ids::RegionId;
use crate::residency::{Action, Actions, Input, Outcome, Step};
use crate::table::{Carrier, Launched};

impl<D: Device> Engine<D> {
    /// Carries `actions` out and everything that follows at once from them, then starts sleeps
    /// that have been waiting for their turn.
    pub(super) fn drive(&self, id: RegionId, actions: Actions) {
        self.carry_on(id, actions);
        self.pump();
    }

    /// The completion of a step that was in flight.
    pub(super) fn complete(&self, id: RegionId, outcome: Outcome) {
        if let Some(actions) = self.table.feed(id, Input::Done(outcome)).actions() {
            self.carry_on(id, actions);
        }
        self.pump();
    }

    pub(super) fn carry_on(&self, id: RegionId, actions: Actions) {
        self.table.carry(id, actions, self);
    }
}

impl<D: Device> Carrier for Engine<D> {
    /// Actions that are over when this returns, and cannot fail as far as the machine goes.
    fn at_once(&self, id: RegionId, action: Action) {
        match action {
            Action::Start(_) | Action::Cancel => {}
            Action::Thaw => {
                if let Some(span) = self.body(id, |b| b.span.take()) {
                    self.fault(self.device.thaw(span));
                }
            }
            Action::Discard => self.discard(id),
            Action::Forget => {
                if let Some(span) = self.body(id, |b| b.span.take()) {
                    self.fault(self.device.forget(span));
                }
            }
            Action::ReleaseExtent => {
                if let Some(extent) = self.body(id, |b| b.extent.take()) {
                    self.release_extent(extent);
                }
            }
            Action::ReleaseHost => {
                if let Some(buffer) = self.body(id, |b| b.host.take()) {
                    self.give_after_arrival(id, buffer);
                }
            }
            Action::Awake => bump(&self.counters.wakes, 1),
            Action::WakeFailed => {
                bump(&self.counters.wake_failures, 1);
                self.timeline.instant(Lane::Notice, self.names.wake_failed, id.key());
            }
            Action::SleepFailed => self.note_failed_sleep(id),
            Action::Finish => self.finish_after_arrival(id),
        }
    }

    /// Starts a step. Its resources stay in the body; only copies of addresses leave.
    fn launch(&self, id: RegionId, step: Step) -> Launched {
        let result = match step {
            Step::Freeze => self.freeze(id),
            Step::Seal => return Launched::Over(self.seal(id)),
            Step::Stage => self.stage(id),
            Step::Publish => self.publish(id),
            Step::CopyOut => return self.start_copy(id, true),
            Step::CopyIn => return self.start_copy(id, false),
            Step::Write => return self.start_write(id),
            Step::Read => return self.start_read(id),
        };
        Launched::Over(match result {
            Ok(()) => Outcome::Ok,
            Err(e) => self.failed(id, e),
        })
    }
}

impl<D: Device> Engine<D> {
    pub(super) fn finish(&self, id: RegionId) {
        // The slot goes last: who sees no region any more may count on its memory being back.
        if let Some(block) = self.body(id, |b| b.block) {
            // The block is doomed: it is Drop that brought us here. An error would mean that the
            // allocator lost it, which its own walker reports.
            if self.allocator.finish_free(block).is_err() {
                bump(&self.counters.device_faults, 1);
            }
        }
        self.table.remove(id);
    }

    fn discard(&self, id: RegionId) {
        let is_settled = self.settle_arrival(id).is_ok();
        let staged = self.body(id, |b| b.staged.take());
        if !is_settled {
            // Somebody may be filling them still: these pages and their room are nobody's for good.
            bump(&self.counters.device_faults, 1);
            return std::mem::forget(staged);
        }
        if let Some(staged) = staged {
            self.device.discard(staged);
        }
        self.unreserve(id);
    }

    pub(super) fn unreserve(&self, id: RegionId) {
        let bytes = self.body(id, |b| std::mem::take(&mut b.is_reserved).then_some(b.bytes()));
        if let Some(bytes) = bytes
            && self.allocator.unreserve_awake(bytes).is_err()
        {
            bump(&self.counters.device_faults, 1);
        }
    }

    fn note_failed_sleep(&self, id: RegionId) {
        let noted = self.body(id, |b| b.error.clone().map(|e| (e, b.owner.clone())));
        match noted {
            Some((error, owner)) => {
                bump(&self.counters.sleep_failures, 1);
                self.timeline.instant(Lane::Notice, self.names.sleep_failed, id.key());
                if let Some(owner) = owner {
                    owner.decline(&error.to_string());
                }
            }
            None => bump(&self.counters.sleeps_backed_out, 1),
        }
    }

    fn freeze(&self, id: RegionId) -> Result<(), OffloadError> {
        let (range, label) =
            self.table.with(id, |e| (e.body.range, e.body.label)).unwrap_or_default();
        let span = self.device.freeze(range, label)?;
        self.table.with(id, |e| e.body.span = Some(span));
        Ok(())
    }

    fn seal(&self, id: RegionId) -> Outcome {
        let Some((span, block)) = self.body(id, |b| Some((b.span?, b.block?))) else {
            return Outcome::Failed;
        };
        // Where bytes are dropped, no copy out has waited for it.
        if let Err(e) = self.settle_arrival(id) {
            return self.failed(id, e.into());
        }
        match self.device.seal(span) {
            Ok(Sealed::Asleep) => {
                if self.allocator.set_asleep(block).is_err() {
                    bump(&self.counters.device_faults, 1);
                }
                bump(&self.counters.sleeps, 1);
                Outcome::Ok
            }
            Ok(Sealed::Written) => {
                self.table.with(id, |e| e.body.span = None);
                bump(&self.counters.written_meanwhile, 1);
                Outcome::Written
            }
            Err(e) => self.failed(id, e.into()),
        }
    }

    fn stage(&self, id: RegionId) -> Result<(), OffloadError> {
        let asleep = self.body(id, |b| {
            // Kept nowhere: its bytes were dropped, and it wakes as new memory would.
            let is_empty = b.extent.is_none() && b.host.is_none();
            Some((b.span?, b.is_reserved, if is_empty { Fill::Zero } else { Fill::Any }))
        });
        let Some((span, is_reserved, fill)) = asleep else { return Err(self.stale(id)) };
        if !is_reserved {
            self.reserve(id)?;
        }
        match self.device.stage(span, fill) {
            Ok(staged) => {
                self.table.with(id, |e| e.body.staged = Some(staged));
                Ok(())
            }
            Err(e) => {
                self.unreserve(id);
                Err(e.into())
            }
        }
    }

    fn publish(&self, id: RegionId) -> Result<(), OffloadError> {
        let Some((staged, block)) = self.body(id, |b| Some((b.staged.take()?, b.block?))) else {
            return Err(self.stale(id));
        };
        match self.device.publish(staged) {
            Ok(()) => {
                self.table.with(id, |e| {
                    e.body.span = None;
                    e.body.is_reserved = false;
                });
                if self.allocator.set_awake(block).is_err() {
                    bump(&self.counters.device_faults, 1);
                }
                Ok(())
            }
            Err((e, staged)) => {
                self.table.with(id, |entry| entry.body.staged = Some(staged));
                Err(e.into())
            }
        }
    }

    /// Keeps why a step failed, for whoever waits or asks.
    pub(super) fn failed(&self, id: RegionId, error: OffloadError) -> Outcome {
        self.table.with(id, |e| e.body.error = Some(Arc::new(error)));
        Outcome::Failed
    }

    pub(super) fn stale(&self, id: RegionId) -> OffloadError {
        OffloadError::Stale { what: "region", id: id.to_string() }
    }

    /// Something about one region's belongings; `None` also where it is gone.
    pub(super) fn body<T>(
        &self,
        id: RegionId,
        f: impl FnOnce(&mut Body<D>) -> Option<T>,
    ) -> Option<T> {
        self.table.with(id, |entry| f(&mut entry.body)).flatten()
    }

    /// A device refusal that leaves nothing for us to do: counted.
    fn fault(&self, result: Result<(), dormouse_device::DeviceError>) {
        if result.is_err() {
            bump(&self.counters.device_faults, 1);
        }
    }
}
