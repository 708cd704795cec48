//! Compressed prefix trees of a batch: which token sequences share which tokens.
//!
//! A *node* is a run of tokens that the same sequences share; a *forest* is all trees of a batch.
//! Nodes are numbered depth first, a parent before its children, so a subtree is a run of numbers
//! and a root-to-leaf path is found by walking parents. A sequence *ends* in one node, at its end or
//! inside it: one that is a complete prefix of another ends where the other goes on.
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

mod lengths;

use serde::{Deserialize, Serialize};

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
    /// A sequence that runs through it: its ids are that sequence's at `tokens`.
    pub sequence: u32,
}

impl Node {
    /// Positions of the rows it runs. Empty for a root of one token.
    #[must_use]
    pub const fn rows(&self) -> Span {
        Span { begin: self.tokens.begin.saturating_sub(1), end: self.tokens.end - 1 }
    }
}

/// Where a sequence ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// In which node.
    pub node: NodeId,
    /// Its tokens, from the root on: above the node's first position, at most its last plus one.
    pub tokens: u64,
}

/// All trees of a batch. See the module for numbering and rows.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
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

    /// Tokens of all nodes: what is computed when everything shared is computed once.
    #[must_use]
    pub fn tree_tokens(&self) -> u64 {
        self.nodes.iter().map(|node| node.tokens.count()).sum()
    }

    /// Tokens of all sequences: what a dense run computes.
    #[must_use]
    pub fn dense_tokens(&self) -> u64 {
        self.endings.iter().map(|ending| ending.tokens).sum()
    }

    /// Runs of one level within `[begin, end)`: each starts where the one before it ended.
    fn siblings(&self, begin: u32, end: u32) -> impl Iterator<Item = NodeId> + '_ {
        let first = (begin < end).then_some(NodeId(begin));
        std::iter::successors(first, move |id| {
            let next = self.node(*id).subtree_end;
            (next < end).then_some(NodeId(next))
        })
    }
}
