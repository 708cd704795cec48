//! Finds a plan: whose bytes sleep, which of them in the file, and when each leaves and returns.
//!
//! Bytes needed last sleep first, and of those that sleep the ones needed last go to the file:
//! they have the longest time to come back in. For groups of one size whose lifetimes lie one in
//! the other, as those of a prefix's layers do, that and the right numbers are all there is; where
//! they are not alike, single changes and exchanges are tried as long as they help. Few groups have
//! every combination tried: there are steps in which it pays to change places half-way through B.

use std::cmp::Reverse;

use super::replay::{Outcome, replay};
use super::work::{Choice, Group, Placing, Plan, Work};

/// How many more groups than the fewest are tried asleep one by one; beyond, in growing steps.
const MORE_ASLEEP_MAX: usize = 6;
/// The same for those that go to the file.
const MORE_IN_FILE_MAX: usize = 3;
/// Of at most so many groups every combination of places is tried.
const GROUPS_COMBINED_MAX: usize = 6;
/// How many operations later than it may a group is tried to leave, or before it must to wake.
const SHIFTS_MAX: usize = 6;
/// Group by group, what one search may replay.
const GROUPS_REPLAYED_MAX: usize = 1 << 16;

/// A plan for `work`, with what it comes to: the shortest found, of those the one that writes the
/// fewest bytes to the file, of those the one that moves fewest; then each group wakes as late as
/// costs nothing. `None` where no plan was found that comes to an end.
#[must_use]
pub fn choose(work: &Work) -> Option<(Plan, Outcome)> {
    work.validate().ok()?;
    let mut order: Vec<usize> = (0..work.groups.len()).collect();
    order.sort_by_key(|&at| (Reverse(work.groups[at].needed), work.groups[at].made));
    let replays_left = GROUPS_REPLAYED_MAX / work.groups.len().max(1);
    let mut search = Search { work, order, best: None, replays_left };
    search.try_counts();
    search.try_combinations();
    while search.try_singles() || search.try_swaps() || search.try_shifts() {}
    let (plan, outcome) = search.best?;
    Some(wake_late(work, plan, outcome))
}

const PLACES: [Choice; 3] = [Choice::Keep, Choice::Host, Choice::Nvme];

struct Search<'a> {
    work: &'a Work,
    /// Groups, the one needed last first.
    order: Vec<usize>,
    best: Option<(Plan, Outcome)>,
    replays_left: usize,
}

impl Search<'_> {
    /// Keeps the plan if it is better. Whether it is.
    fn consider(&mut self, plan: Plan) -> bool {
        let Some(left) = self.replays_left.checked_sub(1) else { return false };
        self.replays_left = left;
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
                self.consider(Plan::new(self.work, &choices, self.wake_from(&choices)));
            }
        }
    }

    fn try_combinations(&mut self) {
        let groups = self.order.len();
        if groups > GROUPS_COMBINED_MAX {
            return;
        }
        for combination in 0..PLACES.len().pow(groups as u32) {
            let place =
                |at: usize| PLACES[combination / PLACES.len().pow(at as u32) % PLACES.len()];
            let choices: Vec<Choice> = (0..groups).map(place).collect();
            self.consider(Plan::new(self.work, &choices, self.wake_from(&choices)));
        }
    }

    /// Nothing wakes while something may yet sleep, if that can be: it would be in the way.
    fn wake_from(&self, choices: &[Choice]) -> usize {
        let slept = || {
            let groups = self.work.groups.iter().zip(choices);
            groups.filter(|&(_, &choice)| choice != Choice::Keep).map(|(group, _)| group)
        };
        let all_may_have_left = slept().map(|group| group.leaves + 1).max().unwrap_or_default();
        let is_before_all = slept().all(|group| all_may_have_left <= group.needed);
        if is_before_all { all_may_have_left } else { 0 }
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

    /// Each group in each other place. Whether that helped.
    fn try_singles(&mut self) -> bool {
        let mut has_helped = false;
        for at in 0..self.order.len() {
            for choice in PLACES {
                has_helped |= self.try_change(|groups| groups[at].choice = choice);
            }
        }
        has_helped
    }

    /// Each two groups in each other's places. Whether that helped.
    fn try_swaps(&mut self) -> bool {
        let mut has_helped = false;
        for one in 0..self.order.len() {
            for other in 0..one {
                has_helped |= self.try_change(|groups| {
                    let choice = groups[one].choice;
                    groups[one].choice = groups[other].choice;
                    groups[other].choice = choice;
                });
            }
        }
        has_helped
    }

    /// Each group leaving later, or waking at another time. Whether that helped.
    fn try_shifts(&mut self) -> bool {
        let mut has_helped = false;
        for at in 0..self.order.len() {
            let Group { leaves, needed, .. } = self.work.groups[at];
            for sleep_after in (leaves..needed).take(SHIFTS_MAX) {
                has_helped |= self.try_change(|groups| groups[at].sleep_after = sleep_after);
            }
            for wake_from in (leaves + 1..=needed).rev().take(SHIFTS_MAX) {
                has_helped |= self.try_change(|groups| groups[at].wake_from = wake_from);
            }
        }
        has_helped
    }

    fn try_change(&mut self, change: impl FnOnce(&mut [Placing])) -> bool {
        let Some((best, _)) = &self.best else { return false };
        let mut changed = best.clone();
        change(&mut changed.groups);
        changed != *best && self.consider(changed)
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

/// The latest operation before which nothing needs to wake: memory is the trainer's until then.
fn wake_late(work: &Work, plan: Plan, outcome: Outcome) -> (Plan, Outcome) {
    let slept = work.groups.iter().zip(&plan.groups).filter(|(_, p)| p.choice != Choice::Keep);
    let Some(last) = slept.map(|(group, _)| group.needed).min() else { return (plan, outcome) };
    let with = |wake_from: usize| {
        let late = |p: &Placing| Placing { wake_from: p.wake_from.max(wake_from), ..*p };
        Plan { groups: plan.groups.iter().map(late).collect() }
    };
    let costs_nothing =
        |wake_from: usize| replay(work, &with(wake_from)).is_some_and(|o| o == outcome);
    // Found by halving: later is hardly ever better where earlier was not.
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
