//! What the pinned pool pins beyond what is asked for, as one line of JSON.
//!
//! Sizes are log-uniform, 4 KiB to 256 MiB. *fill*: buffers are taken and none given back. *churn*:
//! at that many live buffers a random one is given back and another taken. `waste` is the peak
//! pinned over the peak asked for, less one; `pinned_per_asked` is what was pinned over the whole run per
//! byte asked for: what the bound on waste costs. A take and its give are timed on a warm pool.
#![allow(clippy::unwrap_used, reason = "a measuring program stops where it cannot go on")]

use std::sync::Arc;
use std::time::Instant;

use dormouse_alloc::pinned::{PinMode, PinnedBuffer, PinnedConfig, PinnedPool};
use dormouse_device::host::{HostConfig, HostDevice};
use dormouse_timeline::Timeline;

const SMALLEST: f64 = 4096.0;
const LARGEST: f64 = (256 << 20) as f64;
/// Pinned at most: more than any run here needs.
const CAP_BYTES: u64 = 1 << 40;
/// Buffers given back and taken per live buffer.
const TURNS: usize = 20;
const STEPS: usize = 100;
const LAYERS: usize = 32;
const LONGEST: usize = 8192;
/// What a layer saves per token: hidden states, projections, the MLP's width.
const BYTES_PER_TOKEN: [usize; 5] = [8192, 8192, 2048, 28_672, 28_672];
const PAIRS: u32 = 200_000;

/// xorshift64*: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)
    }

    fn below(&mut self, count: usize) -> usize {
        usize::try_from(self.next() % count as u64).unwrap()
    }

    #[allow(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn log_uniform(&mut self) -> usize {
        let part = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        (SMALLEST * (LARGEST / SMALLEST).powf(part)) as usize
    }
}

#[derive(Default)]
struct Run {
    asked: u64,
    peak_asked: u64,
    asked_in_all: u64,
    live: Vec<(PinnedBuffer, usize)>,
}

impl Run {
    fn take(&mut self, pool: &PinnedPool<HostDevice>, bytes: usize) {
        self.live.push((pool.allocate(bytes, PinMode::Now).unwrap(), bytes));
        self.asked += bytes as u64;
        self.asked_in_all += bytes as u64;
        self.peak_asked = self.peak_asked.max(self.asked);
    }

    fn give(&mut self, pool: &PinnedPool<HostDevice>, at: usize) {
        let (buffer, bytes) = self.live.swap_remove(at);
        self.asked -= bytes as u64;
        pool.free(buffer).unwrap();
    }

    /// Waste and pinned bytes per asked byte.
    #[allow(clippy::cast_precision_loss)]
    fn figures(&self, pool: &PinnedPool<HostDevice>) -> (f64, f64) {
        let usage = pool.usage();
        let waste = usage.peak_pinned_bytes as f64 / self.peak_asked as f64 - 1.0;
        // `max` drops a NaN.
        assert!(waste >= 0.0, "less was pinned than asked for: {waste}");
        (waste, usage.pinned_in_all_bytes as f64 / self.asked_in_all as f64)
    }
}

fn pool(prepares: bool) -> PinnedPool<HostDevice> {
    let device = Arc::new(HostDevice::new(HostConfig::new(1 << 20, 1 << 20)).unwrap());
    let config = PinnedConfig { cap_bytes: CAP_BYTES, keeps: true, prepares };
    PinnedPool::new(device, config, Arc::new(Timeline::new(64)), None).unwrap()
}

/// Waste and pinned bytes per asked byte.
fn run(live: usize, turns: usize, seed: u64, prepares: bool) -> (f64, f64) {
    let (pool, mut random, mut run) = (pool(prepares), Random(seed), Run::default());
    for _ in 0..live {
        run.take(&pool, random.log_uniform());
    }
    for _ in 0..turns * live {
        run.give(&pool, random.below(live));
        run.take(&pool, random.log_uniform());
    }
    pool.check().unwrap();
    run.figures(&pool)
}

/// Training steps: every step has the same number of layers, each with the same few sizes, which
/// go with the step's sequence length: from half of the longest up. All is given back in between.
fn steps() -> (f64, f64) {
    let (pool, mut random, mut run) = (pool(true), Random(7919), Run::default());
    for _ in 0..STEPS {
        let tokens = LONGEST / 2 + random.below(LONGEST / 2);
        for _ in 0..LAYERS {
            for bytes_per_token in BYTES_PER_TOKEN {
                run.take(&pool, tokens * bytes_per_token);
            }
        }
        while !run.live.is_empty() {
            run.give(&pool, 0);
        }
    }
    run.figures(&pool)
}

/// Nanoseconds of a take and its give on a warm pool.
fn pair_ns(bytes: usize) -> f64 {
    let pool = pool(false);
    let others: Vec<_> = (0..64).map(|_| pool.allocate(bytes, PinMode::Now).unwrap()).collect();
    pool.free(others[7]).unwrap();
    let start = Instant::now();
    for _ in 0..PAIRS {
        pool.free(pool.allocate(bytes, PinMode::Now).unwrap()).unwrap();
    }
    start.elapsed().as_secs_f64() * 1e9 / f64::from(PAIRS)
}

fn main() {
    let mut worst: f64 = 0.0;
    let mut rows = Vec::new();
    for (name, live, turns) in [
        ("fill_100", 100, 0),
        ("fill_1000", 1000, 0),
        ("churn_100", 100, TURNS),
        ("churn_1000", 1000, TURNS),
    ] {
        for prepares in [false, true] {
            // The worst of a few, for 100 buffers are few.
            let runs = (1..=5).map(|seed| run(live, turns, seed * 7919, prepares));
            let (waste, pinned) =
                runs.fold((0.0, 0.0), |a: (f64, f64), b| (a.0.max(b.0), a.1.max(b.1)));
            worst = worst.max(waste);
            let name = if prepares { format!("{name}_prepared") } else { name.to_owned() };
            rows.push(format!(
                "\"{name}\":{{\"waste\":{waste:.4},\"pinned_per_asked\":{pinned:.3}}}"
            ));
        }
    }
    let (waste, pinned) = steps();
    rows.push(format!("\"steps\":{{\"waste\":{waste:.4},\"pinned_per_asked\":{pinned:.3}}}"));
    println!(
        "{{\"pinned_waste\":{worst:.4},{},\"pair_ns\":{{\"64KiB\":{:.0},\"64MiB\":{:.0}}}}}",
        rows.join(","),
        pair_ns(64 << 10),
        pair_ns(64 << 20)
    );
}
