//! Runs plans of small batches on a simulated machine that reads only the ops.

use std::collections::BTreeMap;

use crate::batch::Batch;
use crate::tree_planner_support::{batch, device_limits, labels, sequences};
use dormouse_schedule::forest::{Forest, NO_PARENT};
use dormouse_schedule::*;
use proptest::prelude::*;

/// A node's tensors on the device.
#[derive(Debug)]
struct Held {
    /// Layers of its saved tensors.
    layers: u64,
    asleep: bool,
    has_graph: bool,
}

/// Runs ops and checks that each is allowed.
struct Replay<'a> {
    plan: &'a Plan,
    batch: &'a Batch,
    sequences: &'a [Vec<u32>],
    held: BTreeMap<u32, Held>,
    /// Number of first forwards of each node.
    forwards: Vec<u32>,
    backwards: Vec<u32>,
    again: Vec<u32>,
    /// Times each label of each sequence was scored.
    scored: BTreeMap<(u32, u64), u32>,
    /// Ops that the plan names as its peak.
    peaks: u32,
}

impl<'a> Replay<'a> {
    fn run(plan: &'a Plan, batch: &'a Batch, sequences: &'a [Vec<u32>]) {
        let count = plan.nodes().len();
        let mut it = Self {
            plan,
            batch,
            sequences,
            held: BTreeMap::new(),
            forwards: vec![0; count],
            backwards: vec![0; count],
            again: vec![0; count],
            scored: BTreeMap::new(),
            peaks: 0,
        };
        let mut cursor = plan.clone();
        loop {
            let op = cursor.next_op().clone();
            if op.kind == OpKind::Done {
                break;
            }
            it.op(&op);
            cursor.complete(op.id).unwrap();
        }
        let runs = plan.ops().len() > 1;
        assert_eq!(it.peaks, u32::from(runs), "the peak is an op that runs");
        it.finish();
    }

    fn node(&self, id: u32) -> &PlanNode {
        &self.plan.nodes()[id as usize]
    }

    fn is_leaf(&self, id: u32) -> bool {
        !self.plan.nodes().iter().any(|node| node.parent == Some(NodeId(id)))
    }

    fn path(&self, from: Option<NodeId>) -> Vec<u32> {
        std::iter::successors(from, |id| self.node(id.0).parent).map(|id| id.0).collect()
    }

    fn rows(&self, id: u32) -> u64 {
        self.node(id).rows.count()
    }

    /// Distinct rows of a node that carry loss, counted over all sequences.
    fn scored_rows(&self, id: u32) -> u64 {
        let mut rows: Vec<u64> = Vec::new();
        for op in self.plan.ops() {
            for score in &op.scores {
                let first = match &op.kind {
                    OpKind::PrefixBackward { node, .. } if node.0 == id => self.node(id).rows.begin,
                    OpKind::Microbatch { members, .. } => {
                        let at = |m: &&Member| {
                            m.node.0 == id
                                && m.rows.begin <= score.rows.begin
                                && score.rows.end <= m.rows.end
                        };
                        match members.iter().find(at) {
                            Some(member) => member.first_position.wrapping_sub(member.rows.begin),
                            None => continue,
                        }
                    }
                    _ => continue,
                };
                rows.extend((score.rows.begin..score.rows.end).map(|row| row.wrapping_add(first)));
            }
        }
        rows.sort();
        rows.dedup();
        rows.len() as u64
    }

    fn live_layers(&self, id: u32) -> u64 {
        let dead = self.batch.last_layer_dead && self.scored_rows(id) == 0;
        u64::from(self.batch.model.layers) - u64::from(dead)
    }

    fn window(&self, id: u32) -> u64 {
        self.live_layers(id).min(self.batch.wake_window_layers.into())
    }

    /// Bytes of a row: K and V of 2 bytes per element, accumulators of 4.
    fn boundary_bytes(&self) -> u64 {
        let model = &self.batch.model;
        2 * u64::from(model.layers * model.kv_heads * model.head_dim) * (2 + 4)
    }

    /// Bytes of all nodes: K, V and accumulators, and the layers held.
    fn device_bytes(&self) -> u64 {
        let (boundary, saved) =
            (self.boundary_bytes(), self.batch.model.saved_bytes_per_token_layer);
        let bytes = |(id, held): (&u32, &Held)| self.rows(*id) * (boundary + saved * held.layers);
        self.held.iter().map(bytes).sum()
    }

    fn host_bytes(&self) -> u64 {
        let saved = self.batch.model.saved_bytes_per_token_layer;
        let asleep = self.held.iter().filter(|(_, held)| held.asleep);
        asleep.map(|(id, _)| self.rows(*id) * saved * self.live_layers(*id)).sum()
    }

    /// The peak of the plan is divided as the nodes held and the op's labels say.
    fn check_peak(&mut self, op: &Op) {
        let Some(peak) = self.plan.device_peak().filter(|peak| peak.op == op.id.0) else { return };
        let held: u64 = self.held.keys().map(|id| self.rows(*id)).sum();
        let scored = match &op.kind {
            OpKind::Microbatch { members, .. } => {
                members.iter().map(|member| self.scored_rows(member.node.0)).sum()
            }
            OpKind::PrefixBackward { node, .. } => self.scored_rows(node.0),
            _ => 0,
        };
        assert_eq!(peak.boundary_bytes, held * self.boundary_bytes(), "{op:?}");
        assert_eq!(peak.logits_bytes, self.logits_bytes(scored), "{op:?}");
        assert_eq!(peak.bytes(), op.device_bytes, "{op:?}");
        assert!(self.plan.ops().iter().all(|other| other.device_bytes <= op.device_bytes));
        self.peaks += 1;
    }

    fn logits_bytes(&self, rows: u64) -> u64 {
        3 * rows * 2 * u64::from(self.batch.vocab)
    }

    fn op(&mut self, op: &Op) {
        if let Some(node) = op.waking {
            let window = self.window(node.0);
            let held = self.held.get_mut(&node.0).unwrap();
            assert!(held.asleep && held.layers == 0, "{op:?}");
            held.layers = window;
        }
        for id in self.path(op.reads) {
            assert!(self.held.contains_key(&id), "K and V of {id} are read: {op:?}");
        }
        let beside = match &op.kind {
            OpKind::PrefixForward { node, tokens } => self.forward(op, node.0, *tokens),
            OpKind::Microbatch { node, members, microbatches_left } => {
                assert_eq!(op.reads.unwrap_or(NodeId::NONE), *node);
                assert_eq!(*microbatches_left, self.microbatches_left(op.id, *node));
                self.microbatch(op, members)
            }
            OpKind::ForwardAgain { node, tokens } => {
                assert_eq!(op.residency, Some(Residency::Recompute));
                assert_eq!(*tokens, self.node(node.0).rows);
                self.all_below_done(node.0);
                let layers = self.live_layers(node.0);
                let held = self.held.get_mut(&node.0).unwrap();
                assert!(!held.has_graph);
                (held.has_graph, held.layers) = (true, layers);
                self.again[node.0 as usize] += 1;
                0
            }
            OpKind::PrefixBackward { node, wake_window_layers } => {
                self.all_below_done(node.0);
                let held = &self.held[&node.0];
                assert!(held.has_graph);
                let sleeps = op.residency == Some(Residency::Sleep);
                let wanted = if sleeps { self.window(node.0) } else { self.live_layers(node.0) };
                assert_eq!(held.layers, wanted, "{op:?}");
                assert_eq!(u64::from(*wake_window_layers) >= wanted, sleeps || wanted == 0);
                self.logits_bytes(self.scored_rows(node.0))
            }
            other => panic!("unknown op {other:?}"),
        };
        assert_eq!(op.device_bytes, self.device_bytes() + beside, "{op:?}");
        assert_eq!(op.host_bytes, self.host_bytes(), "{op:?}");
        self.check_peak(op);
        self.score(op);
        self.after(op);
    }

    /// Counts later microbatches of the node, and one more unless the node's second forward or backward
    /// follows the last of them.
    fn microbatches_left(&self, id: OpId, node: NodeId) -> u32 {
        let is_own =
            |kind: &OpKind| matches!(kind, OpKind::Microbatch { node: of, .. } if *of == node);
        let ops = self.plan.ops();
        let own: Vec<usize> =
            (id.0 as usize..ops.len()).filter(|at| is_own(&ops[*at].kind)).collect();
        let backward = matches!(&ops[own[own.len() - 1] + 1].kind, OpKind::PrefixBackward { node: of, .. }
            | OpKind::ForwardAgain { node: of, .. } if *of == node);
        own.len() as u32 - 1 + u32::from(!backward)
    }

    fn forward(&mut self, op: &Op, id: u32, tokens: Span) -> u64 {
        assert!(!self.is_leaf(id));
        assert_eq!((tokens, op.reads), (self.node(id).rows, self.node(id).parent));
        assert_eq!(op.residency, Some(self.node(id).residency));
        self.forwards[id as usize] += 1;
        let (layers, has_graph) = match op.residency.unwrap() {
            Residency::Keep => (self.live_layers(id), true),
            Residency::Sleep => (self.window(id), true),
            // One layer at a time, none afterwards.
            _ => (self.live_layers(id).min(1), false),
        };
        let asleep = op.residency == Some(Residency::Sleep);
        assert!(self.held.insert(id, Held { layers, asleep, has_graph }).is_none());
        0
    }

    /// Saved tensors and logits of the members.
    fn microbatch(&mut self, op: &Op, members: &[Member]) -> u64 {
        let (mut row, mut bytes) = (0, 0);
        for member in members {
            let (id, node) = (member.node.0, self.node(member.node.0));
            assert!(self.is_leaf(id));
            assert_eq!((member.sequence, member.first_position), (node.sequence, node.rows.begin));
            assert_eq!(node.parent, op.reads);
            assert_eq!(member.rows, Span { begin: row, end: row + node.rows.count() });
            assert_eq!(member.tokens, Span { begin: 0, end: node.rows.count() });
            row = member.rows.end;
            let model = &self.batch.model;
            bytes +=
                node.rows.count() * model.saved_bytes_per_token_layer * u64::from(model.layers);
            bytes += self.logits_bytes(self.scored_rows(id));
            self.forwards[id as usize] += 1;
            self.backwards[id as usize] += 1;
        }
        assert!(members.is_sorted_by(|a, b| a.node.0 < b.node.0), "{members:?}");
        assert!(row <= self.plan.microbatch_rows().into() || members.len() == 1, "{members:?}");
        bytes
    }

    fn all_below_done(&self, id: u32) {
        let below = id as usize + 1..self.node(id).subtree_end as usize;
        assert!(self.backwards[below].iter().all(|count| *count == 1), "below {id}");
    }

    /// The path of each scored row has the sequence's tokens up to the one before the label.
    fn score(&mut self, op: &Op) {
        for score in &op.scores {
            let scoring = &self.batch.scoring[score.sequence as usize];
            assert_eq!(score.weight, scoring.weight);
            let (id, first) = match &op.kind {
                OpKind::PrefixBackward { node, .. } => (node.0, self.node(node.0).rows.begin),
                OpKind::Microbatch { members, .. } => {
                    let holds = |m: &&Member| {
                        m.rows.begin <= score.rows.begin && score.rows.end <= m.rows.end
                    };
                    let member = members.iter().find(holds).unwrap();
                    (member.node.0, member.first_position.wrapping_sub(member.rows.begin))
                }
                other => panic!("{other:?} scores"),
            };
            let own = &self.sequences[score.sequence as usize];
            let representative = &self.sequences[self.node(id).sequence as usize];
            for (row, label) in (score.rows.begin..score.rows.end).zip(score.first_label..) {
                let position = row.wrapping_add(first);
                assert_eq!(position + 1, label);
                assert!(self.node(id).rows.begin <= position && position < self.node(id).rows.end);
                let seen = ..=position as usize;
                assert_eq!(own[seen], representative[seen], "{score:?}");
                *self.scored.entry((score.sequence, label)).or_default() += 1;
            }
        }
    }

    fn after(&mut self, op: &Op) {
        match &op.kind {
            OpKind::PrefixForward { node, .. } if op.residency == Some(Residency::Recompute) => {
                self.held.get_mut(&node.0).unwrap().layers = 0;
            }
            OpKind::PrefixBackward { node, .. } => {
                self.backwards[node.0 as usize] += 1;
                self.held.remove(&node.0);
            }
            _ => {}
        }
        if let Some(node) = op.asleep {
            let held = self.held.get_mut(&node.0).unwrap();
            assert!(held.asleep && held.layers > 0, "{op:?}");
            held.layers = 0;
        }
    }

    fn finish(&self) {
        assert!(self.held.is_empty());
        assert!(self.forwards.iter().chain(&self.backwards).all(|count| *count == 1));
        for (id, node) in self.plan.nodes().iter().enumerate() {
            let again = u32::from(node.residency == Residency::Recompute);
            assert_eq!(self.again[id], again);
            let begin = node.parent.map_or(0, |parent| self.node(parent.0).rows.end);
            assert_eq!(node.rows.begin, begin, "a path is contiguous");
        }
        let mut wanted = BTreeMap::new();
        for (sequence, (scoring, tokens)) in
            self.batch.scoring.iter().zip(self.sequences).enumerate()
        {
            for label in labels(scoring, tokens.len() as u64) {
                wanted.insert((sequence as u32, label), 1);
            }
        }
        assert_eq!(self.scored, wanted, "every label is scored once");
        let predicted = self.plan.predict();
        let [a, b, c, asleep] = self.bounds();
        assert_eq!([predicted.peak_bytes_a, predicted.peak_bytes_b], [a, b]);
        assert_eq!([predicted.peak_bytes_c, predicted.sleep_bytes], [c, asleep]);
    }

    /// Maxima over paths: all awake, with logits, asleep; and K and V with microbatches.
    fn bounds(&self) -> [u64; 4] {
        let model = &self.batch.model;
        let boundary = 2 * u64::from(model.layers * model.kv_heads * model.head_dim) * (2 + 4);
        let saved = |id: u32, layers| self.rows(id) * model.saved_bytes_per_token_layer * layers;
        let mut bounds = [0; 4];
        let mut most = |phase: usize, bytes: u64| bounds[phase] = bytes.max(bounds[phase]);
        for id in (0..self.plan.nodes().len() as u32).filter(|id| !self.is_leaf(*id)) {
            let path = self.path(Some(NodeId(id)));
            let asleep: u64 = path.iter().map(|id| saved(*id, self.live_layers(*id))).sum();
            let awake = asleep + path.iter().map(|id| boundary * self.rows(*id)).sum::<u64>();
            most(0, awake);
            most(2, awake + self.logits_bytes(self.scored_rows(id)));
            most(3, asleep);
        }
        for op in self.plan.ops() {
            let OpKind::Microbatch { members, .. } = &op.kind else { continue };
            let above = self.path(op.reads).iter().map(|id| boundary * self.rows(*id)).sum::<u64>();
            let of =
                |id: u32| saved(id, model.layers.into()) + self.logits_bytes(self.scored_rows(id));
            most(1, above + members.iter().map(|member| of(member.node.0)).sum::<u64>());
        }
        bounds
    }
}

/// Rows of a trie: the distinct prefixes that continue with another token.
fn trie_rows(sequences: &[Vec<u32>]) -> usize {
    let mut rows: Vec<&[u32]> =
        sequences.iter().flat_map(|tokens| (2..=tokens.len()).map(|end| &tokens[..end])).collect();
    rows.sort();
    rows.dedup();
    rows.len()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    #[test]
    fn a_plan_runs_every_row_once_and_scores_every_label_once(
        sequences in sequences(),
        losses in prop::collection::vec(any::<u32>(), 1..8),
        microbatch_rows in 1_u32..20,
        block_rows in 0_u64..4,
        last_layer_dead in any::<bool>(),
    ) {
        let mut batch = batch(&sequences, &losses, microbatch_rows);
        (batch.block_rows, batch.last_layer_dead) = (block_rows, last_layer_dead);
        let plan = batch.plan().unwrap();
        Replay::run(&plan, &batch, &sequences);
        let rows: u64 = plan.nodes().iter().map(|node| node.rows.count()).sum();
        prop_assert_eq!(rows, trie_rows(&sequences) as u64);
        prop_assert!(plan.nodes().iter().all(|it| block_rows == 0 || it.rows.count() <= block_rows));
        prop_assert!(plan.nodes().iter().all(|node| node.residency == Residency::Keep));
        let again = batch.plan().unwrap();
        prop_assert_eq!(&again, &plan);
    }

    #[test]
    fn a_plan_within_memory_stays_within_it(
        sequences in sequences(),
        losses in prop::collection::vec(any::<u32>(), 1..8),
        microbatch_rows in 0_u32..12,
        block_rows in 0_u64..4,
        last_layer_dead in any::<bool>(),
        links in prop::collection::vec(prop::sample::select(vec![0_u64, 1, 1_000, 1_000_000]), 3),
        host_bytes in prop::sample::select(vec![0_u64, 100, 600, 1_500, 5_000]),
    ) {
        let mut batch = batch(&sequences, &losses, microbatch_rows.max(1));
        (batch.block_rows, batch.last_layer_dead) = (block_rows, last_layer_dead);
        batch.machine = Some(Machine {
            flops_per_s: links[0], sleep_bytes_per_s: links[1], wake_bytes_per_s: links[2],
            ..Machine::default()
        });
        batch.host_bytes = host_bytes;
        let limits = device_limits(&batch);
        batch.microbatch_rows = microbatch_rows;
        for device_bytes in limits {
            batch.device_bytes = device_bytes;
            let plan = match batch.plan() {
                Ok(plan) => plan,
                Err(PlanError::DoesNotFit { needed_bytes, budget_bytes, .. }) => {
                    prop_assert!(needed_bytes > budget_bytes);
                    continue;
                }
                Err(other) => panic!("{other}"),
            };
            Replay::run(&plan, &batch, &sequences);
            prop_assert!(plan.ops().iter().all(|op| op.device_bytes <= device_bytes));
            prop_assert!(host_bytes == 0 || plan.ops().iter().all(|op| op.host_bytes <= host_bytes));
            let predicted = plan.predict();
            let most = |of: fn(&Op) -> u64| plan.ops().iter().map(of).max().unwrap_or(0);
            prop_assert_eq!(predicted.device_bytes.into_iter().max(), Some(most(|op| op.device_bytes)));
            prop_assert_eq!(predicted.host_bytes.into_iter().max(), Some(most(|op| op.host_bytes)));
        }
    }

    /// Batches and subtrees that run as separate leaves repeat rows, but score each label once.
    #[test]
    fn separate_leaves_score_every_label_once(
        sequences in sequences(),
        losses in prop::collection::vec(any::<u32>(), 1..8),
        op_overhead_ns in prop::sample::select(vec![1_u64, 10_000, 1_000_000, 1_000_000_000]),
        block_rows in 0_u64..4,
    ) {
        let mut batch = batch(&sequences, &losses, 20);
        batch.block_rows = block_rows;
        batch.machine =
            Some(Machine { flops_per_s: 100_000_000, op_overhead_ns, ..Machine::default() });
        let plan = batch.plan().unwrap();
        Replay::run(&plan, &batch, &sequences);
        batch.always_share = true;
        let shared = batch.plan().unwrap();
        let [ours, all_shared] = [&plan, &shared].map(|plan| plan.predict().seconds_shared.unwrap());
        prop_assert!(ours <= all_shared, "{} {}", ours, all_shared);
    }
}

/// Microbatches of whole sequences, first-fit decreasing; a prefix of another sequence runs with it.
fn microbatches_apart(forest: &Forest, microbatch_rows: u64) -> usize {
    let mut rows: Vec<u64> = forest.leaves().map(|leaf| forest.node(leaf).tokens.end - 1).collect();
    rows.retain(|rows| *rows > 0);
    rows.sort_by(|a, b| b.cmp(a));
    let mut rooms: Vec<u64> = Vec::new();
    for rows in rows {
        match rooms.iter_mut().find(|room| **room >= rows) {
            Some(room) => *room -= rows,
            None => rooms.push(microbatch_rows - rows),
        }
    }
    rooms.len()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// If sharing costs more than it saves, the plan is no slower than the dense run.
    #[test]
    fn no_plan_is_slower_than_the_dense_run(
        sequences in sequences(),
        losses in prop::collection::vec(any::<u32>(), 1..8),
        microbatch_rows in 20_u32..60,
        op_overhead_ns in prop::sample::select(vec![1_u64, 10_000, 100_000, 10_000_000]),
    ) {
        let mut batch = batch(&sequences, &losses, microbatch_rows);
        batch.machine =
            Some(Machine { flops_per_s: 100_000_000, op_overhead_ns, ..Machine::default() });
        let plan = batch.plan().unwrap().predict();
        let apart_s = plan.flops_dense / 1e8
            + microbatches_apart(&batch.forest, microbatch_rows.into()) as f64 * op_overhead_ns as f64 * 1e-9;
        // The dense run's microbatches are counted as if all were full.
        let dense_s = plan.seconds_dense.unwrap().max(apart_s);
        let ours_s = plan.seconds_shared.unwrap();
        prop_assert!(ours_s <= dense_s * (1.0 + 1e-9), "{} {}", ours_s, dense_s);
    }

    /// The reported bytes suffice, one byte less does not, and the reported rows fit.
    #[test]
    fn a_refusal_names_rows_that_fit(
        sequences in sequences(),
        losses in prop::collection::vec(any::<u32>(), 1..8),
        microbatch_rows in 0_u32..12,
        block_rows in 0_u64..4,
        last_layer_dead in any::<bool>(),
        host_bytes in prop::sample::select(vec![0_u64, 1, 100, 600, 1_500]),
        wake_window_layers in 1_u32..5,
    ) {
        let mut batch = batch(&sequences, &losses, 1);
        (batch.block_rows, batch.last_layer_dead) = (block_rows, last_layer_dead);
        batch.wake_window_layers = wake_window_layers;
        let limits = device_limits(&batch);
        (batch.microbatch_rows, batch.host_bytes) = (microbatch_rows, host_bytes);
        let fits = |batch: &Batch| batch.plan().is_ok();
        for device_bytes in limits {
            batch.device_bytes = device_bytes;
            let refused = match batch.plan() {
                Ok(_) => continue,
                Err(refused) => refused,
            };
            let PlanError::DoesNotFit { tier, needed_bytes, budget_bytes, remedy, .. } = refused else {
                panic!("{refused}");
            };
            prop_assert!(needed_bytes > budget_bytes);
            if tier == "host" {
                prop_assert_eq!(budget_bytes, host_bytes);
                let enough = batch.with(|it| it.host_bytes = needed_bytes);
                prop_assert!(fits(&enough));
                continue;
            }
            prop_assert_eq!((tier, budget_bytes), ("device", device_bytes));
            let with = |device_bytes| batch.with(|it| (it.device_bytes, it.host_bytes) = (device_bytes, 0));
            prop_assert!(fits(&with(needed_bytes)));
            prop_assert!(!fits(&with(needed_bytes - 1)));
            if let Remedy::MicrobatchRows(microbatch_rows) = remedy {
                let smaller = with(device_bytes).with(|it| it.microbatch_rows = microbatch_rows);
                prop_assert!(fits(&smaller));
            }
        }
    }

    /// An open microbatch size becomes the largest that fits, or a smaller one that is faster.
    #[test]
    fn microbatches_are_not_larger_than_the_best_size(
        sequences in sequences(),
        losses in prop::collection::vec(any::<u32>(), 1..8),
        link in prop::sample::select(vec![1_000_u64, 1_000_000]),
        op_overhead_ns in prop::sample::select(vec![1_u64, 100_000, 10_000_000]),
        block_rows in 0_u64..4,
    ) {
        let mut batch = batch(&sequences, &losses, 1);
        (batch.block_rows, batch.always_share) = (block_rows, true);
        let machine = Machine {
            flops_per_s: 100_000_000, sleep_bytes_per_s: link, wake_bytes_per_s: link,
            ..Machine::default()
        };
        for device_bytes in device_limits(&batch) {
            // The cost of an op is unknown: the largest that fits.
            let mut open = batch.with(|it| {
                (it.microbatch_rows, it.device_bytes, it.machine) = (0, device_bytes, Some(machine));
            });
            let Ok(largest) = open.plan() else { break };
            open.machine = Some(Machine { op_overhead_ns, ..machine });
            let ours = open.plan().unwrap();
            prop_assert!(ours.microbatch_rows() <= largest.microbatch_rows());
            prop_assert!(ours.microbatch_rows() >= largest.microbatch_rows() / 8);
            let ours_s = ours.predict().seconds_shared.unwrap();
            for half in 0..=3 {
                open.microbatch_rows = (largest.microbatch_rows() >> half).max(1);
                let fixed = open.plan().unwrap().predict();
                // Below the size at which all nodes keep, times differ only by packing.
                if fixed.host_bytes != [0; 3] || fixed.recomputed_rows > 0 || half == 0 {
                    let fixed_s = fixed.seconds_shared.unwrap();
                    prop_assert!(ours_s <= fixed_s * (1.0 + 1e-9), "{} {} {:?}", ours_s, fixed_s, half);
                }
            }
        }
    }
}

/// K and V of the prefix and their accumulators exceed the saved tensors of whole sequences, so these run
/// separately.
#[test]
fn a_plan_that_fits_only_without_sharing_is_not_shared() {
    let mut batch = lengths(&[NO_PARENT, 0, 0], &[20, 2, 2], 1);
    batch.model.saved_bytes_per_token_layer = 1;
    batch.machine =
        Some(Machine { flops_per_s: 1 << 40, op_overhead_ns: 1_000_000, ..Machine::default() });
    batch.device_bytes = 1_000;
    let plan = batch.plan().unwrap();
    assert_eq!(plan.ops().len(), 2, "a microbatch of both, and the end");
    batch.always_share = true;
    let refused = batch.plan();
    assert!(matches!(refused, Err(PlanError::DoesNotFit { .. })), "{refused:?}");
}

/// A batch of lengths; each sequence scores its last `scored` tokens.
fn lengths(parents: &[u32], lengths: &[u64], scored: u64) -> Batch {
    let forest = Forest::from_nodes(parents, lengths).unwrap();
    let last = |tokens: u64| Loss::From(tokens - scored.min(tokens - 1));
    let scoring = |tokens: u64| Scoring { loss: last(tokens), weight: 1.0 };
    Batch {
        scoring: forest.endings().iter().map(|ending| scoring(ending.tokens)).collect(),
        forest,
        ..batch(&[vec![0, 1]], &[0], 64)
    }
}

/// A root with two leaves and a child with two leaves, one leaf per microbatch: `microbatches_left` of each
/// op, windows of each node.
fn counted_down(device_bytes: u64) -> (Vec<u32>, Vec<Option<u32>>) {
    let forest = Forest::from_nodes(&[NO_PARENT, 0, 0, 0, 3, 3], &[50, 4, 4, 50, 4, 4]).unwrap();
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
        microbatch_rows: 4,
        device_bytes,
        wake_window_layers: 2,
        always_share: true,
        model,
        ..PlanOptions::default()
    };
    let batch = Batch { scoring: vec![Scoring::default(); 4], forest, options };
    let plan = batch.plan().unwrap();
    let left = plan.ops().iter().filter_map(|op| match op.kind {
        OpKind::Microbatch { microbatches_left, .. } => Some(microbatches_left),
        _ => None,
    });
    let windows = (0..plan.nodes().len() as u32 + 1).map(|id| plan.wake_window_layers(NodeId(id)));
    (left.collect(), windows.collect())
}

#[test]
fn a_nodes_last_microbatch_is_not_its_last_part_where_children_follow() {
    let (left, windows) = counted_down(0);
    assert_eq!(left, [2, 1, 1, 0], "two of the root, two of its child");
    assert_eq!(windows, [Some(0), None, None, Some(0), None, None, None]);
}

/// With little memory, the two smallest parts are at the ends, and both nodes sleep.
#[test]
fn a_microbatch_that_is_the_last_part_has_nothing_after_it() {
    let (left, windows) = counted_down(30_000);
    assert_eq!(left, [1, 1, 0, 0], "the child runs between the root's microbatches");
    assert_eq!(windows, [Some(2), None, None, Some(2), None, None, None]);
}

/// A chain with a leaf at each node: parents and lengths.
fn chain(nodes: u32) -> (Vec<u32>, Vec<u64>) {
    let parent = |id: u32| match id {
        0 => NO_PARENT,
        _ if id % 2 == 1 => id - 1,
        _ => id - 2,
    };
    ((0..nodes).map(parent).collect(), vec![2; nodes as usize])
}

/// Planning does not recurse and is not quadratic in nodes.
#[test]
fn deep_and_wide_forests_are_planned() {
    let nodes = 100_000_u32;
    let (deep, two) = chain(nodes);
    let star: Vec<u32> = (0..nodes).map(|id| if id == 0 { NO_PARENT } else { 0 }).collect();
    let apart = vec![NO_PARENT; nodes as usize];
    for parents in [deep, star, apart] {
        let mut batch = lengths(&parents, &two, 1);
        batch.microbatch_rows = 0;
        batch.device_bytes = 1 << 40;
        let most = batch.plan().unwrap();
        batch.device_bytes = most.predict().peak_bytes_b + 4_000;
        let plan = batch.plan().unwrap();
        let labels: u64 =
            plan.ops().iter().flat_map(|op| &op.scores).map(|score| score.rows.count()).sum();
        assert_eq!(labels, batch.scoring.len() as u64);
        assert!(plan.ops().iter().all(|op| op.device_bytes <= batch.device_bytes));
    }
}

/// Every sequence of a chain scores all nodes above it, which exceeds the limit of scores.
#[test]
fn more_scores_than_the_limit_are_refused() {
    let (parents, two) = chain(40_000);
    let batch = lengths(&parents, &two, u64::MAX);
    let error = batch.plan().unwrap_err().to_string();
    assert!(error.contains("accepted: 0 to 67108864"), "{error}");
}

#[test]
fn refusals_name_the_value_and_what_is_accepted() {
    let refusal = |change: fn(&mut Batch)| {
        let mut batch = batch(&[vec![0, 1, 2], vec![0, 1, 1]], &[0], 8);
        assert!(batch.plan().is_ok());
        change(&mut batch);
        batch.plan().unwrap_err().to_string()
    };
    let spans = |begin, end| Loss::Spans(vec![Span { begin, end }]);
    let cases = [
        (refusal(|b| b.forest = Forest::default()), "sequences is 0; accepted: 1 to"),
        (refusal(|b| drop(b.scoring.pop())), "scoring is 1; accepted: 2, one for each sequence"),
        (refusal(|b| b.vocab = 0), "vocab is 0; accepted: 1 to"),
        (refusal(|b| b.model.layers = 0), "layers is 0; accepted: 1 to 4096"),
        (
            refusal(|b| b.microbatch_rows = 0),
            "microbatch_rows is 0; accepted: 1 to 4294967295, or 0 with",
        ),
        (refusal(|b| b.block_rows = u64::MAX), "block_rows is 18446744073709551615; accepted: 0"),
        (refusal(|b| b.scoring[1].weight = f64::NAN), "weight 1 is NaN; accepted: finite"),
        (refusal(|b| b.scoring[1].loss = Loss::From(4)), "sequence 1 scores labels 4 to 3"),
    ];
    for (seen, wanted) in cases {
        assert!(seen.contains(wanted), "{seen:?} does not say {wanted:?}");
    }
    for (begin, end) in [(0, 1), (2, 2), (2, 4), (3, 2)] {
        let mut batch = batch(&[vec![0, 1, 2]], &[0], 8);
        batch.scoring[0].loss = spans(begin, end);
        let error = batch.plan().unwrap_err();
        assert_eq!(error, PlanError::Labels { sequence: 0, begin, end, tokens: 3 });
    }
}

/// Bytes saturate at 64 bits, and then no plan fits.
#[test]
fn bytes_saturate_at_64_bits() {
    let tokens = TOKENS_MAX / 2;
    let mut batch = lengths(&[NO_PARENT, 0, 0], &[tokens, tokens, 1], 1);
    (batch.vocab, batch.microbatch_rows, batch.wake_window_layers) = (u32::MAX, u32::MAX, u32::MAX);
    batch.model = ModelShape {
        layers: LAYERS_MAX,
        heads: u32::MAX,
        kv_heads: u32::MAX,
        head_dim: u32::MAX,
        dtype_bytes: 8,
        layer_linear_weights: u64::MAX,
        kv_linear_weights: u64::MAX,
        last_layer_prefix_weights: u64::MAX,
        head_weights: u64::MAX,
        saved_bytes_per_token_layer: u64::MAX,
    };
    let plan = batch.plan().unwrap().predict();
    assert_eq!(plan.device_bytes, [u64::MAX; 3]);
    assert!(plan.speedup.is_finite() && plan.speedup > 1.0);
    batch.device_bytes = u64::MAX - 1;
    let refused = batch.plan();
    assert!(matches!(refused, Err(PlanError::DoesNotFit { .. })), "{refused:?}");
}
