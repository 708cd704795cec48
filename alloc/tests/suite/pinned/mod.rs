//! The pinned pool on real memory and real streams, with faults.
#![allow(unsafe_code, reason = "buffers are written and read to see whose they are")]

mod background;
mod faults;
mod frees;
mod threads;

use std::sync::Arc;
use std::time::{Duration, Instant};

use dormouse_alloc::pinned::{PinnedBuffer, PinnedConfig, PinnedPool, UNIT_BYTES};
use dormouse_device::faulty::Faulty;
use dormouse_device::host::{HostConfig, HostDevice};
use dormouse_device::{DeviceError, Operation};
use dormouse_timeline::Timeline;

type TestDevice = Faulty<HostDevice>;
type Pool = PinnedPool<TestDevice>;

const MIB: usize = 1 << 20;
/// Longer than any awaited work takes.
const PATIENCE: Duration = Duration::from_secs(60);

fn config(cap_bytes: usize) -> PinnedConfig {
    PinnedConfig { cap_bytes: cap_bytes as u64, keeps: true, prepares: false }
}

fn pool_of(config: PinnedConfig) -> (Arc<TestDevice>, Pool) {
    let host = HostDevice::new(HostConfig::new(1 << 20, 1 << 20)).unwrap();
    let device = Arc::new(Faulty::new(host));
    let pool = PinnedPool::new(Arc::clone(&device), config, Arc::new(Timeline::new(64)), None);
    (device, pool.unwrap())
}

/// A pool that keeps memory and has no thread.
fn pool(cap_bytes: usize) -> (Arc<TestDevice>, Pool) {
    pool_of(config(cap_bytes))
}

fn refused() -> DeviceError {
    DeviceError::Refused {
        operation: Operation::Pin,
        start: 0,
        bytes: 0,
        code: 12,
        reason: "injected".to_owned(),
    }
}

/// Waits for the background thread.
fn until(what: impl Fn() -> bool) {
    let start = Instant::now();
    while !what() {
        assert!(start.elapsed() < PATIENCE, "timed out");
        std::thread::yield_now();
    }
}

/// Writes `mark` at the start of every unit.
fn mark(buffer: PinnedBuffer, mark: u64) {
    for at in (0..buffer.bytes()).step_by(UNIT_BYTES) {
        // SAFETY: the buffer is ours, and that long.
        unsafe { ((buffer.start() + at) as *mut u64).write_volatile(mark) };
    }
}

fn is_marked(buffer: PinnedBuffer, mark: u64) -> bool {
    (0..buffer.bytes()).step_by(UNIT_BYTES).all(|at| {
        // SAFETY: as above.
        let seen = unsafe { ((buffer.start() + at) as *const u64).read_volatile() };
        seen == mark
    })
}
