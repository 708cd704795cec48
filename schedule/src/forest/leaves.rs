//! What a planner asks of a forest: leaves in order, what sharing saves, who runs through a node.

use super::Forest;
use crate::NodeId;

/// A leaf on a walk over all of them, depth first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Leaf {
    /// Its node.
    pub node: NodeId,
    /// Tokens from the root to its end.
    pub path_tokens: u64,
    /// Those of them that are not on the path to the leaf before.
    ///
    /// So the leaves `i..j` alone have as many tokens as `path_tokens` of leaf i and `new_tokens` of
    /// the others: one subtraction of prefix sums.
    pub new_tokens: u64,
}

impl Forest {
    /// The leaves, depth first.
    pub fn leaves(&self) -> impl Iterator<Item = Leaf> + '_ {
        // Nodes between one leaf and the next are those on the next one's path alone.
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

    /// Dense tokens over tree tokens; 1 for a forest of no nodes.
    #[must_use]
    pub fn compression(&self) -> f64 {
        if self.nodes.is_empty() {
            return 1.0;
        }
        self.dense_tokens() as f64 / self.tree_tokens() as f64
    }

    /// For each node, how many sequences have tokens of it: the copies of its first token that a
    /// dense run computes. Of a later token, at position p, it computes as many less the endings
    /// in the node of p tokens or fewer.
    #[must_use]
    pub fn multiplicities(&self) -> Vec<u32> {
        let mut counts = vec![0; self.nodes.len()];
        for ending in &self.endings {
            counts[ending.node.0 as usize] += 1;
        }
        for id in (0..self.nodes.len()).rev() {
            if let Some(parent) = self.nodes[id].parent {
                counts[parent.0 as usize] += counts[id];
            }
        }
        counts
    }

    /// The sequences in the order in which a walk from first to last node ends them: by node, then
    /// by tokens, then by number. Those of a subtree are a run.
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
