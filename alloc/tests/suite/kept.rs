//! Kept arenas: the pages of a captured graph serve no other request, also under memory pressure, until the
//! arena is closed and all streams have passed an event.

use crate::common::gpu::Call;
use crate::common::{Fake, PAGE, allocator, key, ordered};
use dormouse_alloc::{
    ARENAS_MAX, AllocError, Allocator, ArenaId, Block, Config, Freed, OutOfMemory, Request,
};
use dormouse_timeline::Timeline;
use std::sync::Arc;

/// The streams of these tests: a graph is captured on one, replayed on another.
const CAPTURED: usize = 0;
const REPLAYS: usize = 1;

fn bytes(pages: usize) -> u64 {
    (pages * PAGE) as u64
}

fn request(arena: Option<ArenaId>, stream: usize, pages: usize) -> Request {
    Request { arena, stream: key(stream), ..Request::new(pages * PAGE) }
}

fn block(allocator: &Allocator<Fake>, arena: Option<ArenaId>, pages: usize) -> Block {
    let block = allocator.allocate(&request(arena, CAPTURED, pages)).unwrap();
    allocator.check().unwrap();
    block
}

fn free(allocator: &Allocator<Fake>, block: &Block) {
    assert_eq!(allocator.free(block.range.start, key(CAPTURED)).unwrap(), Freed::Done);
    allocator.check().unwrap();
}

fn out_of_memory(outcome: Result<Block, AllocError>) -> Box<OutOfMemory> {
    match outcome {
        Err(AllocError::OutOfMemory(report)) => report,
        other => panic!("{other:?}"),
    }
}

/// Returns an arena with a free range of this number of pages, and the range.
fn kept(allocator: &Allocator<Fake>, pages: usize) -> (ArenaId, Block) {
    let arena = allocator.arena_create_kept().unwrap();
    let freed = block(allocator, Some(arena), pages);
    free(allocator, &freed);
    (arena, freed)
}

#[test]
fn free_pages_of_a_kept_arena_serve_only_it() {
    let (device, allocator) = ordered(512, 20, 2);
    let (arena, freed) = kept(&allocator, 12);
    assert_eq!(allocator.trim(u64::MAX), 0);
    assert_ne!(block(&allocator, None, 4).range.start, freed.range.start);
    // Neither a request that lacks memory, nor a wake, nor a lower budget gets them.
    let report = out_of_memory(allocator.allocate(&request(None, CAPTURED, 5)));
    assert_eq!((report.kept_bytes, report.stats.cached_bytes.current), (bytes(12), bytes(12)));
    assert_eq!((report.largest_cached_bytes, report.tried.trimmed_bytes), (0, 0));
    let text = report.to_string();
    assert!(text.contains("of the cached, 48.0 KiB kept for graphs"), "{text}");
    assert!(text.lines().count() <= 12, "{text}");
    let no_room = allocator.reserve_awake(bytes(5)).unwrap_err();
    assert!(matches!(no_room, AllocError::NoRoom { .. }), "{no_room}");
    allocator.set_budget(bytes(10)).unwrap();
    assert_eq!(device.mapped_bytes(), bytes(16));
    allocator.set_budget(bytes(20)).unwrap();
    assert_eq!(block(&allocator, Some(arena), 12).range, freed.range);
    assert_eq!(device.violations(), Vec::<String>::new());
}

/// Idle pages leave for a wake even where there is room, but not these.
#[test]
fn a_wake_does_not_reuse_its_pages() {
    const MIB: usize = 1 << 20;
    let (device, allocator) = allocator(64 * MIB / PAGE, 64 * MIB / PAGE);
    let arena = allocator.arena_create_kept().unwrap();
    let freed = Request { arena: Some(arena), ..Request::new(8 * MIB) };
    let freed = allocator.allocate(&freed).unwrap();
    let _ = allocator.free(freed.range.start, 0).unwrap();
    allocator.reserve_awake(2 * MIB as u64).unwrap();
    assert_eq!(device.mapped_bytes(), 8 * MIB as u64);
    // Nothing is in streams here: closed, they are free at once.
    allocator.arena_close(arena);
    allocator.reserve_awake(2 * MIB as u64).unwrap();
    assert_eq!(device.mapped_bytes(), 0);
    allocator.check().unwrap();
}

#[test]
fn moving_passes_its_pages_over() {
    let (device, _) = ordered(512, 100, 2);
    let config =
        Config { segment_bytes: 16 * PAGE, moves_pages: true, ..Config::new(PAGE, bytes(100)) };
    let timeline = Arc::new(Timeline::new(64));
    let allocator = Allocator::new(Arc::clone(&device), config, timeline).unwrap();
    for stream in [CAPTURED, REPLAYS] {
        allocator.register_stream(key(stream), stream).unwrap();
    }
    let (_, freed) = kept(&allocator, 12);
    let ordinary = block(&allocator, None, 8);
    free(&allocator, &ordinary);
    let unmaps = allocator.stats().unmaps;
    // More than was ever in use is wanted: 8 pages can move, 12 stay where they are.
    let longer = block(&allocator, None, 24);
    assert_eq!(allocator.stats().unmaps - unmaps, 1);
    assert_eq!(device.mapped_bytes(), bytes(12 + 24));
    assert!(device.touch(freed.range).0);
    assert!(device.touch(longer.range).0);
}

/// The streams of replays are unknown, so the arena waits for all streams.
#[test]
fn a_closed_kept_arena_frees_its_pages_after_every_stream() {
    let (device, allocator) = ordered(512, 20, 3);
    let (arena, freed) = kept(&allocator, 12);
    device.gpu().launch(REPLAYS, freed.range);
    allocator.arena_close(arena);
    allocator.check().unwrap();
    assert_eq!(device.gpu().calls(Call::Synchronize), 0, "closing does not wait");
    let refused = allocator.allocate(&request(Some(arena), CAPTURED, 1)).unwrap_err();
    assert!(matches!(refused, AllocError::UnknownArena { .. }), "{refused}");
    let other = block(&allocator, None, 8);
    assert!(other.range.start >= freed.range.end() || other.range.end() <= freed.range.start);
    assert_eq!(allocator.stats().arenas.current, 1);
    // The rest is not enough: now the streams are waited for.
    let longer = block(&allocator, None, 12);
    assert_eq!(device.gpu().queued(REPLAYS), 0);
    assert_eq!(longer.range, freed.range, "its segment serves the stream it was used on");
    let stats = allocator.stats();
    assert_eq!((stats.arenas.current, stats.ooms), (0, 0));
    assert_eq!(device.mapped_bytes(), bytes(20));
}

#[test]
fn completed_uses_at_the_close_need_no_wait() {
    let (device, allocator) = ordered(512, 20, 2);
    let (arena, freed) = kept(&allocator, 12);
    device.gpu().launch(REPLAYS, freed.range);
    device.gpu().drain();
    allocator.arena_close(arena);
    assert_eq!(allocator.trim(u64::MAX), bytes(12));
    assert_eq!(device.gpu().calls(Call::Synchronize), 0);
    let stats = allocator.stats();
    assert_eq!((stats.arenas.current, stats.segments.current, device.mapped_bytes()), (0, 0, 0));
}

#[test]
fn a_block_that_outlives_its_arena_returns_when_it_is_freed() {
    let (device, allocator) = ordered(512, 40, 2);
    let arena = allocator.arena_create_kept().unwrap();
    let (held, freed) = (block(&allocator, Some(arena), 3), block(&allocator, Some(arena), 9));
    free(&allocator, &freed);
    allocator.arena_close(arena);
    assert_eq!(allocator.trim(u64::MAX), bytes(9));
    assert_eq!(allocator.lookup(held.range.start).map(|it| it.range), Some(held.range));
    free(&allocator, &held);
    assert_eq!(allocator.stats().arenas.current, 0);
    assert_eq!(allocator.trim(u64::MAX), bytes(3));
    assert_eq!(device.mapped_bytes(), 0);
}

/// What was in use when it was closed counts as room once the streams are through.
#[test]
fn frees_after_the_close_cause_no_refusal() {
    let (device, allocator) = ordered(512, 20, 2);
    let arena = allocator.arena_create_kept().unwrap();
    let held = block(&allocator, Some(arena), 12);
    device.gpu().launch(REPLAYS, held.range);
    allocator.arena_close(arena);
    free(&allocator, &held);
    assert!(allocator.allocate(&request(None, REPLAYS, 20)).is_ok());
    assert_eq!(allocator.stats().ooms, 0);
}

/// While a stream is being captured it takes no event: the arena of an older graph stays until it
/// does, and a block freed then with uses is pending.
#[test]
fn releases_during_a_capture_wait_for_its_end() {
    let (device, allocator) = ordered(512, 20, 2);
    let (arena, _) = kept(&allocator, 6);
    let used = block(&allocator, None, 4);
    device.gpu().launch(REPLAYS, used.range);
    allocator.record_stream(used.range.start, key(REPLAYS)).unwrap();
    device.gpu().set_captured(CAPTURED, true);
    device.gpu().set_captured(REPLAYS, true);
    free(&allocator, &used);
    allocator.arena_close(arena);
    device.gpu().drain();
    let report = out_of_memory(allocator.allocate(&request(None, REPLAYS, 11)));
    assert_eq!((report.kept_bytes, report.stats.pending_bytes.current), (bytes(6), bytes(4)));
    device.gpu().set_captured(CAPTURED, false);
    device.gpu().set_captured(REPLAYS, false);
    assert!(allocator.allocate(&request(None, REPLAYS, 20)).is_ok());
    assert_eq!(allocator.stats().arenas.current, 0);
}

/// Work queued on the stream may still use a spare segment, and the graph is replayed on another.
#[test]
fn a_kept_arena_takes_over_no_pages() {
    let (device, allocator) = ordered(512, 40, 2);
    let first = allocator.arena_create().unwrap();
    let used = block(&allocator, Some(first), 10);
    device.gpu().launch(CAPTURED, used.range);
    free(&allocator, &used);
    allocator.arena_close(first);
    let arena = allocator.arena_create_kept().unwrap();
    assert_ne!(block(&allocator, Some(arena), 10).range, used.range);
    let ordinary = allocator.arena_create().unwrap();
    assert_eq!(block(&allocator, Some(ordinary), 10).range, used.range);
}

#[test]
fn blocks_of_a_kept_arena_cannot_be_claimed() {
    let (_, allocator) = ordered(512, 40, 2);
    let arena = allocator.arena_create_kept().unwrap();
    let held = block(&allocator, Some(arena), 3);
    let refused = allocator.claim(held.range.start, 7).unwrap_err();
    assert!(refused.to_string().contains("an arena that keeps its pages"), "{refused}");
    allocator.check().unwrap();
    // Once the graph is gone, it is a block like any other.
    allocator.arena_close(arena);
    allocator.trim(u64::MAX);
    assert!(allocator.claim(held.range.start, 7).is_ok());
}

#[test]
fn an_empty_arena_and_its_id_end_at_the_close() {
    let (_, allocator) = ordered(512, 40, 2);
    let first = allocator.arena_create_kept().unwrap();
    allocator.arena_close(first);
    assert_eq!(allocator.stats().arenas.current, 0);
    // The next arena has the slot. The closed one stays closed.
    let (second, freed) = kept(&allocator, 5);
    allocator.arena_close(first);
    assert_eq!(allocator.trim(u64::MAX), 0);
    assert_eq!(block(&allocator, Some(second), 5).range, freed.range);
    let arenas = (1..ARENAS_MAX).map(|_| allocator.arena_create_kept()).collect::<Vec<_>>();
    assert!(arenas.iter().all(Result::is_ok));
    assert!(matches!(allocator.arena_create_kept(), Err(AllocError::TooManyArenas { .. })));
}
