//! Builds forests from borrowed token ids, without copies.

use super::Forest;
use super::build::build;
use super::order::order;
use crate::PlanError;
use crate::limits::{NODES_MAX, TOKENS_MAX};
use crate::model::count;

/// Maximum sequences of a batch; its trees have fewer than twice as many nodes.
pub const SEQUENCES_MAX: usize = NODES_MAX / 2;

pub(super) mod sealed {
    pub trait Sealed {}
}

/// An integer type of token ids: `i32`, `u32` or `i64`.
pub trait TokenInt: Copy + Ord + Into<i64> + sealed::Sealed {
    /// Returns whether it is not an id of the vocabulary.
    #[doc(hidden)]
    fn outside(self, vocab: u32) -> bool;
}

// Each in its own width, so that the check of a run of ids is vectorised.
impl sealed::Sealed for i32 {}
impl TokenInt for i32 {
    fn outside(self, vocab: u32) -> bool {
        (self < 0) | (self.cast_unsigned() >= vocab)
    }
}

impl sealed::Sealed for u32 {}
impl TokenInt for u32 {
    fn outside(self, vocab: u32) -> bool {
        self >= vocab
    }
}

impl sealed::Sealed for i64 {}
impl TokenInt for i64 {
    fn outside(self, vocab: u32) -> bool {
        self.cast_unsigned() >= u64::from(vocab)
    }
}

/// The sequences of a batch: sequence i is `ids[offsets[i]..offsets[i + 1]]`.
#[derive(Clone, Copy, Debug)]
pub(super) struct Sequences<'a, I> {
    pub(super) ids: &'a [I],
    pub(super) offsets: &'a [u64],
}

impl<'a, I: Copy> Sequences<'a, I> {
    pub(super) fn count(self) -> usize {
        self.offsets.len().saturating_sub(1)
    }

    /// Returns the ids of a sequence. Offsets must be checked.
    pub(super) fn get(self, sequence: u32) -> &'a [I] {
        let at = sequence as usize;
        &self.ids[self.offsets[at] as usize..self.offsets[at + 1] as usize]
    }

    fn check(self) -> Result<(), PlanError> {
        let ids = self.ids.len() as u64;
        for (index, pair) in self.offsets.windows(2).enumerate() {
            let (begin, end) = (pair[0], pair[1]);
            if begin > end || end > ids {
                return Err(PlanError::Offsets { index, begin, end, ids });
            }
        }
        check_count(self.count())?;
        (0..self.count()).try_for_each(|index| check_length(index, self.get(index as u32).len()))
    }
}

impl Forest {
    /// Builds the forest of sequences in one buffer: sequence i is `ids[offsets[i]..offsets[i + 1]]`, so there is
    /// one more offset than sequences. `kinds` has one number for each sequence (see
    /// [*Identity*](super#identity)), or is empty if all are of kind 0.
    ///
    /// Reads every id about once and keeps none: 100 million take tenths of a second.
    ///
    /// # Errors
    /// `Offsets` that decrease or exceed the ids, `Tokens` for a length outside 1 to [`TOKENS_MAX`], `Count` for
    /// no sequences, more than [`SEQUENCES_MAX`], a wrong number of kinds, or a `vocab` of 0; `TokenId` for the
    /// first id outside the vocabulary.
    pub fn from_ids<I: TokenInt>(
        ids: &[I],
        offsets: &[u64],
        kinds: &[u64],
        vocab: u32,
    ) -> Result<Self, PlanError> {
        let sequences = Sequences { ids, offsets };
        check_vocab(vocab)?;
        sequences.check()?;
        if !kinds.is_empty() && kinds.len() != sequences.count() {
            let accepted = format!("0 or {}, one for each sequence", sequences.count());
            return Err(PlanError::Count { what: "kinds", seen: kinds.len() as u64, accepted });
        }
        let order = order(sequences, kinds, vocab).map_err(|met| {
            // An earlier sequence may also have an id outside.
            let outside = |at| outside(sequences.get(at), vocab).map(|index| (at, index));
            let (at, index) = (0..met.0).find_map(outside).unwrap_or(met);
            refuse_id(at as usize, sequences.get(at), index, vocab)
        })?;
        Ok(build(&order, |sequence| sequences.get(sequence).len()))
    }
}

pub(super) fn check_vocab(vocab: u32) -> Result<(), PlanError> {
    count("vocab", vocab, 1, u32::MAX)
}

pub(super) fn check_count(seen: usize) -> Result<(), PlanError> {
    count("sequences", seen as u64, 1, SEQUENCES_MAX as u64)
}

/// Returns an error unless the length of a sequence or node is in `least..=most`.
pub(super) fn check_tokens(
    of: impl FnOnce() -> String,
    seen: u64,
    least: u64,
    most: u64,
) -> Result<(), PlanError> {
    if (least..=most).contains(&seen) {
        return Ok(());
    }
    Err(PlanError::Tokens { of: of(), seen, accepted: format!("{least} to {most}") })
}

pub(super) fn check_length(index: usize, length: usize) -> Result<(), PlanError> {
    check_tokens(|| format!("sequence {index}"), length as u64, 1, TOKENS_MAX)
}

/// Returns the index of the first id outside the vocabulary.
pub(super) fn outside<I: TokenInt>(ids: &[I], vocab: u32) -> Option<usize> {
    /// Ids checked without a branch between them, which is several times faster.
    const STRIDE: usize = 256;
    let strides = ids.chunks(STRIDE);
    let at = strides
        .take_while(|stride| !stride.iter().fold(false, |any, id| any | id.outside(vocab)))
        .count()
        * STRIDE;
    let rest = ids.get(at..)?;
    rest.iter().position(|id| id.outside(vocab)).map(|index| at + index)
}

pub(super) fn refuse_id<I: TokenInt>(
    sequence: usize,
    ids: &[I],
    index: usize,
    vocab: u32,
) -> PlanError {
    PlanError::TokenId { sequence, index, seen: ids[index].into(), vocab }
}
