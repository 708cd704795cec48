//! Replicas of a pipeline: which of them runs which groups, and the lists of all.
//!
//! Replicas begin together, and a step lasts until the last has run its list. How long a list takes follows from
//! its groups and from the room of the stages: where long prefixes leave room for one group at a time, its
//! bubble is paid for each. So work alone does not balance replicas; their lists do.
//!
//! 1. Longest first: groups by their time on the busiest stage, each to the replica with the least.
//! 2. Every replica's lists are planned within the room of its stages.
//! 3. While it ends sooner, the replica that ends last gives a group to another, or exchanges one with it.
//!    Both are planned again, the most promising by time first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use serde::{Deserialize, Serialize};

use super::PipelineError;
use super::chunks::Costs;
use super::lists::Stages;
use super::spec::Pipeline;
use dormouse_schedule::check_range;

/// Maximum number of replicas.
pub const REPLICAS_MAX: u32 = 1 << 12;
/// Maximum changes tried in a row without an end that is sooner.
const TRIED_IN_A_ROW_MAX: usize = 8;
/// Maximum changes tried; each plans two replicas.
const TRIED_MAX: u32 = 64;

/// One replica.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Replica {
    /// Numbers of its groups, ascending: group i of its lists is `groups[i]` of the pipeline.
    pub groups: Vec<u32>,
    /// Its lists.
    pub stages: Stages,
}

/// All replicas.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Replicas {
    /// Each replica.
    pub replicas: Vec<Replica>,
    /// Time from the start to the end of the last replica.
    pub makespan_ns: u64,
    /// Lower bound on it for whole groups: an even share of the busiest stage's compute, or the largest group's.
    pub bound_ns: u64,
    /// Number of changes to the first assignment that were planned.
    pub tried: u32,
}

/// A group of the last replica that moves to another one, in exchange for one of that replica's groups or none.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Change {
    /// Estimated end of the later of the two.
    end_ns: u64,
    other: usize,
    gives: u32,
    takes: Option<u32>,
}

impl Pipeline {
    /// Assigns the groups to `replicas` replicas of the pipeline, and plans the lists of each.
    ///
    /// # Errors
    /// As [`Pipeline::plan`]; `Count` for 0 replicas, or more than groups or [`REPLICAS_MAX`].
    pub fn plan_replicas(&self, replicas: u32) -> Result<Replicas, PipelineError> {
        self.check()?;
        let groups = u32::try_from(self.groups.len()).unwrap_or(u32::MAX);
        check_range("replicas", replicas, 1, groups.min(REPLICAS_MAX))?;
        let work = Work::of(self);
        let mut all = work
            .longest_first(replicas)
            .into_iter()
            .map(|groups| self.replica(groups))
            .collect::<Result<Vec<Replica>, _>>()?;
        let mut tried = 0;
        while let Some(changed) = self.sooner(&all, &work, &mut tried)? {
            for (place, replica) in changed {
                all[place] = replica;
            }
        }
        let makespan_ns = all.iter().map(Replica::end_ns).max().unwrap_or(0);
        Ok(Replicas { replicas: all, makespan_ns, bound_ns: work.bound_ns(replicas), tried })
    }

    fn replica(&self, mut groups: Vec<u32>) -> Result<Replica, PipelineError> {
        groups.sort_unstable();
        let stages = self.of_groups(&groups).plan()?;
        Ok(Replica { groups, stages })
    }

    /// Returns the pipeline with some of its groups.
    #[must_use]
    pub fn of_groups(&self, groups: &[u32]) -> Self {
        let groups = groups.iter().map(|group| self.groups[*group as usize].clone()).collect();
        Self {
            groups,
            stage_bytes: self.stage_bytes.clone(),
            stage_room_bytes: self.stage_room_bytes.clone(),
            prefix_permille: self.prefix_permille.clone(),
            microbatch_permille: self.microbatch_permille.clone(),
            ..*self
        }
    }

    /// Returns the last replica and another after a change with which the later of both ends sooner than the
    /// last does; `None` if there is none among the most promising.
    fn sooner(
        &self,
        all: &[Replica],
        work: &Work,
        tried: &mut u32,
    ) -> Result<Option<[(usize, Replica); 2]>, PipelineError> {
        let Some(last) = (0..all.len()).max_by_key(|place| (all[*place].end_ns(), Reverse(*place)))
        else {
            return Ok(None);
        };
        for change in work.changes(all, last) {
            if *tried == TRIED_MAX {
                return Ok(None);
            }
            *tried += 1;
            let without = |place: usize, group: Option<u32>| {
                all[place].groups.iter().copied().filter(move |own| Some(*own) != group)
            };
            let gives = Some(change.gives);
            let own = without(last, gives).chain(change.takes).collect();
            let others = without(change.other, change.takes).chain(gives).collect();
            let both = self.replica(own).and_then(|own| Ok((own, self.replica(others)?)));
            let (own, other) = match both {
                // These groups have no room together, or too many ops: the assignment stays.
                Err(PipelineError::Room { .. } | PipelineError::Count(_)) => continue,
                both => both?,
            };
            if own.end_ns().max(other.end_ns()) < all[last].end_ns() {
                return Ok(Some([(last, own), (change.other, other)]));
            }
        }
        Ok(None)
    }
}

impl Replica {
    fn end_ns(&self) -> u64 {
        self.stages.report.makespan_ns
    }
}

/// Compute time of each group on each stage.
#[derive(Debug)]
struct Work {
    /// By stage, then group.
    stages: Vec<Vec<u64>>,
    /// The stage with the most.
    busiest: usize,
}

impl Work {
    fn of(pipeline: &Pipeline) -> Self {
        let costs = Costs(pipeline);
        let of_stage = |stage| pipeline.groups.iter().map(|it| costs.group_ns(it, stage)).collect();
        let stages: Vec<Vec<u64>> = (0..pipeline.stages).map(of_stage).collect();
        let sum = |stage: &usize| sum_ns(&stages[*stage]);
        let busiest = (0..stages.len()).max_by_key(sum).unwrap_or(0);
        Self { stages, busiest }
    }

    fn ns(&self, group: u32) -> u64 {
        self.stages[self.busiest][group as usize]
    }

    fn bound_ns(&self, replicas: u32) -> u64 {
        let even = self.stages.iter().map(|own| sum_ns(own).div_ceil(replicas.into()));
        let largest = self.stages.iter().flatten().map(|ns| u128::from(*ns));
        u64::try_from(even.chain(largest).max().unwrap_or(0)).unwrap_or(u64::MAX)
    }

    /// Returns the groups of each replica: by descending time, each to the replica with the fewest
    /// nanoseconds, of equals to that with the fewest groups.
    fn longest_first(&self, replicas: u32) -> Vec<Vec<u32>> {
        let mut order: Vec<u32> = (0..self.stages[self.busiest].len() as u32).collect();
        order.sort_by_key(|group| (Reverse(self.ns(*group)), *group));
        let mut all = vec![(0_u128, Vec::new()); replicas as usize];
        for group in order {
            let least = all.iter_mut().min_by_key(|(ns, groups)| (*ns, groups.len()));
            if let Some((ns, groups)) = least {
                *ns += u128::from(self.ns(group));
                groups.push(group);
            }
        }
        all.into_iter().map(|(_, groups)| groups).collect()
    }

    /// Returns the best changes with which the last replica is estimated to end sooner, best first: ends move by
    /// the time of what is given and taken. No more than [`TRIED_IN_A_ROW_MAX`] are held, as replicas with
    /// thousands of groups have millions of changes.
    fn changes(&self, all: &[Replica], last: usize) -> Vec<Change> {
        let end_ns = all[last].end_ns();
        let may_be_fewer = all[last].groups.len() > 1;
        let mut best = BinaryHeap::with_capacity(TRIED_IN_A_ROW_MAX + 1);
        for (other, replica) in all.iter().enumerate().filter(|(other, _)| *other != last) {
            let taken = replica.groups.iter().map(|group| (Some(*group), self.ns(*group)));
            for (takes, taken_ns) in may_be_fewer.then_some((None, 0)).into_iter().chain(taken) {
                for &gives in &all[last].groups {
                    let Some(less_ns) = self.ns(gives).checked_sub(taken_ns) else { continue };
                    let other_ns = replica.end_ns().saturating_add(less_ns);
                    let later_ns = other_ns.max(end_ns.saturating_sub(less_ns));
                    if later_ns < end_ns {
                        best.push(Change { end_ns: later_ns, other, gives, takes });
                        if best.len() > TRIED_IN_A_ROW_MAX {
                            best.pop();
                        }
                    }
                }
            }
        }
        best.into_sorted_vec()
    }
}

fn sum_ns(of_groups: &[u64]) -> u128 {
    of_groups.iter().map(|ns| u128::from(*ns)).sum()
}

#[cfg(test)]
mod tests {
    use super::super::lists::PipelineReport;
    use super::*;

    /// Returns replicas of groups with `work_ns`, dealt in turn. Each ends when its groups' work does.
    fn replicas(work_ns: &[u64], count: usize) -> (Work, Vec<Replica>) {
        let replica = |place: usize| {
            let groups: Vec<u32> = (place as u32..work_ns.len() as u32).step_by(count).collect();
            let report = PipelineReport {
                makespan_ns: groups.iter().map(|group| work_ns[*group as usize]).sum(),
                ideal_ns: 0,
                bubble: 0.0,
                bubble_bound: 0.0,
                chunks: 1,
                tried: 1,
                prefix_saved_asleep: false,
            };
            Replica { groups, stages: Stages { stages: Vec::new(), report } }
        };
        let work = Work { stages: vec![work_ns.to_vec()], busiest: 0 };
        (work, (0..count).map(replica).collect())
    }

    #[test]
    fn the_best_changes_alone_are_held() {
        // Ascending: the last replica has more work, and thousands of groups have a smaller one elsewhere.
        let work_ns: Vec<u64> = (0..8192).map(|group| 1_000_000 + 37 * group % 4099).collect();
        let (work, all) = replicas(&work_ns, 2);
        let last = usize::from(all[1].end_ns() > all[0].end_ns());
        assert_eq!(work.changes(&all, last).len(), TRIED_IN_A_ROW_MAX);

        let (work, all) = replicas(&work_ns[..60], 3);
        let last = (0..3).max_by_key(|place| all[*place].end_ns()).unwrap_or(0);
        let mut every = Vec::new();
        for other in (0..3).filter(|other| *other != last) {
            let takes = all[other].groups.iter().map(|group| Some(*group)).chain([None]);
            for (takes, gives) in
                takes.flat_map(|it| all[last].groups.iter().map(move |own| (it, *own)))
            {
                let less_ns = i128::from(work.ns(gives)) - takes.map_or(0, |it| work.ns(it).into());
                let ends = [
                    -less_ns + i128::from(all[last].end_ns()),
                    less_ns + i128::from(all[other].end_ns()),
                ];
                let end_ns = ends[0].max(ends[1]);
                if less_ns >= 0 && end_ns < i128::from(all[last].end_ns()) {
                    every.push(Change { end_ns: end_ns as u64, other, gives, takes });
                }
            }
        }
        every.sort_unstable();
        assert!(every.len() > TRIED_IN_A_ROW_MAX, "{}", every.len());
        assert_eq!(work.changes(&all, last), every[..TRIED_IN_A_ROW_MAX]);
    }
}
