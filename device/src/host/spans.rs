//! Spans of the host device: the guard's protocol with real system calls, and what it means for
//! pages and counts.

use super::guard::{self, Failed, State, TABLE};
use super::page_states::PageState;
use super::pages::{HUGE_BYTES, Space};
use super::system;
use crate::{AddressRange, DeviceError, Operation, Sealed, SpanId, SpanLabel};

use std::sync::Arc;

/// Pages prepared aside for one asleep span. Dropping them is `discard`.
#[derive(Debug)]
pub struct Staged {
    space: Arc<Space>,
    span: SpanId,
    /// Where they will be published.
    target: AddressRange,
    /// Where they are.
    pages: AddressRange,
    /// Whether `pages` moved to the span.
    published: bool,
}

impl Staged {
    pub(super) fn address(&self) -> usize {
        self.pages.start
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.space.accounts.unstage(self.target.bytes);
        if self.published {
            return;
        }
        // SAFETY: our own mapping; whoever filled it gave it up with `self`.
        unsafe { system::release(self.pages) };
        self.space.accounts.give(self.target.bytes);
        // I3: while staged, only the holder of the pages moves the span.
        TABLE.finish(self.span, State::Asleep);
    }
}

/// The `WrongState` error of a span seen in `state`.
fn wrong(operation: Operation, span: SpanId, state: State, needed: &'static str) -> DeviceError {
    DeviceError::WrongState { operation, span: span.0, state: state.name(), needed }
}

impl Space {
    /// Refuses a span of another device of the process.
    fn owns(
        &self,
        span: SpanId,
        operation: Operation,
        needed: &'static str,
    ) -> Result<(), DeviceError> {
        let (range, _) = TABLE.get(span).map_err(|state| wrong(operation, span, state, needed))?;
        if self.range.covers(range) {
            return Ok(());
        }
        let state = "of another device";
        Err(DeviceError::WrongState { operation, span: span.0, state, needed })
    }

    pub(super) fn freeze(
        &self,
        range: AddressRange,
        label: &SpanLabel,
    ) -> Result<SpanId, DeviceError> {
        const OPERATION: Operation = Operation::Freeze;
        self.check(range, OPERATION)?;
        self.states.change(range, PageState::Mapped, PageState::Span, OPERATION)?;
        // SAFETY: I1; writers meet the guard, which finds the span in the table.
        let protect = |range| unsafe { system::write_protect(range, OPERATION) };
        // SAFETY: I1.
        let open = |range| unsafe { system::open(range, OPERATION) };
        let frozen = TABLE
            .freeze(range, label, protect, open)
            .unwrap_or(Err(DeviceError::TooManySpans { limit: guard::LIMIT }));
        if frozen.is_err() {
            self.states.change(range, PageState::Span, PageState::Mapped, OPERATION)?;
        }
        frozen
    }

    pub(super) fn thaw(&self, span: SpanId) -> Result<(), DeviceError> {
        const OPERATION: Operation = Operation::Thaw;
        const NEEDED: &str = "frozen";
        self.owns(span, OPERATION, NEEDED)?;
        // SAFETY: I1; T2: the span is ours while it is opened.
        let open = |range| unsafe { system::open(range, OPERATION) };
        let range = TABLE.thaw(span, open).map_err(|failed| match failed {
            Failed::State(state) => wrong(OPERATION, span, state, NEEDED),
            Failed::System(error) => error,
        })?;
        self.states.change(range, PageState::Span, PageState::Mapped, OPERATION)
    }

    pub(super) fn seal(&self, span: SpanId) -> Result<Sealed, DeviceError> {
        const OPERATION: Operation = Operation::Seal;
        const NEEDED: &str = "frozen";
        self.owns(span, OPERATION, NEEDED)?;
        // SAFETY: I1; T3: nothing was written since the freeze, and the caller has its copy.
        let close = |range| unsafe { system::close(range, OPERATION) };
        // SAFETY: I1; T2: the span is ours while it is opened.
        let open = |range| unsafe { system::open(range, OPERATION) };
        let (range, sealed) = TABLE.seal(span, close, open).map_err(|failed| match failed {
            Failed::State(state) => wrong(OPERATION, span, state, NEEDED),
            Failed::System(error) => error,
        })?;
        match sealed {
            Sealed::Asleep => self.accounts.give(range.bytes),
            Sealed::Written => {
                self.states.change(range, PageState::Span, PageState::Mapped, OPERATION)?;
            }
        }
        Ok(sealed)
    }

    pub(super) fn forget(&self, span: SpanId) -> Result<(), DeviceError> {
        const OPERATION: Operation = Operation::Forget;
        const NEEDED: &str = "asleep";
        self.owns(span, OPERATION, NEEDED)?;
        let next = |state| (state == State::Asleep).then_some(State::Thawing);
        let (range, _) =
            TABLE.begin(span, next).map_err(|state| wrong(OPERATION, span, state, NEEDED))?;
        TABLE.remove(span);
        self.states.change(range, PageState::Span, PageState::Unmapped, OPERATION)
    }
}

/// `Device::stage`.
pub(super) fn stage(space: &Arc<Space>, span: SpanId) -> Result<Staged, DeviceError> {
    const OPERATION: Operation = Operation::Stage;
    const NEEDED: &str = "asleep";
    space.owns(span, OPERATION, NEEDED)?;
    let next = |state| (state == State::Asleep).then_some(State::Staged);
    let (target, _) =
        TABLE.begin(span, next).map_err(|state| wrong(OPERATION, span, state, NEEDED))?;
    let taken = space.accounts.take(target.bytes, OPERATION);
    let pages = taken
        .and_then(|()| staging_pages(target).inspect_err(|_| space.accounts.give(target.bytes)));
    match pages {
        Ok(pages) => {
            space.accounts.stage(target.bytes);
            Ok(Staged { space: Arc::clone(space), span, target, pages, published: false })
        }
        Err(error) => {
            TABLE.finish(span, State::Asleep);
            Err(error)
        }
    }
}

/// `Device::publish`.
pub(super) fn publish(mut staged: Staged) -> Result<(), (DeviceError, Staged)> {
    const OPERATION: Operation = Operation::Publish;
    // SAFETY: both ours and equally long; the asleep span has no pages, and `staged`, which
    // alone knows the old address, is consumed.
    let moved = unsafe { system::move_pages(staged.pages, staged.target, OPERATION) };
    if let Err(error) = moved {
        return Err((error, staged));
    }
    staged.published = true;
    TABLE.remove(staged.span);
    let (from, to) = (PageState::Span, PageState::Mapped);
    let changed = staged.space.states.change(staged.target, from, to, OPERATION);
    debug_assert!(changed.is_ok(), "pages of a span belong to it until it is published");
    Ok(())
}

/// Pages for `target`, elsewhere, at the same distance from a huge page's start: the kernel then
/// moves whole page tables (0.05 ms per 256 MiB measured, instead of 0.8 to 2.0), and huge pages
/// stay huge. They lie inside one span, so sleeping gives them back whole; filling them is 2.6
/// times faster (41 ms instead of 108 per 256 MiB).
fn staging_pages(target: AddressRange) -> Result<AddressRange, DeviceError> {
    if target.bytes < HUGE_BYTES {
        return system::fresh(target.bytes, Operation::Stage);
    }
    let room = system::fresh(target.bytes.saturating_add(HUGE_BYTES), Operation::Stage)?;
    let skip = target.start.wrapping_sub(room.start) % HUGE_BYTES;
    let pages = AddressRange::new(room.start + skip, target.bytes);
    // SAFETY: the ends of our own fresh mapping, used by nobody.
    unsafe {
        system::release(AddressRange::new(room.start, skip));
        system::release(AddressRange::new(pages.end(), HUGE_BYTES - skip));
        system::wish_huge(pages);
    }
    Ok(pages)
}
