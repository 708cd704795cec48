//! What a plan costs and saves, by counting.
//!
//! Floating-point operations of a training step (forward and backward):
//! `6 · weights` per row and linear weight, on the head only for rows that have logits, and
//! `12 · pairs · heads · head_dim` per layer, pairs being the query–key pairs that are not masked.
//! Norms, activations and softmax are left out on both sides.

use serde::{Deserialize, Serialize};

use crate::{ModelShape, Op, OpKind, Spec};

/// Copies of a wave's logits alive at once: logits, their log-softmax, their gradient.
const LOGIT_COPIES: u64 = 3;
/// K and V.
const BOUNDARY_SLOTS: u64 = 2;
/// Bytes of an FP32 accumulator element, the least an accumulator has.
const ACCUMULATOR_BYTES_MIN: u32 = 4;

/// Whether sharing pays.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Less work than the dense run.
    Pays,
    /// As much work or more: the prefix is too short, or there is a single response.
    TooLittleShared,
}

impl Verdict {
    /// One sentence.
    #[must_use]
    pub fn reason(self, speedup: f64) -> String {
        match self {
            Self::Pays => format!("the dense run does {speedup:.2} times the work"),
            Self::TooLittleShared => {
                format!("the dense run does {speedup:.2} times the work: nothing is saved")
            }
        }
    }
}

/// What a plan costs and saves.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Floating-point operations of the dense run.
    pub flops_dense: f64,
    /// Floating-point operations of the plan.
    pub flops_shared: f64,
    /// Their ratio.
    pub speedup: f64,
    /// Rows of the dense run over rows of the plan.
    pub token_ratio: f64,
    /// Bytes in phase A at its end: everything saved, and K and V.
    pub peak_bytes_a: u64,
    /// Bytes in phase B, all the prefix saved asleep: K, V, accumulators, the largest wave.
    pub peak_bytes_b: u64,
    /// Bytes in phase C at its start: everything saved awake, K, V, accumulators.
    pub peak_bytes_c: u64,
    /// Bytes the prefix saves for its backward, which may sleep in B.
    pub sleep_bytes: u64,
    /// Whether sharing pays.
    pub verdict: Verdict,
}

/// Rows, rows with logits, and unmasked query–key pairs per layer.
#[derive(Clone, Copy, Debug, Default)]
struct Work {
    rows: f64,
    logit_rows: f64,
    pairs: f64,
}

impl Work {
    /// `rows` new rows, each seeing `before` keys and its own causal past.
    fn causal(rows: u64, before: u64, logit_rows: u64) -> Self {
        let (rows, before) = (rows as f64, before as f64);
        Self {
            rows,
            logit_rows: logit_rows as f64,
            pairs: rows * before + rows * (rows + 1.0) / 2.0,
        }
    }

    /// Operations of `layers` whole layers, and of the head.
    fn flops(self, model: &ModelShape, layers: f64) -> f64 {
        6.0 * self.rows * model.layer_linear_weights as f64 * layers
            + 12.0 * self.pairs * f64::from(model.heads) * f64::from(model.head_dim) * layers
            + 6.0 * self.logit_rows * model.head_weights as f64
    }
}

impl Prediction {
    pub(crate) fn of(spec: &Spec, ops: &[Op]) -> Self {
        let model = &spec.model;
        let layers = f64::from(model.layers);
        let prefix = spec.prefix_rows();
        let (mut dense_rows, mut shared_rows) = (0.0, prefix as f64);
        let (mut flops_dense, mut flops_shared) = (0.0, prefix_flops(spec));
        for suffix in spec.suffix_rows() {
            let dense = Work::causal(prefix + suffix, 0, suffix);
            dense_rows += dense.rows;
            flops_dense += dense.flops(model, layers);
            let shared = Work::causal(suffix, prefix, suffix);
            shared_rows += shared.rows;
            flops_shared += shared.flops(model, layers);
        }
        let speedup = flops_dense / flops_shared;
        let sleep_bytes = prefix * model.saved_bytes_per_token_layer * live_layers(spec);
        let boundary = boundary_elements(spec);
        let boundary_bytes = boundary * u64::from(model.dtype_bytes);
        let accumulators = boundary * u64::from(model.dtype_bytes.max(ACCUMULATOR_BYTES_MIN));
        Self {
            flops_dense,
            flops_shared,
            speedup,
            token_ratio: dense_rows / shared_rows,
            peak_bytes_a: sleep_bytes + boundary_bytes,
            peak_bytes_b: boundary_bytes + accumulators + wave_bytes(spec, ops),
            peak_bytes_c: sleep_bytes + boundary_bytes + accumulators,
            sleep_bytes,
            verdict: if speedup > 1.0 { Verdict::Pays } else { Verdict::TooLittleShared },
        }
    }
}

/// Layers whose prefix rows run whole.
fn live_layers(spec: &Spec) -> u64 {
    u64::from(spec.model.layers) - u64::from(spec.last_layer_dead)
}

fn prefix_flops(spec: &Spec) -> f64 {
    let rows = spec.prefix_rows();
    let whole = Work::causal(rows, 0, 0).flops(&spec.model, live_layers(spec) as f64);
    let dead = if spec.last_layer_dead {
        6.0 * rows as f64 * spec.model.last_layer_prefix_weights as f64
    } else {
        0.0
    };
    whole + dead
}

/// K and V elements of the prefix, all layers.
fn boundary_elements(spec: &Spec) -> u64 {
    let model = &spec.model;
    spec.prefix_rows()
        * BOUNDARY_SLOTS
        * u64::from(model.layers)
        * u64::from(model.kv_heads)
        * u64::from(model.head_dim)
}

/// Bytes the largest wave saves, with its logits.
fn wave_bytes(spec: &Spec, ops: &[Op]) -> u64 {
    let model = &spec.model;
    let rows = ops.iter().filter_map(|op| match &op.kind {
        OpKind::Wave { members, .. } => Some(members.iter().map(|m| m.rows.count()).sum()),
        _ => None,
    });
    let rows: u64 = rows.max().unwrap_or(0);
    let logits = LOGIT_COPIES * u64::from(spec.vocab) * u64::from(model.dtype_bytes);
    rows * (model.saved_bytes_per_token_layer * u64::from(model.layers) + logits)
}
