//! Every way a device call can fail: nothing is lost, everything is as before, a retry works.

use crate::common::{Fake, Fault, PAGE, allocator};
use dormouse_alloc::{AllocError, Allocator, BlockInfo, Cause, Request, Stats, TRIM_REFUSALS_MAX};
use dormouse_device::{DeviceError, Fill, Operation};
use std::sync::Arc;

/// All that must not change when a call fails.
fn state(device: &Fake, allocator: &Allocator<Fake>) -> (Vec<u64>, Vec<BlockInfo>, u64) {
    allocator.check().unwrap();
    assert_eq!(device.violations(), Vec::<String>::new());
    let Stats { allocated_bytes, active_bytes, requested_bytes, mapped_bytes, .. } =
        allocator.stats();
    let Stats { cached_bytes, inactive_split_bytes, allocations, segments, arenas, maps, .. } =
        allocator.stats();
    let mut figures: Vec<u64> = [
        allocated_bytes,
        active_bytes,
        requested_bytes,
        mapped_bytes,
        cached_bytes,
        inactive_split_bytes,
        allocations,
        segments,
        arenas,
    ]
    .iter()
    .flat_map(|it| [it.current, it.peak])
    .collect();
    // The peak of a count of addresses alone may show that a segment was tried.
    figures.remove(15);
    figures.push(maps);
    (figures, allocator.blocks(), device.mapped_bytes())
}

/// A little life: two pools, sizes that split, merge and need new segments. Retries each
/// allocation that fails, once. Returns how many failed.
fn scenario(device: &Fake, allocator: &Arc<Allocator<Fake>>) -> usize {
    let arena = allocator.arena_create().unwrap();
    let mut held = Vec::new();
    let mut failures = 0;
    for (step, pages) in [3, 20, 1, 7, 16, 2, 5, 9, 30, 1].into_iter().enumerate() {
        let arena = (step % 2 == 0).then_some(arena);
        let request = Request { arena, align: PAGE << (step % 3), ..Request::new(pages * PAGE) };
        let before = state(device, allocator);
        let block = allocator.allocate(&request).unwrap_or_else(|error| {
            failures += 1;
            assert!(matches!(error, AllocError::Device(DeviceError::Refused { .. })), "{error}");
            assert_eq!(state(device, allocator), before);
            allocator.allocate(&request).unwrap()
        });
        held.push(block);
        if step % 3 == 2 {
            let gone = held.remove(0);
            let _ = allocator.free(gone.range.start, 0).unwrap();
        }
    }
    for block in held {
        let _ = allocator.free(block.range.start, 0).unwrap();
    }
    allocator.arena_close(arena);
    allocator.trim(u64::MAX);
    allocator.check().unwrap();
    assert_eq!(device.mapped_bytes(), 0);
    assert_eq!(allocator.stats().segments.current, 0);
    failures
}

#[test]
fn a_map_refused_at_any_call_changes_nothing_and_can_be_retried() {
    let (device, healthy) = allocator(512, 200);
    assert_eq!(scenario(&device, &healthy), 0);
    let calls = device.maps();
    assert!(calls >= 8, "{calls}");
    for call in 0..calls {
        let (device, allocator) = allocator(512, 200);
        device.fail_map(call, Fault::Refused);
        assert_eq!(scenario(&device, &allocator), 1, "call {call}");
    }
}

/// A map that fails because the device is full is a shortage: trimming is what helps.
#[test]
fn a_device_smaller_than_the_budget_is_trimmed_by_the_shortage() {
    let (device, allocator) = allocator(512, 100);
    device.set_capacity_pages(40);
    let first = allocator.allocate(&Request::new(30 * PAGE)).unwrap();
    let _ = allocator.free(first.range.start, 0).unwrap();
    // 30 pages cached, 10 left on the device, 32 wanted in one piece.
    let zeroes = Request { fill: Fill::Zero, ..Request::new(32 * PAGE) };
    let second = allocator.allocate(&zeroes).unwrap();
    assert!(second.zeroed);
    assert_eq!(device.mapped_bytes(), 40 * PAGE as u64);
    assert_eq!(allocator.stats().cached_bytes.current, 8 * PAGE as u64);
    let refused = allocator.allocate(&Request::new(20 * PAGE)).unwrap_err();
    let AllocError::OutOfMemory(report) = refused else { panic!("{refused}") };
    assert_eq!(report.cause, Cause::Device);
    assert!(report.to_string().contains("device error"), "{report}");
    assert!(report.to_string().lines().count() <= 12);
    allocator.check().unwrap();
}

/// A device that says "full" though it is not must not be asked for ever.
#[test]
fn requests_end_on_a_device_that_is_always_full() {
    let (device, allocator) = allocator(512, 100);
    let warm = allocator.allocate(&Request::new(50 * PAGE)).unwrap();
    let _ = allocator.free(warm.range.start, 0).unwrap();
    let before = device.maps();
    device.set_capacity_pages(0);
    let refused = allocator.allocate(&Request::new(60 * PAGE)).unwrap_err();
    assert!(matches!(refused, AllocError::OutOfMemory(_)), "{refused}");
    assert!(device.maps() - before <= 8, "{} calls", device.maps() - before);
    device.set_capacity_pages(512);
    allocator.check().unwrap();
    let zeroes = Request { fill: Fill::Zero, ..Request::new(60 * PAGE) };
    assert!(allocator.allocate(&zeroes).unwrap().zeroed);
}

#[test]
fn a_failed_map_of_a_first_segment_gives_the_segment_back() {
    let (device, allocator) = allocator(64, 64);
    let arena = allocator.arena_create().unwrap();
    let request = Request { arena: Some(arena), ..Request::new(PAGE) };
    device.fail_map(0, Fault::Refused);
    assert!(allocator.allocate(&request).is_err());
    assert_eq!(allocator.stats().segments.current, 0);
    let first = allocator.allocate(&request).unwrap();
    assert_eq!(first.range.start, crate::common::BASE);
}

/// The cache: ranges of 9, 7, 5, 3 and 1 pages, kept apart by blocks.
fn ragged_cache(allocator: &Allocator<Fake>) {
    let mut holes = Vec::new();
    for pages in [9, 7, 5, 3, 1] {
        holes.push(allocator.allocate(&Request::new(pages * PAGE)).unwrap());
        allocator.allocate(&Request::new(PAGE)).unwrap();
    }
    for hole in holes {
        let _ = allocator.free(hole.range.start, 0).unwrap();
    }
}

#[test]
fn a_range_that_fails_to_unmap_stays_cached_and_others_are_tried() {
    let (device, allocator) = allocator(512, 100);
    ragged_cache(&allocator);
    device.fail_unmap(0, Fault::Refused);
    assert_eq!(allocator.trim(10 * PAGE as u64), 10 * PAGE as u64);
    let unmapped: Vec<usize> = device
        .log()
        .iter()
        .filter(|(operation, _)| *operation == Operation::Unmap)
        .map(|(_, range)| range.bytes / PAGE)
        .collect();
    assert_eq!(unmapped, [7, 3], "the largest was refused, the next two follow in order");
    allocator.check().unwrap();
    assert_eq!(allocator.stats().unmap_refusals, 1);
    assert_eq!(allocator.stats().cached_bytes.current, 15 * PAGE as u64);
    // Later it works, and the range is as good as any.
    assert_eq!(allocator.trim(u64::MAX), 15 * PAGE as u64);
    allocator.check().unwrap();
    assert_eq!(device.violations(), Vec::<String>::new());
}

#[test]
fn a_trim_ends_at_the_limit_of_failures_and_loses_nothing() {
    let (device, allocator) = allocator(512, 100);
    ragged_cache(&allocator);
    for call in 0..100 {
        device.fail_unmap(call, Fault::Refused);
    }
    assert_eq!(allocator.trim(u64::MAX), 0);
    assert_eq!(allocator.stats().unmap_refusals, TRIM_REFUSALS_MAX as u64);
    allocator.check().unwrap();
    // In the ladder too: a report, not an endless search.
    let refused = allocator.allocate(&Request::new(80 * PAGE)).unwrap_err();
    assert!(matches!(refused, AllocError::OutOfMemory(_)), "{refused}");
    allocator.check().unwrap();
    // What is cached still serves.
    let again = allocator.allocate(&Request::new(9 * PAGE)).unwrap();
    assert!(!again.zeroed);
}

/// I5: while the device maps or unmaps, other threads free and look up.
#[test]
fn no_lock_that_frees_need_is_held_while_the_device_works() {
    let (device, allocator) = allocator(512, 100);
    let victims: Vec<usize> =
        (0..4).map(|_| allocator.allocate(&Request::new(PAGE)).unwrap().range.start).collect();
    let (shared, mut left) = (Arc::downgrade(&allocator), victims.into_iter());
    let (send, receive) = std::sync::mpsc::channel();
    device.set_hook(move |_, _| {
        let (Some(allocator), Some(victim)) = (shared.upgrade(), left.next()) else { return };
        // Another thread, as a lock of our own held here would be for ever otherwise.
        let (done, wait) = std::sync::mpsc::channel();
        std::thread::spawn(move || {
            let freed = allocator.lookup(victim).is_some() && allocator.free(victim, 0).is_ok();
            let _ = done.send(freed);
        });
        // Only a failure ever waits that long.
        let _ = send.send(wait.recv_timeout(std::time::Duration::from_secs(20)));
    });
    let block = allocator.allocate(&Request::new(90 * PAGE)).unwrap();
    let _ = allocator.free(block.range.start, 0).unwrap();
    allocator.trim(90 * PAGE as u64);
    device.clear_hook();
    let results: Vec<_> = receive.iter().collect();
    assert!(results.len() >= 2 && results.iter().all(|it| *it == Ok(true)), "{results:?}");
    allocator.check().unwrap();
}

/// While part of a spare segment is being unmapped, an arena takes the segment over.
#[test]
fn a_segment_changes_its_pool_during_a_trim() {
    let (device, allocator) = allocator(512, 100);
    let first = allocator.arena_create().unwrap();
    let request = Request { arena: Some(first), ..Request::new(12 * PAGE) };
    let block = allocator.allocate(&request).unwrap();
    let _ = allocator.free(block.range.start, 0).unwrap();
    allocator.arena_close(first);
    let second = allocator.arena_create().unwrap();
    let (weak, (send, receive)) = (Arc::downgrade(&allocator), std::sync::mpsc::channel());
    device.set_hook(move |operation, _| {
        let Some(allocator) = weak.upgrade().filter(|_| operation == Operation::Unmap) else {
            return;
        };
        let request = Request { arena: Some(second), ..Request::new(3 * PAGE) };
        let _ = send.send(allocator.allocate(&request).map_err(drop));
        allocator.check().unwrap();
    });
    assert_eq!(allocator.trim(8 * PAGE as u64), 8 * PAGE as u64);
    device.clear_hook();
    let adopted: Vec<_> = receive.iter().collect();
    let [Ok(adopted)] = adopted[..] else { panic!("{adopted:?}") };
    assert_eq!((adopted.range.start, adopted.zeroed), (block.range.start, false));
    allocator.check().unwrap();
    // What was unmapped meanwhile is the arena's: 1 cached page and 12 bare ones are left.
    let rest = Request { arena: Some(second), ..Request::new(12 * PAGE) };
    assert_eq!(allocator.allocate(&rest).unwrap().range.start, block.range.start + 4 * PAGE);
    assert_eq!(allocator.stats().segments.current, 1);
    allocator.check().unwrap();
    assert_eq!(device.violations(), Vec::<String>::new());
}

/// Pages that are being mapped count against the budget.
#[test]
fn the_budget_covers_what_is_being_mapped() {
    let (device, allocator) = allocator(512, 10);
    let (weak, (send, receive)) = (Arc::downgrade(&allocator), std::sync::mpsc::channel());
    device.set_hook(move |_, _| {
        // The ladder is free, so this call takes it; it finds nothing to trim.
        let room = weak.upgrade().map(|it| it.reserve_awake(5 * PAGE as u64).is_ok());
        let _ = send.send(room);
    });
    allocator.allocate(&Request::new(6 * PAGE)).unwrap();
    device.clear_hook();
    assert_eq!(receive.iter().collect::<Vec<_>>(), [Some(false)]);
    allocator.reserve_awake(4 * PAGE as u64).unwrap();
}

#[test]
fn the_largest_range_of_all_pools_is_trimmed_first() {
    let (device, allocator) = allocator(512, 100);
    let mut starts = Vec::new();
    for pages in [3, 7, 5] {
        let arena = Some(allocator.arena_create().unwrap());
        let request = Request { arena, ..Request::new(pages * PAGE) };
        starts.push(allocator.allocate(&request).unwrap().range.start);
    }
    for start in starts {
        let _ = allocator.free(start, 0).unwrap();
    }
    allocator.trim(u64::MAX);
    let log = device.log();
    let sizes: Vec<_> = log[3..].iter().map(|(_, range)| range.bytes / PAGE).collect();
    assert_eq!(sizes, [7, 5, 3]);
}
