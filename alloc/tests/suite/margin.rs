//! What stays cached beyond what is in use, and what a trim to the margin gives back.

use crate::common::random::Random;
use crate::common::{PAGE, with_contents};
use dormouse_alloc::{Allocator, Block, Config, Margin, Request};
use dormouse_device::Fill;
use std::sync::Arc;

const PAGES: usize = 512;
const MARGIN: Margin = Margin { divisor: 4, bytes_min: 8 * PAGE as u64 };
const OPERATIONS: usize = 4000;
const LIVE_PAGES_MAX: usize = 300;

fn config() -> Config {
    Config {
        segment_bytes: PAGES * PAGE,
        moves_pages: true,
        margin: MARGIN,
        ..Config::new(PAGE, (PAGES * PAGE) as u64)
    }
}

fn margin_bytes(in_use_bytes: u64) -> u64 {
    (in_use_bytes / MARGIN.divisor).max(MARGIN.bytes_min)
}

/// After every free at most the margin is cached; the device, which knows the contents, sees no access to a page
/// that is gone.
#[test]
fn at_most_the_margin_stays_cached() {
    let (device, allocator) = with_contents(PAGES, config(), 0);
    let (mut random, mut live): (_, Vec<Block>) = (Random(7), Vec::new());
    let (mut live_pages, mut most_pages) = (0, 0);
    for _ in 0..OPERATIONS {
        let pages = 1 + random.below(24);
        if random.below(2) == 0 && live_pages + pages <= LIVE_PAGES_MAX {
            let fill = if random.below(2) == 0 { Fill::Zero } else { Fill::Any };
            let request = Request { fill, ..Request::new(pages * PAGE) };
            live.push(allocator.allocate(&request).unwrap());
            live_pages += pages;
        } else if !live.is_empty() {
            let block = live.swap_remove(random.below(live.len()));
            let _ = allocator.free(block.range.start, 0).unwrap();
            live_pages -= block.range.bytes / PAGE;
            allocator.trim_beyond_margin();
            let in_use_bytes = (live_pages * PAGE) as u64;
            let held_bytes = device.mapped_bytes();
            assert!(held_bytes <= in_use_bytes + margin_bytes(in_use_bytes), "{held_bytes}");
        }
        most_pages = most_pages.max(live_pages);
        allocator.check().unwrap();
    }
    assert!(most_pages > LIVE_PAGES_MAX / 2, "the sequence is long enough: {most_pages}");
    assert_eq!(device.violations(), Vec::<String>::new());
}

/// Only what is beyond the margin goes, and it is counted.
#[test]
fn what_is_within_the_margin_stays() {
    let (device, allocator) = with_contents(PAGES, config(), 0);
    let blocks = [16, 40].map(|pages| allocate(&allocator, pages));
    let _ = allocator.free(blocks[1].range.start, 0).unwrap();
    assert_eq!(allocator.trim_beyond_margin(), 32 * PAGE as u64);
    assert_eq!(device.mapped_bytes(), (16 + 8) * PAGE as u64);
    assert_eq!(allocator.trim_beyond_margin(), 0);
    let again = allocate(&allocator, 4);
    assert_eq!(device.mapped_bytes(), (16 + 8) * PAGE as u64, "cached pages serve it");
    let _ = allocator.free(again.range.start, 0).unwrap();
    assert_eq!(allocator.trim_beyond_margin(), 0);
}

/// Without moving pages there is no margin.
#[test]
fn an_allocator_that_moves_no_pages_keeps_them() {
    let plain = Config { moves_pages: false, ..config() };
    let (device, allocator) = with_contents(PAGES, plain, 0);
    let block = allocate(&allocator, 64);
    let _ = allocator.free(block.range.start, 0).unwrap();
    assert_eq!((allocator.trim_beyond_margin(), device.mapped_bytes()), (0, 64 * PAGE as u64));
}

fn allocate(allocator: &Arc<Allocator<crate::common::Fake>>, pages: usize) -> Block {
    allocator.allocate(&Request::new(pages * PAGE)).unwrap()
}

/// What may wake ahead: up to a sixteenth below the most ever in use, or below the budget.
#[test]
fn memory_is_spare_as_far_as_it_was_in_use_before() {
    let (_, allocator) = with_contents(PAGES, config(), 0);
    let bytes = |pages: usize| (pages * PAGE) as u64;
    let block = |pages| allocator.allocate(&Request::new(pages * PAGE)).unwrap();
    let (kept, freed) = (block(63), block(97));
    assert_eq!(allocator.spare_bytes(), 0, "this is the most that was ever in use");
    // The use is noted with the next request.
    let noted = block(1);
    let _ = allocator.free(freed.range.start, 0).unwrap();
    assert_eq!(allocator.spare_bytes(), bytes(160 - 10 - 64));
    allocator.reserve_awake(bytes(6)).unwrap();
    assert_eq!(allocator.spare_bytes(), bytes(160 - 10 - 64 - 6));
    allocator.set_budget(bytes(128)).unwrap();
    assert_eq!(allocator.spare_bytes(), bytes(128 - 8 - 64 - 6));
    allocator.unreserve_awake(bytes(6)).unwrap();
    for block in [kept, noted] {
        let _ = allocator.free(block.range.start, 0).unwrap();
    }
    assert_eq!(allocator.spare_bytes(), bytes(128 - 8));
}
