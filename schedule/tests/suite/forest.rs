//! Compares forests, growing forests and parts with the set of all prefixes.

mod model;

use crate::batch::from_slices;
use dormouse_schedule::forest::{Ending, Forest, GrowingForest, NO_PARENT};
use dormouse_schedule::{NodeId, PlanError};
pub(crate) use model::sequences_of_leaves;
use model::{Model, Sequence, batch, prefixes, starts_with};
use proptest::prelude::*;

const VOCAB: u32 = 3;

fn forest(sequences: &[Sequence]) -> Forest {
    let slices: Vec<&[i64]> = sequences.iter().map(|(_, ids)| ids.as_slice()).collect();
    let kinds: Vec<u64> = sequences.iter().map(|(kind, _)| *kind).collect();
    from_slices(&slices, &kinds, VOCAB).unwrap()
}

/// Parents and lengths, as for `Forest::from_nodes`.
fn shape(forest: &Forest) -> (Vec<u32>, Vec<u64>) {
    let node = |node: &dormouse_schedule::forest::Node| {
        (node.parent.map_or(NO_PARENT, |parent| parent.0), node.tokens.count())
    };
    forest.nodes().iter().map(node).unzip()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1024))]

    #[test]
    fn a_forest_is_the_set_of_prefixes(sequences in batch()) {
        let forest = forest(&sequences);
        let model = Model::of(&sequences);
        let nodes: Vec<_> = (0..model.ends.len()).map(|id| model.node(id, &sequences)).collect();
        prop_assert_eq!(forest.nodes(), nodes);
        let endings: Vec<Ending> = sequences.iter().map(|seq| model.ending(seq)).collect();
        prop_assert_eq!(forest.endings(), endings);
        prop_assert_eq!(forest.tree_tokens(), prefixes(&sequences).len() as u64);
        let dense: usize = sequences.iter().map(|(_, ids)| ids.len()).sum();
        prop_assert_eq!(forest.dense_tokens(), dense as u64);
        let ratio = dense as f64 / prefixes(&sequences).len() as f64;
        prop_assert!((forest.compression() - ratio).abs() < 1e-12);
    }

    #[test]
    fn every_width_and_layout_of_ids_gives_the_same(
        sequences in batch(),
        before in 0_usize..3,
        one_kind in any::<bool>(),
    ) {
        let mut sequences = sequences;
        if one_kind {
            sequences.iter_mut().for_each(|(kind, _)| *kind = 0);
        }
        // Ids before the first offset and after the last belong to no sequence and are not read.
        let mut ids = vec![-9_i64; before];
        let mut offsets = vec![before as u64];
        for (_, sequence) in &sequences {
            ids.extend(sequence);
            offsets.push(ids.len() as u64);
        }
        ids.push(99);
        let wanted = forest(&sequences);
        let kinds: Vec<u64> = match one_kind {
            true => Vec::new(),
            false => sequences.iter().map(|(kind, _)| *kind).collect(),
        };
        prop_assert_eq!(&Forest::from_ids(&ids, &offsets, &kinds, VOCAB).unwrap(), &wanted);
        let narrow: Vec<i32> = ids.iter().map(|id| *id as i32).collect();
        prop_assert_eq!(&Forest::from_ids(&narrow, &offsets, &kinds, VOCAB).unwrap(), &wanted);
        let unsigned: Vec<u32> = ids.iter().map(|id| *id as u32).collect();
        prop_assert_eq!(&Forest::from_ids(&unsigned, &offsets, &kinds, VOCAB).unwrap(), &wanted);
    }

    #[test]
    fn the_order_of_sequences_changes_only_their_numbers(
        (sequences, shuffled) in batch().prop_flat_map(|sequences| {
            let numbered: Vec<_> = sequences.iter().cloned().enumerate().collect();
            (Just(sequences), Just(numbered).prop_shuffle())
        }),
    ) {
        let (numbers, others): (Vec<usize>, Vec<Sequence>) = shuffled.into_iter().unzip();
        let (one, other) = (forest(&sequences), forest(&others));
        prop_assert_eq!(shape(&one), shape(&other));
        for (at, number) in numbers.into_iter().enumerate() {
            prop_assert_eq!(other.endings()[at], one.endings()[number]);
        }
    }

    #[test]
    fn leaves_and_the_order_of_endings_match_the_model(sequences in batch()) {
        let forest = forest(&sequences);
        let model = Model::of(&sequences);
        let leaf = |id: usize| !model.ends.iter().any(|end| {
            *end != model.ends[id] && starts_with(end, &model.ends[id])
        });
        let nodes: Vec<usize> = (0..model.ends.len()).filter(|id| leaf(*id)).collect();
        let leaves: Vec<usize> = forest.leaves().map(|leaf| leaf.0 as usize).collect();
        prop_assert_eq!(leaves, nodes);
        let mut sorted: Vec<usize> = (0..sequences.len()).collect();
        sorted.sort_by_key(|at| sequences[*at].clone());
        let sorted: Vec<u32> = sorted.into_iter().map(|at| at as u32).collect();
        prop_assert_eq!(forest.sequences_by_ending(), sorted);
    }

    #[test]
    fn a_growing_forest_equals_one_built_at_once(sequences in batch()) {
        let mut growing = GrowingForest::new(VOCAB).unwrap();
        prop_assert_eq!(growing.freeze(), Forest::default());
        for (at, (kind, ids)) in sequences.iter().enumerate() {
            prop_assert_eq!(growing.add(ids, *kind).unwrap(), at as u32);
            let wanted = forest(&sequences[..=at]);
            prop_assert_eq!(growing.tree_tokens(), wanted.tree_tokens());
            prop_assert_eq!(growing.freeze(), wanted);
        }
    }

    #[test]
    fn shapes_read_back(sequences in batch()) {
        let forest = forest(&sequences);
        let (parents, lengths) = shape(&forest);
        let read = Forest::from_nodes_with(&parents, &lengths, forest.endings());
        prop_assert_eq!(&read.unwrap(), &forest);
    }

    #[test]
    fn a_part_has_the_prefixes_of_its_sequences(
        sequences in batch(),
        picks in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
    ) {
        let forest = forest(&sequences);
        let picks: Vec<u32> = picks.iter().map(|pick| pick.index(sequences.len()) as u32).collect();
        let chosen: Vec<Sequence> = picks.iter().map(|at| sequences[*at as usize].clone()).collect();
        let part = forest.part_of_sequences(&picks).unwrap();
        prop_assert_eq!(&part.sequences, &picks);
        prop_assert_eq!(part.forest.tree_tokens(), prefixes(&chosen).len() as u64);
        prop_assert_eq!(part.nodes.len(), part.forest.nodes().len());
        prop_assert!(part.nodes.is_sorted_by(|a, b| a.0 < b.0));
        for (node, was) in part.forest.nodes().iter().zip(&part.nodes) {
            let was = forest.node(*was);
            prop_assert_eq!(node.tokens.begin, was.tokens.begin);
            prop_assert!(node.tokens.end <= was.tokens.end);
            prop_assert_eq!(node.parent.map(|up| part.nodes[up.0 as usize]), was.parent);
            // Its sequence is the lowest of the part that contains all of its tokens.
            let path = |at: u32| (chosen[at as usize].0, chosen[at as usize].1.get(..node.tokens.end as usize));
            let whole = path(node.sequence);
            prop_assert!(whole.1.is_some());
            prop_assert!((0..node.sequence).all(|lower| path(lower) != whole));
        }
        for (at, ending) in picks.iter().zip(part.forest.endings()) {
            let was = forest.endings()[*at as usize];
            prop_assert_eq!((part.nodes[ending.node.0 as usize], ending.tokens), (was.node, was.tokens));
        }
        // A forest built from the shape of the part is equal.
        if !picks.is_empty() {
            let (parents, lengths) = shape(&part.forest);
            let read = Forest::from_nodes_with(&parents, &lengths, part.forest.endings());
            prop_assert_eq!(read.unwrap(), part.forest);
        }
    }

    #[test]
    fn parts_of_leaves_partition_the_sequences(
        sequences in batch(),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let forest = forest(&sequences);
        let leaves: Vec<NodeId> = forest.leaves().collect();
        let mut cuts: Vec<usize> = cuts.iter().map(|cut| cut.index(leaves.len() + 1)).collect();
        cuts.extend([0, leaves.len()]);
        cuts.sort_unstable();
        let mut all = Vec::new();
        for pair in cuts.windows(2) {
            let own = sequences_of_leaves(&forest, pair[0]..pair[1]);
            let part = forest.part_of_sequences(&own).unwrap();
            let nodes: Vec<NodeId> = part.forest.leaves().map(|leaf| part.nodes[leaf.0 as usize]).collect();
            prop_assert_eq!(nodes, &leaves[pair[0]..pair[1]]);
            all.extend(own);
        }
        all.sort_unstable();
        prop_assert!(all.iter().copied().eq(0..sequences.len() as u32));
        prop_assert_eq!(forest.part_of_sequences(&all).unwrap().forest, forest);
    }

    /// Runs are long enough for differences in every part of a compared stride.
    #[test]
    fn differences_in_long_sequences_are_found(
        length in 1_usize..1200,
        cuts in prop::collection::vec((0_usize..1200, any::<bool>()), 1..6),
        bad in prop::option::of(0_usize..1200),
    ) {
        let base: Vec<i32> = (0..length as i32).map(|at| at % 7).collect();
        let mut sequences = vec![base.clone()];
        for (cut, ends) in &cuts {
            let cut = cut % length;
            let mut other = base.clone();
            other[cut] += 7;
            if *ends {
                other.truncate(cut + 1);
            }
            sequences.push(other);
        }
        let slices: Vec<&[i32]> = sequences.iter().map(Vec::as_slice).collect();
        let wide: Vec<(u64, Vec<i64>)> = sequences.iter()
            .map(|ids| (0, ids.iter().map(|id| i64::from(*id)).collect())).collect();
        let forest = from_slices(&slices, &[], 14).unwrap();
        let mut sorted = wide.clone();
        sorted.sort();
        let common = |a: &[i64], b: &[i64]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let optimum: usize = sorted[0].1.len()
            + sorted.windows(2).map(|w| w[1].1.len() - common(&w[0].1, &w[1].1)).sum::<usize>();
        prop_assert_eq!(forest.tree_tokens(), optimum as u64);
        let mut growing = GrowingForest::new(14).unwrap();
        for ids in &slices {
            growing.add(ids, 0).unwrap();
        }
        prop_assert_eq!(growing.freeze(), forest);
        if let Some(bad) = bad {
            let last = sequences.len() - 1;
            let at = bad % sequences[last].len();
            sequences[last][at] = -1;
            let slices: Vec<&[i32]> = sequences.iter().map(Vec::as_slice).collect();
            let refused = PlanError::TokenId { sequence: last, index: at, seen: -1, vocab: 14 };
            prop_assert_eq!(from_slices(&slices, &[], 14), Err(refused));
        }
    }
}

/// The ids exceed one chunk of a growing forest.
#[test]
fn a_forest_grows_beyond_one_chunk() {
    let long = |first: u32, count: u32| (first..first + count).collect::<Vec<u32>>();
    let cut = |ids: &[u32], at: usize| [&ids[..at], &[0, 0]].concat();
    let mut sequences = vec![long(1, 200_000), long(2, 200_000), long(3, 300_000), long(4, 70_000)];
    for (index, at) in [(0, 150_000), (1, 199_999), (2, 299_000), (2, 1), (3, 10), (0, 160_000)] {
        sequences.push(cut(&sequences[index], at));
        sequences.push(sequences[index][..at - 1].to_vec());
    }
    let slices: Vec<&[u32]> =
        sequences.iter().map(Vec::as_slice).filter(|ids| !ids.is_empty()).collect();
    let mut growing = GrowingForest::new(1 << 20).unwrap();
    for ids in &slices {
        growing.add(ids, 0).unwrap();
    }
    assert_eq!(growing.tree_tokens(), 770_000 + 2 * 6);
    assert_eq!(growing.freeze(), from_slices(&slices, &[], 1 << 20).unwrap());
}
