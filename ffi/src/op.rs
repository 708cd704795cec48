//! Operations and nodes of a plan as C sees them.

use dormouse_schedule::{Member, NodeId, Op, OpKind, PlanNode, Residency, Score};

use crate::abi::v1::structs as c;

/// What an operation's pointers point to.
#[derive(Debug, Default)]
pub(crate) struct Lists {
    members: Vec<c::dormouse_member_t>,
    scores: Vec<c::dormouse_score_t>,
}

impl Lists {
    /// Converts an op; its lists stay in place until the next call.
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
            // Done, and whatever a later schedule adds before this boundary has a number for it.
            _ => {}
        }
        it
    }

    /// What every kind has, as the end of a plan would have it.
    fn common(&self, op: &Op) -> c::dormouse_op_t {
        c::dormouse_op_t {
            size: 0,
            version: 0,
            id: op.id.0,
            kind: c::DORMOUSE_OP_DONE,
            node: 0,
            token_begin: 0,
            token_end: 0,
            members: std::ptr::null(),
            member_count: 0,
            last: 0,
            wake_window_layers: 0,
            reserved: 0,
            flags: 0,
            scores: if self.scores.is_empty() { std::ptr::null() } else { self.scores.as_ptr() },
            score_count: self.scores.len() as u64,
            reads: number(op.reads),
            residency: op.residency.map_or(c::DORMOUSE_RESIDENCY_NONE, residency_code),
            asleep: number(op.asleep),
            waking: number(op.waking),
            device_bytes: op.device_bytes,
            host_bytes: op.host_bytes,
        }
    }
}

/// A node's number, or that of none.
pub(crate) fn number(node: Option<NodeId>) -> u32 {
    node.map_or(c::DORMOUSE_NODE_NONE, |node| node.0)
}

fn residency_code(residency: Residency) -> i32 {
    match residency {
        Residency::Sleep => c::DORMOUSE_RESIDENCY_SLEEP,
        Residency::Recompute => c::DORMOUSE_RESIDENCY_RECOMPUTE,
        // Keeping is what a caller may do with whatever a later schedule adds.
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

/// A node of a plan.
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

/// The numbers of no node are the same.
const _: () = {
    assert!(NodeId::NONE.0 == c::DORMOUSE_NODE_NONE);
    assert!(dormouse_schedule::forest::NO_PARENT == c::DORMOUSE_NODE_NONE);
};
