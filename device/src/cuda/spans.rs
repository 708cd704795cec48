//! Spans of the `cuda` device. Uses come in stream order, and whoever freezes, seals or stages has
//! waited for them, so nothing here guards against a touch: a span is its state and its pages.

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use super::space::{Refused, Space};
use crate::page_states::PageState;
use crate::sync::MutexGuard;
use crate::{AddressRange, DeviceError, Fill, Operation, Sealed, SpanId, SpanLabel};

/// The most spans at once.
pub const SPANS_MAX: usize = 1 << 20;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Frozen,
    Asleep,
    Staged,
    /// A call on it is under way, or went wrong half-way.
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
struct Span {
    range: AddressRange,
    label: SpanLabel,
    state: State,
}

/// Every span there is.
#[derive(Debug, Default)]
pub(super) struct Spans(HashMap<SpanId, Span>);

/// Pages attached to one asleep span, to be filled there. Dropping them is `discard`.
#[derive(Debug)]
pub struct Staged {
    space: Arc<Space>,
    span: SpanId,
    range: AddressRange,
    is_published: bool,
}

impl Staged {
    pub(super) const fn address(&self) -> usize {
        self.range.start
    }
}

impl Drop for Staged {
    fn drop(&mut self) {
        self.space.accounts.unstage(self.range.bytes);
        if self.is_published {
            return;
        }
        let gpu = self.space.context.enter(Operation::Unmap);
        let detached = gpu.is_ok_and(|gpu| {
            // SAFETY: whoever filled the pages gave them up with `self`, after the last copy.
            unsafe { self.space.detach(&gpu, self.range, Operation::Unmap) }.is_ok()
        });
        // Pages that do not come off are counted on, and the span is of no use any more.
        let state = if detached { State::Asleep } else { State::Busy };
        self.space.set(self.span, state);
    }
}

/// A name no span of this process has, and none had for four billion spans.
fn fresh_id(taken: &HashMap<SpanId, Span>) -> SpanId {
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
    fn spans(&self) -> MutexGuard<'_, Spans> {
        self.spans.lock()
    }

    fn set(&self, id: SpanId, state: State) {
        if let Some(span) = self.spans().0.get_mut(&id) {
            span.state = state;
        }
    }

    /// Takes a span in state `from` in hand; nobody else gets it until it is set or removed.
    fn begin(
        &self,
        id: SpanId,
        from: State,
        operation: Operation,
    ) -> Result<AddressRange, DeviceError> {
        let mut spans = self.spans();
        let found = spans.0.get_mut(&id);
        let state = match &found {
            Some(span) => span.state.name(),
            None => "gone",
        };
        match found.filter(|span| span.state == from) {
            Some(span) => {
                span.state = State::Busy;
                Ok(span.range)
            }
            None => {
                let needed = from.name();
                Err(DeviceError::WrongState { operation, span: id.0, state, needed })
            }
        }
    }

    /// Ends a span in hand; its pages become `state`.
    fn end(&self, id: SpanId, state: PageState, operation: Operation) -> Result<(), DeviceError> {
        let removed = self.spans().0.remove(&id);
        let range = removed.map(|span| span.range).unwrap_or_default();
        self.states.change(range, PageState::Span, state, operation)
    }

    pub(super) fn freeze(
        &self,
        range: AddressRange,
        label: SpanLabel,
    ) -> Result<SpanId, DeviceError> {
        const OPERATION: Operation = Operation::Freeze;
        self.check(range, OPERATION)?;
        self.states.change(range, PageState::Mapped, PageState::Span, OPERATION)?;
        let mut spans = self.spans();
        if spans.0.len() >= SPANS_MAX {
            drop(spans);
            self.states.change(range, PageState::Span, PageState::Mapped, OPERATION)?;
            return Err(DeviceError::TooManySpans { limit: SPANS_MAX as u32 });
        }
        let id = fresh_id(&spans.0);
        spans.0.insert(id, Span { range, label, state: State::Frozen });
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
            // SAFETY: whoever seals has waited for every use, and for the copy.
            unsafe { self.detach(&gpu, range, OPERATION) }
        });
        match outcome {
            // Some pages have gone and do not come back. The bytes are only the copy's from now on,
            // which must not be dropped as that of a span that stays; nor can it come back here.
            Err(Refused { error: DeviceError::Refused { .. }, is_undone: false }) => {
                Ok(Sealed::Asleep)
            }
            outcome => {
                self.settle(id, outcome, State::Asleep, State::Frozen).map(|()| Sealed::Asleep)
            }
        }
    }

    /// Puts a span in hand down: in `after`, or as it was `before`. Where a refusal cannot be
    /// undone it stays in hand, for nobody may use it.
    fn settle(
        &self,
        id: SpanId,
        outcome: Result<(), Refused>,
        after: State,
        before: State,
    ) -> Result<(), DeviceError> {
        match outcome {
            Ok(()) => self.set(id, after),
            Err(refused) => {
                if refused.is_undone {
                    self.set(id, before);
                }
                return Err(refused.error);
            }
        }
        Ok(())
    }

    pub(super) fn forget(&self, id: SpanId) -> Result<(), DeviceError> {
        self.begin(id, State::Asleep, Operation::Forget)?;
        self.end(id, PageState::Unmapped, Operation::Forget)
    }

    /// Who sleeps around `address`: for the message of a copy that would touch it.
    pub(super) fn label_at(&self, address: usize) -> Option<SpanLabel> {
        let spans = self.spans();
        spans.0.values().find(|span| span.range.contains(address)).map(|span| span.label)
    }
}

/// `Device::stage`.
pub(super) fn stage(space: &Arc<Space>, id: SpanId, fill: Fill) -> Result<Staged, DeviceError> {
    const OPERATION: Operation = Operation::Stage;
    let range = space.begin(id, State::Asleep, OPERATION)?;
    let outcome = space
        .context
        .enter(OPERATION)
        .map_err(Refused::clean)
        .and_then(|gpu| space.attach(&gpu, range, fill, OPERATION));
    space.settle(id, outcome, State::Staged, State::Asleep)?;
    space.accounts.stage(range.bytes);
    Ok(Staged { space: Arc::clone(space), span: id, range, is_published: false })
}

/// `Device::publish`: the pages are there already.
pub(super) fn publish(mut staged: Staged) -> Result<(), (DeviceError, Staged)> {
    match staged.space.end(staged.span, PageState::Mapped, Operation::Publish) {
        Ok(()) => {
            staged.is_published = true;
            Ok(())
        }
        Err(error) => Err((error, staged)),
    }
}
