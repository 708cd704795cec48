//! What callers ask for and are handed.

use dormouse_device::{AddressRange, Fill};

/// Names one arena: a pool of its own, whose segments nobody else uses until it is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArenaId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// A request for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bytes wanted, at least 1. The block has them rounded up to whole granules.
    pub bytes: usize,
    /// Alignment of the address: a power of two up to [`crate::ALIGN_BYTES_MAX`]. Anything up to
    /// one granule costs nothing.
    pub align: usize,
    /// Key of the stream that uses it, 0 for the calling thread (see the crate page).
    pub stream: u64,
    /// The pool to take it from; the general one where `None`.
    pub arena: Option<ArenaId>,
    /// Opaque: who was collecting when it was allocated; 0 for nobody.
    pub scope: u64,
    /// Opaque: a user's tag; 0 for none.
    pub tag: u32,
    /// What pages mapped for it are to hold. `Zero` is no promise: see [`Block::zeroed`].
    pub fill: Fill,
    /// Whether the block is to have its pages to itself: all of it can sleep then, and the rest of
    /// its last page is wasted. A 32nd of a page or less shares its page all the same.
    pub whole_pages: bool,
}

impl Request {
    /// A plain request to the general pool, aligned to whatever a granule gives.
    #[must_use]
    pub const fn new(bytes: usize) -> Self {
        Self {
            bytes,
            align: 1,
            stream: 0,
            arena: None,
            scope: 0,
            tag: 0,
            fill: Fill::Any,
            whole_pages: false,
        }
    }
}

/// Names one block for as long as it lives. A slot is reused with the next generation, so an id
/// that outlived its block is recognised (the generation wraps after 2³² uses of one slot). Not so
/// where a small block was kept as it was ([`crate::Config::thread_cache`]): it comes back with the
/// name it had, and is nobody's in between.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId {
    /// Slot.
    pub index: u32,
    /// Which use of the slot.
    pub generation: u32,
}

/// A block as handed out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its name.
    pub id: BlockId,
    /// Its addresses: whole granules, all of them the caller's.
    pub range: AddressRange,
    /// Every byte is zero: zeroed pages were asked for and mapped for this block.
    pub zeroed: bool,
}

/// What is known of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// Its name.
    pub id: BlockId,
    /// Its addresses, whole granules.
    pub range: AddressRange,
    /// The pages that no other block lies in: those that can sleep. May be empty.
    pub pages: AddressRange,
    /// Bytes its user asked for.
    pub requested_bytes: usize,
    /// [`Request::scope`].
    pub scope: u64,
    /// [`Request::tag`].
    pub tag: u32,
    /// [`Request::arena`], which may be closed by now.
    pub arena: Option<ArenaId>,
    /// The owner key of the claimant, where there is one.
    pub claimed: Option<u64>,
    /// Its pages are gone, its addresses are kept.
    pub asleep: bool,
    /// Freed by its user while claimed; the claimant has yet to let go.
    pub free_deferred: bool,
    /// [`Request::stream`].
    pub stream: u64,
}

/// What became of a freed block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a claimed block stays until its claimant calls `finish_free`"]
pub enum Freed {
    /// Its memory may be reused from now on: by its own stream at once, by others once all its
    /// uses are over.
    Done,
    /// The free is deferred: the claimant with this owner key must call
    /// [`finish_free`](crate::Allocator::finish_free) (or `unclaim`) once it is done with it.
    Claimed(u64),
}
