//! The search against a naive oracle, its bound, and cases worked out by hand.

pub(crate) mod arbitrary;
mod by_hand;
mod oracle;

use proptest::prelude::*;
use proptest::strategy::ValueTree;
use proptest::test_runner::TestRunner;

use super::*;
use crate::LinkRates;
use crate::plan::work::{BYTES_MAX, DormantGroup, StepOperation};
use arbitrary::{FINE, TINY, any_work, arbitrary_work};
use oracle::oracle_ns;

const STATES_MAX: usize = 1 << 20;
/// One byte a nanosecond.
const GB: u64 = 1_000_000_000;

/// Something is under way at every moment of the best schedule, so none is longer.
fn horizon_ns(work: &StepWork) -> u64 {
    let links = work.links;
    let rates = [
        links.device_to_host_bytes_per_s,
        links.device_to_nvme_bytes_per_s,
        links.nvme_to_device_bytes_per_s,
        links.host_to_device_bytes_per_s,
    ];
    let copies = rates.into_iter().filter(|&rate| rate > 0).map(|rate| {
        let ns = work.groups.iter().map(|group| (group.bytes * GB).div_ceil(rate));
        ns.sum::<u64>()
    });
    work.compute_ns() + copies.sum::<u64>()
}

fn check(work: &StepWork) -> Result<(), TestCaseError> {
    let expected = oracle_ns(work, horizon_ns(work)).map_or(Optimum::Never, Optimum::Exact);
    prop_assert_eq!(optimum(work, None, STATES_MAX), expected);
    if let Optimum::Exact(total_ns) = expected {
        prop_assert!(lower_bound(work) <= total_ns);
        prop_assert_eq!(optimum(work, Some(total_ns), STATES_MAX), expected);
        prop_assert_eq!(optimum(work, Some(total_ns + 1), STATES_MAX), expected);
    }
    Ok(())
}

proptest! {
    #[test]
    fn anything_small_is_as_the_oracle_says(work in any_work(1..=3, 2..=6, TINY)) {
        check(&work)?;
    }

    #[test]
    fn small_prefixes_are_as_the_oracle_says(work in arbitrary_work(1..=3, 0..=2, TINY)) {
        check(&work)?;
    }

    #[test]
    fn a_prefix_has_a_best_schedule(work in arbitrary_work(1..=4, 1..=3, FINE)) {
        let total_ns = exact_ns(&work)?;
        prop_assert!(lower_bound(&work) <= total_ns);
        prop_assert!(work.compute_ns() <= total_ns);
        prop_assert_eq!(optimum(&work, Some(total_ns), STATES_MAX), Optimum::Exact(total_ns));
        prop_assert_eq!(optimum(&work, Some(2 * total_ns), STATES_MAX), Optimum::Exact(total_ns));
    }

    /// More room, a faster link or more host memory never make it longer.
    #[test]
    fn more_of_anything_never_hurts(
        work in arbitrary_work(1..=4, 1..=3, FINE),
        at in any::<prop::sample::Index>(),
        more_bytes in 1..=FINE.bytes_max,
        factor in 2..=8_u64,
    ) {
        let total_ns = exact_ns(&work)?;
        let bound_ns = lower_bound(&work);
        let mut better = vec![work.clone(); 7];
        better[0].operations[at.index(work.operations.len())].room_bytes += more_bytes;
        better[1].links.device_to_host_bytes_per_s *= factor;
        better[2].links.host_to_device_bytes_per_s *= factor;
        better[3].links.device_to_nvme_bytes_per_s *= factor;
        better[4].links.nvme_to_device_bytes_per_s *= factor;
        better[5].host_bytes += more_bytes;
        better[6].nvme_bytes += more_bytes;
        for better in better {
            prop_assert!(exact_ns(&better)? <= total_ns, "{:?}", better);
            prop_assert!(lower_bound(&better) <= bound_ns, "{:?}", better);
        }
    }

    #[test]
    fn with_room_for_all_nothing_waits(mut work in arbitrary_work(1..=6, 1..=4, FINE)) {
        let all_bytes = work.groups.iter().map(|group| group.bytes).sum();
        for operation in &mut work.operations {
            operation.room_bytes = all_bytes;
        }
        work.links = LinkRates::default();
        prop_assert_eq!(lower_bound(&work), work.compute_ns());
        prop_assert_eq!(exact_ns(&work)?, work.compute_ns());
    }

    /// However early the search gives up, what it says is true.
    #[test]
    fn a_spent_limit_leaves_a_bound(
        work in arbitrary_work(2..=4, 1..=3, FINE), states_max in 0..200_usize,
    ) {
        let total_ns = exact_ns(&work)?;
        match optimum(&work, None, states_max) {
            Optimum::Exact(ns) => prop_assert_eq!(ns, total_ns),
            Optimum::AtLeast(ns) => prop_assert!(lower_bound(&work) <= ns && ns <= total_ns),
            Optimum::Never => prop_assert!(false, "there is one of {} ns", total_ns),
        }
    }

    /// Equal layers in host memory alone, all out before the first of them is consumed: the stall
    /// is what the closed bounds of a window say.
    #[test]
    fn a_window_stalls_as_long_as_its_bound(
        layers in 1..=5_usize,
        window in 1..=5_u64,
        load_ns in 1..50_u64,
        compute_ns in 0..50_u64,
        lead_ns in 0..120_u64,
    ) {
        let work = windowed(layers, window, load_ns, compute_ns, lead_ns);
        // StepOperation 0 takes nothing; then all leave, and the second begins.
        let no_stall_ns = layers as u64 * (load_ns + compute_ns) + lead_ns;
        let stall_ns = exact_ns(&work)? - no_stall_ns;
        prop_assert_eq!(lower_bound(&work) - no_stall_ns, stall_ns);
        let consumed = vec![crate::LayerLoad { bytes: load_ns, compute_ns }; layers];
        let capacity_ns =
            crate::stall::tests::stall_bound_capacity_ns(&consumed, GB, lead_ns, window * load_ns);
        prop_assert_eq!(stall_ns, capacity_ns);
        let wake = crate::WindowedWake {
            layers: layers as u32,
            window: window as u32,
            load_s: load_ns as f64,
            compute_s: compute_ns as f64,
            lead_s: lead_ns as f64,
        };
        prop_assert_eq!(stall_ns as f64, wake.stall_s());
    }
}

fn exact_ns(work: &StepWork) -> Result<u64, TestCaseError> {
    match optimum(work, None, STATES_MAX) {
        Optimum::Exact(ns) => Ok(ns),
        other => Err(TestCaseError::fail(format!("{other:?} of {work:?}"))),
    }
}

const fn op(compute_ns: u64, room_bytes: u64) -> StepOperation {
    StepOperation { compute_ns, room_bytes }
}

/// A group of `bytes`, with its `[made, leaves, needed, freed]`.
const fn group(bytes: u64, [made, leaves, needed, freed]: [usize; 4]) -> DormantGroup {
    DormantGroup { bytes, made, leaves, needed, freed }
}

/// All links carry a byte a nanosecond; host memory alone, and enough of it.
fn at_one_byte_a_ns(operations: &[StepOperation], groups: &[DormantGroup]) -> StepWork {
    StepWork {
        operations: operations.to_vec(),
        groups: groups.to_vec(),
        links: LinkRates {
            device_to_host_bytes_per_s: GB,
            host_to_device_bytes_per_s: GB,
            device_to_nvme_bytes_per_s: GB,
            nvme_to_device_bytes_per_s: GB,
        },
        host_bytes: 1000,
        nvme_bytes: 0,
        is_direct: false,
    }
}

/// `layers` of `load_ns` bytes that leave, `lead_ns` of compute with room for the window, and each
/// consumed for `compute_ns` within it.
fn windowed(layers: usize, window: u64, load_ns: u64, compute_ns: u64, lead_ns: u64) -> StepWork {
    let room_bytes = window * load_ns;
    let mut operations = vec![op(0, layers as u64 * load_ns), op(0, 0), op(lead_ns, room_bytes)];
    operations.extend(vec![op(compute_ns, room_bytes); layers]);
    let groups: Vec<DormantGroup> =
        (0..layers).map(|layer| group(load_ns, [0, 0, 3 + layer, 3 + layer])).collect();
    at_one_byte_a_ns(&operations, &groups)
}

/// The search is of use only where it ends.
#[test]
fn most_prefixes_of_six_layers_are_solved() {
    let mut runner = TestRunner::deterministic();
    let prefixes = arbitrary_work(5..=6, 2..=4, FINE);
    let exact = (0..40).filter(|_| {
        let work = prefixes.new_tree(&mut runner).map(|tree| tree.current());
        work.is_ok_and(|work| matches!(optimum(&work, None, 50_000), Optimum::Exact(_)))
    });
    assert!(exact.count() >= 36);
}
