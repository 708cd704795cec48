//! Large pages: which blocks have them, where blocks go beside them, and that every free page can leave.

use crate::common::gpu::Call;
use crate::common::{Fake, PAGE, key, pages_of, with_large_pages};
use dormouse_alloc::{Allocator, Block, Config, Freed, Request};
use dormouse_device::AddressRange;
use std::sync::Arc;

const LARGE: usize = 4;
/// Pages of the device and of a segment.
const PAGES: usize = 512;
const SEGMENT: usize = 64;

/// A trainer with one stream, on a device with room.
struct Scene {
    device: Arc<Fake>,
    allocator: Arc<Allocator<Fake>>,
}

impl Scene {
    fn new() -> Self {
        let config = Config {
            segment_bytes: SEGMENT * PAGE,
            moves_pages: true,
            ..Config::new(PAGE / 8, (PAGES * PAGE) as u64)
        };
        let (device, allocator) = with_large_pages(PAGES, config, 1, LARGE);
        Self { device, allocator }
    }

    /// A scene whose maximum use was `pages`. Up to that number, pages are mapped without a move.
    fn with_room(pages: usize) -> Self {
        let scene = Self::new();
        // The use is noted at the next request.
        [scene.allocate(pages), scene.allocate(1)].iter().for_each(|it| scene.free(it));
        assert_eq!(scene.allocator.trim(u64::MAX), ((pages + 1) * PAGE) as u64);
        scene
    }

    fn allocate(&self, pages: usize) -> Block {
        let request = Request { stream: key(0), ..Request::new(pages * PAGE) };
        let block = self.allocator.allocate(&request).unwrap();
        self.allocator.check().unwrap();
        self.device.gpu().must_suit(block.range, 0);
        block
    }

    fn free(&self, block: &Block) {
        let freed = self.allocator.free(block.range.start, key(0)).unwrap();
        assert_eq!(freed, Freed::Done);
        self.allocator.check().unwrap();
    }

    fn large_pages(&self, range: AddressRange) -> usize {
        self.device.large_pages(range)
    }

    fn held_pages(&self) -> usize {
        self.device.mapped_bytes() as usize / PAGE
    }

    /// Puts a block to sleep, or wakes it, as the engine does.
    fn sleep(&self, block: &Block) -> AddressRange {
        let info = self.allocator.claim(block.range.start, 1).unwrap();
        self.device.take_pages(info.pages);
        self.allocator.set_asleep(block.id).unwrap();
        self.allocator.check().unwrap();
        info.pages
    }

    fn wake(&self, block: &Block) {
        let info = self.allocator.info(block.id).unwrap();
        self.allocator.reserve_awake(info.pages.bytes as u64).unwrap();
        self.device.bring_pages(info.pages);
        if info.wakes_large {
            self.device.join(info.pages);
        }
        self.allocator.set_awake(block.id).unwrap();
        self.allocator.unclaim(block.id).unwrap();
        self.allocator.check().unwrap();
    }
}

#[test]
fn blocks_of_two_large_pages_and_more_have_them() {
    let scene = Scene::new();
    let small = scene.allocate(2 * LARGE - 1);
    assert_eq!(scene.large_pages(small.range), 0);
    // It begins a page before the end of a large page, and is two and a half of them long.
    let big = scene.allocate(2 * LARGE + 2);
    assert_eq!(scene.large_pages(big.range), 2);
    // Half of its last large page is the next block's: that one has pages.
    let next = scene.allocate(3 * LARGE);
    assert_eq!(scene.large_pages(next.range), 2);
}

#[test]
fn a_block_that_wakes_has_large_pages_whatever_it_had() {
    let scene = Scene::new();
    let small: Vec<Block> = (0..3).map(|_| scene.allocate(LARGE)).collect();
    small.iter().for_each(|block| scene.free(block));
    let block = scene.allocate(3 * LARGE);
    assert_eq!(scene.large_pages(block.range), 0, "cached pages are taken as they are");
    scene.sleep(&block);
    scene.wake(&block);
    assert_eq!(scene.large_pages(block.range), 3);
    // Freed asleep, nothing is left of them.
    scene.sleep(&block);
    assert_eq!(scene.allocator.free(block.range.start, key(0)).unwrap(), Freed::Claimed(1));
    scene.allocator.finish_free(block.id).unwrap();
    scene.allocator.check().unwrap();
    assert_eq!(scene.held_pages(), 0);
}

#[test]
fn the_large_page_in_the_way_leaves_and_the_block_covers_the_gap() {
    let scene = Scene::new();
    let big = scene.allocate(4 * LARGE);
    let end = scene.allocate(1);
    scene.free(&big);
    let block = scene.allocate(LARGE + 3);
    assert_eq!(block.range.start, big.range.start, "a place is where it would be without them");
    assert_eq!(scene.large_pages(block.range), 1, "the second one has left");
    // Its last page is unmapped, because no block uses it.
    assert_eq!(scene.held_pages(), 4 * LARGE - 1 + 1);
    // Cached are large pages alone: the next one leaves, and the block has the page that was left over.
    let next = scene.allocate(1);
    assert_eq!(next.range.start, block.range.end());
    assert_eq!(scene.large_pages(big.range), 2);
    assert_eq!(scene.held_pages(), 3 * LARGE + 1);
    [block, next, end].iter().for_each(|it| scene.free(it));
    assert_eq!(scene.allocator.trim(u64::MAX), ((3 * LARGE + 1) * PAGE) as u64);
    assert_eq!(scene.held_pages(), 0);
}

#[test]
fn a_block_prefers_a_place_that_splits_none() {
    let scene = Scene::new();
    let (big, fence) = (scene.allocate(2 * LARGE), scene.allocate(1));
    let small: Vec<Block> = (0..3).map(|_| scene.allocate(LARGE - 1)).collect();
    let fence = [fence, scene.allocate(1)];
    small.iter().for_each(|block| scene.free(block));
    scene.free(&big);
    let unmaps = scene.device.unmaps();
    let block = scene.allocate(2 * LARGE - 1);
    assert_eq!(block.range.start, small[0].range.start);
    assert_eq!(scene.device.unmaps(), unmaps);
    fence.iter().for_each(|it| scene.free(it));
}

#[test]
fn a_large_page_in_use_by_queued_work_stays_and_the_block_grows_elsewhere() {
    let scene = Scene::with_room(5 * LARGE + 1);
    let big = scene.allocate(4 * LARGE);
    scene.device.gpu().launch(0, big.range);
    scene.free(&big);
    let (held_pages, waits) = (scene.held_pages(), scene.device.gpu().calls(Call::Synchronize));
    let block = scene.allocate(LARGE + 1);
    assert!(!pages_of(big.range).contains(&pages_of(block.range).start), "{block:?}");
    assert_eq!(scene.device.gpu().calls(Call::Synchronize), waits, "it does not wait for one");
    assert_eq!(scene.held_pages(), held_pages + LARGE + 1);
    // Once the work is done, it leaves.
    scene.device.gpu().drain();
    scene.allocate(LARGE + 1);
    assert_eq!(scene.large_pages(big.range), 3);
}

#[test]
fn a_move_takes_whole_large_pages() {
    let scene = Scene::new();
    let big = scene.allocate(4 * LARGE);
    scene.free(&big);
    // No cached range is long enough: what is missing moves, rounded up.
    let longer = scene.allocate(SEGMENT);
    assert_eq!(scene.held_pages(), SEGMENT);
    scene.free(&longer);
    let trimmed_bytes = scene.allocator.trim(PAGE as u64);
    assert_eq!(trimmed_bytes, (LARGE * PAGE) as u64);
}

#[test]
fn a_refused_unmap_leaves_the_large_page_and_the_block_grows() {
    let scene = Scene::with_room(4 * LARGE + 1);
    let big = scene.allocate(3 * LARGE);
    scene.free(&big);
    scene.device.fail_unmap(0, crate::common::Fault::Refused);
    let block = scene.allocate(LARGE + 1);
    assert!(!pages_of(big.range).contains(&pages_of(block.range).start), "{block:?}");
    assert_eq!(scene.large_pages(big.range), 3);
    assert_eq!(scene.allocate(LARGE + 1).range.start, big.range.start, "the next one splits it");
}
