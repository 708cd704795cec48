//! Marks behind frees: which pages of a stream that is never idle may leave, and what a request waits for.

use crate::common::gpu::{Call, Event};
use crate::common::{Fake, Fault, PAGE, key, uncounted};
use dormouse_alloc::{Allocator, Block, Config, Freed, Request};
use dormouse_device::{AddressRange, Operation};
use std::sync::Arc;

const PAGES: usize = 1024;
/// Granules of a page.
const UNITS: usize = 8;
/// Pages of a request that does not wait for another stream: more than 1/16 of the maximum use.
const MANY: usize = 12;

/// A trainer with some streams, on a device with room.
struct Scene {
    device: Arc<Fake>,
    allocator: Arc<Allocator<Fake>>,
}

impl Scene {
    fn new(budget_pages: usize) -> Self {
        let config = Config {
            segment_bytes: PAGES / 4 * PAGE,
            moves_pages: true,
            ..Config::new(PAGE / UNITS, (budget_pages * PAGE) as u64)
        };
        let (device, allocator) = uncounted(PAGES, config, 3, 1);
        Self { device, allocator }
    }

    fn allocate(&self, stream: usize, pages: usize) -> Block {
        let request = Request { stream: key(stream), ..Request::new(pages * PAGE) };
        let block = self.allocator.allocate(&request).unwrap();
        self.device.gpu().must_suit(block.range, stream);
        self.allocator.check().unwrap();
        block
    }

    /// Blocks of a page on stream 0, each followed by one that stays.
    fn islands(&self, count: usize) -> Vec<Block> {
        let island = |_| {
            let block = self.allocate(0, 1);
            self.allocate(0, 1);
            block
        };
        (0..count).map(island).collect()
    }

    /// A kernel of the block's stream uses it, and then it is freed.
    fn use_and_free(&self, stream: usize, block: &Block) {
        self.device.gpu().launch(stream, block.range);
        let freed = self.allocator.free(block.range.start, key(stream)).unwrap();
        assert_eq!(freed, Freed::Done);
        self.allocator.check().unwrap();
    }

    /// Gives a block's pages away, as the engine does. It has no work left.
    fn sleep(&self, block: &Block) {
        let info = self.allocator.claim(block.range.start, 1).unwrap();
        self.device.take_pages(info.pages);
        self.allocator.set_asleep(block.id).unwrap();
    }

    fn reserve(&self, pages: usize) {
        self.allocator.reserve_awake((pages * PAGE) as u64).unwrap();
        self.allocator.check().unwrap();
    }

    fn held_pages(&self) -> usize {
        self.device.mapped_bytes() as usize / PAGE
    }

    fn is_mapped(&self, block: &Block) -> bool {
        self.device.mapped_pages()[crate::common::pages_of(block.range)][0]
    }

    fn calls(&self, call: Call) -> u64 {
        self.device.gpu().calls(call)
    }

    /// Has stream 0 found busy, so that it is marked from now on. Takes more pages than a request of another stream waits
    /// for.
    fn find_busy(&self, block: &Block) {
        let records = self.calls(Call::Record);
        self.use_and_free(0, block);
        self.allocate(1, MANY);
        // One for the query of each stream, one for the mark.
        assert_eq!(self.calls(Call::Record), records + 4);
    }
}

#[test]
fn pages_before_a_complete_mark_leave_a_busy_stream() {
    let scene = Scene::new(PAGES);
    let blocks = scene.islands(4);
    scene.find_busy(&blocks[0]);
    // A page was freed: the next mark. The GPU gets to the first one only.
    scene.use_and_free(0, &blocks[1]);
    assert!(scene.device.gpu().advance(0));
    let held_pages = scene.held_pages();
    scene.allocate(1, 1);
    assert_eq!(scene.held_pages(), held_pages, "a page was moved");
    assert_eq!([0, 1].map(|at| scene.is_mapped(&blocks[at])), [false, true]);
    // The other one is in use.
    scene.allocate(1, MANY);
    assert_eq!(scene.held_pages(), held_pages + MANY);
    assert!(scene.device.gpu().advance(0));
    scene.device.gpu().launch(0, AddressRange::default());
    scene.allocate(1, 1);
    assert_eq!(scene.held_pages(), held_pages + MANY);
    assert!(!scene.is_mapped(&blocks[1]));
    assert_eq!(scene.calls(Call::Synchronize), 0);
    assert_eq!(scene.device.violations(), Vec::<String>::new());
}

#[test]
fn a_move_waits_for_its_own_stream_and_only_for_the_mark_that_suffices() {
    let scene = Scene::new(PAGES);
    let blocks = scene.islands(8);
    scene.find_busy(&blocks[0]);
    for block in &blocks[1..6] {
        scene.use_and_free(0, block);
    }
    let held_pages = scene.held_pages();
    // Three pages that are freed first: the GPU has three more to do.
    scene.allocate(0, 3);
    assert_eq!(scene.held_pages(), held_pages);
    assert_eq!((scene.calls(Call::Synchronize), scene.device.gpu().queued(0)), (1, 3));
    let left = [0, 1, 2, 3, 4, 5].map(|at| scene.is_mapped(&blocks[at]));
    assert_eq!(left, [false, false, false, true, true, true]);
    // What was freed since the last mark is behind all of the stream.
    scene.allocate(0, 3);
    assert_eq!(scene.held_pages(), held_pages);
    assert_eq!((scene.calls(Call::Synchronize), scene.device.gpu().queued(0)), (2, 0));
    assert_eq!(scene.device.violations(), Vec::<String>::new());
}

/// Near the maximum a request that misses little waits for other streams, as long as they have work left.
#[test]
fn a_move_tops_up_with_what_another_stream_freed_first() {
    let scene = Scene::new(PAGES);
    let blocks = scene.islands(40);
    scene.find_busy(&blocks[0]);
    blocks[1..9].iter().for_each(|block| scene.use_and_free(0, block));
    let held_pages = scene.held_pages();
    let left = || blocks[..9].iter().filter(|block| scene.is_mapped(block)).count();
    let seen = || (scene.held_pages() - held_pages, left(), scene.calls(Call::Synchronize));
    scene.allocate(1, 1);
    assert_eq!(seen(), (0, 8, 1));
    assert!(!scene.is_mapped(&blocks[0]), "the page that was freed first");
    // More than 1/16 of the maximum of 92 pages.
    scene.allocate(1, 6);
    assert_eq!(seen(), (6, 8, 1));
    // A mark covers three pages.
    for wanted in [(6, 6, 2), (6, 4, 3), (6, 2, 3)] {
        scene.allocate(1, 2);
        assert_eq!(seen(), wanted);
    }
    // All that is free, and three more.
    scene.allocate(1, 5);
    assert_eq!(seen(), (9, 0, 4));
    assert_eq!(scene.device.violations(), Vec::<String>::new());
}

/// A stream receives what the peer sends only after this rank has sent, which the host does after its requests.
#[test]
fn a_request_within_the_budget_goes_on_if_a_stream_waits_for_the_host() {
    let scene = Scene::new(PAGES);
    let blocks = scene.islands(40);
    let sent = Event { stream: 2, items: 1 };
    scene.device.gpu().wait(0, sent);
    scene.find_busy(&blocks[0]);
    blocks[1..20].iter().for_each(|block| scene.use_and_free(0, block));
    let held_pages = scene.held_pages();
    let seen = || (scene.held_pages() - held_pages, scene.calls(Call::Synchronize));
    scene.allocate(1, 1);
    assert_eq!(seen(), (1, 1), "one wait, then pages of its own");
    // Four waits are left out, also of a wake.
    scene.reserve(1);
    (0..3).for_each(|_| {
        scene.allocate(1, 1);
    });
    assert_eq!(seen(), (4, 1));
    scene.allocate(1, 1);
    assert_eq!(seen(), (5, 2));
    // Once it has sent, pages move again.
    scene.device.gpu().launch(2, AddressRange::default());
    scene.device.gpu().drain();
    scene.allocate(1, 1);
    assert_eq!(seen(), (5, 2));
    assert_eq!(scene.device.violations(), Vec::<String>::new());
}

#[test]
fn a_wake_within_the_budget_goes_on_if_a_stream_waits_for_the_host() {
    let scene = Scene::new(PAGES);
    let blocks = scene.islands(40);
    scene.device.gpu().wait(0, Event { stream: 2, items: 1 });
    scene.find_busy(&blocks[0]);
    blocks[1..20].iter().for_each(|block| scene.use_and_free(0, block));
    let held_pages = scene.held_pages();
    scene.reserve(1);
    assert_eq!((scene.held_pages(), scene.calls(Call::Synchronize)), (held_pages, 1));
    assert_eq!(scene.allocator.stats().staged_bytes.current, PAGE as u64);
    scene.device.gpu().launch(2, AddressRange::default());
}

/// Out of room, the pages that were freed first are waited for, whichever stream they are on: not all of it.
#[test]
fn the_ladder_waits_for_the_pages_that_were_freed_first() {
    let scene = Scene::new(24);
    let blocks = scene.islands(4);
    let other = scene.allocate(2, 12);
    assert_eq!(scene.held_pages(), 20);
    scene.use_and_free(0, &blocks[0]);
    scene.use_and_free(0, &blocks[1]);
    // Stream 0 is found busy, and marked.
    scene.allocate(1, 4);
    scene.use_and_free(2, &other);
    scene.use_and_free(0, &blocks[2]);
    assert_eq!(scene.calls(Call::Synchronize), 0);
    scene.allocate(1, 2);
    assert_eq!([0, 1, 2].map(|at| scene.is_mapped(&blocks[at])), [false, false, true]);
    let gpu = scene.device.gpu();
    assert_eq!((gpu.calls(Call::Synchronize), gpu.queued(0), gpu.queued(2)), (1, 1, 1));
    drop(gpu);
    assert_eq!(scene.device.violations(), Vec::<String>::new());
}

#[test]
fn streams_that_are_idle_when_they_are_asked_are_not_marked() {
    let scene = Scene::new(PAGES);
    let blocks = scene.islands(40);
    for block in &blocks[..20] {
        scene.use_and_free(0, block);
    }
    scene.device.gpu().drain();
    scene.allocate(0, 20);
    let records = scene.calls(Call::Record);
    assert_eq!(records, 3, "one query of each stream");
    for block in &blocks[20..] {
        scene.use_and_free(0, block);
    }
    assert_eq!(scene.calls(Call::Record), records);
}

/// Nor are those that are idle again.
#[test]
fn marking_ends_when_a_stream_is_found_idle() {
    let scene = Scene::new(PAGES);
    // A mark comes with each four pages.
    scene.allocate(0, 100);
    let blocks = scene.islands(40);
    scene.find_busy(&blocks[0]);
    // No mark is behind it.
    scene.use_and_free(0, &blocks[1]);
    scene.device.gpu().drain();
    let held_pages = scene.held_pages();
    scene.allocate(1, 2);
    assert_eq!(scene.held_pages(), held_pages);
    let records = scene.calls(Call::Record);
    for block in &blocks[2..] {
        scene.use_and_free(0, block);
    }
    assert_eq!(scene.calls(Call::Record), records);
}

/// A block that comes free once a mark is recorded may be used behind it.
#[test]
fn a_mark_covers_only_the_frees_before_it() {
    let scene = Scene::new(PAGES);
    // A mark comes with each four pages.
    scene.allocate(0, 100);
    let blocks = scene.islands(6);
    scene.find_busy(&blocks[0]);
    let (weak, gpu) = (Arc::downgrade(&scene.allocator), Arc::downgrade(&scene.device));
    let (late, marked) = (blocks[1].range, blocks[5].range.start);
    scene.device.set_hook(move |operation, _| {
        let (Some(allocator), Some(device)) = (weak.upgrade(), gpu.upgrade()) else { return };
        let is_marked = operation == Operation::Event && allocator.lookup(marked).is_none();
        if is_marked && allocator.lookup(late.start).is_some() {
            device.gpu().launch(0, late);
            let _: Freed = allocator.free(late.start, key(0)).unwrap();
        }
    });
    blocks[2..].iter().for_each(|block| scene.use_and_free(0, block));
    scene.device.clear_hook();
    assert!(scene.allocator.lookup(late.start).is_none());
    for _ in 0..5 {
        assert!(scene.device.gpu().advance(0));
    }
    assert_eq!(scene.device.gpu().users(late), [0], "its last use is still queued");
    let held_pages = scene.held_pages();
    scene.allocate(1, 5);
    assert_eq!((scene.held_pages(), scene.is_mapped(&blocks[1])), (held_pages, true));
    scene.allocate(1, MANY);
    assert_eq!((scene.held_pages(), scene.is_mapped(&blocks[1])), (held_pages + MANY, true));
}

#[test]
fn pages_that_could_not_be_unmapped_stay_quiet() {
    let scene = Scene::new(PAGES);
    let blocks = scene.islands(4);
    scene.find_busy(&blocks[0]);
    scene.use_and_free(0, &blocks[1]);
    assert!(scene.device.gpu().advance(0));
    scene.device.fail_unmap(0, Fault::Refused);
    let held_pages = scene.held_pages();
    scene.allocate(1, MANY);
    assert_eq!((scene.held_pages(), scene.is_mapped(&blocks[0])), (held_pages + MANY, true));
    scene.allocate(1, 1);
    assert_eq!((scene.held_pages(), scene.is_mapped(&blocks[0])), (held_pages + MANY, false));
}

/// A stream under capture accepts no mark: its pages stay, and requests go on.
#[test]
fn a_captured_stream_is_marked_after_its_capture() {
    let scene = Scene::new(PAGES);
    let blocks = scene.islands(4);
    scene.find_busy(&blocks[0]);
    scene.device.gpu().set_captured(0, true);
    scene.use_and_free(0, &blocks[1]);
    scene.device.gpu().drain();
    let held_pages = scene.held_pages();
    // The first is behind a mark of before the capture.
    scene.allocate(1, 2);
    assert_eq!([0, 1].map(|at| scene.is_mapped(&blocks[at])), [false, true]);
    assert_eq!(scene.held_pages(), held_pages + 1);
    scene.device.gpu().set_captured(0, false);
    scene.allocate(1, 1);
    assert_eq!((scene.held_pages(), scene.is_mapped(&blocks[1])), (held_pages + 1, false));
}

/// A capture that begins while a mark is recorded takes the event into its graph. It is never complete, and does not
/// hide the marks behind it.
#[test]
fn a_mark_in_a_graph_does_not_hide_the_next() {
    let scene = Scene::new(PAGES);
    let blocks = scene.islands(5);
    scene.find_busy(&blocks[0]);
    scene.device.gpu().capture_next();
    scene.use_and_free(0, &blocks[1]);
    scene.use_and_free(0, &blocks[2]);
    scene.device.gpu().drain();
    scene.device.gpu().launch(0, AddressRange::default());
    let held_pages = scene.held_pages();
    scene.allocate(1, 3);
    assert_eq!(scene.held_pages(), held_pages);
    assert_eq!([0, 1, 2].map(|at| scene.is_mapped(&blocks[at])), [false; 3]);
    assert_eq!(scene.device.violations(), Vec::<String>::new());
}

/// A wake takes the place of pages that are free. It waits for them only if that leaves the GPU as many to work on.
#[test]
fn a_wake_moves_free_pages_and_leaves_the_gpu_work() {
    let scene = Scene::new(PAGES);
    let asleep = scene.allocate(0, 5);
    let blocks = scene.islands(8);
    scene.sleep(&asleep);
    scene.allocate(0, 5);
    scene.find_busy(&blocks[0]);
    for block in &blocks[1..4] {
        scene.use_and_free(0, block);
    }
    assert!(scene.device.gpu().advance(0));
    let held_pages = scene.held_pages();
    let left = || [0, 1, 2, 3].map(|at| scene.is_mapped(&blocks[at]));
    // One page is quiet, and three are left.
    scene.reserve(1);
    assert_eq!((left(), scene.calls(Call::Synchronize)), ([false, true, true, true], 0));
    scene.reserve(1);
    assert_eq!((left(), scene.calls(Call::Synchronize)), ([false, false, true, true], 1));
    assert_eq!(scene.device.gpu().queued(0), 2);
    // The wake would have to wait for both pages that are left.
    scene.reserve(2);
    assert_eq!((scene.held_pages(), scene.calls(Call::Synchronize)), (held_pages - 2, 1));
    std::thread::scope(|scope| {
        let wake = || {
            dormouse_device::register_runtime_thread();
            scene.reserve(1);
        };
        scope.spawn(wake);
    });
    assert_eq!((scene.held_pages(), scene.calls(Call::Synchronize)), (held_pages - 2, 1));
    assert_eq!(scene.device.violations(), Vec::<String>::new());
}

/// What was in use at the maximum has room: a wake below it moves nothing.
#[test]
fn a_wake_below_the_maximum_moves_no_page() {
    let scene = Scene::new(PAGES);
    let asleep = scene.allocate(0, 5);
    let blocks = scene.islands(8);
    // The use is noted when the next block is asked for.
    scene.allocate(0, 1);
    scene.sleep(&asleep);
    blocks[..4].iter().for_each(|block| scene.use_and_free(0, block));
    scene.device.gpu().drain();
    let left = || blocks[..4].iter().filter(|block| scene.is_mapped(block)).count();
    scene.reserve(4);
    assert_eq!(left(), 4);
    scene.reserve(1);
    assert_eq!(left(), 3, "one page more than was ever in use");
}
