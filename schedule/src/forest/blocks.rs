//! Cuts nodes into blocks of bounded length.

use serde::{Deserialize, Serialize};

use super::{Ending, Forest, Node};
use crate::limits::NODES_MAX;
use crate::model::count;
use crate::{NodeId, PlanError, Span};

/// A forest with long nodes cut into blocks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Blocks {
    /// The blocks as nodes; those of one node form a chain. Sequences keep their numbers.
    pub forest: Forest,
    /// The original node of each block.
    pub nodes: Vec<NodeId>,
}

impl Forest {
    /// Cuts every node of more than `block_tokens` tokens into a chain of the fewest blocks, whose lengths differ
    /// by at most one.
    ///
    /// # Errors
    /// `Count` for a `block_tokens` of 0, or too many blocks.
    pub fn blocks(&self, block_tokens: u64) -> Result<Blocks, PlanError> {
        count("block_tokens", block_tokens, 1, u64::MAX)?;
        let pieces = |node: &Node| node.tokens.count().div_ceil(block_tokens);
        let blocks_count: u64 = self.nodes.iter().map(pieces).sum();
        count("blocks", blocks_count, 0, NODES_MAX as u64)?;
        let mut blocks = Vec::with_capacity(blocks_count as usize);
        let mut nodes = Vec::with_capacity(blocks_count as usize);
        let mut firsts = Vec::with_capacity(self.nodes.len());
        for (id, node) in (0..).zip(&self.nodes) {
            firsts.push(blocks.len() as u32);
            let pieces = pieces(node);
            // Both factors are at most 2^28 tokens.
            let at = |i: u64| node.tokens.begin + node.tokens.count() * i / pieces;
            let spans = (0..pieces).map(|i| Span { begin: at(i), end: at(i + 1) });
            blocks.extend(spans.map(Node::of));
            nodes.resize(blocks.len(), NodeId(id));
        }
        let endings = self.endings.iter().map(|ending| {
            let node = self.node(ending.node);
            let tokens = ending.tokens - node.tokens.begin;
            // The block that contains the last of these tokens.
            let block = (tokens * pieces(node)).div_ceil(node.tokens.count()) as u32 - 1;
            Ending { node: NodeId(firsts[ending.node.0 as usize] + block), tokens: ending.tokens }
        });
        let endings = endings.collect();
        Ok(Blocks { forest: Self::link(blocks, endings), nodes })
    }
}
