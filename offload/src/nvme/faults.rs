//! A real file that fails, shortens, flips or holds up on command. Tests only.

use std::collections::VecDeque;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::file::{Aligned, IoMemory, UNIT_BYTES};
use super::storage::{DirectFile, Storage};
use crate::sync::{Condvar, Mutex, lock, wait};

/// A directory on the disk the tests were built on (`/tmp` may be memory).
pub(crate) fn disk_dir() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.parent().unwrap().to_owned()
}

#[derive(Debug, Default)]
struct Plan {
    /// Bytes of writes that still succeed, then this errno.
    write_limit: Option<(u64, i32)>,
    read_errno: Option<i32>,
    /// What the next transfers are cut to.
    shorts: VecDeque<usize>,
    /// Bit flips that the next readings meet, and then no more.
    flips: u32,
    /// Reads see the file end here.
    end: Option<u64>,
    hold_writes: bool,
    hold_reads: bool,
    held: usize,
    reads: u64,
    writes: u64,
}

/// The failing file. Clones share it.
#[derive(Clone, Debug)]
pub(crate) struct Faults {
    file: Arc<DirectFile>,
    plan: Arc<(Mutex<Plan>, Condvar)>,
}

impl Faults {
    pub(crate) fn new(file_bytes: u64) -> Self {
        let file = Arc::new(DirectFile::create(&disk_dir(), file_bytes).unwrap());
        Self { file, plan: Arc::default() }
    }

    fn set(&self, f: impl FnOnce(&mut Plan)) {
        f(&mut lock(&self.plan.0));
        self.plan.1.notify_all();
    }

    pub(crate) fn fail_writes_after(&self, bytes: u64, errno: i32) {
        self.set(|p| p.write_limit = Some((bytes, errno)));
    }

    pub(crate) fn heal(&self) {
        self.set(|p| (p.write_limit, p.read_errno, p.end) = (None, None, None));
    }

    pub(crate) fn fail_reads(&self, errno: i32) {
        self.set(|p| p.read_errno = Some(errno));
    }

    pub(crate) fn cut_next(&self, lengths: &[usize]) {
        self.set(|p| p.shorts.extend(lengths));
    }

    pub(crate) fn flip_next_reads(&self, times: u32) {
        self.set(|p| p.flips = times);
    }

    pub(crate) fn end_at(&self, offset: u64) {
        self.set(|p| p.end = Some(offset));
    }

    pub(crate) fn hold(&self, writes: bool, reads: bool) {
        self.set(|p| (p.hold_writes, p.hold_reads) = (writes, reads));
    }

    /// Blocks until that many transfers are being held up.
    pub(crate) fn wait_held(&self, count: usize) {
        let mut plan = lock(&self.plan.0);
        while plan.held < count {
            plan = wait(&self.plan.1, plan);
        }
    }

    pub(crate) fn counts(&self) -> (u64, u64) {
        let plan = lock(&self.plan.0);
        (plan.reads, plan.writes)
    }

    /// Changes one bit on the disk.
    pub(crate) fn flip_bit(&self, offset: u64) {
        let unit = offset / UNIT_BYTES as u64 * UNIT_BYTES as u64;
        let mut buffer = Aligned::zeroed(UNIT_BYTES).unwrap();
        assert_eq!(self.file.read(unit, &buffer.memory()).unwrap(), UNIT_BYTES);
        buffer.as_mut_slice()[(offset - unit) as usize] ^= 1;
        assert_eq!(self.file.write(unit, &buffer.memory()).unwrap(), UNIT_BYTES);
    }

    /// Waits while held up; then what the transfer is cut to.
    fn begin(&self, is_write: bool, bytes: usize) -> io::Result<usize> {
        let mut plan = lock(&self.plan.0);
        plan.held += 1;
        self.plan.1.notify_all();
        while if is_write { plan.hold_writes } else { plan.hold_reads } {
            plan = wait(&self.plan.1, plan);
        }
        plan.held -= 1;
        let cut = plan.shorts.pop_front().unwrap_or(bytes).min(bytes);
        if is_write {
            plan.writes += 1;
            if let Some((left, errno)) = &mut plan.write_limit {
                if *left == 0 {
                    return Err(io::Error::from_raw_os_error(*errno));
                }
                let cut = cut.min(*left as usize);
                *left -= cut as u64;
                return Ok(cut);
            }
        } else {
            plan.reads += 1;
            if let Some(errno) = plan.read_errno {
                return Err(io::Error::from_raw_os_error(errno));
            }
        }
        Ok(cut)
    }
}

impl Storage for Faults {
    fn read(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        let mut cut = self.begin(false, memory.bytes())?;
        let (flip, end) = {
            let mut plan = lock(&self.plan.0);
            let flip = plan.flips > 0;
            plan.flips = plan.flips.saturating_sub(1);
            (flip, plan.end)
        };
        if let Some(end) = end {
            cut = cut.min(end.saturating_sub(offset) as usize);
        }
        // What is cut off may have been read all the same: callers must not look at it.
        let whole = cut.next_multiple_of(UNIT_BYTES).min(memory.bytes());
        if flip {
            self.flip_bit(offset);
        }
        let n = if whole == 0 { 0 } else { self.file.read(offset, &memory.part(0, whole))? };
        if flip {
            self.flip_bit(offset);
        }
        Ok(n.min(cut))
    }

    fn write(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        let cut = self.begin(true, memory.bytes())?;
        let whole = cut / UNIT_BYTES * UNIT_BYTES;
        if whole > 0 {
            self.file.write(offset, &memory.part(0, whole))?;
        }
        Ok(cut)
    }

    fn is_buffered(&self) -> bool {
        false
    }

    fn drop_cache(&self, _offset: u64, _bytes: u64) {}
}
