//! Version 1 of the C boundary: structs only grow, names and numbers stay.
#![allow(non_camel_case_types)] // reason: the names C sees
#![allow(clippy::missing_safety_doc)] // reason: the docs are C's; one sentence below holds for all
//!
//! # Safety
//! Every function: pointers are NULL or valid for what their documentation says for the length
//! of the call. Handles are numbers and may be anything at all.

pub mod forest;
pub mod kernels;
pub mod library;
pub mod memory;
pub mod plan;
pub mod planning;
pub mod prefix;
pub mod runtime;
pub mod schedule;
pub mod stash;
pub mod structs;
pub mod tags;
pub mod torch;
