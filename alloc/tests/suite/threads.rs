//! Many threads at once. What is checked holds under every interleaving.

use crate::common::random::Random;
use crate::common::{BASE, Fake, PAGE, allocator};
use dormouse_alloc::{AllocError, Allocator, Block, Freed, Request};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Barrier, mpsc};

const THREADS: usize = 4;
const SPACE_PAGES: usize = 4096;

/// The owner of each page: overlaps show at once.
struct Owners(Vec<AtomicU32>);

impl Owners {
    fn new() -> Self {
        Self((0..SPACE_PAGES).map(|_| AtomicU32::new(0)).collect())
    }

    fn change(&self, block: &Block, from: u32, to: u32) {
        let first = (block.range.start - BASE) / PAGE;
        for page in &self.0[first..first + block.range.bytes / PAGE] {
            let seen = page.compare_exchange(from, to, Ordering::AcqRel, Ordering::Acquire);
            assert_eq!(seen, Ok(from), "two owners of {block:?}");
        }
    }
}

fn wind_down(device: &Fake, allocator: &Allocator<Fake>) {
    allocator.check().unwrap();
    assert_eq!(allocator.stats().allocations.current, 0);
    allocator.trim(u64::MAX);
    allocator.check().unwrap();
    assert_eq!(device.mapped_bytes(), 0);
    assert_eq!(device.violations(), Vec::<String>::new());
    assert_eq!(allocator.stats().segments.current, 0);
}

/// Each thread allocates, claims, sleeps, wakes, trims; the next one frees what it made.
#[test]
fn everything_at_once_loses_nothing() {
    const OPERATIONS: usize = 4000;
    let (device, allocator) = allocator(SPACE_PAGES, 600);
    let owners = Owners::new();
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..THREADS).map(|_| mpsc::channel::<Block>()).unzip();
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (thread, inbox) in receivers.into_iter().enumerate() {
            let outbox = senders[(thread + 1) % THREADS].clone();
            let (device, allocator, owners, barrier) = (&device, &allocator, &owners, &barrier);
            threads.push(scope.spawn(move || {
                let me = u32::try_from(thread + 1).unwrap();
                let mut random = Random(me.into());
                let mut arena = allocator.arena_create().unwrap();
                let mut held: Vec<Block> = Vec::new();
                barrier.wait();
                for _ in 0..OPERATIONS {
                    while let Ok(block) = inbox.try_recv() {
                        let sender = if me == 1 { THREADS as u32 } else { me - 1 };
                        owners.change(&block, sender, 0);
                        assert_eq!(allocator.free(block.range.start, 0).unwrap(), Freed::Done);
                    }
                    match random.below(10) {
                        0..5 => {
                            let arena = (random.below(2) == 0).then_some(arena);
                            let request =
                                Request { arena, ..Request::new(1 + random.below(24 * PAGE)) };
                            // The others hold what they hold: a shortage is possible here.
                            if let Ok(block) = allocator.allocate(&request) {
                                owners.change(&block, 0, me);
                                held.push(block);
                            }
                        }
                        5..7 if !held.is_empty() => {
                            let block = held.swap_remove(random.below(held.len()));
                            outbox.send(block).unwrap();
                        }
                        7 if !held.is_empty() => {
                            let at = random.below(held.len());
                            let block = held[at];
                            let gone = || owners.change(&block, me, 0);
                            if !sleep_and_wake(device, allocator, &block, gone) {
                                held.swap_remove(at);
                            }
                        }
                        8 if !held.is_empty() => {
                            let block = held.swap_remove(random.below(held.len()));
                            allocator.claim(block.range.start + 1, 9).unwrap();
                            assert_eq!(
                                allocator.free(block.range.start, 0).unwrap(),
                                Freed::Claimed(9)
                            );
                            owners.change(&block, me, 0);
                            allocator.finish_free(block.id).unwrap();
                        }
                        9 => {
                            allocator.trim((random.below(40) * PAGE) as u64);
                            allocator.arena_close(arena);
                            arena = allocator.arena_create().unwrap();
                        }
                        _ => {}
                    }
                    if let Some(block) = held.last() {
                        assert_eq!(allocator.lookup(block.range.start + 1).unwrap().id, block.id);
                    }
                }
                for block in held {
                    owners.change(&block, me, 0);
                    assert_eq!(allocator.free(block.range.start, 0).unwrap(), Freed::Done);
                }
                allocator.arena_close(arena);
                // What arrives from here on is freed by the main thread, when all have stopped.
                inbox
            }));
        }
        let inboxes: Vec<_> = threads.into_iter().map(|it| it.join().unwrap()).collect();
        for block in inboxes.iter().flat_map(mpsc::Receiver::try_iter) {
            assert_eq!(allocator.free(block.range.start, 0).unwrap(), Freed::Done);
        }
    });
    wind_down(&device, &allocator);
    assert_eq!(allocator.stats().arenas.current, 0);
}

/// Sleeps a block and wakes it again. Where another thread has taken the room meanwhile, the
/// block dies in its sleep: `false`.
fn sleep_and_wake(
    device: &Fake,
    allocator: &Allocator<Fake>,
    block: &Block,
    before_it_goes: impl FnOnce(),
) -> bool {
    allocator.claim(block.range.start, 7).unwrap();
    device.take_pages(block.range);
    allocator.set_asleep(block.id).unwrap();
    match allocator.reserve_awake(block.range.bytes as u64) {
        Ok(()) => {
            device.bring_pages(block.range);
            allocator.set_awake(block.id).unwrap();
            allocator.unclaim(block.id).unwrap();
            true
        }
        Err(AllocError::NoRoom { .. }) => {
            before_it_goes();
            assert_eq!(allocator.free(block.range.start, 0).unwrap(), Freed::Claimed(7));
            allocator.finish_free(block.id).unwrap();
            false
        }
        Err(other) => panic!("{other}"),
    }
}

/// Never a false out-of-memory: the threads together never hold more than the budget, so none of
/// them is ever refused, though nearly every request has to trim what another thread cached.
#[test]
fn requests_that_fit_are_not_refused() {
    const PAGES_EACH: usize = 25;
    const OPERATIONS: usize = 4000;
    let (device, allocator) = allocator(SPACE_PAGES, THREADS * PAGES_EACH);
    let owners = Owners::new();
    let barrier = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (allocator, owners, barrier) = (Arc::clone(&allocator), &owners, &barrier);
            scope.spawn(move || {
                let me = u32::try_from(thread + 1).unwrap();
                let mut random = Random(1000 + u64::from(me));
                let arena = allocator.arena_create().unwrap();
                let (mut held, mut held_pages) = (Vec::<Block>::new(), 0);
                barrier.wait();
                for _ in 0..OPERATIONS {
                    let pages = 1 + random.below(PAGES_EACH);
                    while held_pages + pages > PAGES_EACH {
                        let block = held.swap_remove(random.below(held.len()));
                        held_pages -= block.range.bytes / PAGE;
                        owners.change(&block, me, 0);
                        assert_eq!(allocator.free(block.range.start, 0).unwrap(), Freed::Done);
                    }
                    let arena = Some(arena);
                    let request = Request { arena, ..Request::new(pages * PAGE) };
                    let block =
                        allocator.allocate(&request).unwrap_or_else(|error| panic!("{error}"));
                    owners.change(&block, 0, me);
                    held.push(block);
                    held_pages += pages;
                }
                for block in held {
                    owners.change(&block, me, 0);
                    assert_eq!(allocator.free(block.range.start, 0).unwrap(), Freed::Done);
                }
                allocator.arena_close(arena);
            });
        }
    });
    assert!(allocator.stats().retries > 0, "no request had to trim: the test shows nothing");
    assert_eq!(allocator.stats().ooms, 0);
    assert!(allocator.stats().mapped_bytes.peak <= (THREADS * PAGES_EACH * PAGE) as u64);
    wind_down(&device, &allocator);
}
