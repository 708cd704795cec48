//! Best first search over the moments of all schedules.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};

use super::least_end::LeastEnd;
use super::moment::{Moment, OperationTurn, SearchField};
use super::{GROUPS_SEARCHED_MAX, OPERATIONS_SEARCHED_MAX, Optimum};
use crate::LinkDirection;
use crate::plan::location::GroupLocation;
use crate::plan::work::StepWork;

pub(super) fn search(
    work: &StepWork,
    least_ns: u64,
    known_ns: Option<u64>,
    states_max: usize,
) -> Optimum {
    let is_small =
        work.groups.len() <= GROUPS_SEARCHED_MAX && work.operations.len() < OPERATIONS_SEARCHED_MAX;
    let field = if is_small { SearchField::new(work) } else { None };
    field.map_or(Optimum::AtLeast(least_ns), |field| {
        Search::new(field, known_ns.unwrap_or(u64::MAX)).run(least_ns, states_max)
    })
}

/// A moment that was reached.
struct Reached {
    state: Moment,
    /// Groups, as bits, that have slept or been read already.
    spent: u16,
    /// Another moment leaves at least what this one leaves.
    is_dominated: bool,
}

struct Search<'a> {
    field: SearchField<'a>,
    bound: LeastEnd<'a>,
    /// The shortest schedule known, or `u64::MAX`.
    known_ns: u64,
    reached: Vec<Reached>,
    /// What is the same but for times, what is spent and what was refused.
    alike: HashMap<u64, Vec<usize>>,
    /// By least end, then the furthest, then the latest found.
    open: BinaryHeap<(Reverse<u64>, usize, usize)>,
}

impl<'a> Search<'a> {
    fn new(field: SearchField<'a>, known_ns: u64) -> Self {
        let bound = LeastEnd::new(field.work);
        let (reached, alike, open) = (Vec::new(), HashMap::new(), BinaryHeap::new());
        Self { field, bound, known_ns, reached, alike, open }
    }

    fn run(mut self, least_ns: u64, states_max: usize) -> Optimum {
        self.reach(SearchField::start(), least_ns);
        while let Some((Reverse(ends_ns), _, at)) = self.open.pop() {
            if self.reached[at].is_dominated {
                continue;
            }
            if ends_ns >= self.known_ns {
                break;
            }
            if self.reached.len() > states_max {
                return Optimum::AtLeast(ends_ns);
            }
            let state = self.reached[at].state.clone();
            self.go_on(state, ends_ns);
        }
        if self.known_ns == u64::MAX { Optimum::Never } else { Optimum::Exact(self.known_ns) }
    }

    /// Takes note of a moment, unless it leaves nothing that others do not.
    fn reach(&mut self, state: Moment, least_ns: u64) {
        if state.operation == self.field.work.operations.len() {
            self.known_ns = self.known_ns.min(state.now_ns);
            return;
        }
        let ends_ns = self.bound.end_ns(&self.field.view(&state)).max(least_ns);
        if ends_ns >= self.known_ns {
            return;
        }
        let (key, spent) = key_of(&state);
        let alike = self.alike.entry(key).or_default();
        let new = Reached { state, spent, is_dominated: false };
        if alike.iter().any(|&at| leaves_as_much(&self.reached[at], &new)) {
            return;
        }
        alike.retain(|&at| {
            let is_dominated = leaves_as_much(&new, &self.reached[at]);
            self.reached[at].is_dominated |= is_dominated;
            !is_dominated
        });
        alike.push(self.reached.len());
        self.open.push((Reverse(ends_ns), new.state.operation, self.reached.len()));
        self.reached.push(new);
    }

    /// All that may begin at this instant, the operation first.
    fn go_on(&mut self, state: Moment, ends_ns: u64) {
        if state.turn == OperationTurn::Waits && self.field.may_begin(&state) {
            if !state.is_refused {
                let mut begun = state.clone();
                self.field.begin(&mut begun);
                self.copies(begun, 0, ends_ns);
            }
            if self.field.may_wait(&state) {
                self.copies(Moment { is_refused: true, ..state }, 0, ends_ns);
            }
        } else {
            self.copies(state, 0, ends_ns);
        }
    }

    /// All that may begin on the links from the one in the `turn`th place.
    fn copies(&mut self, mut state: Moment, turn: usize, ends_ns: u64) {
        let Some(&link) = LinkDirection::ALL.get(turn) else {
            return self.pass(state, ends_ns);
        };
        if self.field.is_idle(&state, link) {
            for at in 0..self.field.work.groups.len() {
                let Some(next) = self.field.copied(&state, link, at) else { continue };
                let bit = 1 << at;
                if state.refused[link as usize] & bit == 0 {
                    let mut begun = state.clone();
                    self.field.copy(&mut begun, link, at, next);
                    self.copies(begun, turn + 1, ends_ns);
                }
            }
            for at in 0..self.field.work.groups.len() {
                if self.field.copied(&state, link, at).is_some() {
                    state.refused[link as usize] |= 1 << at;
                }
            }
        }
        self.copies(state, turn + 1, ends_ns);
    }

    /// From one instant to the next, and what ends there.
    fn pass(&mut self, mut state: Moment, ends_ns: u64) {
        if state.turn == OperationTurn::Held && state.has_admitted {
            let mut ended = state.clone();
            self.field.end(&mut ended);
            if ended.operation == self.field.work.operations.len() {
                return self.reach(ended, ends_ns);
            }
            self.go_on(ended, ends_ns);
        }
        if !self.field.advance(&mut state) {
            return;
        }
        if state.turn == OperationTurn::Runs && state.runs_until_ns <= state.now_ns {
            if self.field.room_shrinks(&state) {
                let held = Moment { turn: OperationTurn::Held, runs_until_ns: 0, ..state.clone() };
                self.reach(held, ends_ns);
            }
            self.field.end(&mut state);
        }
        self.reach(state, ends_ns);
    }
}

/// Whether whatever can follow `other` can follow `one`, no later.
fn leaves_as_much(one: &Reached, other: &Reached) -> bool {
    let is_within = |one: u16, other: u16| one & !other == 0;
    let (of_one, of_other) = (&one.state, &other.state);
    let refused =
        |link: LinkDirection| (of_one.refused[link as usize], of_other.refused[link as usize]);
    let mut links = of_one.link_free_ns.iter().zip(of_other.link_free_ns);
    of_one.now_ns <= of_other.now_ns
        && of_one.runs_until_ns <= of_other.runs_until_ns
        && links.all(|(&one, other)| one <= other)
        && is_within(one.spent, other.spent)
        && (of_other.is_refused || !of_one.is_refused)
        && LinkDirection::ALL.into_iter().all(|link| {
            let (of_one, of_other) = refused(link);
            // What is spent cannot leave, whether it was refused or not.
            let goes_down = matches!(link, LinkDirection::Sleep | LinkDirection::Write);
            is_within(of_one, of_other | if goes_down { other.spent } else { 0 })
        })
}

/// What must be the same for two moments to be comparable, and what need not be of it.
fn key_of(state: &Moment) -> (u64, u16) {
    let (mut key, mut spent) = (0_u64, 0);
    for (at, &place) in state.places.iter().enumerate() {
        let like = match place {
            GroupLocation::Back => GroupLocation::Awake,
            GroupLocation::Read => GroupLocation::Host,
            other => other,
        };
        if like != place {
            spent |= 1 << at;
        }
        key = key << 4 | like as u64;
    }
    key = key << 2 | state.turn as u64;
    (key << 12 | state.operation as u64, spent)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Worse in any one way, and a moment no longer stands for the other.
    #[test]
    fn a_moment_stands_for_another_if_nothing_is_worse() {
        let reached = |change: fn(&mut Reached)| {
            let state = Moment { now_ns: 5, runs_until_ns: 9, ..SearchField::start() };
            let mut reached = Reached { state, spent: 0b1, is_dominated: false };
            change(&mut reached);
            reached
        };
        let same = reached(|_| ());
        assert!(leaves_as_much(&same, &same));
        let worse: [fn(&mut Reached); 6] = [
            |r| r.state.now_ns += 1,
            |r| r.state.runs_until_ns += 1,
            |r| r.state.link_free_ns[LinkDirection::Read as usize] += 1,
            |r| r.spent |= 0b10,
            |r| r.state.is_refused = true,
            |r| r.state.refused[LinkDirection::Sleep as usize] |= 0b10,
        ];
        for worsen in worse {
            let other = reached(worsen);
            assert!(!leaves_as_much(&other, &same));
            assert!(leaves_as_much(&same, &other));
        }
        // The group that is spent cannot leave again, but it may be coming back.
        let refused = |link: LinkDirection| {
            let mut refused = reached(|_| ());
            refused.state.refused[link as usize] = 0b1;
            refused
        };
        assert!(leaves_as_much(&refused(LinkDirection::Sleep), &same));
        assert!(!leaves_as_much(&refused(LinkDirection::Wake), &same));
    }
}
