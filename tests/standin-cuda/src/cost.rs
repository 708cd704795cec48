//! What calls that change the memory of the device cost on top of what they do here.
//!
//! On a GPU each of them takes microseconds, which allocators are made to avoid. How many differs
//! from machine to machine, so a benchmark sets it, the same for all whom it compares.

use std::time::{Duration, Instant};

use crate::state::Driver;

/// More than any such call takes: a typing error is found, not waited for.
pub(crate) const COST_NS_MAX: usize = 1_000_000_000;

/// Spins for the cost of one call, before it takes any lock.
pub(crate) fn pay(driver: &Driver) {
    if driver.cost.is_zero() {
        return;
    }
    let begin = Instant::now();
    while begin.elapsed() < driver.cost {
        std::hint::spin_loop();
    }
}

/// The cost as the environment has it.
pub(crate) fn of_ns(ns: usize) -> Duration {
    Duration::from_nanos(ns as u64)
}
