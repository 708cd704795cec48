//! The table alone: limits, ids, and verdicts that a machine does not produce on demand.

use super::protocol::{Access, Failed, Verdict};
use super::spaces::{SPACES_MAX, Spaces};
use super::table::{SPANS_MAX, State, Table};
use super::*;
use crate::{Sealed, SpanId};

fn range(number: usize) -> AddressRange {
    AddressRange::new(0x10_0000 + number * 0x1000, 0x1000)
}

fn label() -> SpanLabel {
    SpanLabel { name: *b"a name of 24 bytes, full", layer: 9 }
}

fn fine(_: AddressRange) -> Result<(), i32> {
    Ok(())
}

fn freeze<const N: usize>(table: &Table<N>, number: usize) -> Option<SpanId> {
    table.freeze(range(number), &label(), fine, fine).map(Result::unwrap)
}

fn fault<const N: usize>(table: &Table<N>, access: Access, opens: bool) -> Verdict {
    table.fault(range(0).start + 9, access, |_| opens, || false, || false)
}

#[test]
fn a_full_table_refuses_and_a_freed_slot_serves_again() {
    let table: Table<4> = empty();
    let spans: Vec<_> = (0..4).map(|number| freeze(&table, number).unwrap()).collect();
    assert_eq!(freeze(&table, 4), None);
    table.thaw(spans[2], fine).unwrap();
    let next = freeze(&table, 5).unwrap();
    assert!(spans.iter().all(|span| *span != next), "an id names one span only");
    assert!(matches!(table.thaw(spans[2], fine), Err(Failed::State(State::Free))));
    assert_eq!(table.get(next).unwrap(), (range(5), State::Frozen));
}

#[test]
fn the_last_slot_of_the_real_table_has_an_id_of_its_own() {
    // The index and the generation share the 32 bits of an id.
    static REAL: Table<SPANS_MAX> = empty();
    let table = &REAL;
    let spans: std::collections::HashSet<_> =
        (0..SPANS_MAX).map(|number| freeze(table, number).unwrap().0).collect();
    assert_eq!(spans.len(), SPANS_MAX);
    assert_eq!(freeze(table, SPANS_MAX), None);
    let seen = table.find(range(SPANS_MAX - 1).start).unwrap();
    assert_eq!(seen.index as usize, SPANS_MAX - 1);
}

#[test]
fn a_full_name_comes_back_from_the_table() {
    let table: Table<2> = empty();
    freeze(&table, 0).unwrap();
    let seen = table.find(range(0).start + 0xfff).unwrap();
    assert_eq!(table.label(&seen), label());
    assert!(table.find(range(0).end()).is_none());
}

#[test]
fn a_write_that_cannot_be_opened_is_stuck_and_may_be_repeated() {
    let table: Table<2> = empty();
    let span = freeze(&table, 0).unwrap();
    assert!(matches!(fault(&table, Access::Write, false), Verdict::Stuck(_)));
    assert_eq!(table.get(span).unwrap().1, State::Frozen);
    assert!(matches!(fault(&table, Access::Write, true), Verdict::Retry));
    assert_eq!(table.get(span).unwrap().1, State::Written);
}

#[test]
fn reads_do_not_cancel_and_unknown_accesses_do() {
    let table: Table<2> = empty();
    let span = freeze(&table, 0).unwrap();
    assert!(matches!(fault(&table, Access::Read, true), Verdict::Retry));
    assert_eq!(table.get(span).unwrap().1, State::Frozen);
    assert!(matches!(fault(&table, Access::Unknown, true), Verdict::Retry));
    assert_eq!(table.get(span).unwrap().1, State::Written);
    assert!(matches!(table.seal(span, fine, fine), Ok((_, Sealed::Written))));
    assert!(matches!(fault(&table, Access::Write, true), Verdict::Elsewhere));
}

#[test]
fn a_refused_freeze_leaves_no_span() {
    let table: Table<2> = empty();
    let frozen = table.freeze(range(0), &label(), |_| Err(12), fine);
    assert_eq!(frozen, Some(Err(12)));
    assert!(table.find(range(0).start).is_none());
}

#[test]
fn a_refused_thaw_never_seals_afterwards() {
    let table: Table<2> = empty();
    let span = freeze(&table, 0).unwrap();
    // A part of the range may be open now: no copy can be trusted.
    assert!(matches!(table.thaw(span, |_| Err(12)), Err(Failed::System(12))));
    assert!(matches!(table.seal(span, fine, |_| Err(12)), Err(Failed::System(12))));
    assert!(matches!(table.seal(span, fine, fine), Ok((_, Sealed::Written))));
}

#[test]
fn a_refused_seal_leaves_the_span_frozen() {
    let table: Table<2> = empty();
    let span = freeze(&table, 0).unwrap();
    assert!(matches!(table.seal(span, |_| Err(12), fine), Err(Failed::System(12))));
    assert_eq!(table.get(span).unwrap().1, State::Frozen);
    assert!(matches!(table.seal(span, fine, fine), Ok((_, Sealed::Asleep))));
    for access in [Access::Read, Access::Write, Access::Unknown] {
        assert!(matches!(fault(&table, access, true), Verdict::Stray(_)), "{access:?}");
    }
}

#[test]
fn clearing_a_space_ends_its_spans_only() {
    let table: Table<4> = empty();
    let spans: Vec<_> = (0..3).map(|number| freeze(&table, number).unwrap()).collect();
    table.clear(AddressRange::new(range(0).start, 0x2000));
    assert!(table.get(spans[0]).is_err() && table.get(spans[1]).is_err());
    assert!(table.get(spans[2]).is_ok());
    assert!(freeze(&table, 7).is_some() && freeze(&table, 8).is_some());
}

#[test]
fn spaces_have_a_limit_and_can_be_left() {
    let spaces = Spaces::new();
    for number in 0..SPACES_MAX {
        assert!(spaces.add(range(number)));
    }
    assert!(!spaces.add(range(SPACES_MAX)));
    assert!(spaces.contains(range(7).start) && !spaces.contains(range(SPACES_MAX).start));
    spaces.shrink(range(6).start, range(6).start + 9);
    assert!(spaces.contains(range(6).start + 8) && !spaces.contains(range(6).start + 9));
    spaces.shrink(range(6).start, range(6).end());
    assert!(!spaces.contains(range(6).start + 9), "it never rises");
    assert!(spaces.contains(range(5).end() - 1) && spaces.contains(range(7).end() - 1));
    spaces.remove(range(7));
    assert!(!spaces.contains(range(7).start) && spaces.contains(range(8).start));
    assert!(spaces.add(range(SPACES_MAX)));
}
