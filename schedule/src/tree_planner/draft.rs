//! A plan before its residency is chosen.

use serde::{Deserialize, Serialize};

use crate::cost::PASSES;
use crate::limits::{PARETO_POINTS_MAX, PARETO_POINTS_TWO_TIERS_MAX};
use crate::tree_planner::microbatches::Microbatches;
use crate::tree_planner::order::{self, LeastMemory};
use crate::tree_planner::predict::{Prediction, Predictor, TreeVerdict};
use crate::tree_planner::request::Request;
use crate::tree_planner::residency::{ResidencyChoice, ResidencyProblem};
use crate::tree_planner::times::ResidencyCosts;
use crate::tree_planner::tree::PlanTree;
use crate::tree_planner::{emit, fit};
use crate::{Op, PlanError, PlanNode, Remedy, Residency};

/// The contents of a plan.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(crate) struct Planned {
    pub(crate) microbatch_rows: u32,
    pub(crate) prediction: Prediction,
    pub(crate) trees: Vec<TreeVerdict>,
    pub(crate) nodes: Vec<PlanNode>,
    pub(crate) ops: Vec<Op>,
}

/// A plan before its residency is chosen.
#[derive(Debug)]
pub(super) struct Draft<'a> {
    pub(super) request: &'a Request<'a>,
    pub(super) tree: &'a PlanTree,
    pub(super) microbatch_rows: u32,
    /// Tops of the subtrees that run separately, by the forest's number.
    pub(super) dense: &'a [bool],
}

impl Draft<'_> {
    /// Calls `with` with the residency problem and the plan that needs the least memory.
    pub(super) fn given<T>(
        &self,
        with: impl FnOnce(&ResidencyProblem<'_>, &LeastMemory) -> T,
    ) -> T {
        let tree = self.tree;
        let items = &Microbatches::new(tree, self.microbatch_rows.into());
        let mut least = LeastMemory::new(tree, items);
        if self.request.options.runtime_residency {
            least.ends = order::as_given(tree, items);
        }
        let ends = &least.ends[..];
        let costs = &ResidencyCosts::new(tree, items, ends);
        let points_max = [PARETO_POINTS_MAX, PARETO_POINTS_TWO_TIERS_MAX];
        with(&ResidencyProblem { tree, items, ends, costs, points_max }, &least)
    }

    pub(super) fn ops(&self, given: &ResidencyProblem<'_>, residency: &[Residency]) -> Vec<Op> {
        emit::ops(given, self.request.scoring, residency)
    }

    /// Returns the seconds that residency and microbatches add to the operations, if the plan fits and they are
    /// below `bound_s`.
    pub(super) fn cost_s(&self, device: u64, bound_s: f64) -> Option<f64> {
        self.given(|given, _| {
            let microbatches_s =
                PASSES * self.tree.model.op_s * given.items.microbatches.len() as f64;
            if microbatches_s >= bound_s {
                return None;
            }
            let choice = given.choose(device, self.request.host_bytes)?;
            let cost_s = given.cost(&choice.residency) + microbatches_s;
            (cost_s < bound_s).then_some(cost_s)
        })
    }

    pub(super) fn plan(&self) -> Result<Planned, PlanError> {
        self.given(|given, least| {
            let choice = self.choice(given, least)?;
            Ok(self.planned(given, &choice))
        })
    }

    /// Returns the plan if its predicted seconds are at most `bound_s` or unknown. No ops are written otherwise.
    pub(super) fn plan_within(&self, bound_s: f64) -> Result<Option<Planned>, PlanError> {
        self.given(|given, least| {
            let choice = self.choice(given, least)?;
            let seconds = Predictor { request: self.request, given, choice: &choice }.seconds();
            let within = seconds.is_none_or(|seconds| seconds <= bound_s);
            Ok(within.then(|| self.planned(given, &choice)))
        })
    }

    fn choice(
        &self,
        given: &ResidencyProblem<'_>,
        least: &LeastMemory,
    ) -> Result<ResidencyChoice, PlanError> {
        match self.request.device_bytes {
            None if self.request.options.runtime_residency => Ok(given.all(Residency::Sleep)),
            None => Ok(given.all(Residency::Keep)),
            Some(device) => given
                .choose(device, self.request.host_bytes)
                .ok_or_else(|| self.misfit(given, least, device)),
        }
    }

    fn planned(&self, given: &ResidencyProblem<'_>, choice: &ResidencyChoice) -> Planned {
        let ops = self.ops(given, &choice.residency);
        let predictor = Predictor { request: self.request, given, choice };
        let (prediction, trees) = predictor.predict(self.microbatch_rows, self.dense, &ops);
        let mut nodes = self.tree.nodes.clone();
        nodes.iter_mut().zip(&choice.residency).for_each(|(node, it)| node.residency = *it);
        Planned { nodes, ops, trees, prediction, microbatch_rows: self.microbatch_rows }
    }

    /// Returns the error for the device in the plan that needs the least of it, or for the host in the plan
    /// that an unlimited host would have.
    fn misfit(&self, given: &ResidencyProblem<'_>, least: &LeastMemory, device: u64) -> PlanError {
        if let (Some(choice), Some(host)) = (given.choose(device, None), self.request.host_bytes) {
            let ops = self.ops(given, &choice.residency);
            return fit::too_little("host", &ops, host, Remedy::BlocksOrBytes, |op| op.host_bytes);
        }
        let remedy = match fit::most_rows(self.tree, device, &order::ANY) {
            Some(rows) if rows < self.microbatch_rows => Remedy::MicrobatchRows(rows),
            _ => Remedy::BlocksOrBytes,
        };
        let ops = self.ops(given, &least.residency);
        fit::too_little("device", &ops, device, remedy, |op| op.device_bytes)
    }
}
