//! On the host device.

mod admission;
#[path = "both/mod.rs"]
#[expect(clippy::duplicate_mod, reason = "the same tests, on another bench")]
mod both;
mod direct;
mod stray;
mod tuning;
mod unused;

use crate::engine::tests::on_host as bench;
