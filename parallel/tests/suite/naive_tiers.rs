//! Runs one rank's steps and copies tick by tick, by the rules of `simulate`, without heaps or tickets.

use dormouse_parallel::simulate::*;

#[derive(Debug)]
pub(crate) struct Outcome {
    /// Reached, started, ended.
    pub(crate) steps: Vec<[u64; 3]>,
    /// Sorted.
    pub(crate) copies: Vec<(LinkDirection, u32, u64, u64)>,
    /// Device, host, file.
    pub(crate) peak: [u64; 3],
}

#[derive(Clone, Copy, PartialEq)]
enum At {
    Nowhere,
    Rest(Tier),
    /// Over a link, until a time.
    Moving(LinkDirection, u64),
}

#[derive(Clone)]
struct Block {
    bytes: u64,
    at: At,
    wish: Option<Tier>,
    /// Order in which it joined the queue of its next link.
    turn: u64,
}

struct Clock<'a> {
    rank: &'a SimulatedRank,
    blocks: Vec<Block>,
    now: u64,
    turn: u64,
    step: usize,
    made: bool,
    ends: Option<u64>,
    outcome: Outcome,
}

fn next(at: At, wish: Option<Tier>) -> Option<LinkDirection> {
    match (at, wish?) {
        (At::Rest(Tier::Device), Tier::Host | Tier::Nvme) => Some(LinkDirection::Sleep),
        (At::Rest(Tier::Host), Tier::Nvme) => Some(LinkDirection::Write),
        (At::Rest(Tier::Host), Tier::Device) => Some(LinkDirection::Wake),
        (At::Rest(Tier::Nvme), Tier::Device | Tier::Host) => Some(LinkDirection::Read),
        _ => None,
    }
}

const fn ends(link: LinkDirection) -> [Tier; 2] {
    match link {
        LinkDirection::Sleep => [Tier::Device, Tier::Host],
        LinkDirection::Write => [Tier::Host, Tier::Nvme],
        LinkDirection::Read => [Tier::Nvme, Tier::Host],
        LinkDirection::Wake => [Tier::Host, Tier::Device],
    }
}

/// The timeline, or the step that never starts.
pub(crate) fn run(rank: &SimulatedRank) -> Result<Outcome, usize> {
    let block = |bytes: &u64| Block { bytes: *bytes, at: At::Nowhere, wish: None, turn: 0 };
    let mut clock = Clock {
        rank,
        blocks: rank.block_bytes.iter().map(block).collect(),
        now: 0,
        turn: 0,
        step: 0,
        made: false,
        ends: None,
        outcome: Outcome {
            steps: vec![[0; 3]; rank.steps.len()],
            copies: Vec::new(),
            peak: [0; 3],
        },
    };
    clock.reach();
    clock.go_on();
    // Every generated step and copy takes at most a few tens of ticks.
    for _ in 0..20_000 {
        while clock.something_ends() {
            clock.go_on();
        }
        clock.now += 1;
    }
    if clock.step < rank.steps.len() {
        return Err(clock.step);
    }
    clock.outcome.copies.sort_unstable();
    Ok(clock.outcome)
}

impl Clock<'_> {
    fn used(&self, tier: Tier) -> u64 {
        let holds = |block: &&Block| match block.at {
            At::Nowhere => false,
            At::Rest(at) => at == tier,
            At::Moving(link, _) => ends(link).contains(&tier),
        };
        self.blocks.iter().filter(holds).map(|block| block.bytes).sum()
    }

    fn room(&self, tier: Tier, bytes: u64) -> bool {
        let most = match tier {
            Tier::Device => self.rank.machine.device_bytes,
            Tier::Host => self.rank.machine.host_bytes,
            Tier::Nvme => 0,
        };
        most == 0 || self.used(tier) + bytes <= most
    }

    fn wish(&mut self, block: u32, tier: Tier) {
        self.turn += 1;
        let block = &mut self.blocks[block as usize];
        if block.wish != Some(tier) {
            block.wish = Some(tier);
            block.turn = self.turn;
        }
    }

    fn reach(&mut self) {
        if let Some(step) = self.rank.steps.get(self.step) {
            self.outcome.steps[self.step][0] = self.now;
            self.made = false;
            for block in step.wakes.iter().chain(&step.needs) {
                self.wish(*block, Tier::Device);
            }
        }
    }

    /// Ends the step, or else the first link's copy, that ends in this tick.
    fn something_ends(&mut self) -> bool {
        if self.ends == Some(self.now) {
            self.ends = None;
            let step = &self.rank.steps[self.step];
            for block in &step.frees {
                let block = &mut self.blocks[*block as usize];
                block.wish = None;
                if let At::Rest(_) = block.at {
                    block.at = At::Nowhere;
                }
            }
            for sleep in &step.sleeps {
                let tier = if sleep.tier == Tier::Nvme { Tier::Nvme } else { Tier::Host };
                self.wish(sleep.block, tier);
            }
            self.step += 1;
            self.reach();
            return true;
        }
        for link in LinkDirection::ALL {
            let done = |block: &Block| block.at == At::Moving(link, self.now);
            if let Some(number) = self.blocks.iter().position(done) {
                self.turn += 1;
                let block = &mut self.blocks[number];
                block.at = if block.wish.is_none() { At::Nowhere } else { At::Rest(ends(link)[1]) };
                block.turn = self.turn;
                return true;
            }
        }
        false
    }

    fn go_on(&mut self) {
        let mut only_room = false;
        if self.ends.is_none()
            && let Some(step) = self.rank.steps.get(self.step)
        {
            let bytes = step.allocates.iter().map(|b| self.blocks[*b as usize].bytes).sum();
            if !self.made && self.room(Tier::Device, bytes) {
                self.made = true;
                for block in &step.allocates {
                    let block = &mut self.blocks[*block as usize];
                    (block.at, block.wish) = (At::Rest(Tier::Device), Some(Tier::Device));
                }
            }
            let here = |block: &u32| self.blocks[*block as usize].at == At::Rest(Tier::Device);
            let met = step.needs.iter().all(here);
            if met && self.made {
                let end = self.now + step.compute_ns;
                self.ends = Some(end);
                self.outcome.steps[self.step][1..].copy_from_slice(&[self.now, end]);
            }
            only_room = met && !self.made;
        }
        for link in LinkDirection::ALL {
            if !(link == LinkDirection::Wake && only_room) {
                self.start(link);
            }
        }
        for (peak, tier) in self.outcome.peak.iter_mut().zip([Tier::Device, Tier::Host, Tier::Nvme])
        {
            let holds = self.blocks.iter().filter(|block| match block.at {
                At::Nowhere => false,
                At::Rest(at) => at == tier,
                At::Moving(link, _) => ends(link).contains(&tier),
            });
            *peak = (*peak).max(holds.map(|block| block.bytes).sum());
        }
    }

    fn start(&mut self, link: LinkDirection) {
        let busy = |block: &Block| matches!(block.at, At::Moving(over, _) if over == link);
        if self.blocks.iter().any(busy) {
            return;
        }
        let in_line = |number: &usize| {
            let block = &self.blocks[*number];
            next(block.at, block.wish) == Some(link)
        };
        let first = (0..self.blocks.len()).filter(in_line).min_by_key(|at| self.blocks[*at].turn);
        let Some(first) = first else { return };
        let bytes = self.blocks[first].bytes;
        if !self.room(ends(link)[1], bytes) {
            return;
        }
        let machine = &self.rank.machine;
        let rate = match link {
            LinkDirection::Sleep => machine.sleep_bytes_per_s,
            LinkDirection::Write => machine.nvme_write_bytes_per_s,
            LinkDirection::Read => machine.nvme_read_bytes_per_s,
            LinkDirection::Wake => machine.wake_bytes_per_s,
        };
        let end = self.now + (bytes * 1_000_000_000).div_ceil(rate);
        self.blocks[first].at = At::Moving(link, end);
        self.outcome.copies.push((link, first as u32, self.now, end));
    }
}
