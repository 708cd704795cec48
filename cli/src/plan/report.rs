//! The report as structs, which define its JSON form; fields are only added.

use dormouse_parallel::pipeline;
use dormouse_schedule::forest::Forest;
use dormouse_schedule::{DevicePeak, Machine, OpKind, Plan, Prediction, Residency, Verdict};
use serde::{Deserialize, Serialize};

use crate::Model;

/// Version of the JSON form.
const REPORT_VERSION: u32 = 1;

/// The report of `dormouse plan`.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Version of the JSON form.
    pub version: u32,
    /// Size and sharing of the batch.
    pub batch: BatchReport,
    /// The model, if given.
    pub model: Option<Model>,
    /// The machine, if given.
    pub machine: Option<Machine>,
    /// The plan, if a model is given.
    pub plan: Option<PlanReport>,
    /// Shares of ranks, if requested.
    pub ranks: Option<RanksReport>,
    /// Pipeline stages, if requested.
    pub pipeline: Option<PipelineReport>,
    /// Two steps of rollouts, if requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rollouts: Option<RolloutsReport>,
}

/// Two steps of rollouts. A worker's tokens are those of the longest response of its share, as predicted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RolloutsReport {
    /// Earlier steps from which lengths are predicted: one per file.
    pub earlier_steps: u64,
    /// Prompts of a step.
    pub prompts: u64,
    /// Responses of a step.
    pub responses: u64,
    /// Groups of prompts of similar length.
    pub groups: u64,
    /// Tokens of both steps of the worker that ends last.
    pub tokens: u64,
    /// The same if every worker had the same share in both steps.
    pub same_order_tokens: u64,
    /// One per worker.
    pub workers: Vec<RolloutWorkerReport>,
}

/// One worker's shares, in the first step and in the second.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutWorkerReport {
    /// Group of prompts, from 0, the shortest.
    pub groups: [u32; 2],
    /// Tokens of its longest response.
    pub tokens: [u64; 2],
}

/// Size and sharing of a batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BatchReport {
    /// Number of sequences.
    pub sequences: u64,
    /// Number of groups in the files.
    pub groups: u64,
    /// Number of trees; sequences of different trees share nothing.
    pub trees: u64,
    /// Number of nodes.
    pub nodes: u64,
    /// Number of leaves.
    pub leaves: u64,
    /// Nodes on the longest path.
    pub depth: u64,
    /// Tokens of the longest sequence.
    pub longest_tokens: u64,
    /// Tokens of all sequences.
    pub dense_tokens: u64,
    /// Tokens of all nodes, counting shared tokens once.
    pub tree_tokens: u64,
    /// `dense_tokens` divided by `tree_tokens`.
    pub compression: f64,
}

/// The plan of one rank.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    /// Maximum rows per microbatch.
    pub microbatch_rows: u32,
    /// Number of ops.
    pub ops: OpCounts,
    /// Residency of shared nodes.
    pub residency: ResidencyCounts,
    /// Number of trees in which sharing saves work.
    pub trees_paying: u64,
    /// Predicted cost and speedup.
    pub prediction: Prediction,
    /// What holds device memory at the peak.
    #[serde(default)]
    pub device_peak: Option<DevicePeak>,
    /// The phase of that op: `A`, `B` or `C`.
    #[serde(default)]
    pub peak_phase: Option<char>,
}

/// Number of ops of each kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpCounts {
    /// Forwards of shared nodes.
    pub prefix_forwards: u64,
    /// Microbatches of leaves.
    pub microbatches: u64,
    /// Second forwards.
    pub forwards_again: u64,
    /// Backwards of shared nodes.
    pub node_backwards: u64,
}

/// Number of shared nodes by residency of their saved tensors.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidencyCounts {
    /// Kept on the device.
    pub keep: u64,
    /// Asleep.
    pub sleep: u64,
    /// Recomputed.
    pub recompute: u64,
}

/// Shares of ranks. Seconds require the machine's `flops_per_s`, and are predictions of the ranks' own plans;
/// exchanges save what balancing expects of them. Other figures are counted work, which balancing divides.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RanksReport {
    /// Time of the whole batch on one rank, in seconds: that of the plan.
    pub uncut_s: Option<f64>,
    /// Finish time of the last rank, in seconds.
    pub largest_s: Option<f64>,
    /// Work of the rank with the most divided by an even share.
    pub imbalance: f64,
    /// Lower bound on `imbalance` for the same units.
    pub limit: f64,
    /// Number of exchanged nodes.
    pub exchanges: u64,
    /// One per rank.
    pub ranks: Vec<RankReport>,
}

/// One rank's share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// Number of sequences.
    pub sequences: u64,
    /// Number of rows.
    pub rows: u64,
    /// Number of dummy ops.
    pub dummy_ops: u64,
    /// Finish time in seconds.
    pub finish_s: Option<f64>,
    /// Seconds until then that it computes and exchanges, without waits for other ranks.
    #[serde(default)]
    pub busy_s: Option<f64>,
    /// Work divided by an even share.
    pub of_even: f64,
}

/// Pipeline stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PipelineReport {
    /// Number of groups.
    pub groups: u64,
    /// Parts per stage.
    pub virtual_stages: u32,
    /// Figures of the op lists.
    pub report: pipeline::PipelineReport,
    /// End of the last op, with waits for copies of what sleeps, in nanoseconds.
    #[serde(default)]
    pub end_ns: u64,
    /// `(end − ideal) / ideal`.
    #[serde(default)]
    pub bubble: f64,
    /// Time that each stage computes, in nanoseconds.
    #[serde(default)]
    pub busy_ns: Vec<u64>,
    /// Peak memory of each stage.
    pub peaks: Vec<pipeline::StagePeak>,
}

impl Report {
    pub(super) fn of(forest: &Forest, groups: &[u32]) -> Self {
        let batch = BatchReport::of(forest, groups);
        Self { version: REPORT_VERSION, batch, ..Self::default() }
    }
}

impl BatchReport {
    fn of(forest: &Forest, groups: &[u32]) -> Self {
        // A parent has a smaller number.
        let mut depths: Vec<u32> = Vec::with_capacity(forest.nodes().len());
        for node in forest.nodes() {
            let above = node.parent.and_then(|parent| depths.get(parent.0 as usize));
            depths.push(above.map_or(1, |above| above + 1));
        }
        Self {
            sequences: forest.endings().len() as u64,
            groups: groups.iter().max().map_or(0, |last| u64::from(*last) + 1),
            trees: forest.roots().count() as u64,
            nodes: forest.nodes().len() as u64,
            leaves: forest.leaves().count() as u64,
            depth: depths.into_iter().max().unwrap_or(0).into(),
            longest_tokens: forest.endings().iter().map(|end| end.tokens).max().unwrap_or(0),
            dense_tokens: forest.dense_tokens(),
            tree_tokens: forest.tree_tokens(),
            compression: forest.compression(),
        }
    }
}

impl PlanReport {
    pub(super) fn of(plan: &Plan) -> Self {
        let (mut ops, mut residency) = (OpCounts::default(), ResidencyCounts::default());
        for op in plan.ops() {
            match &op.kind {
                OpKind::PrefixForward { .. } => {
                    ops.prefix_forwards += 1;
                    match op.residency {
                        Some(Residency::Sleep) => residency.sleep += 1,
                        Some(Residency::Recompute) => residency.recompute += 1,
                        _ => residency.keep += 1,
                    }
                }
                OpKind::Microbatch { .. } => ops.microbatches += 1,
                OpKind::ForwardAgain { .. } => ops.forwards_again += 1,
                OpKind::PrefixBackward { .. } => ops.node_backwards += 1,
                _ => {}
            }
        }
        let paying = plan.trees().iter().filter(|tree| tree.verdict == Verdict::Pays);
        Self {
            microbatch_rows: plan.microbatch_rows(),
            ops,
            residency,
            trees_paying: paying.count() as u64,
            prediction: plan.predict(),
            device_peak: plan.device_peak(),
            peak_phase: peak_phase(plan),
        }
    }
}

/// Returns the phase in which the plan needs the most device memory.
fn peak_phase(plan: &Plan) -> Option<char> {
    let at = plan.device_peak()?.op as usize;
    match plan.ops().get(at)?.kind {
        OpKind::PrefixForward { .. } => Some('A'),
        OpKind::Microbatch { .. } => Some('B'),
        OpKind::ForwardAgain { .. } | OpKind::PrefixBackward { .. } => Some('C'),
        OpKind::Done => None,
    }
}
