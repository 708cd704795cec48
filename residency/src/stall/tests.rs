//! Stall bounds against simulations and the capacity recursion.

use proptest::prelude::*;

use super::*;

const NS_PER_S: f64 = 1e9;

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
}

/// The least stall with room for `resident_bytes` at a time, layers of any size: the forward
/// recursion `s_k ≥ max(f_{k−1}, B_k/BW − L, max_{1≤i<k} f_i + (B_k − B_{i−1} − M)/BW)`,
/// `f_k = s_k + c_k`, stall ≥ `f_n − Σc`. Quadratic in the layers.
pub(crate) fn stall_bound_capacity_ns(
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
        let wake = WindowedWake {
            layers: n as u32,
            window: w as u32,
            load_s: b as f64,
            compute_s: c as f64,
            lead_s: l as f64,
        };
        let recursive = stall_bound_capacity_ns(&equal(n, b, c), GB, l, w * b);
        prop_assert_eq!(wake.stall_s(), recursive as f64);
    }
}

/// Layer by layer, as it is defined.
fn simulated_s(wake: WindowedWake) -> f64 {
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
        let wake = WindowedWake { layers, window, load_s, compute_s, lead_s };
        let wanted = simulated_s(wake);
        prop_assert!(wake.stall_s() >= 0.0, "{}", wake.stall_s());
        prop_assert!((wake.stall_s() - wanted).abs() < 1e-9, "{} {wanted}", wake.stall_s());
    }
}

#[test]
fn room_for_one_layer_is_ruinous() {
    let wake = WindowedWake { layers: 10, window: 1, load_s: 3.0, compute_s: 4.0, lead_s: 100.0 };
    assert_eq!(wake.stall_s(), 27.0, "every layer but the first is waited for in full");
    assert_eq!(WindowedWake { window: 2, ..wake }.stall_s(), 0.0);
}

#[test]
fn nothing_asleep_stalls_nothing() {
    let wake = WindowedWake { layers: 0, window: 0, load_s: 3.0, compute_s: 4.0, lead_s: 0.0 };
    assert_eq!(wake.stall_s(), 0.0);
}
