//! The background thread, which pins in advance.

use dormouse_alloc::pinned::{PinMode, PinnedError};
use dormouse_device::Operation;

use super::*;

fn preparing(cap_bytes: usize) -> (Arc<TestDevice>, Pool) {
    pool_of(PinnedConfig { prepares: true, ..config(cap_bytes) })
}

#[test]
fn next_slab_is_pinned_in_advance() {
    let (_, pool) = preparing(1 << 30);
    // More than half of the first slab.
    let first: Vec<_> = (0..5).map(|_| pool.allocate(MIB / 4, PinMode::Now).unwrap()).collect();
    until(|| pool.usage().idle_bytes > 0);
    let pinned_in_all = pool.usage().pinned_in_all_bytes;
    let rest: Vec<_> = (0..7).map(|_| pool.allocate(MIB / 4, PinMode::Now).unwrap()).collect();
    assert_eq!(pool.usage().pinned_in_all_bytes, pinned_in_all, "no request has pinned");
    for buffer in first.into_iter().chain(rest) {
        pool.free(buffer).unwrap();
    }
    pool.check().unwrap();
}

#[test]
fn repeated_size_is_pinned_in_advance() {
    let (_, pool) = preparing(1 << 30);
    let _first = pool.allocate(MIB, PinMode::Now).unwrap();
    assert_eq!(pool.usage().idle_bytes, 0);
    let _second = pool.allocate(MIB, PinMode::Now).unwrap();
    until(|| pool.usage().idle_bytes == MIB as u64);
}

#[test]
fn nothing_is_pinned_in_advance_beyond_the_cap() {
    let (_, pool) = preparing(3 * MIB);
    for _ in 0..7 {
        let _kept = pool.allocate(MIB / 4, PinMode::Now).unwrap();
    }
    std::thread::sleep(Duration::from_millis(20));
    let usage = pool.usage();
    assert!(usage.peak_pinned_bytes <= 3 * MIB as u64, "{usage:?}");
    let last = pool.allocate(MIB, PinMode::Now).unwrap();
    assert_eq!(last.bytes(), MIB, "memory pinned in advance does not cause a refusal");
}

#[test]
fn error_of_the_background_thread_affects_no_request() {
    let (device, pool) = preparing(1 << 30);
    let _first = pool.allocate(UNIT_BYTES, PinMode::Now).unwrap();
    device.fail_from(Operation::Pin, 1, refused());
    let mut out: Vec<_> = (0..5).map(|_| pool.allocate(MIB / 4, PinMode::Now).unwrap()).collect();
    until(|| pool.usage().background_error == Some(PinnedError::Device(refused())));
    // It is not retried.
    let asked = device.calls(Operation::Pin);
    out.push(pool.allocate(UNIT_BYTES, PinMode::Now).unwrap());
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(device.calls(Operation::Pin), asked);
    device.heal();
    // The next request that pins memory resumes the thread.
    out.push(pool.allocate(3 * MIB, PinMode::Now).unwrap());
    assert_eq!(pool.usage().background_error, None);
    out.push(pool.allocate(UNIT_BYTES, PinMode::Now).unwrap());
    until(|| pool.usage().idle_bytes > 0);
}

#[test]
fn background_thread_unpins_memory_beyond_the_cap() {
    let (_, pool) = preparing(4 * MIB);
    let rest = pool.allocate(4 * MIB, PinMode::Now).unwrap();
    let bounce = pool.allocate(2 * MIB, PinMode::Bounce).unwrap();
    pool.free(bounce).unwrap();
    until(|| pool.usage().pinned_bytes == 4 * MIB as u64);
    pool.free(rest).unwrap();
    pool.check().unwrap();
}
