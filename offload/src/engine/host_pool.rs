//! The host tier: a pinned pool whose slabs are registered with the file tier.

use std::sync::Arc;

use dormouse_alloc::pinned::{
    PinMode, PinnedBuffer, PinnedConfig, PinnedError, PinnedPool, SlabObserver,
};
use dormouse_device::{AddressRange, Device};
use dormouse_timeline::Timeline;

use super::{Engine, raw_memory};
use crate::error::OffloadError;
use crate::ids::Tier;
use dormouse_storage::{Nvme, ThreadError};

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

/// Creates the pinned pool of the host tier. Memory is kept, and pinned ahead of need, where pinning is
/// expensive. Only kept memory is worth registering with the file tier.
pub(super) fn open<D: Device>(
    device: Arc<D>,
    timeline: Arc<Timeline>,
    budget_bytes: u64,
    nvme: Option<&Arc<Nvme>>,
) -> Result<PinnedPool<D>, PinnedError> {
    let config = PinnedConfig::new(budget_bytes, device.is_stream_ordered());
    let lender = nvme.filter(|_| config.keeps).map(|nvme| Lender(Arc::clone(nvme)));
    let watch = lender.map(|lender| Arc::new(lender) as Arc<dyn SlabObserver>);
    PinnedPool::new(device, config, timeline, watch)
}

impl<D: Device> Engine<D> {
    /// Allocates a buffer of the host tier, whose limit rises first if it is full and automatic.
    pub(super) fn take(&self, bytes: usize, mode: PinMode) -> Result<PinnedBuffer, PinnedError> {
        let buffer = match self.host.allocate(bytes, mode) {
            Err(PinnedError::Full { .. }) if self.revise_host_bytes(bytes as u64) => {
                self.host.allocate(bytes, mode)?
            }
            allocated => allocated?,
        };
        self.allocator.host_tier().note_taken(buffer.start(), buffer.bytes() as u64);
        Ok(buffer)
    }

    /// Frees a buffer whose copies are over. Never waits.
    pub(super) fn give(&self, buffer: PinnedBuffer) {
        // First: its address may be another's as soon as it is free.
        self.allocator.host_tier().note_given(buffer.start());
        let given = self.host.free(buffer);
        debug_assert!(given.is_ok(), "R4: {given:?}");
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
            PinnedError::Thread { name, reason } => {
                Self::Thread(ThreadError { name: name.to_owned(), reason })
            }
            other => Self::Pinned(other),
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use dormouse_alloc::pinned::PinMode::{Bounce, Now};
    use dormouse_device::DeviceError;
    use dormouse_device::host::{HostConfig, HostDevice};

    use super::*;

    const UNIT: usize = 4096;

    #[test]
    fn refusals_of_the_pool_are_the_tiers_errors() {
        let device = Arc::new(HostDevice::new(HostConfig::new(1 << 20, 1 << 20)).unwrap());
        // A budget is shown as it was given, and used in whole units.
        let budget_bytes = 3 * UNIT as u64 + 5;
        let pool = open(device, Arc::new(Timeline::new(64)), budget_bytes, None).unwrap();
        let first = pool.allocate(2 * UNIT, Now).unwrap();
        let bounce = pool.allocate(UNIT, Bounce).unwrap();
        let full = OffloadError::from(pool.allocate(UNIT, Now).unwrap_err());
        assert!(full.is_declined(), "{full}");
        let OffloadError::TierFull { tier: Tier::Host, used_bytes, budget_bytes: seen, .. } = full
        else {
            panic!("{full}")
        };
        assert_eq!((used_bytes, seen), (3 * UNIT as u64, budget_bytes));
        let beyond = pool.allocate(4 * UNIT, Bounce).unwrap();
        pool.free(bounce).unwrap();
        pool.free(beyond).unwrap();
        let usage = pool.usage();
        assert_eq!((usage.used_bytes, usage.pinned_bytes), (2 * UNIT as u64, 2 * UNIT as u64));
        assert_eq!((usage.peak_used_bytes, usage.cap_bytes), (7 * UNIT as u64, budget_bytes));
        pool.set_cap(0);
        assert!(pool.allocate(1, Now).is_err());
        pool.free(first).unwrap();
        let large = OffloadError::from(pool.allocate(usize::MAX, Bounce).unwrap_err());
        assert!(matches!(large, OffloadError::Pinned(_)));
        let lost = PinnedError::Device(DeviceError::TooManySpans { limit: 1 });
        assert!(matches!(OffloadError::from(lost), OffloadError::Device(_)));
    }
}
