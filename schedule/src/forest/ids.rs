//! Forests from token ids: what is accepted, borrowed and never copied.

use super::Forest;
use super::build::build;
use super::order::order;
use crate::PlanError;
use crate::limits::{NODES_MAX, TOKENS_MAX};

/// Sequences of one batch: a tree of so many has fewer than twice as many nodes.
pub const SEQUENCES_MAX: usize = NODES_MAX / 2;

pub(super) mod sealed {
    pub trait Sealed {}
}

/// An integer that token ids come as: `i32`, `u32` or `i64`.
pub trait TokenInt: Copy + Ord + Into<i64> + sealed::Sealed {
    /// Whether it is not an id of a vocabulary.
    #[doc(hidden)]
    fn outside(self, vocab: u32) -> bool;
}

// Each in its own width, so that a run of ids is checked many at a time.
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

/// The ids of a batch, wherever they lie.
#[derive(Clone, Copy, Debug)]
pub(super) enum Sequences<'a, I> {
    Packed { ids: &'a [I], offsets: &'a [u64] },
    Separate(&'a [&'a [I]]),
}

impl<'a, I: Copy> Sequences<'a, I> {
    pub(super) fn count(self) -> usize {
        match self {
            Self::Packed { offsets, .. } => offsets.len().saturating_sub(1),
            Self::Separate(slices) => slices.len(),
        }
    }

    /// The ids of one sequence. Offsets have been checked.
    pub(super) fn get(self, sequence: u32) -> &'a [I] {
        let at = sequence as usize;
        match self {
            Self::Packed { ids, offsets } => &ids[offsets[at] as usize..offsets[at + 1] as usize],
            Self::Separate(slices) => slices[at],
        }
    }

    fn check(self) -> Result<(), PlanError> {
        if let Self::Packed { ids, offsets } = self {
            for (index, pair) in offsets.windows(2).enumerate() {
                let (begin, end) = (pair[0], pair[1]);
                if begin > end || end > ids.len() as u64 {
                    return Err(PlanError::Offsets { index, begin, end, ids: ids.len() as u64 });
                }
            }
        }
        check_count(self.count())?;
        (0..self.count()).try_for_each(|index| check_length(index, self.get(index as u32).len()))
    }
}

impl Forest {
    /// The forest of sequences that lie one after another: sequence i is
    /// `ids[offsets[i]..offsets[i + 1]]`, so there is one offset more than sequences, and ids
    /// before the first and after the last offset belong to none. `kinds` is one number a sequence
    /// (see [*Identity*](super#identity)), or empty where all are of kind 0.
    ///
    /// Reads every id about once and keeps none: 100 million take tenths of a second.
    ///
    /// # Errors
    /// `Offsets` that fall or lie outside the ids, `SequenceLength` outside 1 to [`TOKENS_MAX`],
    /// `Count` for no sequences, more than [`SEQUENCES_MAX`], kinds that are not one a sequence, or
    /// a `vocab` of 0; `TokenId` for the first id outside the vocabulary.
    pub fn from_ids<I: TokenInt>(
        ids: &[I],
        offsets: &[u64],
        kinds: &[u64],
        vocab: u32,
    ) -> Result<Self, PlanError> {
        Self::from_sequences(Sequences::Packed { ids, offsets }, kinds, vocab)
    }

    /// The same of sequences in buffers of their own.
    ///
    /// # Errors
    /// As [`Forest::from_ids`], `Offsets` apart.
    pub fn from_slices<I: TokenInt>(
        sequences: &[&[I]],
        kinds: &[u64],
        vocab: u32,
    ) -> Result<Self, PlanError> {
        Self::from_sequences(Sequences::Separate(sequences), kinds, vocab)
    }

    fn from_sequences<I: TokenInt>(
        sequences: Sequences<'_, I>,
        kinds: &[u64],
        vocab: u32,
    ) -> Result<Self, PlanError> {
        check_vocab(vocab)?;
        sequences.check()?;
        if !kinds.is_empty() && kinds.len() != sequences.count() {
            let accepted = format!("0, or {}, one a sequence", sequences.count());
            return Err(PlanError::Count { what: "kinds", seen: kinds.len() as u64, accepted });
        }
        let order = order(sequences, kinds, vocab).map_err(|met| {
            // As one reads the sequences, another may come first.
            let outside = |at| outside(sequences.get(at), vocab).map(|index| (at, index));
            let (at, index) = (0..met.0).find_map(outside).unwrap_or(met);
            refuse_id(at as usize, sequences.get(at), index, vocab)
        })?;
        Ok(build(&order, |sequence| sequences.get(sequence).len()))
    }
}

pub(super) fn check_vocab(vocab: u32) -> Result<(), PlanError> {
    if vocab > 0 {
        return Ok(());
    }
    Err(PlanError::Count { what: "vocab", seen: 0, accepted: format!("1 to {}", u32::MAX) })
}

pub(super) fn check_count(seen: usize) -> Result<(), PlanError> {
    if (1..=SEQUENCES_MAX).contains(&seen) {
        return Ok(());
    }
    let accepted = format!("1 to {SEQUENCES_MAX}");
    Err(PlanError::Count { what: "sequences", seen: seen as u64, accepted })
}

pub(super) fn check_length(index: usize, length: usize) -> Result<(), PlanError> {
    if (1..=TOKENS_MAX).contains(&(length as u64)) {
        return Ok(());
    }
    Err(PlanError::SequenceLength { index, seen: length as u64 })
}

/// Where a sequence's first id outside the vocabulary is.
pub(super) fn outside<I: TokenInt>(ids: &[I], vocab: u32) -> Option<usize> {
    /// Ids checked at a time: a check that may stop at each of them is several times slower.
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
    at: usize,
    vocab: u32,
) -> PlanError {
    PlanError::TokenId {
        place: format!("sequence {sequence}"),
        index: at,
        seen: ids[at].into(),
        vocab,
    }
}
