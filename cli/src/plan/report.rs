//! Everything that is printed, as structs. JSON has their fields; fields are only added.

use dormouse_parallel::pipeline;
use dormouse_schedule::forest::Forest;
use dormouse_schedule::{Machine, OpKind, Plan, Prediction, Residency, Verdict};
use serde::{Deserialize, Serialize};

use crate::Model;

/// Version of the JSON form.
const REPORT_VERSION: u32 = 1;

/// What `dormouse plan` says of a batch.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Report {
    /// Of the JSON form.
    pub version: u32,
    /// What there is, and what of it is shared.
    pub batch: BatchReport,
    /// The model, where one was given.
    pub model: Option<Model>,
    /// The machine, where one was given.
    pub machine: Option<Machine>,
    /// What the plan costs, where there is a model.
    pub plan: Option<PlanReport>,
    /// Shares of ranks, where asked for.
    pub ranks: Option<RanksReport>,
    /// Lists of stages, where asked for.
    pub pipeline: Option<PipelineReport>,
}

/// What there is, and what of it is shared.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct BatchReport {
    /// Sequences.
    pub sequences: u64,
    /// Groups that the files name.
    pub groups: u64,
    /// Trees: sequences of different trees share nothing.
    pub trees: u64,
    /// Nodes of all trees.
    pub nodes: u64,
    /// Those from which nothing goes on.
    pub leaves: u64,
    /// Nodes on the longest path.
    pub depth: u64,
    /// Tokens of the longest sequence.
    pub longest_tokens: u64,
    /// Tokens of all sequences.
    pub dense_tokens: u64,
    /// Tokens of all nodes: each that is shared once.
    pub tree_tokens: u64,
    /// Their ratio.
    pub compression: f64,
}

/// What the plan of one rank costs.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct PlanReport {
    /// Most rows of a microbatch.
    pub microbatch_rows: u32,
    /// What there is to do.
    pub ops: OpCounts,
    /// What becomes of what shared nodes save.
    pub residency: ResidencyCounts,
    /// Trees in which sharing saves work. Whether that pays, the prediction says, with time counted.
    pub trees_paying: u64,
    /// What it costs and saves.
    pub prediction: Prediction,
}

/// How many ops of each kind.
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

/// How many shared nodes do what with what they save for their backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ResidencyCounts {
    /// It stays on the device.
    pub keep: u64,
    /// It sleeps.
    pub sleep: u64,
    /// It is computed again.
    pub recompute: u64,
}

/// Shares of ranks. Seconds are there where the machine's `flops_per_s` is known.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RanksReport {
    /// The whole batch on one rank.
    pub uncut_s: Option<f64>,
    /// Until the last rank is done.
    pub largest_s: Option<f64>,
    /// The last rank's time over an even part of the whole.
    pub imbalance: f64,
    /// No shares of the same units have a smaller one.
    pub limit: f64,
    /// Nodes that ranks exchange.
    pub exchanges: u64,
    /// Each rank.
    pub ranks: Vec<RankReport>,
}

/// One rank's share.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct RankReport {
    /// Its sequences.
    pub sequences: u64,
    /// Rows it runs.
    pub rows: u64,
    /// Ops without rows of its own, so that all ranks run the same.
    pub dummy_ops: u64,
    /// Until its last op ends.
    pub finish_s: Option<f64>,
    /// That over an even part of the whole.
    pub of_even: f64,
}

/// Lists of pipeline stages.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PipelineReport {
    /// Prefixes with their microbatches.
    pub groups: u64,
    /// Parts of each stage.
    pub virtual_stages: u32,
    /// What the lists are expected to take.
    pub report: pipeline::PipelineReport,
    /// The most each stage holds.
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
        }
    }
}
