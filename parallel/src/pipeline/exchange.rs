//! Conversion of start times into lists of steps.
//!
//! All ops and transfers are sorted into one order: an op at its start, a transfer at the end of its op
//! (*early*) or just before the op that needs it (*late*). Each stage's list contains its entries of that
//! order. Both ends of a transfer have one position, so the earliest unfinished transfer can always run:
//! stages never deadlock, even if sends block. Posting neighbours together only lets them start sooner.

use super::chunks::Costs;
use super::graph::Graph;
use super::lists::{
    Payload, StageList, StageOp, StagePeak, StageStep, StageStepKind, StageTransfer, TransferShape,
};
use super::spec::Pipeline;
use dormouse_schedule::Span;

/// Position of a transfer in the common order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TransferPlace {
    /// At the end of the op that sends.
    Early,
    /// Just before the op that receives.
    Late,
}

/// Returns the lists of all stages, with peaks of 0, and the graph's ids of their ops.
pub(super) fn lists(
    pipeline: &Pipeline,
    graph: &Graph,
    starts: &[u64],
    place: TransferPlace,
) -> (Vec<StageList>, Vec<Vec<usize>>) {
    // (time, transfers before ops, op)
    let mut order: Vec<(u64, bool, usize)> = Vec::with_capacity(2 * graph.len());
    for (id, &start) in starts.iter().enumerate() {
        order.push((start, true, id));
        if graph.sends(id)
            && let Some(target) = graph.target(id)
        {
            let time = match place {
                TransferPlace::Early => start + graph.op_ns[id],
                TransferPlace::Late => starts[target],
            };
            order.push((time, false, id));
        }
    }
    order.sort_unstable();
    let mut build = Build::new(graph, starts);
    for (_, computes, id) in order {
        if computes {
            build.compute(pipeline, id);
        } else {
            build.transfer(id);
        }
    }
    (build.stages, build.ids)
}

struct Build<'a> {
    graph: &'a Graph,
    stages: Vec<StageList>,
    /// The graph's ids of each stage's ops.
    ids: Vec<Vec<usize>>,
    /// Index of each op in its stage's list.
    local: Vec<u32>,
    /// Number of each stage's current batch, and whether a compute has closed it.
    batches: Vec<(u32, bool)>,
}

impl<'a> Build<'a> {
    fn new(graph: &'a Graph, starts: &[u64]) -> Self {
        let stage = StageList {
            ops: Vec::new(),
            steps: Vec::new(),
            sync_after_op: 0,
            peak: StagePeak::default(),
        };
        let mut local = vec![0; starts.len()];
        let mut counts = vec![0; graph.stages as usize];
        let mut ids: Vec<usize> = (0..starts.len()).collect();
        ids.sort_unstable_by_key(|id| (starts[*id], *id));
        for id in ids {
            let count = &mut counts[graph.stage(graph.unit(id).part) as usize];
            local[id] = *count;
            *count += 1;
        }
        let count = graph.stages as usize;
        let (stages, ids) = (vec![stage; count], vec![Vec::new(); count]);
        Self { graph, stages, ids, local, batches: vec![(0, true); count] }
    }

    fn compute(&mut self, pipeline: &Pipeline, id: usize) {
        let op = stage_op(pipeline, self.graph, id);
        let number = self.graph.stage(op.part) as usize;
        let stage = &mut self.stages[number];
        let batch = &mut self.batches[number];
        batch.1 = true;
        stage.sync_after_op = stage.ops.len() as u32;
        let op_number = self.local[id];
        stage.steps.push(StageStep { kind: StageStepKind::Compute, op: op_number, batch: batch.0 });
        stage.ops.push(op);
        self.ids[number].push(id);
    }

    /// Appends both ends of the transfer that `id` sends.
    fn transfer(&mut self, id: usize) {
        let Some(target) = self.graph.target(id) else { return };
        for (kind, end) in [(StageStepKind::Send, id), (StageStepKind::Receive, target)] {
            let number = self.graph.stage(self.graph.unit(end).part) as usize;
            let batch = &mut self.batches[number];
            if batch.1 {
                *batch = (batch.0 + 1, false);
            }
            let step = StageStep { kind, op: self.local[end], batch: batch.0 };
            self.stages[number].steps.push(step);
        }
    }
}

/// Returns an op as it appears in a list.
pub(super) fn stage_op(pipeline: &Pipeline, graph: &Graph, id: usize) -> StageOp {
    let unit = graph.unit(id);
    let rows = if unit.kind.is_prefix() {
        let [begin, end] = graph.chunk_rows(unit.group, unit.index);
        Span { begin, end }
    } else {
        let microbatch = pipeline.groups[unit.group as usize].microbatches[unit.index as usize];
        Span { begin: 0, end: microbatch.rows }
    };
    let end = |other: usize| StageTransfer {
        peer: graph.stage(graph.unit(other).part),
        payload: if unit.kind.is_forward() { Payload::Activation } else { Payload::Gradient },
        shape: if unit.kind.is_prefix() { TransferShape::Prefix } else { TransferShape::Suffix },
        rows: rows.count(),
        bytes: Costs(pipeline).bytes(rows.count()),
    };
    let leaves = graph.stages > 1;
    StageOp {
        kind: unit.kind,
        group: unit.group,
        index: unit.index,
        part: unit.part,
        virtual_stage: unit.part / graph.stages,
        rows,
        receives: graph.source(id).filter(|_| leaves).map(end),
        sends: graph.target(id).filter(|_| leaves).map(end),
    }
}
