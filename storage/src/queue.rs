//! A thread's queue to the file: requests go in, answers come out, in any order.

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
    /// The operation.
    pub operation: IoOperation,
    /// Offset in the file.
    pub offset: u64,
    /// The memory to fill or to write.
    pub memory: IoMemory,
}

impl Request {
    /// Executes it on the calling thread. May transfer less than requested.
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
    /// The token of the request.
    pub token: u64,
    /// Bytes transferred, or the error of the system.
    pub result: io::Result<usize>,
}

/// Requests of one thread. Every request is answered once; its memory stays lent until then, and
/// dropping the queue waits for the answers.
///
/// Another I/O path would implement this trait: GPU Direct Storage would be a queue for device memory.
pub trait Queue: Send + Debug {
    /// Returns the limit of unanswered requests, at least 1.
    fn depth(&self) -> usize;
    /// Adds a request. At most [`Queue::depth`] are unanswered, this one included.
    fn push(&mut self, token: u64, request: Request);
    /// Waits for an answer. `None` if no request is unanswered.
    fn wait(&mut self) -> Option<Answer>;
}

/// Returns the limit of the unanswered requests of one kind in a queue of `depth`. Writes leave room, so
/// that an arriving read waits neither for a slot nor behind a full queue of writes.
pub const fn share(operation: IoOperation, depth: usize) -> usize {
    match operation {
        IoOperation::Read => depth,
        IoOperation::Write => depth - depth / 4,
    }
}

/// Requests executed one after another by the thread that waits for them. Works on every system.
#[derive(Debug)]
pub struct Blocking {
    storage: Arc<dyn Storage>,
    asked: VecDeque<(u64, Request)>,
}

impl Blocking {
    /// Creates a queue to `storage`.
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

/// A queue without a file, for threads that only run blocking tasks.
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
