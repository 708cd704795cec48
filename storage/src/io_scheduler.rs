//! The I/O scheduler of one I/O thread: which of its transfers submits a request next. Pure.
//!
//! The queue to the file is kept full from the first transfer that has something to ask for; the
//! next one is taken only when there is none. Reads go before writes, and writes leave room in
//! the queue, so that a read that arrives waits neither for a slot nor behind all of them.

use std::io;

use crate::{IoOperation, Request, share};

/// What goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Priority {
    /// Somebody waits for it.
    Read,
    /// Nobody waits for it.
    Write,
}

/// A transfer. It must not panic and must not wait for other work of the pool.
pub trait TransferJob: Send {
    /// What to ask the file for now, under a name of its own. `None`: nothing before an answer.
    fn next_request(&mut self) -> Option<(u32, Request)>;
    /// The answer to what was asked under that name.
    fn answer(&mut self, name: u32, result: io::Result<usize>);
    /// Whether there is nothing more to ask for and nothing unanswered.
    fn is_over(&self) -> bool;
    /// Once, when it is over: tells whoever has to know.
    fn finish(self: Box<Self>);
    /// Whether it would be over without asking for anything, and somebody waits for that.
    fn is_called_off(&self) -> bool {
        false
    }
}

/// What the thread does next.
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

    /// Requests that the file has not answered.
    pub(crate) const fn unanswered(&self) -> usize {
        self.unanswered
    }

    /// Whose turn it is; `take` gives more work of a priority, where there is some.
    pub(crate) fn next_step(
        &mut self,
        mut take: impl FnMut(Priority) -> Option<Box<dyn TransferJob>>,
    ) -> SchedulerStep {
        for priority in [Priority::Read, Priority::Write] {
            let mut from = 0;
            // Ends: every turn of it goes on to a later slot, and a new one is asked or is over.
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

    /// An answer; the transfer it was of, where that is over with it.
    pub(crate) fn answer(
        &mut self,
        token: u64,
        result: io::Result<usize>,
    ) -> Option<Box<dyn TransferJob>> {
        let (at, name) = ((token >> 32) as usize, token as u32);
        let slot = self.slots.get_mut(at).and_then(Option::as_mut);
        debug_assert!(slot.is_some(), "nobody asked under {token:#x}");
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

    /// The first slot from `from` on with that priority.
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

/// The slot in the high half, the transfer's own name in the low one.
const fn token(at: usize, name: u32) -> u64 {
    (at as u64) << 32 | name as u64
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
