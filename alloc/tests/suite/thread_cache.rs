//! Small blocks that are kept as they are when they are freed, step by step.

use crate::common::{Fake, PAGE, key, with_contents};
use dormouse_alloc::{AllocError, Allocator, Block, Config, Freed, Request, ThreadShard};
use dormouse_device::{AddressRange, Operation};
use std::sync::Arc;

const GRANULE_BYTES: usize = PAGE / 8;
const PAGE_BYTES: u64 = PAGE as u64;

fn keeping(budget_pages: u64, streams: usize) -> (Arc<Fake>, Arc<Allocator<Fake>>) {
    let config = Config {
        segment_bytes: 16 * PAGE,
        thread_cache: true,
        ..Config::new(GRANULE_BYTES, budget_pages * PAGE_BYTES)
    };
    with_contents(256.max(17 * streams), config, streams)
}

/// A request that the thread cache may meet, where there are streams: on the first of them.
fn small(granules: usize, streams: usize) -> Request {
    let stream = if streams > 0 { key(0) } else { 0 };
    Request { stream, ..Request::new(granules * GRANULE_BYTES) }
}

fn free(allocator: &Allocator<Fake>, block: &Block, stream: u64) {
    assert_eq!(allocator.free(block.range.start, stream).unwrap(), Freed::Done);
}

/// The block of the thread cache that serves `request`.
fn take(allocator: &Allocator<Fake>, request: &Request) -> Option<Block> {
    let Request { bytes, stream, .. } = *request;
    assert_eq!(*request, Request { stream, ..Request::new(bytes) }, "nothing else is asked for");
    let start = allocator.allocate_small(ThreadShard::current(), bytes, stream)?;
    let info = allocator.lookup(start).unwrap();
    Some(Block { id: info.id, range: info.range, zeroed: false })
}

fn allocated(allocator: &Allocator<Fake>) -> (u64, u64) {
    let allocated = allocator.stats().allocated_bytes;
    allocator.check().unwrap();
    (allocated.current, allocated.peak)
}

#[test]
fn a_freed_block_is_reused_with_its_id() {
    let (device, allocator) = keeping(16, 1);
    let request = small(40, 1);
    let block = allocator.allocate(&request).unwrap();
    free(&allocator, &block, key(0));
    assert_eq!(allocator.lookup(block.range.start), None);
    assert!(matches!(allocator.info(block.id), Err(AllocError::StaleBlock { .. })));
    let again = allocator.free(block.range.start, key(0));
    assert!(matches!(again, Err(AllocError::NotABlock { .. })), "{again:?}");
    // One of the same class, from 39 granules on: asked of the device's pages, and of the thread cache.
    let maps = device.maps();
    let less = Request { bytes: 38 * GRANULE_BYTES + 1, ..request };
    assert_eq!(take(&allocator, &less).unwrap(), block);
    assert_eq!(allocator.info(block.id).unwrap().requested_bytes, less.bytes);
    assert_eq!((device.maps(), take(&allocator, &less)), (maps, None));
    allocator.check().unwrap();
}

/// Where there is none of the class, one of the next three serves, unless it is a quarter larger.
#[test]
fn a_slightly_larger_class_serves_too() {
    let (_, allocator) = keeping(16, 1);
    let [small_one, large_one] = [38, 40].map(|it| allocator.allocate(&small(it, 1)).unwrap());
    free(&allocator, &large_one, key(0));
    // Classes go up in steps of two here: 34, 36, 38, 40.
    assert_eq!(take(&allocator, &small(32, 1)), None);
    let taken = take(&allocator, &small(33, 1)).unwrap();
    assert_eq!(taken, large_one);
    let info = allocator.info(taken.id).unwrap();
    assert_eq!((info.requested_bytes, info.range.bytes), (33 * GRANULE_BYTES, 40 * GRANULE_BYTES));
    // It goes back to where it came from, and the nearest comes first.
    free(&allocator, &taken, key(0));
    free(&allocator, &small_one, key(0));
    assert_eq!(take(&allocator, &small(33, 1)).unwrap(), small_one);
    let tiny = allocator.allocate(&small(3, 1)).unwrap();
    free(&allocator, &tiny, key(0));
    assert_eq!(take(&allocator, &small(2, 1)), None);
    assert_eq!(allocator.stats().allocations.current, 1);
    allocator.check().unwrap();
}

/// The short way for plain requests makes the same blocks as any other.
#[test]
fn a_small_block_from_cached_pages_may_go_to_the_thread_cache() {
    let (device, allocator) = keeping(16, 1);
    assert_eq!(
        allocator.try_allocate(ThreadShard::current(), GRANULE_BYTES, key(0)),
        None,
        "nothing is cached"
    );
    // Not one for the thread cache: its pages are cached.
    let large = allocator.allocate(&Request { tag: 1, ..small(64, 1) }).unwrap();
    free(&allocator, &large, key(0));
    let maps = device.maps();
    // Classes go up in steps of two here: the block has 34 granules.
    let bytes = 32 * GRANULE_BYTES + 1;
    assert_eq!(
        allocator.try_allocate(ThreadShard::current(), bytes, key(1)),
        None,
        "no stream has that key"
    );
    let address = allocator.try_allocate(ThreadShard::current(), bytes, key(0)).unwrap();
    let info = allocator.lookup(address).unwrap();
    assert_eq!(
        (info.range, info.requested_bytes),
        (AddressRange::new(address, 34 * GRANULE_BYTES), bytes)
    );
    assert!(!allocator.try_free(address + GRANULE_BYTES, key(0)), "no block starts there");
    assert_eq!(allocator.free(address, key(0)).unwrap(), Freed::Done);
    assert_eq!(take(&allocator, &small(34, 1)).unwrap().id, info.id);
    // And by the short way back: then it is a free range, not the thread cache's.
    assert!(allocator.try_free(address, key(0)));
    assert!(!allocator.try_free(address, key(0)), "freed twice");
    assert_eq!(take(&allocator, &small(34, 1)), None);
    assert_eq!((allocator.stats().allocations.current, device.maps()), (0, maps));
    allocator.check().unwrap();
}

/// As many of a class are kept as a line has places for; the others are free ranges.
#[test]
fn the_thread_cache_is_limited() {
    let (_, allocator) = keeping(64, 1);
    let request = small(2, 1);
    let blocks: Vec<Block> = (0..20).map(|_| allocator.allocate(&request).unwrap()).collect();
    blocks.iter().for_each(|block| free(&allocator, block, key(0)));
    let kept = std::iter::from_fn(|| take(&allocator, &request)).collect::<Vec<_>>();
    // The last one given comes first.
    let expected: Vec<Block> = blocks[..8].iter().rev().copied().collect();
    assert_eq!(kept, expected);
    allocator.check().unwrap();
}

/// A block that was freed on another stream, or that another one uses, does not stay as it is.
#[test]
fn blocks_used_by_other_streams_are_not_cached_by_thread() {
    let (_, allocator) = keeping(16, 2);
    let request = small(2, 2);
    let [one, other, own] = [(); 3].map(|()| allocator.allocate(&request).unwrap());
    allocator.record_stream(one.range.start, key(1)).unwrap();
    free(&allocator, &one, key(0));
    free(&allocator, &other, key(1));
    assert_eq!(take(&allocator, &request), None);
    free(&allocator, &own, key(0));
    let elsewhere = Request { stream: key(1), ..request };
    assert_eq!(take(&allocator, &elsewhere), None);
    assert_eq!(take(&allocator, &request), Some(own));
    allocator.check().unwrap();
}

/// I2: past a lowered budget not even the thread cache hands anything out.
#[test]
fn a_lowered_budget_closes_the_thread_cache() {
    let (device, allocator) = keeping(16, 1);
    let large = allocator.allocate(&Request { tag: 1, ..small(64, 1) }).unwrap();
    let request = small(2, 1);
    let [first, second] = [(); 2].map(|()| allocator.allocate(&request).unwrap());
    free(&allocator, &first, key(0));
    allocator.set_budget(4 * PAGE_BYTES).unwrap();
    free(&allocator, &second, key(0));
    assert_eq!(take(&allocator, &request), None);
    let refused = allocator.allocate(&request);
    assert!(matches!(refused, Err(AllocError::OutOfMemory(_))), "{refused:?}");
    // Once it fits again, blocks are kept as before.
    free(&allocator, &large, key(0));
    allocator.trim(u64::MAX);
    let block = allocator.allocate(&request).unwrap();
    free(&allocator, &block, key(0));
    assert_eq!(take(&allocator, &request), Some(block));
    // The same where it fits because the budget is raised, and what is cached serves.
    allocator.set_budget(16 * PAGE_BYTES).unwrap();
    let large = allocator.allocate(&Request { tag: 1, ..small(64, 1) }).unwrap();
    allocator.set_budget(PAGE_BYTES).unwrap();
    allocator.set_budget(16 * PAGE_BYTES).unwrap();
    let (maps, next) = (device.maps(), allocator.allocate(&request).unwrap());
    assert_eq!(device.maps(), maps);
    free(&allocator, &next, key(0));
    assert_eq!(take(&allocator, &request), Some(next));
    free(&allocator, &large, key(0));
    allocator.check().unwrap();
}

/// What the thread cache has handed out since the figures were settled leaves them by way of the state.
#[test]
fn a_block_may_be_freed_before_its_allocation_is_counted() {
    let (_, allocator) = keeping(16, 2);
    let block = allocator.allocate(&small(2, 2)).unwrap();
    free(&allocator, &block, key(0));
    let bytes = 2 * GRANULE_BYTES as u64;
    assert_eq!(allocated(&allocator), (0, bytes));
    assert_eq!(allocator.allocate(&small(2, 2)).unwrap(), block);
    free(&allocator, &block, key(1));
    assert_eq!(allocated(&allocator), (0, bytes));
    assert_eq!(allocator.stats().requested_bytes.current, 0);
}

/// The peak is the value of its moment, even if a block sleeps before it is read.
#[test]
fn sleep_and_waking_leave_the_peak_as_it_was() {
    let (device, allocator) = keeping(64, 0);
    let small_bytes = 2 * GRANULE_BYTES as u64;
    let large = allocator.allocate(&Request { tag: 1, ..small(64, 0) }).unwrap();
    let info = allocator.claim(large.range.start, 1).unwrap();
    let large_bytes = large.range.bytes as u64;
    let block = allocator.allocate(&small(2, 0)).unwrap();
    free(&allocator, &block, 0);
    allocator.reset_peaks();
    // Handed out while the large one is awake: the peak is both.
    assert_eq!(allocator.allocate(&small(2, 0)).unwrap(), block);
    device.take_pages(info.pages);
    allocator.set_asleep(large.id).unwrap();
    assert_eq!(allocated(&allocator), (small_bytes, small_bytes + large_bytes));
    // Given back before it wakes: the peak is the large one.
    free(&allocator, &block, 0);
    allocator.reset_peaks();
    assert_eq!(allocator.allocate(&small(2, 0)).unwrap(), block);
    free(&allocator, &block, 0);
    allocator.reserve_awake(large_bytes).unwrap();
    device.bring_pages(info.pages);
    allocator.set_awake(large.id).unwrap();
    assert_eq!(allocated(&allocator), (large_bytes, large_bytes));
}

/// Has `block` freed while the device unmaps something.
fn free_during_unmap(device: &Fake, allocator: &Arc<Allocator<Fake>>, block: Block) {
    let (weak, mut is_freed) = (Arc::downgrade(allocator), false);
    device.set_hook(move |operation, _| {
        if let Some(allocator) = weak.upgrade().filter(|_| operation == Operation::Unmap)
            && !std::mem::replace(&mut is_freed, true)
        {
            free(&allocator, &block, 0);
        }
    });
}

/// Freed into the thread cache while pages leave, a block is of as much use as one that was there before.
#[test]
fn blocks_freed_during_a_trim_leave_the_thread_cache_too() {
    let whole = small(8, 0);
    // A trim takes its page along.
    let (device, allocator) = keeping(16, 0);
    let [cached, late] = [(); 2].map(|()| allocator.allocate(&whole).unwrap());
    free(&allocator, &cached, 0);
    free_during_unmap(&device, &allocator, late);
    assert_eq!(allocator.trim(u64::MAX), 2 * PAGE_BYTES);
    // A request is not refused for it, nor is room to wake.
    for wakes in [false, true] {
        let (device, allocator) = keeping(3, 0);
        let [cached, late, last] = [(); 3].map(|()| allocator.allocate(&whole).unwrap());
        free(&allocator, &cached, 0);
        free_during_unmap(&device, &allocator, late);
        if wakes {
            allocator.reserve_awake(2 * PAGE_BYTES).unwrap();
        } else {
            let arena = Some(allocator.arena_create().unwrap());
            allocator.allocate(&Request { arena, ..small(16, 0) }).unwrap();
        }
        free(&allocator, &last, 0);
        allocator.check().unwrap();
    }
}

/// Where the device is not stream-ordered a key is only reported: as it was asked for.
#[test]
fn an_unused_stream_key_is_still_reported() {
    let (_, allocator) = keeping(16, 0);
    let named = Request { stream: 42, ..small(2, 0) };
    let block = allocator.allocate(&named).unwrap();
    free(&allocator, &block, 0);
    let block = allocator.allocate(&small(2, 0)).unwrap();
    assert_eq!(allocator.lookup(block.range.start).unwrap().stream, 0);
    allocator.check().unwrap();
}

/// The thread cache serves this number of streams. Blocks of further streams go to the state.
#[test]
fn streams_beyond_the_thread_cache_get_blocks_too() {
    const STREAMS: usize = 300;
    let (device, allocator) = keeping(1024, STREAMS);
    let of = |stream: usize| Request { stream: key(stream), ..small(3, 1) };
    let blocks: Vec<Block> = (0..STREAMS).map(|it| allocator.allocate(&of(it)).unwrap()).collect();
    for (stream, block) in blocks.iter().enumerate() {
        device.gpu().launch(stream, block.range);
        free(&allocator, block, key(stream));
    }
    assert_eq!(allocated(&allocator).0, 0);
    for (stream, block) in blocks.iter().enumerate().rev() {
        let again = allocator.allocate(&of(stream)).unwrap();
        device.gpu().must_suit(again.range, stream);
        assert_eq!(again.range, block.range, "stream {stream}");
        assert_eq!(allocator.lookup(again.range.start).unwrap().stream, key(stream));
    }
    // A use of one of them is waited for like any other.
    let (first, last) = (&blocks[0], STREAMS - 1);
    allocator.record_stream(first.range.start, key(last)).unwrap();
    free(&allocator, first, key(0));
    assert_ne!(allocator.allocate(&of(0)).unwrap().range, first.range);
    assert_eq!(allocator.stats().pending_blocks.current, 1);
    device.gpu().drain();
    allocator.trim(0);
    assert_eq!(allocator.allocate(&of(0)).unwrap().range, first.range);
    allocator.check().unwrap();
}
