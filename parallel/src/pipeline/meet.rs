//! Replay of op lists: the times of all ops and transfers, and deadlocks.
//!
//! A trainer's transfers follow one of three timing modes. In each, the k-th send of a channel (an ordered
//! pair of stages) matches the k-th receive, a channel carries one transfer at a time, and times do not
//! depend on the order in which stages are visited: each is a maximum over what it waits for.

use serde::{Deserialize, Serialize};

use super::PipelineError;
use super::graph::Graph;
use super::lists::{StageList, StageStep, StageStepKind};
use crate::simulate::TimeSpan;

/// Timing mode of transfers.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TransferTiming {
    /// Posting never blocks, receives are posted one op ahead, and an op waits for what it receives: a
    /// transfer starts when it is sent.
    Overlapped,
    /// A batch is posted at once and blocks its stage until all of it is done. A transfer starts when both
    /// ends are posted.
    Batched,
    /// Each send and each receive blocks its stage until it is done; there are no buffers.
    OneByOne,
}

impl TransferTiming {
    /// All modes, the most permissive first.
    pub const ALL: [Self; 3] = [Self::Overlapped, Self::Batched, Self::OneByOne];

    const fn name(self) -> &'static str {
        match self {
            Self::Overlapped => "overlapped transfers",
            Self::Batched => "blocking batches",
            Self::OneByOne => "blocking sends",
        }
    }
}

/// Times of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferTime {
    /// The sending stage.
    pub from: u32,
    /// Index of its op.
    pub from_op: u32,
    /// The receiving stage.
    pub to: u32,
    /// Index of its op.
    pub to_op: u32,
    /// Start.
    pub start_ns: u64,
    /// End.
    pub end_ns: u64,
}

/// Times of all ops and transfers.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PipelineTimes {
    /// Each stage's ops, in list order.
    pub ops: Vec<Vec<TimeSpan>>,
    /// All transfers, by start, then stages.
    pub transfers: Vec<TransferTime>,
    /// End of the last op.
    pub makespan_ns: u64,
}

/// A posted end of a transfer.
#[derive(Clone, Copy, Debug)]
struct Posted {
    /// Index of the op in the stage that posted it.
    op: u32,
    /// The op that sends.
    id: usize,
    ns: u64,
}

/// Transfers posted from one stage to another.
#[derive(Clone, Debug, Default)]
struct Channel {
    sends: Vec<Posted>,
    receives: Vec<Posted>,
    free_ns: u64,
}

#[derive(Clone, Debug, Default)]
struct Walker {
    /// The next step.
    step: usize,
    now_ns: u64,
    /// Unfinished transfers of the open batch.
    open: u32,
    /// End of the finished transfers of the open batch.
    batch_ns: u64,
    /// End of each op's receive.
    arrived_ns: Vec<Option<u64>>,
    times: Vec<TimeSpan>,
}

pub(super) struct TransferReplay<'a> {
    graph: &'a Graph,
    lists: &'a [StageList],
    /// The graph's ids of each stage's ops.
    ids: &'a [Vec<usize>],
    meeting: TransferTiming,
    channels: Vec<Channel>,
    walkers: Vec<Walker>,
    transfers: Vec<TransferTime>,
    /// Stages that may continue.
    awake: Vec<usize>,
}

impl<'a> TransferReplay<'a> {
    /// Every step of `lists` must name an op of its list.
    pub(super) fn new(
        graph: &'a Graph,
        lists: &'a [StageList],
        ids: &'a [Vec<usize>],
        meeting: TransferTiming,
    ) -> Self {
        let walker = |ids: &Vec<usize>| Walker {
            arrived_ns: vec![None; ids.len()],
            times: vec![TimeSpan::default(); ids.len()],
            ..Walker::default()
        };
        Self {
            graph,
            lists,
            ids,
            meeting,
            channels: vec![Channel::default(); lists.len() * lists.len()],
            walkers: ids.iter().map(walker).collect(),
            transfers: Vec::new(),
            awake: (0..lists.len()).rev().collect(),
        }
    }

    /// Runs the replay.
    ///
    /// # Errors
    /// `Mismatch` if matched ends differ, `Cycle` for a deadlock.
    pub(super) fn run(mut self) -> Result<PipelineTimes, PipelineError> {
        while let Some(stage) = self.awake.pop() {
            while self.step(stage)? {}
        }
        let unfinished = |(walker, list): (&Walker, &StageList)| walker.step < list.steps.len();
        if self.walkers.iter().zip(self.lists).any(unfinished) {
            return Err(self.cycle());
        }
        let key = |t: &TransferTime| (t.start_ns, t.from, t.to, t.from_op);
        self.transfers.sort_unstable_by_key(key);
        let ops: Vec<Vec<TimeSpan>> = self.walkers.into_iter().map(|walker| walker.times).collect();
        let makespan_ns = ops.iter().flatten().map(|time| time.end_ns).max().unwrap_or(0);
        Ok(PipelineTimes { ops, transfers: self.transfers, makespan_ns })
    }

    /// Executes a stage's next step; returns `false` if it must wait or is done.
    fn step(&mut self, stage: usize) -> Result<bool, PipelineError> {
        let steps = &self.lists[stage].steps;
        let walker = &mut self.walkers[stage];
        if walker.open > 0 {
            return Ok(false);
        }
        walker.now_ns = walker.now_ns.max(std::mem::take(&mut walker.batch_ns));
        let Some(&step) = steps.get(walker.step) else { return Ok(false) };
        if step.kind == StageStepKind::Compute {
            return Ok(self.compute(stage, step.op as usize));
        }
        let mut end = walker.step + 1;
        if self.meeting == TransferTiming::Batched {
            let same = |other: &&StageStep| {
                other.kind != StageStepKind::Compute && other.batch == step.batch
            };
            end += steps[end..].iter().take_while(same).count();
        }
        let batch = walker.step..end;
        walker.step = end;
        let now_ns = walker.now_ns;
        if self.meeting != TransferTiming::Overlapped {
            walker.open = batch.len() as u32;
        }
        for at in batch {
            self.post(stage, self.lists[stage].steps[at], now_ns)?;
        }
        Ok(true)
    }

    fn compute(&mut self, stage: usize, op: usize) -> bool {
        let id = self.ids[stage][op];
        let walker = &mut self.walkers[stage];
        let receives = self.lists[stage].ops[op].receives.is_some();
        let arrived_ns = match walker.arrived_ns[op] {
            None if receives => return false,
            arrived_ns => arrived_ns.unwrap_or(0),
        };
        let start_ns = walker.now_ns.max(arrived_ns);
        walker.now_ns = start_ns + self.graph.op_ns[id];
        walker.times[op] = TimeSpan { start_ns, end_ns: walker.now_ns };
        walker.step += 1;
        true
    }

    /// Returns the sender, the receiver and the sending op of a step's transfer; `None` if its op has no such
    /// transfer.
    fn ends(&self, stage: usize, step: StageStep) -> Option<(usize, usize, usize)> {
        let op = self.lists[stage].ops[step.op as usize];
        let id = self.ids[stage][step.op as usize];
        if step.kind == StageStepKind::Send {
            Some((stage, op.sends?.peer as usize, id))
        } else {
            Some((op.receives?.peer as usize, stage, self.graph.source(id)?))
        }
    }

    fn post(&mut self, stage: usize, step: StageStep, ns: u64) -> Result<(), PipelineError> {
        let Some((from, to, id)) = self.ends(stage, step) else { return Ok(()) };
        let posted = Posted { op: step.op, id, ns };
        let channel = &mut self.channels[from * self.lists.len() + to];
        let (mine, others) = if step.kind == StageStepKind::Send {
            (&mut channel.sends, &channel.receives)
        } else {
            (&mut channel.receives, &channel.sends)
        };
        let other = others.get(mine.len()).copied();
        mine.push(posted);
        let Some(other) = other else { return Ok(()) };
        let (sent, received) =
            if step.kind == StageStepKind::Send { (posted, other) } else { (other, posted) };
        if sent.id != received.id {
            return Err(PipelineError::Mismatch {
                from: from as u32,
                to: to as u32,
                sent: self.graph.name(sent.id),
                received: self.graph.name(received.id),
            });
        }
        let posted_ns = match self.meeting {
            TransferTiming::Overlapped => sent.ns,
            _ => sent.ns.max(received.ns),
        };
        let start_ns = posted_ns.max(channel.free_ns);
        let end_ns = start_ns + self.graph.transfer_ns[id];
        channel.free_ns = end_ns;
        self.transfers.push(TransferTime {
            from: from as u32,
            from_op: sent.op,
            to: to as u32,
            to_op: received.op,
            start_ns,
            end_ns,
        });
        self.walkers[to].arrived_ns[received.op as usize] = Some(end_ns);
        for stage in [from, to] {
            self.done(stage, end_ns);
        }
        Ok(())
    }

    /// Processes the end of a stage's transfer.
    fn done(&mut self, stage: usize, end_ns: u64) {
        let walker = &mut self.walkers[stage];
        if self.meeting != TransferTiming::Overlapped {
            walker.open -= 1;
            walker.batch_ns = walker.batch_ns.max(end_ns);
        }
        self.awake.push(stage);
    }

    /// Describes what a blocked stage waits for, and returns the stage it waits for.
    fn waiting(&self, stage: usize) -> Option<(String, usize)> {
        let walker = &self.walkers[stage];
        let steps = &self.lists[stage].steps;
        if walker.open == 0 {
            let step = steps.get(walker.step)?;
            let name = self.graph.name(self.ids[stage][step.op as usize]);
            let from = self.lists[stage].ops[step.op as usize].receives?.peer;
            return Some((
                format!("stage {stage} waits for stage {from} before {name}"),
                from as usize,
            ));
        }
        // A posted transfer whose other end is not posted.
        let unmatched = |step: &&StageStep| {
            self.ends(stage, **step).is_some_and(|(from, to, id)| {
                let channel = &self.channels[from * self.lists.len() + to];
                let others = if step.kind == StageStepKind::Send {
                    &channel.receives
                } else {
                    &channel.sends
                };
                others.iter().all(|posted| posted.id != id)
            })
        };
        let step = steps[..walker.step].iter().rfind(unmatched)?;
        let (from, to, id) = self.ends(stage, *step)?;
        let peer = if step.kind == StageStepKind::Send { to } else { from };
        let verb = if step.kind == StageStepKind::Send { "send to" } else { "receive from" };
        Some((format!("stage {stage} would {verb} stage {peer} {}", self.graph.name(id)), peer))
    }

    /// Describes the cycle that the first unfinished stage is in or waits for.
    fn cycle(&self) -> PipelineError {
        let stuck = |stage: &usize| self.walkers[*stage].step < self.lists[*stage].steps.len();
        let mut path: Vec<usize> = Vec::new();
        let mut waits = Vec::new();
        let mut at = (0..self.lists.len()).find(stuck).unwrap_or(0);
        while !path.contains(&at) {
            let Some((text, peer)) = self.waiting(at) else { break };
            path.push(at);
            waits.push(text);
            at = peer;
        }
        let begin = path.iter().position(|stage| *stage == at).unwrap_or(0);
        PipelineError::Cycle { meeting: self.meeting.name(), waits: waits.split_off(begin) }
    }
}
