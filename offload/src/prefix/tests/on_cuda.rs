//! On a GPU, whose driver is the stand-in.

#[path = "both/mod.rs"]
#[expect(clippy::duplicate_mod, reason = "the same tests, on another bench")]
mod both;
mod marks;
mod unused;

use crate::engine::tests::on_cuda as bench;
