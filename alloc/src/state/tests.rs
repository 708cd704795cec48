//! What only the state itself can show.

use super::{Attempt, Geometry, Need, State, Who};
use crate::core::Fit;
use crate::types::Request;

const PAGE: usize = 4096;

fn state(budget_pages: u64) -> State {
    let geometry =
        Geometry { base: PAGE, granule_bytes: PAGE, page_units: 1, units: 256, segment_units: 16 };
    State::new(geometry, budget_pages * PAGE as u64, false, false)
}

fn pages(units: u32) -> (Request, Need) {
    let need = Need { fit: Fit { units, align_units: 1 }, bytes: u64::from(units) * PAGE as u64 };
    (Request::new(units as usize * PAGE), need)
}

/// What was trimmed for one is not there for another, until it lets go.
#[test]
fn held_back_bytes_are_for_whoever_is_on_the_ladder() {
    let mut state = state(10);
    let (request, need) = pages(6);
    state.hold_back(5 * PAGE as u64);
    let excess = PAGE as u64;
    assert_eq!(state.attempt(&request, &need, Who::Anybody).unwrap(), Attempt::OverBudget(excess));
    assert_eq!(state.reserve_awake(need.bytes, Who::Anybody), Err(excess));
    let Attempt::Bare(mapping) = state.attempt(&request, &need, Who::OnLadder).unwrap() else {
        panic!("its own room was refused");
    };
    state.cancel_map(mapping);
    state.let_go();
    assert_eq!(state.reserve_awake(need.bytes, Who::Anybody), Ok(()));
    state.check().unwrap();
}

/// Cached pages are in the budget already: they serve others even while some are held back.
#[test]
fn cached_pages_serve_anybody_whatever_is_held_back() {
    let mut state = state(10);
    let (request, need) = pages(6);
    let Ok(Attempt::Bare(mapping)) = state.attempt(&request, &need, Who::Anybody) else {
        panic!("no room in an empty state");
    };
    let block = state.complete_map(mapping, &request, &need);
    let _ = state.free(block.range.start, 0).unwrap();
    state.hold_back(4 * PAGE as u64);
    let again = state.attempt(&request, &need, Who::Anybody).unwrap();
    assert!(matches!(again, Attempt::Cached(_)), "{again:?}");
}

/// A range on its way in is found by nobody, and counts in no figure but the budget's.
#[test]
fn a_range_being_mapped_is_no_block() {
    let mut state = state(10);
    let (request, need) = pages(6);
    let Ok(Attempt::Bare(mapping)) = state.attempt(&request, &need, Who::Anybody) else {
        panic!("no room in an empty state");
    };
    let address = state.pages_to_map(&mapping).start;
    assert_eq!(state.lookup(address), None);
    assert!(state.free(address, 0).is_err());
    assert!(state.blocks().is_empty());
    assert_eq!((state.stats.mapped_bytes.peak, state.stats.active_bytes.peak), (0, 0));
    assert_eq!(state.excess_bytes(5 * PAGE as u64, Who::Anybody), PAGE as u64);
    state.check().unwrap();
    state.complete_map(mapping, &request, &need);
    assert_eq!(state.lookup(address).map(|it| it.range.start), Some(address));
}
