//! Pages that move: which ones, whom it takes, and where blocks go while nearly all is in use.

use crate::common::gpu::Call;
use crate::common::{BASE, Fake, PAGE, key, uncounted, with_contents};
use dormouse_alloc::{Allocator, Block, Config, Freed, Margin, Request};
use std::sync::Arc;

const PAGE_BYTES: u64 = PAGE as u64;
/// Granules of a page.
const UNITS: usize = 8;
/// What `two_gaps` leaves.
const HELD_PAGES: u64 = 12;

/// A trainer that works on stream 0 and has another stream, on a device with room.
struct Scene {
    device: Arc<Fake>,
    allocator: Arc<Allocator<Fake>>,
}

impl Scene {
    fn new() -> Self {
        const PAGES: usize = 1024;
        let config = Config {
            segment_bytes: PAGES / 4 * PAGE,
            moves_pages: true,
            ..Config::new(PAGE / UNITS, PAGES as u64 * PAGE_BYTES)
        };
        let (device, allocator) = with_contents(PAGES, config, 2);
        Self { device, allocator }
    }

    fn allocate_on(&self, stream: usize, units: usize) -> Block {
        let request = Request { stream: key(stream), ..Request::new(units * PAGE / UNITS) };
        let block = self.allocator.allocate(&request).unwrap();
        self.allocator.check().unwrap();
        block
    }

    fn allocate(&self, units: usize) -> Block {
        self.allocate_on(0, units)
    }

    fn free(&self, block: &Block) {
        let freed = self.allocator.free(block.range.start, key(0)).unwrap();
        assert_eq!(freed, Freed::Done);
        self.allocator.check().unwrap();
    }

    /// Allocates blocks of these numbers of pages, each followed by a block of one page. Returns the former.
    fn islands(&self, pages: &[usize]) -> Vec<Block> {
        let island = |&pages: &usize| {
            let block = self.allocate(pages * UNITS);
            self.allocate(UNITS);
            block
        };
        pages.iter().map(island).collect()
    }

    /// Pages that are still there of what was a block.
    fn pages_left(&self, block: &Block) -> usize {
        let mapped = self.device.mapped_pages();
        crate::common::pages_of(block.range).filter(|&page| mapped[page]).count()
    }

    fn held_pages(&self) -> u64 {
        self.device.mapped_bytes() / PAGE_BYTES
    }

    fn asked(&self) -> u64 {
        self.device.gpu().calls(Call::Query)
    }
}

#[test]
fn ranges_freed_first_move_first() {
    let scene = Scene::new();
    let blocks = scene.islands(&[2, 1, 1]);
    let held_pages = scene.held_pages();
    // The two single pages, and then one of the pair.
    for at in [1, 2, 0] {
        scene.free(&blocks[at]);
    }
    scene.allocate(3 * UNITS);
    assert_eq!([0, 1, 2].map(|at| scene.pages_left(&blocks[at])), [1, 0, 0]);
    assert_eq!(scene.held_pages(), held_pages);
}

#[test]
fn long_runs_stay_where_there_are_many_short_ones() {
    // More than are looked at, also after those that move.
    const SHORT: usize = 80;
    let scene = Scene::new();
    let mut pages = vec![1; SHORT];
    pages.push(9);
    let blocks = scene.islands(&pages);
    // The long one first: it is the oldest.
    for block in blocks.iter().rev() {
        scene.free(block);
    }
    let held_pages = scene.held_pages();
    // More than it has, and nothing else is as long.
    scene.allocate(10 * UNITS);
    assert_eq!((scene.pages_left(&blocks[SHORT]), scene.held_pages()), (9, held_pages));
    assert_eq!(scene.allocate(9 * UNITS).range, blocks[SHORT].range);
    assert_eq!(scene.device.violations(), Vec::<String>::new());
}

#[test]
fn one_query_of_a_stream_covers_all_earlier_frees() {
    let scene = Scene::new();
    let blocks = scene.islands(&[1, 1, 1, 1, 1, 1]);
    let held_pages = scene.held_pages();
    for block in &blocks[..4] {
        scene.free(block);
    }
    let before = scene.asked();
    let user = scene.allocate(2 * UNITS);
    assert_eq!(scene.asked() - before, 2, "of both streams");
    // It has work now, but none that uses what was free then.
    scene.device.gpu().launch(0, user.range);
    scene.allocate(2 * UNITS);
    assert_eq!(scene.held_pages(), held_pages);
    // What comes free from here on may be in use: nothing moves for another stream until this one is idle again.
    scene.device.gpu().launch(0, blocks[4].range);
    scene.free(&blocks[4]);
    scene.free(&blocks[5]);
    scene.allocate_on(1, 2 * UNITS);
    assert_eq!(scene.held_pages(), held_pages + 2);
    scene.device.gpu().drain();
    // The mark behind them is complete.
    scene.allocate_on(1, 2 * UNITS);
    assert_eq!(scene.held_pages(), held_pages + 2);
    assert_eq!(scene.device.violations(), Vec::<String>::new());
}

/// Two gaps that are long enough for two pages: one with all of three pages, and one whose middle
/// page is missing, that two pages fill to both edges. With them a granule more would be in use than
/// ever was.
fn two_gaps(scene: &Scene) -> (Block, Block) {
    let sizes = [12, 16, 12, 24, 8];
    let blocks = sizes.map(|units| scene.allocate(units));
    // Small ones lie elsewhere. What was in use is noted when the second is asked for.
    for _ in 0..2 {
        scene.allocate(1);
    }
    assert_eq!(blocks.map(|it| (it.range.start - BASE) * UNITS / PAGE), [0, 12, 28, 40, 64]);
    scene.free(&blocks[1]);
    assert_eq!(scene.allocator.trim(PAGE_BYTES), PAGE_BYTES);
    // In use meanwhile, so that nothing moves for the other stream.
    scene.device.gpu().launch(0, blocks[3].range);
    scene.free(&blocks[3]);
    scene.allocate_on(1, 24);
    assert_eq!(scene.held_pages(), HELD_PAGES, "73 granules ever were in use, 58 are");
    (blocks[1], blocks[3])
}

#[test]
fn near_the_maximum_a_block_goes_where_it_strands_least() {
    let scene = Scene::new();
    let (edged, whole) = two_gaps(&scene);
    scene.device.gpu().drain();
    assert_eq!(scene.allocate(16).range.start, edged.range.start);
    assert_eq!((scene.held_pages(), scene.pages_left(&whole)), (HELD_PAGES, 2), "a page was moved");
    assert_eq!(scene.device.violations(), Vec::<String>::new());
}

#[test]
fn the_rest_of_a_long_gap_counts_too() {
    let scene = Scene::new();
    let blocks = scene.islands(&[2, 6]);
    let (exact, long) = (blocks[0], blocks[1]);
    scene.allocate(1);
    scene.free(&exact);
    assert_eq!(scene.allocator.trim(2 * PAGE_BYTES), 2 * PAGE_BYTES);
    // In use meanwhile, so that nothing moves for the other stream.
    scene.device.gpu().launch(0, long.range);
    scene.free(&long);
    scene.allocate_on(1, 6 * UNITS);
    scene.device.gpu().drain();
    let held_pages = scene.held_pages();
    // Neither strands anything. The short gap has no page, the long one would have four left.
    assert_eq!(scene.allocate(2 * UNITS).range, exact.range);
    assert_eq!((scene.held_pages(), scene.pages_left(&long)), (held_pages, 4), "two were moved");
    assert_eq!(scene.device.violations(), Vec::<String>::new());
}

#[test]
fn a_choice_that_moves_no_page_maps_no_more() {
    let scene = Scene::new();
    let (edged, whole) = two_gaps(&scene);
    let block = scene.allocate(16);
    assert_eq!(block.range.start, whole.range.start, "what is cached will do");
    assert_eq!((scene.held_pages(), scene.pages_left(&edged)), (HELD_PAGES, 2));
    // It is not tried again soon: the device is not asked for every block.
    let asked = scene.asked();
    scene.free(&block);
    assert_eq!(scene.allocate(16).range.start, whole.range.start);
    assert_eq!(scene.asked(), asked);
    assert_eq!(scene.device.violations(), Vec::<String>::new());
}

#[test]
fn farther_from_the_maximum_cached_ranges_come_first() {
    let scene = Scene::new();
    let (_, whole) = two_gaps(&scene);
    scene.device.gpu().drain();
    // With this one two 73rds of the most ever in use are not.
    assert_eq!(scene.allocate(13).range.start, whole.range.start);
    assert_eq!((scene.held_pages(), scene.pages_left(&whole)), (HELD_PAGES, 3));
}

/// A block that is replaced by a slightly longer one again and again leaves no cache behind, whatever the budget.
#[test]
fn blocks_that_grow_hold_no_more_than_the_spare_bytes() {
    for (divisor, bytes_min) in [(4, 0), (4, 64 * PAGE_BYTES), (256, 0), (1, 16 * PAGE_BYTES)] {
        const PAGES: usize = 1 << 16;
        let config = Config {
            segment_bytes: 64 * PAGE,
            moves_pages: true,
            margin: Margin { divisor, bytes_min },
            ..Config::new(PAGE, PAGES as u64 * PAGE_BYTES)
        };
        let (device, allocator) = uncounted(PAGES, config, 0, 1);
        let mut old: Option<Block> = None;
        let mut high_bytes = 0;
        for pages in 32..512 {
            let new = allocator.allocate(&Request::new(pages * PAGE)).unwrap();
            let old_bytes = old.as_ref().map_or(0, |block| block.range.bytes);
            high_bytes = high_bytes.max((old_bytes + new.range.bytes) as u64);
            let spare_bytes = bytes_min.max(high_bytes / divisor);
            let (mapped_bytes, limit_bytes) = (device.mapped_bytes(), high_bytes + spare_bytes);
            assert!(mapped_bytes <= limit_bytes, "{mapped_bytes} mapped, {limit_bytes} accepted");
            if let Some(old) = old.replace(new) {
                let _: Freed = allocator.free(old.range.start, 0).unwrap();
            }
        }
    }
}
