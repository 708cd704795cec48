//! A transfer between an extent and memory: several chunks in flight, each whole and verified or an
//! error. Pure: it returns requests and takes answers.

use std::io;

use super::chunk::{Attempt, CHUNK_BYTES, ChunkStep};
use super::error::{IoOperation, NvmeError};
use super::file::IoMemory;
use super::queue::{Queue, Request, share};

/// A chunk that was requested and is not complete.
#[derive(Debug)]
struct ChunkInFlight {
    chunk: u32,
    attempt: Attempt,
    /// Its checksum differed on the first read.
    is_second: bool,
    /// The system has not answered its request.
    is_asked: bool,
}

/// A transfer. Its caller bounds the requests in flight.
#[derive(Debug)]
pub struct Transfer {
    operation: IoOperation,
    /// First byte of the extent, for errors.
    extent: u64,
    /// First byte of the transfer in the file.
    offset: u64,
    memory: IoMemory,
    /// Checksums of the chunks: computed (write) or expected (read); `None` if they are off.
    sums: Option<Vec<u32>>,
    next: u32,
    in_flight: Vec<ChunkInFlight>,
    moved_bytes: u64,
    reread: u64,
    failed: Option<NvmeError>,
}

impl Transfer {
    pub(super) fn writer(offset: u64, memory: IoMemory, takes_sums: bool) -> Self {
        Self::new(IoOperation::Write, offset, memory, takes_sums.then(Vec::new))
    }

    /// Returns a transfer that fills `memory` from `offset` and verifies the checksums of its chunks.
    #[must_use]
    pub const fn reader(offset: u64, memory: IoMemory, expected: Vec<u32>) -> Self {
        Self::new(IoOperation::Read, offset, memory, Some(expected))
    }

    /// Names the extent that errors refer to, if the transfer starts inside it.
    pub(super) fn of_extent(self, extent: u64) -> Self {
        Self { extent, ..self }
    }

    const fn new(
        operation: IoOperation,
        offset: u64,
        memory: IoMemory,
        sums: Option<Vec<u32>>,
    ) -> Self {
        Self {
            operation,
            extent: offset,
            offset,
            memory,
            sums,
            next: 0,
            in_flight: Vec::new(),
            moved_bytes: 0,
            reread: 0,
            failed: None,
        }
    }

    /// Returns the length in bytes.
    #[must_use]
    pub const fn bytes(&self) -> u64 {
        self.memory.bytes() as u64
    }

    /// Returns the bytes transferred so far, including repeated ones.
    #[must_use]
    pub const fn moved_bytes(&self) -> u64 {
        self.moved_bytes
    }

    /// Returns the number of chunks read twice.
    #[must_use]
    pub const fn reread(&self) -> u64 {
        self.reread
    }

    /// Stops requesting. The transfer is over once the requests in flight are answered.
    pub fn cancel(&mut self) {
        self.fail(NvmeError::Cancelled);
    }

    /// Returns the next request and its chunk; `None` if there is none before the next answer.
    pub fn next_request(&mut self) -> Option<(u32, Request)> {
        if self.failed.is_some() {
            return None;
        }
        if let Some(again) = self.in_flight.iter_mut().find(|f| !f.is_asked) {
            again.is_asked = true;
            return Some((again.chunk, again.attempt.request()));
        }
        let done = self.next as usize * CHUNK_BYTES;
        if done >= self.memory.bytes() {
            return None;
        }
        let part = self.memory.part(done, CHUNK_BYTES);
        if let (IoOperation::Write, Some(sums)) = (self.operation, &mut self.sums) {
            sums.push(part.crc32c());
        }
        if self.operation == IoOperation::Read {
            part.fault_in();
        }
        let attempt = Attempt::new(self.operation, self.offset + done as u64, part);
        let chunk = self.next;
        self.next += 1;
        self.in_flight.push(ChunkInFlight { chunk, attempt, is_second: false, is_asked: true });
        Some((chunk, attempt.request()))
    }

    /// Takes the system's answer to the request for `chunk`.
    pub fn answer(&mut self, chunk: u32, result: io::Result<usize>) {
        let found = self.in_flight.iter_mut().position(|f| f.chunk == chunk && f.is_asked);
        debug_assert!(found.is_some(), "chunk {chunk} was not asked for");
        let Some(at) = found else { return };
        let in_flight = &mut self.in_flight[at];
        in_flight.is_asked = false;
        self.moved_bytes += *result.as_ref().unwrap_or(&0) as u64;
        let over = match in_flight.attempt.answer(result) {
            Ok(ChunkStep::Again) => return,
            Ok(ChunkStep::Whole) if self.operation == IoOperation::Read => self.verify(at),
            Ok(ChunkStep::Whole) => Some(Ok(())),
            Err(e) => Some(Err(e)),
        };
        if let Some(result) = over {
            self.in_flight.swap_remove(at);
            if let Err(e) = result {
                self.fail(e);
            }
        }
    }

    /// Verifies a chunk; `None` if it must be read again. A second read tells a bad cable or DMA from a
    /// bad disk.
    fn verify(&mut self, at: usize) -> Option<Result<(), NvmeError>> {
        let in_flight = self.in_flight.get_mut(at)?;
        let attempt = in_flight.attempt;
        let expected = self.sums.as_ref().and_then(|s| s.get(in_flight.chunk as usize).copied());
        let Some(expected) = expected else { return Some(Ok(())) };
        let seen = attempt.memory().crc32c();
        if seen == expected {
            self.reread += u64::from(in_flight.is_second);
            return Some(Ok(()));
        }
        let offset = attempt.offset();
        if in_flight.is_second {
            let extent = self.extent;
            return Some(Err(NvmeError::Corrupted { extent, offset, expected, seen }));
        }
        tracing::warn!(target: "storage", extent = self.extent, offset, expected, seen, "checksum differs; reading again");
        in_flight.is_second = true;
        in_flight.attempt = Attempt::new(IoOperation::Read, offset, *attempt.memory());
        None
    }

    /// Keeps the first error, except that an error of the disk replaces a cancel.
    fn fail(&mut self, reason: NvmeError) {
        if matches!(self.failed, None | Some(NvmeError::Cancelled)) {
            self.failed = Some(reason);
        }
    }

    /// Returns true if no request is left and none is unanswered.
    #[must_use]
    pub fn is_over(&self) -> bool {
        match self.failed {
            Some(_) => self.in_flight.iter().all(|f| !f.is_asked),
            None => {
                self.in_flight.is_empty() && self.next as usize * CHUNK_BYTES >= self.memory.bytes()
            }
        }
    }

    /// Returns the result of a transfer that is over: for a write, the checksums if they are on.
    ///
    /// # Errors
    /// The first of `Failed`, `Short`, `Truncated`, `Corrupted`, `Cancelled`.
    pub fn outcome(&mut self) -> Result<Option<Vec<u32>>, NvmeError> {
        debug_assert!(self.is_over(), "{self:?}");
        match self.failed.take() {
            Some(reason) => Err(reason),
            None => Ok(self.sums.take().filter(|_| self.operation == IoOperation::Write)),
        }
    }

    /// Runs the whole transfer on the calling thread.
    ///
    /// # Errors
    /// As [`Transfer::outcome`].
    pub fn run(&mut self, queue: &mut dyn Queue) -> Result<Option<Vec<u32>>, NvmeError> {
        let mut unanswered = 0;
        // Ends: every turn requests or is answered, and requests of one chunk are bounded (`Attempt`, and
        // twice for its checksum).
        loop {
            if unanswered < share(self.operation, queue.depth())
                && let Some((chunk, request)) = self.next_request()
            {
                queue.push(u64::from(chunk), request);
                unanswered += 1;
            } else if let Some(answer) = queue.wait() {
                unanswered -= 1;
                self.answer(answer.token as u32, answer.result);
            } else {
                return self.outcome();
            }
        }
    }
}
