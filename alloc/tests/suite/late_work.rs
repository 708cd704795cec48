//! Attacks on decision 0040: no page moves while queued work still reads it, whatever comes between a free and its
//! mark.
//!
//! The model of stream time is the simulated GPU: work writes and reads the contents of pages when it is done, not
//! when it is queued. It panics where it finds other bytes, or where pages change that queued work uses.

use crate::common::gpu::Call;
use crate::common::{Fake, PAGE, key, uncounted};
use dormouse_alloc::{AllocError, Allocator, BlockId, Config, Freed, Margin, Request};
use dormouse_device::AddressRange;
use proptest::prelude::*;
use std::sync::Arc;

const SPACE_PAGES: usize = 4096;
const BUDGET_PAGES: usize = 192;
/// Live blocks have at most this many pages, so that a request fits although streams are captured or busy.
const LIVE_PAGES_MAX: usize = 96;
/// Granules of a page.
const UNITS: usize = 8;
const GRANULE: usize = PAGE / UNITS;
const STREAMS: usize = 3;

#[derive(Clone, Copy, Debug)]
enum Op {
    Allocate {
        units: usize,
        stream: usize,
    },
    /// Blocks come and go: more marks than a stream keeps.
    Churn {
        blocks: usize,
        units: usize,
        stream: usize,
    },
    /// Work reads the block, on its own stream or behind it on another one.
    Read {
        which: usize,
        stream: usize,
    },
    /// Another stream reads the block and is not recorded as a user: the block's own stream waits for it after the
    /// free.
    ReadUnrecorded {
        which: usize,
        stream: usize,
    },
    /// Freed on its own stream, or on another one that read it last.
    Free {
        which: usize,
        stream: Option<usize>,
    },
    Advance {
        stream: usize,
        items: usize,
    },
    Drain,
    /// No event can be recorded on the stream until its capture ends.
    Capture {
        stream: usize,
        is_begun: bool,
    },
    /// The next event goes into a graph, unseen.
    CaptureNext,
    EventFails {
        call: Call,
        skip: u64,
    },
    Sleep {
        which: usize,
    },
    Wake {
        which: usize,
    },
    Trim {
        pages: usize,
    },
    /// Unused pages leave, since the trim before.
    TrimUnused {
        pages_max: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let (which, stream) = (any::<usize>(), 0..STREAMS);
    let units = || prop_oneof![3 => 1..UNITS, 4 => UNITS..6 * UNITS, 1 => 6 * UNITS..20 * UNITS];
    let call = prop_oneof![Just(Call::Record), Just(Call::Query), Just(Call::Synchronize)];
    prop_oneof![
        12 => (units(), stream.clone()).prop_map(|(units, stream)| Op::Allocate { units, stream }),
        2 => (2..60_usize, units(), stream.clone())
            .prop_map(|(blocks, units, stream)| Op::Churn { blocks, units, stream }),
        9 => (which, stream.clone()).prop_map(|(which, stream)| Op::Read { which, stream }),
        4 => (which, stream.clone())
            .prop_map(|(which, stream)| Op::ReadUnrecorded { which, stream }),
        9 => (which, proptest::option::weighted(0.3, stream.clone()))
            .prop_map(|(which, stream)| Op::Free { which, stream }),
        6 => (stream.clone(), 1..12_usize).prop_map(|(stream, items)| Op::Advance { stream, items }),
        1 => Just(Op::Drain),
        2 => (stream, any::<bool>())
            .prop_map(|(stream, is_begun)| Op::Capture { stream, is_begun }),
        1 => Just(Op::CaptureNext),
        1 => (call, 0..3_u64).prop_map(|(call, skip)| Op::EventFails { call, skip }),
        3 => which.prop_map(|which| Op::Sleep { which }),
        4 => which.prop_map(|which| Op::Wake { which }),
        1 => (0..40_usize).prop_map(|pages| Op::Trim { pages }),
        2 => (0..40_usize).prop_map(|pages_max| Op::TrimUnused { pages_max }),
    ]
}

struct Live {
    id: BlockId,
    range: AddressRange,
    tag: u32,
    /// Its own stream first.
    users: Vec<usize>,
    /// Streams that read it and are not recorded as users.
    unrecorded: Vec<usize>,
    is_asleep: bool,
}

struct Trainer {
    device: Arc<Fake>,
    allocator: Arc<Allocator<Fake>>,
    live: Vec<Live>,
    tags: u32,
    /// The allocator's time at the last trim of unused pages.
    unused_from: u64,
    /// Waits may fail from now on: a request may find too little.
    is_faulty: bool,
}

impl Trainer {
    fn new(run_ahead: Option<u64>, limit: Option<Margin>, thread_cache: bool) -> Self {
        let config = Config {
            segment_bytes: 16 * PAGE,
            moves_pages: true,
            run_ahead: limit,
            thread_cache,
            ..Config::new(GRANULE, (BUDGET_PAGES * PAGE) as u64)
        };
        let (device, allocator) = uncounted(SPACE_PAGES, config, STREAMS, 1);
        device.gpu().keep_contents(SPACE_PAGES, GRANULE);
        if let Some(launches) = run_ahead {
            device.gpu().set_run_ahead(launches);
        }
        Self { device, allocator, live: Vec::new(), tags: 0, unused_from: 0, is_faulty: false }
    }

    fn allocate(&mut self, units: usize, stream: usize) {
        let live_bytes: usize = self.live.iter().map(|it| it.range.bytes).sum();
        if live_bytes + units * GRANULE > LIVE_PAGES_MAX * PAGE {
            return;
        }
        // The first one is of a scope: from then on a run-ahead is limited.
        let scope = u64::from(self.tags == 0);
        let request = Request { stream: key(stream), scope, ..Request::new(units * GRANULE) };
        let block = match self.allocator.allocate(&request) {
            Ok(block) => block,
            Err(AllocError::OutOfMemory(_)) if self.is_faulty => return,
            Err(error) => panic!("{error}"),
        };
        self.tags += 1;
        let mut gpu = self.device.gpu();
        gpu.must_suit(block.range, stream);
        gpu.write(stream, block.range, self.tags);
        let (tag, users, unrecorded) = (self.tags, vec![stream], Vec::new());
        let (id, range) = (block.id, block.range);
        self.live.push(Live { id, range, tag, users, unrecorded, is_asleep: false });
    }

    fn read(&mut self, at: usize, stream: usize) {
        let Live { range, tag, ref mut users, is_asleep, .. } = self.live[at];
        if is_asleep {
            return;
        }
        if !users.contains(&stream) {
            self.allocator.record_stream(range.start, key(stream)).unwrap();
            users.push(stream);
        }
        let mut gpu = self.device.gpu();
        if stream != users[0] {
            let written = gpu.end(users[0]);
            gpu.wait(stream, written);
        }
        gpu.read(stream, range, tag);
    }

    fn read_unrecorded(&mut self, at: usize, stream: usize) {
        let Live { range, tag, ref users, ref mut unrecorded, is_asleep, .. } = self.live[at];
        if is_asleep || users.contains(&stream) {
            return;
        }
        unrecorded.push(stream);
        let mut gpu = self.device.gpu();
        let written = gpu.end(users[0]);
        gpu.wait(stream, written);
        gpu.read(stream, range, tag);
    }

    fn free(&mut self, at: usize, stream: Option<usize>) {
        let is_asleep = self.live[at].is_asleep;
        if let Some(stream) = stream
            && !is_asleep
        {
            self.read(at, stream);
        }
        let Live { id, range, users, unrecorded, .. } = self.live.swap_remove(at);
        let last = stream.filter(|_| !is_asleep).unwrap_or(users[0]);
        match self.allocator.free(range.start, key(last)).unwrap() {
            Freed::Done => {}
            Freed::Claimed(_) => self.allocator.finish_free(id).unwrap(),
        }
        let mut gpu = self.device.gpu();
        for stream in unrecorded {
            let read = gpu.end(stream);
            gpu.wait(users[0], read);
        }
    }

    /// As the engine does: once all uses are over the pages leave.
    fn sleep(&mut self, at: usize) {
        let Live { id, range, is_asleep, ref unrecorded, .. } = self.live[at];
        if is_asleep || self.is_faulty || !unrecorded.is_empty() {
            return;
        }
        let info = self.allocator.claim(range.start, 1).unwrap();
        let ends = self.allocator.uses_end(&[id]).unwrap().events;
        ends.into_iter().for_each(|end| self.device.gpu().finish(end));
        if info.pages.bytes == 0 {
            return self.allocator.unclaim(id).unwrap();
        }
        self.device.take_pages(info.pages);
        self.allocator.set_asleep(id).unwrap();
        self.live[at].is_asleep = true;
    }

    fn wake(&mut self, at: usize) {
        let Live { id, range, tag, ref users, is_asleep, .. } = self.live[at];
        let pages = self.allocator.info(id).unwrap().pages;
        if !is_asleep || self.allocator.reserve_awake(pages.bytes as u64).is_err() {
            return;
        }
        self.device.bring_pages(pages);
        self.allocator.set_awake(id).unwrap();
        self.allocator.unclaim(id).unwrap();
        // The copy in: its own stream comes behind it.
        self.device.gpu().write(users[0], range, tag);
        self.live[at].is_asleep = false;
    }

    fn apply(&mut self, op: Op) {
        let at = |which: usize| which.checked_rem(self.live.len());
        match op {
            Op::Allocate { units, stream } => self.allocate(units, stream),
            Op::Churn { blocks, units, stream } => {
                for _ in 0..blocks {
                    let before = self.live.len();
                    self.allocate(units, stream);
                    if self.live.len() > before {
                        self.read(before, stream);
                        self.free(before, None);
                    }
                }
            }
            Op::Read { which, stream } => {
                at(which).into_iter().for_each(|at| self.read(at, stream))
            }
            Op::ReadUnrecorded { which, stream } => {
                at(which).into_iter().for_each(|at| self.read_unrecorded(at, stream))
            }
            Op::Free { which, stream } => {
                at(which).into_iter().for_each(|at| self.free(at, stream))
            }
            Op::Advance { stream, items } => {
                (0..items).for_each(|_| _ = self.device.gpu().advance(stream));
            }
            Op::Drain => self.device.gpu().drain(),
            Op::Capture { stream, is_begun } => {
                self.is_faulty |= is_begun;
                self.device.gpu().set_captured(stream, is_begun);
            }
            Op::CaptureNext => {
                self.is_faulty = true;
                self.device.gpu().capture_next();
            }
            Op::EventFails { call, skip } => {
                self.is_faulty = true;
                self.device.gpu().fail(call, skip);
            }
            Op::Sleep { which } => at(which).into_iter().for_each(|at| self.sleep(at)),
            Op::Wake { which } => at(which).into_iter().for_each(|at| self.wake(at)),
            Op::Trim { pages } => drop(self.allocator.trim((pages * PAGE) as u64)),
            Op::TrimUnused { pages_max } => {
                self.allocator.trim_unused(self.unused_from, (pages_max * PAGE) as u64);
                self.unused_from = self.allocator.watch_unused();
            }
        }
    }

    /// Everything is freed: no page stays.
    fn wind_down(mut self) {
        (0..STREAMS).for_each(|stream| self.device.gpu().set_captured(stream, false));
        self.device.forget_faults();
        self.device.gpu().drain();
        while !self.live.is_empty() {
            self.free(0, None);
        }
        self.allocator.trim(u64::MAX);
        self.allocator.check().unwrap();
        assert_eq!(self.device.mapped_bytes(), 0);
    }
}

/// A reduce-scatter writes gradients on its stream, the optimizer reads them on another one, and they are freed: nothing
/// but the trainer knows of the read. Pages that leave are unmapped, so what frees them waits for it.
#[test]
fn pages_stay_until_an_unrecorded_read_on_another_stream_is_over() {
    for is_marked in [false, true] {
        let mut trainer = Trainer::new(None, None, false);
        (0..4).for_each(|_| trainer.allocate(4 * UNITS, 1));
        trainer.allocate(UNITS, 0);
        trainer.device.gpu().drain();
        if is_marked {
            trainer.read(4, 0);
            trainer.free(3, None);
            assert_eq!(trainer.allocator.trim_unused(u64::MAX, u64::MAX), 0);
        }
        trainer.read_unrecorded(0, 0);
        let range = trainer.live[0].range;
        trainer.free(0, None);
        // The reduce-scatter's stream has nothing left but the wait for the read.
        assert_eq!(trainer.device.gpu().users(range), [0]);
        let trimmed_bytes = trainer.allocator.trim_unused(u64::MAX, u64::MAX);
        assert_eq!(trimmed_bytes, 0, "a read on stream 0 is queued");
        // Emptying the cache waits for the read, and takes all that is free.
        let free_bytes = trainer.allocator.stats().cached_bytes.current;
        assert_eq!(trainer.allocator.trim(u64::MAX), free_bytes);
        assert_eq!(trainer.device.gpu().queued(0), 0);
        assert_eq!(trainer.device.violations(), Vec::<String>::new());
        trainer.wind_down();
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(192))]
    #[test]
    fn late_work_finds_its_bytes(
        run_ahead in prop_oneof![Just(None), (1..400_u64).prop_map(Some), Just(Some(1024))],
        divisor in proptest::option::of(1..40_u64),
        thread_cache in any::<bool>(),
        ops in proptest::collection::vec(op(), 1..160),
    ) {
        let limit = divisor.map(|divisor| Margin { divisor, bytes_min: 0 });
        let mut trainer = Trainer::new(run_ahead, limit, thread_cache);
        for op in ops {
            trainer.apply(op);
            prop_assert_eq!(trainer.allocator.check(), Ok(()));
            prop_assert_eq!(trainer.device.violations(), Vec::<String>::new());
        }
        trainer.wind_down();
    }
}
