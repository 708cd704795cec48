//! Every call about an event can fail: nothing is lost, nothing is reused that may be in use, and
//! what stayed behind comes back once the device answers again.

use crate::common::gpu::Call;
use crate::common::{Fake, Fault, PAGE, key, ordered};
use dormouse_alloc::{
    AllocError, Allocator, Block, Freed, OutOfMemory, Request, TRIM_REFUSALS_MAX,
};
use std::sync::Arc;

/// About how many calls of a kind are made to fail, each in a run of its own.
const FAULTS_MAX: usize = 100;
const CALLS: [Call; 3] = [Call::Record, Call::Query, Call::Synchronize];

fn bytes(pages: usize) -> u64 {
    (pages * PAGE) as u64
}

fn request(stream: usize, pages: usize) -> Request {
    Request { stream: key(stream), ..Request::new(pages * PAGE) }
}

/// A block for `stream`, which must suit it, with a kernel of that stream queued on it.
fn busy_block(
    device: &Fake,
    allocator: &Allocator<Fake>,
    stream: usize,
    pages: usize,
) -> Result<Block, AllocError> {
    let block = allocator.allocate(&request(stream, pages))?;
    device.gpu().must_suit(block.range, stream);
    device.gpu().launch(stream, block.range);
    Ok(block)
}

fn free(allocator: &Allocator<Fake>, block: &Block, stream: usize) {
    assert_eq!(allocator.free(block.range.start, key(stream)).unwrap(), Freed::Done);
    allocator.check().unwrap();
}

fn out_of_memory(outcome: Result<Block, AllocError>) -> Box<OutOfMemory> {
    match outcome {
        Err(AllocError::OutOfMemory(report)) => report,
        other => panic!("{other:?}"),
    }
}

/// Shared blocks, pressure from other streams, waits: every kind of call about an event is made.
/// Returns how many requests were refused.
fn scenario(device: &Fake, allocator: &Arc<Allocator<Fake>>) -> u64 {
    let mut refused = 0;
    for step in 0..12 {
        let stream = step % 3;
        match busy_block(device, allocator, stream, 3 + step % 5) {
            Ok(block) => {
                let other = (step + 1) % 3;
                if step % 2 == 0 {
                    allocator.record_stream(block.range.start, key(other)).unwrap();
                    device.gpu().launch(other, block.range);
                }
                free(allocator, &block, stream);
            }
            Err(AllocError::OutOfMemory(report)) => {
                refused += 1;
                assert!(report.to_string().contains("device error"), "{report}");
            }
            Err(other) => panic!("{other}"),
        }
        allocator.check().unwrap();
        if step % 4 == 3 {
            device.gpu().advance(stream);
        }
    }
    // What failed once works now, and nothing was lost meanwhile.
    device.gpu().drain();
    allocator.trim(u64::MAX);
    allocator.trim(u64::MAX);
    allocator.check().unwrap();
    let stats = allocator.stats();
    assert_eq!((device.mapped_bytes(), stats.pending_blocks.current), (0, 0));
    assert_eq!((stats.segments.current, stats.active_bytes.current), (0, 0));
    assert_eq!(device.violations(), Vec::<String>::new());
    refused
}

#[test]
fn a_failed_event_call_loses_no_memory() {
    let (device, healthy) = ordered(512, 12, 3);
    assert_eq!(scenario(&device, &healthy), 0);
    let calls = CALLS.map(|call| (call, device.gpu().calls(call)));
    assert!(healthy.stats().stream_waits > 0, "the scenario never waits");
    for (call, times) in calls {
        assert!(times > 3, "{call:?} {times} times");
        for at in (0..times).step_by(1 + times as usize / FAULTS_MAX) {
            let (device, allocator) = ordered(512, 12, 3);
            device.gpu().fail(call, at);
            scenario(&device, &allocator);
            assert_eq!(allocator.stats().event_refusals, 1, "{call:?} {at}");
        }
    }
}

#[test]
fn a_failed_event_is_recorded_later() {
    let (device, allocator) = ordered(512, 20, 2);
    let block = busy_block(&device, &allocator, 0, 10).unwrap();
    device.gpu().drain();
    device.gpu().launch(1, block.range);
    device.gpu().set_captured(1, true);
    free(&allocator, &block, 1);
    // The work is over, but this cannot be queried: the block stays pending.
    device.gpu().drain();
    let other = busy_block(&device, &allocator, 0, 10).unwrap();
    assert_ne!(other.range, block.range);
    let report = out_of_memory(busy_block(&device, &allocator, 0, 10));
    assert_eq!((report.stats.pending_bytes.current, report.awake_bytes()), (bytes(10), bytes(10)));
    let text = report.to_string();
    assert!(text.contains("in use by streams 40.0 KiB"), "{text}");
    assert!(text.contains("device error") && text.contains("being captured"), "{text}");
    assert!(text.lines().count() <= 12, "{text}");
    device.gpu().set_captured(1, false);
    let again = busy_block(&device, &allocator, 0, 10).unwrap();
    assert_eq!(again.range, block.range);
    allocator.check().unwrap();
}

/// What is freed during a capture stays mapped; what other streams freed before leaves.
#[test]
fn a_captured_stream_keeps_its_pages() {
    let (device, allocator) = ordered(512, 30, 3);
    let blocks: Vec<Block> =
        (0..2).map(|stream| busy_block(&device, &allocator, stream, 15).unwrap()).collect();
    device.gpu().drain();
    free(&allocator, &blocks[1], 1);
    // All streams are found idle behind this free.
    assert_eq!(allocator.trim(bytes(1)), bytes(1));
    device.gpu().set_captured(0, true);
    free(&allocator, &blocks[0], 0);
    busy_block(&device, &allocator, 2, 15).unwrap();
    let records = device.gpu().calls(Call::Record);
    out_of_memory(busy_block(&device, &allocator, 2, 15));
    // A stream that cannot be waited for is not tried again and again.
    assert!(device.gpu().calls(Call::Record) - records < 16);
    assert_eq!(allocator.stats().cached_bytes.current, bytes(15));
    // Capturing is no reason not to reuse in the order of the same stream.
    assert_eq!(busy_block(&device, &allocator, 0, 15).unwrap().range, blocks[0].range);
    allocator.check().unwrap();
}

#[test]
fn a_lost_device_frees_nothing_and_the_loss_is_reported() {
    let (device, allocator) = ordered(512, 20, 3);
    let cached = busy_block(&device, &allocator, 0, 10).unwrap();
    let shared = busy_block(&device, &allocator, 0, 10).unwrap();
    device.gpu().launch(1, shared.range);
    free(&allocator, &cached, 0);
    device.gpu().set_lost(true);
    free(&allocator, &shared, 1);
    let mapped_bytes = device.mapped_bytes();
    let report = out_of_memory(busy_block(&device, &allocator, 2, 10));
    assert!(report.to_string().contains("device is lost"), "{report}");
    assert_eq!(report.stats.pending_bytes.current, bytes(10));
    assert!(matches!(allocator.reserve_awake(bytes(10)), Err(AllocError::NoRoom { .. })));
    assert_eq!(allocator.trim(u64::MAX), 0);
    allocator.set_budget(bytes(15)).unwrap();
    allocator.set_budget(bytes(20)).unwrap();
    allocator.check().unwrap();
    assert_eq!((device.mapped_bytes(), allocator.stats().stream_waits), (mapped_bytes, 0));
    device.gpu().set_lost(false);
    assert_eq!(allocator.trim(u64::MAX), bytes(20));
    allocator.check().unwrap();
}

#[test]
fn an_allocator_dropped_with_a_lost_device_leaves_its_pages_alone() {
    let (device, allocator) = ordered(512, 20, 2);
    let blocks = [10, 5].map(|pages| busy_block(&device, &allocator, 0, pages).unwrap());
    free(&allocator, &blocks[0], 0);
    free(&allocator, &blocks[1], 1);
    device.gpu().set_lost(true);
    drop(allocator);
    assert_eq!(device.mapped_bytes(), bytes(15));
}

/// Wherever pages cannot be had from one stream, those must do that were freed before it went silent.
#[test]
fn a_stream_without_answer_does_not_block_the_trim_of_others() {
    for is_pending in [false, true] {
        let (device, allocator) = ordered(512, 30, 3);
        let silent = busy_block(&device, &allocator, 0, 15).unwrap();
        let other = busy_block(&device, &allocator, 1, 15).unwrap();
        device.gpu().launch(2, other.range);
        free(&allocator, &other, if is_pending { 2 } else { 1 });
        device.gpu().drain();
        // All streams are found idle behind this free.
        assert_eq!(allocator.trim(bytes(1)), bytes(1));
        device.gpu().set_captured(0, true);
        free(&allocator, &silent, 0);
        let again = busy_block(&device, &allocator, 2, 15).unwrap();
        assert_ne!(again.range.start, silent.range.start);
        allocator.check().unwrap();
    }
    let (device, allocator) = ordered(512, 30, 3);
    let silent = busy_block(&device, &allocator, 0, 15).unwrap();
    let pending = busy_block(&device, &allocator, 1, 15).unwrap();
    device.gpu().launch(2, pending.range);
    free(&allocator, &silent, 0);
    free(&allocator, &pending, 2);
    device.gpu().set_captured(0, true);
    // Work that stream 0 had queued before may read what another stream freed.
    out_of_memory(busy_block(&device, &allocator, 2, 15));
    assert!(allocator.stats().stream_waits > 0);
    device.gpu().set_captured(0, false);
    busy_block(&device, &allocator, 2, 15).unwrap();
    assert_eq!(device.violations(), Vec::<String>::new());
}

/// A stream that was destroyed is not waited for, and keeps its own pages, until the device knows its handle again.
#[test]
fn a_stream_that_is_gone_does_not_hold_up_the_pages_of_others() {
    let (device, allocator) = ordered(512, 100, 2);
    let blocks: Vec<Block> =
        (0..2).map(|stream| busy_block(&device, &allocator, stream, 10).unwrap()).collect();
    device.gpu().drain();
    (0..2).for_each(|stream| free(&allocator, &blocks[stream], stream));
    device.gpu().set_destroyed(0, true);
    assert_eq!(allocator.trim(u64::MAX), bytes(10));
    assert_eq!(allocator.stats().cached_bytes.current, bytes(10));
    device.gpu().set_destroyed(0, false);
    assert_eq!(allocator.trim(u64::MAX), bytes(10));
    allocator.check().unwrap();
}

/// Nor the pages of a closed arena that it has no part in. Those that it has are held up, and no others.
#[test]
fn a_stream_that_is_gone_holds_up_only_arenas_of_its_own() {
    let (device, allocator) = ordered(512, 100, 3);
    let arenas = [[0, 1], [0, 2]].map(|streams| {
        let arena = allocator.arena_create_kept().unwrap();
        for stream in streams {
            let request = Request { arena: Some(arena), ..request(stream, 10) };
            let block = allocator.allocate(&request).unwrap();
            device.gpu().launch(stream, block.range);
            free(&allocator, &block, stream);
        }
        arena
    });
    device.gpu().drain();
    device.gpu().set_destroyed(2, true);
    arenas.into_iter().for_each(|arena| allocator.arena_close(arena));
    allocator.trim(u64::MAX);
    let stats = allocator.stats();
    assert_eq!((device.mapped_bytes(), stats.arenas.current), (bytes(20), 1));
    allocator.trim(u64::MAX);
    assert_eq!(device.mapped_bytes(), bytes(20), "nothing tells when its last work is over");
    device.gpu().set_destroyed(2, false);
    allocator.trim(u64::MAX);
    assert_eq!((device.mapped_bytes(), allocator.stats().arenas.current), (0, 0));
    allocator.check().unwrap();
    assert_eq!(device.violations(), Vec::<String>::new());
}

/// A replay that was queued before the close is waited for.
#[test]
fn a_stream_that_is_known_again_is_waited_for_at_the_close() {
    let (device, allocator) = ordered(512, 100, 2);
    let arena = allocator.arena_create_kept().unwrap();
    let block = allocator.allocate(&Request { arena: Some(arena), ..request(0, 10) }).unwrap();
    free(&allocator, &block, 0);
    device.gpu().set_destroyed(1, true);
    allocator.trim(u64::MAX);
    device.gpu().set_destroyed(1, false);
    device.gpu().launch(1, block.range);
    allocator.arena_close(arena);
    allocator.trim(u64::MAX);
    assert_eq!((device.gpu().queued(1), device.mapped_bytes()), (0, 0));
    assert_eq!(device.violations(), Vec::<String>::new());
}

/// A block that it used has no known end, others have.
#[test]
fn a_stream_that_is_gone_holds_up_only_the_uses_of_its_blocks() {
    let (device, allocator) = ordered(512, 100, 3);
    let [own, shared, other] =
        [2, 0, 1].map(|stream| busy_block(&device, &allocator, stream, 10).unwrap());
    allocator.record_stream(shared.range.start, key(2)).unwrap();
    device.gpu().set_destroyed(2, true);
    let end = allocator.uses_end(&[own.id, shared.id, other.id]).unwrap();
    assert_eq!(end.without_end, [own.id, shared.id]);
    assert_eq!(end.events.iter().map(|event| event.stream).collect::<Vec<_>>(), [0, 1]);
    // A refusal that may end, of a stream that is there, is an error as before.
    device.gpu().set_captured(1, true);
    assert!(matches!(allocator.uses_end(&[own.id, other.id]), Err(AllocError::Device(_))));
}

/// A new stream has the handle of one that is gone. What it reads stays, also where all other streams are through.
#[test]
fn a_stream_with_the_handle_of_one_that_is_gone_is_asked() {
    let (device, allocator) = ordered(512, 100, 3);
    let [read, first, second, gone] =
        [0, 1, 0, 2].map(|stream| busy_block(&device, &allocator, stream, 10).unwrap());
    device.gpu().drain();
    free(&allocator, &gone, 2);
    device.gpu().set_destroyed(2, true);
    assert_eq!(allocator.trim(u64::MAX), 0, "its own pages stay");
    device.gpu().set_destroyed(2, false);
    device.gpu().launch(2, read.range);
    free(&allocator, &read, 0);
    // Streams 0 and 1 are known to be through with that free, once the events of these uses are complete.
    free(&allocator, &first, 0);
    free(&allocator, &second, 1);
    assert_eq!(allocator.trim(u64::MAX), bytes(40));
    assert_eq!((allocator.stats().stream_waits, device.gpu().queued(2)), (1, 0));
    assert_eq!(device.violations(), Vec::<String>::new());
}

/// Ranges share the events of one look, but not the limit of what may be refused.
#[test]
fn a_trim_ends_at_the_limit_of_failures_and_restores_the_rest() {
    let (device, allocator) = ordered(512, 100, 1);
    let blocks: Vec<Block> =
        (0..20).map(|_| busy_block(&device, &allocator, 0, 3).unwrap()).collect();
    device.gpu().drain();
    for block in blocks.iter().step_by(2) {
        free(&allocator, block, 0);
    }
    for call in 0..100 {
        device.fail_unmap(call, Fault::Refused);
    }
    assert_eq!(allocator.trim(u64::MAX), 0);
    // Once for what is quiet, and once more with patience.
    assert_eq!(allocator.stats().unmap_refusals, 2 * TRIM_REFUSALS_MAX as u64);
    assert_eq!(allocator.stats().cached_bytes.current, bytes(30));
    allocator.check().unwrap();
}
