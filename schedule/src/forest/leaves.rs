//! Leaves, token counts and the order of endings of a forest.

use super::Forest;
use crate::NodeId;

/// A leaf in depth-first order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Its node.
    pub node: NodeId,
    /// Tokens from the root to its end.
    pub path_tokens: u64,
    /// Tokens that are not on the path to the previous leaf. The leaves `i..j` alone have `path_tokens` of leaf i
    /// plus `new_tokens` of the others.
    pub new_tokens: u64,
}

impl Forest {
    /// Returns the leaves in depth-first order.
    pub fn leaves(&self) -> impl Iterator<Item = Leaf> + '_ {
        // Nodes between two leaves are on the path of the second only.
        let mut new_tokens = 0;
        (0..self.nodes.len() as u32).filter_map(move |id| {
            let tokens = self.nodes[id as usize].tokens;
            new_tokens += tokens.count();
            let node = NodeId(id);
            self.is_leaf(node).then(|| Leaf {
                node,
                path_tokens: tokens.end,
                new_tokens: std::mem::take(&mut new_tokens),
            })
        })
    }

    /// Returns the tokens of all nodes: shared tokens count once.
    #[must_use]
    pub fn tree_tokens(&self) -> u64 {
        self.nodes.iter().map(|node| node.tokens.count()).sum()
    }

    /// Returns the tokens of all sequences, those of a dense run.
    #[must_use]
    pub fn dense_tokens(&self) -> u64 {
        self.endings.iter().map(|ending| ending.tokens).sum()
    }

    /// Returns dense tokens divided by tree tokens; 1 for an empty forest.
    #[must_use]
    pub fn compression(&self) -> f64 {
        if self.nodes.is_empty() {
            return 1.0;
        }
        self.dense_tokens() as f64 / self.tree_tokens() as f64
    }

    /// Returns the sequences ordered by the node in which they end, then tokens, then number. Sequences of a subtree
    /// are contiguous.
    #[must_use]
    pub fn sequences_by_ending(&self) -> Vec<u32> {
        let mut sequences: Vec<u32> = (0..self.endings.len() as u32).collect();
        sequences.sort_unstable_by_key(|sequence| {
            let ending = self.endings[*sequence as usize];
            (ending.node.0, ending.tokens, *sequence)
        });
        sequences
    }
}
