//! A rank's blocks: where they are, where they are wished, and the links between.
//!
//! A block at rest in another place than it is wished stands in line for the next link on its way.
//! A changed wish is a new ticket, and what stands in line with an old one is passed over.

use std::collections::VecDeque;

use super::timeline::{CopyTime, MemorySample, RankTimeline};
use super::world::{CopyLink, SimulatedRank, Tier, copy_ns};

#[derive(Clone, Copy, Debug)]
struct Block {
    /// `None` before it is made and after it is gone.
    place: Option<Tier>,
    /// `None` when it is to be gone.
    wish: Option<Tier>,
    ticket: u32,
    moving: bool,
}

#[derive(Clone, Debug, Default)]
struct Line {
    waiting: VecDeque<(u32, u32)>,
    /// The block under way, and since when.
    busy: Option<(u32, u64)>,
}

#[derive(Debug)]
pub(super) struct Copies<'a> {
    rank: &'a SimulatedRank,
    blocks: Vec<Block>,
    lines: [Line; 4],
    used: [u64; 3],
}

/// The link a block goes over next.
fn next_link(place: Option<Tier>, wish: Option<Tier>) -> Option<CopyLink> {
    match (place?, wish?) {
        (Tier::Device, Tier::Host | Tier::File) => Some(CopyLink::Sleep),
        (Tier::Host, Tier::File) => Some(CopyLink::Write),
        (Tier::Host, Tier::Device) => Some(CopyLink::Wake),
        (Tier::File, Tier::Device | Tier::Host) => Some(CopyLink::Read),
        _ => None,
    }
}

impl<'a> Copies<'a> {
    pub(super) fn new(rank: &'a SimulatedRank) -> Self {
        let block = Block { place: None, wish: None, ticket: 0, moving: false };
        Self {
            rank,
            blocks: vec![block; rank.block_bytes.len()],
            lines: Default::default(),
            used: [0; 3],
        }
    }

    pub(super) fn used(&self, tier: Tier) -> u64 {
        self.used[tier as usize]
    }

    fn bytes(&self, block: u32) -> u64 {
        self.rank.block_bytes[block as usize]
    }

    /// Whether a tier has room for so many bytes more.
    fn has_room(&self, tier: Tier, bytes: u64) -> bool {
        let most = match tier {
            Tier::Device => self.rank.machine.device_bytes,
            Tier::Host => self.rank.machine.host_bytes,
            Tier::File => 0,
        };
        most == 0 || bytes <= most.saturating_sub(self.used(tier))
    }

    /// Makes blocks on the device, all or none.
    pub(super) fn make(&mut self, blocks: &[u32]) -> bool {
        let bytes = blocks.iter().fold(0, |sum: u64, block| sum.saturating_add(self.bytes(*block)));
        if !self.has_room(Tier::Device, bytes) {
            return false;
        }
        self.used[Tier::Device as usize] = self.used(Tier::Device).saturating_add(bytes);
        for &block in blocks {
            let block = &mut self.blocks[block as usize];
            (block.place, block.wish) = (Some(Tier::Device), Some(Tier::Device));
        }
        true
    }

    /// Lets a block go: at once, or when the copy under way has ended.
    pub(super) fn free(&mut self, number: u32) {
        let bytes = self.bytes(number);
        let block = &mut self.blocks[number as usize];
        block.wish = None;
        block.ticket += 1;
        if !block.moving
            && let Some(place) = block.place.take()
        {
            self.used[place as usize] = self.used[place as usize].saturating_sub(bytes);
        }
    }

    /// Wishes a block somewhere; `false` where it is wished there already.
    pub(super) fn wish(&mut self, number: u32, tier: Tier) -> bool {
        let block = &mut self.blocks[number as usize];
        if block.wish == Some(tier) {
            return false;
        }
        block.wish = Some(tier);
        block.ticket += 1;
        self.stand_in_line(number);
        true
    }

    fn stand_in_line(&mut self, number: u32) {
        let block = self.blocks[number as usize];
        if !block.moving
            && let Some(link) = next_link(block.place, block.wish)
        {
            self.lines[link as usize].waiting.push_back((number, block.ticket));
        }
    }

    /// Whether a block is on the device and stays.
    pub(super) fn is_here(&self, number: u32) -> bool {
        let block = self.blocks[number as usize];
        block.place == Some(Tier::Device) && block.wish == Some(Tier::Device) && !block.moving
    }

    /// Starts the next copy of a link, if it is free and there is room. Says when it ends.
    pub(super) fn start(&mut self, link: CopyLink, now_ns: u64) -> Option<u64> {
        let line = &mut self.lines[link as usize];
        if line.busy.is_some() {
            return None;
        }
        let blocks = &self.blocks;
        let stale = |&(number, ticket): &(u32, u32)| {
            let block = blocks[number as usize];
            block.ticket != ticket || next_link(block.place, block.wish) != Some(link)
        };
        while line.waiting.front().is_some_and(stale) {
            line.waiting.pop_front();
        }
        let &(number, _) = line.waiting.front()?;
        let [_, to] = link.ends();
        let bytes = self.bytes(number);
        if !self.has_room(to, bytes) {
            return None;
        }
        let line = &mut self.lines[link as usize];
        line.waiting.pop_front();
        line.busy = Some((number, now_ns));
        self.blocks[number as usize].moving = true;
        self.used[to as usize] = self.used[to as usize].saturating_add(bytes);
        let rate = link.bytes_per_s(&self.rank.machine);
        Some(now_ns.saturating_add(copy_ns(bytes.into(), rate)))
    }

    /// Ends a link's copy.
    pub(super) fn end(&mut self, link: CopyLink, now_ns: u64, timeline: &mut RankTimeline) {
        let Some((number, start_ns)) = self.lines[link as usize].busy.take() else { return };
        let [from, to] = link.ends();
        let bytes = self.bytes(number);
        self.used[from as usize] = self.used[from as usize].saturating_sub(bytes);
        let block = &mut self.blocks[number as usize];
        (block.place, block.moving) = (Some(to), false);
        if block.wish.is_none() {
            block.place = None;
            self.used[to as usize] = self.used[to as usize].saturating_sub(bytes);
        }
        self.stand_in_line(number);
        timeline.link_busy_ns[link as usize] += now_ns - start_ns;
        timeline.copies.push(CopyTime { link, block: number, start_ns, end_ns: now_ns });
    }

    /// Notes what tiers hold, where it has changed.
    pub(super) fn sample(&self, ns: u64, timeline: &mut RankTimeline) {
        let [device_bytes, host_bytes, file_bytes] = self.used;
        let sample = MemorySample { ns, device_bytes, host_bytes, file_bytes };
        let peak = &mut timeline.peak;
        peak.device_bytes = peak.device_bytes.max(device_bytes);
        peak.host_bytes = peak.host_bytes.max(host_bytes);
        peak.file_bytes = peak.file_bytes.max(file_bytes);
        if timeline.bytes.last().is_some_and(|last| last.ns == ns) {
            timeline.bytes.pop();
        }
        if timeline.bytes.last().is_none_or(|last| MemorySample { ns, ..*last } != sample) {
            timeline.bytes.push(sample);
        }
    }
}
