//! The allocator where blocks share pages, against a shadow that keeps its own account of blocks,
//! pages and contents (`packed_shadow/`).
//!
//! # What a refusal is held against
//! When a request is refused with `OutOfMemory`, the shadow counts by brute force: with nothing
//! pending, and every page unmapped that no awake block has a part in, how many pages would have
//! to be mapped at the best place there is? The refusal is right where these and the pages that
//! must stay, together with staged bytes, pass the budget or the device. Places are all aligned
//! starts in gaps between blocks (asleep ones included: they keep their addresses) of the segments
//! of the request's arena and stream, those of small, large and huge blocks, and a new segment where no
//! segment with a block in it lies.
//!
//! So a refusal is *proved* right as far as no block moves and none changes pools. Not counted as
//! places are gaps in the segments of other pools (arenas and streams lie apart, by contract: what is
//! lost of a page there is less than the page), and runs of free addresses less than 33/32 of what a new segment needs (the search
//! there is by size class, see `core::Tlsf`). Nothing is claimed about a call in which the device
//! refused something.

use crate::common::PAGE;
use crate::packed_shadow::Shadow;
use crate::packed_shadow::ops::{OP_BYTES, Op, SETUP_BYTES, Setup, decode};
use proptest::prelude::*;
use std::path::PathBuf;
use std::time::Instant;

/// Operations of the long run; `DORMOUSE_MODEL_OPS` says otherwise.
const LONG_RUN_OPS: usize = 300_000;
/// Operations on one allocator of the long run.
const OPS_PER_LIFE: usize = 2000;

/// Random bytes from a counter (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        let words = std::iter::repeat_with(|| self.next().to_le_bytes());
        words.flatten().take(count).collect()
    }
}

fn life() -> impl Strategy<Value = Vec<u8>> {
    let ops = proptest::collection::vec(any::<[u8; OP_BYTES]>(), 1..160);
    (any::<[u8; SETUP_BYTES]>(), ops).prop_map(|(mut setup, ops)| {
        // Everything after each operation.
        setup[SETUP_BYTES - 1] = 0;
        [&setup[..], ops.as_flattened()].concat()
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(384))]

    /// I1 to I4 and I6 to I8, budget, figures, lookups, contents and refusals.
    #[test]
    fn agrees_with_the_shadow_and_repeats_itself(bytes in life()) {
        prop_assert_eq!(Shadow::run(&bytes), Shadow::run(&bytes));
    }
}

/// The same over long lives, compared now and then.
#[test]
fn a_long_run_agrees_with_the_shadow() {
    let asked = std::env::var("DORMOUSE_MODEL_OPS").ok();
    let goal = asked.map_or(LONG_RUN_OPS, |it| it.parse().expect("a number of operations"));
    let (began, mut ops, mut seed) = (Instant::now(), 0, 0);
    let (mut blocks, mut refused) = (0, 0);
    while ops < goal {
        let mut bytes = Random(seed).bytes(SETUP_BYTES + OPS_PER_LIFE * OP_BYTES);
        bytes[SETUP_BYTES - 1] = 7;
        let outcome = std::panic::catch_unwind(|| Shadow::run(&bytes));
        let run = outcome.unwrap_or_else(|_| panic!("life {seed} failed, see above"));
        (ops, seed) = (ops + run.ops, seed + 1);
        blocks += run.trace.iter().flatten().count();
        refused += run.trace.iter().filter(|it| it.is_none()).count();
    }
    let seconds = began.elapsed().as_secs_f64();
    println!("{ops} operations, {blocks} blocks, {refused} refusals in {seconds:.1} s");
}

/// What the fuzzer has found worth keeping (`make fuzz-alloc`).
/// `DORMOUSE_MODEL_INPUT` names another file or folder.
#[test]
fn the_fuzzers_corpus_agrees_with_the_shadow() {
    let corpus = concat!(env!("CARGO_MANIFEST_DIR"), "/fuzz/corpus/operations");
    let asked = std::env::var_os("DORMOUSE_MODEL_INPUT").map(PathBuf::from);
    let path = asked.unwrap_or_else(|| PathBuf::from(corpus));
    let mut files: Vec<PathBuf> = match std::fs::read_dir(&path) {
        Ok(entries) => entries.map(|it| it.unwrap().path()).collect(),
        Err(_) => vec![path],
    };
    files.sort();
    for file in &files {
        let bytes = std::fs::read(file).unwrap();
        let outcome = std::panic::catch_unwind(|| Shadow::run(&bytes));
        assert!(outcome.is_ok(), "{} failed, see above", file.display());
    }
    assert!(!files.is_empty(), "there is no corpus");
}

/// I6: where no block is shared and the budget has room, how fast the device is has no say.
#[test]
fn addresses_of_unshared_blocks_do_not_depend_on_time() {
    for seed in 0..40 {
        let bytes = Random(seed).bytes(SETUP_BYTES + 300 * OP_BYTES);
        assert_eq!(addresses(&bytes, true), addresses(&bytes, false), "seed {seed}");
    }
}

/// Addresses on a device that gets on with its work at once, or never.
fn addresses(bytes: &[u8], is_quick: bool) -> Vec<Option<usize>> {
    let (setup, ops) = decode(bytes);
    let streams = setup.streams.max(1);
    // Pages that are moved are those of streams that are quiet: time has a say in which.
    let setup = Setup {
        streams,
        moves_pages: false,
        space_pages: 8192,
        budget_bytes: (4096 * PAGE) as u64,
        capacity_pages: 8192,
        ..setup
    };
    let mut shadow = Shadow::new(setup);
    for op in ops {
        match op {
            Op::Free { which, .. } => shadow.apply(Op::Free { which, other: 0 }),
            // None that cannot be had.
            Op::Allocate { bytes, .. } if bytes > 32 * PAGE => {}
            Op::Allocate { .. } | Op::Launch { .. } | Op::ReopenArena { .. } => shadow.apply(op),
            _ => {}
        }
        if is_quick {
            shadow.drain();
        }
    }
    shadow.compare();
    assert_eq!(shadow.ooms, 0);
    shadow.trace.clone()
}
