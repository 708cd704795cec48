//! `core::Tlsf` against a model: one flag per unit.

use dormouse_alloc::core::{Extent, OWN_CLASS_SCAN_MAX, Tlsf};
use proptest::prelude::*;

#[derive(Clone, Copy, Debug)]
enum Op {
    Allocate { units: u32, align_log: u32 },
    Free { which: usize },
    Cut,
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        3 => (1..40_u32, 0..4_u32).prop_map(|(units, align_log)| Op::Allocate { units, align_log }),
        2 => (1..400_u32, 0..1_u32).prop_map(|(units, align_log)| Op::Allocate { units, align_log }),
        4 => any::<usize>().prop_map(|which| Op::Free { which }),
        1 => Just(Op::Cut),
    ]
}

/// The longest free run.
fn longest_free(taken: &[bool]) -> u32 {
    let runs = taken.split(|&it| it).map(<[bool]>::len);
    u32::try_from(runs.max().unwrap_or(0)).unwrap()
}

/// Runs `ops`; checks everything after each; returns where each allocation landed.
fn run(units: u32, ops: &[Op]) -> Result<Vec<Option<u32>>, TestCaseError> {
    let mut tlsf = Tlsf::new(units);
    let mut taken = vec![false; units as usize];
    let mut held: Vec<Extent> = Vec::new();
    let mut trace = Vec::new();
    for &op in ops {
        match op {
            Op::Allocate { units, align_log } => {
                let align = 1 << align_log;
                let extent = tlsf.allocate(units, align);
                trace.push(extent.as_ref().map(Extent::start_units));
                match extent {
                    Some(extent) => {
                        prop_assert_eq!(extent.units(), units);
                        prop_assert_eq!(extent.start_units() % align, 0);
                        let start = extent.start_units() as usize;
                        let piece = &mut taken[start..start + units as usize];
                        prop_assert!(piece.iter().all(|it| !it), "{:?} overlaps", extent);
                        piece.fill(true);
                        held.push(extent);
                    }
                    None => {
                        // Good fit misses at most what shares the class of the request.
                        let enough = units + align - 1;
                        let sure = enough + enough / 32 + u32::from(enough >= 64);
                        prop_assert!(longest_free(&taken) < sure, "{units} refused");
                    }
                }
            }
            Op::Free { which } if !held.is_empty() => {
                let extent = held.swap_remove(which % held.len());
                let start = extent.start_units() as usize;
                taken[start..start + extent.units() as usize].fill(false);
                prop_assert_eq!(tlsf.free(extent), Ok(()));
            }
            Op::Free { .. } => {}
            Op::Cut => {
                let used = taken.iter().rposition(|it| *it).map_or(0, |last| last + 1);
                taken.truncate(used);
                prop_assert_eq!(tlsf.cut() as usize, used);
                trace.push(Some(tlsf.units()));
            }
        }
        prop_assert_eq!(tlsf.check(), Ok(()));
        let free = taken.iter().filter(|&&it| !it).count();
        prop_assert_eq!(tlsf.free_units() as usize, free);
        prop_assert_eq!(tlsf.extents() as usize, held.len());
        prop_assert_eq!(tlsf.largest_free_units(), longest_free(&taken));
    }
    for extent in held.drain(..) {
        prop_assert_eq!(tlsf.free(extent), Ok(()));
    }
    prop_assert_eq!(tlsf.largest_free_units() as usize, taken.len());
    Ok(trace)
}

proptest! {
    #[test]
    fn agrees_with_the_model_and_repeats_itself(
        units in 1..1500_u32,
        ops in proptest::collection::vec(op(), 1..120),
    ) {
        prop_assert_eq!(run(units, &ops)?, run(units, &ops)?);
    }
}

#[test]
fn an_exact_fit_in_a_wide_class_is_found() {
    // 1001 units share a class with 992..1024: the next class alone would miss it.
    let mut tlsf = Tlsf::new(1001);
    let extent = tlsf.allocate(1001, 1).unwrap();
    assert_eq!(tlsf.allocate(1, 1), None);
    tlsf.free(extent).unwrap();
    assert_eq!(tlsf.allocate(1001, 1).unwrap().start_units(), 0);
}

/// The scan of the request's own class is bounded: a range deeper in the list is not found.
#[test]
fn the_own_class_is_scanned_to_the_limit_and_no_further() {
    let (small, large) = (1000_u32, 1001_u32);
    for (smaller_ones, found) in [(OWN_CLASS_SCAN_MAX - 1, true), (OWN_CLASS_SCAN_MAX, false)] {
        // One large range, freed first, under `smaller_ones` that are a unit too short. Walls
        // between them keep them apart.
        let mut tlsf = Tlsf::new(large + 1 + smaller_ones * (small + 1));
        let mut holes = vec![tlsf.allocate(large, 1).unwrap()];
        let mut walls = vec![tlsf.allocate(1, 1).unwrap()];
        for _ in 0..smaller_ones {
            holes.push(tlsf.allocate(small, 1).unwrap());
            walls.push(tlsf.allocate(1, 1).unwrap());
        }
        assert_eq!(tlsf.free_units(), 0);
        for hole in holes {
            tlsf.free(hole).unwrap();
        }
        assert_eq!(tlsf.allocate(large, 1).is_some(), found);
        tlsf.check().unwrap();
    }
}

#[test]
fn invalid_requests_are_refused() {
    let mut tlsf = Tlsf::new(100);
    assert_eq!(tlsf.allocate(0, 1), None);
    assert_eq!(tlsf.allocate(1, 0), None);
    assert_eq!(tlsf.allocate(1, 3), None);
    assert_eq!(tlsf.allocate(101, 1), None);
    assert_eq!(tlsf.allocate(u32::MAX, 1 << 31), None);
    assert_eq!(Tlsf::new(0).allocate(1, 1), None);
    assert_eq!(Tlsf::new(0).check(), Ok(()));
    let mut whole = Tlsf::new(u32::MAX);
    assert_eq!(whole.allocate(u32::MAX, 1).unwrap().units(), u32::MAX);
}

#[test]
fn a_foreign_extent_is_returned_to_the_caller() {
    let (mut one, mut other) = (Tlsf::new(10), Tlsf::new(10));
    let extent = one.allocate(4, 1).unwrap();
    let extent = other.free(extent).unwrap_err();
    // At the same start, with another length.
    let longer = other.allocate(5, 1).unwrap();
    let extent = other.free(extent).unwrap_err();
    assert_eq!(other.free(longer), Ok(()));
    assert_eq!(other.check(), Ok(()));
    assert_eq!(one.free(extent), Ok(()));
}
