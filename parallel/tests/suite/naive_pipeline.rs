//! Runs op lists tick by tick, without heaps or closed forms.
//!
//! Written from docs/method.md §9 and the documentation of `TransferTiming`, independently of the code under
//! test.

use std::collections::{BTreeMap, BTreeSet};

use dormouse_parallel::pipeline::*;

/// Kind, group, index, part.
pub(crate) type Name = (StageOpKind, u32, u32, u32);

pub(crate) fn name(op: &StageOp) -> Name {
    (op.kind, op.group, op.index, op.part)
}

/// All ops that must end before this one starts, on any stage.
pub(crate) fn needs(op: &StageOp, parts: u32, chunks: u32, microbatches: u32) -> Vec<Name> {
    use StageOpKind::*;
    let StageOp { kind, group, index, part, .. } = *op;
    let mut needs = Vec::new();
    match kind {
        PrefixForward => {
            needs.extend((0..index).map(|chunk| (PrefixForward, group, chunk, part)));
        }
        MicrobatchForward => {
            needs.extend((0..chunks).map(|chunk| (PrefixForward, group, chunk, part)))
        }
        MicrobatchBackward => needs.push((MicrobatchForward, group, index, part)),
        PrefixBackward => {
            needs.extend(
                (0..microbatches).map(|microbatch| (MicrobatchBackward, group, microbatch, part)),
            );
            needs.extend((index + 1..chunks).map(|chunk| (PrefixBackward, group, chunk, part)));
        }
    }
    match kind {
        PrefixForward | MicrobatchForward if part > 0 => needs.push((kind, group, index, part - 1)),
        MicrobatchBackward | PrefixBackward if part + 1 < parts => {
            needs.push((kind, group, index, part + 1));
        }
        _ => {}
    }
    needs
}

/// Chunks of each group, counted from the lists.
pub(crate) fn chunks(stages: &Stages) -> BTreeMap<u32, u32> {
    let mut chunks = BTreeMap::new();
    for op in stages.stages.iter().flat_map(|stage| &stage.ops) {
        if op.kind == StageOpKind::PrefixForward && op.part == 0 {
            *chunks.entry(op.group).or_default() += 1;
        }
    }
    chunks
}

#[derive(Default)]
struct Channel {
    sends: Vec<(Name, u64)>,
    receives: Vec<(Name, u64)>,
    /// Number of started transfers, and the end of the last.
    begun: usize,
    free: u64,
    /// End times of running transfers.
    ends: Vec<(usize, u64)>,
}

struct Clock<'a> {
    stages: &'a Stages,
    pipeline: &'a Pipeline,
    costs: Vec<Vec<u64>>,
    meeting: TransferTiming,
    now: u64,
    at: Vec<usize>,
    running: Vec<Option<u64>>,
    /// Unfinished transfers of each stage's open batch: (sends, transfer).
    open: Vec<BTreeSet<(bool, Name)>>,
    channels: BTreeMap<(u32, u32), Channel>,
    computed: BTreeSet<Name>,
    arrived: BTreeSet<Name>,
    times: Vec<Vec<TimeSpan>>,
}

/// Times of all ops; `None` if the lists deadlock or an op starts before an op that it needs.
pub(crate) fn run(
    pipeline: &Pipeline,
    stages: &Stages,
    meeting: TransferTiming,
) -> Option<Vec<Vec<TimeSpan>>> {
    let count = stages.stages.len();
    let costs = costs(pipeline, stages);
    let longest: u64 = costs.iter().flatten().sum::<u64>()
        + stages
            .stages
            .iter()
            .flat_map(|s| &s.ops)
            .map(|op| transfer_ns(pipeline, op))
            .sum::<u64>();
    let mut clock = Clock {
        stages,
        pipeline,
        costs,
        meeting,
        now: 0,
        at: vec![0; count],
        running: vec![None; count],
        open: vec![BTreeSet::new(); count],
        channels: BTreeMap::new(),
        computed: BTreeSet::new(),
        arrived: BTreeSet::new(),
        times: stages.stages.iter().map(|s| vec![TimeSpan::default(); s.ops.len()]).collect(),
    };
    while clock.now <= longest + 1 {
        while clock.moves()? {}
        if clock.at.iter().zip(&stages.stages).all(|(at, stage)| *at == stage.steps.len()) {
            return Some(clock.times);
        }
        clock.now += 1;
    }
    None
}

/// The time of each op, for pipelines without pairs or scaled parts.
fn costs(pipeline: &Pipeline, stages: &Stages) -> Vec<Vec<u64>> {
    let cost = |op: &StageOp| {
        let group = &pipeline.groups[op.group as usize];
        let microbatch = || group.microbatches[op.index as usize];
        let share = |whole: u64| {
            whole * op.rows.end / group.prefix_rows - whole * op.rows.begin / group.prefix_rows
        };
        let compute = match op.kind {
            StageOpKind::PrefixForward => share(group.forward.linear_ns),
            StageOpKind::PrefixBackward => share(group.backward.linear_ns),
            StageOpKind::MicrobatchForward => microbatch().forward_ns,
            StageOpKind::MicrobatchBackward => microbatch().backward_ns,
        };
        (compute + pipeline.rates.op_overhead_ns).max(1)
    };
    stages.stages.iter().map(|stage| stage.ops.iter().map(cost).collect()).collect()
}

fn transfer_ns(pipeline: &Pipeline, op: &StageOp) -> u64 {
    let bytes = op.rows.count() * pipeline.row_bytes.activation;
    let copy = match pipeline.rates.link_bytes_per_s {
        0 => 0,
        rate => (bytes * 1_000_000_000).div_ceil(rate),
    };
    copy + pipeline.rates.transfer_latency_ns
}

impl Clock<'_> {
    /// Performs one event of the current tick, if any. `None` if an op starts too early or the ends of
    /// different transfers are matched.
    fn moves(&mut self) -> Option<bool> {
        for stage in 0..self.at.len() {
            if self.stage_moves(stage)? {
                return Some(true);
            }
        }
        let pairs: Vec<(u32, u32)> = self.channels.keys().copied().collect();
        for pair in pairs {
            if self.channel_moves(pair)? {
                return Some(true);
            }
        }
        Some(false)
    }

    fn stage_moves(&mut self, stage: usize) -> Option<bool> {
        let list = &self.stages.stages[stage];
        if let Some(end) = self.running[stage] {
            if end == self.now {
                let step = list.steps[self.at[stage]];
                self.computed.insert(name(&list.ops[step.op as usize]));
                self.running[stage] = None;
                self.at[stage] += 1;
                return Some(true);
            }
            return Some(false);
        }
        if self.meeting != TransferTiming::Overlapped && !self.open[stage].is_empty() {
            return Some(false);
        }
        let Some(step) = list.steps.get(self.at[stage]) else { return Some(false) };
        let op = &list.ops[step.op as usize];
        if step.kind == StageStepKind::Compute {
            if op.receives.is_some() && !self.arrived.contains(&name(op)) {
                return Some(false);
            }
            let microbatches = self.pipeline.groups[op.group as usize].microbatches.len() as u32;
            let parts = self.pipeline.stages * self.pipeline.virtual_stages;
            let chunks = chunks(self.stages)[&op.group];
            if !needs(op, parts, chunks, microbatches)
                .iter()
                .all(|need| self.computed.contains(need))
            {
                return None;
            }
            let end = self.now + self.costs[stage][step.op as usize];
            self.times[stage][step.op as usize] = TimeSpan { start_ns: self.now, end_ns: end };
            self.running[stage] = Some(end);
            return Some(true);
        }
        let mut count = 1;
        if self.meeting == TransferTiming::Batched {
            let rest = &list.steps[self.at[stage] + 1..];
            let same = |other: &&StageStep| {
                other.kind != StageStepKind::Compute && other.batch == step.batch
            };
            count += rest.iter().take_while(same).count();
        }
        for at in self.at[stage]..self.at[stage] + count {
            self.post(stage as u32, list.steps[at])?;
        }
        self.at[stage] += count;
        Some(true)
    }

    /// A transfer is named by the op that receives it.
    fn post(&mut self, stage: u32, step: StageStep) -> Option<()> {
        let op = self.stages.stages[stage as usize].ops[step.op as usize];
        let (kind, group, index, part) = name(&op);
        if step.kind == StageStepKind::Send {
            if !self.computed.contains(&name(&op)) {
                return None;
            }
            let to = if kind.is_forward() { part + 1 } else { part.checked_sub(1)? };
            let what = (kind, group, index, to);
            let channel = self.channels.entry((stage, op.sends?.peer)).or_default();
            channel.sends.push((what, self.now));
            self.open[stage as usize].insert((true, what));
        } else {
            let channel = self.channels.entry((op.receives?.peer, stage)).or_default();
            channel.receives.push((name(&op), self.now));
            self.open[stage as usize].insert((false, name(&op)));
        }
        Some(())
    }

    fn channel_moves(&mut self, pair: (u32, u32)) -> Option<bool> {
        let channel = self.channels.get_mut(&pair)?;
        let next = channel.begun;
        if let Some((sent, _)) = channel.sends.get(next)
            && channel.free <= self.now
            && (self.meeting == TransferTiming::Overlapped || channel.receives.len() > next)
        {
            let (kind, group, index, part) = *sent;
            let source = if kind.is_forward() { part - 1 } else { part + 1 };
            let from = &self.stages.stages[pair.0 as usize];
            let op = from.ops.iter().find(|op| name(op) == (kind, group, index, source))?;
            channel.free = self.now + transfer_ns(self.pipeline, op);
            channel.ends.push((next, channel.free));
            channel.begun += 1;
            return Some(true);
        }
        let done = channel
            .ends
            .iter()
            .position(|(which, end)| *end <= self.now && channel.receives.len() > *which);
        let Some(done) = done else { return Some(false) };
        let (which, _) = channel.ends.remove(done);
        let (sent, received) = (channel.sends[which].0, channel.receives[which].0);
        if sent != received {
            return None;
        }
        self.arrived.insert(received);
        self.open[pair.0 as usize].remove(&(true, sent));
        self.open[pair.1 as usize].remove(&(false, received));
        Some(true)
    }
}
