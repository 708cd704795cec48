//! Planning for several ranks, pipeline stages, context shards, experts and rollouts.
//!
//! Plans are reachable through `dormouse_schedule_query`, the command-line program and Python. `dormouse.megatron`
//! executes lists of pipeline stages, context shards and the shares of replicas, `dormouse.rollouts` assignments of rollouts; nothing executes
//! those of experts. This crate extends the plans of `dormouse-schedule`. Data in, data out: no I/O, no threads, no clock;
//! equal input gives equal plans on every rank.
//!
//! # Glossary
//! - *share*: the sequences one data-parallel rank computes; *imbalance*: largest share over mean.
//! - *stage*: a contiguous range of layers on one pipeline rank; *bubble*: a stage's idle time.
//! - *shard*: the rows of a packed sequence on one context-parallel rank.
//! - *rollout*: the generation of one response; *worker*: an engine that generates.
//!
//! # Invariants
//! - **P1** Every sequence is in exactly one share; all ranks run ops that contain collectives in the same
//!   order.
//! - **P2** Op lists of a pipeline never deadlock: they are executed before they are returned.
//! - **P3** An invalid request is refused with the value seen and the values accepted.
//!
//! ```text
//!   Forest ──► balance ──► Shares            Pipeline ──► Stages ──┐
//!   pieces ──► context ──► Shards            Plan ──► World ──► simulate ──► Timeline ──► draw ──► SVG
//!   Router ──► experts ──► Accounting        History ──► rollout ──► Assignment
//!                       query: all of these and dormouse-schedule, JSON in, JSON out
//! ```
#![forbid(unsafe_code)]

pub mod balance;
pub mod context;
pub mod draw;
pub mod experts;
pub mod pipeline;
pub mod query;
pub mod rollout;
pub mod simulate;
