//! Many threads at once. What is checked holds under every interleaving.

use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_alloc::pinned::{PinMode, PinnedError};

use super::*;
use crate::common::random::Random;

const THREADS: u64 = 4;
const TURNS: usize = 1500;
const CAP: usize = 48 * MIB;

fn live(pool: &Pool, over: &Event, marks: &AtomicU64, seed: u64) {
    let (mut random, mut out) = (Random(seed), Vec::new());
    for _ in 0..TURNS {
        if out.len() > 12 || (random.below(2) == 0 && !out.is_empty()) {
            let (buffer, own): (PinnedBuffer, u64) = out.swap_remove(random.below(out.len()));
            assert!(is_marked(buffer, own), "another has written to {buffer:?}");
            match random.below(3) {
                0 => pool.free_after(buffer, vec![over.clone()]).unwrap(),
                _ => pool.free(buffer).unwrap(),
            }
            continue;
        }
        let bytes = match random.below(3) {
            0 => 1 + random.below(64 << 10),
            1 => 1 + random.below(MIB),
            _ => 1 + random.below(6 * MIB),
        };
        let room =
            [PinMode::Now, PinMode::Wait, PinMode::Bounce][random.below(10).saturating_sub(7)];
        match pool.allocate(bytes, room) {
            Ok(buffer) => {
                let own = marks.fetch_add(1, Ordering::Relaxed);
                mark(buffer, own);
                out.push((buffer, own));
            }
            Err(PinnedError::Full { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        if random.below(200) == 0 {
            pool.trim().unwrap();
        }
    }
    for (buffer, own) in out {
        assert!(is_marked(buffer, own));
        pool.free(buffer).unwrap();
    }
}

#[test]
fn everything_at_once_loses_nothing() {
    for prepares in [false, true] {
        let (device, pool) = pool_of(PinnedConfig { prepares, ..config(CAP) });
        let (over, marks) = (done(&device), AtomicU64::new(1));
        std::thread::scope(|scope| {
            for seed in 1..=THREADS {
                let (pool, over, marks) = (&pool, &over, &marks);
                scope.spawn(move || live(pool, over, marks, seed));
            }
        });
        pool.trim().unwrap();
        pool.check().unwrap();
        let usage = pool.usage();
        assert_eq!((usage.buffers, usage.used_bytes, usage.pending_bytes), (0, 0, 0));
        until(|| {
            pool.trim().unwrap();
            pool.usage().pinned_bytes == 0
        });
    }
}

/// No thread is refused for what another is about to have back: each asks for its share alone.
#[test]
fn nobody_is_refused_for_what_others_are_looking_at() {
    const SHARE: usize = 8 * MIB;
    let (device, pool) = pool(THREADS as usize * SHARE);
    let over = done(&device);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                for _ in 0..TURNS {
                    let buffer = pool.allocate(SHARE, PinMode::Now).unwrap();
                    pool.free_after(buffer, vec![over.clone()]).unwrap();
                }
            });
        }
    });
    assert!(pool.usage().peak_pinned_bytes <= (THREADS as usize * SHARE) as u64);
}
