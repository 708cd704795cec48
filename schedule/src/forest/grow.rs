//! A forest that grows: sequences are added as rollouts finish, and the forest of those there are
//! is frozen whenever it is wanted.
//!
//! # Why it keeps ids
//! A caller's buffers are its own again when a sequence has been added; nothing is asked back, so
//! no caller has to keep 0.8 GB of ids alive, or promise that they do not change. What is kept is one
//! copy of every *tree* token, four bytes each as a vocabulary has at most 2^32 ids: a tenth of the
//! sequences' tokens where they share nine tenths, and half the bytes of 64-bit ids. They lie in
//! *chunks* that are never moved: one growing array would need three times the bytes while it grows.
//!
//! # How it grows
//! A *run* is tokens that were added at once, and is cut in two where a later sequence leaves it or
//! ends in it; no token moves. The lower half keeps the run's number, and with it all that hangs
//! below and the sequences that end at its end. Where a sequence goes on from the end of a childless
//! run, its only child is the same node's: freezing joins such chains.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::ids::{TokenInt, check_count, check_length, check_vocab, outside, refuse_id};
use super::order::common_prefix;
use super::{Ending, Forest, Node};
use crate::{NodeId, PlanError, Span};

/// Sequences added so far, as a tree that [`GrowingForest::freeze`] makes a [`Forest`] of.
///
/// It keeps one copy of every tree token, four bytes each, and under a hundred for every node
/// and sequence; the caller's buffers are its own again when a sequence has been added. For one
/// thread at a time.
#[derive(Clone, Debug)]
pub struct GrowingForest {
    vocab: u32,
    /// The ids of all runs, each run's in one chunk.
    chunks: Vec<Vec<u32>>,
    runs: Vec<Run>,
    /// The run that goes on from one with a token. Ordered: a run's children follow each other in
    /// order of their tokens.
    children: BTreeMap<(u32, u32), u32>,
    /// An empty run for each kind, the parent of its roots.
    kinds: BTreeMap<u64, u32>,
    /// For each sequence, the run that ends where it does.
    endings: Vec<u32>,
    /// The sequence being added.
    scratch: Vec<u32>,
}

/// Tokens that follow each other.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Where its ids are: in which chunk, from which on.
    chunk: u32,
    at: u32,
    /// The first one's position in its sequences, and one past the last one's.
    begin: u32,
    end: u32,
}

/// Ids of a chunk, 1 MiB; longer runs have a chunk of their own.
const CHUNK: usize = 1 << 18;

impl GrowingForest {
    /// No sequences yet. Token ids will be below `vocab`.
    ///
    /// # Errors
    /// `Count` for a `vocab` of 0.
    pub fn new(vocab: u32) -> Result<Self, PlanError> {
        check_vocab(vocab)?;
        Ok(Self {
            vocab,
            chunks: Vec::new(),
            runs: Vec::new(),
            children: BTreeMap::new(),
            kinds: BTreeMap::new(),
            endings: Vec::new(),
            scratch: Vec::new(),
        })
    }

    /// Adds a sequence; the answer is its number: they count up from 0. `kind` is as in
    /// [`Forest::from_ids`], where it is 0 if none is given.
    ///
    /// Reads the ids once; besides, it takes a search in a sorted map for every node on its path.
    ///
    /// # Errors
    /// `Count` for one more than [`SEQUENCES_MAX`](super::SEQUENCES_MAX) sequences, `SequenceLength`, `TokenId`. The
    /// forest stays as it was.
    pub fn add<I: TokenInt>(&mut self, ids: &[I], kind: u64) -> Result<u32, PlanError> {
        let sequence = self.endings.len();
        check_count(sequence + 1)?;
        check_length(sequence, ids.len())?;
        if let Some(at) = outside(ids, self.vocab) {
            return Err(refuse_id(sequence, ids, at, self.vocab));
        }
        let mut scratch = std::mem::take(&mut self.scratch);
        scratch.clear();
        // Exact: an id of the vocabulary is below 2^32.
        scratch.extend(ids.iter().map(|id| Into::<i64>::into(*id) as u32));
        let end = self.end_of(&scratch, kind);
        self.endings.push(end);
        self.scratch = scratch;
        Ok(sequence as u32)
    }

    /// Sequences added.
    #[must_use]
    pub fn sequences(&self) -> usize {
        self.endings.len()
    }

    /// Tokens that the forest has now: the bytes of ids kept are four times as many.
    #[must_use]
    pub fn tree_tokens(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.len() as u64).sum()
    }

    /// The forest of the sequences added so far: the same that [`Forest::from_slices`] makes of
    /// them. Takes time for nodes and sequences, none for tokens. Empty where none was added.
    #[must_use]
    pub fn freeze(&self) -> Forest {
        let mut nodes: Vec<Node> = Vec::new();
        // The node that each run has become part of.
        let mut places = vec![0; self.runs.len()];
        let mut open: Vec<u32> = Vec::new();
        for kind in self.kinds.values().rev() {
            open.extend(self.children_of(*kind).rev());
        }
        while let Some(first) = open.pop() {
            let mut last = first;
            loop {
                places[last as usize] = nodes.len() as u32;
                let mut children = self.children_of(last);
                match (children.next(), children.next()) {
                    (Some(only), None) => last = only,
                    _ => break,
                }
            }
            open.extend(self.children_of(last).rev());
            let (begin, end) = (self.runs[first as usize].begin, self.runs[last as usize].end);
            nodes.push(Node::of(Span { begin: begin.into(), end: end.into() }));
        }
        let endings = self.endings.iter().map(|run| Ending {
            node: NodeId(places[*run as usize]),
            tokens: self.runs[*run as usize].end.into(),
        });
        Forest::link(nodes, endings.collect())
    }

    /// Makes sure that a run ends where the sequence does, and says which.
    fn end_of(&mut self, ids: &[u32], kind: u64) -> u32 {
        let mut at = self.root_of(kind);
        loop {
            let rest = &ids[self.runs[at as usize].end as usize..];
            let Some(&token) = rest.first() else { return at };
            let Some(&child) = self.children.get(&(at, token)) else {
                return self.append(at, rest);
            };
            let known = self.ids(self.runs[child as usize]);
            let same = common_prefix(known, rest);
            at = if same < known.len() { self.cut(at, child, same as u32) } else { child };
        }
    }

    fn ids(&self, run: Run) -> &[u32] {
        let count = run.end - run.begin;
        &self.chunks[run.chunk as usize][run.at as usize..(run.at + count) as usize]
    }

    fn children_of(&self, run: u32) -> impl DoubleEndedIterator<Item = u32> + '_ {
        self.children.range((run, 0)..=(run, u32::MAX)).map(|(_, child)| *child)
    }

    fn root_of(&mut self, kind: u64) -> u32 {
        match self.kinds.entry(kind) {
            Entry::Occupied(known) => *known.get(),
            Entry::Vacant(unknown) => {
                let root = self.runs.len() as u32;
                self.runs.push(Run { chunk: 0, at: 0, begin: 0, end: 0 });
                *unknown.insert(root)
            }
        }
    }

    /// A new run below `parent`.
    fn append(&mut self, parent: u32, ids: &[u32]) -> u32 {
        let begin = self.runs[parent as usize].end;
        let end = begin + ids.len() as u32;
        let room = |chunk: &Vec<u32>| chunk.capacity() - chunk.len();
        if self.chunks.last().is_none_or(|last| room(last) < ids.len()) {
            self.chunks.push(Vec::with_capacity(ids.len().max(CHUNK)));
        }
        let number = self.chunks.len() - 1;
        let chunk = &mut self.chunks[number];
        let run = Run { chunk: number as u32, at: chunk.len() as u32, begin, end };
        chunk.extend_from_slice(ids);
        self.insert(parent, run, ids[0])
    }

    /// Cuts a child of `parent` after its first `count` tokens, at least one and not all; they are
    /// the run that is answered.
    fn cut(&mut self, parent: u32, child: u32, count: u32) -> u32 {
        let run = self.runs[child as usize];
        let ids = self.ids(run);
        let (first, next) = (ids[0], ids[count as usize]);
        let begin = run.begin + count;
        self.runs[child as usize] = Run { at: run.at + count, begin, ..run };
        let upper = self.insert(parent, Run { end: begin, ..run }, first);
        self.children.insert((upper, next), child);
        upper
    }

    /// Hangs a new run below `parent`, in the place of the child with the same first token if there
    /// is one.
    fn insert(&mut self, parent: u32, run: Run, first: u32) -> u32 {
        let number = self.runs.len() as u32;
        self.children.insert((parent, first), number);
        self.runs.push(run);
        number
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use super::*;

    #[test]
    fn chunks_are_never_moved() {
        let mut growing = GrowingForest::new(u32::MAX).unwrap();
        let long = CHUNK as u32 + 1;
        for (sequence, count) in (0..).zip([CHUNK as u32 - 9, 10, long, 8, long - 2, 1]) {
            let ids: Vec<u32> = (sequence..sequence + count).collect();
            growing.add(&ids, 0).unwrap();
        }
        let chunk = |chunk: &Vec<u32>| (chunk.len(), chunk.capacity());
        let chunks: Vec<_> = growing.chunks.iter().map(chunk).collect();
        let wanted = [(CHUNK - 9, CHUNK), (10, CHUNK), (CHUNK + 1, CHUNK + 1), (8, CHUNK)];
        assert_eq!(chunks[..4], wanted, "as long as reserved at first");
        assert_eq!(chunks[4..], [(CHUNK, CHUNK)], "filled to the last id");
    }
}
