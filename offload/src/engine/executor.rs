//! Executes the actions of the region state machine, except those on the pages of blocks.

use std::sync::Arc;

use dormouse_device::Device;
use dormouse_timeline::Lane;

use super::{Engine, RegionData};
use crate::error::OffloadError;
use crate::ids::RegionId;
use crate::table::{Executor, Launched};
use dormouse_residency::region::{Action, Actions, Input, RegionStep, StepOutcome};
use dormouse_storage::sync::lock;

impl<D: Device> Engine<D> {
    /// Executes `actions` and those that follow at once, then starts waiting sleeps.
    pub(super) fn drive(&self, id: RegionId, actions: Actions) {
        self.execute(id, actions);
        self.pump();
    }

    /// Feeds the completion of a step that was in flight, then starts waiting sleeps and loads.
    pub(super) fn complete(&self, id: RegionId, outcome: StepOutcome) {
        self.end_step(id, outcome);
        self.pump();
    }

    /// As [`Engine::complete`]; the caller serves the queues.
    pub(super) fn end_step(&self, id: RegionId, outcome: StepOutcome) {
        if let Some(actions) = self.table.feed(id, Input::Done(outcome)).actions() {
            if actions.contains(&Action::Start(RegionStep::Seal)) {
                // The bytes have left: the next copy goes on beside the calls that remove their pages.
                self.start_queued_sleep();
            }
            self.execute(id, actions);
        }
    }

    pub(super) fn execute(&self, id: RegionId, actions: Actions) {
        self.table.execute(id, actions, self);
    }
}

impl<D: Device> Executor for Engine<D> {
    /// Executes an action that is over when this returns and cannot fail.
    fn at_once(&self, id: RegionId, action: Action) {
        match action {
            Action::Start(_) | Action::Cancel => {}
            Action::Thaw => self.thaw(id),
            Action::Discard => self.discard(id),
            Action::Forget => self.forget(id),
            Action::ReleaseExtent => {
                if let Some(extent) = self.body(id, |b| b.extent.take()) {
                    self.release_shared_extent(extent);
                }
            }
            Action::ReleaseHost => {
                let taken = |b: &mut RegionData<D>| Some((b.host.take(), b.load_bytes.take()));
                match self.body(id, taken) {
                    Some((Some(buffer), load_bytes)) => {
                        self.give_after_arrival(id, buffer, load_bytes);
                    }
                    Some((None, load_bytes)) => self.end_load(load_bytes),
                    None => {}
                }
            }
            Action::Awake => lock(&self.counts).wakes += 1,
            Action::WakeFailed => {
                lock(&self.counts).wake_failures += 1;
                self.timeline.instant(Lane::Notice, self.names.wake_failed, id.key());
            }
            Action::SleepFailed => self.note_failed_sleep(id),
            Action::Finish => self.finish_after_arrival(id),
        }
    }

    /// Starts a step. Its resources stay in the region's data; only addresses are copied.
    fn launch(&self, id: RegionId, step: RegionStep) -> Launched {
        let result = match step {
            RegionStep::Freeze => self.freeze(id),
            RegionStep::Seal => return Launched::Over(self.seal(id)),
            RegionStep::Stage => self.stage(id),
            RegionStep::Publish => self.publish(id),
            RegionStep::CopyOut => return self.start_copy(id, true),
            RegionStep::CopyIn => return self.start_copy(id, false),
            RegionStep::Write => return self.start_write(id),
            RegionStep::Read => return self.start_read(id),
        };
        Launched::Over(match result {
            Ok(()) => StepOutcome::Ok,
            Err(e) => self.failed(id, e),
        })
    }
}

impl<D: Device> Engine<D> {
    fn note_failed_sleep(&self, id: RegionId) {
        let noted = self.body(id, |b| b.error.clone().map(|e| (e, b.account.clone())));
        match noted {
            Some((error, account)) => {
                let region = id.key();
                let failures = {
                    let mut counts = lock(&self.counts);
                    counts.sleep_failures += 1;
                    counts.sleep_failures
                };
                // A failing disk fails often: only the first failure is a warning.
                if failures == 1 {
                    tracing::warn!(target: "offload", region, %error, "sleep failed; the region stays awake");
                } else {
                    tracing::debug!(target: "offload", region, failures, %error, "sleep failed again");
                }
                self.timeline.instant(Lane::Notice, self.names.sleep_failed, id.key());
                if let Some(account) = account {
                    account.decline(&error.to_string());
                }
            }
            None => lock(&self.counts).sleeps_backed_out += 1,
        }
    }

    /// Keeps the reason of a failed step for waiters.
    pub(super) fn failed(&self, id: RegionId, error: OffloadError) -> StepOutcome {
        self.table.with(id, |e| e.data.error = Some(Arc::new(error)));
        StepOutcome::Failed
    }

    pub(super) fn stale(&self, id: RegionId) -> OffloadError {
        OffloadError::Stale { what: "region", id: id.to_string() }
    }

    /// Runs `f` on a region's data; `None` also if the region is gone.
    pub(super) fn body<T>(
        &self,
        id: RegionId,
        f: impl FnOnce(&mut RegionData<D>) -> Option<T>,
    ) -> Option<T> {
        self.table.with(id, |entry| f(&mut entry.data)).flatten()
    }

    /// Counts a device error that has no caller to report it to.
    pub(super) fn fault<E>(&self, result: Result<(), E>) {
        if result.is_err() {
            lock(&self.counts).device_faults += 1;
        }
    }
}
