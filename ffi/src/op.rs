//! Ops and nodes of a plan as structs of the header.

use dormouse_schedule::{Member, NodeId, Op, OpKind, PlanNode, Residency, Score};

use crate::abi::c;

/// Arrays that the pointers of an op refer to.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    members: Vec<c::dormouse_member_t>,
    scores: Vec<c::dormouse_score_t>,
}

impl Lists {
    /// Converts an op. Its arrays are valid until the next call.
    pub(crate) fn fill(&mut self, op: &Op) -> c::dormouse_op_t {
        self.members.clear();
        if let OpKind::Microbatch { members, .. } = &op.kind {
            self.members.extend(members.iter().map(member));
        }
        self.scores.clear();
        self.scores.extend(op.scores.iter().map(score));
        let mut it = self.common(op);
        match &op.kind {
            OpKind::PrefixForward { node, tokens } => {
                it.kind = c::DORMOUSE_OP_PREFIX_FORWARD;
                it.node = node.0;
                (it.token_begin, it.token_end) = (tokens.begin, tokens.end);
                if op.residency == Some(Residency::Recompute) {
                    it.flags = c::DORMOUSE_OP_WITHOUT_GRAPH;
                }
            }
            OpKind::Microbatch { node, microbatches_left, .. } => {
                it.kind = c::DORMOUSE_OP_MICROBATCH;
                it.node = node.0;
                it.members = self.members.as_ptr();
                it.member_count = self.members.len() as u32;
                it.last = u32::from(*microbatches_left == 0);
            }
            OpKind::ForwardAgain { node, tokens } => {
                it.kind = c::DORMOUSE_OP_FORWARD_AGAIN;
                it.node = node.0;
                (it.token_begin, it.token_end) = (tokens.begin, tokens.end);
            }
            OpKind::PrefixBackward { node, wake_window_layers } => {
                it.kind = c::DORMOUSE_OP_PREFIX_BACKWARD;
                it.node = node.0;
                it.wake_window_layers = *wake_window_layers;
            }
            // Done, and kinds that the header does not know.
            _ => {}
        }
        it
    }

    /// Returns the fields that every kind has, with kind `DORMOUSE_OP_DONE`.
    fn common(&self, op: &Op) -> c::dormouse_op_t {
        c::dormouse_op_t {
            id: op.id.0,
            kind: c::DORMOUSE_OP_DONE,
            scores: if self.scores.is_empty() { std::ptr::null() } else { self.scores.as_ptr() },
            score_count: self.scores.len() as u64,
            reads: number(op.reads),
            residency: op.residency.map_or(c::DORMOUSE_RESIDENCY_NONE, residency_code),
            asleep: number(op.asleep),
            waking: number(op.waking),
            device_bytes: op.device_bytes,
            host_bytes: op.host_bytes,
            ..c::dormouse_op_t::default()
        }
    }
}

/// Returns a node's number, or `DORMOUSE_NODE_NONE`.
pub(crate) fn number(node: Option<NodeId>) -> u32 {
    node.map_or(c::DORMOUSE_NODE_NONE, |node| node.0)
}

fn residency_code(residency: Residency) -> i32 {
    match residency {
        Residency::Sleep => c::DORMOUSE_RESIDENCY_SLEEP,
        Residency::Recompute => c::DORMOUSE_RESIDENCY_RECOMPUTE,
        // A caller can keep the tensors of a residency that the header does not know.
        _ => c::DORMOUSE_RESIDENCY_KEEP,
    }
}

fn member(it: &Member) -> c::dormouse_member_t {
    c::dormouse_member_t {
        sequence: it.sequence,
        node: it.node.0,
        row_begin: it.rows.begin,
        row_end: it.rows.end,
        first_position: it.first_position,
        token_begin: it.tokens.begin,
        token_end: it.tokens.end,
        weight: it.weight,
    }
}

fn score(it: &Score) -> c::dormouse_score_t {
    c::dormouse_score_t {
        sequence: it.sequence,
        reserved: 0,
        row_begin: it.rows.begin,
        row_end: it.rows.end,
        first_label: it.first_label,
        weight: it.weight,
    }
}

pub(crate) fn plan_node(it: &PlanNode) -> c::dormouse_plan_node_t {
    c::dormouse_plan_node_t {
        parent: number(it.parent),
        subtree_end: it.subtree_end,
        sequence: it.sequence,
        origin: it.origin.0,
        row_begin: it.rows.begin,
        row_end: it.rows.end,
        residency: residency_code(it.residency),
        reserved: 0,
    }
}

/// The number for no node is the same in the schedule and in the header.
const _: () = {
    assert!(NodeId::NONE.0 == c::DORMOUSE_NODE_NONE);
    assert!(dormouse_schedule::forest::NO_PARENT == c::DORMOUSE_NODE_NONE);
};
