//! Who has a small block: its user, the front, or nobody but the state.
//!
//! One word per granule, found from a block's address without a lock. It is not 0 only where a
//! block starts that the front may take back as it is. Whoever wants to change what such a block is
//! (claim it, record a use, free it for good) takes it out of the ledger first; the front takes it
//! over from its user the same way. Both are one compare-and-swap on the same word, so one of them
//! has it, and a second free of a block finds that it is not its user's any more (I9).

use super::classes::{CLASSES, UNASKED_UNITS_MAX};
use super::{GRANULE_BYTES_MAX, SHARDS, STREAMS};
use crate::RANGES_MAX;
use crate::sync::{AtomicU32, AtomicU64, Ordering};
use std::sync::OnceLock;

/// Words of a leaf: 32 MiB of 512-byte granules.
#[cfg(not(loom))]
const LEAF_WORDS: usize = 1 << 16;
#[cfg(loom)]
const LEAF_WORDS: usize = 4;

#[derive(Debug)]
struct Leaf {
    words: Box<[AtomicU64; LEAF_WORDS]>,
    /// Beside each entry: the generation of its range's slot.
    generations: Box<[AtomicU32; LEAF_WORDS]>,
}

/// What is known of a block that starts at a granule.
///
/// ```text
///   63  60 59           40 39     33 32    26 25            2   1       0
///   │ shard │ unasked bytes │ stream  │ class  │ slot of range │ front │ entry │
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Word(u64);

/// Set in every word that is an entry.
const IS_ENTRY: u64 = 1;
/// The front has it; else its user does.
const IS_IN_FRONT: u64 = 2;
const INDEX_SHIFT: u32 = 2;
const INDEX_BITS: u32 = 24;
const CLASS_SHIFT: u32 = INDEX_SHIFT + INDEX_BITS;
const CLASS_BITS: u32 = 7;
const STREAM_SHIFT: u32 = CLASS_SHIFT + CLASS_BITS;
const STREAM_BITS: u32 = 7;
const UNASKED_SHIFT: u32 = STREAM_SHIFT + STREAM_BITS;
const UNASKED_BITS: u32 = 20;
const SHARD_SHIFT: u32 = UNASKED_SHIFT + UNASKED_BITS;

const _: () = assert!(RANGES_MAX <= 1 << INDEX_BITS && STREAMS <= 1 << STREAM_BITS);
const _: () = assert!(CLASSES <= 1 << CLASS_BITS && SHARDS <= 1 << (u64::BITS - SHARD_SHIFT));
const _: () = assert!(UNASKED_UNITS_MAX as usize * GRANULE_BYTES_MAX <= 1 << UNASKED_BITS);

impl Word {
    /// No block for the front.
    pub(super) const NOTHING: Self = Self(0);

    /// A block in its user's hands.
    pub(super) const fn new(index: u32, class: u32, stream: u32) -> Self {
        Self(
            IS_ENTRY
                | (index as u64) << INDEX_SHIFT
                | (class as u64) << CLASS_SHIFT
                | (stream as u64) << STREAM_SHIFT,
        )
    }

    /// The same block in the hands of a user, who asked for all but `unasked_bytes` of it and got it
    /// from `shard`.
    #[inline]
    pub(super) const fn handed_out(self, shard: usize, unasked_bytes: u32) -> Self {
        let lasting = self.0 & ((1 << UNASKED_SHIFT) - 1) & !IS_IN_FRONT;
        Self(lasting | (unasked_bytes as u64) << UNASKED_SHIFT | (shard as u64) << SHARD_SHIFT)
    }

    /// The shard it was handed out from, and goes back to.
    #[inline]
    pub(super) const fn shard(self) -> usize {
        (self.0 >> SHARD_SHIFT) as usize
    }

    #[inline]
    pub(super) fn load(place: &AtomicU64) -> Self {
        // Acquire: what was done to the block before is seen.
        Self(place.load(Ordering::Acquire))
    }

    /// Makes `to` of this word; `false` where it is another by now.
    #[inline]
    pub(super) fn change(self, place: &AtomicU64, to: Self) -> bool {
        // Release: whoever takes the block next sees what was done to it. Acquire: so do we.
        place.compare_exchange(self.0, to.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    #[inline]
    const fn part(self, shift: u32, bits: u32) -> u32 {
        // At most 24 bits.
        (self.0 >> shift & ((1 << bits) - 1)) as u32
    }

    /// Slot of its range.
    #[inline]
    pub(crate) const fn index(self) -> u32 {
        self.part(INDEX_SHIFT, INDEX_BITS)
    }

    #[inline]
    pub(super) const fn class(self) -> u32 {
        self.part(CLASS_SHIFT, CLASS_BITS)
    }

    /// Slot of its stream.
    #[inline]
    pub(super) const fn stream(self) -> u32 {
        self.part(STREAM_SHIFT, STREAM_BITS)
    }

    /// Bytes of it that its user did not ask for.
    #[inline]
    pub(crate) const fn unasked_bytes(self) -> u32 {
        self.part(UNASKED_SHIFT, UNASKED_BITS)
    }

    #[inline]
    pub(super) const fn in_front(self) -> Self {
        Self(self.0 | IS_IN_FRONT)
    }

    /// Whether it is an entry, and its user has the block.
    #[inline]
    pub(crate) const fn is_users(self) -> bool {
        self.0 & (IS_ENTRY | IS_IN_FRONT) == IS_ENTRY
    }

    /// Whether the front has the block.
    #[inline]
    pub(crate) const fn is_in_front(self) -> bool {
        self.0 & IS_IN_FRONT != 0
    }
}

/// The words. A leaf (768 KiB) is there from the first small block in it on; small blocks lie close
/// together.
#[derive(Debug)]
pub(crate) struct Ledger {
    leaves: Box<[OnceLock<Leaf>]>,
}

impl Ledger {
    pub(super) fn new(units: u32) -> Self {
        let count = (units as usize).div_ceil(LEAF_WORDS);
        Self { leaves: std::iter::repeat_with(OnceLock::new).take(count).collect() }
    }

    #[inline]
    fn leaf(&self, unit: usize) -> Option<&Leaf> {
        self.leaves.get(unit / LEAF_WORDS)?.get()
    }

    #[inline]
    pub(super) fn word(&self, unit: usize) -> Option<&AtomicU64> {
        Some(&self.leaf(unit)?.words[unit % LEAF_WORDS])
    }

    /// What is known of the block that starts at `unit`, where that is an entry.
    #[inline]
    pub(crate) fn get(&self, unit: u32) -> Option<Word> {
        Some(Word::load(self.word(unit as usize)?)).filter(|word| word.0 & IS_ENTRY != 0)
    }

    /// The generation of the block that starts at `unit`, for whoever has it.
    pub(crate) fn generation(&self, unit: u32) -> Option<u32> {
        let generations = &self.leaf(unit as usize)?.generations;
        Some(generations[unit as usize % LEAF_WORDS].load(Ordering::Relaxed))
    }

    /// Enters a block that nobody else knows of.
    pub(super) fn enter(&self, unit: u32, word: Word, generation: u32) {
        let at = unit as usize;
        let Some(leaf) = self.leaves.get(at / LEAF_WORDS) else { return };
        let leaf = leaf.get_or_init(Leaf::empty);
        // Relaxed: read by whoever has seen the word.
        leaf.generations[at % LEAF_WORDS].store(generation, Ordering::Relaxed);
        leaf.words[at % LEAF_WORDS].store(word.0, Ordering::Release);
    }

    /// Takes the block out; `false` where its word is not `from` any more.
    #[inline]
    pub(crate) fn leave(&self, unit: u32, from: Word) -> bool {
        self.word(unit as usize).is_some_and(|place| from.change(place, Word::NOTHING))
    }

    /// Hands a block of the front out: nobody else may change its word.
    #[inline]
    pub(super) fn hand_out(&self, unit: u32, word: Word) {
        if let Some(place) = self.word(unit as usize) {
            place.store(word.0, Ordering::Release);
        }
    }
}

impl Leaf {
    #[cold]
    fn empty() -> Self {
        Self { words: boxed(|| AtomicU64::new(0)), generations: boxed(|| AtomicU32::new(0)) }
    }
}

/// One for each unit of a leaf, made where they stay: they are too many for a stack.
fn boxed<T>(make: impl FnMut() -> T) -> Box<[T; LEAF_WORDS]> {
    let all: Box<[T]> = std::iter::repeat_with(make).take(LEAF_WORDS).collect();
    all.try_into().unwrap_or_else(|_| unreachable!("so many were made"))
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn a_word_keeps_its_parts_apart(
            index in 0..1_u32 << INDEX_BITS,
            class in 0..1_u32 << CLASS_BITS,
            stream in 0..1_u32 << STREAM_BITS,
            unasked_bytes in 0..1_u32 << UNASKED_BITS,
            shard in 0..SHARDS,
        ) {
            let before = Word::new(index, class, stream).handed_out(3, 7).in_front();
            let word = before.handed_out(shard, unasked_bytes);
            prop_assert_eq!((word.index(), word.class(), word.stream()), (index, class, stream));
            prop_assert_eq!((word.unasked_bytes(), word.shard()), (unasked_bytes, shard));
            prop_assert!(before.is_in_front() && !before.is_users());
            prop_assert!(!word.is_in_front() && word.is_users());
        }
    }

    #[test]
    fn a_word_is_changed_by_one_of_two() {
        let ledger = Ledger::new(10_000);
        let out = Word::new(7, 3, 1).handed_out(0, 9);
        assert_eq!(ledger.get(5), None);
        ledger.enter(5, out, 77);
        assert_eq!((ledger.get(4), ledger.get(5)), (None, Some(out)));
        assert_eq!(ledger.generation(5), Some(77));
        let place = ledger.word(5).unwrap();
        assert!(out.change(place, out.in_front()));
        assert!(!out.change(place, out.in_front()), "freed twice");
        assert!(!ledger.leave(5, out), "not its user's any more");
        ledger.hand_out(5, out);
        assert!(ledger.leave(5, out));
        assert_eq!(ledger.get(5), None);
    }
}
