//! Several threads at once. The checks hold for every interleaving.

use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_alloc::pinned::{PinMode, PinnedError};

use super::*;
use crate::common::random::Random;

const THREADS: u64 = 4;
const TURNS: usize = 1500;
const CAP: usize = 48 * MIB;

fn live(pool: &Pool, marks: &AtomicU64, seed: u64) {
    let (mut random, mut out) = (Random(seed), Vec::new());
    for _ in 0..TURNS {
        if out.len() > 12 || (random.below(2) == 0 && !out.is_empty()) {
            let (buffer, own): (PinnedBuffer, u64) = out.swap_remove(random.below(out.len()));
            assert!(is_marked(buffer, own), "another has written to {buffer:?}");
            pool.free(buffer).unwrap();
            continue;
        }
        let bytes = match random.below(3) {
            0 => 1 + random.below(64 << 10),
            1 => 1 + random.below(MIB),
            _ => 1 + random.below(6 * MIB),
        };
        let mode = if random.below(10) == 0 { PinMode::Bounce } else { PinMode::Now };
        match pool.allocate(bytes, mode) {
            Ok(buffer) => {
                let own = marks.fetch_add(1, Ordering::Relaxed);
                mark(buffer, own);
                out.push((buffer, own));
            }
            Err(PinnedError::Full { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        if random.below(200) == 0 {
            pool.set_cap(CAP as u64 / 2);
            pool.set_cap(CAP as u64);
        }
    }
    for (buffer, own) in out {
        assert!(is_marked(buffer, own));
        pool.free(buffer).unwrap();
    }
}

#[test]
fn concurrent_requests_lose_nothing() {
    for prepares in [false, true] {
        let (_, pool) = pool_of(PinnedConfig { prepares, ..config(CAP) });
        let marks = AtomicU64::new(1);
        std::thread::scope(|scope| {
            for seed in 1..=THREADS {
                let (pool, marks) = (&pool, &marks);
                scope.spawn(move || live(pool, marks, seed));
            }
        });
        pool.check().unwrap();
        let usage = pool.usage();
        assert_eq!((usage.buffers, usage.used_bytes), (0, 0));
        pool.set_cap(0);
        assert_eq!(pool.usage().pinned_bytes, 0);
    }
}

/// Each thread requests only its share of the cap.
#[test]
fn shares_of_the_cap_are_never_refused() {
    const SHARE: usize = 8 * MIB;
    let (_, pool) = pool(THREADS as usize * SHARE);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..TURNS {
                    let buffer = pool.allocate(SHARE, PinMode::Now).unwrap();
                    pool.free(buffer).unwrap();
                }
            });
        }
    });
    assert!(pool.usage().peak_pinned_bytes <= (THREADS as usize * SHARE) as u64);
}
