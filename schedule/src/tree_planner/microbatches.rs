//! The parts of a node's subtree: microbatches of its leaves, and its other children.

use std::ops::Range;

use crate::cost::Flops;
use crate::tree_planner::pack::pack;
use crate::tree_planner::tree::PlanTree;

/// Leaves of one node that run together.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Microbatch {
    begin: u32,
    end: u32,
    pub(crate) bytes: u64,
    pub(crate) flops: Flops,
}

impl Microbatch {
    /// Returns the microbatch of `leaves`, the first of which is at `begin` in the list of all leaves.
    fn new(tree: &PlanTree, begin: usize, leaves: &[u32]) -> Option<Self> {
        let (mut bytes, mut flops) = (0_u64, Flops::default());
        for &leaf in leaves {
            bytes = bytes.saturating_add(tree.leaf_bytes(leaf as usize));
            flops += tree.leaf_flops(leaf as usize);
        }
        let (begin, end) = (begin as u32, (begin + leaves.len()) as u32);
        (begin < end).then_some(Self { begin, end, bytes, flops })
    }
}

/// A part of a node's subtree. Parts run one after another.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum SubtreePart {
    Microbatch(u32),
    Node(u32),
}

/// The first and the last part of a node's subtree, during which a sleeping node holds its window. They are
/// the same if there is one part, and `None` for a leaf.
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

/// The microbatches of all nodes. Leaves without a parent are listed under one past the last node.
#[derive(Clone, Debug)]
pub(crate) struct Microbatches {
    pub(crate) microbatches: Vec<Microbatch>,
    leaves: Vec<u32>,
    first: Vec<u32>,
}

impl Microbatches {
    /// Packs the leaves of each node under a budget of rows.
    pub(crate) fn new(tree: &PlanTree, microbatch_rows: u64) -> Self {
        let (mut leaves, starts) = leaves_by_parent(tree);
        let (mut microbatches, mut first) = (Vec::new(), Vec::with_capacity(tree.len() + 2));
        for above in 0..=tree.len() {
            first.push(microbatches.len() as u32);
            let (mut begin, end) = (starts[above], starts[above + 1]);
            let own = &mut leaves[begin..end];
            let rows: u64 = own.iter().map(|leaf| tree.rows(*leaf as usize)).sum();
            if rows <= microbatch_rows || own.len() == 1 {
                microbatches.extend(Microbatch::new(tree, begin, own));
                continue;
            }
            let rows: Vec<u64> = own.iter().map(|leaf| tree.rows(*leaf as usize)).collect();
            let given = own.to_vec();
            for members in pack(&rows, microbatch_rows) {
                let next = begin + members.len();
                let packed = &mut leaves[begin..next];
                packed.iter_mut().zip(&members).for_each(|(leaf, at)| *leaf = given[*at]);
                microbatches.extend(Microbatch::new(tree, begin, packed));
                begin = next;
            }
        }
        first.push(microbatches.len() as u32);
        Self { microbatches, leaves, first }
    }

    /// Returns the microbatches of a node's leaves.
    pub(crate) fn of(&self, node: usize) -> Range<u32> {
        self.first[node]..self.first[node + 1]
    }

    pub(crate) fn microbatch(&self, microbatch: u32) -> &Microbatch {
        &self.microbatches[microbatch as usize]
    }

    /// Returns the leaves of a microbatch, by number.
    pub(crate) fn members(&self, microbatch: u32) -> &[u32] {
        let microbatch = self.microbatch(microbatch);
        &self.leaves[microbatch.begin as usize..microbatch.end as usize]
    }

    /// Returns the parts of a node's subtree: microbatches, then children by number.
    pub(crate) fn under<'a>(
        &'a self,
        tree: &'a PlanTree,
        node: usize,
    ) -> impl Iterator<Item = SubtreePart> + 'a {
        let microbatches = self.of(node).map(SubtreePart::Microbatch);
        microbatches.chain(tree.inner_children(node).map(|child| SubtreePart::Node(child as u32)))
    }
}

/// Returns the leaves grouped by parent, by number within a group, and the start of each group.
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
