//! A shadow of the allocator where blocks share pages: every operation is done to both, and what
//! the allocator says and does to the pages of the fake is held against the shadow's own account.
//!
//! Contents are tags: the user of a block writes one number to all its granules. A neighbour that
//! is handed the same granule, or a page that leaves or comes under a block, changes them.

mod compare;
mod life;
mod memory;
pub(crate) mod ops;
mod sleeper;
mod thread_cache;

use super::common::gpu::{Call, Event};
use super::common::{Fake, with_large_pages};
use dormouse_alloc::{Allocator, ArenaId, BlockId, BlockInfo, Config, HistoryOptions, Margin};
use dormouse_device::AddressRange;
use ops::{ARENAS, Op, Setup};
use sleeper::Sleeper;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// Blocks that are gone which are kept to be asked about.
const GONE_MAX: usize = 64;
/// Set, it has every operation printed before it is done.
const SHOW: &str = "DORMOUSE_MODEL_SHOW";
/// Few enough events that the oldest are overwritten.
const HISTORY: HistoryOptions = HistoryOptions { events_max: 200, skipped: 0 };
const CALLS: [Call; 3] = [Call::Record, Call::Query, Call::Synchronize];

/// A block as it should be, which streams use it (its own first), and what it holds.
struct Live {
    info: BlockInfo,
    users: Vec<usize>,
    tag: u32,
}

/// A freed block that other streams use: it is pending until all of this is done.
struct Left {
    range: AddressRange,
    ends: Vec<Event>,
}

/// A block that is to be freed while the device works.
struct Armed {
    live: Live,
    is_freed: Arc<AtomicBool>,
}

/// What named a block that was freed.
#[derive(Clone, Copy, Debug)]
struct Gone {
    id: BlockId,
    start: usize,
}

/// The most there was of each at the end of an operation since peaks were last reset.
#[derive(Clone, Copy, Debug, Default)]
struct Peaks {
    allocated_bytes: u64,
    requested_bytes: u64,
    asleep_bytes: u64,
    mapped_bytes: u64,
    blocks: u64,
    /// More than the budget there was, or what was held past it, is never mapped.
    mapped_bytes_max: u64,
    /// Since an interval last began.
    interval_bytes: u64,
}

/// What a run came to.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Run {
    pub(crate) ops: usize,
    /// Where each block came, in order; `None` where a request was refused.
    pub(crate) trace: Vec<Option<usize>>,
}

pub(crate) struct Shadow {
    setup: Setup,
    device: Arc<Fake>,
    allocator: Arc<Allocator<Fake>>,
    live: Vec<Live>,
    left: Vec<Left>,
    armed: Option<Armed>,
    sleeper: Arc<Sleeper>,
    gone: Vec<Gone>,
    arenas: Vec<ArenaId>,
    staged_bytes: u64,
    budget_bytes: u64,
    capacity_pages: usize,
    mapped_bytes_before: u64,
    /// Most in use when a block was asked for, as far as the allocator must have noted it.
    noted_use_bytes: u64,
    peaks: Peaks,
    tags: u32,
    pub(crate) ooms: u64,
    pub(crate) trace: Vec<Option<usize>>,
}

/// What a failed run leaves is not to be taken apart: that would be a failure within one.
impl Drop for Shadow {
    fn drop(&mut self) {
        if std::thread::panicking() {
            std::mem::forget(Arc::clone(&self.allocator));
        }
    }
}

impl Shadow {
    pub(crate) fn new(setup: Setup) -> Self {
        let page_bytes = super::common::PAGE;
        let config = Config {
            granule_bytes: setup.granule_bytes,
            budget_bytes: setup.budget_bytes,
            segment_bytes: setup.segment_pages * page_bytes,
            moves_pages: setup.moves_pages,
            margin: Margin::TIGHT,
            run_ahead: None,
            thread_cache: setup.thread_cache,
        };
        let (device, allocator) =
            with_large_pages(setup.space_pages, config, setup.streams, setup.large_pages);
        device.set_capacity_pages(setup.capacity_pages);
        if setup.records {
            allocator.start_history(HISTORY, false);
        }
        let sleeper = Sleeper::new(&allocator);
        let weak = Arc::downgrade(&sleeper);
        allocator.set_reclaim(weak);
        let arenas = (0..ARENAS).map(|_| allocator.arena_create().unwrap()).collect();
        Self {
            setup,
            device,
            allocator,
            live: Vec::new(),
            left: Vec::new(),
            armed: None,
            sleeper,
            gone: Vec::new(),
            arenas,
            staged_bytes: 0,
            budget_bytes: setup.budget_bytes,
            capacity_pages: setup.capacity_pages,
            mapped_bytes_before: 0,
            noted_use_bytes: 0,
            peaks: Peaks::default(),
            tags: 0,
            ooms: 0,
            trace: Vec::new(),
        }
    }

    /// Does what `bytes` say, compares as often as they say, and winds down.
    pub(crate) fn run(bytes: &[u8]) -> Run {
        let (setup, ops) = ops::decode(bytes);
        let is_shown = std::env::var_os(SHOW).is_some();
        if is_shown {
            eprintln!("{setup:?}");
        }
        let mut shadow = Self::new(setup);
        let mut done = 0;
        for op in ops {
            if is_shown {
                eprintln!("{op:?}");
            }
            if setup.watched_from == Some(done) {
                shadow.allocator.watch_unused();
            }
            shadow.apply(op);
            done += 1;
            if done % setup.compared_every == 0 {
                shadow.compare();
            }
        }
        shadow.wind_down();
        Run { ops: done, trace: std::mem::take(&mut shadow.trace) }
    }

    pub(crate) fn apply(&mut self, op: Op) {
        let pick = |which: usize| (!self.live.is_empty()).then(|| which % self.live.len());
        match op {
            Op::Allocate { .. } => self.allocate(op),
            Op::Free { which, other } => {
                pick(which).into_iter().for_each(|at| self.free(at, other))
            }
            Op::FreeDuring { which } => pick(which).into_iter().for_each(|at| self.arm(at)),
            Op::Launch { which, user } => {
                pick(which).into_iter().for_each(|at| self.launch(at, user));
            }
            Op::Record { which, stream } => {
                pick(which).into_iter().for_each(|at| self.record(at, stream));
            }
            Op::Advance { stream, items } => {
                if self.is_ordered() {
                    (0..items).for_each(|_| _ = self.device.gpu().advance(stream));
                }
            }
            Op::Depend { stream, on } => {
                if self.is_ordered() {
                    // On what is queued already, so that no circle comes about.
                    let event = self.device.gpu().end(on);
                    self.device.gpu().wait(stream, event);
                }
            }
            Op::Claim { which, offset } => {
                pick(which).into_iter().for_each(|at| self.claim(at, offset));
            }
            Op::Sleep { which } => pick(which).into_iter().for_each(|at| self.sleep(at)),
            Op::Aim { which } => {
                pick(which).into_iter().for_each(|at| self.sleeper.aim(self.live[at].info.id));
            }
            Op::Wake { which } => pick(which).into_iter().for_each(|at| self.wake(at)),
            Op::LetGo { which } => {
                pick(which).into_iter().for_each(|at| self.release_held_back(at))
            }
            Op::Reserve { bytes } => _ = self.reserve(bytes),
            Op::Unreserve { bytes, all } => {
                self.unreserve(if all { self.staged_bytes } else { bytes });
            }
            Op::Trim { bytes } => self.trim(bytes),
            Op::Budget { bytes } => self.set_budget(bytes),
            Op::ReopenArena { which } => self.reopen_arena(which),
            Op::Stale { which } => self.stale(which),
            Op::ResetPeaks => self.reset_peaks(),
            Op::BeginInterval => self.begin_interval(),
            Op::MapFails { skip, is_full } => self.device.fail_map(skip, fault(is_full)),
            Op::UnmapFails { skip } => self.device.fail_unmap(skip, fault(false)),
            Op::EventFails { call, skip } => self.device.gpu().fail(CALLS[call], skip),
            Op::Capacity { pages } => {
                // Others can only have taken what was free.
                let mapped_pages = self.device.mapped_bytes() as usize / super::common::PAGE;
                self.capacity_pages = pages.max(mapped_pages);
                self.device.set_capacity_pages(self.capacity_pages);
            }
        }
        self.settle();
        self.note_peak();
        // Above a lowered budget it can only go down (I2).
        let mapped_bytes = self.mapped_bytes();
        let is_held = mapped_bytes <= self.budget_bytes.max(self.mapped_bytes_before);
        assert!(is_held, "{mapped_bytes} bytes of {}", self.budget_bytes);
        self.mapped_bytes_before = mapped_bytes;
    }

    /// All that is queued is done.
    pub(crate) fn drain(&mut self) {
        self.device.gpu().drain();
    }

    fn is_ordered(&self) -> bool {
        self.setup.streams > 0
    }

    /// Whether figures are only asked for now and then: being asked settles them.
    fn is_lazy(&self) -> bool {
        self.setup.thread_cache && self.setup.compared_every > 1
    }

    /// What had gone wrong by now: with no more of it since, the allocator has no excuse.
    fn refusals(&self) -> u64 {
        self.device.faulted() + self.device.gpu().failed()
    }

    /// What happened to blocks during the last call: one may be freed, one asleep.
    fn settle(&mut self) {
        if let Some(slept) = self.sleeper.take_slept() {
            let it = self.live.iter_mut().find(|it| it.info.id == slept);
            // Only a block that lives is put to sleep.
            it.unwrap().info.asleep = true;
        }
        if self.armed.as_ref().is_some_and(|it| it.is_freed.load(Ordering::Relaxed)) {
            self.device.clear_hook();
            // Where it was there may be the block that is being made.
            let freed = self.armed.take().map(|it| Gone::new(&it.live.info));
            self.gone.extend(freed);
        }
    }

    /// Every block that has not been freed yet.
    fn blocks(&self) -> impl Iterator<Item = &Live> {
        let is_there = |it: &&Armed| !it.is_freed.load(Ordering::Relaxed);
        self.live.iter().chain(self.armed.as_ref().filter(is_there).map(|it| &it.live))
    }

    /// Everything is let go, and the device is sound again: nothing must be left.
    fn wind_down(&mut self) {
        self.compare();
        self.device.forget_faults();
        self.device.clear_hook();
        if let Some(armed) = self.armed.take() {
            self.live.push(armed.live);
        }
        while let Some(at) = self.live.len().checked_sub(1) {
            if !self.live[at].info.free_deferred {
                self.free(at, 0);
            }
            if self.live.len() > at {
                self.release_held_back(at);
            }
        }
        self.unreserve(self.staged_bytes);
        self.arenas.drain(..).for_each(|arena| self.allocator.arena_close(arena));
        self.compare();
        // What an event was refused for is asked about again.
        self.allocator.trim(u64::MAX);
        self.compare();
        let stats = self.allocator.stats();
        let left = [stats.segments, stats.arenas, stats.mapped_bytes, stats.pending_blocks];
        assert_eq!(left.map(|it| it.current), [0; 4], "{stats:?}");
        assert_eq!(self.device.mapped_bytes(), 0);
        assert_eq!(self.allocator.blocks(), []);
    }
}

const fn fault(is_full: bool) -> super::common::Fault {
    if is_full { super::common::Fault::Full } else { super::common::Fault::Refused }
}
