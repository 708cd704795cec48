//! Readers' events, and the faults of a well-known pool as negative tests.

use dormouse_alloc::pinned::{EVENTS_MAX, PinMode, PinnedError};
use dormouse_device::Operation;

use super::*;

/// A cached block smaller than the request once served it: here a buffer is as long as asked,
/// whatever lies about free.
#[test]
fn a_smaller_free_piece_never_serves_a_larger_request() {
    let (_, pool) = pool(1 << 30);
    for asked in [4097, 8192, 100_000, MIB + 1, 5 * MIB, 5 * MIB + 4097, 6 * MIB - 1] {
        // Free pieces just shorter than the request, of both kinds of slab.
        let shorter: Vec<_> = (1..4)
            .filter_map(|less: usize| asked.checked_sub(less * UNIT_BYTES).filter(|&b| b > 0))
            .map(|bytes| pool.allocate(bytes, PinMode::Now).unwrap())
            .collect();
        for buffer in shorter {
            pool.free(buffer).unwrap();
        }
        let buffer = pool.allocate(asked, PinMode::Now).unwrap();
        assert_eq!(buffer.bytes(), asked.next_multiple_of(UNIT_BYTES));
        mark(buffer, 1);
        pool.check().unwrap();
        pool.free(buffer).unwrap();
    }
}

/// Counters of active bytes once went down for blocks with events only.
#[test]
fn figures_go_down_for_every_way_a_buffer_comes_back() {
    let (device, pool) = pool(1 << 30);
    let buffers = [4096, MIB, 9 * MIB].map(|bytes| pool.allocate(bytes, PinMode::Now).unwrap());
    assert_eq!(pool.usage().buffers, 3);
    assert_eq!(pool.usage().used_bytes, 4096 + 10 * MIB as u64);
    pool.free(buffers[0]).unwrap();
    assert_eq!((pool.usage().buffers, pool.usage().used_bytes), (2, 10 * MIB as u64));
    pool.free_after(buffers[1], Vec::new()).unwrap();
    assert_eq!((pool.usage().buffers, pool.usage().pending_bytes), (1, 0));
    pool.free_after(buffers[2], vec![done(&device)]).unwrap();
    assert_eq!((pool.usage().buffers, pool.usage().pending_bytes), (1, 9 * MIB as u64));
    pool.trim().unwrap();
    let usage = pool.usage();
    assert_eq!((usage.buffers, usage.used_bytes, usage.pending_bytes), (0, 0, 0));
    assert_eq!((usage.pinned_bytes, usage.slabs), (0, 0));
    assert_eq!(usage.peak_used_bytes, 4096 + 10 * MIB as u64);
}

/// An event at the head of the queue once kept every later one.
#[test]
fn a_late_event_keeps_nobodys_buffer_but_its_own() {
    let (device, pool) = pool(1 << 30);
    let first = pool.allocate(8 * MIB, PinMode::Now).unwrap();
    let others: Vec<_> = (0..10).map(|_| pool.allocate(8 * MIB, PinMode::Now).unwrap()).collect();
    let over = done(&device);
    pool.free_after(first, vec![over.clone(), late(&device)]).unwrap();
    for &buffer in &others {
        pool.free_after(buffer, vec![over.clone()]).unwrap();
    }
    let pins = device.calls(Operation::Pin);
    let again: Vec<_> = (0..10).map(|_| pool.allocate(8 * MIB, PinMode::Now).unwrap()).collect();
    assert_eq!(device.calls(Operation::Pin), pins, "each has the memory of one that is over");
    assert!(again.iter().all(|buffer| buffer.range() != first.range()));
    assert_eq!(pool.usage().pending_bytes, 8 * MIB as u64);
    device.release_events();
    assert_eq!(pool.allocate(8 * MIB, PinMode::Now).unwrap().range(), first.range());
    assert_eq!(device.calls(Operation::Pin), pins);
}

/// A buffer with several readers is out until the last of them is done, in whatever order.
#[test]
fn every_reader_counts() {
    let (device, pool) = pool(8 * MIB);
    let over = done(&device);
    let late = late(&device);
    for events in [vec![over.clone(), late.clone()], vec![late.clone(), over.clone()]] {
        let buffer = pool.allocate(4 * MIB, PinMode::Now).unwrap();
        pool.free_after(buffer, events).unwrap();
    }
    assert!(matches!(pool.allocate(MIB, PinMode::Now), Err(PinnedError::Full { .. })));
    device.release_events();
    assert_eq!(pool.allocate(8 * MIB, PinMode::Now).unwrap().bytes(), 8 * MIB);
}

/// P5, where every other way to find room is closed.
#[test]
fn a_pending_buffer_is_refused_rather_than_shared() {
    let (device, pool) = pool(8 * MIB);
    let buffer = pool.allocate(8 * MIB, PinMode::Now).unwrap();
    pool.free_after(buffer, vec![late(&device)]).unwrap();
    let full = pool.allocate(MIB, PinMode::Now).unwrap_err();
    let PinnedError::Full { pending_bytes, cap_bytes, asked_bytes, .. } = full else {
        panic!("{full}")
    };
    assert_eq!((pending_bytes, cap_bytes), (8 * MIB as u64, 8 * MIB as u64));
    assert_eq!(asked_bytes, MIB as u64);
    // A bounce buffer has room beyond the cap, and still not that of the pending one.
    let bounce = pool.allocate(MIB, PinMode::Bounce).unwrap();
    assert!(!buffer.range().contains(bounce.start()));
    device.release_events();
    pool.free(bounce).unwrap();
    assert_eq!(pool.allocate(8 * MIB, PinMode::Now).unwrap().range(), buffer.range());
}

/// It waits only where that helps, and for no more than it needs.
#[test]
fn a_request_that_may_wait_does() {
    let (device, pool) = pool(8 * MIB);
    let mut buffers: Vec<_> =
        (0..2).map(|_| pool.allocate(4 * MIB, PinMode::Now).unwrap()).collect();
    let last = buffers.pop().unwrap();
    pool.free_after(last, vec![late(&device)]).unwrap();
    // One that could not be met with every reader done is refused at once.
    assert!(matches!(pool.allocate(5 * MIB, PinMode::Wait), Err(PinnedError::Full { .. })));
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| pool.allocate(4 * MIB, PinMode::Wait).unwrap());
        let releaser = scope.spawn(|| {
            // Nobody who waits holds others up.
            assert!(matches!(pool.allocate(MIB, PinMode::Now), Err(PinnedError::Full { .. })));
            device.release_events();
        });
        releaser.join().unwrap();
        assert_eq!(waiter.join().unwrap().range(), last.range());
    });
    pool.check().unwrap();
}

#[test]
fn what_is_not_out_is_not_taken_back() {
    let (device, pool) = pool(1 << 30);
    let buffer = pool.allocate(MIB, PinMode::Now).unwrap();
    let over = done(&device);
    let not_out = |given| matches!(given, Err(PinnedError::NotOut { .. }));
    pool.free_after(buffer, vec![late(&device)]).unwrap();
    assert!(not_out(pool.free(buffer)), "pending");
    assert!(not_out(pool.free_after(buffer, vec![over.clone()])), "pending");
    device.release_events();
    pool.trim().unwrap();
    assert!(not_out(pool.free(buffer)), "gone");
    let next = pool.allocate(MIB, PinMode::Now).unwrap();
    assert!(not_out(pool.free(buffer)), "another's by now");
    let many = vec![over; EVENTS_MAX + 1];
    let refusal = PinnedError::TooManyEvents { seen: EVENTS_MAX + 1, accepted: EVENTS_MAX };
    assert_eq!(pool.free_after(next, many), Err(refusal));
    pool.free(next).unwrap();
    assert!(matches!(pool.allocate(usize::MAX, PinMode::Now), Err(PinnedError::BadSize { .. })));
}

/// A device that does not say whether a reader is done has that buffer kept from everybody.
#[test]
fn a_device_that_does_not_say_keeps_the_buffer_pending() {
    let (device, pool) = pool(8 * MIB);
    let buffer = pool.allocate(8 * MIB, PinMode::Now).unwrap();
    pool.free_after(buffer, vec![done(&device)]).unwrap();
    device.fail_from(Operation::Event, 1, refused());
    assert!(matches!(pool.allocate(8 * MIB, PinMode::Now), Err(PinnedError::Device(_))));
    assert!(pool.trim().is_err());
    assert_eq!(pool.usage().pending_bytes, 8 * MIB as u64);
    device.heal();
    assert_eq!(pool.allocate(8 * MIB, PinMode::Now).unwrap().range(), buffer.range());
}

/// Many that are pending are looked at by requests that need none of them.
#[test]
fn pending_buffers_do_not_pile_up() {
    let (device, pool) = pool(1 << 30);
    let over = done(&device);
    for _ in 0..10_000 {
        let buffer = pool.allocate(UNIT_BYTES, PinMode::Now).unwrap();
        pool.free_after(buffer, vec![over.clone()]).unwrap();
    }
    assert!(pool.usage().buffers < 200, "{:?}", pool.usage());
    pool.check().unwrap();
}

/// Dropping the pool waits for readers.
#[test]
fn dropping_the_pool_waits_for_readers() {
    let (device, pool) = pool(1 << 30);
    let buffer = pool.allocate(MIB, PinMode::Now).unwrap();
    pool.free_after(buffer, vec![late(&device)]).unwrap();
    std::thread::scope(|scope| {
        let dropped = scope.spawn(move || drop(pool));
        std::thread::sleep(Duration::from_millis(20));
        assert!(!dropped.is_finished(), "a reader is running");
        device.release_events();
        dropped.join().unwrap();
    });
}

/// Memory of a buffer nobody gave back outlives the pool.
#[test]
fn what_is_still_out_stays_after_the_pool() {
    let (_, pool) = pool(1 << 30);
    let buffer = pool.allocate(4 * MIB, PinMode::Now).unwrap();
    mark(buffer, 7);
    drop(pool);
    assert!(is_marked(buffer, 7));
}

/// Two pools cut their slabs the same way: a buffer of one must not end what the other has there.
#[test]
fn a_buffer_of_another_pool_is_turned_away() {
    let ((device, mine), (_, others)) = (pool(1 << 30), pool(1 << 30));
    for asked in [1, MIB, 9 * MIB] {
        let buffers = [&mine, &others].map(|pool| pool.allocate(asked, PinMode::Now).unwrap());
        let before = mine.usage();
        let refused = mine.free(buffers[1]).unwrap_err();
        assert!(matches!(refused, PinnedError::NotOut { .. }), "{refused}");
        let refused = mine.free_after(buffers[1], vec![done(&device)]).unwrap_err();
        assert!(matches!(refused, PinnedError::NotOut { .. }), "{refused}");
        assert_eq!(mine.usage(), before);
        mine.free(buffers[0]).unwrap();
        others.free(buffers[1]).unwrap();
        mine.check().unwrap();
    }
}
