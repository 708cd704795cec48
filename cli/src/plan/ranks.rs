//! Shares of data-parallel ranks, and the plan of each.

use std::collections::BTreeSet;

use dormouse_parallel::balance::{
    BalanceOptions, BalanceUnit, PassKind, RankShare, Shares, Workload,
};
use dormouse_schedule::cost::Rates;
use dormouse_schedule::forest::Forest;
use dormouse_schedule::tree_planner::scored_rows;
use dormouse_schedule::{NodeId, OpKind, Plan, PlanOptions, Scoring};

use super::Setting;
use super::report::{RankReport, RanksReport};
use crate::Error;

const PICOSECONDS: f64 = 1e12;

/// The batch that ranks divide.
#[derive(Clone, Copy, Debug)]
pub(super) struct Batch<'a> {
    pub(super) forest: &'a Forest,
    pub(super) scoring: &'a [Scoring],
    pub(super) groups: &'a [u32],
}

/// The shares of all ranks and their plans.
#[derive(Debug)]
pub(super) struct Ranks {
    pub(super) shares: Shares,
    /// By rank; `None` for a rank without sequences.
    pub(super) plans: Vec<Option<Plan>>,
}

impl Ranks {
    /// Divides a batch among ranks. `whole`: its plan, whose microbatch size all ranks have.
    pub(super) fn new(
        setting: &Setting<'_>,
        ranks: u32,
        batch: &Batch<'_>,
        whole: &Plan,
    ) -> Result<Self, Error> {
        let shares = shares(setting, ranks, batch, whole.microbatch_rows())?;
        let options = PlanOptions {
            microbatch_rows: whole.microbatch_rows(),
            // What ranks exchange is shared.
            always_share: setting.args.always_share || !shares.exchanges.is_empty(),
            ..setting.options()
        };
        let exchanged: BTreeSet<u32> = shares.exchanges.iter().map(|it| it.node.0).collect();
        let (mut plans, mut passes) = (Vec::new(), Vec::new());
        for share in &shares.shares {
            if share.sequences.is_empty() {
                plans.push(None);
                passes.push(Vec::new());
                continue;
            }
            let part = batch.forest.part_of_sequences(&share.sequences)?;
            let scoring: Vec<Scoring> =
                share.sequences.iter().map(|at| batch.scoring[*at as usize].clone()).collect();
            let plan = Plan::new(&part.forest, &scoring, &options)?;
            let is_own = |node: NodeId| {
                let origin = plan.nodes().get(node.0 as usize).map(|node| node.origin.0 as usize);
                let origin = origin.and_then(|origin| part.nodes.get(origin));
                origin.is_none_or(|origin| !exchanged.contains(&origin.0))
            };
            passes.push(own_passes(&plan, is_own));
            plans.push(Some(plan));
        }
        let shares = match setting.args.collectives {
            true => shares.with_passes(&passes)?,
            false => shares,
        };
        Ok(Self { shares, plans })
    }

    /// Returns the report. `whole`: the plan of the batch on one rank.
    pub(super) fn report(&self, whole: &Plan) -> RanksReport {
        let Self { shares, plans } = self;
        let uncut_s = whole.predict().seconds_shared;
        let even = shares.uncut_ps as f64 / shares.shares.len() as f64;
        let of = |(share, plan): (&RankShare, &Option<Plan>)| {
            let plan_s = plan.as_ref().map_or(Some(0.0), |plan| plan.predict().seconds_shared);
            // An exchange saves time of a node that each rank's plan computes.
            let seconds = |spent_ps: u64| {
                let exchanged_s = (spent_ps as f64 - share.alone_ps as f64) / PICOSECONDS;
                plan_s.filter(|_| uncut_s.is_some()).map(|plan_s| (plan_s + exchanged_s).max(0.0))
            };
            RankReport {
                sequences: share.sequences.len() as u64,
                rows: share.features.rows,
                dummy_ops: u64::from(share.dummy_microbatches)
                    + u64::from(share.dummy_forwards)
                    + u64::from(share.dummy_backwards),
                finish_s: seconds(share.finish_ps),
                busy_s: seconds(share.busy_ps),
                of_even: share.finish_ps as f64 / even,
            }
        };
        let ranks: Vec<RankReport> = shares.shares.iter().zip(plans).map(of).collect();
        let largest_s = ranks.iter().filter_map(|rank| rank.finish_s).reduce(f64::max);
        RanksReport {
            uncut_s,
            largest_s,
            imbalance: shares.imbalance,
            limit: shares.limit,
            exchanges: shares.exchanges.len() as u64,
            ranks,
        }
    }
}

/// Returns the passes of a plan that may hold collectives, without those of nodes that ranks exchange.
fn own_passes(plan: &Plan, is_own: impl Fn(NodeId) -> bool) -> Vec<PassKind> {
    let pass = |kind: &OpKind| match kind {
        OpKind::Microbatch { .. } => Some(PassKind::Microbatch),
        OpKind::PrefixForward { node, .. } | OpKind::ForwardAgain { node, .. } => {
            is_own(*node).then_some(PassKind::Forward)
        }
        OpKind::PrefixBackward { node, .. } => is_own(*node).then_some(PassKind::Backward),
        OpKind::Done => None,
    };
    plan.ops().iter().filter_map(|op| pass(&op.kind)).collect()
}

fn shares(
    setting: &Setting<'_>,
    ranks: u32,
    batch: &Batch<'_>,
    microbatch_rows: u32,
) -> Result<Shares, Error> {
    let Setting { args, model, machine } = setting;
    let machine = machine.unwrap_or_default();
    let Batch { forest, scoring, groups } = *batch;
    if args.unit == Some(BalanceUnit::Group) && groups.is_empty() {
        return Err(Error::NoGroups { with: "--unit group" });
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
    let logit_rows = scored_rows(forest, scoring)?;
    Ok(Shares::new(&Workload { forest, groups, logit_rows: &logit_rows }, &options)?)
}
