//! The account of a prefix: bytes per tier, transfers and declines of its regions.

use std::sync::atomic::{AtomicU64, Ordering};

use super::counters::Copies;
use super::region_data::tier_of;
use crate::ids::Tier;
use dormouse_residency::region::{Region, RegionState};
use dormouse_storage::sync::{Mutex, lock};

/// Limit on distinct reasons kept.
const REASONS_MAX: usize = 16;

/// Figures of one prefix. Relaxed: the order of single additions does not matter.
#[derive(Debug, Default)]
pub(crate) struct Account {
    asleep: Gauge,
    tiers: [Gauge; 3],
    /// Transfers to and from the file.
    pub(crate) written: Copies,
    pub(crate) read: Copies,
    /// Sleeps that ended or were withdrawn.
    awakenings: AtomicU64,
    reasons: Mutex<Vec<Reason>>,
}

/// A reason for a decline, and its count.
#[derive(Debug)]
struct Reason {
    text: String,
    times: u64,
}

impl Reason {
    /// Returns true if the texts differ in figures only: a full tier refuses each time with another number
    /// of bytes used.
    fn is_like(&self, text: &str) -> bool {
        words(&self.text).eq(words(text))
    }
}

/// Returns the words of a text without its figures.
fn words(text: &str) -> impl Iterator<Item = &str> {
    let words = text.split(|c: char| !c.is_alphanumeric());
    words.filter(|word| !word.starts_with(|c: char| c.is_ascii_digit()))
}

#[derive(Debug, Default)]
struct Gauge {
    current: AtomicU64,
    peak: AtomicU64,
}

impl Gauge {
    fn add(&self, bytes: u64) {
        let now = self.current.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.peak.fetch_max(now, Ordering::Relaxed);
    }

    fn remove(&self, bytes: u64) {
        self.current.fetch_sub(bytes, Ordering::Relaxed);
    }
}

impl Account {
    pub(crate) fn moved(&self, before: &Region, after: &Region, bytes: u64) {
        match (before.state.is_asleep(), after.state.is_asleep()) {
            (false, true) => self.asleep.add(bytes),
            (true, false) => self.asleep.remove(bytes),
            _ => {}
        }
        let sleeps = |r: &Region| r.state != RegionState::Awake || r.wait.is_admitted();
        if sleeps(before) && !sleeps(after) {
            // Relaxed: a separate figure.
            self.awakenings.fetch_add(1, Ordering::Relaxed);
        }
        let counted = |r: &Region| if r.state == RegionState::Awake { None } else { tier_of(r) };
        let (from, to) = (counted(before), counted(after));
        if from != to {
            if let Some(tier) = from {
                self.tiers[tier.index()].remove(bytes);
            }
            if let Some(tier) = to {
                self.tiers[tier.index()].add(bytes);
            }
        }
    }

    /// Removes the bytes of blocks that leave a region while it falls asleep.
    pub(crate) fn detach_blocks(&self, bytes: u64) {
        self.tiers[Tier::Device.index()].remove(bytes);
    }

    /// Returns how often a sleep ended or was withdrawn. While it stays the same, what slept or was
    /// admitted still is.
    pub(crate) fn awakenings(&self) -> u64 {
        self.awakenings.load(Ordering::Relaxed)
    }

    pub(crate) fn asleep_bytes(&self) -> u64 {
        self.asleep.current.load(Ordering::Relaxed)
    }

    pub(crate) fn asleep_bytes_peak(&self) -> u64 {
        self.asleep.peak.load(Ordering::Relaxed)
    }

    pub(crate) fn tier_bytes_peak(&self, tier: Tier) -> u64 {
        self.tiers[tier.index()].peak.load(Ordering::Relaxed)
    }

    /// Counts a reason for a decline.
    pub(crate) fn decline(&self, reason: &str) {
        let mut reasons = lock(&self.reasons);
        if let Some(known) = reasons.iter_mut().find(|known| known.is_like(reason)) {
            known.times += 1;
        } else if reasons.len() < REASONS_MAX {
            reasons.push(Reason { text: reason.to_owned(), times: 1 });
        }
    }

    /// Returns the first text of each reason, with its count.
    pub(crate) fn reasons(&self) -> Vec<String> {
        let tell = |reason: &Reason| match reason.times {
            1 => reason.text.clone(),
            times => format!("{} ({times} times; figures of the first)", reason.text),
        };
        lock(&self.reasons).iter().map(tell).collect()
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    #[test]
    fn reasons_that_differ_in_figures_are_one_and_leave_room_for_others() {
        let account = Account::default();
        for used in 0..100 {
            account
                .decline(&format!("the Host tier has no room for 5 bytes: {used} of 9 are used"));
        }
        account.decline("extent 0x1a0: CRC-32C is 0xdeadbeef");
        account.decline("extent 0xfe: CRC-32C is 0x0badf00d");
        account.decline("the Nvme tier has no room for 5 bytes: 1 of 9 are used");
        assert_eq!(
            account.reasons(),
            [
                "the Host tier has no room for 5 bytes: 0 of 9 are used (100 times; figures of the first)",
                "extent 0x1a0: CRC-32C is 0xdeadbeef (2 times; figures of the first)",
                "the Nvme tier has no room for 5 bytes: 1 of 9 are used",
            ]
        );
        for other in 'a'..='z' {
            account.decline(&other.to_string());
        }
        assert_eq!(account.reasons().len(), REASONS_MAX);
    }
}
