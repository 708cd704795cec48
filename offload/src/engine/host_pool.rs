//! The host tier: pinned buffers under a budget.
//!
//! Pinning costs a GPU's driver a millisecond for a few megabytes, and unpinning waits for the
//! GPU. So there buffers that come back are kept for the next sleep of their size: a trainer's
//! steps ask for the same sizes again and again.

use std::collections::BTreeMap;
use std::sync::Arc;

use dormouse_device::{AddressRange, Device};
use dormouse_timeline::{Gauge, Timeline};

use super::rim;
use crate::error::OffloadError;
use crate::ids::Tier;
use crate::sync::{Mutex, lock};

/// A kept buffer serves a request that it is no more than this part of larger than.
const WASTE_DIVISOR: usize = 8;
/// The most buffers kept.
const KEPT_MAX: usize = 1 << 14;

#[derive(Debug, Default)]
struct Use {
    used_bytes: u64,
    peak_bytes: u64,
    budget_bytes: u64,
    /// Buffers in nobody's hands, by their length; within the budget with what is used.
    kept: BTreeMap<usize, Vec<AddressRange>>,
    kept_bytes: u64,
    kept_count: usize,
}

/// Figures of the host tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostUse {
    /// Bytes in buffers, bounce buffers included.
    pub used_bytes: u64,
    /// The most since the last reset.
    pub peak_bytes: u64,
    /// The limit; bounce buffers of loads may go beyond it by what is being loaded.
    pub budget_bytes: u64,
    /// Bytes pinned and kept for the next sleep, beside those used.
    pub kept_bytes: u64,
}

/// Pinned buffers.
#[derive(Debug)]
pub(crate) struct HostPool<D: Device> {
    device: Arc<D>,
    timeline: Arc<Timeline>,
    /// Whether buffers that come back are kept: where getting them anew costs much.
    keeps: bool,
    counts: Mutex<Use>,
}

impl Use {
    fn charge(&mut self, bytes: u64) {
        self.used_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.used_bytes);
    }

    /// A kept buffer of at least `bytes` and little more.
    fn unkeep(&mut self, bytes: usize) -> Option<AddressRange> {
        let most = bytes.saturating_add(bytes / WASTE_DIVISOR);
        let (&length, _) = self.kept.range(bytes..=most).next()?;
        self.unkeep_of(length)
    }

    fn unkeep_of(&mut self, length: usize) -> Option<AddressRange> {
        let same = self.kept.get_mut(&length)?;
        let buffer = same.pop()?;
        if same.is_empty() {
            self.kept.remove(&length);
        }
        self.kept_bytes -= length as u64;
        self.kept_count -= 1;
        Some(buffer)
    }

    /// Kept buffers, the largest first, until what is left has room for `asked_bytes` more.
    fn give_up(&mut self, asked_bytes: u64) -> Vec<AddressRange> {
        let mut given_up = Vec::new();
        while self.used_bytes + self.kept_bytes + asked_bytes > self.budget_bytes {
            let largest = self.kept.last_key_value().map(|(length, _)| *length);
            let Some(buffer) = largest.and_then(|length| self.unkeep_of(length)) else { break };
            given_up.push(buffer);
        }
        given_up
    }
}

impl<D: Device> HostPool<D> {
    pub(crate) fn new(
        device: Arc<D>,
        timeline: Arc<Timeline>,
        budget_bytes: u64,
        keeps: bool,
    ) -> Self {
        let counts = Use { budget_bytes, ..Use::default() };
        Self { device, timeline, keeps, counts: Mutex::new(counts) }
    }

    /// A buffer of at least `bytes`. A *bounce* is not refused for the budget's sake: a load must
    /// be able to finish, and the device budget bounds how many there are.
    pub(crate) fn take(&self, bytes: usize, bounce: bool) -> Result<AddressRange, OffloadError> {
        let asked_bytes = bytes as u64;
        let given_up = {
            let mut counts = lock(&self.counts);
            if !bounce && counts.used_bytes + asked_bytes > counts.budget_bytes {
                return Err(OffloadError::TierFull {
                    tier: Tier::Host,
                    asked_bytes,
                    used_bytes: counts.used_bytes,
                    budget_bytes: counts.budget_bytes,
                });
            }
            if let Some(buffer) = counts.unkeep(bytes) {
                counts.charge(buffer.bytes as u64);
                self.timeline.gauge(Gauge::HostUsed, counts.used_bytes);
                return Ok(buffer);
            }
            let given_up = counts.give_up(asked_bytes);
            counts.used_bytes += asked_bytes;
            given_up
        };
        self.free(given_up);
        let allocated = self.device.allocate_pinned(bytes).or_else(|refused| {
            // Kept buffers may be what the system lacks.
            let kept = self.take_kept();
            if kept.is_empty() {
                return Err(refused);
            }
            self.free(kept);
            self.device.allocate_pinned(bytes)
        });
        let mut counts = lock(&self.counts);
        counts.used_bytes -= asked_bytes;
        let buffer = allocated?;
        // Charge what was really given, which may be whole pages.
        counts.charge(buffer.bytes as u64);
        self.timeline.gauge(Gauge::HostUsed, counts.used_bytes);
        Ok(buffer)
    }

    pub(crate) fn give(&self, buffer: AddressRange) {
        let given_up = {
            let mut counts = lock(&self.counts);
            counts.used_bytes = counts.used_bytes.saturating_sub(buffer.bytes as u64);
            self.timeline.gauge(Gauge::HostUsed, counts.used_bytes);
            if self.keeps && counts.kept_count < KEPT_MAX {
                counts.kept.entry(buffer.bytes).or_default().push(buffer);
                counts.kept_bytes += buffer.bytes as u64;
                counts.kept_count += 1;
                counts.give_up(0)
            } else {
                vec![buffer]
            }
        };
        self.free(given_up);
    }

    fn take_kept(&self) -> Vec<AddressRange> {
        let mut counts = lock(&self.counts);
        (counts.kept_bytes, counts.kept_count) = (0, 0);
        std::mem::take(&mut counts.kept).into_values().flatten().collect()
    }

    fn free(&self, buffers: Vec<AddressRange>) {
        for buffer in buffers {
            rim::free_pinned(&*self.device, buffer);
        }
    }

    pub(crate) fn set_budget(&self, bytes: u64) {
        let given_up = {
            let mut counts = lock(&self.counts);
            counts.budget_bytes = bytes;
            counts.give_up(0)
        };
        self.free(given_up);
    }

    pub(crate) fn usage(&self) -> HostUse {
        let counts = lock(&self.counts);
        HostUse {
            used_bytes: counts.used_bytes,
            peak_bytes: counts.peak_bytes,
            budget_bytes: counts.budget_bytes,
            kept_bytes: counts.kept_bytes,
        }
    }

    pub(crate) fn reset_peak(&self) {
        let mut counts = lock(&self.counts);
        counts.peak_bytes = counts.used_bytes;
    }
}

impl<D: Device> Drop for HostPool<D> {
    fn drop(&mut self) {
        let kept = self.take_kept();
        self.free(kept);
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use dormouse_device::faulty::Faulty;
    use dormouse_device::host::{HostConfig, HostDevice};
    use dormouse_device::{DeviceError, Operation};

    use super::*;

    const PAGE: usize = 4096;

    fn pool(keeps: bool, budget_pages: usize) -> HostPool<Faulty<HostDevice>> {
        let device = HostDevice::new(HostConfig::new(1 << 20, 1 << 20)).unwrap();
        let timeline = Arc::new(Timeline::new(64));
        HostPool::new(Arc::new(Faulty::new(device)), timeline, (budget_pages * PAGE) as u64, keeps)
    }

    fn pages(pool: &HostPool<Faulty<HostDevice>>) -> (u64, u64) {
        let usage = pool.usage();
        (usage.used_bytes / PAGE as u64, usage.kept_bytes / PAGE as u64)
    }

    #[test]
    fn a_buffer_that_came_back_serves_the_next_of_its_size() {
        let pool = pool(true, 64);
        let first = pool.take(8 * PAGE, false).unwrap();
        pool.give(first);
        assert_eq!(pages(&pool), (0, 8));
        for bytes in [8 * PAGE, 8 * PAGE - PAGE / 2] {
            let again = pool.take(bytes, false).unwrap();
            assert_eq!((again, pages(&pool)), (first, (8, 0)));
            pool.give(again);
        }
        // Half of it would be wasted.
        let other = pool.take(4 * PAGE, false).unwrap();
        assert_eq!(pages(&pool), (4, 8));
        pool.give(other);
        assert_eq!(pool.device.calls(Operation::Pin), 2);
    }

    #[test]
    fn where_pinning_costs_nothing_nothing_is_kept() {
        let pool = pool(false, 64);
        let buffer = pool.take(8 * PAGE, false).unwrap();
        pool.give(buffer);
        assert_eq!(pages(&pool), (0, 0));
    }

    #[test]
    fn kept_buffers_make_way_within_the_budget() {
        let pool = pool(true, 12);
        let (large, small) =
            (pool.take(8 * PAGE, false).unwrap(), pool.take(2 * PAGE, false).unwrap());
        pool.give(large);
        pool.give(small);
        assert_eq!(pages(&pool), (0, 10));
        let next = pool.take(10 * PAGE, false).unwrap();
        assert_eq!(pages(&pool), (10, 2), "the largest goes first");
        assert!(matches!(pool.take(3 * PAGE, false), Err(OffloadError::TierFull { .. })));
        pool.give(next);
        pool.set_budget(4 * PAGE as u64);
        assert_eq!(pages(&pool), (0, 2));
        // A bounce goes beyond the budget, and is not kept beyond it.
        let bounce = pool.take(6 * PAGE, true).unwrap();
        assert_eq!(pages(&pool), (6, 0));
        pool.give(bounce);
        assert_eq!(pages(&pool), (0, 0));
    }

    #[test]
    fn kept_buffers_are_given_up_where_the_system_has_no_more() {
        let pool = pool(true, 64);
        let kept = pool.take(8 * PAGE, false).unwrap();
        pool.give(kept);
        let refused = || DeviceError::Refused {
            operation: Operation::Pin,
            start: 0,
            bytes: 0,
            code: libc::ENOMEM,
            reason: "for the test".to_owned(),
        };
        pool.device.fail(Operation::Pin, 1, refused());
        let buffer = pool.take(2 * PAGE, false).unwrap();
        assert_eq!(pages(&pool), (2, 0));
        // With nothing to give up the refusal is the answer.
        pool.device.fail(Operation::Pin, 1, refused());
        assert!(matches!(pool.take(PAGE, false), Err(OffloadError::Device(_))));
        assert_eq!(pages(&pool), (2, 0));
        pool.give(buffer);
    }
}
