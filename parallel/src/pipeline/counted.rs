//! Conversion of flat groups' plans into a pipeline, with counted costs.

use super::PipelineError;
use super::chunks::PERMILLE;
use super::spec::{
    NS_MAX, Pipeline, PipelineGroup, PipelineMicrobatch, PipelineRates, RowBytes, StageBytes,
    StageShare,
};
use dormouse_schedule::cost::{
    ACCUMULATOR_BYTES_MIN, BACKWARD_SHARE, BOUNDARY_SLOTS, Flops, KernelRates, Work,
};
use dormouse_schedule::tree_planner::CostModel;
use dormouse_schedule::{Machine, ModelShape, NodeId, OpKind, Plan, check_range};

/// A model, the rates of a machine, and the layers per part, which may be fractional.
#[derive(Clone, Copy)]
struct Counter {
    model: ModelShape,
    kernels: KernelRates,
    layers: f64,
}

impl Counter {
    fn flops(&self, work: Work) -> Flops {
        work.flops(&self.model, self.layers)
    }

    fn ns(&self, flops: Flops) -> u64 {
        // A float cast saturates.
        ((flops.seconds(&self.kernels) * 1e9).round() as u64).min(NS_MAX)
    }

    fn share(&self, rows: u64, part: f64) -> StageShare {
        let all = part * self.flops(Work::causal(rows, 0, 0));
        let linear = Flops { linear: all.linear, ..Flops::default() };
        StageShare { linear_ns: self.ns(linear), pairs_ns: self.ns(Flops { linear: 0.0, ..all }) }
    }

    fn group(&self, plan: &Plan) -> PipelineGroup {
        let prefix_rows = plan.nodes()[0].rows.count();
        let microbatches = plan.ops().iter().filter_map(|op| match &op.kind {
            OpKind::Microbatch { members, .. } => Some(members),
            _ => None,
        });
        let microbatches = microbatches.map(|members| {
            let rows = || members.iter().map(|member| member.rows.count());
            let flops = rows()
                .map(|rows| self.flops(Work::causal(rows, prefix_rows, 0)))
                .fold(Flops::default(), |sum, flops| sum + flops);
            PipelineMicrobatch {
                rows: rows().sum(),
                forward_ns: self.ns((1.0 - BACKWARD_SHARE) * flops),
                backward_ns: self.ns(BACKWARD_SHARE * flops),
            }
        });
        PipelineGroup {
            prefix_rows,
            forward: self.share(prefix_rows, 1.0 - BACKWARD_SHARE),
            backward: self.share(prefix_rows, BACKWARD_SHARE),
            microbatches: microbatches.collect(),
        }
    }

    fn row_bytes(&self) -> RowBytes {
        let ModelShape { heads, kv_heads, head_dim, dtype_bytes, .. } = self.model;
        let dtype_bytes_wide = u64::from(dtype_bytes);
        let row = |heads: u32| u64::from(heads).saturating_mul(head_dim.into());
        let of_part = |layer_bytes: u64| (layer_bytes as f64 * self.layers).ceil() as u64;
        let element = dtype_bytes_wide + u64::from(dtype_bytes.max(ACCUMULATOR_BYTES_MIN));
        let saved = of_part(self.model.saved_bytes_per_token_layer);
        RowBytes {
            activation: row(heads).saturating_mul(dtype_bytes_wide),
            boundary: of_part(row(kv_heads).saturating_mul(BOUNDARY_SLOTS * element)),
            prefix_saved: saved,
            microbatch_saved: saved,
        }
    }

    /// Returns the scale of the last part's ops, in thousandths: prefixes with a dead last layer,
    /// microbatches with the head.
    fn last_permille(&self, plans: &[Plan], groups: &[PipelineGroup]) -> [u32; 2] {
        let linear_s = |flops: f64| flops / self.kernels.linear;
        let seconds = |flops: Flops| flops.seconds(&self.kernels);
        let (mut head, mut microbatches, mut dead, mut prefixes) = (0.0, 0.0, 0.0, 0.0);
        for (plan, group) in plans.iter().zip(groups) {
            for leaf in &plan.nodes()[1..] {
                let rows = leaf.rows.count();
                let work = Work::causal(rows, group.prefix_rows, rows);
                head += linear_s(6.0 * work.logit_rows * self.model.head_weights as f64);
                microbatches += seconds(self.flops(Work { logit_rows: 0.0, ..work }));
            }
            let work = Work::causal(group.prefix_rows, 0, 0);
            prefixes += seconds(self.flops(work));
            if plan.options().last_layer_dead {
                let weights = self.model.last_layer_prefix_weights as f64;
                let runs = linear_s(6.0 * work.rows * weights);
                dead += seconds(work.flops(&self.model, 1.0)) - runs;
            }
        }
        let permille = |ratio: f64| (ratio.max(0.0) * f64::from(PERMILLE)).round() as u32;
        [permille(1.0 - dead / prefixes), permille(1.0 + head / microbatches)]
    }
}

/// Returns the bytes of logits per row of a microbatch, as the plans count them on one device. Where some rows
/// have no logits, the most of any microbatch.
fn logits_row(plans: &[Plan]) -> u64 {
    let of_plan = |plan: &Plan| {
        let model = CostModel::new(plan.options());
        let bytes = plan.ops().iter().filter_map(|op| {
            let OpKind::Microbatch { members, .. } = &op.kind else { return None };
            let rows: u64 = members.iter().map(|member| member.rows.count()).sum();
            Some(model.node_bytes(0, op.scored_rows()).logits.div_ceil(rows.max(1)))
        });
        bytes.max().unwrap_or(0)
    };
    plans.iter().map(of_plan).max().unwrap_or(0)
}

/// Returns whether a plan consists of one node and its leaves.
fn is_flat_group(plan: &Plan) -> bool {
    let [prefix, leaves @ ..] = plan.nodes() else { return false };
    let root = NodeId(0);
    prefix.parent.is_none()
        && !leaves.is_empty()
        && leaves.iter().all(|leaf| leaf.parent == Some(root))
}

impl Pipeline {
    /// Converts plans of flat groups. Model and machine are those of the first plan. Layers are spread evenly
    /// over parts; the head and a dead last layer change the cost of the last part. A row sent has
    /// `heads · head_dim` elements. All pairs of a prefix run at the rate of causal attention, in chunks too.
    /// The stage of the last part holds the logits of its microbatches from their forward to their backward. Each
    /// stage has the device memory of the first plan as its room; host memory bounds nothing. Bounds, chunks and
    /// order keep their defaults.
    ///
    /// # Errors
    /// `Count` for no plan, a plan that is no flat group, no parts, or an unknown `flops_per_s`.
    pub fn of_plans(
        plans: &[Plan],
        stages: u32,
        virtual_stages: u32,
    ) -> Result<Self, PipelineError> {
        let flat = plans.iter().filter(|plan| is_flat_group(plan)).count() as u64;
        check_range("plans of flat groups", flat, (plans.len() as u64).max(1), u64::MAX)?;
        let options = plans[0].options();
        let machine = options.planned_machine();
        let Machine { op_overhead_ns, link_bytes_per_s, .. } = machine;
        let Machine { sleep_bytes_per_s, wake_bytes_per_s, .. } = machine;
        check_range("flops_per_s", machine.flops_per_s, 1, u64::MAX)?;
        let mut pipeline = Self {
            stages,
            virtual_stages,
            groups: plans.iter().map(|_| PipelineGroup::default()).collect(),
            rates: PipelineRates {
                op_overhead_ns,
                transfer_latency_ns: 0,
                link_bytes_per_s,
                sleep_bytes_per_s,
                wake_bytes_per_s,
            },
            ..Self::default()
        };
        pipeline.check_stages()?;
        if machine.device_bytes > 0 {
            pipeline.stage_room_bytes = vec![machine.device_bytes; stages as usize];
        }
        let parts = pipeline.parts();
        let layers = f64::from(options.model.layers) / f64::from(parts);
        let kernels = KernelRates::of(&machine).unwrap_or(KernelRates::uniform(1.0));
        let counter = Counter { model: options.model, kernels, layers };
        pipeline.groups = plans.iter().map(|plan| counter.group(plan)).collect();
        pipeline.row_bytes = counter.row_bytes();
        pipeline.stage_bytes = vec![StageBytes::from(pipeline.row_bytes); stages as usize];
        if let Some(last) = pipeline.stage_bytes.last_mut() {
            last.microbatch_logits = logits_row(plans);
        }
        let last = counter.last_permille(plans, &pipeline.groups);
        let permille = |last: u32| {
            (1..=parts).map(|part| if part < parts { PERMILLE } else { last }).collect()
        };
        pipeline.prefix_permille = permille(last[0]);
        pipeline.microbatch_permille = permille(last[1]);
        Ok(pipeline)
    }
}
