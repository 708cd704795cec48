//! The minimum time over all schedules of one step.
//!
//! The rules are those of [`crate::plan`], and nothing else binds: which groups leave, when, in which
//! order, to which tier, when they are read ahead and when they come back is anybody's choice at
//! every moment, with the whole step known beforehand. Where the rules leave something open:
//! - A group sleeps at most once, and is written to the file at most once.
//! - While an operation runs or is waited for, no copy in begins beyond its room; memory that is
//!   taken already when its turn comes only has it wait.
//! - A group may leave while the first operation that needs it is waited for.
//! - The file holds a group from the begin of its write to the end of its read.
//! - Of things that happen at one instant, those that end and begin there do so in any order in
//!   which they may: a copy may begin as the last thing under one operation's room.
//!
//! # Why looking at ends alone misses nothing
//! [`optimum`] lets copies and operations begin at time 0 and where something else has just ended.
//! Take, of the best schedules, one with the least sum of all begins and ends. Memory is taken by
//! begins and given back by ends; so whatever begins between two ends could begin, in the same
//! order, at the first of them. Ending earlier hurts nothing either, but for one case: an operation
//! that ends makes the room that of the next one, which may be smaller. There an operation that
//! is over may be *held*, which stands for one that began later. Four things would each leave a
//! smaller sum, so the search does not look at them:
//! - a hold that ends otherwise than right after a copy in has begun;
//! - an operation left to wait though it could begin, unless a copy in begins before it does: the
//!   memory that it makes, or a group that it needs and that leaves once more, was in the way;
//! - a copy left to wait though it could begin, its link idle until it does, unless something
//!   else took of the same memory meanwhile: host memory for a copy out or a read, device memory
//!   for a copy in. For a write nothing can: the file is filled by writes alone;
//! - copies of nothing: groups of no bytes stay.
//!
//! Waiting itself stays a choice at every end.

mod least_end;
mod moment;
mod search;
#[cfg(test)]
pub(crate) mod tests;

use crate::plan::{StepWork, lower_bound};

/// Most groups that are searched.
const GROUPS_SEARCHED_MAX: usize = 12;
/// Most operations that are searched, and one.
const OPERATIONS_SEARCHED_MAX: usize = 1 << 12;

/// What is known of the least total time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Optimum {
    /// The minimum, in nanoseconds.
    Exact(u64),
    /// A lower bound, in nanoseconds. It is unknown whether a schedule reaches it.
    AtLeast(u64),
    /// No schedule ends, or the work is not valid.
    Never,
}

/// The least time from the begin of the first operation to the end of the last.
///
/// `known_ns` is the time of a schedule that somebody has, if any, and is taken at its word:
/// nothing as long is looked at. (Given one more, the search finds out whether it can be so short.)
/// Beyond `states_max` different moments (about 200 bytes each) the search gives up, with the best
/// bound it has proven; of more than 12 groups or 4095 operations it gives [`lower_bound`].
#[must_use]
pub fn optimum(work: &StepWork, known_ns: Option<u64>, states_max: usize) -> Optimum {
    let least_ns = lower_bound(work);
    if least_ns == u64::MAX {
        return Optimum::Never;
    }
    if known_ns == Some(least_ns) {
        return Optimum::Exact(least_ns);
    }
    search::search(work, least_ns, known_ns, states_max)
}
