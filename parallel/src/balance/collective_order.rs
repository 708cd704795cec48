//! Ranks whose ops contain collectives run the same kinds of op in the same order.
//!
//! Each rank has its own sequence of passes: forwards, microbatches and backwards. The collective order
//! is a common supersequence of them; where a rank has no pass of its own it runs a *dummy*, a pass of
//! that kind on one padding row of weight 0. The shortest common supersequence is NP-hard; the greedy
//! choice takes the kind that most ranks want next, which serves at least a third of them each time.
//!
//! [`super::Shares::new`] makes no plans: it assumes plans that always share, cut no node into blocks and
//! have unlimited memory. For other plans (a node runs forward twice, its children in another order,
//! leaves separately), [`super::Shares::with_passes`] takes the passes of the plans themselves.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};

use super::leaves::Leaves;
use dormouse_schedule::NodeId;
use dormouse_schedule::tree_planner::pack;

/// Kinds of pass that contain collectives. Also parsed from the names of ops in plans.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PassKind {
    /// Forward of a node that has children.
    #[serde(alias = "prefix_forward", alias = "forward_again")]
    Forward,
    /// Forward and backward of a microbatch.
    Microbatch,
    /// Backward of a node that has children.
    #[serde(alias = "prefix_backward")]
    Backward,
}

/// All kinds, in the order ties are broken.
const KINDS: [PassKind; 3] = [PassKind::Forward, PassKind::Microbatch, PassKind::Backward];

/// One order of passes for all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct CollectiveOrder {
    /// The kinds that every rank runs, in order.
    pub kinds: Vec<PassKind>,
    /// Positions in `kinds` of each rank's own passes, ascending; the rest are dummies.
    pub own: Vec<Vec<u32>>,
}

impl CollectiveOrder {
    /// Merges the passes of all ranks into one order.
    #[must_use]
    pub fn of(passes: &[Vec<PassKind>]) -> Self {
        let mut kinds = Vec::new();
        let mut own: Vec<Vec<u32>> = vec![Vec::new(); passes.len()];
        let mut waiting: Vec<usize> =
            (0..passes.len()).filter(|r| !passes[*r].is_empty()).collect();
        while !waiting.is_empty() {
            let next = |rank: usize| passes[rank][own[rank].len()];
            let count = |kind| waiting.iter().filter(|rank| next(**rank) == kind).count();
            // Ties go to the first kind.
            let Some(kind) = KINDS.into_iter().min_by_key(|kind| waiting.len() - count(*kind))
            else {
                break;
            };
            let served: Vec<usize> = waiting.iter().copied().filter(|r| next(*r) == kind).collect();
            for rank in served {
                own[rank].push(kinds.len() as u32);
            }
            kinds.push(kind);
            waiting.retain(|rank| own[*rank].len() < passes[*rank].len());
        }
        Self { kinds, own }
    }

    /// Returns the number of dummies of a kind that a rank runs; 0 for an unknown rank.
    pub(super) fn dummies(&self, rank: usize, kind: PassKind) -> u32 {
        let Some(own) = self.own.get(rank) else { return 0 };
        let all = self.kinds.iter().filter(|k| **k == kind).count();
        let own = own.iter().filter(|at| self.kinds.get(**at as usize) == Some(&kind)).count();
        all.saturating_sub(own) as u32
    }
}

/// Returns the passes of a rank with these leaves, assuming a plan that always shares, has no blocks and
/// never runs a forward twice: each node's forward, the microbatches of its leaves, its other children, its
/// backward. Nodes in `apart` are skipped.
pub(super) fn rank_passes(
    leaves: &Leaves<'_>,
    own: impl Iterator<Item = u32>,
    microbatch_tokens: u32,
    apart: &BTreeSet<u32>,
) -> Vec<PassKind> {
    let forest = leaves.forest;
    // A root of one token has no rows; its children count as roots.
    let has_rows = |node: &NodeId| forest.node(*node).rows().count() > 0;
    let mut inner: Vec<NodeId> = Vec::new();
    // The parent and the rows of each leaf.
    let mut members: Vec<(Option<u32>, u64)> = Vec::new();
    let mut last: Option<NodeId> = None;
    for leaf in own.map(|leaf| NodeId(leaves.nodes[leaf as usize])).filter(has_rows) {
        let is_new = |node: &NodeId| last.is_none_or(|last| node.0 > last.0);
        let above = forest.node(leaf).parent.filter(has_rows);
        members.push((above.map(|node| node.0), forest.node(leaf).rows().count()));
        let begin = inner.len();
        inner.extend(forest.path(leaf).skip(1).filter(has_rows).take_while(is_new));
        inner[begin..].reverse();
        last = Some(leaf);
    }
    members.sort_by_key(|(above, _)| *above);
    let mut microbatches =
        Microbatches { members: &members, microbatch_tokens: microbatch_tokens.into() };
    let mut rank_passes = vec![PassKind::Microbatch; microbatches.of(None)];
    let runs_here = |node: &NodeId| !apart.contains(&node.0);
    let mut open: Vec<NodeId> = Vec::new();
    for node in inner {
        while let Some(done) = open.pop_if(|open| forest.node(*open).subtree_end <= node.0) {
            rank_passes.extend(runs_here(&done).then_some(PassKind::Backward));
        }
        rank_passes.extend(runs_here(&node).then_some(PassKind::Forward));
        rank_passes.resize(rank_passes.len() + microbatches.of(Some(node.0)), PassKind::Microbatch);
        open.push(node);
    }
    rank_passes.extend(open.iter().filter(|node| runs_here(node)).map(|_| PassKind::Backward));
    rank_passes
}

/// Leaves not yet in a microbatch, sorted by parent, roots first.
struct Microbatches<'a> {
    members: &'a [(Option<u32>, u64)],
    microbatch_tokens: u64,
}

impl Microbatches<'_> {
    /// Returns the number of microbatches that the leaves below `above` fill; `above` must ascend.
    fn of(&mut self, above: Option<u32>) -> usize {
        let count = self.members.partition_point(|member| member.0 <= above);
        let (own, rest) = self.members.split_at(count);
        self.members = rest;
        let rows: Vec<u64> = own.iter().map(|(_, rows)| *rows).collect();
        pack(&rows, self.microbatch_tokens).len()
    }
}
