//! Shares of data-parallel ranks: which rank computes which leaves of a forest.
//!
//! What a node costs is counted or fitted (`cost`), in whole picoseconds. Leaves in depth-first
//! order are cut into segments; what two segments share, both compute, or exchange.
//!
//! ```text
//!   Workload, Options ──► Leaves ──► units ──► cut / fill / longest first ──► Shares
//!                                    └──► cut ◄──► trunk: recompute, send, divide ──┘
//! ```
//!
//! # Invariants
//! - **B1** Every sequence is on exactly one rank, with a leaf whose path it ends on.
//! - **B2** No unit is on two ranks.
//! - **B3** Without exchange, contiguous shares have the least largest cost of all contiguous cuts.
//! - **B4** `limit_ps` is at most the largest cost of any shares of the same units.
//! - **B5** Only whole numbers decide: equal input gives equal shares on every rank.
//! - **B6** Everything that ranks do together is in one list, in one order. Where ops hold collectives,
//!   a rank's own in it are the ops of its plan, in their order.

mod build;
mod cut;
#[cfg(test)]
mod cut_tests;
mod error;
mod leaves;
mod limit;
mod lockstep;
mod options;
mod place;
mod search;
mod shares;
mod tariff;
mod trunk;

pub use error::BalanceError;
pub use lockstep::{Kind, Lockstep};
pub use options::{Method, Options, RANKS_MAX, Unit, Workload};
pub use shares::{Collective, Exchange, SHARES_VERSION, Share, Shares, Transfer};
