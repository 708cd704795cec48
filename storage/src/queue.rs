//! A thread's own way to the file: requests go in, answers come out, in any order.

use std::collections::VecDeque;
use std::fmt::Debug;
use std::io;
use std::sync::Arc;

use super::error::IoOperation;
use super::file::IoMemory;
use super::storage::Storage;

/// One positioned read or write.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// Which.
    pub operation: IoOperation,
    /// Where in the file.
    pub offset: u64,
    /// Filled or written, as far as the system goes.
    pub memory: IoMemory,
}

impl Request {
    /// Does it on the calling thread.
    ///
    /// # Errors
    /// The system's.
    pub fn execute(&self, storage: &dyn Storage) -> io::Result<usize> {
        let result = match self.operation {
            IoOperation::Read => storage.read(self.offset, &self.memory),
            IoOperation::Write => storage.write(self.offset, &self.memory),
        };
        storage.drop_cache(self.offset, self.memory.bytes() as u64);
        result
    }
}

/// An answer.
#[derive(Debug)]
pub struct Answer {
    /// The name its request was given.
    pub token: u64,
    /// How many bytes went over, or the system's error.
    pub result: io::Result<usize>,
}

/// Requests of one thread. Every request is answered once; its memory stays lent until then, and
/// dropping the queue waits for what is not answered.
///
/// This is where another way to the file goes in: GPU Direct Storage would be a queue whose memory
/// is the device's.
pub trait Queue: Send + Debug {
    /// Requests that may be unanswered at a time, at least 1.
    fn depth(&self) -> usize;
    /// Takes a request in. No more than [`Queue::depth`] may be unanswered with it.
    fn push(&mut self, token: u64, request: Request);
    /// Waits for an answer; `None` where nothing is unanswered.
    fn wait(&mut self) -> Option<Answer>;
}

/// Requests of one kind that may be unanswered at a time, of `depth` in all: writes leave room, so
/// that a read that comes waits neither for a place nor behind a full queue of them.
pub const fn share(operation: IoOperation, depth: usize) -> usize {
    match operation {
        IoOperation::Read => depth,
        IoOperation::Write => depth - depth / 4,
    }
}

/// Requests carried out one after the other on the thread that waits for them: what works on every
/// system.
#[derive(Debug)]
pub struct Blocking {
    storage: Arc<dyn Storage>,
    asked: VecDeque<(u64, Request)>,
}

impl Blocking {
    /// A queue to `storage`.
    #[must_use]
    pub fn new(storage: Arc<dyn Storage>) -> Self {
        Self { storage, asked: VecDeque::new() }
    }
}

impl Queue for Blocking {
    fn depth(&self) -> usize {
        1
    }

    fn push(&mut self, token: u64, request: Request) {
        self.asked.push_back((token, request));
    }

    fn wait(&mut self) -> Option<Answer> {
        let (token, request) = self.asked.pop_front()?;
        Some(Answer { token, result: request.execute(&*self.storage) })
    }
}

/// A queue to no file, for threads that only run blocking tasks.
#[derive(Debug, Default)]
pub struct NullQueue(VecDeque<u64>);

impl Queue for NullQueue {
    fn depth(&self) -> usize {
        1
    }

    fn push(&mut self, token: u64, _: Request) {
        self.0.push_back(token);
    }

    fn wait(&mut self) -> Option<Answer> {
        let token = self.0.pop_front()?;
        Some(Answer { token, result: Err(io::Error::from_raw_os_error(libc::ENXIO)) })
    }
}
