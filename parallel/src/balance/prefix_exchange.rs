//! Nodes that several ranks need, and how each rank obtains them.
//!
//! # Costs
//! - *Recompute*: every rank computes the node.
//! - *Send*: the first rank computes the node and sends K and V to the one other rank that needs it, which
//!   pays for receiving them and returning gradients. The transfer is hidden only if the receiver has other
//!   work, so a node is sent only if the receiver's work outside the node, shared with no rank, costs at
//!   least as much as all it is sent.
//! - *Divide*: all ranks that need the node compute a part of its rows each and gather K and V of the rest
//!   at the start of the step; its backward runs at the end. Ranks wait for each other there, which
//!   [`ExchangePlan::finish`] simulates.
//!
//! # Order of divided nodes
//! Ancestors first. Among nodes of equal depth, the sets of ranks are runs that share at most one rank, so
//! every second node goes first: a rank waits for one neighbour, not for a chain. The backward order is the
//! reverse. No rank takes part in two nodes at a time and all follow one order, so they cannot deadlock.

use std::collections::BTreeSet;

use super::cost_table::{CostTable, Divided};
use super::cut::sums_before;
use super::leaves::Leaves;
use dormouse_schedule::NodeId;

/// How ranks obtain a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ExchangeChoice {
    Recompute,
    Send,
    Divide(Divided),
}

/// Condition on the ancestors of an exchanged node. If ops contain collectives, exchanged nodes run before
/// the ops, so their ancestors must be exchanged too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum AncestorRule {
    /// No condition.
    Any,
    /// Ancestors must be exchanged on their own merit: nodes below a recomputed node are recomputed.
    Computed,
    /// Ancestors are divided if necessary.
    Divided,
}

/// A node needed by ranks `first..=last`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct SharedNode {
    pub(super) node: NodeId,
    pub(super) first: u32,
    pub(super) last: u32,
    pub(super) way: ExchangeChoice,
}

impl SharedNode {
    fn ranks(&self) -> std::ops::RangeInclusive<usize> {
        self.first as usize..=self.last as usize
    }
}

/// Segments of leaves and their common nodes.
#[derive(Clone, Debug)]
pub(super) struct ExchangePlan<'a> {
    pub(super) leaves: &'a Leaves<'a>,
    /// Costs of all nodes, in picoseconds.
    pub(super) full: &'a [u64],
    pub(super) cost_table: CostTable,
    /// Ends of the segments, none empty.
    pub(super) ends: Vec<u32>,
    /// Ordered by node number.
    pub(super) common: Vec<SharedNode>,
}

impl<'a> ExchangePlan<'a> {
    /// Creates a plan in which every common node is recomputed.
    pub(super) fn new(
        leaves: &'a Leaves<'a>,
        full: &'a [u64],
        cost_table: CostTable,
        ends: Vec<u32>,
    ) -> Self {
        let mut common = Vec::new();
        let rank_of = |leaf: usize| ends.partition_point(|end| *end as usize <= leaf) as u32;
        let mut known = BTreeSet::new();
        for begin in &ends[..ends.len() - 1] {
            let fork = leaves.fork(*begin as usize);
            for node in fork.into_iter().flat_map(|fork| leaves.forest.path(fork)) {
                if !known.insert(node.0) {
                    break;
                }
                let below = leaves.below(node);
                let (first, last) = (rank_of(below.start), rank_of(below.end - 1));
                common.push(SharedNode { node, first, last, way: ExchangeChoice::Recompute });
            }
        }
        common.sort_by_key(|common| common.node.0);
        Self { leaves, full, cost_table, ends, common }
    }

    /// Chooses the cheapest permitted exchange for each common node.
    pub(super) fn choose(&mut self, above: AncestorRule) {
        let sent = self.sent(above);
        for (common, sent) in self.common.iter_mut().zip(sent) {
            let node = self.leaves.forest.node(common.node);
            let cost = self.full[common.node.0 as usize];
            let divided = self.cost_table.divided(node, cost, common.ranks().count() as u32);
            common.way = if node.rows().count() == 0 {
                // A root of one token has no rows to compute or send.
                ExchangeChoice::Recompute
            } else if sent {
                ExchangeChoice::Send
            } else if divided.sum_ps() < cost {
                ExchangeChoice::Divide(divided)
            } else {
                ExchangeChoice::Recompute
            };
        }
        match above {
            AncestorRule::Any => {}
            AncestorRule::Computed => self.leave_out_below(),
            AncestorRule::Divided => self.divide_above(),
        }
    }

    /// Recomputes every node below a recomputed node; parents come first.
    fn leave_out_below(&mut self) {
        let mut computed = BTreeSet::new();
        for common in &mut self.common {
            let node = self.leaves.forest.node(common.node);
            if node.parent.is_some_and(|parent| computed.contains(&parent.0)) {
                common.way = ExchangeChoice::Recompute;
            }
            if common.way == ExchangeChoice::Recompute && node.rows().count() > 0 {
                computed.insert(common.node.0);
            }
        }
    }

    /// Divides every ancestor of an exchanged node, at any cost; children come first.
    fn divide_above(&mut self) {
        let mut read = BTreeSet::new();
        for common in self.common.iter_mut().rev() {
            let node = self.leaves.forest.node(common.node);
            let has_rows = node.rows().count() > 0;
            if common.way == ExchangeChoice::Recompute && has_rows && read.contains(&common.node.0)
            {
                let (cost, ranks) = (self.full[common.node.0 as usize], common.ranks().count());
                let divided = self.cost_table.divided(node, cost, ranks as u32);
                common.way = ExchangeChoice::Divide(divided);
            }
            if common.way != ExchangeChoice::Recompute {
                read.extend(node.parent.map(|parent| parent.0));
            }
        }
    }

    /// Selects the nodes to send, deepest first, as long as the receiver has enough other work. Divided nodes
    /// run before sent ones, so no divided node may have a sent ancestor.
    fn sent(&self, above: AncestorRule) -> Vec<bool> {
        let before = sums_before(self.full);
        let shared = self.shared_with_next();
        // The work of a rank outside the subtree of a node that it shares only with the previous rank. Nodes
        // shared with the next rank are not below that node: a third rank would share it.
        let outside = |rank: usize, node: NodeId| {
            let end = self.leaves.nodes[self.ends[rank] as usize - 1] as usize + 1;
            let below_end = self.leaves.forest.node(node).subtree_end as usize;
            (before[end] - before[below_end]).saturating_sub(shared[rank])
        };
        let mut sent = vec![false; self.common.len()];
        // The cost of what each rank is sent, and whether its other work still hides it.
        let mut load = vec![0_u64; self.ends.len()];
        let mut open = vec![true; self.ends.len()];
        for (index, common) in self.common.iter().enumerate().rev() {
            let to = common.last as usize;
            if common.first + 1 != common.last || !open[to] {
                continue;
            }
            let node = self.leaves.forest.node(common.node);
            let cost = self.full[common.node.0 as usize];
            if self.cost_table.sent_ps(node) >= cost {
                let is_divided = self.cost_table.divided(node, cost, 2).sum_ps() < cost;
                open[to] = !is_divided && above != AncestorRule::Divided;
                continue;
            }
            load[to] += cost;
            open[to] = load[to] <= outside(to, common.node);
            sent[index] = open[to];
        }
        sent
    }

    /// Returns, for each rank, the cost of the nodes shared with the next rank but not with the previous.
    fn shared_with_next(&self) -> Vec<u64> {
        let mut begin = 0;
        let mut sums = Vec::with_capacity(self.ends.len());
        for end in &self.ends[..self.ends.len() - 1] {
            let first = self.leaves.first_new(begin);
            let fork = self.leaves.fork(*end as usize);
            let path = fork.into_iter().flat_map(|fork| self.leaves.forest.path(fork));
            let new = path.take_while(|node| node.0 >= first);
            sums.push(new.map(|node| self.full[node.0 as usize]).sum());
            begin = *end as usize;
        }
        sums.push(0);
        sums
    }

    /// Returns the busy and finish times of each rank.
    pub(super) fn finish(&self) -> Vec<Load> {
        let before = sums_before(self.full);
        let mut alone_ps: Vec<u64> = Vec::with_capacity(self.ends.len());
        let mut begin = 0;
        for end in &self.ends {
            let first = self.leaves.first_new(begin) as usize;
            let last = self.leaves.nodes[*end as usize - 1] as usize;
            alone_ps.push(before[last + 1] - before[first]);
            begin = *end as usize;
        }
        for common in &self.common {
            let cost = self.full[common.node.0 as usize];
            let of_others = match common.way {
                ExchangeChoice::Recompute => cost,
                ExchangeChoice::Send => {
                    self.cost_table.sent_ps(self.leaves.forest.node(common.node))
                }
                ExchangeChoice::Divide(_) => {
                    alone_ps[common.first as usize] -= cost;
                    continue;
                }
            };
            alone_ps[common.ranks()].iter_mut().skip(1).for_each(|ps| *ps += of_others);
        }
        self.play(&alone_ps)
    }

    fn play(&self, alone_ps: &[u64]) -> Vec<Load> {
        let mut loads: Vec<Load> =
            alone_ps.iter().map(|ps| Load { busy_ps: *ps, finish_ps: 0 }).collect();
        let order = self.divided_in_order();
        for (common, divided) in &order {
            meet(&mut loads[common.ranks()], divided.forward_ps);
        }
        for (load, alone_ps) in loads.iter_mut().zip(alone_ps) {
            load.finish_ps = load.finish_ps.saturating_add(*alone_ps);
        }
        for (common, divided) in order.iter().rev() {
            meet(&mut loads[common.ranks()], divided.backward_ps);
        }
        loads
    }

    /// Returns divided nodes in the order of their forwards.
    pub(super) fn divided_in_order(&self) -> Vec<(SharedNode, Divided)> {
        let mut keyed = Vec::new();
        // Divided ancestors of the current node, and the number of divided nodes at each depth.
        let mut above: Vec<u32> = Vec::new();
        let mut at_depth: Vec<u32> = Vec::new();
        for common in &self.common {
            let ExchangeChoice::Divide(divided) = common.way else { continue };
            let contains =
                |id: &u32| common.node.0 < self.leaves.forest.node(NodeId(*id)).subtree_end;
            while above.last().is_some_and(|id| !contains(id)) {
                above.pop();
            }
            let depth = above.len();
            above.push(common.node.0);
            if at_depth.len() == depth {
                at_depth.push(0);
            }
            keyed.push(((depth, at_depth[depth] % 2, common.node.0), (*common, divided)));
            at_depth[depth] += 1;
        }
        keyed.sort_by_key(|(key, _)| *key);
        keyed.into_iter().map(|(_, common)| common).collect()
    }
}

/// Times of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Load {
    /// Time spent computing and exchanging.
    pub(super) busy_ps: u64,
    /// End of its last op, including waits.
    pub(super) finish_ps: u64,
}

/// Runs an operation of several ranks; it starts when the last of them is ready.
fn meet(loads: &mut [Load], took_ps: u64) {
    let start = loads.iter().map(|load| load.finish_ps).max().unwrap_or(0);
    for load in loads {
        // A node divided for a descendant may take any time.
        load.finish_ps = start.saturating_add(took_ps);
        load.busy_ps = load.busy_ps.saturating_add(took_ps);
    }
}
