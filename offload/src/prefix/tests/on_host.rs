//! On the host device.

#[path = "both/mod.rs"]
#[expect(clippy::duplicate_mod, reason = "the same tests, on another bench")]
mod both;
mod direct;
mod line;

use crate::engine::tests::on_host as bench;
