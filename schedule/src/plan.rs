//! The plan: ops in order, one at a time.

use serde::Serialize;

use crate::limits::WAKE_WINDOW_LAYERS;
use crate::waves::pack;
use crate::{Disorder, Member, NodeId, Op, OpId, OpKind, PlanError, Prediction, Span, Spec};

/// Version of the JSON form. Fields are only added within a version.
pub const PLAN_VERSION: u32 = 1;

/// What to do for one group. Deterministic: equal specs give equal plans.
#[derive(Clone, Debug, PartialEq)]
pub struct Plan {
    spec: Spec,
    ops: Vec<Op>,
    /// Ops completed so far.
    completed: usize,
    /// Whether the op at `completed` has been given.
    given: bool,
}

#[derive(Serialize)]
struct PlanJson<'a> {
    version: u32,
    prompt_tokens: u64,
    responses: usize,
    wave_tokens: u32,
    prediction: Prediction,
    ops: &'a [Op],
}

impl Plan {
    /// Makes the plan of one group.
    ///
    /// # Errors
    /// Every value that is not accepted, named with what is; see [`PlanError`].
    pub fn new(spec: Spec) -> Result<Self, PlanError> {
        spec.check()?;
        let ops = ops(&spec);
        Ok(Self { spec, ops, completed: 0, given: false })
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

    /// Every op, in order.
    #[must_use]
    pub fn ops(&self) -> &[Op] {
        &self.ops
    }

    /// What it was made from.
    #[must_use]
    pub fn spec(&self) -> &Spec {
        &self.spec
    }

    /// What it costs and saves.
    #[must_use]
    pub fn predict(&self) -> Prediction {
        Prediction::of(&self.spec, &self.ops)
    }

    /// The plan as JSON: version, sizes, prediction, ops.
    #[must_use]
    pub fn to_json(&self) -> String {
        let json = PlanJson {
            version: PLAN_VERSION,
            prompt_tokens: self.spec.prompt.count(),
            responses: self.spec.responses.len(),
            wave_tokens: self.spec.wave_tokens,
            prediction: self.predict(),
            ops: &self.ops,
        };
        // Plain structs with string keys: serialising them cannot fail.
        serde_json::to_string_pretty(&json).unwrap_or_default()
    }
}

fn ops(spec: &Spec) -> Vec<Op> {
    let node = NodeId::default();
    let window = match spec.wake_window_layers {
        0 => WAKE_WINDOW_LAYERS,
        layers => layers,
    };
    let rows: Vec<u64> = spec.suffix_rows().collect();
    let waves = pack(&rows, spec.wave_tokens.into());
    let last = waves.len() - 1;
    let prefix = Span { begin: 0, end: spec.prefix_rows() };
    let mut kinds = vec![OpKind::PrefixForward { node, tokens: prefix }];
    for (number, sequences) in waves.into_iter().enumerate() {
        let members = members(spec, &sequences);
        kinds.push(OpKind::Wave { node, members, last: number == last });
    }
    kinds.push(OpKind::NodeBackward { node, wake_window_layers: window.min(spec.model.layers) });
    kinds.push(OpKind::Done);
    (0..).zip(kinds).map(|(id, kind)| Op { id: OpId(id), kind }).collect()
}

/// Lays suffixes out one after another. The first row of each is the last prompt token, which
/// predicts the response's first (I1), at that token's own position (I2).
fn members(spec: &Spec, sequences: &[usize]) -> Vec<Member> {
    let mut row = 0;
    let mut members = Vec::with_capacity(sequences.len());
    for &sequence in sequences {
        let response = &spec.responses[sequence];
        let count = response.tokens.count();
        members.push(Member {
            sequence: sequence as u32,
            rows: Span { begin: row, end: row + count },
            first_position: spec.prefix_rows(),
            tokens: Span { begin: 0, end: count },
            weight: response.weight,
        });
        row += count;
    }
    members
}
