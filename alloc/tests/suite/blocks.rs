//! Blocks, claims, arenas, and what is refused: one case each, in words.

use crate::common::{BASE, Fake, Fault, PAGE, allocator};
use dormouse_alloc::{ALIGN_BYTES_MAX, ARENAS_MAX, AllocError, Allocator, Config, Freed, Request};
use dormouse_device::Fill;
use dormouse_timeline::{Event, Gauge, Timeline};
use std::sync::Arc;

fn pages(count: usize) -> Request {
    Request { fill: Fill::Zero, ..Request::new(count * PAGE) }
}

fn bytes(pages: usize) -> u64 {
    (pages * PAGE) as u64
}

#[test]
fn a_block_with_a_deferred_free_is_not_reused_while_claimed() {
    let (_, allocator) = allocator(512, 100);
    let block = allocator.allocate(&pages(4)).unwrap();
    let start = block.range.start;
    let info = allocator.claim(start + PAGE + 1, 42).unwrap();
    assert_eq!((info.id, info.claimed), (block.id, Some(42)));
    assert_eq!(allocator.free(start, 0).unwrap(), Freed::Claimed(42));
    assert_eq!(allocator.lookup(start), None);
    let again = allocator.free(start, 0).unwrap_err();
    assert!(matches!(again, AllocError::FreeDeferred { owner_key: 42, .. }), "{again}");
    let other = allocator.allocate(&pages(4)).unwrap();
    assert_ne!(other.range.start, start, "the memory is still being copied");
    allocator.finish_free(block.id).unwrap();
    allocator.check().unwrap();
    assert_eq!(allocator.allocate(&pages(4)).unwrap().range.start, start);
}

#[test]
fn unclaim_completes_a_deferred_free() {
    let (_, allocator) = allocator(512, 100);
    let block = allocator.allocate(&pages(4)).unwrap();
    allocator.claim(block.range.start, 1).unwrap();
    assert_eq!(allocator.free(block.range.start, 0).unwrap(), Freed::Claimed(1));
    allocator.unclaim(block.id).unwrap();
    assert_eq!(allocator.stats().cached_bytes.current, bytes(4));
    assert!(matches!(allocator.unclaim(block.id), Err(AllocError::StaleBlock { .. })));
    allocator.check().unwrap();
}

#[test]
fn a_block_freed_asleep_leaves_a_bare_range() {
    let (device, allocator) = allocator(512, 100);
    let keep = allocator.allocate(&pages(1)).unwrap();
    let block = allocator.allocate(&pages(4)).unwrap();
    allocator.claim(block.range.start, 1).unwrap();
    device.take_pages(block.range);
    allocator.set_asleep(block.id).unwrap();
    let unclaimed = allocator.unclaim(block.id).unwrap_err();
    assert!(matches!(unclaimed, AllocError::WrongState { state: "asleep", .. }), "{unclaimed}");
    assert_eq!(allocator.free(block.range.start, 0).unwrap(), Freed::Claimed(1));
    allocator.finish_free(block.id).unwrap();
    let stats = allocator.stats();
    assert_eq!((stats.cached_bytes.current, stats.asleep_bytes.current), (0, 0));
    let next = allocator.allocate(&pages(4)).unwrap();
    assert_eq!((next.range, next.zeroed), (block.range, true), "mapped afresh");
    assert_eq!(device.violations(), Vec::<String>::new());
    let _ = allocator.free(keep.range.start, 0).unwrap();
}

#[test]
fn a_slot_that_is_used_again_has_the_next_generation() {
    let (_, allocator) = allocator(512, 100);
    let first = allocator.allocate(&pages(1)).unwrap();
    allocator.claim(first.range.start, 1).unwrap();
    let _ = allocator.free(first.range.start, 0).unwrap();
    allocator.finish_free(first.id).unwrap();
    let second = allocator.allocate(&pages(1)).unwrap();
    assert_eq!(second.id.index, first.id.index);
    assert_eq!(second.id.generation, first.id.generation + 1);
    allocator.claim(second.range.start, 2).unwrap();
    let stale = allocator.unclaim(first.id).unwrap_err();
    assert!(matches!(stale, AllocError::StaleBlock { generation: 0, current: 1, .. }), "{stale}");
    assert_eq!(allocator.lookup(second.range.start).unwrap().claimed, Some(2));
}

#[test]
fn waking_takes_exactly_the_room_that_was_reserved() {
    let (device, allocator) = allocator(512, 100);
    let block = allocator.allocate(&Request::new(3 * PAGE + 1)).unwrap();
    allocator.claim(block.range.start, 1).unwrap();
    let awake = allocator.set_awake(block.id).unwrap_err();
    assert!(matches!(awake, AllocError::WrongState { state: "awake", .. }), "{awake}");
    device.take_pages(block.range);
    allocator.set_asleep(block.id).unwrap();
    assert!(matches!(allocator.set_asleep(block.id), Err(AllocError::WrongState { .. })));
    allocator.reserve_awake(bytes(4) - 1).unwrap();
    let short = allocator.set_awake(block.id).unwrap_err();
    assert!(matches!(short, AllocError::NotReserved { asked_bytes: 16384, staged_bytes: 16383 }));
    assert!(allocator.info(block.id).unwrap().asleep);
    allocator.reserve_awake(1).unwrap();
    device.bring_pages(block.range);
    allocator.set_awake(block.id).unwrap();
    assert!(matches!(allocator.unreserve_awake(1), Err(AllocError::NotReserved { .. })));
    allocator.check().unwrap();
}

#[test]
fn every_address_of_a_large_block_leads_to_it_and_none_outside() {
    let (_, allocator) = allocator(4096, 4000);
    let below = allocator.allocate(&pages(3)).unwrap();
    let block = allocator.allocate(&pages(2500)).unwrap();
    for page in 0..2500 {
        let info = allocator.lookup(block.range.start + page * PAGE + 7).unwrap();
        assert_eq!(info.id, block.id, "page {page}");
    }
    assert_eq!(allocator.lookup(below.range.end() - 1).unwrap().id, below.id);
    assert_eq!(allocator.lookup(below.range.end()), None);
    assert_eq!(allocator.lookup(block.range.end()), None);
    assert_eq!(allocator.lookup(BASE - 1), None);
    assert_eq!(allocator.lookup(0), None);
    assert_eq!(allocator.lookup(usize::MAX), None);
    assert!(allocator.contains(BASE) && !allocator.contains(BASE - 1));
    assert!(allocator.contains(BASE + 4096 * PAGE - 1) && !allocator.contains(BASE + 4096 * PAGE));
    // Small blocks where the large one was: its traces in the table lead nowhere.
    let _ = allocator.free(block.range.start, 0).unwrap();
    let small = allocator.allocate(&pages(1)).unwrap();
    assert_eq!(allocator.lookup(small.range.start).unwrap().id, small.id);
    for page in 1..2500 {
        assert_eq!(allocator.lookup(small.range.start + page * PAGE), None, "page {page}");
    }
    allocator.check().unwrap();
}

#[test]
fn an_arena_shares_no_segment_until_it_is_closed() {
    let (_, allocator) = allocator(512, 300);
    let one = allocator.arena_create().unwrap();
    let other = allocator.arena_create().unwrap();
    let segment = |arena| {
        let block = allocator.allocate(&Request { arena, ..pages(1) }).unwrap();
        (block.range.start - BASE) / (16 * PAGE)
    };
    let of: Vec<usize> = [None, Some(one), Some(other)].map(segment).to_vec();
    assert_eq!(of, [0, 1, 2]);
    assert_eq!([None, Some(one), Some(other)].map(segment).to_vec(), of);
    allocator.check().unwrap();
}

#[test]
fn the_pages_of_a_closed_arena_serve_the_next_one() {
    let (device, allocator) = allocator(512, 100);
    let first = allocator.arena_create().unwrap();
    let request = Request { arena: Some(first), ..pages(10) };
    let (a, b) = (allocator.allocate(&request).unwrap(), allocator.allocate(&request).unwrap());
    let _ = allocator.free(a.range.start, 0).unwrap();
    allocator.arena_close(first);
    assert_eq!(allocator.stats().arenas.current, 1, "it holds a block still");
    let refused = allocator.allocate(&request).unwrap_err();
    assert!(matches!(refused, AllocError::UnknownArena { .. }), "{refused}");
    let _ = allocator.free(b.range.start, 0).unwrap();
    assert_eq!(allocator.stats().arenas.current, 0);
    allocator.check().unwrap();
    // The next arena has the slot, not the name; and the pages.
    let second = allocator.arena_create().unwrap();
    assert_ne!(second, first);
    let maps = device.maps();
    for _ in 0..2 {
        let again = allocator.allocate(&Request { arena: Some(second), ..pages(10) }).unwrap();
        assert!(!again.zeroed);
    }
    assert_eq!(device.maps(), maps, "no page was mapped anew");
    // Closing the old name again does not close the new arena.
    allocator.arena_close(first);
    allocator.allocate(&Request { arena: Some(second), ..pages(1) }).unwrap();
    allocator.check().unwrap();
}

#[test]
fn there_is_an_end_to_arenas() {
    let (_, allocator) = allocator(64, 10);
    let mut last = None;
    for _ in 0..ARENAS_MAX {
        last = Some(allocator.arena_create().unwrap());
    }
    let refused = allocator.arena_create().unwrap_err();
    assert!(matches!(refused, AllocError::TooManyArenas { limit: ARENAS_MAX }), "{refused}");
    allocator.arena_close(last.unwrap());
    allocator.arena_create().unwrap();
    allocator.check().unwrap();
}

#[test]
fn large_alignments_hold_for_addresses_not_offsets() {
    let (_, allocator) = allocator(4096, 2000);
    for log in 0..22 {
        let request = Request { align: 1 << log, ..pages(3) };
        let block = allocator.allocate(&request).unwrap();
        assert_eq!(block.range.start % (1 << log), 0, "2^{log}");
        allocator.check().unwrap();
    }
}

#[test]
fn invalid_requests_are_refused_by_field() {
    let (device, allocator) = allocator(64, 10);
    for request in [
        Request::new(0),
        Request { align: 0, ..pages(1) },
        Request { align: 3, ..pages(1) },
        Request { align: 2 * ALIGN_BYTES_MAX, ..pages(1) },
    ] {
        let error = allocator.allocate(&request).unwrap_err();
        assert!(matches!(error, AllocError::BadRequest { .. }), "{error}");
        assert!(error.to_string().contains("accepted: "), "{error}");
    }
    for address in [0, BASE - 1, BASE, usize::MAX] {
        let error = allocator.free(address, 0).unwrap_err();
        assert!(matches!(error, AllocError::NotABlock { .. }), "{error}");
        assert!(allocator.claim(address, 1).is_err());
    }
    let block = allocator.allocate(&pages(1)).unwrap();
    let error = allocator.free(block.range.start + 1, 0).unwrap_err();
    assert!(matches!(error, AllocError::NotBlockStart { .. }), "{error}");
    for refused in [
        allocator.unclaim(block.id),
        allocator.set_asleep(block.id),
        allocator.set_awake(block.id),
        allocator.finish_free(block.id),
    ] {
        assert!(matches!(refused, Err(AllocError::WrongState { .. })), "{refused:?}");
    }
    let _ = allocator.free(block.range.start, 0).unwrap();
    let twice = allocator.free(block.range.start, 0).unwrap_err();
    assert!(matches!(twice, AllocError::NotABlock { .. }), "{twice}");
    assert_eq!(device.maps(), 1);
}

#[test]
fn bad_configurations_are_refused_by_field() {
    let good = Config::new(PAGE, 1);
    let bad = [
        (Config { granule_bytes: 0, ..good }, "granule_bytes"),
        (Config { granule_bytes: PAGE / 2 + 1, ..good }, "granule_bytes"),
        (Config { granule_bytes: 3 * PAGE, ..good }, "granule_bytes"),
        (Config { granule_bytes: 8192, thread_cache: true, ..good }, "granule_bytes"),
        (Config { segment_bytes: 0, ..good }, "segment_bytes"),
        (Config { segment_bytes: PAGE + 1, ..good }, "segment_bytes"),
        (Config { budget_bytes: 0, ..good }, "budget_bytes"),
    ];
    for (config, name) in bad {
        let error = Allocator::new(Fake::new(8), config, Arc::new(Timeline::new(64))).unwrap_err();
        assert!(matches!(error, AllocError::BadConfig { field, .. } if field == name), "{error}");
    }
    let none = Allocator::new(Fake::new(0), good, Arc::new(Timeline::new(64))).unwrap_err();
    assert!(matches!(none, AllocError::BadConfig { .. }), "{none}");
}

/// Granules larger than a page: the space is used from the first whole one.
#[test]
fn granules_may_be_larger_than_pages() {
    let device = Fake::new(67);
    let config = Config { segment_bytes: 8 * PAGE, ..Config::new(4 * PAGE, 1 << 30) };
    let timeline = Arc::new(Timeline::new(64));
    let allocator = Allocator::new(Arc::clone(&device), config, timeline).unwrap();
    let mut blocks = 0;
    while let Ok(block) = allocator.allocate(&Request::new(1)) {
        assert_eq!((block.range.start % (4 * PAGE), block.range.bytes), (0, 4 * PAGE));
        blocks += 1;
    }
    // The base is 3 pages past a multiple of 4: 66 pages are left, 16 granules.
    assert_eq!(blocks, 16);
    allocator.check().unwrap();
    assert_eq!(device.violations(), Vec::<String>::new());
}

#[test]
fn drop_unmaps_the_cache_and_keeps_blocks_mapped() {
    let device = Fake::new(64);
    let config = Config { segment_bytes: 16 * PAGE, ..Config::new(PAGE, bytes(60)) };
    let timeline = Arc::new(Timeline::new(64));
    let allocator = Allocator::new(Arc::clone(&device), config, timeline).unwrap();
    let leaked = allocator.allocate(&pages(3)).unwrap();
    let freed = allocator.allocate(&pages(5)).unwrap();
    let _ = allocator.free(freed.range.start, 0).unwrap();
    drop(allocator);
    assert_eq!(device.mapped_bytes(), bytes(3));
    assert_eq!(device.touch(leaked.range), (true, false), "it may still be in use");
}

/// The gauges follow in steps; small changes leave no trace in the ring.
#[test]
fn gauges_move_in_steps_a_person_can_see() {
    let device = Fake::new(2048);
    let timeline = Arc::new(Timeline::new(64));
    let config = Config::new(PAGE, bytes(2048));
    let allocator = Allocator::new(device, config, Arc::clone(&timeline)).unwrap();
    for _ in 0..10 {
        let small = allocator.allocate(&pages(1)).unwrap();
        let _ = allocator.free(small.range.start, 0).unwrap();
    }
    assert_eq!(timeline.snapshot().events.len(), 0);
    let large = allocator.allocate(&pages(512)).unwrap();
    assert_eq!(timeline.snapshot().events.len(), 2, "awake and mapped");
    let _ = allocator.free(large.range.start, 0).unwrap();
    assert_eq!(timeline.snapshot().events.len(), 3, "awake only: it is cached");
    allocator.trim(u64::MAX);
    assert_eq!(timeline.snapshot().events.len(), 4);
}

/// A maximum lower than a step above the last record is recorded too: when the level next moves a step, or when
/// it is asked for.
#[test]
fn peaks_of_the_timeline_are_those_of_the_statistics() {
    let device = Fake::new(8192);
    let timeline = Arc::new(Timeline::new(1 << 12));
    let config = Config::new(PAGE, bytes(8192));
    let allocator = Allocator::new(device, config, Arc::clone(&timeline)).unwrap();
    let peak_of = |gauge: Gauge| {
        let levels = timeline.snapshot().events.into_iter().filter_map(|event| match event {
            Event::Gauge { gauge: its, value_bytes, .. } if its == gauge => Some(value_bytes),
            _ => None,
        });
        levels.max().unwrap_or(0)
    };
    let large = allocator.allocate(&pages(1000)).unwrap();
    let small = allocator.allocate(&pages(3)).unwrap();
    let _ = allocator.free(small.range.start, 0).unwrap();
    assert_eq!(peak_of(Gauge::DeviceAwake), bytes(1000), "3 pages are less than a step");
    let _ = allocator.free(large.range.start, 0).unwrap();
    let stats = allocator.stats();
    assert_eq!(stats.active_bytes.peak, bytes(1003));
    assert_eq!(peak_of(Gauge::DeviceAwake), bytes(1003), "the level moved a step");
    let blocks: Vec<_> = (0..5).map(|_| allocator.allocate(&pages(201)).unwrap()).collect();
    let more = allocator.allocate(&pages(2)).unwrap();
    allocator.record_levels();
    let stats = allocator.stats();
    assert_eq!(peak_of(Gauge::DeviceAwake), stats.active_bytes.peak);
    assert_eq!(peak_of(Gauge::DeviceMapped), stats.mapped_bytes.peak);
    assert_eq!(stats.active_bytes.peak, bytes(1007));
    let recorded = timeline.snapshot().events.len();
    allocator.record_levels();
    assert_eq!(timeline.snapshot().events.len(), recorded, "nothing has changed");
    for block in blocks.iter().chain([&more]) {
        let _ = allocator.free(block.range.start, 0).unwrap();
    }
}

/// Each watch has the peak since its own last look; resets and intervals of others do not shorten it, and it does
/// not shorten theirs.
#[test]
fn a_watch_has_the_peak_since_its_last_look() {
    let (_, allocator) = allocator(512, 100);
    let up_to = |count: u64| {
        let block = allocator.allocate(&pages(count as usize)).unwrap();
        let _ = allocator.free(block.range.start, 0).unwrap();
    };
    let kept = allocator.allocate(&pages(2)).unwrap();
    up_to(40);
    let [first, second] = [allocator.watch_peak(), allocator.watch_peak()];
    up_to(10);
    assert_eq!(allocator.watched_peak(first), bytes(12));
    up_to(5);
    allocator.begin_interval();
    up_to(3);
    assert_eq!([first, first, second].map(|it| allocator.watched_peak(it)), [7, 2, 12].map(bytes));
    let stats = allocator.stats();
    assert_eq!(stats.allocated_bytes.peak, bytes(42), "since the start");
    assert_eq!(stats.allocated_interval_peak_bytes, bytes(5));
    up_to(20);
    allocator.reset_peaks();
    allocator.unwatch_peak(second);
    assert_eq!([first, second].map(|it| allocator.watched_peak(it)), [22, 2].map(bytes));
    assert_eq!(allocator.stats().allocated_bytes.peak, bytes(2));
    let _ = allocator.free(kept.range.start, 0).unwrap();
}

#[test]
fn peaks_are_reset_to_what_is_now() {
    let (_, allocator) = allocator(512, 100);
    let block = allocator.allocate(&pages(30)).unwrap();
    let _keep = allocator.allocate(&pages(2)).unwrap();
    let _ = allocator.free(block.range.start, 0).unwrap();
    let before = allocator.stats();
    assert_eq!((before.allocated_bytes.peak, before.mapped_bytes.peak), (bytes(32), bytes(32)));
    allocator.reset_peaks();
    let after = allocator.stats();
    assert_eq!((after.allocated_bytes.peak, after.mapped_bytes.peak), (bytes(2), bytes(32)));
    assert_eq!(after.allocated_bytes.added_total, bytes(32));
    // One segment of 32 pages: 30 are cached beside the two in use.
    assert_eq!(after.cached_bytes.current, bytes(30));
}

#[test]
fn an_interval_has_a_peak_of_its_own() {
    let (_, allocator) = allocator(512, 100);
    let peaks = || {
        let stats = allocator.stats();
        (stats.allocated_bytes.peak, stats.allocated_interval_peak_bytes)
    };
    let pass = |count| {
        let block = allocator.allocate(&pages(count)).unwrap();
        let _ = allocator.free(block.range.start, 0).unwrap();
    };
    let _keep = allocator.allocate(&pages(2)).unwrap();
    pass(30);
    assert_eq!(peaks(), (bytes(32), bytes(32)));
    allocator.begin_interval();
    assert_eq!(peaks(), (bytes(32), bytes(2)));
    pass(10);
    assert_eq!(peaks(), (bytes(32), bytes(12)));
    allocator.reset_peaks();
    assert_eq!(peaks(), (bytes(2), bytes(12)));
    pass(5);
    assert_eq!(peaks(), (bytes(7), bytes(12)));
    pass(40);
    assert_eq!(peaks(), (bytes(42), bytes(42)));
    allocator.begin_interval();
    allocator.begin_interval();
    assert_eq!(peaks(), (bytes(42), bytes(2)));
}

#[test]
fn cached_ranges_beside_blocks_count_as_inactive_split() {
    let (device, allocator) = allocator(512, 100);
    let (a, b) = (allocator.allocate(&pages(4)).unwrap(), allocator.allocate(&pages(4)).unwrap());
    let split = || allocator.stats().inactive_split_bytes.current;
    assert_eq!(split(), 0);
    let _ = allocator.free(a.range.start, 0).unwrap();
    assert_eq!(split(), bytes(4));
    let _ = allocator.free(b.range.start, 0).unwrap();
    assert_eq!(split(), 0, "the whole segment is free");
    // A range in transit is in use; one that came back is not.
    for call in 0..8 {
        device.fail_unmap(call, Fault::Refused);
    }
    assert_eq!(allocator.trim(1), 0);
    assert_eq!((split(), allocator.stats().cached_bytes.current), (0, bytes(8)));
    allocator.check().unwrap();
}
