//! The plan: ops in order, one at a time.

use serde::Serialize;

use crate::forest::Forest;
use crate::tree_planner::{Batch, Loss, PlanNode, Planned, Request, Scoring, plan};
use crate::{Disorder, Op, OpId, OpKind, PlanError, Prediction, Spec, TreeVerdict};

/// Version of the JSON form. Fields are only added within a version.
pub const PLAN_VERSION: u32 = 1;

/// What to do for one group or batch. Deterministic: equal specs give equal plans.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    /// Of a flat group: what it was made from.
    spec: Option<Spec>,
    sequences: usize,
    microbatch_tokens: u32,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    prompt_tokens: Option<u64>,
    responses: usize,
    microbatch_tokens: u32,
    prediction: Prediction,
    trees: &'a [TreeVerdict],
    nodes: &'a [PlanNode],
    ops: &'a [Op],
}

impl Plan {
    /// Makes the plan of one group: a tree of depth one, of which the runtime decides what sleeps.
    ///
    /// # Errors
    /// Every value that is not accepted, named with what is; see [`PlanError`].
    pub fn new(spec: Spec) -> Result<Self, PlanError> {
        spec.check()?;
        let prompt = spec.prompt.count();
        let forest = Forest::flat(prompt, spec.responses.iter().map(|it| it.tokens.count()));
        let scored = |weight| Scoring { loss: Loss::From(prompt), weight };
        let scoring: Vec<Scoring> = spec.responses.iter().map(|it| scored(it.weight)).collect();
        let planned = plan(&Request::flat(&spec, &forest, &scoring))?;
        let responses = spec.responses.len();
        Ok(Self::of(Some(spec), responses, planned))
    }

    /// Makes the plan of a batch of prefix trees: its nodes depth first, each node's leaves in
    /// microbatches, what sleeps and what is recomputed, within the memory there is. Takes seconds for a
    /// million nodes, and about 300 bytes a node.
    ///
    /// # Errors
    /// Every value that is not accepted, named with what is; `DoesNotFit` where no choice of what
    /// sleeps brings the batch within memory. See [`PlanError`].
    pub fn of_batch(batch: &Batch) -> Result<Self, PlanError> {
        let planned = plan(&batch.request()?)?;
        Ok(Self::of(None, batch.scoring.len(), planned))
    }

    fn of(spec: Option<Spec>, sequences: usize, planned: Planned) -> Self {
        Self {
            spec,
            sequences,
            microbatch_tokens: planned.microbatch_rows,
            nodes: planned.nodes,
            trees: planned.trees,
            prediction: planned.prediction,
            ops: planned.ops,
            completed: 0,
            given: false,
        }
    }

    /// The next op. Asked again before it is completed, the answer is the same; after the last,
    /// it is [`OpKind::Done`], which needs no completion.
    pub fn next_op(&mut self) -> &Op {
        self.given = true;
        &self.ops[self.completed.min(self.ops.len() - 1)]
    }

    /// Says that the op given last is done.
    ///
    /// # Errors
    /// `Order` for any other id, and where none is outstanding; it says which [`Disorder`]. The
    /// plan stands as before.
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

    /// What is wrong with completing `id`, given that it is not outstanding. Ids count up from 0.
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

    /// What a flat group's plan was made from; none of a batch's.
    #[must_use]
    pub fn spec(&self) -> Option<&Spec> {
        self.spec.as_ref()
    }

    /// Every op, in order.
    #[must_use]
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// The nodes that ops name, by number.
    #[must_use]
    pub fn nodes(&self) -> &[PlanNode] {
        &self.nodes
    }

    /// What sharing does for each tree of the batch, in the forest's order.
    #[must_use]
    pub fn trees(&self) -> &[TreeVerdict] {
        &self.trees
    }

    /// Most rows of a microbatch: as asked, or as many as [`Batch::microbatch_rows`] says where left open.
    #[must_use]
    pub fn microbatch_rows(&self) -> u32 {
        self.microbatch_tokens
    }

    /// What it costs and saves.
    #[must_use]
    pub fn predict(&self) -> Prediction {
        self.prediction
    }

    /// The plan as JSON: version, sizes, prediction, trees, nodes, ops.
    #[must_use]
    pub fn to_json(&self) -> String {
        let json = PlanJson {
            version: PLAN_VERSION,
            prompt_tokens: self.spec.as_ref().map(|spec| spec.prompt.count()),
            responses: self.sequences,
            microbatch_tokens: self.microbatch_tokens,
            prediction: self.prediction,
            trees: &self.trees,
            nodes: &self.nodes,
            ops: &self.ops,
        };
        // Plain structs with string keys: serialising them cannot fail.
        serde_json::to_string_pretty(&json).unwrap_or_default()
    }
}
