//! The transition function.

use super::region::{Goal, Held, Pages, Region, State, Step, Wish};

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Input {
    /// Fall asleep. Every place the goal needs has been granted before: a host copy for `Host`, an
    /// extent for `Nvme`, both for `Nvme` where the region is not direct.
    Sleep(Goal),
    /// Move on from host memory to the file; an extent has been granted.
    Spill,
    /// Move from the file to host memory, ahead of a wake; a host copy has been granted. Never for
    /// a direct region, which wakes from the file itself.
    Promote,
    /// Be awake.
    Wake,
    /// Be gone: the owner freed it.
    Drop,
    /// The action in flight completed.
    Done(Outcome),
}

/// How the action in flight ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// As asked.
    Ok,
    /// Not at all; everything is as before it started.
    Failed,
    /// Stopped early, as [`Action::Cancel`] asked (write and read only).
    Cancelled,
    /// Seal only: the pages were written to, the copy is stale, the span is gone.
    Written,
}

/// What to do. In a list, all but the last are carried out at once, in order, and cannot fail;
/// only the last may be `Start`, whose completion comes back as [`Input::Done`].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Action {
    /// Start this step; its completion is awaited.
    Start(Step),
    /// Let the write or read in flight stop at its next chunk.
    Cancel,
    /// Make frozen pages writable again.
    Thaw,
    /// Give staged pages up, and the budget reserved for them.
    Discard,
    /// Tell the device that an asleep range is not wanted any more.
    Forget,
    /// Give the extent back.
    ReleaseExtent,
    /// Give the host copy back.
    ReleaseHost,
    /// The region is awake: anybody waiting may go on.
    Awake,
    /// A wake failed; the bytes are where they were.
    WakeFailed,
    /// A sleep was backed out of; the region is awake.
    SleepFailed,
    /// The region is gone: the allocator may reuse its addresses.
    Finish,
}

/// Actions in order.
pub type Actions = Vec<Action>;

/// An input the region cannot take now. The region is unchanged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, thiserror::Error)]
#[error("{input:?} does not apply to a region that is {state:?} with {in_flight:?} in flight")]
pub struct Refusal {
    /// What was given.
    pub input: Input,
    /// The region's state.
    pub state: State,
    /// Its action in flight.
    pub in_flight: Option<Step>,
}

/// One transition.
///
/// # Errors
/// [`Refusal`] where the input does not apply; nothing changes then.
pub fn step(region: &Region, input: Input) -> Result<(Region, Actions), Refusal> {
    let mut next = Transition { region: *region, actions: Actions::new() };
    let accepted = match input {
        Input::Sleep(goal) => next.sleep(goal),
        Input::Spill => next.spill(),
        Input::Promote => next.promote(),
        Input::Wake => next.wake(),
        Input::Drop => next.drop_region(),
        Input::Done(outcome) => next.done(outcome),
    };
    if accepted {
        Ok((next.region, next.actions))
    } else {
        Err(Refusal { input, state: region.state, in_flight: region.in_flight })
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

    fn start(&mut self, step: Step) {
        self.region.in_flight = Some(step);
        self.act(Action::Start(step));
    }

    fn sleep(&mut self, goal: Goal) -> bool {
        let r = &mut self.region;
        if r.state != State::Awake {
            return false;
        }
        r.goal = goal;
        r.state = State::FallingAsleep;
        if goal == Goal::Host || (goal == Goal::Nvme && !r.direct) {
            r.host = Held::Granted;
        }
        if goal == Goal::Nvme {
            r.extent = Held::Granted;
        }
        self.start(Step::Freeze);
        true
    }

    fn spill(&mut self) -> bool {
        if self.region.state != State::Host {
            return false;
        }
        self.region.extent = Held::Granted;
        self.region.state = State::Spilling;
        self.start(Step::Write);
        true
    }

    fn promote(&mut self) -> bool {
        if self.region.state != State::Nvme || self.region.direct {
            return false;
        }
        self.region.host = Held::Granted;
        self.region.state = State::Promoting;
        self.start(Step::Read);
        true
    }

    fn wake(&mut self) -> bool {
        match self.region.state {
            _ if self.region.wish == Wish::Drop => {}
            State::Host | State::Nvme | State::Empty => self.begin_wake(),
            State::FallingAsleep | State::Spilling => {
                if self.region.wish != Wish::Wake {
                    self.region.wish = Wish::Wake;
                    self.cancel_transfer();
                }
            }
            // What is being read is wanted all the same.
            State::Promoting => self.region.wish = Wish::Wake,
            State::Awake | State::Loading | State::Waking | State::Gone => {}
        }
        true
    }

    fn drop_region(&mut self) -> bool {
        if self.region.state == State::Gone || self.region.wish == Wish::Drop {
            return false;
        }
        if self.region.in_flight.is_some() {
            self.region.wish = Wish::Drop;
            self.cancel_transfer();
        } else {
            self.finish();
        }
        true
    }

    fn cancel_transfer(&mut self) {
        if matches!(self.region.in_flight, Some(Step::Write | Step::Read)) {
            self.act(Action::Cancel);
        }
    }

    fn done(&mut self, outcome: Outcome) -> bool {
        let Some(step) = self.region.in_flight else { return false };
        let fits = match outcome {
            Outcome::Ok | Outcome::Failed => true,
            Outcome::Cancelled => matches!(step, Step::Write | Step::Read),
            Outcome::Written => step == Step::Seal,
        };
        if !fits {
            return false;
        }
        self.region.in_flight = None;
        let ok = outcome == Outcome::Ok;
        match step {
            Step::Freeze => self.frozen(ok),
            Step::CopyOut => self.copied_out(ok),
            Step::Write => self.written(ok),
            Step::Seal => self.sealed(outcome),
            Step::Stage => self.staged(ok),
            Step::Read => self.loaded(ok),
            Step::CopyIn => self.copied_in(ok),
            Step::Publish => self.published(ok),
        }
        true
    }

    fn frozen(&mut self, ok: bool) {
        if ok {
            self.region.pages = Pages::Frozen;
        }
        if !ok || self.region.wish != Wish::None {
            return self.back_out();
        }
        match (self.region.goal, self.region.direct) {
            (Goal::Empty, _) => self.start(Step::Seal),
            (Goal::Nvme, true) => self.start(Step::Write),
            (Goal::Host, _) | (Goal::Nvme, false) => self.start(Step::CopyOut),
        }
    }

    fn copied_out(&mut self, ok: bool) {
        if ok {
            self.region.host = Held::Valid;
        }
        if !ok || self.region.wish != Wish::None {
            return self.back_out();
        }
        self.start(Step::Seal);
    }

    fn written(&mut self, ok: bool) {
        if ok {
            self.region.extent = Held::Valid;
        }
        if self.region.state == State::FallingAsleep {
            if !ok || self.region.wish != Wish::None {
                return self.back_out();
            }
            return self.start(Step::Seal);
        }
        // Spilling. The host copy is still whole: a wish to wake is served from it.
        if ok && self.region.wish != Wish::Wake {
            self.release_host();
            self.region.state = State::Nvme;
        } else {
            self.release_extent();
            self.region.state = State::Host;
        }
        self.rest();
    }

    fn sealed(&mut self, outcome: Outcome) {
        match outcome {
            Outcome::Ok => self.region.pages = Pages::Away,
            Outcome::Written => {
                self.region.pages = Pages::Mapped;
                return self.back_out();
            }
            Outcome::Failed | Outcome::Cancelled => return self.back_out(),
        }
        self.region.state = match (self.region.goal, self.region.direct) {
            (Goal::Empty, _) => State::Empty,
            (Goal::Nvme, true) => State::Nvme,
            (Goal::Host, _) | (Goal::Nvme, false) => State::Host,
        };
        let spill = self.region.state == State::Host && self.region.goal == Goal::Nvme;
        if spill && self.region.wish == Wish::None {
            self.region.state = State::Spilling;
            return self.start(Step::Write);
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
        self.region.pages = Pages::Staged;
        if self.region.wish == Wish::Drop {
            return self.finish();
        }
        match (self.region.state, self.region.host) {
            (State::Loading, _) => {
                if !self.region.direct {
                    self.region.host = Held::Granted;
                }
                self.start(Step::Read);
            }
            (_, Held::Valid) => self.start(Step::CopyIn),
            _ => self.start(Step::Publish),
        }
    }

    fn loaded(&mut self, ok: bool) {
        if self.region.state == State::Promoting {
            return self.promoted(ok);
        }
        if !ok {
            return self.wake_failed();
        }
        if self.region.wish == Wish::Drop {
            return self.finish();
        }
        self.region.state = State::Waking;
        if self.region.direct {
            self.start(Step::Publish);
        } else {
            self.region.host = Held::Valid;
            self.start(Step::CopyIn);
        }
    }

    fn promoted(&mut self, ok: bool) {
        if ok {
            self.region.host = Held::Valid;
            self.release_extent();
            self.region.state = State::Host;
        } else {
            self.release_host();
            self.region.state = State::Nvme;
        }
        self.rest();
    }

    fn copied_in(&mut self, ok: bool) {
        if !ok {
            return self.wake_failed();
        }
        if self.region.wish == Wish::Drop {
            return self.finish();
        }
        self.start(Step::Publish);
    }

    fn published(&mut self, ok: bool) {
        if !ok {
            return self.wake_failed();
        }
        self.region.pages = Pages::Mapped;
        if self.region.wish == Wish::Drop {
            return self.finish();
        }
        self.release_host();
        self.release_extent();
        self.region.state = State::Awake;
        self.act(Action::Awake);
    }

    /// A sleep ends where it began: awake, nothing held, unless a drop was wished for.
    fn back_out(&mut self) {
        if self.region.wish == Wish::Drop {
            return self.finish();
        }
        self.thaw();
        self.release_host();
        self.release_extent();
        self.region.wish = Wish::None;
        self.region.state = State::Awake;
        self.act(Action::SleepFailed);
    }

    /// A wake ends where it began. A bounce copy is given back where the extent has the bytes.
    fn wake_failed(&mut self) {
        self.act(Action::Discard);
        self.region.pages = Pages::Away;
        if self.region.extent == Held::Valid {
            self.release_host();
        }
        self.region.state = self.asleep_state();
        self.act(Action::WakeFailed);
        self.rest();
    }

    const fn asleep_state(&self) -> State {
        match (self.region.host, self.region.extent) {
            (_, Held::Valid) => State::Nvme,
            (Held::Valid, _) => State::Host,
            _ => State::Empty,
        }
    }

    /// Asleep with nothing in flight: now do what was wished for meanwhile.
    fn rest(&mut self) {
        match self.region.wish {
            Wish::None => {}
            Wish::Wake => {
                self.region.wish = Wish::None;
                self.begin_wake();
            }
            Wish::Drop => self.finish(),
        }
    }

    fn begin_wake(&mut self) {
        self.region.state = match self.region.state {
            State::Nvme => State::Loading,
            _ => State::Waking,
        };
        self.start(Step::Stage);
    }

    fn finish(&mut self) {
        match self.region.pages {
            Pages::Mapped => {}
            Pages::Frozen => self.thaw(),
            Pages::Away => self.act(Action::Forget),
            Pages::Staged => {
                self.act(Action::Discard);
                self.act(Action::Forget);
            }
        }
        self.release_host();
        self.release_extent();
        self.region.pages = Pages::Mapped;
        self.region.wish = Wish::None;
        self.region.state = State::Gone;
        self.act(Action::Finish);
    }

    fn thaw(&mut self) {
        if self.region.pages == Pages::Frozen {
            self.region.pages = Pages::Mapped;
            self.act(Action::Thaw);
        }
    }

    fn release_host(&mut self) {
        if self.region.host != Held::None {
            self.region.host = Held::None;
            self.act(Action::ReleaseHost);
        }
    }

    fn release_extent(&mut self) {
        if self.region.extent != Held::None {
            self.region.extent = Held::None;
            self.act(Action::ReleaseExtent);
        }
    }
}
