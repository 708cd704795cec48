//! Peak memory of an op list.

use std::collections::BTreeMap;

use super::lists::{StageOp, StageOpKind, StagePeak};
use super::spec::RowBytes;

/// Returns the peak memory of a list, which depends only on the order of ops.
///
/// A chunk's boundary and saved bytes are alive from its forward to the end of its backward, a
/// microbatch's on each part likewise.
pub(super) fn peak(ops: &[StageOp], row_bytes: &RowBytes) -> StagePeak {
    let mut peak = StagePeak::default();
    let mut held = StagePeak::default();
    // Live chunks of each group and live parts of each microbatch.
    let mut chunks: BTreeMap<u32, u32> = BTreeMap::new();
    let mut microbatches: BTreeMap<(u32, u32), u32> = BTreeMap::new();
    for op in ops {
        let rows = op.rows.count();
        let [boundary, saved, microbatch] =
            [row_bytes.boundary, row_bytes.prefix_saved, row_bytes.microbatch_saved]
                .map(|bytes| rows.saturating_mul(bytes));
        match op.kind {
            StageOpKind::PrefixForward => {
                *chunks.entry(op.group).or_default() += 1;
                held.boundary_bytes = held.boundary_bytes.saturating_add(boundary);
                held.prefix_bytes = held.prefix_bytes.saturating_add(saved);
            }
            StageOpKind::MicrobatchForward => {
                *microbatches.entry((op.group, op.index)).or_default() += 1;
                held.in_flight_parts += 1;
                held.microbatch_bytes = held.microbatch_bytes.saturating_add(microbatch);
            }
            StageOpKind::MicrobatchBackward => {
                release(&mut microbatches, (op.group, op.index));
                held.in_flight_parts = held.in_flight_parts.saturating_sub(1);
                held.microbatch_bytes = held.microbatch_bytes.saturating_sub(microbatch);
            }
            StageOpKind::PrefixBackward => {
                release(&mut chunks, op.group);
                held.boundary_bytes = held.boundary_bytes.saturating_sub(boundary);
                held.prefix_bytes = held.prefix_bytes.saturating_sub(saved);
            }
        }
        held.live_groups = chunks.len() as u32;
        held.in_flight = microbatches.len() as u32;
        held.bytes = held
            .boundary_bytes
            .saturating_add(held.prefix_bytes)
            .saturating_add(held.microbatch_bytes);
        peak = largest(peak, held);
    }
    peak
}

fn release<K: Ord>(held: &mut BTreeMap<K, u32>, key: K) {
    if let Some(count) = held.get_mut(&key) {
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
