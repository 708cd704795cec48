//! Blocks of bounded length: what a walk that computes a node at once can hold.

use serde::{Deserialize, Serialize};

use super::{Ending, Forest, Node};
use crate::limits::NODES_MAX;
use crate::{NodeId, PlanError, Span};

/// A forest whose longer nodes have been cut.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocks {
    /// The blocks as nodes: those of one node are a chain. Sequences keep their numbers.
    pub forest: Forest,
    /// The node that each block is of.
    pub nodes: Vec<NodeId>,
}

/// A run of tokens in as few near-equal pieces as a bound on their length allows.
#[derive(Clone, Copy, Debug)]
struct Cut {
    tokens: Span,
    pieces: u64,
}

impl Cut {
    /// Piece i, the first being 0: lengths differ by one token at most.
    fn piece(self, i: u64) -> Span {
        // Fits: both factors are at most 2^28 tokens.
        let at = |i: u64| self.tokens.begin + self.tokens.count() * i / self.pieces;
        Span { begin: at(i), end: at(i + 1) }
    }

    /// The piece whose last token, or an earlier one of it, is the last of `tokens` from the root.
    fn piece_of(self, tokens: u64) -> u64 {
        ((tokens - self.tokens.begin) * self.pieces).div_ceil(self.tokens.count()) - 1
    }
}

impl Forest {
    /// The forest with every node of more than `block_tokens` tokens cut into a chain of near-equal
    /// ones, as few as can be. Sequences end at the same tokens as before, in the right block.
    ///
    /// # Errors
    /// `Count` for a `block_tokens` of 0, or one so small that there would be too many nodes.
    pub fn blocks(&self, block_tokens: u64) -> Result<Blocks, PlanError> {
        let refuse =
            |accepted| Err(PlanError::Count { what: "block_tokens", seen: block_tokens, accepted });
        if block_tokens == 0 {
            return refuse("1 or more".to_owned());
        }
        let cut = |node: &Node| Cut {
            tokens: node.tokens,
            pieces: node.tokens.count().div_ceil(block_tokens),
        };
        let count: u64 = self.nodes.iter().map(|node| cut(node).pieces).sum();
        if count > NODES_MAX as u64 {
            return refuse(format!("what makes at most {NODES_MAX} blocks, not {count}"));
        }
        let mut blocks = Vec::with_capacity(count as usize);
        let mut nodes = Vec::with_capacity(count as usize);
        let mut firsts = Vec::with_capacity(self.nodes.len());
        for (id, node) in (0..).zip(&self.nodes) {
            firsts.push(blocks.len() as u32);
            let cut = cut(node);
            blocks.extend((0..cut.pieces).map(|i| Node::of(cut.piece(i))));
            nodes.resize(blocks.len(), NodeId(id));
        }
        let endings = self.endings.iter().map(|ending| {
            let at = ending.node.0 as usize;
            let piece = cut(&self.nodes[at]).piece_of(ending.tokens);
            Ending { node: NodeId(firsts[at] + piece as u32), tokens: ending.tokens }
        });
        let endings = endings.collect();
        Ok(Blocks { forest: Self::link(blocks, endings), nodes })
    }
}
