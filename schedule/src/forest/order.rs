//! Sequences in lexicographic order, and how much neighbours share, reading every id about once.
//!
//! A *group* is a run of sequences that share their first tokens. One of the longest is the *pivot*:
//! any would do, but a conversation's turns are all dealt with at once where the last is it. Every
//! other member is compared with the pivot once, to the first difference. Where and how it leaves
//! the pivot sorts it among the others, and those that leave at the same place with the same token
//! are the next group, to be compared from there on:
//!
//! ```text
//!   pivot   a b c d e f       leaves at    side
//!           a b a . . .       2, with a    before the pivot
//!           a b c d           4, ended     before, and done
//!           a b c e . .       3, with e    after
//!           a b d . . .       2, with d    after: the sooner it leaves, the later it comes
//! ```
//!
//! So an id is read once as a member's, however deep its group; the pivot's stay in the cache.
//! Only pivots have ids that no other sequence was found to share, so theirs alone are checked
//! against the vocabulary: as many as the forest has tokens.

use std::cmp::Ordering;

use super::ids::{Sequences, TokenInt, outside};

/// Sequences in order of kind, then ids; those with the same in any order.
#[derive(Debug)]
pub(super) struct Order {
    pub(super) sequences: Vec<u32>,
    /// Tokens that each shares with the one before it; 0 for the first. Where they are the same, it
    /// may be more than they have.
    pub(super) shared: Vec<u32>,
}

/// Members of a group: a run of the order.
#[derive(Clone, Copy, Debug)]
struct Group {
    begin: u32,
    end: u32,
    /// First tokens that all share and that have been compared.
    compared: u32,
}

/// How a member leaves the pivot.
#[derive(Clone, Copy, Debug)]
struct Branch {
    /// Order of leaving: sooner is earlier before the pivot, and later after it.
    rank: u32,
    sequence: u32,
    /// What it goes on with.
    token: i64,
}

/// Rank of the pivot and its like. Lengths, at most 2^28, are ranks below it.
const ALIKE: u32 = 1 << 29;
/// Less the tokens shared: ranks above it.
const AFTER: u32 = 1 << 30;
/// Token of a sequence that has ended: before all others.
const ENDED: i64 = i64::MIN;

/// The order; where an id is outside the vocabulary, a sequence and the index of its first such id.
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
            if alike[0].token != ENDED {
                groups.push(Group { begin, end, compared: alike[0].shared() });
            }
            begin = end;
        }
    }
    Ok(order)
}

/// Sorts by kind; the runs of one kind each.
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

/// How each member of a group leaves its pivot; or where the pivot leaves the vocabulary.
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
            return Branch { rank: ALIKE, sequence: member, token: ENDED };
        }
        Branch::of(ids, &sequences.get(member)[compared as usize..], compared, member)
    }));
    Ok(())
}

impl Branch {
    /// Both from the first token on that has not been compared.
    fn of<I: TokenInt>(pivot: &[I], member: &[I], compared: u32, sequence: u32) -> Self {
        let same = common_prefix(pivot, member);
        let shared = compared + same as u32;
        let (rank, token) = match (member.get(same), pivot.get(same)) {
            (None, None) => (ALIKE, ENDED),
            (None, Some(_)) => (shared, ENDED),
            (Some(token), pivots) => match Some(token).cmp(&pivots) {
                Ordering::Less => (shared, (*token).into()),
                _ => (AFTER - shared, (*token).into()),
            },
        };
        Self { rank, sequence, token }
    }

    /// Tokens shared with the pivot; for its like, more than any sequence has.
    const fn shared(&self) -> u32 {
        if self.rank <= ALIKE { self.rank } else { AFTER - self.rank }
    }
}

/// How many first elements are the same.
pub(super) fn common_prefix<I: Eq>(a: &[I], b: &[I]) -> usize {
    /// Elements compared at a time: slices of integers as memory, many times faster than singly.
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

    /// The longest leave first, so that there are as many groups within groups as sequences.
    #[test]
    fn ids_are_compared_about_once_however_deep_the_groups() {
        let sequence = |index: usize| {
            let count = |id, count| std::iter::repeat_n(Counted(id), count);
            count(1, 10 * index).chain(count(2, 2000 - 20 * index)).collect::<Vec<_>>()
        };
        let sequences: Vec<Vec<Counted>> = (0..100).map(sequence).collect();
        let slices: Vec<&[Counted]> = sequences.iter().map(Vec::as_slice).collect();
        let ids: usize = sequences.iter().map(Vec::len).sum();
        let order = order(Sequences::Separate(&slices), &[], 3).unwrap();
        assert!(order.sequences.is_sorted_by(|a, b| a > b), "more of 1 comes before more of 2");
        // Twice where they differ: the stride is found first, then the id.
        let compared = COMPARED.with(Cell::get);
        assert!((ids / 4..ids * 2).contains(&compared), "{compared} comparisons of {ids} ids");
    }
}
