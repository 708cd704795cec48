//! Finds a plan: whose bytes sleep, which of them in the file, and how late waking may begin.
//!
//! Bytes needed last sleep first, and of those that sleep the ones needed last go to the file:
//! they have the longest time to come back in. Where groups are of one size and one lifetime
//! inside the other's, as the layers of a prefix are, no other sets are better; where they are
//! not, single groups are tried the other way.

use std::cmp::Reverse;

use super::replay::{Outcome, replay};
use super::work::{Choice, Plan, Work};

/// How many more groups than the fewest are tried asleep one by one; beyond, in growing steps.
const MORE_ASLEEP_MAX: usize = 6;
/// The same for those that go to the file.
const MORE_IN_FILE_MAX: usize = 3;
/// Works of at most so many groups have each group tried in each place.
const SINGLES_MAX: usize = 64;
/// Rounds of that, each keeping what was better.
const ROUNDS_MAX: usize = 4;

/// A plan for `work`, with what it comes to: the shortest found, of those the one that writes the
/// fewest bytes to the file, of those the one that moves fewest, and begins to wake latest. `None`
/// where no plan was found that comes to an end.
#[must_use]
pub fn choose(work: &Work) -> Option<(Plan, Outcome)> {
    work.validate().ok()?;
    let mut order: Vec<usize> = (0..work.groups.len()).collect();
    order.sort_by_key(|&at| (Reverse(work.groups[at].needed), work.groups[at].made));
    let mut search = Search { work, order, best: None };
    search.try_counts();
    search.try_singles();
    let (plan, outcome) = search.best?;
    Some(wake_late(work, plan, outcome))
}

struct Search<'a> {
    work: &'a Work,
    /// Groups, the one needed last first.
    order: Vec<usize>,
    best: Option<(Plan, Outcome)>,
}

impl Search<'_> {
    /// Keeps the plan if it is better. Whether it is.
    fn consider(&mut self, choices: Vec<Choice>) -> bool {
        let plan = Plan { choices, wake_from: 0 };
        let Some(outcome) = replay(self.work, &plan) else { return false };
        let rank = |o: &Outcome| (o.total_ns, o.written_bytes, o.slept_bytes);
        let is_better = self.best.as_ref().is_none_or(|(_, best)| rank(&outcome) < rank(best));
        if is_better {
            self.best = Some((plan, outcome));
        }
        is_better
    }

    /// Numbers of groups asleep, from the fewest that the rooms allow, and of those in the file.
    fn try_counts(&mut self) {
        let groups = self.order.len();
        for asleep in steps(self.fewest_asleep(), groups, MORE_ASLEEP_MAX) {
            for in_file in steps(self.fewest_in_file(asleep), asleep, MORE_IN_FILE_MAX) {
                let mut choices = vec![Choice::Keep; groups];
                for (rank, &at) in self.order.iter().enumerate().take(asleep) {
                    choices[at] = if rank < in_file { Choice::Nvme } else { Choice::Host };
                }
                self.consider(choices);
            }
        }
    }

    /// So many must sleep that those kept fit beside each operation, those touched included.
    fn fewest_asleep(&self) -> usize {
        let groups = &self.work.groups;
        let mut least = 0;
        for (number, operation) in self.work.operations.iter().enumerate() {
            let is_idle = |at: usize| groups[at].leaves < number && number < groups[at].needed;
            let is_there = |at: usize| groups[at].made <= number && number <= groups[at].freed;
            let there = self.order.iter().copied().filter(|&at| is_there(at));
            let there_bytes: u64 = there.map(|at| groups[at].bytes).sum();
            let mut over_bytes = there_bytes.saturating_sub(operation.room_bytes);
            for (rank, &at) in self.order.iter().enumerate() {
                if over_bytes == 0 {
                    break;
                }
                if is_idle(at) {
                    over_bytes = over_bytes.saturating_sub(groups[at].bytes);
                    least = least.max(rank + 1);
                }
            }
        }
        least
    }

    /// So many of the `asleep` must go to the file that the rest fits in host memory.
    fn fewest_in_file(&self, asleep: usize) -> usize {
        let bytes = |&at: &usize| self.work.groups[at].bytes;
        let mut over_bytes = self.order.iter().take(asleep).map(bytes).sum::<u64>();
        for (rank, at) in self.order.iter().enumerate().take(asleep) {
            if over_bytes <= self.work.host_bytes {
                return rank;
            }
            over_bytes -= bytes(at);
        }
        asleep
    }

    /// Each group in each other place, as long as that helps.
    fn try_singles(&mut self) {
        if self.order.len() > SINGLES_MAX {
            return;
        }
        for _ in 0..ROUNDS_MAX {
            let mut has_helped = false;
            for at in 0..self.order.len() {
                for choice in [Choice::Keep, Choice::Host, Choice::Nvme] {
                    let Some((best, _)) = &self.best else { return };
                    if best.choices[at] != choice {
                        let mut choices = best.choices.clone();
                        choices[at] = choice;
                        has_helped |= self.consider(choices);
                    }
                }
            }
            if !has_helped {
                return;
            }
        }
    }
}

/// From `least` to `most`: each of the first `close`, then ever larger steps, and the last.
fn steps(least: usize, most: usize, close: usize) -> Vec<usize> {
    let mut found = Vec::new();
    let (mut at, mut step) = (least.min(most), 1);
    while at < most {
        found.push(at);
        if found.len() > close {
            step *= 2;
        }
        at += step;
    }
    found.push(most);
    found
}

/// The latest operation to begin waking at that costs nothing: memory is the trainer's until then.
fn wake_late(work: &Work, plan: Plan, outcome: Outcome) -> (Plan, Outcome) {
    let asleep = |&(group, _): &(&super::Group, &Choice)| group.bytes > 0;
    let slept = work.groups.iter().zip(&plan.choices).filter(|&(_, &c)| c != Choice::Keep);
    let Some(last) = slept.filter(asleep).map(|(group, _)| group.needed).min() else {
        return (plan, outcome);
    };
    let with = |wake_from: usize| Plan { wake_from, ..plan.clone() };
    let costs_nothing =
        |wake_from: usize| replay(work, &with(wake_from)).is_some_and(|o| o == outcome);
    // Later is never better: the latest that is as good is found by halving.
    let (mut good, mut bad) = (0, last + 1);
    while bad - good > 1 {
        let middle = good.midpoint(bad);
        if costs_nothing(middle) {
            good = middle;
        } else {
            bad = middle;
        }
    }
    (with(good), outcome)
}
