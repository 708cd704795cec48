//! The host tier: a view of the pinned pool.

use std::sync::Arc;

use dormouse_alloc::pinned::{
    PinMode, PinnedBuffer, PinnedConfig, PinnedError, PinnedPool, SlabObserver,
};
use dormouse_device::{AddressRange, Device};
use dormouse_timeline::Timeline;

use super::raw_memory;
use crate::error::OffloadError;
use crate::ids::Tier;
use dormouse_storage::Nvme;

/// Statistics of the host tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HostUse {
    /// Bytes in buffers, including bounce buffers.
    pub used_bytes: u64,
    /// Peak of `used_bytes` since the last reset.
    pub peak_bytes: u64,
    /// Limit in bytes. Bounce buffers of loads may exceed it by the bytes being loaded.
    pub budget_bytes: u64,
    /// Pinned bytes kept for the next sleep, not part of `used_bytes`.
    pub kept_bytes: u64,
}

/// Registers slabs with the file tier while they are pinned.
#[derive(Debug)]
struct Lender(Arc<Nvme>);

impl SlabObserver for Lender {
    fn on_pin(&self, range: AddressRange) {
        self.0.lend(&raw_memory::slab_memory(range));
    }

    fn on_unpin(&self, range: AddressRange) {
        self.0.take_back(&raw_memory::slab_memory(range));
    }
}

/// Pinned buffers.
#[derive(Debug)]
pub(crate) struct HostPool<D: Device> {
    pool: PinnedPool<D>,
}

impl<D: Device> HostPool<D> {
    /// Keeps memory, and pins it ahead of need, where pinning is expensive. Only kept memory is worth
    /// registering with the file tier.
    pub(crate) fn new(
        device: Arc<D>,
        timeline: Arc<Timeline>,
        budget_bytes: u64,
        nvme: Option<&Arc<Nvme>>,
    ) -> Result<Self, OffloadError> {
        let config = PinnedConfig::new(budget_bytes, device.is_stream_ordered());
        let lender = nvme.filter(|_| config.keeps).map(|nvme| Lender(Arc::clone(nvme)));
        let watch = lender.map(|lender| Arc::new(lender) as Arc<dyn SlabObserver>);
        Ok(Self { pool: PinnedPool::new(device, config, timeline, watch)? })
    }

    /// Returns a buffer of at least `bytes`. A *bounce* may exceed the budget: a load must be able to
    /// finish, and the device budget bounds the number of loads.
    pub(crate) fn take(&self, bytes: usize, bounce: bool) -> Result<PinnedBuffer, OffloadError> {
        let room = if bounce { PinMode::Bounce } else { PinMode::Now };
        Ok(self.pool.allocate(bytes, room)?)
    }

    /// Returns a buffer whose copies are over. Never waits.
    pub(crate) fn give(&self, buffer: PinnedBuffer) {
        let given = self.pool.free(buffer);
        debug_assert!(given.is_ok(), "R4: {given:?}");
    }

    pub(crate) fn set_budget(&self, bytes: u64) {
        self.pool.set_cap(bytes);
    }

    pub(crate) fn usage(&self) -> HostUse {
        let usage = self.pool.usage();
        HostUse {
            used_bytes: usage.used_bytes,
            peak_bytes: usage.peak_used_bytes,
            budget_bytes: usage.cap_bytes,
            kept_bytes: usage.pinned_bytes - usage.used_bytes,
        }
    }

    pub(crate) fn reset_peak(&self) {
        self.pool.reset_peaks();
    }
}

impl From<PinnedError> for OffloadError {
    fn from(error: PinnedError) -> Self {
        match error {
            PinnedError::Full { asked_bytes, used_bytes, cap_bytes, .. } => Self::TierFull {
                tier: Tier::Host,
                asked_bytes,
                used_bytes,
                budget_bytes: cap_bytes,
            },
            PinnedError::Device(refused) => Self::Device(refused),
            PinnedError::Thread { name, reason } => Self::Thread { name: name.to_owned(), reason },
            other => Self::Pinned(other),
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use dormouse_device::DeviceError;
    use dormouse_device::host::{HostConfig, HostDevice};

    use super::*;

    const UNIT: usize = 4096;

    #[test]
    fn figures_and_refusals_are_the_tiers_own() {
        let device = Arc::new(HostDevice::new(HostConfig::new(1 << 20, 1 << 20)).unwrap());
        // A budget is shown as it was given, and used in whole units.
        let budget_bytes = 3 * UNIT as u64 + 5;
        let pool = HostPool::new(device, Arc::new(Timeline::new(64)), budget_bytes, None).unwrap();
        let (first, bounce) = (pool.take(2 * UNIT, false).unwrap(), pool.take(UNIT, true).unwrap());
        let full = pool.take(UNIT, false).unwrap_err();
        assert!(full.is_declined(), "{full}");
        let OffloadError::TierFull { tier: Tier::Host, used_bytes, budget_bytes: seen, .. } = full
        else {
            panic!("{full}")
        };
        assert_eq!((used_bytes, seen), (3 * UNIT as u64, budget_bytes));
        let beyond = pool.take(4 * UNIT, true).unwrap();
        pool.give(bounce);
        pool.give(beyond);
        let usage = pool.usage();
        assert_eq!((usage.used_bytes, usage.kept_bytes), (2 * UNIT as u64, 0));
        assert_eq!((usage.peak_bytes, usage.budget_bytes), (7 * UNIT as u64, budget_bytes));
        pool.reset_peak();
        assert_eq!(pool.usage().peak_bytes, 2 * UNIT as u64);
        pool.set_budget(0);
        assert!(pool.take(1, false).is_err());
        pool.give(first);
        assert!(matches!(pool.take(usize::MAX, true), Err(OffloadError::Pinned(_))));
        let lost = PinnedError::Device(DeviceError::TooManySpans { limit: 1 });
        assert!(matches!(OffloadError::from(lost), OffloadError::Device(_)));
    }
}
