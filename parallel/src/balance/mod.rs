//! Shares of data-parallel ranks: which rank computes which leaves of a forest.
//!
//! Node costs are whole picoseconds, counted or fitted (`dormouse_schedule::cost`). Leaves in depth-first
//! order are cut into segments; nodes that segments share are recomputed or exchanged.
//!
//! ```text
//!   Workload, BalanceOptions ──► Leaves ──► units ──► cut / fill / longest first ──► Shares
//!                                    └──► cut ◄──► exchange: recompute, send, divide ──┘
//! ```
//!
//! # Invariants
//! - **B1** Every sequence is on exactly one rank, with a leaf whose path it ends on.
//! - **B2** No unit is on two ranks.
//! - **B3** Without exchange, contiguous shares have the least largest cost of all contiguous cuts.
//! - **B4** `limit_ps` is at most the largest cost of any shares of the same units.
//! - **B5** Decisions use integers only: equal input gives equal shares on every rank.
//! - **B6** All collectives are in one list, in one order. If ops contain collectives, a rank's own entries
//!   are the ops of its plan, in their order.

mod build;
mod collective_order;
mod cost_table;
mod cut;
#[cfg(test)]
mod cut_tests;
mod error;
mod leaves;
mod limit;
mod options;
mod place;
mod prefix_exchange;
mod search;
mod shares;

pub use collective_order::{CollectiveOrder, PassKind};
pub use error::BalanceError;
pub use options::{BalanceMethod, BalanceOptions, BalanceUnit, RANKS_MAX, Workload};
pub use place::VISITS_MAX;
pub use shares::{Collective, ExchangeMode, PrefixExchange, RankShare, SHARES_VERSION, Shares};
