//! The thread cache: recently freed small blocks, kept whole for the next request of their class.
//!
//! Blocks of up to [`CLASS_UNITS_MAX`] granules come in size classes. A block that is freed on its own
//! stream goes to the shard of the thread that allocated it, whichever thread frees it: a trainer's
//! backward thread frees what its forward thread allocates again. A request of the same class and
//! stream on that thread takes it. Neither call waits: each thread has a shard, and a shard that
//! another thread holds is skipped in favour of the state. If a class is empty, one of the next few
//! larger ones serves: this wastes a little memory and avoids the state's lock.
//!
//! To the state a cached block is live. The [`OwnershipTable`] records who owns it.

#[cfg(all(test, loom))]
mod cache_loom;
mod classes;
mod counts;
mod ownership;
mod thread_shard;

use crate::stats::Stats;
use crate::sync::{AtomicU64, Mutex, Ordering};
pub(crate) use classes::{CLASS_UNITS_MAX, class_round};
use classes::{CLASSES, class_depth, class_of, class_of_units, classes_above, units_of_class};
use counts::ShardCounts;
use crossbeam::utils::CachePadded;
pub(crate) use ownership::{Ownership, OwnershipTable};
pub use thread_shard::ThreadShard;

/// Number of shards, a power of two. Further threads share them.
#[cfg(not(loom))]
const SHARDS: usize = 16;
#[cfg(loom)]
const SHARDS: usize = 2;
/// Most blocks of one class and stream in a shard, a power of two.
#[cfg(not(loom))]
const DEPTH: usize = 8;
#[cfg(loom)]
const DEPTH: usize = 2;
/// Most streams with blocks in a shard at a time.
const STREAMS_PER_SHARD: usize = 4;
/// Number of streams that are cached, the first ones registered: limited by the bits of [`Ownership`].
const STREAMS: u32 = 128;
/// The largest granule: the slack of a block must fit the bits of [`Ownership`].
pub(crate) const GRANULE_BYTES_MAX: usize = 4096;
/// Most granules of one class and stream in a shard (at least one block is kept).
const DEPTH_UNITS: u32 = 512;

/// A cached block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CachedBlock {
    pub(crate) unit: u32,
    pub(crate) word: Ownership,
}

/// A block that the state has just created.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NewBlock {
    pub(crate) unit: u32,
    pub(crate) units: u32,
    pub(crate) index: u32,
    pub(crate) generation: u32,
    /// Slot of its stream.
    pub(crate) stream: u32,
}

/// The cached blocks of one stream: a stack for each class.
#[derive(Debug)]
struct StreamBins {
    counts: [u8; CLASSES],
    bins: [[CachedBlock; DEPTH]; CLASSES],
}

#[derive(Debug)]
struct Shard {
    /// The stream of each entry of `bins`.
    streams: [StreamRef; STREAMS_PER_SHARD],
    /// The same while a history is recorded: for callers with the state locked. `streams` is empty then.
    recorded_streams: [StreamRef; STREAMS_PER_SHARD],
    bins: [Option<Box<StreamBins>>; STREAMS_PER_SHARD],
    /// Bytes in the shard when `counts` was last added to the allocator's statistics.
    cached_bytes: u64,
    counts: ShardCounts,
    /// Accepts no blocks. `streams` is empty then, so that only `bins_for` has to check.
    is_closed: bool,
}

/// A stream, by its key and its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct StreamRef {
    key: u64,
    slot: u32,
}

impl StreamRef {
    /// No stream has this key: it is not an address.
    const NONE: Self = Self { key: u64::MAX, slot: STREAMS };
}

/// All shards, and the ownership table.
#[derive(Debug)]
pub(crate) struct ThreadCache {
    shards: Box<[CachePadded<Mutex<Shard>>; SHARDS]>,
    ownership: OwnershipTable,
    /// By slot: the keys of streams. Written before any block of the stream is registered.
    stream_keys: Box<[AtomicU64; STREAMS as usize]>,
    granule_log: u32,
}

impl ThreadCache {
    pub(crate) fn new(units: u32, granule_bytes: usize) -> Self {
        let shard = || Shard {
            streams: [StreamRef::NONE; STREAMS_PER_SHARD],
            recorded_streams: [StreamRef::NONE; STREAMS_PER_SHARD],
            bins: [const { None }; STREAMS_PER_SHARD],
            cached_bytes: 0,
            counts: ShardCounts::default(),
            is_closed: false,
        };
        Self {
            shards: Box::new(std::array::from_fn(|_| CachePadded::new(Mutex::new(shard())))),
            ownership: OwnershipTable::new(units),
            stream_keys: Box::new(std::array::from_fn(|_| AtomicU64::new(0))),
            granule_log: granule_bytes.ilog2(),
        }
    }

    pub(crate) const fn ownership(&self) -> &OwnershipTable {
        &self.ownership
    }

    /// Makes `stream_key` the key of the stream in slot `stream`.
    pub(crate) fn register_stream(&self, stream: usize, stream_key: u64) {
        if let Some(key) = self.stream_keys.get(stream) {
            key.store(stream_key, Ordering::Release);
        }
    }

    /// Whether blocks of the stream in slot `stream` are cached.
    #[inline]
    pub(crate) const fn serves(stream: u32) -> bool {
        stream < STREAMS
    }

    /// Registers a new block, allocated for a request of `bytes`.
    pub(crate) fn register(&self, block: &NewBlock, bytes: usize) {
        let whole_bytes = (block.units as usize) << self.granule_log;
        // Both are small: a class has few granules.
        let slack_bytes = u32::try_from(whole_bytes - bytes).unwrap_or(0);
        let class = class_of(block.units);
        let shard = ThreadShard::current().index() % SHARDS;
        let word = Ownership::new(block.index, class, block.stream).allocated(shard, slack_bytes);
        self.ownership.insert(block.unit, word, block.generation);
    }

    #[inline]
    fn class_bytes(&self, class: u32) -> u64 {
        u64::from(units_of_class(class)) << self.granule_log
    }

    /// Allocates a block of `bytes` (not 0, at most the largest class) on the stream with
    /// `stream_key`.
    #[inline(always)]
    #[expect(
        clippy::inline_always,
        reason = "the most frequent request: the call is a third of it"
    )]
    pub(crate) fn allocate(
        &self,
        shard: ThreadShard,
        bytes: u32,
        stream_key: u64,
    ) -> Option<CachedBlock> {
        let class = class_of_units((bytes - 1) >> self.granule_log);
        let number = shard.index() % SHARDS;
        let mut shard = self.shards[number].try_lock()?;
        let shard = &mut *shard;
        let at = shard.streams.iter().position(|stream| stream.key == stream_key)?;
        self.take(shard, number, at, class, bytes)
    }

    /// As [`Self::allocate`], while a history is recorded. The caller has locked the state.
    pub(crate) fn allocate_recorded(
        &self,
        shard: ThreadShard,
        bytes: u32,
        stream_key: u64,
    ) -> Option<CachedBlock> {
        let class = class_of_units((bytes - 1) >> self.granule_log);
        let number = shard.index() % SHARDS;
        let mut shard = self.shards[number].try_lock()?;
        let shard = &mut *shard;
        let at = shard.recorded_streams.iter().position(|stream| stream.key == stream_key)?;
        self.take(shard, number, at, class, bytes)
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as `allocate`")]
    fn take(
        &self,
        shard: &mut Shard,
        number: usize,
        at: usize,
        class: u32,
        bytes: u32,
    ) -> Option<CachedBlock> {
        let bins = shard.bins[at].as_deref_mut()?;
        let (class, CachedBlock { unit, word }) = match bins.pop(class) {
            Some(block) => (class, block),
            None => bins.pop_above(class)?,
        };
        let class_bytes = self.class_bytes(class);
        let slack_bytes = class_bytes as u32 - bytes;
        let word = word.allocated(number, slack_bytes);
        shard.counts.add_allocated(class_bytes, bytes.into());
        self.ownership.set_allocated(unit, word);
        Some(CachedBlock { unit, word })
    }

    /// Frees the block that starts at `unit`, last used on the stream with `stream_key`, into the
    /// cache. `false` if it is not cacheable or its bin is full.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "the most frequent free: the call is a third of it")]
    pub(crate) fn free(&self, unit: usize, stream_key: u64) -> bool {
        let Some(entry) = self.ownership.entry(unit) else { return false };
        let word = Ownership::load(entry);
        if !word.is_allocated() {
            return false;
        }
        let Some(mut shard) = self.shards[word.shard() % SHARDS].try_lock() else {
            return false;
        };
        let shard = &mut *shard;
        let stream = StreamRef { key: stream_key, slot: word.stream() };
        let at = match shard.streams.iter().position(|it| *it == stream) {
            Some(at) => at,
            None => match self.bins_for(shard, stream) {
                Some(at) => at,
                None => return false,
            },
        };
        self.put(shard, at, unit, entry, word)
    }

    /// As [`Self::free`], while a history is recorded. The caller has locked the state.
    pub(crate) fn free_recorded(&self, unit: usize, stream_key: u64) -> bool {
        let Some(entry) = self.ownership.entry(unit) else { return false };
        let word = Ownership::load(entry);
        if !word.is_allocated() {
            return false;
        }
        let Some(mut shard) = self.shards[word.shard() % SHARDS].try_lock() else {
            return false;
        };
        let shard = &mut *shard;
        let stream = StreamRef { key: stream_key, slot: word.stream() };
        let at = match shard.recorded_streams.iter().position(|it| *it == stream) {
            Some(at) => at,
            None => match self.place_for(shard, stream) {
                Some(at) => {
                    shard.recorded_streams[at] = stream;
                    at
                }
                None => return false,
            },
        };
        self.put(shard, at, unit, entry, word)
    }

    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as `free`")]
    fn put(
        &self,
        shard: &mut Shard,
        at: usize,
        unit: usize,
        entry: &AtomicU64,
        word: Ownership,
    ) -> bool {
        let class = word.class();
        let class_bytes = self.class_bytes(class);
        let Some(bins) = &mut shard.bins[at] else { return false };
        if bins.is_full(class) || !word.change(entry, word.in_cache()) {
            return false;
        }
        // A unit with an entry in the table is one.
        bins.push(class, CachedBlock { unit: unit as u32, word: word.in_cache() });
        shard.counts.add_freed(class_bytes, class_bytes - u64::from(word.slack_bytes()));
        true
    }

    /// Bins for one more stream: new ones, or ones that are empty. `None` if the key is not that of
    /// the slot: the block is freed on a stream other than its own.
    #[cold]
    #[inline(never)]
    fn bins_for(&self, shard: &mut Shard, stream: StreamRef) -> Option<usize> {
        if shard.is_closed {
            return None;
        }
        let at = self.place_for(shard, stream)?;
        shard.streams[at] = stream;
        Some(at)
    }

    /// Empty bins for `stream`. `None` if the key is not that of the slot.
    #[cold]
    fn place_for(&self, shard: &mut Shard, stream: StreamRef) -> Option<usize> {
        let key = self.stream_keys[(stream.slot % STREAMS) as usize].load(Ordering::Acquire);
        let is_empty = |bins: &Option<Box<StreamBins>>| {
            bins.as_ref().is_none_or(|it| it.counts == [0; CLASSES])
        };
        let at = shard.bins.iter().position(is_empty).filter(|_| key == stream.key)?;
        shard.bins[at].get_or_insert_with(StreamBins::empty);
        Some(at)
    }

    /// Reopens every shard.
    pub(crate) fn open(&self) {
        self.shards.iter().for_each(|shard| shard.lock().is_closed = false);
    }

    /// Empties every shard, and closes it if `is_closed`. Returns the blocks, for the caller to free.
    pub(crate) fn drain(&self, is_closed: bool) -> Vec<CachedBlock> {
        let mut drained = Vec::new();
        for shard in self.shards.iter() {
            let mut shard = shard.lock();
            for bins in shard.bins.iter_mut().flatten() {
                for class in 0..CLASSES as u32 {
                    drained.extend(std::iter::from_fn(|| bins.pop(class)));
                }
            }
            if is_closed {
                shard.is_closed = true;
                shard.streams = [StreamRef::NONE; STREAMS_PER_SHARD];
                shard.recorded_streams = [StreamRef::NONE; STREAMS_PER_SHARD];
            }
            // 0 once `counts` is added.
            shard.cached_bytes = shard.counts.cached_bytes_change().wrapping_neg();
        }
        drained
    }

    /// Adds the counts of all shards to `stats`. Called with the state locked: its lock comes first.
    /// Returns the cached bytes: active bytes can grow by as many without the state.
    pub(crate) fn settle(&self, stats: &mut Stats) -> u64 {
        // A thread that is assigned a shard now has done nothing yet.
        let used = ThreadShard::count().min(SHARDS);
        let settle = |shard: &CachePadded<Mutex<Shard>>| {
            let mut shard = shard.lock();
            let counts = std::mem::take(&mut shard.counts);
            shard.cached_bytes = shard.cached_bytes.wrapping_add(counts.cached_bytes_change());
            counts.add_to(stats);
            shard.cached_bytes
        };
        self.shards.iter().take(used).map(settle).sum()
    }
}

impl StreamBins {
    #[cold]
    fn empty() -> Box<Self> {
        let nothing = CachedBlock { unit: 0, word: Ownership::NOTHING };
        Box::new(Self { counts: [0; CLASSES], bins: [[nothing; DEPTH]; CLASSES] })
    }

    #[inline]
    fn is_full(&self, class: u32) -> bool {
        self.counts[class as usize % CLASSES] >= class_depth(class)
    }

    /// Pushes a block onto the stack of its class, which is not full.
    #[inline]
    fn push(&mut self, class: u32, block: CachedBlock) {
        let class = class as usize % CLASSES;
        let count = &mut self.counts[class];
        self.bins[class][*count as usize % DEPTH] = block;
        *count += 1;
    }

    #[inline]
    fn pop(&mut self, class: u32) -> Option<CachedBlock> {
        let class = class as usize % CLASSES;
        let count = self.counts[class].checked_sub(1)?;
        self.counts[class] = count;
        Some(self.bins[class][count as usize % DEPTH])
    }

    /// Pops a block of a class slightly larger than `class`. Returns it with its class.
    #[inline(never)]
    fn pop_above(&mut self, class: u32) -> Option<(u32, CachedBlock)> {
        classes_above(class).find_map(|class| Some((class, self.pop(class)?)))
    }
}
