//! What running rows costs: by counting, or by rates fitted to measured steps.
//!
//! Counting operations: see `predict` for the formulas. Seconds are a sum of rate times count over
//! the [`Features`] of what is run; [`Fit`] finds the rates in measured steps, and where there are
//! none, [`Rates::counted`] has them from operations and the machine's rates.

mod error;
mod features;
mod fit;
mod nnls;
#[cfg(test)]
mod nnls_tests;
mod order;
mod rates;

pub use error::CostError;
pub use features::{Features, logit_rows_of};
pub use fit::{
    FIT_VERSION, Fit, SAMPLES_MAX, SECONDS_MAX, SECONDS_MIN, Sample, Standing, Weighting,
};
pub use order::{FEATURE_NAMES, FEATURES};
pub use rates::{COST_MAX_PS, Rates};

use crate::ModelShape;

/// Of a training step's operations, those of backward.
pub const BACKWARD_SHARE: f64 = 2.0 / 3.0;
/// Boundary tensors of a row and layer: K and V.
pub const BOUNDARY_SLOTS: u64 = 2;
/// Bytes of an FP32 accumulator element, the least an accumulator has.
pub const ACCUMULATOR_BYTES_MIN: u32 = 4;

/// Rows, rows with logits, and unmasked query–key pairs per layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Rows run in every layer.
    pub rows: f64,
    /// Rows that have logits.
    pub logit_rows: f64,
    /// Unmasked query–key pairs per layer.
    pub pairs: f64,
}

impl Work {
    /// `rows` new rows, each seeing `before` keys and its own causal past.
    #[must_use]
    pub fn causal(rows: u64, before: u64, logit_rows: u64) -> Self {
        let (rows, before) = (rows as f64, before as f64);
        Self {
            rows,
            logit_rows: logit_rows as f64,
            pairs: rows * before + rows * (rows + 1.0) / 2.0,
        }
    }

    /// Operations of `layers` whole layers, and of the head.
    #[must_use]
    pub fn flops(self, model: &ModelShape, layers: f64) -> f64 {
        6.0 * self.rows * model.layer_linear_weights as f64 * layers
            + 12.0 * self.pairs * f64::from(model.heads) * f64::from(model.head_dim) * layers
            + 6.0 * self.logit_rows * model.head_weights as f64
    }
}
