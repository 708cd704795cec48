//! Cuts leaves into contiguous segments with the smallest maximum cost. Exact.
//!
//! A node costs `full` for the first rank with a leaf below it and `again ≤ full` for every other (equal
//! if recomputed, less if sent). A segment of leaves `i..j` thus costs
//!
//! ```text
//!   again(path of the fork before leaf i) + full(every node from leaf i's first new one to leaf j − 1)
//! ```
//!
//! two prefix sums and one path sum. It grows with `j` and does not grow with `i`: the path of the next
//! fork lies on leaf i's path, so its nodes were paid for before. Hence for a given cap, segments of
//! maximal length use the fewest ranks, and a binary search finds the smallest cap that fits the ranks.

use super::leaves::Leaves;
use dormouse_schedule::{NodeId, bisect};

/// Segment costs in constant time.
#[derive(Debug)]
pub(super) struct Segments<'a> {
    leaves: &'a Leaves<'a>,
    /// Sums of `full` over the nodes before each number.
    full_before: Vec<u64>,
    /// Sum of `again` over a node and its ancestors.
    again_path: Vec<u64>,
}

impl<'a> Segments<'a> {
    /// `again[v] ≤ full[v]`, and the sum of `full` at most [`dormouse_schedule::cost::COST_MAX_PS`].
    pub(super) fn new(leaves: &'a Leaves<'a>, full: &[u64], again: &[u64]) -> Self {
        Self { leaves, full_before: sums_before(full), again_path: path_sums(leaves, again) }
    }

    /// Returns the cost of leaves `begin..end`.
    pub(super) fn cost(&self, begin: usize, end: usize) -> u64 {
        if begin == end {
            return 0;
        }
        let first = self.leaves.first_new(begin) as usize;
        let last = self.leaves.nodes[end - 1] as usize;
        let fork = self.leaves.fork(begin).map_or(0, |fork| self.again_path[fork.0 as usize]);
        fork + self.full_before[last + 1] - self.full_before[first]
    }

    /// Returns the ends of at most `ranks` segments with the smallest maximum cost. `starts` lists where
    /// segments may begin, and the end. Unneeded ranks are omitted.
    pub(super) fn cut(&self, starts: &[u32], ranks: u32) -> Vec<u32> {
        let pieces = starts.windows(2).map(|pair| self.cost(pair[0] as usize, pair[1] as usize));
        let reach = |cap| self.reach(starts, cap, ranks as usize);
        let count = self.leaves.count();
        let (low, high) = (pieces.max().unwrap_or(0), self.cost(0, count));
        let cap = bisect(low, high, |cap| reach(cap).is_some());
        reach(cap).unwrap_or_else(|| vec![count as u32])
    }

    /// Returns the ends of at most `ranks` segments of maximal length within the cap, if possible.
    fn reach(&self, starts: &[u32], cap: u64, ranks: usize) -> Option<Vec<u32>> {
        let mut ends = Vec::new();
        let mut at = 0;
        while at + 1 < starts.len() {
            let begin = starts[at] as usize;
            let within = |end: &u32| self.cost(begin, *end as usize) <= cap;
            let further = starts[at + 1..].partition_point(within);
            if further == 0 || ends.len() == ranks {
                return None;
            }
            at += further;
            ends.push(starts[at]);
        }
        Some(ends)
    }
}

/// Returns the sum of the costs before each index, and of all.
pub(super) fn sums_before(costs: &[u64]) -> Vec<u64> {
    let mut sum = 0;
    let sums = costs.iter().map(|cost| {
        sum += cost;
        sum
    });
    std::iter::once(0).chain(sums).collect()
}

/// Returns the sums over each node and its ancestors.
pub(super) fn path_sums(leaves: &Leaves<'_>, costs: &[u64]) -> Vec<u64> {
    let mut sums: Vec<u64> = Vec::with_capacity(costs.len());
    for (node, cost) in leaves.forest.nodes().iter().zip(costs) {
        let above = node.parent.map_or(0, |NodeId(parent)| sums[parent as usize]);
        sums.push(above + cost);
    }
    sums
}
