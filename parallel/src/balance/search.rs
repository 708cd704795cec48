//! Cutting with exchange: which nodes are common depends on the cuts, and where to cut on what
//! common nodes cost.
//!
//! So cut, see what is common and how it had best come to its ranks, charge it so, and cut again,
//! for a few rounds; kept is the round that ends first, played through with its waits. Every cut is
//! exact for its charges and the first charges everything recomputed, so exchanging is never
//! predicted slower than recomputing.

use super::BalanceOptions;
use super::cost_table::CostTable;
use super::cut::Segments;
use super::leaves::Leaves;
use super::prefix_exchange::{AncestorRule, ExchangeChoice, ExchangePlan};
use dormouse_schedule::NodeId;

/// Rounds of cutting and charging; two or three settle.
const ROUNDS_MAX: usize = 8;

/// The best segments found and how their common nodes come to them.
pub(super) fn with_exchange<'a>(
    leaves: &'a Leaves<'a>,
    full: &[u64],
    cost_table: &CostTable,
    starts: &[u32],
    options: &BalanceOptions,
) -> ExchangePlan<'a> {
    // When the last rank ends; of equals, what all of them spend.
    let price = |plan: &ExchangePlan<'_>| {
        let loads = plan.finish(full, cost_table);
        let busy_ps = loads.iter().map(|load| u128::from(load.busy_ps)).sum::<u128>();
        (loads.iter().map(|load| load.finish_ps).max(), busy_ps)
    };
    let cut = |charges: &Charges| {
        ExchangePlan::new(
            leaves,
            Segments::new(leaves, &charges.first, &charges.again).cut(starts, options.ranks),
        )
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
            chosen.choose(full, cost_table, *above);
            (price(&chosen), chosen)
        });
        let Some((chosen_price, chosen)) = chosen.min_by_key(|(price, _)| *price) else { break };
        plan = chosen;
        if chosen_price < best_price {
            (best, best_price) = (plan.clone(), chosen_price);
        }
        let next = Charges::learnt(leaves, full, cost_table, &plan);
        if next == charges {
            break;
        }
        charges = next;
        plan = cut(&charges);
    }
    best
}

/// What nodes cost their first rank, and every other.
#[derive(Debug, PartialEq, Eq)]
struct Charges {
    first: Vec<u64>,
    again: Vec<u64>,
}

impl Charges {
    /// Shared nodes as they were; others, which a cut may make common, as if they were sent then.
    fn learnt(
        leaves: &Leaves<'_>,
        full: &[u64],
        cost_table: &CostTable,
        plan: &ExchangePlan<'_>,
    ) -> Self {
        let sent =
            |(id, cost): (u32, &u64)| cost_table.sent_ps(leaves.forest.node(NodeId(id))).min(*cost);
        let mut charges = Self { first: full.to_vec(), again: (0..).zip(full).map(sent).collect() };
        for common in &plan.common {
            let id = common.node.0 as usize;
            match common.way {
                ExchangeChoice::Send => {}
                ExchangeChoice::Recompute => charges.again[id] = full[id],
                ExchangeChoice::Divide(divided) => {
                    // Of one divided for another's sake, no more than computing it.
                    let divided_ps = divided.sum_ps().min(full[id]);
                    (charges.first[id], charges.again[id]) = (divided_ps, divided_ps);
                }
            }
        }
        charges
    }
}
