//! Sorts sequences and finds how many tokens neighbours share, reading every id about once.
//!
//! A *group* is sequences that share their first tokens. Every member is compared once with the longest, the
//! *pivot*, up to the first difference. The position and the token at which members leave the pivot sort
//! them; those that leave at the same position with the same token are the next group:
//!
//! ```text
//!   pivot   a b c d e f       leaves at    side
//!           a b a . . .       2, with a    before the pivot
//!           a b c d           4, ended     before, and done
//!           a b c e . .       3, with e    after
//!           a b d . . .       2, with d    after: the sooner it leaves, the later it comes
//! ```
//!
//! An id is read once as a member's at any depth; the pivot's ids stay in the cache. Only pivots have ids not yet
//! found in another sequence, so only theirs are checked against the vocabulary: as many as tree tokens.

use std::cmp::Ordering;

use super::ids::{Sequences, TokenInt, outside};

/// Sequences ordered by kind, then ids.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) sequences: Vec<u32>,
    /// Tokens shared with the previous sequence; 0 for the first. For equal sequences it may exceed their length.
    pub(super) shared: Vec<u32>,
}

/// A group, contiguous in the order.
#[derive(Clone, Copy, Debug)]
struct Group {
    begin: u32,
    end: u32,
    /// Tokens that all share and that have been compared.
    compared: u32,
}

/// The point at which a member leaves the pivot.
#[derive(Clone, Copy, Debug)]
struct Branch {
    /// Sort key of the position: before the pivot, an earlier position is smaller; after it, larger.
    rank: u32,
    sequence: u32,
    /// Its next token; `None`, which sorts before all tokens, if it has ended.
    token: Option<i64>,
}

/// Rank of the pivot and equal sequences. Lengths, at most 2^28, are smaller ranks.
const ALIKE: u32 = 1 << 29;
/// Ranks after the pivot are this minus the shared tokens.
const AFTER: u32 = 1 << 30;

/// Returns the order, or a sequence with an id outside the vocabulary and the index of its first such id.
pub(super) fn order<I: TokenInt>(
    sequences: Sequences<'_, I>,
    kinds: &[u64],
    vocab: u32,
) -> Result<Order, (u32, usize)> {
    let count = sequences.count() as u32;
    let mut order = Order { sequences: (0..count).collect(), shared: vec![0; count as usize] };
    let mut groups = by_kind(&mut order.sequences, kinds);
    let mut branches: Vec<Branch> = Vec::new();
    while let Some(group) = groups.pop() {
        let place = group.begin as usize..group.end as usize;
        let members = &mut order.sequences[place.clone()];
        leave(sequences, members, group.compared, vocab, &mut branches)?;
        branches.sort_unstable_by_key(|branch| (branch.rank, branch.token));
        for (member, branch) in members.iter_mut().zip(&branches) {
            *member = branch.sequence;
        }
        for (shared, pair) in order.shared[place].iter_mut().skip(1).zip(branches.windows(2)) {
            *shared = pair[0].shared().min(pair[1].shared());
        }
        let mut begin = group.begin;
        for alike in branches.chunk_by(|a, b| (a.rank, a.token) == (b.rank, b.token)) {
            let end = begin + alike.len() as u32;
            if alike[0].token.is_some() {
                groups.push(Group { begin, end, compared: alike[0].shared() });
            }
            begin = end;
        }
    }
    Ok(order)
}

/// Sorts by kind and returns a group for each kind.
fn by_kind(sequences: &mut [u32], kinds: &[u64]) -> Vec<Group> {
    if kinds.is_empty() {
        return vec![Group { begin: 0, end: sequences.len() as u32, compared: 0 }];
    }
    let kind = |sequence: &u32| kinds[*sequence as usize];
    sequences.sort_unstable_by_key(kind);
    let mut begin = 0;
    let runs = sequences.chunk_by(|a, b| kind(a) == kind(b));
    runs.map(|run| {
        let end = begin + run.len() as u32;
        Group { begin: std::mem::replace(&mut begin, end), end, compared: 0 }
    })
    .collect()
}

/// Fills `branches` with those of a group; fails with an id of the pivot outside the vocabulary.
fn leave<I: TokenInt>(
    sequences: Sequences<'_, I>,
    members: &[u32],
    compared: u32,
    vocab: u32,
    branches: &mut Vec<Branch>,
) -> Result<(), (u32, usize)> {
    branches.clear();
    let length = |member: &u32| sequences.get(*member).len();
    let Some(pivot) = members.iter().copied().max_by_key(length) else { return Ok(()) };
    let ids = &sequences.get(pivot)[compared as usize..];
    if let Some(at) = outside(ids, vocab) {
        return Err((pivot, compared as usize + at));
    }
    branches.extend(members.iter().map(|&member| {
        if member == pivot {
            return Branch { rank: ALIKE, sequence: member, token: None };
        }
        Branch::of(ids, &sequences.get(member)[compared as usize..], compared, member)
    }));
    Ok(())
}

impl Branch {
    /// Compares the tokens of pivot and member after the first `compared`.
    fn of<I: TokenInt>(pivot: &[I], member: &[I], compared: u32, sequence: u32) -> Self {
        let same = common_prefix(pivot, member);
        let shared = compared + same as u32;
        let (token, pivots) = (member.get(same), pivot.get(same));
        let rank = match token.cmp(&pivots) {
            Ordering::Less => shared,
            // Both have ended.
            Ordering::Equal => ALIKE,
            Ordering::Greater => AFTER - shared,
        };
        Self { rank, sequence, token: token.map(|token| (*token).into()) }
    }

    /// Returns the tokens shared with the pivot; for equal sequences, more than any sequence has.
    const fn shared(&self) -> u32 {
        if self.rank <= ALIKE { self.rank } else { AFTER - self.rank }
    }
}

/// Returns the length of the common prefix.
pub(super) fn common_prefix<I: Eq>(a: &[I], b: &[I]) -> usize {
    /// Elements compared at once: slices of integers compare as memory, many times faster.
    const STRIDE: usize = 256;
    let count = a.len().min(b.len());
    let (a, b) = (&a[..count], &b[..count]);
    let strides = a.chunks(STRIDE).zip(b.chunks(STRIDE));
    let at = (strides.take_while(|(a, b)| a == b).count() * STRIDE).min(count);
    at + a[at..].iter().zip(&b[at..]).take_while(|(a, b)| a == b).count()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use std::cell::Cell;

    use super::super::ids::sealed::Sealed;
    use super::*;

    thread_local! {
        static COMPARED: Cell<usize> = const { Cell::new(0) };
    }

    /// An id that counts how often it is compared.
    #[derive(Clone, Copy, Debug, Eq, PartialOrd, Ord)]
    struct Counted(i64);

    impl PartialEq for Counted {
        fn eq(&self, other: &Self) -> bool {
            COMPARED.with(|compared| compared.set(compared.get() + 1));
            self.0 == other.0
        }
    }

    impl From<Counted> for i64 {
        fn from(id: Counted) -> Self {
            id.0
        }
    }

    impl Sealed for Counted {}

    impl TokenInt for Counted {
        fn outside(self, vocab: u32) -> bool {
            self.0.outside(vocab)
        }
    }

    /// The longest leave first, so that groups nest as deep as there are sequences.
    #[test]
    fn ids_are_compared_about_once_in_nested_groups() {
        let sequence = |index: usize| {
            let count = |id, count| std::iter::repeat_n(Counted(id), count);
            count(1, 10 * index).chain(count(2, 2000 - 20 * index)).collect::<Vec<_>>()
        };
        let sequences: Vec<Vec<Counted>> = (0..100).map(sequence).collect();
        let end = |at: usize| sequences[..at].iter().map(|ids| ids.len() as u64).sum::<u64>();
        let offsets: Vec<u64> = (0..=sequences.len()).map(end).collect();
        let ids = sequences.concat();
        let order = order(Sequences { ids: &ids, offsets: &offsets }, &[], 3).unwrap();
        let ids = ids.len();
        assert!(order.sequences.is_sorted_by(|a, b| a > b), "more of 1 comes before more of 2");
        // Twice where they differ: the stride is found first, then the id.
        let compared = COMPARED.with(Cell::get);
        assert!((ids / 4..ids * 2).contains(&compared), "{compared} comparisons of {ids} ids");
    }
}
