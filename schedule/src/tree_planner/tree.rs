//! The nodes of a plan: those of the forest, long ones cut into blocks, and what is planned dense
//! laid out leaf by leaf.

use serde::{Deserialize, Serialize};

use crate::forest::Forest;
use crate::limits::NODES_MAX;
use crate::{NodeId, PlanError, Residency, Span};

/// Number of no node, in lists of plain numbers.
pub(crate) const NONE: u32 = NodeId::NONE.0;

/// One node of a plan. Numbered depth first; a forest of which nothing is cut, planned dense or
/// without rows keeps its numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanNode {
    /// Its parent, a smaller number; `None` where it reads nothing.
    pub parent: Option<NodeId>,
    /// Positions of the rows it runs; never empty. Row `r` predicts token `r + 1`.
    pub rows: Span,
    /// One past the last node of its subtree.
    pub subtree_end: u32,
    /// A sequence that runs through it: its ids are that sequence's.
    pub sequence: u32,
    /// The forest's node it is, is a block of, or ends in.
    pub origin: NodeId,
    /// What becomes of what it saves; `keep` for a leaf, whose backward is in its microbatch.
    pub residency: Residency,
}

/// The nodes, and where each of the forest's went.
#[derive(Clone, Debug)]
pub(crate) struct PlanTree {
    pub(crate) nodes: Vec<PlanNode>,
    /// By the forest's number: the last of the node's blocks, a leaf that holds all its rows where
    /// it is planned dense, [`NONE`] where it has no rows.
    pub(crate) of: Vec<u32>,
}

impl PlanTree {
    /// The nodes of `forest`; subtrees whose first node is in `dense` get a leaf for each of
    /// theirs. `block_rows` is the longest node, 0 for any.
    pub(crate) fn new(forest: &Forest, dense: &[bool], block_rows: u64) -> Result<Self, PlanError> {
        let count = forest.nodes().len();
        let mut tree = Self { nodes: Vec::with_capacity(count), of: vec![NONE; count] };
        let mut id = 0;
        while id < count {
            let node = forest.node(NodeId(id as u32));
            let parent = node.parent.map_or(NONE, |above| tree.of[above.0 as usize]);
            let end = if dense.get(id).is_some_and(|dense| *dense) {
                tree.separate(forest, id, parent, block_rows)?;
                node.subtree_end as usize
            } else {
                tree.of[id] = tree.chain(id, parent, node.sequence, node.rows(), block_rows)?;
                id + 1
            };
            id = end;
        }
        for id in (0..tree.nodes.len()).rev() {
            if let Some(parent) = tree.nodes[id].parent {
                let end = tree.nodes[id].subtree_end;
                let above = &mut tree.nodes[parent.0 as usize].subtree_end;
                *above = end.max(*above);
            }
        }
        Ok(tree)
    }

    /// A leaf for each leaf below `top`, with all rows from `top` on. Nodes on the way are found in
    /// the first leaf below them.
    fn separate(
        &mut self,
        forest: &Forest,
        top: usize,
        parent: u32,
        block_rows: u64,
    ) -> Result<(), PlanError> {
        let begin = forest.node(NodeId(top as u32)).rows().begin;
        let mut waiting = top;
        for id in top..forest.node(NodeId(top as u32)).subtree_end as usize {
            if !forest.is_leaf(NodeId(id as u32)) {
                continue;
            }
            let node = forest.node(NodeId(id as u32));
            let rows = Span { begin, end: node.rows().end };
            let leaf = self.chain(id, parent, node.sequence, rows, block_rows)?;
            self.of[waiting..=id].fill(leaf);
            waiting = id + 1;
        }
        Ok(())
    }

    /// Nodes of at most `block_rows` rows after one another, nearly equal; gives the last.
    fn chain(
        &mut self,
        origin: usize,
        mut parent: u32,
        sequence: u32,
        rows: Span,
        block_rows: u64,
    ) -> Result<u32, PlanError> {
        let count = rows.count();
        let blocks =
            if block_rows == 0 { u64::from(count > 0) } else { count.div_ceil(block_rows) };
        if self.nodes.len() as u64 + blocks > NODES_MAX as u64 {
            let seen = self.nodes.len() as u64 + blocks;
            let accepted = format!("1 to {NODES_MAX}, blocks of a node counted each");
            return Err(PlanError::Count { what: "nodes", seen, accepted });
        }
        for block in 0..blocks {
            let cut =
                |block: u64| rows.begin + count / blocks * block + (count % blocks).min(block);
            let id = self.nodes.len() as u32;
            self.nodes.push(PlanNode {
                parent: (parent != NONE).then_some(NodeId(parent)),
                rows: Span { begin: cut(block), end: cut(block + 1) },
                subtree_end: id + 1,
                sequence,
                origin: NodeId(origin as u32),
                residency: Residency::Keep,
            });
            parent = id;
        }
        // A root of one token: what goes on from it reads nothing.
        Ok(parent)
    }

    pub(crate) fn len(&self) -> usize {
        self.nodes.len()
    }

    pub(crate) fn is_leaf(&self, id: usize) -> bool {
        self.nodes[id].subtree_end as usize == id + 1
    }

    /// A node's parent, or one past the last node: what all trees hang from.
    pub(crate) fn above(&self, id: usize) -> usize {
        self.nodes[id].parent.map_or(self.nodes.len(), |parent| parent.0 as usize)
    }

    /// Children of a node, or of what all trees hang from, that are not leaves; in order.
    pub(crate) fn inner_children(&self, id: usize) -> impl Iterator<Item = usize> + '_ {
        self.inner_from(id, if id == self.nodes.len() { 0 } else { id + 1 })
    }

    /// … from the child `begin` on, or none if that is the end of the node's subtree.
    pub(crate) fn inner_from(&self, id: usize, begin: usize) -> impl Iterator<Item = usize> + '_ {
        let end = self.nodes.get(id).map_or(id, |node| node.subtree_end as usize);
        let first = (begin < end).then_some(begin);
        std::iter::successors(first, move |child| {
            let next = self.nodes[*child].subtree_end as usize;
            (next < end).then_some(next)
        })
        .filter(|child| !self.is_leaf(*child))
    }
}
