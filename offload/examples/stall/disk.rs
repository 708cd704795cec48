//! A file in memory that takes as long as a disk of chosen rates.

use std::ffi::CStr;
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::os::fd::{AsRawFd, FromRawFd};

use dormouse_storage::{IoMemory, Storage};

use crate::pace::{Link, sleep_until};

const NAME: &CStr = c"disk";

/// Reads and writes are paced apart, each one after the other.
#[derive(Debug)]
pub(crate) struct Disk {
    file: File,
    write: Link,
    read: Link,
}

impl Disk {
    pub(crate) fn new(
        file_bytes: u64,
        write_bytes_per_s: NonZeroU64,
        read_bytes_per_s: NonZeroU64,
    ) -> io::Result<Self> {
        // SAFETY: a name that ends with a zero byte.
        let descriptor = unsafe { libc::memfd_create(NAME.as_ptr(), libc::MFD_CLOEXEC) };
        if descriptor < 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: just created, with no other owner.
        let file = unsafe { File::from_raw_fd(descriptor) };
        file.set_len(file_bytes)?;
        let (write, read) = (Link::new(write_bytes_per_s), Link::new(read_bytes_per_s));
        Ok(Self { file, write, read })
    }
}

fn told(moved: isize) -> io::Result<usize> {
    usize::try_from(moved).map_err(|_| io::Error::last_os_error())
}

impl Storage for Disk {
    fn read(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        let due = self.read.take(memory.bytes());
        let to = memory.address() as *mut libc::c_void;
        // SAFETY: `IoMemory`'s contract: writable for its length.
        let moved = told(unsafe {
            libc::pread(self.file.as_raw_fd(), to, memory.bytes(), offset.cast_signed())
        });
        sleep_until(due);
        moved
    }

    fn write(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        let due = self.write.take(memory.bytes());
        let from = memory.address() as *const libc::c_void;
        // SAFETY: `IoMemory`'s contract: readable for its length.
        let moved = told(unsafe {
            libc::pwrite(self.file.as_raw_fd(), from, memory.bytes(), offset.cast_signed())
        });
        sleep_until(due);
        moved
    }

    fn is_buffered(&self) -> bool {
        false
    }

    fn drop_cache(&self, _offset: u64, _bytes: u64) {}
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use dormouse_storage::{Aligned, UNIT_BYTES};

    use super::*;

    #[test]
    fn what_is_written_is_read_and_the_file_ends() {
        let disk = Disk::new(2 * UNIT_BYTES as u64, NonZeroU64::MAX, NonZeroU64::MAX).unwrap();
        let mut memory = Aligned::zeroed(2 * UNIT_BYTES).unwrap();
        memory.as_mut_slice().fill(7);
        let unit = memory.memory().part(0, UNIT_BYTES);
        assert_eq!(disk.write(UNIT_BYTES as u64, &unit).unwrap(), UNIT_BYTES);
        assert_eq!(disk.read(0, &memory.memory()).unwrap(), 2 * UNIT_BYTES);
        assert!(memory.as_slice()[..UNIT_BYTES].iter().all(|&byte| byte == 0));
        assert!(memory.as_slice()[UNIT_BYTES..].iter().all(|&byte| byte == 7));
        assert_eq!(disk.read(UNIT_BYTES as u64, &memory.memory()).unwrap(), UNIT_BYTES);
        assert_eq!(disk.read(2 * UNIT_BYTES as u64, &unit).unwrap(), 0);
    }

    #[test]
    fn each_way_has_its_own_rate() {
        let slow = NonZeroU64::new(100 * UNIT_BYTES as u64).unwrap();
        let mut buffer = Aligned::zeroed(UNIT_BYTES).unwrap();
        let memory = buffer.memory();
        let time = Duration::from_millis(10);

        let disk = Disk::new(UNIT_BYTES as u64, slow, NonZeroU64::MAX).unwrap();
        let asked = Instant::now();
        disk.write(0, &memory).unwrap();
        assert!(asked.elapsed() >= time);
        let disk = Disk::new(UNIT_BYTES as u64, NonZeroU64::MAX, slow).unwrap();
        let asked = Instant::now();
        disk.read(0, &memory).unwrap();
        assert!(asked.elapsed() >= time);
    }
}
