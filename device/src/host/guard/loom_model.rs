//! The span table and its protocol under every interleaving of a few threads.
//!
//! Both files are compiled a second time here, over loom's atomics. Memory is a protection and
//! one value behind a lock: an access either sees them together or faults, as on a machine.
#![allow(dead_code, unreachable_pub, reason = "the copies are used in part")]

#[path = "protocol.rs"]
mod protocol;
#[path = "table.rs"]
mod table;
mod sync {
    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering, fence};
    pub(super) use loom::thread::yield_now;
}

use loom::sync::{Arc, Mutex};
use loom::thread;

use crate::{AddressRange, Sealed, SpanLabel};
use protocol::{Access, Failed, Verdict};
use sync::{AtomicU32, AtomicU64, AtomicUsize};
use table::{Slot, State, Table};

const RANGE: AddressRange = AddressRange::new(0x1000, 0x1000);
const SLOTS: usize = 2;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Protection {
    None,
    ReadOnly,
    ReadWrite,
}

/// One range of memory and the table that guards it.
struct World {
    table: Table<SLOTS>,
    memory: Mutex<(Protection, u32)>,
}

/// How a writer ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Wrote,
    Stray,
}

fn table<const N: usize>() -> Table<N> {
    Table {
        slots: std::array::from_fn(|_| Slot {
            control: AtomicU64::new(0),
            start: AtomicUsize::new(0),
            bytes: AtomicUsize::new(0),
            name: std::array::from_fn(|_| AtomicU64::new(0)),
            layer: AtomicU32::new(0),
            next_free: AtomicU32::new(0),
        }),
        used: AtomicU32::new(0),
        entered: AtomicU64::new(0),
        free: AtomicU64::new(0),
    }
}

impl World {
    fn new() -> Arc<Self> {
        Arc::new(Self { table: table(), memory: Mutex::new((Protection::ReadWrite, 0)) })
    }

    fn protect(&self, protection: Protection) -> Result<(), ()> {
        self.memory.lock().unwrap().0 = protection;
        Ok(())
    }

    fn value(&self) -> u32 {
        self.memory.lock().unwrap().1
    }

    fn protection(&self) -> Protection {
        self.memory.lock().unwrap().0
    }

    /// Writes `value` as a thread does: faulting, asking the table, trying again.
    fn write(&self, value: u32) -> End {
        loop {
            {
                let mut memory = self.memory.lock().unwrap();
                if memory.0 == Protection::ReadWrite {
                    memory.1 = value;
                    return End::Wrote;
                }
            }
            let open = |_| self.protect(Protection::ReadWrite).is_ok();
            let accessible = || self.protection() == Protection::ReadWrite;
            match self.table.fault(RANGE.start + 5, Access::Write, open, accessible, || false) {
                Verdict::Retry => {}
                Verdict::Stray(_) => return End::Stray,
                Verdict::Stuck(_) => unreachable!("opening is never refused here"),
                Verdict::Elsewhere => unreachable!("an unknown fault"),
            }
        }
    }

    fn freeze(&self) -> crate::SpanId {
        let protect = |_| self.protect(Protection::ReadOnly);
        let open = |_| self.protect(Protection::ReadWrite);
        self.table.freeze(RANGE, &SpanLabel::default(), protect, open).unwrap().unwrap()
    }

    fn thaw(&self, span: crate::SpanId) {
        self.table.thaw(span, |_| self.protect(Protection::ReadWrite)).unwrap();
    }

    /// Freezes, copies and seals; what was sealed must be what was copied.
    fn sleep(&self) -> Sealed {
        let span = self.freeze();
        let copy = self.value();
        let close = |_| {
            let mut memory = self.memory.lock().unwrap();
            assert_eq!(memory.1, copy, "a write was let through and lost");
            memory.0 = Protection::None;
            Ok::<(), ()>(())
        };
        let open = |_| self.protect(Protection::ReadWrite);
        self.table.seal(span, close, open).unwrap().1
    }
}

/// Checks how a sleep and its writers ended.
fn check(world: &World, sealed: Sealed, ends: &[End]) {
    match sealed {
        Sealed::Asleep => assert_eq!(world.protection(), Protection::None, "opened too late"),
        Sealed::Written => {
            assert_eq!(world.protection(), Protection::ReadWrite);
            assert!(ends.iter().all(|end| *end == End::Wrote));
            assert_ne!(world.value(), 0);
        }
    }
}

#[test]
fn loom_a_write_cancels_the_sleep_or_is_stray() {
    loom::model(|| {
        let world = World::new();
        let writer = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.write(1))
        };
        let sealed = world.sleep();
        check(&world, sealed, &[writer.join().unwrap()]);
    });
}

#[test]
fn loom_two_writers_and_a_sleep() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let world = World::new();
        let writers = [1, 2].map(|value| {
            let world = Arc::clone(&world);
            thread::spawn(move || world.write(value))
        });
        let sealed = world.sleep();
        let ends = writers.map(|writer| writer.join().unwrap());
        check(&world, sealed, &ends);
    });
}

#[test]
fn loom_a_write_survives_thawing_and_the_next_freeze() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let world = World::new();
        let writer = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.write(1))
        };
        let first = world.freeze();
        world.thaw(first);
        // The same slot, the same range: a handler still busy with the first span must not open
        // the second behind its back.
        let second = world.freeze();
        let copy = world.value();
        let close = |_| {
            assert_eq!(world.value(), copy, "a write was let through and lost");
            world.protect(Protection::None)
        };
        let open = |_| world.protect(Protection::ReadWrite);
        let sealed = world.table.seal(second, close, open).unwrap().1;
        assert!(world.table.thaw(first, |_| Ok::<(), ()>(())).is_err());
        check(&world, sealed, &[writer.join().unwrap()]);
    });
}

#[test]
fn loom_a_thawed_write_is_never_stray() {
    loom::model(|| {
        let world = World::new();
        let writer = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.write(1))
        };
        let span = world.freeze();
        world.thaw(span);
        assert_eq!(writer.join().unwrap(), End::Wrote);
        assert_eq!((world.protection(), world.value()), (Protection::ReadWrite, 1));
    });
}

#[test]
fn loom_a_refused_seal_loses_nothing() {
    loom::model(|| {
        let world = World::new();
        let writer = {
            let world = Arc::clone(&world);
            thread::spawn(move || world.write(1))
        };
        let span = world.freeze();
        let open = |_| world.protect(Protection::ReadWrite);
        match world.table.seal(span, |_| Err(()), open) {
            Err(Failed::System(())) => world.thaw(span),
            Ok((_, sealed)) => assert_eq!(sealed, Sealed::Written),
            Err(Failed::State(state)) => unreachable!("{state:?}"),
        }
        let end = writer.join().unwrap();
        assert_eq!(world.protection(), Protection::ReadWrite);
        assert_eq!(world.value() == 1, end == End::Wrote);
    });
}

#[test]
fn loom_slots_are_never_shared_nor_seen_half_filled() {
    /// Outside the model: how often a span was seen at all, over all interleavings.
    static SEEN: std::sync::atomic::AtomicUsize = std::sync::atomic::AtomicUsize::new(0);
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let table: Arc<Table<1>> = Arc::new(table());
        let ranges = [AddressRange::new(0x1000, 0x1000), AddressRange::new(0x8000, 0x4000)];
        let fillers = ranges.map(|range| {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                let Some(span) = table.insert(range, &SpanLabel::default()) else { return false };
                assert_eq!(table.get(span).unwrap(), (range, State::Frozen), "a slot of two");
                let next = |state| (state == State::Frozen).then_some(State::Thawing);
                assert_eq!(table.begin(span, next).unwrap().0, range);
                table.remove(span);
                true
            })
        });
        // As a fault is judged; without the count loom does not look into the scan.
        table.entered();
        if let Some(seen) = table.find(0x1800) {
            SEEN.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            assert!(ranges.contains(&seen.range), "half filled: {seen:?}");
        }
        let filled = fillers.map(|filler| filler.join().unwrap());
        assert!(filled.contains(&true), "a free slot was refused to both");
        assert!(table.find(0x1800).is_none() && table.find(0x9000).is_none());
    });
    assert!(
        SEEN.load(std::sync::atomic::Ordering::Relaxed) > 0,
        "no interleaving saw a span: the model tests nothing"
    );
}

/// Two slots in the free list. One thread takes both and puts the first back, so that the list
/// begins as the other thread saw it and continues differently.
#[test]
fn loom_the_free_list_keeps_its_slots() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(3);
    model.check(|| {
        let table: Arc<Table<2>> = Arc::new(table());
        let insert = |table: &Table<2>| table.insert(RANGE, &SpanLabel::default());
        let end = |table: &Table<2>, span| {
            let next = |state| (state == State::Frozen).then_some(State::Thawing);
            table.begin(span, next).unwrap();
            table.remove(span);
        };
        let both = [insert(&table), insert(&table)].map(Option::unwrap);
        both.into_iter().for_each(|span| end(&table, span));
        let other = {
            let table = Arc::clone(&table);
            thread::spawn(move || {
                let first = insert(&table);
                let kept = insert(&table);
                first.into_iter().for_each(|span| end(&table, span));
                kept
            })
        };
        let ours = insert(&table);
        let theirs = other.join().unwrap();
        if let (Some(ours), Some(theirs)) = (ours, theirs) {
            assert_ne!(ours.0 & 3, theirs.0 & 3, "one slot twice");
        }
        let held = [ours, theirs].into_iter().flatten().count();
        let left = std::iter::from_fn(|| insert(&table)).count();
        assert_eq!(held + left, 2, "a slot was lost");
    });
}
