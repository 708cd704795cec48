//! Discrete-event simulation: steps of ranks, copies between tiers, exchanges between ranks.
//!
//! A [`World`] lists each rank's steps, the memory blocks that each step allocates, needs and frees, when
//! blocks sleep and wake, and all exchanges. [`World::run`] returns when everything happens, what waited
//! for what, and the bytes in each tier. [`SimulatedRank::of_plan`] converts a
//! [`Plan`](dormouse_schedule::Plan), [`World::of_stages`] the op lists of a pipeline.
//!
//! # Rules
//! - A rank *reaches* a step when the previous one ends; the blocks that the step wakes start to wake. The
//!   step *starts* when its exchanges have arrived, its blocks are allocated, and the blocks it needs are
//!   on the device. The wait is charged to the first of these that is missing. Blocks are allocated as
//!   soon as there is room.
//! - Each of a rank's four links ([`LinkDirection`]) carries one copy at a time, in order of request. A
//!   copy starts when its destination has room, which it takes then; its source is released when it ends.
//!   The first in the queue is never overtaken. NVMe is reached through the host.
//! - While a step waits only for room, no wake starts: sleeping makes room before waking takes it.
//! - A block woken before its sleep has begun stays; later, it sleeps, then wakes. A block that a step
//!   needs and that is asleep wakes when the step is reached (`demand_wakes`).
//! - Exchanges between two ranks run one at a time, in the order sent. When all ranks are done, a ring
//!   reduces `collective_bytes`.
//!
//! Times and bytes are integers. Simultaneous events are processed by kind, then rank: equal worlds give
//! equal timelines. A run of n events takes O(n log n).

mod check;
mod copies;
mod engine;
mod error;
mod of_stages;
mod timeline;
mod trees;
mod world;

pub use dormouse_residency::{LinkDirection, Tier};
pub use error::SimulateError;
pub use timeline::{CopyTime, MemorySample, RankTimeline, StepTime, TimeSpan, Timeline, Waits};
pub use world::{
    BLOCKS_MAX, BlockSleep, STEPS_MAX, SimulatedRank, SimulatedStep, StepExchange, World,
};
