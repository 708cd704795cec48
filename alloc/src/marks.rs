//! Marks: events recorded behind the frees of a stream. Pure: an event is any value.
//!
//! Frees are numbered. A mark with number *n* is an event recorded after free *n* and before any work that
//! uses what the stream allocated since. Once the event is complete, what was freed on the stream up to *n*
//! is quiet.

use std::collections::VecDeque;

/// Limit of the marks of a stream.
pub(crate) const MARKS_MAX: usize = 32;

/// An event, and the number of the last free before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Mark<E> {
    pub(crate) frees: u64,
    pub(crate) event: E,
}

/// The marks of a stream that are not known to be complete, oldest first.
#[derive(Debug)]
pub(crate) struct Marks<E>(VecDeque<Mark<E>>);

impl<E> Default for Marks<E> {
    fn default() -> Self {
        Self(VecDeque::new())
    }
}

impl<E: Clone> Marks<E> {
    /// Adds a mark, unless a newer one was added meanwhile. If there are too many, every other one is removed,
    /// but not the oldest: the next one covers its frees.
    pub(crate) fn add(&mut self, mark: Mark<E>) {
        if self.0.back().is_some_and(|last| last.frees >= mark.frees) {
            return;
        }
        if self.0.len() == MARKS_MAX {
            let mut is_kept = false;
            self.0.retain(|_| {
                is_kept = !is_kept;
                is_kept
            });
        }
        self.0.push_back(mark);
    }

    /// Returns the oldest mark.
    pub(crate) fn oldest(&self) -> Option<&Mark<E>> {
        self.0.front()
    }

    /// Returns the oldest mark behind free number `frees`.
    pub(crate) fn covering(&self, frees: u64) -> Option<&Mark<E>> {
        self.0.iter().find(|mark| mark.frees >= frees)
    }

    /// Removes the marks up to free number `frees`: these frees are quiet, or covered by a later mark.
    pub(crate) fn pass(&mut self, frees: u64) {
        while self.0.front().is_some_and(|mark| mark.frees <= frees) {
            self.0.pop_front();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{MARKS_MAX, Mark, Marks};
    use proptest::prelude::*;

    /// A stream does its work in order: `queued` pieces of it were given, `done` of them are complete. A mark is
    /// an event behind a number of pieces.
    #[derive(Default)]
    struct Stream {
        queued: u64,
        done: u64,
        /// For each free, by number from 1, the pieces before it.
        frees: Vec<u64>,
    }

    #[derive(Clone, Copy, Debug)]
    enum Op {
        Launch,
        Free,
        Mark,
        Work(u64),
        /// Waits for what was freed up to this part of the frees, in 255ths.
        Wait(u8),
    }

    fn op() -> impl Strategy<Value = Op> {
        prop_oneof![
            4 => Just(Op::Launch),
            4 => Just(Op::Free),
            3 => Just(Op::Mark),
            2 => (0..6_u64).prop_map(Op::Work),
            1 => any::<u8>().prop_map(Op::Wait),
        ]
    }

    /// Takes the complete marks out. Returns the number up to which frees are quiet.
    fn query(marks: &mut Marks<u64>, done: u64) -> u64 {
        let mut quiet = 0;
        while let Some(&Mark { frees, event }) = marks.oldest().filter(|mark| mark.event <= done) {
            assert!(event <= done && frees >= quiet, "{marks:?}");
            quiet = frees;
            marks.pass(frees);
        }
        quiet
    }

    proptest! {
        #[test]
        fn what_marks_say_is_quiet_is_and_no_mark_is_lost(
            ops in proptest::collection::vec(op(), 1..400),
        ) {
            let (mut stream, mut marks) = (Stream::default(), Marks::default());
            let (mut quiet, mut marked) = (0, Vec::new());
            for op in ops {
                let frees = stream.frees.len() as u64;
                match op {
                    Op::Launch => stream.queued += 1,
                    Op::Free => stream.frees.push(stream.queued),
                    Op::Mark => {
                        marks.add(Mark { frees, event: stream.queued });
                        marked.push((frees, stream.queued));
                    }
                    Op::Work(pieces) => stream.done = stream.queued.min(stream.done + pieces),
                    Op::Wait(part) => {
                        let wanted = frees * u64::from(part) / 255;
                        if let Some(&Mark { frees, event }) = marks.covering(wanted) {
                            prop_assert!(frees >= wanted);
                            stream.done = stream.done.max(event);
                        }
                    }
                }
                quiet = quiet.max(query(&mut marks, stream.done));
                prop_assert!(marks.0.len() <= MARKS_MAX);
                // Safe: the model knows what was queued before each free.
                let is_quiet = |&before: &u64| before <= stream.done;
                prop_assert!(stream.frees[..quiet as usize].iter().all(is_quiet));
                // Of all marks ever added, the newest covers what it did.
                if let Some(&(frees, event)) = marked.last() {
                    prop_assert!(event > stream.done || quiet >= frees, "{frees} {event} {quiet}");
                    prop_assert!(quiet >= frees || marks.covering(frees).is_some());
                }
            }
            stream.done = stream.queued;
            quiet = quiet.max(query(&mut marks, stream.done));
            prop_assert_eq!(quiet, marked.last().map_or(0, |&(frees, _)| frees));
        }
    }

    /// Of two threads that mark, the one that recorded first may come last.
    #[test]
    fn an_older_mark_that_comes_late_is_dropped() {
        let mut marks = Marks::default();
        for frees in [5, 3, 5, 7] {
            marks.add(Mark { frees, event: frees });
        }
        assert_eq!(marks.0.iter().map(|mark| mark.frees).collect::<Vec<_>>(), [5, 7]);
    }

    /// A stream that gets nothing done keeps its oldest mark, its newest, and some between them.
    #[test]
    fn the_oldest_mark_stays() {
        let mut marks = Marks::default();
        for frees in 1..=1000 {
            marks.add(Mark { frees, event: frees });
        }
        let kept: Vec<u64> = marks.0.iter().map(|mark| mark.frees).collect();
        assert!(kept.len() <= MARKS_MAX && kept.len() > MARKS_MAX / 2, "{kept:?}");
        assert_eq!((kept[0], kept[kept.len() - 1]), (1, 1000));
        assert!(kept.is_sorted_by(|earlier, later| earlier < later), "{kept:?}");
    }
}
