//! What runs under a node: microbatches of its leaves, and its other children.

use std::ops::Range;

use crate::tree_planner::cost_model::CostModel;
use crate::tree_planner::pack::pack;
use crate::tree_planner::tree::PlanTree;

/// Leaves of one node run together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Microbatch {
    begin: u32,
    end: u32,
    pub(crate) bytes: u64,
    pub(crate) flops: f64,
}

/// One thing that runs under a node, from start to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SubtreePart {
    Microbatch(u32),
    Node(u32),
}

/// Which run at the two ends of a node's subtree, beside the window of one that sleeps: the same
/// where there is only one, none for a leaf.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct EdgeParts {
    pub(crate) first: Option<SubtreePart>,
    pub(crate) last: Option<SubtreePart>,
}

impl EdgeParts {
    pub(crate) fn has(&self, item: SubtreePart) -> bool {
        self.first == Some(item) || self.last == Some(item)
    }
}

/// The microbatches of all nodes. What hangs from nothing is listed under one past the last node.
#[derive(Clone, Debug)]
pub(crate) struct Microbatches {
    pub(crate) microbatches: Vec<Microbatch>,
    leaves: Vec<u32>,
    first: Vec<u32>,
}

impl Microbatches {
    /// Packs the leaves of each node under a budget of rows.
    pub(crate) fn new(
        tree: &PlanTree,
        scored: &[u64],
        shape: &CostModel,
        microbatch_rows: u64,
    ) -> Self {
        let (mut leaves, starts) = leaves_by_parent(tree);
        let mut items = Self { microbatches: Vec::new(), leaves: Vec::new(), first: Vec::new() };
        for above in 0..=tree.len() {
            items.first.push(items.microbatches.len() as u32);
            let (begin, end) = (starts[above], starts[above + 1]);
            let own = &mut leaves[begin..end];
            let sum: u64 = own.iter().map(|leaf| rows(tree, *leaf)).sum();
            if sum <= microbatch_rows || own.len() == 1 {
                items.push(tree, scored, shape, begin, own);
                continue;
            }
            let rows: Vec<u64> = own.iter().map(|leaf| rows(tree, *leaf)).collect();
            let given = own.to_vec();
            let mut at = 0;
            for members in pack(&rows, microbatch_rows) {
                for (place, member) in own[at..].iter_mut().zip(&members) {
                    *place = given[*member];
                }
                items.push(tree, scored, shape, begin + at, &own[at..at + members.len()]);
                at += members.len();
            }
        }
        items.first.push(items.microbatches.len() as u32);
        items.leaves = leaves;
        items
    }

    fn push(
        &mut self,
        tree: &PlanTree,
        scored: &[u64],
        shape: &CostModel,
        begin: usize,
        own: &[u32],
    ) {
        if own.is_empty() {
            return;
        }
        let (mut bytes, mut flops) = (0_u64, 0.0);
        for &leaf in own {
            let scored = scored[leaf as usize];
            bytes = bytes.saturating_add(shape.leaf_bytes(rows(tree, leaf), scored));
            flops += shape.leaf_flops(tree.nodes[leaf as usize].rows, scored);
        }
        let (begin, end) = (begin as u32, (begin + own.len()) as u32);
        self.microbatches.push(Microbatch { begin, end, bytes, flops });
    }

    pub(crate) fn leaf_count(&self) -> usize {
        self.leaves.len()
    }

    /// The microbatches of a node's leaves.
    pub(crate) fn of(&self, node: usize) -> Range<u32> {
        self.first[node]..self.first[node + 1]
    }

    pub(crate) fn microbatch(&self, microbatch: u32) -> &Microbatch {
        &self.microbatches[microbatch as usize]
    }

    /// The leaves of a microbatch, by number.
    pub(crate) fn members(&self, microbatch: u32) -> &[u32] {
        let microbatch = self.microbatch(microbatch);
        &self.leaves[microbatch.begin as usize..microbatch.end as usize]
    }

    /// All that runs under a node, microbatches first; children by number.
    pub(crate) fn under<'a>(
        &'a self,
        tree: &'a PlanTree,
        node: usize,
    ) -> impl Iterator<Item = SubtreePart> + 'a {
        let microbatches = self.of(node).map(SubtreePart::Microbatch);
        microbatches.chain(tree.inner_children(node).map(|child| SubtreePart::Node(child as u32)))
    }
}

fn rows(tree: &PlanTree, leaf: u32) -> u64 {
    tree.nodes[leaf as usize].rows.count()
}

/// Leaves grouped by what they hang from, by number within; and where each group starts.
fn leaves_by_parent(tree: &PlanTree) -> (Vec<u32>, Vec<usize>) {
    let leaves = || (0..tree.len()).filter(|id| tree.is_leaf(*id));
    let mut starts = vec![0_usize; tree.len() + 2];
    for leaf in leaves() {
        starts[tree.above(leaf) + 1] += 1;
    }
    for above in 0..=tree.len() {
        starts[above + 1] += starts[above];
    }
    let mut grouped = vec![0_u32; starts[tree.len() + 1]];
    let mut next = starts.clone();
    for leaf in leaves() {
        let place = &mut next[tree.above(leaf)];
        grouped[*place] = leaf as u32;
        *place += 1;
    }
    (grouped, starts)
}
