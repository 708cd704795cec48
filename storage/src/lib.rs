//! The NVMe tier: one unlinked file whose space is reserved, cut into extents, with checked I/O.
//!
//! This crate knows bytes and offsets. It is not a residency engine (`offload` decides what is written
//! and when) and not a file system: the file has no name and ends with the process.
//!
//! # Glossary
//! - *extent*: a piece of the file ([`Extent`]); *chunk*: one read or write of it, at most
//!   [`CHUNK_BYTES`], with a checksum of its own.
//! - *transfer*: the chunks of one extent, read or written ([`Transfer`]).
//! - *queue*: one thread's way to the file ([`Queue`]): io_uring, or one blocking call at a time.
//! - *I/O scheduler*: decides which transfer of a thread submits its next request; a transfer holds a
//!   *slot* of it while in progress.
//! - *blocking task*: work that waits on an I/O thread, other than a transfer ([`BlockingTask`]).
//!
//! # Invariants
//! - **I1** Every length is checked and every chunk is verified against its checksum when it is read.
//! - **I2** A failed write stops the tier: it accepts no more data and still reads what it holds. A
//!   failed read changes nothing.
//! - **I3** Memory lent to a request stays lent until the request is answered, also when a thread
//!   panics.
//! - **I4** Reads are submitted before writes, and writes leave room in a queue for reads.
//! - **I5** Every retry and every queue has a named limit.
//! - **I6** A descriptor is used and closed only while it names the file that it was opened for: the program
//!   may close it and open another file as the same number.
//!
//! ```text
//!  IoPool: threads ──► IoScheduler ──► Transfer: next chunk, meaning of an answer ──► Queue ──► file
//!                                         (pure; several chunks in flight)      Blocking | Ring
//! ```
#![deny(unsafe_code)]

mod choice;
mod chunk;
mod descriptors;
mod direct;
mod error;
mod extent;
mod fallback;
mod file;
mod growth;
mod io_pool;
mod io_scheduler;
mod probe;
mod queue;
mod rates;
mod storage;
#[cfg(all(target_arch = "x86_64", not(miri)))]
mod sum;
pub mod sync;
#[cfg(all(any(test, feature = "faults"), not(loom)))]
pub mod testing;
mod transfer;
mod uring;
mod write_budget;

#[cfg(test)]
#[cfg(not(loom))]
mod ring_tests;
#[cfg(test)]
#[cfg(not(loom))]
mod tests;
#[cfg(test)]
#[cfg(not(loom))]
mod transfer_tests;

pub use choice::IoEngine;
pub use chunk::{CHUNK_BYTES, SHORT_ATTEMPTS_MAX};
pub use descriptors::{ClosedInChild, OwnFile, close_in_child};
pub use error::{IoOperation, NvmeError, ThreadError};
pub use extent::Extent;
pub use file::{Aligned, IoMemory, UNIT_BYTES};
pub use io_pool::{BlockingTask, IoPool};
pub use io_scheduler::{Priority, TransferJob};
pub use probe::{DiskProbe, probe};
pub use queue::{Answer, Blocking, NullQueue, Queue, Request, share};
pub use rates::Rates;
pub use storage::{DirectFile, Storage};
pub use transfer::Transfer;

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use dormouse_alloc::core::Tlsf;

use self::choice::Choice;
use self::fallback::Fallback;
use self::growth::{DiskLimit, Reserved};
use self::uring::Buffers;
use self::write_budget::WriteBudget;
use crate::sync::{Mutex, lock};

/// Limit of `io_threads`.
pub const IO_THREADS_MAX: usize = 64;
/// Limit of `queue_depth`.
pub const QUEUE_DEPTH_MAX: usize = 256;
/// Largest file in bytes: 2³² − 1 units.
pub const FILE_BYTES_MAX: u64 = u32::MAX as u64 * UNIT_BYTES as u64;

/// Settings of the NVMe tier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NvmeConfig {
    /// Directory on a disk. The file in it has no name.
    pub dir: PathBuf,
    /// Size of the file in bytes, preallocated; rounded down to whole units.
    pub file_bytes: u64,
    /// What the file may grow to when it is full, in bytes; at most `file_bytes`: it does not grow.
    pub file_bytes_max: u64,
    /// I/O threads, 1 to [`IO_THREADS_MAX`].
    pub io_threads: usize,
    /// I/O engine of the threads.
    pub io_engine: IoEngine,
    /// Requests in flight per thread with io_uring, 1 to [`QUEUE_DEPTH_MAX`].
    pub queue_depth: usize,
    /// Average limit on bytes written per 24 hours; 0 if unlimited. A tier starts with one day's budget.
    pub write_budget_bytes: u64,
}

/// Statistics of the NVMe tier.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct NvmeUse {
    /// Bytes in extents.
    pub used_bytes: u64,
    /// Peak of `used_bytes` since the last reset.
    pub peak_bytes: u64,
    /// Limit in bytes, at most what the file has and what the disk lets it grow by, as seen at most 10 s ago.
    pub budget_bytes: u64,
    /// Limit in bytes on a disk that gives all of it: the one that was set, or what the file may grow to.
    pub limit_bytes: u64,
    /// Bytes written since creation, including failed transfers.
    pub written_bytes: u64,
    /// Write budget in bytes per 24 hours; 0 if unlimited.
    pub write_budget_bytes: u64,
    /// Bytes left of the write budget; 0 if unlimited.
    pub write_left_bytes: u64,
    /// Reason that the tier stopped accepting data.
    pub stopped: Option<String>,
    /// Whether file I/O is buffered in the page cache.
    pub buffered: bool,
    /// I/O engine in use: `Uring` or `Threads`.
    pub io_engine: IoEngine,
    /// Reason for a fallback of the I/O engine.
    pub io_note: Option<String>,
}

#[derive(Debug)]
struct FileSpace {
    tlsf: Tlsf,
    used_bytes: u64,
    peak_bytes: u64,
    budget_bytes: u64,
    disk: DiskLimit,
    writes: WriteBudget,
    stopped: Option<String>,
}

impl FileSpace {
    /// Returns the limit on bytes in use now.
    fn budget_bytes(&self) -> u64 {
        self.budget_bytes.min(self.disk.file_bytes_max())
    }

    fn full(&self, asked_bytes: u64) -> NvmeError {
        let (used_bytes, budget_bytes) = (self.used_bytes, self.budget_bytes());
        NvmeError::Full { asked_bytes, used_bytes, budget_bytes }
    }
}

/// The NVMe tier: the file and its extents. Any-thread.
#[derive(Debug)]
pub struct Nvme {
    storage: Arc<dyn Storage>,
    io_engine: IoEngine,
    queues: Mutex<Vec<Box<dyn Queue>>>,
    buffers: Option<Arc<Buffers>>,
    io_note: Arc<Fallback>,
    /// The start of the write budget.
    began: Instant,
    space: Mutex<FileSpace>,
    reserved: Reserved,
    checksums: bool,
    rates: Rates,
}

impl Nvme {
    /// Creates the file, chooses the I/O engine and measures throughput.
    ///
    /// # Errors
    /// `Config` for sizes out of range, `IsMemory`, `Setup`, and the errors of the measurement.
    pub fn create(config: &NvmeConfig, checksums: bool) -> Result<Self, NvmeError> {
        Self::create_with(config, checksums, |_| config.queue_depth)
    }

    /// As [`Nvme::create`], with queues of the depth that `depth` returns for the throughput, which is measured with
    /// `config.queue_depth`. If the system refuses those, the queues of the measurement stay.
    ///
    /// # Errors
    /// As [`Nvme::create`].
    pub fn create_with(
        config: &NvmeConfig,
        checksums: bool,
        depth: impl FnOnce(Rates) -> usize,
    ) -> Result<Self, NvmeError> {
        check_config(config)?;
        let whole = |bytes: u64| bytes / UNIT_BYTES as u64 * UNIT_BYTES as u64;
        let bytes = whole(config.file_bytes);
        let bytes_max = whole(config.file_bytes_max).clamp(bytes, FILE_BYTES_MAX);
        let file = Arc::new(DirectFile::create(&config.dir, bytes)?);
        let NvmeConfig { dir, io_engine, io_threads, queue_depth, .. } = config;
        let mut choice = choice::choose(dir, &file, *io_engine, *io_threads, *queue_depth)?;
        let mut writes = WriteBudget::new(config.write_budget_bytes);
        let rates = match choice.queues.first_mut() {
            Some(queue) => rates::measure(&mut **queue, bytes, &mut writes)?,
            None => Rates::default(),
        };
        let wanted = depth(rates).clamp(1, QUEUE_DEPTH_MAX);
        if wanted != *queue_depth
            && choice.engine == IoEngine::Uring
            && let Ok(deeper) = choice::choose(dir, &file, IoEngine::Uring, *io_threads, wanted)
        {
            choice = deeper;
        }
        let Choice { engine, queues, buffers, note } = choice;
        let tier = Self {
            rates,
            io_engine: engine,
            queues: Mutex::new(queues),
            buffers,
            io_note: note,
            reserved: Reserved::new(bytes, bytes_max),
            ..Self::with_storage(file, bytes_max, checksums)
        };
        lock(&tier.space).writes = writes;
        Ok(tier)
    }

    /// Creates a tier over any storage: not measured, one request per thread, without a write budget. The file has all
    /// of its bytes.
    #[must_use]
    pub fn with_storage(storage: Arc<dyn Storage>, file_bytes: u64, checksums: bool) -> Self {
        let units = u32::try_from(file_bytes / UNIT_BYTES as u64).unwrap_or(u32::MAX);
        let space = FileSpace {
            tlsf: Tlsf::new(units),
            used_bytes: 0,
            peak_bytes: 0,
            budget_bytes: u64::from(units) * UNIT_BYTES as u64,
            disk: DiskLimit::default(),
            writes: WriteBudget::default(),
            stopped: None,
        };
        Self {
            storage,
            io_engine: IoEngine::Threads,
            queues: Mutex::default(),
            buffers: None,
            io_note: Arc::default(),
            began: Instant::now(),
            space: Mutex::new(space),
            reserved: Reserved::new(file_bytes, file_bytes),
            checksums,
            rates: Rates::default(),
        }
    }

    /// Returns a queue for one thread: first those created with the tier, then blocking ones.
    #[must_use]
    pub fn take_queue(&self) -> Box<dyn Queue> {
        let made = lock(&self.queues).pop();
        made.unwrap_or_else(|| Box::new(Blocking::new(Arc::clone(&self.storage))))
    }

    /// Registers `memory` with io_uring until [`Nvme::take_back`]. Returns false if that is not possible;
    /// transfers then cost more.
    pub fn lend(&self, memory: &IoMemory) -> bool {
        let Some(buffers) = &self.buffers else { return false };
        let lent = buffers.lend(memory).inspect_err(|e| {
            let bytes = memory.bytes();
            self.io_note.set(format!("{bytes} bytes are not registered with io_uring: {e}"));
        });
        lent.is_ok()
    }

    /// Sets a listener that is called once with [`NvmeUse::io_note`], now or when the fallback happens, on
    /// any thread.
    pub fn on_note(&self, listener: impl FnOnce(&str) + Send + 'static) {
        self.io_note.on_set(Box::new(listener));
    }

    /// Deregisters lent memory. No transfer may use it.
    pub fn take_back(&self, memory: &IoMemory) {
        if let Some(buffers) = &self.buffers {
            buffers.take_back(memory);
        }
    }

    /// Returns whether chunks have checksums.
    #[must_use]
    pub const fn checksums(&self) -> bool {
        self.checksums
    }

    /// Returns the throughput measured at creation.
    #[must_use]
    pub const fn rates(&self) -> Rates {
        self.rates
    }

    /// Allocates an extent of `bytes`, rounded up to whole units, and reserves as much of the write budget. A file
    /// that is full grows first, if the disk has room; the caller waits for the file system. After a refusal the disk is
    /// not asked again for 10 s.
    ///
    /// # Errors
    /// `Full`, also if the disk has no room for a file that would grow; `Spent`; `Stopped`.
    pub fn allocate(&self, bytes: u64) -> Result<Extent, NvmeError> {
        self.allocate_at(bytes, self.now_ns())
    }

    fn allocate_at(&self, bytes: u64, now_ns: u64) -> Result<Extent, NvmeError> {
        self.look_at_disk(now_ns);
        let (extent, file_bytes_max) = self.take_place(bytes, now_ns)?;
        let end_bytes = extent.offset() + extent.whole_bytes();
        if end_bytes > file_bytes_max {
            self.release(extent);
            return Err(lock(&self.space).full(bytes));
        }
        if let Err(refusal) = self.reserved.cover(&*self.storage, end_bytes) {
            self.release(extent);
            let file_bytes = self.reserved.bytes();
            let (is_first, full) = {
                let mut space = lock(&self.space);
                (space.disk.note_refusal(now_ns, file_bytes), space.full(bytes))
            };
            let spare_bytes = self.storage.spare_bytes();
            if is_first {
                tracing::warn!(target: "storage", end_bytes, file_bytes, spare_bytes, reason = %refusal, "the file does not grow; the disk is asked again later");
            } else {
                tracing::debug!(target: "storage", end_bytes, file_bytes, spare_bytes, reason = %refusal, "the file does not grow yet");
            }
            return Err(full);
        }
        Ok(extent)
    }

    /// Looks at what the disk spares, if the last look is old.
    fn look_at_disk(&self, now_ns: u64) {
        if !lock(&self.space).disk.is_due(now_ns) {
            return;
        }
        // Not under the lock, which a release takes.
        let spare_bytes = self.storage.spare_bytes();
        let file_bytes_max =
            spare_bytes.map_or(u64::MAX, |bytes| self.reserved.bytes().saturating_add(bytes));
        lock(&self.space).disk.note(now_ns, file_bytes_max);
    }

    /// Takes a place in the file, which may be longer than the file is yet. Also returns the limit of the file's length
    /// for now.
    fn take_place(&self, bytes: u64, now_ns: u64) -> Result<(Extent, u64), NvmeError> {
        let mut space = lock(&self.space);
        if let Some(reason) = &space.stopped {
            return Err(NvmeError::Stopped { reason: reason.clone() });
        }
        let Ok(units) = u32::try_from(bytes.div_ceil(UNIT_BYTES as u64)) else {
            return Err(space.full(bytes));
        };
        let whole_bytes = u64::from(units) * UNIT_BYTES as u64;
        if space.used_bytes + whole_bytes > space.budget_bytes() {
            return Err(space.full(bytes));
        }
        space.writes.reserve(whole_bytes, now_ns)?;
        let Some(piece) = space.tlsf.allocate(units, 1) else {
            space.writes.give_back(whole_bytes, now_ns);
            return Err(space.full(bytes));
        };
        space.used_bytes += whole_bytes;
        space.peak_bytes = space.peak_bytes.max(space.used_bytes);
        Ok((Extent::new(piece, bytes), space.disk.file_bytes_max()))
    }

    /// Counts bytes written into an extent, including failed writes.
    pub fn wrote(&self, extent: &mut Extent, bytes: u64) {
        let now_ns = self.now_ns();
        lock(&self.space).writes.wrote(&mut extent.reserved_bytes, bytes, now_ns);
    }

    /// Writes `memory`, at most a chunk, at `at` bytes into an extent, on the calling thread. Returns its
    /// checksum if chunks have one.
    ///
    /// # Errors
    /// `Failed` or `Short`; the bytes on the disk are then undefined.
    pub fn write_chunk(
        &self,
        extent: &mut Extent,
        at: u64,
        memory: IoMemory,
    ) -> Result<Option<u32>, NvmeError> {
        let mut transfer = Transfer::writer(extent.offset() + at, memory, self.checksums);
        let result = transfer.run(&mut Blocking::new(Arc::clone(&self.storage)));
        self.wrote(extent, transfer.moved_bytes());
        Ok(result?.and_then(|sums| sums.first().copied()))
    }

    /// Fills `memory`, at most a chunk, from `at` bytes into an extent, on the calling thread. Returns true
    /// if the checksum matched only on the second read.
    ///
    /// # Errors
    /// `Failed`, `Short`, `Truncated`, `Corrupted`.
    pub fn read_chunk(
        &self,
        extent: &Extent,
        at: u64,
        memory: IoMemory,
    ) -> Result<bool, NvmeError> {
        let sum = Vec::from_iter(extent.sum(at as usize / CHUNK_BYTES));
        let start = extent.offset();
        let mut transfer = Transfer::reader(start + at, memory, sum).of_extent(start);
        transfer.run(&mut Blocking::new(Arc::clone(&self.storage)))?;
        Ok(transfer.reread() > 0)
    }

    /// Releases an extent and the write budget that it did not use. Returns the bytes still in use.
    pub fn release(&self, extent: Extent) -> u64 {
        let now_ns = self.now_ns();
        let mut space = lock(&self.space);
        let bytes = extent.whole_bytes();
        space.writes.give_back(extent.reserved_bytes, now_ns);
        if space.tlsf.free(extent.into_piece()).is_ok() {
            space.used_bytes -= bytes;
        }
        space.used_bytes
    }

    /// Stops accepting data. The first reason is kept.
    pub fn stop(&self, reason: &str) {
        let mut space = lock(&self.space);
        let is_first = space.stopped.is_none();
        if is_first {
            space.stopped = Some(reason.to_owned());
        }
        drop(space);
        if is_first {
            tracing::warn!(target: "storage", reason, "the file takes no more data");
        }
    }

    /// Sets the limit on bytes in use, at most the size of the file. Existing data stays.
    pub fn set_budget(&self, bytes: u64) {
        let mut space = lock(&self.space);
        let file_bytes = u64::from(space.tlsf.units()) * UNIT_BYTES as u64;
        space.budget_bytes = bytes.min(file_bytes);
    }

    /// Returns statistics.
    #[must_use]
    pub fn usage(&self) -> NvmeUse {
        self.usage_at(self.now_ns())
    }

    fn usage_at(&self, now_ns: u64) -> NvmeUse {
        self.look_at_disk(now_ns);
        let mut space = lock(&self.space);
        NvmeUse {
            written_bytes: space.writes.written_bytes(),
            write_budget_bytes: space.writes.day_bytes(),
            write_left_bytes: space.writes.left_bytes(now_ns),
            used_bytes: space.used_bytes,
            peak_bytes: space.peak_bytes,
            budget_bytes: space.budget_bytes(),
            limit_bytes: space.budget_bytes,
            stopped: space.stopped.clone(),
            buffered: self.storage.is_buffered(),
            io_engine: self.io_engine,
            io_note: self.io_note.get(),
        }
    }

    fn now_ns(&self) -> u64 {
        u64::try_from(self.began.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Resets the peak.
    pub fn reset_peak(&self) {
        let mut space = lock(&self.space);
        space.peak_bytes = space.used_bytes;
    }
}

fn check_config(config: &NvmeConfig) -> Result<(), NvmeError> {
    for (what, seen, least, most) in [
        ("file_bytes", config.file_bytes, UNIT_BYTES as u64, FILE_BYTES_MAX),
        ("io_threads", config.io_threads as u64, 1, IO_THREADS_MAX as u64),
        ("queue_depth", config.queue_depth as u64, 1, QUEUE_DEPTH_MAX as u64),
    ] {
        if !(least..=most).contains(&seen) {
            return Err(NvmeError::Config { what, seen, accepted: format!("{least} to {most}") });
        }
    }
    Ok(())
}
