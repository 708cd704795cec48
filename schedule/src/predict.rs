//! What a plan costs and saves, by counting.
//!
//! # Floating-point operations
//! A multiplication and an addition are two, and backward is twice forward, so a training step does
//! - `6` per row and linear weight of a layer, for every row run in it;
//! - `6` per row and head weight, for rows that have logits: one per response token;
//! - `12 · heads · head_dim` per layer and query–key pair that is not masked: two products, scores
//!   and output, of `head_dim` elements a head.
//!
//! | | rows | pairs of a layer | rows with logits |
//! |---|---|---|---|
//! | dense, response i | `T = \|P\| + \|S_i\| − 1` | `T·(T + 1)/2` | `\|S_i\|` |
//! | shared, prefix | `p = \|P\| − 1` | `p·(p + 1)/2` | none |
//! | shared, response i | `s = \|S_i\|` | `s·p + s·(s + 1)/2` | `\|S_i\|` |
//!
//! With the last layer dead ([`Spec::last_layer_dead`]) the prefix has no pairs there and runs
//! `last_layer_prefix_weights` instead of all of the layer's. Embeddings, norms, activations,
//! softmax, rotary embedding and the loss are left out on both sides.
//!
//! # Bytes
//! Of what the plan makes: parameters, gradients and optimizer state are the trainer's. Sums are
//! exact and stop at the largest 64-bit number.

use serde::{Deserialize, Serialize};

use crate::cost::{BACKWARD_SHARE, Work};
use crate::stall::Wake;
use crate::{Op, OpKind, Spec};

/// Copies of a wave's logits alive at once: logits, their log-softmax, their gradient.
const LOGIT_COPIES: u64 = 3;
/// K and V.
const BOUNDARY_SLOTS: u64 = 2;
/// Bytes of an FP32 accumulator element, the least an accumulator has.
const ACCUMULATOR_BYTES_MIN: u32 = 4;
/// A speedup is a ratio of sums of products: this near to 1, it is 1.
const SPEEDUP_ROUNDING: f64 = 1e-9;

/// Whether sharing pays, and if not, why not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    /// Less work than the dense run.
    Pays,
    /// As much work or more: the prefix is too short, or there is a single response.
    TooLittleShared,
    /// Less work, but phase B does not fit the device even with the whole prefix asleep.
    DoesNotFit {
        /// Bytes phase B needs.
        needed_bytes: u64,
        /// Bytes the device has.
        device_bytes: u64,
    },
}

impl Verdict {
    /// One sentence.
    #[must_use]
    pub fn reason(self, speedup: f64) -> String {
        let work = format!("the dense run does {speedup:.2} times the work");
        match self {
            Self::Pays => work,
            Self::TooLittleShared => format!("{work}: nothing is saved"),
            Self::DoesNotFit { needed_bytes, device_bytes } => format!(
                "phase B needs {needed_bytes} bytes of {device_bytes}: try fewer wave tokens"
            ),
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
    /// Bytes at the end of phase A, nothing asleep: all the prefix saved, K, V and their
    /// accumulators, which are made with them.
    pub peak_bytes_a: u64,
    /// Bytes in phase B, all the prefix saved asleep: K, V, accumulators, the largest wave.
    pub peak_bytes_b: u64,
    /// Bytes at the start of phase C, nothing asleep: as at the end of A.
    pub peak_bytes_c: u64,
    /// Bytes the prefix saves for its backward, which may sleep in B.
    pub sleep_bytes: u64,
    /// Seconds phase C waits for waking at least, where the machine's rates are known: the wake
    /// window's layers of room, waking since the last wave began.
    pub wake_stall_s: Option<f64>,
    /// Whether sharing pays.
    pub verdict: Verdict,
}

impl Prediction {
    pub(crate) fn of(spec: &Spec, ops: &[Op]) -> Self {
        let layers = f64::from(spec.model.layers);
        let prefix = spec.prefix_rows();
        let (mut dense_rows, mut shared_rows) = (0.0, prefix as f64);
        let (mut flops_dense, mut flops_shared) = (0.0, prefix_flops(spec));
        for suffix in spec.suffix_rows() {
            let dense = Work::causal(prefix + suffix, 0, suffix);
            dense_rows += dense.rows;
            flops_dense += dense.flops(&spec.model, layers);
            shared_rows += suffix as f64;
            flops_shared += suffix_flops(spec, suffix);
        }
        let speedup = flops_dense / flops_shared;
        let bytes = Bytes::of(spec, ops);
        Self {
            flops_dense,
            flops_shared,
            speedup,
            token_ratio: dense_rows / shared_rows,
            peak_bytes_a: clamp(bytes.saved + bytes.boundary),
            peak_bytes_b: clamp(bytes.boundary + bytes.wave),
            peak_bytes_c: clamp(bytes.saved + bytes.boundary),
            sleep_bytes: clamp(bytes.saved),
            wake_stall_s: wake_stall_s(spec, ops),
            verdict: verdict(spec, speedup, clamp(bytes.boundary + bytes.wave)),
        }
    }
}

fn verdict(spec: &Spec, speedup: f64, needed_bytes: u64) -> Verdict {
    let device_bytes = spec.machine.map_or(0, |machine| machine.device_bytes);
    if speedup <= 1.0 + SPEEDUP_ROUNDING {
        Verdict::TooLittleShared
    } else if device_bytes > 0 && needed_bytes > device_bytes {
        Verdict::DoesNotFit { needed_bytes, device_bytes }
    } else {
        Verdict::Pays
    }
}

/// Layers whose prefix rows run whole.
fn live_layers(spec: &Spec) -> u32 {
    spec.model.layers - u32::from(spec.last_layer_dead)
}

fn prefix_flops(spec: &Spec) -> f64 {
    let rows = spec.prefix_rows();
    let whole = Work::causal(rows, 0, 0).flops(&spec.model, f64::from(live_layers(spec)));
    let dead = if spec.last_layer_dead {
        6.0 * rows as f64 * spec.model.last_layer_prefix_weights as f64
    } else {
        0.0
    };
    whole + dead
}

fn suffix_flops(spec: &Spec, rows: u64) -> f64 {
    Work::causal(rows, spec.prefix_rows(), rows).flops(&spec.model, spec.model.layers.into())
}

/// Rows of each wave's members.
fn waves(ops: &[Op]) -> impl Iterator<Item = Vec<u64>> + '_ {
    ops.iter().filter_map(|op| match &op.kind {
        OpKind::Wave { members, .. } => Some(members.iter().map(|m| m.rows.count()).collect()),
        _ => None,
    })
}

/// Bytes of each kind, in 128 bits: no product of a spec's fields is larger.
#[derive(Clone, Copy, Debug)]
struct Bytes {
    /// What the prefix saves for its backward.
    saved: u128,
    /// K, V and their accumulators.
    boundary: u128,
    /// What the largest wave saves, with its logits.
    wave: u128,
}

impl Bytes {
    fn of(spec: &Spec, ops: &[Op]) -> Self {
        let model = &spec.model;
        let wide = |value: u32| u128::from(value);
        let prefix = u128::from(spec.prefix_rows());
        let saved_row = u128::from(model.saved_bytes_per_token_layer);
        let boundary_row = u128::from(BOUNDARY_SLOTS)
            * wide(model.layers)
            * wide(model.kv_heads)
            * wide(model.head_dim);
        let accumulator_bytes = model.dtype_bytes.max(ACCUMULATOR_BYTES_MIN);
        let logits_row = u128::from(LOGIT_COPIES) * wide(spec.vocab) * wide(model.dtype_bytes);
        let rows = waves(ops).map(|rows| rows.iter().sum::<u64>()).max().unwrap_or(0);
        Self {
            saved: prefix * saved_row * wide(live_layers(spec)),
            boundary: prefix * boundary_row * wide(model.dtype_bytes + accumulator_bytes),
            wave: u128::from(rows) * (saved_row * wide(model.layers) + logits_row),
        }
    }
}

fn clamp(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// What C waits for at least when the prefix sleeps through B, where the rates are known.
fn wake_stall_s(spec: &Spec, ops: &[Op]) -> Option<f64> {
    let known = |rate: u64| (rate > 0).then_some(rate as f64);
    let machine = spec.machine?;
    let flops_per_s = known(machine.flops_per_s)?;
    let wake_bytes_per_s = known(machine.wake_bytes_per_s)?;
    let window = ops.iter().find_map(|op| match op.kind {
        OpKind::NodeBackward { wake_window_layers, .. } => Some(wake_window_layers),
        _ => None,
    })?;
    let prefix = spec.prefix_rows();
    let layer_bytes = prefix as f64 * spec.model.saved_bytes_per_token_layer as f64;
    let layer_flops = Work::causal(prefix, 0, 0).flops(&spec.model, 1.0);
    let last_wave_flops: f64 =
        waves(ops).last()?.into_iter().map(|rows| suffix_flops(spec, rows)).sum();
    let wake = Wake {
        layers: live_layers(spec),
        window,
        load_s: layer_bytes / wake_bytes_per_s,
        compute_s: BACKWARD_SHARE * layer_flops / flops_per_s,
        lead_s: last_wave_flops / flops_per_s,
    };
    Some(wake.stall_s())
}
