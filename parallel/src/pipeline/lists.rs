//! Result of pipeline planning: op lists and figures.

use serde::{Deserialize, Serialize};

use dormouse_schedule::Span;

/// Kind of a stage's op.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageOpKind {
    /// Phase A: a chunk of the prefix, its graph kept.
    PrefixForward,
    /// Phase B: a microbatch forward.
    MicrobatchForward,
    /// Phase B: a microbatch backward, its graph freed.
    MicrobatchBackward,
    /// Phase C: a chunk of the prefix backward.
    PrefixBackward,
}

impl StageOpKind {
    /// In the order a group runs them.
    pub const ALL: [Self; 4] = [
        Self::PrefixForward,
        Self::MicrobatchForward,
        Self::MicrobatchBackward,
        Self::PrefixBackward,
    ];

    /// Returns whether the op belongs to a prefix chunk.
    #[must_use]
    pub const fn is_prefix(self) -> bool {
        matches!(self, Self::PrefixForward | Self::PrefixBackward)
    }

    /// Returns whether the op is a forward.
    #[must_use]
    pub const fn is_forward(self) -> bool {
        matches!(self, Self::PrefixForward | Self::MicrobatchForward)
    }
}

/// The payload.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Payload {
    /// Hidden states, to the next part.
    Activation,
    /// Their gradient, to the previous part.
    Gradient,
}

/// Shape of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferShape {
    /// Rows of a chunk.
    Prefix,
    /// Rows of a microbatch.
    Suffix,
}

/// One end of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageTransfer {
    /// The stage at the other end.
    pub peer: u32,
    /// The payload.
    pub payload: Payload,
    /// Shape metadata.
    pub shape: TransferShape,
    /// Rows sent.
    pub rows: u64,
    /// Bytes sent.
    pub bytes: u64,
}

/// One op of a stage.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageOp {
    /// Kind of the op.
    pub kind: StageOpKind,
    /// Group number.
    pub group: u32,
    /// Chunk or microbatch number in the group.
    pub index: u32,
    /// Part of the model.
    pub part: u32,
    /// Index of the part on its stage.
    pub virtual_stage: u32,
    /// Rows: a chunk's within the prefix, a microbatch's from 0.
    pub rows: Span,
    /// Transfer received before it starts; `None` for the first part's forward, the last part's backward,
    /// and between parts of one stage.
    pub receives: Option<StageTransfer>,
    /// Transfer sent after it.
    pub sends: Option<StageTransfer>,
}

/// Kind of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageStepKind {
    /// Runs the op.
    Compute,
    /// Sends the op's result.
    Send,
    /// Receives the op's input.
    Receive,
}

/// One step of a stage's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageStep {
    /// Kind of the step.
    pub kind: StageStepKind,
    /// Index of the op.
    pub op: u32,
    /// Batch number; consecutive sends and receives of one batch are posted at once.
    pub batch: u32,
}

/// Peak memory of a stage.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagePeak {
    /// Groups with at least a part of their prefix graph alive.
    pub live_groups: u32,
    /// Microbatches in flight: begun, backward not done.
    pub in_flight: u32,
    /// Microbatches in flight, counted per part of the stage.
    pub in_flight_parts: u32,
    /// Bytes of boundary tensors and their accumulators.
    pub boundary_bytes: u64,
    /// Bytes that prefixes save for their backward and that stay awake.
    pub prefix_bytes: u64,
    /// Bytes that microbatches save for their backward.
    pub microbatch_bytes: u64,
    /// Peak of the sum of these bytes with what ops work with, and of those that a stage always holds.
    pub bytes: u64,
}

/// One stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageList {
    /// Its ops, in order.
    pub ops: Vec<StageOp>,
    /// Its ops and transfers, in order.
    pub steps: Vec<StageStep>,
    /// The op after which parameter gradients are reduced: the last.
    pub sync_after_op: u32,
    /// Peak memory.
    pub peak: StagePeak,
}

/// Predicted figures of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PipelineReport {
    /// Time from the first op's start to the last op's end.
    pub makespan_ns: u64,
    /// Compute time of the busiest stage, with whole prefixes and no overhead.
    pub ideal_ns: u64,
    /// `(makespan − ideal) / ideal`.
    pub bubble: f64,
    /// Lower bound on the bubble of any order with these chunks.
    pub bubble_bound: f64,
    /// Chunks per prefix, at most its rows.
    pub chunks: u32,
    /// Number of lists tried.
    pub tried: u32,
    /// Whether what `prefix_saved` counts was planned asleep between the ops of its prefix.
    #[serde(default)]
    pub prefix_saved_asleep: bool,
}

/// The lists of all stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stages {
    /// Each stage's list.
    pub stages: Vec<StageList>,
    /// Predicted figures.
    pub report: PipelineReport,
}

impl Stages {
    /// Returns the bubble of lists that end at `end_ns`: time beyond the ideal, divided by it.
    #[must_use]
    pub fn bubble_of(&self, end_ns: u64) -> f64 {
        end_ns as f64 / self.report.ideal_ns.max(1) as f64 - 1.0
    }
}
