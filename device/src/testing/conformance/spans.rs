//! The life of a span.

use super::bench::{Bench, pattern};
use crate::{Device, DeviceError, Fill, Operation, Sealed};

pub(super) fn bytes_survive_a_sleep<D: Device>(bench: &Bench<D>) {
    let range = bench.mapped(2, 6, 11);
    for round in 0..5 {
        let span = bench.freeze(range);
        let copy = bench.read(range);
        assert!(copy == pattern(range.bytes, 11 + round), "round {round}");
        assert_eq!(bench.device.seal(span), Ok(Sealed::Asleep));
        bench.wake(span, range, 11 + round);
        bench.assert_holds(range, 11 + round);
        // Awake, it is ordinary memory again.
        bench.write(range.start, &pattern(range.bytes, 12 + round));
    }
    bench.device.unmap(range).unwrap();
    bench.device.map(range, Fill::Zero).unwrap();
    bench.assert_zero(range);
}

pub(super) fn a_frozen_span_can_be_read_and_thawed<D: Device>(bench: &Bench<D>) {
    let range = bench.mapped(0, 3, 21);
    let span = bench.freeze(range);
    bench.assert_holds(range, 21);
    bench.device.thaw(span).unwrap();
    bench.assert_holds(range, 21);
    bench.write(range.start, &pattern(range.bytes, 22));
    bench.assert_holds(range, 22);
}

pub(super) fn neighbours_are_left_alone<D: Device>(bench: &Bench<D>) {
    // One span over two mappings, between pages of each.
    let left = bench.mapped(0, 4, 31);
    let right = bench.mapped(4, 4, 32);
    let page = bench.device.page_bytes();
    let span = bench.sleep(bench.range(2, 4));
    assert_eq!(bench.read(bench.range(0, 2)), pattern(left.bytes, 31)[..2 * page]);
    assert_eq!(bench.read(bench.range(6, 2)), pattern(right.bytes, 32)[2 * page..]);
    bench.write(bench.range(6, 1).start, &pattern(page, 33));
    bench.wake(span, bench.range(2, 4), 34);
    bench.assert_holds(bench.range(2, 4), 34);
    bench.assert_holds(bench.range(6, 1), 33);
    assert_eq!(bench.read(bench.range(0, 2)), pattern(left.bytes, 31)[..2 * page]);
}

pub(super) fn staged_bytes_show_only_when_published<D: Device>(bench: &Bench<D>) {
    let range = bench.mapped(1, 2, 41);
    let span = bench.sleep(range);
    let staged = bench.device.stage(span, Fill::Any).unwrap();
    let address = bench.device.staged_address(&staged);
    assert_eq!(range.contains(address), bench.device.is_stream_ordered(), "aside or in place");
    bench.write(address, &pattern(range.bytes, 42));
    drop(staged);
    // Discarded bytes never come back: the next stage starts anew.
    let staged = bench.device.stage(span, Fill::Any).unwrap();
    let address = bench.device.staged_address(&staged);
    bench.write(address, &pattern(range.bytes, 43));
    bench.device.publish(staged).map_err(|(error, _)| error).unwrap();
    bench.assert_holds(range, 43);
}

pub(super) fn a_wake_to_large_pages_keeps_bytes<D: Device>(bench: &Bench<D>) {
    let range = bench.around_large();
    bench.device.map(range, Fill::Any).unwrap();
    for round in 0..3 {
        let span = bench.sleep(range);
        let staged = bench.device.stage_large(span, Fill::Any).unwrap();
        let address = bench.device.staged_address(&staged);
        bench.write(address, &pattern(range.bytes, 61 + round));
        bench.device.publish(staged).map_err(|(error, _)| error).unwrap();
        bench.assert_holds(range, 61 + round);
    }
    bench.device.unmap(range).unwrap();
    assert_eq!(bench.mapped_bytes(), 0);
}

pub(super) fn a_forgotten_span_is_unmapped<D: Device>(bench: &Bench<D>) {
    let range = bench.mapped(1, 2, 51);
    let span = bench.sleep(range);
    bench.device.forget(span).unwrap();
    assert_eq!(bench.mapped_bytes(), 0);
    bench.device.map(range, Fill::Zero).unwrap();
    bench.assert_zero(range);
}

pub(super) fn a_stage_past_the_capacity_is_refused<D: Device>(bench: &Bench<D>) {
    let page = bench.device.page_bytes();
    let capacity_bytes = bench.device.memory_info().capacity_bytes;
    let range = bench.mapped(0, 2, 61);
    let span = bench.sleep(range);
    let rest = bench.range(2, capacity_bytes as usize / page - 1);
    bench.device.map(rest, Fill::Zero).unwrap();
    let refused = DeviceError::OutOfMemory {
        operation: Operation::Stage,
        asked_bytes: range.bytes as u64,
        mapped_bytes: rest.bytes as u64,
        capacity_bytes,
    };
    assert_eq!(bench.device.stage(span, Fill::Any).map(|_| ()), Err(refused));
    assert_eq!(bench.device.memory_info().staged_bytes, 0);
    bench.device.unmap(rest).unwrap();
    bench.wake(span, range, 61);
    bench.assert_holds(range, 61);
}

/// Devices whose memory threads touch by themselves. `copy` runs on a thread of the device.
pub(super) fn a_write_to_a_frozen_span_cancels_the_sleep<D: Device>(bench: &Bench<D>) {
    let range = bench.mapped(0, 3, 71);
    let page = bench.device.page_bytes();
    for give_up in [false, true] {
        let span = bench.freeze(range);
        let stale = bench.read(range);
        bench.write(range.start + page, &pattern(page, 72));
        if give_up {
            bench.device.thaw(span).unwrap();
        } else {
            assert_eq!(bench.device.seal(span), Ok(Sealed::Written));
        }
        let state = bench.device.thaw(span);
        assert!(matches!(state, Err(DeviceError::WrongState { state: "gone", .. })), "{state:?}");
        let mut now = stale;
        now[page..2 * page].copy_from_slice(&pattern(page, 72));
        assert!(bench.read(range) == now, "the write is there, and nothing else changed");
        bench.write(range.start, &pattern(range.bytes, 71));
    }
    assert_eq!(bench.mapped_bytes(), range.bytes as u64);
    // The next sleep is not cancelled by a write to the last.
    let span = bench.sleep(range);
    bench.wake(span, range, 73);
    bench.assert_holds(range, 73);
}
