//! Tests of the two libraries, run by C programs, Python and binutils in processes of their own.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "a test fails by panicking")]

mod allocators;
mod common;
mod declarations;
mod dumps;
mod header;
mod layouts;
mod preload;
mod programs;
mod race;
mod sanitized;
mod trainer;
mod wrong;
