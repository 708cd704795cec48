//! Lower bounds on the cost of the costliest rank.

use super::cut::path_sums;
use super::leaves::Leaves;
use dormouse_schedule::bisect;

/// Returns a lower bound on the largest cost over all assignments of leaves to ranks, contiguous or not,
/// where a node costs `full` for one rank and `again ≤ full` for every other with a leaf below it.
///
/// For a cap `B`, a rank with a leaf below node v spends at least `again` on v and each ancestor, hence at
/// most `B − again_path(v)` below v. So v is on at least `⌈below(v) ÷ (B − again_path(v))⌉` ranks, where
/// `below(v)` counts the copies of v's descendants likewise. The bound is the smallest `B` at which all
/// copies fit into `ranks · B`.
pub(super) fn least_largest(leaves: &Leaves<'_>, full: &[u64], again: &[u64], ranks: u32) -> u64 {
    let again_path = path_sums(leaves, again);
    let fits = |cap: u64| {
        copies_cost(leaves, full, again, &again_path, cap)
            .is_some_and(|sum| sum <= u128::from(cap) * u128::from(ranks))
    };
    bisect(0, full.iter().sum(), fits)
}

/// Returns the cost of all nodes with the copies that `cap` forces; `None` if a path does not fit.
fn copies_cost(
    leaves: &Leaves<'_>,
    full: &[u64],
    again: &[u64],
    again_path: &[u64],
    cap: u64,
) -> Option<u128> {
    let nodes = leaves.forest.nodes();
    let mut below = vec![0_u128; nodes.len()];
    let mut all = 0_u128;
    for id in (0..nodes.len()).rev() {
        let room = cap.checked_sub(again_path[id])?;
        let copies = match (below[id], room) {
            (0, _) => 1,
            (_, 0) => return None,
            (below, room) => below.div_ceil(u128::from(room)),
        };
        if nodes[id].subtree_end as usize == id + 1 && room < full[id] - again[id] {
            return None;
        }
        let cost = u128::from(full[id]) + (copies - 1) * u128::from(again[id]);
        match nodes[id].parent {
            Some(parent) => below[parent.0 as usize] += cost + below[id],
            None => all += cost + below[id],
        }
    }
    Some(all)
}

/// Returns the largest cost of a unit's own nodes, which no other unit needs: one rank has them all.
pub(super) fn largest_unit(leaves: &Leaves<'_>, units: &[u32], full: &[u64]) -> u64 {
    let mut own = vec![0_u64; leaves.count()];
    // The unit of all leaves below a node, if it is the same.
    let mut common: Vec<Option<u32>> = vec![None; full.len()];
    let mut seen = vec![false; full.len()];
    let mut leaf = leaves.count();
    for (id, node) in leaves.forest.nodes().iter().enumerate().rev() {
        if leaf > 0 && leaves.nodes[leaf - 1] as usize == id {
            leaf -= 1;
            (common[id], seen[id]) = (Some(units[leaf]), true);
        }
        if let Some(unit) = common[id] {
            own[unit as usize] += full[id];
        }
        if let Some(parent) = node.parent.map(|parent| parent.0 as usize) {
            if !seen[parent] {
                (common[parent], seen[parent]) = (common[id], true);
            } else if common[parent] != common[id] {
                common[parent] = None;
            }
        }
    }
    own.into_iter().max().unwrap_or(0)
}
