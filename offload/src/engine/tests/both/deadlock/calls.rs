//! The interfaces' calls, what may become of each, and which of them must not wait for a copy.

use dormouse_alloc::{AllocError, Request};

use super::BYTES;
use super::cells::{Cell, InFlight};
use super::scene::{Scene, request_in};
use crate::error::OffloadError;
use crate::ids::Tier;
use crate::prefix::{Edge, Phase};

/// What a call came to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Done,
    OutOfMemory,
    /// No tier has a place.
    Declined,
    /// A wait, asked of a thread of ours.
    Refused,
}

/// The same, with blocks that were freed and made.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) outcome: Outcome,
    pub(super) freed: Vec<usize>,
    pub(super) made: Vec<usize>,
}

/// One call of an interface.
pub(super) struct Call {
    pub(super) interface: &'static str,
    pub(super) name: &'static str,
    /// It may wait for copies of ours; else it returns while one is held.
    pub(super) may_wait: bool,
    pub(super) run: fn(&Scene) -> Answer,
    pub(super) expected: fn(&Scene, Cell) -> Outcome,
}

const fn must(interface: &'static str, name: &'static str, run: fn(&Scene) -> Answer) -> Call {
    Call { interface, name, may_wait: false, run, expected: |_, _| Outcome::Done }
}

const fn may(
    interface: &'static str,
    name: &'static str,
    run: fn(&Scene) -> Answer,
    expected: fn(&Scene, Cell) -> Outcome,
) -> Call {
    Call { interface, name, may_wait: true, run, expected }
}

pub(super) const CALLS: &[Call] = &[
    may("allocator", "malloc", |s| allocated(s, &Request::new(BYTES)), room),
    must("allocator", "free of what is copied", |s| free(s, s.subject.address)),
    must("allocator", "free of what sleeps", |s| free(s, s.asleep.address)),
    must("allocator", "free", |s| free(s, s.plain)),
    must("allocator", "empty_cache", |s| {
        s.allocator.trim(u64::MAX);
        done()
    }),
    may("pool", "malloc", |s| allocated(s, &request_in(s.tag_awake)), room),
    must("pool", "sleep", sleep_tag),
    may("pool", "wake", |s| answer(s.engine.tag_wait(s.tag_asleep)), room),
    must("pool", "free of what sleeps", |s| free(s, s.tagged_asleep.address)),
    may("copy", "put", put, |_, cell| {
        let has_tier_room = cell.memory.has_host() || cell.memory.has_nvme();
        if has_tier_room { Outcome::Done } else { Outcome::Declined }
    }),
    may("copy", "get", get, |_, _| Outcome::Done),
    must("copy", "drop", |s| answer(s.engine.stash_drop(s.stash))),
    must("tags", "sleep", sleep_tag),
    must("tags", "wake", |s| {
        answer(s.engine.tag_regions(s.tag_asleep).map(|ids| s.engine.wake(&ids)))
    }),
    may("tags", "wait", |s| answer(s.engine.tag_wait(s.tag_asleep)), room),
    may("tags", "destroy", |s| answer(s.engine.tag_destroy(s.tag_asleep)), room),
    must("marks", "enter B", |s| {
        answer(s.prefix.lock().unwrap().as_mut().unwrap().enter(Phase::B, &s.here))
    }),
    may("marks", "backward begin", backward, room),
    may("preload", "malloc", |s| allocated(s, &Request::new(BYTES)), room),
    may("preload", "touch of what is copied", wake_subject, |s, cell| {
        // Where its pages have gone it needs others.
        let has_pages = cell.copy != InFlight::Write || s.engine.is_direct;
        if has_pages { Outcome::Done } else { room(s, cell) }
    }),
    may("preload", "realloc of what sleeps", realloc, room_for_two),
    must("preload", "free of what is copied", |s| free(s, s.subject.address)),
    must("preload", "free", |s| free(s, s.plain)),
];

fn room(scene: &Scene, cell: Cell) -> Outcome {
    if scene.can_make_room(cell) { Outcome::Done } else { Outcome::OutOfMemory }
}

/// The sleeping block's own, and a copy as large: what leaves already is not enough.
fn room_for_two(scene: &Scene, cell: Cell) -> Outcome {
    let nothing_leaves = Cell { copy: InFlight::Nothing, ..cell };
    // The spare region goes, and the one beside: back to where it has been, where it is coming in.
    room(scene, nothing_leaves)
}

fn done() -> Answer {
    Answer { outcome: Outcome::Done, freed: Vec::new(), made: Vec::new() }
}

fn answer<T>(result: Result<T, OffloadError>) -> Answer {
    let outcome = match result {
        Ok(_) => Outcome::Done,
        Err(e) if e.is_out_of_memory() => Outcome::OutOfMemory,
        Err(e) if e.is_declined() => Outcome::Declined,
        Err(OffloadError::Order { what: "waiting", .. }) => Outcome::Refused,
        Err(e) => panic!("neither memory nor a place lacks: {e}"),
    };
    Answer { outcome, ..done() }
}

fn allocated(scene: &Scene, request: &Request) -> Answer {
    match scene.allocator.allocate(request) {
        Ok(block) => Answer { made: vec![block.range.start], ..done() },
        Err(AllocError::OutOfMemory(report)) => {
            let lines = report.to_string().lines().count();
            assert!(lines <= 12, "{lines} lines:\n{report}");
            Answer { outcome: Outcome::OutOfMemory, ..done() }
        }
        Err(e) => panic!("{e}"),
    }
}

fn free(scene: &Scene, address: usize) -> Answer {
    scene.engine.free(address, 0).unwrap();
    Answer { freed: vec![address], ..done() }
}

/// What has no place stays awake.
fn sleep_tag(scene: &Scene) -> Answer {
    let outcome = scene.engine.tag_sleep(scene.tag_awake, Tier::Host, &[]).unwrap();
    assert_eq!(outcome.accepted_bytes + outcome.declined_bytes, BYTES as u64);
    done()
}

fn put(scene: &Scene) -> Answer {
    // SAFETY: a live, awake block of the test's own.
    let put = unsafe { scene.engine.stash_put(scene.plain, BYTES, 2, &scene.here) };
    if let Ok(id) = put {
        scene.engine.stash_drop(id).unwrap();
    }
    answer(put)
}

fn get(scene: &Scene) -> Answer {
    // SAFETY: a live, awake block of the test's own, as long as the stash.
    let got = unsafe { scene.engine.stash_get(scene.stash, scene.target, &scene.here) };
    if got.is_ok() {
        assert!(super::holds(scene.target, BYTES, 14), "what came back is not what was put");
    }
    answer(got)
}

fn backward(scene: &Scene) -> Answer {
    let mut prefix = scene.prefix.lock().unwrap();
    let prefix = prefix.as_mut().unwrap();
    answer(
        prefix
            .enter(Phase::C, &scene.here)
            .and_then(|()| prefix.mark(Edge::BackwardBegin, 0, &scene.here).map(|_| ())),
    )
}

fn wake_subject(scene: &Scene) -> Answer {
    scene.engine.forbid_reclaim(&[scene.subject.id]);
    answer(scene.engine.wait_awake(&[scene.subject.id]))
}

/// As the preload library does it: awake first, then copied, then the old one goes.
fn realloc(scene: &Scene) -> Answer {
    let woken = answer(scene.engine.wake_address(scene.asleep.address));
    if woken.outcome != Outcome::Done {
        return woken;
    }
    let fresh = allocated(scene, &Request::new(BYTES));
    if fresh.outcome == Outcome::Done {
        assert!(super::holds(scene.asleep.address, BYTES, 13), "awake without its bytes");
        return Answer { freed: free(scene, scene.asleep.address).freed, ..fresh };
    }
    fresh
}
