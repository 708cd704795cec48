//! What is the host device's own: its configuration, its threads, their limits.

#![allow(clippy::unwrap_used, clippy::panic, reason = "helpers of tests")]

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};

use super::*;
use crate::QUEUE_LEN_MAX;

fn device() -> HostDevice {
    let page = os_page_bytes();
    HostDevice::new(HostConfig::new(16 * page, 8 * page as u64)).unwrap()
}

fn refused_field(config: HostConfig) -> &'static str {
    match HostDevice::new(config) {
        Err(DeviceError::BadConfig { field, .. }) => field,
        other => panic!("{config:?} gave {other:?}"),
    }
}

#[test]
fn a_bad_configuration_names_its_field() {
    let good = HostConfig::new(1 << 20, 1 << 20);
    assert_eq!(refused_field(HostConfig { reserve_bytes: 0, ..good }), "reserve_bytes");
    assert_eq!(refused_field(HostConfig { reserve_bytes: usize::MAX, ..good }), "reserve_bytes");
    assert_eq!(refused_field(HostConfig { capacity_bytes: 0, ..good }), "capacity_bytes");
    for page_bytes in [0, 1, 3 * 4096, os_page_bytes() / 2] {
        assert_eq!(refused_field(HostConfig { page_bytes, ..good }), "page_bytes");
    }
}

#[test]
fn more_addresses_than_there_are_is_refused() {
    let config = HostConfig::new(usize::MAX / 4, 1 << 20);
    match HostDevice::new(config) {
        Err(DeviceError::Refused { operation: Operation::Reserve, code, .. }) => {
            assert_eq!(code, libc::ENOMEM);
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_space_is_whole_pages_and_costs_nothing() {
    let device = HostDevice::new(HostConfig {
        reserve_bytes: (64 << 30) + 1,
        capacity_bytes: 1 << 20,
        page_bytes: 2 << 20,
    })
    .unwrap();
    assert_eq!(device.address_space().bytes, (64 << 30) + (2 << 20));
    assert!(device.address_space().start.is_multiple_of(2 << 20));
    assert_eq!(device.memory_info(), MemoryInfo { capacity_bytes: 1 << 20, ..Default::default() });
}

#[test]
fn only_null_is_a_foreign_stream() {
    let device = device();
    // SAFETY: the handle is refused unlooked at.
    match unsafe { device.foreign_stream(0x10 as *mut c_void) } {
        Err(DeviceError::ForeignStream { raw: 0x10, kind: "host", .. }) => {}
        other => panic!("{other:?}"),
    }
}

#[test]
fn a_panicking_callback_loses_the_stream_and_ends_all_waits() {
    let device = device();
    let stream = device.create_stream("panics").unwrap();
    let before = device.record(&stream).unwrap();
    device.callback(&stream, Box::new(|_| panic!("a test's own panic"))).unwrap();
    // Queued before or refused after the panic; never left waiting.
    if let Ok(after) = device.record(&stream) {
        device.synchronize(&after).unwrap();
    }
    device.synchronize(&before).unwrap();
    let lost = device.record(&stream);
    assert!(matches!(lost, Err(DeviceError::DeviceLost { .. })), "{lost:?}");
}

#[test]
fn a_full_queue_refuses_a_stream_thread() {
    let device = Arc::new(device());
    let full = device.create_stream("full").unwrap();
    let other = device.create_stream("other").unwrap();
    let (go, gate) = channel::<()>();
    let held = move |_| gate.recv().unwrap_or(());
    device.callback(&full, Box::new(held)).unwrap();
    let ran = Arc::new(AtomicUsize::new(0));
    let (report, outcome) = channel();
    let (asked, count) = (Arc::clone(&device), Arc::clone(&ran));
    let fill = full.clone();
    let ask = move |_| {
        let mut taken = 0;
        let refused = loop {
            let count = Arc::clone(&count);
            let work = move |_| count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
            match asked.callback(&fill, Box::new(work)) {
                Ok(()) => taken += 1,
                Err(error) => break error,
            }
        };
        report.send((taken, refused)).unwrap();
    };
    device.callback(&other, Box::new(ask)).unwrap();
    let (taken, refused) = outcome.recv().unwrap();
    // The held callback itself may still be in the queue.
    assert!((QUEUE_LEN_MAX - 1..=QUEUE_LEN_MAX).contains(&taken), "{taken}");
    assert!(matches!(refused, DeviceError::Refused { code: libc::EAGAIN, .. }), "{refused}");
    drop(go);
    device.synchronize(&device.record(&full).unwrap()).unwrap();
    assert_eq!(ran.load(Ordering::Relaxed), taken);
}

#[test]
fn dropping_the_device_completes_pending_work_of_living_streams() {
    let device = device();
    let stream = device.create_stream("outlives").unwrap();
    let (go, gate) = channel::<()>();
    let held = move |_| gate.recv().unwrap_or(());
    device.callback(&stream, Box::new(held)).unwrap();
    let ran = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&ran);
    let work = move |_| count.store(count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    device.callback(&stream, Box::new(work)).unwrap();
    let event = device.record(&stream).unwrap();
    assert!(!event.is_complete());
    drop(go);
    drop(device);
    assert!(event.is_complete());
    assert_eq!(ran.load(Ordering::Relaxed), 1);
    let other = self::device();
    let lost = other.record(&stream);
    assert!(matches!(lost, Err(DeviceError::DeviceLost { .. })), "{lost:?}");
}

#[test]
fn the_last_clone_of_a_stream_may_go_on_its_own_thread() {
    let device = device();
    let stream = device.create_stream("last").unwrap();
    let (go, gate) = channel::<()>();
    let own = stream.clone();
    let work = move |_| {
        let _ = gate.recv();
        drop(own);
    };
    device.callback(&stream, Box::new(work)).unwrap();
    let event = device.record(&stream).unwrap();
    drop(stream);
    drop(go);
    device.synchronize(&event).unwrap();
}

#[test]
fn the_last_clone_may_go_on_a_stream_that_it_waits_for() {
    let device = device();
    let ahead = device.create_stream("ahead").unwrap();
    let behind = device.create_stream("behind").unwrap();
    let (go, gate) = channel::<()>();
    let (hand_over, handed) = channel::<Stream>();
    let work = move |_| {
        let _ = gate.recv();
        // Joining it here would wait for the event after this very callback.
        drop(handed.recv());
    };
    device.callback(&ahead, Box::new(work)).unwrap();
    let reached = device.record(&ahead).unwrap();
    device.wait(&behind, &reached).unwrap();
    let done = device.record(&behind).unwrap();
    hand_over.send(behind).unwrap();
    drop(go);
    device.synchronize(&done).unwrap();
}

#[test]
fn streams_have_a_limit_and_ended_ones_do_not_count() {
    let device = device();
    let mut streams: Vec<_> =
        (0..STREAMS_MAX).map(|_| device.create_stream("many").unwrap()).collect();
    let refused = device.create_stream("one more");
    assert!(
        matches!(refused, Err(DeviceError::Refused { operation: Operation::CreateStream, .. })),
        "{refused:?}"
    );
    streams.pop();
    streams.push(device.create_stream("in its place").unwrap());
}

#[test]
fn a_stream_name_may_contain_a_zero_byte() {
    let device = device();
    let stream = device.create_stream("zero\0byte, and longer than a thread's name").unwrap();
    device.synchronize(&device.record(&stream).unwrap()).unwrap();
}

#[test]
fn staged_pages_that_are_dropped_are_given_back() {
    let device = device();
    let page = os_page_bytes();
    let range = AddressRange::new(device.address_space().start, 2 * page);
    device.map(range, Fill::Zero).unwrap();
    let span = device.freeze(range, SpanLabel::default()).unwrap();
    device.seal(span).unwrap();
    drop(device.stage(span, Fill::Any).unwrap());
    assert_eq!(device.memory_info().mapped_bytes, 0);
    assert_eq!(device.memory_info().staged_bytes, 0);
    device.forget(span).unwrap();
}

#[test]
fn staged_pages_may_outlive_the_device() {
    let device = device();
    let page = os_page_bytes();
    let range = AddressRange::new(device.address_space().start, page);
    device.map(range, Fill::Zero).unwrap();
    let span = device.freeze(range, SpanLabel::default()).unwrap();
    device.seal(span).unwrap();
    let staged = device.stage(span, Fill::Any).unwrap();
    drop(device);
    drop(staged);
}

#[test]
fn absurd_pinned_sizes_are_refused() {
    let refused = device().allocate_pinned(usize::MAX);
    assert!(
        matches!(refused, Err(DeviceError::Refused { operation: Operation::Pin, .. })),
        "{refused:?}"
    );
}

/// The thread that was making it writable is not in the child.
#[test]
fn a_forked_child_writes_to_a_span_that_was_thawing() {
    const PATIENCE: Duration = Duration::from_secs(10);
    guard::install().unwrap();
    let device = device();
    let range = AddressRange::new(device.address_space().start, os_page_bytes());
    device.map(range, Fill::Zero).unwrap();
    let span = device.freeze(range, SpanLabel::default()).unwrap();
    guard::TABLE.begin(span, |_| Some(guard::State::Thawing)).unwrap();
    // SAFETY: the child writes a byte of its own copy and ends.
    let child = unsafe {
        let child = libc::fork();
        if child == 0 {
            (range.start as *mut u8).write_volatile(1);
            libc::_exit(0);
        }
        child
    };
    let (mut status, began) = (-1, Instant::now());
    // SAFETY: a child of this test, and a live local.
    let mut wait = |options| unsafe { libc::waitpid(child, &raw mut status, options) };
    while wait(libc::WNOHANG) == 0 {
        if began.elapsed() > PATIENCE {
            // SAFETY: as above.
            unsafe { libc::kill(child, libc::SIGKILL) };
            wait(0);
            break;
        }
        std::thread::sleep(Duration::from_millis(2));
    }
    guard::TABLE.finish(span, guard::State::Frozen);
    device.thaw(span).unwrap();
    assert_eq!(status, 0, "it did not go on");
}
