//! Pure planning: the ops of a trainer for the prefix trees of a rollout batch, and their cost.
//!
//! Data in, data out: a [`forest::Forest`], its [`Scoring`] and [`PlanOptions`] become a [`Plan`], whose
//! [`Op`]s are given one at a time and completed in order. A flat group is a tree of depth one. No I/O,
//! no threads, no clock; of ours it imports only the pure `residency`: the same input gives the same
//! plan on every rank. Not a memory manager
//! (which tier, and when a copy starts, is `offload`'s) and not a trainer.
//!
//! # Glossary
//! - *prompt* `P`: what all responses share; *prefix*: `P[:-1]`, the rows of the node.
//! - *response* `S_i`; *suffix* `[P[-1]] + S_i[:-1]`: the rows that predict `S_i` (docs/method.md §2).
//! - *microbatch*: suffixes run at once in one packed row; *member*: one suffix in a microbatch.
//! - *node*: a run of tokens that the same sequences share; *forest*: all prefix trees of a batch.
//! - *op*: one thing to do; *dense*: the ordinary run, every response with its whole prompt.
//!
//! # Invariants
//! - **I1** Every label of every sequence is scored by exactly one row of exactly one op: the row
//!   before it.
//! - **I2** A row has the position the dense run gives its token.
//! - **I3** No microbatch holds more rows than the budget, unless it holds a single suffix.
//! - **I4** Ops come depth first: a node's forward, its microbatches and other children, its backward; each
//!   is completed before the next is given. A node is read only between its forward and backward.
//! - **I5** No op of a plan needs more memory than its budgets, unless the runtime decides residency.
//!
//! ```text
//!   Forest ──► Plan ──next()──► PrefixForward ► Microbatch … Microbatch ► PrefixBackward ► Done
//!   options ─►  │ │               └► children, each likewise ─────┘
//!              │ │                         ◄──complete(id)──
//!              │ └──predict()──► Prediction        └──to_json()──► text
//! ```
#![forbid(unsafe_code)]

pub mod cost;
mod error;
pub mod forest;
pub mod layout;
mod limits;
mod model;
mod op;
mod plan;
pub mod tree_planner;

pub use error::{Disorder, PlanError, Remedy};
pub use limits::{LAYERS_MAX, NODES_MAX, RESPONSES_MAX, SCORES_MAX, TOKENS_MAX};
pub use op::{Member, NodeId, Op, OpId, OpKind, PlanNode, Residency, Score, Span};
pub use plan::{PLAN_VERSION, Plan};

pub use model::{Machine, ModelShape, count as check_range};
pub use tree_planner::{Loss, PlanOptions, Prediction, Scoring, TreeVerdict, Verdict};
