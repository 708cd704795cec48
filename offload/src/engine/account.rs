//! The account of a prefix: bytes per tier, transfers and declines of its regions.

use std::sync::atomic::{AtomicU64, Ordering};

use super::counters::Copies;
use super::region_data::tier_of;
use super::stray::{StrayAccess, StrayWakes};
use crate::ids::Tier;
use dormouse_residency::region::{Region, RegionState, RegionWait};
use dormouse_storage::sync::{Mutex, lock};

/// Limit on distinct reasons kept.
const REASONS_MAX: usize = 16;

/// Figures of one prefix. Relaxed atomics, since every mark reads some of them; the order of single additions
/// does not matter.
#[derive(Debug, Default)]
pub(crate) struct Account {
    pub(crate) asleep: Gauge,
    /// Asleep bytes by tier.
    pub(crate) tiers: [Gauge; 3],
    /// Transfers to and from the file.
    pub(crate) written: Copies,
    pub(crate) read: Copies,
    /// Number of sleeps that ended or were withdrawn. While it stays the same, regions that slept or waited to
    /// do so still do.
    awakenings: AtomicU64,
    reasons: Mutex<Vec<Reason>>,
    stray: Mutex<StrayWakes>,
    /// Time that stray accesses waited, in nanoseconds.
    stray_ns: AtomicU64,
}

/// Bytes and their peak.
#[derive(Debug, Default)]
pub(crate) struct Gauge {
    current: AtomicU64,
    peak: AtomicU64,
}

impl Gauge {
    /// Adds `bytes` when they enter, and removes them when they leave.
    fn change(&self, was_in: bool, is_in: bool, bytes: u64) {
        match (was_in, is_in) {
            (false, true) => {
                let now = self.current.fetch_add(bytes, Ordering::Relaxed) + bytes;
                self.peak.fetch_max(now, Ordering::Relaxed);
            }
            (true, false) => {
                self.current.fetch_sub(bytes, Ordering::Relaxed);
            }
            _ => {}
        }
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.current.load(Ordering::Relaxed)
    }

    pub(crate) fn peak_bytes(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }
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

impl Account {
    pub(crate) fn moved(&self, before: &Region, after: &Region, bytes: u64) {
        self.asleep.change(before.state.is_asleep(), after.state.is_asleep(), bytes);
        let sleeps = |r: &Region| r.state != RegionState::Awake || r.wait != RegionWait::None;
        if sleeps(before) && !sleeps(after) {
            self.awakenings.fetch_add(1, Ordering::Relaxed);
        }
        let (from, to) = (tier_of(before), tier_of(after));
        for tier in [Tier::Host, Tier::Nvme] {
            self.tiers[tier.index()].change(from == Some(tier), to == Some(tier), bytes);
        }
    }

    pub(crate) fn awakenings(&self) -> u64 {
        self.awakenings.load(Ordering::Relaxed)
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

    /// Counts a wake by a stray access. Returns true for the first.
    pub(crate) fn note_stray(&self, access: StrayAccess) -> bool {
        let mut stray = lock(&self.stray);
        stray.add(access);
        stray.count == 1
    }

    pub(crate) fn stray(&self) -> StrayWakes {
        *lock(&self.stray)
    }

    /// Adds the wait of a stray access.
    pub(crate) fn stray_waited(&self, ns: u64) {
        self.stray_ns.fetch_add(ns, Ordering::Relaxed);
    }

    pub(crate) fn stray_ns(&self) -> u64 {
        self.stray_ns.load(Ordering::Relaxed)
    }

    /// Returns the first text of each reason, with its count.
    pub(crate) fn reasons(&self) -> Vec<String> {
        let text = |reason: &Reason| match reason.times {
            1 => reason.text.clone(),
            times => format!("{} ({times} times; figures of the first)", reason.text),
        };
        lock(&self.reasons).iter().map(text).collect()
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
