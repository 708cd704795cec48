//! Pages that microbatches do not use go back to the driver while the prefix sleeps.

use dormouse_alloc::Request;

use super::bench::both::{Fixture, Plan};
use super::both::trainer::Trainer;
use crate::engine::tests::{MIB, holds};
use crate::prefix::{Edge, Phase};

/// More than what a mark leaves: parts of large pages.
const REST_BYTES: u64 = 256 << 10;
/// Of a microbatch's activations, in blocks.
const BLOCK_BYTES: usize = MIB;

/// A trainer in phase B, all that is dormant asleep, and as much memory as that free.
fn in_phase_b(fixture: &Fixture) -> Trainer<'_> {
    let trainer = Trainer::asleep_in_phase_b(fixture);
    free_at_once(fixture, 12);
    trainer
}

/// Allocates blocks and frees them immediately. Their pages stay cached, and no later block uses them.
fn free_at_once(fixture: &Fixture, blocks: usize) {
    let request = Request::new(BLOCK_BYTES);
    let blocks: Vec<_> =
        (0..blocks).map(|_| fixture.allocator.allocate(&request).unwrap()).collect();
    for block in blocks {
        fixture.engine.free(block.range.start, 0).unwrap();
    }
}

/// A microbatch with this number of blocks, whose bytes are there until it is over. Returns the most bytes in use.
fn microbatch(trainer: &mut Trainer<'_>, after: u32, blocks: usize) -> u64 {
    let fixture = trainer.fixture;
    // Its marks are complete, though a query of the stream may still find it busy.
    fixture.finish(&trainer.stream);
    trainer.prefix.microbatch(after);
    fixture.allocator.reset_peaks();
    let blocks: Vec<_> =
        (0..blocks).map(|seed| fixture.allocate(BLOCK_BYTES, seed as u64)).collect();
    trainer.microbatch();
    for (block, seed) in blocks.into_iter().zip(0..) {
        assert!(holds(block, BLOCK_BYTES, seed));
        fixture.engine.free(block, 0).unwrap();
    }
    fixture.allocator.stats().active_bytes.peak
}

fn mapped_bytes(fixture: &Fixture) -> u64 {
    fixture.allocator.stats().mapped_bytes.current
}

#[test]
fn pages_that_two_microbatches_have_not_used_leave() {
    let fixture = Plan::default().build();
    let mut trainer = in_phase_b(&fixture);
    for (number, after) in (1..12).rev().enumerate() {
        let before = mapped_bytes(&fixture);
        let in_use = microbatch(&mut trainer, after, 3);
        let unused = mapped_bytes(&fixture).saturating_sub(in_use);
        match number {
            0 | 1 | 7 | 8 => {
                assert_eq!(mapped_bytes(&fixture), before, "mark {number}");
                assert!(unused > 4 * MIB as u64, "{unused} bytes unused at mark {number}");
            }
            // A stream that is found busy at the first try is marked from then on.
            2 | 9 => {}
            _ => assert!(unused <= REST_BYTES, "{unused} bytes unused at mark {number}"),
        }
        if number == 6 {
            // The next two marks do not come after two microbatches without them.
            free_at_once(&fixture, 12);
        }
    }
    // The last one needs them for what wakes.
    let before = mapped_bytes(&fixture);
    free_at_once(&fixture, 6);
    microbatch(&mut trainer, 0, 3);
    assert!(mapped_bytes(&fixture) > before);
    trainer.settle();
    trainer.backward_all_and_end();
}

/// Every other microbatch is larger: its pages stay.
#[test]
fn microbatches_that_alternate_map_nothing_anew() {
    let fixture = Plan::default().build();
    let mut trainer = in_phase_b(&fixture);
    let mut calls = None;
    for after in (1..13).rev() {
        microbatch(&mut trainer, after, if after % 2 == 0 { 2 } else { 6 });
        let stats = fixture.allocator.stats();
        if after <= 7 {
            let now = (stats.maps, stats.unmaps);
            assert_eq!(*calls.get_or_insert(now), now, "{after} to come");
        }
    }
    trainer.backward_all_and_end();
}

/// Marks at which pages stay, as numbers of microbatches to come; `None`: waking begins.
#[test]
fn pages_stay_for_the_last_microbatch_and_while_layers_wake() {
    for marks in [&[Some(2), Some(1), Some(0)][..], &[Some(4), Some(3), None, Some(2), Some(1)][..]]
    {
        let fixture = Plan::default().build();
        let mut trainer = in_phase_b(&fixture);
        fixture.finish(&trainer.stream);
        for mark in marks {
            let unmaps = fixture.allocator.stats().unmaps;
            match mark {
                Some(after) => {
                    trainer.prefix.microbatch(*after);
                    assert_eq!(fixture.allocator.stats().unmaps, unmaps, "{marks:?} {mark:?}");
                    // A microbatch beside which nothing has room, so that no wake moves pages.
                    let bytes = 2 * fixture.allocator.spare_bytes() as usize;
                    fixture.engine.free(fixture.allocate(bytes, 1), 0).unwrap();
                }
                // Nothing wakes yet, so that all of what is unused is there.
                None => trainer.prefix.wake_began_ns = Some(0),
            }
        }
        trainer.backward_all_and_end();
    }
}

/// Only the begin of a microbatch is one.
#[test]
fn a_repeated_mark_gives_nothing_back() {
    let fixture = Plan::default().build();
    let mut trainer = in_phase_b(&fixture);
    fixture.finish(&trainer.stream);
    let mapped = mapped_bytes(&fixture);
    for after in [3, 3, 3, 3, 2, 2, 2] {
        trainer.prefix.microbatch(after);
    }
    assert_eq!(mapped_bytes(&fixture), mapped);
    trainer.backward_all_and_end();
}

#[test]
fn a_step_in_which_nothing_sleeps_gives_nothing_back() {
    let fixture = Plan::default().build();
    let (mut prefix, stream) = (fixture.engine.prefix(1, "awake").unwrap(), fixture.here());
    prefix.enter(Phase::A, &stream).unwrap();
    prefix.mark(Edge::ForwardBegin, 0, &stream).unwrap();
    prefix.mark(Edge::ForwardEnd, 0, &stream).unwrap();
    prefix.enter(Phase::B, &stream).unwrap();
    free_at_once(&fixture, 6);
    fixture.finish(&stream);
    let mapped = mapped_bytes(&fixture);
    for after in (1..8).rev() {
        fixture.finish(&stream);
        prefix.microbatch(after);
        free_at_once(&fixture, 1);
    }
    assert_eq!(mapped_bytes(&fixture), mapped);
    assert_eq!(prefix.close().left_asleep_bytes, 0);
}
