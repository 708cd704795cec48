//! Bytes, operations and seconds of rows, for a model and a machine. Sums of bytes saturate at 64 bits.

use dormouse_residency::WindowedWake;

use crate::cost::{
    ACCUMULATOR_BYTES_MIN, BACKWARD_SHARE, BOUNDARY_SLOTS, Flops, KernelRates, Work,
};
use crate::tree_planner::request::PlanOptions;
use crate::{ModelShape, Residency, Span};

/// Copies of a microbatch's logits that exist at once: logits, log-softmax and gradient.
const LOGIT_COPIES: u64 = 3;
const NANOSECONDS: f64 = 1e9;

/// Costs per row, for a model and a machine.
#[derive(Clone, Copy, Debug)]
pub struct CostModel {
    model: ModelShape,
    last_layer_dead: bool,
    /// Layers of a sleeping node that are awake at once.
    pub window: u32,
    boundary_row: u64,
    logits_row: u64,
    /// Operations per second, if known.
    pub(crate) kernels: Option<KernelRates>,
    pub(crate) sleep_bytes_per_s: Option<f64>,
    pub(crate) wake_bytes_per_s: Option<f64>,
    /// Overhead of a forward or a backward in seconds.
    pub(crate) op_s: f64,
}

/// Device bytes of a node from its forward to its backward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct NodeBytes {
    /// K, V and their gradient accumulators.
    pub boundary: u64,
    /// Tensors saved for its backward, all layers.
    pub saved: u64,
    /// Saved tensors of the layers awake at once while it sleeps.
    pub window: u64,
    /// Saved tensors of one layer, the peak of a forward without a graph.
    pub layer: u64,
    /// Logits of its own losses, held in its backward.
    pub logits: u64,
}

impl NodeBytes {
    /// Returns the bytes held while a part of its subtree runs; `edge` for the first or last part, during which
    /// a sleeping node holds its window.
    pub(crate) fn held(&self, residency: Residency, edge: bool) -> u64 {
        let saved = match residency {
            Residency::Keep => self.saved,
            Residency::Sleep if edge => self.window,
            Residency::Sleep | Residency::Recompute => 0,
        };
        self.boundary.saturating_add(saved)
    }

    /// Returns the bytes of its forward.
    pub(crate) fn forward(&self, residency: Residency) -> u64 {
        self.boundary.saturating_add(match residency {
            Residency::Keep => self.saved,
            Residency::Sleep => self.window,
            Residency::Recompute => self.layer,
        })
    }

    /// Returns the bytes of its second forward.
    pub(crate) fn again(&self) -> u64 {
        self.boundary.saturating_add(self.saved)
    }

    /// Returns the bytes of its backward.
    pub(crate) fn backward(&self, residency: Residency) -> u64 {
        let saved = if residency == Residency::Sleep { self.window } else { self.saved };
        self.boundary.saturating_add(saved).saturating_add(self.logits)
    }

    /// Returns the peak bytes of its forwards and backward.
    pub(crate) fn own(&self, residency: Residency) -> u64 {
        // A second forward needs no more than the backward.
        self.forward(residency).max(self.backward(residency))
    }
}

fn known(rate: u64) -> Option<f64> {
    (rate > 0).then_some(rate as f64)
}

impl CostModel {
    /// Returns the cost model of a plan's options.
    #[must_use]
    pub fn new(options: &PlanOptions) -> Self {
        let PlanOptions { model, last_layer_dead, vocab, .. } = *options;
        let machine = options.machine.unwrap_or_default();
        let wide = |value: u32| u64::from(value);
        let element = model.dtype_bytes + model.dtype_bytes.max(ACCUMULATOR_BYTES_MIN);
        let boundary_row = [model.layers, model.kv_heads, model.head_dim, element]
            .into_iter()
            .fold(BOUNDARY_SLOTS, |bytes, factor| bytes.saturating_mul(wide(factor)));
        Self {
            model,
            last_layer_dead,
            window: options.window_layers(),
            boundary_row,
            logits_row: (LOGIT_COPIES * wide(model.dtype_bytes)).saturating_mul(wide(vocab)),
            kernels: KernelRates::of(&machine),
            sleep_bytes_per_s: known(machine.sleep_bytes_per_s),
            wake_bytes_per_s: known(machine.wake_bytes_per_s),
            op_s: machine.op_overhead_ns as f64 / NANOSECONDS,
        }
    }

    /// Returns the number of layers that run whole: the last may be dead if no row is scored.
    #[must_use]
    pub fn live_layers(&self, scored: u64) -> u32 {
        self.model.layers - u32::from(self.last_layer_dead && scored == 0)
    }

    /// Returns the device bytes of a node with `rows` rows, of which `scored` have logits.
    #[must_use]
    pub fn node_bytes(&self, rows: u64, scored: u64) -> NodeBytes {
        let layer = rows.saturating_mul(self.model.saved_bytes_per_token_layer);
        let live = u64::from(self.live_layers(scored));
        let layers = |count: u64| layer.saturating_mul(count.min(live));
        NodeBytes {
            boundary: rows.saturating_mul(self.boundary_row),
            saved: layers(live),
            window: layers(self.window.into()),
            layer: layers(1),
            logits: scored.saturating_mul(self.logits_row),
        }
    }

    /// Returns the bytes of a leaf's rows in a microbatch.
    #[must_use]
    pub fn leaf_bytes(&self, rows: u64, scored: u64) -> u64 {
        let saved = rows.saturating_mul(self.model.saved_bytes_per_token_layer);
        let saved = saved.saturating_mul(self.model.layers.into());
        saved.saturating_add(scored.saturating_mul(self.logits_row))
    }

    /// Returns the operations of a leaf's rows, forward and backward.
    #[must_use]
    pub fn leaf_flops(&self, rows: Span, scored: u64) -> Flops {
        Work::causal(rows.count(), rows.begin, scored).flops(&self.model, self.model.layers.into())
    }

    /// Returns the operations of a node's rows, forward and backward.
    #[must_use]
    pub fn node_flops(&self, rows: Span, scored: u64) -> Flops {
        let live = self.live_layers(scored);
        let whole = Work::causal(rows.count(), rows.begin, scored);
        let dead = f64::from(self.model.layers - live);
        let mut flops = whole.flops(&self.model, live.into());
        flops.linear +=
            6.0 * rows.count() as f64 * self.model.last_layer_prefix_weights as f64 * dead;
        flops
    }

    /// Returns the seconds of operations, if the rates are known.
    #[must_use]
    pub fn seconds(&self, flops: Flops) -> Option<f64> {
        self.kernels.map(|rates| flops.seconds(&rates))
    }

    /// Returns the seconds that the forward waits for layers to leave, if the rates are known: the wake formula
    /// with time reversed. `lead_s` is the time in which the last layers leave.
    pub(crate) fn sleep_stall_s(&self, rows: Span, scored: u64, lead_s: f64) -> Option<f64> {
        self.stall_s(rows, scored, lead_s, self.sleep_bytes_per_s?, 1.0 - BACKWARD_SHARE)
    }

    /// Returns the seconds that the backward waits for layers to return, if the rates are known.
    pub(crate) fn wake_stall_s(&self, rows: Span, scored: u64, lead_s: f64) -> Option<f64> {
        self.stall_s(rows, scored, lead_s, self.wake_bytes_per_s?, BACKWARD_SHARE)
    }

    fn stall_s(
        &self,
        rows: Span,
        scored: u64,
        lead_s: f64,
        bytes_per_s: f64,
        share: f64,
    ) -> Option<f64> {
        let layer_bytes = rows.count() as f64 * self.model.saved_bytes_per_token_layer as f64;
        let layer_flops = Work::causal(rows.count(), rows.begin, 0).flops(&self.model, 1.0);
        let wake = WindowedWake {
            layers: self.live_layers(scored),
            window: self.window,
            load_s: layer_bytes / bytes_per_s,
            compute_s: share * self.seconds(layer_flops)?,
            lead_s,
        };
        Some(wake.stall_s())
    }
}
