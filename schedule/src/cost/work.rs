//! Counted operations of rows.

use crate::ModelShape;

/// Share of the backward in a training step's operations.
pub const BACKWARD_SHARE: f64 = 2.0 / 3.0;
/// Forwards and backwards of a microbatch, and those of a node with children.
pub const PASSES: f64 = 2.0;
/// Boundary tensors per row and layer: K and V.
pub const BOUNDARY_SLOTS: u64 = 2;
/// Minimum bytes of an accumulator element (FP32).
pub const ACCUMULATOR_BYTES_MIN: u32 = 4;

/// Rows, rows with logits, and unmasked query–key pairs per layer.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Rows, each run in every layer.
    pub rows: f64,
    /// Rows with logits.
    pub logit_rows: f64,
    /// Unmasked query–key pairs per layer.
    pub pairs: f64,
}

impl Work {
    /// Returns the work of `rows` new rows that attend to `before` keys and to each other causally.
    #[must_use]
    pub fn causal(rows: u64, before: u64, logit_rows: u64) -> Self {
        let (rows, before) = (rows as f64, before as f64);
        Self {
            rows,
            logit_rows: logit_rows as f64,
            pairs: rows * before + rows * (rows + 1.0) / 2.0,
        }
    }

    /// Returns the operations of `layers` whole layers and of the head.
    #[must_use]
    pub fn flops(self, model: &ModelShape, layers: f64) -> f64 {
        6.0 * self.rows * model.layer_linear_weights as f64 * layers
            + 12.0 * self.pairs * f64::from(model.heads) * f64::from(model.head_dim) * layers
            + 6.0 * self.logit_rows * model.head_weights as f64
    }
}
