//! The history by hand; `packed_model` and `stream_model` undo it after every random operation.

use crate::common::{Fake, PAGE, key, ordered, uncounted};
use dormouse_alloc::HistoryAction::{
    Allocated, Annotated, Awoke, FellAsleep, FreeCompleted, FreeRequested, Freed, Mapped,
    OutOfMemory, Read, Unmapped,
};
use dormouse_alloc::{
    Allocator, Config, Freed as Outcome, HistoryAction, HistoryEvent, HistoryOptions, Margin,
    OPERATIONS_MAX, Operations, RangeUse, Request, ThreadShard, set_context,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

const ALL: HistoryOptions = HistoryOptions { events_max: 64, skipped: 0 };

fn actions(allocator: &Allocator<Fake>) -> Vec<HistoryAction> {
    events(allocator).iter().map(|it| it.action).collect()
}

/// The events but those of readings.
fn events(allocator: &Allocator<Fake>) -> Vec<HistoryEvent> {
    let events = allocator.read_memory(true).events;
    assert_eq!(events.last().map(|it| it.action), Some(Read));
    events.into_iter().filter(|it| it.action != Read).collect()
}

fn request(bytes: usize) -> Request {
    Request { stream: key(0), ..Request::new(bytes) }
}

#[test]
fn off_it_keeps_nothing_and_a_reading_has_the_ranges() {
    let (_, allocator) = ordered(64, 32, 1);
    let block = allocator.allocate(&request(PAGE)).unwrap();
    let reading = allocator.read_memory(true);
    assert_eq!((reading.events.len(), reading.recorded, reading.events_max), (0, 0, 0));
    let used: Vec<_> = reading.ranges.iter().filter(|it| it.usage == RangeUse::Allocated).collect();
    assert_eq!((used.len(), used[0].range, used[0].requested_bytes), (1, block.range, PAGE as u64));
    assert_eq!(allocator.free(block.range.start, key(0)).unwrap(), Outcome::Done);
    assert!(allocator.read_memory(true).ranges.iter().all(|it| it.usage == RangeUse::Free));
}

#[test]
fn a_block_comes_with_its_pages_and_goes_before_them() {
    let (_, allocator) = ordered(64, 32, 1);
    allocator.start_history(ALL, false);
    set_context(7);
    let tagged = Request { scope: 3, tag: 5, ..request(PAGE + 1) };
    let block = allocator.allocate(&tagged).unwrap();
    set_context(8);
    assert_eq!(allocator.free(block.range.start, key(0)).unwrap(), Outcome::Done);
    set_context(0);
    assert!(allocator.trim(u64::MAX) > 0);
    let events = events(&allocator);
    let seen: Vec<_> = events.iter().map(|it| (it.action, it.bytes, it.context)).collect();
    let (pages, asked) = (2 * PAGE as u64, PAGE as u64 + 1);
    assert_eq!(
        seen,
        [(Mapped, pages, 7), (Allocated, asked, 7), (Freed, asked, 8), (Unmapped, pages, 0)]
    );
    assert_eq!((events[1].scope, events[1].tag, events[1].stream), (3, 5, key(0)));
    assert!(events.iter().all(|it| it.address == block.range.start));
    assert!(events.is_sorted_by_key(|it| it.at_ns) && events[0].at_ns > 0);
    allocator.check().unwrap();
}

#[test]
fn what_another_stream_uses_is_freed_later_than_asked() {
    let (device, allocator) = ordered(64, 32, 2);
    allocator.start_history(ALL, false);
    let block = allocator.allocate(&request(PAGE)).unwrap();
    allocator.record_stream(block.range.start, key(1)).unwrap();
    device.gpu().launch(1, block.range);
    assert_eq!(allocator.free(block.range.start, key(0)).unwrap(), Outcome::Done);
    let pending = allocator.read_memory(true).ranges;
    assert_eq!(pending[0].usage, RangeUse::PendingFree);
    assert_eq!(actions(&allocator), [Mapped, Allocated, FreeRequested]);
    allocator.check().unwrap();
    device.gpu().advance(1);
    allocator.trim(0);
    let _other = allocator.allocate(&request(4 * PAGE)).unwrap();
    assert!(actions(&allocator).contains(&FreeCompleted));
    allocator.check().unwrap();
}

#[test]
fn the_oldest_events_make_room_for_the_newest() {
    let (_, allocator) = ordered(64, 32, 1);
    allocator.start_history(HistoryOptions { events_max: 5, ..ALL }, false);
    for _ in 0..9 {
        let block = allocator.allocate(&request(PAGE)).unwrap();
        let _ = allocator.free(block.range.start, key(0)).unwrap();
    }
    let reading = allocator.read_memory(true);
    // Pages once, nine pairs and the reading.
    assert_eq!((reading.recorded, reading.events.len(), reading.events_max), (20, 5, 5));
    assert_eq!(
        reading.events.iter().map(|it| it.action).collect::<Vec<_>>(),
        [Allocated, Freed, Allocated, Freed, Read]
    );
    allocator.start_history(HistoryOptions { events_max: 2, ..ALL }, false);
    let kept = allocator.read_memory(true);
    assert_eq!((kept.events.len(), kept.events_max), (2, 2));
    allocator.start_history(ALL, true);
    assert_eq!(actions(&allocator), []);
    allocator.stop_history();
    assert_eq!(allocator.read_memory(true).recorded, 0);
}

#[test]
fn skipped_actions_are_not_recorded() {
    let (_, allocator) = ordered(64, 32, 1);
    let skipped = Mapped.bit() | Freed.bit();
    allocator.start_history(HistoryOptions { skipped, ..ALL }, false);
    let block = allocator.allocate(&request(PAGE)).unwrap();
    allocator.annotate(block.range.start);
    allocator.note_out_of_memory(99, 7);
    let _ = allocator.free(block.range.start, key(0)).unwrap();
    let events = events(&allocator);
    assert_eq!(
        events.iter().map(|it| (it.action, it.bytes)).collect::<Vec<_>>(),
        [(Allocated, PAGE as u64), (Annotated, PAGE as u64), (OutOfMemory, 99)]
    );
    assert_eq!(events[2].address, 7);
}

/// The thread cache serves meanwhile, with the state locked.
#[test]
fn small_blocks_are_recorded_and_cached() {
    let config = Config {
        thread_cache: true,
        segment_bytes: 16 * PAGE,
        margin: Margin::TIGHT,
        ..Config::new(512, 64 * PAGE as u64)
    };
    let (_, allocator) = uncounted(256, config, 1, 1);
    let pair = |allocator: &Arc<Allocator<Fake>>| {
        let block = allocator.allocate(&request(700)).unwrap();
        let _ = allocator.free(block.range.start, key(0)).unwrap();
        block.range.start
    };
    let before = allocator.allocate(&request(700)).unwrap();
    pair(&allocator);
    allocator.start_history(ALL, false);
    pair(&allocator);
    pair(&allocator);
    let _ = allocator.free(before.range.start, key(0)).unwrap();
    assert_eq!(actions(&allocator), [Allocated, Freed, Allocated, Freed, Freed]);
    assert!(events(&allocator).iter().all(|it| it.bytes == 700));
    allocator.check().unwrap();
    // As PyTorch's requests come: the block that was freed last, whole, under its own number of bytes.
    let last = allocator.try_allocate(ThreadShard::current(), 690, key(0)).unwrap();
    assert_eq!(last, before.range.start);
    allocator.check().unwrap();
    let reading = allocator.read_memory(true);
    let used: Vec<_> = reading.ranges.iter().filter(|it| it.usage == RangeUse::Allocated).collect();
    assert_eq!((used.len(), used[0].range.start, used[0].requested_bytes), (1, last, 690));
    assert!(allocator.try_free(last, key(0)));
    assert_eq!(actions(&allocator)[5..], [Allocated, Freed]);
    assert!(allocator.read_memory(true).ranges.iter().all(|it| it.usage == RangeUse::Free));
    assert_eq!(allocator.stats().allocations.current, 0);
    allocator.check().unwrap();
    allocator.stop_history();
    let cached = pair(&allocator);
    assert_eq!(allocator.stats().allocations.current, 0);
    assert_eq!(pair(&allocator), cached);
    allocator.check().unwrap();
}

#[test]
fn a_sleep_takes_the_block_and_its_pages_away_and_a_wake_brings_both() {
    let (_, allocator) = ordered(64, 32, 1);
    set_context(4);
    allocator.start_history(ALL, false);
    let block = allocator.allocate(&request(2 * PAGE)).unwrap();
    set_context(0);
    let claimed = allocator.claim(block.range.start, 1).unwrap();
    allocator.set_asleep(claimed.id).unwrap();
    assert!(allocator.read_memory(true).ranges.is_empty());
    allocator.check().unwrap();
    allocator.reserve_awake(2 * PAGE as u64).unwrap();
    allocator.set_awake(claimed.id).unwrap();
    assert_eq!(actions(&allocator), [Mapped, Allocated, FellAsleep, Unmapped, Mapped, Awoke]);
    let awoke = *events(&allocator).last().unwrap();
    assert_eq!((awoke.context, awoke.bytes), (4, 2 * PAGE as u64));
    assert_eq!(allocator.read_memory(true).ranges[0].context, 4);
    allocator.check().unwrap();
    allocator.set_asleep(claimed.id).unwrap();
    assert_eq!(allocator.free(block.range.start, key(0)).unwrap(), Outcome::Claimed(1));
    allocator.finish_free(claimed.id).unwrap();
    assert_eq!(actions(&allocator)[6..], [FellAsleep, Unmapped]);
    allocator.check().unwrap();
}

/// Operations as (what, bytes), with the peak of the bytes that they leave live.
fn taken(allocator: &Allocator<Fake>, taken: &mut Operations) -> (Vec<(HistoryAction, u64)>, u64) {
    assert!(allocator.take_operations(taken));
    let (mut live, mut peak) = (0, 0);
    let mut blocks = HashMap::new();
    for event in &taken.events {
        match event.action {
            Allocated => {
                assert_eq!(blocks.insert(event.address, event.bytes), None, "{event:?}");
                live += event.bytes;
            }
            Freed => {
                assert_eq!(blocks.remove(&event.address), Some(event.bytes), "{event:?}");
                live -= event.bytes;
            }
            _ => {}
        }
        peak = peak.max(live);
    }
    let seen = taken.events.drain(..).map(|event| (event.action, event.bytes)).collect();
    (seen, peak)
}

#[test]
fn the_log_has_what_callers_asked_for_and_nothing_else() {
    let (device, allocator) = ordered(64, 32, 2);
    let before = allocator.allocate(&request(PAGE)).unwrap();
    let gone = allocator.allocate(&request(2 * PAGE)).unwrap();
    let _ = allocator.free(gone.range.start, key(0)).unwrap();
    assert!(!allocator.take_operations(&mut Operations::default()), "it is off");
    allocator.start_log();
    let sleeper = Request { whole_pages: true, ..request(3 * PAGE) };
    let sleeper = allocator.allocate(&sleeper).unwrap();
    // A sleep and a wake are no operations.
    allocator.claim(sleeper.range.start, 1).unwrap();
    device.take_pages(sleeper.range);
    allocator.set_asleep(sleeper.id).unwrap();
    allocator.reserve_awake(3 * PAGE as u64).unwrap();
    allocator.set_awake(sleeper.id).unwrap();
    assert_eq!(allocator.free(sleeper.range.start, key(0)).unwrap(), Outcome::Claimed(1));
    allocator.finish_free(sleeper.id).unwrap();
    // Another stream still uses it: the caller's free is the operation, the end of the use is not.
    let used = allocator.allocate(&request(5 * PAGE)).unwrap();
    allocator.record_stream(used.range.start, key(1)).unwrap();
    device.gpu().launch(1, used.range);
    let _ = allocator.free(used.range.start, key(0)).unwrap();
    device.gpu().advance(1);
    allocator.trim(0);
    assert!(allocator.allocate(&request(1000 * PAGE)).is_err());
    let _ = allocator.free(before.range.start, key(0)).unwrap();
    let page = PAGE as u64;
    let mut operations = Operations::default();
    let (seen, peak) = taken(&allocator, &mut operations);
    let wanted = [
        (Allocated, page),
        (Allocated, 3 * page),
        (Freed, 3 * page),
        (Allocated, 5 * page),
        (Freed, 5 * page),
        (OutOfMemory, 1000 * page),
        (Freed, page),
    ];
    assert_eq!((seen.as_slice(), peak), (&wanted[..], 6 * page));
    allocator.check().unwrap();
    allocator.stop_log();
    assert!(!allocator.take_operations(&mut operations));
}

#[test]
fn the_log_and_the_history_start_and_end_alone() {
    let (_, allocator) = ordered(64, 32, 1);
    let pair = || {
        let block = allocator.allocate(&request(PAGE)).unwrap();
        let _ = allocator.free(block.range.start, key(0)).unwrap();
    };
    let mut operations = Operations::default();
    allocator.start_history(ALL, false);
    allocator.start_log();
    pair();
    allocator.stop_history();
    pair();
    assert_eq!(taken(&allocator, &mut operations).0.len(), 4);
    assert_eq!(allocator.read_memory(true).events_max, 0);
    allocator
        .start_history(HistoryOptions { skipped: Allocated.bit() | Freed.bit(), ..ALL }, false);
    pair();
    assert_eq!(taken(&allocator, &mut operations).0.len(), 2, "what the history skips is logged");
    allocator.stop_log();
    pair();
    assert!(actions(&allocator).iter().all(|action| *action != Allocated));
    allocator.check().unwrap();
}

#[test]
fn the_log_has_the_events_of_the_history() {
    let (_, allocator) = ordered(64, 32, 1);
    allocator.start_history(ALL, false);
    allocator.start_log();
    for bytes in [PAGE, 512] {
        set_context(7);
        let block = allocator.allocate(&request(bytes)).unwrap();
        set_context(8);
        std::thread::sleep(Duration::from_micros(50));
        let _ = allocator.free(block.range.start, key(0)).unwrap();
    }
    let mut operations = Operations::default();
    assert!(allocator.take_operations(&mut operations));
    let is_operation = |it: &HistoryEvent| matches!(it.action, Allocated | Freed);
    let wanted: Vec<_> = events(&allocator).into_iter().filter(is_operation).collect();
    assert_eq!(wanted.iter().map(|it| it.context).collect::<Vec<_>>(), [7, 8, 7, 8]);
    assert!(wanted.chunks(2).all(|it| it[0].at_ns < it[1].at_ns), "{wanted:?}");
    let logged: Vec<_> =
        operations.events.iter().map(|it| HistoryEvent { thread: 0, ..*it }).collect();
    assert_eq!(logged, wanted);
    set_context(0);
}

#[test]
fn operations_that_nobody_takes_are_counted_as_lost() {
    let (_, allocator) = ordered(64, 32, 1);
    allocator.start_log();
    for _ in 0..OPERATIONS_MAX / 2 + 3 {
        let block = allocator.allocate(&request(PAGE)).unwrap();
        let _ = allocator.free(block.range.start, key(0)).unwrap();
    }
    let mut operations = Operations::default();
    assert!(allocator.take_operations(&mut operations));
    assert_eq!((operations.events.len(), operations.lost), (OPERATIONS_MAX, 6));
}

/// What lies in pages shared with neighbours is a block of the history while its block sleeps, and none of the log.
#[test]
fn parts_of_a_sleeping_block_are_no_operations() {
    let config = Config { segment_bytes: 16 * PAGE, ..Config::new(512, 64 * PAGE as u64) };
    let (_, allocator) = uncounted(256, config, 1, 1);
    allocator.start_log();
    let first = allocator.allocate(&request(2 * PAGE + 512)).unwrap();
    let sleeper = allocator.allocate(&request(3 * PAGE)).unwrap();
    let claimed = allocator.claim(sleeper.range.start, 1).unwrap();
    assert!(claimed.pages.bytes < 3 * PAGE, "it shares a page");
    allocator.set_asleep(claimed.id).unwrap();
    allocator.reserve_awake(claimed.pages.bytes as u64).unwrap();
    allocator.set_awake(claimed.id).unwrap();
    allocator.set_asleep(claimed.id).unwrap();
    assert_eq!(allocator.free(sleeper.range.start, key(0)).unwrap(), Outcome::Claimed(1));
    allocator.finish_free(claimed.id).unwrap();
    assert_eq!(allocator.free(first.range.start, key(0)).unwrap(), Outcome::Done);
    let (one, two) = (2 * PAGE as u64 + 512, 3 * PAGE as u64);
    let (seen, peak) = taken(&allocator, &mut Operations::default());
    assert_eq!(seen, [(Allocated, one), (Allocated, two), (Freed, two), (Freed, one)]);
    assert_eq!(peak, one + two);
    allocator.check().unwrap();
}
