//! Works to test with.

use proptest::prelude::*;

use crate::LinkRates;
use crate::plan::work::{DormantGroup, StepOperation, StepWork};

/// How large the figures of a work are.
#[derive(Clone, Debug)]
pub(crate) struct Scale {
    pub bytes_max: u64,
    pub compute_max_ns: u64,
    /// Each link has one of these, in bytes per second.
    pub rates: &'static [u64],
}

/// So small that a time-stepped search ends.
pub(crate) const TINY: Scale =
    Scale { bytes_max: 4, compute_max_ns: 4, rates: &[500_000_000, 1_000_000_000, 2_000_000_000] };

/// No two figures alike.
pub(crate) const FINE: Scale = Scale {
    bytes_max: 1_000_000,
    compute_max_ns: 1_000_000,
    rates: &[250_000_000, 500_000_000, 900_000_000, 1_700_000_000, 4_000_000_000],
};

/// Which tiers there are, and how they are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Tiers {
    Host,
    File,
    Direct,
}

/// A prefix's step of `groups` layers and `between` operations of B, the way a real prefix makes it:
/// layer `k` is made by its A, leaves behind the A of the layer above (the last behind its own),
/// is needed when the C of the layer above begins (the last by its own) and freed by its own. Some
/// schedule ends.
pub(crate) fn arbitrary_work(
    groups: std::ops::RangeInclusive<usize>,
    between: std::ops::RangeInclusive<usize>,
    scale: Scale,
) -> impl Strategy<Value = StepWork> {
    (groups, between).prop_flat_map(move |(layers, between)| {
        let count = 2 * layers + between;
        let sizes = prop::collection::vec(1..=scale.bytes_max, layers);
        // Beyond what an operation touches: nothing, or up to three layers' worth.
        let spare = prop_oneof![1 => Just(0), 3 => 0..=3 * scale.bytes_max];
        let operations = prop::collection::vec((0..=scale.compute_max_ns, spare), count);
        let rates = prop::array::uniform4(prop::sample::select(scale.rates));
        let tiers = prop::sample::select(vec![Tiers::Host, Tiers::File, Tiers::Direct]);
        (sizes, operations, rates, tiers, 0..=4 * scale.bytes_max)
            .prop_map(|parts| prefix_work(&parts.0, &parts.1, parts.2, parts.3, parts.4))
    })
}

fn prefix_work(
    sizes: &[u64],
    operations: &[(u64, u64)],
    rates: [u64; 4],
    tiers: Tiers,
    spare_host_bytes: u64,
) -> StepWork {
    let (layers, count) = (sizes.len(), operations.len());
    let top = layers - 1;
    let groups = sizes.iter().enumerate().map(|(layer, &bytes)| DormantGroup {
        bytes,
        made: layer,
        leaves: (layer + 1).min(top),
        needed: count - 1 - (layer + 1).min(top),
        freed: count - 1 - layer,
    });
    let groups = groups.collect();
    let mut work = StepWork {
        operations: Vec::new(),
        groups,
        links: LinkRates {
            device_to_host_bytes_per_s: rates[0],
            device_to_nvme_bytes_per_s: if tiers == Tiers::Host { 0 } else { rates[1] },
            nvme_to_device_bytes_per_s: if tiers == Tiers::Host { 0 } else { rates[2] },
            host_to_device_bytes_per_s: rates[3],
        },
        is_direct: tiers == Tiers::Direct,
        ..StepWork::default()
    };
    let all: u64 = sizes.iter().sum();
    let largest = sizes.iter().copied().max().unwrap_or(0);
    (work.host_bytes, work.nvme_bytes) = match tiers {
        Tiers::Host => (all, 0),
        // One layer at a time can go through host memory.
        Tiers::File => (largest + spare_host_bytes, all),
        Tiers::Direct => (spare_host_bytes, all),
    };
    for (at, &(compute_ns, spare_bytes)) in operations.iter().enumerate() {
        let room_bytes = touched_bytes(&work, at) + spare_bytes;
        work.operations.push(StepOperation { compute_ns, room_bytes });
    }
    work
}

/// What cannot be asleep while operation `at` runs.
pub(crate) fn touched_bytes(work: &StepWork, at: usize) -> u64 {
    let is_alive = |group: &&DormantGroup| (group.made..=group.freed).contains(&at);
    let is_touched = |group: &&DormantGroup| at <= group.leaves || at >= group.needed;
    work.groups.iter().filter(is_alive).filter(is_touched).map(|group| group.bytes).sum()
}

/// Anything valid of this size: groups that overlap in any way, links and tiers that are not
/// there, rooms in which nothing may be able to run.
pub(crate) fn any_work(
    groups: std::ops::RangeInclusive<usize>,
    operations: std::ops::RangeInclusive<usize>,
    scale: Scale,
) -> impl Strategy<Value = StepWork> {
    let operation = (0..=scale.compute_max_ns, 0..=3 * scale.bytes_max)
        .prop_map(|(compute_ns, room_bytes)| StepOperation { compute_ns, room_bytes });
    let operations = prop::collection::vec(operation, operations);
    operations.prop_flat_map(move |operations| {
        let spans = prop::collection::vec(0..operations.len(), 4);
        let group = (0..=scale.bytes_max, spans).prop_filter_map("no gap", |(bytes, mut spans)| {
            spans.sort_unstable();
            let [made, leaves, needed, freed] = spans[..] else { return None };
            (leaves < needed).then_some(DormantGroup { bytes, made, leaves, needed, freed })
        });
        let mut rates = vec![0];
        rates.extend(scale.rates.iter().flat_map(|&rate| [rate; 3]));
        let rates = prop::array::uniform4(prop::sample::select(rates));
        let groups = prop::collection::vec(group, groups.clone());
        let host_bytes = 0..=3 * scale.bytes_max;
        let tiers = (host_bytes.clone(), host_bytes, any::<bool>());
        (Just(operations), groups, rates, tiers).prop_map(
            |(operations, mut groups, rates, tiers)| {
                groups.sort_by_key(|group| group.made);
                StepWork {
                    operations,
                    groups,
                    links: LinkRates {
                        device_to_host_bytes_per_s: rates[0],
                        device_to_nvme_bytes_per_s: rates[1],
                        nvme_to_device_bytes_per_s: rates[2],
                        host_to_device_bytes_per_s: rates[3],
                    },
                    host_bytes: tiers.0,
                    nvme_bytes: tiers.1,
                    is_direct: tiers.2,
                }
            },
        )
    })
}
