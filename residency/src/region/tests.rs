//! The state machine against a naive model of memory, over every reachable state and in long random
//! runs. The model tracks facts (pages present, copy valid) and fails on any action that contradicts
//! them.

use std::collections::{HashMap, HashSet, VecDeque};

use super::*;

/// Facts about the bytes, from naive execution of the actions.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct World {
    pages: PageState,
    /// Whether the region's own pages hold its bytes.
    pages_hold: bool,
    staged_filled: bool,
    host: Option<bool>,
    extent: Option<bool>,
    backup: bool,
    finished: bool,
    in_flight: Option<RegionStep>,
}

impl World {
    fn new() -> Self {
        Self {
            pages: PageState::Mapped,
            pages_hold: true,
            staged_filled: false,
            host: None,
            extent: None,
            backup: true,
            finished: false,
            in_flight: None,
        }
    }

    fn holds_bytes(&self) -> bool {
        self.pages_hold || self.host == Some(true) || self.extent == Some(true)
    }

    /// The engine grants places before it feeds the input; a released region takes them along.
    fn grant(&mut self, region: &Region, input: Input) {
        let (host, extent) = match input {
            Input::Admit { goal: SleepGoal::Host, .. } => (true, false),
            Input::Admit { goal: SleepGoal::Nvme, .. } => (!region.direct, true),
            Input::Spill => (false, true),
            Input::Promote => (true, false),
            _ => (false, false),
        };
        if host {
            assert!(self.host.replace(false).is_none(), "granted twice");
        }
        if extent {
            assert!(self.extent.replace(false).is_none(), "granted twice");
        }
        if input == Input::Sleep {
            self.backup = region.wait != RegionWait::Window(SleepGoal::Empty);
        }
        if input == Input::Release {
            assert_eq!(self.pages, PageState::Mapped);
            (self.host, self.extent, self.finished) = (None, None, true);
        }
    }

    fn act(&mut self, action: Action, direct: bool) {
        assert!(!self.finished, "{action:?} after Finish");
        match action {
            Action::Start(step) => {
                assert!(self.in_flight.is_none(), "R1: two in flight");
                self.may_start(step, direct);
                self.in_flight = Some(step);
            }
            Action::Cancel => {
                assert!(matches!(self.in_flight, Some(RegionStep::Write | RegionStep::Read)))
            }
            Action::Thaw => {
                assert_eq!(self.pages, PageState::Frozen);
                self.pages = PageState::Mapped;
            }
            Action::Discard => {
                assert_eq!(self.pages, PageState::Staged);
                self.pages = PageState::Away;
                self.staged_filled = false;
            }
            Action::Forget => {
                assert_eq!(self.pages, PageState::Away);
                self.pages = PageState::Mapped; // the allocator's now: nothing of ours is left there
            }
            Action::ReleaseExtent => assert!(self.extent.take().is_some(), "R4: released twice"),
            Action::ReleaseHost => assert!(self.host.take().is_some(), "R4: released twice"),
            Action::Awake | Action::SleepFailed => assert_eq!(self.pages, PageState::Mapped),
            Action::WakeFailed => assert_eq!(self.pages, PageState::Away),
            Action::Finish => {
                assert_eq!(self.pages, PageState::Mapped);
                assert_eq!((self.host, self.extent), (None, None), "R4: leaked");
                self.finished = true;
            }
        }
    }

    fn may_start(&mut self, step: RegionStep, direct: bool) {
        match step {
            RegionStep::Freeze => assert_eq!(self.pages, PageState::Mapped),
            RegionStep::CopyOut => assert!(self.pages == PageState::Frozen && self.host.is_some()),
            RegionStep::Write => {
                assert!(self.extent.is_some());
                let from_pages = direct && self.pages == PageState::Frozen;
                assert!(from_pages || self.host == Some(true));
            }
            RegionStep::Seal => {
                assert_eq!(self.pages, PageState::Frozen);
                let copied = self.host == Some(true) || self.extent == Some(true);
                assert!(copied || !self.backup, "R2: sealing without a copy");
            }
            RegionStep::Stage => assert_eq!(self.pages, PageState::Away),
            RegionStep::Read => {
                assert_eq!(self.extent, Some(true));
                if self.pages == PageState::Away {
                    assert_eq!(self.host, Some(false), "promoted to a copy granted before");
                } else {
                    assert_eq!(self.pages, PageState::Staged);
                    assert!(direct || self.host.replace(false).is_none(), "granted twice");
                }
            }
            RegionStep::CopyIn => {
                assert_eq!((self.pages, self.host), (PageState::Staged, Some(true)))
            }
            RegionStep::Publish => {
                assert_eq!(self.pages, PageState::Staged);
                assert!(self.staged_filled || !self.backup, "R3: published unfilled pages");
            }
        }
    }

    fn complete(&mut self, outcome: StepOutcome, direct: bool) {
        let step = self.in_flight.take().expect("a completion without an action");
        match (step, outcome) {
            (RegionStep::Seal, StepOutcome::Written) => self.pages = PageState::Mapped,
            (_, StepOutcome::Failed | StepOutcome::Cancelled | StepOutcome::Written) => {}
            (RegionStep::Freeze, _) => self.pages = PageState::Frozen,
            (RegionStep::CopyOut, _) => self.host = Some(true),
            (RegionStep::Write, _) => self.extent = Some(true),
            (RegionStep::Seal, _) => {
                self.pages = PageState::Away;
                self.pages_hold = false;
            }
            (RegionStep::Stage, _) => self.pages = PageState::Staged,
            (RegionStep::Read, _) if direct => self.staged_filled = true,
            (RegionStep::Read, _) => self.host = Some(true),
            (RegionStep::CopyIn, _) => self.staged_filled = true,
            (RegionStep::Publish, _) => {
                self.pages = PageState::Mapped;
                self.pages_hold = true;
                self.backup = true;
                self.staged_filled = false;
            }
        }
    }

    /// Facts the region claims must be facts of the world.
    fn agrees(&self, region: &Region) {
        let held = |h: CopyState| match h {
            CopyState::None => None,
            CopyState::Granted => Some(false),
            CopyState::Valid => Some(true),
        };
        assert_eq!(region.in_flight, self.in_flight);
        assert_eq!(held(region.host), self.host, "{region:?}");
        assert_eq!(held(region.extent), self.extent, "{region:?}");
        assert_eq!(region.pages, self.pages);
        assert_eq!(region.state == RegionState::Gone, self.finished);
        assert_eq!(rests(region.state), region.is_settled(), "{region:?}");
        self.waits_where_it_may(region);
        if !self.finished {
            assert!(self.holds_bytes() || !self.backup, "R2: bytes lost in {region:?}");
            if region.state == RegionState::Awake {
                assert_eq!(self.pages, PageState::Mapped);
            }
        }
    }

    /// R5.
    fn waits_where_it_may(&self, region: &Region) {
        let state = match region.wait {
            RegionWait::None => region.state,
            RegionWait::Promotion => RegionState::Nvme,
            _ => RegionState::Awake,
        };
        assert_eq!(region.state, state, "R5: {region:?}");
        assert!(region.is_settled() || region.wait == RegionWait::None, "R5: {region:?}");
        let goal = match region.wait {
            RegionWait::Events { goal, .. } | RegionWait::Window(goal) => goal,
            RegionWait::Promotion => return assert!(!region.direct, "R5: {region:?}"),
            RegionWait::None | RegionWait::Admission(_) => SleepGoal::Empty,
        };
        if region.state == RegionState::Awake {
            let host = goal == SleepGoal::Host || (goal == SleepGoal::Nvme && !region.direct);
            let held = (host.then_some(false), (goal == SleepGoal::Nvme).then_some(false));
            assert_eq!((self.host, self.extent), held, "R5: {region:?}");
        }
    }
}

/// Whether no step is in flight in this state.
const fn rests(state: RegionState) -> bool {
    use RegionState::{Awake, Empty, Gone, Host, Nvme};
    matches!(state, Awake | Host | Nvme | Empty | Gone)
}

const INPUTS: [Input; 24] = [
    Input::AwaitAdmission(SleepGoal::Empty),
    Input::AwaitAdmission(SleepGoal::Host),
    Input::AwaitAdmission(SleepGoal::Nvme),
    Input::Admit { goal: SleepGoal::Empty, ticket: None },
    Input::Admit { goal: SleepGoal::Host, ticket: None },
    Input::Admit { goal: SleepGoal::Nvme, ticket: None },
    Input::Admit { goal: SleepGoal::Empty, ticket: Some(1) },
    Input::Admit { goal: SleepGoal::Host, ticket: Some(1) },
    Input::Admit { goal: SleepGoal::Nvme, ticket: Some(1) },
    Input::Admit { goal: SleepGoal::Host, ticket: Some(2) },
    Input::EventsOver(1),
    Input::EventsOver(2),
    Input::Withdraw,
    Input::Sleep,
    Input::Spill,
    Input::AwaitPromotion,
    Input::Promote,
    Input::Wake,
    Input::Drop,
    Input::Release,
    Input::Done(StepOutcome::Ok),
    Input::Done(StepOutcome::Failed),
    Input::Done(StepOutcome::Cancelled),
    Input::Done(StepOutcome::Written),
];

/// Feeds one input to both, checking everything that must hold in between.
fn advance(region: &Region, world: &World, input: Input) -> Option<(Region, World)> {
    let direct = region.direct;
    let Ok((next, actions)) = step(region, input) else { return None };
    let mut after = *world;
    after.grant(region, input);
    if let Input::Done(outcome) = input {
        after.complete(outcome, direct);
    }
    for (i, &action) in actions.iter().enumerate() {
        after.act(action, direct);
        let is_last = i + 1 == actions.len();
        assert!(is_last || !matches!(action, Action::Start(_)), "only the last may be awaited");
    }
    after.agrees(&next);
    Some((next, after))
}

fn explore(direct: bool) -> HashMap<(Region, World), Vec<(Region, World)>> {
    let mut edges = HashMap::new();
    let mut queue = VecDeque::from([(Region::awake(direct), World::new())]);
    let mut seen = HashSet::from([(Region::awake(direct), World::new())]);
    while let Some((region, world)) = queue.pop_front() {
        let mut reached = Vec::new();
        for input in INPUTS {
            if let Some(pair) = advance(&region, &world, input) {
                reached.push(pair);
                if seen.insert(pair) {
                    queue.push_back(pair);
                }
            }
        }
        edges.insert((region, world), reached);
    }
    edges
}

#[test]
fn every_reachable_state_keeps_the_rules() {
    for direct in [true, false] {
        let edges = explore(direct);
        let states: HashSet<RegionState> = edges.keys().map(|(r, _)| r.state).collect();
        // Direct regions are never promoted.
        let all = if direct { 9 } else { 10 };
        assert_eq!(states.len(), all, "unreached states: {states:?}");
        assert!((40..1000).contains(&edges.len()), "{} states: not small any more", edges.len());
        let waits: HashSet<RegionWait> = edges.keys().map(|(r, _)| r.wait).collect();
        // None, three admissions, four sets of events, three windows, and promotion.
        assert_eq!(waits.len(), if direct { 11 } else { 12 }, "unreached waits: {waits:?}");
    }
}

#[test]
fn a_wait_ends_with_the_input_it_is_for() {
    let goals = [SleepGoal::Empty, SleepGoal::Host, SleepGoal::Nvme];
    for direct in [true, false] {
        for (region, world) in explore(direct).keys() {
            let takes = |input| advance(region, world, input).map(|(next, _)| next);
            let (wait, is_awake) = (region.wait, region.state == RegionState::Awake);
            for goal in goals {
                let queued = takes(Input::AwaitAdmission(goal)).map(|next| next.wait);
                let may = is_awake && wait == RegionWait::None;
                assert_eq!(queued, may.then_some(RegionWait::Admission(goal)), "{region:?}");
                let may = is_awake && !wait.is_admitted();
                let admitted = takes(Input::Admit { goal, ticket: None }).map(|next| next.wait);
                assert_eq!(admitted, may.then_some(RegionWait::Window(goal)), "{region:?}");
                let admitted = takes(Input::Admit { goal, ticket: Some(7) }).map(|next| next.wait);
                let events = RegionWait::Events { goal, ticket: 7 };
                assert_eq!(admitted, may.then_some(events), "{region:?}");
            }
            for over in [1, 2] {
                let moved = takes(Input::EventsOver(over)).map(|next| next.wait);
                let expected = match wait {
                    RegionWait::Events { goal, ticket } if ticket == over => {
                        Some(RegionWait::Window(goal))
                    }
                    _ => None,
                };
                assert_eq!(moved, expected, "{region:?}");
            }
            let begun = takes(Input::Sleep).map(|next| (next.state, next.wait, next.goal));
            let expected = match wait {
                RegionWait::Window(goal) => {
                    Some((RegionState::FallingAsleep, RegionWait::None, goal))
                }
                _ => None,
            };
            assert_eq!(begun, expected, "{region:?}");
            let promoted = takes(Input::Promote).is_some();
            assert_eq!(promoted, wait == RegionWait::Promotion, "{region:?}");
            let left = takes(Input::Withdraw).map(|next| (next.state, next.wait));
            let expected = (wait != RegionWait::None).then_some((region.state, RegionWait::None));
            assert_eq!(left, expected, "{region:?}");
            for input in [Input::Wake, Input::Drop, Input::Release] {
                let ended = takes(input).is_none_or(|next| next.wait == RegionWait::None);
                assert!(ended, "{input:?} left {region:?} waiting");
            }
        }
    }
}

#[test]
fn every_completion_is_accepted_and_no_other() {
    for direct in [true, false] {
        for (region, _) in explore(direct).keys() {
            for outcome in
                [StepOutcome::Ok, StepOutcome::Failed, StepOutcome::Cancelled, StepOutcome::Written]
            {
                let fits = match (region.in_flight, outcome) {
                    (None, _) => false,
                    (Some(_), StepOutcome::Ok | StepOutcome::Failed) => true,
                    (Some(s), StepOutcome::Cancelled) => {
                        matches!(s, RegionStep::Write | RegionStep::Read)
                    }
                    (Some(s), StepOutcome::Written) => s == RegionStep::Seal,
                };
                assert_eq!(step(region, Input::Done(outcome)).is_ok(), fits, "{region:?}");
            }
        }
    }
}

/// From every state, with completions chosen by an adversary, these inputs end where they must.
fn always_ends(edges: &HashMap<(Region, World), Vec<(Region, World)>>, first: Input) {
    for (region, world) in edges.keys() {
        let Some(start) = advance(region, world, first) else { continue };
        let mut frontier = vec![(start, 0)];
        while let Some(((r, w), depth)) = frontier.pop() {
            assert!(depth <= 8, "{first:?} from {region:?} does not settle: {r:?}");
            if r.is_settled() {
                let dropped = first == Input::Drop || region.pending == PendingRequest::Drop;
                assert_eq!(
                    dropped || region.state == RegionState::Gone,
                    r.state == RegionState::Gone
                );
                continue;
            }
            for o in
                [StepOutcome::Ok, StepOutcome::Failed, StepOutcome::Cancelled, StepOutcome::Written]
            {
                frontier.extend(advance(&r, &w, Input::Done(o)).map(|p| (p, depth + 1)));
            }
        }
    }
}

#[test]
fn a_drop_always_reaches_gone_and_a_wake_always_settles() {
    for direct in [true, false] {
        let edges = explore(direct);
        always_ends(&edges, Input::Drop);
        always_ends(&edges, Input::Wake);
    }
}

#[test]
fn a_wake_succeeds_from_every_live_state_when_nothing_fails() {
    for direct in [true, false] {
        for (region, world) in explore(direct).keys() {
            if region.state == RegionState::Gone || region.pending == PendingRequest::Drop {
                continue;
            }
            let (mut r, mut w) = advance(region, world, Input::Wake).expect("a wake is accepted");
            while !r.is_settled() {
                (r, w) =
                    advance(&r, &w, Input::Done(StepOutcome::Ok)).expect("success is accepted");
            }
            assert_eq!(r.state, RegionState::Awake, "from {region:?}");
        }
    }
}

/// Drives a region with completions that succeed until `until` is in flight.
fn run_to(direct: bool, inputs: &[Input], until: RegionStep) -> (Region, World) {
    let (mut region, mut world) = (Region::awake(direct), World::new());
    for &input in inputs {
        (region, world) = advance(&region, &world, input).expect("a legal input");
        while region.in_flight.is_some_and(|s| s != until) {
            let done = Input::Done(StepOutcome::Ok);
            (region, world) = advance(&region, &world, done).expect("success is accepted");
        }
    }
    assert_eq!(region.in_flight, Some(until));
    (region, world)
}

#[test]
fn a_wish_is_served_the_shortest_way() {
    let after = |(region, world): (Region, World), input, done| {
        let (region, world) = advance(&region, &world, input).unwrap();
        advance(&region, &world, Input::Done(done)).unwrap().0
    };
    let sleep = [Input::Admit { goal: SleepGoal::Nvme, ticket: None }, Input::Sleep];
    // Woken while being sealed on its way to the file: no write is begun.
    let sealing = || run_to(false, &sleep, RegionStep::Seal);
    let woken = after(sealing(), Input::Wake, StepOutcome::Ok);
    assert_eq!((woken.state, woken.in_flight), (RegionState::Waking, Some(RegionStep::Stage)));
    assert_eq!(after(sealing(), Input::Drop, StepOutcome::Ok).state, RegionState::Gone);
    // Woken while spilling, even as the write succeeds: from the host copy, not the file.
    let spilling = || run_to(false, &sleep, RegionStep::Write);
    for done in [StepOutcome::Ok, StepOutcome::Cancelled, StepOutcome::Failed] {
        let woken = after(spilling(), Input::Wake, done);
        assert_eq!((woken.state, woken.extent), (RegionState::Waking, CopyState::None));
        assert_eq!(woken.in_flight, Some(RegionStep::Stage));
    }
    // Woken while it is read ahead: from the host copy, or from the file where that failed.
    let promoting = || {
        let (asleep, world) = run_to(false, &sleep, RegionStep::Write);
        let (asleep, world) = advance(&asleep, &world, Input::Done(StepOutcome::Ok)).unwrap();
        let (asleep, world) = advance(&asleep, &world, Input::AwaitPromotion).unwrap();
        advance(&asleep, &world, Input::Promote).unwrap()
    };
    let woken = after(promoting(), Input::Wake, StepOutcome::Ok);
    assert_eq!((woken.state, woken.extent), (RegionState::Waking, CopyState::None));
    let woken = after(promoting(), Input::Wake, StepOutcome::Failed);
    assert_eq!((woken.state, woken.host), (RegionState::Loading, CopyState::None));
    // Woken while written from its pages: it never leaves.
    let writing = run_to(true, &sleep, RegionStep::Write);
    assert_eq!(
        after(writing, Input::Wake, StepOutcome::Ok),
        Region { goal: SleepGoal::Nvme, ..Region::awake(true) }
    );
}

#[test]
fn a_refusal_says_what_and_where() {
    let asleep = Region { state: RegionState::Nvme, pages: PageState::Away, ..Region::awake(true) };
    let refusal = step(&asleep, Input::Sleep).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "Sleep does not apply to a region that is Nvme with None in flight"
    );
}

mod properties {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// Long random lives, illegal inputs included: the rules hold at every step.
        #[test]
        fn random_lives(direct: bool, choices in prop::collection::vec(0..INPUTS.len(), 1..200)) {
            let (mut region, mut world) = (Region::awake(direct), World::new());
            for choice in choices {
                if let Some(next) = advance(&region, &world, INPUTS[choice]) {
                    (region, world) = next;
                }
            }
        }
    }
}
