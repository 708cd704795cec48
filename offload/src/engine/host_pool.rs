//! The host tier: pinned buffers under a budget.

use std::sync::Arc;

use dormouse_device::{AddressRange, Device};
use dormouse_timeline::{Gauge, Timeline};

use super::rim;
use crate::error::OffloadError;
use crate::ids::Tier;
use crate::sync::{Mutex, lock};

#[derive(Debug, Default)]
struct Use {
    used_bytes: u64,
    peak_bytes: u64,
    budget_bytes: u64,
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
}

/// Pinned buffers.
#[derive(Debug)]
pub(crate) struct HostPool<D: Device> {
    device: Arc<D>,
    timeline: Arc<Timeline>,
    counts: Mutex<Use>,
}

impl<D: Device> HostPool<D> {
    pub(crate) fn new(device: Arc<D>, timeline: Arc<Timeline>, budget_bytes: u64) -> Self {
        let counts = Use { budget_bytes, ..Use::default() };
        Self { device, timeline, counts: Mutex::new(counts) }
    }

    /// A buffer of `bytes`. A *bounce* is not refused for the budget's sake: a load must be able
    /// to finish, and the device budget bounds how many there are.
    pub(crate) fn take(&self, bytes: usize, bounce: bool) -> Result<AddressRange, OffloadError> {
        let asked_bytes = bytes as u64;
        {
            let mut counts = lock(&self.counts);
            if !bounce && counts.used_bytes + asked_bytes > counts.budget_bytes {
                return Err(OffloadError::TierFull {
                    tier: Tier::Host,
                    asked_bytes,
                    used_bytes: counts.used_bytes,
                    budget_bytes: counts.budget_bytes,
                });
            }
            counts.used_bytes += asked_bytes;
        }
        match self.device.allocate_pinned(bytes) {
            Ok(range) => {
                let mut counts = lock(&self.counts);
                // Charge what was really given, which may be whole pages.
                counts.used_bytes = counts.used_bytes - asked_bytes + range.bytes as u64;
                counts.peak_bytes = counts.peak_bytes.max(counts.used_bytes);
                self.timeline.gauge(Gauge::HostUsed, counts.used_bytes);
                Ok(range)
            }
            Err(e) => {
                lock(&self.counts).used_bytes -= asked_bytes;
                Err(e.into())
            }
        }
    }

    pub(crate) fn give(&self, range: AddressRange) {
        rim::free_pinned(&*self.device, range);
        let mut counts = lock(&self.counts);
        counts.used_bytes = counts.used_bytes.saturating_sub(range.bytes as u64);
        self.timeline.gauge(Gauge::HostUsed, counts.used_bytes);
    }

    pub(crate) fn set_budget(&self, bytes: u64) {
        lock(&self.counts).budget_bytes = bytes;
    }

    pub(crate) fn usage(&self) -> HostUse {
        let counts = lock(&self.counts);
        HostUse {
            used_bytes: counts.used_bytes,
            peak_bytes: counts.peak_bytes,
            budget_bytes: counts.budget_bytes,
        }
    }

    pub(crate) fn reset_peak(&self) {
        let mut counts = lock(&self.counts);
        counts.peak_bytes = counts.used_bytes;
    }
}
