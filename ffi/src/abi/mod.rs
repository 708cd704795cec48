//! The exported C functions, one module per version of the boundary.
//!
//! A function here converts its arguments, looks its handles up and calls inward; it decides
//! nothing. `ffi/include/dormouse.h` is generated from these modules.
#![allow(unreachable_pub, reason = "`pub` is what goes into the C header")]

pub mod v1;
