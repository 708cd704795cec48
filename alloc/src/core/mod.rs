//! Pure parts: offsets and units, no addresses, devices or locks.
//!
//! `Ranges` manages free ranges of several kinds in many lines of units; the allocator of this crate uses
//! it. [`Tlsf`] is an offset allocator on top of it, for one line (a file's extents, an address space).

mod bins;
mod large;
mod ranges;
mod starts;
mod tlsf;

pub(crate) use large::LargePages;
pub(crate) use ranges::{Fit, Ranges};
pub(crate) use starts::Starts;
pub use tlsf::{Extent, Tlsf};

/// No index: the end of a list, or a missing neighbour.
pub(crate) const NONE: u32 = u32::MAX;

/// Limit of the ranges of the request's own size class that are examined. After them the next larger class,
/// in which all ranges fit, is used. See [`Tlsf::allocate`].
pub const OWN_CLASS_SCAN_MAX: u32 = 4;
