//! The C functions of `ffi/include/dormouse.h`, which is generated from these modules.
//!
//! Version 1: structs only grow; names and numbers stay.
#![allow(unreachable_pub, reason = "`pub` is what goes into the C header")]
#![allow(non_camel_case_types)] // reason: the names C sees
#![allow(clippy::missing_safety_doc)] // reason: the docs are C's; one message below holds for all
//!
//! # Safety
//! Every function: pointers are NULL or valid as documented for the length of the call; streams are
//! NULL or live streams of the device. Handles are numbers and may have any value.

/// Every constant, struct and handle of the header.
pub mod c {
    pub use super::dialogues::*;
    pub use super::planning::*;
    pub use super::rollouts::*;
    pub use super::structs::*;
}

pub mod dialogue_history;
pub mod dialogues;
pub mod forest;
pub mod history;
pub mod kernels;
// Of tests alone, so that the library can be built to measure the layouts anew.
#[cfg(test)]
mod layouts;
pub mod library;
pub mod memory;
pub mod plan;
pub mod planning;
pub mod plugin;
pub mod prefix;
pub mod rollout_history;
pub mod rollouts;
pub mod runtime;
pub mod stash;
pub mod structs;
pub mod tags;
pub mod torch;
