//! The allocator on a stream-ordered device against a naive model: random operations on a few
//! streams of a simulated GPU, everything compared after each. The GPU itself panics where pages
//! change that queued work uses.

use crate::common::gpu::{Call, Event};
use crate::common::{BASE, Fake, PAGE, key, ordered};
use dormouse_alloc::{
    AllocError, Allocator, ArenaId, BlockInfo, Cause, Freed, HistoryOptions, Request,
};
use dormouse_device::{AddressRange, Fill};
use proptest::prelude::*;
use std::collections::BTreeSet;
use std::sync::Arc;

/// Far more addresses than budget, so that a shortage is one of pages.
const SPACE_PAGES: usize = 8192;
const BUDGET_PAGES: usize = 48;
const ARENAS: usize = 2;
/// The one of them that keeps its pages.
const KEPT: usize = 1;
const STREAMS_MAX: usize = 4;
/// Few enough events that the oldest are overwritten.
const HISTORY: HistoryOptions = HistoryOptions { events_max: 200, skipped: 0 };

#[derive(Clone, Copy, Debug)]
enum Op {
    Allocate {
        pages: usize,
        align_log: u32,
        arena: usize,
        stream: usize,
        zero: bool,
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
    /// Freed on its own stream (`other` 0), or after a last use on another.
    Free {
        which: usize,
        other: usize,
    },
    Advance {
        stream: usize,
        items: usize,
    },
    Depend {
        stream: usize,
        on: usize,
    },
    Claim {
        which: usize,
    },
    Sleep {
        which: usize,
    },
    Wake {
        which: usize,
    },
    LetGo {
        which: usize,
    },
    Trim {
        pages: usize,
    },
    Budget {
        pages: usize,
    },
    ReopenArena {
        which: usize,
    },
    /// A graph uses pages of the arena that keeps them: whatever it was captured with, on whichever
    /// stream.
    Replay {
        page: usize,
        stream: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let which = any::<usize>();
    let stream = 0..STREAMS_MAX;
    let pages = prop_oneof![4 => 1..8_usize, 3 => 8..30_usize, 1 => 30..BUDGET_PAGES + 4];
    prop_oneof![
        14 => (pages, 12..15_u32, 0..=ARENAS, stream.clone(), any::<bool>()).prop_map(
            |(pages, align_log, arena, stream, zero)|
                Op::Allocate { pages, align_log, arena, stream, zero }),
        10 => (which, any::<usize>()).prop_map(|(which, user)| Op::Launch { which, user }),
        5 => (which, stream.clone()).prop_map(|(which, stream)| Op::Record { which, stream }),
        10 => (which, 0..8_usize).prop_map(|(which, other)| Op::Free { which, other }),
        6 => (stream.clone(), 1..4_usize).prop_map(
            |(stream, items)| Op::Advance { stream, items }),
        1 => (stream.clone(), stream).prop_map(|(stream, on)| Op::Depend { stream, on }),
        3 => which.prop_map(|which| Op::Claim { which }),
        2 => which.prop_map(|which| Op::Sleep { which }),
        2 => which.prop_map(|which| Op::Wake { which }),
        3 => which.prop_map(|which| Op::LetGo { which }),
        2 => (0..20_usize).prop_map(|pages| Op::Trim { pages }),
        1 => prop_oneof![10..BUDGET_PAGES, Just(BUDGET_PAGES)].prop_map(|pages| Op::Budget { pages }),
        2 => (0..ARENAS).prop_map(|which| Op::ReopenArena { which }),
        4 => (which, 0..STREAMS_MAX).prop_map(|(page, stream)| Op::Replay { page, stream }),
    ]
}

/// A block as it should be, and which streams use it: its own first.
struct Live {
    info: BlockInfo,
    users: Vec<usize>,
}

/// A freed block that other streams use: it is pending until all of this is done.
struct Left {
    range: AddressRange,
    ends: Vec<Event>,
}

struct Model {
    device: Arc<Fake>,
    allocator: Arc<Allocator<Fake>>,
    streams: usize,
    blocks: Vec<Live>,
    left: Vec<Left>,
    arenas: Vec<ArenaId>,
    /// Whether one of them keeps its pages.
    keeps: bool,
    /// The pages that blocks of it had, by address.
    kept: BTreeSet<usize>,
    budget_bytes: u64,
    trace: Vec<Option<usize>>,
}

type Checked = Result<(), TestCaseError>;

fn bytes(pages: usize) -> u64 {
    (pages * PAGE) as u64
}

impl Model {
    fn new(streams: usize, budget_pages: usize, keeps: bool) -> Self {
        let (device, allocator) = ordered(SPACE_PAGES, budget_pages, streams);
        allocator.start_history(HISTORY, false);
        let mut model = Self {
            device,
            allocator,
            streams,
            blocks: Vec::new(),
            left: Vec::new(),
            arenas: Vec::new(),
            keeps,
            kept: BTreeSet::new(),
            budget_bytes: bytes(budget_pages),
            trace: Vec::new(),
        };
        model.arenas = (0..ARENAS).map(|which| model.open(which)).collect();
        model
    }

    fn open(&self, which: usize) -> ArenaId {
        let opened = if self.keeps && which == KEPT {
            self.allocator.arena_create_kept()
        } else {
            self.allocator.arena_create()
        };
        opened.unwrap()
    }

    /// Bytes whose pages cannot be had: those of awake blocks, and what is kept.
    fn held_bytes(&self) -> u64 {
        let awake = self.blocks.iter().filter(|it| !it.info.asleep).map(|it| it.info.range);
        let held = self.kept.iter().filter(|&&page| !awake.clone().any(|it| it.contains(page)));
        self.awake_bytes() + bytes(held.count())
    }

    fn awake_bytes(&self) -> u64 {
        let awake = self.blocks.iter().filter(|it| !it.info.asleep);
        awake.map(|it| it.info.range.bytes as u64).sum()
    }

    fn is_over(&self, left: &Left) -> bool {
        let gpu = self.device.gpu();
        left.ends.iter().all(|&end| gpu.is_complete(end))
    }

    fn left_bytes(&self, which: impl Fn(&Left) -> bool) -> u64 {
        self.left.iter().filter(|it| which(it)).map(|it| it.range.bytes as u64).sum()
    }

    fn waits(&self) -> u64 {
        self.device.gpu().calls(Call::Synchronize)
    }

    fn apply(&mut self, op: Op) -> Checked {
        let pick = |which: usize| (!self.blocks.is_empty()).then(|| which % self.blocks.len());
        match op {
            Op::Allocate { pages, align_log, arena, stream, zero } => {
                let scope = if self.keeps && arena == KEPT { KEPT as u64 } else { 0 };
                let arena = self.arenas.get(arena).copied();
                let fill = if zero { Fill::Zero } else { Fill::Any };
                let align = 1 << align_log;
                let stream = stream % self.streams;
                let request =
                    Request { align, arena, fill, scope, stream: key(stream), ..Request::new(1) };
                return self.allocate(Request { bytes: pages * PAGE, ..request }, stream);
            }
            Op::Launch { which, user } => {
                let Some(Live { info, users }) = pick(which).map(|at| &self.blocks[at]) else {
                    return Ok(());
                };
                if !info.asleep && !info.free_deferred {
                    self.device.gpu().launch(users[user % users.len()], info.range);
                }
            }
            Op::Record { which, stream } => {
                let (Some(at), stream) = (pick(which), stream % self.streams) else {
                    return Ok(());
                };
                let Live { info, users } = &mut self.blocks[at];
                let recorded = self.allocator.record_stream(info.range.end() - 1, key(stream));
                prop_assert_eq!(recorded.is_ok(), !info.free_deferred);
                if !info.free_deferred && !users.contains(&stream) {
                    users.push(stream);
                }
            }
            Op::Free { which, other } => {
                return pick(which).map_or(Ok(()), |at| self.free(at, other));
            }
            Op::Advance { stream, items } => {
                for _ in 0..items {
                    self.device.gpu().advance(stream % self.streams);
                }
            }
            Op::Depend { stream, on } => {
                // On what is queued already, so that no circle comes about.
                let event = self.device.gpu().end(on % self.streams);
                self.device.gpu().wait(stream % self.streams, event);
            }
            Op::Claim { which } => {
                if let Some(at) = pick(which) {
                    let info = &mut self.blocks[at].info;
                    // Of those it closed, when the arena stops to keep them depends on the device.
                    if info.scope == KEPT as u64 {
                        return Ok(());
                    }
                    let claimed = self.allocator.claim(info.range.start, 9);
                    prop_assert_eq!(claimed.is_ok(), info.claimed.is_none() && !info.free_deferred);
                    info.claimed = Some(9);
                }
            }
            Op::Sleep { which } => pick(which).into_iter().for_each(|at| self.sleep(at)),
            Op::Wake { which } => return pick(which).map_or(Ok(()), |at| self.wake(at)),
            Op::LetGo { which } => {
                return pick(which).map_or(Ok(()), |at| self.release_held_back(at));
            }
            Op::Trim { pages } => {
                let cached_bytes = self.device.mapped_bytes() - self.held_bytes();
                prop_assert_eq!(self.allocator.trim(bytes(pages)), bytes(pages).min(cached_bytes));
                let over: Vec<bool> = self.left.iter().map(|it| self.is_over(it)).collect();
                let mut over = over.into_iter();
                self.left.retain(|_| !over.next().unwrap());
                let pending_bytes = self.allocator.stats().pending_bytes.current;
                prop_assert!(pending_bytes >= self.left_bytes(|_| true));
                // Waits end what was not asked about again; a second look sees that too.
                self.allocator.trim(0);
                let pending_bytes = self.allocator.stats().pending_bytes.current;
                prop_assert_eq!(pending_bytes, self.left_bytes(|_| true));
            }
            Op::Budget { pages } => {
                self.budget_bytes = bytes(pages);
                self.allocator.set_budget(self.budget_bytes).unwrap();
                let most_bytes = self.budget_bytes.max(self.held_bytes());
                prop_assert!(self.device.mapped_bytes() <= most_bytes);
            }
            Op::ReopenArena { which } => {
                let opened = self.open(which);
                let closed = std::mem::replace(&mut self.arenas[which], opened);
                self.allocator.arena_close(closed);
                if which == KEPT {
                    self.kept.clear();
                }
            }
            Op::Replay { page, stream } => {
                let page = page % self.kept.len().max(1);
                if let Some(&page) = self.kept.iter().nth(page) {
                    let range = AddressRange::new(page, PAGE);
                    self.device.gpu().launch(stream % self.streams, range);
                }
            }
        }
        Ok(())
    }

    fn allocate(&mut self, request: Request, stream: usize) -> Checked {
        let bytes = request.bytes as u64;
        let (waits, unmaps) = (self.waits(), self.allocator.stats().unmaps);
        let is_easy = self.device.mapped_bytes() + bytes <= self.budget_bytes;
        let block = match self.allocator.allocate(&request) {
            Ok(block) => block,
            Err(AllocError::OutOfMemory(report)) => {
                // Never a false one: were all streams drained, it would still not fit.
                prop_assert_eq!(report.cause, Cause::Budget, "{}", report);
                prop_assert!(self.held_bytes() + bytes > self.budget_bytes, "{report}");
                self.trace.push(None);
                return Ok(());
            }
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        };
        if is_easy {
            let after = (self.waits(), self.allocator.stats().unmaps);
            prop_assert_eq!(after, (waits, unmaps), "there was room");
        }
        let range = block.range;
        prop_assert_eq!(range.bytes as u64, bytes);
        prop_assert_eq!(range.start % request.align, 0);
        let overlaps =
            |other: &AddressRange| other.start < range.end() && range.start < other.end();
        prop_assert!(!self.blocks.iter().any(|it| overlaps(&it.info.range)), "{block:?}");
        for left in self.left.iter().filter(|it| overlaps(&it.range)) {
            prop_assert!(self.is_over(left), "{:?} of {:?} is not over", left.ends, left.range);
        }
        self.left.retain(|it| !overlaps(&it.range));
        let is_kept = self.kept.contains(&range.start);
        if request.scope == KEPT as u64 {
            self.kept.extend((range.start..range.end()).step_by(PAGE));
        } else {
            prop_assert!(!self.kept.iter().any(|&page| range.contains(page)), "{block:?}");
        }
        // Graphs that share an arena are not replayed at the same time: that is their owner's care.
        if !is_kept {
            self.device.gpu().must_suit(range, stream);
        }
        let (mapped, dirty) = self.device.touch(range);
        prop_assert!(mapped, "{block:?} has no pages");
        prop_assert_eq!(block.zeroed, !dirty);
        self.trace.push(Some(range.start - BASE));
        let info = BlockInfo {
            id: block.id,
            range,
            pages: range,
            requested_bytes: request.bytes,
            scope: request.scope,
            tag: 0,
            arena: request.arena,
            wakes_large: false,
            claimed: None,
            asleep: false,
            free_deferred: false,
            stream: request.stream,
        };
        self.blocks.push(Live { info, users: vec![stream] });
        Ok(())
    }

    fn free(&mut self, at: usize, other: usize) -> Checked {
        let waits = self.waits();
        let Live { info, users } = &mut self.blocks[at];
        // The last use comes before the free.
        let last = if other == 0 { users[0] } else { other % self.streams };
        if !info.free_deferred && !info.asleep {
            self.device.gpu().launch(last, info.range);
        }
        match self.allocator.free(info.range.start, key(last)) {
            Ok(freed) => {
                prop_assert!(!info.free_deferred);
                if !users.contains(&last) {
                    users.push(last);
                }
                match freed {
                    Freed::Done => self.leave(at),
                    Freed::Claimed(owner) => {
                        prop_assert_eq!(info.claimed, Some(owner));
                        info.free_deferred = true;
                    }
                }
            }
            Err(AllocError::FreeDeferred { .. }) => prop_assert!(info.free_deferred),
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        }
        prop_assert_eq!(self.waits(), waits, "a free waited");
        Ok(())
    }

    /// A block ends.
    fn leave(&mut self, at: usize) {
        let Live { info, users } = self.blocks.swap_remove(at);
        if !info.asleep && users.len() > 1 {
            let ends = users[1..].iter().map(|&user| self.device.gpu().end(user)).collect();
            self.left.push(Left { range: info.range, ends });
        }
    }

    /// The claimant waits for all uses, and then the pages go.
    fn sleep(&mut self, at: usize) {
        let Live { info, users } = &mut self.blocks[at];
        if info.claimed.is_none() || info.asleep {
            return;
        }
        let mut gpu = self.device.gpu();
        for &user in &*users {
            let end = gpu.end(user);
            gpu.finish(end);
        }
        drop(gpu);
        self.device.take_pages(info.range);
        info.asleep = true;
        self.allocator.set_asleep(info.id).unwrap();
    }

    fn wake(&mut self, at: usize) -> Checked {
        let held_bytes = self.held_bytes();
        let info = &mut self.blocks[at].info;
        if !info.asleep {
            return Ok(());
        }
        let bytes = info.range.bytes as u64;
        match self.allocator.reserve_awake(bytes) {
            Ok(()) => {
                self.device.bring_pages(info.range);
                self.device.touch(info.range);
                self.allocator.set_awake(info.id).unwrap();
                info.asleep = false;
            }
            Err(AllocError::NoRoom { .. }) => {
                prop_assert!(held_bytes + bytes > self.budget_bytes);
            }
            Err(other) => return Err(TestCaseError::fail(other.to_string())),
        }
        Ok(())
    }

    /// The claimant is done with the block.
    fn release_held_back(&mut self, at: usize) -> Checked {
        let waits = self.waits();
        let info = &mut self.blocks[at].info;
        if info.free_deferred {
            self.allocator.finish_free(info.id).unwrap();
            self.leave(at);
        } else if info.claimed.is_some() && !info.asleep {
            self.allocator.unclaim(info.id).unwrap();
            info.claimed = None;
        }
        prop_assert_eq!(self.waits(), waits, "letting go waited");
        Ok(())
    }

    /// Everything that can be seen from outside, compared.
    fn compare(&self) -> Checked {
        prop_assert_eq!(self.allocator.check(), Ok(()));
        prop_assert_eq!(self.device.violations(), Vec::<String>::new());
        for &page in &self.kept {
            let (mapped, _) = self.device.touch(AddressRange::new(page, 1));
            prop_assert!(mapped, "the kept page {page:#x} is gone");
        }
        let stats = self.allocator.stats();
        let pending_bytes = stats.pending_bytes.current;
        prop_assert!(pending_bytes >= self.left_bytes(|it| !self.is_over(it)));
        prop_assert!(pending_bytes <= self.left_bytes(|_| true));
        let (mapped_bytes, awake_bytes) = (self.device.mapped_bytes(), self.awake_bytes());
        let active_bytes = awake_bytes + pending_bytes;
        let mine = self.blocks.iter().filter(|it| !it.info.asleep && !it.info.free_deferred);
        let allocated_bytes: u64 = mine.map(|it| it.info.range.bytes as u64).sum();
        for (name, figure, expected) in [
            ("mapped", stats.mapped_bytes.current, mapped_bytes),
            ("active", stats.active_bytes.current, active_bytes),
            ("cached", stats.cached_bytes.current, mapped_bytes - active_bytes),
            ("allocated", stats.allocated_bytes.current, allocated_bytes),
            ("waits", stats.stream_waits, self.waits()),
            ("refusals", stats.event_refusals, 0),
        ] {
            prop_assert_eq!(figure, expected, "{}", name);
        }
        let mut found = self.allocator.blocks();
        found.sort_by_key(|it| it.range.start);
        let mut expected: Vec<BlockInfo> = self.blocks.iter().map(|it| it.info).collect();
        expected.sort_by_key(|it| it.range.start);
        prop_assert_eq!(found, expected);
        for left in self.left.iter().filter(|it| !self.is_over(it)) {
            prop_assert_eq!(self.allocator.lookup(left.range.start), None);
        }
        Ok(())
    }

    /// Everything is let go: nothing must be left.
    fn wind_down(&mut self) -> Checked {
        while let Some(at) = self.blocks.len().checked_sub(1) {
            if !self.blocks[at].info.free_deferred {
                self.free(at, 0)?;
            }
            if self.blocks.len() > at {
                self.release_held_back(at)?;
            }
        }
        for arena in self.arenas.drain(..) {
            self.allocator.arena_close(arena);
        }
        self.kept.clear();
        self.compare()?;
        self.allocator.trim(u64::MAX);
        let stats = self.allocator.stats();
        let left = [stats.segments, stats.arenas, stats.mapped_bytes, stats.pending_blocks];
        prop_assert_eq!(left.map(|it| it.current), [0; 4]);
        prop_assert_eq!(self.allocator.check(), Ok(()));
        prop_assert_eq!(self.device.mapped_bytes(), 0);
        Ok(())
    }
}

fn run(streams: usize, ops: &[Op]) -> Result<Vec<Option<usize>>, TestCaseError> {
    let mut model = Model::new(streams, BUDGET_PAGES, true);
    for &op in ops {
        model.apply(op)?;
        model.compare()?;
    }
    model.wind_down()?;
    Ok(model.trace)
}

/// Addresses of those operations that share nothing, on a GPU that gets on at once or never.
fn addresses(ops: &[Op], is_quick: bool) -> Result<Vec<Option<usize>>, TestCaseError> {
    // When the pages of a closed arena that kept them serve others depends on time.
    let mut model = Model::new(STREAMS_MAX, SPACE_PAGES / 4, false);
    for &op in ops {
        match op {
            Op::Free { which, .. } => model.apply(Op::Free { which, other: 0 })?,
            Op::Allocate { .. } | Op::Launch { .. } | Op::ReopenArena { .. } => model.apply(op)?,
            _ => {}
        }
        if is_quick {
            model.device.gpu().drain();
        }
        model.compare()?;
    }
    Ok(model.trace)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// I1 to I4 and I7 to I9, budget, figures and lookups, after every single operation.
    #[test]
    fn agrees_with_the_model_and_repeats_itself(
        streams in 1..=STREAMS_MAX,
        ops in proptest::collection::vec(op(), 1..120),
    ) {
        prop_assert_eq!(run(streams, &ops)?, run(streams, &ops)?);
    }

    /// I6: where nothing is shared and the budget has room, how fast the GPU is has no say.
    #[test]
    fn addresses_of_unshared_blocks_do_not_depend_on_time(
        ops in proptest::collection::vec(op(), 1..120),
    ) {
        prop_assert_eq!(addresses(&ops, true)?, addresses(&ops, false)?);
    }
}
