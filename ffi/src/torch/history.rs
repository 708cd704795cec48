//! PyTorch's memory history (`torch.cuda.memory._record_memory_history`), recorded by the allocator of each GPU.
//!
//! Requests load whether it is on together with what they load anyhow ([`request_flags`]); only then is anything here
//! called. The context of an event is two numbers: the Python stack and the text that the thread has set.

use std::cell::Cell;
use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, AtomicI32, Ordering};

use dormouse_alloc::{HISTORY_EVENTS_MAX, HistoryOptions, set_context};
use dormouse_device::sync::Mutex;

use super::python;
use super::request_flags;
use crate::device::GPUS_MAX;
use crate::fault::Fault;
use crate::heap::Heap;
use crate::stderr::guarded;

/// What is recorded; `None`: nothing.
static OPTIONS: Mutex<Option<HistoryOptions>> = Mutex::new(None);
/// By GPU: its allocator records.
static RECORDS: [AtomicBool; GPUS_MAX] = [const { AtomicBool::new(false) }; GPUS_MAX];
static STACKS: AtomicI32 = AtomicI32::new(Stacks::None as i32);

thread_local! {
    /// Number of the text that this thread has set; 0: none. No destructor: threads may free late.
    static TEXT: Cell<u32> = const { Cell::new(0) };
}

/// The events that have a Python stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Stacks {
    None = 0,
    Allocations = 1,
    All = 2,
}

/// `dormouse_torch_record_history`.
pub(crate) fn start(
    events_max: u64,
    skipped: u32,
    stacks: Stacks,
    forgets: bool,
) -> Result<(), Fault> {
    let most = HISTORY_EVENTS_MAX as u64;
    if events_max == 0 || events_max > most {
        return Err(Fault::argument(format!("events_max is {events_max}; accepted: 1 to {most}")));
    }
    let options = HistoryOptions { events_max: events_max as usize, skipped };
    let mut current = OPTIONS.lock();
    *current = Some(options);
    for heap in Heap::gpus() {
        heap.allocator().start_history(options, forgets);
        mark(heap, true);
    }
    STACKS.store(stacks as i32, Ordering::Relaxed);
    // Last: a request that sees it finds everything above.
    request_flags::set_recorded(true);
    Ok(())
}

/// `dormouse_torch_record_history` with 0 events.
pub(crate) fn stop() {
    let mut current = OPTIONS.lock();
    *current = None;
    request_flags::set_recorded(false);
    STACKS.store(Stacks::None as i32, Ordering::Relaxed);
    for heap in Heap::gpus() {
        heap.allocator().stop_history();
        mark(heap, false);
    }
}

fn mark(heap: &Heap, records: bool) {
    let (_, ordinal) = heap.device();
    if let Some(flag) = RECORDS.get(ordinal as usize) {
        flag.store(records, Ordering::Relaxed);
    }
}

/// Starts the history of a GPU whose heap is younger than the call that asked for it.
pub(super) fn join(heap: &Heap) {
    let (_, ordinal) = heap.device();
    let records = RECORDS.get(ordinal as usize).is_none_or(|flag| flag.load(Ordering::Relaxed));
    if records {
        return;
    }
    let current = OPTIONS.lock();
    if let Some(options) = *current {
        heap.allocator().start_history(options, false);
        mark(heap, true);
    }
}

/// Makes the context of this thread that of the allocation to come.
pub(super) fn enter_allocation() -> Context {
    enter(Stacks::Allocations)
}

/// Makes the context of this thread that of the free to come.
pub(super) fn enter_free() -> Context {
    enter(Stacks::All)
}

/// Ends the context of its thread when it is dropped: what the thread does next is no request.
#[must_use = "the context ends with it"]
pub(super) struct Context(u64);

impl Drop for Context {
    fn drop(&mut self) {
        if self.0 != 0 {
            set_context(0);
        }
    }
}

#[inline(always)]
#[expect(clippy::inline_always, reason = "a tenth of a recorded request is calls of it otherwise")]
fn enter(least: Stacks) -> Context {
    let has_stack = STACKS.load(Ordering::Relaxed) >= least as i32;
    let stack = if has_stack { python::stack() } else { 0 };
    let context = u64::from(TEXT.get()) << 32 | u64::from(stack);
    if context != 0 {
        set_context(context);
    }
    Context(context)
}

/// Returns the numbers of the stack and of the text in a context.
pub(crate) const fn parts(context: u64) -> (u32, u32) {
    (context as u32, (context >> 32) as u32)
}

/// `dormouse_torch_set_metadata`.
pub(crate) fn set_text(number: u32) {
    TEXT.set(number);
}

/// `dormouse_torch_annotate`.
pub(crate) fn annotate(pointer: *const c_void, number: u32) {
    let before = TEXT.replace(number);
    guarded("annotate", || {
        if let Some(heap) = Heap::gpu_around(pointer.addr()) {
            let _context = enter_allocation();
            heap.allocator().annotate(pointer.addr());
        }
        Ok(())
    });
    TEXT.set(before);
}

/// Records that a request of `bytes` found no memory.
pub(super) fn note_out_of_memory(heap: &Heap, bytes: usize) {
    let allocator = heap.allocator();
    let stats = allocator.stats();
    let free_bytes = stats.budget_bytes.saturating_sub(stats.mapped_bytes.current);
    allocator.note_out_of_memory(bytes as u64, usize::try_from(free_bytes).unwrap_or(usize::MAX));
}
