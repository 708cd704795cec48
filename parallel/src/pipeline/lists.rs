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
    /// Hidden states, to the part behind.
    Activation,
    /// Their gradient, to the part before.
    Gradient,
}

/// Whose shape metadata a transfer has: chunks and microbatches differ, and each is known beforehand.
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
    /// Of which group.
    pub group: u32,
    /// Which chunk or microbatch of it.
    pub index: u32,
    /// On which part of the model.
    pub part: u32,
    /// Which of its stage's parts that is.
    pub virtual_stage: u32,
    /// Rows: a chunk's within the prefix, a microbatch's from 0.
    pub rows: Span,
    /// What must have arrived before it starts. A first part's forward and a last part's backward
    /// receive nothing, nor does what the same stage hands over.
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
    /// Sends what the op made.
    Send,
    /// Receives what the op needs.
    Receive,
}

/// One step of a stage's list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageStep {
    /// Kind of the step.
    pub kind: StageStepKind,
    /// For which of the stage's ops.
    pub op: u32,
    /// Sends and receives that follow one another with one number are posted at once.
    pub batch: u32,
}

/// The most a stage holds at any time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct StagePeak {
    /// Groups whose prefix graph is alive, in whole or in part.
    pub live_groups: u32,
    /// Microbatches begun whose backward is not done.
    pub in_flight: u32,
    /// The same, counted for each part of the stage.
    pub in_flight_parts: u32,
    /// Bytes of boundary tensors and their accumulators.
    pub boundary_bytes: u64,
    /// Bytes that prefixes save for their backward.
    pub prefix_bytes: u64,
    /// Bytes that microbatches save for their backward.
    pub microbatch_bytes: u64,
    /// All of these together, at the worst time.
    pub bytes: u64,
}

/// One stage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageList {
    /// Its ops, in order.
    pub ops: Vec<StageOp>,
    /// Its ops and transfers, in order.
    pub steps: Vec<StageStep>,
    /// Parameter gradients are reduced once, when this op is done: the last.
    pub sync_after_op: u32,
    /// The most it holds.
    pub peak: StagePeak,
}

/// Predicted figures of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PipelineReport {
    /// From the first op's start to the last op's end.
    pub makespan_ns: u64,
    /// The busiest stage's compute, every prefix whole, no overhead.
    pub ideal_ns: u64,
    /// `(makespan − ideal) / ideal`.
    pub bubble: f64,
    /// No order of ops with these chunks has a smaller bubble; there may be none that reaches it.
    pub bubble_bound: f64,
    /// Chunks of a prefix, where it has the rows.
    pub chunks: u32,
    /// Lists tried.
    pub tried: u32,
}

/// The lists of all stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Stages {
    /// Each stage's list.
    pub stages: Vec<StageList>,
    /// Expected figures.
    pub report: PipelineReport,
}
