//! The leaves of a forest in depth-first order, and which of them belong together.
//!
//! Between one leaf and the next, every node number is new: the first is a child of where their
//! paths part, each further one a child of the one before. So what a leaf adds to the one before is
//! a run of numbers, and what it shares is the path of that first node's parent.

use super::{BalanceUnit, Workload};
use dormouse_schedule::NodeId;
use dormouse_schedule::forest::Forest;

/// Leaves by rising node number, and the sequences that run with each.
#[derive(Debug)]
pub(super) struct Leaves<'a> {
    pub(super) forest: &'a Forest,
    /// Node numbers.
    pub(super) nodes: Vec<u32>,
    /// (leaf, sequence), sorted.
    pub(super) sequences: Vec<(u32, u32)>,
}

impl<'a> Leaves<'a> {
    pub(super) fn of(forest: &'a Forest) -> Self {
        let ids = 0..forest.nodes().len() as u32;
        let nodes: Vec<u32> = ids.filter(|id| forest.is_leaf(NodeId(*id))).collect();
        // One that ends inside a path runs with the first leaf below its end.
        let leaf_of = |node: NodeId| nodes.partition_point(|leaf| *leaf < node.0) as u32;
        let endings = (0_u32..).zip(forest.endings());
        let mut sequences: Vec<(u32, u32)> =
            endings.map(|(sequence, ending)| (leaf_of(ending.node), sequence)).collect();
        sequences.sort_unstable();
        Self { forest, nodes, sequences }
    }

    pub(super) fn count(&self) -> usize {
        self.nodes.len()
    }

    /// The first node that leaf `i` adds to the one before it.
    pub(super) fn first_new(&self, i: usize) -> u32 {
        i.checked_sub(1).map_or(0, |before| self.nodes[before] + 1)
    }

    /// Where leaf `i`'s path parts from that of the leaf before; `None` where they share nothing.
    pub(super) fn fork(&self, i: usize) -> Option<NodeId> {
        self.forest.node(NodeId(self.first_new(i))).parent
    }

    /// The leaves below a node, as a run.
    pub(super) fn below(&self, node: NodeId) -> std::ops::Range<usize> {
        let end = self.forest.node(node).subtree_end;
        let first = |id| self.nodes.partition_point(|leaf| *leaf < id);
        first(node.0)..first(end)
    }

    /// A number for each leaf, equal for leaves of one unit: the first leaf of the unit.
    pub(super) fn units(&self, batch: &Workload<'_>, unit: BalanceUnit) -> Vec<u32> {
        match unit {
            BalanceUnit::Tree => {
                let mut units = Vec::with_capacity(self.count());
                for i in 0..self.count() {
                    let shared = self.fork(i).and_then(|_| units.last().copied());
                    units.push(shared.unwrap_or(i as u32));
                }
                units
            }
            BalanceUnit::Group => self.groups(batch.groups),
            BalanceUnit::Leaf | BalanceUnit::GroupOrLeaf => (0..self.count() as u32).collect(),
        }
    }

    /// Leaves joined by groups, groups joined by leaves.
    fn groups(&self, groups: &[u32]) -> Vec<u32> {
        let mut by_group: Vec<(u32, u32)> = self
            .sequences
            .iter()
            .map(|(leaf, sequence)| (groups[*sequence as usize], *leaf))
            .collect();
        by_group.sort_unstable();
        let mut parent: Vec<u32> = (0..self.count() as u32).collect();
        for pair in by_group.windows(2).filter(|pair| pair[0].0 == pair[1].0) {
            let (a, b) = (root(&mut parent, pair[0].1), root(&mut parent, pair[1].1));
            parent[a.max(b) as usize] = a.min(b);
        }
        (0..self.count() as u32).map(|leaf| root(&mut parent, leaf)).collect()
    }
}

/// The first leaf of a leaf's unit so far; paths are halved on the way.
fn root(parent: &mut [u32], mut leaf: u32) -> u32 {
    while parent[leaf as usize] != leaf {
        parent[leaf as usize] = parent[parent[leaf as usize] as usize];
        leaf = parent[leaf as usize];
    }
    leaf
}

/// Where a run of leaves may begin: between two leaves that no unit spans; and the end.
pub(super) fn starts(units: &[u32]) -> Vec<u32> {
    let mut last = vec![0_u32; units.len()];
    for (leaf, unit) in (0_u32..).zip(units) {
        last[*unit as usize] = leaf;
    }
    let mut starts = vec![0];
    let mut end = 0;
    for (leaf, unit) in (0_u32..).zip(units) {
        end = end.max(last[*unit as usize]);
        if end == leaf {
            starts.push(leaf + 1);
        }
    }
    starts
}
