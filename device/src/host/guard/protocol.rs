//! Freeze, thaw, seal and write fault, which may race. The system calls are parameters, which the loom model
//! replaces by a model of memory.

use super::sync::yield_now;
use super::table::{Seen, State, Table};
use crate::{AddressRange, Sealed, SpanId, SpanLabel};

/// The kind of an access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Write,
    /// Not known on this machine. On a frozen span, where reads are allowed, treated as a write.
    #[cfg_attr(target_arch = "x86_64", allow(dead_code))] // always known
    Unknown,
}

impl Access {
    /// Its name in messages.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Write => "write",
            Self::Unknown => "read or write",
        }
    }
}

/// The reaction to a fault.
#[derive(Debug)]
pub(crate) enum Verdict {
    /// Repeat the access: it is, or soon will be, allowed.
    Retry,
    /// An access to an asleep span.
    Stray(Seen),
    /// A write to a frozen span that the system cannot make writable.
    Stuck(Seen),
    /// An inaccessible address in no span.
    Elsewhere,
}

/// The error of a transition.
#[derive(Debug)]
pub(crate) enum Failed<E> {
    /// The span is in this state.
    State(State),
    /// An error of the system.
    System(E),
}

impl<const N: usize> Table<N> {
    /// Write-protects `range` as a new span; `None` if the table is full.
    ///
    /// The span is inserted first, so that a write fault finds it.
    pub(crate) fn freeze<E>(
        &self,
        range: AddressRange,
        label: &SpanLabel,
        protect: impl FnOnce(AddressRange) -> Result<(), E>,
        open: impl FnOnce(AddressRange) -> Result<(), E>,
    ) -> Option<Result<SpanId, E>> {
        let span = self.insert(range, label)?;
        let Err(error) = protect(range) else { return Some(Ok(span)) };
        // A part may be protected. If it cannot be made writable again the slot stays *written*, so that a
        // write fault is served.
        if self.thaw(span, open).is_err() {
            debug_assert!(false, "the system neither protects nor opens {range:?}");
        }
        Some(Err(error))
    }

    /// Makes a frozen or written span writable and removes it. After an error of the system the span is
    /// *written*: a part may be writable, so no copy of it is valid.
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

    /// Closes a frozen span, or makes a written one writable and removes it.
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

    /// Ends a span that the caller has changed to *thawing*.
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

    /// Handles a fault at `address`. Async-signal-safe if the functions are. `accessible` returns whether the access is
    /// possible now, `is_forked` whether this process is a child that was forked since the table was in use.
    pub(crate) fn fault(
        &self,
        address: usize,
        access: Access,
        open: impl FnOnce(AddressRange) -> bool,
        accessible: impl FnOnce() -> bool,
        is_forked: impl Fn() -> bool,
    ) -> Verdict {
        let entered = self.entered();
        let Some(seen) = self.find(address) else {
            // Thawed or woken since the access, or frozen since the search: then the access faults again.
            // Otherwise it is a foreign protection or freed memory.
            let is_late = accessible() || self.entered() != entered;
            return if is_late { Verdict::Retry } else { Verdict::Elsewhere };
        };
        match seen.state {
            State::Sealing | State::Asleep | State::Staged => Verdict::Stray(seen),
            State::Frozen | State::Written if access != Access::Read => {
                // If the swap fails the span has changed state: the repeated access may fault again.
                if !self.swap(&seen, State::Opening) {
                    return Verdict::Retry;
                }
                let opened = open(seen.range);
                self.settle(&seen, if opened { State::Written } else { State::Frozen });
                if opened { Verdict::Retry } else { Verdict::Stuck(seen) }
            }
            // The thread that was making it writable is not in this process. The pages are the child's own.
            State::Opening | State::Thawing if is_forked() => {
                if open(seen.range) {
                    Verdict::Retry
                } else {
                    Verdict::Stuck(seen)
                }
            }
            // Another thread is making it writable.
            State::Opening | State::Thawing => {
                yield_now();
                Verdict::Retry
            }
            // Reads are allowed here: the fault is older than the state.
            State::Frozen | State::Written | State::Free | State::Filling => Verdict::Retry,
        }
    }
}
