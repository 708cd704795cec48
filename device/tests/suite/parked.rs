//! Pages that go from one owner to the next, without zeroing and faults, and are inaccessible in between.

use dormouse_device::host::{HostConfig, HostDevice, PARKED_BYTES_MAX, guard, os_page_bytes};
use dormouse_device::{AddressRange, Device, DeviceError, Fill, Sealed, SpanLabel};

/// The shortest piece worth parking.
const PAGE: usize = 256 << 10;
const PARKED_PAGES_MAX: usize = PARKED_BYTES_MAX / PAGE;

struct Bench(HostDevice);

impl Bench {
    fn new(capacity_pages: usize) -> Self {
        guard::install().unwrap();
        let config = HostConfig {
            reserve_bytes: 4 * capacity_pages * PAGE,
            capacity_bytes: (capacity_pages * PAGE) as u64,
            page_bytes: PAGE,
        };
        Self(HostDevice::new(config).unwrap())
    }

    fn range(&self, first: usize, pages: usize) -> AddressRange {
        AddressRange::new(self.0.address_space().start + first * PAGE, pages * PAGE)
    }

    fn parked_pages(&self) -> usize {
        self.0.memory_info().parked_bytes as usize / PAGE
    }

    /// Maps pages, each filled with its own number.
    fn mapped(&self, first: usize, pages: usize) -> AddressRange {
        let range = self.range(first, pages);
        self.0.map(range, Fill::Any).unwrap();
        for page in first..first + pages {
            // SAFETY: mapped above, and this test's alone.
            unsafe {
                std::ptr::write_bytes(self.range(page, 1).start as *mut u8, number(page), PAGE)
            };
        }
        range
    }

    /// What each of these mapped pages is filled with.
    fn seen(&self, first: usize, pages: usize) -> Vec<u8> {
        (first..first + pages)
            .map(|page| {
                let start = self.range(page, 1).start as *const u8;
                // SAFETY: the caller's test has it mapped.
                let bytes = unsafe { std::slice::from_raw_parts(start, PAGE) };
                assert!(bytes.iter().all(|byte| *byte == bytes[0]), "page {page} is torn");
                bytes[0]
            })
            .collect()
    }
}

fn number(page: usize) -> u8 {
    u8::try_from(page % 255).unwrap() + 1
}

fn numbers(pages: impl IntoIterator<Item = usize>) -> Vec<u8> {
    pages.into_iter().map(number).collect()
}

#[test]
fn unmapped_pages_serve_the_next_map() {
    let bench = Bench::new(64);
    bench.0.unmap(bench.mapped(0, 8)).unwrap();
    assert_eq!((bench.parked_pages(), bench.0.memory_info().mapped_bytes), (8, 0));
    bench.0.map(bench.range(40, 8), Fill::Any).unwrap();
    assert_eq!(bench.seen(40, 8), numbers(0..8), "the same pages, at other addresses");
    assert_eq!(bench.parked_pages(), 0);
}

#[test]
fn the_pages_of_a_sealed_span_serve_others_and_come_back_with_its_bytes() {
    let bench = Bench::new(64);
    let range = bench.mapped(0, 4);
    let span = bench.0.freeze(range, SpanLabel::default()).unwrap();
    assert_eq!(bench.0.seal(span), Ok(Sealed::Asleep));
    assert_eq!(bench.parked_pages(), 4);
    bench.0.map(bench.range(20, 4), Fill::Any).unwrap();
    assert_eq!(bench.seen(20, 4), numbers(0..4));
    bench.0.unmap(bench.range(20, 4)).unwrap();
    let staged = bench.0.stage(span, Fill::Any).unwrap();
    assert_eq!(bench.parked_pages(), 0, "staged from what was parked");
    let start = bench.0.staged_address(&staged);
    // SAFETY: staged pages are the test's to fill.
    unsafe { std::ptr::write_bytes(start as *mut u8, 77, range.bytes) };
    bench.0.publish(staged).map_err(|(error, _)| error).unwrap();
    assert_eq!(bench.seen(0, 4), [77; 4]);
    // Its new pages park and serve like any others.
    bench.0.unmap(range).unwrap();
    bench.0.map(bench.range(30, 4), Fill::Any).unwrap();
    assert_eq!(bench.seen(30, 4), [77; 4]);
}

#[test]
fn a_span_wakes_over_its_own_parked_pages() {
    let bench = Bench::new(64);
    let range = bench.mapped(0, 4);
    let span = bench.0.freeze(range, SpanLabel::default()).unwrap();
    bench.0.seal(span).unwrap();
    // Fresh pages, so that its own are still parked where it sleeps.
    let staged = bench.0.stage(span, Fill::Zero).unwrap();
    assert_eq!(bench.parked_pages(), 4);
    bench.0.publish(staged).map_err(|(error, _)| error).unwrap();
    assert_eq!((bench.parked_pages(), bench.seen(0, 4)), (0, vec![0; 4]));
}

#[test]
fn pages_parked_where_they_are_wanted_stay_and_the_gaps_are_filled() {
    let bench = Bench::new(64);
    bench.mapped(0, 16);
    bench.0.unmap(bench.range(2, 3)).unwrap();
    bench.0.unmap(bench.range(8, 2)).unwrap();
    bench.0.unmap(bench.range(0, 2)).unwrap();
    bench.0.unmap(bench.range(5, 3)).unwrap();
    assert_eq!(bench.parked_pages(), 10);
    bench.0.map(bench.range(1, 8), Fill::Any).unwrap();
    assert_eq!(bench.seen(1, 8), numbers(1..9));
    assert_eq!(bench.parked_pages(), 2, "a page before and one after");
    // Elsewhere they are moved to.
    bench.0.map(bench.range(30, 2), Fill::Any).unwrap();
    let mut moved = bench.seen(30, 2);
    moved.sort_unstable();
    assert_eq!(moved, numbers([0, 9]));
}

#[test]
fn requested_zeroes_are_zero() {
    let bench = Bench::new(64);
    bench.0.unmap(bench.mapped(0, 8)).unwrap();
    bench.0.map(bench.range(2, 3), Fill::Zero).unwrap();
    assert_eq!(bench.seen(2, 3), [0; 3], "where they were parked");
    bench.0.map(bench.range(20, 3), Fill::Zero).unwrap();
    assert_eq!(bench.seen(20, 3), [0; 3], "and elsewhere");
    assert_eq!(bench.parked_pages(), 5, "the rest still is");
}

#[test]
fn parked_pages_have_a_limit_and_make_way_for_mapped_ones() {
    let capacity_pages = PARKED_PAGES_MAX + 64;
    let bench = Bench::new(capacity_pages);
    bench.mapped(0, capacity_pages);
    for first in (0..PARKED_PAGES_MAX).step_by(32) {
        bench.0.unmap(bench.range(first, 32)).unwrap();
    }
    assert_eq!(bench.parked_pages(), PARKED_PAGES_MAX);
    bench.0.unmap(bench.range(PARKED_PAGES_MAX, 32)).unwrap();
    assert_eq!(bench.parked_pages(), PARKED_PAGES_MAX, "no more than that");
    // 32 are mapped and 32 neither: mapping 40 anew leaves room for 8 fewer parked.
    bench.0.map(bench.range(2 * capacity_pages, 40), Fill::Zero).unwrap();
    let info = bench.0.memory_info();
    assert!(info.mapped_bytes + info.parked_bytes <= info.capacity_bytes, "{info:?}");
    assert!(info.parked_bytes > 0, "only what was in the way went");
}

#[test]
fn a_limit_below_the_capacity_holds_for_mapped_and_parked_together() {
    let bench = Bench::new(64);
    bench.mapped(0, 20);
    bench.0.unmap(bench.range(0, 8)).unwrap();
    bench.0.unmap(bench.range(10, 4)).unwrap();
    bench.0.limit_parked(14 * PAGE as u64);
    assert_eq!(bench.parked_pages(), 4, "one piece had to go, the other fits");
    // A page neither of them is moved for.
    bench.0.map(bench.range(40, 3), Fill::Zero).unwrap();
    assert_eq!(bench.parked_pages(), 0);
    // Past a limit that was lowered nothing is parked, whatever is unmapped.
    bench.0.limit_parked(2 * PAGE as u64);
    bench.0.unmap(bench.range(14, 4)).unwrap();
    assert_eq!(bench.parked_pages(), 0);
}

#[test]
fn longer_pieces_take_the_place_of_shorter_ones() {
    let bench = Bench::new(1024);
    bench.mapped(0, 512);
    // Every other page: as many short pieces as there are places for.
    for page in (0..128).step_by(2) {
        bench.0.unmap(bench.range(page, 1)).unwrap();
    }
    let short_pages = bench.parked_pages();
    assert_eq!(short_pages, 64);
    bench.0.unmap(bench.range(256, 8)).unwrap();
    assert_eq!(bench.parked_pages(), short_pages - 1 + 8);
    bench.0.map(bench.range(600, 8), Fill::Any).unwrap();
    assert_eq!(bench.seen(600, 8), numbers(256..264));
}

#[test]
fn released_pages_are_the_systems() {
    let bench = Bench::new(64);
    bench.0.unmap(bench.mapped(0, 8)).unwrap();
    assert_eq!(bench.0.release_parked(), 8 * PAGE as u64);
    assert_eq!((bench.parked_pages(), bench.0.release_parked()), (0, 0));
    bench.0.map(bench.range(0, 8), Fill::Any).unwrap();
    assert_eq!(bench.seen(0, 8), [0; 8], "new ones");
}

#[test]
fn a_run_of_several_mappings_is_given_back_instead_of_moved() {
    let bench = Bench::new(64);
    bench.mapped(0, 8);
    let middle = bench.range(3, 2);
    // What a user of the block may well have done to a part of it.
    // SAFETY: advice on mapped memory of this test's own.
    let status =
        unsafe { libc::madvise(middle.start as *mut _, middle.bytes, libc::MADV_NOHUGEPAGE) };
    assert_eq!(status, 0);
    bench.0.unmap(bench.range(0, 8)).unwrap();
    assert_eq!(bench.parked_pages(), 8);
    bench.0.map(bench.range(40, 8), Fill::Any).unwrap();
    assert_eq!((bench.seen(40, 8), bench.parked_pages()), (vec![0; 8], 0), "new pages, all usable");
    // Staging from such a run gives pages that can be filled as well.
    bench.0.map(bench.range(0, 8), Fill::Any).unwrap();
    let span = bench.0.freeze(bench.range(0, 8), SpanLabel::default()).unwrap();
    bench.0.seal(span).unwrap();
    bench.0.release_parked();
    let again = bench.mapped(16, 8);
    // SAFETY: as above.
    let status = unsafe {
        libc::madvise((again.start + 3 * PAGE) as *mut _, 2 * PAGE, libc::MADV_NOHUGEPAGE)
    };
    assert_eq!(status, 0);
    bench.0.unmap(again).unwrap();
    let staged = bench.0.stage(span, Fill::Any).unwrap();
    let start = bench.0.staged_address(&staged);
    // SAFETY: staged pages are the test's to fill.
    unsafe { std::ptr::write_bytes(start as *mut u8, 3, 8 * PAGE) };
    bench.0.publish(staged).map_err(|(error, _)| error).unwrap();
    assert_eq!(bench.seen(0, 8), [3; 8]);
}

#[test]
fn locked_pages_are_zero_if_requested() {
    let bench = Bench::new(64);
    let range = bench.mapped(0, 2);
    // One page of the system, which every process may lock.
    // SAFETY: mapped memory of this test's own.
    assert_eq!(unsafe { libc::mlock((range.start + PAGE) as *const _, os_page_bytes()) }, 0);
    bench.0.unmap(range).unwrap();
    bench.0.map(range, Fill::Zero).unwrap();
    assert_eq!(bench.seen(0, 2), [0; 2]);
}

/// Owners of ranges come and go, while whatever is parked is given up as fast as that goes.
fn change_hands(owners: usize, rounds: usize) {
    let bench = Bench::new(64);
    std::thread::scope(|scope| {
        let own = |owner: usize| {
            let bench = &bench;
            scope.spawn(move || {
                for round in 0..rounds {
                    let (first, pages) = (owner * 8 + round / 8 % 3, 1 + round / 8 % 4);
                    let zeroes = round % 5 == 0;
                    let range = bench.range(first, pages);
                    bench.0.map(range, if zeroes { Fill::Zero } else { Fill::Any }).unwrap();
                    if zeroes {
                        assert_eq!(bench.seen(first, pages), vec![0; pages]);
                    }
                    let mark = number(owner * rounds + round);
                    // SAFETY: mapped, and this thread's alone.
                    unsafe { std::ptr::write_bytes(range.start as *mut u8, mark, range.bytes) };
                    std::thread::yield_now();
                    assert_eq!(bench.seen(first, pages), vec![mark; pages]);
                    bench.0.unmap(range).unwrap();
                }
            })
        };
        let owners: Vec<_> = (0..owners).map(own).collect();
        while owners.iter().any(|owner| !owner.is_finished()) {
            bench.0.release_parked();
        }
    });
}

#[test]
fn awake_bytes_stay_while_pieces_move() {
    change_hands(3, 600);
}

/// One owner: what is given up is all there is, and where the next block comes to lie.
#[test]
fn awake_bytes_stay_while_the_last_piece_is_freed() {
    change_hands(1, 3000);
}

#[test]
fn addresses_that_are_returned_belong_to_whoever_maps_them_next() {
    let bench = Bench::new(64);
    let space = bench.0.address_space();
    bench.mapped(4, 4);
    bench.mapped(20, 4);
    assert_eq!(bench.0.used_end(), bench.range(23, 1).end());
    bench.0.unmap(bench.range(20, 4)).unwrap();
    bench.0.unmap(bench.range(4, 4)).unwrap();
    assert_eq!((bench.0.used_end(), bench.parked_pages()), (space.start, 8));
    let end = bench.range(8, 1).start;
    // SAFETY: nothing is mapped from there on, and the test keeps no copy of the end.
    unsafe { bench.0.shrink(end) };
    assert_eq!(bench.0.address_space(), AddressRange::new(space.start, 8 * PAGE));
    assert_eq!(bench.parked_pages(), 4, "those of the addresses that stay");
    assert!(matches!(
        bench.0.map(bench.range(20, 1), Fill::Any),
        Err(DeviceError::BadRange { .. })
    ));
    // All but the page after the range is free for others, who keep what they map there.
    let others = AddressRange::new(end + os_page_bytes(), space.end() - end);
    let (access, fixed) = (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_FIXED_NOREPLACE);
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE | fixed;
    // SAFETY: it replaces no mapping.
    let mapped = unsafe { libc::mmap(others.start as *mut _, others.bytes, access, flags, -1, 0) };
    assert_eq!(mapped as usize, others.start);
    let word = bench.range(21, 1).start as *mut u64;
    // SAFETY: in the mapping of above.
    unsafe { word.write(7) };
    // The parked piece at the very end moves, and none of the others' pages does.
    bench.0.map(bench.range(0, 4), Fill::Any).unwrap();
    assert_eq!((bench.seen(0, 4), bench.parked_pages()), (numbers(4..8), 0));
    // SAFETY: a higher end is ignored.
    unsafe { bench.0.shrink(space.end()) };
    assert_eq!(bench.0.address_space().end(), end);
    drop(bench);
    // SAFETY: the mapping of above, which outlives the device.
    unsafe {
        assert_eq!(word.read(), 7);
        libc::munmap(mapped, others.bytes);
    }
}
