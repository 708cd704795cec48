//! Settings and operations, and how bytes read as them: any bytes do, so that a fuzzer, a property
//! test and a long run speak one language.
//!
//! The first [`SETUP_BYTES`] are the settings, each [`OP_BYTES`] after them one operation. Zeroes
//! are the plainest of each: shrinking leads there.

use super::super::common::PAGE;

pub(crate) const SETUP_BYTES: usize = 8;
pub(crate) const OP_BYTES: usize = 6;
/// More operations than this are not looked at.
pub(crate) const OPS_MAX: usize = 4096;

/// The settings of one run.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Setup {
    pub(crate) granule_bytes: usize,
    /// 0 on a device that is not stream-ordered.
    pub(crate) streams: usize,
    pub(crate) moves_pages: bool,
    pub(crate) thread_cache: bool,
    /// The history is on, which closes the thread cache.
    pub(crate) records: bool,
    /// Operations before the first watch of unused pages, from which on huge blocks have pools of their own.
    pub(crate) watched_from: Option<usize>,
    pub(crate) space_pages: usize,
    pub(crate) segment_pages: usize,
    /// Pages of a large page; 1: there are none.
    pub(crate) large_pages: usize,
    pub(crate) budget_bytes: u64,
    /// Pages that the device has.
    pub(crate) capacity_pages: usize,
    /// Operations between full comparisons.
    pub(crate) compared_every: usize,
}

#[derive(Clone, Copy, Debug)]
pub(crate) enum Op {
    Allocate {
        bytes: usize,
        align: usize,
        arena: usize,
        stream: usize,
        whole_pages: bool,
        zero: bool,
    },
    /// Freed on its own stream (`other` 0), or after a last use on another.
    Free {
        which: usize,
        other: usize,
    },
    /// Freed while the device maps or unmaps something next.
    FreeDuring {
        which: usize,
    },
    /// Work of the block's own stream, or of one that was recorded.
    Launch {
        which: usize,
        user: usize,
    },
    Record {
        which: usize,
        stream: usize,
    },
    Advance {
        stream: usize,
        items: usize,
    },
    /// One stream waits for what another has queued.
    Depend {
        stream: usize,
        on: usize,
    },
    Claim {
        which: usize,
        offset: usize,
    },
    Sleep {
        which: usize,
    },
    /// Put to sleep once the allocator asks for room.
    Aim {
        which: usize,
    },
    Wake {
        which: usize,
    },
    LetGo {
        which: usize,
    },
    Reserve {
        bytes: u64,
    },
    Unreserve {
        bytes: u64,
        all: bool,
    },
    Trim {
        bytes: u64,
    },
    Budget {
        bytes: u64,
    },
    ReopenArena {
        which: usize,
    },
    Stale {
        which: usize,
    },
    ResetPeaks,
    BeginInterval,
    MapFails {
        skip: u64,
        is_full: bool,
    },
    UnmapFails {
        skip: u64,
    },
    EventFails {
        call: usize,
        skip: u64,
    },
    Capacity {
        pages: usize,
    },
}

/// Granules of the smallest requests that are alike.
const SIZES_ALIKE: usize = 3;
/// Arenas that are open at a time.
pub(crate) const ARENAS: usize = 3;
const BUDGET_PAGES_MIN: usize = 8;
const BUDGET_PAGES_MAX: usize = 96;

/// What `bytes` say, as far as they go.
pub(crate) fn decode(bytes: &[u8]) -> (Setup, impl Iterator<Item = Op>) {
    let mut head = [0; SETUP_BYTES];
    let given = bytes.len().min(SETUP_BYTES);
    head[..given].copy_from_slice(&bytes[..given]);
    let setup = setup(head);
    let rest = &bytes[given..];
    let ops = rest.chunks_exact(OP_BYTES).take(OPS_MAX);
    (setup, ops.map(move |it| op(&setup, [it[0], it[1], it[2], it[3], it[4], it[5]])))
}

fn pick<T: Copy>(from: &[T], byte: u8) -> T {
    from[usize::from(byte) % from.len()]
}

fn setup(head: [u8; SETUP_BYTES]) -> Setup {
    let budget_pages =
        BUDGET_PAGES_MAX - usize::from(head[4]) % (BUDGET_PAGES_MAX - BUDGET_PAGES_MIN + 1);
    // Mostly far more addresses than budget, so that a shortage is one of pages.
    let space_pages = pick(&[4096, 4096, 4096, 4096, 200, 67], head[3]);
    Setup {
        granule_bytes: pick(&[512, 512, 1024, 256, 2048, 16, PAGE], head[0]),
        streams: pick(&[0, 0, 1, 2, 3, 4], head[1]),
        moves_pages: head[2] & 1 == 1,
        thread_cache: head[2] & 2 == 2,
        records: head[2] & 16 == 16,
        watched_from: pick(&[None, Some(0), None, Some(40)], head[2] >> 5),
        space_pages,
        segment_pages: pick(&[16, 16, 4, 64, 1], head[5]),
        large_pages: pick(&[1, 4, 2, 8], head[2] >> 2),
        budget_bytes: (budget_pages * PAGE) as u64,
        capacity_pages: if head[6] < 192 { space_pages } else { usize::from(head[6]) / 3 },
        compared_every: 1 + usize::from(head[7] % 8),
    }
}

/// How often an operation comes, by the remainder of its first byte.
const KINDS: [u8; 80] = [
    0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, //
    1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, //
    3, 3, 3, 3, 3, 4, 4, 4, 5, 5, 5, 6, 7, 7, 7, 7, 8, 8, 8, 9, //
    9, 9, 10, 10, 10, 10, 10, 10, 11, 12, 12, 13, 13, 14, 14, 15, 16, 17, 18, 18,
];

fn op(setup: &Setup, [kind, a0, a1, b0, b1, c]: [u8; OP_BYTES]) -> Op {
    let a = usize::from(u16::from_le_bytes([a0, a1]));
    let b = usize::from(u16::from_le_bytes([b0, b1]));
    let c = usize::from(c);
    let (which, stream) = (a, b % setup.streams.max(1));
    // Most of what the thread cache keeps is alike, and freed where it was asked for.
    let is_alike = setup.thread_cache && usize::from(kind) >= KINDS.len();
    // The plain operation of a kind that is several: the rarer ones are of some bytes only.
    match KINDS[usize::from(kind) % KINDS.len()] {
        0 if is_alike => Op::Allocate {
            bytes: 1 + (a + b) % ((SIZES_ALIKE << (2 * (c & 3))) * setup.granule_bytes),
            align: 1,
            arena: ARENAS,
            stream: (c >> 6) % setup.streams.max(1),
            whole_pages: false,
            zero: false,
        },
        0 => Op::Allocate {
            bytes: size(setup, a, b),
            // Mostly what a granule gives; up to 32 pages.
            align: if c & 7 == 7 { 1 << (3 + (c >> 3) % 15) } else { 1 },
            arena: if c & 32 == 0 { ARENAS } else { c % ARENAS },
            stream: (c >> 6) % setup.streams.max(1),
            whole_pages: c & 24 == 24,
            zero: c & 1 == 1,
        },
        1 if is_alike => Op::Free { which, other: 0 },
        1 => Op::Free { which, other: b % 8 },
        2 => Op::FreeDuring { which },
        3 => Op::Launch { which, user: b },
        4 => Op::Record { which, stream },
        5 => Op::Advance { stream, items: 1 + c % 8 },
        6 => Op::Depend { stream, on: c % setup.streams.max(1) },
        7 => Op::Claim { which, offset: b },
        8 if c % 4 == 3 => Op::Aim { which },
        8 => Op::Sleep { which },
        9 => Op::Wake { which },
        10 => Op::LetGo { which },
        11 => Op::Reserve { bytes: (a % 20 * PAGE) as u64 },
        12 => Op::Unreserve { bytes: (a % 20 * PAGE) as u64, all: c % 2 == 0 },
        13 if c % 16 == 15 => Op::Trim { bytes: u64::MAX },
        13 => Op::Trim { bytes: (a % (30 * PAGE)) as u64 },
        14 if c % 4 > 0 => Op::Budget { bytes: setup.budget_bytes },
        14 => Op::Budget { bytes: 1 + ((a << 4) as u64) % setup.budget_bytes },
        15 => Op::ReopenArena { which: a % ARENAS },
        16 if c % 4 == 1 => Op::ResetPeaks,
        16 if c % 4 == 3 => Op::BeginInterval,
        16 => Op::Stale { which },
        17 if c % 8 == 7 => Op::EventFails { call: a % 3, skip: (b % 4) as u64 },
        17 if c % 2 == 0 => Op::MapFails { skip: (b % 3) as u64, is_full: c % 4 == 0 },
        17 => Op::UnmapFails { skip: (b % 3) as u64 },
        _ if c % 8 > 0 => Op::Capacity { pages: setup.capacity_pages },
        _ => Op::Capacity { pages: a % BUDGET_PAGES_MAX },
    }
}

/// A size: most often a small block or one about as long as some pages, at times a huge one.
fn size(setup: &Setup, a: usize, b: usize) -> usize {
    let granule_bytes = setup.granule_bytes;
    let near = |pages: usize| (pages * PAGE + b % (2 * granule_bytes) - granule_bytes).max(1);
    match a % 16 {
        0..6 => 1 + b % (PAGE / 2),
        6..10 => 1 + b % (4 * PAGE),
        10..13 => near(1 + a / 16 % 6),
        13 => 1 + (a / 16 * 61 + b) % (24 * PAGE),
        14 => near(1 + a / 16 % 48),
        _ if a / 16 % 8 == 7 => usize::MAX - b,
        _ => 1 + b * 8,
    }
}
