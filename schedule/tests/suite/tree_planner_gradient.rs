//! Runs a small causal model by a plan's ops and compares gradients with the dense run in FP64.

use std::collections::BTreeMap;

use crate::batch::Batch;
use crate::tree_planner_support::{batch, device_limits, labels, sequences};
use dormouse_schedule::*;
use proptest::prelude::*;

/// Two layers of linear attention on one channel, and a head.
const PARAMETERS: [f64; 7] = [0.9, -0.7, 1.1, 0.6, 0.8, -1.2, 0.75];
/// K and V of a row in both layers.
type Boundary = [f64; 4];

/// Scalars, with the inputs and derivatives of each.
#[derive(Default)]
struct Tape {
    values: Vec<f64>,
    from: Vec<[(usize, f64); 2]>,
}

impl Tape {
    fn push(&mut self, value: f64, from: [(usize, f64); 2]) -> usize {
        self.values.push(value);
        self.from.push(from);
        self.values.len() - 1
    }

    fn leaf(&mut self, value: f64) -> usize {
        self.push(value, [(0, 0.0); 2])
    }

    fn add(&mut self, a: usize, b: usize) -> usize {
        self.push(self.values[a] + self.values[b], [(a, 1.0), (b, 1.0)])
    }

    fn mul(&mut self, a: usize, b: usize) -> usize {
        let (x, y) = (self.values[a], self.values[b]);
        self.push(x * y, [(a, y), (b, x)])
    }

    fn tanh(&mut self, a: usize) -> usize {
        let value = self.values[a].tanh();
        self.push(value, [(a, 1.0 - value * value), (a, 0.0)])
    }

    /// Gradients of all, from seeds.
    fn backward(&self, seeds: &[(usize, f64)]) -> Vec<f64> {
        let mut gradients = vec![0.0; self.values.len()];
        seeds.iter().for_each(|(at, seed)| gradients[*at] += seed);
        for at in (0..gradients.len()).rev() {
            for (from, derivative) in self.from[at] {
                gradients[from] += gradients[at] * derivative;
            }
        }
        gradients
    }
}

/// Rows after one another on a tape.
struct Run {
    tape: Tape,
    parameters: [usize; 7],
    /// K and V of all readable rows: those of the path, then its own.
    keys: Vec<[usize; 4]>,
    first: usize,
    outputs: Vec<usize>,
}

impl Run {
    /// Rows of `tokens` from position `before.len()` on, reading what lies before.
    fn new(before: &[Boundary], tokens: &[u32]) -> Self {
        let mut tape = Tape::default();
        let parameters = PARAMETERS.map(|value| tape.leaf(value));
        let keys = before.iter().map(|row| row.map(|value| tape.leaf(value))).collect();
        let mut run = Self { tape, parameters, keys, first: before.len(), outputs: Vec::new() };
        tokens.iter().for_each(|token| run.row(*token));
        run
    }

    fn row(&mut self, token: u32) {
        let position = self.keys.len() as f64;
        let embedding = (1.3 * f64::from(token) + 0.7 * position).sin() + 0.2;
        let mut hidden = self.tape.leaf(embedding);
        let mut own = [0; 4];
        for layer in 0..2 {
            let [q, k, v] = [0, 1, 2].map(|at| self.parameters[3 * layer + at]);
            let key = self.tape.mul(k, hidden);
            own[2 * layer] = self.tape.tanh(key);
            own[2 * layer + 1] = self.tape.mul(v, hidden);
            let query = self.tape.mul(q, hidden);
            let scale = self.tape.leaf(1.0 / (position + 1.0));
            let all: Vec<[usize; 4]> = self.keys.iter().copied().chain([own]).collect();
            for row in all {
                let score = self.tape.mul(query, row[2 * layer]);
                let score = self.tape.mul(score, scale);
                let part = self.tape.mul(score, row[2 * layer + 1]);
                hidden = self.tape.add(hidden, part);
            }
        }
        self.keys.push(own);
        self.outputs.push(self.tape.mul(self.parameters[6], hidden));
    }

    /// The seed of a row's output for one label: squared distance to a target.
    fn seed(&self, row: usize, label: u32, weight: f64) -> (usize, f64) {
        let output = self.outputs[row];
        (output, weight * (self.tape.values[output] - 0.3 * f64::from(label) - 0.1))
    }

    fn boundary(&self) -> Vec<Boundary> {
        self.keys[self.first..].iter().map(|row| row.map(|at| self.tape.values[at])).collect()
    }
}

fn add_parameters(sum: &mut [f64; 7], run: &Run, gradients: &[f64]) {
    sum.iter_mut().zip(run.parameters).for_each(|(sum, at)| *sum += gradients[at]);
}

fn dense(batch: &Batch, sequences: &[Vec<u32>]) -> [f64; 7] {
    let mut sum = [0.0; 7];
    for (scoring, tokens) in batch.scoring.iter().zip(sequences) {
        let run = Run::new(&[], &tokens[..tokens.len() - 1]);
        let seed =
            |label: u64| run.seed(label as usize - 1, tokens[label as usize], scoring.weight);
        let seeds: Vec<(usize, f64)> =
            labels(scoring, tokens.len() as u64).into_iter().map(seed).collect();
        add_parameters(&mut sum, &run, &run.tape.backward(&seeds));
    }
    sum
}

/// A trainer's state of one node.
struct Live {
    boundary: Vec<Boundary>,
    sums: Vec<Boundary>,
    graph: Option<Run>,
}

struct Trainer<'a> {
    plan: &'a Plan,
    sequences: &'a [Vec<u32>],
    live: BTreeMap<u32, Live>,
    gradient: [f64; 7],
}

impl Trainer<'_> {
    fn path(&self, from: Option<NodeId>) -> Vec<u32> {
        let nodes = self.plan.nodes();
        let up = std::iter::successors(from, |id| nodes[id.0 as usize].parent);
        let mut path: Vec<u32> = up.map(|id| id.0).collect();
        path.reverse();
        path
    }

    fn start(&self, reads: Option<NodeId>, node: NodeId) -> Run {
        let path = self.path(reads);
        let before: Vec<Boundary> =
            path.iter().flat_map(|id| self.live[id].boundary.iter().copied()).collect();
        let node = &self.plan.nodes()[node.0 as usize];
        let rows = node.rows.begin as usize..node.rows.end as usize;
        Run::new(&before, &self.sequences[node.sequence as usize][rows])
    }

    /// Backward of a run, into parameters and the sums of its path.
    fn back(&mut self, reads: Option<NodeId>, run: &Run, seeds: &[(usize, f64)]) {
        let gradients = run.tape.backward(seeds);
        add_parameters(&mut self.gradient, run, &gradients);
        let mut keys = run.keys.iter();
        for id in self.path(reads) {
            for sums in &mut self.live.get_mut(&id).unwrap().sums {
                let row = keys.next().unwrap();
                sums.iter_mut().zip(row).for_each(|(sum, at)| *sum += gradients[*at]);
            }
        }
    }

    fn op(&mut self, op: &Op) {
        match &op.kind {
            OpKind::PrefixForward { node, .. } => {
                let run = self.start(op.reads, *node);
                let boundary = run.boundary();
                let sums = vec![[0.0; 4]; boundary.len()];
                let graph = (op.residency != Some(Residency::Recompute)).then_some(run);
                self.live.insert(node.0, Live { boundary, sums, graph });
            }
            OpKind::ForwardAgain { node, .. } => {
                let run = self.start(op.reads, *node);
                self.live.get_mut(&node.0).unwrap().graph = Some(run);
            }
            OpKind::Microbatch { members, .. } => {
                for member in members {
                    let run = self.start(op.reads, member.node);
                    let own = op.scores.iter().filter(|score| {
                        member.rows.begin <= score.rows.begin && score.rows.end <= member.rows.end
                    });
                    let seeds = self.seeds(&run, own, member.rows.begin);
                    self.back(op.reads, &run, &seeds);
                }
            }
            OpKind::PrefixBackward { node, .. } => {
                let Live { sums, graph, .. } = self.live.remove(&node.0).unwrap();
                let run = graph.unwrap();
                let mut seeds = self.seeds(&run, op.scores.iter(), 0);
                for (row, sums) in run.keys[run.first..].iter().zip(&sums) {
                    seeds.extend(row.iter().copied().zip(sums.iter().copied()));
                }
                self.back(op.reads, &run, &seeds);
            }
            other => panic!("unknown op {other:?}"),
        }
    }

    fn seeds<'s>(
        &self,
        run: &Run,
        scores: impl Iterator<Item = &'s Score>,
        first: u64,
    ) -> Vec<(usize, f64)> {
        let mut seeds = Vec::new();
        for score in scores {
            let tokens = &self.sequences[score.sequence as usize];
            for (row, label) in (score.rows.begin..score.rows.end).zip(score.first_label..) {
                let label = tokens[label as usize];
                seeds.push(run.seed((row - first) as usize, label, score.weight));
            }
        }
        seeds
    }
}

fn planned(plan: &Plan, sequences: &[Vec<u32>]) -> [f64; 7] {
    let mut trainer = Trainer { plan, sequences, live: BTreeMap::new(), gradient: [0.0; 7] };
    for op in plan.ops().iter().filter(|op| op.kind != OpKind::Done) {
        trainer.op(op);
    }
    assert!(trainer.live.is_empty());
    trainer.gradient
}

fn distance(a: &[f64; 7], b: &[f64; 7]) -> f64 {
    a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
}

proptest! {
    /// The gradient is the same with sleep, recomputing, blocks and separate leaves.
    #[test]
    fn the_ops_give_the_dense_gradient(
        sequences in sequences(),
        losses in prop::collection::vec(any::<u32>(), 1..8),
        microbatch_rows in 1_u32..20,
        block_rows in 0_u64..4,
        op_overhead_ns in prop::sample::select(vec![0_u64, 100_000]),
        rate in prop::sample::select(vec![1_u64, 1_000_000]),
    ) {
        let mut batch = batch(&sequences, &losses, microbatch_rows);
        batch.block_rows = block_rows;
        batch.machine = Some(Machine {
            flops_per_s: 1_000_000_000, op_overhead_ns,
            sleep_bytes_per_s: rate, wake_bytes_per_s: rate,
            ..Machine::default()
        });
        let wanted = dense(&batch, &sequences);
        let size = wanted.iter().map(|it| it * it).sum::<f64>().sqrt();
        for device_bytes in device_limits(&batch) {
            batch.device_bytes = device_bytes;
            let Ok(plan) = batch.plan() else { break };
            let apart = distance(&planned(&plan, &sequences), &wanted);
            prop_assert!(apart <= 1e-12 * size + 1e-15, "{} of {}", apart, size);
        }
    }
}

/// A lost sum or a weight counted twice changes the gradient by much more than the tolerance.
#[test]
fn the_distance_detects_lost_gradients() {
    let sequences = [vec![0, 1, 2, 1, 0], vec![0, 1, 2, 2], vec![0, 1, 2, 1, 2]];
    let mut batch = batch(&sequences, &[0], 8);
    let wanted = dense(&batch, &sequences);
    let plan = batch.plan().unwrap();
    assert!(
        plan.ops().iter().filter(|op| matches!(op.kind, OpKind::PrefixBackward { .. })).count()
            == 2
    );
    assert!(distance(&planned(&plan, &sequences), &wanted) < 1e-14);
    batch.scoring[1].weight *= 2.0;
    let other = batch.plan().unwrap();
    assert!(distance(&planned(&other, &sequences), &wanted) > 1e-3);
}
