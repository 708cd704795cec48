//! Time, simulated: steps of ranks, copies between tiers, exchanges between ranks.
//!
//! A [`World`] says what each rank computes in which order, which blocks of memory each step makes,
//! needs and frees, when blocks are told to sleep and wake, and what is exchanged. [`World::run`]
//! says when everything happens, what waited for what, and how many bytes each tier held.
//! [`SimulatedRank::of_plan`] makes a rank of a [`Plan`](dormouse_schedule::Plan), op by op, and layer
//! by layer where a node sleeps; [`World::of_stages`] makes ranks of a pipeline's lists.
//!
//! # Rules
//! - A rank *reaches* a step when it has ended the one before. Reaching tells the step's wakes; the
//!   step *starts* when its exchanges have arrived, there is room for what it allocates, and what it
//!   needs is on the device. In between the rank waits, and the wait is charged to the first of
//!   these that is missing. Room is taken as soon as it is there.
//! - Four links of a rank each carry one copy at a time, first told first: device → host (*sleep*),
//!   host → file (*write*), file → host (*read*), host → device (*wake*). A copy starts when the tier
//!   it goes to has room, which is taken then; the tier it leaves is free when it ends. Nothing
//!   overtakes the first in line.
//! - A step that only waits for room holds back all wakes: sleeping makes room before waking takes it.
//! - A block told to wake before its sleep has begun stays; after, it sleeps, then wakes. A block that
//!   a step needs and nobody woke is woken on reaching the step (`demand_wakes`).
//! - Exchanges from one rank to another run one at a time, in the order sent. When all ranks are
//!   done, a ring reduces `collective_bytes`.
//!
//! Nanoseconds and bytes are whole numbers. Events of one time are taken in order of kind, then rank:
//! equal worlds give equal timelines. A run of n events takes O(n log n).

mod check;
mod copies;
mod engine;
mod error;
mod of_stages;
mod timeline;
mod trees;
mod world;

pub use error::SimulateError;
pub use timeline::{CopyTime, MemorySample, OpenStep, RankTimeline, StepTime, Timeline, Waits};
pub use world::{
    BLOCKS_MAX, BlockSleep, CopyLink, STEPS_MAX, SimulatedRank, SimulatedStep, SleepTier,
    StepExchange, Tier, World,
};
