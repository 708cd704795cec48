//! Host copies that threads read without the table's lock, since what they copy to may sleep itself.
//!
//! Pure: [`super::region_data::TableState`] holds it under the table's lock.

use dormouse_alloc::pinned::PinnedBuffer;

/// A host copy that is being read.
#[derive(Debug)]
struct HostRead {
    buffer: PinnedBuffer,
    /// Number of threads that read it.
    readers: usize,
    /// Its region has given it up: the last reader frees it.
    is_left: bool,
}

/// All of them: at most one for each thread that reads.
#[derive(Debug, Default)]
pub(crate) struct HostReads {
    reads: Vec<HostRead>,
}

impl HostReads {
    /// Begins a read of a host copy that its region has.
    pub(super) fn begin(&mut self, buffer: PinnedBuffer) {
        match self.find(buffer) {
            Some(read) => read.readers += 1,
            None => self.reads.push(HostRead { buffer, readers: 1, is_left: false }),
        }
    }

    /// Ends a read. Returns true if the caller is to free the buffer.
    pub(super) fn end(&mut self, buffer: PinnedBuffer) -> bool {
        let Some(read) = self.find(buffer) else { return false };
        read.readers -= 1;
        if read.readers > 0 {
            return false;
        }
        let is_left = read.is_left;
        self.reads.retain(|read| read.buffer != buffer);
        is_left
    }

    /// Notes that a region gives its host copy up. Returns true if the caller is to free the buffer.
    pub(super) fn leave(&mut self, buffer: PinnedBuffer) -> bool {
        let found = self.find(buffer);
        found.map(|read| read.is_left = true).is_none()
    }

    fn find(&mut self, buffer: PinnedBuffer) -> Option<&mut HostRead> {
        self.reads.iter_mut().find(|read| read.buffer == buffer)
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::sync::Arc;

    use dormouse_alloc::pinned::{PinMode, PinnedConfig, PinnedPool};
    use dormouse_device::host::{HostConfig, HostDevice};
    use dormouse_timeline::Timeline;

    use super::*;

    #[test]
    fn the_last_of_readers_and_region_frees_a_copy() {
        let device = Arc::new(HostDevice::new(HostConfig::new(1 << 20, 1 << 20)).unwrap());
        let (config, timeline) = (PinnedConfig::new(1 << 20, false), Arc::new(Timeline::new(64)));
        let pool = PinnedPool::new(device, config, timeline, None).unwrap();
        let [first, second] = [(); 2].map(|()| pool.allocate(4096, PinMode::Now).unwrap());
        let mut reads = HostReads::default();
        assert!(reads.leave(first), "no thread reads it");
        for buffer in [first, first, second] {
            reads.begin(buffer);
        }
        assert!(!reads.end(second), "its region has it");
        assert!(!reads.leave(first) && !reads.end(first));
        assert!(reads.end(first));
        assert!(reads.reads.is_empty() && reads.leave(first));
    }
}
