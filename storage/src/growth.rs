//! The part of the file that is reserved on the disk. It grows when an extent ends behind it.

use std::io;

use super::Storage;
use crate::sync::{Mutex, lock};

/// The file grows by at least this much, so that few extents wait for the file system.
const GROW_BYTES_MIN: u64 = 1 << 30;

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
    use super::*;
    use crate::IoMemory;

    const GIB: u64 = GROW_BYTES_MIN;

    /// A disk with room for a file of `room_bytes`.
    #[derive(Debug)]
    struct Disk {
        room_bytes: u64,
        grown: Mutex<Vec<(u64, u64)>>,
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
            if to_bytes > self.room_bytes {
                return Err(io::Error::from_raw_os_error(libc::ENOSPC));
            }
            lock(&self.grown).push((from_bytes, to_bytes));
            Ok(())
        }
    }

    #[test]
    fn a_file_grows_by_a_gib_or_by_what_the_disk_has() {
        let disk = Disk { room_bytes: 3 * GIB, grown: Mutex::default() };
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
        let disk = Disk { room_bytes: GIB + 100, grown: Mutex::default() };
        let reserved = Reserved::new(GIB, 16 * GIB);
        reserved.cover(&disk, GIB + 100).unwrap();
        assert_eq!(reserved.bytes(), GIB + 100);
    }

    #[test]
    fn a_file_grows_no_further_than_its_limit() {
        let disk = Disk { room_bytes: u64::MAX, grown: Mutex::default() };
        let reserved = Reserved::new(GIB, GIB + 100);
        reserved.cover(&disk, GIB + 1).unwrap();
        assert_eq!(reserved.bytes(), GIB + 100);
    }
}
