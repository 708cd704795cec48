//! A thread that reads all the time never sees bytes other than the owner's (I2).

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use super::bench::{Bench, pattern};
use crate::{AddressRange, Device};

/// Sleeps and wakes that readers watch.
const ROUNDS: usize = 200;
/// Bytes looked at in one read; a pipe holds as much without blocking.
const WINDOW_BYTES: usize = 4096;

/// Both ends of a pipe: `write` reads memory as a thread would, and says `EFAULT` where a thread
/// would die.
struct Pipe([i32; 2]);

impl Pipe {
    fn new() -> Self {
        let mut ends = [0; 2];
        // SAFETY: two file descriptors are written to our own array.
        assert_eq!(unsafe { libc::pipe(ends.as_mut_ptr()) }, 0);
        Self(ends)
    }

    /// What lies at `address` now, or nothing where there is no access.
    fn peek(&self, address: usize, into: &mut [u8]) -> usize {
        // SAFETY: the kernel checks the address; only `read` below uses the bytes.
        let taken = unsafe { libc::write(self.0[1], address as *const _, into.len()) };
        let Ok(taken) = usize::try_from(taken) else {
            let code = std::io::Error::last_os_error().raw_os_error();
            assert_eq!(code, Some(libc::EFAULT), "a read fails by EFAULT only");
            return 0;
        };
        // SAFETY: `into` is ours and at least `taken` long.
        let read = unsafe { libc::read(self.0[0], into.as_mut_ptr().cast(), taken) };
        assert_eq!(usize::try_from(read), Ok(taken));
        taken
    }
}

impl Drop for Pipe {
    fn drop(&mut self) {
        // SAFETY: both descriptors are ours.
        self.0.iter().for_each(|end| unsafe {
            libc::close(*end);
        });
    }
}

/// Reads `range` in windows until `stop`; how often it saw bytes.
fn watch(range: AddressRange, expected: &[u8], stop: &AtomicBool, seen: &AtomicU64) {
    let pipe = Pipe::new();
    let mut window = vec![0; WINDOW_BYTES];
    while !stop.load(Ordering::Relaxed) {
        for offset in (0..range.bytes).step_by(WINDOW_BYTES) {
            let taken = pipe.peek(range.start + offset, &mut window);
            let owners = &expected[offset..offset + taken];
            assert!(&window[..taken] == owners, "foreign bytes at {offset} of {range:x?}");
            seen.fetch_add(u64::from(taken > 0), Ordering::Relaxed);
        }
    }
}

pub(super) fn never_see_foreign_bytes<D: Device>(bench: &Bench<D>) {
    let range = bench.mapped(1, 3, 81);
    let expected = pattern(range.bytes, 81);
    let (stop, seen) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|scope| {
        let watchers: Vec<_> =
            (0..2).map(|_| scope.spawn(|| watch(range, &expected, &stop, &seen))).collect();
        let mut round = 0;
        // Go on until the readers had their share, so that a pass means something.
        while round < ROUNDS || seen.load(Ordering::Relaxed) < ROUNDS as u64 {
            if watchers.iter().any(std::thread::ScopedJoinHandle::is_finished) {
                break;
            }
            let span = bench.sleep(range);
            bench.wake(span, range, 81);
            round += 1;
        }
        stop.store(true, Ordering::Relaxed);
    });
}
