//! The transition function.

use super::state::{
    CopyState, PageState, PendingRequest, Region, RegionState, RegionStep, RegionWait, SleepGoal,
};

/// A request or a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// Join the admission queue with a sleep.
    AwaitAdmission(SleepGoal),
    /// Admit a sleep. Every place that the goal needs has been granted: a host copy for `Host`, an
    /// extent for `Nvme`, both for `Nvme` if the region is not direct. The sleep waits for the
    /// events of `ticket`, if any, then for the in-flight window.
    Admit {
        /// Where the sleep ends.
        goal: SleepGoal,
        /// Identifies the events to wait for.
        ticket: Option<u64>,
    },
    /// The events of this ticket completed.
    EventsOver(u64),
    /// Stop waiting and release the places of an admitted sleep.
    Withdraw,
    /// Begin the sleep that waits for the in-flight window.
    Sleep,
    /// Move from host memory to the file; an extent has been granted.
    Spill,
    /// Join the promotion queue. Not for a direct region, which wakes from the file itself.
    AwaitPromotion,
    /// Move from the file to host memory ahead of a wake; a host copy has been granted.
    Promote,
    /// Wake; a waiting sleep is withdrawn.
    Wake,
    /// Drop: the owner freed the region.
    Drop,
    /// Return an awake region to its owner. The caller takes over the places of a waiting sleep.
    Release,
    /// The step in flight completed.
    Done(StepOutcome),
}

/// How the step in flight ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StepOutcome {
    /// Completed.
    Ok,
    /// Failed; everything is as before it started.
    Failed,
    /// Stopped early by [`Action::Cancel`] (write and read only).
    Cancelled,
    /// Seal only: the pages were written to, the copy is stale, the span is gone.
    Written,
}

/// An action to execute. All but the last of a list are over at once, in order, and cannot fail;
/// only the last may be `Start`, whose completion comes back as [`Input::Done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Start this step; its completion is awaited.
    Start(RegionStep),
    /// Stop the write or read in flight at its next chunk.
    Cancel,
    /// Make frozen pages writable again.
    Thaw,
    /// Release staged pages and the budget reserved for them.
    Discard,
    /// Tell the device that a sleeping range is no longer needed.
    Forget,
    /// Release the extent.
    ReleaseExtent,
    /// Release the host copy.
    ReleaseHost,
    /// The region is awake.
    Awake,
    /// A wake failed; the bytes are where they were.
    WakeFailed,
    /// A sleep was cancelled or failed; the region is awake.
    SleepFailed,
    /// The region is gone: the allocator may reuse its addresses.
    Finish,
}

/// Actions in order.
pub type Actions = Vec<Action>;

/// An input that does not apply to the region's state. The region is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{input:?} does not apply to a region that is {state:?} with {in_flight:?} in flight")]
pub struct RefusedInput {
    /// The refused input.
    pub input: Input,
    /// The region's state.
    pub state: RegionState,
    /// Its step in flight.
    pub in_flight: Option<RegionStep>,
}

/// Returns the region after one input, and the actions to execute.
///
/// # Errors
/// [`RefusedInput`] if the input does not apply.
pub fn step(region: &Region, input: Input) -> Result<(Region, Actions), RefusedInput> {
    let mut next = Transition { region: *region, actions: Actions::new() };
    let accepted = match input {
        Input::AwaitAdmission(goal) => next.await_admission(goal),
        Input::Admit { goal, ticket } => next.admit(goal, ticket),
        Input::EventsOver(ticket) => next.events_over(ticket),
        Input::Withdraw => next.withdraw(),
        Input::Sleep => next.sleep(),
        Input::Spill => next.spill(),
        Input::AwaitPromotion => next.await_promotion(),
        Input::Promote => next.promote(),
        Input::Wake => next.wake(),
        Input::Drop => next.drop_region(),
        Input::Release => next.release(),
        Input::Done(outcome) => next.done(outcome),
    };
    if accepted {
        Ok((next.region, next.actions))
    } else {
        Err(RefusedInput { input, state: region.state, in_flight: region.in_flight })
    }
}

struct Transition {
    region: Region,
    actions: Actions,
}

impl Transition {
    fn act(&mut self, action: Action) {
        self.actions.push(action);
    }

    fn start(&mut self, step: RegionStep) {
        self.region.in_flight = Some(step);
        self.act(Action::Start(step));
    }

    fn await_admission(&mut self, goal: SleepGoal) -> bool {
        let r = &mut self.region;
        if r.state != RegionState::Awake || r.wait != RegionWait::None {
            return false;
        }
        r.wait = RegionWait::Admission(goal);
        true
    }

    fn admit(&mut self, goal: SleepGoal, ticket: Option<u64>) -> bool {
        let r = &mut self.region;
        if r.state != RegionState::Awake || r.wait.is_admitted() {
            return false;
        }
        r.wait = match ticket {
            Some(ticket) => RegionWait::Events { goal, ticket },
            None => RegionWait::Window(goal),
        };
        if goal == SleepGoal::Host || (goal == SleepGoal::Nvme && !r.direct) {
            r.host = CopyState::Granted;
        }
        if goal == SleepGoal::Nvme {
            r.extent = CopyState::Granted;
        }
        true
    }

    fn events_over(&mut self, over: u64) -> bool {
        match self.region.wait {
            RegionWait::Events { goal, ticket } if ticket == over => {
                self.region.wait = RegionWait::Window(goal);
                true
            }
            _ => false,
        }
    }

    fn withdraw(&mut self) -> bool {
        let wait = std::mem::take(&mut self.region.wait);
        if wait.is_admitted() {
            self.release_host();
            self.release_extent();
        }
        wait != RegionWait::None
    }

    fn sleep(&mut self) -> bool {
        let RegionWait::Window(goal) = self.region.wait else { return false };
        self.region.wait = RegionWait::None;
        self.region.goal = goal;
        self.region.state = RegionState::FallingAsleep;
        self.start(RegionStep::Freeze);
        true
    }

    fn spill(&mut self) -> bool {
        if self.region.state != RegionState::Host {
            return false;
        }
        self.region.extent = CopyState::Granted;
        self.region.state = RegionState::Spilling;
        self.start(RegionStep::Write);
        true
    }

    fn await_promotion(&mut self) -> bool {
        let r = &mut self.region;
        if r.state != RegionState::Nvme || r.direct || r.wait != RegionWait::None {
            return false;
        }
        r.wait = RegionWait::Promotion;
        true
    }

    fn promote(&mut self) -> bool {
        if self.region.wait != RegionWait::Promotion {
            return false;
        }
        self.region.wait = RegionWait::None;
        self.region.host = CopyState::Granted;
        self.region.state = RegionState::Promoting;
        self.start(RegionStep::Read);
        true
    }

    fn wake(&mut self) -> bool {
        self.withdraw();
        match self.region.state {
            _ if self.region.pending == PendingRequest::Drop => {}
            RegionState::Host | RegionState::Nvme | RegionState::Empty => self.begin_wake(),
            RegionState::FallingAsleep | RegionState::Spilling => {
                if self.region.pending != PendingRequest::Wake {
                    self.region.pending = PendingRequest::Wake;
                    self.cancel_transfer();
                }
            }
            // The read continues: the wake needs it.
            RegionState::Promoting => self.region.pending = PendingRequest::Wake,
            RegionState::Awake | RegionState::Loading | RegionState::Waking | RegionState::Gone => {
            }
        }
        true
    }

    fn drop_region(&mut self) -> bool {
        if self.region.state == RegionState::Gone || self.region.pending == PendingRequest::Drop {
            return false;
        }
        if self.region.in_flight.is_some() {
            self.region.pending = PendingRequest::Drop;
            self.cancel_transfer();
        } else {
            self.finish();
        }
        true
    }

    fn release(&mut self) -> bool {
        if self.region.state != RegionState::Awake {
            return false;
        }
        self.region = Region { state: RegionState::Gone, ..Region::awake(self.region.direct) };
        true
    }

    fn cancel_transfer(&mut self) {
        if matches!(self.region.in_flight, Some(RegionStep::Write | RegionStep::Read)) {
            self.act(Action::Cancel);
        }
    }

    fn done(&mut self, outcome: StepOutcome) -> bool {
        let Some(step) = self.region.in_flight else { return false };
        let fits = match outcome {
            StepOutcome::Ok | StepOutcome::Failed => true,
            StepOutcome::Cancelled => matches!(step, RegionStep::Write | RegionStep::Read),
            StepOutcome::Written => step == RegionStep::Seal,
        };
        if !fits {
            return false;
        }
        self.region.in_flight = None;
        let ok = outcome == StepOutcome::Ok;
        match step {
            RegionStep::Freeze => self.frozen(ok),
            RegionStep::CopyOut => self.copied_out(ok),
            RegionStep::Write => self.written(ok),
            RegionStep::Seal => self.sealed(outcome),
            RegionStep::Stage => self.staged(ok),
            RegionStep::Read => self.loaded(ok),
            RegionStep::CopyIn => self.copied_in(ok),
            RegionStep::Publish => self.published(ok),
        }
        true
    }

    fn frozen(&mut self, ok: bool) {
        if ok {
            self.region.pages = PageState::Frozen;
        }
        if !ok || self.region.pending != PendingRequest::None {
            return self.back_out();
        }
        match (self.region.goal, self.region.direct) {
            (SleepGoal::Empty, _) => self.start(RegionStep::Seal),
            (SleepGoal::Nvme, true) => self.start(RegionStep::Write),
            (SleepGoal::Host, _) | (SleepGoal::Nvme, false) => self.start(RegionStep::CopyOut),
        }
    }

    fn copied_out(&mut self, ok: bool) {
        if ok {
            self.region.host = CopyState::Valid;
        }
        if !ok || self.region.pending != PendingRequest::None {
            return self.back_out();
        }
        self.start(RegionStep::Seal);
    }

    fn written(&mut self, ok: bool) {
        if ok {
            self.region.extent = CopyState::Valid;
        }
        if self.region.state == RegionState::FallingAsleep {
            if !ok || self.region.pending != PendingRequest::None {
                return self.back_out();
            }
            return self.start(RegionStep::Seal);
        }
        // Spilling. The host copy is still valid: a pending wake is served from it.
        if ok && self.region.pending != PendingRequest::Wake {
            self.release_host();
            self.region.state = RegionState::Nvme;
        } else {
            self.release_extent();
            self.region.state = RegionState::Host;
        }
        self.rest();
    }

    fn sealed(&mut self, outcome: StepOutcome) {
        match outcome {
            StepOutcome::Ok => self.region.pages = PageState::Away,
            StepOutcome::Written => {
                self.region.pages = PageState::Mapped;
                return self.back_out();
            }
            StepOutcome::Failed | StepOutcome::Cancelled => return self.back_out(),
        }
        self.region.state = match (self.region.goal, self.region.direct) {
            (SleepGoal::Empty, _) => RegionState::Empty,
            (SleepGoal::Nvme, true) => RegionState::Nvme,
            (SleepGoal::Host, _) | (SleepGoal::Nvme, false) => RegionState::Host,
        };
        let spill = self.region.state == RegionState::Host && self.region.goal == SleepGoal::Nvme;
        if spill && self.region.pending == PendingRequest::None {
            self.region.state = RegionState::Spilling;
            return self.start(RegionStep::Write);
        }
        if spill {
            self.release_extent();
        }
        self.rest();
    }

    fn staged(&mut self, ok: bool) {
        if !ok {
            self.region.state = self.asleep_state();
            self.act(Action::WakeFailed);
            return self.rest();
        }
        self.region.pages = PageState::Staged;
        if self.region.pending == PendingRequest::Drop {
            return self.finish();
        }
        match (self.region.state, self.region.host) {
            (RegionState::Loading, _) => {
                if !self.region.direct {
                    self.region.host = CopyState::Granted;
                }
                self.start(RegionStep::Read);
            }
            (_, CopyState::Valid) => self.start(RegionStep::CopyIn),
            _ => self.start(RegionStep::Publish),
        }
    }

    fn loaded(&mut self, ok: bool) {
        if self.region.state == RegionState::Promoting {
            return self.promoted(ok);
        }
        if !ok {
            return self.wake_failed();
        }
        if self.region.pending == PendingRequest::Drop {
            return self.finish();
        }
        self.region.state = RegionState::Waking;
        if self.region.direct {
            self.start(RegionStep::Publish);
        } else {
            self.region.host = CopyState::Valid;
            self.start(RegionStep::CopyIn);
        }
    }

    fn promoted(&mut self, ok: bool) {
        if ok {
            self.region.host = CopyState::Valid;
            self.release_extent();
            self.region.state = RegionState::Host;
        } else {
            self.release_host();
            self.region.state = RegionState::Nvme;
        }
        self.rest();
    }

    fn copied_in(&mut self, ok: bool) {
        if !ok {
            return self.wake_failed();
        }
        if self.region.pending == PendingRequest::Drop {
            return self.finish();
        }
        self.start(RegionStep::Publish);
    }

    fn published(&mut self, ok: bool) {
        if !ok {
            return self.wake_failed();
        }
        self.region.pages = PageState::Mapped;
        if self.region.pending == PendingRequest::Drop {
            return self.finish();
        }
        self.release_host();
        self.release_extent();
        self.region.state = RegionState::Awake;
        self.act(Action::Awake);
    }

    /// Ends a sleep where it began: awake, nothing held; or drops the region if that is pending.
    fn back_out(&mut self) {
        if self.region.pending == PendingRequest::Drop {
            return self.finish();
        }
        self.thaw();
        self.release_host();
        self.release_extent();
        self.region.pending = PendingRequest::None;
        self.region.state = RegionState::Awake;
        self.act(Action::SleepFailed);
    }

    /// Ends a wake where it began. Releases a bounce copy if the extent has the bytes.
    fn wake_failed(&mut self) {
        self.act(Action::Discard);
        self.region.pages = PageState::Away;
        if self.region.extent == CopyState::Valid {
            self.release_host();
        }
        self.region.state = self.asleep_state();
        self.act(Action::WakeFailed);
        self.rest();
    }

    const fn asleep_state(&self) -> RegionState {
        match (self.region.host, self.region.extent) {
            (_, CopyState::Valid) => RegionState::Nvme,
            (CopyState::Valid, _) => RegionState::Host,
            _ => RegionState::Empty,
        }
    }

    /// Asleep with nothing in flight: serves the pending request.
    fn rest(&mut self) {
        match self.region.pending {
            PendingRequest::None => {}
            PendingRequest::Wake => {
                self.region.pending = PendingRequest::None;
                self.begin_wake();
            }
            PendingRequest::Drop => self.finish(),
        }
    }

    fn begin_wake(&mut self) {
        self.region.state = match self.region.state {
            RegionState::Nvme => RegionState::Loading,
            _ => RegionState::Waking,
        };
        self.start(RegionStep::Stage);
    }

    fn finish(&mut self) {
        match self.region.pages {
            PageState::Mapped => {}
            PageState::Frozen => self.thaw(),
            PageState::Away => self.act(Action::Forget),
            PageState::Staged => {
                self.act(Action::Discard);
                self.act(Action::Forget);
            }
        }
        self.release_host();
        self.release_extent();
        self.region.wait = RegionWait::None;
        self.region.pages = PageState::Mapped;
        self.region.pending = PendingRequest::None;
        self.region.state = RegionState::Gone;
        self.act(Action::Finish);
    }

    fn thaw(&mut self) {
        if self.region.pages == PageState::Frozen {
            self.region.pages = PageState::Mapped;
            self.act(Action::Thaw);
        }
    }

    fn release_host(&mut self) {
        if self.region.host != CopyState::None {
            self.region.host = CopyState::None;
            self.act(Action::ReleaseHost);
        }
    }

    fn release_extent(&mut self) {
        if self.region.extent != CopyState::None {
            self.region.extent = CopyState::None;
            self.act(Action::ReleaseExtent);
        }
    }
}
