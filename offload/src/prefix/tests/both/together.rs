//! Layers whose small tensors sleep together.

use dormouse_alloc::Request;

use super::bench::ASLEEP_FIRST;
use super::bench::both::Plan;
use super::trainer::{LAYER_BYTES, LAYERS, Trainer, tensor};
use crate::config::Route;
use crate::engine::REGION_BLOCKS_MAX;
use crate::engine::tests::{MIB, fill, holds};
use crate::ids::Tier;
use crate::prefix::{Edge, Phase};
use dormouse_kernels::DType;
use dormouse_residency::region::RegionState;

const KIB: usize = 1 << 10;

fn plans() -> [Plan; 2] {
    [Plan::default(), Plan::default().via_host()].map(|mut plan| {
        // More on a direct device, where a twelfth of it counts.
        let is_direct = plan.config.route == Route::Auto && ASLEEP_FIRST == RegionState::Nvme;
        plan.config.coalesced_bytes_max = if is_direct { 12 * MIB as u64 } else { MIB as u64 };
        plan
    })
}

#[test]
fn a_step_moves_each_layers_small_tensors_once() {
    for plan in plans() {
        let fixture = plan.build();
        let mut trainer = Trainer::new(&fixture);
        trainer.forward_all();
        trainer.prefix.enter(Phase::B, &trainer.stream).unwrap();
        trainer.settle();
        // The large one alone; half and a quarter of its size together.
        assert!((0..LAYERS).all(|layer| trainer.ids(layer).len() == 2));
        trainer.to_file();
        trainer.settle();
        assert!((0..LAYERS).all(|layer| trainer.states(layer) == [RegionState::Nvme; 2]));
        let dormant_bytes = u64::from(LAYERS) * LAYER_BYTES;
        assert_eq!(
            fixture.engine.stats().tiers[Tier::Nvme.index()].regions.current_bytes,
            dormant_bytes
        );
        assert_eq!(fixture.engine.stats().nvme_write.copies, 2 * u64::from(LAYERS));
        trainer.microbatch();
        trainer.prefix.enter(Phase::C, &trainer.stream).unwrap();
        for layer in (0..LAYERS).rev() {
            // As each is freed its memory is there for others.
            trainer.prefix.mark(Edge::BackwardBegin, layer, &trainer.stream).unwrap();
            fixture.finish(&trainer.stream);
            assert!(trainer.intact(layer));
            for (address, ..) in trainer.saved[layer as usize].drain(1..) {
                assert!(fixture.allocator.lookup(address).is_some());
                fixture.engine.free(address, 0).unwrap();
                assert!(fixture.allocator.lookup(address).is_none());
            }
            trainer.prefix.mark(Edge::BackwardEnd, layer, &trainer.stream).unwrap();
        }
        let report = trainer.end();
        assert_eq!(
            (report.dormant_bytes, report.asleep_bytes_peak),
            (dormant_bytes, dormant_bytes)
        );
    }
}

#[test]
fn many_are_several_regions_and_each_block_is_in_one() {
    let [plan, _] = plans();
    let fixture = plan.build();
    let mut trainer = Trainer::new(&fixture);
    trainer.prefix.enter(Phase::A, &trainer.stream).unwrap();
    trainer.prefix.mark(Edge::ForwardBegin, 0, &trainer.stream).unwrap();
    let scope = trainer.prefix.scope(0).unwrap();
    let count = 2 * REGION_BLOCKS_MAX + 1;
    let blocks: Vec<usize> = (0..count as u64)
        .map(|seed| {
            let request = Request { scope, whole_pages: true, ..Request::new(64 * KIB) };
            let address = fixture.allocator.allocate(&request).unwrap().range.start;
            fill(address, 64 * KIB, seed);
            address
        })
        .collect();
    let twice: Vec<usize> = blocks.iter().flat_map(|&at| [at, at + 64]).collect();
    let named = trainer.prefix.dormant(0, &twice).unwrap();
    assert_eq!((named.accepted as usize, named.refused.len()), (count, 0));
    assert_eq!(named.accepted_bytes, (count * 64 * KIB) as u64);
    assert_eq!(trainer.ids(0).len(), 3);
    let again = trainer.prefix.dormant(0, &blocks).unwrap();
    assert_eq!((again.accepted, again.refused.len()), (0, 0));
    // One of them is a boundary after all: the fifteen beside it stay awake with it.
    let key = tensor(blocks[3], 64 * KIB, 16, DType::F32);
    trainer.prefix.boundary(0, 0, key, &trainer.stream).unwrap();
    let left_bytes = ((count - REGION_BLOCKS_MAX) * 64 * KIB) as u64;
    assert_eq!(trainer.prefix.report().dormant_bytes, left_bytes);
    trainer.prefix.mark(Edge::ForwardEnd, 0, &trainer.stream).unwrap();
    trainer.prefix.mark(Edge::ForwardBegin, 1, &trainer.stream).unwrap();
    trainer.prefix.mark(Edge::ForwardEnd, 1, &trainer.stream).unwrap();
    fixture.engine.wait_settled(&trainer.ids(0)).unwrap();
    assert_eq!(fixture.allocator.stats().asleep_bytes.current, left_bytes);
    fixture.engine.wait_awake(&trainer.ids(0)).unwrap();
    assert!(blocks.iter().zip(0..).all(|(&at, seed)| holds(at, 64 * KIB, seed)));
    let prefix = trainer.prefix.close();
    assert_eq!(prefix.left_asleep_bytes, 0);
    blocks.iter().for_each(|&at| fixture.engine.free(at, 0).unwrap());
    fixture.assert_empty();
}
