use super::*;
use proptest::prelude::*;
use std::sync::Barrier;
use std::thread;

/// Five words of one event, different from those of any other.
fn sealed(value: u64) -> [u64; 5] {
    std::array::from_fn(|at| value.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(at as u64))
}

proptest! {
    #[test]
    fn one_writer_agrees_with_a_list_that_forgets(
        capacity in 1usize..40, writes in 0u64..200, reads in proptest::collection::vec(0u64..200, 0..4)
    ) {
        let ring = Ring::<5>::new(capacity);
        let mut model: Vec<[u64; 5]> = Vec::new();
        for value in 0..writes {
            ring.record(sealed(value));
            model.push(sealed(value));
            if reads.contains(&value) || value + 1 == writes {
                let reading = ring.read();
                let forgotten = model.len().saturating_sub(capacity);
                prop_assert_eq!(&reading.events, &model[forgotten..]);
                prop_assert_eq!(reading.dropped, forgotten as u64);
            }
        }
    }
}

#[test]
fn readers_see_complete_events_in_each_writers_order() {
    const WRITERS: u64 = 4;
    const WRITES: u64 = if cfg!(miri) { 50 } else { 20_000 };
    let ring = Ring::<5>::new(16);
    let start = Barrier::new(WRITERS as usize + 1);
    thread::scope(|scope| {
        for writer in 0..WRITERS {
            let (ring, start) = (&ring, &start);
            scope.spawn(move || {
                start.wait();
                for count in 0..WRITES {
                    ring.record([writer, count, writer ^ count, !count, count << 8 | writer]);
                }
            });
        }
        start.wait();
        for _ in 0..WRITES / 10 {
            check_whole_and_ordered(&ring.read());
        }
    });
    let reading = ring.read();
    check_whole_and_ordered(&reading);
    assert_eq!(reading.events.len() as u64 + reading.dropped, WRITERS * WRITES);
    assert!(!reading.events.is_empty());
}

fn check_whole_and_ordered(reading: &Reading<5>) {
    let mut last = [None; 4];
    for words in &reading.events {
        let [writer, count, ..] = *words;
        assert_eq!(*words, [writer, count, writer ^ count, !count, count << 8 | writer]);
        let last = &mut last[writer as usize];
        assert!(last.is_none_or(|last| last < count), "tickets follow each writer's order");
        *last = Some(count);
    }
}

#[test]
fn an_unfinished_write_loses_only_events_of_its_slot() {
    let ring = Ring::<5>::new(2);
    // A writer that took ticket 0 and was stopped for good, as in the child of a fork.
    let stuck = ring.head.0.fetch_add(1, Ordering::Relaxed);
    ring.slots.all()[0].sequence.store(stuck * 2 + 1, Ordering::Relaxed);
    for value in 1..6 {
        ring.record(sealed(value));
    }
    let reading = ring.read();
    assert_eq!(reading.events, [sealed(5)], "slot 1 goes on, slot 0 is left out");
    assert_eq!(reading.dropped, 5);
}

#[test]
fn a_writer_a_lap_behind_keeps_the_newer_event() {
    let slot = Slot::<5>::empty();
    slot.write(8, sealed(8));
    slot.write(4, sealed(4));
    assert_eq!(slot.read(), Some((8, sealed(8))));
}

#[test]
fn a_slot_is_one_cache_line() {
    assert_eq!(size_of::<Slot<5>>(), 64);
    assert_eq!(align_of::<Slot<5>>(), 64);
}

#[test]
fn a_ring_without_memory_counts_what_it_drops() {
    // More than an address space has.
    let slots = Slots::<5>::zeroed(usize::MAX);
    let ring = Ring { head: Head(AtomicU64::new(0)), mask: 7, kept: 8, slots };
    assert!(ring.slots.all().is_empty());
    for value in 0..3 {
        ring.record(sealed(value));
    }
    let reading = ring.read();
    assert_eq!((reading.events.len(), reading.dropped), (0, 3));
}

#[test]
fn slots_without_events_take_no_pages() {
    const SLOTS: usize = 1 << 16;
    let page_bytes = 4096;
    let ring = Ring::<5>::new(SLOTS);
    ring.record(sealed(1));
    let slots = ring.slots.all();
    let bytes = size_of_val(slots);
    let mut resident = vec![0u8; bytes.div_ceil(page_bytes)];
    let start = slots.as_ptr().cast_mut().cast();
    #[expect(unsafe_code, reason = "a system call")]
    // SAFETY: the range is mapped, and `resident` has a byte for each of its pages.
    let status = unsafe { libc::mincore(start, bytes, resident.as_mut_ptr()) };
    assert_eq!(status, 0);
    // With huge pages the first touch takes a whole one.
    let huge = 2 << 20;
    let here = resident.iter().filter(|page| **page & 1 == 1).count() * page_bytes;
    assert!(here > 0 && here <= huge, "{here} of {bytes} bytes");
}
