//! The leaves of a forest in depth-first order, and their units.
//!
//! The nodes between two successive leaves form a chain of consecutive numbers whose first parent is the
//! fork of the leaves' paths. So the nodes that a leaf adds are a range of numbers, and the nodes it shares
//! with the previous leaf are the path of that fork.

use super::{BalanceUnit, Workload};
use dormouse_schedule::NodeId;
use dormouse_schedule::forest::Forest;

/// Leaves by node number, and the sequences of each.
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
        let nodes: Vec<u32> = forest.leaves().map(|leaf| leaf.0).collect();
        // A sequence that ends inside a path belongs to the first leaf below its end.
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

    /// Returns the first node that leaf `i` adds to the previous leaves.
    pub(super) fn first_new(&self, i: usize) -> u32 {
        i.checked_sub(1).map_or(0, |before| self.nodes[before] + 1)
    }

    /// Returns the last common node of leaf `i` and the previous leaf; `None` if they share nothing.
    pub(super) fn fork(&self, i: usize) -> Option<NodeId> {
        self.forest.node(NodeId(self.first_new(i))).parent
    }

    /// Returns the range of leaves below a node.
    pub(super) fn below(&self, node: NodeId) -> std::ops::Range<usize> {
        let end = self.forest.node(node).subtree_end;
        let first = |id| self.nodes.partition_point(|leaf| *leaf < id);
        first(node.0)..first(end)
    }

    /// Returns the unit of each leaf, numbered by its first leaf.
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

    /// Merges leaves that share a group and groups that share a leaf.
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

/// Returns the root of a leaf in the union-find structure, halving paths.
fn root(parent: &mut [u32], mut leaf: u32) -> u32 {
    while parent[leaf as usize] != leaf {
        parent[leaf as usize] = parent[parent[leaf as usize] as usize];
        leaf = parent[leaf as usize];
    }
    leaf
}

/// Returns the leaves at which a segment may begin without splitting a unit, and the end.
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
