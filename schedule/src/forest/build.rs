//! Builds nodes from sorted sequences in one pass, last to first.
//!
//! A stack holds the end positions of the *open* nodes, those on the path to the previous sequence. A sequence
//! that shares fewer tokens with it closes the nodes beyond them, deepest first; a node in which it leaves the
//! path stays open up to there. Nodes are written when they close, in reverse depth-first order.

use super::order::Order;
use super::{Ending, Forest, Node};
use crate::{NodeId, Span};

/// Builds the forest of sorted sequences. `length` returns the tokens of a sequence.
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
        // Otherwise it is a prefix of the next sequence and ends on the open path.
        if shared < length {
            closing.close(shared, place + 1);
            closing.open.push(length);
        }
    }
    closing.close(0, 0);
    let Closing { mut nodes, mut endings, .. } = closing;
    // Only addresses were reserved: the unused rest has no pages.
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
    /// Ends of the open nodes, the deepest last.
    open: Vec<u64>,
    /// Sequences from here on have an ending. The ones visited before them are prefixes of each other and end on
    /// the open path.
    unplaced: usize,
    /// In reverse order, also for numbers in `endings`.
    nodes: Vec<Node>,
    endings: Vec<Ending>,
}

impl<L: Fn(usize) -> u64> Closing<'_, L> {
    /// Closes the nodes open beyond position `to`, and sets the endings of sequences from `first` on.
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
