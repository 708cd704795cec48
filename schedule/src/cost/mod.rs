//! The cost of running rows: counted operations, or seconds by rates fitted to measured steps.
//!
//! `predict` has the formulas of operations. Seconds are a sum of rate times count over [`Features`]. [`Fit`]
//! finds the rates from measured steps; [`Rates::counted`] derives them from a machine's rates.

mod error;
mod features;
mod fit;
mod nnls;
#[cfg(test)]
mod nnls_tests;
mod rates;
mod work;

pub use error::{COST_MAX_PS, CostError, SAMPLES_MAX, SECONDS_MAX, SECONDS_MIN};
pub use features::{FEATURE_NAMES, FEATURES, Features, PerFeature, logit_rows_of};
pub use fit::{FIT_VERSION, Fit, Sample, Weighting};
pub use nnls::Standing;
pub use rates::Rates;
pub use work::{
    ACCUMULATOR_BYTES_MIN, BACKWARD_SHARE, BOUNDARY_SLOTS, Flops, KernelRates, PASSES, Work,
};
