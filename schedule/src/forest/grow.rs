//! A forest that grows as rollouts finish, and is frozen on demand.
//!
//! It keeps one copy of every tree token, four bytes each, so that callers may reuse their buffers. Ids lie in
//! *chunks* that never move: one growing array would need up to three times the bytes.
//!
//! A *run* is tokens added at once. It is cut in two where a later sequence leaves it or ends in it; no token
//! moves. The lower half keeps the number of the run, with its children and the sequences that end at its end.
//! If a sequence continues from the end of a run without children, its only child belongs to the same node:
//! freezing joins such chains.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;

use super::ids::{TokenInt, check_count, check_length, check_vocab, outside, refuse_id};
use super::order::common_prefix;
use super::{Ending, Forest, Node};
use crate::{NodeId, PlanError, Span};

/// A forest to which sequences are added one at a time; [`GrowingForest::freeze`] returns it as a [`Forest`].
/// Uses four bytes per tree token, and less than a hundred per node and sequence. For one thread at a time.
#[derive(Clone, Debug)]
pub struct GrowingForest {
    vocab: u32,
    /// The ids of all runs; those of a run are in one chunk.
    chunks: Vec<Vec<u32>>,
    runs: Vec<Run>,
    /// The child of a run for a token; children of a run are ordered by token.
    children: BTreeMap<(u32, u32), u32>,
    /// An empty run for each kind, the parent of the roots.
    kinds: BTreeMap<u64, u32>,
    /// The run at whose end each sequence ends.
    endings: Vec<u32>,
    /// Ids of the sequence being added.
    scratch: Vec<u32>,
}

/// Consecutive tokens.
#[derive(Clone, Copy, Debug)]
struct Run {
    /// Chunk of its ids, and their offset.
    chunk: u32,
    at: u32,
    /// Positions of its tokens in their sequences.
    begin: u32,
    end: u32,
}

/// Ids of a chunk (1 MiB). Longer runs have their own chunk.
const CHUNK: usize = 1 << 18;

impl GrowingForest {
    /// Creates an empty forest for token ids below `vocab`.
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

    /// Adds a sequence and returns its number, counted from 0. `kind` is as in [`Forest::from_ids`]. Reads the ids
    /// once, and searches a sorted map for every node on the path.
    ///
    /// # Errors
    /// `Count` for more than [`SEQUENCES_MAX`](super::SEQUENCES_MAX) sequences, `Tokens`, `TokenId`. The forest is
    /// unchanged.
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

    /// Returns the number of tree tokens, each of which uses four bytes.
    #[must_use]
    pub fn tree_tokens(&self) -> u64 {
        self.chunks.iter().map(|chunk| chunk.len() as u64).sum()
    }

    /// Returns the forest of the sequences added so far, equal to that of [`Forest::from_ids`]. The time depends on
    /// nodes and sequences, not on tokens.
    #[must_use]
    pub fn freeze(&self) -> Forest {
        let mut nodes: Vec<Node> = Vec::new();
        // The node of each run.
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

    /// Returns the run at whose end the sequence ends, cut or added if needed.
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

    /// Adds a run below `parent`.
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

    /// Cuts a child of `parent` after its first `count` tokens, at least one and not all, and returns the run of
    /// these tokens.
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

    /// Inserts a run below `parent`, in place of a child with the same first token.
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
