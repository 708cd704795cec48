//! Tests that cross crates live in `tests/tests`; this crate has no code of its own.
