//! The memory history of GPUs (`torch.cuda.memory._record_memory_history`), and what is mapped.

use std::collections::HashMap;
use std::ffi::{c_char, c_int, c_void};
use std::ptr::with_exposed_provenance_mut;

use dormouse_alloc::{ArenaId, HistoryAction, HistoryEvent, MappedRange, RangeUse};
use dormouse_offload::{TagId, Tier};
use dormouse_timeline::ClockAnchor;

use super::c::*;
use crate::boundary::{Elements, Out, enter};
use crate::fault::Fault;
use crate::heap::Heap;
use crate::status::{DORMOUSE_ERR_LIMIT, DORMOUSE_ERR_UNSUPPORTED, dormouse_status_t};
use crate::torch::history::{self, Stacks};
use crate::torch::python::{self, Frame};
use crate::torch::{captures, observer};
use crate::{convert, fork};

/// Records the history of all GPUs: the newest `events_max` events, none if it is 0, and their history is forgotten.
/// `skipped` has bit `n` set for each `DORMOUSE_ACTION_*` n that is not recorded. `stacks` is 0 for events without a
/// Python stack, 1 for stacks of allocations, 2 for stacks of frees too; stacks take Python's global lock at each
/// event. `forgets` is 1 to forget earlier events. While it records, small blocks take a lock too.
///
/// Any-thread. Errors: `ARGUMENT`; `UNSUPPORTED` for stacks in a process without CPython 3.11 or later.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_record_history(
    events_max: u64,
    skipped: u32,
    stacks: c_int,
    forgets: c_int,
) -> dormouse_status_t {
    enter(|| {
        if events_max == 0 {
            history::stop();
            return Ok(());
        }
        let stacks = match stacks {
            0 => Stacks::None,
            1 => Stacks::Allocations,
            2 => Stacks::All,
            _ => return Err(Fault::argument(format!("stacks is {stacks}; accepted: 0 to 2"))),
        };
        if stacks != Stacks::None && !python::is_readable() {
            return Err(Fault::new(
                DORMOUSE_ERR_UNSUPPORTED,
                "this process has no CPython 3.11 or later, whose stacks could be read",
            ));
        }
        history::start(events_max, skipped, stacks, forgets != 0)
    })
}

/// Returns what is mapped on GPU `device`, by segment and address, and the events of its history, oldest first: undone
/// from the newest on, they lead from these ranges to those of the oldest event. The last event is this reading.
/// `tier` is `DORMOUSE_TIER_DEVICE`; with `_HOST` or `_NVME` it is what that tier holds of the GPU's sleeping memory.
/// Addresses of the NVMe tier are offsets in its file.
///
/// `history_out` receives the figures. `ranges` and `events` receive the elements if both capacities are enough;
/// otherwise they are unchanged. Each may be NULL: without `events` there is no event of this reading.
///
/// Any-thread; requests of the GPU wait meanwhile. The caller owns the arrays. Errors: `NULL`, `VERSION`, `ARGUMENT`
/// for a device without a heap, `LIMIT` if an array is too small (`history_out` is written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_get_history(
    device: i32,
    tier: i32,
    history_out: *mut dormouse_memory_history_t,
    ranges: *mut dormouse_range_t,
    range_capacity: u64,
    events: *mut dormouse_memory_event_t,
    event_capacity: u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let (out, ranges, events) = unsafe {
            (
                Out::sized(history_out, "history_out")?,
                Elements::new(ranges, range_capacity, "ranges")?,
                Elements::new(events, event_capacity, "events")?,
            )
        };
        let heap = Heap::existing_gpu(device)?;
        let (allocator, with_events) = (heap.allocator(), events.is_wanted());
        let reading = match convert::tier(tier)? {
            Tier::Device => allocator.read_memory(with_events),
            Tier::Host => allocator.host_tier().read(with_events),
            Tier::Nvme => allocator.file_tier().read(with_events),
        };
        let (range_count, event_count) = (reading.ranges.len() as u64, reading.event_count as u64);
        out.fill(dormouse_memory_history_t {
            range_count,
            event_count,
            recorded_count: reading.recorded,
            events_max: reading.events_max as u64,
            ..dormouse_memory_history_t::default()
        });
        if ranges.is_short_of(range_count) || events.is_short_of(event_count) {
            return Err(Fault::new(
                DORMOUSE_ERR_LIMIT,
                format!(
                    "capacities are {range_capacity} and {event_capacity}; accepted: at least \
                     {range_count} and {event_count}"
                ),
            ));
        }
        let mut pools = Pools { heap, known: HashMap::new() };
        let clock = ClockAnchor::now();
        let all_ranges: Vec<_> = reading.ranges.iter().map(|it| range_of(it, &mut pools)).collect();
        let all_events: Vec<_> =
            reading.events.iter().map(|it| event_of(it, &clock, &mut pools)).collect();
        ranges.write(&all_ranges)?;
        events.write(&all_events)
    })
}

/// Returns the frames of all Python stacks in histories. `count_out` receives their number; `frames` receives them if
/// `capacity` elements are enough, and may be NULL to query the number. They stay, and more may come.
///
/// Any-thread. The caller owns the array. Errors: `NULL`, `LIMIT` if the array is too small (`count_out` is written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_get_frames(
    frames: *mut dormouse_frame_t,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let (count, frames) = unsafe {
            (Out::new(count_out, "count_out")?, Elements::new(frames, capacity, "frames")?)
        };
        let frame = |Frame { code, offset, caller }| dormouse_frame_t {
            code: with_exposed_provenance_mut(code),
            offset,
            caller,
        };
        let all: Vec<_> = python::frames().into_iter().map(frame).collect();
        count.array(&all, &frames)
    })
}

/// Returns the name of tag `tag` of the runtime of GPU `device`, as ranges and events name it by number. `count_out`
/// receives the length with its NUL, 1 for a tag that was destroyed; `text` receives the name if `capacity` bytes are
/// enough, and may be NULL to query the length.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `ARGUMENT` for a device without a heap, `LIMIT`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_torch_get_tag_name(
    device: i32,
    tag: u32,
    text: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let count = unsafe { Out::new(count_out, "count_out")? };
        let engine = Heap::existing_gpu(device)?.engine();
        let name = engine.and_then(|engine| engine.tag_name(TagId(tag))).unwrap_or_default();
        // SAFETY: as above: `text` is NULL or writable for `capacity` bytes.
        unsafe { count.text(name, text, capacity) }
    })
}

/// Sets the number that events of the calling thread carry in `metadata`; 0 at first. The caller keeps what it stands
/// for.
///
/// Any-thread. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_set_metadata(number: u32) {
    history::set_text(number);
}

/// Records a remark on the block around `ptr`: an event with `number` in `metadata`. Nothing happens while no history is
/// recorded, or if no live block contains `ptr`.
///
/// Any-thread. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_annotate(ptr: *const c_void, number: u32) {
    if !fork::in_child() {
        history::annotate(ptr, number);
    }
}

/// Has `observer` called where a request of `dormouse_torch_malloc` finds no memory, before its exception. NULL: none.
/// It may call any function of this header, and must return: no exception or `longjmp` may leave it.
///
/// Any-thread. Never fails.
#[unsafe(no_mangle)]
pub extern "C" fn dormouse_torch_set_out_of_memory_observer(observer: dormouse_out_of_memory_fn) {
    observer::set(observer);
}

/// Ids of the pools of CUDA graphs, by arena.
struct Pools {
    heap: &'static Heap,
    known: HashMap<ArenaId, (u64, u64)>,
}

impl Pools {
    /// Returns the id of the pool of an arena; zeros for no arena, a layer's, or one that was released.
    fn id_of(&mut self, arena: Option<ArenaId>) -> (u64, u64) {
        let Some(arena) = arena else { return (0, 0) };
        let find = || captures::pool_of(self.heap, arena).unwrap_or_default();
        *self.known.entry(arena).or_insert_with(find)
    }
}

fn range_of(range: &MappedRange, pools: &mut Pools) -> dormouse_range_t {
    let (pool_first, pool_second) = pools.id_of(range.arena);
    let (stack, metadata) = history::parts(range.context);
    dormouse_range_t {
        address: range.range.start as u64,
        bytes: range.range.bytes as u64,
        requested_bytes: range.requested_bytes,
        stream: range.stream,
        scope: range.scope,
        pool_first,
        pool_second,
        usage: match range.usage {
            RangeUse::Free => DORMOUSE_USE_FREE,
            RangeUse::Allocated => DORMOUSE_USE_ALLOCATED,
            RangeUse::PendingFree => DORMOUSE_USE_PENDING_FREE,
        },
        segment: range.segment,
        tag: range.tag,
        stack,
        metadata,
        is_small: range.is_small.into(),
    }
}

fn event_of(
    event: &HistoryEvent,
    clock: &ClockAnchor,
    pools: &mut Pools,
) -> dormouse_memory_event_t {
    let (pool_first, pool_second) = pools.id_of(event.arena);
    let (stack, metadata) = history::parts(event.context);
    dormouse_memory_event_t {
        unix_ns: clock.unix_ns(event.at_ns),
        address: event.address as u64,
        bytes: event.bytes,
        stream: event.stream,
        scope: event.scope,
        pool_first,
        pool_second,
        action: match event.action {
            HistoryAction::Allocated => DORMOUSE_ACTION_ALLOCATED,
            HistoryAction::Freed => DORMOUSE_ACTION_FREED,
            HistoryAction::FreeRequested => DORMOUSE_ACTION_FREE_REQUESTED,
            HistoryAction::FreeCompleted => DORMOUSE_ACTION_FREE_COMPLETED,
            HistoryAction::Mapped => DORMOUSE_ACTION_MAPPED,
            HistoryAction::Unmapped => DORMOUSE_ACTION_UNMAPPED,
            HistoryAction::FellAsleep => DORMOUSE_ACTION_FELL_ASLEEP,
            HistoryAction::Awoke => DORMOUSE_ACTION_AWOKE,
            HistoryAction::OutOfMemory => DORMOUSE_ACTION_OUT_OF_MEMORY,
            HistoryAction::Read => DORMOUSE_ACTION_READ,
            HistoryAction::Annotated => DORMOUSE_ACTION_ANNOTATED,
        },
        tag: event.tag,
        stack,
        metadata,
    }
}
