//! Streams, events, copies, callbacks.

use std::ptr::null_mut;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::bench::{Bench, pattern};
use crate::{Device, Hold};

/// More than any queue holds.
const MANY: usize = 3000;
/// How often a thing that must not happen is looked for.
const LOOKS: usize = 2000;
/// How long a thing that must happen may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// Puts work on `stream` that does not end before the sender says so or is dropped.
fn hold<D: Hold>(device: &D, stream: &D::Stream) -> Sender<()> {
    let (sender, receiver): (_, Receiver<()>) = channel();
    let wait = Box::new(move || {
        let _ = receiver.recv();
    });
    device.hold(stream, wait).unwrap();
    sender
}

/// Adds `what` to the list when `stream` gets there.
fn note<D: Device>(device: &D, stream: &D::Stream, list: &Arc<Mutex<Vec<u32>>>, what: u32) {
    let list = Arc::clone(list);
    device.callback(stream, Box::new(move |_| list.lock().unwrap().push(what))).unwrap();
}

/// Asserts that the list comes to be `expected`: a callback may run a little after what comes
/// behind it in its stream.
fn comes_to_be(list: &Arc<Mutex<Vec<u32>>>, expected: &[u32]) {
    let start = Instant::now();
    while list.lock().unwrap().len() < expected.len() && start.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
    assert_eq!(*list.lock().unwrap(), expected);
}

pub(super) fn work_runs_in_order<D: Hold>(bench: &Bench<D>) {
    let device = &bench.device;
    let first = bench.mapped(0, 2, 91);
    let second = bench.mapped(2, 2, 92);
    let third = bench.mapped(4, 2, 93);
    let list = Arc::default();
    let go = hold(device, &bench.stream);
    // SAFETY: the ranges stay mapped and unused until the event below is complete.
    unsafe {
        device.copy(third.start, second.start, second.bytes, &bench.stream).unwrap();
        note(device, &bench.stream, &list, 1);
        device.copy(second.start, first.start, first.bytes, &bench.stream).unwrap();
        note(device, &bench.stream, &list, 2);
        device.copy(first.start, third.start, 0, &bench.stream).unwrap();
    }
    let done = device.record(&bench.stream).unwrap();
    assert_eq!(device.query(&done), Ok(false), "work before it is held up");
    drop(go);
    device.synchronize(&done).unwrap();
    comes_to_be(&list, &[1, 2]);
    bench.assert_holds(first, 91);
    bench.assert_holds(second, 91);
    bench.assert_holds(third, 92);
}

pub(super) fn an_event_completes_when_reached<D: Hold>(bench: &Bench<D>) {
    let device = &bench.device;
    let go = hold(device, &bench.stream);
    let event = device.record(&bench.stream).unwrap();
    let same = event.clone();
    for _ in 0..LOOKS {
        assert_eq!(device.query(&event), Ok(false));
    }
    let brief = Duration::from_millis(1);
    assert_eq!(device.synchronize_within(&event, brief), Ok(false), "it is held up");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| device.synchronize(&same));
        let other = scope.spawn(|| device.synchronize_within(&same, PATIENCE));
        drop(go);
        waiter.join().unwrap().unwrap();
        assert_eq!(other.join().unwrap(), Ok(true));
    });
    assert_eq!(device.query(&event), Ok(true));
    assert_eq!(device.synchronize_within(&event, Duration::ZERO), Ok(true));
    device.synchronize(&event).unwrap();
    // A complete event delays no stream.
    device.wait(&bench.stream, &event).unwrap();
    device.synchronize(&device.record(&bench.stream).unwrap()).unwrap();
}

pub(super) fn streams_wait_for_each_other<D: Hold>(bench: &Bench<D>) {
    let device = &bench.device;
    let (ahead, behind) = (&bench.stream, device.create_stream("behind").unwrap());
    let (of_ahead, of_behind) = (Arc::default(), Arc::default());
    let go = hold(device, ahead);
    note(device, ahead, &of_ahead, 1);
    let reached = device.record(ahead).unwrap();
    device.wait(&behind, &reached).unwrap();
    note(device, &behind, &of_behind, 2);
    let done = device.record(&behind).unwrap();
    for _ in 0..LOOKS {
        assert_eq!(device.query(&done), Ok(false), "it waits for a stream that is held up");
        assert!(of_behind.lock().unwrap().is_empty(), "its callback came too early");
        std::thread::yield_now();
    }
    // Work given to a stream after the event does not hold up who waits for the event.
    let later = hold(device, ahead);
    drop(go);
    device.synchronize(&done).unwrap();
    comes_to_be(&of_ahead, &[1]);
    comes_to_be(&of_behind, &[2]);
    drop(later);
}

pub(super) fn the_null_stream_takes_part<D: Hold>(bench: &Bench<D>) {
    let device = &bench.device;
    // SAFETY: NULL is a stream of every device.
    let null = unsafe { device.foreign_stream(null_mut()).unwrap() };
    let range = bench.mapped(0, 2, 95);
    let copy = bench.mapped(2, 2, 96);
    let (of_stream, of_null) = (Arc::default(), Arc::default());
    note(device, &bench.stream, &of_stream, 1);
    let reached = device.record(&bench.stream).unwrap();
    device.wait(&null, &reached).unwrap();
    note(device, &null, &of_null, 2);
    // SAFETY: the ranges stay mapped, and nothing else uses them.
    unsafe { device.copy(copy.start, range.start, range.bytes, &null).unwrap() };
    device.synchronize(&device.record(&null).unwrap()).unwrap();
    comes_to_be(&of_stream, &[1]);
    comes_to_be(&of_null, &[2]);
    bench.assert_holds(copy, 95);
}

pub(super) fn more_work_than_a_queue_holds_is_done<D: Hold>(bench: &Bench<D>) {
    let device = &bench.device;
    let next = Arc::new(AtomicUsize::new(0));
    for number in 0..MANY {
        let next = Arc::clone(&next);
        let work = move |_| {
            // Out of order, the count stops short.
            let _ = next.compare_exchange(number, number + 1, Ordering::Relaxed, Ordering::Relaxed);
        };
        device.callback(&bench.stream, Box::new(work)).unwrap();
    }
    let start = Instant::now();
    while next.load(Ordering::Relaxed) < MANY && start.elapsed() < PATIENCE {
        std::thread::yield_now();
    }
    assert_eq!(next.load(Ordering::Relaxed), MANY);
}

pub(super) fn a_dropped_stream_finishes_its_work<D: Hold>(bench: &Bench<D>) {
    let device = &bench.device;
    let stream = device.create_stream("short").unwrap();
    let range = bench.mapped(0, 1, 97);
    let copy = bench.mapped(1, 1, 98);
    let go = hold(device, &stream);
    // SAFETY: the ranges stay mapped and unused until the event is complete.
    unsafe { device.copy(copy.start, range.start, range.bytes, &stream).unwrap() };
    let done = device.record(&stream).unwrap();
    assert_eq!(device.query(&done), Ok(false));
    // Its drop may wait for the work, so the work is let go first.
    drop(go);
    drop(stream);
    device.synchronize(&done).unwrap();
    assert!(bench.read(copy) == pattern(range.bytes, 97));
}
