//! Pure planning: the ops of a trainer for the prefix trees of a rollout batch, and their cost.
//!
//! A [`forest::Forest`], its [`Scoring`] and [`PlanOptions`] become a [`Plan`], whose [`Op`]s are returned one at a
//! time and completed in order. No I/O, no threads, no clock: the same input gives the same plan on every rank.
//! Not a memory manager (`offload` decides tiers and the start of copies) and not a trainer.
//!
//! # Glossary
//! - *prompt* `P`: the tokens that all responses share; *prefix*: `P[:-1]`, the rows of the node.
//! - *response* `S_i`; *suffix* `[P[-1]] + S_i[:-1]`: the rows that predict `S_i` (docs/method.md §2).
//! - *microbatch*: suffixes that run in one packed row; *member*: a suffix in a microbatch.
//! - *node*: consecutive tokens that the same sequences share; *forest*: all prefix trees of a batch.
//! - *op*: one operation; *dense run*: the ordinary run, every response with its own prompt.
//!
//! # Invariants
//! - **I1** Every label of every sequence is scored by exactly one row of one op: the row before it.
//! - **I2** A row has the position of its token in the dense run.
//! - **I3** A microbatch holds at most the budgeted rows, or a single suffix.
//! - **I4** Ops come depth first: a node's forward, its microbatches and other children, its backward. Each is
//!   completed before the next is returned. A node is read only between its forward and backward.
//! - **I5** No op needs more memory than the budgets, unless the runtime decides residency.
//!
//! ```text
//!   Forest ──► Plan ──next_op()► PrefixForward ► Microbatch … Microbatch ► PrefixBackward ► Done
//!   options ─►  │ │               └► children, each likewise ─────┘
//!              │ │                         ◄──complete(id)──
//!              │ └──predict()──► Prediction        └──to_json()──► text;  PlanFile ──► text ──► PlanFile
//! ```
#![forbid(unsafe_code)]

pub mod cost;
mod error;
pub mod forest;
pub mod layout;
mod limits;
mod model;
mod op;
mod peak;
mod plan;
mod plan_file;
mod search;
pub mod tree_planner;

pub use error::{Disorder, PlanError, Remedy};
pub use limits::{LAYERS_MAX, NODES_MAX, RESPONSES_MAX, SCORES_MAX, TOKENS_MAX};
pub use op::{Member, NodeId, Op, OpId, OpKind, PlanNode, Residency, Score, Span};
pub use peak::DevicePeak;
pub use plan::{PLAN_VERSION, Plan};
pub use plan_file::{FileSequence, PLAN_FILE_VERSION, PlanFile, PlanFileError, SequenceName};
pub use search::bisect;

pub use model::{Machine, ModelShape, count as check_range};
pub use tree_planner::{Loss, PlanOptions, Prediction, Scoring, TreeVerdict, Verdict};
