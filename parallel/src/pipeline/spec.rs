//! Input of pipeline planning: groups, stages, bounds, rates.

use serde::{Deserialize, Serialize};

use super::PipelineError;
use dormouse_schedule::TOKENS_MAX;

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
/// Nanoseconds of one op or transfer, 18 minutes: the sum over all ops stays within 64 bits.
pub const NS_MAX: u64 = 1 << 40;
/// Thousandths a part's ops may be scaled by.
const PERMILLE_MAX: u32 = 1_000_000;

/// Nanoseconds of a whole prefix on one part, by what they grow with.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct StageShare {
    /// Grows with rows.
    pub linear_ns: u64,
    /// Grows with unmasked query–key pairs: later chunks cost more.
    pub pairs_ns: u64,
}

/// One suffix microbatch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipelineMicrobatch {
    /// Its rows.
    pub rows: u64,
    /// Forward on one part, nanoseconds.
    pub forward_ns: u64,
    /// Backward on one part, nanoseconds.
    pub backward_ns: u64,
}

/// A prefix and its microbatches.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PipelineGroup {
    /// Rows of the prefix.
    pub prefix_rows: u64,
    /// Its forward on one part.
    pub forward: StageShare,
    /// Its backward on one part.
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
    /// Groups whose prefix graph is alive on a stage.
    pub live_groups_max: u32,
    /// Microbatches begun on a stage whose backward is not done there.
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
}

/// Bytes per row and part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct RowBytes {
    /// Activation sent to the next part, and its gradient sent back.
    pub activation: u64,
    /// A prefix row's boundary tensors and accumulators.
    pub boundary: u64,
    /// Bytes a prefix row saves for its backward.
    pub prefix_saved: u64,
    /// Bytes a microbatch row saves for its backward.
    pub microbatch_saved: u64,
}

/// A pipeline to plan.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Pipeline {
    /// Stages.
    pub stages: u32,
    /// Parts a stage holds: 1 is 1F1B, more is interleaved.
    pub virtual_stages: u32,
    /// Groups, in order.
    pub groups: Vec<PipelineGroup>,
    /// Order of the groups on a stage.
    pub order: PipelineOrder,
    /// Chunks of each prefix, fewer where it has fewer rows; 0 leaves it to the plan.
    pub chunks: u32,
    /// Chunks but a prefix's last have a multiple of these rows (sequence parallelism); 0 is 1.
    pub chunk_rows_multiple: u32,
    /// Memory bounds of each stage.
    pub bounds: MemoryBounds,
    /// Whether a send holds its stage until the other takes it; the plan minimises the bubble of
    /// that. Otherwise transfers run beside compute.
    pub blocking: bool,
    /// Overheads of ops and transfers.
    pub rates: PipelineRates,
    /// Bytes per row.
    pub row_bytes: RowBytes,
    /// Thousandths of a prefix op's time, for each part: a dead last layer costs less. Empty: all 1000.
    pub prefix_permille: Vec<u32>,
    /// Thousandths of a microbatch op's time, for each part: one with a head costs more. Empty: all 1000.
    pub microbatch_permille: Vec<u32>,
}

impl Pipeline {
    /// Parts of all stages.
    pub(crate) fn parts(&self) -> u32 {
        self.stages * self.virtual_stages
    }

    /// Every reason to refuse but the number of ops, which depends on chunks.
    pub(super) fn check(&self) -> Result<(), PipelineError> {
        self.check_stages()?;
        count("groups", self.groups.len() as u64, 1, GROUPS_MAX as u64)?;
        count("chunks", self.chunks.into(), 0, CHUNKS_MAX.into())?;
        count("op_overhead_ns", self.rates.op_overhead_ns, 0, NS_MAX)?;
        count("transfer_latency_ns", self.rates.transfer_latency_ns, 0, NS_MAX)?;
        self.check_permille("prefix_permille", &self.prefix_permille)?;
        self.check_permille("microbatch_permille", &self.microbatch_permille)?;
        self.groups.iter().enumerate().try_for_each(|(index, group)| group.check(index))
    }

    pub(super) fn check_stages(&self) -> Result<(), PipelineError> {
        count("stages", self.stages.into(), 1, STAGES_MAX.into())?;
        count("virtual_stages", self.virtual_stages.into(), 1, VIRTUAL_STAGES_MAX.into())
    }

    fn check_permille(&self, what: &'static str, values: &[u32]) -> Result<(), PipelineError> {
        let parts = self.parts();
        if !values.is_empty() && values.len() != parts as usize {
            return Err(PipelineError::Parts { what, seen: values.len(), parts });
        }
        match values.iter().find(|value| **value > PERMILLE_MAX) {
            None => Ok(()),
            Some(&seen) => Err(PipelineError::Count {
                what,
                seen: seen.into(),
                least: 0,
                most: PERMILLE_MAX.into(),
            }),
        }
    }
}

/// Refuses a number outside `least..=most`.
fn count(what: &'static str, seen: u64, least: u64, most: u64) -> Result<(), PipelineError> {
    if (least..=most).contains(&seen) {
        Ok(())
    } else {
        Err(PipelineError::Count { what, seen, least, most })
    }
}

impl PipelineGroup {
    fn check(&self, group: usize) -> Result<(), PipelineError> {
        let field = |what, seen: u64, least: u64, most: u64| {
            if (least..=most).contains(&seen) {
                Ok(())
            } else {
                Err(PipelineError::Group { group, what, seen, least, most })
            }
        };
        field("prefix_rows", self.prefix_rows, 1, TOKENS_MAX)?;
        for share in [self.forward, self.backward] {
            field("linear_ns", share.linear_ns, 0, NS_MAX)?;
            field("pairs_ns", share.pairs_ns, 0, NS_MAX)?;
        }
        field("microbatches", self.microbatches.len() as u64, 1, MICROBATCHES_MAX as u64)?;
        for microbatch in &self.microbatches {
            field("rows of a microbatch", microbatch.rows, 1, TOKENS_MAX)?;
            field("forward_ns of a microbatch", microbatch.forward_ns, 0, NS_MAX)?;
            field("backward_ns of a microbatch", microbatch.backward_ns, 0, NS_MAX)?;
        }
        Ok(())
    }
}
