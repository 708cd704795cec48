//! The engine over a file that fails on command: on the host device, and on a GPU that the
//! stand-in driver plays. Tests in `both` are written once and hold on either; what is one
//! device's own is beside it.
#![expect(unsafe_code, reason = "tests play the trainer, who touches memory by address")]

mod ahead;
pub(crate) mod campaign;
pub(crate) mod on_cuda;
pub(crate) mod on_host;

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::time::{Duration, Instant};

use dormouse_device::Hold;

use crate::error::OffloadError;
use dormouse_storage::{IoEngine, NvmeConfig};

pub(crate) const KIB: usize = 1 << 10;
pub(crate) const MIB: usize = 1 << 20;
/// How long a test waits for what other threads do by themselves, before it fails.
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
/// How long something is held up that a caller has to wait for: long enough to go wrong in.
pub(crate) const A_WHILE: Duration = Duration::from_millis(20);

/// Waits until `is_so`.
pub(crate) fn soon(what: &str, mut is_so: impl FnMut() -> bool) {
    let start = Instant::now();
    while !is_so() {
        assert!(start.elapsed() < PATIENCE, "not within {PATIENCE:?}: {what}");
        std::thread::yield_now();
    }
}

/// Blocks a stream until it is released, at most for [`PATIENCE`]: a test that waits for it by mistake
/// fails instead of hanging.
pub(crate) struct Held {
    go: Sender<()>,
    is_over: Arc<AtomicBool>,
}

impl Held {
    pub(crate) fn new<D: Hold>(device: &D, stream: &D::Stream) -> Self {
        Self::by(|until| device.hold(stream, until).unwrap())
    }

    /// As `new`, for a queue that `hold` blocks by running its argument.
    pub(crate) fn by(hold: impl FnOnce(Box<dyn FnOnce() + Send>)) -> Self {
        let (go, wait) = channel();
        let is_over = Arc::new(AtomicBool::new(false));
        let over = Arc::clone(&is_over);
        let until = move || {
            if wait.recv_timeout(PATIENCE) == Err(RecvTimeoutError::Timeout) {
                over.store(true, Ordering::SeqCst);
            }
        };
        hold(Box::new(until));
        Self { go, is_over }
    }

    pub(crate) fn let_go(self) {
        assert!(!self.is_over.load(Ordering::SeqCst), "somebody waited for a stream that was held");
        self.go.send(()).unwrap();
    }

    /// Releases the stream [`A_WHILE`] from now. The returned flag is set by then, so a caller that waited
    /// for the stream finds it set.
    pub(crate) fn let_go_later(self) -> Arc<AtomicBool> {
        let has_gone = Arc::new(AtomicBool::new(false));
        let gone = Arc::clone(&has_gone);
        std::thread::spawn(move || {
            std::thread::sleep(A_WHILE);
            gone.store(true, Ordering::SeqCst);
            self.let_go();
        });
        has_gone
    }
}

pub(crate) fn fill(address: usize, bytes: usize, seed: u64) {
    // SAFETY: a live, awake block of the test's own.
    let words = unsafe { std::slice::from_raw_parts_mut(address as *mut u64, bytes / 8) };
    for (i, word) in words.iter_mut().enumerate() {
        *word = (i as u64 + 1).wrapping_mul(seed | 1);
    }
}

pub(crate) fn holds(address: usize, bytes: usize, seed: u64) -> bool {
    // SAFETY: a live, awake block of the test's own.
    let words = unsafe { std::slice::from_raw_parts(address as *const u64, bytes / 8) };
    words.iter().enumerate().all(|(i, &word)| word == (i as u64 + 1).wrapping_mul(seed | 1))
}

pub(crate) fn is_zero(address: usize, bytes: usize) -> bool {
    // SAFETY: a live, awake block of the test's own.
    let words = unsafe { std::slice::from_raw_parts(address as *const u64, bytes / 8) };
    words.iter().all(|&word| word == 0)
}

/// Writes one word, as a trainer's stray update would.
pub(crate) fn poke(address: usize, value: u64) {
    // SAFETY: a live block of the test's own; where it is frozen the guard lets the write through.
    unsafe { std::ptr::write_volatile(address as *mut u64, value) }
}

pub(crate) fn peek(address: usize) -> u64 {
    // SAFETY: a live, awake block of the test's own.
    unsafe { std::ptr::read_volatile(address as *const u64) }
}

pub(crate) fn cause(error: OffloadError) -> OffloadError {
    match error {
        OffloadError::WakeFailed { source, .. } => (*source).clone(),
        other => other,
    }
}

pub(crate) fn real_file(file_bytes: usize) -> NvmeConfig {
    let dir = dormouse_storage::testing::disk_dir();
    let file_bytes = file_bytes as u64;
    NvmeConfig {
        dir,
        file_bytes,
        file_bytes_max: 0,
        io_threads: 2,
        io_engine: IoEngine::Auto,
        queue_depth: 4,
        write_budget_bytes: 0,
    }
}
