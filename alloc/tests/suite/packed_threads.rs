//! Many threads at once on blocks that share pages, with maps in flight beside each other, moved
//! pages, sleep, and a device that fails now and then. What is checked holds under every
//! interleaving: every block holds what its user wrote until it is freed.

use crate::common::random::Random;
use crate::common::{Fake, Fault, PAGE, key, with_contents};
use dormouse_alloc::{AllocError, Allocator, Block, Config, Freed, Request};
use std::sync::{Barrier, mpsc};

const THREADS: usize = 4;
const OPERATIONS: usize = 20_000;
const SPACE_PAGES: usize = 4096;
/// Less than all threads want together.
const BUDGET_PAGES: u64 = 320;
const HELD_MAX: usize = 40;

/// A block, and what its user wrote into it.
#[derive(Clone, Copy)]
struct Held {
    block: Block,
    tag: u32,
}

/// One thread, which is one stream too where the device has any.
struct Worker<'a> {
    device: &'a Fake,
    allocator: &'a Allocator<Fake>,
    number: usize,
    is_ordered: bool,
    random: Random,
    tags: u32,
    held: Vec<Held>,
}

impl Worker<'_> {
    fn allocate(&mut self) {
        let bytes = match self.random.below(4) {
            0 | 1 => 1 + self.random.below(PAGE),
            2 => 1 + self.random.below(4 * PAGE),
            _ => 1 + self.random.below(16 * PAGE),
        };
        let request = Request {
            stream: key(self.number),
            align: 1 << self.random.below(14),
            whole_pages: self.random.below(8) == 0,
            ..Request::new(bytes)
        };
        match self.allocator.allocate(&request) {
            Ok(block) => {
                if self.is_ordered {
                    self.device.gpu().must_suit(block.range, self.number);
                }
                self.tags += 1;
                let tag = (self.number as u32 + 1) << 24 | self.tags;
                self.device.write(block.range, tag);
                self.held.push(Held { block, tag });
            }
            // The others hold what they hold, and the device fails.
            Err(AllocError::OutOfMemory(_) | AllocError::Device(_)) => {}
            Err(other) => panic!("{other}"),
        }
    }

    fn must_hold(&self, held: &Held) {
        let found = self.device.first_other(held.block.range, held.tag);
        assert_eq!(found, None, "{:?}, tag {:x}", held.block, held.tag);
    }

    /// Freed by this thread, allocated by any.
    fn free(&mut self, held: Held) {
        self.must_hold(&held);
        if self.is_ordered {
            self.device.gpu().launch(self.number, held.block.range);
        }
        let freed = self.allocator.free(held.block.range.start, key(self.number));
        assert_eq!(freed.unwrap(), Freed::Done);
    }

    /// Asleep and awake again, or freed asleep.
    fn sleep(&mut self, at: usize) {
        let Held { block, tag } = self.held[at];
        let info = self.allocator.claim(block.range.start, 9).unwrap();
        let ends = self.allocator.uses_end(&[block.id]).unwrap().events;
        ends.into_iter().for_each(|end| self.device.gpu().finish(end));
        let bytes = info.pages.bytes as u64;
        if bytes > 0 {
            self.device.take_pages(info.pages);
        }
        self.allocator.set_asleep(block.id).unwrap();
        if self.allocator.reserve_awake(bytes).is_ok() {
            if bytes > 0 {
                self.device.bring_pages(info.pages);
                self.device.write(info.pages, tag);
            }
            self.allocator.set_awake(block.id).unwrap();
            self.allocator.unclaim(block.id).unwrap();
            self.must_hold(&self.held[at]);
        } else {
            let freed = self.allocator.free(block.range.start, key(self.number));
            assert_eq!(freed.unwrap(), Freed::Claimed(9));
            self.allocator.finish_free(block.id).unwrap();
            self.held.swap_remove(at);
        }
    }

    fn step(&mut self, outbox: &mpsc::Sender<Held>) {
        let at = self.random.below(self.held.len().max(1));
        match self.random.below(16) {
            _ if self.held.len() > HELD_MAX => {
                let held = self.held.swap_remove(at);
                self.free(held);
            }
            0..7 => self.allocate(),
            7..11 if !self.held.is_empty() => {
                let held = self.held.swap_remove(at);
                self.free(held);
            }
            11 | 12 if !self.held.is_empty() => {
                outbox.send(self.held.swap_remove(at)).unwrap();
            }
            13 if !self.held.is_empty() => self.sleep(at),
            14 => _ = self.allocator.trim(self.random.below(8 * PAGE) as u64),
            15 => match self.random.below(8) {
                0 => self.device.fail_map(0, Fault::Refused),
                1 => self.device.fail_map(0, Fault::Full),
                2 => self.device.fail_unmap(0, Fault::Refused),
                _ => self.held.iter().for_each(|it| self.must_hold(it)),
            },
            _ => {}
        }
    }
}

fn everything_at_once(streams: usize) {
    let config = Config {
        segment_bytes: 16 * PAGE,
        moves_pages: true,
        ..Config::new(PAGE / 8, BUDGET_PAGES * PAGE as u64)
    };
    let (device, allocator) = with_contents(SPACE_PAGES, config, streams);
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..THREADS).map(|_| mpsc::channel::<Held>()).unzip();
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for (number, inbox) in receivers.into_iter().enumerate() {
            let outbox = senders[(number + 1) % THREADS].clone();
            let mut worker = Worker {
                device: &device,
                allocator: &allocator,
                number,
                is_ordered: streams > 0,
                random: Random(number as u64 + 1),
                tags: 0,
                held: Vec::new(),
            };
            let barrier = &barrier;
            scope.spawn(move || {
                barrier.wait();
                for _ in 0..OPERATIONS {
                    while let Ok(held) = inbox.try_recv() {
                        worker.free(held);
                    }
                    worker.step(&outbox);
                }
                drop(outbox);
                while let Some(held) = worker.held.pop() {
                    worker.free(held);
                }
                // Until the thread before this one is done.
                while let Ok(held) = inbox.recv() {
                    worker.free(held);
                }
            });
        }
        drop(senders);
    });
    device.forget_faults();
    allocator.check().unwrap();
    let allocations = allocator.stats().allocations;
    assert_eq!(allocations.current, 0);
    // Most requests are refused, but not nearly all.
    assert!(allocations.added_total as usize > OPERATIONS / 10, "{allocations:?}");
    allocator.trim(u64::MAX);
    allocator.check().unwrap();
    let stats = allocator.stats();
    assert_eq!((device.mapped_bytes(), stats.mapped_bytes.current), (0, 0));
    assert_eq!((stats.segments.current, stats.pending_blocks.current), (0, 0));
    assert_eq!(device.violations(), Vec::<String>::new());
}

#[test]
fn blocks_that_share_pages_do_not_overlap() {
    everything_at_once(0);
}

#[test]
fn blocks_that_share_pages_do_not_overlap_in_stream_order() {
    everything_at_once(THREADS);
}
