//! Cutting with exchange. Which nodes are common depends on the cuts, and the best cuts depend on the cost
//! of common nodes.
//!
//! Each round cuts the leaves, chooses how common nodes are exchanged, and charges them accordingly in the
//! next round. The round with the earliest simulated finish wins. The first round charges everything as
//! recomputed, so exchange is never predicted slower than recomputing.

use super::BalanceOptions;
use super::cost_table::CostTable;
use super::cut::Segments;
use super::leaves::Leaves;
use super::prefix_exchange::{AncestorRule, ExchangeChoice, ExchangePlan};
use dormouse_schedule::NodeId;

/// Maximum rounds; two or three usually suffice.
const ROUNDS_MAX: usize = 8;

/// Returns the best segments found and their exchanges.
pub(super) fn with_exchange<'a>(
    leaves: &'a Leaves<'a>,
    full: &'a [u64],
    starts: &[u32],
    options: &BalanceOptions,
) -> ExchangePlan<'a> {
    let cost_table = CostTable::new(&options.model, &options.machine);
    // Finish time of the last rank, then total busy time.
    let price = |plan: &ExchangePlan<'_>| {
        let loads = plan.finish();
        let busy_ps = loads.iter().map(|load| u128::from(load.busy_ps)).sum::<u128>();
        (loads.iter().map(|load| load.finish_ps).max(), busy_ps)
    };
    let cut = |charges: &Charges| {
        let segments = Segments::new(leaves, &charges.first, &charges.again);
        ExchangePlan::new(leaves, full, cost_table, segments.cut(starts, options.ranks))
    };
    let mut charges = Charges { first: full.to_vec(), again: full.to_vec() };
    let mut best = cut(&charges);
    let mut best_price = price(&best);
    let aboves: &[AncestorRule] = match options.ops_hold_collectives {
        false => &[AncestorRule::Any],
        true => &[AncestorRule::Computed, AncestorRule::Divided],
    };
    let mut plan = best.clone();
    for _ in 0..ROUNDS_MAX {
        let chosen = aboves.iter().map(|above| {
            let mut chosen = plan.clone();
            chosen.choose(*above);
            (price(&chosen), chosen)
        });
        let Some((chosen_price, chosen)) = chosen.min_by_key(|(price, _)| *price) else { break };
        plan = chosen;
        if chosen_price < best_price {
            (best, best_price) = (plan.clone(), chosen_price);
        }
        let next = Charges::of_plan(&plan);
        if next == charges {
            break;
        }
        charges = next;
        plan = cut(&charges);
    }
    best
}

/// Costs of nodes for their first rank and for every other.
#[derive(Debug, PartialEq, Eq)]
struct Charges {
    first: Vec<u64>,
    again: Vec<u64>,
}

impl Charges {
    /// Charges shared nodes as exchanged in the plan, and other nodes as if sent.
    fn of_plan(plan: &ExchangePlan<'_>) -> Self {
        let ExchangePlan { leaves, full, cost_table, .. } = *plan;
        let sent =
            |(id, cost): (u32, &u64)| cost_table.sent_ps(leaves.forest.node(NodeId(id))).min(*cost);
        let mut charges = Self { first: full.to_vec(), again: (0..).zip(full).map(sent).collect() };
        for common in &plan.common {
            let id = common.node.0 as usize;
            match common.way {
                ExchangeChoice::Send => {}
                ExchangeChoice::Recompute => charges.again[id] = full[id],
                ExchangeChoice::Divide(divided) => {
                    // A node divided for a descendant costs at most as much as computing it.
                    let divided_ps = divided.sum_ps().min(full[id]);
                    (charges.first[id], charges.again[id]) = (divided_ps, divided_ps);
                }
            }
        }
        charges
    }
}
