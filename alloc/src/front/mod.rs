//! The front: small blocks that were freed a moment ago, for whoever wants one like them.
//!
//! Blocks of up to [`CLASS_UNITS_MAX`] granules come in classes. One that is freed on its own
//! stream stays as it is, in the shard of the thread that it was allocated by, whoever frees it: a
//! trainer's backward thread frees what its forward thread will ask for again. A request of its
//! class and stream from that thread takes it. Neither ever waits: threads have shards of their
//! own, and where another is at work in one, the state is asked instead. Where there is no block of
//! its class, one of the next few serves: a little of it is wasted, and the state is left alone.
//!
//! The state knows nothing of this: to it such a block lives on. The [`Ledger`] says who has it.

mod classes;
mod counts;
#[cfg(all(test, loom))]
mod front_loom;
mod ledger;
mod place;

use crate::stats::Stats;
use crate::sync::{AtomicU64, Mutex, Ordering};
pub(crate) use classes::{CLASS_UNITS_MAX, class_round};
use classes::{CLASSES, class_of, look_up_above, look_up_class, look_up_depth, look_up_units};
use counts::Counts;
pub(crate) use ledger::{Ledger, Word};
pub use place::Place;

/// How many shards there are, a power of two: threads beyond share them.
#[cfg(not(loom))]
const SHARDS: usize = 16;
#[cfg(loom)]
const SHARDS: usize = 2;
/// The most blocks of one class and stream in a shard, a power of two.
#[cfg(not(loom))]
const DEPTH: usize = 8;
#[cfg(loom)]
const DEPTH: usize = 2;
/// The most streams whose blocks a shard has at a time.
const LINES: usize = 4;
/// The streams that have a front: the first ones, as many as the ledger's words have bits for.
const STREAMS: u32 = 128;
/// The largest granule: of a larger one more might be left over than the ledger has bits for.
pub(crate) const GRANULE_BYTES_MAX: usize = 4096;
/// The most granules of one class and stream in a shard, and at least one block.
const DEPTH_UNITS: u32 = 512;

/// A block in a shard.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Kept {
    pub(crate) unit: u32,
    pub(crate) word: Word,
}

/// A block that has just been made by the state.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Made {
    pub(crate) unit: u32,
    pub(crate) units: u32,
    pub(crate) index: u32,
    pub(crate) generation: u32,
    /// Slot of its stream.
    pub(crate) stream: u32,
}

/// The blocks of one stream: of each class a stack, the last one given on top.
#[derive(Debug)]
struct Line {
    counts: [u8; CLASSES],
    bins: [[Kept; DEPTH]; CLASSES],
}

#[derive(Debug)]
struct Shard {
    /// Whose lines these are.
    owners: [Owner; LINES],
    lines: [Option<Box<Line>>; LINES],
    /// Of its blocks, when its figures were last added to the state's.
    kept_bytes: u64,
    counts: Counts,
    /// Takes no blocks. It has no owners then, so that only `new_line` has to look.
    is_shut: bool,
}

/// A stream, by its key and its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Owner {
    key: u64,
    slot: u32,
}

impl Owner {
    /// No stream has that key: it is no address.
    const NOBODY: Self = Self { key: u64::MAX, slot: STREAMS };
}

/// Alone in its cache lines: what one thread does to its shard is no other's business.
#[derive(Debug)]
#[repr(align(128))]
struct Padded(Mutex<Shard>);

/// All shards.
#[derive(Debug)]
pub(crate) struct Front {
    shards: Box<[Padded; SHARDS]>,
    ledger: Ledger,
    /// By slot: the keys of streams. Written before any block of the stream is entered.
    stream_keys: Box<[AtomicU64; STREAMS as usize]>,
    granule_log: u32,
}

impl Front {
    pub(crate) fn new(units: u32, granule_bytes: usize) -> Self {
        let shard = || Shard {
            owners: [Owner::NOBODY; LINES],
            lines: [const { None }; LINES],
            kept_bytes: 0,
            counts: Counts::default(),
            is_shut: false,
        };
        Self {
            shards: Box::new(std::array::from_fn(|_| Padded(Mutex::new(shard())))),
            ledger: Ledger::new(units),
            stream_keys: Box::new(std::array::from_fn(|_| AtomicU64::new(0))),
            granule_log: granule_bytes.ilog2(),
        }
    }

    pub(crate) const fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// `stream_key` names the stream of slot `stream` from here on.
    pub(crate) fn know_stream(&self, stream: u32, stream_key: u64) {
        if let Some(place) = self.stream_keys.get(stream as usize) {
            place.store(stream_key, Ordering::Release);
        }
    }

    /// Whether blocks of the stream of slot `stream` may be entered.
    #[inline]
    pub(crate) const fn serves(stream: u32) -> bool {
        stream < STREAMS
    }

    /// A block that has just been made for `bytes`, in its user's hands from here on.
    pub(crate) fn enter(&self, made: &Made, bytes: usize) {
        let whole_bytes = (made.units as usize) << self.granule_log;
        // Both are small: a class has few granules.
        let unasked_bytes = u32::try_from(whole_bytes - bytes).unwrap_or(0);
        let class = class_of(made.units);
        let shard = Place::of_thread().number() % SHARDS;
        let word = Word::new(made.index, class, made.stream).handed_out(shard, unasked_bytes);
        self.ledger.enter(made.unit, word, made.generation);
    }

    #[inline]
    fn class_bytes(&self, class: u32) -> u64 {
        u64::from(look_up_units(class)) << self.granule_log
    }

    /// A block for `bytes` (not 0, at most of the largest class) on the stream that `stream_key`
    /// names.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "what most requests come to: a third is the call")]
    pub(crate) fn take(&self, place: Place, bytes: u32, stream_key: u64) -> Option<Kept> {
        let class = look_up_class((bytes - 1) >> self.granule_log);
        let number = place.number() % SHARDS;
        let mut shard = self.shards[number].0.try_lock()?;
        let shard = &mut *shard;
        let at = shard.owners.iter().position(|owner| owner.key == stream_key)?;
        let line = shard.lines[at].as_deref_mut()?;
        let (class, Kept { unit, word }) = match line.pop(class) {
            Some(kept) => (class, kept),
            None => line.pop_above(class)?,
        };
        let class_bytes = self.class_bytes(class);
        let unasked_bytes = class_bytes as u32 - bytes;
        let word = word.handed_out(number, unasked_bytes);
        shard.counts.handed_out(class_bytes, bytes.into());
        self.ledger.hand_out(unit, word);
        Some(Kept { unit, word })
    }

    /// Takes the block that starts at `unit` from its user, who is done with it on the stream that
    /// `stream_key` names; `false` where it is not for the front, or there is no place.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "what most frees come to: a third is the call")]
    pub(crate) fn give(&self, unit: usize, stream_key: u64) -> bool {
        let Some(place_of_word) = self.ledger.word(unit) else { return false };
        let word = Word::load(place_of_word);
        if !word.is_users() {
            return false;
        }
        let Some(mut shard) = self.shards[word.shard() % SHARDS].0.try_lock() else {
            return false;
        };
        let shard = &mut *shard;
        let class = word.class();
        let class_bytes = self.class_bytes(class);
        let owner = Owner { key: stream_key, slot: word.stream() };
        let at = match shard.owners.iter().position(|it| *it == owner) {
            Some(at) => at,
            None => match self.new_line(shard, owner) {
                Some(at) => at,
                None => return false,
            },
        };
        let Some(line) = &mut shard.lines[at] else { return false };
        if line.is_full(class) || !word.change(place_of_word, word.in_front()) {
            return false;
        }
        // A unit that the ledger has an entry for is one.
        line.push(class, Kept { unit: unit as u32, word: word.in_front() });
        shard.counts.taken_back(class_bytes, class_bytes - u64::from(word.unasked_bytes()));
        true
    }

    /// A line for one more stream: a new one, or one that is empty. None where the key is not that
    /// of the slot: the block is freed on a stream that is not its own.
    #[cold]
    #[inline(never)]
    fn new_line(&self, shard: &mut Shard, owner: Owner) -> Option<usize> {
        if shard.is_shut {
            return None;
        }
        let known = self.stream_keys[(owner.slot % STREAMS) as usize].load(Ordering::Acquire);
        let is_free =
            |line: &Option<Box<Line>>| line.as_ref().is_none_or(|it| it.counts == [0; CLASSES]);
        let at = shard.lines.iter().position(is_free).filter(|_| known == owner.key)?;
        shard.lines[at].get_or_insert_with(Line::empty);
        shard.owners[at] = owner;
        Some(at)
    }

    /// Has every shard take blocks again.
    pub(crate) fn open(&self) {
        self.shards.iter().for_each(|place| place.0.lock().is_shut = false);
    }

    /// Empties every shard, and shuts it where that `is_shut` too; what was in them is the caller's
    /// to free.
    pub(crate) fn drain(&self, is_shut: bool) -> Vec<Kept> {
        let mut drained = Vec::new();
        for place in self.shards.iter() {
            let mut shard = place.0.lock();
            for line in shard.lines.iter_mut().flatten() {
                for class in 0..CLASSES as u32 {
                    drained.extend(std::iter::from_fn(|| line.pop(class)));
                }
            }
            if is_shut {
                shard.is_shut = true;
                shard.owners = [Owner::NOBODY; LINES];
            }
            // So that there is nothing, once its figures are added.
            shard.kept_bytes = shard.counts.kept_bytes().wrapping_neg();
        }
        drained
    }

    /// Adds what the shards did to `stats`. Called with the state locked: its lock comes first.
    /// Returns the bytes in the shards: active bytes can grow by so many without the state.
    pub(crate) fn settle(&self, stats: &mut Stats) -> u64 {
        // A thread that chooses its place now has done nothing yet.
        let used = Place::count().min(SHARDS);
        let settle = |place: &Padded| {
            let mut shard = place.0.lock();
            let counts = std::mem::take(&mut shard.counts);
            shard.kept_bytes = shard.kept_bytes.wrapping_add(counts.kept_bytes());
            counts.add_to(stats);
            shard.kept_bytes
        };
        self.shards.iter().take(used).map(settle).sum()
    }
}

impl Line {
    #[cold]
    fn empty() -> Box<Self> {
        let nothing = Kept { unit: 0, word: Word::NOTHING };
        Box::new(Self { counts: [0; CLASSES], bins: [[nothing; DEPTH]; CLASSES] })
    }

    #[inline]
    fn is_full(&self, class: u32) -> bool {
        self.counts[class as usize % CLASSES] >= look_up_depth(class)
    }

    /// Puts a block on top of its class, which is not full.
    #[inline]
    fn push(&mut self, class: u32, kept: Kept) {
        let class = class as usize % CLASSES;
        let count = &mut self.counts[class];
        self.bins[class][*count as usize % DEPTH] = kept;
        *count += 1;
    }

    #[inline]
    fn pop(&mut self, class: u32) -> Option<Kept> {
        let class = class as usize % CLASSES;
        let count = self.counts[class].checked_sub(1)?;
        self.counts[class] = count;
        Some(self.bins[class][count as usize % DEPTH])
    }

    /// A block that is a little larger than those of `class`, and its class.
    #[inline(never)]
    fn pop_above(&mut self, class: u32) -> Option<(u32, Kept)> {
        look_up_above(class).find_map(|class| Some((class, self.pop(class)?)))
    }
}
