//! The live prefixes of a plan: each is notified of the ops that concern its memory.

use std::collections::HashMap;
use std::sync::{Arc, Weak};

use dormouse_schedule::{Op, OpKind};

use crate::fault::Fault;
use crate::prefix::Prefix;
use crate::status;

/// The live prefixes of one plan, by the number that ops name.
#[derive(Debug, Default)]
pub(crate) struct PlanPrefixes {
    prefixes: HashMap<u32, Weak<Prefix>>,
}

impl PlanPrefixes {
    /// Registers a prefix until it is destroyed.
    pub(crate) fn attach(&mut self, id: u32, prefix: &Arc<Prefix>) -> Result<(), Fault> {
        if self.live(id).is_some() {
            return Err(Fault::new(
                status::DORMOUSE_ERR_BUSY,
                format!("prefix {id} of the plan is live; destroy it first"),
            ));
        }
        self.prefixes.insert(id, Arc::downgrade(prefix));
        Ok(())
    }

    /// Notifies prefixes that `op` begins; `next` comes after it. Idempotent.
    pub(crate) fn begin_op(&self, op: &Op, next: Option<&Op>, runtime_residency: bool) {
        if let OpKind::Microbatch { node, microbatches_left, .. } = op.kind
            && let Some(prefix) = self.live(node.0)
        {
            prefix.microbatch(microbatches_left);
        }
        // A plan that decides residency has budgeted the wake window during this op. Otherwise the
        // runtime waits for the first gradient, when the microbatch frees its memory.
        if !runtime_residency {
            let waking = waking(op, next).into_iter().flatten();
            waking.filter_map(|id| self.live(id)).for_each(|prefix| prefix.begin_wake());
        }
    }

    fn live(&self, id: u32) -> Option<Arc<Prefix>> {
        self.prefixes.get(&id)?.upgrade()
    }
}

/// Returns the prefixes that can start to wake when `op` begins: the one that it names, and the one whose
/// backward is next.
fn waking(op: &Op, next: Option<&Op>) -> [Option<u32>; 2] {
    let backward = next.and_then(|next| match next.kind {
        OpKind::PrefixBackward { node, .. } => Some(node.0),
        _ => None,
    });
    [op.waking.map(|node| node.0), backward]
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use dormouse_schedule::forest::{Forest, NO_PARENT};
    use dormouse_schedule::{ModelShape, Plan, PlanOptions, Scoring};

    use super::*;

    /// Plans a root with two leaves and a child that has two leaves, within `device_bytes`.
    fn plan(microbatch_rows: u32, device_bytes: u64) -> Plan {
        let parents = [NO_PARENT, 0, 0, 0, 3, 3];
        let forest = Forest::from_nodes(&parents, &[50, 4, 4, 50, 4, 4]).unwrap();
        let scoring = vec![Scoring::default(); 4];
        let model = ModelShape {
            layers: 8,
            heads: 1,
            kv_heads: 1,
            head_dim: 1,
            dtype_bytes: 4,
            layer_linear_weights: 100,
            saved_bytes_per_token_layer: 100,
            ..ModelShape::default()
        };
        let options = PlanOptions {
            vocab: 2,
            microbatch_rows,
            device_bytes,
            wake_window_layers: 2,
            always_share: true,
            model,
            ..PlanOptions::default()
        };
        Plan::new(&forest, &scoring, &options).unwrap()
    }

    /// Formats the ops with their nodes, such as `F0 W0 B0`.
    fn shown(plan: &Plan) -> String {
        let word = |op: &Op| match op.kind {
            OpKind::PrefixForward { node, .. } => format!("F{}", node.0),
            OpKind::Microbatch { node, .. } => format!("W{}", node.0),
            OpKind::ForwardAgain { node, .. } => format!("A{}", node.0),
            OpKind::PrefixBackward { node, .. } => format!("B{}", node.0),
            _ => "end".to_owned(),
        };
        plan.ops().iter().map(word).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn a_prefix_wakes_at_the_op_that_names_it_and_before_its_backward() {
        // Under this budget the two parts that need least memory are at the ends, and both nodes sleep.
        let plan = plan(4, 30_000);
        assert_eq!(shown(&plan), "F0 W0 F3 W3 W3 B3 W0 B0 end");
        let ops = plan.ops();
        let woken = |at: usize| waking(&ops[at], ops.get(at + 1));
        assert_eq!(woken(0), [None, None]);
        assert_eq!(woken(4), [Some(3), Some(3)]);
        assert_eq!(woken(6), [Some(0), Some(0)]);
        assert_eq!(woken(8), [None, None]);
    }
}
