//! A `Reclaim` that puts blocks to sleep.

use super::super::common::Fake;
use dormouse_alloc::{Allocator, BlockId, Reclaim, Reclaimed};
use std::sync::{Arc, Mutex, Weak};

/// Puts one block to sleep when asked, if it is claimed and awake by then.
#[derive(Debug)]
pub(super) struct Sleeper {
    allocator: Weak<Allocator<Fake>>,
    victim: Mutex<Option<BlockId>>,
    slept: Mutex<Option<BlockId>>,
}

impl Sleeper {
    pub(super) fn new(allocator: &Arc<Allocator<Fake>>) -> Arc<Self> {
        let allocator = Arc::downgrade(allocator);
        Arc::new(Self { allocator, victim: Mutex::default(), slept: Mutex::default() })
    }

    /// `block` is the one from here on.
    pub(super) fn aim(&self, block: BlockId) {
        *self.victim.lock().unwrap() = Some(block);
    }

    /// The block that was put to sleep since this was last asked.
    pub(super) fn take_slept(&self) -> Option<BlockId> {
        self.slept.lock().unwrap().take()
    }

    fn put_to_sleep(&self) -> Option<u64> {
        let (allocator, id) = (self.allocator.upgrade()?, self.victim.lock().unwrap().take()?);
        let info = allocator.info(id).ok().filter(|it| it.claimed.is_some() && !it.asleep)?;
        let device = allocator.device();
        let ends = allocator.uses_end(&[id]).ok()?.events;
        ends.into_iter().for_each(|end| device.gpu().finish(end));
        if info.pages.bytes > 0 {
            device.take_pages(info.pages);
        }
        allocator.set_asleep(id).unwrap();
        *self.slept.lock().unwrap() = Some(id);
        Some(info.pages.bytes as u64)
    }
}

impl Reclaim for Sleeper {
    fn reclaim(&self, _: u64) -> Reclaimed {
        Reclaimed { freed_bytes: self.put_to_sleep().unwrap_or(0), in_flight_bytes: 0 }
    }
}
