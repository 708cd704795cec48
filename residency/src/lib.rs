//! The rules of residency: the states of a region, the cost of a step's copies, and the plan of a step with
//! the least stall.
//!
//! Pure: data in, data out. No threads, no clocks, no I/O, no imports of other crates of the workspace. It is
//! not a runtime (`offload` executes a region's actions and follows the plans) and not a planner of tokens
//! (`schedule` decides what a trainer runs).
//!
//! # Glossary
//! - *region*: a range of bytes that sleeps and wakes as a whole ([`region::Region`]).
//! - *action*: what the runtime does next for a region ([`region::Action`]).
//! - *step*: one training step; its *work* is a list of operations and of dormant groups
//!   ([`plan::StepWork`]).
//! - *group*: dormant bytes that sleep and wake together, usually those of one layer.
//! - *room*: device bytes that an operation leaves for dormant groups.
//! - *plan*: for each group, the tier it sleeps in, when it leaves and when it may return
//!   ([`plan::ResidencyPlan`]).
//! - *stall*: time in which compute waits for a copy.
//!
//! # Invariants
//! - **I1** The rules R1 to R4 of [`region`] hold in every reachable state; tests visit all of them.
//! - **I2** A replay equals that of an independent naive model of the same rules.
//! - **I3** No replay is shorter than [`plan::lower_bound`], nor than the exact optimum.
//! - **I4** Every search has a named limit and ends.
//!
//! ```text
//!   Input ──► region::step ──► Region, Actions ──► (runtime) ──► Input::Done
//!   StepWork ──► plan::choose ──► ResidencyPlan ──► (runtime)
//!                    │ plan::replay, plan::lower_bound
//! ```
#![forbid(unsafe_code)]

mod error;
mod links;
pub mod plan;
pub mod region;
mod stall;
#[cfg(any(test, feature = "optimum"))]
pub mod testing;
pub mod tune;
pub mod units;

pub use error::WorkError;
pub use links::{LinkDirection, LinkRates, Tier, copy_ns};
pub use stall::{LayerLoad, WindowedWake, stall_bound_ns};
