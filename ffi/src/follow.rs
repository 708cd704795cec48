//! Nodes made from a plan: what each operation means for their memory.

use std::sync::{Arc, Weak};

use dormouse_schedule::{Op, OpKind, Plan};

use crate::fault::Fault;
use crate::prefix::Prefix;
use crate::status;

/// The live nodes of one plan.
#[derive(Debug, Default)]
pub(crate) struct Followers {
    /// Read off the plan when the first node is made from it.
    course: Option<Course>,
    /// By the number that operations name.
    nodes: Vec<(u32, Weak<Prefix>)>,
}

impl Followers {
    /// The wake window of the backward of node `id`, where the plan has that backward.
    pub(crate) fn window(&mut self, plan: &Plan, id: u32) -> Option<u32> {
        let course = self.course.get_or_insert_with(|| Course::of(plan));
        course.windows.get(id as usize).copied().flatten()
    }

    /// Remembers a node as long as it lives.
    pub(crate) fn attach(&mut self, id: u32, node: &Arc<Prefix>) -> Result<(), Fault> {
        self.nodes.retain(|(_, node)| node.strong_count() > 0);
        if self.nodes.iter().any(|(known, _)| *known == id) {
            return Err(Fault::new(
                status::DORMOUSE_ERR_BUSY,
                format!("the plan's node {id} is live already; destroy it first"),
            ));
        }
        self.nodes.push((id, Arc::downgrade(node)));
        Ok(())
    }

    /// Tells nodes what `op`, which begins, means for them. `next` comes after it. Again is harmless.
    pub(crate) fn tell(&self, op: &Op, next: Option<&Op>, is_flat: bool) {
        let live = |id: u32| {
            let known = self.nodes.iter().find(|(known, _)| *known == id);
            known.and_then(|(_, node)| node.upgrade())
        };
        if let OpKind::Microbatch { node: of, .. } = op.kind {
            let course = self.course.as_ref();
            let after = course.and_then(|it| it.microbatches_after.get(op.id.0 as usize));
            if let (Some(after), Some(node)) = (after, live(of.0)) {
                node.microbatch(*after);
            }
        }
        // A batch's plan has counted the window beside this op. A flat group leaves it to the
        // runtime, which waits for the first gradient: then the microbatch's own memory is going.
        if !is_flat {
            let woken = coming_back(op, next).into_iter().flatten();
            woken.filter_map(live).for_each(|node| node.begin_wake());
        }
    }
}

/// Nodes whose first layers may come back from the beginning of `op`: the one it names, and the one
/// whose backward is next.
fn coming_back(op: &Op, next: Option<&Op>) -> [Option<u32>; 2] {
    let backward = next.and_then(|next| match next.kind {
        OpKind::PrefixBackward { node, .. } => Some(node.0),
        _ => None,
    });
    [op.waking.map(|node| node.0), backward]
}

/// What is looked up at every operation, found in one pass.
#[derive(Debug, PartialEq, Eq)]
struct Course {
    /// By operation: of a microbatch, how many microbatches of its node come later, and one more where children
    /// come after the last of them; else 0.
    microbatches_after: Vec<u32>,
    /// By node: layers its backward wakes ahead; `None` where it has none of its own.
    windows: Vec<Option<u32>>,
}

impl Course {
    fn of(plan: &Plan) -> Self {
        let nodes = plan.nodes().len();
        let mut it =
            Self { microbatches_after: vec![0; plan.ops().len()], windows: vec![None; nodes] };
        let mut seen = vec![0_u32; nodes];
        for (op, after) in plan.ops().iter().zip(&mut it.microbatches_after).rev() {
            match op.kind {
                OpKind::Microbatch { node, last, .. } => {
                    let Some(seen) = seen.get_mut(node.0 as usize) else { continue };
                    // Children may come after its last microbatch: then the backward is not next.
                    *seen += u32::from(*seen == 0 && !last);
                    *after = *seen;
                    *seen += 1;
                }
                OpKind::PrefixBackward { node, wake_window_layers } => {
                    if let Some(window) = it.windows.get_mut(node.0 as usize) {
                        *window = Some(wake_window_layers);
                    }
                }
                _ => {}
            }
        }
        it
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

    use dormouse_schedule::forest::{Forest, NO_PARENT};
    use dormouse_schedule::{Batch, ModelShape, Scoring};

    use super::*;

    /// A root with two leaves of its own and a child with two leaves, planned within `device_bytes`.
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
        let batch = Batch {
            forest,
            scoring,
            vocab: 2,
            microbatch_rows,
            device_bytes,
            wake_window_layers: 2,
            always_share: true,
            model,
            ..Batch::default()
        };
        Plan::of_batch(&batch).unwrap()
    }

    /// `F0 W0 B0`: what each operation does, on which node.
    fn words(plan: &Plan) -> String {
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
    fn a_node_s_last_microbatch_is_not_its_last_part_where_children_follow() {
        let plan = plan(4, 0);
        assert_eq!(words(&plan), "F0 W0 W0 F3 W3 W3 B3 B0 end");
        let course = Course::of(&plan);
        assert_eq!(course.microbatches_after, [0, 2, 1, 0, 1, 0, 0, 0, 0]);
        assert_eq!(course.windows, [Some(0), None, None, Some(0), None, None]);
    }

    #[test]
    fn a_microbatch_that_is_the_last_part_has_nothing_after_it() {
        // Short of memory the two parts that need least are at the ends, and both nodes sleep.
        let plan = plan(4, 30_000);
        assert_eq!(words(&plan), "F0 W0 F3 W3 W3 B3 W0 B0 end");
        let course = Course::of(&plan);
        assert_eq!(course.microbatches_after, [0, 1, 0, 1, 0, 0, 0, 0, 0]);
        assert_eq!(course.windows, [Some(2), None, None, Some(2), None, None]);
        let ops = plan.ops();
        let woken = |at: usize| coming_back(&ops[at], ops.get(at + 1));
        // The op that names a node, and the op before a backward.
        assert_eq!(woken(0), [None, None]);
        assert_eq!(woken(4), [Some(3), Some(3)]);
        assert_eq!(woken(6), [Some(0), Some(0)]);
        assert_eq!(woken(8), [None, None]);
    }
}
