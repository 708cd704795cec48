//! Blocks that share pages: what the shadow of `packed_model.rs` found once, step by step.

use crate::common::{BASE, Fake, Fault, PAGE, with_contents};
use dormouse_alloc::{
    AllocError, Allocator, BlockId, Cause, Config, Freed, PoolStats, Request, WHOLE_PAGES_DIVISOR,
};
use dormouse_device::AddressRange;
use std::sync::Arc;

const PAGE_BYTES: u64 = PAGE as u64;

/// Pages of `page_units` granules, segments of 16 pages.
fn packed(
    space_pages: usize,
    budget_pages: u64,
    page_units: usize,
) -> (Arc<Fake>, Arc<Allocator<Fake>>) {
    let config = Config {
        segment_bytes: 16 * PAGE,
        ..Config::new(PAGE / page_units, budget_pages * PAGE_BYTES)
    };
    with_contents(space_pages, config, 0)
}

/// Start of a new block, in granules of pages of `page_units`.
fn allocate(allocator: &Allocator<Fake>, page_units: usize, units: usize) -> usize {
    let granule_bytes = PAGE / page_units;
    let block = allocator.allocate(&Request::new(units * granule_bytes)).unwrap();
    (block.range.start - BASE) / granule_bytes
}

fn free(allocator: &Allocator<Fake>, page_units: usize, start: usize) {
    let address = BASE + start * (PAGE / page_units);
    assert_eq!(allocator.free(address, 0).unwrap(), Freed::Done);
    allocator.check().unwrap();
}

/// Nothing of such a block can leave: asleep or not, all of it is cached once it is freed.
#[test]
fn a_block_with_no_page_of_its_own_can_be_freed_asleep() {
    let (device, allocator) = packed(64, 16, 8);
    let blocks = [2, 3].map(|units| {
        let block = allocator.allocate(&Request::new(units * PAGE / 8)).unwrap();
        let info = allocator.claim(block.range.start, 1).unwrap();
        assert_eq!(info.pages.bytes, 0);
        allocator.set_asleep(block.id).unwrap();
        block
    });
    for block in blocks {
        assert_eq!(allocator.free(block.range.start, 0).unwrap(), Freed::Claimed(1));
        allocator.finish_free(block.id).unwrap();
        allocator.check().unwrap();
    }
    assert_eq!(allocator.stats().cached_bytes.current, PAGE_BYTES);
    assert_eq!(allocator.trim(u64::MAX), PAGE_BYTES);
    assert_eq!(device.mapped_bytes(), 0);
}

/// Where the space has no segment of the usual size left, shorter ones do: of whole pages.
#[test]
fn a_short_segment_ends_with_a_page() {
    let (device, allocator) = packed(3, 16, 8);
    for page in 0..3 {
        let arena = Some(allocator.arena_create().unwrap());
        let block = allocator.allocate(&Request { arena, ..Request::new(1) }).unwrap();
        assert_eq!(block.range.start, BASE + page * PAGE);
        allocator.check().unwrap();
    }
    let refused = allocator.allocate(&Request::new(1)).unwrap_err();
    let AllocError::OutOfMemory(report) = refused else { panic!("{refused}") };
    assert_eq!(report.cause, Cause::AddressSpace);
    assert_eq!(device.violations(), Vec::<String>::new());
}

/// Pools of small blocks, up to half a page, and of large ones have their figures; what is asleep is requested alone.
#[test]
fn small_and_large_blocks_are_counted_apart() {
    let (_, allocator) = packed(64, 16, 8);
    let unit = PAGE / 8;
    let [small, _, large, page] = [2 * unit, 3 * unit - 1, 24 * unit - 5, 8 * unit].map(|bytes| {
        let request = Request { whole_pages: bytes == 8 * unit, ..Request::new(bytes) };
        allocator.allocate(&request).unwrap()
    });
    let of = |units: usize| (units * unit) as u64;
    let stats = PoolStats { segments: 1, ..PoolStats::default() };
    let small_stats = PoolStats {
        allocated_bytes: of(5),
        active_bytes: of(5),
        requested_bytes: of(5) - 1,
        mapped_bytes: of(8),
        inactive_split_bytes: of(3),
        allocations: 2,
        inactive_splits: 1,
        ..stats
    };
    let large_stats = PoolStats {
        allocated_bytes: of(32),
        active_bytes: of(32),
        requested_bytes: of(32) - 5,
        mapped_bytes: of(32),
        allocations: 2,
        ..stats
    };
    assert_eq!(allocator.stats_by_kind(), (allocator.stats(), [small_stats, large_stats]));
    allocator.claim(page.range.start, 1).unwrap();
    allocator.set_asleep(page.id).unwrap();
    let [_, seen] = allocator.stats_by_kind().1;
    let (awake, pages) = (of(24), of(24));
    let asleep = PoolStats {
        allocated_bytes: awake,
        active_bytes: awake,
        mapped_bytes: pages,
        ..large_stats
    };
    assert_eq!(seen, asleep);
    free(&allocator, 8, (small.range.start - BASE) / unit);
    free(&allocator, 8, (large.range.start - BASE) / unit);
    let [small_seen, large_seen] = allocator.stats_by_kind().1;
    assert_eq!(
        (small_seen.inactive_split_bytes, small_seen.inactive_splits, small_seen.allocations),
        (of(5), 2, 1)
    );
    // What sleeps keeps its segment in use.
    assert_eq!(
        (large_seen.inactive_split_bytes, large_seen.inactive_splits, large_seen.allocations),
        (of(24), 1, 1)
    );
    assert_eq!((large_seen.allocated_bytes, large_seen.requested_bytes), (0, of(8)));
}

/// The shortest gap is taken first, but no request is refused that a longer one has the pages for.
#[test]
fn the_gap_with_the_fewest_pages_missing_is_the_last_resort() {
    let (_, allocator) = packed(64, 16, 8);
    let sizes = [9, 23, 8, 16, 8, 64];
    assert_eq!(sizes.map(|units| allocate(&allocator, 8, units)), [0, 9, 32, 40, 56, 64]);
    // Two gaps: 9 to 32, whose first 7 granules have a page, and 40 to 56, which has none.
    free(&allocator, 8, 9);
    free(&allocator, 8, 40);
    assert_eq!(allocator.trim(u64::MAX), 4 * PAGE_BYTES);
    allocator.set_budget(13 * PAGE_BYTES).unwrap();
    assert_eq!(allocate(&allocator, 8, 12), 9);
    allocator.check().unwrap();
}

/// The end of a gap that an aligned block misses fewest pages at may be its upper one.
#[test]
fn an_aligned_request_may_have_the_upper_end_of_a_gap() {
    let (_, allocator) = packed(64, 16, 8);
    // The last of the gap's three pages is shared with the block after it.
    let sizes = [8, 23, 97];
    assert_eq!(sizes.map(|units| allocate(&allocator, 8, units)), [0, 8, 31]);
    free(&allocator, 8, 8);
    assert_eq!(allocator.trim(u64::MAX), 2 * PAGE_BYTES);
    allocator.set_budget(15 * PAGE_BYTES).unwrap();
    let align = PAGE / 2;
    let request = Request { align, ..Request::new(11 * PAGE / 8) };
    // One page at the upper end, from granule 20 on; two at the lower one.
    let block = allocator.allocate(&request).unwrap();
    assert_eq!(block.range.start, BASE + 20 * PAGE / 8);
    allocator.check().unwrap();
}

/// A size class is searched so far at first; before a refusal it is searched to the end.
#[test]
fn no_cached_range_is_too_deep_in_its_class() {
    let (_, allocator) = packed(64, 12, 256);
    let mut holes = Vec::new();
    for units in [201, 200, 200, 200, 200, 200, 200, 200, 200] {
        holes.push(allocate(&allocator, 256, units));
        allocate(&allocator, 256, 130);
    }
    for &hole in &holes {
        free(&allocator, 256, hole);
    }
    // No page can be mapped, and none is free.
    assert_eq!(allocator.stats().mapped_bytes.current, 12 * PAGE_BYTES);
    assert_eq!(allocate(&allocator, 256, 201), holes[0]);
    allocator.check().unwrap();
}

/// Free pages are moved rather than more mapped than ever were in use.
#[test]
fn free_pages_are_moved() {
    const REQUESTS: u64 = 1000;
    let config = Config {
        segment_bytes: 16 * PAGE,
        moves_pages: true,
        ..Config::new(PAGE / 8, 64 * PAGE_BYTES)
    };
    let (device, allocator) = with_contents(64, config, 0);
    // What one arena frees is of no use to the other as it is.
    let arenas = [0, 1].map(|_| Some(allocator.arena_create().unwrap()));
    let mut most_bytes = 0;
    for request in 0..REQUESTS {
        let arena = arenas[request as usize % 2];
        let block = allocator.allocate(&Request { arena, ..Request::new(10 * PAGE) }).unwrap();
        most_bytes = device.mapped_bytes().max(most_bytes);
        assert_eq!(allocator.free(block.range.start, 0).unwrap(), Freed::Done);
    }
    assert_eq!(most_bytes, 10 * PAGE_BYTES);
    allocator.check().unwrap();
}

/// An id names one block, whatever became of maps that failed meanwhile.
#[test]
fn a_failed_map_revives_no_old_id() {
    let (device, allocator) = packed(64, 16, 8);
    assert_eq!(allocate(&allocator, 8, 9), 0);
    // One that begins in the cached rest of a page, and one that begins with the page after it.
    let shared = Request::new(12 * PAGE / 8);
    let apart = Request { whole_pages: true, ..Request::new(PAGE) };
    let mut gone: Vec<BlockId> = Vec::new();
    for _ in 0..4 {
        device.fail_map(0, Fault::Refused);
        allocator.allocate(&shared).unwrap_err();
        let block = allocator.allocate(&apart).unwrap();
        assert!(!gone.contains(&block.id), "{:?} again", block.id);
        assert_eq!(allocator.free(block.range.start, 0).unwrap(), Freed::Done);
        assert_eq!(allocator.trim(u64::MAX), PAGE_BYTES);
        gone.push(block.id);
        assert!(gone.iter().all(|&id| allocator.info(id).is_err()), "{gone:?}");
        allocator.check().unwrap();
    }
}

/// A block is put at the end of a gap where it takes fewer pages, right to the edge.
#[test]
fn a_gap_is_filled_from_the_end_that_misses_fewer_pages() {
    let (device, allocator) = packed(64, 16, 8);
    // Of the gap from 8 to 31 the last page has a block beside it, and stays.
    assert_eq!([8, 23, 97].map(|units| allocate(&allocator, 8, units)), [0, 8, 31]);
    free(&allocator, 8, 8);
    assert_eq!(allocator.trim(u64::MAX), 2 * PAGE_BYTES);
    assert_eq!(allocate(&allocator, 8, 11), 20);
    assert_eq!(device.mapped_bytes(), 15 * PAGE_BYTES);
    allocator.check().unwrap();
}

/// Small blocks would keep the pages of large ones from moving: they have segments of their own.
#[test]
fn small_blocks_lie_apart() {
    let (_, allocator) = packed(64, 64, 8);
    let segment_units = 16 * 8;
    assert_eq!(allocate(&allocator, 8, 5), 0);
    assert_eq!(allocate(&allocator, 8, 4), segment_units);
    assert_eq!(allocate(&allocator, 8, 1), segment_units + 4);
    assert_eq!(allocate(&allocator, 8, 6), 5);
    // A 32nd of a page is small, whole pages or not; a byte more of them is large.
    let whole = |bytes| Request { whole_pages: true, ..Request::new(bytes) };
    let small = allocator.allocate(&whole(PAGE / WHOLE_PAGES_DIVISOR)).unwrap();
    assert_eq!(small.range, AddressRange::new(BASE + (segment_units + 5) * PAGE / 8, PAGE / 8));
    let large = allocator.allocate(&whole(PAGE / WHOLE_PAGES_DIVISOR + 1)).unwrap();
    assert_eq!(large.range, AddressRange::new(BASE + 2 * PAGE, PAGE));
    allocator.check().unwrap();
}

/// Where nothing else is left, a block of either kind has what is free beside those of the other:
/// cached as it is, or with the pages that are missing.
#[test]
fn nothing_is_refused_that_is_free_among_blocks_of_the_other_kind() {
    let (_, allocator) = packed(64, 4, 8);
    assert_eq!(allocate(&allocator, 8, 28), 0);
    assert_eq!(allocate(&allocator, 8, 3), 28, "small, in the last page of a large one");
    assert_eq!(allocate(&allocator, 8, 1), 31);
    free(&allocator, 8, 0);
    // Small ones have one of the three pages that are whole, and a large one the others.
    assert_eq!((allocate(&allocator, 8, 2), allocate(&allocator, 8, 16)), (128, 0));
    assert_eq!(allocate(&allocator, 8, 5), 130, "large, in the page of a small one");
    assert_eq!(allocate(&allocator, 8, 4), 24, "small, in half of a page of large ones");
    // One granule is left.
    let refused = allocator.allocate(&Request::new(PAGE / 4)).unwrap_err();
    assert!(matches!(refused, AllocError::OutOfMemory(_)), "{refused}");
    allocator.set_budget(5 * PAGE_BYTES).unwrap();
    // Among large ones it would take two pages more.
    assert_eq!(allocate(&allocator, 8, 9), 135, "large, the granule and one page more");
    allocator.check().unwrap();
}

/// A block takes whole pages of the budget: the rest of a page serves no block.
#[test]
fn a_request_beyond_the_budget_is_impossible() {
    let (_, allocator) = packed(64, 4, 8);
    allocator.set_budget(4 * PAGE_BYTES - 1).unwrap();
    let cached = allocate(&allocator, 8, 24);
    free(&allocator, 8, cached);
    let refused = allocator.allocate(&Request::new(4 * PAGE - PAGE / 8)).unwrap_err();
    let AllocError::OutOfMemory(report) = refused else { panic!("{refused}") };
    assert!(report.tried.impossible, "{report}");
    assert_eq!(allocator.stats().cached_bytes.current, 3 * PAGE_BYTES);
    assert_eq!(allocate(&allocator, 8, 24), cached);
}
