//! A rank's blocks: the tier each is in, its target tier, and the links between tiers.
//!
//! A block at rest outside its target tier waits in the queue of the next link on its way. A new target
//! gives it a new ticket; queue entries with an older ticket are skipped.

use std::collections::VecDeque;

use super::timeline::{CopyTime, MemorySample, RankTimeline};
use super::world::{SimulatedRank, capacity_bytes, link_rates};
use dormouse_residency::{LinkDirection, Tier, copy_ns};

#[derive(Clone, Copy, Debug)]
struct Block {
    /// `None` before it is allocated and after it is freed.
    tier: Option<Tier>,
    /// `None` once it is freed.
    target: Option<Tier>,
    ticket: u32,
    moving: bool,
}

#[derive(Clone, Debug, Default)]
struct LinkQueue {
    /// Block and ticket.
    waiting: VecDeque<(u32, u32)>,
    /// The block being copied, and its start time.
    busy: Option<(u32, u64)>,
}

#[derive(Debug)]
pub(super) struct Copies<'a> {
    rank: &'a SimulatedRank,
    blocks: Vec<Block>,
    queues: [LinkQueue; 4],
    used: [u64; 3],
}

/// Returns the next link from a tier to a target.
fn next_link(tier: Option<Tier>, target: Option<Tier>) -> Option<LinkDirection> {
    match (tier?, target?) {
        (Tier::Device, Tier::Host | Tier::Nvme) => Some(LinkDirection::Sleep),
        (Tier::Host, Tier::Nvme) => Some(LinkDirection::Write),
        (Tier::Host, Tier::Device) => Some(LinkDirection::Wake),
        (Tier::Nvme, Tier::Device | Tier::Host) => Some(LinkDirection::Read),
        _ => None,
    }
}

/// Returns the tiers that a link copies from and to.
const fn ends(link: LinkDirection) -> [Tier; 2] {
    match link {
        LinkDirection::Sleep => [Tier::Device, Tier::Host],
        LinkDirection::Write => [Tier::Host, Tier::Nvme],
        LinkDirection::Read => [Tier::Nvme, Tier::Host],
        LinkDirection::Wake => [Tier::Host, Tier::Device],
    }
}

impl<'a> Copies<'a> {
    pub(super) fn new(rank: &'a SimulatedRank) -> Self {
        let block = Block { tier: None, target: None, ticket: 0, moving: false };
        Self {
            rank,
            blocks: vec![block; rank.block_bytes.len()],
            queues: Default::default(),
            used: [0; 3],
        }
    }

    pub(super) fn used(&self, tier: Tier) -> u64 {
        self.used[tier as usize]
    }

    fn bytes(&self, block: u32) -> u64 {
        self.rank.block_bytes[block as usize]
    }

    /// Returns whether a tier has room for `bytes` more.
    fn has_room(&self, tier: Tier, bytes: u64) -> bool {
        let capacity = capacity_bytes(&self.rank.machine, tier);
        capacity.is_none_or(|most| bytes <= most.saturating_sub(self.used(tier)))
    }

    /// Allocates all blocks on the device, or none.
    pub(super) fn allocate(&mut self, blocks: &[u32]) -> bool {
        let bytes = blocks.iter().fold(0, |sum: u64, block| sum.saturating_add(self.bytes(*block)));
        if !self.has_room(Tier::Device, bytes) {
            return false;
        }
        self.used[Tier::Device as usize] = self.used(Tier::Device).saturating_add(bytes);
        for &block in blocks {
            let block = &mut self.blocks[block as usize];
            (block.tier, block.target) = (Some(Tier::Device), Some(Tier::Device));
        }
        true
    }

    /// Frees a block: at once, or at the end of its copy.
    pub(super) fn free(&mut self, number: u32) {
        let bytes = self.bytes(number);
        let block = &mut self.blocks[number as usize];
        block.target = None;
        block.ticket += 1;
        if !block.moving
            && let Some(tier) = block.tier.take()
        {
            self.used[tier as usize] = self.used[tier as usize].saturating_sub(bytes);
        }
    }

    /// Sets the target of a block; returns `false` if it is the target already.
    pub(super) fn set_target(&mut self, number: u32, tier: Tier) -> bool {
        let block = &mut self.blocks[number as usize];
        if block.target == Some(tier) {
            return false;
        }
        block.target = Some(tier);
        block.ticket += 1;
        self.enqueue(number);
        true
    }

    fn enqueue(&mut self, number: u32) {
        let block = self.blocks[number as usize];
        if !block.moving
            && let Some(link) = next_link(block.tier, block.target)
        {
            self.queues[link as usize].waiting.push_back((number, block.ticket));
        }
    }

    /// Returns whether a block is on the device and stays there.
    pub(super) fn is_awake(&self, number: u32) -> bool {
        let block = self.blocks[number as usize];
        block.tier == Some(Tier::Device) && block.target == Some(Tier::Device) && !block.moving
    }

    /// Starts the next copy of a link if it is free and there is room. Returns when it ends.
    pub(super) fn start(&mut self, link: LinkDirection, now_ns: u64) -> Option<u64> {
        let queue = &mut self.queues[link as usize];
        if queue.busy.is_some() {
            return None;
        }
        let blocks = &self.blocks;
        let stale = |&(number, ticket): &(u32, u32)| {
            let block = blocks[number as usize];
            block.ticket != ticket || next_link(block.tier, block.target) != Some(link)
        };
        while queue.waiting.front().is_some_and(stale) {
            queue.waiting.pop_front();
        }
        let &(number, _) = queue.waiting.front()?;
        let [_, to] = ends(link);
        let bytes = self.bytes(number);
        if !self.has_room(to, bytes) {
            return None;
        }
        let queue = &mut self.queues[link as usize];
        queue.waiting.pop_front();
        queue.busy = Some((number, now_ns));
        self.blocks[number as usize].moving = true;
        self.used[to as usize] = self.used[to as usize].saturating_add(bytes);
        let rate = link_rates(&self.rank.machine).of(link);
        Some(now_ns.saturating_add(copy_ns(bytes.into(), rate).unwrap_or(0)))
    }

    /// Ends a link's copy.
    pub(super) fn end(&mut self, link: LinkDirection, now_ns: u64, timeline: &mut RankTimeline) {
        let Some((number, start_ns)) = self.queues[link as usize].busy.take() else { return };
        let [from, to] = ends(link);
        let bytes = self.bytes(number);
        self.used[from as usize] = self.used[from as usize].saturating_sub(bytes);
        let block = &mut self.blocks[number as usize];
        (block.tier, block.moving) = (Some(to), false);
        if block.target.is_none() {
            block.tier = None;
            self.used[to as usize] = self.used[to as usize].saturating_sub(bytes);
        }
        self.enqueue(number);
        timeline.link_busy_ns[link as usize] += now_ns - start_ns;
        timeline.copies.push(CopyTime { link, block: number, start_ns, end_ns: now_ns });
    }

    /// Samples the bytes of each tier if they have changed.
    pub(super) fn sample(&self, ns: u64, timeline: &mut RankTimeline) {
        let [device_bytes, host_bytes, nvme_bytes] = self.used;
        let sample = MemorySample { ns, device_bytes, host_bytes, nvme_bytes };
        let peak = &mut timeline.peak;
        peak.device_bytes = peak.device_bytes.max(device_bytes);
        peak.host_bytes = peak.host_bytes.max(host_bytes);
        peak.nvme_bytes = peak.nvme_bytes.max(nvme_bytes);
        if timeline.bytes.last().is_some_and(|last| last.ns == ns) {
            timeline.bytes.pop();
        }
        if timeline.bytes.last().is_none_or(|last| MemorySample { ns, ..*last } != sample) {
            timeline.bytes.push(sample);
        }
    }
}
