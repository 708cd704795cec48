//! On the CPU free pages stay: other programs get them when memory runs short.

use super::bench::both::Plan;
use super::both::trainer::Trainer;
use crate::engine::tests::MIB;

#[test]
fn marks_of_microbatches_unmap_nothing() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::asleep_in_phase_b(&fixture);
    let scratch = fixture.allocate(8 * MIB, 1);
    fixture.engine.free(scratch, 0).unwrap();
    let mapped_bytes = fixture.allocator.stats().mapped_bytes.current;
    (1..8).rev().for_each(|after| trainer.prefix.microbatch(after));
    assert_eq!(fixture.allocator.stats().mapped_bytes.current, mapped_bytes);
    trainer.backward_all_and_end();
}
