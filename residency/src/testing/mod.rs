//! What plans are measured against; behind the feature `optimum`, for tests and benchmarks.

mod optimum;

#[cfg(test)]
pub(crate) use optimum::tests::arbitrary;
pub use optimum::{Optimum, optimum};
