//! Closed forms of the least time a prefix backward waits for waking layers (docs/method.md §5).
//!
//! No schedule that obeys the link's rate stalls less. A run reports its stall beside
//! [`stall_bound_ns`], with its layers as they were; predictions use [`WindowedWake`], whose layers
//! are alike and wake within a window.

/// One layer. Layers are in the order in which the prefix backward consumes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerLoad {
    /// Bytes that must be loaded before it can run.
    pub bytes: u64,
    /// The time of its backward, in nanoseconds.
    pub compute_ns: u64,
}

/// The least stall with unlimited memory: `max_k max(0, Σ_{j≤k} b_j/BW − (L + Σ_{j<k} c_j))`.
///
/// `layers` are in the order they are consumed; `lead_ns` is the time between the first wake and the
/// first layer's backward. Returns 0 if the rate is unknown.
#[must_use]
pub fn stall_bound_ns(layers: &[LayerLoad], rate_bytes_per_s: u64, lead_ns: u64) -> u64 {
    if rate_bytes_per_s == 0 {
        return 0;
    }
    let mut bytes = 0_u128;
    let mut computed_ns = u128::from(lead_ns);
    let mut bound_ns = 0_u128;
    for layer in layers {
        bytes += u128::from(layer.bytes);
        let arrived_ns = bytes * 1_000_000_000 / u128::from(rate_bytes_per_s);
        bound_ns = bound_ns.max(arrived_ns.saturating_sub(computed_ns));
        computed_ns += u128::from(layer.compute_ns);
    }
    u64::try_from(bound_ns).unwrap_or(u64::MAX)
}

/// A prefix whose layers wake one after another, each in the same time. Times are in seconds.
#[derive(Clone, Copy, Debug)]
pub struct WindowedWake {
    /// Layers asleep when the first wake starts.
    pub layers: u32,
    /// Layers that fit in device memory at a time: another loads only when one has been consumed.
    pub window: u32,
    /// The copy of one layer.
    pub load_s: f64,
    /// The backward of one layer.
    pub compute_s: f64,
    /// From the first wake to the beginning of phase C.
    pub lead_s: f64,
}

impl WindowedWake {
    /// Returns the stall in seconds, on one link that is never idle when it may load.
    ///
    /// Layer k loads after layer k−1 has loaded and layer k−window is consumed; its backward starts
    /// when it has loaded and layer k−1 is consumed. Layers are numbered in the order consumed.
    #[must_use]
    pub fn stall_s(self) -> f64 {
        if self.layers == 0 {
            return 0.0;
        }
        let (count, window) = (f64::from(self.layers), f64::from(self.window.max(1)));
        let first_s = self.load_s - self.lead_s;
        if self.window <= 1 {
            // No layer loads while another is consumed.
            return first_s.max(0.0) + (count - 1.0) * self.load_s;
        }
        let link_s = count * self.load_s - self.lead_s - (count - 1.0) * self.compute_s;
        let room_s = if window < count {
            (count - window) * self.load_s - (count - 2.0) * self.compute_s
        } else {
            0.0
        };
        first_s.max(link_s).max(room_s).max(0.0)
    }
}

#[cfg(test)]
pub(crate) mod tests;
