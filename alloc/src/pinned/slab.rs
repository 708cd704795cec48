//! The memory of a slab, and its observer.

use std::fmt::Debug;
use std::sync::Arc;

use dormouse_device::{AddressRange, Device, DeviceError, PinnedMemory};

/// Observes the memory of slabs, for example to register it with the kernel's I/O. Called without any
/// lock that a free takes; must not call the pool.
pub trait SlabObserver: Send + Sync + Debug {
    /// Called after `range` is pinned.
    fn on_pin(&self, range: AddressRange);
    /// Called before `range` is unpinned; it is no longer in use.
    fn on_unpin(&self, range: AddressRange);
}

/// Limits what may be pinned now, within the cap. Called without any lock that a free takes; must not call the pool.
pub trait PinLimit: Send + Sync + Debug {
    /// Returns the most bytes that may be pinned in all while `pinned_bytes` are.
    fn limit_bytes(&self, pinned_bytes: u64) -> u64;
}

/// Pinned memory that notifies its observer.
#[derive(Debug)]
pub(super) struct PinnedSlab<D: Device> {
    memory: PinnedMemory<D>,
    /// `None` after a leak.
    observer: Option<Arc<dyn SlabObserver>>,
}

impl<D: Device> PinnedSlab<D> {
    pub(super) fn pin(
        device: &Arc<D>,
        bytes: usize,
        observer: Option<&Arc<dyn SlabObserver>>,
    ) -> Result<Self, DeviceError> {
        let memory = PinnedMemory::allocate(device, bytes)?;
        if let Some(observer) = observer {
            observer.on_pin(memory.range());
        }
        Ok(Self { memory, observer: observer.cloned() })
    }

    pub(super) fn range(&self) -> AddressRange {
        self.memory.range()
    }

    /// Leaks the memory: it may still be in use.
    pub(super) fn leak(mut self) {
        self.observer = None;
        self.memory.leak();
    }
}

impl<D: Device> Drop for PinnedSlab<D> {
    fn drop(&mut self) {
        if let Some(observer) = &self.observer {
            observer.on_unpin(self.memory.range());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use dormouse_device::host::{HostConfig, HostDevice};
    use dormouse_timeline::Timeline;

    use super::super::{PinMode, PinnedConfig, PinnedPool};
    use super::*;

    /// The slabs that exist according to the notifications.
    #[derive(Debug, Default)]
    struct Told(Mutex<Vec<AddressRange>>);

    impl SlabObserver for Told {
        fn on_pin(&self, range: AddressRange) {
            self.0.lock().unwrap().push(range);
        }

        fn on_unpin(&self, range: AddressRange) {
            let mut there = self.0.lock().unwrap();
            let at = there.iter().position(|known| *known == range).unwrap();
            there.swap_remove(at);
        }
    }

    #[test]
    fn observer_knows_each_slab_while_it_is_pinned() {
        let device = Arc::new(HostDevice::new(HostConfig::new(1 << 20, 1 << 20)).unwrap());
        let told = Arc::new(Told::default());
        let observer = Arc::clone(&told) as Arc<dyn SlabObserver>;
        let (config, timeline) = (PinnedConfig::new(64 << 20, false), Arc::new(Timeline::new(64)));
        let pool = PinnedPool::new(device, config, timeline, Some(observer)).unwrap();
        let buffers =
            [8 << 20, 4096, 16 << 20].map(|bytes| pool.allocate(bytes, PinMode::Now).unwrap());
        let is_known = |buffer: &super::super::PinnedBuffer| {
            let (start, end) = (buffer.start(), buffer.start() + buffer.bytes());
            let there = told.0.lock().unwrap();
            there.iter().any(|slab| slab.start <= start && end <= slab.start + slab.bytes)
        };
        assert!(buffers.iter().all(is_known));
        let [first, small, last] = buffers;
        pool.free(first).unwrap();
        assert!(!is_known(&first) && is_known(&last));
        pool.free(small).unwrap();
        // A buffer that is not freed stays pinned: it may be in use.
        drop(pool);
        assert!(is_known(&last));
        assert_eq!(told.0.lock().unwrap().len(), 1);
    }
}
