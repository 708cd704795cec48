//! Compressed prefix trees of a batch: which token sequences share which tokens.
//!
//! A *node* is a run of tokens that the same sequences share; a *forest* is all trees of a batch.
//! Nodes are numbered depth first, a parent before its children, so a subtree is a run of numbers
//! and a root-to-leaf path is found by walking parents. A sequence *ends* in one node, at its end or
//! inside it: one that is a complete prefix of another ends where the other goes on. In every leaf
//! a sequence ends at its last token.
//!
//! # Rows
//! A node holds tokens at positions `[b, e)`; they are the labels of the rows `[b − 1, e − 1)`, and
//! those rows it runs (docs/method.md §8): a row is shared only where its label is. A root's first
//! token is no label, so its rows are `[0, e − 1)`.
//!
//! ```text
//!   node 0  tokens [0, 5)   rows [0, 4)        sequences 0 1 2
//!   ├ node 1  tokens [5, 9)   rows [4, 8)      sequence 0; 1 ends inside, at 7
//!   └ node 2  tokens [5, 6)   rows [4, 5)      sequence 2
//! ```
//!
//! # Identity
//! Two sequences share a token when they share every token up to it and are of the same *kind*: a
//! number of the caller's for whatever else a token's identity depends on (docs/method.md §8), as
//! images, adapters, masks, or positions that do not start at 0. Sequences of different kinds share
//! nothing. Where they differ late, an id of its own for what differs there (an image's
//! placeholders, say) shares what comes before.
//!
//! # Order
//! Trees come by kind, then by their first token; children by theirs, whatever the order of the
//! sequences was. So ranks that hold the same sequences number nodes alike.
//!
//! # Where forests come from
//! | from | by | nodes |
//! |---|---|---|
//! | token ids, all at once | [`Forest::from_ids`], [`Forest::from_slices`] | compressed exactly |
//! | token ids, one sequence at a time | [`GrowingForest`] | the same nodes |
//! | lengths | [`Forest::from_nodes`] and its kin | those given |
//! | a forest | [`Forest::blocks`], [`Forest::part_of_leaves`], [`Forest::part_of_sequences`] | cut, or chosen |
//!
//! *Compressed exactly*: a node ends only where sequences go on with different tokens, or where none
//! goes on. So its tokens in all are as many as the distinct prefixes of the batch.

mod blocks;
mod build;
mod grow;
mod ids;
mod leaves;
mod lengths;
mod order;
mod part;
mod stored;

use serde::{Deserialize, Serialize};

pub use self::blocks::Blocks;
pub use self::grow::GrowingForest;
pub use self::ids::{SEQUENCES_MAX, TokenInt};
pub use self::leaves::Leaf;
pub use self::part::Part;
use crate::{NodeId, Span};

/// Parent number of a root in [`Forest::from_nodes`].
pub const NO_PARENT: u32 = u32::MAX;

/// One run of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its parent, a smaller number; `None` for a root.
    pub parent: Option<NodeId>,
    /// Positions of its tokens on every path through it; never empty.
    pub tokens: Span,
    /// One past the last node of its subtree.
    pub subtree_end: u32,
    /// The lowest sequence that runs through all of it: its ids are that sequence's at `tokens`.
    pub sequence: u32,
}

impl Node {
    /// A node of which only the tokens are known; [`Forest::link`] finds the rest.
    const fn of(tokens: Span) -> Self {
        Self { parent: None, tokens, subtree_end: 0, sequence: u32::MAX }
    }

    /// Positions of the rows it runs. Empty for a root of one token.
    #[must_use]
    pub const fn rows(&self) -> Span {
        Span { begin: self.tokens.begin.saturating_sub(1), end: self.tokens.end - 1 }
    }
}

/// Where a sequence ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// In which node.
    pub node: NodeId,
    /// Its tokens, from the root on: above the node's first position, at most its last plus one.
    pub tokens: u64,
}

/// All trees of a batch. See the module for numbering and rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "stored::Stored")]
pub struct Forest {
    nodes: Vec<Node>,
    endings: Vec<Ending>,
}

impl Forest {
    /// Every node, depth first.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Where each sequence ends, by its number in the batch.
    #[must_use]
    pub fn endings(&self) -> &[Ending] {
        &self.endings
    }

    /// One node.
    ///
    /// # Panics
    /// Where the forest has no such node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// The roots, in order.
    pub fn roots(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.siblings(0, self.nodes.len() as u32)
    }

    /// The children of a node, in order.
    pub fn children(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        self.siblings(id.0 + 1, self.node(id).subtree_end)
    }

    /// Whether nothing goes on from a node.
    #[must_use]
    pub fn is_leaf(&self, id: NodeId) -> bool {
        self.node(id).subtree_end == id.0 + 1
    }

    /// A node and its ancestors, the node first.
    pub fn path(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        std::iter::successors(Some(id), |id| self.node(*id).parent)
    }

    /// Runs of one level within `[begin, end)`: each starts where the one before it ended.
    fn siblings(&self, begin: u32, end: u32) -> impl Iterator<Item = NodeId> + '_ {
        let first = (begin < end).then_some(NodeId(begin));
        std::iter::successors(first, move |id| {
            let next = self.node(*id).subtree_end;
            (next < end).then_some(NodeId(next))
        })
    }

    /// A forest from nodes that are depth first and know their tokens only: in that order positions
    /// alone say what hangs below what. A node's parent is the last before it that ends where it
    /// begins. Every leaf must have an ending at its end.
    fn link(mut nodes: Vec<Node>, endings: Vec<Ending>) -> Self {
        let mut path: Vec<u32> = Vec::new();
        for id in 0..nodes.len() {
            let begin = nodes[id].tokens.begin;
            while path.last().is_some_and(|last| nodes[*last as usize].tokens.end > begin) {
                path.pop();
            }
            nodes[id].parent = path.last().map(|last| NodeId(*last));
            nodes[id].subtree_end = id as u32 + 1;
            path.push(id as u32);
        }
        for (sequence, ending) in (0..).zip(&endings) {
            let node = &nodes[ending.node.0 as usize];
            // One that ends inside a node runs through those above it.
            let through =
                if ending.tokens == node.tokens.end { Some(ending.node) } else { node.parent };
            if let Some(NodeId(id)) = through {
                let lowest = &mut nodes[id as usize].sequence;
                *lowest = sequence.min(*lowest);
            }
        }
        // Children have higher numbers: last to first, a node is complete before its parent is.
        for id in (0..nodes.len()).rev() {
            let Node { parent, subtree_end, sequence, .. } = nodes[id];
            if let Some(parent) = parent {
                let parent = &mut nodes[parent.0 as usize];
                parent.subtree_end = parent.subtree_end.max(subtree_end);
                parent.sequence = parent.sequence.min(sequence);
            }
        }
        Self { nodes, endings }
    }
}
