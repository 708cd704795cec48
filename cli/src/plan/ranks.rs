//! Shares of data-parallel ranks.

use dormouse_parallel::balance::{BalanceOptions, BalanceUnit, Shares, Workload};
use dormouse_schedule::Machine;
use dormouse_schedule::cost::Rates;
use dormouse_schedule::forest::Forest;

use super::Setting;
use super::report::{RankReport, RanksReport};
use crate::Error;

const PICOSECONDS: f64 = 1e12;

pub(super) fn shares(
    setting: &Setting<'_>,
    ranks: u32,
    forest: &Forest,
    groups: &[u32],
    microbatch_rows: u32,
) -> Result<Shares, Error> {
    let Setting { args, model, machine } = setting;
    let machine = machine.unwrap_or_default();
    if args.unit == Some(BalanceUnit::Group) && groups.is_empty() {
        return Err(Error::NoGroups);
    }
    let options = BalanceOptions {
        ranks,
        method: Default::default(),
        unit: args.unit.unwrap_or_default(),
        exchange: args.exchange,
        ops_hold_collectives: args.collectives,
        microbatch_tokens: microbatch_rows,
        rates: Rates::counted(&model.shape, &machine)?,
        model: model.shape,
        machine,
    };
    Ok(Shares::new(&Workload { forest, groups, logit_rows: &[] }, &options)?)
}

/// Returns the report of shares; seconds only if `flops_per_s` is known.
pub(super) fn report(shares: &Shares, machine: Option<Machine>) -> RanksReport {
    let known = machine.is_some_and(|machine| machine.flops_per_s > 0);
    let seconds = |ps: u64| known.then_some(ps as f64 / PICOSECONDS);
    let even = shares.uncut_ps as f64 / shares.shares.len() as f64;
    let of = |share: &dormouse_parallel::balance::RankShare| RankReport {
        sequences: share.sequences.len() as u64,
        rows: share.features.rows,
        dummy_ops: u64::from(share.dummy_microbatches)
            + u64::from(share.dummy_forwards)
            + u64::from(share.dummy_backwards),
        finish_s: seconds(share.finish_ps),
        of_even: share.finish_ps as f64 / even,
    };
    RanksReport {
        uncut_s: seconds(shares.uncut_ps),
        largest_s: seconds(shares.largest_ps),
        imbalance: shares.imbalance,
        limit: shares.limit,
        exchanges: shares.exchanges.len() as u64,
        ranks: shares.shares.iter().map(of).collect(),
    }
}
