//! What only the state itself can show.

use super::{Attempt, Geometry, Need, Priority, State};
use crate::config::Margin;
use crate::core::Fit;
use crate::types::Request;

const PAGE: usize = 4096;
const GEOMETRY: Geometry = Geometry {
    base: PAGE,
    granule_bytes: PAGE,
    page_units: 1,
    large_units: 1,
    units: 256,
    segment_units: 16,
};

fn state(budget_pages: u64) -> State {
    State::new(GEOMETRY, budget_pages * PAGE as u64, false, None, None)
}

fn pages(units: u32) -> (Request, Need) {
    let need = Need {
        fit: Fit { units, align_units: 1 },
        bytes: u64::from(units) * PAGE as u64,
        is_small: false,
    };
    (Request::new(units as usize * PAGE), need)
}

/// What was trimmed for one is not there for another, until it lets go.
#[test]
fn held_back_bytes_serve_the_request_on_the_ladder() {
    let mut state = state(10);
    let (request, need) = pages(6);
    state.hold_back(5 * PAGE as u64);
    let excess = PAGE as u64;
    assert_eq!(
        state.attempt(&request, &need, Priority::Normal).unwrap(),
        Attempt::OverBudget(excess)
    );
    assert_eq!(state.reserve_awake(need.bytes, Priority::Normal), Err(excess));
    let Attempt::Bare(mapping) = state.attempt(&request, &need, Priority::OnLadder).unwrap() else {
        panic!("its own room was refused");
    };
    state.cancel_map(mapping);
    state.release_held_back();
    assert_eq!(state.reserve_awake(need.bytes, Priority::Normal), Ok(()));
    state.check().unwrap();
}

/// Cached pages are in the budget already: they serve others even while some are held back.
#[test]
fn cached_pages_serve_every_request_despite_held_back_bytes() {
    let mut state = state(10);
    let (request, need) = pages(6);
    let Ok(Attempt::Bare(mapping)) = state.attempt(&request, &need, Priority::Normal) else {
        panic!("no room in an empty state");
    };
    let block = state.complete_map(mapping, &request, &need);
    let _ = state.free(block.range.start, 0).unwrap();
    state.hold_back(4 * PAGE as u64);
    let again = state.attempt(&request, &need, Priority::Normal).unwrap();
    assert!(matches!(again, Attempt::Cached(_)), "{again:?}");
}

/// A range being mapped is found by no lookup, and only the budget counts it.
#[test]
fn a_range_being_mapped_is_not_a_block() {
    let mut state = state(10);
    let (request, need) = pages(6);
    let Ok(Attempt::Bare(mapping)) = state.attempt(&request, &need, Priority::Normal) else {
        panic!("no room in an empty state");
    };
    let address = state.pages_to_map(&mapping).0.start;
    assert_eq!(state.lookup(address), None);
    assert!(state.free(address, 0).is_err());
    assert!(state.blocks().is_empty());
    assert_eq!((state.stats.mapped_bytes.peak, state.stats.active_bytes.peak), (0, 0));
    assert_eq!(state.excess_bytes(5 * PAGE as u64, Priority::Normal), PAGE as u64);
    state.check().unwrap();
    state.complete_map(mapping, &request, &need);
    assert_eq!(state.lookup(address).map(|it| it.range.start), Some(address));
}

/// A state on a stream-ordered device that moves pages, and a stream of it.
fn moving() -> (State, u64) {
    let mut state = State::new(GEOMETRY, 100 * PAGE as u64, true, Some(Margin::TIGHT), None);
    state.register_stream(7).unwrap();
    (state, 7)
}

/// Pages that stay mapped start no ladder.
#[test]
fn kept_pages_cause_no_moves() {
    let (mut state, stream) = moving();
    let mut moves = |arena| {
        let (request, need) = pages(6);
        let request = Request { arena, stream, ..request };
        let Ok(Attempt::Bare(mapping)) = state.attempt(&request, &need, Priority::Normal) else {
            panic!("no room in an empty state");
        };
        let move_bytes = mapping.move_bytes;
        let block = state.complete_map(mapping, &request, &need);
        let _ = state.free(block.range.start, stream).unwrap();
        let opened = state.arena_create(true).unwrap();
        (move_bytes, opened)
    };
    let (_, first) = moves(None);
    let (general_bytes, second) = moves(Some(first));
    assert_eq!(general_bytes, 6 * PAGE as u64, "those of the general pool can move");
    state.note_quiet(0, state.frees());
    state.begin_trim(u64::MAX, super::TrimPurpose::Release).unwrap();
    let (request, need) = pages(6);
    let request = Request { arena: Some(second), stream, ..request };
    let Ok(Attempt::Bare(mapping)) = state.attempt(&request, &need, Priority::Normal) else {
        panic!("no room");
    };
    assert_eq!(mapping.move_bytes, 0, "the first arena's cannot");
    state.cancel_map(mapping);
}

/// An arena is closed while its only pages are being mapped, and the device does not map them.
#[test]
fn an_arena_that_lost_its_slot_settles_no_other() {
    let (mut state, stream) = moving();
    let attempt = |state: &mut State, arena| {
        let (request, need) = pages(6);
        let request = Request { arena: Some(arena), stream, ..request };
        match state.attempt(&request, &need, Priority::Normal) {
            Ok(Attempt::Bare(mapping)) => (mapping, request, need),
            other => panic!("{other:?}"),
        }
    };
    let first = state.arena_create(true).unwrap();
    let (mapping, ..) = attempt(&mut state, first);
    assert!(state.arena_close(first).is_some());
    state.cancel_map(mapping);
    state.check().unwrap();
    let second = state.arena_create(true).unwrap();
    assert_eq!(second.index, first.index);
    let (mapping, request, need) = attempt(&mut state, second);
    let block = state.complete_map(mapping, &request, &need);
    let _ = state.free(block.range.start, stream).unwrap();
    let closing = state.arena_close(second).unwrap();
    assert_eq!(closing.bytes, 6 * PAGE as u64);
    assert_eq!(state.arena_settle(first), 0);
    assert_eq!(state.kept_bytes(), closing.bytes);
    assert_eq!(state.arena_settle(second), closing.bytes);
    assert_eq!(state.kept_bytes(), 0);
    state.check().unwrap();
}

/// What was found quiet stays so, though an older answer comes later.
#[test]
fn an_older_answer_takes_no_quiet_pages_back() {
    let (mut state, stream) = moving();
    let (request, need) = pages(6);
    let request = Request { stream, ..request };
    let Ok(Attempt::Bare(mapping)) = state.attempt(&request, &need, Priority::Normal) else {
        panic!("no room in an empty state");
    };
    let block = state.complete_map(mapping, &request, &need);
    let _ = state.free(block.range.start, stream).unwrap();
    let trim = |state: &mut State| state.begin_trim(1, super::TrimPurpose::Release);
    assert_eq!(trim(&mut state), None);
    for frees in [state.frees(), state.frees() - 1] {
        state.note_quiet(0, frees);
    }
    assert!(trim(&mut state).is_some());
}
