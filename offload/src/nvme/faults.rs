//! A real file that fails, shortens, flips or holds up on command, and whose queues answer late
//! and out of order. Tests only.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use super::choice::{self, Choice};
use super::file::{Aligned, IoMemory, UNIT_BYTES};
use super::storage::{DirectFile, Storage};
use super::writes::Writes;
use super::{Answer, IoEngine, IoOperation, Nvme, Queue, Request};
use crate::engine::tests::random::Random;
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

impl Nvme {
    /// From now on so much may be written in 24 hours.
    pub(crate) fn limit_writes(&self, day_bytes: u64) {
        lock(&self.space).writes = Writes::new(day_bytes);
    }

    /// As if that many hours had gone by.
    pub(crate) fn pass_hours(&self, hours: u64) {
        lock(&self.space).writes.pass(hours * 3_600_000_000_000);
    }
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

    /// Heals it, and takes back what was still to befall it.
    pub(crate) fn forget(&self) {
        self.set(|p| *p = Plan { reads: p.reads, writes: p.writes, ..Plan::default() });
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

    /// A tier over it whose threads use io_uring where the system lets us, and take answers in no
    /// order.
    pub(crate) fn tier(
        &self,
        file_bytes: u64,
        checksums: bool,
        rings: usize,
        depth: usize,
    ) -> Nvme {
        let chosen = choice::choose(&disk_dir(), &self.file, IoEngine::Auto, rings, depth);
        let Choice { engine, queues, buffers, .. } = chosen.unwrap();
        let queues = queues.into_iter().enumerate().map(|(at, inner)| {
            Box::new(FaultyQueue::new(inner, self.clone(), at as u64)) as Box<dyn Queue>
        });
        Nvme {
            io_engine: engine,
            queues: Mutex::new(queues.collect()),
            buffers,
            ..Nvme::with_storage(Arc::new(self.clone()), file_bytes, checksums)
        }
    }

    /// Waits while held up.
    fn wait_for_turn(&self, operation: IoOperation) {
        let mut plan = lock(&self.plan.0);
        plan.held += 1;
        self.plan.1.notify_all();
        while plan.holds(operation) {
            plan = wait(&self.plan.1, plan);
        }
        plan.held -= 1;
    }

    /// What becomes of a request: how much of it is done, and how much of that is told.
    fn decide(&self, request: &Request) -> io::Result<Fate> {
        let mut plan = lock(&self.plan.0);
        let bytes = request.memory.bytes();
        let mut told = plan.shorts.pop_front().unwrap_or(bytes).min(bytes);
        if request.operation == IoOperation::Write {
            plan.writes += 1;
            if let Some((left, errno)) = &mut plan.write_limit {
                if *left == 0 {
                    return Err(io::Error::from_raw_os_error(*errno));
                }
                told = told.min(*left as usize);
                *left -= told as u64;
            }
            let done = told / UNIT_BYTES * UNIT_BYTES;
            return Ok(Fate { told, done, flip: None });
        }
        plan.reads += 1;
        if let Some(errno) = plan.read_errno {
            return Err(io::Error::from_raw_os_error(errno));
        }
        let flip = (plan.flips > 0).then_some(request.offset);
        plan.flips = plan.flips.saturating_sub(1);
        if let Some(end) = plan.end {
            told = told.min(end.saturating_sub(request.offset) as usize);
        }
        // What is cut off may have been read all the same: callers must not look at it.
        let done = told.next_multiple_of(UNIT_BYTES).min(bytes);
        Ok(Fate { told, done, flip })
    }

    fn carry_out(&self, request: Request) -> io::Result<usize> {
        self.wait_for_turn(request.operation);
        let fate = self.decide(&request)?;
        if let Some(offset) = fate.flip {
            self.flip_bit(offset);
        }
        if let Some(request) = fate.of(&request) {
            request.carry_out(&*self.file)?;
        }
        if let Some(offset) = fate.flip {
            self.flip_bit(offset);
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
}

/// What becomes of one request.
#[derive(Clone, Copy, Debug)]
struct Fate {
    told: usize,
    done: usize,
    flip: Option<u64>,
}

impl Fate {
    fn of(&self, request: &Request) -> Option<Request> {
        let memory = request.memory.part(0, self.done);
        (self.done > 0).then_some(Request { memory, ..*request })
    }
}

impl Storage for Faults {
    fn read(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        self.carry_out(Request { operation: IoOperation::Read, offset, memory: *memory })
    }

    fn write(&self, offset: u64, memory: &IoMemory) -> io::Result<usize> {
        self.carry_out(Request { operation: IoOperation::Write, offset, memory: *memory })
    }

    fn is_buffered(&self) -> bool {
        false
    }

    fn drop_cache(&self, _offset: u64, _bytes: u64) {}
}

/// A queue with the faults of its file. An answer is given out once all that were asked for have
/// come, and then any of them.
#[derive(Debug)]
struct FaultyQueue {
    inner: Box<dyn Queue>,
    faults: Faults,
    random: Random,
    asked: VecDeque<(u64, Request)>,
    started: HashMap<u64, Fate>,
    ready: Vec<Answer>,
}

impl FaultyQueue {
    fn new(inner: Box<dyn Queue>, faults: Faults, seed: u64) -> Self {
        let random = Random::new(seed * 7919 + 3);
        let (asked, started, ready) = (VecDeque::new(), HashMap::new(), Vec::new());
        Self { inner, faults, random, asked, started, ready }
    }

    fn start(&mut self, token: u64, request: &Request) {
        let fate = match self.faults.decide(request) {
            Ok(fate) => fate,
            Err(e) => return self.ready.push(Answer { token, result: Err(e) }),
        };
        let Some(request) = fate.of(request) else {
            return self.ready.push(Answer { token, result: Ok(fate.told) });
        };
        if let Some(offset) = fate.flip {
            self.faults.flip_bit(offset);
        }
        assert!(self.started.insert(token, fate).is_none(), "{token:#x} was asked twice");
        self.inner.push(token, request);
    }

    fn gather(&mut self) {
        while let Some(answer) = self.inner.wait() {
            let fate = self.started.remove(&answer.token).unwrap();
            if let Some(offset) = fate.flip {
                self.faults.flip_bit(offset);
            }
            let told = |n: usize| if n == fate.done { fate.told } else { n.min(fate.told) };
            let Answer { token, result } = answer;
            self.ready.push(Answer { token, result: result.map(told) });
        }
    }
}

impl Queue for FaultyQueue {
    fn depth(&self) -> usize {
        self.inner.depth()
    }

    fn push(&mut self, token: u64, request: Request) {
        self.asked.push_back((token, request));
        let unanswered = self.asked.len() + self.started.len() + self.ready.len();
        assert!(unanswered <= self.depth(), "{unanswered} unanswered");
    }

    fn wait(&mut self) -> Option<Answer> {
        loop {
            for (token, request) in std::mem::take(&mut self.asked) {
                let is_held = lock(&self.faults.plan.0).holds(request.operation);
                if is_held {
                    self.asked.push_back((token, request));
                } else {
                    self.start(token, &request);
                }
            }
            self.gather();
            if !self.ready.is_empty() {
                let at = self.random.below(self.ready.len() as u64) as usize;
                return Some(self.ready.swap_remove(at));
            }
            let (_, held) = self.asked.front()?;
            self.faults.wait_for_turn(held.operation);
        }
    }
}
