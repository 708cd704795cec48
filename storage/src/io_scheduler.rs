//! The I/O scheduler of one I/O thread: which of its transfers submits a request next. Pure.
//!
//! The queue to the file is kept full by the first transfer with a request; the next transfer is taken
//! only when no other has one. Reads go before writes, and writes leave room in the queue, so that an
//! arriving read waits neither for a slot nor behind a full queue of writes.

use std::io;

use crate::{IoOperation, Request, share};

/// The priority of a transfer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// High: a thread waits for it.
    Read,
    /// Low.
    Write,
}

/// A transfer. It must not panic and must not wait for other work of the pool.
pub trait TransferJob: Send {
    /// Returns the next request and its name in the transfer. `None` if it has none before an answer.
    fn next_request(&mut self) -> Option<(u32, Request)>;
    /// Takes the answer to the request `name`.
    fn answer(&mut self, name: u32, result: io::Result<usize>);
    /// Whether no request is left and none is unanswered.
    fn is_over(&self) -> bool;
    /// Called once, when it is over: reports the result.
    fn finish(self: Box<Self>);
    /// Whether it was cancelled, makes no request, and a thread waits for its end.
    fn is_called_off(&self) -> bool {
        false
    }
}

/// The next step of the thread.
pub(crate) enum SchedulerStep {
    /// Submit this request under this token.
    Submit(u64, Request),
    /// This transfer is over.
    Finished(Box<dyn TransferJob>),
    /// Nothing to do until an answer or more work arrives.
    Idle,
}

struct TransferSlot {
    priority: Priority,
    job: Box<dyn TransferJob>,
}

/// The transfers of one thread, each in a slot. At most the queue depth of reads and the write share of
/// the depth of writes hold slots; further transfers wait in the pool.
pub(crate) struct IoScheduler {
    slots: Vec<Option<TransferSlot>>,
    depth: usize,
    writes_max: usize,
    unanswered: usize,
    unanswered_writes: usize,
}

impl IoScheduler {
    /// Creates a scheduler for a queue of `depth` requests.
    pub(crate) const fn new(depth: usize) -> Self {
        let writes_max = share(IoOperation::Write, depth);
        Self { slots: Vec::new(), depth, writes_max, unanswered: 0, unanswered_writes: 0 }
    }

    /// Returns the number of requests without an answer.
    pub(crate) const fn unanswered(&self) -> usize {
        self.unanswered
    }

    /// Returns the next step. `take` returns the next waiting transfer of a priority.
    pub(crate) fn next_step(
        &mut self,
        mut take: impl FnMut(Priority) -> Option<Box<dyn TransferJob>>,
    ) -> SchedulerStep {
        for priority in [Priority::Read, Priority::Write] {
            let mut from = 0;
            // Ends: each turn continues at a later slot, and a new transfer has a request or is over.
            while self.has_room(priority) {
                let at = match self.find_slot(from, priority) {
                    Some(at) => at,
                    None => match take(priority) {
                        Some(job) => self.insert(TransferSlot { priority, job }),
                        None => break,
                    },
                };
                let Some(slot) = self.slots.get_mut(at).and_then(Option::as_mut) else { break };
                if let Some((name, request)) = slot.job.next_request() {
                    self.unanswered += 1;
                    self.unanswered_writes += usize::from(priority == Priority::Write);
                    return SchedulerStep::Submit(token(at, name), request);
                }
                if let Some(over) = self.remove_if_over(at) {
                    return SchedulerStep::Finished(over);
                }
                from = at + 1;
            }
        }
        SchedulerStep::Idle
    }

    /// Passes an answer to its transfer. Returns the transfer if it is over.
    pub(crate) fn answer(
        &mut self,
        token: u64,
        result: io::Result<usize>,
    ) -> Option<Box<dyn TransferJob>> {
        let (at, name) = ((token >> 32) as usize, token as u32);
        let slot = self.slots.get_mut(at).and_then(Option::as_mut);
        debug_assert!(slot.is_some(), "no request has token {token:#x}");
        let slot = slot?;
        self.unanswered -= 1;
        self.unanswered_writes -= usize::from(slot.priority == Priority::Write);
        slot.job.answer(name, result);
        self.remove_if_over(at)
    }

    const fn has_room(&self, priority: Priority) -> bool {
        match priority {
            Priority::Read => self.unanswered < self.depth,
            Priority::Write => {
                self.unanswered < self.depth && self.unanswered_writes < self.writes_max
            }
        }
    }

    /// Returns the first slot with this priority, from `from` on.
    fn find_slot(&self, from: usize, priority: Priority) -> Option<usize> {
        let is_it =
            |slot: &Option<TransferSlot>| slot.as_ref().is_some_and(|s| s.priority == priority);
        self.slots.iter().skip(from).position(is_it).map(|at| at + from)
    }

    fn insert(&mut self, slot: TransferSlot) -> usize {
        if let Some(at) = self.slots.iter().position(Option::is_none) {
            self.slots[at] = Some(slot);
            return at;
        }
        self.slots.push(Some(slot));
        self.slots.len() - 1
    }

    fn remove_if_over(&mut self, at: usize) -> Option<Box<dyn TransferJob>> {
        let place = self.slots.get_mut(at)?;
        place.take_if(|slot| slot.job.is_over()).map(|slot| slot.job)
    }
}

/// The slot in the high half, the name in the transfer in the low half.
const fn token(at: usize, name: u32) -> u64 {
    (at as u64) << 32 | name as u64
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
