//! Figures of one owner of regions (a node), kept by the engine as its regions move.

use std::sync::atomic::{AtomicU64, Ordering};

use super::body::tier_of;
use crate::ids::Tier;
use crate::residency::{Region, State};
use crate::sync::{Mutex, lock};

/// Most reasons kept; more of them say nothing new.
const REASONS_MAX: usize = 16;

/// Figures of one owner. Changed under the table's lock or by one transfer's end: the order of
/// single additions does not matter, so all of it is relaxed.
#[derive(Debug, Default)]
pub(crate) struct Owner {
    asleep: Gauge,
    tiers: [Gauge; 3],
    pub(crate) written_bytes: AtomicU64,
    pub(crate) written_ns: AtomicU64,
    pub(crate) read_bytes: AtomicU64,
    pub(crate) read_ns: AtomicU64,
    /// Regions of its that are awake though a sleep had been agreed on, or that woke.
    roused: AtomicU64,
    reasons: Mutex<Vec<String>>,
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

impl Owner {
    pub(crate) fn moved(&self, before: &Region, after: &Region, bytes: u64) {
        match (before.state.is_asleep(), after.state.is_asleep()) {
            (false, true) => self.asleep.add(bytes),
            (true, false) => self.asleep.remove(bytes),
            _ => {}
        }
        if before.state != State::Awake && after.state == State::Awake {
            self.rouse();
        }
        let counted = |r: &Region| if r.state == State::Awake { None } else { tier_of(r) };
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

    /// A sleep that had been agreed on has come to nothing.
    pub(crate) fn rouse(&self) {
        self.roused.fetch_add(1, Ordering::Relaxed);
    }

    /// How often that was so: while it stays, what sleeps or is about to still does.
    pub(crate) fn roused(&self) -> u64 {
        self.roused.load(Ordering::Relaxed)
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

    /// Notes why something was not done, each reason once.
    pub(crate) fn decline(&self, reason: &str) {
        let mut reasons = lock(&self.reasons);
        if reasons.len() < REASONS_MAX && !reasons.iter().any(|r| r == reason) {
            reasons.push(reason.to_owned());
        }
    }

    pub(crate) fn reasons(&self) -> Vec<String> {
        lock(&self.reasons).clone()
    }
}
