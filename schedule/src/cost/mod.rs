//! What running rows costs.
//!
//! By counting: see `predict` for the formulas.

use crate::ModelShape;

/// Of a training step's operations, those of backward.
pub(crate) const BACKWARD_SHARE: f64 = 2.0 / 3.0;

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
