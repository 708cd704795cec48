//! The part of the file that is reserved on the disk. It grows when an extent ends behind it.

use std::io;

use super::Storage;
use crate::sync::{Mutex, lock};

/// The file grows by at least this much, so that few extents wait for the file system.
const GROW_BYTES_MIN: u64 = 1 << 30;

/// Time after which the disk is looked at again, also behind a refusal. Others may have freed or taken space by then, and
/// a look costs a call of the file system.
const LOOK_AGAIN_NS: u64 = 10_000_000_000;

/// The length that the disk lets the file have, as last seen.
#[derive(Debug)]
pub(super) struct DiskLimit {
    file_bytes_max: u64,
    seen_ns: Option<u64>,
    has_refused: bool,
}

impl Default for DiskLimit {
    fn default() -> Self {
        Self { file_bytes_max: u64::MAX, seen_ns: None, has_refused: false }
    }
}

impl DiskLimit {
    pub(super) const fn file_bytes_max(&self) -> u64 {
        self.file_bytes_max
    }

    /// Returns true if the disk is to be looked at.
    pub(super) fn is_due(&self, now_ns: u64) -> bool {
        self.seen_ns.is_none_or(|seen_ns| now_ns.saturating_sub(seen_ns) >= LOOK_AGAIN_NS)
    }

    /// Notes a look. Growth changes the limit little: what the file takes, the disk has less.
    pub(super) const fn note(&mut self, now_ns: u64, file_bytes_max: u64) {
        (self.file_bytes_max, self.seen_ns) = (file_bytes_max, Some(now_ns));
    }

    /// Notes that a file of `file_bytes` may not grow. Returns true for the first time.
    pub(super) fn note_refusal(&mut self, now_ns: u64, file_bytes: u64) -> bool {
        self.note(now_ns, file_bytes);
        !std::mem::replace(&mut self.has_refused, true)
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

    const MIB: u64 = 1 << 20;
    /// A time.
    const BEGIN_NS: u64 = 7;

    /// A disk with room for a file of `room_bytes`.
    #[derive(Debug)]
    struct Disk {
        room_bytes: Mutex<u64>,
        grown: Mutex<Vec<(u64, u64)>>,
        refused: Mutex<u64>,
        /// The length of the file before it grows, if the disk says what it spares.
        start_bytes: Option<u64>,
    }

    impl Disk {
        /// It does not say what it spares, as one with a quota.
        fn new(room_bytes: u64) -> Self {
            let room_bytes = Mutex::new(room_bytes);
            Self {
                room_bytes,
                grown: Mutex::default(),
                refused: Mutex::default(),
                start_bytes: None,
            }
        }
    }

    /// A file of 2 MiB that may grow to 64.
    fn growing(disk: &Arc<Disk>) -> Nvme {
        Nvme {
            reserved: Reserved::new(2 * MIB, 64 * MIB),
            ..Nvme::with_storage(Arc::<Disk>::clone(disk), 64 * MIB, false)
        }
    }

    fn is_full_of(full: &NvmeError, bytes: u64) -> bool {
        matches!(full, NvmeError::Full { budget_bytes, .. } if *budget_bytes == bytes)
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
        fn spare_bytes(&self) -> Option<u64> {
            let file_bytes = lock(&self.grown).last().map(|grown| grown.1).or(self.start_bytes)?;
            Some(lock(&self.room_bytes).saturating_sub(file_bytes))
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
        let disk = Arc::new(Disk::new(2 * MIB));
        let nvme = growing(&disk);
        let budget_bytes = |now_ns| nvme.usage_at(now_ns).budget_bytes;
        assert_eq!(budget_bytes(BEGIN_NS), 64 * MIB);
        let first = nvme.allocate_at(MIB, BEGIN_NS).unwrap();
        let full = nvme.allocate_at(4 * MIB, BEGIN_NS).unwrap_err();
        assert!(is_full_of(&full, 2 * MIB), "{full}");
        assert_eq!((budget_bytes(BEGIN_NS), *lock(&disk.refused)), (2 * MIB, 2));
        *lock(&disk.room_bytes) = u64::MAX;
        let (before_ns, again_ns) = (BEGIN_NS + LOOK_AGAIN_NS - 1, BEGIN_NS + LOOK_AGAIN_NS);
        let full = nvme.allocate_at(4 * MIB, before_ns).unwrap_err();
        assert!(is_full_of(&full, 2 * MIB), "{full}");
        // Space that the file already has is still allocated. A request beyond it does not ask the disk.
        nvme.release(first);
        nvme.release(nvme.allocate_at(MIB, before_ns).unwrap());
        assert_eq!((*lock(&disk.refused), lock(&disk.grown).len()), (2, 0));
        assert_eq!((budget_bytes(before_ns), budget_bytes(again_ns)), (2 * MIB, 64 * MIB));
        nvme.release(nvme.allocate_at(4 * MIB, again_ns).unwrap());
        assert_eq!((budget_bytes(again_ns), lock(&disk.grown).len()), (64 * MIB, 1));
    }

    /// The limit of a file that grows may be a whole disk, most of which others have.
    #[test]
    fn a_file_has_what_it_reserved_and_what_the_disk_spares() {
        let disk = Arc::new(Disk { start_bytes: Some(2 * MIB), ..Disk::new(2 * MIB) });
        let nvme = growing(&disk);
        let budget_bytes = |now_ns| nvme.usage_at(now_ns).budget_bytes;
        let [soon_ns, later_ns, last_ns] = [1, 2, 3].map(|looks| BEGIN_NS + looks * LOOK_AGAIN_NS);
        assert_eq!([BEGIN_NS, soon_ns].map(budget_bytes), [2 * MIB; 2]);
        assert_eq!(nvme.usage_at(soon_ns).limit_bytes, 64 * MIB);
        let full = nvme.allocate_at(4 * MIB, soon_ns).unwrap_err();
        assert!(is_full_of(&full, 2 * MIB), "{full}");
        assert_eq!(*lock(&disk.refused), 0, "it would not fit");
        *lock(&disk.room_bytes) = 6 * MIB;
        let grown = nvme.allocate_at(4 * MIB, later_ns).unwrap();
        assert_eq!(
            (budget_bytes(later_ns), lock(&disk.grown).clone()),
            (6 * MIB, vec![(2 * MIB, 4 * MIB)])
        );
        // Others take the rest.
        *lock(&disk.room_bytes) = 3 * MIB;
        assert_eq!(budget_bytes(last_ns), 4 * MIB);
        nvme.release(grown);
    }

    #[test]
    fn only_the_first_refusal_is_news() {
        let mut disk = DiskLimit::default();
        assert!(disk.is_due(0) && disk.file_bytes_max() == u64::MAX);
        assert!(disk.note_refusal(5, GIB));
        assert!(!disk.note_refusal(5 + LOOK_AGAIN_NS, GIB));
        assert!(!disk.is_due(5 + LOOK_AGAIN_NS) && disk.file_bytes_max() == GIB, "of the last one");
    }
}
