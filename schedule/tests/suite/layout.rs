//! Compares layouts with a naive model of attention, and padded packing with every partition.

use std::collections::BTreeSet;

use crate::batch::FlatGroup;
use dormouse_schedule::layout::{
    LayoutError, LayoutOptions, MULTIPLE_MAX, PADDING, Packed, Padded, PaddingSide, Piece,
    Positions, ROWS_MAX, Varlen, pack_padded,
};
use dormouse_schedule::{Member, ModelShape, NodeId, OpKind, PlanOptions, Span};
use proptest::prelude::*;

/// Pieces of up to three prefixes; some without labels, or without one for the last row.
fn pieces() -> impl Strategy<Value = Vec<Piece>> {
    let one = (0u32..4, 0u64..9, 1u64..7, any::<bool>(), 0u8..3);
    proptest::collection::vec(one, 1..8).prop_map(|all| {
        (0u32..)
            .zip(all)
            .map(|(sequence, (node, begin, rows, prefix, labels))| {
                let begin = if prefix { begin } else { 0 };
                let labels = match labels {
                    0 => Span::default(),
                    1 => Span { begin: begin + 1, end: begin + rows },
                    _ => Span { begin: begin + 1, end: begin + 1 + rows },
                };
                let prefix = prefix.then_some(NodeId(node));
                Piece { sequence, first_position: begin, rows, prefix, labels }
            })
            .collect()
    })
}

fn options(multiple: u32) -> LayoutOptions {
    LayoutOptions { multiple, ..LayoutOptions::default() }
}

/// A key: a token of a sequence itself, or of the path of a node.
type Key = (Option<u32>, Option<u32>, u64);

/// The keys of each token in the dense run: those of its path before its piece, then its own.
fn wanted(pieces: &[Piece]) -> Vec<((u32, u32), BTreeSet<Key>)> {
    let mut rows = Vec::new();
    for piece in pieces {
        for row in 0..piece.rows {
            let position = piece.first_position + row;
            let path =
                (0..piece.first_position).map(|at| (piece.prefix.map(|node| node.0), None, at));
            let own = (piece.first_position..=position).map(|at| (None, Some(piece.sequence), at));
            rows.push(((piece.sequence, position as u32), path.chain(own).collect()));
        }
    }
    rows
}

/// Segment of a row, and its place in it.
fn segment(varlen: &Varlen, row: usize) -> (usize, usize) {
    let at = varlen.cu_seqlens_q.iter().rposition(|begin| *begin as usize <= row).unwrap();
    (at, row - varlen.cu_seqlens_q[at] as usize)
}

fn count(ends: &[i32], at: usize) -> usize {
    (ends[at + 1] - ends[at]) as usize
}

/// The keys of a row in the two attention calls.
fn seen(packed: &Packed, row: usize) -> BTreeSet<Key> {
    let (at, _) = segment(&packed.prefix, row);
    let node = packed.prefix_nodes[at].map(|node| node.0);
    let path = (0..count(&packed.prefix.cu_seqlens_k, at)).map(|key| (node, None, key as u64));
    let (at, place) = segment(&packed.suffix, row);
    assert_eq!(packed.suffix.cu_seqlens_q, packed.suffix.cu_seqlens_k, "keys are the rows");
    let begin = packed.suffix.cu_seqlens_k[at] as usize;
    let own = (begin..=begin + place).map(|key| {
        let (sequence, position) = (packed.rows.sequences[key], packed.rows.positions[key]);
        (None, Some(sequence), u64::from(position))
    });
    path.chain(own).collect()
}

fn labels(rows: &dormouse_schedule::layout::Rows) -> Vec<(u32, u32, u32)> {
    (0..rows.label_rows.len())
        .map(|at| (rows.label_rows[at], rows.label_sequences[at], rows.label_positions[at]))
        .collect()
}

proptest! {
    #[test]
    fn packed_rows_attend_to_the_keys_of_dense_rows(pieces in pieces(), multiple in 1u32..9) {
        let packed = Packed::of(&pieces, &options(multiple)).unwrap();
        let wanted = wanted(&pieces);
        let all = packed.rows.sequences.len();
        prop_assert_eq!(all, wanted.len().next_multiple_of(multiple as usize));
        prop_assert_eq!(packed.padding_rows as usize, all - wanted.len());
        prop_assert_eq!(packed.rows.positions.len(), all);
        for (row, (token, keys)) in wanted.iter().enumerate() {
            let got = (packed.rows.sequences[row], packed.rows.positions[row]);
            prop_assert_eq!(got, *token);
            prop_assert_eq!(&seen(&packed, row), keys);
        }
        for row in wanted.len()..all {
            prop_assert_eq!(packed.rows.sequences[row], PADDING);
            let (last, _) = segment(&packed.suffix, row);
            prop_assert_eq!(packed.suffix.cu_seqlens_q[last] as usize, wanted.len());
        }
        for varlen in [&packed.suffix, &packed.prefix] {
            prop_assert_eq!(*varlen.cu_seqlens_q.last().unwrap() as usize, all);
            let segments = varlen.cu_seqlens_q.len() - 1;
            let most = |ends: &[i32]| (0..segments).map(|at| count(ends, at)).max().unwrap() as i32;
            prop_assert_eq!(varlen.max_seqlen_q, most(&varlen.cu_seqlens_q));
            prop_assert_eq!(varlen.max_seqlen_k, most(&varlen.cu_seqlens_k));
        }
        let keys: Vec<u64> = packed.prefix_keys.iter().map(|keys| u64::from(*keys)).collect();
        prop_assert_eq!(keys, pieces.iter().map(|piece| piece.first_position).collect::<Vec<_>>());
    }

    #[test]
    fn a_padded_row_holds_its_piece_and_then_padding(pieces in pieces(), multiple in 1u32..9) {
        let padded = Padded::of(&pieces, &options(multiple)).unwrap();
        let longest = pieces.iter().map(|piece| piece.rows).max().unwrap();
        prop_assert_eq!(padded.width, longest.next_multiple_of(multiple.into()));
        prop_assert_eq!(padded.batch as usize, pieces.len());
        let mut wasted = 0;
        for (number, piece) in pieces.iter().enumerate() {
            prop_assert_eq!(u64::from(padded.lengths[number]), piece.rows);
            prop_assert_eq!(u64::from(padded.prefix_keys[number]), piece.first_position);
            prop_assert_eq!(padded.prefix_nodes[number], piece.prefix);
            for column in 0..padded.width {
                let row = (number as u64 * padded.width + column) as usize;
                let token = (padded.rows.sequences[row], padded.rows.positions[row]);
                if column < piece.rows {
                    prop_assert_eq!(token, (piece.sequence, (piece.first_position + column) as u32));
                } else {
                    prop_assert_eq!(token.0, PADDING);
                    wasted += 1;
                }
            }
        }
        prop_assert_eq!(padded.wasted_rows, wasted);
    }

    #[test]
    fn each_scored_token_has_the_row_before_it(pieces in pieces(), multiple in 1u32..9) {
        let packed = Packed::of(&pieces, &options(multiple)).unwrap();
        let padded = Padded::of(&pieces, &options(multiple)).unwrap();
        let scored: Vec<(u32, u32)> = pieces
            .iter()
            .flat_map(|piece| {
                (piece.labels.begin..piece.labels.end).map(|at| (piece.sequence, at as u32))
            })
            .collect();
        for rows in [&packed.rows, &padded.rows] {
            let labels = labels(rows);
            prop_assert_eq!(labels.len(), scored.len());
            for ((row, sequence, position), token) in labels.into_iter().zip(&scored) {
                prop_assert_eq!((sequence, position), *token);
                prop_assert_eq!(rows.sequences[row as usize], sequence);
                prop_assert_eq!(rows.positions[row as usize] + 1, position);
            }
        }
    }

    #[test]
    fn padded_packing_is_optimal_over_all_partitions(
        rows in proptest::collection::vec(1u64..12, 1..8),
        budget in 1u64..40,
        multiple in 1u32..5,
    ) {
        let microbatches = pack_padded(&rows, budget, multiple).unwrap();
        let mut seen: Vec<u32> = microbatches.iter().flat_map(|microbatch| microbatch.members.clone()).collect();
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..rows.len() as u32).collect::<Vec<_>>());
        let mut cost = (microbatches.len(), 0);
        for microbatch in &microbatches {
            let longest = microbatch.members.iter().map(|at| rows[*at as usize]).max().unwrap();
            prop_assert_eq!(microbatch.width, longest.next_multiple_of(multiple.into()));
            let padded = microbatch.width * microbatch.members.len() as u64;
            prop_assert!(padded <= budget || microbatch.members.len() == 1);
            prop_assert!(microbatch.members.is_sorted());
            cost.1 += padded;
        }
        prop_assert_eq!(cost, best(&rows, budget, multiple, &mut Vec::new()));
    }

    /// Compares with the quadratic recurrence, for more pieces than brute force can try.
    #[test]
    fn padded_packing_is_optimal_over_all_cuts(
        mut rows in proptest::collection::vec(1u64..400, 1..120),
        budget in 1u64..4000,
    ) {
        let microbatches = pack_padded(&rows, budget, 1).unwrap();
        let padded: u64 = microbatches.iter().map(|microbatch| microbatch.width * microbatch.members.len() as u64).sum();
        rows.sort_unstable_by(|one, other| other.cmp(one));
        let mut least = vec![(0, 0)];
        for end in 1..=rows.len() {
            let ends = (0..end).filter(|begin| {
                end - begin == 1 || rows[*begin] * (end - begin) as u64 <= budget
            });
            let cost = |begin: usize| {
                let before: (usize, u64) = least[begin];
                (before.0 + 1, before.1 + rows[begin] * (end - begin) as u64)
            };
            let best = ends.map(cost).min().unwrap();
            least.push(best);
        }
        prop_assert_eq!((microbatches.len(), padded), *least.last().unwrap());
    }
}

/// Fewest microbatches, then fewest padded rows, over all partitions of the pieces.
fn best(
    rows: &[u64],
    budget: u64,
    multiple: u32,
    microbatches: &mut Vec<(u64, u64)>,
) -> (usize, u64) {
    let Some((first, rest)) = rows.split_first() else {
        let padded =
            |(width, members): &(u64, u64)| width.next_multiple_of(multiple.into()) * members;
        let fits =
            microbatches.iter().all(|microbatch| microbatch.1 == 1 || padded(microbatch) <= budget);
        let all = microbatches.iter().map(padded).sum();
        return if fits { (microbatches.len(), all) } else { (usize::MAX, 0) };
    };
    let mut least = (usize::MAX, 0);
    for at in 0..=microbatches.len() {
        let before = microbatches.clone();
        if at == microbatches.len() {
            microbatches.push((0, 0));
        }
        microbatches[at] = (microbatches[at].0.max(*first), microbatches[at].1 + 1);
        least = least.min(best(rest, budget, multiple, microbatches));
        *microbatches = before;
    }
    least
}

fn smallest_model() -> ModelShape {
    ModelShape {
        layers: 1,
        heads: 1,
        kv_heads: 1,
        head_dim: 1,
        dtype_bytes: 1,
        layer_linear_weights: 1,
        ..ModelShape::default()
    }
}

#[test]
fn a_plans_microbatches_score_every_token_of_every_response_once() {
    let lengths = [5u64, 1, 3, 8, 2];
    let group = FlatGroup {
        prompt: 7,
        responses: lengths.map(|length| (length, 1.0)).to_vec(),
        options: PlanOptions {
            vocab: 9,
            microbatch_rows: 9,
            model: smallest_model(),
            ..PlanOptions::default()
        },
    };
    let plan = group.plan().unwrap();
    let mut scored = Vec::new();
    for op in plan.ops() {
        let OpKind::Microbatch { node, members, .. } = &op.kind else { continue };
        let piece = |one: &Member| {
            let (first_position, rows) = (one.first_position, one.rows.count());
            let labels = Span { begin: first_position + 1, end: first_position + 1 + rows };
            let prefix = (*node != NodeId::NONE).then_some(*node);
            Piece { sequence: one.sequence, first_position, rows, prefix, labels }
        };
        let pieces: Vec<Piece> = members.iter().map(piece).collect();
        let packed = Packed::of(&pieces, &options(4)).unwrap();
        assert_eq!(packed.prefix.cu_seqlens_k, [0, 6], "one prefix, read once");
        assert_eq!(packed.pieces, members.iter().map(|one| one.rows).collect::<Vec<_>>());
        scored.extend(labels(&packed.rows).into_iter().map(|(_, of, at)| (of, at)));
    }
    scored.sort_unstable();
    let wanted = |(of, length): (u32, &u64)| (7..7 + *length as u32).map(move |at| (of, at));
    assert_eq!(scored, (0u32..).zip(&lengths).flat_map(wanted).collect::<Vec<_>>());
}

fn piece(first_position: u64, rows: u64) -> Piece {
    let prefix = Some(NodeId(0));
    Piece { sequence: 0, first_position, rows, prefix, labels: Span::default() }
}

fn refusal(pieces: &[Piece], options: &LayoutOptions) -> String {
    let error = Packed::of(pieces, options).unwrap_err();
    assert_eq!(Padded::of(pieces, options).unwrap_err(), error);
    error.to_string()
}

#[test]
fn invalid_pieces_and_options_are_refused() {
    let ok = LayoutOptions::default();
    let axes = LayoutOptions { positions: Positions::MultiAxis, ..ok };
    assert!(refusal(&[piece(0, 1)], &axes).starts_with("positions are multi_axis (M-RoPE)"));
    let left = LayoutOptions { padding_side: PaddingSide::Left, ..ok };
    assert!(refusal(&[piece(0, 1)], &left).starts_with("padding side is left"));
    assert!(refusal(&[], &ok).starts_with("pieces is 0; accepted: 1 to"));
    assert!(refusal(&[piece(3, 0)], &ok).starts_with("rows of a piece is 0; accepted: 1 to"));
    assert!(refusal(&[piece(0, 1)], &options(0)).starts_with("multiple is 0; accepted: 1 to 4096"));
    assert!(refusal(&[piece(0, 1)], &options(MULTIPLE_MAX + 1)).starts_with("multiple is 4097"));
    assert!(refusal(&[piece(u64::MAX, 1)], &ok).starts_with("first position of a piece is 184467"));
    let alone = Piece { prefix: None, ..piece(2, 1) };
    assert_eq!(
        refusal(&[piece(0, 1), alone], &ok),
        "piece 1 starts at position 2 without a prefix; accepted: 0, or a prefix"
    );
    for labels in [(2, 4), (3, 6), (5, 3)] {
        let labels = Span { begin: labels.0, end: labels.1 };
        let wrong = Piece { labels, ..piece(2, 2) };
        assert!(refusal(&[wrong], &ok).ends_with("accepted: none, or within 3..5"));
    }
    let many = [piece(0, ROWS_MAX), piece(0, 1)];
    assert!(refusal(&many, &ok).starts_with("rows is 16777217; accepted: 1 to 16777216"));
    assert!(pack_padded(&[1, 0], 4, 1).is_err() && pack_padded(&[1], 0, 1).is_err());
    assert!(pack_padded(&[], 4, 1).is_err() && pack_padded(&[1], 4, 0).is_err());
    let keys = vec![Piece { prefix: None, ..piece(0, 1) }, piece(1 << 27, 1)];
    let keys: Vec<Piece> = keys.into_iter().cycle().take(40).collect();
    let error = Packed::of(&keys, &ok).unwrap_err();
    assert!(error.to_string().starts_with("prefix keys is 2684354560; accepted: 0 to 2147483647"));
    assert!(matches!(error, LayoutError::Count(_)));
}
