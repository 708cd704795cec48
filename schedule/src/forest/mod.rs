//! Compressed prefix trees of a batch: which token sequences share which tokens.
//!
//! A *node* is a run of tokens that the same sequences share; a *forest* is all trees of a batch. Nodes are
//! numbered depth first, so a subtree is a range of numbers. A sequence *ends* in one node, at its end or
//! inside it. At the end of every leaf a sequence ends.
//!
//! # Rows
//! A node with tokens at positions `[b, e)` runs the rows `[b − 1, e − 1)`, whose labels these tokens are
//! (docs/method.md §8): a row is shared only if its label is. A root's rows are `[0, e − 1)`.
//!
//! ```text
//!   node 0  tokens [0, 5)   rows [0, 4)        sequences 0 1 2
//!   ├ node 1  tokens [5, 9)   rows [4, 8)      sequence 0; 1 ends inside, at 7
//!   └ node 2  tokens [5, 6)   rows [4, 5)      sequence 2
//! ```
//!
//! # Identity
//! Two sequences share a token if they share all tokens up to it and are of the same *kind*: a number for
//! anything else that a token's identity depends on (docs/method.md §8), such as images, adapters, masks, or
//! positions that do not start at 0. To share the tokens before a late difference, give the difference its own
//! token id (for example an image's placeholders).
//!
//! # Order
//! Trees are ordered by kind and first token, children by first token, whatever the order of the sequences. So
//! ranks that hold the same sequences number nodes alike.
//!
//! # Constructors
//! | from | by | nodes |
//! |---|---|---|
//! | token ids, all at once | [`Forest::from_ids`] | compressed |
//! | token ids, one sequence at a time | [`GrowingForest`] | the same |
//! | lengths | [`Forest::from_nodes`], [`Forest::from_nodes_with`], [`Forest::group`] | as given |
//! | a forest | [`Forest::part_of_sequences`] | selected |
//!
//! *Compressed*: a node ends only where sequences continue with different tokens, or where all end. So the tree
//! tokens are the distinct prefixes of the batch.

mod build;
mod grow;
mod ids;
mod leaves;
mod lengths;
mod order;
mod part;

use serde::{Deserialize, Serialize};

pub use self::grow::GrowingForest;
pub use self::ids::{SEQUENCES_MAX, TokenInt};
pub use self::part::Part;
use crate::{NodeId, Span};

/// Parent number of a root in [`Forest::from_nodes`].
pub const NO_PARENT: u32 = u32::MAX;

/// One run of tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Node {
    /// Its parent, a smaller number; `None` for a root.
    pub parent: Option<NodeId>,
    /// Positions of its tokens on every path through it; never empty.
    pub tokens: Span,
    /// One past the last node of its subtree.
    pub subtree_end: u32,
    /// The lowest sequence that contains all of it.
    pub sequence: u32,
}

impl Node {
    /// Creates a node with tokens only; [`Forest::link`] sets the rest.
    const fn of(tokens: Span) -> Self {
        Self { parent: None, tokens, subtree_end: 0, sequence: u32::MAX }
    }

    /// Returns the positions of its rows; empty for a root of one token.
    #[must_use]
    pub const fn rows(&self) -> Span {
        Span { begin: self.tokens.begin.saturating_sub(1), end: self.tokens.end - 1 }
    }
}

/// The end of a sequence.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Ending {
    /// The node in which it ends.
    pub node: NodeId,
    /// Its tokens from the root on.
    pub tokens: u64,
}

/// All trees of a batch. The module documentation defines numbering and rows.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Forest {
    nodes: Vec<Node>,
    endings: Vec<Ending>,
}

impl Forest {
    /// Returns all nodes, depth first.
    #[must_use]
    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    /// Returns the ends of all sequences, by number in the batch.
    #[must_use]
    pub fn endings(&self) -> &[Ending] {
        &self.endings
    }

    /// Returns a node.
    ///
    /// # Panics
    /// If the forest has no such node.
    #[must_use]
    pub fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id.0 as usize]
    }

    /// Returns the roots in order.
    pub fn roots(&self) -> impl Iterator<Item = NodeId> + '_ {
        self.siblings(0, self.nodes.len() as u32)
    }

    /// Returns the children of a node in order.
    pub fn children(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        self.siblings(id.0 + 1, self.node(id).subtree_end)
    }

    /// Returns whether a node has no children.
    #[must_use]
    pub fn is_leaf(&self, id: NodeId) -> bool {
        self.node(id).subtree_end == id.0 + 1
    }

    /// Returns a node and its ancestors, the node first.
    pub fn path(&self, id: NodeId) -> impl Iterator<Item = NodeId> + '_ {
        std::iter::successors(Some(id), |id| self.node(*id).parent)
    }

    /// Returns sibling subtrees within `[begin, end)`, each of which begins where the previous one ends.
    fn siblings(&self, begin: u32, end: u32) -> impl Iterator<Item = NodeId> + '_ {
        let first = (begin < end).then_some(NodeId(begin));
        std::iter::successors(first, move |id| {
            let next = self.node(*id).subtree_end;
            (next < end).then_some(NodeId(next))
        })
    }

    /// Builds a forest from nodes in depth-first order with tokens only. The parent of a node is the last node
    /// before it that ends where it begins. Every leaf must have an ending at its end.
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
            // A sequence that ends inside a node contains all of its ancestors only.
            let through =
                if ending.tokens == node.tokens.end { Some(ending.node) } else { node.parent };
            if let Some(NodeId(id)) = through {
                let lowest = &mut nodes[id as usize].sequence;
                *lowest = sequence.min(*lowest);
            }
        }
        // Children have higher numbers, so from last to first a node is complete before its parent.
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
