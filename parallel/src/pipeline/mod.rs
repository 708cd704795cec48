//! Op lists of pipeline stages: prefix in chunks, suffix microbatches, no barrier between the phases.
//!
//! A [`Pipeline`] says what is to be run, on how many stages, within which bounds; [`Pipeline::plan`]
//! gives each stage its list. A *part* is a run of layers, the unit a stage holds `virtual_stages`
//! of: part `q` is on stage `q mod stages`. A prefix is cut into *chunks* of rows, so that the stage
//! behind starts on the first while the stage before runs the second.
//!
//! # What needs what (docs/method.md §9)
//! | op of part q | needs |
//! |---|---|
//! | chunk c forward | chunk c−1 forward (its K and V), and c's activation from part q−1 |
//! | microbatch forward | the last chunk forward of its group, and its activation from part q−1 |
//! | microbatch backward | its forward, and its gradient from part q+1 |
//! | chunk c backward | all its group's microbatch backwards (gK and gV complete), chunk c+1 backward, and c's gradient from part q+1 |
//!
//! The last part's chunk backward starts from its own gK and gV alone; every other part adds its own
//! to the gradient it receives. Parameter gradients are reduced once, after a stage's last op.
//!
//! # Orders
//! [`PipelineOrder::GroupByGroup`] is what a trainer does that runs 1F1B for each group (interleaved where a
//! stage has several parts). [`PipelineOrder::Stream`] runs all groups as one stream: the next prefix fills
//! what would be idle. Its lists come from greedy runs under several rules, of which the one with
//! the smallest bubble is kept; ties go to less memory.
//!
//! # Bubble
//! *Ideal work* is the busiest stage's compute with every prefix whole and no op overhead;
//! `bubble = (makespan − ideal work) / ideal work`, so what chunks cost counts as bubble.
//!
//! # Transfers
//! A list's steps are computes, sends and receives; sends and receives with one `batch` number are
//! posted at once. All stages take their part in transfers in one common order, which is why none
//! ever waits in a circle, even where a send blocks until its receive ([`Stages::check`] replays
//! it). A trainer that posts without blocking posts the receives behind an op before that op, so that
//! they run beside it, and waits for each only before the op that needs it.
//!
//! # Invariants
//! - **P1** Every op of every group is in exactly one list, once, on its part's stage.
//! - **P2** The k-th send from one stage to another is the k-th receive there, whatever is sent.
//! - **P3** No bound of the caller is exceeded; where none can be kept, there is no plan.
//! - **P4** Equal pipelines give equal lists.

mod chunks;
mod counted;
mod error;
mod exchange;
mod graph;
mod greedy;
mod lists;
mod meet;
mod peaks;
mod plan;
mod rules;
mod spec;
mod verify;

pub use error::PipelineError;
pub use lists::{
    Payload, PipelineReport, StageList, StageOp, StageOpKind, StagePeak, StageStep, StageStepKind,
    StageTransfer, Stages, TransferShape,
};
pub use meet::{OpTime, PipelineTimes, TransferTime, TransferTiming};
pub use spec::{
    CHUNKS_MAX, GROUPS_MAX, MICROBATCHES_MAX, MemoryBounds, NS_MAX, OPS_MAX, Pipeline,
    PipelineGroup, PipelineMicrobatch, PipelineOrder, PipelineRates, RowBytes, STAGES_MAX,
    StageShare, VIRTUAL_STAGES_MAX,
};
