//! An address space whose free end is given up.

use crate::common::{BASE, Fake, PAGE};
use dormouse_alloc::{AllocError, Allocator, Block, Config, Request};
use dormouse_timeline::Timeline;
use std::sync::Arc;

/// Pages of the space, and of a segment.
const PAGES: usize = 64;
const SEGMENT_PAGES: usize = 8;

fn allocator() -> (Arc<Fake>, Allocator<Fake>) {
    let device = Fake::new(PAGES);
    let config =
        Config { segment_bytes: SEGMENT_PAGES * PAGE, ..Config::new(PAGE, (PAGES * PAGE) as u64) };
    let allocator = Allocator::new(Arc::clone(&device), config, Arc::new(Timeline::new(64)));
    (device, allocator.unwrap())
}

fn allocate(allocator: &Allocator<Fake>, pages: usize) -> Result<Block, AllocError> {
    let outcome = allocator.allocate(&Request::new(pages * PAGE));
    allocator.check().unwrap();
    outcome
}

fn free(allocator: &Allocator<Fake>, block: &Block) {
    let _ = allocator.free(block.range.start, 0).unwrap();
    allocator.check().unwrap();
}

fn cut_pages(allocator: &Allocator<Fake>) -> usize {
    let end = allocator.cut_addresses();
    allocator.check().unwrap();
    (end - BASE) / PAGE
}

#[test]
fn addresses_behind_the_last_segment_serve_no_request() {
    let (device, allocator) = allocator();
    let blocks = [8, 20, 8].map(|pages| allocate(&allocator, pages).unwrap());
    free(&allocator, &blocks[1]);
    free(&allocator, &blocks[2]);
    // Cached pages keep their segments: 8, 24 and 8 pages.
    assert_eq!(cut_pages(&allocator), 40);
    let unmaps = device.unmaps();
    // The cache serves as before. Nothing is trimmed for what it cannot serve.
    let again = allocate(&allocator, 20).unwrap();
    assert_eq!(again.range, blocks[1].range);
    match allocate(&allocator, 9) {
        Err(AllocError::NoAddresses { asked_bytes, space_bytes }) => {
            assert_eq!((asked_bytes, space_bytes), (9 * PAGE as u64, 40 * PAGE as u64));
        }
        other => panic!("{other:?}"),
    }
    assert_eq!((device.unmaps(), allocator.stats().ooms), (unmaps, 0));
    assert!(allocator.lookup(BASE + 40 * PAGE).is_none());
    // Without its pages the last segment leaves as well, and then all of them.
    allocator.trim(u64::MAX);
    assert_eq!(cut_pages(&allocator), 32);
    free(&allocator, &again);
    free(&allocator, &blocks[0]);
    allocator.trim(u64::MAX);
    assert_eq!((cut_pages(&allocator), cut_pages(&allocator)), (0, 0));
    assert!(matches!(allocate(&allocator, 1), Err(AllocError::NoAddresses { .. })));
    assert_eq!(device.violations(), Vec::<String>::new());
}

#[test]
fn addresses_between_segments_stay_and_serve() {
    let (_, allocator) = allocator();
    let blocks = [8, 16, 8].map(|pages| allocate(&allocator, pages).unwrap());
    free(&allocator, &blocks[1]);
    allocator.trim(u64::MAX);
    assert_eq!(cut_pages(&allocator), 32);
    assert_eq!(allocate(&allocator, 16).unwrap().range, blocks[1].range);
    assert!(matches!(allocate(&allocator, 8), Err(AllocError::NoAddresses { .. })));
}
