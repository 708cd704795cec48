//! The ownership table: whether a small block belongs to its user, to the thread cache or to the state.
//!
//! One word per granule, found from a block's address without a lock. It is non-zero only at the start
//! of a cacheable block. A caller that claims such a block, records a use of it or returns it to the
//! state first removes its entry; the thread cache takes it over from its user the same way. Both are
//! one compare-and-swap on the same word, so exactly one of them succeeds, and a second free finds a
//! block that its user no longer owns (I9).

use super::classes::{CLASSES, SLACK_UNITS_MAX};
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
    /// For each entry: the generation of its range's slot.
    generations: Box<[AtomicU32; LEAF_WORDS]>,
}

/// The entry of a block that starts at a granule.
///
/// ```text
///   63  60 59           40 39     33 32    26 25            2   1       0
///   │ shard │  slack bytes  │ stream  │ class  │ slot of range │ cached │ entry │
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ownership(u64);

/// Set in every word that is an entry.
const IS_ENTRY: u64 = 1;
/// The thread cache owns the block; otherwise its user does.
const IS_IN_CACHE: u64 = 2;
const INDEX_SHIFT: u32 = 2;
const INDEX_BITS: u32 = 24;
const CLASS_SHIFT: u32 = INDEX_SHIFT + INDEX_BITS;
const CLASS_BITS: u32 = 7;
const STREAM_SHIFT: u32 = CLASS_SHIFT + CLASS_BITS;
const STREAM_BITS: u32 = 7;
const SLACK_SHIFT: u32 = STREAM_SHIFT + STREAM_BITS;
const SLACK_BITS: u32 = 20;
const SHARD_SHIFT: u32 = SLACK_SHIFT + SLACK_BITS;

const _: () = assert!(RANGES_MAX <= 1 << INDEX_BITS && STREAMS <= 1 << STREAM_BITS);
const _: () = assert!(CLASSES <= 1 << CLASS_BITS && SHARDS <= 1 << (u64::BITS - SHARD_SHIFT));
const _: () = assert!(SLACK_UNITS_MAX as usize * GRANULE_BYTES_MAX <= 1 << SLACK_BITS);

impl Ownership {
    /// No entry.
    pub(super) const NOTHING: Self = Self(0);

    /// The entry of a block that its user owns.
    pub(super) const fn new(index: u32, class: u32, stream: u32) -> Self {
        Self(
            IS_ENTRY
                | (index as u64) << INDEX_SHIFT
                | (class as u64) << CLASS_SHIFT
                | (stream as u64) << STREAM_SHIFT,
        )
    }

    /// The same block, owned by a user that requested all but `slack_bytes` of it and got it from
    /// `shard`.
    #[inline]
    pub(super) const fn allocated(self, shard: usize, slack_bytes: u32) -> Self {
        let lasting = self.0 & ((1 << SLACK_SHIFT) - 1) & !IS_IN_CACHE;
        Self(lasting | (slack_bytes as u64) << SLACK_SHIFT | (shard as u64) << SHARD_SHIFT)
    }

    /// The shard that allocated it, and takes it back.
    #[inline]
    pub(super) const fn shard(self) -> usize {
        (self.0 >> SHARD_SHIFT) as usize
    }

    #[inline]
    pub(super) fn load(entry: &AtomicU64) -> Self {
        // Acquire: what was done to the block before is seen.
        Self(entry.load(Ordering::Acquire))
    }

    /// Replaces this word by `to`; `false` if it has changed.
    #[inline]
    pub(super) fn change(self, entry: &AtomicU64, to: Self) -> bool {
        // Release: the next owner sees what was done to the block. Acquire: so do we.
        entry.compare_exchange(self.0, to.0, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    #[inline]
    const fn field(self, shift: u32, bits: u32) -> u32 {
        // At most 24 bits.
        (self.0 >> shift & ((1 << bits) - 1)) as u32
    }

    /// Slot of its range.
    #[inline]
    pub(crate) const fn index(self) -> u32 {
        self.field(INDEX_SHIFT, INDEX_BITS)
    }

    #[inline]
    pub(super) const fn class(self) -> u32 {
        self.field(CLASS_SHIFT, CLASS_BITS)
    }

    /// Slot of its stream.
    #[inline]
    pub(super) const fn stream(self) -> u32 {
        self.field(STREAM_SHIFT, STREAM_BITS)
    }

    /// Bytes of the block beyond the request.
    #[inline]
    pub(crate) const fn slack_bytes(self) -> u32 {
        self.field(SLACK_SHIFT, SLACK_BITS)
    }

    #[inline]
    pub(super) const fn in_cache(self) -> Self {
        Self(self.0 | IS_IN_CACHE)
    }

    /// Whether it is an entry, and its user owns the block.
    #[inline]
    pub(crate) const fn is_allocated(self) -> bool {
        self.0 & (IS_ENTRY | IS_IN_CACHE) == IS_ENTRY
    }

    /// Whether the thread cache owns the block.
    #[inline]
    pub(crate) const fn is_in_cache(self) -> bool {
        self.0 & IS_IN_CACHE != 0
    }
}

/// The words. A leaf (768 KiB) is allocated with its first small block; small blocks lie close
/// together.
#[derive(Debug)]
pub(crate) struct OwnershipTable {
    leaves: Box<[OnceLock<Leaf>]>,
}

impl OwnershipTable {
    pub(super) fn new(units: u32) -> Self {
        let count = (units as usize).div_ceil(LEAF_WORDS);
        Self { leaves: std::iter::repeat_with(OnceLock::new).take(count).collect() }
    }

    #[inline]
    fn leaf(&self, unit: usize) -> Option<&Leaf> {
        self.leaves.get(unit / LEAF_WORDS)?.get()
    }

    #[inline]
    pub(super) fn entry(&self, unit: usize) -> Option<&AtomicU64> {
        Some(&self.leaf(unit)?.words[unit % LEAF_WORDS])
    }

    /// The entry of the block that starts at `unit`, if any.
    #[inline]
    pub(crate) fn get(&self, unit: u32) -> Option<Ownership> {
        Some(Ownership::load(self.entry(unit as usize)?)).filter(|word| word.0 & IS_ENTRY != 0)
    }

    /// The generation of the block that starts at `unit`, for its owner.
    pub(crate) fn generation(&self, unit: u32) -> Option<u32> {
        let generations = &self.leaf(unit as usize)?.generations;
        Some(generations[unit as usize % LEAF_WORDS].load(Ordering::Relaxed))
    }

    /// Inserts the entry of a block that no other thread knows.
    pub(super) fn insert(&self, unit: u32, word: Ownership, generation: u32) {
        let at = unit as usize;
        let Some(leaf) = self.leaves.get(at / LEAF_WORDS) else { return };
        let leaf = leaf.get_or_init(Leaf::empty);
        // Relaxed: only read after the word.
        leaf.generations[at % LEAF_WORDS].store(generation, Ordering::Relaxed);
        leaf.words[at % LEAF_WORDS].store(word.0, Ordering::Release);
    }

    /// Removes the entry; `false` if its word is no longer `from`.
    #[inline]
    pub(crate) fn remove(&self, unit: u32, from: Ownership) -> bool {
        self.entry(unit as usize).is_some_and(|entry| from.change(entry, Ownership::NOTHING))
    }

    /// Marks a cached block as allocated: no other thread may change its word.
    #[inline]
    pub(super) fn set_allocated(&self, unit: u32, word: Ownership) {
        if let Some(entry) = self.entry(unit as usize) {
            entry.store(word.0, Ordering::Release);
        }
    }
}

impl Leaf {
    #[cold]
    fn empty() -> Self {
        Self { words: boxed(|| AtomicU64::new(0)), generations: boxed(|| AtomicU32::new(0)) }
    }
}

/// A value for each unit of a leaf, created on the heap: they do not fit a stack.
fn boxed<T>(make: impl FnMut() -> T) -> Box<[T; LEAF_WORDS]> {
    let all: Box<[T]> = std::iter::repeat_with(make).take(LEAF_WORDS).collect();
    all.try_into().unwrap_or_else(|_| unreachable!("created with this length"))
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
            slack_bytes in 0..1_u32 << SLACK_BITS,
            shard in 0..SHARDS,
        ) {
            let before = Ownership::new(index, class, stream).allocated(3, 7).in_cache();
            let word = before.allocated(shard, slack_bytes);
            prop_assert_eq!((word.index(), word.class(), word.stream()), (index, class, stream));
            prop_assert_eq!((word.slack_bytes(), word.shard()), (slack_bytes, shard));
            prop_assert!(before.is_in_cache() && !before.is_allocated());
            prop_assert!(!word.is_in_cache() && word.is_allocated());
        }
    }

    #[test]
    fn only_one_of_two_changes_of_a_word_succeeds() {
        let ownership = OwnershipTable::new(10_000);
        let out = Ownership::new(7, 3, 1).allocated(0, 9);
        assert_eq!(ownership.get(5), None);
        ownership.insert(5, out, 77);
        assert_eq!((ownership.get(4), ownership.get(5)), (None, Some(out)));
        assert_eq!(ownership.generation(5), Some(77));
        let entry = ownership.entry(5).unwrap();
        assert!(out.change(entry, out.in_cache()));
        assert!(!out.change(entry, out.in_cache()), "freed twice");
        assert!(!ownership.remove(5, out), "not its user's any more");
        ownership.set_allocated(5, out);
        assert!(ownership.remove(5, out));
        assert_eq!(ownership.get(5), None);
    }
}
