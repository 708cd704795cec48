//! Invalid inputs of forests are refused without side effects.

use crate::batch::from_slices;
use dormouse_schedule::forest::{Ending, Forest, GrowingForest, NO_PARENT, SEQUENCES_MAX};
use dormouse_schedule::{NodeId, PlanError};

fn refusal<T: std::fmt::Debug>(result: Result<T, PlanError>) -> String {
    result.unwrap_err().to_string()
}

fn ending(node: u32, tokens: u64) -> Ending {
    Ending { node: NodeId(node), tokens }
}

#[test]
fn ids_offsets_and_kinds_are_checked() {
    let ids = [1_i64, 2, 3, 4];
    let from = |offsets: &[u64], kinds: &[u64]| Forest::from_ids(&ids, offsets, kinds, 5);
    assert!(from(&[0, 2, 4], &[7, 8]).is_ok());
    let cases = [
        (
            refusal(from(&[0, 3, 2], &[])),
            "sequence 1 has offsets 3 to 2; accepted: ascending offsets from 0 to 4",
        ),
        (refusal(from(&[0, 5], &[])), "sequence 0 has offsets 0 to 5"),
        (refusal(from(&[u64::MAX, u64::MAX], &[])), "sequence 0 has offsets 18446744073709551615"),
        (refusal(from(&[0, 2, 2], &[])), "sequence 1 has 0 tokens; accepted: 1 to 268435456"),
        (refusal(from(&[0], &[])), "sequences is 0; accepted: 1 to 8388608"),
        (refusal(from(&[], &[])), "sequences is 0"),
        (refusal(from(&[0, 4], &[1, 2])), "kinds is 2; accepted: 0 or 1, one for each sequence"),
        (refusal(Forest::from_ids(&ids, &[0, 4], &[], 0)), "vocab is 0; accepted: 1 to 4294967295"),
        (refusal(from_slices::<i64>(&[], &[], 5)), "sequences is 0"),
        (refusal(from_slices::<i64>(&[&ids, &[]], &[], 5)), "sequence 1 has 0 tokens"),
    ];
    for (seen, wanted) in cases {
        assert!(seen.starts_with(wanted), "{seen:?} does not say {wanted:?}");
    }
    let many = vec![0; SEQUENCES_MAX + 2];
    assert!(refusal(from(&many, &[])).starts_with("sequences is 8388609"));
}

/// The first in the order of the input, not of the sort.
#[test]
fn the_first_id_outside_the_vocabulary_is_named() {
    let first = |sequences: &[&[i64]]| refusal(from_slices(sequences, &[], 5));
    let said = first(&[&[1, 2], &[1, 5], &[9, 9, 9]]);
    assert_eq!(said, "sequence 1 has token id 5 at 1; accepted: 0 to 4");
    assert!(first(&[&[1, 2, 3], &[1, 2, -1, 7]]).starts_with("sequence 1 has token id -1 at 2"));
    assert!(first(&[&[i64::MIN]]).contains("token id -9223372036854775808 at 0"));
    assert!(first(&[&[1 << 32]]).contains("token id 4294967296 at 0"), "not truncated to 32 bits");
    // The least id, which NaN cast to int64 gives, is not the end of a sequence.
    let least = "sequence 1 has token id -9223372036854775808 at 1; accepted: 0 to 4";
    assert_eq!(first(&[&[1, 2, 3], &[1, i64::MIN]]), least);
    assert_eq!(first(&[&[1], &[1, i64::MIN], &[1, 2, 3]]), least, "beside one that ends there");
    let narrow = from_slices(&[&[-2_i32][..]], &[], u32::MAX);
    assert!(refusal(narrow).contains("token id -2 at 0; accepted: 0 to 4294967294"));
    let unsigned = from_slices(&[&[u32::MAX][..]], &[], u32::MAX);
    assert!(refusal(unsigned).contains("token id 4294967295 at 0"));
    assert!(from_slices(&[&[u32::MAX - 1][..]], &[], u32::MAX).is_ok());
}

#[test]
fn a_refused_sequence_leaves_a_growing_forest_unchanged() {
    let mut growing = GrowingForest::new(5).unwrap();
    growing.add(&[1_i64, 2, 3], 0).unwrap();
    let before = growing.freeze();
    let said = refusal(growing.add(&[1_i64, 2, 4, 5], 0));
    assert_eq!(said, "sequence 1 has token id 5 at 3; accepted: 0 to 4");
    assert_eq!(
        refusal(growing.add::<i32>(&[], 9)),
        "sequence 1 has 0 tokens; accepted: 1 to 268435456"
    );
    assert_eq!(growing.freeze(), before);
    assert_eq!(growing.tree_tokens(), 3);
    assert_eq!(growing.add(&[1_u32, 2, 4], 0).unwrap(), 1, "a refused sequence has no number");
    assert!(refusal(GrowingForest::new(0)).starts_with("vocab is 0"));
}

#[test]
fn endings_outside_their_node_and_leaves_without_ending_are_refused() {
    let with =
        |endings: &[Ending]| Forest::from_nodes_with(&[NO_PARENT, 0, 0], &[4, 2, 3], endings);
    assert!(with(&[ending(1, 6), ending(2, 7), ending(0, 1)]).is_ok());
    let cases = [
        (refusal(with(&[])), "endings is 0; accepted: 1 to 16777216"),
        (
            refusal(with(&[ending(3, 1)])),
            "sequence 0 ends in node 3 after 1 tokens; accepted: nodes 0 to 2",
        ),
        (
            refusal(with(&[ending(1, 6), ending(2, 4)])),
            "sequence 1 ends in node 2 after 4 tokens; accepted: 5 to 7",
        ),
        (refusal(with(&[ending(2, 8)])), "sequence 0 ends in node 2 after 8 tokens"),
        (
            refusal(with(&[ending(0, 0)])),
            "sequence 0 ends in node 0 after 0 tokens; accepted: 1 to 4",
        ),
        (
            refusal(with(&[ending(1, 6), ending(2, 6), ending(0, 4)])),
            "0 sequences end at the end of leaf 2",
        ),
        (refusal(Forest::from_nodes_with(&[1], &[1], &[ending(0, 1)])), "node 0 has parent 1"),
    ];
    for (seen, wanted) in cases {
        assert!(seen.starts_with(wanted), "{seen:?} does not say {wanted:?}");
    }
}

#[test]
fn parts_of_unknown_sequences_are_refused() {
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0], &[5, 1, 1]).unwrap();
    assert_eq!(refusal(forest.part_of_sequences(&[0, 2])), "sequence is 2; accepted: below 2");
    assert_eq!(forest.part_of_sequences(&[]).unwrap().forest, Forest::default());
}
