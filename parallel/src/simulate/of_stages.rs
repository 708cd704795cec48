//! Conversion of a pipeline's op lists: a stage is a rank, an op a step, a transfer an exchange.

use std::collections::BTreeMap;

use super::world::{BlockSleep, SimulatedRank, SimulatedStep, StepExchange, World};
use crate::pipeline::{
    Pipeline, PipelineError, PipelineRates, PipelineUnit, StageList, StageOp, Stages,
};
use dormouse_residency::Tier;
use dormouse_schedule::Machine;

impl World {
    /// Converts op lists into ranks; transfers overlap compute. The boundary and saved bytes of a chunk,
    /// or of a microbatch on one part, are one block from its forward to the end of its backward; what an
    /// op works with one of that op; what a stage always holds one without an end.
    ///
    /// If the pipeline has both rates, what sleeps of a chunk is a block too, on its way to the host after
    /// the forward and back for the backward, and a device has room for the planned peak alone: steps wait
    /// for what has not left. Otherwise it leaves and returns in no time.
    ///
    /// # Errors
    /// As [`Stages::op_ns`].
    pub fn of_stages(pipeline: &Pipeline, stages: &Stages) -> Result<Self, PipelineError> {
        let op_ns = stages.op_ns(pipeline)?;
        let mut exchanges = Vec::new();
        let mut sent: BTreeMap<PipelineUnit, u32> = BTreeMap::new();
        for (stage, list) in (0..).zip(&stages.stages) {
            for op in &list.ops {
                if let Some((send, target)) = op.sends.zip(op.unit().target()) {
                    sent.insert(target, exchanges.len() as u32);
                    exchanges.push(StepExchange { from: stage, to: send.peer, bytes: send.bytes });
                }
            }
        }
        let PipelineRates { sleep_bytes_per_s, wake_bytes_per_s, .. } = pipeline.rates;
        let sleeps = sleep_bytes_per_s > 0 && wake_bytes_per_s > 0;
        let rank = |(stage, (list, op_ns)): (u32, (&StageList, Vec<u64>))| {
            let mut rank = rank(pipeline, stage, &list.ops, &op_ns, &sent, sleeps);
            if sleeps {
                let device_bytes = list.peak.bytes;
                let rates = Machine { sleep_bytes_per_s, wake_bytes_per_s, ..Machine::default() };
                rank.machine = Machine { device_bytes, ..rates };
            }
            rank
        };
        Ok(Self {
            ranks: (0..).zip(stages.stages.iter().zip(op_ns)).map(rank).collect(),
            exchanges,
            link_bytes_per_s: pipeline.rates.link_bytes_per_s,
            link_latency_ns: pipeline.rates.transfer_latency_ns,
            collective_bytes: 0,
        })
    }
}

fn rank(
    pipeline: &Pipeline,
    stage: u32,
    ops: &[StageOp],
    op_ns: &[u64],
    sent: &BTreeMap<PipelineUnit, u32>,
    sleeps: bool,
) -> SimulatedRank {
    let bytes = pipeline.bytes_of(stage);
    let mut rank = SimulatedRank::default();
    // The blocks of forwards whose backward has not run, and those of them that sleep.
    let (mut blocks, mut asleep) = (BTreeMap::new(), BTreeMap::new());
    for (op, compute_ns) in ops.iter().zip(op_ns) {
        let mut step = SimulatedStep { compute_ns: *compute_ns, ..SimulatedStep::default() };
        let place = (op.kind.is_prefix(), op.group, op.index, op.part);
        if op.kind.is_forward() {
            let row = bytes.kept(op.kind, pipeline.is_last(op.part));
            let own = u128::from(op.rows.count()).saturating_mul(row);
            let own = u64::try_from(own).unwrap_or(u64::MAX);
            let block = allocated(&mut rank, &mut step, own);
            blocks.insert(place, block);
        } else {
            step.frees.extend(blocks.remove(&place));
        }
        let mut row = bytes.working(op.kind);
        if sleeps && op.kind.is_prefix() {
            row = bytes.prefix_working;
            if op.kind.is_forward() {
                let own = op.rows.count().saturating_mul(bytes.prefix_asleep);
                let block = allocated(&mut rank, &mut step, own);
                step.sleeps.push(BlockSleep { block, tier: Tier::Host });
                asleep.insert(place, block);
            } else if let Some(block) = asleep.remove(&place) {
                step.needs.push(block);
                step.frees.push(block);
            }
        }
        let working = op.rows.count().saturating_mul(row);
        if working > 0 {
            let block = allocated(&mut rank, &mut step, working);
            step.frees.push(block);
        }
        if rank.steps.is_empty() && bytes.fixed > 0 {
            allocated(&mut rank, &mut step, bytes.fixed);
        }
        if op.receives.is_some() {
            step.receives.extend(sent.get(&op.unit()));
        }
        if op.sends.is_some() {
            step.sends.extend(op.unit().target().and_then(|target| sent.get(&target)));
        }
        rank.steps.push(step);
    }
    rank
}

/// Adds a block that a step allocates.
fn allocated(rank: &mut SimulatedRank, step: &mut SimulatedStep, bytes: u64) -> u32 {
    let block = rank.block_bytes.len() as u32;
    rank.block_bytes.push(bytes);
    step.allocates.push(block);
    block
}
