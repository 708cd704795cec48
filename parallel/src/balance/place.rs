//! Placement without search: greedy in order, and longest first.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

use super::BalanceError;
use super::cut::{Segments, path_sums};
use super::leaves::Leaves;
use dormouse_schedule::{NodeId, check_range};

/// Maximum nodes of all parts of a forest, a node counted once for each part with a leaf below it: a few seconds.
/// A node is in many parts if a deep tree is dealt to many, as groups or longest first.
pub const VISITS_MAX: u64 = if cfg!(test) { 1 << 22 } else { 1 << 30 };

/// Returns the ends of segments: each unit goes to the rank whose even share of the total cost contains its
/// middle. Ignores what segments share; ranks may be empty.
pub(super) fn fill(segments: &Segments<'_>, starts: &[u32], ranks: u32) -> Vec<u32> {
    let cost_before = |end: u32| u128::from(segments.cost(0, end as usize));
    let whole = cost_before(starts[starts.len() - 1]);
    let mut ends = vec![0; ranks as usize];
    for pair in starts.windows(2) {
        let middle_twice = cost_before(pair[0]) + cost_before(pair[1]);
        let rank = (middle_twice * u128::from(ranks) / (2 * whole)).min(u128::from(ranks) - 1);
        ends[rank as usize] = pair[1];
    }
    for rank in 1..ends.len() {
        ends[rank] = ends[rank].max(ends[rank - 1]);
    }
    ends
}

/// Returns the rank of each leaf: units by descending cost, each to the least loaded rank, ties to the
/// first. Each unit is charged all its nodes, as if alone on its rank: `costs` are those of [`unit_costs`].
pub(super) fn longest_first(units: &[u32], costs: &[u64], ranks: u32) -> Vec<u32> {
    let mut order: Vec<u32> = (0..).zip(units).filter(|(i, u)| i == *u).map(|(i, _)| i).collect();
    order.sort_by_key(|unit| (Reverse(costs[*unit as usize]), *unit));
    let mut loads: BinaryHeap<Reverse<(u128, u32)>> = (0..ranks).map(|r| Reverse((0, r))).collect();
    let mut rank_of_unit = vec![0; units.len()];
    for unit in order {
        let Some(Reverse((load, rank))) = loads.pop() else { break };
        rank_of_unit[unit as usize] = rank;
        loads.push(Reverse((load + u128::from(costs[unit as usize]), rank)));
    }
    units.iter().map(|unit| rank_of_unit[*unit as usize]).collect()
}

/// Returns the cost of each unit, with every node on a path of its leaves counted once. `are_leaves`: each leaf is
/// a unit, whose cost is a sum over its path; no node is visited twice.
///
/// # Errors
/// As [`visit_parts`], unless each leaf is a unit.
pub(super) fn unit_costs(
    leaves: &Leaves<'_>,
    units: &[u32],
    are_leaves: bool,
    full: &[u64],
) -> Result<Vec<u64>, BalanceError> {
    if !are_leaves {
        return costs_by_part(leaves, units, full);
    }
    let sums = path_sums(leaves, full);
    Ok(leaves.nodes.iter().map(|leaf| sums[*leaf as usize]).collect())
}

/// Returns the cost of each part, with every node on a path of its leaves counted once. `parts` is the part
/// of each leaf.
///
/// # Errors
/// As [`visit_parts`].
pub(super) fn costs_by_part(
    leaves: &Leaves<'_>,
    parts: &[u32],
    full: &[u64],
) -> Result<Vec<u64>, BalanceError> {
    let mut costs = Vec::new();
    visit_parts(leaves, parts, |part, node| {
        if part >= costs.len() {
            costs.resize(part + 1, 0);
        }
        costs[part] += full[node.0 as usize];
    })?;
    Ok(costs)
}

/// Visits every node of every part once per part: by leaf, each leaf's new nodes from the leaf up.
///
/// # Errors
/// `Plan` for more than [`VISITS_MAX`] visits.
pub(super) fn visit_parts(
    leaves: &Leaves<'_>,
    parts: &[u32],
    mut visit: impl FnMut(usize, NodeId),
) -> Result<(), BalanceError> {
    let mut visits = 0_u64;
    // The last leaf of each part. A node on a leaf's path is new unless its number is at most that leaf's.
    let mut last: Vec<Option<u32>> = Vec::new();
    for (leaf, part) in leaves.nodes.iter().zip(parts) {
        let part = *part as usize;
        if part >= last.len() {
            last.resize(part + 1, None);
        }
        let is_new = |node: &NodeId| last[part].is_none_or(|last| node.0 > last);
        for node in leaves.forest.path(NodeId(*leaf)).take_while(is_new) {
            visits += 1;
            visit(part, node);
        }
        // A path may exceed the limit, but not by more than its length.
        check_range("nodes of all units or shares", visits, 0, VISITS_MAX)?;
        last[part] = Some(*leaf);
    }
    Ok(())
}
