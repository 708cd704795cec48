//! A bounded history of what happened to memory, for tools that draw it. Off by default.
//!
//! Events are recorded under the state's lock, and a [`MemoryReading`] is taken under it. So the events of a reading,
//! undone from the newest on, lead from its ranges to those of the oldest event.
//!
//! A *log of operations* can be recorded beside it or without it: what callers asked for, call by call, for a thread
//! that writes it to a file. Pages, sleeps and uses that end are not in it.
//!
//! While it is on, the thread cache serves only callers with the state locked: what it does otherwise passes by the
//! state.

use crate::types::ArenaId;
use dormouse_device::AddressRange;
use dormouse_timeline::now_ns;
use std::cell::Cell;
use std::sync::atomic::{AtomicU32, Ordering};

/// Limit of the events that are kept (88 MiB).
pub const HISTORY_EVENTS_MAX: usize = 1 << 20;
/// Limit of the operations that wait for [`crate::Allocator::take_operations`] (6 MiB).
pub const OPERATIONS_MAX: usize = 1 << 16;

thread_local! {
    /// No destructor: threads may free late.
    static CONTEXT: Cell<u64> = const { Cell::new(0) };
    /// 0: not numbered yet.
    static THREAD: Cell<u32> = const { Cell::new(0) };
}

/// Returns the number of the calling thread, from 1 in the order of their first event.
fn thread_number() -> u32 {
    static LAST: AtomicU32 = AtomicU32::new(0);
    if THREAD.get() == 0 {
        // Relaxed: no other data depends on it.
        THREAD.set(LAST.fetch_add(1, Ordering::Relaxed).wrapping_add(1));
    }
    THREAD.get()
}

/// Sets the context of the calling thread: an opaque number that its events carry. 0 at first.
#[inline]
pub fn set_context(context: u64) {
    CONTEXT.set(context);
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum HistoryAction {
    /// A block was allocated. A part of a sleeping block that shares its page with others counts as a block, from the
    /// sleep to the wake.
    Allocated = 0,
    /// A block was freed, and no other stream uses it.
    Freed = 1,
    /// A block was freed. Something may still use it: another stream, or a copy.
    FreeRequested = 2,
    /// The uses of a freed block are over.
    FreeCompleted = 3,
    /// Pages were mapped.
    Mapped = 4,
    /// Pages were unmapped.
    Unmapped = 5,
    /// A block fell asleep. Its pages, unmapped next, hold none of it any more.
    FellAsleep = 6,
    /// A block awoke.
    Awoke = 7,
    /// A request found no memory. The address is the device's free bytes.
    OutOfMemory = 8,
    /// A reading was taken.
    Read = 9,
    /// The caller's remark on a block.
    Annotated = 10,
}

impl HistoryAction {
    /// Returns the bit of the action in [`HistoryOptions::skipped`].
    #[must_use]
    pub const fn bit(self) -> u32 {
        1 << self as u32
    }
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryEvent {
    /// `CLOCK_MONOTONIC`, in nanoseconds.
    pub at_ns: u64,
    /// What happened.
    pub action: HistoryAction,
    /// Address of the block or the pages.
    pub address: usize,
    /// Requested bytes of the block, or bytes of the pages.
    pub bytes: u64,
    /// [`crate::Request::stream`].
    pub stream: u64,
    /// [`crate::Request::scope`].
    pub scope: u64,
    /// [`crate::Request::tag`].
    pub tag: u32,
    /// Of an operation of the log the thread, from 1 in the order of their first one; else 0.
    pub thread: u32,
    /// [`crate::Request::arena`].
    pub arena: Option<ArenaId>,
    /// The context of the thread ([`set_context`]); of an awakening block, that of its allocation.
    pub context: u64,
}

impl HistoryEvent {
    /// An event of the calling thread at this moment that concerns no block.
    pub(crate) fn now(action: HistoryAction, address: usize, bytes: u64) -> Self {
        Self {
            at_ns: now_ns(),
            action,
            address,
            bytes,
            stream: 0,
            scope: 0,
            tag: 0,
            thread: 0,
            arena: None,
            context: CONTEXT.get(),
        }
    }
}

/// What is recorded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HistoryOptions {
    /// Events that are kept, the newest: 1 to [`HISTORY_EVENTS_MAX`].
    pub events_max: usize,
    /// The actions that are not recorded, by [`HistoryAction::bit`].
    pub skipped: u32,
}

/// The use of a mapped range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeUse {
    /// A block, or a part of a sleeping block that shares its page with others.
    Allocated,
    /// The same, freed, but possibly still in use.
    PendingFree,
    /// Neither.
    Free,
}

/// A mapped range of addresses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MappedRange {
    /// Its addresses, whole granules.
    pub range: AddressRange,
    /// Its use.
    pub usage: RangeUse,
    /// Number of its segment. Neighbours with the same number are one piece of memory.
    pub segment: u32,
    /// Requested bytes of the block; 0 for free memory.
    pub requested_bytes: u64,
    /// Key of the stream of its pool; 0 without stream order.
    pub stream: u64,
    /// Whether its pool serves small blocks.
    pub is_small: bool,
    /// The arena of its pool.
    pub arena: Option<ArenaId>,
    /// [`crate::Request::scope`] of the block.
    pub scope: u64,
    /// [`crate::Request::tag`] of the block.
    pub tag: u32,
    /// The context of its allocation; 0 if that was not recorded.
    pub context: u64,
}

/// All mapped memory at one moment, and the events before it.
#[derive(Clone, Debug, Default)]
pub struct MemoryReading {
    /// By segment and address.
    pub ranges: Vec<MappedRange>,
    /// Oldest first; empty if they were not asked for.
    pub events: Vec<HistoryEvent>,
    /// Number of events that are kept.
    pub event_count: usize,
    /// Events that were recorded since the history was last empty.
    pub recorded: u64,
    /// Events that are kept; 0 while the history is off.
    pub events_max: usize,
}

/// Operations for the log, in order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Operations {
    /// Allocations, frees and requests that found no memory.
    pub events: Vec<HistoryEvent>,
    /// Operations that were lost: [`OPERATIONS_MAX`] others waited.
    pub lost: u64,
}

impl Operations {
    #[cold]
    fn push(&mut self, event: &HistoryEvent) {
        if self.events.len() < OPERATIONS_MAX {
            self.events.push(HistoryEvent { thread: thread_number(), ..*event });
        } else {
            self.lost += 1;
        }
    }
}

/// What is recorded, and what was known of each block at its allocation.
#[derive(Debug, Default)]
pub(crate) struct History {
    ring: Option<EventRing>,
    log: Option<Operations>,
    /// By slot: the allocation of a live or pending block.
    allocations: Vec<Option<HistoryEvent>>,
}

/// The newest events.
#[derive(Debug)]
struct EventRing {
    /// A ring once it is full.
    events: Vec<HistoryEvent>,
    /// The place of the oldest event in a full ring.
    next: usize,
    recorded: u64,
    options: HistoryOptions,
}

impl History {
    /// Starts the ring, or changes its options. It keeps the newest events, unless they are to be forgotten.
    pub(crate) fn start_ring(&mut self, options: HistoryOptions, forgets: bool) {
        let mut changed = EventRing::new(options);
        if let Some(ring) = self.ring.as_ref().filter(|_| !forgets) {
            let events = ring.events();
            let left_out = events.len().saturating_sub(changed.options.events_max);
            changed.events.extend_from_slice(&events[left_out..]);
            changed.recorded = ring.recorded;
        }
        self.ring = Some(changed);
    }

    /// Ends the ring. Returns whether nothing is recorded any more.
    pub(crate) fn stop_ring(&mut self) -> bool {
        self.ring = None;
        self.log.is_none()
    }

    /// Starts the log with these operations.
    pub(crate) fn start_log(&mut self, first: impl Iterator<Item = HistoryEvent>) {
        let events = Vec::with_capacity(OPERATIONS_MAX);
        self.log = Some(Operations { events, lost: 0 });
        first.for_each(|event| self.log(&event));
    }

    /// Ends the log. Returns whether nothing is recorded any more.
    pub(crate) fn stop_log(&mut self) -> bool {
        self.log = None;
        self.ring.is_none()
    }

    /// Swaps the operations of the log for `taken`, which is empty. `false`: the log is off.
    pub(crate) fn take_operations(&mut self, taken: &mut Operations) -> bool {
        self.log.as_mut().map(|log| std::mem::swap(log, taken)).is_some()
    }

    /// Adds an operation to the log, if that is on.
    #[inline]
    pub(crate) fn log(&mut self, event: &HistoryEvent) {
        if let Some(log) = &mut self.log {
            log.push(event);
        }
    }

    pub(crate) fn event_count(&self) -> usize {
        self.ring.as_ref().map_or(0, |ring| ring.events.len())
    }

    pub(crate) fn recorded(&self) -> u64 {
        self.ring.as_ref().map_or(0, |ring| ring.recorded)
    }

    pub(crate) fn events_max(&self) -> usize {
        self.ring.as_ref().map_or(0, |ring| ring.options.events_max)
    }

    /// Returns the events, oldest first.
    pub(crate) fn events(&self) -> Vec<HistoryEvent> {
        self.ring.as_ref().map(EventRing::events).unwrap_or_default()
    }

    /// Returns the allocation of the block in `slot`.
    #[inline]
    pub(crate) fn allocation(&self, slot: u32) -> Option<&HistoryEvent> {
        self.allocations.get(slot as usize)?.as_ref()
    }

    /// Records the allocation of the block in `slot`.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "half of a recorded request is calls otherwise")]
    pub(crate) fn push_allocation(&mut self, slot: u32, event: &HistoryEvent) {
        self.set_allocation(slot, event);
        self.push(event);
        if self.log.is_some() {
            self.log_block(slot, None);
        }
    }

    /// Records that something happened to the block in `slot` at this moment.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "as above")]
    pub(crate) fn push_change(&mut self, slot: u32, action: HistoryAction) {
        let allocation = self.allocations.get(slot as usize).and_then(Option::as_ref);
        let Some(allocation) = allocation else { return };
        let at_ns = now_ns();
        let is_again = matches!(action, HistoryAction::Awoke);
        let context = if is_again { allocation.context } else { CONTEXT.get() };
        if let Some(ring) = self.ring.as_mut().filter(|ring| ring.records(action)) {
            // Changed where it is kept: it is copied once.
            let event = ring.add(allocation);
            (event.at_ns, event.action, event.context) = (at_ns, action, context);
        }
        if action == HistoryAction::Freed && self.log.is_some() {
            self.log_block(slot, Some((at_ns, context)));
        }
    }

    #[inline]
    pub(crate) fn set_allocation(&mut self, slot: u32, event: &HistoryEvent) {
        if slot as usize >= self.allocations.len() {
            self.add_slots(slot);
        }
        self.allocations[slot as usize] = Some(*event);
    }

    #[cold]
    #[inline(never)]
    fn add_slots(&mut self, last: u32) {
        self.allocations.resize(last as usize + 1, None);
    }

    /// Adds the allocation of the block in `slot` to the log, or its free at that moment and in that context.
    ///
    /// The event is made anew: a caller without a log then has it in no memory but the ring's.
    #[cold]
    #[inline(never)]
    fn log_block(&mut self, slot: u32, freed: Option<(u64, u64)>) {
        let Some(&allocation) = self.allocation(slot) else { return };
        let freed = freed.map(|(at_ns, context)| HistoryEvent {
            at_ns,
            context,
            action: HistoryAction::Freed,
            ..allocation
        });
        self.log(&freed.unwrap_or(allocation));
    }

    #[inline]
    pub(crate) fn push(&mut self, event: &HistoryEvent) {
        if let Some(ring) = self.ring.as_mut().filter(|ring| ring.records(event.action)) {
            ring.add(event);
        }
    }
}

impl EventRing {
    fn new(options: HistoryOptions) -> Self {
        let events_max = options.events_max.clamp(1, HISTORY_EVENTS_MAX);
        let options = HistoryOptions { events_max, ..options };
        Self { events: Vec::with_capacity(events_max), next: 0, recorded: 0, options }
    }

    fn events(&self) -> Vec<HistoryEvent> {
        let (newer, older) = self.events.split_at(self.next);
        [older, newer].concat()
    }

    #[inline]
    const fn records(&self, action: HistoryAction) -> bool {
        self.options.skipped & action.bit() == 0
    }

    /// Adds a copy of `event`, which is returned.
    #[inline(always)]
    #[expect(clippy::inline_always, reason = "half of a recorded request is calls otherwise")]
    fn add(&mut self, event: &HistoryEvent) -> &mut HistoryEvent {
        self.recorded += 1;
        let mut at = self.events.len();
        if at < self.options.events_max {
            // Within the capacity: no memory is allocated.
            self.events.push(*event);
        } else {
            at = self.next;
            self.events[at] = *event;
            self.next += 1;
            if self.next == self.events.len() {
                self.next = 0;
            }
        }
        &mut self.events[at]
    }
}
