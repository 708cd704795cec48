//! The plan: ops in order, one at a time.

use serde::Serialize;

use crate::forest::Forest;
use crate::tree_planner::{PlanOptions, Prediction, Request, Scoring, TreeVerdict, plan};
use crate::{Disorder, NodeId, Op, OpId, OpKind, PlanError, PlanNode, Residency};

/// Version of the JSON form. Fields are only added within a version.
pub const PLAN_VERSION: u32 = 1;

/// What to do for the sequences of a forest. Deterministic: equal inputs give equal plans.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    options: PlanOptions,
    sequences: usize,
    microbatch_rows: u32,
    nodes: Vec<PlanNode>,
    trees: Vec<TreeVerdict>,
    prediction: Prediction,
    ops: Vec<Op>,
    /// Ops completed so far.
    completed: usize,
    /// Whether the op at `completed` has been given.
    given: bool,
}

#[derive(Serialize)]
struct PlanJson<'a> {
    version: u32,
    sequences: usize,
    microbatch_rows: u32,
    prediction: Prediction,
    trees: &'a [TreeVerdict],
    nodes: &'a [PlanNode],
    ops: &'a [Op],
}

impl Plan {
    /// Plans the sequences of a forest: its nodes depth first, each node's leaves in microbatches, and
    /// what sleeps or is recomputed, within the memory budgets. A flat group is a tree of depth one
    /// ([`Forest::group`]). `scoring` has one entry for each sequence. Takes seconds for a million nodes,
    /// and about 300 bytes a node.
    ///
    /// # Errors
    /// Names the value seen and what is accepted; `DoesNotFit` if no choice of what sleeps brings the
    /// plan within memory. See [`PlanError`].
    pub fn new(
        forest: &Forest,
        scoring: &[Scoring],
        options: &PlanOptions,
    ) -> Result<Self, PlanError> {
        let planned = plan(&Request::new(forest, scoring, options)?)?;
        Ok(Self {
            options: *options,
            sequences: scoring.len(),
            microbatch_rows: planned.microbatch_rows,
            nodes: planned.nodes,
            trees: planned.trees,
            prediction: planned.prediction,
            ops: planned.ops,
            completed: 0,
            given: false,
        })
    }

    /// Returns the next op: the same one until it is completed, and [`OpKind::Done`], which needs no
    /// completion, after the last.
    pub fn next_op(&mut self) -> &Op {
        self.given = true;
        &self.ops[self.completed.min(self.ops.len() - 1)]
    }

    /// Completes the op given last.
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
        match usize::try_from(id.0).ok().filter(|index| *index < self.ops.len()) {
            None => Disorder::Unknown,
            Some(index) if index < self.completed => Disorder::Twice,
            Some(index) if self.ops[index].kind == OpKind::Done => Disorder::End,
            Some(_) => Disorder::Early,
        }
    }

    fn outstanding(&self) -> Option<OpId> {
        let op = self.ops.get(self.completed).filter(|op| op.kind != OpKind::Done)?;
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
        &self.ops
    }

    /// Returns the nodes that ops name, by number.
    #[must_use]
    pub fn nodes(&self) -> &[PlanNode] {
        &self.nodes
    }

    /// Returns how many layers the backward of a shared node wakes ahead, 0 if the node does not sleep;
    /// `None` for a leaf or an unknown node.
    #[must_use]
    pub fn wake_window_layers(&self, node: NodeId) -> Option<u32> {
        let it = self.nodes.get(node.0 as usize)?;
        let sleeps = it.residency == Residency::Sleep;
        let window = if sleeps { self.options.window_layers() } else { 0 };
        (it.subtree_end > node.0 + 1).then_some(window)
    }

    /// Returns the effect of sharing on each tree, in the forest's order.
    #[must_use]
    pub fn trees(&self) -> &[TreeVerdict] {
        &self.trees
    }

    /// Returns the maximum rows of a microbatch; see [`PlanOptions::microbatch_rows`].
    #[must_use]
    pub fn microbatch_rows(&self) -> u32 {
        self.microbatch_rows
    }

    /// Returns the predicted cost.
    #[must_use]
    pub fn predict(&self) -> Prediction {
        self.prediction
    }

    /// Returns the plan as JSON: version, sizes, prediction, trees, nodes, ops.
    #[must_use]
    pub fn to_json(&self) -> String {
        let json = PlanJson {
            version: PLAN_VERSION,
            sequences: self.sequences,
            microbatch_rows: self.microbatch_rows,
            prediction: self.prediction,
            trees: &self.trees,
            nodes: &self.nodes,
            ops: &self.ops,
        };
        // Plain structs with string keys: serialising them cannot fail.
        serde_json::to_string_pretty(&json).unwrap_or_default()
    }
}
