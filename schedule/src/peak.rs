//! What holds device memory at the peak of a plan.

use serde::{Deserialize, Serialize};

use crate::tree_planner::CostModel;
use crate::{NodeId, Op, OpId, OpKind, Plan, Span};

/// Device memory at the op that needs the most, by what holds it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DevicePeak {
    /// The first op with the most bytes.
    pub op: u64,
    /// K, V and gradient accumulators of the nodes on its path.
    pub boundary_bytes: u64,
    /// Tensors saved for backwards: of those nodes, and of its own rows.
    pub saved_bytes: u64,
    /// Logits of its labels.
    pub logits_bytes: u64,
}

impl DevicePeak {
    /// Returns the sum, which is the op's `device_bytes`.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.boundary_bytes.saturating_add(self.saved_bytes).saturating_add(self.logits_bytes)
    }
}

impl Plan {
    /// Returns what holds device memory at the op that needs the most; `None` if no op needs any.
    #[must_use]
    pub fn device_peak(&self) -> Option<DevicePeak> {
        // `max_by_key` returns the last of several.
        let op = self.ops().iter().rev().max_by_key(|op| op.device_bytes)?;
        let model = CostModel::new(self.options());
        let (deepest, scores) = match op.kind {
            OpKind::PrefixForward { node, .. } | OpKind::ForwardAgain { node, .. } => {
                (Some(node), false)
            }
            OpKind::PrefixBackward { node, .. } => (Some(node), true),
            OpKind::Microbatch { .. } => (op.reads, true),
            OpKind::Done => return None,
        };
        let rows: u64 = self.path(deepest).map(|rows| rows.count()).sum();
        let boundary_bytes = model.node_bytes(rows, 0).boundary;
        let scored = if scores { op.scored_rows() } else { 0 };
        let logits_bytes = model.node_bytes(0, scored).logits;
        let saved_bytes =
            op.device_bytes.saturating_sub(boundary_bytes.saturating_add(logits_bytes));
        let OpId(op) = op.id;
        Some(DevicePeak { op, boundary_bytes, saved_bytes, logits_bytes })
    }

    /// Returns the rows of a node and of its ancestors.
    fn path(&self, deepest: Option<NodeId>) -> impl Iterator<Item = Span> + '_ {
        let node = |id: NodeId| self.nodes().get(id.0 as usize);
        std::iter::successors(deepest.and_then(node), move |it| it.parent.and_then(node))
            .map(|it| it.rows)
    }
}

impl Op {
    /// Returns the number of its rows that have logits: several sequences may score one row.
    #[must_use]
    pub fn scored_rows(&self) -> u64 {
        let mut spans: Vec<Span> = self.scores.iter().map(|score| score.rows).collect();
        spans.sort_by_key(|span| span.begin);
        let (mut end, mut rows) = (0, 0);
        for span in spans {
            rows += span.end.saturating_sub(span.begin.max(end));
            end = end.max(span.end);
        }
        rows
    }
}
