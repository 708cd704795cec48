//! Streams on a stream-ordered device: who may have what, and when; one case each, in words.

use crate::common::gpu::Call;
use crate::common::{Fake, PAGE, allocator, key, ordered, with_contents};
use dormouse_alloc::{
    AllocError, Allocator, ArenaId, Block, Config, Freed, OutOfMemory, PENDING_ASKED_FROM, Reclaim,
    Reclaimed, Request, STREAMS_MAX,
};
use dormouse_device::{AddressRange, Fill, Operation};
use std::sync::{Arc, Mutex, Weak};

fn bytes(pages: usize) -> u64 {
    (pages * PAGE) as u64
}

fn request(stream: usize, pages: usize) -> Request {
    Request { stream: key(stream), ..Request::new(pages * PAGE) }
}

/// A block for `stream`, which must suit it, with a kernel of that stream queued on it.
fn busy_block(device: &Fake, allocator: &Allocator<Fake>, stream: usize, pages: usize) -> Block {
    in_arena(device, allocator, None, stream, pages)
}

fn in_arena(
    device: &Fake,
    allocator: &Allocator<Fake>,
    arena: Option<ArenaId>,
    stream: usize,
    pages: usize,
) -> Block {
    let request = Request { arena, ..request(stream, pages) };
    let block = allocator.allocate(&request).unwrap_or_else(|error| panic!("{error}"));
    device.gpu().must_suit(block.range, stream);
    device.gpu().launch(stream, block.range);
    allocator.check().unwrap();
    block
}

fn free(allocator: &Allocator<Fake>, block: &Block, stream: usize) {
    assert_eq!(allocator.free(block.range.start, key(stream)).unwrap(), Freed::Done);
    allocator.check().unwrap();
}

fn out_of_memory(allocator: &Allocator<Fake>, request: &Request) -> Box<OutOfMemory> {
    match allocator.allocate(request) {
        Err(AllocError::OutOfMemory(report)) => {
            allocator.check().unwrap();
            assert!(report.to_string().lines().count() <= 12, "{report}");
            report
        }
        other => panic!("{other:?}"),
    }
}

/// Queues work that uses none of our memory.
fn keep_busy(device: &Fake, stream: usize) {
    device.gpu().launch(stream, AddressRange::default());
}

/// Waits of the GPU so far.
fn waits(device: &Fake) -> u64 {
    device.gpu().calls(Call::Synchronize)
}

#[test]
fn a_stream_reuses_its_own_pages_without_an_event() {
    let (device, allocator) = ordered(512, 100, 2);
    let first = busy_block(&device, &allocator, 1, 5);
    free(&allocator, &first, 1);
    let again = busy_block(&device, &allocator, 1, 5);
    assert_eq!(again.range, first.range);
    free(&allocator, &again, 1);
    // Another stream has pages of its own, while the budget has room for both.
    let other = busy_block(&device, &allocator, 0, 5);
    assert_ne!(other.range.start, first.range.start);
    assert_eq!(allocator.stats().mapped_bytes.current, bytes(10));
    for call in [Call::Record, Call::Query, Call::Synchronize] {
        assert_eq!(device.gpu().calls(call), 0);
    }
}

#[test]
fn a_block_is_pending_until_all_other_streams_are_done() {
    let (device, allocator) = ordered(512, 100, 3);
    let block = busy_block(&device, &allocator, 0, 5);
    for other in [1, 2, 0] {
        allocator.record_stream(block.range.start + PAGE, key(other)).unwrap();
        device.gpu().launch(other, block.range);
    }
    free(&allocator, &block, 0);
    assert_eq!(device.gpu().calls(Call::Record), 2, "one for each other stream");
    assert_eq!(allocator.lookup(block.range.start), None);
    assert!(allocator.blocks().is_empty());
    assert!(matches!(allocator.info(block.id), Err(AllocError::StaleBlock { .. })));
    let twice = allocator.free(block.range.start, key(0)).unwrap_err();
    assert!(matches!(twice, AllocError::NotABlock { .. }), "{twice}");
    let stats = allocator.stats();
    assert_eq!((stats.pending_bytes.current, stats.pending_blocks.current), (bytes(5), 1));
    assert_eq!((stats.allocated_bytes.current, stats.active_bytes.current), (0, bytes(5)));
    assert_eq!((stats.cached_bytes.current, stats.allocations.current), (0, 0));
    // Its own stream being done is not enough, nor is one of two.
    for done in [0, 2] {
        device.gpu().advance(done);
        let not_it = busy_block(&device, &allocator, 0, 5);
        assert_ne!(not_it.range.start, block.range.start);
    }
    device.gpu().advance(1);
    let again = busy_block(&device, &allocator, 0, 5);
    assert_eq!(again.range.start, block.range.start);
    assert_eq!(allocator.stats().pending_blocks.current, 0);
    assert_eq!(waits(&device), 0);
}

#[test]
fn a_free_on_another_stream_counts_as_its_use() {
    let (device, allocator) = ordered(512, 100, 2);
    let block = busy_block(&device, &allocator, 0, 5);
    device.gpu().launch(1, block.range);
    free(&allocator, &block, 1);
    assert_eq!(allocator.stats().pending_bytes.current, bytes(5));
    let not_it = busy_block(&device, &allocator, 0, 5);
    assert_ne!(not_it.range.start, block.range.start);
    device.gpu().advance(1);
    assert_eq!(busy_block(&device, &allocator, 0, 5).range.start, block.range.start);
}

/// Sixteen streams use one buffer in turn: what one leaves serves the next, with no wait where
/// the streams are done, and with just the waits it takes where they are not.
#[test]
fn nothing_is_stranded_with_a_stream() {
    for is_busy in [false, true] {
        let (device, allocator) = ordered(2048, 10, 16);
        for stream in 0..16 {
            let block = busy_block(&device, &allocator, stream, 10);
            free(&allocator, &block, stream);
            if !is_busy {
                device.gpu().drain();
            }
        }
        let stats = allocator.stats();
        assert_eq!((stats.cross_stream_trims, stats.ooms), (15, 0));
        assert_eq!(stats.stream_waits, if is_busy { 15 } else { 0 });
        assert_eq!(waits(&device), stats.stream_waits);
        assert_eq!(stats.mapped_bytes.peak, bytes(10));
    }
}

#[test]
fn quiet_streams_are_trimmed_first_and_only_as_needed() {
    let (device, allocator) = ordered(512, 40, 3);
    let blocks: Vec<Block> =
        (0..2).map(|stream| busy_block(&device, &allocator, stream, 20)).collect();
    device.gpu().drain();
    free(&allocator, &blocks[1], 1);
    // All streams are found idle behind this free.
    assert_eq!(allocator.trim(bytes(1)), bytes(1));
    device.gpu().launch(0, blocks[0].range);
    free(&allocator, &blocks[0], 0);
    // Stream 0 is busy, so it is 1 that gives.
    busy_block(&device, &allocator, 2, 8);
    assert_eq!(waits(&device), 0);
    let stats = allocator.stats();
    assert_eq!((stats.cached_bytes.current, stats.cross_stream_trims), (bytes(32), 1));
    // What is busy is still there for its own stream.
    assert_eq!(busy_block(&device, &allocator, 0, 20).range, blocks[0].range);
}

type Step = Box<dyn FnMut() -> Reclaimed + Send>;

/// A `Reclaim` that does as the test says.
struct Script(Mutex<Step>);

impl std::fmt::Debug for Script {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Script")
    }
}

impl Reclaim for Script {
    fn reclaim(&self, _: u64) -> Reclaimed {
        (self.0.lock().unwrap())()
    }
}

fn install(
    allocator: &Allocator<Fake>,
    step: impl FnMut() -> Reclaimed + Send + 'static,
) -> Arc<Script> {
    let script = Arc::new(Script(Mutex::new(Box::new(step))));
    let weak: Weak<Script> = Arc::downgrade(&script);
    allocator.set_reclaim(weak);
    script
}

/// The order of the ladder: what is over, what is quiet, `Reclaim`, and only then a wait.
#[test]
fn dormant_memory_sleeps_before_a_request_waits() {
    let (device, allocator) = ordered(512, 40, 4);
    let over = busy_block(&device, &allocator, 0, 5);
    free(&allocator, &over, 1);
    let quiet = busy_block(&device, &allocator, 3, 5);
    free(&allocator, &quiet, 3);
    let [busy, pending, sleeper] =
        [1, 1, 2].map(|stream| busy_block(&device, &allocator, stream, 10));
    device.gpu().drain();
    // All streams are found idle behind these frees.
    assert_eq!(allocator.trim(bytes(1)), bytes(1));
    device.gpu().launch(1, busy.range);
    device.gpu().launch(2, pending.range);
    free(&allocator, &busy, 1);
    free(&allocator, &pending, 2);
    let id = allocator.claim(sleeper.range.start, 1).unwrap().id;
    let (seen, weak, fake) =
        (Arc::new(Mutex::new(Vec::new())), Arc::downgrade(&allocator), Arc::clone(&device));
    let log = Arc::clone(&seen);
    let _script = install(&allocator, move || {
        let allocator = weak.upgrade().unwrap();
        log.lock().unwrap().push((waits(&fake), allocator.stats().pending_bytes.current));
        if allocator.info(id).unwrap().asleep {
            return Reclaimed::default();
        }
        fake.take_pages(sleeper.range);
        allocator.set_asleep(id).unwrap();
        Reclaimed { freed_bytes: bytes(10), in_flight_bytes: 0 }
    });
    busy_block(&device, &allocator, 0, 10);
    assert!(seen.lock().unwrap().is_empty(), "what was over and what was quiet was enough");
    busy_block(&device, &allocator, 0, 10);
    assert_eq!(*seen.lock().unwrap(), [(0, bytes(10))]);
    assert_eq!(waits(&device), 0, "memory that slept made a wait needless");
    busy_block(&device, &allocator, 0, 10);
    assert_eq!(seen.lock().unwrap().len(), 2);
    assert_eq!(waits(&device), 3, "for streams 0, 1 and 2: the cached pages of 1 are enough");
    assert_eq!(allocator.stats().pending_bytes.current, bytes(10));
    assert_eq!(allocator.stats().mapped_bytes.current, bytes(40));
}

#[test]
fn waiting_is_for_the_oldest_pending_blocks_and_only_for_enough() {
    let (device, allocator) = ordered(512, 40, 3);
    let blocks: Vec<Block> = (0..4).map(|_| busy_block(&device, &allocator, 0, 10)).collect();
    device.gpu().drain();
    for block in &blocks {
        device.gpu().launch(1, block.range);
        free(&allocator, block, 1);
    }
    // Two of them, one after the other, and the stream they are cached for is quiet.
    busy_block(&device, &allocator, 2, 20);
    assert_eq!((waits(&device), device.gpu().queued(1)), (2, 2));
    assert_eq!(allocator.stats().pending_bytes.current, bytes(20));
    // Its own stream has the next one as it is.
    assert_eq!(busy_block(&device, &allocator, 0, 10).range, blocks[2].range);
    assert_eq!((waits(&device), allocator.stats().stream_waits), (3, 3));
    // Busy pages that are enough are waited for, on all streams; what is pending beside them is left alone.
    let (busy, pending) = (blocks[2], blocks[3]);
    free(&allocator, &busy, 0);
    busy_block(&device, &allocator, 2, 10);
    assert_eq!((waits(&device), device.gpu().queued(1)), (6, 0));
    assert_eq!(allocator.stats().pending_bytes.current, pending.range.bytes as u64);
}

/// Pages in two halves each, all of them pending: the first halves are waited for before the others.
fn pending_halves(pages: usize) -> (Arc<Fake>, Arc<Allocator<Fake>>) {
    let config = Config { segment_bytes: 16 * PAGE, ..Config::new(PAGE / 2, bytes(pages)) };
    let (device, allocator) = with_contents(4 * pages, config, 3);
    let half = Request { stream: key(0), ..Request::new(PAGE / 2) };
    let halves: Vec<Block> = (0..2 * pages).map(|_| allocator.allocate(&half).unwrap()).collect();
    for first in [0, 1] {
        for block in halves.iter().skip(first).step_by(2) {
            device.gpu().launch(1, block.range);
            assert_eq!(allocator.free(block.range.start, key(1)).unwrap(), Freed::Done);
        }
    }
    (device, allocator)
}

/// No page is free before all first halves were waited for: waiting does not end before that, as
/// long as it gives something. Nor does it go on to the end.
#[test]
fn waiting_goes_on_until_a_page_is_whole() {
    let (device, allocator) = pending_halves(300);
    busy_block(&device, &allocator, 2, 1);
    assert!(device.gpu().queued(1) > 0, "all of the stream was waited for");
    let (device, allocator) = pending_halves(300);
    allocator.reserve_awake(bytes(1)).unwrap();
    assert!(device.gpu().queued(1) > 0, "all of the stream was waited for");
    allocator.check().unwrap();
}

/// The stream that uses a block may itself be waiting for another one.
#[test]
fn a_wait_ends_when_streams_depend_on_each_other() {
    let (device, allocator) = ordered(512, 10, 3);
    let block = busy_block(&device, &allocator, 0, 10);
    let after = device.gpu().end(0);
    device.gpu().wait(1, after);
    device.gpu().launch(1, block.range);
    free(&allocator, &block, 1);
    busy_block(&device, &allocator, 2, 10);
    assert_eq!(allocator.stats().ooms, 0);
}

#[test]
fn the_report_lists_pending_bytes_and_the_steps_tried() {
    let (device, allocator) = ordered(512, 20, 2);
    let held = busy_block(&device, &allocator, 0, 4);
    let stuck = busy_block(&device, &allocator, 0, 10);
    device.gpu().set_captured(1, true);
    free(&allocator, &stuck, 1);
    let back = busy_block(&device, &allocator, 0, 6);
    device.gpu().drain();
    device.gpu().set_captured(1, false);
    device.gpu().launch(1, back.range);
    free(&allocator, &back, 1);
    let report = out_of_memory(&allocator, &request(0, 17));
    assert_eq!(report.tried.collected_bytes, bytes(16));
    assert_eq!((report.tried.stream_waits, report.tried.trimmed_bytes), (1, bytes(16)));
    assert_eq!((report.awake_bytes(), report.stats.pending_bytes.current), (bytes(4), 0));
    assert!(report.to_string().contains("wait for streams, 1 times"), "{report}");
    assert!(allocator.lookup(held.range.start).is_some());
}

#[test]
fn streams_are_known_once_and_up_to_a_limit() {
    let (device, allocator) = ordered(512, 100, 1);
    let block = busy_block(&device, &allocator, 0, 1);
    let before = allocator.stats();
    for refused in [
        allocator.allocate(&request(1, 1)).map(drop),
        allocator.free(block.range.start, key(1)).map(drop),
        allocator.record_stream(block.range.start, key(1)),
    ] {
        let unknown = matches!(refused, Err(AllocError::UnknownStream { key: it }) if it == key(1));
        assert!(unknown, "{refused:?}");
    }
    assert_eq!(allocator.stats(), before);
    let nowhere = allocator.record_stream(block.range.end(), key(0)).unwrap_err();
    assert!(matches!(nowhere, AllocError::NotABlock { .. }), "{nowhere}");
    // A key that is known keeps its stream.
    allocator.register_stream(key(0), 5).unwrap();
    for stream in 1..STREAMS_MAX as usize {
        device.gpu().add_stream();
        allocator.register_stream(key(stream), stream).unwrap();
    }
    let last = STREAMS_MAX as usize;
    let many = allocator.register_stream(key(last), last).unwrap_err();
    assert!(matches!(many, AllocError::TooManyStreams { limit: STREAMS_MAX }), "{many}");
    allocator.register_stream(key(0), 5).unwrap();
    let all = busy_block(&device, &allocator, last - 1, 1);
    device.gpu().launch(last - 1, block.range);
    device.gpu().launch(0, all.range);
    free(&allocator, &block, last - 1);
    free(&allocator, &all, 0);
    device.gpu().advance(0);
    device.gpu().advance(0);
    let again = busy_block(&device, &allocator, last - 1, 1);
    assert_eq!(again.range, all.range);
    // The other is in use by the last stream, and by no other.
    let fresh = busy_block(&device, &allocator, 0, 1);
    assert_ne!(fresh.range, block.range);
    device.gpu().drain();
    assert_eq!(busy_block(&device, &allocator, 0, 2).range.bytes, 2 * PAGE);
    let back = busy_block(&device, &allocator, 0, 1);
    assert_eq!(back.range, block.range);
    device.gpu().drain();
    free(&allocator, &again, last - 1);
    allocator.trim(u64::MAX);
    assert_eq!(allocator.stats().mapped_bytes.current, bytes(4));
}

/// Nothing changes where memory is not used in stream order: every key is the calling thread.
#[test]
fn devices_without_stream_order_ignore_streams() {
    let (device, allocator) = allocator(512, 100);
    allocator.register_stream(7, 0).unwrap();
    let block = allocator.allocate(&Request { stream: 8, ..Request::new(PAGE) }).unwrap();
    allocator.record_stream(block.range.start, 9).unwrap();
    assert_eq!(allocator.lookup(block.range.start).unwrap().stream, 8);
    assert_eq!(allocator.free(block.range.start, 10).unwrap(), Freed::Done);
    let again = allocator.allocate(&Request { stream: 11, ..Request::new(PAGE) }).unwrap();
    assert_eq!(again.range, block.range);
    assert_eq!(device.gpu().calls(Call::Record), 0);
}

/// A closed arena's pages go to arenas of the same stream as they are, to others only unmapped.
#[test]
fn spare_segments_keep_to_their_stream() {
    let (device, allocator) = ordered(512, 40, 2);
    let first = allocator.arena_create().unwrap();
    let blocks: Vec<Block> =
        (0..2).map(|stream| in_arena(&device, &allocator, Some(first), stream, 16)).collect();
    free(&allocator, &blocks[0], 0);
    free(&allocator, &blocks[1], 1);
    allocator.arena_close(first);
    allocator.check().unwrap();
    assert_eq!(allocator.stats().arenas.current, 0);
    let second = allocator.arena_create().unwrap();
    let own = in_arena(&device, &allocator, Some(second), 1, 16);
    assert_eq!((own.range, own.zeroed), (blocks[1].range, false));
    // Stream 0's pages are spare and busy: under pressure stream 1 has to wait for them, and for its own work, which
    // may read them.
    let more = in_arena(&device, &allocator, Some(second), 1, 16);
    assert_eq!(waits(&device), 2);
    assert_ne!(more.range.start, own.range.start);
    free(&allocator, &own, 1);
    free(&allocator, &more, 1);
    allocator.arena_close(second);
    allocator.trim(u64::MAX);
    allocator.check().unwrap();
    assert_eq!((device.mapped_bytes(), allocator.stats().segments.current), (0, 0));
}

#[test]
fn a_deferred_free_applies_to_all_streams_of_the_block() {
    for finish in [Allocator::finish_free, Allocator::unclaim] {
        let (device, allocator) = ordered(512, 100, 3);
        let block = busy_block(&device, &allocator, 0, 5);
        allocator.claim(block.range.start, 1).unwrap();
        allocator.record_stream(block.range.start, key(1)).unwrap();
        device.gpu().launch(1, block.range);
        device.gpu().launch(2, block.range);
        assert_eq!(allocator.free(block.range.start, key(2)).unwrap(), Freed::Claimed(1));
        assert!(
            allocator.record_stream(block.range.start, key(1)).is_err(),
            "its free is deferred"
        );
        assert_eq!(device.gpu().calls(Call::Record), 0);
        finish(&allocator, block.id).unwrap();
        assert_eq!(allocator.stats().pending_bytes.current, bytes(5));
        for stream in [1, 2] {
            assert_ne!(busy_block(&device, &allocator, 0, 5).range, block.range);
            device.gpu().advance(stream);
        }
        assert_eq!(busy_block(&device, &allocator, 0, 5).range, block.range);
    }
}

#[test]
fn uses_outlast_a_sleep_and_end_with_it_where_the_block_dies_asleep() {
    let (device, allocator) = ordered(512, 100, 2);
    let sleep = |block: &Block| {
        allocator.claim(block.range.start, 1).unwrap();
        allocator.record_stream(block.range.start, key(1)).unwrap();
        device.gpu().drain();
        device.take_pages(block.range);
        allocator.set_asleep(block.id).unwrap();
        allocator.check().unwrap();
    };
    let block = busy_block(&device, &allocator, 0, 5);
    sleep(&block);
    allocator.reserve_awake(bytes(5)).unwrap();
    device.bring_pages(block.range);
    allocator.set_awake(block.id).unwrap();
    allocator.unclaim(block.id).unwrap();
    // Recorded once, as torch does it: the use may come after the sleep.
    device.gpu().launch(1, block.range);
    free(&allocator, &block, 0);
    assert_eq!(allocator.stats().pending_bytes.current, bytes(5));
    device.gpu().drain();
    let again = busy_block(&device, &allocator, 0, 5);
    assert_eq!(again.range, block.range);
    sleep(&again);
    assert_eq!(allocator.free(again.range.start, key(0)).unwrap(), Freed::Claimed(1));
    allocator.finish_free(again.id).unwrap();
    assert_eq!(allocator.stats().pending_bytes.current, 0, "it has no pages to protect");
    assert_eq!((device.mapped_bytes(), allocator.stats().segments.current), (0, 0));
}

#[test]
fn a_trim_waits_only_if_quiet_ranges_do_not_suffice() {
    let (device, allocator) = ordered(512, 100, 3);
    let blocks: Vec<Block> =
        (0..3).map(|stream| busy_block(&device, &allocator, stream, 10)).collect();
    device.gpu().drain();
    free(&allocator, &blocks[1], 1);
    // All streams are found idle behind this free.
    assert_eq!(allocator.trim(bytes(1)), bytes(1));
    device.gpu().launch(0, blocks[0].range);
    device.gpu().launch(0, blocks[2].range);
    free(&allocator, &blocks[0], 0);
    free(&allocator, &blocks[2], 0);
    assert_eq!(allocator.trim(bytes(9)), bytes(9));
    assert_eq!(waits(&device), 0);
    assert_eq!(allocator.trim(bytes(10)), bytes(10));
    assert!(waits(&device) > 0);
    assert_eq!(allocator.trim(u64::MAX), bytes(10));
    assert_eq!((device.mapped_bytes(), allocator.stats().pending_bytes.current), (0, 0));
    assert_eq!(allocator.trim(u64::MAX), 0);
}

#[test]
fn a_trim_of_0_bytes_collects_completed_blocks() {
    let (device, allocator) = ordered(512, 100, 2);
    let block = busy_block(&device, &allocator, 0, 10);
    free(&allocator, &block, 1);
    keep_busy(&device, 1);
    assert_eq!(allocator.trim(0), 0);
    let stats = allocator.stats();
    assert_eq!((stats.pending_bytes.current, stats.cached_bytes.current), (0, bytes(10)));
    device.gpu().drain();
}

#[test]
fn a_lowered_budget_and_a_wake_wait_for_busy_streams() {
    let (device, allocator) = ordered(512, 40, 2);
    let blocks: Vec<Block> =
        (0..2).map(|stream| busy_block(&device, &allocator, stream, 20)).collect();
    device.gpu().launch(0, blocks[1].range);
    free(&allocator, &blocks[0], 0);
    free(&allocator, &blocks[1], 0);
    allocator.set_budget(bytes(30)).unwrap();
    assert_eq!(device.mapped_bytes(), bytes(30));
    assert!(waits(&device) > 0);
    keep_busy(&device, 0);
    keep_busy(&device, 1);
    let before = waits(&device);
    allocator.reserve_awake(bytes(30)).unwrap();
    assert_eq!((device.mapped_bytes(), allocator.stats().staged_bytes.current), (0, bytes(30)));
    assert_eq!(waits(&device), before, "what was free before is known to be quiet");
    assert!(matches!(allocator.reserve_awake(bytes(1)), Err(AllocError::NoRoom { .. })));
    allocator.check().unwrap();
}

#[test]
fn a_dropped_allocator_waits_and_gives_its_pages_back() {
    let (device, allocator) = ordered(512, 40, 2);
    let blocks: Vec<Block> =
        (0..2).map(|stream| busy_block(&device, &allocator, stream, 20)).collect();
    free(&allocator, &blocks[0], 0);
    free(&allocator, &blocks[1], 0);
    drop(allocator);
    assert_eq!(device.mapped_bytes(), 0);
    assert_eq!(device.violations(), Vec::<String>::new());
}

/// Requests that the cache meets ask after pending blocks too, once these are many.
#[test]
fn pending_blocks_do_not_pile_up() {
    let (device, allocator) = ordered(4096, 4096, 2);
    let cached = busy_block(&device, &allocator, 0, 1);
    free(&allocator, &cached, 0);
    let blocks: Vec<Block> =
        (0..PENDING_ASKED_FROM).map(|_| busy_block(&device, &allocator, 0, 2)).collect();
    device.gpu().drain();
    for block in &blocks[1..] {
        free(&allocator, block, 1);
    }
    let hit = busy_block(&device, &allocator, 0, 1);
    assert_eq!(device.gpu().calls(Call::Query), 0, "few, and the cache has it");
    free(&allocator, &hit, 0);
    free(&allocator, &blocks[0], 1);
    let hit = busy_block(&device, &allocator, 0, 1);
    assert_eq!(allocator.stats().pending_blocks.current, 0);
    free(&allocator, &hit, 0);
}

/// A stream found busy is asked about once, however many blocks wait for it.
#[test]
fn a_collection_queries_one_busy_event_per_stream() {
    let (device, allocator) = ordered(4096, 4096, 2);
    let blocks: Vec<Block> = (0..50).map(|_| busy_block(&device, &allocator, 0, 2)).collect();
    for block in &blocks {
        device.gpu().launch(1, block.range);
        free(&allocator, block, 1);
    }
    for _ in 0..10 {
        device.gpu().advance(1);
    }
    allocator.trim(0);
    assert_eq!(device.gpu().calls(Call::Query), 11);
    assert_eq!(allocator.stats().pending_blocks.current, 40);
}

/// Two arenas and two streams are four pools; a fifth, made for a request that fails, is none.
#[test]
fn pools_come_and_go_with_their_segments() {
    let (device, allocator) = ordered(4096, 100, 3);
    let arena = allocator.arena_create().unwrap();
    let blocks: Vec<Block> =
        (0..2).map(|stream| in_arena(&device, &allocator, Some(arena), stream, 8)).collect();
    out_of_memory(&allocator, &Request { arena: Some(arena), ..request(2, 101) });
    free(&allocator, &blocks[0], 0);
    allocator.arena_close(arena);
    assert_eq!(allocator.stats().arenas.current, 1, "a block of stream 1 is in it");
    allocator.check().unwrap();
    // It goes by way of another stream: pending, and in the arena until it is over.
    device.gpu().launch(2, blocks[1].range);
    free(&allocator, &blocks[1], 2);
    assert_eq!(allocator.stats().arenas.current, 1);
    device.gpu().drain();
    allocator.trim(0);
    assert_eq!(allocator.stats().arenas.current, 0);
    allocator.check().unwrap();
    let next = allocator.arena_create().unwrap();
    assert_ne!(next, arena);
    let spare = in_arena(&device, &allocator, Some(next), 1, 8);
    assert_eq!(spare.range, blocks[1].range);
}

/// No lock that frees need is held while the device is asked about events.
#[test]
fn frees_go_on_while_the_device_is_asked() {
    let (device, allocator) = ordered(512, 100, 3);
    let victims: Vec<usize> =
        (0..8).map(|_| busy_block(&device, &allocator, 2, 1).range.start).collect();
    let block = busy_block(&device, &allocator, 0, 40);
    let other = busy_block(&device, &allocator, 1, 40);
    let (shared, mut left) = (Arc::downgrade(&allocator), victims.into_iter());
    let (send, receive) = std::sync::mpsc::channel();
    device.set_hook(move |operation, _| {
        let (Some(allocator), Some(victim)) = (shared.upgrade(), left.next()) else { return };
        let (done, wait) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let freed = allocator.lookup(victim).is_some()
                && allocator.free(victim, key(2)).is_ok()
                && allocator.check().is_ok();
            let _ = done.send(freed);
        });
        // Only a failure ever waits that long.
        let freed = wait.recv_timeout(std::time::Duration::from_secs(20));
        let _ = send.send((operation, freed));
    });
    device.gpu().launch(1, block.range);
    free(&allocator, &block, 1);
    free(&allocator, &other, 1);
    assert!(allocator.trim(u64::MAX) >= bytes(80));
    device.clear_hook();
    let results: Vec<_> = receive.iter().collect();
    assert!(results.iter().all(|(_, freed)| *freed == Ok(true)), "{results:?}");
    let events = results.iter().filter(|(operation, _)| *operation == Operation::Event).count();
    assert!(events >= 4, "{results:?}");
    allocator.check().unwrap();
}

/// A block freed during a trim was used after the events that the trim has seen complete.
#[test]
fn a_query_covers_only_ranges_taken_before_it() {
    let (device, allocator) = ordered(512, 100, 1);
    let early = busy_block(&device, &allocator, 0, 10);
    let late = busy_block(&device, &allocator, 0, 20);
    free(&allocator, &early, 0);
    device.gpu().drain();
    let (weak, gpu) = (Arc::downgrade(&allocator), Arc::downgrade(&device));
    device.set_hook(move |operation, _| {
        let (Some(allocator), Some(device)) = (weak.upgrade(), gpu.upgrade()) else { return };
        // Early is on its way out; its stream has been found quiet.
        if operation == Operation::Unmap && allocator.lookup(late.range.start).is_some() {
            device.gpu().launch(0, late.range);
            let _ = allocator.free(late.range.start, key(0)).unwrap();
        }
    });
    assert_eq!(allocator.trim(u64::MAX), bytes(30));
    device.clear_hook();
    assert_eq!(waits(&device), 1);
}

/// New pages serve the request that maps them, zeroed if requested.
#[test]
fn only_newly_mapped_blocks_are_zeroed() {
    let (device, allocator) = ordered(512, 10, 2);
    let zeroed = Request { fill: Fill::Zero, ..request(0, 10) };
    let block = allocator.allocate(&zeroed).unwrap();
    assert!(block.zeroed);
    free(&allocator, &block, 0);
    assert!(!allocator.allocate(&zeroed).unwrap().zeroed, "it is the cached one");
    free(&allocator, &block, 0);
    assert!(allocator.allocate(&Request { stream: key(1), ..zeroed }).unwrap().zeroed);
    assert_eq!(device.violations(), Vec::<String>::new());
}

#[test]
fn uses_end_returns_an_event_for_every_stream() {
    let (device, allocator) = ordered(64, 64, 3);
    let own = busy_block(&device, &allocator, 0, 2);
    let shared = busy_block(&device, &allocator, 1, 2);
    allocator.record_stream(shared.range.start, key(2)).unwrap();
    device.gpu().launch(2, shared.range);
    let ends = |blocks: &[Block]| {
        let ids: Vec<_> = blocks.iter().map(|block| block.id).collect();
        let ends = allocator.uses_end(&ids).unwrap().events;
        let mut ends: Vec<_> = ends.iter().map(|end| (end.stream, end.items)).collect();
        ends.sort_unstable();
        ends
    };
    assert_eq!(ends(&[own]), [(0, 1)]);
    assert_eq!(ends(&[shared]), [(1, 1), (2, 1)]);
    assert_eq!(ends(&[own, shared]), [(0, 1), (1, 1), (2, 1)]);
    device.gpu().set_captured(2, true);
    assert!(matches!(allocator.uses_end(&[shared.id]), Err(AllocError::Device(_))));
    assert_eq!(ends(&[own]), [(0, 1)], "another stream's is known all the same");
    device.gpu().set_captured(2, false);
    let _ = allocator.free(own.range.start, key(0)).unwrap();
    assert_eq!(ends(&[own]), [], "it is gone");
}
