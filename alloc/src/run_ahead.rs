//! How far requests may be ahead of their stream. Pure: an event is any value.
//!
//! The bytes requested near the maximum use are counted, an event is recorded each time a part of the limit is full, and
//! a request waits for the event [`PARTS`] parts before: the stream keeps work of nearly that many parts.

use std::collections::VecDeque;

/// Parts of the limit.
const PARTS: usize = 4;

/// The events of one stream, oldest first.
#[derive(Debug)]
pub(crate) struct RunAhead<E> {
    /// Bytes since the last event.
    bytes: u64,
    events: VecDeque<E>,
}

impl<E> Default for RunAhead<E> {
    fn default() -> Self {
        Self { bytes: 0, events: VecDeque::new() }
    }
}

impl<E> RunAhead<E> {
    /// Counts bytes about to be used. Returns whether an event is due, for a limit of `limit_bytes`.
    pub(crate) fn count(&mut self, bytes: u64, limit_bytes: u64) -> bool {
        self.bytes = self.bytes.saturating_add(bytes);
        let is_due = self.bytes >= limit_bytes / PARTS as u64;
        if is_due {
            self.bytes = 0;
        }
        is_due
    }

    /// Adds the event that is due. Returns the one to wait for, if any.
    pub(crate) fn add(&mut self, event: E) -> Option<E> {
        self.events.push_back(event);
        (self.events.len() > PARTS).then(|| self.events.pop_front()).flatten()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        /// A stream that does nothing unless it is waited for is never further behind than the limit and one
        /// request for each part, and a request never waits for the last parts.
        #[test]
        fn the_lead_is_at_most_the_limit_and_one_request(
            sizes in proptest::collection::vec(1..100_u64, 1..400),
            limit_bytes in 4..500_u64,
        ) {
            let (mut run_ahead, mut mapped, mut done) = (RunAhead::default(), 0, 0);
            for bytes in sizes {
                if run_ahead.count(bytes, limit_bytes)
                    && let Some(event) = run_ahead.add(mapped)
                {
                    prop_assert!(event > done || event == 0);
                    prop_assert!(mapped - event >= (PARTS as u64 - 1) * (limit_bytes / PARTS as u64));
                    done = event;
                }
                mapped += bytes;
                let parts_bytes = (PARTS as u64 + 1) * (limit_bytes / PARTS as u64 + 100);
                prop_assert!(mapped - done <= parts_bytes, "{} of {}", mapped - done, parts_bytes);
            }
        }
    }
}
