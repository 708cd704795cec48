//! The plan against counting row by row and pair by pair.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

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

fn spec(prompt: u64, lengths: &[u64], wave_tokens: u32) -> Spec {
    Spec {
        prompt: Tokens::Length(prompt),
        responses: lengths
            .iter()
            .enumerate()
            .map(|(i, n)| Response { tokens: Tokens::Length(*n), weight: i as f64 - 1.5 })
            .collect(),
        vocab: 50,
        wave_tokens,
        model: model(),
        ..Spec::default()
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

/// FLOPs of a sequence of rows by enumeration: each row sees `before` and the rows up to itself.
fn naive(rows: u64, before: u64, logit_rows: u64, layers: u64, weights: u64) -> f64 {
    let (mut flops, shape) = (0.0, model());
    for _ in 0..layers {
        for row in 0..rows {
            flops += 6.0 * weights as f64;
            for _key in 0..before + row + 1 {
                flops += 12.0 * f64::from(shape.heads * shape.head_dim);
            }
        }
    }
    flops + 6.0 * (logit_rows * shape.head_weights) as f64
}

proptest! {
    #[test]
    fn every_response_token_is_a_label_once_at_its_dense_position(
        prompt in 2u64..40,
        lengths in prop::collection::vec(1u64..30, 1..12),
        wave_tokens in 1u32..60,
    ) {
        let mut plan = Plan::new(spec(prompt, &lengths, wave_tokens)).unwrap();
        let kinds = run(&mut plan);
        let mut labels = vec![Vec::new(); lengths.len()];
        for (number, kind) in kinds.iter().enumerate() {
            match kind {
                OpKind::PrefixForward { tokens, .. } => {
                    prop_assert_eq!(number, 0);
                    prop_assert_eq!(*tokens, Span { begin: 0, end: prompt - 1 });
                }
                OpKind::Wave { members, last, .. } => {
                    prop_assert_eq!(*last, number == kinds.len() - 2);
                    prop_assert!(members.is_sorted_by_key(|m| m.sequence));
                    let mut row = 0;
                    for member in members {
                        prop_assert_eq!(member.rows.begin, row);
                        row = member.rows.end;
                        prop_assert_eq!(member.weight, f64::from(member.sequence) - 1.5);
                        for offset in 0..member.rows.count() {
                            // Input token at dense position p predicts the token at p + 1.
                            let position = member.first_position + member.tokens.begin + offset;
                            labels[member.sequence as usize].push(position + 1 - prompt);
                        }
                    }
                    prop_assert!(row <= u64::from(wave_tokens) || members.len() == 1);
                }
                OpKind::NodeBackward { .. } => prop_assert_eq!(number, kinds.len() - 1),
                other => prop_assert!(false, "unexpected {:?}", other),
            }
        }
        for (seen, length) in labels.iter().zip(&lengths) {
            prop_assert_eq!(seen, &(0..*length).collect::<Vec<_>>());
        }
    }

    #[test]
    fn waves_are_few(
        lengths in prop::collection::vec(1u64..30, 1..40),
        wave_tokens in 30u32..100,
    ) {
        let mut plan = Plan::new(spec(5, &lengths, wave_tokens)).unwrap();
        let waves = run(&mut plan).len() as u64 - 2;
        let needed = lengths.iter().sum::<u64>().div_ceil(wave_tokens.into());
        // First-fit decreasing: at most 11/9 of the best packing, which is at least `needed`
        // halves full.
        prop_assert!(waves <= 2 * needed, "{} waves, {} needed at least", waves, needed);
    }

    #[test]
    fn flops_are_what_enumeration_counts(
        prompt in 2u64..12,
        lengths in prop::collection::vec(1u64..9, 1..5),
        dead in any::<bool>(),
    ) {
        let shape = model();
        let mut case = spec(prompt, &lengths, 16);
        case.last_layer_dead = dead;
        let prediction = Plan::new(case).unwrap().predict();
        let layers = u64::from(shape.layers);
        let weights = shape.layer_linear_weights;
        let prefix = prompt - 1;
        let (mut dense, mut rows, mut shared_rows) = (0.0, 0, prefix);
        let live = layers - u64::from(dead);
        let mut shared = naive(prefix, 0, 0, live, weights);
        if dead {
            shared += 6.0 * (prefix * shape.last_layer_prefix_weights) as f64;
        }
        for &n in &lengths {
            dense += naive(prompt + n - 1, 0, n, layers, weights);
            shared += naive(n, prefix, n, layers, weights);
            rows += prompt + n - 1;
            shared_rows += n;
        }
        let close = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs();
        prop_assert!(close(prediction.flops_dense, dense), "{} {}", prediction.flops_dense, dense);
        prop_assert!(close(prediction.flops_shared, shared), "{} {}", prediction.flops_shared, shared);
        prop_assert!(close(prediction.speedup, dense / shared));
        prop_assert!(close(prediction.token_ratio, rows as f64 / shared_rows as f64));
        prop_assert_eq!(
            prediction.sleep_bytes,
            prefix * live * shape.saved_bytes_per_token_layer
        );
    }
}

#[test]
fn a_single_response_does_not_pay_and_says_so() {
    let plan = Plan::new(spec(10, &[4], 16)).unwrap();
    let prediction = plan.predict();
    assert_eq!(prediction.verdict, Verdict::TooLittleShared);
    assert!((prediction.speedup - 1.0).abs() < 1e-12);
    assert_eq!(Plan::new(spec(10, &[4; 8], 16)).unwrap().predict().verdict, Verdict::Pays);
}

#[test]
fn ops_are_given_again_until_completed_and_only_in_order() {
    let mut plan = Plan::new(spec(4, &[2, 2], 2)).unwrap();
    assert_eq!(
        plan.complete(OpId(0)),
        Err(PlanError::Order { seen: 0, expected: None }),
        "nothing was given yet"
    );
    let first = plan.next_op().clone();
    assert_eq!(*plan.next_op(), first);
    assert_eq!(
        plan.complete(OpId(first.id.0 + 1)),
        Err(PlanError::Order { seen: first.id.0 + 1, expected: Some(first.id) })
    );
    plan.complete(first.id).unwrap();
    assert!(plan.complete(first.id).is_err(), "completed twice");
    run(&mut plan);
    let done = plan.next_op().clone();
    assert_eq!(done.kind, OpKind::Done);
    assert!(plan.complete(done.id).is_err());
}

fn refusal(change: impl FnOnce(&mut Spec)) -> String {
    let mut case = spec(4, &[2, 3], 8);
    case.prompt = Tokens::Ids(vec![1, 2, 3, 4]);
    case.responses[1].tokens = Tokens::Ids(vec![5, 6, 7]);
    assert!(Plan::new(case.clone()).is_ok());
    change(&mut case);
    Plan::new(case).unwrap_err().to_string()
}

#[test]
fn refusals_name_the_value_and_what_is_accepted() {
    let cases = [
        (refusal(|s| s.prompt = Tokens::Length(1)), "prompt has 1 tokens; accepted: 2 to"),
        (refusal(|s| s.prompt = Tokens::Length(TOKENS_MAX + 1)), "prompt has 268435457 tokens"),
        (refusal(|s| s.responses.clear()), "0 responses; accepted: 1 to 1048576"),
        (refusal(|s| s.responses[1].tokens = Tokens::Ids(vec![])), "response 1 has 0 tokens"),
        (refusal(|s| s.responses[0].tokens = Tokens::Length(0)), "response 0 has 0 tokens"),
        (refusal(|s| s.responses[0].weight = f64::NAN), "weight 0 is NaN; accepted: finite"),
        (refusal(|s| s.responses[1].weight = f64::INFINITY), "weight 1 is inf"),
        (
            refusal(|s| s.prompt = Tokens::Ids(vec![1, 50])),
            "prompt has token id 50 at 1; accepted: 0 to 49",
        ),
        (
            refusal(|s| s.responses[1].tokens = Tokens::Ids(vec![0, -1])),
            "response 1 has token id -1 at 1",
        ),
        (refusal(|s| s.wave_tokens = 0), "wave_tokens is 0; accepted: 1 to"),
        (refusal(|s| s.model.layers = 0), "layers is 0; accepted: 1 to 4096"),
        (refusal(|s| s.model.layers = LAYERS_MAX + 1), "layers is 4097"),
    ];
    for (seen, wanted) in cases {
        assert!(seen.contains(wanted), "{seen:?} does not say {wanted:?}");
    }
}

#[test]
fn too_many_responses() {
    let mut case = spec(2, &[1], 8);
    case.responses = vec![case.responses[0].clone(); RESPONSES_MAX + 1];
    assert!(matches!(Plan::new(case), Err(PlanError::ResponseCount { .. })));
}
