//! Spans of the host device: the guard's protocol with system calls, page states and counts.

use super::guard::{self, Failed, State, TABLE};
use super::pages::Space;
use super::system;
use crate::page_states::PageState;
use crate::{AddressRange, DeviceError, Fill, Operation, Sealed, SpanId, SpanLabel};

use std::sync::Arc;

/// Pages prepared at a separate address for an asleep span. Dropping them releases them.
#[derive(Debug)]
pub struct Staged {
    space: Arc<Space>,
    span: SpanId,
    /// The addresses of the span.
    target: AddressRange,
    /// The addresses at which they are filled: one mapping per piece, in order.
    pub(super) aside: AddressRange,
    /// Bytes of the pieces that are not yet published, the next one last.
    pieces: Vec<usize>,
}

impl Staged {
    /// Returns the bytes that are already at the target.
    fn published_bytes(&self) -> usize {
        self.target.bytes - self.pieces.iter().sum::<usize>()
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.space.accounts.unstage(self.target.bytes);
        if self.pieces.is_empty() {
            return;
        }
        let published_bytes = self.published_bytes();
        let (published, _) = self.target.split_at(published_bytes);
        let (_, left) = self.aside.split_at(published_bytes);
        // SAFETY: our own mapping, no longer used by its owner; and the part of the asleep span that a
        // refused publish has filled, which is not accessed.
        unsafe {
            system::release(left);
            system::clear(published);
        }
        self.space.accounts.give(self.target.bytes);
        // I3: only the owner of the staged pages changes the span's state.
        TABLE.finish(self.span, State::Asleep);
    }
}

fn wrong(operation: Operation, span: SpanId, state: State, needed: &'static str) -> DeviceError {
    DeviceError::WrongState { operation, span: span.0, state: state.name(), needed }
}

fn device_error(
    failed: Failed<DeviceError>,
    operation: Operation,
    span: SpanId,
    needed: &'static str,
) -> DeviceError {
    match failed {
        Failed::State(state) => wrong(operation, span, state, needed),
        Failed::System(error) => error,
    }
}

impl Space {
    /// Refuses a span of another device.
    fn owns(
        &self,
        span: SpanId,
        operation: Operation,
        needed: &'static str,
    ) -> Result<(), DeviceError> {
        let (range, _) = TABLE.get(span).map_err(|state| wrong(operation, span, state, needed))?;
        if self.range().covers(range) {
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
        // A legal write to a frozen span would end the process without it.
        guard::keep_installed()?;
        range.check_pages(self.range(), self.page_bytes, OPERATION)?;
        self.states.change(range, PageState::Mapped, PageState::Span, OPERATION)?;
        // SAFETY: I1; the guard handles writes, since the span is in the table.
        let protect = |range| unsafe { system::protect(range, system::READ_ONLY, OPERATION) };
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
        let thawed = TABLE.thaw(span, open);
        let range = thawed.map_err(|failed| device_error(failed, OPERATION, span, NEEDED))?;
        self.states.change(range, PageState::Span, PageState::Mapped, OPERATION)
    }

    pub(super) fn seal(&self, span: SpanId) -> Result<Sealed, DeviceError> {
        const OPERATION: Operation = Operation::Seal;
        const NEEDED: &str = "frozen";
        self.owns(span, OPERATION, NEEDED)?;
        // SAFETY: I1; T3: nothing was written since the freeze, and the caller has a copy.
        let close = |range| unsafe { self.parked.vacate(range, true, OPERATION) };
        // SAFETY: I1; T2: the span is ours while it is opened.
        let open = |range| unsafe { system::open(range, OPERATION) };
        let sealed = TABLE.seal(span, close, open);
        let (range, sealed) =
            sealed.map_err(|failed| device_error(failed, OPERATION, span, NEEDED))?;
        match sealed {
            Sealed::Asleep => self.give(range.bytes),
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
pub(super) fn stage(space: &Arc<Space>, span: SpanId, fill: Fill) -> Result<Staged, DeviceError> {
    const OPERATION: Operation = Operation::Stage;
    const NEEDED: &str = "asleep";
    space.owns(span, OPERATION, NEEDED)?;
    let next = |state| (state == State::Asleep).then_some(State::Staged);
    let (target, _) =
        TABLE.begin(span, next).map_err(|state| wrong(OPERATION, span, state, NEEDED))?;
    let taken = space.accounts.take(target.bytes, OPERATION);
    let pages = taken.and_then(|()| {
        staging_pages(space, target.bytes, fill).inspect_err(|_| space.accounts.give(target.bytes))
    });
    match pages {
        Ok((aside, pieces)) => {
            // Before new pages are filled (I5).
            space.parked.shrink(space.accounts.parking_bytes());
            space.accounts.stage(target.bytes);
            Ok(Staged { space: Arc::clone(space), span, target, aside, pieces })
        }
        Err(error) => {
            TABLE.finish(span, State::Asleep);
            Err(error)
        }
    }
}

/// Returns pages at a new address, parked ones first, and the bytes of their pieces, the first one last.
fn staging_pages(
    space: &Space,
    bytes: usize,
    fill: Fill,
) -> Result<(AddressRange, Vec<usize>), DeviceError> {
    const OPERATION: Operation = Operation::Stage;
    let aside = system::fresh(bytes, OPERATION)?;
    let mut pieces = Vec::new();
    let mut moved_bytes = 0;
    if fill == Fill::Any {
        // SAFETY: our own new mapping, unused.
        pieces = unsafe { space.parked.fill_aside(aside) };
        moved_bytes = pieces.iter().sum();
        // All of it: a refused move leaves an inaccessible part.
        // SAFETY: as above.
        if let Err(error) = unsafe { system::open(aside, OPERATION) } {
            // SAFETY: as above.
            unsafe { system::release(aside) };
            return Err(error);
        }
    }
    if moved_bytes < bytes {
        pieces.push(bytes - moved_bytes);
    }
    pieces.reverse();
    Ok((aside, pieces))
}

/// `Device::publish`. Moves the pieces one by one, each atomically; the span is awake after the last. After
/// an error the rest can be retried. Until then a stray access to a published piece is not reported, and
/// a stray write to it is lost if the staged pages are dropped.
pub(super) fn publish(mut staged: Staged) -> Result<(), (DeviceError, Staged)> {
    const OPERATION: Operation = Operation::Publish;
    while let Some(&bytes) = staged.pieces.last() {
        let published_bytes = staged.published_bytes();
        let piece = |whole: AddressRange| whole.split_at(published_bytes).1.split_at(bytes).0;
        let (from, onto) = (piece(staged.aside), piece(staged.target));
        staged.space.parked.expect_piece(onto);
        // SAFETY: both are ours and equally long, and `from` is one mapping; the asleep span has no pages
        // there, and only the consumed `staged` knows the old address.
        if let Err(error) = unsafe { system::move_pages(from, onto, OPERATION) } {
            return Err((error, staged));
        }
        staged.pieces.pop();
    }
    TABLE.remove(staged.span);
    let (from, to) = (PageState::Span, PageState::Mapped);
    let changed = staged.space.states.change(staged.target, from, to, OPERATION);
    debug_assert!(changed.is_ok(), "pages of an asleep span belong to it");
    Ok(())
}
