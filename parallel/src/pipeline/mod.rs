//! Op lists of pipeline stages: prefix in chunks, suffix microbatches, no barrier between the phases.
//!
//! A [`Pipeline`] describes groups, stages and bounds; [`Pipeline::plan`] returns each stage's list. A
//! *part* is a contiguous range of layers; a stage holds `virtual_stages` parts, and part `q` is on stage
//! `q mod stages`. A prefix is cut into *chunks* of rows, so that a stage starts on the first chunk while
//! the previous stage runs the second.
//!
//! # Dependencies (docs/method.md §9)
//! | op of part q | needs |
//! |---|---|
//! | chunk c forward | chunk c−1 forward (its K and V), and c's activation from part q−1 |
//! | microbatch forward | the last chunk forward of its group, and its activation from part q−1 |
//! | microbatch backward | its forward, and its gradient from part q+1 |
//! | chunk c backward | all its group's microbatch backwards (gK and gV complete), chunk c+1 backward, and c's gradient from part q+1 |
//!
//! The last part's chunk backward starts from its own gK and gV; every other part adds its own to the
//! gradient it receives. Parameter gradients are reduced once, after a stage's last op.
//!
//! # Orders
//! [`PipelineOrder::GroupByGroup`] runs 1F1B for each group (interleaved if a stage has several parts).
//! [`PipelineOrder::Stream`] runs all groups as one stream: the next prefix fills idle time. Its lists come
//! from greedy runs under several rules; the smallest bubble wins, then the least memory.
//!
//! # Room
//! With [`Pipeline::stage_room_bytes`], as many groups and microbatches are in flight as every stage has room
//! for. [`Pipeline::plan_replicas`] assigns groups to replicas of the pipeline and plans the lists of each
//! within that room. [`Pipeline::plan_with_sleep`] plans prefixes awake or asleep between their ops, or chooses.
//!
//! # Bubble
//! *Ideal work* is the busiest stage's compute with whole prefixes and no op overhead;
//! `bubble = (makespan − ideal work) / ideal work`, so the cost of chunks counts as bubble.
//!
//! # Transfers
//! A list's steps are computes, sends and receives; sends and receives with one `batch` number are posted
//! at once. All stages execute transfers in one common order, so they never deadlock, even if a send blocks
//! until it is received ([`Stages::check`] replays it). A trainer that posts without blocking posts the
//! receives of the next op before an op and waits for each only before the op that needs it.
//!
//! # Invariants
//! - **P1** Every op of every group is in exactly one list, once, on its part's stage.
//! - **P2** The k-th send from one stage to another is the k-th receive there.
//! - **P3** No bound and no room of the caller is exceeded; if that is impossible, planning fails.
//! - **P4** Equal pipelines give equal lists.

mod chunks;
mod counted;
mod error;
mod exchange;
mod graph;
mod greedy;
#[cfg(test)]
mod greedy_tests;
mod lists;
mod meet;
mod peaks;
mod plan;
mod replicas;
mod rules;
mod sleep;
mod spec;
mod verify;

pub use crate::simulate::TimeSpan;
pub use error::PipelineError;
pub(crate) use graph::PipelineUnit;
pub use lists::{
    Payload, PipelineReport, StageList, StageOp, StageOpKind, StagePeak, StageStep, StageStepKind,
    StageTransfer, Stages, TransferShape,
};
pub use meet::{PipelineTimes, TransferTime, TransferTiming};
pub use replicas::{REPLICAS_MAX, Replica, Replicas};
pub use sleep::PrefixSleep;
pub use spec::{
    CHUNKS_MAX, GROUPS_MAX, MICROBATCHES_MAX, MemoryBounds, NS_MAX, OPS_MAX, Pipeline,
    PipelineGroup, PipelineMicrobatch, PipelineOrder, PipelineRates, RowBytes, STAGES_MAX,
    StageBytes, StageShare, VIRTUAL_STAGES_MAX,
};
