//! Faults of a well-known pool as negative tests, and wrong frees.

use dormouse_alloc::pinned::{PinMode, PinnedError};

use super::*;

#[test]
fn smaller_free_piece_never_serves_a_larger_request() {
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

#[test]
fn statistics_count_every_free() {
    let (_, pool) = pool(1 << 30);
    let buffers = [4096, MIB, 9 * MIB].map(|bytes| pool.allocate(bytes, PinMode::Now).unwrap());
    assert_eq!(pool.usage().buffers, 3);
    assert_eq!(pool.usage().used_bytes, 4096 + 10 * MIB as u64);
    pool.free(buffers[0]).unwrap();
    assert_eq!((pool.usage().buffers, pool.usage().used_bytes), (2, 10 * MIB as u64));
    pool.free(buffers[1]).unwrap();
    assert_eq!((pool.usage().buffers, pool.usage().used_bytes), (1, 9 * MIB as u64));
    pool.free(buffers[2]).unwrap();
    pool.set_cap(0);
    let usage = pool.usage();
    assert_eq!((usage.buffers, usage.used_bytes), (0, 0));
    assert_eq!((usage.pinned_bytes, usage.slabs), (0, 0));
    assert_eq!(usage.peak_used_bytes, 4096 + 10 * MIB as u64);
}

#[test]
fn stale_buffers_are_refused() {
    let (_, pool) = pool(1 << 30);
    let buffer = pool.allocate(MIB, PinMode::Now).unwrap();
    let not_out = |given| matches!(given, Err(PinnedError::NotOut { .. }));
    pool.free(buffer).unwrap();
    assert!(not_out(pool.free(buffer)), "freed");
    let next = pool.allocate(MIB, PinMode::Now).unwrap();
    assert_eq!(next.range(), buffer.range());
    assert!(not_out(pool.free(buffer)), "allocated again");
    pool.free(next).unwrap();
    pool.set_cap(0);
    assert!(not_out(pool.free(buffer)), "unpinned");
    assert!(matches!(pool.allocate(usize::MAX, PinMode::Now), Err(PinnedError::BadSize { .. })));
}

#[test]
fn buffers_that_are_not_freed_outlive_the_pool() {
    let (_, pool) = pool(1 << 30);
    let buffer = pool.allocate(4 * MIB, PinMode::Now).unwrap();
    mark(buffer, 7);
    drop(pool);
    assert!(is_marked(buffer, 7));
}

/// Two pools divide their slabs in the same way.
#[test]
fn buffer_of_another_pool_is_refused() {
    let ((_, mine), (_, others)) = (pool(1 << 30), pool(1 << 30));
    for asked in [1, MIB, 9 * MIB] {
        let buffers = [&mine, &others].map(|pool| pool.allocate(asked, PinMode::Now).unwrap());
        let before = mine.usage();
        let refused = mine.free(buffers[1]).unwrap_err();
        assert!(matches!(refused, PinnedError::NotOut { .. }), "{refused}");
        assert_eq!(mine.usage(), before);
        mine.free(buffers[0]).unwrap();
        others.free(buffers[1]).unwrap();
        mine.check().unwrap();
    }
}
