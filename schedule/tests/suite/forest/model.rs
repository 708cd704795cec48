//! A slow independent model of forests, from the set of all prefixes.

use std::collections::BTreeSet;
use std::ops::Range;

use dormouse_schedule::NodeId;
use dormouse_schedule::forest::{Ending, Forest, Node};
use proptest::prelude::*;

/// A sequence: its kind and its ids, in the order of forests.
pub(crate) type Sequence = (u64, Vec<i64>);

/// Every prefix of every sequence, the empty ones left out.
pub(crate) fn prefixes(sequences: &[Sequence]) -> BTreeSet<Sequence> {
    let of = |(kind, ids): &Sequence| {
        let kind = *kind;
        let ids = ids.clone();
        (1..=ids.len()).map(move |end| (kind, ids[..end].to_vec()))
    };
    sequences.iter().flat_map(of).collect()
}

pub(crate) fn starts_with(sequence: &Sequence, prefix: &Sequence) -> bool {
    sequence.0 == prefix.0 && sequence.1.starts_with(&prefix.1)
}

/// The sequences that end in leaves at these positions, or above them and no earlier leaf.
pub(crate) fn sequences_of_leaves(forest: &Forest, positions: Range<usize>) -> Vec<u32> {
    let leaves: Vec<NodeId> = forest.leaves().collect();
    let leaf_of = |ending: &Ending| leaves.partition_point(|leaf| leaf.0 < ending.node.0);
    let endings = (0..).zip(forest.endings());
    let own = endings.filter(|(_, ending)| positions.contains(&leaf_of(ending)));
    own.map(|(sequence, _)| sequence).collect()
}

/// A naive forest: each node as the prefix that ends with it.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) ends: Vec<Sequence>,
    pub(crate) begins: Vec<usize>,
}

impl Model {
    pub(crate) fn of(sequences: &[Sequence]) -> Self {
        let all = prefixes(sequences);
        let goes_on = |prefix: &Sequence| {
            let longer =
                all.iter().filter(|p| p.1.len() == prefix.1.len() + 1 && starts_with(p, prefix));
            longer.count()
        };
        let ends: Vec<Sequence> = all.iter().filter(|p| goes_on(p) != 1).cloned().collect();
        let begin = |(kind, ids): &Sequence| {
            let branch =
                |begin: &usize| *begin == 0 || goes_on(&(*kind, ids[..*begin].to_vec())) > 1;
            (0..ids.len()).rev().find(branch).unwrap()
        };
        let begins = ends.iter().map(begin).collect();
        Self { ends, begins }
    }

    pub(crate) fn node(&self, id: usize, sequences: &[Sequence]) -> Node {
        let (end, begin) = (&self.ends[id], self.begins[id]);
        let above = (end.0, end.1[..begin].to_vec());
        let parent = self.ends.iter().position(|other| *other == above);
        let below = self.ends.iter().rposition(|other| starts_with(other, end)).unwrap();
        let sequence = sequences.iter().position(|sequence| starts_with(sequence, end)).unwrap();
        let mut node = Node {
            parent: parent.map(|parent| NodeId(parent as u32)),
            tokens: dormouse_schedule::Span::default(),
            subtree_end: below as u32 + 1,
            sequence: sequence as u32,
        };
        (node.tokens.begin, node.tokens.end) = (begin as u64, end.1.len() as u64);
        node
    }

    pub(crate) fn ending(&self, sequence: &Sequence) -> Ending {
        let ends_in = |id: &usize| {
            starts_with(&self.ends[*id], sequence) && self.begins[*id] < sequence.1.len()
        };
        let node = (0..self.ends.len()).find(ends_in).unwrap();
        Ending { node: NodeId(node as u32), tokens: sequence.1.len() as u64 }
    }
}

/// Batches with much in common: each sequence is a prefix of an earlier one, and some more tokens.
/// Nested ends, duplicates, roots and nodes of one token, several trees are all frequent.
pub(crate) fn batch() -> impl Strategy<Value = Vec<Sequence>> {
    let cut = (any::<prop::sample::Index>(), any::<prop::sample::Index>());
    let more = prop::collection::vec(0_i64..3, 0..5);
    let kind = prop_oneof![4 => Just(None), 1 => (0_u64..3).prop_map(Some)];
    prop::collection::vec((cut, more, kind), 1..16).prop_map(|steps| {
        let mut sequences: Vec<Sequence> = Vec::new();
        for ((from, keep), more, kind) in steps {
            let (was, mut ids) = match from.index(sequences.len() + 1) {
                0 => (0, Vec::new()),
                other => sequences[other - 1].clone(),
            };
            ids.truncate(keep.index(ids.len() + 1));
            ids.extend(more);
            if ids.is_empty() {
                ids.push(1);
            }
            sequences.push((kind.unwrap_or(was), ids));
        }
        sequences
    })
}
