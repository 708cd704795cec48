//! Shapes of models and rates of machines.

use std::fmt::Display;

use serde::{Deserialize, Serialize};

use crate::PlanError;
use crate::limits::{DTYPE_BYTES_MAX, LAYERS_MAX};

/// A model's shape, as far as costs depend on it. Weights and elements, not bytes, unless said.
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
    /// Those of them that make K and V.
    pub kv_linear_weights: u64,
    /// Linear weights of the last layer that A runs when it is dead: the K and V projections, and
    /// whatever else the trainer cannot leave out.
    pub last_layer_prefix_weights: u64,
    /// Weights of the language-model head.
    pub head_weights: u64,
    /// Bytes one layer saves per token for its backward. With K and V after rotary embedding among
    /// them, bytes of microbatches are right, and those of nodes, whose K and V stay as boundary tensors, too
    /// high by K and V once; without, nodes are right and microbatches too low. Where a budget must hold,
    /// count them.
    pub saved_bytes_per_token_layer: u64,
}

impl ModelShape {
    /// Checks that no dimension is missing; costs of an incomplete model would be meaningless.
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
/// `Count`, naming `what` was counted, the value seen and the range accepted.
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
    /// Floating-point operations per second of one rank.
    pub flops_per_s: u64,
    /// Bytes of device memory for what a plan counts: parameters and the like apart.
    pub device_bytes: u64,
    /// Device to the tier that sleeps, bytes per second.
    pub sleep_bytes_per_s: u64,
    /// The tier that sleeps to device, bytes per second.
    pub wake_bytes_per_s: u64,
    /// Bytes of pinned host memory for what sleeps.
    pub host_bytes: u64,
    /// Host to file, bytes per second.
    pub nvme_write_bytes_per_s: u64,
    /// File to host, bytes per second.
    pub nvme_read_bytes_per_s: u64,
    /// From one rank to another, bytes per second.
    pub link_bytes_per_s: u64,
    /// What an op costs whatever its size: launches, weights gathered. Nanoseconds.
    pub op_overhead_ns: u64,
}
