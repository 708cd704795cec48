//! Conversion of a plan into steps, op by op.
//!
//! - A forward allocates boundary and saved tensors. A node that sleeps takes one step per layer; a layer
//!   falls asleep when the next is done.
//! - A microbatch allocates and frees its own tensors.
//! - A backward needs the saved tensors, then frees all. A node that sleeps takes one step per layer, last
//!   layer first, with a window of layers woken ahead.

use super::SimulateError;
use super::check::check_sizes;
use super::world::{BlockSleep, SimulatedRank, SimulatedStep};
use dormouse_residency::Tier;
use dormouse_schedule::cost::{BACKWARD_SHARE, Flops};
use dormouse_schedule::tree_planner::{CostModel, NodeBytes};
use dormouse_schedule::{Member, NodeId, Op, OpKind, Plan, Residency, Score, check_range};

/// The blocks of a node.
#[derive(Clone, Debug, Default)]
struct NodeBlocks {
    boundary: u32,
    /// Saved tensors: one block, or one per layer if the node sleeps.
    saved: Vec<u32>,
}

struct Replay<'a> {
    plan: &'a Plan,
    shape: CostModel,
    op_overhead_ns: u64,
    tier: Tier,
    /// Rows with logits, per node.
    scored: Vec<u64>,
    /// Whether the last layers of a node sleep too, per node.
    has_gap: Vec<bool>,
    held: Vec<NodeBlocks>,
    rank: SimulatedRank,
}

impl SimulatedRank {
    /// Converts a plan into the steps of one rank. Each op is a step; a node that sleeps in `tier` takes
    /// one step per layer, forward and backward. Rates, bounds and overhead are those of the plan's
    /// options.
    ///
    /// # Errors
    /// `Count` if `flops_per_s` is unknown, or above [`STEPS_MAX`](super::STEPS_MAX) or
    /// [`BLOCKS_MAX`](super::BLOCKS_MAX).
    pub fn of_plan(plan: &Plan, tier: Tier) -> Result<Self, SimulateError> {
        let machine = plan.options().planned_machine();
        check_range("flops_per_s", machine.flops_per_s, 1, u64::MAX)?;
        let nodes = plan.nodes().len();
        let mut replay = Replay {
            plan,
            shape: CostModel::new(plan.options()),
            op_overhead_ns: machine.op_overhead_ns,
            tier,
            scored: vec![0; nodes],
            has_gap: vec![false; nodes],
            held: vec![NodeBlocks::default(); nodes],
            rank: Self { machine, ..Self::default() },
        };
        plan.ops().iter().for_each(|op| replay.look_ahead(op));
        for op in plan.ops() {
            replay.op(op);
            check_sizes(replay.rank.steps.len(), replay.rank.block_bytes.len())?;
        }
        Ok(replay.rank)
    }
}

impl Replay<'_> {
    /// Collects what forwards need to know of later ops.
    fn look_ahead(&mut self, op: &Op) {
        if let Some(NodeId(node)) = op.asleep {
            self.has_gap[node as usize] = true;
        }
        match &op.kind {
            OpKind::PrefixBackward { node, .. } => {
                let rows = self.plan.nodes()[node.0 as usize].rows.count();
                self.scored[node.0 as usize] = scored(&op.scores, 0, rows);
            }
            OpKind::Microbatch { members, .. } => {
                for Member { node, rows, .. } in members {
                    self.scored[node.0 as usize] = scored(&op.scores, rows.begin, rows.end);
                }
            }
            _ => {}
        }
    }

    fn op(&mut self, op: &Op) {
        let boundary = |node: &NodeId| self.held[node.0 as usize].boundary;
        let mut step = SimulatedStep {
            needs: op.reads.iter().map(boundary).collect(),
            ..SimulatedStep::default()
        };
        if let Some(NodeId(node)) = op.waking {
            let saved = &self.held[node as usize].saved;
            let asleep = saved.len().saturating_sub(self.shape.window as usize);
            step.wakes = saved[asleep..].iter().rev().copied().collect();
        }
        match &op.kind {
            OpKind::PrefixForward { node, .. } => {
                step.compute_ns = self.node_ns(*node, 1.0 - BACKWARD_SHARE);
                self.forward(*node, op.residency.unwrap_or_default(), step);
            }
            OpKind::Microbatch { members, .. } => self.microbatch(members, step),
            OpKind::ForwardAgain { node, .. } => {
                step.compute_ns = self.node_ns(*node, 1.0 - BACKWARD_SHARE);
                let saved = self.block(self.keeping(*node).saved);
                self.held[node.0 as usize].saved = vec![saved];
                step.allocates.push(saved);
                self.rank.steps.push(step);
            }
            OpKind::PrefixBackward { node, .. } => self.backward(*node, &step),
            OpKind::Done => {}
        }
    }

    fn forward(&mut self, node: NodeId, residency: Residency, mut step: SimulatedStep) {
        let keeping = self.keeping(node);
        let live = self.shape.live_layers(self.scored[node.0 as usize]);
        let mut held = NodeBlocks { boundary: self.block(keeping.boundary), saved: Vec::new() };
        step.allocates.push(held.boundary);
        match residency {
            Residency::Sleep if live > 0 => {
                held.saved = (0..live).map(|_| self.block(keeping.layer)).collect();
                self.layers_forward(step, &held.saved, self.has_gap[node.0 as usize]);
                self.held[node.0 as usize] = held;
                return;
            }
            Residency::Keep | Residency::Sleep => {
                held.saved.push(self.block(keeping.saved));
                step.allocates.extend(&held.saved);
            }
            Residency::Recompute => {
                // Without a graph, one layer's tensors exist at a time.
                let layer = self.block(keeping.layer);
                step.allocates.push(layer);
                step.frees.push(layer);
            }
        }
        self.held[node.0 as usize] = held;
        self.rank.steps.push(step);
    }

    /// Adds one step per layer. A layer falls asleep when the next is done; the last `window` layers only
    /// if there is a gap before their backward.
    fn layers_forward(&mut self, mut first: SimulatedStep, saved: &[u32], has_gap: bool) {
        let stay = if has_gap { 0 } else { self.shape.window as usize };
        let leave = saved.len().saturating_sub(stay);
        let parts = parts(first.compute_ns, saved.len());
        for (layer, (&block, compute_ns)) in saved.iter().zip(parts).enumerate() {
            let mut step = SimulatedStep { compute_ns, ..std::mem::take(&mut first) };
            step.allocates.push(block);
            let last = layer + 1 == saved.len();
            let done = layer.saturating_sub(1)..if last { layer + 1 } else { layer };
            let asleep = done.filter(|layer| *layer < leave);
            step.sleeps =
                asleep.map(|at| BlockSleep { block: saved[at], tier: self.tier }).collect();
            self.rank.steps.push(step);
        }
    }

    fn microbatch(&mut self, members: &[Member], mut step: SimulatedStep) {
        let (mut bytes, mut flops) = (0_u64, Flops::default());
        for member in members {
            let leaf = member.node.0 as usize;
            let (rows, scored) = (self.plan.nodes()[leaf].rows, self.scored[leaf]);
            bytes = bytes.saturating_add(self.shape.leaf_bytes(rows.count(), scored));
            flops += self.shape.leaf_flops(rows, scored);
        }
        let block = self.block(bytes);
        // Forward and backward.
        step.compute_ns = self.ns(flops).saturating_add(self.op_overhead_ns);
        step.allocates.push(block);
        step.frees.push(block);
        self.rank.steps.push(step);
    }

    fn backward(&mut self, node: NodeId, like: &SimulatedStep) {
        let NodeBlocks { boundary, saved } = std::mem::take(&mut self.held[node.0 as usize]);
        let logits = self.block(self.keeping(node).logits);
        let compute_ns = self.node_ns(node, BACKWARD_SHARE);
        let window = self.shape.window as usize;
        let count = saved.len();
        for (at, compute_ns) in (0..count).rev().zip(parts(compute_ns, count)) {
            let first = at + 1 == count;
            let mut step = SimulatedStep { compute_ns, ..like.clone() };
            step.needs.extend([boundary, saved[at]]);
            step.frees.push(saved[at]);
            if first {
                // Logits of its own losses exist only before the layers below run.
                step.allocates.push(logits);
                step.frees.push(logits);
            } else {
                step.wakes.extend((at + 1).checked_sub(window).map(|next| saved[next]));
            }
            if at == 0 {
                step.frees.push(boundary);
            }
            self.rank.steps.push(step);
        }
    }

    fn keeping(&self, node: NodeId) -> NodeBytes {
        let rows = self.plan.nodes()[node.0 as usize].rows.count();
        self.shape.node_bytes(rows, self.scored[node.0 as usize])
    }

    fn block(&mut self, bytes: u64) -> u32 {
        self.rank.block_bytes.push(bytes);
        self.rank.block_bytes.len() as u32 - 1
    }

    /// Returns a share of the time of a node's forward and backward.
    fn node_ns(&self, node: NodeId, share: f64) -> u64 {
        let rows = self.plan.nodes()[node.0 as usize].rows;
        self.ns(share * self.shape.node_flops(rows, self.scored[node.0 as usize]))
    }

    fn ns(&self, flops: Flops) -> u64 {
        // A float cast saturates. `of_plan` has checked that the rate is known.
        let ns = (self.shape.seconds(flops).unwrap_or(0.0) * 1e9).round() as u64;
        ns.saturating_add(self.op_overhead_ns)
    }
}

/// Divides a time into `count` parts that add up to it.
fn parts(ns: u64, count: usize) -> impl Iterator<Item = u64> {
    let until = move |part: usize| (u128::from(ns) * part as u128 / count.max(1) as u128) as u64;
    (0..count).map(move |part| until(part + 1) - until(part))
}

/// Counts the rows of `begin..end` that score a label. Scores are ordered by member.
fn scored(scores: &[Score], begin: u64, end: u64) -> u64 {
    let until = |row: u64| scores.partition_point(|score| score.rows.begin < row);
    let own = &scores[until(begin)..until(end)];
    let mut spans: Vec<(u64, u64)> = own.iter().map(|it| (it.rows.begin, it.rows.end)).collect();
    spans.sort_unstable();
    let (mut rows, mut seen) = (0, begin);
    for (first, last) in spans {
        rows += last.saturating_sub(first.max(seen));
        seen = seen.max(last);
    }
    rows
}
