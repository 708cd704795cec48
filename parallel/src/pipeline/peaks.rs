//! Peak memory of an op list.

use std::collections::BTreeMap;

use super::lists::{StageOp, StagePeak};
use super::spec::Pipeline;

/// Returns the peak memory of a stage's list, which depends only on the order of ops.
///
/// A chunk's boundary and saved bytes are alive from its forward to the end of its backward, a
/// microbatch's on each part likewise. Working bytes, and what sleeps of a prefix, are held during an op
/// alone: within this peak a list runs on any machine, as a slower one waits for what is falling asleep.
pub(super) fn peak(ops: &[StageOp], pipeline: &Pipeline, stage: u32) -> StagePeak {
    let bytes = pipeline.bytes_of(stage);
    let mut held = StagePeak { bytes: bytes.fixed, ..StagePeak::default() };
    let mut peak = held;
    // Live chunks of each group and live parts of each microbatch.
    let mut chunks: BTreeMap<u32, u32> = BTreeMap::new();
    let mut microbatches: BTreeMap<(u32, u32), u32> = BTreeMap::new();
    for op in ops {
        let (rows, begins) = (op.rows.count(), op.kind.is_forward());
        let working = rows.saturating_mul(bytes.working(op.kind));
        if !begins {
            peak = largest(peak, with_working(held, working));
        }
        let hold = |bytes: &mut u64, row_bytes: u128| {
            let own = u64::try_from(u128::from(rows).saturating_mul(row_bytes)).unwrap_or(u64::MAX);
            *bytes = if begins { bytes.saturating_add(own) } else { bytes.saturating_sub(own) };
        };
        if op.kind.is_prefix() {
            count(&mut chunks, op.group, begins);
            hold(&mut held.boundary_bytes, bytes.boundary.into());
            hold(&mut held.prefix_bytes, bytes.prefix_saved.into());
        } else {
            count(&mut microbatches, (op.group, op.index), begins);
            hold(&mut held.microbatch_bytes, bytes.kept(op.kind, pipeline.is_last(op.part)));
            let parts = held.in_flight_parts;
            held.in_flight_parts = if begins { parts + 1 } else { parts.saturating_sub(1) };
        }
        held.live_groups = chunks.len() as u32;
        held.in_flight = microbatches.len() as u32;
        held.bytes = bytes
            .fixed
            .saturating_add(held.boundary_bytes)
            .saturating_add(held.prefix_bytes)
            .saturating_add(held.microbatch_bytes);
        if begins {
            peak = largest(peak, with_working(held, working));
        }
    }
    peak
}

fn with_working(held: StagePeak, working: u64) -> StagePeak {
    StagePeak { bytes: held.bytes.saturating_add(working), ..held }
}

/// Counts one more of `key`, or one less.
fn count<K: Ord>(held: &mut BTreeMap<K, u32>, key: K, begins: bool) {
    if begins {
        *held.entry(key).or_default() += 1;
    } else if let Some(count) = held.get_mut(&key) {
        *count -= 1;
        if *count == 0 {
            held.remove(&key);
        }
    }
}

fn largest(a: StagePeak, b: StagePeak) -> StagePeak {
    StagePeak {
        live_groups: a.live_groups.max(b.live_groups),
        in_flight: a.in_flight.max(b.in_flight),
        in_flight_parts: a.in_flight_parts.max(b.in_flight_parts),
        boundary_bytes: a.boundary_bytes.max(b.boundary_bytes),
        prefix_bytes: a.prefix_bytes.max(b.prefix_bytes),
        microbatch_bytes: a.microbatch_bytes.max(b.microbatch_bytes),
        bytes: a.bytes.max(b.bytes),
    }
}
