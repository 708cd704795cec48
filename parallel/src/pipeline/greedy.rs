//! A greedy run: every stage starts the best op that may start, whenever it is free.
//!
//! A run never sticks if only *admission* is bounded: a stage begins groups and their microbatches in one
//! order and may always continue what it has begun, so the oldest unfinished op can always run.
//! [`AdmissionRule::parts_max`] bounds more than admission and may stick.
//!
//! A run stops once its lists cannot be the best: they end too late, or a stage holds too much ([`Limits`]).

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use super::graph::{Graph, PipelineUnit};
use super::lists::StageOpKind;
use super::rules::AdmissionRule;
use super::spec::StageBytes;

/// Ready ops of one kind and stage, by key.
type ReadyQueue = BinaryHeap<Reverse<([u32; 4], usize)>>;

/// Beyond which a run stops.
#[derive(Clone, Debug)]
pub(super) struct Limits {
    /// The latest end.
    pub(super) end_ns_max: u64,
    /// What each stage holds, and its largest peak. Empty: unlimited.
    pub(super) peaks_max: Vec<(StageBytes, u64)>,
}

#[derive(Debug)]
struct StageState {
    busy: bool,
    /// Whether an op has ended or become ready since an op was last looked for.
    changed: bool,
    /// Ready ops by kind, except those in `begins`.
    ready: [ReadyQueue; 4],
    /// Ready ops that begin a group on this stage, and those that begin a microbatch, in order.
    begins: [VecDeque<usize>; 2],
    /// Number of groups and microbatches begun.
    begun: [usize; 2],
    live_groups: u32,
    in_flight: u32,
    parts_in_flight: u32,
    /// Exact, where peaks saturate.
    held_bytes: u128,
}

#[derive(Debug)]
struct Run<'a> {
    graph: &'a Graph,
    rule: &'a AdmissionRule,
    limits: &'a Limits,
    /// Whether a stage holds more than its largest peak.
    too_large: bool,
    stages: Vec<StageState>,
    /// Number of unmet needs of each op.
    needs: Vec<u32>,
    /// Number of each group's first microbatch, counted over all groups.
    first_microbatch: Vec<usize>,
    /// Each stage's microbatch forwards in the order of their keys, if the rule enforces it.
    turns: Vec<Vec<usize>>,
    /// Number of them started.
    turns_taken: Vec<usize>,
    starts: Vec<u64>,
    /// (time, 0 for an end or 1 for an arrival, op).
    events: BinaryHeap<Reverse<(u64, u8, usize)>>,
    now: u64,
    done: usize,
}

/// Returns the start of each op; `None` if the run sticks or exceeds a limit.
///
/// Bounds depend on what the stage itself has run, so lists of these ops in this order end no sooner. Peaks depend on
/// the order of a stage's ops alone, so theirs are those of the run.
pub(super) fn run(graph: &Graph, rule: &AdmissionRule, limits: &Limits) -> Option<Vec<u64>> {
    let mut run = Run::new(graph, rule, limits);
    for id in 0..graph.len() {
        if run.needs[id] == 0 {
            run.ready(id);
        }
    }
    for stage in 0..run.stages.len() {
        run.start(stage);
    }
    while let Some(&Reverse((now, _, _))) = run.events.peek() {
        if now > limits.end_ns_max || run.too_large {
            return None;
        }
        run.now = now;
        while let Some(&Reverse((time, kind, id))) = run.events.peek()
            && time == now
        {
            run.events.pop();
            if kind == 0 { run.end(id) } else { run.release(id) }
        }
        for stage in 0..run.stages.len() {
            if std::mem::take(&mut run.stages[stage].changed) {
                run.start(stage);
            }
        }
    }
    (run.done == graph.len()).then_some(run.starts)
}

impl<'a> Run<'a> {
    fn new(graph: &'a Graph, rule: &'a AdmissionRule, limits: &'a Limits) -> Self {
        let mut needs = vec![0; graph.len()];
        for (id, count) in needs.iter_mut().enumerate() {
            graph.local_needs(id, |_| *count += 1);
            *count += u32::from(graph.source(id).is_some());
        }
        let mut microbatches = 0;
        let first_microbatch = (0..graph.groups())
            .map(|group| {
                microbatches += graph.microbatches(group) as usize;
                microbatches - graph.microbatches(group) as usize
            })
            .collect();
        let fixed = |stage: u32| limits.peaks_max.get(stage as usize).map_or(0, |it| it.0.fixed);
        let stage = |stage| StageState {
            busy: false,
            changed: false,
            ready: Default::default(),
            begins: Default::default(),
            begun: [0; 2],
            live_groups: 0,
            in_flight: 0,
            parts_in_flight: 0,
            held_bytes: fixed(stage).into(),
        };
        Self {
            graph,
            rule,
            limits,
            too_large: false,
            stages: (0..graph.stages).map(stage).collect(),
            needs,
            first_microbatch,
            turns: turns(graph, rule),
            turns_taken: vec![0; graph.stages as usize],
            starts: vec![0; graph.len()],
            events: BinaryHeap::new(),
            now: 0,
            done: 0,
        }
    }

    fn stage_of(&self, id: usize) -> usize {
        self.graph.stage(self.graph.unit(id).part) as usize
    }

    /// Returns whether an op is the first (forward) or last (backward) of its group or microbatch on its stage.
    fn is_outermost(&self, id: usize) -> bool {
        let unit = self.graph.unit(id);
        unit.part < self.graph.stages && (!unit.kind.is_prefix() || unit.index == 0)
    }

    /// Returns the number of an op's group or microbatch, counted over all groups.
    fn number(&self, id: usize) -> usize {
        let unit = self.graph.unit(id);
        if unit.kind.is_prefix() {
            unit.group as usize
        } else {
            self.first_microbatch[unit.group as usize] + unit.index as usize
        }
    }

    fn ready(&mut self, id: usize) {
        let unit = self.graph.unit(id);
        let begins = unit.kind.is_forward() && self.is_outermost(id);
        let (key, stage) = (self.rule.key(self.graph, unit), self.stage_of(id));
        let state = &mut self.stages[stage];
        state.changed = true;
        if begins {
            // Groups become ready in order; microbatches of one group may not.
            let queue = &mut state.begins[usize::from(!unit.kind.is_prefix())];
            let at = queue.partition_point(|other| *other < id);
            queue.insert(at, id);
        } else {
            state.ready[unit.kind as usize].push(Reverse((key, id)));
        }
    }

    fn release(&mut self, id: usize) {
        self.needs[id] -= 1;
        if self.needs[id] == 0 {
            self.ready(id);
        }
    }

    /// Returns the op of a kind that may start next on a stage, and whether it begins a group or microbatch.
    fn candidate(&self, stage: usize, kind: StageOpKind) -> Option<(usize, bool)> {
        let first = self.first(stage, kind)?;
        if kind.is_prefix() || !self.rule.bound_parts {
            return Some(first);
        }
        let room = self.stages[stage].parts_in_flight < self.rule.parts_max(stage as u32);
        let turn = self.turns[stage].get(self.turns_taken[stage]).copied();
        let may = if kind == StageOpKind::MicrobatchForward {
            room && turn == Some(first.0)
        } else {
            // Forwards and backwards alternate: while forwards are left, a backward runs when there is no room.
            let group = |id: usize| self.graph.unit(id).group;
            !room || turn.is_none_or(|turn| group(turn) != group(first.0))
        };
        may.then_some(first)
    }

    /// Returns the first ready op of a kind, and whether it begins a group or microbatch.
    fn first(&self, stage: usize, kind: StageOpKind) -> Option<(usize, bool)> {
        let state = &self.stages[stage];
        let microbatch_forward = kind == StageOpKind::MicrobatchForward;
        let waiting = state.ready[kind as usize].peek().map(|Reverse((key, id))| (*key, *id));
        let begins = kind.is_forward().then(|| self.beginning(stage, microbatch_forward)).flatten();
        match (waiting, begins) {
            (Some((_, id)), None) => Some((id, false)),
            (Some((key, id)), Some(first)) => {
                let ahead = self.rule.key(self.graph, self.graph.unit(first)) < key;
                Some(if ahead { (first, true) } else { (id, false) })
            }
            (None, Some(first)) => Some((first, true)),
            (None, None) => None,
        }
    }

    /// Returns the op that begins the next group or microbatch, if it is ready and there is room.
    fn beginning(&self, stage: usize, microbatch: bool) -> Option<usize> {
        let state = &self.stages[stage];
        let &id = state.begins[usize::from(microbatch)].front()?;
        let room = if microbatch {
            state.in_flight < self.rule.in_flight_max(stage as u32)
        } else {
            state.live_groups < self.rule.live_groups_max
        };
        (room && self.number(id) == state.begun[usize::from(microbatch)]).then_some(id)
    }

    fn start(&mut self, stage: usize) {
        if self.stages[stage].busy {
            return;
        }
        let ranked = self.rule.ranks.iter();
        let best = ranked.filter_map(|kind| self.candidate(stage, *kind)).next();
        let Some((id, begins)) = best else { return };
        let kind = self.graph.unit(id).kind;
        let state = &mut self.stages[stage];
        if begins {
            let which = usize::from(!kind.is_prefix());
            state.begins[which].pop_front();
            state.begun[which] += 1;
            if kind.is_prefix() { state.live_groups += 1 } else { state.in_flight += 1 }
        } else {
            state.ready[kind as usize].pop();
        }
        if kind == StageOpKind::MicrobatchForward {
            state.parts_in_flight += 1;
            self.turns_taken[stage] += 1;
        }
        state.busy = true;
        self.hold(stage, id);
        self.starts[id] = self.now;
        self.events.push(Reverse((self.now + self.graph.op_ns[id], 0, id)));
    }

    /// Counts what an op holds, as [`peak`](super::peaks::peak) does.
    fn hold(&mut self, stage: usize, id: usize) {
        let Some((bytes, peak_max)) = self.limits.peaks_max.get(stage) else { return };
        let PipelineUnit { kind, part, .. } = self.graph.unit(id);
        let rows = u128::from(self.graph.rows[id]);
        let kept = rows * bytes.kept(kind, part + 1 == self.graph.parts);
        let held = &mut self.stages[stage].held_bytes;
        if kind.is_forward() {
            *held += kept;
        }
        let seen = (*held + rows * u128::from(bytes.working(kind))).min(u64::MAX.into());
        self.too_large |= seen > u128::from(*peak_max);
        if !kind.is_forward() {
            *held -= kept;
        }
    }

    fn end(&mut self, id: usize) {
        self.done += 1;
        let outermost = self.is_outermost(id);
        let stage = self.stage_of(id);
        let state = &mut self.stages[stage];
        (state.busy, state.changed) = (false, true);
        match self.graph.unit(id).kind {
            StageOpKind::PrefixBackward => state.live_groups -= u32::from(outermost),
            StageOpKind::MicrobatchBackward => {
                state.in_flight -= u32::from(outermost);
                state.parts_in_flight -= 1;
            }
            _ => {}
        }
        let graph = self.graph;
        graph.local_needed_by(id, |needing| self.release(needing));
        if let Some(target) = graph.target(id) {
            let transfer_ns = if graph.sends(id) { graph.transfer_ns[id] } else { 0 };
            if transfer_ns == 0 {
                self.release(target);
            } else {
                self.events.push(Reverse((self.now + transfer_ns, 1, target)));
            }
        }
    }
}

/// Returns each stage's microbatch forwards in the order of their keys; empty unless the rule enforces it.
fn turns(graph: &Graph, rule: &AdmissionRule) -> Vec<Vec<usize>> {
    let mut turns = vec![Vec::new(); graph.stages as usize];
    if !rule.bound_parts {
        return turns;
    }
    for id in 0..graph.len() {
        let unit = graph.unit(id);
        if unit.kind == StageOpKind::MicrobatchForward {
            turns[graph.stage(unit.part) as usize].push(id);
        }
    }
    for stage in &mut turns {
        stage.sort_by_key(|id| rule.key(graph, graph.unit(*id)));
    }
    turns
}
