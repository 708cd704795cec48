//! Pure parts: they know offsets and units, never addresses, devices or locks.
//!
//! [`Tlsf`] is the offset allocator for one line of units (a file's extents, an address space).
//! Under it, `Ranges` is the same algorithm for many lines and several kinds of free range, which
//! is what the allocator of this crate is made of.

mod bins;
mod ranges;
mod starts;
mod tlsf;

pub(crate) use ranges::{Fit, Ranges};
pub(crate) use starts::Starts;
pub use tlsf::{Extent, Tlsf, TlsfError};

/// "No index": the end of every list and the absence of every neighbour.
pub(crate) const NONE: u32 = u32::MAX;

/// How many ranges of the request's own size class are looked at for one that fits, before the
/// next larger class (where all fit) is taken. Bounds the search; see [`Tlsf::allocate`].
pub const OWN_CLASS_SCAN_MAX: u32 = 4;
