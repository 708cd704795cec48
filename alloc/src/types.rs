//! Requests and blocks.

use dormouse_device::{AddressRange, Fill};

/// Identifies an arena: a separate pool, whose segments serve no other until it is closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ArenaId {
    pub(crate) index: u32,
    pub(crate) generation: u32,
}

/// A request for one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Size in bytes, at least 1. The block is rounded up to whole granules.
    pub bytes: usize,
    /// Alignment of the address: a power of two up to [`crate::ALIGN_BYTES_MAX`]. Free of cost up to
    /// one granule.
    pub align: usize,
    /// Key of the stream that uses the block; 0: the calling thread (see Streams on the crate page).
    pub stream: u64,
    /// The arena; `None`: the general pool.
    pub arena: Option<ArenaId>,
    /// Opaque number of the collecting scope; 0 for none.
    pub scope: u64,
    /// Opaque number of the user's tag; 0 for none.
    pub tag: u32,
    /// Contents of the pages mapped for it. `Zero` is not guaranteed: see [`Block::zeroed`].
    pub fill: Fill,
    /// Whether the block shares no page: then all of it can sleep, and the rest of its last page is
    /// wasted. Blocks of up to a 32nd of a page share theirs regardless.
    pub whole_pages: bool,
}

impl Request {
    /// Creates a request to the general pool, aligned to a granule, without scope and tag.
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

/// Identifies a block during its life. A slot is reused with the next generation, so a stale id is
/// detected (the generation wraps after 2³² uses of a slot). A small block that passes through the
/// thread cache ([`crate::Config::thread_cache`]) keeps its id; in between, the id is invalid.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BlockId {
    /// Slot.
    pub index: u32,
    /// Number of the use of the slot.
    pub generation: u32,
}

/// An allocated block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Its id.
    pub id: BlockId,
    /// Its addresses, whole granules.
    pub range: AddressRange,
    /// Whether every byte is zero: [`Fill::Zero`] was requested and all pages were mapped for the block.
    pub zeroed: bool,
}

/// Properties of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// Its id.
    pub id: BlockId,
    /// Its addresses, whole granules.
    pub range: AddressRange,
    /// The pages that it shares with no other block: those that can sleep. May be empty.
    pub pages: AddressRange,
    /// Requested bytes.
    pub requested_bytes: usize,
    /// [`Request::scope`].
    pub scope: u64,
    /// [`Request::tag`].
    pub tag: u32,
    /// [`Request::arena`], possibly closed since.
    pub arena: Option<ArenaId>,
    /// Whether it must wake by `Device::stage_large`; otherwise by `stage`. The allocator counts its large pages.
    pub wakes_large: bool,
    /// Owner key of the claimant, if any.
    pub claimed: Option<u64>,
    /// Whether it sleeps: its pages are unmapped, its addresses kept.
    pub asleep: bool,
    /// Whether it was freed while claimed; the claim has not ended yet.
    pub free_deferred: bool,
    /// [`Request::stream`].
    pub stream: u64,
}

/// Result of a free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[must_use = "a claimed block stays until its claimant calls `finish_free`"]
pub enum Freed {
    /// The memory may be reused: by its own stream at once, by others after all uses have completed.
    Done,
    /// The free is deferred: the claimant with this owner key must call
    /// [`finish_free`](crate::Allocator::finish_free) or `unclaim` when it no longer needs the block.
    Claimed(u64),
}
