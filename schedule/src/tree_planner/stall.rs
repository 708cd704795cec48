//! How long phase C must wait for sleeping layers at least (docs/method.md §5).

/// A prefix whose layers wake one after another, each in the same time. Times in seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PipelineStall {
    /// Layers asleep when the first wake starts.
    pub(crate) layers: u32,
    /// Layers there is room for: one more may load only when one has been consumed.
    pub(crate) window: u32,
    /// Loading one layer.
    pub(crate) load_s: f64,
    /// The backward of one layer.
    pub(crate) compute_s: f64,
    /// From the first wake to the beginning of phase C.
    pub(crate) lead_s: f64,
}

impl PipelineStall {
    /// Seconds the backward waits, on one link that is never idle when it may load.
    ///
    /// Layer k loads after layer k−1 has loaded and layer k−window is consumed; its backward starts
    /// when it has loaded and layer k−1 is consumed. Layers are numbered in the order consumed.
    pub(crate) fn stall_s(self) -> f64 {
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
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Layer by layer, as it is defined.
    fn simulated_s(wake: PipelineStall) -> f64 {
        let window = wake.window.max(1) as usize;
        let mut consumed: Vec<f64> = Vec::new();
        let (mut loaded, mut now) = (-wake.lead_s, 0.0_f64);
        for layer in 0..wake.layers as usize {
            if layer >= window {
                loaded = loaded.max(consumed[layer - window]);
            }
            loaded += wake.load_s;
            now = now.max(loaded) + wake.compute_s;
            consumed.push(now);
        }
        now - wake.compute_s * f64::from(wake.layers)
    }

    proptest! {
        /// The closed form of docs/method.md §5 is what happens layer by layer.
        #[test]
        fn the_stall_is_what_is_waited_for(
            layers in 0u32..40,
            window in 0u32..12,
            load_s in 0.0f64..10.0,
            compute_s in 0.0f64..10.0,
            lead_s in 0.0f64..50.0,
        ) {
            let wake = PipelineStall { layers, window, load_s, compute_s, lead_s };
            let wanted = simulated_s(wake);
            prop_assert!(wake.stall_s() >= 0.0, "{}", wake.stall_s());
            prop_assert!((wake.stall_s() - wanted).abs() < 1e-9, "{} {wanted}", wake.stall_s());
        }
    }

    #[test]
    fn room_for_one_layer_is_ruinous() {
        let wake =
            PipelineStall { layers: 10, window: 1, load_s: 3.0, compute_s: 4.0, lead_s: 100.0 };
        assert_eq!(wake.stall_s(), 27.0, "every layer but the first is waited for in full");
        assert_eq!(PipelineStall { window: 2, ..wake }.stall_s(), 0.0);
    }

    #[test]
    fn nothing_asleep_stalls_nothing() {
        let wake = PipelineStall { layers: 0, window: 0, load_s: 3.0, compute_s: 4.0, lead_s: 0.0 };
        assert_eq!(wake.stall_s(), 0.0);
    }
}
