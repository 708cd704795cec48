//! The integration tests of the devices that share a process, as one binary.
//!
//! Binaries of their own: `cuda` (loads the stand-in driver, which is process-wide), `guard` (signals,
//! and children that run one of its tests), `halfway` and `refused` (change the mappings, or use up
//! the mapping limit, of the process).
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

mod conformance;
mod faulty;
mod model;
mod parked;
