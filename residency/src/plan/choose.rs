//! Finds a plan: which groups sleep, which of them in the file, and when each leaves and returns.
//!
//! Groups needed last sleep first, and of those that sleep the ones needed last go to the file: they have
//! the longest time to come back. For groups of one size with nested lifetimes, as those of a prefix's
//! layers, only the two numbers have to be found. Otherwise single changes and swaps are tried as long as
//! they help. For few groups every combination is tried: in some steps it pays to swap groups in the middle
//! of B.
//!
//! A trainer's thread waits for the plan in every step. The search therefore begins with the most likely
//! plans, and ends when no plan can be better or its steps are used up.

use std::cmp::Reverse;

use super::lower_bound::lower_bound;
use super::replay::{ReplayOutcome, Stage};
use super::work::{DormantGroup, GroupPlan, ResidencyPlan, StepOperation, StepWork};
use crate::Tier;

/// Numbers of sleeping groups above the fewest that are tried one by one; beyond, in growing steps.
const MORE_ASLEEP_MAX: usize = 6;
/// The same for the groups in the file.
const MORE_IN_FILE_MAX: usize = 3;
/// Limit on groups whose combinations of tiers are all tried.
const GROUPS_COMBINED_MAX: usize = 6;
/// Limit on the operations by which a group is tried to leave later, or to wake earlier.
const SHIFTS_MAX: usize = 6;
/// Limit on steps of replays, of about two nanoseconds each, in a search that has a plan.
const STEPS_MAX: u64 = 7 << 18;
/// The divisor of these steps that gives the steps for trying numbers.
const COUNTS_DIVISOR: u64 = 8;
/// Limit on steps of a search that has found no plan.
const STEPS_WITHOUT_PLAN_MAX: u64 = 1 << 25;
/// Limit on steps of the search for the latest wake.
const STEPS_TO_WAKE_LATE_MAX: u64 = 1 << 23;
/// Cost of the lower bound per pair of operations.
const BOUND_STEPS: u64 = 3;
/// Copies of one group: out, to the file, from it, and in. Each takes whole nanoseconds.
const COPIES_MAX: u64 = 4;

/// Returns a plan for `work` and its replay: the shortest found; of equal ones, the one that writes the
/// fewest bytes to the file, then the one that moves the fewest bytes. Each group wakes as late as costs
/// nothing. `None` if no plan was found that ends.
#[must_use]
pub fn choose(work: &StepWork) -> Option<(ResidencyPlan, ReplayOutcome)> {
    let mut search = Search::new(work)?;
    search.run();
    search.finish()
}

struct Search<'a> {
    work: &'a StepWork,
    stage: Stage<'a>,
    /// Groups, the one needed last in front.
    order: Vec<usize>,
    best: Option<(ResidencyPlan, ReplayOutcome)>,
    /// Lower bound of every plan, plus the rounding of copies; 0 before it is computed.
    least_ns: u64,
    /// Steps taken so far.
    steps: u64,
}

impl<'a> Search<'a> {
    fn new(work: &'a StepWork) -> Option<Self> {
        work.validate().ok()?;
        let mut order: Vec<usize> = (0..work.groups.len()).collect();
        order.sort_by_key(|&at| (Reverse(work.groups[at].needed), work.groups[at].made));
        let stage = Stage::new(work);
        Some(Self { work, stage, order, best: None, least_ns: 0, steps: 0 })
    }

    fn run(&mut self) {
        self.try_counts();
        self.try_combinations();
        while self.try_swaps() || self.try_singles() || self.try_shifts() {}
    }

    fn finish(&mut self) -> Option<(ResidencyPlan, ReplayOutcome)> {
        let (plan, outcome) = self.best.take()?;
        Some(self.wake_late(plan, outcome))
    }

    /// Keeps the plan if it is better, and returns whether it is.
    fn consider(&mut self, plan: ResidencyPlan) -> bool {
        let most_ns = self.best.as_ref().map_or(u64::MAX, |(_, best)| best.total_ns);
        let steps_max = if self.best.is_some() { STEPS_MAX } else { STEPS_WITHOUT_PLAN_MAX };
        let Some(outcome) = self.play(&plan, most_ns, steps_max.saturating_sub(self.steps)) else {
            return false;
        };
        let rank = |o: &ReplayOutcome| (o.total_ns, o.written_bytes, o.slept_bytes);
        let is_better = self.best.as_ref().is_none_or(|(_, best)| rank(&outcome) < rank(best));
        if is_better {
            self.best = Some((plan, outcome));
        }
        is_better
    }

    fn play(
        &mut self,
        plan: &ResidencyPlan,
        most_ns: u64,
        steps_max: u64,
    ) -> Option<ReplayOutcome> {
        let mut steps_left = steps_max;
        let outcome = self.stage.play(plan, most_ns, &mut steps_left);
        self.steps += steps_max - steps_left;
        outcome
    }

    /// Returns true if the search is over.
    fn is_done(&mut self) -> bool {
        let Some((_, best)) = &self.best else { return self.steps >= STEPS_WITHOUT_PLAN_MAX };
        let best_ns = best.total_ns;
        if self.steps >= STEPS_MAX || best.stall_ns == 0 {
            return true;
        }
        let steps = BOUND_STEPS * (self.work.operations.len() as u64).pow(2);
        if self.least_ns == 0 && self.steps + steps < STEPS_MAX {
            self.steps += steps;
            let rounding_ns = COPIES_MAX * self.work.groups.len() as u64;
            self.least_ns = lower_bound(self.work).saturating_add(rounding_ns);
        }
        best_ns <= self.least_ns
    }

    /// Tries numbers of sleeping groups, from the fewest that the rooms allow, and numbers of those in the
    /// file: the fewest of both first, then more of either.
    fn try_counts(&mut self) {
        let groups = self.order.len();
        let mut counts = Vec::new();
        let asleep = steps(self.fewest_asleep(), groups, MORE_ASLEEP_MAX);
        for (more_asleep, asleep) in asleep.into_iter().enumerate() {
            let in_file = steps(self.fewest_in_file(asleep), asleep, MORE_IN_FILE_MAX);
            let in_file = in_file.into_iter().enumerate();
            counts.extend(in_file.map(|(more, in_file)| (more_asleep + more, asleep, in_file)));
        }
        counts.sort_unstable();
        for (_, asleep, in_file) in counts {
            let is_enough = self.best.is_some() && self.steps >= STEPS_MAX / COUNTS_DIVISOR;
            if is_enough || self.is_done() {
                return;
            }
            let mut choices = vec![Tier::Device; groups];
            for (rank, &at) in self.order.iter().enumerate().take(asleep) {
                choices[at] = if rank < in_file { Tier::Nvme } else { Tier::Host };
            }
            self.consider(ResidencyPlan::new(self.work, &choices, self.wake_from(&choices)));
        }
    }

    fn try_combinations(&mut self) {
        let groups = self.order.len();
        if groups > GROUPS_COMBINED_MAX {
            return;
        }
        for combination in 0..Tier::ALL.len().pow(groups as u32) {
            if self.is_done() {
                return;
            }
            let count = Tier::ALL.len();
            let place = |at: usize| Tier::ALL[combination / count.pow(at as u32) % count];
            let choices: Vec<Tier> = (0..groups).map(place).collect();
            self.consider(ResidencyPlan::new(self.work, &choices, self.wake_from(&choices)));
        }
    }

    /// Returns the operation from which groups wake: after all may have left, if that is early enough,
    /// because a group that wakes takes room from those that still leave.
    fn wake_from(&self, choices: &[Tier]) -> usize {
        let slept = || {
            let groups = self.work.groups.iter().zip(choices);
            groups.filter(|&(_, &choice)| choice != Tier::Device).map(|(group, _)| group)
        };
        let all_may_have_left = slept().map(|group| group.leaves + 1).max().unwrap_or_default();
        let is_before_all = slept().all(|group| all_may_have_left <= group.needed);
        if is_before_all { all_may_have_left } else { 0 }
    }

    /// Returns the fewest groups that must sleep so that the others fit beside each operation.
    fn fewest_asleep(&self) -> usize {
        let groups = self.order.len();
        let there_bytes = self.stage.there_bytes();
        let over_bytes =
            |(operation, there): (&StepOperation, u64)| there.saturating_sub(operation.room_bytes);
        let over_bytes: Vec<u64> =
            self.work.operations.iter().zip(there_bytes).map(over_bytes).collect();
        let (mut few, mut enough) = (0, groups);
        while few < enough {
            let middle = few.midpoint(enough);
            let idle_bytes = self.idle_bytes(middle);
            if over_bytes.iter().zip(idle_bytes).all(|(&over, idle)| idle >= over) {
                enough = middle;
            } else {
                few = middle + 1;
            }
        }
        enough
    }

    /// Returns, by operation, the idle bytes of the first `asleep` groups.
    fn idle_bytes(&self, asleep: usize) -> Vec<u64> {
        let count = self.work.operations.len();
        let (mut comes, mut goes) = (vec![0; count], vec![0; count]);
        for &at in &self.order[..asleep] {
            let group = &self.work.groups[at];
            comes[group.leaves + 1] += group.bytes;
            goes[group.needed] += group.bytes;
        }
        let mut bytes = 0;
        let now = |(comes, goes): (u64, u64)| {
            bytes = bytes + comes - goes;
            bytes
        };
        comes.into_iter().zip(goes).map(now).collect()
    }

    /// Returns the fewest of the `asleep` groups that must go to the file so that the rest fits in host memory.
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

    /// Tries each group in each other tier. Returns true if that helped.
    fn try_singles(&mut self) -> bool {
        let mut has_helped = false;
        for at in 0..self.order.len() {
            if self.is_done() {
                break;
            }
            for choice in Tier::ALL {
                has_helped |= self.try_change(|groups| groups[at].choice = choice);
            }
        }
        has_helped
    }

    /// Tries to swap the tiers of each two groups, close ones first: the further apart two groups are, the more
    /// it costs that the one needed earlier sleeps. Returns true if that helped.
    fn try_swaps(&mut self) -> bool {
        let mut has_helped = false;
        for apart in 1..self.order.len() {
            for other in 0..self.order.len() - apart {
                if self.is_done() {
                    return has_helped;
                }
                has_helped |= self.try_swap(other + apart, other);
            }
        }
        has_helped
    }

    fn try_swap(&mut self, one: usize, other: usize) -> bool {
        self.steps += 1;
        let Some((best, _)) = &self.best else { return false };
        let choices = [one, other].map(|at| best.groups[at].choice);
        choices[0] != choices[1]
            && self.try_change(|groups| {
                groups[one].choice = choices[1];
                groups[other].choice = choices[0];
            })
    }

    /// Tries each group leaving later, or waking at another operation. Returns true if that helped.
    fn try_shifts(&mut self) -> bool {
        let mut has_helped = false;
        for at in 0..self.order.len() {
            if self.is_done() {
                break;
            }
            let DormantGroup { leaves, needed, .. } = self.work.groups[at];
            for sleep_after in (leaves..needed).take(SHIFTS_MAX) {
                has_helped |= self.try_change(|groups| groups[at].sleep_after = sleep_after);
            }
            for wake_from in (leaves + 1..=needed).rev().take(SHIFTS_MAX) {
                has_helped |= self.try_change(|groups| groups[at].wake_from = wake_from);
            }
        }
        has_helped
    }

    fn try_change(&mut self, change: impl FnOnce(&mut [GroupPlan])) -> bool {
        if self.is_done() {
            return false;
        }
        let Some((best, _)) = &self.best else { return false };
        let mut changed = best.clone();
        change(&mut changed.groups);
        changed != *best && self.consider(changed)
    }

    /// Delays wakes to the latest operation that costs nothing: until then the memory is the trainer's.
    fn wake_late(
        &mut self,
        plan: ResidencyPlan,
        outcome: ReplayOutcome,
    ) -> (ResidencyPlan, ReplayOutcome) {
        let groups = self.work.groups.iter().zip(&plan.groups);
        let slept = groups.filter(|(_, placing)| placing.choice != Tier::Device);
        let Some(last) = slept.map(|(group, _)| group.needed).min() else { return (plan, outcome) };
        let with = |wake_from: usize| {
            let late = |p: &GroupPlan| GroupPlan { wake_from: p.wake_from.max(wake_from), ..*p };
            ResidencyPlan { groups: plan.groups.iter().map(late).collect() }
        };
        let steps_max = self.steps + STEPS_TO_WAKE_LATE_MAX;
        // By bisection: a later operation is rarely free if an earlier one was not.
        let (mut good, mut bad) = (0, last + 1);
        while bad - good > 1 && self.steps < steps_max {
            let middle = good.midpoint(bad);
            let steps_left = steps_max - self.steps;
            if self.play(&with(middle), outcome.total_ns, steps_left) == Some(outcome) {
                good = middle;
            } else {
                bad = middle;
            }
        }
        (with(good), outcome)
    }
}

/// Returns numbers from `least` to `most`: the first `close` one by one, then in growing steps, and the last.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::LinkRates;
    use crate::testing::arbitrary::{FINE, any_work};

    const LAYER_BYTES: u64 = 1 << 20;
    const MICROBATCHES: usize = 12;

    /// A prefix of unlike layers; its microbatches have room for some of them, host memory for some.
    fn prefix(layers: usize, in_microbatches: usize, in_host: usize) -> StepWork {
        let op = |compute_ns, layers: usize| StepOperation {
            compute_ns,
            room_bytes: layers as u64 * LAYER_BYTES,
        };
        let mut operations = vec![op(100_000, layers); layers];
        operations.extend(vec![op(1_000_000, in_microbatches); MICROBATCHES]);
        operations.extend(vec![op(200_000, (in_microbatches + 2).min(layers)); layers]);
        let (top, last) = (layers - 1, operations.len() - 1);
        let groups = (0..layers).map(|layer| {
            let above = (layer + 1).min(top);
            let bytes = LAYER_BYTES - layer as u64 * 31 % 97 * 4096;
            DormantGroup {
                bytes,
                made: layer,
                leaves: above,
                needed: last - above,
                freed: last - layer,
            }
        });
        StepWork {
            groups: groups.collect(),
            operations,
            links: LinkRates {
                device_to_host_bytes_per_s: 5 << 30,
                host_to_device_bytes_per_s: 5 << 30,
                device_to_nvme_bytes_per_s: 1 << 30,
                nvme_to_device_bytes_per_s: 1 << 30,
            },
            host_bytes: in_host as u64 * LAYER_BYTES,
            nvme_bytes: 1 << 40,
            is_direct: false,
        }
    }

    /// What one replay of the plan costs.
    fn steps_of(search: &Search<'_>, plan: &ResidencyPlan) -> u64 {
        let mut steps_left = u64::MAX;
        search.stage.play(plan, u64::MAX, &mut steps_left).unwrap();
        u64::MAX - steps_left
    }

    /// What the bound of the work costs.
    fn bound_steps(work: &StepWork) -> u64 {
        BOUND_STEPS * (work.operations.len() as u64).pow(2)
    }

    #[test]
    fn a_search_stays_within_its_limits_of_steps() {
        for layers in [32, 64, 128, 512, 1024] {
            for (in_microbatches, in_host) in
                [(layers, 0), (layers / 4, layers), (layers / 4, layers / 4)]
            {
                let work = prefix(layers, in_microbatches, in_host);
                let mut search = Search::new(&work).unwrap();
                search.run();
                let (plan, _) = search.best.clone().unwrap();
                // The first plan is played to its end, however long that takes.
                let steps_max = STEPS_MAX.max(steps_of(&search, &plan));
                assert!(search.steps <= steps_max, "{layers} {in_microbatches} {in_host}");
                assert!(layers > 512 || steps_max == STEPS_MAX);
                let searched = search.steps;
                assert!(search.finish().is_some());
                let steps_max = if layers <= 128 { STEPS_MAX / 4 } else { STEPS_TO_WAKE_LATE_MAX };
                let steps = search.steps - searched;
                assert!(steps <= steps_max, "{layers} {in_microbatches} {in_host}: {steps}");
            }
        }
    }

    #[test]
    fn trying_numbers_takes_its_share_of_the_steps() {
        for layers in [128, 512] {
            let work = prefix(layers, layers / 4, layers / 4);
            let mut search = Search::new(&work).unwrap();
            search.try_counts();
            let (plan, _) = search.best.clone().unwrap();
            // The last one tried is played to its end, and then asked whether it can be better.
            let last_steps = steps_of(&search, &plan) + bound_steps(&work);
            let steps_max = STEPS_MAX / COUNTS_DIVISOR + last_steps;
            assert!(search.steps <= steps_max, "{layers}: {}", search.steps);
        }
    }

    /// Whether `asleep` groups leave room for all that is awake beside each operation.
    fn leaves_room(search: &Search<'_>, asleep: usize) -> bool {
        let is_asleep = |at: usize, operation: usize| {
            let DormantGroup { leaves, needed, .. } = search.work.groups[at];
            search.order[..asleep].contains(&at) && leaves < operation && operation < needed
        };
        search.work.operations.iter().enumerate().all(
            |(operation, StepOperation { room_bytes, .. })| {
                let groups = search.work.groups.iter().enumerate();
                let awake = groups.filter(|&(at, group)| {
                    let is_there = group.made <= operation && operation <= group.freed;
                    is_there && !is_asleep(at, operation)
                });
                awake.map(|(_, group)| group.bytes).sum::<u64>() <= *room_bytes
            },
        )
    }

    proptest! {
        #[test]
        fn the_fewest_asleep_leave_room_and_one_less_does_not(
            work in any_work(1..=6, 2..=9, FINE),
        ) {
            let search = Search::new(&work).unwrap();
            let fewest = search.fewest_asleep();
            let least = (0..=work.groups.len()).find(|&asleep| leaves_room(&search, asleep));
            prop_assert_eq!(fewest, least.unwrap_or(work.groups.len()));
        }
    }

    #[test]
    fn a_plan_that_cannot_be_better_is_replayed_once() {
        // All fits; then most sleep and nothing waits for them, as computing takes long.
        for in_microbatches in [1024, 256] {
            let mut work = prefix(1024, in_microbatches, 1024);
            work.operations.iter_mut().for_each(|op| op.compute_ns *= 100);
            let mut search = Search::new(&work).unwrap();
            search.run();
            let (plan, outcome) = search.best.clone().unwrap();
            assert_eq!((outcome.stall_ns, outcome.slept_bytes > 0), (0, in_microbatches == 256));
            assert_eq!(search.steps, steps_of(&search, &plan));
        }
    }

    #[test]
    fn a_plan_as_short_as_the_bound_is_the_last_tried() {
        let mut work = prefix(64, 16, 64);
        work.groups.iter_mut().for_each(|group| group.bytes = LAYER_BYTES);
        let mut search = Search::new(&work).unwrap();
        search.run();
        let (plan, outcome) = search.best.clone().unwrap();
        assert!(outcome.stall_ns > 0);
        assert_eq!(search.steps, steps_of(&search, &plan) + bound_steps(&work));
    }

    #[test]
    fn a_search_without_a_plan_ends() {
        // So many that one replay takes more steps than there are.
        let work = prefix(1 << 14, 1 << 12, 1 << 14);
        let mut search = Search::new(&work).unwrap();
        search.run();
        assert_eq!(search.steps, STEPS_WITHOUT_PLAN_MAX);
        assert_eq!(search.finish(), None);
    }
}
