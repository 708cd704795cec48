//! The machine against a naive model of the world, over every reachable state and in long random
//! runs. The model holds real things (are the pages there, does the copy hold the bytes) and
//! refuses any action that does not make sense in it.

use std::collections::{HashMap, HashSet, VecDeque};

use super::*;

/// What is true of the bytes, kept by carrying the actions out naively.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
struct World {
    pages: Pages,
    /// Whether the region's own pages hold its bytes.
    pages_hold: bool,
    staged_filled: bool,
    host: Option<bool>,
    extent: Option<bool>,
    backup: bool,
    finished: bool,
    in_flight: Option<Step>,
}

impl World {
    fn new() -> Self {
        Self {
            pages: Pages::Mapped,
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

    /// The engine grants places before it asks.
    fn grant(&mut self, input: Input, direct: bool) {
        let (host, extent) = match input {
            Input::Sleep(Goal::Host) => (true, false),
            Input::Sleep(Goal::Nvme) => (!direct, true),
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
        if let Input::Sleep(goal) = input {
            self.backup = goal != Goal::Empty;
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
            Action::Cancel => assert!(matches!(self.in_flight, Some(Step::Write | Step::Read))),
            Action::Thaw => {
                assert_eq!(self.pages, Pages::Frozen);
                self.pages = Pages::Mapped;
            }
            Action::Discard => {
                assert_eq!(self.pages, Pages::Staged);
                self.pages = Pages::Away;
                self.staged_filled = false;
            }
            Action::Forget => {
                assert_eq!(self.pages, Pages::Away);
                self.pages = Pages::Mapped; // the allocator's now: nothing of ours is left there
            }
            Action::ReleaseExtent => assert!(self.extent.take().is_some(), "R4: released twice"),
            Action::ReleaseHost => assert!(self.host.take().is_some(), "R4: released twice"),
            Action::Awake | Action::SleepFailed => assert_eq!(self.pages, Pages::Mapped),
            Action::WakeFailed => assert_eq!(self.pages, Pages::Away),
            Action::Finish => {
                assert_eq!(self.pages, Pages::Mapped);
                assert_eq!((self.host, self.extent), (None, None), "R4: leaked");
                self.finished = true;
            }
        }
    }

    fn may_start(&mut self, step: Step, direct: bool) {
        match step {
            Step::Freeze => assert_eq!(self.pages, Pages::Mapped),
            Step::CopyOut => assert!(self.pages == Pages::Frozen && self.host.is_some()),
            Step::Write => {
                assert!(self.extent.is_some());
                let from_pages = direct && self.pages == Pages::Frozen;
                assert!(from_pages || self.host == Some(true));
            }
            Step::Seal => {
                assert_eq!(self.pages, Pages::Frozen);
                let copied = self.host == Some(true) || self.extent == Some(true);
                assert!(copied || !self.backup, "R2: sealing without a copy");
            }
            Step::Stage => assert_eq!(self.pages, Pages::Away),
            Step::Read => {
                assert_eq!(self.extent, Some(true));
                if self.pages == Pages::Away {
                    assert_eq!(self.host, Some(false), "promoted to a copy granted before");
                } else {
                    assert_eq!(self.pages, Pages::Staged);
                    assert!(direct || self.host.replace(false).is_none(), "granted twice");
                }
            }
            Step::CopyIn => assert_eq!((self.pages, self.host), (Pages::Staged, Some(true))),
            Step::Publish => {
                assert_eq!(self.pages, Pages::Staged);
                assert!(self.staged_filled || !self.backup, "R3: published unfilled pages");
            }
        }
    }

    fn complete(&mut self, outcome: Outcome, direct: bool) {
        let step = self.in_flight.take().expect("a completion without an action");
        match (step, outcome) {
            (Step::Seal, Outcome::Written) => self.pages = Pages::Mapped,
            (_, Outcome::Failed | Outcome::Cancelled | Outcome::Written) => {}
            (Step::Freeze, _) => self.pages = Pages::Frozen,
            (Step::CopyOut, _) => self.host = Some(true),
            (Step::Write, _) => self.extent = Some(true),
            (Step::Seal, _) => {
                self.pages = Pages::Away;
                self.pages_hold = false;
            }
            (Step::Stage, _) => self.pages = Pages::Staged,
            (Step::Read, _) if direct => self.staged_filled = true,
            (Step::Read, _) => self.host = Some(true),
            (Step::CopyIn, _) => self.staged_filled = true,
            (Step::Publish, _) => {
                self.pages = Pages::Mapped;
                self.pages_hold = true;
                self.backup = true;
                self.staged_filled = false;
            }
        }
    }

    /// Facts the region claims must be facts of the world.
    fn agrees(&self, region: &Region) {
        let held = |h: Held| match h {
            Held::None => None,
            Held::Granted => Some(false),
            Held::Valid => Some(true),
        };
        assert_eq!(region.in_flight, self.in_flight);
        assert_eq!(held(region.host), self.host, "{region:?}");
        assert_eq!(held(region.extent), self.extent, "{region:?}");
        assert_eq!(region.pages, self.pages);
        assert_eq!(region.state == State::Gone, self.finished);
        assert_eq!(region.state.is_settled(), region.is_settled(), "{region:?}");
        if !self.finished {
            assert!(self.holds_bytes() || !self.backup, "R2: bytes lost in {region:?}");
            if region.state == State::Awake {
                assert_eq!(self.pages, Pages::Mapped);
                assert_eq!((self.host, self.extent), (None, None), "awake regions hold nothing");
            }
        }
    }
}

const INPUTS: [Input; 11] = [
    Input::Sleep(Goal::Empty),
    Input::Sleep(Goal::Host),
    Input::Sleep(Goal::Nvme),
    Input::Spill,
    Input::Promote,
    Input::Wake,
    Input::Drop,
    Input::Done(Outcome::Ok),
    Input::Done(Outcome::Failed),
    Input::Done(Outcome::Cancelled),
    Input::Done(Outcome::Written),
];

/// Feeds one input to both, checking everything that must hold in between.
fn advance(region: &Region, world: &World, input: Input) -> Option<(Region, World)> {
    let direct = region.direct;
    let Ok((next, actions)) = step(region, input) else { return None };
    let mut after = *world;
    after.grant(input, direct);
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
        let states: HashSet<State> = edges.keys().map(|(r, _)| r.state).collect();
        // Direct regions are never promoted.
        let all = if direct { 9 } else { 10 };
        assert_eq!(states.len(), all, "unreached states: {states:?}");
        assert!((40..1000).contains(&edges.len()), "{} states: not small any more", edges.len());
    }
}

#[test]
fn every_completion_is_accepted_and_no_other() {
    for direct in [true, false] {
        for (region, _) in explore(direct).keys() {
            for outcome in [Outcome::Ok, Outcome::Failed, Outcome::Cancelled, Outcome::Written] {
                let fits = match (region.in_flight, outcome) {
                    (None, _) => false,
                    (Some(_), Outcome::Ok | Outcome::Failed) => true,
                    (Some(s), Outcome::Cancelled) => matches!(s, Step::Write | Step::Read),
                    (Some(s), Outcome::Written) => s == Step::Seal,
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
                let dropped = first == Input::Drop || region.wish == Wish::Drop;
                assert_eq!(dropped || region.state == State::Gone, r.state == State::Gone);
                continue;
            }
            for o in [Outcome::Ok, Outcome::Failed, Outcome::Cancelled, Outcome::Written] {
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
            if region.state == State::Gone || region.wish == Wish::Drop {
                continue;
            }
            let (mut r, mut w) = advance(region, world, Input::Wake).expect("a wake is accepted");
            while !r.is_settled() {
                (r, w) = advance(&r, &w, Input::Done(Outcome::Ok)).expect("success is accepted");
            }
            assert_eq!(r.state, State::Awake, "from {region:?}");
        }
    }
}

/// Drives a region with completions that succeed until `until` is in flight.
fn run_to(direct: bool, inputs: &[Input], until: Step) -> (Region, World) {
    let (mut region, mut world) = (Region::awake(direct), World::new());
    for &input in inputs {
        (region, world) = advance(&region, &world, input).expect("a legal input");
        while region.in_flight.is_some_and(|s| s != until) {
            let done = Input::Done(Outcome::Ok);
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
    let sleep = [Input::Sleep(Goal::Nvme)];
    // Woken while being sealed on its way to the file: no write is begun.
    let sealing = || run_to(false, &sleep, Step::Seal);
    let woken = after(sealing(), Input::Wake, Outcome::Ok);
    assert_eq!((woken.state, woken.in_flight), (State::Waking, Some(Step::Stage)));
    assert_eq!(after(sealing(), Input::Drop, Outcome::Ok).state, State::Gone);
    // Woken while spilling, even as the write succeeds: from the host copy, not the file.
    let spilling = || run_to(false, &sleep, Step::Write);
    for done in [Outcome::Ok, Outcome::Cancelled, Outcome::Failed] {
        let woken = after(spilling(), Input::Wake, done);
        assert_eq!((woken.state, woken.extent), (State::Waking, Held::None));
        assert_eq!(woken.in_flight, Some(Step::Stage));
    }
    // Woken while it is read ahead: from the host copy, or from the file where that failed.
    let promoting = || {
        let (asleep, world) = run_to(false, &sleep, Step::Write);
        let (asleep, world) = advance(&asleep, &world, Input::Done(Outcome::Ok)).unwrap();
        advance(&asleep, &world, Input::Promote).unwrap()
    };
    let woken = after(promoting(), Input::Wake, Outcome::Ok);
    assert_eq!((woken.state, woken.extent), (State::Waking, Held::None));
    let woken = after(promoting(), Input::Wake, Outcome::Failed);
    assert_eq!((woken.state, woken.host), (State::Loading, Held::None));
    // Woken while written from its pages: it never leaves.
    let writing = run_to(true, &sleep, Step::Write);
    assert_eq!(
        after(writing, Input::Wake, Outcome::Ok),
        Region { goal: Goal::Nvme, ..Region::awake(true) }
    );
}

#[test]
fn a_refusal_says_what_and_where() {
    let asleep = Region { state: State::Nvme, pages: Pages::Away, ..Region::awake(true) };
    let refusal = step(&asleep, Input::Sleep(Goal::Host)).unwrap_err();
    assert_eq!(
        refusal.to_string(),
        "Sleep(Host) does not apply to a region that is Nvme with None in flight"
    );
}

#[cfg(not(loom))]
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
