//! Spans of the `cuda` device. Callers of freeze, seal and stage have waited for all uses in stream order,
//! so accesses are not guarded: a span is its state and its pages.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::space::{Refused, Space};
use crate::page_states::PageState;
use crate::{AddressRange, DeviceError, Fill, Operation, Sealed, SpanId};

/// Limit of the spans of a device.
pub const SPANS_MAX: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Frozen,
    Asleep,
    Staged,
    /// A call is in progress, or failed and could not be undone.
    Busy,
}

impl State {
    const fn name(self) -> &'static str {
        match self {
            Self::Frozen => "frozen",
            Self::Asleep => "asleep",
            Self::Staged => "waking",
            Self::Busy => "being changed",
        }
    }
}

#[derive(Debug)]
pub(super) struct Span {
    range: AddressRange,
    state: State,
}

/// The spans of a device.
pub(super) type Spans = HashMap<SpanId, Span>;

/// Pages mapped for an asleep span, to be filled in place. Dropping them unmaps them.
#[derive(Debug)]
pub struct Staged {
    space: Arc<Space>,
    span: SpanId,
    pub(super) range: AddressRange,
    is_published: bool,
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.space.accounts.unstage(self.range.bytes);
        if self.is_published {
            return;
        }
        let gpu = self.space.context.enter(Operation::Unmap);
        let detached = gpu.is_ok_and(|gpu| {
            // SAFETY: the owner of `self` has waited for the last copy to the pages.
            unsafe { self.space.detach(&gpu, self.range, Operation::Unmap) }.is_ok()
        });
        // Pages that cannot be unmapped stay counted, and the span is unusable.
        let state = if detached { State::Asleep } else { State::Busy };
        self.space.set(self.span, state);
    }
}

/// Returns an unused id; ids repeat after four billion spans.
fn fresh_id(taken: &Spans) -> SpanId {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    loop {
        // Relaxed: only uniqueness matters.
        let id = SpanId(NEXT.fetch_add(1, Ordering::Relaxed));
        if id.0 < u32::MAX - 1 && !taken.contains_key(&id) {
            return id;
        }
    }
}

impl Space {
    fn set(&self, id: SpanId, state: State) {
        if let Some(span) = self.spans.lock().get_mut(&id) {
            span.state = state;
        }
    }

    /// Makes a span in state `from` busy, until `set` or `end`.
    fn begin(
        &self,
        id: SpanId,
        from: State,
        operation: Operation,
    ) -> Result<AddressRange, DeviceError> {
        let mut spans = self.spans.lock();
        let state = match spans.get_mut(&id) {
            Some(span) if span.state == from => {
                span.state = State::Busy;
                return Ok(span.range);
            }
            Some(span) => span.state.name(),
            None => "gone",
        };
        Err(DeviceError::WrongState { operation, span: id.0, state, needed: from.name() })
    }

    /// Removes a busy span; its pages become `state`.
    fn end(&self, id: SpanId, state: PageState, operation: Operation) -> Result<(), DeviceError> {
        let removed = self.spans.lock().remove(&id);
        let range = removed.map(|span| span.range).unwrap_or_default();
        self.states.change(range, PageState::Span, state, operation)
    }

    pub(super) fn freeze(&self, range: AddressRange) -> Result<SpanId, DeviceError> {
        const OPERATION: Operation = Operation::Freeze;
        range.check_pages(self.range, self.page_bytes, OPERATION)?;
        self.states.change(range, PageState::Mapped, PageState::Span, OPERATION)?;
        if let Err(error) = self.check_whole(range, OPERATION) {
            self.states.change(range, PageState::Span, PageState::Mapped, OPERATION)?;
            return Err(error);
        }
        let mut spans = self.spans.lock();
        if spans.len() >= SPANS_MAX {
            drop(spans);
            self.states.change(range, PageState::Span, PageState::Mapped, OPERATION)?;
            return Err(DeviceError::TooManySpans { limit: SPANS_MAX as u32 });
        }
        let id = fresh_id(&spans);
        spans.insert(id, Span { range, state: State::Frozen });
        Ok(id)
    }

    pub(super) fn thaw(&self, id: SpanId) -> Result<(), DeviceError> {
        self.begin(id, State::Frozen, Operation::Thaw)?;
        self.end(id, PageState::Mapped, Operation::Thaw)
    }

    pub(super) fn seal(&self, id: SpanId) -> Result<Sealed, DeviceError> {
        const OPERATION: Operation = Operation::Seal;
        let range = self.begin(id, State::Frozen, OPERATION)?;
        let outcome = self.context.enter(OPERATION).map_err(Refused::clean).and_then(|gpu| {
            // SAFETY: the caller of `seal` has waited for all uses and for the copy.
            unsafe { self.detach(&gpu, range, OPERATION) }
        });
        match outcome {
            // Some pages are lost. The copy is the only one left: it must not be dropped as that of a span
            // that stays awake, and the span cannot wake.
            Err(Refused { error: DeviceError::Refused { .. }, is_undone: false }) => {
                Ok(Sealed::Asleep)
            }
            outcome => {
                let settled = Refused::settle(outcome, |is_asleep| {
                    self.set(id, if is_asleep { State::Asleep } else { State::Frozen });
                    Ok(())
                });
                settled.map(|()| Sealed::Asleep)
            }
        }
    }

    pub(super) fn forget(&self, id: SpanId) -> Result<(), DeviceError> {
        self.begin(id, State::Asleep, Operation::Forget)?;
        self.end(id, PageState::Unmapped, Operation::Forget)
    }

    /// Whether a span contains `address`.
    pub(super) fn has_span_at(&self, address: usize) -> bool {
        self.spans.lock().values().any(|span| span.range.contains(address))
    }
}

/// `Device::stage` and `Device::stage_large`.
pub(super) fn stage(
    space: &Arc<Space>,
    id: SpanId,
    fill: Fill,
    is_large: bool,
) -> Result<Staged, DeviceError> {
    const OPERATION: Operation = Operation::Stage;
    let range = space.begin(id, State::Asleep, OPERATION)?;
    let large = if is_large { range } else { AddressRange::default() };
    let outcome = space
        .context
        .enter(OPERATION)
        .map_err(Refused::clean)
        .and_then(|gpu| space.attach(&gpu, range, large, fill, OPERATION));
    Refused::settle(outcome, |is_staged| {
        space.set(id, if is_staged { State::Staged } else { State::Asleep });
        Ok(())
    })?;
    space.accounts.stage(range.bytes);
    Ok(Staged { space: Arc::clone(space), span: id, range, is_published: false })
}

/// `Device::publish`: the pages are already mapped.
pub(super) fn publish(mut staged: Staged) -> Result<(), (DeviceError, Staged)> {
    match staged.space.end(staged.span, PageState::Mapped, Operation::Publish) {
        Ok(()) => {
            staged.is_published = true;
            Ok(())
        }
        Err(error) => Err((error, staged)),
    }
}
