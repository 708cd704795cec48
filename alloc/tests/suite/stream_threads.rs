//! Threads and streams at once: one thread allocates on a stream, another frees on a second one.

use crate::common::{PAGE, key, ordered};
use dormouse_alloc::{AllocError, Block, Freed, Request};
use std::sync::mpsc;

const BUDGET_PAGES: usize = 60;
const OPERATIONS: usize = 4000;

/// The first thread makes blocks on stream 0 and uses them there; the second uses them on stream
/// 1, says so, and frees them; a third is the GPU. Only the allocating thread waits.
#[test]
fn one_thread_allocates_and_another_frees_what_its_stream_uses() {
    let (device, allocator) = ordered(4096, BUDGET_PAGES, 2);
    let (send, receive) = mpsc::sync_channel::<Block>(2);
    std::thread::scope(|scope| {
        let gpu = scope.spawn(|| {
            // Ends when the others do.
            loop {
                let is_moving = [0, 1].map(|stream| device.gpu().advance(stream)).contains(&true);
                if !is_moving {
                    if std::sync::Arc::strong_count(&allocator) == 1 {
                        break;
                    }
                    std::thread::yield_now();
                }
            }
        });
        let mine = std::sync::Arc::clone(&allocator);
        let device = &device;
        scope.spawn(move || {
            for step in 0..OPERATIONS {
                // At most four are held at a time, of 14 pages each: all fit.
                let request = Request { stream: key(0), ..Request::new((1 + step % 14) * PAGE) };
                let block = mine.allocate(&request).unwrap_or_else(|error| panic!("{error}"));
                device.gpu().must_suit(block.range, 0);
                device.gpu().launch(0, block.range);
                send.send(block).unwrap();
            }
        });
        let mine = std::sync::Arc::clone(&allocator);
        scope.spawn(move || {
            for (step, block) in receive.iter().enumerate() {
                device.gpu().launch(1, block.range);
                let start = block.range.start;
                let stream = if step % 2 == 0 {
                    mine.record_stream(start, key(1)).unwrap();
                    0
                } else {
                    1
                };
                assert_eq!(mine.free(start, key(stream)).unwrap(), Freed::Done);
                if step % 64 == 0 {
                    mine.trim((step % 30 * PAGE) as u64);
                    mine.check().unwrap();
                }
            }
        });
        gpu.join().unwrap();
    });
    allocator.check().unwrap();
    allocator.trim(u64::MAX);
    allocator.check().unwrap();
    let stats = allocator.stats();
    assert_eq!((device.mapped_bytes(), stats.ooms, stats.pending_blocks.current), (0, 0, 0));
    assert!(stats.pending_blocks.added_total >= OPERATIONS as u64 / 2);
    assert_eq!(device.violations(), Vec::<String>::new());
}

/// Each thread has a stream, and all share a budget that one of them could use up: no request is refused,
/// though nearly every request needs pages that another stream may still be using.
#[test]
fn requests_that_fit_are_not_refused() {
    const THREADS: usize = 3;
    const PAGES_EACH: usize = 20;
    let (device, allocator) = ordered(4096, THREADS * PAGES_EACH, THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (device, allocator) = (&device, &allocator);
            scope.spawn(move || {
                let next = (thread + 1) % THREADS;
                for step in 0..OPERATIONS / 4 {
                    let pages = 1 + step * 7 % PAGES_EACH;
                    let request = Request { stream: key(thread), ..Request::new(pages * PAGE) };
                    let block = allocator.allocate(&request);
                    let block = block.unwrap_or_else(|error: AllocError| panic!("{error}"));
                    device.gpu().must_suit(block.range, thread);
                    device.gpu().launch(thread, block.range);
                    let is_shared = step % 3 == 0;
                    if is_shared {
                        device.gpu().launch(next, block.range);
                    }
                    let stream = if is_shared { next } else { thread };
                    assert_eq!(
                        allocator.free(block.range.start, key(stream)).unwrap(),
                        Freed::Done
                    );
                    if step % 2 == 0 {
                        device.gpu().advance(thread);
                    }
                }
            });
        }
    });
    allocator.check().unwrap();
    let stats = allocator.stats();
    assert_eq!(stats.ooms, 0);
    assert!(stats.stream_waits > 0 && stats.cross_stream_trims > 0, "{stats:?}");
    assert!(stats.mapped_bytes.peak <= (THREADS * PAGES_EACH * PAGE) as u64);
    drop(allocator);
    assert_eq!(device.mapped_bytes(), 0);
}
