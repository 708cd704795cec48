//! The forest of a batch.

use dormouse_schedule::forest::{Ending, Forest, NO_PARENT};
use dormouse_schedule::{NodeId, PlanError};

use crate::{Sequences, Tokens};

/// Builds the forest of sequences from their ids, or from their groups if only lengths are known.
pub(super) fn of(sequences: &Sequences, vocab: u32) -> Result<Forest, PlanError> {
    match sequences.tokens() {
        // The forest refuses an empty batch.
        None => Forest::from_ids::<i32>(&[], &[0], &[], vocab),
        Some(Tokens::Ids { ids, offsets }) => {
            Forest::from_ids(ids, offsets, sequences.kinds(), vocab)
        }
        Some(Tokens::Lengths { tokens, shared }) => of_lengths(sequences, tokens, shared),
    }
}

/// Builds a tree per group and kind: the shared prompt, and below it the rest of each sequence. A sequence
/// that shares nothing is a separate tree.
fn of_lengths(sequences: &Sequences, tokens: &[u64], shared: &[u64]) -> Result<Forest, PlanError> {
    let tree = |sequence: usize| {
        let group = sequences.groups().get(sequence).copied();
        let kind = sequences.kinds().get(sequence).copied().unwrap_or(0);
        group.filter(|_| shared[sequence] > 0).map(|group| (group, kind))
    };
    let mut order: Vec<usize> = (0..tokens.len()).collect();
    order.sort_by_key(|sequence| tree(*sequence));
    let (mut parents, mut lengths) = (Vec::new(), Vec::new());
    let mut endings = vec![Ending::default(); tokens.len()];
    let (mut open, mut root) = (None, NO_PARENT);
    for sequence in order {
        let tree = tree(sequence);
        if tree.is_none() || tree != open {
            root = parents.len() as u32;
            parents.push(NO_PARENT);
            lengths.push(if tree.is_some() { shared[sequence] } else { tokens[sequence] });
            open = tree;
        }
        let own = if tree.is_some() { tokens[sequence] - shared[sequence] } else { 0 };
        let mut node = root;
        if own > 0 {
            node = parents.len() as u32;
            parents.push(root);
            lengths.push(own);
        }
        endings[sequence] = Ending { node: NodeId(node), tokens: tokens[sequence] };
    }
    Forest::from_nodes_with(&parents, &lengths, &endings)
}
