//! Lower bounds on the time compute must wait for waking layers. Pure arithmetic.
//!
//! Nothing that obeys the link's rate can stall less than these; a run reports itself against
//! them.

const NS_PER_S: f64 = 1e9;

/// One layer as the prefix backward consumes it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LayerLoad {
    /// Bytes that must come in before it can run.
    pub bytes: u64,
    /// Its own backward, in nanoseconds.
    pub compute_ns: u64,
}

/// The least stall with unlimited memory: `max_k max(0, Σ_{j≤k} b_j/BW − (L + Σ_{j<k} c_j))`.
///
/// `layers` in the order they are consumed, `lead_ns` the time between the first wake and the
/// first layer's backward. 0 where the rate is not known.
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

/// The least stall of `layers` equal ones with room for a window of `window` ≥ 2 of them:
/// `max(0, β − L, nβ − L − (n−1)c, (n−W)β − (n−2)c)`, β and c in nanoseconds.
#[must_use]
pub fn stall_bound_window_ns(
    layers: u64,
    window: u64,
    load_ns: u64,
    compute_ns: u64,
    lead_ns: u64,
) -> u64 {
    if layers == 0 {
        return 0;
    }
    let term = |loads: u64, lead: u64, computes: u64| {
        let load = u128::from(loads) * u128::from(load_ns);
        let cover = u128::from(lead) + u128::from(computes) * u128::from(compute_ns);
        u64::try_from(load.saturating_sub(cover)).unwrap_or(u64::MAX)
    };
    term(1, lead_ns, 0).max(term(layers, lead_ns, layers - 1)).max(term(
        layers.saturating_sub(window),
        0,
        layers.saturating_sub(2),
    ))
}

/// The least stall with room for `resident_bytes` at a time, layers of any size: the forward
/// recursion `s_k ≥ max(f_{k−1}, B_k/BW − L, max_{1≤i<k} f_i + (B_k − B_{i−1} − M)/BW)`,
/// `f_k = s_k + c_k`, stall ≥ `f_n − Σc`. Quadratic in the layers.
#[must_use]
pub fn stall_bound_capacity_ns(
    layers: &[LayerLoad],
    rate_bytes_per_s: u64,
    lead_ns: u64,
    resident_bytes: u64,
) -> u64 {
    if rate_bytes_per_s == 0 {
        return 0;
    }
    let load_ns = |bytes: f64| bytes * NS_PER_S / rate_bytes_per_s as f64;
    let mut loaded = vec![0.0]; // B_k, from B_0
    let mut finished = vec![0.0]; // f_k, from f_0
    for layer in layers {
        let before = loaded.last().copied().unwrap_or(0.0);
        let all = before + layer.bytes as f64;
        let mut start =
            finished.last().copied().unwrap_or(0.0_f64).max(load_ns(all) - lead_ns as f64);
        // Layer i's bytes leave when it has finished; only then may those beyond M come in.
        for (f_i, b_before_i) in finished.iter().skip(1).zip(&loaded) {
            start = start.max(f_i + load_ns(all - b_before_i - resident_bytes as f64));
        }
        loaded.push(all);
        finished.push(start + layer.compute_ns as f64);
    }
    let computed: f64 = layers.iter().map(|l| l.compute_ns as f64).sum();
    (finished.last().copied().unwrap_or(0.0) - computed).max(0.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn equal(n: usize, bytes: u64, compute_ns: u64) -> Vec<LayerLoad> {
        vec![LayerLoad { bytes, compute_ns }; n]
    }

    #[test]
    fn known_cases() {
        // One byte a nanosecond. Loads of 10 under computes of 4, no lead: all wait for the last.
        assert_eq!(stall_bound_ns(&equal(3, 10, 4), GB, 0), 30 - 8);
        assert_eq!(stall_bound_ns(&equal(3, 10, 4), GB, 22), 0);
        // Fast link: only the first load shows.
        assert_eq!(stall_bound_ns(&equal(3, 4, 10), GB, 1), 3);
        // The prefix maximum is tighter than its last term.
        let front = [
            LayerLoad { bytes: 100, compute_ns: 1 },
            LayerLoad { bytes: 1, compute_ns: 500 },
            LayerLoad { bytes: 1, compute_ns: 1 },
        ];
        assert_eq!(stall_bound_ns(&front, GB, 0), 100);
        assert_eq!(stall_bound_ns(&front, 0, 0), 0);
        assert_eq!(stall_bound_ns(&[], GB, 0), 0);
    }

    #[test]
    fn no_overflow_at_the_ends() {
        let huge = equal(4, u64::MAX, u64::MAX);
        assert_eq!(stall_bound_ns(&huge, 1, 0), u64::MAX);
        assert_eq!(stall_bound_window_ns(u64::MAX, 2, u64::MAX, 0, 0), u64::MAX);
        assert_eq!(stall_bound_window_ns(0, 2, 5, 5, 5), 0);
    }

    mod properties {
        use super::*;
        use proptest::prelude::*;

        fn any_layers() -> impl Strategy<Value = Vec<LayerLoad>> {
            let layer = (0..10_000_u64, 0..10_000_u64)
                .prop_map(|(bytes, compute_ns)| LayerLoad { bytes, compute_ns });
            prop::collection::vec(layer, 0..20)
        }

        /// Plays the best schedule there is with unlimited memory: load in order, at full rate.
        fn simulate(layers: &[LayerLoad], lead_ns: u64) -> u64 {
            let (mut link, mut now, mut stall) = (0, lead_ns, 0);
            for layer in layers {
                link += layer.bytes;
                stall += link.saturating_sub(now);
                now = now.max(link) + layer.compute_ns;
            }
            stall
        }

        proptest! {
            /// The bound is met exactly by the greedy schedule: it is neither low nor high.
            #[test]
            fn bound_is_what_greedy_reaches(layers in any_layers(), lead in 0..50_000_u64) {
                prop_assert_eq!(stall_bound_ns(&layers, GB, lead), simulate(&layers, lead));
            }

            /// With room for everything the capacity-aware bound is the plain one.
            #[test]
            fn capacity_bound_reduces(layers in any_layers(), lead in 0..50_000_u64) {
                let plain = stall_bound_ns(&layers, GB, lead);
                let all = layers.iter().map(|l| l.bytes).sum();
                prop_assert!(plain.abs_diff(stall_bound_capacity_ns(&layers, GB, lead, all)) <= 1);
            }

            /// Less room never helps.
            #[test]
            fn capacity_bound_is_monotone(
                layers in any_layers(), lead in 0..50_000_u64, m in 0..50_000_u64, d in 0..9_000_u64,
            ) {
                let tight = stall_bound_capacity_ns(&layers, GB, lead, m);
                prop_assert!(tight >= stall_bound_capacity_ns(&layers, GB, lead, m + d));
            }

            /// Equal layers: the closed form is the recursion.
            #[test]
            fn window_form_agrees(
                n in 2..20_usize, w in 2..8_u64, b in 0..1000_u64, c in 0..1000_u64, l in 0..2000_u64,
            ) {
                let closed = stall_bound_window_ns(n as u64, w, b, c, l);
                let layers = equal(n, b, c);
                let recursive = stall_bound_capacity_ns(&layers, GB, l, w * b);
                prop_assert!(closed <= recursive + 1, "{} > {}", closed, recursive);
            }
        }
    }
}
