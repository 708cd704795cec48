//! The integration tests of the timeline that share a process.
//!
//! `tests/allocation.rs` is a binary of its own: it replaces the global allocator.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic, reason = "test helpers")]

mod common;
mod html;
mod pftrace;
mod recorder;
