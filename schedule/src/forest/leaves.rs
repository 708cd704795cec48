//! Leaves, token counts and the order of endings of a forest.

use super::Forest;
use crate::NodeId;

impl Forest {
    /// Returns the leaves in depth-first order.
    pub fn leaves(&self) -> impl Iterator<Item = NodeId> + '_ {
        (0..self.nodes.len() as u32).map(NodeId).filter(|id| self.is_leaf(*id))
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
