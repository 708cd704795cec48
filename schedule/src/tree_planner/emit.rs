//! Writes the ops of a plan, depth first, without recursion.

use crate::tree_planner::microbatches::{EdgeParts, SubtreePart};
use crate::tree_planner::request::Scoring;
use crate::tree_planner::residency::ResidencyProblem;
use crate::tree_planner::scores::Scored;
use crate::{Member, NodeId, Op, OpId, OpKind, Residency, Score, Span};

/// Returns the ops of a plan in order, the last of them [`OpKind::Done`].
pub(crate) fn ops(
    given: &ResidencyProblem<'_>,
    scoring: &[Scoring],
    residency: &[Residency],
) -> Vec<Op> {
    let count = 2 * given.tree.inner_nodes().count() + given.items.microbatches.len() + 1;
    let ops = Vec::with_capacity(count);
    let mut writer = Writer { given, scoring, residency, ops, parts: Vec::new(), waking: None };
    writer.write();
    writer.count_down();
    writer.ops
}

/// A node whose subtree is being written.
#[derive(Debug)]
struct Frame {
    node: usize,
    /// Its parts still to come are those of the writer from this index on.
    first_part: usize,
    /// The current part.
    now: Option<SubtreePart>,
    /// Bytes held by the node's ancestors.
    device: u64,
    host: u64,
}

#[derive(Debug)]
struct Writer<'a> {
    given: &'a ResidencyProblem<'a>,
    scoring: &'a [Scoring],
    residency: &'a [Residency],
    ops: Vec<Op>,
    /// Parts still to come of all nodes on the path, the next one last.
    parts: Vec<SubtreePart>,
    /// The node that starts to wake with the next op.
    waking: Option<NodeId>,
}

impl Writer<'_> {
    fn sleeps(&self, node: usize) -> bool {
        self.residency.get(node) == Some(&Residency::Sleep)
    }

    /// Returns whether layers of the node leave and return between its first and its last part.
    fn has_gap(&self, node: usize) -> bool {
        self.sleeps(node) && self.given.ends[node].first != self.given.ends[node].last
    }

    /// Converts labels to rows of an op in which the node's first row is row `first`.
    fn score(&self, scored: &Scored, begin: u64, first: u64) -> Score {
        let row = |label: u32| u64::from(label) - 1 - begin + first;
        Score {
            sequence: scored.sequence,
            rows: Span { begin: row(scored.begin), end: row(scored.end) },
            first_label: scored.begin.into(),
            weight: self.scoring[scored.sequence as usize].weight,
        }
    }

    fn write(&mut self) {
        let mut stack = vec![self.enter(self.given.tree.len(), 0, 0)];
        while let Some(frame) = stack.last_mut() {
            self.leave_first(frame);
            frame.now = if self.parts.len() > frame.first_part { self.parts.pop() } else { None };
            let Some(part) = frame.now else {
                self.backward(frame);
                stack.pop();
                continue;
            };
            if self.parts.len() == frame.first_part && self.has_gap(frame.node) {
                self.waking = Some(NodeId(frame.node as u32));
            }
            let (device, host) = self.held(frame, part);
            match part {
                SubtreePart::Microbatch(microbatch) => {
                    self.microbatch(frame.node, microbatch, device, host)
                }
                SubtreePart::Node(child) => {
                    let child = self.enter(child as usize, device, host);
                    self.forward(&child);
                    stack.push(child);
                }
            }
        }
        self.push(OpKind::Done, 0, 0);
    }

    /// Returns the frame of a node. The parts of a sleeping node start and end with the chosen edge parts,
    /// others are in the given order.
    fn enter(&mut self, node: usize, device: u64, host: u64) -> Frame {
        let ResidencyProblem { tree, items, ends, .. } = *self.given;
        let ends = if self.has_gap(node) { ends[node] } else { EdgeParts::default() };
        let middle = items.under(tree, node).filter(|part| !ends.has(*part));
        let first_part = self.parts.len();
        self.parts.extend(ends.first.into_iter().chain(middle).chain(ends.last));
        self.parts[first_part..].reverse();
        Frame { node, first_part, now: None, device, host }
    }

    /// Returns the device and host bytes of a node and its ancestors during a part of its subtree.
    fn held(&self, frame: &Frame, item: SubtreePart) -> (u64, u64) {
        if frame.node == self.given.tree.len() {
            return (0, 0);
        }
        let edge = self.given.ends[frame.node].has(item);
        let bytes = self.given.tree.node_bytes(frame.node);
        let device = frame.device.saturating_add(bytes.held(self.residency[frame.node], edge));
        (device, self.host(frame))
    }

    fn host(&self, frame: &Frame) -> u64 {
        let asleep = self.sleeps(frame.node);
        let own = if asleep { self.given.tree.node_bytes(frame.node).saved } else { 0 };
        frame.host.saturating_add(own)
    }

    /// Marks the op with which the last layers of a sleeping node have left: the last op of the first part.
    fn leave_first(&mut self, frame: &Frame) {
        let first = self.given.ends.get(frame.node).and_then(|ends| ends.first);
        if frame.now.is_some()
            && frame.now == first
            && self.has_gap(frame.node)
            && let Some(op) = self.ops.last_mut()
        {
            op.asleep = Some(NodeId(frame.node as u32));
        }
    }

    fn forward(&mut self, frame: &Frame) {
        let (node, tokens) = self.node_of(frame);
        let residency = self.residency[frame.node];
        let bytes = self.given.tree.node_bytes(frame.node).forward(residency);
        let host = self.host(frame);
        let op = OpKind::PrefixForward { node, tokens };
        let op = self.push(op, frame.device.saturating_add(bytes), host);
        op.residency = Some(residency);
        self.reads_parent(frame.node);
    }

    fn microbatch(&mut self, node: usize, microbatch: u32, device: u64, host: u64) {
        let leaves = self.given.items.members(microbatch);
        let mut members = Vec::with_capacity(leaves.len());
        let mut scores = Vec::new();
        let mut row = 0;
        for &leaf in leaves {
            let it = &self.given.tree.nodes[leaf as usize];
            let count = it.rows.count();
            let weight = self.scoring[it.sequence as usize].weight;
            members.push(Member {
                sequence: it.sequence,
                rows: Span { begin: row, end: row + count },
                first_position: it.rows.begin,
                tokens: Span { begin: 0, end: count },
                weight,
                node: NodeId(leaf),
            });
            let own = self.given.tree.scores_of(leaf as usize).iter();
            scores.extend(own.map(|scored| self.score(scored, it.rows.begin, row)));
            row += count;
        }
        let bytes = device.saturating_add(self.given.items.microbatch(microbatch).bytes);
        let reads = (node < self.given.tree.len()).then_some(NodeId(node as u32));
        let node = reads.unwrap_or(NodeId::NONE);
        let op = self.push(OpKind::Microbatch { node, members, microbatches_left: 0 }, bytes, host);
        (op.reads, op.scores) = (reads, scores);
    }

    fn backward(&mut self, frame: &Frame) {
        if frame.node == self.given.tree.len() {
            return;
        }
        let (node, tokens) = self.node_of(frame);
        let residency = self.residency[frame.node];
        let (node_bytes, host) = (self.given.tree.node_bytes(frame.node), self.host(frame));
        if residency == Residency::Recompute {
            let bytes = frame.device.saturating_add(node_bytes.again());
            let op = self.push(OpKind::ForwardAgain { node, tokens }, bytes, host);
            op.residency = Some(residency);
            self.reads_parent(frame.node);
        }
        let window = if residency == Residency::Sleep { self.given.tree.model.window } else { 0 };
        let kind = OpKind::PrefixBackward { node, wake_window_layers: window };
        let own = self.given.tree.scores_of(frame.node).iter();
        let scores = own.map(|scored| self.score(scored, tokens.begin, 0)).collect();
        let bytes = frame.device.saturating_add(node_bytes.backward(residency));
        let op = self.push(kind, bytes, host);
        (op.residency, op.scores) = (Some(residency), scores);
        self.reads_parent(frame.node);
    }

    /// Sets `microbatches_left`, from the last op to the first.
    fn count_down(&mut self) {
        let above_all = self.given.tree.len();
        let mut left = vec![0_u32; above_all + 1];
        let mut backward_next = None;
        for op in self.ops.iter_mut().rev() {
            let OpKind::Microbatch { node, microbatches_left, .. } = &mut op.kind else {
                backward_next = match op.kind {
                    OpKind::ForwardAgain { node, .. } | OpKind::PrefixBackward { node, .. } => {
                        Some(node)
                    }
                    _ => None,
                };
                continue;
            };
            let left = &mut left[(node.0 as usize).min(above_all)];
            *left += u32::from(*left == 0 && backward_next != Some(*node));
            *microbatches_left = *left;
            *left += 1;
            backward_next = None;
        }
    }

    fn node_of(&self, frame: &Frame) -> (NodeId, Span) {
        (NodeId(frame.node as u32), self.given.tree.nodes[frame.node].rows)
    }

    fn reads_parent(&mut self, node: usize) {
        if let Some(op) = self.ops.last_mut() {
            op.reads = self.given.tree.nodes[node].parent;
        }
    }

    fn push(&mut self, kind: OpKind, device_bytes: u64, host_bytes: u64) -> &mut Op {
        let at = self.ops.len();
        self.ops.push(Op {
            id: OpId(at as u64),
            kind,
            reads: None,
            residency: None,
            asleep: None,
            waking: self.waking.take(),
            scores: Vec::new(),
            device_bytes,
            host_bytes,
        });
        &mut self.ops[at]
    }
}
