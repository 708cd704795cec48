//! A file that fails, shortens, flips or holds up on command, and whose queues answer late and out
//! of order. It is a real one, or memory where speed matters more. Tests only.
#![allow(
    missing_docs,
    clippy::unwrap_used,
    clippy::panic,
    reason = "helpers of tests; their names say what they do"
)]

mod cache;
mod memory;
mod queue;
mod random;
pub mod seccomp;

use std::collections::{BTreeSet, VecDeque};
use std::io::{self, Write};
use std::ops::Range;
use std::path::PathBuf;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

pub use self::cache::CachedFile;
use self::memory::MemoryFile;
use self::queue::FaultyQueue;
pub use self::random::Random;
use crate::choice::{self, Choice};
use crate::file::{Aligned, IoMemory, UNIT_BYTES};
use crate::storage::{DirectFile, Storage};
use crate::sync::{Condvar, Mutex, lock, wait};
use crate::write_budget::WriteBudget;
use crate::{Blocking, IoEngine, IoOperation, Nvme, Queue, Rates, Request};

/// How much later than others a request is that comes late.
const LATE: Duration = Duration::from_micros(200);

/// What may befall a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Mishap {
    FullDisk,
    FailedWrite,
    FailedRead,
    ShortWrite,
    ShortRead,
    Interrupted,
    FlippedRead,
    FlippedWrite,
    Late,
    HeldUp,
    OutOfOrder,
}

impl Mishap {
    pub const ALL: [Self; 11] = [
        Self::FullDisk,
        Self::FailedWrite,
        Self::FailedRead,
        Self::ShortWrite,
        Self::ShortRead,
        Self::Interrupted,
        Self::FlippedRead,
        Self::FlippedWrite,
        Self::Late,
        Self::HeldUp,
        Self::OutOfOrder,
    ];
}

/// Reports that a test is skipped because the system refuses io_uring. Fails where io_uring is required:
/// `CI` or `REQUIRE_IO_URING` is set.
pub fn skip_without_io_uring(reason: impl std::fmt::Display) {
    let required = ["CI", "REQUIRE_IO_URING"]
        .into_iter()
        .find(|name| std::env::var_os(name).is_some_and(|value| !value.is_empty() && value != "0"));
    assert!(required.is_none(), "io_uring refused ({reason}), and {required:?} requires it");
    // Straight to the descriptor: libtest captures what `eprintln!` writes in a test that passes.
    let _ = writeln!(io::stderr(), "skipped: io_uring refused ({reason})");
}

/// Skips a test on a system that refuses io_uring; fails on any other error.
pub fn refused_here(error: &io::Error) {
    let is_refusal =
        matches!(error.raw_os_error(), Some(libc::EPERM | libc::ENOSYS | libc::ENOMEM))
            || error.kind() == io::ErrorKind::Unsupported;
    assert!(is_refusal, "{error}");
    skip_without_io_uring(error);
}

/// A directory on the disk the tests were built on (`/tmp` may be memory).
pub fn disk_dir() -> PathBuf {
    let exe = std::env::current_exe().unwrap();
    exe.parent().unwrap().to_owned()
}

/// Runs a test of that module alone in a process of its own, which may change its limits and in which no
/// other test forks. Returns true in that process.
pub fn in_a_process_of_its_own(module: &str, test: &str) -> bool {
    const MARK: &str = "TEST_IN_A_PROCESS_OF_ITS_OWN";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let (_, module) = module.split_once("::").unwrap();
    let test = format!("{module}::{test}");
    let exe = std::env::current_exe().unwrap();
    let ended = Command::new(exe).args(["--exact", &test]).env(MARK, "1").output().unwrap();
    let said = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success() && said.contains("1 passed"), "{ended:?}");
    false
}

#[derive(Debug, Default)]
struct Plan {
    /// Bytes of writes that still succeed, then this errno.
    write_limit: Option<(u64, i32)>,
    /// Number of reads that fail, and their errno.
    read_failures: Option<(u32, i32)>,
    /// Requests that a signal interrupts.
    interrupts: u32,
    /// What the next transfers are cut to.
    shorts: VecDeque<usize>,
    /// Bit flips that the next readings meet, and then no more.
    flips: u32,
    /// Writes of which one bit arrives wrong.
    flipped_writes: u32,
    /// Bytes on the disk of which one bit is not what was written.
    spoiled: BTreeSet<u64>,
    /// Requests that come late, and by how much.
    late: (u32, Duration),
    /// Reads see the file end here.
    end: Option<u64>,
    hold_writes: bool,
    hold_reads: bool,
    held: usize,
    reads: u64,
    writes: u64,
    /// By [`Mishap`]: how often it has befallen a request.
    befallen: [u64; Mishap::ALL.len()],
}

impl Nvme {
    /// As if that had been measured when it was made.
    pub fn measured_as(self, rates: Rates) -> Self {
        Self { rates, ..self }
    }

    /// Sets the bytes that may be written in 24 hours.
    pub fn limit_writes(&self, day_bytes: u64) {
        lock(&self.space).writes = WriteBudget::new(day_bytes);
    }

    /// As if that many hours had gone by.
    pub fn pass_hours(&self, hours: u64) {
        lock(&self.space).writes.pass(hours * 3_600_000_000_000);
    }
}

/// The failing file. Clones share it.
#[derive(Clone, Debug)]
pub struct Faults {
    file: Arc<dyn Storage>,
    /// The same, where it is a real one.
    direct: Option<Arc<DirectFile>>,
    plan: Arc<(Mutex<Plan>, Condvar)>,
}

impl Faults {
    pub fn new(file_bytes: u64) -> Self {
        let direct = Arc::new(DirectFile::create(&disk_dir(), file_bytes).unwrap());
        let file = Arc::clone(&direct) as Arc<dyn Storage>;
        Self { file, direct: Some(direct), plan: Arc::default() }
    }

    /// Over memory in place of a file.
    pub fn in_memory(file_bytes: u64) -> Self {
        Self::over(Arc::new(MemoryFile::new(file_bytes as usize)))
    }

    /// Over what is no real file.
    pub fn over(file: Arc<dyn Storage>) -> Self {
        Self { file, direct: None, plan: Arc::default() }
    }

    fn set(&self, f: impl FnOnce(&mut Plan)) {
        f(&mut lock(&self.plan.0));
        self.plan.1.notify_all();
    }

    pub fn fail_writes_after(&self, bytes: u64, errno: i32) {
        self.set(|p| p.write_limit = Some((bytes, errno)));
    }

    pub fn heal(&self) {
        self.set(|p| (p.write_limit, p.read_failures, p.end) = (None, None, None));
    }

    /// Heals it, and takes back what was still to befall it.
    pub fn forget(&self) {
        self.set(|p| {
            let spoiled = std::mem::take(&mut p.spoiled);
            let Plan { held, reads, writes, befallen, .. } = *p;
            *p = Plan { held, reads, writes, befallen, spoiled, ..Plan::default() };
        });
    }

    pub fn fail_reads(&self, errno: i32) {
        self.fail_next_reads(u32::MAX, errno);
    }

    pub fn fail_next_reads(&self, times: u32, errno: i32) {
        self.set(|p| p.read_failures = Some((times, errno)));
    }

    pub fn interrupt_next(&self, times: u32) {
        self.set(|p| p.interrupts = times);
    }

    pub fn cut_next(&self, lengths: &[usize]) {
        self.set(|p| p.shorts.extend(lengths));
    }

    pub fn flip_next_reads(&self, times: u32) {
        self.set(|p| p.flips = times);
    }

    pub fn flip_next_writes(&self, times: u32) {
        self.set(|p| p.flipped_writes = times);
    }

    pub fn delay_next(&self, times: u32) {
        self.delay_next_by(times, LATE);
    }

    pub fn delay_next_by(&self, times: u32, delay: Duration) {
        self.set(|p| p.late = (times, delay));
    }

    pub fn end_at(&self, offset: u64) {
        self.set(|p| p.end = Some(offset));
    }

    pub fn hold(&self, writes: bool, reads: bool) {
        self.set(|p| (p.hold_writes, p.hold_reads) = (writes, reads));
    }

    /// Blocks until that many transfers are being held up.
    pub fn wait_held(&self, count: usize) {
        let mut plan = lock(&self.plan.0);
        while plan.held < count {
            plan = wait(&self.plan.1, plan);
        }
    }

    /// Whether no transfer is being held up.
    pub fn is_idle(&self) -> bool {
        lock(&self.plan.0).held == 0
    }

    pub fn counts(&self) -> (u64, u64) {
        let plan = lock(&self.plan.0);
        (plan.reads, plan.writes)
    }

    /// How often it has befallen a request so far.
    pub fn befallen(&self, mishap: Mishap) -> u64 {
        lock(&self.plan.0).befallen[mishap as usize]
    }

    /// Changes one bit on the disk, as [`Faults::flip_bit`], and remembers it until it is written
    /// over or mended.
    pub fn spoil(&self, offset: u64) {
        self.flip_bit(offset);
        let spoiled = &mut lock(&self.plan.0).spoiled;
        if !spoiled.remove(&offset) {
            spoiled.insert(offset);
        }
    }

    /// Whether a bit of what was written there is wrong.
    pub fn is_spoiled(&self, range: Range<u64>) -> bool {
        lock(&self.plan.0).spoiled.range(range).next().is_some()
    }

    /// Sets every wrong bit right.
    pub fn mend(&self) {
        let spoiled = std::mem::take(&mut lock(&self.plan.0).spoiled);
        for offset in spoiled {
            self.flip_bit(offset);
        }
    }

    /// Changes one bit on the disk.
    pub fn flip_bit(&self, offset: u64) {
        let unit = offset / UNIT_BYTES as u64 * UNIT_BYTES as u64;
        let mut buffer = Aligned::zeroed(UNIT_BYTES).unwrap();
        assert_eq!(self.file.read(unit, &buffer.memory()).unwrap(), UNIT_BYTES);
        buffer.as_mut_slice()[(offset - unit) as usize] ^= 1;
        assert_eq!(self.file.write(unit, &buffer.memory()).unwrap(), UNIT_BYTES);
    }

    /// A tier over it whose threads use io_uring where the system lets us, and take answers in no
    /// order.
    pub fn tier(&self, file_bytes: u64, checksums: bool, rings: usize, depth: usize) -> Nvme {
        let Some(file) = &self.direct else {
            return self.unordered_tier(file_bytes, checksums, rings, depth);
        };
        let chosen = choice::choose(&disk_dir(), file, IoEngine::Auto, rings, depth);
        let Choice { engine, queues, buffers, .. } = chosen.unwrap();
        let queues = queues.into_iter().map(|inner| (inner.depth(), inner));
        Nvme {
            io_engine: engine,
            queues: Mutex::new(self.faulty(queues)),
            buffers,
            ..Nvme::with_storage(Arc::new(self.clone()), file_bytes, checksums)
        }
    }

    /// As [`Faults::tier`], of threads that do all that they were asked at once.
    pub fn unordered_tier(
        &self,
        file_bytes: u64,
        checksums: bool,
        threads: usize,
        depth: usize,
    ) -> Nvme {
        let blocking = || Box::new(Blocking::new(Arc::clone(&self.file))) as Box<dyn Queue>;
        let queues = std::iter::repeat_with(|| (depth, blocking())).take(threads);
        Nvme {
            queues: Mutex::new(self.faulty(queues)),
            ..Nvme::with_storage(Arc::new(self.clone()), file_bytes, checksums)
        }
    }

    fn faulty(&self, queues: impl Iterator<Item = (usize, Box<dyn Queue>)>) -> Vec<Box<dyn Queue>> {
        let faulty = |(at, (depth, inner))| {
            Box::new(FaultyQueue::new(inner, depth, self.clone(), at as u64)) as Box<dyn Queue>
        };
        queues.enumerate().map(faulty).collect()
    }

    /// Waits while held up.
    fn wait_for_turn(&self, operation: IoOperation) {
        let mut plan = lock(&self.plan.0);
        plan.held += 1;
        if plan.holds(operation) {
            plan.befell(Mishap::HeldUp);
        }
        self.plan.1.notify_all();
        while plan.holds(operation) {
            plan = wait(&self.plan.1, plan);
        }
        plan.held -= 1;
    }

    /// Returns the bytes of a request that are transferred, and those that are reported.
    fn decide(&self, request: &Request) -> io::Result<Fate> {
        let mut plan = lock(&self.plan.0);
        if let (left @ 1.., delay) = &mut plan.late {
            *left -= 1;
            let delay = *delay;
            plan.befell(Mishap::Late);
            drop(plan);
            std::thread::sleep(delay);
            plan = lock(&self.plan.0);
        }
        if plan.interrupts > 0 {
            plan.interrupts -= 1;
            plan.befell(Mishap::Interrupted);
            return Err(io::ErrorKind::Interrupted.into());
        }
        match request.operation {
            IoOperation::Write => plan.decide_write(request),
            IoOperation::Read => plan.decide_read(request),
        }
    }

    /// Before and after what is done of a request.
    fn before(&self, fate: &Fate) {
        if let Some(offset) = fate.flip {
            self.flip_bit(offset);
        }
    }

    fn after(&self, fate: &Fate) {
        self.before(fate);
        if let Some(offset) = fate.spoil {
            self.spoil(offset);
        }
    }

    fn execute(&self, request: Request) -> io::Result<usize> {
        self.wait_for_turn(request.operation);
        let fate = self.decide(&request)?;
        if let Some(request) = fate.of(&request) {
            self.before(&fate);
            let done = request.execute(&*self.file);
            self.after(&fate);
            done?;
        }
        Ok(fate.told)
    }
}

impl Plan {
    fn holds(&self, operation: IoOperation) -> bool {
        match operation {
            IoOperation::Write => self.hold_writes,
            IoOperation::Read => self.hold_reads,
        }
    }

    const fn befell(&mut self, mishap: Mishap) {
        self.befallen[mishap as usize] += 1;
    }

    /// Returns the reported part of `bytes`.
    fn cut(&mut self, bytes: usize, mishap: Mishap) -> usize {
        let told = self.shorts.pop_front().unwrap_or(bytes).min(bytes);
        if told < bytes {
            self.befell(mishap);
        }
        told
    }

    fn decide_write(&mut self, request: &Request) -> io::Result<Fate> {
        self.writes += 1;
        let mut told = self.cut(request.memory.bytes(), Mishap::ShortWrite);
        if let Some((left, errno)) = &mut self.write_limit {
            if *left == 0 {
                let errno = *errno;
                let is_full = errno == libc::ENOSPC;
                self.befell(if is_full { Mishap::FullDisk } else { Mishap::FailedWrite });
                return Err(io::Error::from_raw_os_error(errno));
            }
            told = told.min(*left as usize);
            *left -= told as u64;
        }
        let done = told / UNIT_BYTES * UNIT_BYTES;
        let end = request.offset + done as u64;
        self.spoiled.retain(|offset| !(request.offset..end).contains(offset));
        let is_flipped = done > 0 && self.flipped_writes > 0;
        if is_flipped {
            self.flipped_writes -= 1;
            self.befell(Mishap::FlippedWrite);
        }
        let spoil = is_flipped.then_some(request.offset + done as u64 / 2);
        Ok(Fate { told, done, flip: None, spoil })
    }

    fn decide_read(&mut self, request: &Request) -> io::Result<Fate> {
        self.reads += 1;
        if let Some((left @ 1.., errno)) = &mut self.read_failures {
            *left -= 1;
            let errno = *errno;
            self.befell(Mishap::FailedRead);
            return Err(io::Error::from_raw_os_error(errno));
        }
        let bytes = request.memory.bytes();
        let mut told = self.cut(bytes, Mishap::ShortRead);
        if let Some(end) = self.end {
            told = told.min(end.saturating_sub(request.offset) as usize);
        }
        // What is cut off may have been read all the same: callers must not look at it.
        let done = told.next_multiple_of(UNIT_BYTES).min(bytes);
        let is_flipped = done > 0 && self.flips > 0;
        if is_flipped {
            self.flips -= 1;
            self.befell(Mishap::FlippedRead);
        }
        Ok(Fate { told, done, flip: is_flipped.then_some(request.offset), spoil: None })
    }
}

/// What becomes of one request.
#[derive(Clone, Copy, Debug)]
struct Fate {
    told: usize,
    done: usize,
    /// A bit that is wrong while it is done.
    flip: Option<u64>,
    /// A bit that is wrong from then on.
    spoil: Option<u64>,
}

impl Fate {
    fn of(&self, request: &Request) -> Option<Request> {
        let memory = request.memory.part(0, self.done);
        (self.done > 0).then_some(Request { memory, ..*request })
    }
}

impl Storage for Faults {
    fn read(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        self.execute(Request { operation: IoOperation::Read, offset, memory: *memory })
    }

    fn write(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        self.execute(Request { operation: IoOperation::Write, offset, memory: *memory })
    }

    fn is_buffered(&self) -> bool {
        false
    }

    fn drop_cache(&self, _offset: u64, _bytes: u64) {}
}
