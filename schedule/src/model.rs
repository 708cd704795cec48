//! Model shapes and machine rates.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

use crate::PlanError;
use crate::limits::{DTYPE_BYTES_MAX, LAYERS_MAX};

/// The shape of a model. Counts are weights and elements unless the name says bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelShape {
    /// Decoder layers.
    pub layers: u32,
    /// Query heads of a layer.
    pub heads: u32,
    /// Key and value heads of a layer.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Bytes of one activation element, 1 to 8.
    pub dtype_bytes: u32,
    /// Linear weights of one layer.
    pub layer_linear_weights: u64,
    /// Linear weights of the K and V projections, part of `layer_linear_weights`.
    pub kv_linear_weights: u64,
    /// Linear weights of the last layer that phase A runs if the layer is dead: the K and V projections, and
    /// others that the trainer cannot omit.
    pub last_layer_prefix_weights: u64,
    /// Weights of the language-model head.
    pub head_weights: u64,
    /// Bytes one layer saves per token for its backward. If this includes K and V after rotary embedding, bytes of
    /// microbatches are exact, and those of nodes count K and V twice. Otherwise nodes are exact and
    /// microbatches too low. Include them for a strict budget.
    pub saved_bytes_per_token_layer: u64,
}

impl ModelShape {
    /// Checks that every dimension is in range.
    ///
    /// # Errors
    /// `Count` for the first dimension out of range.
    pub fn check(&self, last_layer_dead: bool) -> Result<(), PlanError> {
        count("layers", self.layers, 1, LAYERS_MAX)?;
        count("heads", self.heads, 1, u32::MAX)?;
        count("kv_heads", self.kv_heads, 1, u32::MAX)?;
        count("head_dim", self.head_dim, 1, u32::MAX)?;
        count("dtype_bytes", self.dtype_bytes, 1, DTYPE_BYTES_MAX)?;
        let all = self.layer_linear_weights;
        count("layer_linear_weights", all, 1, u64::MAX)?;
        count("kv_linear_weights", self.kv_linear_weights, 0, all)?;
        if last_layer_dead {
            let at_least = self.kv_linear_weights;
            let seen = self.last_layer_prefix_weights;
            count("last_layer_prefix_weights", seen, at_least, all)?;
        }
        Ok(())
    }
}

/// Returns an error if a number is outside `least..=most`.
///
/// # Errors
/// `Count` with the name `what`, the value and the accepted range.
pub fn count<T>(what: &'static str, seen: T, least: T, most: T) -> Result<(), PlanError>
where
    T: Copy + Into<u64> + PartialOrd + Display,
{
    if (least..=most).contains(&seen) {
        return Ok(());
    }
    let accepted = format!("{least} to {most}");
    Err(PlanError::Count { what, seen: seen.into(), accepted })
}

/// A machine's rates; 0 means unknown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Machine {
    /// Floating-point operations per second of one rank, in products with weights.
    pub flops_per_s: u64,
    /// Device memory in bytes, without parameters, gradients and optimizer state.
    pub device_bytes: u64,
    /// Device to host bandwidth in bytes per second.
    pub sleep_bytes_per_s: u64,
    /// Host to device bandwidth in bytes per second.
    pub wake_bytes_per_s: u64,
    /// Pinned host memory for sleeping tensors, in bytes.
    pub host_bytes: u64,
    /// NVMe write bandwidth in bytes per second.
    pub nvme_write_bytes_per_s: u64,
    /// NVMe read bandwidth in bytes per second.
    pub nvme_read_bytes_per_s: u64,
    /// Bandwidth between ranks in bytes per second.
    pub link_bytes_per_s: u64,
    /// Overhead of a forward or a backward through the layers, whatever its rows, in nanoseconds: kernel
    /// launches, reading weights and writing their gradients, gathering of weights. A microbatch has both.
    pub op_overhead_ns: u64,
    /// Floating-point operations per second of attention to the keys of a prefix. 0: `flops_per_s`.
    pub prefix_attention_flops_per_s: u64,
    /// Floating-point operations per second of causal attention, where masked pairs do not count: a kernel that
    /// computes them too has half its other rate. 0: `prefix_attention_flops_per_s`.
    pub causal_attention_flops_per_s: u64,
}
