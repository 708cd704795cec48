//! The plans of this crate against naive models, and readable scenarios in `tests/testdata/ROOM/*.txt`.
//!
//! `UPDATE=1 cargo test -p dormouse-parallel` rewrites the expectations; read the diff.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod balance;
mod balance_common;
mod balance_scenarios;
#[path = "../../../schedule/tests/suite/batch.rs"]
mod batch;
mod collective_order;
mod context;
mod context_scenarios;
mod draw;
mod experts;
mod experts_forest;
mod experts_scenarios;
mod json;
mod naive_pipeline;
mod naive_tiers;
mod pipeline_properties;
mod pipeline_room;
mod pipeline_scenarios;
mod published;
mod queries;
mod rollout;
mod rollout_scenarios;
#[path = "../../../schedule/tests/suite/scenario_files.rs"]
mod scenario_files;
mod simulate_properties;
mod simulate_scenarios;
mod simulate_trees;

use scenario_files::{lines, number, scenarios};
