//! Input of pipeline planning: groups, stages, bounds, rates.

use serde::{Deserialize, Serialize};

use super::PipelineError;
use super::lists::StageOpKind;
use super::meet::TransferTiming;
use dormouse_schedule::{PlanError, TOKENS_MAX, check_range};

/// Maximum number of stages.
pub const STAGES_MAX: u32 = 256;
/// Maximum parts per stage.
pub const VIRTUAL_STAGES_MAX: u32 = 64;
/// Maximum number of groups.
pub const GROUPS_MAX: usize = 1 << 16;
/// Maximum microbatches per group.
pub const MICROBATCHES_MAX: usize = 1 << 16;
/// Maximum chunks per prefix.
pub const CHUNKS_MAX: u32 = 1 << 10;
/// Maximum ops of all stages together.
pub const OPS_MAX: usize = 1 << 22;
/// Maximum nanoseconds of one op or transfer (18 minutes): the sum over all ops fits 64 bits.
pub const NS_MAX: u64 = 1 << 40;
/// Maximum scale of a part's ops, in thousandths.
const PERMILLE_MAX: u32 = 1_000_000;

/// Time of a whole prefix on one part, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StageShare {
    /// The share proportional to rows.
    pub linear_ns: u64,
    /// The share proportional to unmasked query–key pairs: later chunks cost more.
    pub pairs_ns: u64,
}

/// One suffix microbatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipelineMicrobatch {
    /// Number of rows.
    pub rows: u64,
    /// Forward time on one part, in nanoseconds.
    pub forward_ns: u64,
    /// Backward time on one part, in nanoseconds.
    pub backward_ns: u64,
}

/// A prefix and its microbatches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipelineGroup {
    /// Rows of the prefix.
    pub prefix_rows: u64,
    /// Forward time of the prefix on one part.
    pub forward: StageShare,
    /// Backward time of the prefix on one part.
    pub backward: StageShare,
    /// Its microbatches, in order.
    pub microbatches: Vec<PipelineMicrobatch>,
}

/// Order of groups on a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PipelineOrder {
    /// Each group finishes on a stage before the next begins; microbatches run 1F1B.
    GroupByGroup,
    /// One stream: prefixes of later groups fill idle time of a stage.
    #[default]
    Stream,
}

/// Memory bounds of a stage; 0 means unbounded.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MemoryBounds {
    /// Maximum groups whose prefix graph is alive on a stage.
    pub live_groups_max: u32,
    /// Maximum microbatches in flight: begun on a stage, backward not done there.
    pub in_flight_max: u32,
}

/// Overheads of ops and transfers; 0 means none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipelineRates {
    /// Overhead per op, in nanoseconds.
    pub op_overhead_ns: u64,
    /// Latency per transfer, in nanoseconds.
    pub transfer_latency_ns: u64,
    /// Link rate per pair of stages and direction, in bytes/s; 0 means unlimited.
    pub link_bytes_per_s: u64,
    /// Rate at which a prefix falls asleep on each stage, in bytes/s; 0 means unlimited. Lists do not depend
    /// on it: [`World::of_stages`](crate::simulate::World::of_stages) does.
    pub sleep_bytes_per_s: u64,
    /// Rate at which it wakes, likewise.
    pub wake_bytes_per_s: u64,
}

/// Bytes per row and part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RowBytes {
    /// Activation sent to the next part, and its gradient sent back.
    pub activation: u64,
    /// Boundary tensors and accumulators of a prefix row.
    pub boundary: u64,
    /// Bytes a prefix row saves for its backward.
    pub prefix_saved: u64,
    /// Bytes a microbatch row saves for its backward.
    pub microbatch_saved: u64,
}

/// What one stage holds, in bytes: of a row on each of its parts, and besides rows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StageBytes {
    /// Boundary tensors and their accumulators, per prefix row.
    pub boundary: u64,
    /// Bytes a prefix row saves for its backward, and that stay awake.
    pub prefix_saved: u64,
    /// Bytes a prefix row saves for its backward, and that are awake during its own ops alone. What has not
    /// left when the next op needs the room, that op waits for.
    pub prefix_asleep: u64,
    /// Bytes per prefix row that its own ops work with.
    pub prefix_working: u64,
    /// Bytes a microbatch row saves for its backward.
    pub microbatch_saved: u64,
    /// Bytes per microbatch row that its own ops work with.
    pub microbatch_working: u64,
    /// Bytes that a microbatch row holds besides on the pipeline's last part, from its forward to the end of its
    /// backward: logits.
    pub microbatch_logits: u64,
    /// Bytes that the stage holds during its whole list, such as gradients of parameters.
    pub fixed: u64,
}

impl StageBytes {
    /// Returns the bytes per row that an op of this kind keeps, from the forward to the end of the backward.
    /// `is_last`: it is on the pipeline's last part.
    pub(crate) fn kept(&self, kind: StageOpKind, is_last: bool) -> u128 {
        if kind.is_prefix() {
            u128::from(self.boundary) + u128::from(self.prefix_saved)
        } else {
            let logits = if is_last { self.microbatch_logits } else { 0 };
            u128::from(self.microbatch_saved) + u128::from(logits)
        }
    }

    /// Returns the bytes per row that are awake during an op alone.
    pub(crate) const fn working(&self, kind: StageOpKind) -> u64 {
        if kind.is_prefix() {
            self.prefix_asleep.saturating_add(self.prefix_working)
        } else {
            self.microbatch_working
        }
    }
}

impl From<RowBytes> for StageBytes {
    fn from(row: RowBytes) -> Self {
        let RowBytes { boundary, prefix_saved, microbatch_saved, .. } = row;
        Self { boundary, prefix_saved, microbatch_saved, ..Self::default() }
    }
}

/// A pipeline to plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pipeline {
    /// Number of stages.
    pub stages: u32,
    /// Parts per stage: 1 is 1F1B, more is interleaved.
    pub virtual_stages: u32,
    /// Groups, in order.
    pub groups: Vec<PipelineGroup>,
    /// Order of the groups on a stage.
    pub order: PipelineOrder,
    /// Chunks per prefix, at most its rows; 0 means the plan chooses.
    pub chunks: u32,
    /// Rows of each chunk but the last are a multiple of this (sequence parallelism); 0 means 1.
    pub chunk_rows_multiple: u32,
    /// Minimum rows per chunk: a prefix with `r` rows has at most `r / chunk_rows_min` chunks, and at least one.
    /// 0 means 1.
    pub chunk_rows_min: u32,
    /// Memory bounds of each stage.
    pub bounds: MemoryBounds,
    /// Whether a send blocks its stage until it is received; otherwise transfers overlap compute.
    pub blocking: bool,
    /// Overheads of ops and transfers.
    pub rates: PipelineRates,
    /// Bytes per row.
    pub row_bytes: RowBytes,
    /// What each stage holds. Empty: `row_bytes` on every stage, nothing asleep.
    pub stage_bytes: Vec<StageBytes>,
    /// Bytes that each stage has for what it holds: as many groups and microbatches are in flight as there is
    /// room for. Empty: unlimited.
    pub stage_room_bytes: Vec<u64>,
    /// Scale of a prefix op's time per part, in thousandths: a dead last layer costs less. Empty: all 1000.
    pub prefix_permille: Vec<u32>,
    /// Scale of a microbatch op's time per part, in thousandths: a head costs more. Empty: all 1000.
    pub microbatch_permille: Vec<u32>,
}

impl Pipeline {
    /// Returns the number of parts of all stages.
    pub(crate) fn parts(&self) -> u32 {
        self.stages * self.virtual_stages
    }

    /// Returns whether a part is the last one, which has the logits.
    pub(crate) fn is_last(&self, part: u32) -> bool {
        part + 1 == self.parts()
    }

    /// Returns what a stage holds.
    pub(crate) fn bytes_of(&self, stage: u32) -> StageBytes {
        self.stage_bytes.get(stage as usize).copied().unwrap_or_else(|| self.row_bytes.into())
    }

    /// Returns the room of a stage in bytes; `None` if it is unlimited.
    pub(crate) fn room_of(&self, stage: u32) -> Option<u64> {
        self.stage_room_bytes.get(stage as usize).copied()
    }

    /// Returns the timing mode of transfers that the plan assumes.
    #[must_use]
    pub const fn timing(&self) -> TransferTiming {
        if self.blocking { TransferTiming::Batched } else { TransferTiming::Overlapped }
    }

    /// Checks everything except the number of ops, which depends on the chunks.
    pub(super) fn check(&self) -> Result<(), PipelineError> {
        self.check_stages()?;
        check_range("groups", self.groups.len() as u64, 1, GROUPS_MAX as u64)?;
        check_range("chunks", self.chunks, 0, CHUNKS_MAX)?;
        check_range("op_overhead_ns", self.rates.op_overhead_ns, 0, NS_MAX)?;
        check_range("transfer_latency_ns", self.rates.transfer_latency_ns, 0, NS_MAX)?;
        let stages = u64::from(self.stages);
        for (what, entries) in [
            ("stage_bytes", self.stage_bytes.len()),
            ("stage_room_bytes", self.stage_room_bytes.len()),
        ] {
            if entries > 0 {
                check_range(what, entries as u64, stages, stages)?;
            }
        }
        self.check_permille("prefix_permille", &self.prefix_permille)?;
        self.check_permille("microbatch_permille", &self.microbatch_permille)?;
        for (group, it) in self.groups.iter().enumerate() {
            it.check().map_err(|source| PipelineError::Group { group, source })?;
        }
        Ok(())
    }

    pub(super) fn check_stages(&self) -> Result<(), PipelineError> {
        check_range("stages", self.stages, 1, STAGES_MAX)?;
        Ok(check_range("virtual_stages", self.virtual_stages, 1, VIRTUAL_STAGES_MAX)?)
    }

    fn check_permille(&self, what: &'static str, values: &[u32]) -> Result<(), PipelineError> {
        let parts = self.parts();
        if !values.is_empty() && values.len() != parts as usize {
            return Err(PipelineError::Parts { what, seen: values.len(), parts });
        }
        let most = values.iter().max().copied().unwrap_or(0);
        Ok(check_range(what, most, 0, PERMILLE_MAX)?)
    }
}

impl PipelineGroup {
    fn check(&self) -> Result<(), PlanError> {
        check_range("prefix_rows", self.prefix_rows, 1, TOKENS_MAX)?;
        for share in [self.forward, self.backward] {
            check_range("linear_ns", share.linear_ns, 0, NS_MAX)?;
            check_range("pairs_ns", share.pairs_ns, 0, NS_MAX)?;
        }
        let microbatches = self.microbatches.len() as u64;
        check_range("microbatches", microbatches, 1, MICROBATCHES_MAX as u64)?;
        for microbatch in &self.microbatches {
            check_range("rows of a microbatch", microbatch.rows, 1, TOKENS_MAX)?;
            check_range("forward_ns of a microbatch", microbatch.forward_ns, 0, NS_MAX)?;
            check_range("backward_ns of a microbatch", microbatch.backward_ns, 0, NS_MAX)?;
        }
        Ok(())
    }
}
