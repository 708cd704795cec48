//! Checks that nodes and ops are those of some plan: whoever runs them reads no node that is not there and no
//! token outside a sequence.

use super::{FileSequence, PlanFileError};
use crate::tree_planner::Planned;
use crate::{Member, NODES_MAX, NodeId, Op, OpKind, PlanNode, Residency, Span, check_range};

/// Checks nodes, then ops.
pub(super) fn check(planned: &Planned, sequences: &[FileSequence]) -> Result<(), PlanFileError> {
    check_nodes(&planned.nodes, sequences)?;
    let mut replay = Replay {
        nodes: &planned.nodes,
        sequences,
        open: Vec::new(),
        done: vec![false; planned.nodes.len()],
        completed: 0,
    };
    let last = planned.ops.len().saturating_sub(1);
    for (at, op) in planned.ops.iter().enumerate() {
        let refuse = |what| PlanFileError::Op { op: at, what };
        if op.id.0 != at as u64 {
            return Err(refuse("has another id"));
        }
        if (op.kind == OpKind::Done) != (at == last) {
            return Err(refuse("is not where the plan ends"));
        }
        replay.op(op).map_err(refuse)?;
    }
    let is_whole = replay.open.is_empty() && replay.completed == planned.nodes.len();
    if planned.ops.is_empty() || !is_whole {
        return Err(PlanFileError::Op {
            op: last,
            what: "ends the plan before all nodes have run",
        });
    }
    Ok(())
}

/// Checks that nodes are in depth-first order, and each continues its parent within a sequence.
fn check_nodes(nodes: &[PlanNode], sequences: &[FileSequence]) -> Result<(), PlanFileError> {
    check_range("nodes", nodes.len() as u64, 0, NODES_MAX as u64)?;
    let mut path: Vec<usize> = Vec::new();
    for (id, node) in nodes.iter().enumerate() {
        let refuse = |what| Err(PlanFileError::Node { node: id, what });
        while path.pop_if(|open| nodes[*open].subtree_end as usize <= id).is_some() {}
        let above = path.last().map(|above| &nodes[*above]);
        if node.parent.map(|parent| parent.0 as usize) != path.last().copied() {
            return refuse("is not below its parent");
        }
        let end = node.subtree_end as usize;
        if end <= id || end > above.map_or(nodes.len(), |above| above.subtree_end as usize) {
            return refuse("has a subtree outside its parent's");
        }
        if node.rows.count() == 0 || node.rows.begin != above.map_or(0, |above| above.rows.end) {
            return refuse("does not continue the rows of its parent");
        }
        let tokens = sequences.get(node.sequence as usize).map(|sequence| sequence.tokens);
        if tokens.is_none_or(|tokens| node.rows.end >= tokens) {
            return refuse("has rows outside its sequence");
        }
        path.push(id);
    }
    Ok(())
}

/// A node whose backward has not run.
struct Open {
    node: usize,
    /// Nodes completed before its forward.
    before: usize,
    /// Whether its graph is there.
    has_graph: bool,
}

struct Replay<'a> {
    nodes: &'a [PlanNode],
    sequences: &'a [FileSequence],
    /// The path to the current node.
    open: Vec<Open>,
    /// Nodes that have run, or begun to.
    done: Vec<bool>,
    completed: usize,
}

impl Replay<'_> {
    fn op(&mut self, op: &Op) -> Result<(), &'static str> {
        for node in op.asleep.iter().chain(&op.waking) {
            if node.0 as usize >= self.nodes.len() {
                return Err("names a node that is not there");
            }
        }
        match &op.kind {
            OpKind::PrefixForward { node, tokens } => {
                let at = self.begins(*node, op.reads)?;
                let it = &self.nodes[at];
                if it.subtree_end as usize == at + 1 {
                    return Err("runs a leaf as a node with children");
                }
                let is_its = *tokens == it.rows && op.residency == Some(it.residency);
                if !is_its || !op.scores.is_empty() {
                    return Err("is not the forward of its node");
                }
                let has_graph = it.residency != Residency::Recompute;
                self.open.push(Open { node: at, before: self.completed, has_graph });
            }
            OpKind::Microbatch { node, members, .. } => {
                if op.reads.unwrap_or(NodeId::NONE) != *node || members.is_empty() {
                    return Err("has no members, or reads another node than theirs");
                }
                let mut row = 0;
                for member in members {
                    let leaf = self.begins(member.node, op.reads)?;
                    self.member(leaf, member, row)?;
                    row = member.rows.end;
                    self.completed += 1;
                }
                self.scores(op, |rows| {
                    let within = |m: &&Member| m.rows.begin <= rows.begin && rows.end <= m.rows.end;
                    let member = members.iter().find(within)?;
                    Some(member.first_position + (rows.begin - member.rows.begin))
                })?;
            }
            OpKind::ForwardAgain { node, tokens } => {
                let open = self.ends(*node, op.reads)?;
                let it = &self.nodes[open];
                let is_its = *tokens == it.rows && it.residency == Residency::Recompute;
                match self.open.last_mut() {
                    Some(open) if is_its && !open.has_graph && op.scores.is_empty() => {
                        open.has_graph = true;
                    }
                    _ => return Err("is not the second forward of its node"),
                }
            }
            OpKind::PrefixBackward { node, .. } => {
                let at = self.ends(*node, op.reads)?;
                if self.open.pop().is_none_or(|open| !open.has_graph) {
                    return Err("runs backward without a graph");
                }
                let rows = self.nodes[at].rows;
                self.scores(op, |own| (own.end <= rows.count()).then(|| rows.begin + own.begin))?;
                self.completed += 1;
            }
            OpKind::Done => {}
        }
        Ok(())
    }

    /// Returns a node that has not run, and whose parent is the current node.
    fn begins(&mut self, node: NodeId, reads: Option<NodeId>) -> Result<usize, &'static str> {
        let at = node.0 as usize;
        let Some(it) = self.nodes.get(at) else { return Err("names a node that is not there") };
        let above = self.open.last().map(|open| NodeId(open.node as u32));
        if reads != it.parent || above != it.parent {
            return Err("runs a node whose parent is not the one that is open");
        }
        if std::mem::replace(&mut self.done[at], true) {
            return Err("runs a node twice");
        }
        Ok(at)
    }

    /// Returns the current node, all of whose subtree has run.
    fn ends(&self, node: NodeId, reads: Option<NodeId>) -> Result<usize, &'static str> {
        let at = node.0 as usize;
        let Some(open) = self.open.last().filter(|open| open.node == at) else {
            return Err("ends a node that is not the one that is open");
        };
        if reads != self.nodes[at].parent {
            return Err("reads another node than its parent");
        }
        let below = self.nodes[at].subtree_end as usize - at - 1;
        if self.completed - open.before != below {
            return Err("ends a node before all nodes below it");
        }
        Ok(at)
    }

    fn member(&self, leaf: usize, member: &Member, row: u64) -> Result<(), &'static str> {
        let it = &self.nodes[leaf];
        let count = it.rows.count();
        if it.subtree_end as usize != leaf + 1 {
            return Err("has a member with children");
        }
        let is_its = member.rows == Span { begin: row, end: row.saturating_add(count) }
            && member.tokens == Span { begin: 0, end: count }
            && member.first_position == it.rows.begin
            && member.sequence == it.sequence;
        if is_its && member.weight.is_finite() {
            Ok(())
        } else {
            Err("has other rows than its leaves")
        }
    }

    /// Checks the labels of an op. `position`: returns that of rows, if they are the op's.
    fn scores(&self, op: &Op, position: impl Fn(Span) -> Option<u64>) -> Result<(), &'static str> {
        for score in &op.scores {
            let tokens = self.sequences.get(score.sequence as usize).map(|it| it.tokens);
            let own = position(score.rows).filter(|_| score.rows.count() > 0);
            let Some((tokens, own)) = tokens.zip(own) else {
                return Err("scores rows or sequences that are not there");
            };
            let is_next = score.first_label == own + 1 && score.weight.is_finite();
            if !is_next || own + score.rows.count() >= tokens {
                return Err("scores other labels than its rows predict");
            }
        }
        Ok(())
    }
}
