//! Nodes from sorted sequences: one pass, last to first.
//!
//! The path to the sequence before is *open*: a stack of the positions where its nodes end. A
//! sequence that shares fewer tokens with it closes the nodes beyond those, deepest first; where it
//! leaves inside a node, the part that both share stays open. A node is written when it closes, so
//! what is written is depth first from behind, and its number counts down.

use super::order::Order;
use super::{Ending, Forest, Node};
use crate::{NodeId, Span};

/// The nodes and endings of sorted sequences, of which `length` gives the tokens.
pub(super) fn build(order: &Order, length: impl Fn(u32) -> usize) -> Forest {
    let lengths = |place: usize| length(order.sequences[place]) as u64;
    let count = order.sequences.len();
    let shared_with_next =
        |place: usize| order.shared.get(place + 1).map_or(0, |shared| u64::from(*shared));
    let leaves = (0..count).filter(|place| shared_with_next(*place) < lengths(*place)).count();
    let mut closing = Closing {
        sequences: &order.sequences,
        lengths,
        open: Vec::new(),
        unplaced: count,
        nodes: Vec::with_capacity(2 * leaves),
        endings: vec![Ending::default(); count],
    };
    for place in (0..count).rev() {
        let (shared, length) = (shared_with_next(place), (closing.lengths)(place));
        // Else it is a complete prefix of the next, or the same: it ends on the open path.
        if shared < length {
            closing.close(shared, place + 1);
            closing.open.push(length);
        }
    }
    closing.close(0, 0);
    let Closing { mut nodes, mut endings, .. } = closing;
    // Only addresses were reserved: what no node was written to was never a page.
    nodes.shrink_to_fit();
    nodes.reverse();
    for ending in &mut endings {
        ending.node.0 = nodes.len() as u32 - 1 - ending.node.0;
    }
    Forest::link(nodes, endings)
}

struct Closing<'a, L> {
    sequences: &'a [u32],
    lengths: L,
    /// Where the open nodes end, the deepest last.
    open: Vec<u64>,
    /// Sequences from here on are placed. Of those before it that have been met, each is a prefix
    /// of the next, and all end on the open path.
    unplaced: usize,
    /// Numbered from behind, here and in `endings`.
    nodes: Vec<Node>,
    endings: Vec<Ending>,
}

impl<L: Fn(usize) -> u64> Closing<'_, L> {
    /// Closes what is open beyond position `to`, and places sequences from `first` on in it.
    fn close(&mut self, to: u64, first: usize) {
        while let Some(end) = self.open.pop_if(|end| *end > to) {
            let above = self.open.last().copied().unwrap_or(0);
            let begin = above.max(to);
            let node = NodeId(self.nodes.len() as u32);
            self.nodes.push(Node::of(Span { begin, end }));
            while self.unplaced > first && (self.lengths)(self.unplaced - 1) > begin {
                self.unplaced -= 1;
                let tokens = (self.lengths)(self.unplaced);
                self.endings[self.sequences[self.unplaced] as usize] = Ending { node, tokens };
            }
            if above < to {
                self.open.push(to);
            }
        }
    }
}
