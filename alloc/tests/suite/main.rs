//! The integration tests of the allocator that share a process, as one binary.
//!
//! `tests/cuda.rs` is a binary of its own: it loads the stand-in driver, which is process-wide.
#![allow(clippy::unwrap_used, clippy::panic, reason = "tests fail by panicking")]

mod blocks;
mod busy;
mod caps;
mod common;
mod cut;
mod faults;
mod history;
mod huge;
mod kept;
mod ladder;
mod large;
mod late_work;
mod margin;
mod marks;
mod model;
mod moves;
mod packed;
mod packed_model;
mod packed_shadow;
mod packed_threads;
mod pinned;
mod stream_faults;
mod stream_model;
mod stream_threads;
mod streams;
mod thread_cache;
mod thread_cache_threads;
mod threads;
mod tlsf;
mod unused;
