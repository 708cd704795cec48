//! The part of the file that is reserved on the disk. It grows when an extent ends behind it.

use std::io;

use super::Storage;
use crate::sync::{Mutex, lock};

/// The file grows by at least this much, so that few extents wait for the file system.
const GROW_BYTES_MIN: u64 = 1 << 30;

/// Time after a refusal before the disk is asked to grow the file again. Others may have freed space by then, and a
/// refusal costs two calls of the file system.
const GROW_AGAIN_NS: u64 = 10_000_000_000;

/// The last refusal of the disk to grow the file.
#[derive(Debug, Default)]
pub(super) struct GrowthRefused {
    /// When the disk refused, and the length of the file then.
    last: Option<(u64, u64)>,
}

impl GrowthRefused {
    /// Notes a refusal. Returns true for the first.
    pub(super) fn note(&mut self, now_ns: u64, file_bytes: u64) -> bool {
        self.last.replace((now_ns, file_bytes)).is_none()
    }

    /// Returns the length that the file may not exceed now.
    pub(super) fn limit_bytes(&self, now_ns: u64) -> u64 {
        match self.last {
            Some((at_ns, file_bytes)) if now_ns.saturating_sub(at_ns) < GROW_AGAIN_NS => file_bytes,
            _ => u64::MAX,
        }
    }
}

/// The bytes from the begin of the file that are reserved on the disk.
#[derive(Debug)]
pub(super) struct Reserved {
    /// Locked while the file grows, and never by a release of an extent, which does not wait.
    bytes: Mutex<u64>,
    bytes_max: u64,
}

impl Reserved {
    pub(super) fn new(bytes: u64, bytes_max: u64) -> Self {
        Self { bytes: Mutex::new(bytes), bytes_max }
    }

    pub(super) fn bytes(&self) -> u64 {
        *lock(&self.bytes)
    }

    /// Reserves the file up to `end_bytes` at least.
    pub(super) fn cover(&self, storage: &dyn Storage, end_bytes: u64) -> io::Result<()> {
        let mut bytes = lock(&self.bytes);
        if end_bytes <= *bytes {
            return Ok(());
        }
        let ahead_bytes = bytes.saturating_add(GROW_BYTES_MIN).min(self.bytes_max).max(end_bytes);
        *bytes = match storage.grow(*bytes, ahead_bytes) {
            Ok(()) => ahead_bytes,
            Err(_) if end_bytes < ahead_bytes => {
                storage.grow(*bytes, end_bytes)?;
                end_bytes
            }
            Err(error) => return Err(error),
        };
        Ok(())
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{IoMemory, Nvme, NvmeError};

    const GIB: u64 = GROW_BYTES_MIN;

    /// A disk with room for a file of `room_bytes`.
    #[derive(Debug)]
    struct Disk {
        room_bytes: Mutex<u64>,
        grown: Mutex<Vec<(u64, u64)>>,
        refused: Mutex<u64>,
    }

    impl Disk {
        fn new(room_bytes: u64) -> Self {
            let room_bytes = Mutex::new(room_bytes);
            Self { room_bytes, grown: Mutex::default(), refused: Mutex::default() }
        }
    }

    impl Storage for Disk {
        fn read(&self, _: u64, _: &IoMemory) -> io::Result<usize> {
            Ok(0)
        }
        fn write(&self, _: u64, _: &IoMemory) -> io::Result<usize> {
            Ok(0)
        }
        fn is_buffered(&self) -> bool {
            false
        }
        fn drop_cache(&self, _: u64, _: u64) {}
        fn grow(&self, from_bytes: u64, to_bytes: u64) -> io::Result<()> {
            if to_bytes > *lock(&self.room_bytes) {
                *lock(&self.refused) += 1;
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            lock(&self.grown).push((from_bytes, to_bytes));
            Ok(())
        }
    }

    #[test]
    fn a_file_grows_by_a_gib_or_by_what_the_disk_has() {
        let disk = Disk::new(3 * GIB);
        let reserved = Reserved::new(GIB, 16 * GIB);
        for (end_bytes, bytes) in
            [(GIB, GIB), (GIB + 1, 2 * GIB), (2 * GIB, 2 * GIB), (2 * GIB + 5, 3 * GIB)]
        {
            reserved.cover(&disk, end_bytes).unwrap();
            assert_eq!(reserved.bytes(), bytes, "up to {end_bytes}");
        }
        assert_eq!(*lock(&disk.grown), [(GIB, 2 * GIB), (2 * GIB, 3 * GIB)]);
        reserved.cover(&disk, 3 * GIB + 1).unwrap_err();
        assert_eq!(reserved.bytes(), 3 * GIB);
        // No room for a whole GiB ahead, but for this extent.
        let disk = Disk::new(GIB + 100);
        let reserved = Reserved::new(GIB, 16 * GIB);
        reserved.cover(&disk, GIB + 100).unwrap();
        assert_eq!(reserved.bytes(), GIB + 100);
    }

    #[test]
    fn a_file_grows_no_further_than_its_limit() {
        let disk = Disk::new(u64::MAX);
        let reserved = Reserved::new(GIB, GIB + 100);
        reserved.cover(&disk, GIB + 1).unwrap();
        assert_eq!(reserved.bytes(), GIB + 100);
    }

    #[test]
    fn a_disk_that_was_full_is_asked_again_later() {
        const MIB: u64 = 1 << 20;
        let disk = Arc::new(Disk::new(2 * MIB));
        let nvme = Nvme {
            reserved: Reserved::new(2 * MIB, 64 * MIB),
            ..Nvme::with_storage(Arc::<Disk>::clone(&disk), 64 * MIB, false)
        };
        let begin_ns = 7;
        let budget_bytes = |now_ns| nvme.usage_at(now_ns).budget_bytes;
        let first = nvme.allocate_at(MIB, begin_ns).unwrap();
        let full = nvme.allocate_at(4 * MIB, begin_ns).unwrap_err();
        assert!(matches!(full, NvmeError::Full { budget_bytes, .. } if budget_bytes == 64 * MIB));
        assert_eq!((budget_bytes(begin_ns), *lock(&disk.refused)), (2 * MIB, 2));
        *lock(&disk.room_bytes) = u64::MAX;
        let (before_ns, again_ns) = (begin_ns + GROW_AGAIN_NS - 1, begin_ns + GROW_AGAIN_NS);
        let full = nvme.allocate_at(4 * MIB, before_ns).unwrap_err();
        assert!(matches!(full, NvmeError::Full { budget_bytes, .. } if budget_bytes == 2 * MIB));
        // Space that the file already has is still allocated. A request beyond it does not ask the disk.
        nvme.release(first);
        nvme.release(nvme.allocate_at(MIB, before_ns).unwrap());
        assert_eq!((*lock(&disk.refused), lock(&disk.grown).len()), (2, 0));
        assert_eq!((budget_bytes(before_ns), budget_bytes(again_ns)), (2 * MIB, 64 * MIB));
        nvme.release(nvme.allocate_at(4 * MIB, again_ns).unwrap());
        assert_eq!((budget_bytes(again_ns), lock(&disk.grown).len()), (64 * MIB, 1));
    }

    #[test]
    fn only_the_first_refusal_is_news() {
        let mut growth = GrowthRefused::default();
        assert_eq!(growth.limit_bytes(0), u64::MAX);
        assert!(growth.note(5, GIB));
        assert!(!growth.note(5 + GROW_AGAIN_NS, GIB));
        assert_eq!(growth.limit_bytes(5 + GROW_AGAIN_NS), GIB, "counted from the last one");
    }
}
