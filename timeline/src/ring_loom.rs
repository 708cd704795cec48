//! Every interleaving of a few writers and a reader on the smallest rings.

use super::*;
use loom::sync::Arc;
use loom::thread;

fn check_whole(reading: &Reading<2>) {
    for [first, second] in &reading.events {
        assert!(*first != 0 && first == second, "torn: {first} and {second}");
    }
}

#[test]
fn loom_two_writers_on_one_slot_never_mix_and_leave_one_event() {
    loom::model(|| {
        let ring = Arc::new(Ring::<2>::new(1));
        let other = Arc::clone(&ring);
        let writer = thread::spawn(move || other.record([1, 1]));
        ring.record([2, 2]);
        writer.join().unwrap();
        let reading = ring.read();
        check_whole(&reading);
        assert_eq!((reading.events.len(), reading.dropped), (1, 1));
    });
}

#[test]
fn loom_a_concurrent_reader_sees_the_old_or_the_new_event() {
    loom::model(|| {
        let ring = Arc::new(Ring::<2>::new(1));
        ring.record([1, 1]);
        let other = Arc::clone(&ring);
        let writer = thread::spawn(move || other.record([2, 2]));
        let reading = ring.read();
        check_whole(&reading);
        assert!(reading.events.len() as u64 + reading.dropped <= 2);
        writer.join().unwrap();
        assert_eq!(ring.read().events, [[2, 2]], "without contention the newer event stays");
    });
}

#[test]
fn loom_a_reader_with_two_writers_on_one_slot() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let ring = Arc::new(Ring::<2>::new(1));
        let writers = [1, 2].map(|value| {
            let ring = Arc::clone(&ring);
            thread::spawn(move || ring.record([value, value]))
        });
        check_whole(&ring.read());
        for writer in writers {
            writer.join().unwrap();
        }
        check_whole(&ring.read());
    });
}

#[test]
fn loom_two_writers_on_two_slots_lose_nothing() {
    loom::model(|| {
        let ring = Arc::new(Ring::<2>::new(2));
        let other = Arc::clone(&ring);
        let writer = thread::spawn(move || other.record([1, 1]));
        ring.record([2, 2]);
        writer.join().unwrap();
        let reading = ring.read();
        check_whole(&reading);
        assert_eq!((reading.events.len(), reading.dropped), (2, 0));
    });
}

#[test]
fn loom_a_reader_of_one_writer_sees_whole_updates_that_never_step_back() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let slot = Arc::new(Slot::<2>::empty());
        slot.write(0, [1, 1]);
        let other = Arc::clone(&slot);
        let writer = thread::spawn(move || (1..=2).for_each(|t| other.write(t, [t + 1, t + 1])));
        let mut last = 0;
        for _ in 0..2 {
            if let Some((ticket, words)) = slot.read() {
                assert_eq!(words, [ticket + 1; 2]);
                assert!(ticket >= last, "{ticket} after {last}");
                last = ticket;
            }
        }
        writer.join().unwrap();
        assert_eq!(slot.read(), Some((2, [3, 3])));
    });
}
