//! A device that refuses to pin at each call, and behaviour that the engine relies on.

use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_alloc::pinned::{PinLimit, PinMode, PinnedError};
use dormouse_device::Operation;

use super::*;

/// Makes requests with idle slabs and a full cap in between. Returns the number that succeeded.
fn work(pool: &Pool) -> usize {
    let mut met = 0;
    for round in 0..3 {
        let mut out = Vec::new();
        for bytes in [UNIT_BYTES, 3 * MIB, 64 << 10, (5 + round) * MIB, 700 << 10, 20 * MIB] {
            match pool.allocate(bytes, PinMode::Now) {
                Ok(buffer) => {
                    mark(buffer, bytes as u64);
                    out.push((buffer, bytes as u64));
                }
                Err(PinnedError::Device(_)) => {}
                Err(other) => panic!("{other}"),
            }
            pool.check().unwrap();
        }
        met += out.len();
        for (buffer, bytes) in out {
            assert!(is_marked(buffer, bytes));
            pool.free(buffer).unwrap();
        }
        pool.check().unwrap();
        assert_eq!(pool.usage().used_bytes, 0);
    }
    met
}

#[test]
fn a_failed_pin_loses_nothing() {
    let pins = {
        let (device, pool) = pool(40 * MIB);
        assert_eq!(work(&pool), 18);
        device.calls(Operation::Pin)
    };
    assert!(pins > 5, "{pins}");
    for nth in 1..=pins {
        let (device, pool) = pool(40 * MIB);
        device.fail(Operation::Pin, nth, refused());
        assert!(work(&pool) >= 17, "one refusal costs at most one request");
        pool.set_cap(0);
        assert_eq!((pool.usage().pinned_bytes, pool.usage().slabs), (0, 0));
        // From this call on it refuses always: pinned memory still serves.
        let (device, pool) = super::pool(40 * MIB);
        device.fail_from(Operation::Pin, nth, refused());
        work(&pool);
        device.heal();
        assert_eq!(work(&pool), 18, "no lasting effect");
    }
}

#[test]
fn idle_slabs_are_unpinned_when_the_system_is_out_of_memory() {
    let (device, pool) = pool(1 << 30);
    let idle = pool.allocate(3 * MIB, PinMode::Now).unwrap();
    pool.free(idle).unwrap();
    device.fail(Operation::Pin, 1, refused());
    let buffer = pool.allocate(12 * MIB, PinMode::Now).unwrap();
    let usage = pool.usage();
    assert_eq!((usage.used_bytes, usage.pinned_bytes), (12 * MIB as u64, 12 * MIB as u64));
    // A small request then pins only its own size.
    device.fail(Operation::Pin, 1, refused());
    let small = pool.allocate(UNIT_BYTES, PinMode::Now).unwrap();
    assert_eq!(pool.usage().pinned_bytes, (12 * MIB + UNIT_BYTES) as u64);
    // Without idle slabs, and with no smaller size to pin, the error is returned.
    device.fail(Operation::Pin, 1, refused());
    assert_eq!(pool.allocate(9 * MIB, PinMode::Now), Err(PinnedError::Device(refused())));
    assert_eq!(pool.usage().used_bytes, (12 * MIB + UNIT_BYTES) as u64);
    pool.free(small).unwrap();
    pool.free(buffer).unwrap();
}

/// P3: at the cap a free range of any slab serves.
#[test]
fn requests_that_fit_any_free_range_are_not_refused() {
    let (_, pool) = pool(2 * MIB);
    let small = pool.allocate(UNIT_BYTES, PinMode::Now).unwrap();
    assert_eq!(pool.usage().pinned_bytes, 2 * MIB as u64, "all of it is one slab for small ones");
    let rest = 2 * MIB - UNIT_BYTES;
    let large = pool.allocate(rest, PinMode::Now).unwrap();
    assert!(matches!(pool.allocate(1, PinMode::Now), Err(PinnedError::Full { .. })));
    mark(small, 1);
    mark(large, 2);
    assert!(is_marked(small, 1) && is_marked(large, 2));
    // A small one fits where a large one was, too.
    pool.free(small).unwrap();
    pool.free(large).unwrap();
    let large = pool.allocate(rest, PinMode::Now).unwrap();
    let small = pool.allocate(UNIT_BYTES, PinMode::Now).unwrap();
    assert!(!large.range().contains(small.start()));
}

#[test]
fn nothing_is_kept_if_pinning_is_free() {
    let (_, pool) = pool_of(PinnedConfig::new(64 * MIB as u64, false));
    for bytes in [UNIT_BYTES, 8 * MIB] {
        let buffer = pool.allocate(bytes, PinMode::Now).unwrap();
        assert_eq!(pool.usage().pinned_bytes, bytes as u64, "no more than asked");
        pool.free(buffer).unwrap();
        assert_eq!((pool.usage().pinned_bytes, pool.usage().used_bytes), (0, 0));
    }
}

#[test]
fn bounces_exceed_the_cap_and_are_not_kept_there() {
    let (_, pool) = pool(12 * MIB);
    let rest = pool.allocate(8 * MIB, PinMode::Now).unwrap();
    assert!(matches!(pool.allocate(5 * MIB, PinMode::Now), Err(PinnedError::Full { .. })));
    let bounce = pool.allocate(6 * MIB, PinMode::Bounce).unwrap();
    assert_eq!(pool.usage().pinned_bytes, 14 * MIB as u64);
    // The memory of a freed bounce serves the next bounce, and other requests only within the cap.
    pool.free(bounce).unwrap();
    let next = pool.allocate(4 * MIB, PinMode::Now).unwrap();
    assert_eq!(pool.usage().pinned_bytes, 12 * MIB as u64);
    pool.free(next).unwrap();
    pool.free(rest).unwrap();
    pool.set_cap(9 * MIB as u64);
    assert_eq!(pool.usage().pinned_bytes, 8 * MIB as u64, "the smaller one is unpinned");
    pool.set_cap(0);
    assert_eq!(pool.usage().pinned_bytes, 0);
    assert!(matches!(pool.allocate(1, PinMode::Now), Err(PinnedError::Full { .. })));
    let bounce = pool.allocate(1, PinMode::Bounce).unwrap();
    assert_eq!(bounce.bytes(), UNIT_BYTES);
    pool.free(bounce).unwrap();
    // Its slab may still be pinned, but serves only another bounce.
    assert!(matches!(pool.allocate(1, PinMode::Now), Err(PinnedError::Full { .. })));
    assert_eq!(pool.allocate(1, PinMode::Bounce).unwrap().range(), bounce.range());
}

#[test]
fn invalid_settings_are_refused() {
    let host = HostDevice::new(HostConfig::new(1 << 20, 1 << 20)).unwrap();
    let config = PinnedConfig { cap_bytes: 1 << 20, keeps: false, prepares: true };
    let refused = PinnedPool::new(Arc::new(host), config, Arc::new(Timeline::new(64)), None);
    let text = refused.unwrap_err().to_string();
    assert_eq!(text, "prepares is 1; accepted: 0 without keeps");
}

/// Memory that may be pinned, as a test says.
#[derive(Debug, Default)]
struct Room(AtomicU64);

impl PinLimit for Room {
    fn limit_bytes(&self, _: u64) -> u64 {
        self.0.load(Ordering::Relaxed)
    }
}

#[test]
fn a_limit_is_asked_before_a_slab_is_pinned() {
    let (_, pool) = pool(64 * MIB);
    let room = Arc::new(Room::default());
    pool.limit_by(Arc::<Room>::clone(&room));
    let full = |bytes: usize| match pool.allocate(bytes, PinMode::Now) {
        Err(PinnedError::Full { cap_bytes, .. }) => cap_bytes,
        other => panic!("{other:?}"),
    };
    assert_eq!((full(MIB), pool.usage().pinned_bytes), (0, 0));
    let bounce = pool.allocate(MIB, PinMode::Bounce).unwrap();
    assert!(pool.usage().pinned_bytes >= MIB as u64);
    pool.free(bounce).unwrap();
    // Idle slabs are unpinned for it.
    room.0.store(8 * MIB as u64, Ordering::Relaxed);
    let first = pool.allocate(8 * MIB, PinMode::Now).unwrap();
    assert_eq!((pool.usage().pinned_bytes, full(MIB)), (8 * MIB as u64, 8 * MIB as u64));
    // Memory that is pinned serves again, whatever there is.
    room.0.store(0, Ordering::Relaxed);
    pool.free(first).unwrap();
    let again = pool.allocate(8 * MIB, PinMode::Now).unwrap();
    pool.free(again).unwrap();
    pool.set_cap(0);
    assert_eq!(pool.usage().pinned_bytes, 0);
}

/// One lack of memory costs the slabs that make up for it, not all that are idle.
#[test]
fn a_limit_below_what_is_pinned_unpins_no_more_than_it_asks_for() {
    let (_, pool) = pool(64 * MIB);
    let room = Arc::new(Room(AtomicU64::new(48 * MIB as u64)));
    pool.limit_by(Arc::<Room>::clone(&room));
    let buffers = [0; 6].map(|_| pool.allocate(8 * MIB, PinMode::Now).unwrap());
    buffers.into_iter().for_each(|buffer| pool.free(buffer).unwrap());
    assert_eq!(pool.usage().idle_bytes, 48 * MIB as u64);
    room.0.store(47 * MIB as u64, Ordering::Relaxed);
    let buffer = pool.allocate(9 * MIB, PinMode::Now).unwrap();
    assert_eq!(pool.usage().pinned_bytes, 41 * MIB as u64, "two of six slabs, and the new one");
    pool.free(buffer).unwrap();
}

/// P3: no slab is unpinned for one that the limit refuses, and a larger one serves instead.
#[test]
fn a_larger_idle_slab_serves_where_the_limit_allows_no_other() {
    let (_, pool) = pool(64 * MIB);
    let room = Arc::new(Room(AtomicU64::new(8 * MIB as u64)));
    pool.limit_by(Arc::<Room>::clone(&room));
    let first = pool.allocate(8 * MIB, PinMode::Now).unwrap();
    pool.free(first).unwrap();
    room.0.store(0, Ordering::Relaxed);
    let refused = pool.allocate(9 * MIB, PinMode::Now);
    assert!(matches!(refused, Err(PinnedError::Full { .. })), "{refused:?}");
    let second = pool.allocate(5 * MIB, PinMode::Now).unwrap();
    assert_eq!((second.start(), pool.usage().pinned_bytes), (first.start(), 8 * MIB as u64));
    pool.free(second).unwrap();
}
