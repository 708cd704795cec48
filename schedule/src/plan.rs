//! A plan, whose ops are returned one at a time.

use serde::Serialize;

use crate::forest::Forest;
use crate::tree_planner::{PlanOptions, Planned, Prediction, Request, Scoring, TreeVerdict, plan};
use crate::{Disorder, NodeId, Op, OpId, OpKind, PlanError, PlanNode, Residency};

/// Version of the JSON form. Fields are only added within a version.
pub const PLAN_VERSION: u32 = 1;

/// The ops for the sequences of a forest. Deterministic: equal inputs give equal plans.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    options: PlanOptions,
    sequences: usize,
    planned: Planned,
    /// Number of completed ops.
    completed: usize,
    /// Whether the op at `completed` has been returned.
    given: bool,
}

#[derive(Serialize)]
struct PlanJson<'a> {
    version: u32,
    sequences: usize,
    #[serde(flatten)]
    planned: &'a Planned,
}

impl Plan {
    /// Plans the sequences of a forest: nodes depth first, leaves in microbatches, and a residency for each node
    /// within the memory budgets. A flat group is a tree of depth one ([`Forest::group`]). `scoring` has one entry
    /// for each sequence. A million nodes take seconds and about 300 bytes each.
    ///
    /// # Errors
    /// [`PlanError`] for invalid input; `DoesNotFit` if the plan exceeds memory for every choice of residency.
    pub fn new(
        forest: &Forest,
        scoring: &[Scoring],
        options: &PlanOptions,
    ) -> Result<Self, PlanError> {
        let planned = plan(&Request::new(forest, scoring, options)?)?;
        let sequences = scoring.len();
        Ok(Self { options: *options, sequences, planned, completed: 0, given: false })
    }

    /// Creates a plan of checked parts, with no op completed.
    pub(crate) fn of_planned(options: PlanOptions, sequences: usize, planned: Planned) -> Self {
        Self { options, sequences, planned, completed: 0, given: false }
    }

    pub(crate) fn planned(&self) -> &Planned {
        &self.planned
    }

    /// Returns the next op, the same one until it is completed. The last is [`OpKind::Done`], which needs no
    /// completion.
    pub fn next_op(&mut self) -> &Op {
        self.given = true;
        &self.planned.ops[self.completed.min(self.planned.ops.len() - 1)]
    }

    /// Completes the op returned last.
    ///
    /// # Errors
    /// `Order` with the [`Disorder`] for any other id, or if no op is outstanding. The plan is unchanged.
    pub fn complete(&mut self, id: OpId) -> Result<(), PlanError> {
        let expected = self.outstanding();
        if expected != Some(id) {
            let disorder = self.disorder(id);
            return Err(PlanError::Order { seen: id.0, disorder, expected });
        }
        self.completed += 1;
        self.given = false;
        Ok(())
    }

    /// Returns why `id`, which is not outstanding, cannot be completed. Ids count up from 0.
    fn disorder(&self, id: OpId) -> Disorder {
        match usize::try_from(id.0).ok().filter(|index| *index < self.planned.ops.len()) {
            None => Disorder::Unknown,
            Some(index) if index < self.completed => Disorder::Twice,
            Some(index) if self.planned.ops[index].kind == OpKind::Done => Disorder::End,
            Some(_) => Disorder::Early,
        }
    }

    fn outstanding(&self) -> Option<OpId> {
        let op = self.planned.ops.get(self.completed).filter(|op| op.kind != OpKind::Done)?;
        self.given.then_some(op.id)
    }

    /// Returns the options the plan was made with.
    #[must_use]
    pub fn options(&self) -> &PlanOptions {
        &self.options
    }

    /// Returns all ops in order.
    #[must_use]
    pub fn ops(&self) -> &[Op] {
        &self.planned.ops
    }

    /// Returns the nodes by number.
    #[must_use]
    pub fn nodes(&self) -> &[PlanNode] {
        &self.planned.nodes
    }

    /// Returns the layers that the backward of a shared node wakes ahead, 0 if it does not sleep, `None` for a
    /// leaf or an unknown node.
    #[must_use]
    pub fn wake_window_layers(&self, node: NodeId) -> Option<u32> {
        let it = self.planned.nodes.get(node.0 as usize)?;
        let sleeps = it.residency == Residency::Sleep;
        let window = if sleeps { self.options.window_layers() } else { 0 };
        (it.subtree_end > node.0 + 1).then_some(window)
    }

    /// Returns the effect of sharing on each tree, in the forest's order.
    #[must_use]
    pub fn trees(&self) -> &[TreeVerdict] {
        &self.planned.trees
    }

    /// Returns the maximum rows of a microbatch; see [`PlanOptions::microbatch_rows`].
    #[must_use]
    pub fn microbatch_rows(&self) -> u32 {
        self.planned.microbatch_rows
    }

    /// Returns the predicted cost.
    #[must_use]
    pub fn predict(&self) -> Prediction {
        self.planned.prediction
    }

    /// Returns the plan as JSON: version, sizes, prediction, trees, nodes, ops.
    #[must_use]
    pub fn to_json(&self) -> String {
        let (version, sequences, planned) = (PLAN_VERSION, self.sequences, &self.planned);
        let json = PlanJson { version, sequences, planned };
        // Structs with string keys always serialise.
        serde_json::to_string_pretty(&json).unwrap_or_default()
    }
}
