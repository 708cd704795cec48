//! On the CPU free pages stay: other programs get them when memory runs short.

use super::bench::both::Plan;
use super::both::trainer::{LAYERS, Trainer};
use crate::engine::tests::MIB;
use crate::prefix::Phase;

#[test]
fn marks_of_microbatches_unmap_nothing() {
    let fixture = Plan::default().build();
    let mut trainer = Trainer::new(&fixture);
    trainer.forward_all();
    trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
    trainer.settle();
    let scratch = fixture.allocate(8 * MIB, 1);
    fixture.engine.free(scratch, 0).unwrap();
    let mapped_bytes = fixture.allocator.stats().mapped_bytes.current;
    (1..8).rev().for_each(|after| trainer.prefix.microbatch(after));
    assert_eq!(fixture.allocator.stats().mapped_bytes.current, mapped_bytes);
    trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
    (0..LAYERS).rev().for_each(|layer| trainer.backward(layer));
    trainer.end();
}
