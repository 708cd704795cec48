//! Many threads at once on small blocks that are kept as they are: one asks for a block and another
//! frees it on the same stream, while others claim, tell of uses, trim, look and change the budget.

use crate::common::random::Random;
use crate::common::{Fake, PAGE, key, with_contents};
use dormouse_alloc::{AllocError, Allocator, Block, Config, Freed, Request, ThreadShard};
use std::sync::{Barrier, mpsc};

const THREADS: usize = 4;
/// Operations of a thread; `DORMOUSE_THREADS_OPS` says otherwise.
const OPERATIONS: usize = 20_000;
const GRANULE_BYTES: usize = PAGE / 8;
const SPACE_PAGES: usize = 4096;
const BUDGETS_PAGES: [u64; 3] = [400, 150, 60];
const HELD_MAX: usize = 40;
/// The stream that blocks are asked for on, and one that uses some of them too.
const STREAMS: usize = 2;

/// A block, what was asked for and what its user wrote into it.
#[derive(Clone, Copy)]
struct Held {
    block: Block,
    bytes: usize,
    tag: u32,
}

/// What was handed out.
#[derive(Clone, Copy, Default)]
struct Sums {
    blocks: u64,
    bytes: u64,
    requested_bytes: u64,
    from_cache: u64,
}

struct Worker<'a> {
    device: &'a Fake,
    allocator: &'a Allocator<Fake>,
    number: usize,
    random: Random,
    sums: Sums,
    held: Vec<Held>,
}

impl Worker<'_> {
    /// A block of the thread cache.
    fn allocate_small(&self, request: &Request) -> Option<Block> {
        let Request { bytes, stream, tag, .. } = *request;
        if tag != 0 || !self.allocator.is_small_size(bytes) {
            return None;
        }
        let start = self.allocator.allocate_small(ThreadShard::current(), bytes, stream)?;
        let info = self.allocator.lookup(start).unwrap();
        Some(Block { id: info.id, range: info.range, zeroed: false })
    }

    fn allocate(&mut self) {
        let bytes = match self.random.below(8) {
            0..6 => 1 + self.random.below(6 * GRANULE_BYTES),
            6 => 1 + self.random.below(100 * GRANULE_BYTES),
            // None for the thread cache.
            _ => 2048 * GRANULE_BYTES / 64 + 1,
        };
        let request = Request { stream: key(0), tag: bytes as u32 % 9 / 8, ..Request::new(bytes) };
        let cached = self.allocate_small(&request);
        self.sums.from_cache += u64::from(cached.is_some());
        let block = match cached.map_or_else(|| self.allocator.allocate(&request), Ok) {
            Ok(block) => block,
            // The others hold what they hold.
            Err(AllocError::OutOfMemory(_)) => return,
            Err(other) => panic!("{other}"),
        };
        self.device.gpu().must_suit(block.range, 0);
        self.sums.blocks += 1;
        self.sums.bytes += block.range.bytes as u64;
        self.sums.requested_bytes += bytes as u64;
        let tag = (self.number as u32 + 1) << 24 | self.sums.blocks as u32;
        self.device.write(block.range, tag);
        self.held.push(Held { block, bytes, tag });
    }

    fn must_hold(&self, held: &Held) {
        let found = self.device.first_other(held.block.range, held.tag);
        assert_eq!(found, None, "{:?}, tag {:x}", held.block, held.tag);
    }

    /// After a last use on `stream`.
    fn free_on(&self, held: &Held, stream: usize) {
        self.must_hold(held);
        self.device.gpu().launch(stream, held.block.range);
        let freed = self.allocator.free(held.block.range.start, key(stream));
        assert_eq!(freed.unwrap(), Freed::Done);
    }

    /// A lookup by any thread returns the block as allocated.
    fn look(&self, held: &Held) {
        let address = held.block.range.end() - 1;
        let info = self.allocator.lookup(address).unwrap();
        assert_eq!((info.id, info.range), (held.block.id, held.block.range));
        assert_eq!((info.requested_bytes, info.stream), (held.bytes, key(0)));
        assert_eq!(self.allocator.info(held.block.id).unwrap(), info);
    }

    /// Claimed, and given up or freed meanwhile.
    fn claim(&mut self, at: usize) {
        let held = self.held[at];
        let info = self.allocator.claim(held.block.range.start, 9).unwrap();
        assert_eq!((info.id, info.requested_bytes), (held.block.id, held.bytes));
        if self.random.below(2) == 0 {
            return self.allocator.unclaim(held.block.id).unwrap();
        }
        let freed = self.allocator.free(held.block.range.start, key(0));
        assert_eq!(freed.unwrap(), Freed::Claimed(9));
        self.must_hold(&held);
        self.allocator.finish_free(held.block.id).unwrap();
        self.held.swap_remove(at);
    }

    fn step(&mut self, outbox: &mpsc::Sender<Held>) {
        (0..2 * STREAMS).for_each(|it| _ = self.device.gpu().advance(it % STREAMS));
        if self.held.is_empty() {
            return self.allocate();
        }
        let at = self.random.below(self.held.len());
        match self.random.below(32) {
            0..14 if self.held.len() < HELD_MAX => self.allocate(),
            0..20 => {
                let held = self.held.swap_remove(at);
                self.free_on(&held, 0);
            }
            20..25 => outbox.send(self.held.swap_remove(at)).unwrap(),
            25 => {
                let held = self.held.swap_remove(at);
                self.free_on(&held, 1);
            }
            26 => {
                let range = self.held[at].block.range;
                self.allocator.record_stream(range.start, key(1)).unwrap();
                self.device.gpu().launch(1, range);
            }
            27 | 28 => self.claim(at),
            29 => self.look(&self.held[at]),
            30 => {
                let stats = self.allocator.stats();
                for it in [stats.allocated_bytes, stats.active_bytes, stats.requested_bytes] {
                    assert!(it.current <= it.peak && it.peak <= it.added_total, "{stats:?}");
                }
            }
            _ => match self.random.below(12) {
                0 => {
                    let pages = BUDGETS_PAGES[self.random.below(BUDGETS_PAGES.len())];
                    self.allocator.set_budget(pages * PAGE as u64).unwrap();
                }
                1 => _ = self.allocator.trim(u64::MAX),
                2 => self.allocator.reset_peaks(),
                _ => _ = self.allocator.trim(self.random.below(8 * PAGE) as u64),
            },
        }
    }

    fn run(mut self, inbox: &mpsc::Receiver<Held>, outbox: mpsc::Sender<Held>) -> Sums {
        let asked = std::env::var("DORMOUSE_THREADS_OPS").ok();
        let operations = asked.map_or(OPERATIONS, |it| it.parse().unwrap());
        for _ in 0..operations {
            while let Ok(held) = inbox.try_recv() {
                self.free_on(&held, 0);
            }
            self.step(&outbox);
        }
        drop(outbox);
        self.held.iter().for_each(|held| self.free_on(held, 0));
        // Until the thread before this one is done.
        while let Ok(held) = inbox.recv() {
            self.free_on(&held, 0);
        }
        self.sums
    }
}

#[test]
fn small_blocks_of_the_thread_cache_do_not_overlap() {
    let config = Config {
        segment_bytes: 16 * PAGE,
        thread_cache: true,
        ..Config::new(GRANULE_BYTES, BUDGETS_PAGES[0] * PAGE as u64)
    };
    let (device, allocator) = with_contents(SPACE_PAGES, config, STREAMS);
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..THREADS).map(|_| mpsc::channel::<Held>()).unzip();
    let barrier = Barrier::new(THREADS);
    let mut sums = Sums::default();
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (number, inbox) in receivers.into_iter().enumerate() {
            let outbox = senders[(number + 1) % THREADS].clone();
            let worker = Worker {
                device: &device,
                allocator: &allocator,
                number,
                random: Random(number as u64 + 1),
                sums: Sums::default(),
                held: Vec::new(),
            };
            let barrier = &barrier;
            threads.push(scope.spawn(move || {
                barrier.wait();
                worker.run(&inbox, outbox)
            }));
        }
        drop(senders);
        for thread in threads {
            let Sums { blocks, bytes, requested_bytes, from_cache } = thread.join().unwrap();
            sums.blocks += blocks;
            sums.bytes += bytes;
            sums.requested_bytes += requested_bytes;
            sums.from_cache += from_cache;
        }
    });
    allocator.check().unwrap();
    let stats = allocator.stats();
    for (amount, added) in [
        (stats.allocations, sums.blocks),
        (stats.allocated_bytes, sums.bytes),
        (stats.requested_bytes, sums.requested_bytes),
    ] {
        assert_eq!((amount.current, amount.added_total), (0, added), "{stats:?}");
    }
    assert!(sums.from_cache > sums.blocks / 10, "{} of {}", sums.from_cache, sums.blocks);
    allocator.trim(u64::MAX);
    allocator.check().unwrap();
    let stats = allocator.stats();
    assert_eq!((device.mapped_bytes(), stats.mapped_bytes.current), (0, 0));
    assert_eq!((stats.segments.current, stats.pending_blocks.current), (0, 0));
    assert_eq!((stats.active_bytes.current, stats.cached_bytes.current), (0, 0));
    assert_eq!(device.violations(), Vec::<String>::new());
    assert_eq!(allocator.blocks(), []);
}
