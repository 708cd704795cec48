//! Freeze, thaw, seal and the write fault: what may race with what, with the system calls left
//! to the caller so that loom can put a model of memory in their place.

use super::sync::yield_now;
use super::table::{Seen, State, Table};
use crate::{AddressRange, Sealed, SpanId, SpanLabel};

/// How a thread touched memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    /// The machine does not say. On a frozen span, where reads are allowed, taken for a write.
    #[cfg_attr(target_arch = "x86_64", allow(dead_code))] // there the machine says
    Unknown,
}

/// What to do about a fault.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Go back and try the access again: it is, or soon will be, allowed.
    Retry,
    /// A touch of a sleeping span.
    Stray(Seen),
    /// A write to a frozen span that the system would not let through.
    Stuck(Seen),
    /// Not in any span, and not accessible either.
    Elsewhere,
}

/// Why a transition did not happen.
#[derive(Debug)]
pub(crate) enum Failed<E> {
    /// The span was in this state.
    State(State),
    /// The system refused.
    System(E),
}

impl<const N: usize> Table<N> {
    /// Write-protects `range` as a new span; `None` when the table is full.
    ///
    /// The span is in the table first: a write that faults finds it.
    pub(crate) fn freeze<E>(
        &self,
        range: AddressRange,
        label: &SpanLabel,
        protect: impl FnOnce(AddressRange) -> Result<(), E>,
        open: impl FnOnce(AddressRange) -> Result<(), E>,
    ) -> Option<Result<SpanId, E>> {
        let span = self.insert(range, label)?;
        let Err(error) = protect(range) else { return Some(Ok(span)) };
        // A part may be protected. Take it back; where even that fails the slot stays behind as
        // written, so that a writer still gets through.
        if self.thaw(span, open).is_err() {
            debug_assert!(false, "the system neither protects nor opens {range:?}");
        }
        Some(Err(error))
    }

    /// Opens a frozen or written span and forgets it. Refused by the system, the span is written:
    /// a part may be open already, so that no copy of it can be trusted.
    pub(crate) fn thaw<E>(
        &self,
        span: SpanId,
        open: impl FnOnce(AddressRange) -> Result<(), E>,
    ) -> Result<AddressRange, Failed<E>> {
        let next = |state| match state {
            State::Frozen | State::Written => Some(State::Thawing),
            _ => None,
        };
        let (range, _) = self.begin(span, next).map_err(Failed::State)?;
        self.open_and_remove(span, range, open)
    }

    /// Closes a frozen span, or opens a written one and forgets it.
    pub(crate) fn seal<E>(
        &self,
        span: SpanId,
        close: impl FnOnce(AddressRange) -> Result<(), E>,
        open: impl FnOnce(AddressRange) -> Result<(), E>,
    ) -> Result<(AddressRange, Sealed), Failed<E>> {
        let next = |state| match state {
            State::Frozen => Some(State::Sealing),
            State::Written => Some(State::Thawing),
            _ => None,
        };
        let (range, from) = self.begin(span, next).map_err(Failed::State)?;
        if from == State::Written {
            return self.open_and_remove(span, range, open).map(|range| (range, Sealed::Written));
        }
        let closed = close(range);
        self.finish(span, if closed.is_ok() { State::Asleep } else { State::Frozen });
        closed.map(|()| (range, Sealed::Asleep)).map_err(Failed::System)
    }

    /// Ends a span that the caller moved to *thawing*.
    fn open_and_remove<E>(
        &self,
        span: SpanId,
        range: AddressRange,
        open: impl FnOnce(AddressRange) -> Result<(), E>,
    ) -> Result<AddressRange, Failed<E>> {
        match open(range) {
            Ok(()) => {
                self.remove(span);
                Ok(range)
            }
            Err(error) => {
                self.finish(span, State::Written);
                Err(Failed::System(error))
            }
        }
    }

    /// Judges a fault at `address`. Async-signal-safe where `open` is, and `accessible`, which says
    /// whether the access would go through now.
    pub(crate) fn fault(
        &self,
        address: usize,
        access: Access,
        open: impl FnOnce(AddressRange) -> bool,
        accessible: impl FnOnce() -> bool,
    ) -> Verdict {
        let entered = self.entered();
        let Some(seen) = self.find(address) else {
            // Thawed or woken since the access; or frozen again since we looked, and then the
            // access will fault again. Neither, it is a stranger's protection or freed memory.
            let is_late = accessible() || self.entered() != entered;
            return if is_late { Verdict::Retry } else { Verdict::Elsewhere };
        };
        match seen.state {
            State::Sealing | State::Asleep | State::Staged => Verdict::Stray(seen),
            State::Frozen | State::Written if access != Access::Read => {
                // Losing the swap means that the span moved on: the retried access faults again
                // if it must, and is judged by what the span is then.
                if !self.swap(&seen, State::Opening) {
                    return Verdict::Retry;
                }
                let opened = open(seen.range);
                self.settle(&seen, if opened { State::Written } else { State::Frozen });
                if opened { Verdict::Retry } else { Verdict::Stuck(seen) }
            }
            // Somebody else is opening it.
            State::Opening | State::Thawing => {
                yield_now();
                Verdict::Retry
            }
            // Reading is allowed here: the fault is older than the state.
            State::Frozen | State::Written | State::Free | State::Filling => Verdict::Retry,
        }
    }
}
