//! Counted operations of rows, and the seconds that kernels take for them.

use std::ops::{Add, AddAssign, Mul};

use crate::{Machine, ModelShape};

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
    /// Pairs of a row and a key of its prefix, per layer.
    pub prefix_pairs: f64,
    /// Unmasked pairs of these rows with each other, per layer.
    pub causal_pairs: f64,
}

impl Work {
    /// Returns the work of `rows` new rows that attend to `before` keys and to each other causally.
    #[must_use]
    pub fn causal(rows: u64, before: u64, logit_rows: u64) -> Self {
        let (rows, before) = (rows as f64, before as f64);
        Self {
            rows,
            logit_rows: logit_rows as f64,
            prefix_pairs: rows * before,
            causal_pairs: rows * (rows + 1.0) / 2.0,
        }
    }

    /// Returns the operations of `layers` whole layers and of the head.
    #[must_use]
    pub fn flops(self, model: &ModelShape, layers: f64) -> Flops {
        let pair = 12.0 * f64::from(model.heads) * f64::from(model.head_dim) * layers;
        Flops {
            linear: 6.0 * self.rows * model.layer_linear_weights as f64 * layers
                + 6.0 * self.logit_rows * model.head_weights as f64,
            prefix_attention: pair * self.prefix_pairs,
            causal_attention: pair * self.causal_pairs,
        }
    }
}

/// Floating-point operations by the kernels that run them.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Flops {
    /// Products with weights.
    pub linear: f64,
    /// Attention to the keys of a prefix.
    pub prefix_attention: f64,
    /// Causal attention of rows to each other; masked pairs are not counted.
    pub causal_attention: f64,
}

impl Flops {
    /// Returns the sum over all kernels.
    #[must_use]
    pub fn sum(self) -> f64 {
        self.linear + self.prefix_attention + self.causal_attention
    }

    /// Returns the seconds that they take.
    #[must_use]
    pub fn seconds(self, rates: &KernelRates) -> f64 {
        self.linear / rates.linear
            + self.prefix_attention / rates.prefix_attention
            + self.causal_attention / rates.causal_attention
    }
}

impl Add for Flops {
    type Output = Self;

    fn add(self, other: Self) -> Self {
        Self {
            linear: self.linear + other.linear,
            prefix_attention: self.prefix_attention + other.prefix_attention,
            causal_attention: self.causal_attention + other.causal_attention,
        }
    }
}

impl AddAssign for Flops {
    fn add_assign(&mut self, other: Self) {
        *self = *self + other;
    }
}

impl Mul<Flops> for f64 {
    type Output = Flops;

    fn mul(self, flops: Flops) -> Flops {
        Flops {
            linear: self * flops.linear,
            prefix_attention: self * flops.prefix_attention,
            causal_attention: self * flops.causal_attention,
        }
    }
}

/// Operations per second of each kind of kernel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct KernelRates {
    /// Of products with weights.
    pub linear: f64,
    /// Of attention to the keys of a prefix.
    pub prefix_attention: f64,
    /// Of causal attention, by unmasked pairs.
    pub causal_attention: f64,
}

impl KernelRates {
    /// Returns one rate for all kernels.
    #[must_use]
    pub const fn uniform(flops_per_s: f64) -> Self {
        Self { linear: flops_per_s, prefix_attention: flops_per_s, causal_attention: flops_per_s }
    }

    /// Returns the rates of a machine; `None` if `flops_per_s` is unknown.
    #[must_use]
    pub fn of(machine: &Machine) -> Option<Self> {
        let or = |rate: u64, other: f64| if rate > 0 { rate as f64 } else { other };
        let linear = (machine.flops_per_s > 0).then_some(machine.flops_per_s as f64)?;
        let prefix_attention = or(machine.prefix_attention_flops_per_s, linear);
        let causal_attention = or(machine.causal_attention_flops_per_s, prefix_attention);
        Some(Self { linear, prefix_attention, causal_attention })
    }
}
