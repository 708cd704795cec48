//! Every interleaving of those who want one block at the same time: its user, who frees it, a
//! second free, a claimant, a thread that takes it from the thread cache, and one that empties the cache.

use super::*;
use crate::Request;
use crate::core::Fit;
use crate::state::{Attempt, Geometry, Need, Priority, State};
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::thread;

const UNIT: u32 = 2;
const UNITS: u32 = 3;
const KEY: u64 = 7;
const GRANULE_BYTES: usize = 16;
/// What its user asked for.
const BYTES: usize = UNITS as usize * GRANULE_BYTES - 5;

/// A thread cache, and a block in its user's hands. Access to the pages is what loom checks: two at a time,
/// or one that does not see the other, fail.
struct Scene {
    thread_cache: ThreadCache,
    pages: UnsafeCell<()>,
}

impl Scene {
    fn new() -> Arc<Self> {
        let thread_cache = ThreadCache::new(4, GRANULE_BYTES);
        thread_cache.register_stream(0, KEY);
        let made = NewBlock { unit: UNIT, units: UNITS, index: 5, generation: 9, stream: 0 };
        thread_cache.register(&made, BYTES);
        Arc::new(Self { thread_cache, pages: UnsafeCell::new(()) })
    }

    fn write(&self) {
        self.pages.with_mut(|_| ());
    }

    /// Its user is done with it. The thread cache has it then.
    fn free_small(&self) -> bool {
        self.thread_cache.free(UNIT as usize, KEY)
    }

    /// What `claim`, `record_stream` and the frees that the thread cache does not take do first.
    fn hold(&self) -> bool {
        let ownership = self.thread_cache.ownership();
        let word = ownership.get(UNIT).filter(|it| it.is_allocated());
        word.is_some_and(|word| ownership.remove(UNIT, word))
    }

    fn free(&self) -> bool {
        self.free_small() || self.hold()
    }

    /// The next request like it; its user writes to it.
    fn allocate(&self) -> bool {
        let taken = self.thread_cache.allocate(ThreadShard::current(), BYTES as u32, KEY);
        taken.inspect(|_| self.write()).is_some()
    }

    /// What emptying the thread cache gives back to the state, which unmaps it.
    fn drain(&self) -> bool {
        let drained = self.thread_cache.drain(false);
        let mut left =
            drained.iter().map(|it| self.thread_cache.ownership().remove(it.unit, it.word));
        assert!(left.all(|it| it), "cached blocks have no other owner");
        if !drained.is_empty() {
            self.write();
        }
        drained.len() == 1
    }

    /// Blocks in users' hands that figures of the thread cache know of, less those given back.
    fn settled_blocks(&self, stats: &mut Stats) -> u64 {
        self.thread_cache.settle(stats);
        stats.allocations.current
    }
}

/// Stats of a state that has handed the block out.
fn with_one_block() -> Stats {
    let mut stats = Stats::default();
    let bytes = u64::from(UNITS) * GRANULE_BYTES as u64;
    stats.allocations.add(1);
    stats.allocated_bytes.add(bytes);
    stats.active_bytes.add(bytes);
    stats.requested_bytes.add(BYTES as u64);
    stats
}

#[test]
fn loom_a_block_that_is_freed_twice_at_once_is_freed_once() {
    loom::model(|| {
        let scene = Scene::new();
        let other = Arc::clone(&scene);
        let second = thread::spawn(move || other.free());
        let is_freed = scene.free();
        assert_ne!(is_freed, second.join().unwrap());
    });
}

#[test]
fn loom_a_block_freed_and_claimed_at_once_has_one_owner() {
    loom::model(|| {
        let scene = Scene::new();
        scene.write();
        let other = Arc::clone(&scene);
        let claimant = thread::spawn(move || other.hold());
        let is_given = scene.free_small();
        assert_ne!(is_given, claimant.join().unwrap());
        assert_eq!(scene.allocate(), is_given, "only what was freed comes back");
    });
}

#[test]
fn loom_a_free_is_seen_by_the_thread_that_takes_or_empties_the_cache() {
    loom::model(|| {
        let scene = Scene::new();
        let taker = Arc::clone(&scene);
        let taker = thread::spawn(move || taker.allocate());
        let drainer = Arc::clone(&scene);
        let drainer = thread::spawn(move || drainer.drain());
        scene.write();
        let is_given = scene.free_small();
        let (is_taken, is_drained) = (taker.join().unwrap(), drainer.join().unwrap());
        assert!(is_given || !(is_taken || is_drained));
        assert!(!(is_taken && is_drained), "two have it");
        let is_left = scene.drain();
        assert_eq!(is_left, is_given && !is_taken && !is_drained);
    });
}

#[test]
fn loom_a_reallocated_block_is_not_freed_by_its_previous_user() {
    loom::model(|| {
        let scene = Scene::new();
        assert!(scene.free_small());
        let other = Arc::clone(&scene);
        // Freed a second time by the same thread.
        let second = thread::spawn(move || {
            let word = other.thread_cache.ownership().get(UNIT);
            word.is_some_and(Ownership::is_in_cache) && other.free()
        });
        let is_taken = scene.allocate();
        let is_freed = second.join().unwrap();
        // Such a free is refused while the thread cache has the block; later it cannot be detected.
        assert_eq!(
            scene.thread_cache.ownership().get(UNIT).is_some_and(Ownership::is_allocated),
            is_taken && !is_freed
        );
    });
}

#[test]
fn loom_no_figure_is_lost_or_counted_twice() {
    loom::model(|| {
        let scene = Scene::new();
        let other = Arc::clone(&scene);
        let user = thread::spawn(move || other.free_small() && other.allocate());
        let mut stats = with_one_block();
        let between = scene.settled_blocks(&mut stats);
        assert!(between <= 1);
        let is_taken = user.join().unwrap();
        // It may have found the shard at work: then it still has the block, or the thread cache does.
        let has_it = scene.thread_cache.ownership().get(UNIT).is_some_and(Ownership::is_allocated);
        assert!(has_it || !is_taken);
        assert_eq!(scene.settled_blocks(&mut stats), u64::from(has_it));
        assert_eq!(stats.requested_bytes.current, if has_it { BYTES as u64 } else { 0 });
        assert_eq!(stats.allocated_bytes.current % 48, 0);
    });
}

/// A state that has allocated one block, and its thread cache.
fn state_with_one_block() -> (State, std::sync::Arc<ThreadCache>, usize) {
    let geometry = Geometry {
        base: 0,
        granule_bytes: GRANULE_BYTES,
        page_units: 1,
        large_units: 1,
        units: 4,
        segment_units: 4,
    };
    let thread_cache = std::sync::Arc::new(ThreadCache::new(4, GRANULE_BYTES));
    let mut state =
        State::new(geometry, 64, false, None, Some(std::sync::Arc::clone(&thread_cache)));
    let request = Request::new(BYTES);
    let fit = Fit { units: UNITS, align_units: 1 };
    let need = Need { fit, bytes: BYTES as u64, is_small: true };
    let attempt = state.attempt(&request, &need, Priority::Normal);
    let Ok(Attempt::Bare(mapping)) = attempt else { panic!("{attempt:?}") };
    let block = state.complete_map(mapping, &request, &need);
    (state, thread_cache, block.range.start)
}

#[test]
fn loom_the_state_claims_or_frees_blocks_that_the_cache_has_not() {
    for claims in [true, false] {
        loom::model(move || {
            let (mut state, thread_cache, address) = state_with_one_block();
            let other = thread::spawn(move || {
                let is_mine = if claims {
                    state.claim(address, 1).is_ok()
                } else {
                    state.free(address, 0).is_ok()
                };
                (is_mine, state)
            });
            let is_given = thread_cache.free(address / GRANULE_BYTES, 0);
            let (is_mine, mut state) = other.join().unwrap();
            assert_ne!(is_given, is_mine);
            assert_eq!(state.flush_thread_cache() > 0, is_given);
            state.check().unwrap();
        });
    }
}
