//! Compares forests, plans, layouts and fitted rates with naive models, and runs the scenarios in
//! `tests/testdata/*/*.txt`.
//!
//! `UPDATE=1 cargo test -p dormouse-schedule` rewrites the expectations; read the diff.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod batch;
mod cost_fit;
mod forest;
mod forest_refusals;
mod forest_scenarios;
mod group_properties;
mod group_replay;
mod group_scenarios;
mod kernel_rates;
mod layout;
mod layout_scenarios;
mod plan_file;
mod scenario_files;
mod tree_planner;
mod tree_planner_gradient;
mod tree_planner_scenarios;
mod tree_planner_support;

use scenario_files::{lines, number, scenarios};
