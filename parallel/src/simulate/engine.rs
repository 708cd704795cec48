//! The event loop.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BinaryHeap, VecDeque};

use super::SimulateError;
use super::check::check;
use super::copies::Copies;
use super::timeline::{RankTimeline, StepTime, TimeSpan, Timeline};
use super::world::{SimulatedRank, World};
use dormouse_residency::{LinkDirection, Tier, copy_ns};

/// An event, in the order in which simultaneous events are processed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Step,
    Copy(LinkDirection),
    Exchange(u32),
}

/// The reason a rank waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Waiting {
    Exchanges,
    Room,
    Wakes,
}

#[derive(Debug)]
struct RankState<'a> {
    rank: &'a SimulatedRank,
    copies: Copies<'a>,
    timeline: RankTimeline,
    /// Number of the reached or running step.
    step: usize,
    running: bool,
    /// Whether the blocks of the reached step are allocated.
    allocated: bool,
    /// Leading needs and receives of the reached step that are met.
    met: [usize; 2],
    /// Reason and start time of the current wait.
    waiting: Option<(Waiting, u64)>,
}

#[derive(Debug)]
struct Engine<'a> {
    world: &'a World,
    ranks: Vec<RankState<'a>>,
    /// (time, event, rank)
    events: BinaryHeap<Reverse<(u64, Event, usize)>>,
    /// Exchanges queued per pair of ranks; the first is being sent.
    links: BTreeMap<(u32, u32), VecDeque<u32>>,
    arrived: Vec<bool>,
    exchanges: Vec<TimeSpan>,
    now_ns: u64,
}

impl World {
    /// Runs the simulation and returns the timeline.
    ///
    /// # Errors
    /// An invalid world (`Count`, `Block`, `Exchange`, `Rate`, `TooLarge`), or `Stuck` if a rank waits
    /// forever for room, a block or an exchange.
    pub fn run(&self) -> Result<Timeline, SimulateError> {
        check(self)?;
        let mut engine = Engine::new(self);
        for rank in 0..engine.ranks.len() {
            engine.reach(rank);
            engine.advance(rank);
        }
        while let Some(Reverse((now_ns, event, rank))) = engine.events.pop() {
            engine.now_ns = now_ns;
            engine.take(event, rank);
        }
        engine.finish()
    }
}

impl<'a> Engine<'a> {
    fn new(world: &'a World) -> Self {
        let rank = |rank: &'a SimulatedRank| RankState {
            rank,
            copies: Copies::new(rank),
            timeline: RankTimeline {
                steps: vec![StepTime::default(); rank.steps.len()],
                ..RankTimeline::default()
            },
            step: 0,
            running: false,
            allocated: false,
            met: [0; 2],
            waiting: None,
        };
        Self {
            world,
            ranks: world.ranks.iter().map(rank).collect(),
            events: BinaryHeap::new(),
            links: BTreeMap::new(),
            arrived: vec![false; world.exchanges.len()],
            exchanges: vec![TimeSpan::default(); world.exchanges.len()],
            now_ns: 0,
        }
    }

    fn take(&mut self, event: Event, rank: usize) {
        match event {
            Event::Step => self.end_step(rank),
            Event::Copy(link) => {
                let state = &mut self.ranks[rank];
                state.copies.end(link, self.now_ns, &mut state.timeline);
            }
            Event::Exchange(exchange) => {
                self.arrived[exchange as usize] = true;
                let link = &self.world.exchanges[exchange as usize];
                let queue = self.links.entry((link.from, link.to)).or_default();
                queue.pop_front();
                if let Some(&next) = queue.front() {
                    self.start_exchange(next);
                }
            }
        }
        self.advance(rank);
    }

    fn end_step(&mut self, rank: usize) {
        let state = &mut self.ranks[rank];
        let step = &state.rank.steps[state.step];
        for &block in &step.frees {
            state.copies.free(block);
        }
        for sleep in &step.sleeps {
            state.copies.set_target(sleep.block, sleep.tier);
        }
        state.timeline.end_ns = self.now_ns;
        state.step += 1;
        state.running = false;
        for &exchange in &step.sends {
            let link = &self.world.exchanges[exchange as usize];
            let queue = self.links.entry((link.from, link.to)).or_default();
            queue.push_back(exchange);
            if queue.len() == 1 {
                self.start_exchange(exchange);
            }
        }
        self.reach(rank);
    }

    fn start_exchange(&mut self, exchange: u32) {
        let link = &self.world.exchanges[exchange as usize];
        // A link without a rate is unlimited.
        let copy_ns = copy_ns(link.bytes.into(), self.world.link_bytes_per_s).unwrap_or(0);
        let ns = copy_ns.saturating_add(self.world.link_latency_ns);
        let run = TimeSpan { start_ns: self.now_ns, end_ns: self.now_ns.saturating_add(ns) };
        self.exchanges[exchange as usize] = run;
        self.events.push(Reverse((run.end_ns, Event::Exchange(exchange), link.to as usize)));
    }

    /// Processes that a rank reaches its next step.
    fn reach(&mut self, rank: usize) {
        let state = &mut self.ranks[rank];
        let Some(step) = state.rank.steps.get(state.step) else { return };
        state.timeline.steps[state.step].reached_ns = self.now_ns;
        (state.allocated, state.met) = (false, [0; 2]);
        for &block in &step.wakes {
            state.copies.set_target(block, Tier::Device);
        }
        for &block in &step.needs {
            let demanded = state.copies.set_target(block, Tier::Device);
            state.timeline.demand_wakes += u64::from(demanded);
        }
    }

    /// Starts everything that can start on a rank: first its step, which takes room before copies do.
    fn advance(&mut self, rank: usize) {
        let missing = self.missing(rank);
        let now_ns = self.now_ns;
        let state = &mut self.ranks[rank];
        if let Some((waiting, since_ns)) = state.waiting.take() {
            let waits = &mut state.timeline.waits;
            let charged = match waiting {
                Waiting::Exchanges => &mut waits.exchanges_ns,
                Waiting::Room => &mut waits.room_ns,
                Waiting::Wakes => &mut waits.wakes_ns,
            };
            *charged += now_ns - since_ns;
        }
        state.waiting = missing.map(|waiting| (waiting, now_ns));
        let reached = state.step < state.rank.steps.len() && !state.running;
        if reached && missing.is_none() {
            let compute_ns = state.rank.steps[state.step].compute_ns;
            let end_ns = now_ns.saturating_add(compute_ns);
            let time = &mut state.timeline.steps[state.step];
            (time.start_ns, time.end_ns) = (now_ns, end_ns);
            state.timeline.compute_ns = state.timeline.compute_ns.saturating_add(end_ns - now_ns);
            state.running = true;
            self.events.push(Reverse((end_ns, Event::Step, rank)));
        }
        let only_room = missing == Some(Waiting::Room) && state.needs_met();
        for link in LinkDirection::ALL {
            if link == LinkDirection::Wake && only_room {
                continue;
            }
            if let Some(end_ns) = state.copies.start(link, now_ns) {
                self.events.push(Reverse((end_ns, Event::Copy(link), rank)));
            }
        }
        state.copies.sample(now_ns, &mut state.timeline);
    }

    /// Returns what the reached step waits for. Allocates its blocks as soon as there is room.
    fn missing(&mut self, rank: usize) -> Option<Waiting> {
        let state = &mut self.ranks[rank];
        if state.running {
            return None;
        }
        let step = state.rank.steps.get(state.step)?;
        if !state.allocated {
            state.allocated = state.copies.allocate(&step.allocates);
        }
        let arrived = |exchange: &&u32| self.arrived[**exchange as usize];
        state.met[1] += step.receives[state.met[1]..].iter().take_while(arrived).count();
        if state.met[1] < step.receives.len() {
            Some(Waiting::Exchanges)
        } else if !state.allocated {
            Some(Waiting::Room)
        } else if !state.needs_met() {
            Some(Waiting::Wakes)
        } else {
            None
        }
    }

    fn finish(self) -> Result<Timeline, SimulateError> {
        for (rank, state) in self.ranks.iter().enumerate() {
            if state.step < state.rank.steps.len() {
                return Err(SimulateError::Stuck {
                    rank,
                    step: state.step,
                    waits_for: match state.waiting {
                        Some((Waiting::Exchanges, _)) => "exchanges",
                        Some((Waiting::Room, _)) => "room",
                        _ => "wakes",
                    },
                    device_bytes: state.copies.used(Tier::Device),
                    host_bytes: state.copies.used(Tier::Host),
                });
            }
        }
        let ranks: Vec<RankTimeline> = self.ranks.into_iter().map(|state| state.timeline).collect();
        let slowest_ns = ranks.iter().map(|rank| rank.end_ns).max().unwrap_or(0);
        let end_ns = slowest_ns.saturating_add(self.world.collective_ns());
        let collective = TimeSpan { start_ns: slowest_ns, end_ns };
        Ok(Timeline { ranks, exchanges: self.exchanges, collective, total_ns: end_ns })
    }
}

impl RankState<'_> {
    /// Returns whether all blocks that the reached step needs are awake.
    fn needs_met(&mut self) -> bool {
        let step = &self.rank.steps[self.step];
        let awake = |block: &&u32| self.copies.is_awake(**block);
        self.met[0] += step.needs[self.met[0]..].iter().take_while(awake).count();
        self.met[0] == step.needs.len()
    }
}

impl World {
    /// Returns the time of a ring reduction: 2·(n−1) rounds, each of an n-th of the bytes.
    fn collective_ns(&self) -> u64 {
        let ranks = self.ranks.len() as u64;
        if self.collective_bytes == 0 || ranks < 2 {
            return 0;
        }
        let rounds = 2 * (ranks - 1);
        let bytes = (u128::from(self.collective_bytes) * u128::from(rounds)).div_ceil(ranks.into());
        let latency_ns = self.link_latency_ns.saturating_mul(rounds);
        copy_ns(bytes, self.link_bytes_per_s).unwrap_or(0).saturating_add(latency_ns)
    }
}
