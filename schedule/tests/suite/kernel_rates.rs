//! Kernels have rates of their own: predicted seconds against counting every row and every pair.

use proptest::prelude::*;

use crate::batch::FlatGroup;
use dormouse_schedule::{Machine, ModelShape, PlanOptions};

const MODEL: ModelShape = ModelShape {
    layers: 3,
    heads: 4,
    kv_heads: 2,
    head_dim: 8,
    dtype_bytes: 2,
    layer_linear_weights: 1_000,
    kv_linear_weights: 100,
    last_layer_prefix_weights: 100,
    head_weights: 700,
    saved_bytes_per_token_layer: 64,
};

/// The seconds of rows, one by one.
struct Naive {
    machine: Machine,
    seconds: f64,
}

impl Naive {
    /// Adds a row that attends to `prefix` keys of other rows and to `own` keys of its own.
    fn row(&mut self, prefix: u64, own: u64, has_logits: bool) {
        let Machine {
            flops_per_s, prefix_attention_flops_per_s, causal_attention_flops_per_s, ..
        } = self.machine;
        let linear = flops_per_s as f64;
        let prefix_rate = match prefix_attention_flops_per_s {
            0 => linear,
            rate => rate as f64,
        };
        let causal_rate = match causal_attention_flops_per_s {
            0 => prefix_rate,
            rate => rate as f64,
        };
        // Forward, and backward twice as much; a product and a sum an element.
        let head_weights = if has_logits { 700.0 } else { 0.0 };
        let mut flops = [6.0 * head_weights, 0.0, 0.0];
        for _ in 0..3 {
            flops[0] += 6.0 * 1_000.0;
            for _ in 0..prefix {
                flops[1] += 3.0 * 2.0 * 2.0 * 4.0 * 8.0;
            }
            for _ in 0..own {
                flops[2] += 3.0 * 2.0 * 2.0 * 4.0 * 8.0;
            }
        }
        self.seconds += flops[0] / linear + flops[1] / prefix_rate + flops[2] / causal_rate;
    }
}

proptest! {
    #[test]
    fn seconds_are_those_of_all_rows(
        prompt in 2u64..40,
        lengths in prop::collection::vec(1u64..30, 1..6),
        flops_per_s in 1_000u64..100_000,
        prefix_attention_flops_per_s in prop_oneof![Just(0u64), 100u64..1_000_000],
        causal_attention_flops_per_s in prop_oneof![Just(0u64), 100u64..1_000_000],
    ) {
        let machine = Machine {
            flops_per_s,
            prefix_attention_flops_per_s,
            causal_attention_flops_per_s,
            ..Machine::default()
        };
        let options = PlanOptions {
            vocab: 10,
            microbatch_rows: 16,
            always_share: true,
            model: MODEL,
            machine: Some(machine),
            ..PlanOptions::default()
        };
        let responses = lengths.iter().map(|length| (*length, 1.0)).collect();
        let prediction = FlatGroup { prompt, responses, options }.plan().unwrap().predict();
        let [mut dense, mut shared] = [0, 1].map(|_| Naive { machine, seconds: 0.0 });
        let prefix = prompt - 1;
        (0..prefix).for_each(|row| shared.row(0, row + 1, false));
        for &length in &lengths {
            (0..prefix).for_each(|row| dense.row(0, row + 1, false));
            for row in 0..length {
                dense.row(0, prefix + row + 1, true);
                shared.row(prefix, row + 1, true);
            }
        }
        for (seen, wanted) in [
            (prediction.seconds_dense, dense.seconds),
            (prediction.seconds_shared, shared.seconds),
        ] {
            prop_assert!((seen.unwrap() / wanted - 1.0).abs() < 1e-9, "{:?} {}", seen, wanted);
        }
    }
}
