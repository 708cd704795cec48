//! Validation of op lists: every op once, after what it needs, within bounds and room, without deadlock.

use super::PipelineError;
use super::exchange::stage_op;
use super::graph::Graph;
use super::lists::{StageList, StageOp, StageStepKind, Stages};
use super::meet::{PipelineTimes, TransferReplay, TransferTiming};
use super::peaks::peak;
use super::spec::{CHUNKS_MAX, Pipeline};
use dormouse_schedule::check_range;

impl Stages {
    /// Computes the times of all ops and transfers in a timing mode.
    ///
    /// # Errors
    /// As [`Stages::check`] for ops and steps; `Cycle` for this timing mode only.
    pub fn times(
        &self,
        pipeline: &Pipeline,
        meeting: TransferTiming,
    ) -> Result<PipelineTimes, PipelineError> {
        let (graph, ids) = self.graph(pipeline)?;
        check_steps(&graph, &self.stages, &ids)?;
        TransferReplay::new(&graph, &self.stages, &ids, meeting).run()
    }

    /// Returns the time of each stage's ops in nanoseconds, in list order.
    ///
    /// # Errors
    /// `Op` for an unknown, missing or duplicate op; the errors of an invalid pipeline.
    pub fn op_ns(&self, pipeline: &Pipeline) -> Result<Vec<Vec<u64>>, PipelineError> {
        let (graph, ids) = self.graph(pipeline)?;
        let cost = |ids: Vec<usize>| ids.into_iter().map(|id| graph.op_ns[id]).collect();
        Ok(ids.into_iter().map(cost).collect())
    }

    /// Checks P1 to P3 of the module, and that no timing mode ([`TransferTiming::ALL`]) deadlocks.
    ///
    /// # Errors
    /// The first fault found, with the ops involved.
    pub fn check(&self, pipeline: &Pipeline) -> Result<(), PipelineError> {
        for meeting in TransferTiming::ALL {
            self.times(pipeline, meeting)?;
        }
        for (stage, list) in (0..).zip(&self.stages) {
            check_bounds(pipeline, stage, &list.ops)?;
        }
        Ok(())
    }

    /// Returns the graph of the lists and its ids of their ops. Checks first what the other checks index
    /// by: the number of chunks, the rows and the peers of lists that may come from outside.
    fn graph(&self, pipeline: &Pipeline) -> Result<(Graph, Vec<Vec<usize>>), PipelineError> {
        pipeline.check()?;
        check_range("chunks of the report", self.report.chunks, 1, CHUNKS_MAX)?;
        let last = (self.stages.len() as u64).saturating_sub(1);
        for op in self.stages.iter().flat_map(|stage| &stage.ops) {
            check_range("first row of an op", op.rows.begin, 0, op.rows.end)?;
            for transfer in [op.receives, op.sends].into_iter().flatten() {
                check_range("peer of a transfer", transfer.peer.into(), 0, last)?;
            }
        }
        let graph = Graph::new(pipeline, self.report.chunks)?;
        let ids = ids(pipeline, &graph, &self.stages)?;
        Ok((graph, ids))
    }
}

/// Returns the graph's ids of each stage's ops; every op must be on its stage, once and unchanged.
fn ids(
    pipeline: &Pipeline,
    graph: &Graph,
    stages: &[StageList],
) -> Result<Vec<Vec<usize>>, PipelineError> {
    let wanted = u64::from(graph.stages);
    check_range("stages", stages.len() as u64, wanted, wanted)?;
    let mut seen = vec![false; graph.len()];
    let mut ids = Vec::with_capacity(stages.len());
    for (stage, list) in (0..).zip(stages) {
        let mut of_stage = Vec::with_capacity(list.ops.len());
        for op in &list.ops {
            let unit = op.unit();
            let fault = |problem| PipelineError::Op { stage, op: unit.to_string(), problem };
            let id = graph.id(unit).ok_or_else(|| fault("is not an op of the pipeline"))?;
            if graph.stage(unit.part) != stage {
                return Err(fault("is on another stage"));
            }
            if std::mem::replace(&mut seen[id], true) {
                return Err(fault("is listed twice"));
            }
            // An op without its receive would run too early.
            if *op != stage_op(pipeline, graph, id) {
                return Err(fault("differs from the pipeline in rows or transfers"));
            }
            of_stage.push(id);
        }
        ids.push(of_stage);
    }
    if let Some(id) = seen.iter().position(|seen| !seen) {
        let stage = graph.stage(graph.unit(id).part);
        return Err(PipelineError::Op { stage, op: graph.name(id), problem: "is missing" });
    }
    Ok(ids)
}

/// Checks each stage's steps: every op is computed once, received before, sent after, and follows what it
/// needs on its own stage. The replay checks the order between stages.
fn check_steps(
    graph: &Graph,
    stages: &[StageList],
    ids: &[Vec<usize>],
) -> Result<(), PipelineError> {
    let mut computed = vec![false; graph.len()];
    for ((stage, list), ids) in (0..).zip(stages).zip(ids) {
        let mut received = vec![false; ids.len()];
        let mut sent = vec![false; ids.len()];
        for step in &list.steps {
            let at = step.op as usize;
            let Some(&id) = ids.get(at) else {
                let (op, problem) = (format!("op {at}"), "is not in the list");
                return Err(PipelineError::Op { stage, op, problem });
            };
            let fault = |problem| Err(PipelineError::Op { stage, op: graph.name(id), problem });
            let op = &list.ops[at];
            match step.kind {
                StageStepKind::Compute => {
                    if computed[id] {
                        return fault("is computed twice");
                    }
                    if op.receives.is_some() && !received[at] {
                        return fault("is computed before what it receives");
                    }
                    check_needs(graph, stage, id, &computed)?;
                    computed[id] = true;
                }
                StageStepKind::Send => {
                    if !computed[id] {
                        return fault("is sent before it is computed");
                    }
                    if op.sends.is_none() || std::mem::replace(&mut sent[at], true) {
                        return fault("is sent too often");
                    }
                }
                StageStepKind::Receive => {
                    if op.receives.is_none() || std::mem::replace(&mut received[at], true) {
                        return fault("is received too often");
                    }
                }
            }
        }
        for ((op, id), sent) in list.ops.iter().zip(ids).zip(sent) {
            let (op, problem) = match (computed[*id], op.sends.is_some() == sent) {
                (true, true) => continue,
                (false, _) => (graph.name(*id), "is never computed"),
                (true, false) => (graph.name(*id), "is never sent"),
            };
            return Err(PipelineError::Op { stage, op, problem });
        }
    }
    Ok(())
}

/// Checks that everything an op needs on its own stage is computed: chunks in order, the whole prefix
/// before its microbatches, all microbatches before the prefix backward, and earlier parts of the stage.
fn check_needs(
    graph: &Graph,
    stage: u32,
    id: usize,
    computed: &[bool],
) -> Result<(), PipelineError> {
    let mut missing = None;
    graph.local_needs(id, |needed| {
        if !computed[needed] {
            missing = missing.or(Some(needed));
        }
    });
    if let Some(source) = graph.source(id)
        && !graph.sends(source)
        && !computed[source]
    {
        missing = missing.or(Some(source));
    }
    match missing {
        None => Ok(()),
        Some(needed) => {
            let (op, needs) = (graph.name(id), graph.name(needed));
            Err(PipelineError::Early { stage, op, needs })
        }
    }
}

fn check_bounds(pipeline: &Pipeline, stage: u32, ops: &[StageOp]) -> Result<(), PipelineError> {
    let (bounds, peak) = (pipeline.bounds, peak(ops, pipeline, stage));
    let held = [
        ("groups alive", peak.live_groups, bounds.live_groups_max),
        ("microbatches in flight", peak.in_flight, bounds.in_flight_max),
    ];
    for (what, seen, most) in held {
        if most > 0 && seen > most {
            return Err(PipelineError::Bound { stage, what, seen, most });
        }
    }
    if let Some(room_bytes) = pipeline.room_of(stage)
        && peak.bytes > room_bytes
    {
        return Err(PipelineError::Room { stage, needed_bytes: peak.bytes, room_bytes });
    }
    Ok(())
}
