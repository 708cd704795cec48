//! Order of ops, verdicts, limits and refusals. `group_replay.rs` tests rows and costs of ops.

use crate::batch::{FlatGroup, from_slices};
use dormouse_schedule::*;
use proptest::prelude::*;

fn model() -> ModelShape {
    ModelShape {
        layers: 3,
        heads: 4,
        kv_heads: 2,
        head_dim: 8,
        dtype_bytes: 4,
        layer_linear_weights: 1_000,
        kv_linear_weights: 100,
        last_layer_prefix_weights: 130,
        head_weights: 700,
        saved_bytes_per_token_layer: 64,
    }
}

fn group(prompt: u64, lengths: &[u64], microbatch_rows: u32) -> FlatGroup {
    FlatGroup {
        prompt,
        responses: lengths.iter().enumerate().map(|(i, n)| (*n, i as f64 - 1.5)).collect(),
        options: PlanOptions {
            vocab: 50,
            microbatch_rows,
            model: model(),
            ..PlanOptions::default()
        },
    }
}

/// The plan's ops, driven to the end.
fn run(plan: &mut Plan) -> Vec<OpKind> {
    let mut kinds = Vec::new();
    loop {
        let op = plan.next_op().clone();
        if op.kind == OpKind::Done {
            return kinds;
        }
        kinds.push(op.kind);
        plan.complete(op.id).unwrap();
    }
}

proptest! {
    #[test]
    fn a_single_response_never_pays(
        prompt in 2u64..TOKENS_MAX / 2,
        response in 1u64..TOKENS_MAX / 2,
        weights in 1u64..1 << 40,
        head_weights in 0u64..1 << 40,
    ) {
        let mut case = group(prompt, &[response], 1024);
        case.model.layer_linear_weights = weights;
        case.model.kv_linear_weights = 0;
        case.model.head_weights = head_weights;
        let prediction = case.plan().unwrap().predict();
        prop_assert!((prediction.speedup - 1.0).abs() < 1e-12, "{}", prediction.speedup);
        prop_assert_eq!(prediction.verdict, Verdict::TooLittleShared);
        case.responses.push(case.responses[0]);
        let twice = case.plan().unwrap().predict();
        prop_assert!(twice.speedup > 1.0, "{}", twice.speedup);
    }

    /// For any completions, the plan has the same state as a list with a cursor.
    #[test]
    fn completion_order_matches_a_cursor_model(
        steps in prop::collection::vec((any::<bool>(), 0u64..8), 0..40),
    ) {
        let mut plan = group(4, &[2, 2, 1], 2).plan().unwrap();
        let ops = plan.ops().to_vec();
        prop_assert_eq!(ops.len(), 6);
        let (mut cursor, mut given) = (0usize, false);
        for (ask, id) in steps {
            if ask {
                prop_assert_eq!(plan.next_op(), &ops[cursor]);
                given = true;
                continue;
            }
            let index = id as usize;
            let expected = (given && cursor < 5).then_some(OpId(cursor as u64));
            let disorder = match index {
                6.. => Some(Disorder::Unknown),
                _ if index < cursor => Some(Disorder::Twice),
                5 => Some(Disorder::End),
                _ if index == cursor && given => None,
                _ => Some(Disorder::Early),
            };
            let wanted = match disorder {
                Some(disorder) => Err(PlanError::Order { seen: id, disorder, expected }),
                None => Ok(()),
            };
            prop_assert_eq!(plan.complete(OpId(id)), wanted);
            if disorder.is_none() {
                (cursor, given) = (cursor + 1, false);
            }
        }
    }
}

#[test]
fn a_plan_that_does_not_fit_has_that_verdict() {
    let mut case = group(10, &[4; 8], 16);
    case.machine = Some(Machine { device_bytes: 1000, ..Machine::default() });
    let prediction = case.plan().unwrap().predict();
    let needed_bytes = prediction.peak_bytes_b;
    assert_eq!(prediction.verdict, Verdict::DoesNotFit { needed_bytes, device_bytes: 1000 });
    assert!(prediction.verdict.reason(2.0).contains("of 1000: try fewer microbatch tokens"));
    for device_bytes in [needed_bytes, 0] {
        case.machine = Some(Machine { device_bytes, ..Machine::default() });
        assert_eq!(case.plan().unwrap().predict().verdict, Verdict::Pays);
    }
}

#[test]
fn the_stall_is_predicted_if_rates_are_known() {
    let mut case = group(101, &[4; 8], 8);
    let stall = |case: &FlatGroup| case.plan().unwrap().predict().wake_stall_s;
    assert_eq!(stall(&case), None);
    let rates = |flops_per_s, wake_bytes_per_s| {
        Some(Machine { flops_per_s, wake_bytes_per_s, ..Machine::default() })
    };
    for machine in [rates(0, 1), rates(1, 0)] {
        case.machine = machine;
        assert_eq!(stall(&case), None);
    }
    case.machine = rates(1, u64::MAX);
    assert_eq!(stall(&case), Some(0.0), "an infinitely fast link");
    // Infinitely fast compute waits for every load: 100 rows of 64 bytes in each of 3 layers.
    case.machine = rates(u64::MAX, 100);
    assert!((stall(&case).unwrap() - 3.0 * 64.0).abs() < 1e-6);
    case.last_layer_dead = true;
    assert!((stall(&case).unwrap() - 2.0 * 64.0).abs() < 1e-6, "a dead layer does not sleep");
}

#[test]
fn predictions_saturate_at_64_bits() {
    let mut case = group(TOKENS_MAX / 2, &[TOKENS_MAX / 2; 2], u32::MAX);
    (case.vocab, case.wake_window_layers) = (u32::MAX, u32::MAX);
    case.model = ModelShape {
        layers: LAYERS_MAX,
        heads: u32::MAX,
        kv_heads: u32::MAX,
        head_dim: u32::MAX,
        dtype_bytes: 8,
        layer_linear_weights: u64::MAX,
        kv_linear_weights: u64::MAX,
        last_layer_prefix_weights: u64::MAX,
        head_weights: u64::MAX,
        saved_bytes_per_token_layer: u64::MAX,
    };
    let prediction = case.plan().unwrap().predict();
    assert_eq!([prediction.peak_bytes_a, prediction.peak_bytes_b], [u64::MAX; 2]);
    assert_eq!([prediction.peak_bytes_c, prediction.sleep_bytes], [u64::MAX; 2]);
    assert!(prediction.speedup.is_finite() && prediction.speedup > 1.0);
}

#[test]
fn ops_repeat_until_completed_in_order() {
    let mut plan = group(4, &[2, 2], 2).plan().unwrap();
    assert_eq!(
        plan.complete(OpId(0)),
        Err(PlanError::Order { seen: 0, disorder: Disorder::Early, expected: None }),
        "no op was returned yet"
    );
    let first = plan.next_op().clone();
    assert_eq!(*plan.next_op(), first);
    let refused = |plan: &mut Plan, id: u64| plan.complete(OpId(id)).unwrap_err().to_string();
    let early = "op 1 has not been returned yet; accepted: op 0, returned last";
    assert_eq!(refused(&mut plan, 1), early);
    let unknown = "op 9 is not in the plan; accepted: op 0, returned last";
    assert_eq!(refused(&mut plan, 9), unknown);
    assert!(refused(&mut plan, u64::MAX).contains("is not in the plan"));
    plan.complete(first.id).unwrap();
    let twice = "op 0 is already completed; accepted: none; no op is outstanding";
    assert_eq!(refused(&mut plan, 0), twice);
    run(&mut plan);
    let done = plan.next_op().clone();
    assert_eq!(done.kind, OpKind::Done);
    assert_eq!(*plan.next_op(), done);
    assert!(refused(&mut plan, done.id.0).contains("marks the end of the plan"));
}

/// The forest checks token ids.
fn ids_refused(sequences: &[&[i64]]) -> String {
    from_slices(sequences, &[], 50).unwrap_err().to_string()
}

fn refusal(change: impl FnOnce(&mut FlatGroup)) -> String {
    let mut case = group(4, &[2, 3], 8);
    assert!(case.plan().is_ok());
    change(&mut case);
    case.plan().unwrap_err().to_string()
}

#[test]
fn refusals_name_the_value_and_what_is_accepted() {
    let cases = [
        (refusal(|s| s.prompt = 1), "prompt has 1 tokens; accepted: 2 to"),
        (refusal(|s| s.prompt = TOKENS_MAX + 1), "prompt has 268435457 tokens"),
        (refusal(|s| s.responses.clear()), "responses is 0; accepted: 1 to 1048576"),
        (refusal(|s| s.responses[1].0 = 0), "response 1 has 0 tokens"),
        (refusal(|s| s.responses[0].0 = 0), "response 0 has 0 tokens"),
        (refusal(|s| s.responses[0].1 = f64::NAN), "weight 0 is NaN; accepted: finite"),
        (refusal(|s| s.responses[1].1 = f64::INFINITY), "weight 1 is inf"),
        (ids_refused(&[&[1, 50]]), "sequence 0 has token id 50 at 1; accepted: 0 to 49"),
        (ids_refused(&[&[3], &[0, -1]]), "sequence 1 has token id -1 at 1"),
        (
            refusal(|s| s.responses[0].0 = TOKENS_MAX + 1),
            "response 0 has 268435457 tokens; accepted: 1 to 268435456",
        ),
        (refusal(|s| s.responses[0].1 = f64::NEG_INFINITY), "weight 0 is -inf"),
        (ids_refused(&[&[i64::MAX, 1]]), "9223372036854775807 at 0"),
        (refusal(|s| s.vocab = 0), "vocab is 0; accepted: 1 to 4294967295"),
        (refusal(|s| s.model.heads = 0), "heads is 0; accepted: 1 to"),
        (refusal(|s| s.model.kv_heads = 0), "kv_heads is 0; accepted: 1 to"),
        (refusal(|s| s.model.head_dim = 0), "head_dim is 0; accepted: 1 to"),
        (refusal(|s| s.model.dtype_bytes = 0), "dtype_bytes is 0; accepted: 1 to 8"),
        (refusal(|s| s.model.dtype_bytes = 9), "dtype_bytes is 9"),
        (refusal(|s| s.model.layer_linear_weights = 0), "layer_linear_weights is 0"),
        (
            refusal(|s| s.model.kv_linear_weights = 1001),
            "kv_linear_weights is 1001; accepted: 0 to 1000",
        ),
        (
            refusal(|s| {
                s.last_layer_dead = true;
                s.model.last_layer_prefix_weights = 99;
            }),
            "last_layer_prefix_weights is 99; accepted: 100 to 1000",
        ),
        (refusal(|s| s.microbatch_rows = 0), "microbatch_rows is 0; accepted: 1 to"),
        (refusal(|s| s.model.layers = 0), "layers is 0; accepted: 1 to 4096"),
        (refusal(|s| s.model.layers = LAYERS_MAX + 1), "layers is 4097"),
    ];
    for (seen, wanted) in cases {
        assert!(seen.contains(wanted), "{seen:?} does not say {wanted:?}");
    }
}

#[test]
fn values_at_the_limits_are_accepted_and_beyond_refused() {
    // A sequence is a prompt and its response.
    let mut case = group(TOKENS_MAX - 1, &[1], 8);
    case.model.layers = LAYERS_MAX;
    assert!(case.plan().is_ok());
    let mut case = group(2, &[1], 1024);
    case.responses = vec![case.responses[0]; RESPONSES_MAX];
    assert_eq!(case.plan().unwrap().ops().len(), 1024 + 3);
    case.responses.push(case.responses[0]);
    let error = case.plan().unwrap_err();
    assert_eq!(error.to_string(), "responses is 1048577; accepted: 1 to 1048576");
}

#[test]
fn the_window_defaults_and_is_at_most_the_layers() {
    let window = |asked: u32, layers: u32| {
        let mut case = group(4, &[2, 2], 8);
        (case.wake_window_layers, case.model.layers) = (asked, layers);
        match run(&mut case.plan().unwrap()).pop() {
            Some(OpKind::PrefixBackward { wake_window_layers, .. }) => wake_window_layers,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!([window(0, 10), window(2, 10), window(40, 10), window(0, 1)], [3, 2, 10, 1]);
}
