//! What tests of this and other rooms are made with. Features, never part of the library.

#[cfg(feature = "conformance")]
pub mod conformance;
#[cfg(feature = "faults")]
pub mod faulty;
