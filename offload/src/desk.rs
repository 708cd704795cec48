//! What one I/O thread has on its desk: the transfers it has taken, and whose turn it is. Pure.
//!
//! The queue to the file is kept full from the first transfer that has something to ask for; the
//! next one is taken only when there is none. Reads go before writes, and writes leave room in
//! the queue, so that a read that arrives waits neither for a slot nor behind all of them.

use std::io;

use crate::nvme::{IoOperation, Request, share};

/// What goes first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Priority {
    /// Somebody waits for it.
    Read,
    /// Nobody waits for it.
    Write,
}

/// A transfer on its way. It must not panic and must not wait for other work of the pool.
pub(crate) trait Moving: Send {
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

/// What is to be done next.
pub(crate) enum Turn {
    /// Ask the file for this, under this token.
    Ask(u64, Request),
    /// This one is over.
    Over(Box<dyn Moving>),
    /// Nothing, before an answer or more work has come.
    Nothing,
}

struct Seat {
    priority: Priority,
    job: Box<dyn Moving>,
}

/// The transfers of one thread. No more reads are on it than the queue is deep, and no more writes
/// than may be unanswered at a time: these wait where they are while reads have all of the queue.
pub(crate) struct Desk {
    seats: Vec<Option<Seat>>,
    depth: usize,
    writes_max: usize,
    unanswered: usize,
    unanswered_writes: usize,
}

impl Desk {
    /// A desk in front of a queue of that depth.
    pub(crate) const fn new(depth: usize) -> Self {
        let writes_max = share(IoOperation::Write, depth);
        Self { seats: Vec::new(), depth, writes_max, unanswered: 0, unanswered_writes: 0 }
    }

    /// Requests that the file has not answered.
    pub(crate) const fn unanswered(&self) -> usize {
        self.unanswered
    }

    /// Whose turn it is; `take` gives more work of a priority, where there is some.
    pub(crate) fn turn(
        &mut self,
        mut take: impl FnMut(Priority) -> Option<Box<dyn Moving>>,
    ) -> Turn {
        for priority in [Priority::Read, Priority::Write] {
            let mut from = 0;
            // Ends: every turn of it goes on to a later seat, and a new one is asked or is over.
            while self.has_room(priority) {
                let at = match self.seated(from, priority) {
                    Some(at) => at,
                    None => match take(priority) {
                        Some(job) => self.seat(Seat { priority, job }),
                        None => break,
                    },
                };
                let Some(seat) = self.seats.get_mut(at).and_then(Option::as_mut) else { break };
                if let Some((name, request)) = seat.job.next_request() {
                    self.unanswered += 1;
                    self.unanswered_writes += usize::from(priority == Priority::Write);
                    return Turn::Ask(token(at, name), request);
                }
                if let Some(over) = self.leave_if_over(at) {
                    return Turn::Over(over);
                }
                from = at + 1;
            }
        }
        Turn::Nothing
    }

    /// An answer; the transfer it was of, where that is over with it.
    pub(crate) fn answer(
        &mut self,
        token: u64,
        result: io::Result<usize>,
    ) -> Option<Box<dyn Moving>> {
        let (at, name) = ((token >> 32) as usize, token as u32);
        let seat = self.seats.get_mut(at).and_then(Option::as_mut);
        debug_assert!(seat.is_some(), "nobody asked under {token:#x}");
        let seat = seat?;
        self.unanswered -= 1;
        self.unanswered_writes -= usize::from(seat.priority == Priority::Write);
        seat.job.answer(name, result);
        self.leave_if_over(at)
    }

    const fn has_room(&self, priority: Priority) -> bool {
        match priority {
            Priority::Read => self.unanswered < self.depth,
            Priority::Write => {
                self.unanswered < self.depth && self.unanswered_writes < self.writes_max
            }
        }
    }

    /// The first seat from `from` on with that priority.
    fn seated(&self, from: usize, priority: Priority) -> Option<usize> {
        let is_it = |seat: &Option<Seat>| seat.as_ref().is_some_and(|s| s.priority == priority);
        self.seats.iter().skip(from).position(is_it).map(|at| at + from)
    }

    fn seat(&mut self, seat: Seat) -> usize {
        if let Some(at) = self.seats.iter().position(Option::is_none) {
            self.seats[at] = Some(seat);
            return at;
        }
        self.seats.push(Some(seat));
        self.seats.len() - 1
    }

    fn leave_if_over(&mut self, at: usize) -> Option<Box<dyn Moving>> {
        let place = self.seats.get_mut(at)?;
        place.take_if(|seat| seat.job.is_over()).map(|seat| seat.job)
    }
}

/// The seat in the high half, the transfer's own name in the low one.
const fn token(at: usize, name: u32) -> u64 {
    (at as u64) << 32 | name as u64
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests;
