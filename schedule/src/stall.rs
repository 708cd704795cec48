//! How long phase C must wait for sleeping layers at least (docs/method.md §5).

/// A prefix whose layers wake one after another, each in the same time. Times in seconds.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wake {
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

impl Wake {
    /// Seconds the backward waits, on one link that is never idle when it may load.
    ///
    /// Layer k loads after layer k−1 has loaded and layer k−window is consumed; its backward starts
    /// when it has loaded and layer k−1 is consumed. Layers are numbered in the order consumed.
    pub(crate) fn stall_s(self) -> f64 {
        let window = self.window.max(1) as usize;
        let mut consumed: Vec<f64> = Vec::with_capacity(self.layers as usize);
        let (mut loaded, mut now) = (-self.lead_s, 0.0_f64);
        for layer in 0..self.layers as usize {
            let room = match layer.checked_sub(window) {
                Some(freed) => consumed[freed],
                None => f64::NEG_INFINITY,
            };
            loaded = loaded.max(room) + self.load_s;
            now = now.max(loaded) + self.compute_s;
            consumed.push(now);
        }
        // Rounding must not make a wait of nothing negative.
        (now - self.compute_s * f64::from(self.layers)).max(0.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The closed form of docs/method.md §5 for equal layers and room for two or more.
        #[test]
        fn the_stall_is_the_closed_forms(
            layers in 1u32..40,
            window in 2u32..12,
            load_s in 0.0f64..10.0,
            compute_s in 0.0f64..10.0,
            lead_s in 0.0f64..50.0,
        ) {
            let (n, w) = (f64::from(layers), f64::from(window));
            let wanted = [
                0.0,
                load_s - lead_s,
                n * load_s - lead_s - (n - 1.0) * compute_s,
                if window < layers { (n - w) * load_s - (n - 2.0) * compute_s } else { 0.0 },
            ];
            let wanted = wanted.into_iter().fold(0.0, f64::max);
            let wake = Wake { layers, window, load_s, compute_s, lead_s };
            prop_assert!(wake.stall_s() >= 0.0, "{}", wake.stall_s());
            prop_assert!((wake.stall_s() - wanted).abs() < 1e-9, "{} {wanted}", wake.stall_s());
        }
    }

    #[test]
    fn room_for_one_layer_is_ruinous() {
        let wake = Wake { layers: 10, window: 1, load_s: 3.0, compute_s: 4.0, lead_s: 100.0 };
        assert_eq!(wake.stall_s(), 27.0, "every layer but the first is waited for in full");
        assert_eq!(Wake { window: 2, ..wake }.stall_s(), 0.0);
    }

    #[test]
    fn nothing_asleep_stalls_nothing() {
        let wake = Wake { layers: 0, window: 0, load_s: 3.0, compute_s: 4.0, lead_s: 0.0 };
        assert_eq!(wake.stall_s(), 0.0);
    }
}
