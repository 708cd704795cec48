//! Pages: map, unmap, counts, capacity; pinned memory.

use super::bench::{Bench, pattern};
use crate::{Device, DeviceError, Fill, Operation};

pub(super) fn mapped_pages_are_zeroed_and_keep_bytes<D: Device>(bench: &Bench<D>) {
    let range = bench.range(3, 4);
    bench.device.map(range, Fill::Zero).unwrap();
    bench.assert_zero(range);
    bench.write(range.start, &pattern(range.bytes, 7));
    bench.assert_holds(range, 7);
}

pub(super) fn unmapped_bytes_are_gone<D: Device>(bench: &Bench<D>) {
    let range = bench.mapped(0, 4, 9);
    // A part of a mapping can be unmapped and mapped again.
    let middle = bench.range(1, 2);
    bench.device.unmap(middle).unwrap();
    bench.device.map(middle, Fill::Zero).unwrap();
    bench.assert_zero(middle);
    let page = bench.device.page_bytes();
    let whole = pattern(range.bytes, 9);
    assert_eq!(bench.read(bench.range(0, 1)), whole[..page]);
    assert_eq!(bench.read(bench.range(3, 1)), whole[3 * page..]);
}

pub(super) fn counts_follow<D: Device>(bench: &Bench<D>) {
    let page = bench.device.page_bytes() as u64;
    assert_eq!(bench.mapped_bytes(), 0);
    let range = bench.mapped(0, 5, 1);
    assert_eq!(bench.mapped_bytes(), 5 * page);
    let span = bench.freeze(range);
    assert_eq!(bench.mapped_bytes(), 5 * page, "frozen pages are still there");
    bench.device.seal(span).unwrap();
    assert_eq!(bench.mapped_bytes(), 0, "sleeping pages are not");
    let staged = bench.device.stage(span, Fill::Any).unwrap();
    let info = bench.device.memory_info();
    assert_eq!((info.mapped_bytes, info.staged_bytes), (5 * page, 5 * page));
    drop(staged);
    let info = bench.device.memory_info();
    assert_eq!((info.mapped_bytes, info.staged_bytes), (0, 0));
    bench.wake(span, range, 1);
    let info = bench.device.memory_info();
    assert_eq!((info.mapped_bytes, info.staged_bytes), (5 * page, 0));
    bench.device.unmap(range).unwrap();
    assert_eq!(bench.mapped_bytes(), 0);
}

pub(super) fn large_pages_hold_bytes_and_leave_whole<D: Device>(bench: &Bench<D>) {
    let (range, large_pages) = (bench.around_large(), bench.large_pages());
    bench.device.map_large(range, range, Fill::Zero).unwrap();
    bench.assert_zero(range);
    bench.write(range.start, &pattern(range.bytes, 3));
    bench.assert_holds(range, 3);
    assert_eq!(bench.mapped_bytes(), range.bytes as u64);
    if large_pages > 1 {
        let part = bench.range(large_pages, 1);
        let refused = bench.device.unmap(part);
        assert!(matches!(refused, Err(DeviceError::WrongPages { .. })), "{refused:?}");
        bench.assert_holds(range, 3);
    }
    // Each alone, and the pages beside them.
    let large = bench.range(large_pages, large_pages);
    bench.device.unmap(large).unwrap();
    bench.device.map(large, Fill::Zero).unwrap();
    bench.assert_zero(large);
    bench.device.unmap(range).unwrap();
    assert_eq!(bench.mapped_bytes(), 0);
}

pub(super) fn capacity_is_never_passed<D: Device>(bench: &Bench<D>) {
    let page = bench.device.page_bytes();
    let capacity_bytes = bench.device.memory_info().capacity_bytes;
    let pages = capacity_bytes as usize / page;
    bench.device.map(bench.range(0, pages), Fill::Zero).unwrap();
    let more = bench.range(pages, 1);
    let refused = DeviceError::OutOfMemory {
        operation: Operation::Map,
        asked_bytes: page as u64,
        mapped_bytes: capacity_bytes,
        capacity_bytes,
    };
    assert_eq!(bench.device.map(more, Fill::Zero), Err(refused));
    assert_eq!(bench.mapped_bytes(), capacity_bytes, "a refused map counts nothing");
    bench.device.unmap(bench.range(0, 1)).unwrap();
    bench.device.map(more, Fill::Zero).unwrap();
    bench.assert_zero(more);
}

pub(super) fn pinned_memory_serves_copies<D: Device>(bench: &Bench<D>) {
    let page = bench.device.page_bytes();
    let range = bench.device.allocate_pinned(page + 1).unwrap();
    assert!(range.bytes > page, "{range:?}");
    assert!(range.start.is_multiple_of(page.min(4096)), "{range:?}");
    assert!(!bench.device.address_space().contains(range.start));
    assert_eq!(bench.mapped_bytes(), 0, "pinned memory is not the device's");
    // The bench itself copies through pinned memory: here it is the other side.
    bench.write(range.start, &pattern(page, 5));
    let read = bench.read(crate::AddressRange::new(range.start, page));
    assert!(read == pattern(page, 5));
    // SAFETY: allocated above, freed once, its copies are done.
    unsafe { bench.device.free_pinned(range) };
}

pub(super) fn threads_share_a_device<D: Device>(make: &dyn Fn() -> D) {
    const THREADS: usize = 4;
    const ROUNDS: u8 = 20;
    let bench = Bench::new(make());
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (device, range) = (&bench.device, bench.range(2 * thread, 2));
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    device.map(range, Fill::Zero).unwrap();
                    let span = device.freeze(range, super::bench::label()).unwrap();
                    device.seal(span).unwrap();
                    let staged = device.stage(span, Fill::Any).unwrap();
                    device.publish(staged).map_err(|(error, _)| error).unwrap();
                    device.unmap(range).unwrap();
                }
            });
        }
    });
    assert_eq!(bench.mapped_bytes(), 0, "every page taken was given back");
    assert_eq!(bench.device.memory_info().staged_bytes, 0);
}
