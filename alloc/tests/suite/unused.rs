//! Pages that no block has used since a time: they leave, and no others.

use crate::common::gpu::Call;
use crate::common::{Fake, Fault, PAGE, key, pages_of, uncounted};
use dormouse_alloc::{Allocator, ArenaId, Block, Config, Freed, Request};
use dormouse_device::{AddressRange, Operation};
use proptest::prelude::*;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

const PAGES: usize = 1024;
/// Granules of a page.
const UNITS: usize = 8;
const STREAMS: usize = 2;
const LARGE: usize = 4;

const fn bytes(pages: usize) -> u64 {
    (pages * PAGE) as u64
}

fn config() -> Config {
    Config {
        segment_bytes: PAGES / 4 * PAGE,
        moves_pages: true,
        ..Config::new(PAGE / UNITS, bytes(PAGES))
    }
}

/// A trainer with two streams, on a device with room.
struct Scene {
    device: Arc<Fake>,
    allocator: Arc<Allocator<Fake>>,
}

impl Scene {
    fn with(config: Config, streams: usize, large_pages: usize) -> Self {
        let (device, allocator) = uncounted(PAGES, config, streams, large_pages);
        Self { device, allocator }
    }

    fn new() -> Self {
        Self::with(config(), STREAMS, 1)
    }

    fn request(&self, request: Request) -> Block {
        let block = self.allocator.allocate(&request).unwrap();
        self.allocator.check().unwrap();
        block
    }

    fn allocate(&self, stream: usize, pages: usize) -> Block {
        self.request(Request { stream: key(stream), ..Request::new(pages * PAGE) })
    }

    fn free(&self, stream: usize, block: &Block) {
        let freed = self.allocator.free(block.range.start, key(stream)).unwrap();
        assert_eq!(freed, Freed::Done);
        self.allocator.check().unwrap();
    }

    /// A kernel of stream 0 uses the block, and then it is freed.
    fn use_and_free(&self, block: &Block) {
        self.device.gpu().launch(0, block.range);
        self.free(0, block);
    }

    /// Free ranges with a page in use behind each.
    fn all_freed<const N: usize>(&self, pages: [usize; N]) -> [Block; N] {
        let blocks = pages.map(|pages| {
            let block = self.allocate(0, pages);
            self.allocate(0, 1);
            block
        });
        blocks.iter().for_each(|block| self.free(0, block));
        blocks
    }

    fn freed(&self, pages: usize) -> Block {
        let [block] = self.all_freed([pages]);
        block
    }

    /// A microbatch that needs one block.
    fn microbatch(&self, pages: usize) -> Block {
        let block = self.allocate(0, pages);
        self.use_and_free(&block);
        block
    }

    fn watch(&self) -> u64 {
        self.allocator.watch_unused()
    }

    /// Trims, and returns the pages.
    fn trim(&self, since: u64, pages_max: usize) -> usize {
        let trimmed_bytes = self.allocator.trim_unused(since, bytes(pages_max));
        self.allocator.check().unwrap();
        assert_eq!(self.device.violations(), Vec::<String>::new());
        assert_eq!(self.device.gpu().calls(Call::Synchronize), 0, "it waits for no stream");
        usize::try_from(trimmed_bytes).unwrap() / PAGE
    }

    /// Mapped pages of the block's addresses.
    fn mapped(&self, block: &Block) -> usize {
        let mapped = self.device.mapped_pages();
        mapped[pages_of(block.range)].iter().filter(|is_mapped| **is_mapped).count()
    }
}

#[test]
fn a_range_that_was_used_since_stays_and_another_leaves() {
    let scene = Scene::new();
    let [unused, used] = scene.all_freed([8, 3]);
    let since = scene.watch();
    assert_eq!(scene.microbatch(3).range.start, used.range.start);
    scene.device.gpu().drain();
    assert_eq!(scene.trim(since, PAGES), 8);
    assert_eq!((scene.mapped(&unused), scene.mapped(&used)), (0, 3));
    assert_eq!(scene.trim(since, PAGES), 0);
    // The other block's pages were not used after the time of this second watch.
    assert_eq!(scene.trim(scene.watch(), PAGES), 3);
}

/// What is free in one range has times of its own, also where the stream is idle whenever it is asked.
#[test]
fn the_part_of_a_range_that_was_not_used_leaves() {
    for is_busy in [false, true] {
        let scene = Scene::new();
        let all = scene.freed(10);
        let mut since = Vec::new();
        for number in 0..3 {
            since.push(scene.watch());
            assert_eq!(scene.microbatch(4).range.start, all.range.start);
            if is_busy && number == 0 {
                // The stream is found busy, and is marked from then on.
                assert_eq!(scene.trim(since[0], PAGES), 0);
            }
            scene.device.gpu().drain();
            if is_busy {
                scene.device.gpu().launch(0, AddressRange::default());
            }
        }
        assert_eq!(scene.trim(since[1], PAGES), 6, "{is_busy}");
        assert_eq!(scene.mapped(&all), 4);
        // The next microbatch maps nothing.
        let maps = scene.device.maps();
        scene.microbatch(4);
        assert_eq!(scene.device.maps(), maps);
    }
}

/// Nothing is known of the time before the first call.
#[test]
fn what_was_freed_before_the_watch_counts_as_freed_when_it_began() {
    let scene = Scene::new();
    scene.freed(4);
    let began = scene.watch();
    assert_eq!(scene.trim(began - 1, PAGES), 0);
    assert_eq!(scene.trim(began, PAGES), 4);
}

/// A trim that finds a stream idle ends its marking, but not its times.
#[test]
fn times_stay_when_a_stream_is_found_idle_again() {
    let scene = Scene::new();
    // A mark comes with each 12 pages.
    scene.allocate(0, 400);
    let [all, other] = [5, 1].map(|pages| {
        let block = scene.allocate(0, pages);
        scene.allocate(0, 1);
        block
    });
    scene.microbatch(3);
    assert_eq!(scene.trim(scene.watch(), PAGES), 0, "it is found busy");
    scene.free(0, &other);
    let first = scene.watch();
    scene.free(0, &all);
    let second = scene.watch();
    scene.device.gpu().drain();
    assert_eq!(scene.trim(first, PAGES), 3 + 1);
    assert_eq!(scene.microbatch(2).range.start, all.range.start);
    scene.device.gpu().drain();
    assert_eq!(scene.trim(second, PAGES), 3);
}

/// Times cost no event: a stream is marked where it was found busy, as before.
#[test]
fn the_watch_marks_no_stream() {
    let scene = Scene::new();
    scene.watch();
    for _ in 0..20 {
        scene.freed(8);
    }
    assert_eq!(scene.device.gpu().calls(Call::Record), 0);
}

/// A stream that came later has pages with times too, and so has one that was marked before.
#[test]
fn all_streams_have_times() {
    let scene = Scene::new();
    scene.watch();
    scene.device.gpu().add_stream();
    scene.allocator.register_stream(key(STREAMS), STREAMS).unwrap();
    for stream in [1, STREAMS] {
        let all = scene.allocate(stream, 10);
        scene.allocate(stream, 1);
        scene.free(stream, &all);
        let since = scene.watch();
        let block = scene.allocate(stream, 4);
        assert_eq!(block.range.start, all.range.start);
        scene.free(stream, &block);
        assert_eq!(scene.trim(since, PAGES), 6, "stream {stream}");
    }
}

#[test]
fn pages_stay_while_queued_work_uses_them() {
    let scene = Scene::new();
    let block = scene.allocate(0, 6);
    scene.use_and_free(&block);
    let since = scene.watch();
    assert_eq!(scene.trim(since, PAGES), 0);
    // Behind a mark, though the stream is not idle.
    scene.microbatch(2);
    scene.device.gpu().drain();
    scene.device.gpu().launch(0, AddressRange::default());
    assert_eq!(scene.trim(since, PAGES), 4);
}

#[test]
fn blocks_that_other_streams_use_stay() {
    let scene = Scene::new();
    let block = scene.allocate(0, 6);
    scene.allocator.record_stream(block.range.start, key(1)).unwrap();
    scene.device.gpu().launch(1, block.range);
    scene.free(0, &block);
    let since = scene.watch();
    assert_eq!(scene.allocator.stats().pending_bytes.current, bytes(6));
    assert_eq!((scene.trim(since, PAGES), scene.mapped(&block)), (0, 6));
    scene.device.gpu().drain();
    // The pages can leave once somebody finds them free, and have been free since the block was.
    assert_eq!(scene.allocator.trim(0), 0);
    assert_eq!((scene.trim(since - 1, PAGES), scene.mapped(&block)), (0, 6));
    assert_eq!((scene.trim(since, PAGES), scene.mapped(&block)), (6, 0));
}

#[test]
fn no_more_leaves_than_the_limit_and_the_longest_runs_first() {
    let scene = Scene::new();
    let [short, long] = scene.all_freed([3, 10]);
    let since = scene.watch();
    assert_eq!(scene.allocator.trim_unused(since, PAGE as u64 - 1), 0);
    assert_eq!(scene.allocator.trim_unused(since, bytes(5) - 1), bytes(4));
    assert_eq!((scene.mapped(&short), scene.mapped(&long)), (3, 6));
    assert_eq!(scene.trim(since, 8), 8);
    assert_eq!((scene.mapped(&short), scene.mapped(&long)), (1, 0));
    assert_eq!(scene.trim(since, 0), 0);
}

/// More runs than share a query of their stream.
#[test]
fn many_runs_leave() {
    let scene = Scene::new();
    let blocks = scene.all_freed([2; 100]);
    let since = scene.watch();
    let used = scene.microbatch(2);
    scene.device.gpu().drain();
    assert_eq!(scene.trim(since, PAGES), 2 * (blocks.len() - 1));
    assert_eq!(scene.mapped(&used), 2);
}

#[test]
fn nothing_happens_while_another_thread_trims() {
    let scene = Scene::new();
    let block = scene.freed(6);
    let (since, trimmed) = (scene.watch(), Arc::new(AtomicU64::new(u64::MAX)));
    let (allocator, inner) = (Arc::downgrade(&scene.allocator), Arc::clone(&trimmed));
    scene.device.set_hook(move |operation, _| {
        if let (Operation::Unmap, Some(allocator)) = (operation, allocator.upgrade()) {
            inner.store(allocator.trim_unused(since, u64::MAX), Ordering::SeqCst);
        }
    });
    assert_eq!(scene.allocator.trim(bytes(2)), bytes(2));
    scene.device.clear_hook();
    assert_eq!((trimmed.load(Ordering::SeqCst), scene.mapped(&block)), (0, 4));
    assert_eq!(scene.trim(since, PAGES), 4);
}

#[test]
fn pages_of_kept_arenas_stay() {
    let scene = Scene::new();
    let freed = |arena: Option<ArenaId>| {
        let block = scene.request(Request { stream: key(0), arena, ..Request::new(5 * PAGE) });
        scene.free(0, &block);
        block
    };
    let kept = freed(Some(scene.allocator.arena_create_kept().unwrap()));
    let other = freed(Some(scene.allocator.arena_create().unwrap()));
    assert_eq!(scene.trim(scene.watch(), PAGES), 5);
    assert_eq!((scene.mapped(&kept), scene.mapped(&other)), (5, 0));
}

#[test]
fn large_pages_leave_whole() {
    let scene = Scene::with(config(), STREAMS, LARGE);
    let all = scene.freed(4 * LARGE);
    let since = scene.watch();
    // It ends where a large page does, and the pages of the next one are not used.
    assert_eq!(scene.microbatch(LARGE).range.start, all.range.start);
    scene.device.gpu().drain();
    assert_eq!(scene.trim(since, LARGE - 1), 0);
    assert_eq!(scene.trim(since, 2 * LARGE - 1), LARGE);
    assert_eq!(scene.device.large_pages(all.range), 3);
    assert_eq!(scene.trim(since, PAGES), 2 * LARGE);
    assert_eq!((scene.mapped(&all), scene.device.large_pages(all.range)), (LARGE, 1));
}

/// A run that begins with pages and ends with large ones.
#[test]
fn the_limit_splits_a_run_only_between_large_pages() {
    let scene = Scene::with(config(), STREAMS, LARGE);
    let small = scene.allocate(0, LARGE + 1);
    let big = scene.allocate(0, 2 * LARGE + 3);
    scene.allocate(0, 1);
    assert_eq!(scene.device.large_pages(big.range), 2);
    [small, big].iter().for_each(|block| scene.free(0, block));
    let since = scene.watch();
    let pages = 3 * LARGE + 4;
    // Whatever the limit is, no large page is split: the device would say so.
    let mut left = pages;
    for pages_max in [LARGE - 1, LARGE + 1, LARGE, 1, 2, PAGES] {
        let trimmed = scene.trim(since, pages_max);
        assert!(trimmed <= pages_max, "{trimmed} of {pages_max}");
        left -= trimmed;
        assert_eq!(scene.mapped(&small) + scene.mapped(&big), left);
    }
    assert_eq!(left, 0);
}

#[test]
fn an_allocator_that_moves_no_pages_or_has_no_streams_keeps_them() {
    let plain = Config { moves_pages: false, ..config() };
    for (config, streams) in [(plain, STREAMS), (config(), 0)] {
        let scene = Scene::with(config, streams, 1);
        let stream = if streams > 0 { key(0) } else { 0 };
        let block = scene.request(Request { stream, ..Request::new(6 * PAGE) });
        let _ = scene.allocator.free(block.range.start, stream).unwrap();
        assert_eq!(scene.allocator.trim_unused(scene.watch(), u64::MAX), 0);
        assert_eq!(scene.mapped(&block), 6);
    }
}

#[test]
fn pages_that_could_not_be_unmapped_stay() {
    let scene = Scene::new();
    let block = scene.freed(6);
    scene.device.fail_unmap(0, Fault::Refused);
    let since = scene.watch();
    assert_eq!((scene.trim(since, PAGES), scene.mapped(&block)), (0, 6));
    assert_eq!(scene.allocator.stats().unmap_refusals, 1);
    assert_eq!((scene.trim(since, PAGES), scene.mapped(&block)), (6, 0));
}

/// What the device keeps for the next mapping goes to the driver too.
#[test]
fn parked_pages_are_released() {
    let scene = Scene::new();
    scene.freed(2);
    scene.device.set_parked_bytes(bytes(7));
    scene.trim(scene.watch(), PAGES);
    assert_eq!(dormouse_device::Device::memory_info(&*scene.device).parked_bytes, 0);
}

#[derive(Clone, Copy, Debug)]
enum Op {
    Allocate {
        units: usize,
        stream: usize,
    },
    Free {
        which: usize,
    },
    Advance {
        stream: usize,
        items: usize,
    },
    Drain,
    Watch,
    /// Since the watch of that many before the last, with a limit.
    Trim {
        back: usize,
        pages_max: usize,
    },
    TrimAll {
        pages: usize,
    },
}

fn op() -> impl Strategy<Value = Op> {
    let units = prop_oneof![2 => 1..UNITS, 4 => UNITS..9 * UNITS, 2 => 9 * UNITS..40 * UNITS];
    let pages_max = prop_oneof![2 => Just(PAGES), 1 => 0..20_usize];
    let stream = 0..STREAMS;
    prop_oneof![
        10 => (units, stream.clone()).prop_map(|(units, stream)| Op::Allocate { units, stream }),
        9 => any::<usize>().prop_map(|which| Op::Free { which }),
        2 => (stream, 1..6_usize).prop_map(|(stream, items)| Op::Advance { stream, items }),
        4 => Just(Op::Drain),
        3 => Just(Op::Watch),
        4 => (0..4_usize, pages_max).prop_map(|(back, pages_max)| Op::Trim { back, pages_max }),
        1 => (0..20_usize).prop_map(|pages| Op::TrimAll { pages }),
    ]
}

/// A naive model: which watch was the last when a block used each page last.
struct Model {
    scene: Scene,
    blocks: Vec<(Block, usize)>,
    watches: Vec<u64>,
    /// Number of watches at the last use, by page.
    used_at: Vec<usize>,
}

impl Model {
    fn new(large_pages: usize) -> Self {
        // Some blocks are huge.
        let config = Config { segment_bytes: PAGES / 16 * PAGE, ..config() };
        let scene = Scene::with(config, STREAMS, large_pages);
        let watches = vec![scene.watch()];
        Self { scene, blocks: Vec::new(), watches, used_at: vec![0; PAGES] }
    }

    fn used(&mut self, range: AddressRange) {
        self.used_at[pages_of(range)].fill(self.watches.len());
    }

    fn is_live(&self, page: usize) -> bool {
        self.blocks.iter().any(|(block, _)| pages_of(block.range).contains(&page))
    }

    fn apply(&mut self, op: Op) -> Result<(), TestCaseError> {
        match op {
            Op::Allocate { units, stream } => {
                if self.blocks.len() > 24 {
                    return Ok(());
                }
                let request = Request { stream: key(stream), ..Request::new(units * PAGE / UNITS) };
                let block = self.scene.request(request);
                self.used(block.range);
                self.scene.device.gpu().launch(stream, block.range);
                self.blocks.push((block, stream));
            }
            Op::Free { which } => {
                let Some(at) = which.checked_rem(self.blocks.len()) else { return Ok(()) };
                let (block, stream) = self.blocks.swap_remove(at);
                self.used(block.range);
                self.scene.free(stream, &block);
            }
            Op::Advance { stream, items } => {
                (0..items).for_each(|_| _ = self.scene.device.gpu().advance(stream));
            }
            Op::Drain => self.scene.device.gpu().drain(),
            Op::Watch => self.watches.push(self.scene.watch()),
            Op::Trim { back, pages_max } => return self.trim(back, pages_max),
            Op::TrimAll { pages } => drop(self.scene.allocator.trim(bytes(pages))),
        }
        Ok(())
    }

    fn trim(&mut self, back: usize, pages_max: usize) -> Result<(), TestCaseError> {
        let Some(at) = self.watches.len().checked_sub(back + 1) else { return Ok(()) };
        let before = self.scene.device.mapped_pages();
        let is_unused =
            |page: usize| before[page] && self.used_at[page] <= at && !self.is_live(page);
        let unused: Vec<bool> = (0..PAGES).map(is_unused).collect();
        let is_idle = (0..STREAMS).all(|stream| self.scene.device.gpu().queued(stream) == 0);
        let trimmed =
            usize::try_from(self.scene.allocator.trim_unused(self.watches[at], bytes(pages_max)))
                .unwrap()
                / PAGE;
        let after = self.scene.device.mapped_pages();
        let gone: Vec<usize> = (0..PAGES).filter(|&page| before[page] && !after[page]).collect();
        prop_assert_eq!(gone.len(), trimmed);
        prop_assert!(trimmed <= pages_max);
        prop_assert!(gone.iter().all(|&page| unused[page]), "{:?} was used", gone);
        if is_idle && pages_max == PAGES {
            let left = (0..PAGES).filter(|&page| unused[page] && after[page]);
            prop_assert_eq!(left.collect::<Vec<_>>(), Vec::<usize>::new(), "unused");
        }
        Ok(())
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    /// Exactly the pages that no block has used since leave, once no queued work uses them.
    #[test]
    fn unused_pages_are_those_of_a_naive_model(
        large_pages in prop_oneof![Just(1), Just(LARGE)],
        ops in proptest::collection::vec(op(), 1..120),
    ) {
        let mut model = Model::new(large_pages);
        for op in ops {
            model.apply(op)?;
            prop_assert_eq!(model.scene.allocator.check(), Ok(()));
            prop_assert_eq!(model.scene.device.violations(), Vec::<String>::new());
        }
    }
}
