//! The campaign of faults: random sequences of what trainers do, on files and devices that fail.
//!
//! ```text
//!  seed ──► Script (operations, faults) ──► World (the engine, and what each byte must be) ──► Tally
//! ```
//! A script comes of its seed alone. What the threads make of it does not: a seed that fails may
//! have to be run some times before it fails again. Worlds are in `both`, one for each device.

pub(crate) mod errors;
pub(crate) mod script;
pub(crate) mod tally;

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use dormouse_device::host::guard;

use self::script::Script;
use self::tally::Tally;

/// Default number of sequences.
const SEQUENCES_DEFAULT: u64 = 600;
/// Each device has its share of them.
const DEVICES: u64 = 2;
/// After how many sequences it is said how far the campaign is.
const SAID_EVERY: u64 = 10_000;
/// How often a seed is run that was named, or that failed.
const REPEATS: u64 = 50;
/// How often a shorter script is run before it is said not to fail.
const SHORTER_REPEATS: u32 = 4;
/// How long one sequence may take before it is said to hang.
const HANG: Duration = Duration::from_secs(180);
/// How often that is looked at.
const LOOK: Duration = Duration::from_millis(100);

/// How many sequences, and of which seeds.
struct Orders {
    /// On each device.
    seeds: Range<u64>,
    /// One seed, repeated, with its script cut to this many operations.
    replayed: Option<(u64, usize)>,
}

impl Orders {
    fn read() -> Self {
        let number = |name| {
            std::env::var(name).ok().filter(|text| !text.is_empty()).map(|text| {
                text.parse().unwrap_or_else(|_| panic!("{name} is {text:?}; accepted: a number"))
            })
        };
        let length = number("CAMPAIGN_LENGTH").map_or(usize::MAX, |length: u64| length as usize);
        let first = number("CAMPAIGN_FIRST").unwrap_or(0);
        let sequences = number("CAMPAIGN_SEQUENCES").unwrap_or(SEQUENCES_DEFAULT);
        Self {
            seeds: first..first + sequences.div_ceil(DEVICES),
            replayed: number("CAMPAIGN_SEED").map(|seed| (seed, length)),
        }
    }
}

/// Runs the sequences that were asked for. `name` is the test's own, `run` its world's. `None` where
/// one seed was run again: that says nothing about all of them.
pub(crate) fn campaign(name: &str, run: impl Fn(&Script, &mut Tally)) -> Option<Tally> {
    let orders = Orders::read();
    // Owners write to memory that is frozen.
    guard::install().unwrap();
    let mut tally = Tally::default();
    let watch = Watch::start(name);
    let go = |seed: u64, script: &Script, tally: &mut Tally| {
        watch.at(seed);
        let start = Instant::now();
        let ended = catch_unwind(AssertUnwindSafe(|| run(script, tally)));
        tally.longest = tally.longest.max((start.elapsed(), seed));
        if ended.is_err() {
            let shorter = shortest(&watch, seed, script, &run);
            panic!("{}", failed(name, seed, &shorter.unwrap_or_else(|| script.clone())));
        }
    };
    if let Some((seed, length)) = orders.replayed {
        let script = Script::of(seed).cut(length);
        for _ in 0..REPEATS {
            go(seed, &script, &mut tally);
        }
        println!("{name}: seed {seed} ran {REPEATS} times: {script:?}");
        return None;
    }
    let last = orders.seeds.end.saturating_sub(1);
    for seed in orders.seeds {
        go(seed, &Script::of(seed), &mut tally);
        if (seed + 1).is_multiple_of(SAID_EVERY) && seed != last {
            println!("{name}, so far: {tally}");
        }
    }
    println!("{name}: {tally}");
    Some(tally)
}

/// The shortest beginning of a script that fails too, as far as a few tries tell.
fn shortest(
    watch: &Watch,
    seed: u64,
    script: &Script,
    run: &impl Fn(&Script, &mut Tally),
) -> Option<Script> {
    let fails = |script: &Script| {
        (0..SHORTER_REPEATS).any(|_| {
            watch.at(seed);
            catch_unwind(AssertUnwindSafe(|| run(script, &mut Tally::default()))).is_err()
        })
    };
    (0..script.operations.len()).map(|length| script.clone().cut(length)).find(fails)
}

fn failed(name: &str, seed: u64, script: &Script) -> String {
    let length = script.operations.len();
    format!(
        "the campaign failed in {name}: {script:?}\nseed {seed}, {length} operations; again: \
         make campaign CAMPAIGN_SEED={seed} CAMPAIGN_LENGTH={length}"
    )
}

/// Ends the process if a sequence hangs, and names the sequence.
struct Watch {
    /// Counts sequences, and has the seed of the last.
    state: Arc<(AtomicU64, AtomicU64)>,
    is_over: Arc<AtomicBool>,
}

impl Watch {
    fn start(name: &str) -> Self {
        let watch = Self { state: Arc::default(), is_over: Arc::default() };
        let (state, is_over) = (Arc::clone(&watch.state), Arc::clone(&watch.is_over));
        let name = name.to_owned();
        std::thread::spawn(move || {
            let (mut seen, mut since) = (0, Duration::ZERO);
            while !is_over.load(Ordering::SeqCst) {
                std::thread::sleep(LOOK);
                let now = state.0.load(Ordering::SeqCst);
                since = if now == seen { since + LOOK } else { Duration::ZERO };
                seen = now;
                if since > HANG {
                    let seed = state.1.load(Ordering::SeqCst);
                    eprintln!("{name}: seed {seed} hangs: make campaign CAMPAIGN_SEED={seed}");
                    std::process::abort();
                }
            }
        });
        watch
    }

    fn at(&self, seed: u64) {
        self.state.1.store(seed, Ordering::SeqCst);
        self.state.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.is_over.store(true, Ordering::SeqCst);
    }
}
