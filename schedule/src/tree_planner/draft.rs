//! A plan of which all but the residency is decided.

use crate::limits::{PARETO_POINTS_MAX, PARETO_POINTS_TWO_TIERS_MAX};
use crate::tree_planner::cost_model::CostModel;
use crate::tree_planner::emit::Emitter;
use crate::tree_planner::microbatches::Microbatches;
use crate::tree_planner::order::{self, LeastMemory};
use crate::tree_planner::predict::Predictor;
use crate::tree_planner::request::Request;
use crate::tree_planner::residency::ResidencyProblem;
use crate::tree_planner::scores::Scores;
use crate::tree_planner::times::ResidencyCosts;
use crate::tree_planner::tree::{PlanNode, PlanTree};
use crate::tree_planner::{Planned, fit};
use crate::{Op, PlanError, Remedy, Residency};

/// Nodes and what they score.
#[derive(Debug)]
pub(super) struct ScoredTree {
    pub(super) tree: PlanTree,
    pub(super) scores: Scores,
}

impl ScoredTree {
    pub(super) fn new(
        request: &Request<'_>,
        dense: &[bool],
        block_rows: u64,
    ) -> Result<Self, PlanError> {
        let tree = PlanTree::new(request.forest, dense, block_rows)?;
        let scores = Scores::new(&tree, request.forest.endings(), request.scoring)?;
        Ok(Self { tree, scores })
    }
}

/// A plan of which all but the memory is decided.
#[derive(Debug)]
pub(super) struct Draft<'a> {
    pub(super) request: &'a Request<'a>,
    pub(super) shape: &'a CostModel,
    pub(super) laid: &'a ScoredTree,
    pub(super) microbatch_rows: u32,
    /// By the forest's number, tops of what runs separately.
    pub(super) dense: &'a [bool],
}

impl Draft<'_> {
    /// All there is to choose by, handed to `with`, and the choice that needs the least memory.
    pub(super) fn given<T>(
        &self,
        with: impl FnOnce(&ResidencyProblem<'_>, &LeastMemory) -> T,
    ) -> T {
        let (request, shape) = (self.request, self.shape);
        let ScoredTree { tree, scores } = self.laid;
        let scored = &scores.rows[..];
        let items = &Microbatches::new(tree, scored, shape, self.microbatch_rows.into());
        let mut least = LeastMemory::new(tree, items, scored, shape);
        if request.options.runtime_residency {
            least.ends = order::as_given(tree, items);
        }
        let ends = &least.ends[..];
        let costs = &ResidencyCosts::new(tree, items, scored, shape, ends);
        let points_max = [PARETO_POINTS_MAX, PARETO_POINTS_TWO_TIERS_MAX];
        with(&ResidencyProblem { tree, items, scored, shape, ends, costs, points_max }, &least)
    }

    pub(super) fn ops(&self, given: &ResidencyProblem<'_>, residency: &[Residency]) -> Vec<Op> {
        let ResidencyProblem { tree, items, shape, ends, .. } = *given;
        let (scores, scoring) = (&self.laid.scores, self.request.scoring);
        Emitter { tree, items, scores, scoring, shape, ends, residency }.ops()
    }

    /// Seconds that nodes and microbatches cost beside their operations, where all of it fits and that is
    /// below `bound_s`.
    pub(super) fn cost_s(&self, device: u64, bound_s: f64) -> Option<f64> {
        self.given(|given, _| {
            let microbatches_s = self.shape.op_s * given.items.microbatches.len() as f64;
            if microbatches_s >= bound_s {
                return None;
            }
            let choice = given.choose(device, self.request.host_bytes)?;
            let cost_s = given.cost(&choice.residency) + microbatches_s;
            (cost_s < bound_s).then_some(cost_s)
        })
    }

    pub(super) fn plan(&self) -> Result<Planned, PlanError> {
        let request = self.request;
        self.given(|given, least| {
            let choice = match request.device_bytes {
                None if request.options.runtime_residency => given.all(Residency::Sleep),
                None => given.all(Residency::Keep),
                Some(device) => match given.choose(device, request.host_bytes) {
                    Some(choice) => choice,
                    None => return Err(self.misfit(given, least, device)),
                },
            };
            let ops = self.ops(given, &choice.residency);
            let made =
                Predictor { request, given, scores: &self.laid.scores, choice: &choice, ops: &ops };
            let (prediction, trees) = made.predict(self.microbatch_rows, self.dense);
            let with = |(node, residency): (&PlanNode, &Residency)| PlanNode {
                residency: *residency,
                ..*node
            };
            let nodes = given.tree.nodes.iter().zip(&choice.residency).map(with).collect();
            Ok(Planned { nodes, ops, trees, prediction, microbatch_rows: self.microbatch_rows })
        })
    }

    /// What is short: on the device in the plan that needs least of it, or else on the host in the
    /// plan that a host without limit would have.
    pub(super) fn misfit(
        &self,
        given: &ResidencyProblem<'_>,
        least: &LeastMemory,
        device: u64,
    ) -> PlanError {
        if let (Some(choice), Some(host)) = (given.choose(device, None), self.request.host_bytes) {
            let ops = self.ops(given, &choice.residency);
            return fit::too_little("host", &ops, host, Remedy::BlocksOrBytes, |op| op.host_bytes);
        }
        let most = fit::most_rows(given.tree, given.scored, self.shape, device, &order::ANY);
        let remedy = match most {
            Some(rows) if rows < self.microbatch_rows => Remedy::MicrobatchRows(rows),
            _ => Remedy::BlocksOrBytes,
        };
        let ops = self.ops(given, &least.residency);
        fit::too_little("device", &ops, device, remedy, |op| op.device_bytes)
    }
}
