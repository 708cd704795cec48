//! Recording runs inside `malloc`, so it must never allocate (I1).
//!
//! A binary of its own: it replaces the global allocator.

#![cfg(not(loom))]

use dormouse_timeline::{Gauge, Lane, NAMES_MAX, Slice, Timeline};
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

/// The system allocator, counting what the current thread asks of it.
struct Counting;

thread_local! {
    static ASKED: Cell<u64> = const { Cell::new(0) };
}

fn asked() -> u64 {
    ASKED.with(Cell::get)
}

// SAFETY: every call is handed on to the system allocator as it came; counting touches a
// thread-local that needs neither memory nor a destructor.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        ASKED.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        ASKED.with(|count| count.set(count.get() + 1));
        // SAFETY: the caller's promises are passed on.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

#[test]
fn recording_and_interning_never_allocate() {
    let before = asked();
    let timeline = Timeline::new(0);
    assert!(asked() > before, "the count counts");
    let names: Vec<String> = (0..NAMES_MAX + 10).map(|i| format!("name {i}")).collect();
    let before = asked();
    for name in &names {
        let id = timeline.intern(name);
        timeline.slice(Slice::new(Lane::NvmeWrite, id, 1, 2));
        timeline.instant(Lane::Notice, id, 5);
        timeline.gauge(Gauge::DeviceAwake, 6);
        timeline.tag_gauge(id, 7);
    }
    assert_eq!(asked(), before);
}
