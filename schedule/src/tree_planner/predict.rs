//! The predicted cost of a plan, by counting.
//!
//! # Floating-point operations
//! A multiplication and an addition count as two, and backward as twice forward. A training step does
//! - `6` per row and linear weight of a layer, for every row run in it;
//! - `6` per row and head weight, for rows that have logits: one per response token;
//! - `12 · heads · head_dim` per layer and query–key pair that is not masked: two products, scores
//!   and output, of `head_dim` elements a head.
//!
//! | | rows | pairs of a layer | rows with logits |
//! |---|---|---|---|
//! | dense, sequence of T tokens | `T − 1` | `(T − 1)·T/2` | its labels |
//! | shared, node of n rows from position q on | `n` | `n·q + n·(n + 1)/2` | those with a label |
//!
//! A response of s tokens to a prompt of p + 1 tokens is a leaf of s rows from position p on. If the last
//! layer is dead, a node that scores nothing has no pairs there and runs `last_layer_prefix_weights` instead
//! of all weights of the layer. A recomputed node runs its forward, a third of its work, twice. Embeddings,
//! norms, activations, softmax, rotary embedding and the loss are not counted.
//!
//! # Seconds
//! Operations at the machine's rates of the kernels that run them, the overhead of each forward and backward, and
//! the stalls of what sleeps.
//!
//! # Bytes
//! Parameters, gradients and optimizer state are not counted. Sums are exact and saturate at 64 bits.

use serde::{Deserialize, Serialize};

use crate::cost::{BACKWARD_SHARE, Flops, PASSES, Work};
use crate::tree_planner::request::Request;
use crate::tree_planner::residency::{ResidencyChoice, ResidencyProblem};
use crate::tree_planner::times::Stalls;
use crate::{NodeId, Op, OpKind, Residency, Span};

/// Rounding error of a speedup, a ratio of sums of products.
const SPEEDUP_ROUNDING: f64 = 1e-9;

/// Whether sharing pays, and the reason if it does not.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Verdict {
    /// Less work than the dense run.
    Pays,
    /// No less work: the prefix is too short, or there is a single response.
    TooLittleShared,
    /// Less work, but phase B does not fit the device even with the whole prefix asleep.
    DoesNotFit {
        /// Bytes phase B needs.
        needed_bytes: u64,
        /// Bytes the device has.
        device_bytes: u64,
    },
    /// Less work, but the additional ops and stalls take longer than sharing saves.
    Overhead,
}

impl Verdict {
    /// Returns the verdict as one sentence.
    #[must_use]
    pub fn reason(self, speedup: f64) -> String {
        let work = format!("the dense run does {speedup:.2} times the work");
        match self {
            Self::Pays => work,
            Self::TooLittleShared => format!("{work}: nothing is saved"),
            Self::DoesNotFit { needed_bytes, device_bytes } => format!(
                "phase B needs {needed_bytes} bytes of {device_bytes}: try fewer microbatch tokens"
            ),
            Self::Overhead => format!("{work}: ops and stalls take longer than that saves"),
        }
    }
}

/// Predicted cost of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Prediction {
    /// Floating-point operations of the dense run.
    pub flops_dense: f64,
    /// Floating-point operations of the plan.
    pub flops_shared: f64,
    /// Their ratio.
    pub speedup: f64,
    /// Ratio of the rows of the dense run to the rows of the plan.
    pub token_ratio: f64,
    /// Bytes at the end of phase A with nothing asleep: what the prefix saved, K, V and their
    /// accumulators. For trees, the path that needs the most.
    pub peak_bytes_a: u64,
    /// Bytes in phase B with all that the prefix saved asleep: K, V, accumulators, the largest microbatch.
    pub peak_bytes_b: u64,
    /// Bytes at the start of phase C with nothing asleep: those of phase A, and logits of the prefix's
    /// own losses.
    pub peak_bytes_c: u64,
    /// Bytes that the prefix saves for its backward and that may sleep in phase B.
    pub sleep_bytes: u64,
    /// Lower bound on the seconds that phase C waits for waking layers, if the machine's rates are known:
    /// there is room for the wake window, and waking starts with the last microbatch. For trees, the sum
    /// over sleeping nodes, each waking since the last part of its subtree began.
    pub wake_stall_s: Option<f64>,
    /// Whether sharing pays.
    pub verdict: Verdict,
    /// Lower bound on the seconds that phase A waits for layers to fall asleep.
    #[serde(default)]
    pub sleep_stall_s: Option<f64>,
    /// Seconds of the dense run in microbatches of the same rows, if the machine's rate is known.
    #[serde(default)]
    pub seconds_dense: Option<f64>,
    /// Seconds of the plan, including stalls unless the runtime decides residency.
    #[serde(default)]
    pub seconds_shared: Option<f64>,
    /// Rows that run forward twice.
    #[serde(default)]
    pub recomputed_rows: u64,
    /// Peak device bytes of the ops of phases A, B and C.
    #[serde(default)]
    pub device_bytes: [u64; 3],
    /// Peak host bytes asleep in phases A, B and C.
    #[serde(default)]
    pub host_bytes: [u64; 3],
    /// Upper bound on what another choice of residency would save in the same order of ops, in the
    /// planner's cost (seconds if rates are known): 0 if the choice is optimal, `None` if unknown.
    #[serde(default)]
    pub residency_gap: Option<f64>,
}

/// Effect of sharing on one tree.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct TreeVerdict {
    /// Its root in the forest.
    pub root: NodeId,
    /// Sequences in it.
    pub sequences: u32,
    /// Floating-point operations of its dense run.
    pub flops_dense: f64,
    /// Floating-point operations of its part of the plan.
    pub flops_shared: f64,
    /// Whether sharing pays; `overhead` if the tree is planned as separate leaves.
    pub verdict: Verdict,
}

/// Returns `dense / shared`; 1 if they are equal, also for 0 of 0.
fn ratio(dense: f64, shared: f64) -> f64 {
    if dense == shared { 1.0 } else { dense / shared }
}

/// The inputs of a prediction.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Predictor<'a> {
    pub(crate) request: &'a Request<'a>,
    pub(crate) given: &'a ResidencyProblem<'a>,
    pub(crate) choice: &'a ResidencyChoice,
}

/// Work of a whole plan or of one tree.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    flops_dense: Flops,
    flops_shared: Flops,
    rows_dense: f64,
    rows_shared: f64,
    sequences: u32,
    inner_nodes: u32,
}

impl Predictor<'_> {
    /// Returns the predictions of the plan and of each tree, for microbatches of `microbatch_rows`, subtrees
    /// `dense` that run separately, and the plan's ops.
    pub(crate) fn predict(
        &self,
        microbatch_rows: u32,
        dense: &[bool],
        ops: &[Op],
    ) -> (Prediction, Vec<TreeVerdict>) {
        let mut trees = self.trees();
        self.add_dense(&mut trees);
        self.add_shared(&mut trees);
        let mut sums = Sums::default();
        for (_, tree) in &trees {
            sums.flops_dense += tree.flops_dense;
            sums.flops_shared += tree.flops_shared;
            sums.rows_dense += tree.rows_dense;
            sums.rows_shared += tree.rows_shared;
        }
        let prediction = self.prediction(&sums, microbatch_rows, dense, ops);
        let verdicts = trees.iter().map(|(root, sums)| self.verdict_of(*root, sums, dense));
        (prediction, verdicts.collect())
    }

    /// Returns the predicted seconds of the plan, if the machine's rate is known, without its ops.
    pub(crate) fn seconds(&self) -> Option<f64> {
        let mut trees = self.trees();
        self.add_shared(&mut trees);
        self.seconds_of(
            trees.iter().fold(Flops::default(), |sum, (_, tree)| sum + tree.flops_shared),
        )
    }

    fn seconds_of(&self, flops: Flops) -> Option<f64> {
        let model = &self.given.tree.model;
        let run_s = model.seconds(flops)? + model.op_s * self.passes();
        let [wake_s, sleep_s] = self.stalls();
        let stalls_s = wake_s.unwrap_or(0.0) + sleep_s.unwrap_or(0.0);
        Some(if self.request.options.runtime_residency { run_s } else { run_s + stalls_s })
    }

    fn trees(&self) -> Vec<(NodeId, Sums)> {
        self.request.forest.roots().map(|root| (root, Sums::default())).collect()
    }

    /// Returns the number of forwards and backwards.
    fn passes(&self) -> f64 {
        (self.ops() + self.given.items.microbatches.len()) as f64
    }

    /// Returns the number of ops without the last, [`OpKind::Done`].
    fn ops(&self) -> usize {
        let again = self.inner(Residency::Recompute).count();
        2 * self.given.tree.inner_nodes().count() + again + self.given.items.microbatches.len()
    }

    fn prediction(
        &self,
        sums: &Sums,
        microbatch_rows: u32,
        dense: &[bool],
        ops: &[Op],
    ) -> Prediction {
        debug_assert_eq!(self.ops() + 1, ops.len(), "ops are counted as they are written");
        let (flops_dense, flops_shared) = (sums.flops_dense.sum(), sums.flops_shared.sum());
        let speedup = ratio(flops_dense, flops_shared);
        let [wake_stall_s, sleep_stall_s] = self.stalls();
        let model = &self.given.tree.model;
        let dense_overhead_s = PASSES * model.op_s * self.dense_microbatches(microbatch_rows);
        let seconds_dense = model.seconds(sums.flops_dense).map(|run_s| run_s + dense_overhead_s);
        let seconds_shared = self.seconds_of(sums.flops_shared);
        let [peak_bytes_a, peak_bytes_b, peak_bytes_c, sleep_bytes] = self.bounds();
        let (device_bytes, host_bytes) = phases(ops);
        let device_bytes_max = self.request.options.planned_machine().device_bytes;
        let slower = seconds_dense.zip(seconds_shared).is_some_and(|(dense, ours)| ours >= dense);
        let verdict = if speedup <= 1.0 + SPEEDUP_ROUNDING {
            if dense.contains(&true) { Verdict::Overhead } else { Verdict::TooLittleShared }
        } else if self.request.options.runtime_residency
            && (1..peak_bytes_b).contains(&device_bytes_max)
        {
            let device_bytes = device_bytes_max;
            Verdict::DoesNotFit { needed_bytes: peak_bytes_b, device_bytes }
        } else if slower {
            Verdict::Overhead
        } else {
            Verdict::Pays
        };
        Prediction {
            flops_dense,
            flops_shared,
            speedup,
            token_ratio: ratio(sums.rows_dense, sums.rows_shared),
            peak_bytes_a,
            peak_bytes_b,
            peak_bytes_c,
            sleep_bytes,
            wake_stall_s,
            verdict,
            sleep_stall_s,
            seconds_dense,
            seconds_shared,
            recomputed_rows: self
                .inner(Residency::Recompute)
                .map(|id| self.given.tree.rows(id))
                .sum(),
            device_bytes,
            host_bytes,
            residency_gap: self.choice.gap.is_finite().then_some(self.choice.gap),
        }
    }

    /// Returns the nodes with children and this residency.
    fn inner(&self, residency: Residency) -> impl Iterator<Item = usize> + '_ {
        self.given.tree.inner_nodes().filter(move |id| self.choice.residency[*id] == residency)
    }

    /// Returns the microbatches of the dense run: one for each sequence longer than a microbatch, and full ones
    /// for the others.
    fn dense_microbatches(&self, microbatch_rows: u32) -> f64 {
        let (mut alone, mut together) = (0_u64, 0_u64);
        for ending in self.request.forest.endings() {
            let rows = ending.tokens - 1;
            if rows > microbatch_rows.into() { alone += 1 } else { together += rows }
        }
        (alone + together.div_ceil(microbatch_rows.into())) as f64
    }

    /// Returns the stalls of waking and of sleeping, if the rates are known.
    fn stalls(&self) -> [Option<f64>; 2] {
        let model = &self.given.tree.model;
        let sum = |rate: Option<f64>, of: fn(&Stalls) -> Option<f64>| {
            rate.zip(model.kernels)?;
            let stalls = self.inner(Residency::Sleep).map(|id| &self.given.costs.stalls[id]);
            Some(stalls.filter_map(of).fold(0.0, |sum, stall_s| sum + stall_s))
        };
        [
            sum(model.wake_bytes_per_s, |stalls| stalls.wake_s),
            sum(model.sleep_bytes_per_s, |stalls| stalls.sleep_s),
        ]
    }

    /// Returns the peaks with nothing asleep in A and C and all asleep in B, and the most bytes asleep at once.
    fn bounds(&self) -> [u64; 4] {
        let tree = self.given.tree;
        // Boundary and saved bytes of each node's path, including its own.
        let mut paths: Vec<(u64, u64)> = vec![(0, 0); tree.len() + 1];
        let mut bounds = [0_u64; 4];
        let mut most = |phase: usize, bytes: u64| bounds[phase] = bounds[phase].max(bytes);
        for id in tree.inner_nodes() {
            let above = paths[tree.above(id)];
            let bytes = tree.node_bytes(id);
            let boundary = above.0.saturating_add(bytes.boundary);
            let saved = above.1.saturating_add(bytes.saved);
            paths[id] = (boundary, saved);
            let awake = boundary.saturating_add(saved);
            most(0, awake);
            most(2, awake.saturating_add(bytes.logits));
            most(3, saved);
        }
        for (above, (boundary, _)) in paths.iter().enumerate() {
            for microbatch in self.given.items.of(above) {
                most(1, boundary.saturating_add(self.given.items.microbatch(microbatch).bytes));
            }
        }
        bounds
    }

    fn add_dense(&self, trees: &mut [(NodeId, Sums)]) {
        let (forest, model) = (self.request.forest, &self.request.options.model);
        let mut one = Span::default();
        for (ending, scoring) in forest.endings().iter().zip(self.request.scoring) {
            let sums = tree_of(trees, ending.node);
            let rows = ending.tokens - 1;
            let spans = scoring.spans(ending.tokens, &mut one);
            let labels = spans.iter().map(|span| span.count()).sum();
            sums.rows_dense += rows as f64;
            let work = Work::causal(rows, 0, labels);
            sums.flops_dense += work.flops(model, model.layers.into());
            sums.sequences += 1;
        }
    }

    fn add_shared(&self, trees: &mut [(NodeId, Sums)]) {
        for (id, node) in self.given.tree.nodes.iter().enumerate() {
            let sums = tree_of(trees, node.origin);
            sums.rows_shared += node.rows.count() as f64;
            if self.given.tree.is_leaf(id) {
                sums.flops_shared += self.given.tree.leaf_flops(id);
                continue;
            }
            sums.inner_nodes += 1;
            let flops = self.given.tree.node_flops(id);
            sums.flops_shared += flops;
            if self.choice.residency[id] == Residency::Recompute {
                sums.flops_shared += (1.0 - BACKWARD_SHARE) * flops;
            }
        }
    }

    fn verdict_of(&self, root: NodeId, sums: &Sums, dense: &[bool]) -> TreeVerdict {
        let end = self.request.forest.node(root).subtree_end as usize;
        let separate = dense.get(root.0 as usize..end).is_some_and(|tops| tops.contains(&true));
        let (flops_dense, flops_shared) = (sums.flops_dense.sum(), sums.flops_shared.sum());
        let verdict = if separate && sums.inner_nodes == 0 {
            Verdict::Overhead
        } else if ratio(flops_dense, flops_shared) <= 1.0 + SPEEDUP_ROUNDING {
            Verdict::TooLittleShared
        } else {
            Verdict::Pays
        };
        TreeVerdict { root, sequences: sums.sequences, flops_dense, flops_shared, verdict }
    }
}

/// Returns the peak device and host bytes of each phase.
fn phases(ops: &[Op]) -> ([u64; 3], [u64; 3]) {
    let (mut device, mut host) = ([0; 3], [0; 3]);
    for op in ops {
        let phase = match op.kind {
            OpKind::PrefixForward { .. } => 0,
            OpKind::Microbatch { .. } => 1,
            OpKind::ForwardAgain { .. } | OpKind::PrefixBackward { .. } => 2,
            OpKind::Done => continue,
        };
        device[phase] = op.device_bytes.max(device[phase]);
        host[phase] = op.host_bytes.max(host[phase]);
    }
    (device, host)
}

/// Returns the tree of a forest's node. Roots are in order.
fn tree_of(trees: &mut [(NodeId, Sums)], node: NodeId) -> &mut Sums {
    let after = trees.partition_point(|(root, _)| root.0 <= node.0);
    &mut trees[after.saturating_sub(1)].1
}
