//! A flat group's plan as steps, layer by layer.
//!
//! ```text
//!   A   layer 0 … n−1 forward   each makes its saved bytes; layer l−1 is told to sleep after layer l
//!   B   microbatch … microbatch             each makes and frees its own; reaching the last wakes a window
//!   C   layer n−1 … 0 backward  each needs its saved bytes, then frees them; the next one is woken
//! ```

use super::SimulateError;
use super::world::{BlockSleep, SimulatedRank, SimulatedStep, SleepTier};
use dormouse_schedule::cost::{BACKWARD_SHARE, Work};
use dormouse_schedule::{Machine, OpKind, Plan, Spec};

/// Placement of the prefix's saved bytes between phases A and C.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PrefixSleep {
    /// They stay.
    Never,
    /// They sleep there, layer by layer.
    In(SleepTier),
}

/// Operations of a machine in nanoseconds, rounded.
#[derive(Clone, Copy)]
struct Clock(Machine);

impl Clock {
    fn ns(self, flops: f64) -> u64 {
        // A float cast saturates.
        let ns = (flops / self.0.flops_per_s as f64 * 1e9).round() as u64;
        ns.saturating_add(self.0.op_overhead_ns)
    }
}

/// Sizes and times of one group.
struct Flat<'a> {
    spec: &'a Spec,
    clock: Clock,
    /// Layers whose saved bytes are kept.
    live: u32,
    window: u32,
    /// K, V and accumulators of all layers.
    boundary_bytes: u64,
    layer_bytes: u64,
    microbatch_row_bytes: u64,
    /// Rows of each microbatch's members.
    microbatches: Vec<Vec<u64>>,
}

impl<'a> Flat<'a> {
    fn new(plan: &'a Plan) -> Result<Self, SimulateError> {
        let spec = plan.spec().ok_or(SimulateError::Unknown { what: "spec of a flat group" })?;
        let machine = spec.machine.unwrap_or_default();
        if machine.flops_per_s == 0 {
            return Err(SimulateError::Unknown { what: "flops_per_s" });
        }
        let (mut microbatches, mut window) = (Vec::new(), 1);
        for op in plan.ops() {
            match &op.kind {
                OpKind::Microbatch { members, .. } => {
                    microbatches.push(members.iter().map(|member| member.rows.count()).collect());
                }
                OpKind::PrefixBackward { wake_window_layers, .. } => window = *wake_window_layers,
                _ => {}
            }
        }
        let live = spec.model.layers - u32::from(spec.last_layer_dead);
        let prediction = plan.predict();
        let boundary_bytes = prediction.peak_bytes_a - prediction.sleep_bytes;
        let rows = |microbatch: &Vec<u64>| microbatch.iter().sum::<u64>();
        let most_rows = microbatches.iter().map(rows).max().unwrap_or(0);
        Ok(Self {
            spec,
            clock: Clock(machine),
            live,
            window: window.max(1),
            boundary_bytes,
            layer_bytes: prediction.sleep_bytes / u64::from(live.max(1)),
            microbatch_row_bytes: (prediction.peak_bytes_b - boundary_bytes) / most_rows.max(1),
            microbatches,
        })
    }

    /// Forward and backward of one layer's prefix rows, and of a dead layer's.
    fn layer_ns(&self, live: bool) -> [u64; 2] {
        let model = &self.spec.model;
        let rows = self.spec.prompt.count() - 1;
        let flops = if live {
            Work::causal(rows, 0, 0).flops(model, 1.0)
        } else {
            6.0 * rows as f64 * model.last_layer_prefix_weights as f64
        };
        [1.0 - BACKWARD_SHARE, BACKWARD_SHARE].map(|share| self.clock.ns(share * flops))
    }

    fn microbatch_ns(&self, members: &[u64]) -> u64 {
        let prefix = self.spec.prompt.count() - 1;
        let layers = f64::from(self.spec.model.layers);
        let flops = members
            .iter()
            .map(|rows| Work::causal(*rows, prefix, *rows).flops(&self.spec.model, layers));
        self.clock.ns(flops.sum())
    }

    /// Layers asleep before phase C, in the order it needs them, that are woken when the step is
    /// reached that needs the `consumed`-th.
    fn woken(&self, consumed: u32) -> Vec<u32> {
        let next = (self.live - 1 - consumed).checked_sub(self.window - 1);
        next.into_iter().collect()
    }
}

impl SimulatedRank {
    /// What one rank does for a flat group. Layer l's saved bytes are block l, then come the boundary
    /// tensors of all layers, then each microbatch's bytes; steps are layers forward, microbatches, layers
    /// backward. The spec's machine says rates, bounds and overhead.
    ///
    /// # Errors
    /// `Unknown` where the machine's rate of operations is, and of a plan of no flat group.
    pub fn flat_group(plan: &Plan, asleep: PrefixSleep) -> Result<Self, SimulateError> {
        let flat = Flat::new(plan)?;
        let boundary = flat.live;
        let mut block_bytes = vec![flat.layer_bytes; flat.live as usize];
        block_bytes.push(flat.boundary_bytes);
        let mut steps = forward(&flat, asleep, boundary);
        for (block, microbatch) in (boundary + 1..).zip(&flat.microbatches) {
            block_bytes
                .push(microbatch.iter().sum::<u64>().saturating_mul(flat.microbatch_row_bytes));
            steps.push(SimulatedStep {
                compute_ns: flat.microbatch_ns(microbatch),
                needs: vec![boundary],
                allocates: vec![block],
                frees: vec![block],
                ..SimulatedStep::default()
            });
        }
        if asleep != PrefixSleep::Never
            && let Some(last_microbatch) = steps.last_mut()
        {
            let first = flat.live.saturating_sub(flat.window);
            last_microbatch.wakes = (first..flat.live).rev().collect();
        }
        backward(&flat, asleep, boundary, &mut steps);
        Ok(Self { machine: flat.clock.0, block_bytes, steps })
    }
}

fn forward(flat: &Flat<'_>, asleep: PrefixSleep, boundary: u32) -> Vec<SimulatedStep> {
    let mut steps = Vec::new();
    for layer in 0..flat.spec.model.layers {
        let live = layer < flat.live;
        let made = [(layer == 0).then_some(boundary), live.then_some(layer)];
        let last = layer + 1 == flat.spec.model.layers;
        // A layer's output is the next one's input: it sleeps when that one is done.
        let done = [layer.checked_sub(1), (last && live).then_some(layer)];
        let sleeps = match asleep {
            PrefixSleep::Never => Vec::new(),
            PrefixSleep::In(tier) => {
                done.into_iter().flatten().map(|block| BlockSleep { block, tier }).collect()
            }
        };
        steps.push(SimulatedStep {
            compute_ns: flat.layer_ns(live)[0],
            allocates: made.into_iter().flatten().collect(),
            sleeps,
            ..SimulatedStep::default()
        });
    }
    steps
}

fn backward(flat: &Flat<'_>, asleep: PrefixSleep, boundary: u32, steps: &mut Vec<SimulatedStep>) {
    for layer in (0..flat.spec.model.layers).rev() {
        let live = layer < flat.live;
        let consumed = flat.live.saturating_sub(layer + 1);
        let wakes = if asleep != PrefixSleep::Never && live && consumed > 0 {
            flat.woken(consumed)
        } else {
            Vec::new()
        };
        let gone = [live.then_some(layer), (layer == 0).then_some(boundary)];
        steps.push(SimulatedStep {
            compute_ns: flat.layer_ns(live)[1],
            needs: [live.then_some(layer), Some(boundary)].into_iter().flatten().collect(),
            frees: gone.into_iter().flatten().collect(),
            wakes,
            ..SimulatedStep::default()
        });
    }
}
