//! Requests that make no sense: typed errors, and nothing changed.

use super::bench::{Bench, label};
use crate::{AddressRange, Device, DeviceError, Fill, Operation, Sealed, SpanId};

pub(super) fn bad_ranges_are_refused<D: Device>(bench: &Bench<D>) {
    let page = bench.device.page_bytes();
    let space = bench.device.address_space();
    for range in [
        AddressRange::new(space.start, 0),
        AddressRange::new(space.start + 1, page),
        AddressRange::new(space.start, page + 1),
        AddressRange::new(space.start - page, page),
        AddressRange::new(space.start - page, 2 * page),
        AddressRange::new(space.end(), page),
        AddressRange::new(space.end() - page, 2 * page),
        AddressRange::new(space.start, usize::MAX - page + 1),
        AddressRange::new(0, page),
    ] {
        let bad = |operation| DeviceError::bad_range(operation, range, page, space);
        assert_eq!(bench.device.map(range, Fill::Zero), Err(bad(Operation::Map)));
        assert_eq!(bench.device.unmap(range), Err(bad(Operation::Unmap)));
        assert_eq!(bench.device.freeze(range, label()), Err(bad(Operation::Freeze)));
    }
    assert_eq!(bench.mapped_bytes(), 0);
}

/// Asserts that the page `start` was found in a wrong state.
fn assert_pages<T: std::fmt::Debug>(
    result: Result<T, DeviceError>,
    asked: Operation,
    at: usize,
    found: &str,
) {
    match result {
        Err(DeviceError::WrongPages { operation, start, state, needed }) => {
            assert_eq!((operation, start, state), (asked, at, found));
            assert_ne!(state, needed);
        }
        other => panic!("{asked:?} of {found} pages gave {other:?}"),
    }
}

pub(super) fn pages_in_a_wrong_state_are_refused<D: Device>(bench: &Bench<D>) {
    let device = &bench.device;
    let mapped = bench.mapped(40 % half_pages(bench), 2, 3);
    let first = mapped.start;
    let beyond = AddressRange::new(first, mapped.bytes + device.page_bytes());
    assert_pages(device.map(mapped, Fill::Zero), Operation::Map, first, "mapped");
    assert_pages(device.unmap(beyond), Operation::Unmap, mapped.end(), "unmapped");
    assert_pages(device.freeze(beyond, label()), Operation::Freeze, mapped.end(), "unmapped");
    bench.assert_holds(mapped, 3);
    let span = bench.sleep(mapped);
    assert_pages(device.map(mapped, Fill::Zero), Operation::Map, first, "in a span");
    assert_pages(device.unmap(mapped), Operation::Unmap, first, "in a span");
    assert_pages(device.freeze(mapped, label()), Operation::Freeze, first, "in a span");
    bench.wake(span, mapped, 3);
    bench.assert_holds(mapped, 3);
    // The refusals above left no page behind in a state of its own.
    device.unmap(mapped).unwrap();
    device.map(beyond, Fill::Zero).unwrap();
    device.unmap(beyond).unwrap();
}

fn half_pages<D: Device>(bench: &Bench<D>) -> usize {
    bench.device.address_space().bytes / bench.device.page_bytes() / 2
}

/// Asserts that all but `allowed` operations refuse `span`, naming the state it is in.
fn assert_only<D: Device>(bench: &Bench<D>, span: SpanId, allowed: &[Operation], found: &str) {
    let device = &bench.device;
    let ask = |operation| match operation {
        Operation::Thaw => device.thaw(span),
        Operation::Seal => device.seal(span).map(|_| ()),
        Operation::Stage => device.stage(span, Fill::Any).map(drop),
        _ => device.forget(span),
    };
    for asked in [Operation::Thaw, Operation::Seal, Operation::Stage, Operation::Forget] {
        if allowed.contains(&asked) {
            continue;
        }
        match ask(asked) {
            Err(DeviceError::WrongState { operation, span: named, state, .. }) => {
                assert_eq!((operation, named, state), (asked, span.0, found));
            }
            other => panic!("{asked:?} of a span that is {found} gave {other:?}"),
        }
    }
}

pub(super) fn spans_in_a_wrong_state_are_refused<D: Device>(bench: &Bench<D>) {
    let device = &bench.device;
    let range = bench.mapped(0, 2, 4);
    let thawed = bench.freeze(range);
    assert_only(bench, thawed, &[Operation::Thaw, Operation::Seal], "frozen");
    device.thaw(thawed).unwrap();
    assert_only(bench, thawed, &[], "gone");

    let span = bench.freeze(range);
    assert_ne!(span, thawed, "an id names one span only");
    assert_only(bench, thawed, &[], "gone");
    assert_eq!(device.seal(span), Ok(Sealed::Asleep));
    assert_only(bench, span, &[Operation::Stage, Operation::Forget], "asleep");
    let staged = device.stage(span, Fill::Any).unwrap();
    assert_only(bench, span, &[], "waking");
    device.publish(staged).map_err(|(error, _)| error).unwrap();
    assert_only(bench, span, &[], "gone");

    let forgotten = bench.sleep(range);
    device.forget(forgotten).unwrap();
    assert_only(bench, forgotten, &[], "gone");
}

pub(super) fn ids_that_never_were_are_refused<D: Device>(bench: &Bench<D>) {
    assert_only(bench, SpanId(u32::MAX), &[], "gone");
    assert_only(bench, SpanId(u32::MAX - 1), &[], "gone");
}

pub(super) fn spans_of_another_device_are_refused<D: Device>(ours: &Bench<D>, other: &Bench<D>) {
    let range = other.mapped(0, 1, 8);
    let span = other.freeze(range);
    for result in [ours.device.thaw(span), ours.device.seal(span).map(|_| ())] {
        assert!(matches!(result, Err(DeviceError::WrongState { .. })), "{result:?}");
    }
    other.device.seal(span).unwrap();
    let result = ours.device.forget(span);
    assert!(matches!(result, Err(DeviceError::WrongState { .. })), "{result:?}");
    assert!(ours.device.stage(span, Fill::Any).is_err());
    other.wake(span, range, 8);
    other.assert_holds(range, 8);
}
