//! Huge blocks: pools of their own once a caller asks what has been unused, where each finds the place of the one
//! before it.

use crate::common::gpu::Call;
use crate::common::{Fake, PAGE, key, uncounted};
use dormouse_alloc::{Allocator, Block, Cause, Config, Freed, Request};
use dormouse_device::AddressRange;
use std::sync::Arc;

/// Pages stand for 2 MiB, large pages for 16 MiB and segments for 1 GiB.
const LARGE: usize = 8;
const SEGMENT: usize = 512;
const PAGES: usize = 32 * SEGMENT;
/// Granules of a page.
const UNITS: usize = 8;
/// Granules of a MiB.
const MIB: usize = UNITS / 2;

/// What a layer of a microbatch saves, in MiB, and how many layers there are.
const SAVED: [usize; 12] = [64, 32, 32, 32, 32, 64, 32, 32, 112, 112, 112, 112];
const LAYERS: usize = 4;
/// Logits in FP32, and their gradients, in MiB.
const LOGITS: [usize; 4] = [1002; 4];
const GRADIENTS: [usize; 2] = [501; 2];

struct Scene {
    device: Arc<Fake>,
    allocator: Arc<Allocator<Fake>>,
}

impl Scene {
    fn new(budget_pages: usize, granule_bytes: usize) -> Self {
        let config = Config {
            segment_bytes: SEGMENT * PAGE,
            moves_pages: true,
            ..Config::new(granule_bytes, (budget_pages * PAGE) as u64)
        };
        let (device, allocator) = uncounted(PAGES, config, 1, LARGE);
        Self { device, allocator }
    }

    fn request(units: usize) -> Request {
        Request { stream: key(0), ..Request::new(units * PAGE / UNITS) }
    }

    /// A block that queued work uses.
    fn allocate_by(&self, request: &Request) -> Block {
        let block = self.allocator.allocate(request).unwrap();
        self.device.gpu().launch(0, block.range);
        block
    }

    fn allocate(&self, units: usize) -> Block {
        self.allocate_by(&Self::request(units))
    }

    fn free(&self, block: &Block) {
        let freed = self.allocator.free(block.range.start, key(0)).unwrap();
        assert_eq!(freed, Freed::Done);
    }

    fn blocks_of<const N: usize>(&self, mib: [usize; N]) -> [Block; N] {
        mib.map(|mib| self.allocate(mib * MIB))
    }

    /// Forward and backward of a microbatch, whose head has the logits.
    fn microbatch(&self) {
        let saved: Vec<_> = (0..LAYERS).map(|_| self.blocks_of(SAVED)).collect();
        let logits = self.blocks_of(LOGITS);
        logits.iter().for_each(|block| self.free(block));
        let gradients = self.blocks_of(GRADIENTS);
        gradients.iter().for_each(|block| self.free(block));
        saved.iter().flatten().rev().for_each(|block| self.free(block));
        self.allocator.check().unwrap();
    }

    fn segment_of(&self, block: &Block) -> usize {
        let segments = self.allocator.segments().into_iter().map(|(range, _)| range);
        let mut around =
            segments.filter(|it| it.start <= block.range.start && block.range.end() <= it.end());
        around.next().unwrap().start
    }

    fn are_together(&self, one: &Block, other: &Block) -> bool {
        self.segment_of(one) == self.segment_of(other)
    }

    fn must_be_sound(&self) {
        self.allocator.check().unwrap();
        assert_eq!(self.device.violations(), Vec::<String>::new());
    }
}

/// Units of a huge block, and of one that is not.
const HUGE: usize = SEGMENT / 4 * UNITS;
const NOT_HUGE: usize = HUGE - 1;

/// The stream is never idle, so no large page leaves for a block that would split it.
#[test]
fn the_logits_of_a_microbatch_find_the_places_of_those_before_them() {
    let scene = Scene::new(PAGES, PAGE / UNITS);
    // A step has more in use than its microbatches, so that their pages do not move.
    let prompt: Vec<Block> = (0..16).map(|_| scene.allocate(SEGMENT * UNITS)).collect();
    prompt.iter().for_each(|block| scene.free(block));
    scene.device.gpu().drain();
    scene.allocator.trim(u64::MAX);
    scene.device.gpu().launch(0, AddressRange::default());
    scene.allocator.watch_unused();
    // In the second one the activations lie otherwise: a piece of a layer's last tensor is missing.
    scene.microbatch();
    let first_bytes = scene.device.mapped_bytes();
    scene.microbatch();
    let mapped_bytes = scene.device.mapped_bytes();
    assert!(mapped_bytes - first_bytes < (SAVED[SAVED.len() - 1] / 2 * PAGE) as u64);
    let (maps, waits) = (scene.device.maps(), scene.device.gpu().calls(Call::Synchronize));
    scene.microbatch();
    assert_eq!((scene.device.mapped_bytes(), scene.device.maps()), (mapped_bytes, maps));
    assert_eq!(scene.device.gpu().calls(Call::Synchronize), waits);
    scene.must_be_sound();
}

#[test]
fn huge_blocks_without_an_arena_lie_apart_from_the_first_watch_on() {
    let scene = Scene::new(PAGES, PAGE / UNITS);
    let large = scene.allocate(NOT_HUGE);
    let before = scene.allocate(HUGE);
    assert!(scene.are_together(&large, &before));
    scene.allocator.watch_unused();
    let [huge, next] = [HUGE, 2 * HUGE].map(|units| scene.allocate(units));
    assert!(scene.are_together(&huge, &next) && !scene.are_together(&large, &huge));
    // What was there before stays where it is, and serves blocks of its pool.
    scene.free(&before);
    assert!(scene.are_together(&large, &scene.allocate(NOT_HUGE)));
    let arena = scene.allocator.arena_create().unwrap();
    let of_arena = [NOT_HUGE, HUGE]
        .map(|units| scene.allocate_by(&Request { arena: Some(arena), ..Scene::request(units) }));
    assert!(scene.are_together(&of_arena[0], &of_arena[1]));
    scene.must_be_sound();
    let (stats, [small, all_large]) = scene.allocator.stats_by_kind();
    assert_eq!((small.allocations, all_large.allocations), (0, stats.allocations.current));
    scene.device.gpu().drain();
    for block in [large, huge, next, of_arena[0], of_arena[1]] {
        scene.free(&block);
    }
    scene.allocator.arena_close(arena);
    scene.allocator.trim(u64::MAX);
    scene.must_be_sound();
}

#[test]
fn blocks_of_whole_pages_have_one_pool() {
    let scene = Scene::new(PAGES, PAGE);
    scene.allocator.watch_unused();
    let [large, huge] = [HUGE / 2, HUGE].map(|units| scene.allocate(units));
    assert!(scene.are_together(&large, &huge));
}

/// The last page of the one block has room for the end of the other, and no page is left for both.
#[test]
fn a_block_is_refused_only_when_the_gaps_of_all_pools_are_too_short() {
    let half = UNITS / 2;
    let [large, huge] = [UNITS + half, HUGE + half];
    for [first, second] in [[large, huge], [huge, large]] {
        let pages = (first + second) / UNITS;
        for budget_pages in [pages, pages - 1] {
            let scene = Scene::new(budget_pages, PAGE / UNITS);
            scene.allocator.watch_unused();
            let there = scene.allocate(first);
            scene.device.gpu().drain();
            match scene.allocator.allocate(&Scene::request(second)) {
                Ok(block) => assert!(budget_pages == pages && scene.are_together(&there, &block)),
                Err(dormouse_alloc::AllocError::OutOfMemory(report)) => {
                    assert_eq!((budget_pages, report.cause), (pages - 1, Cause::Budget));
                }
                Err(other) => panic!("{other}"),
            }
            scene.must_be_sound();
        }
    }
}
