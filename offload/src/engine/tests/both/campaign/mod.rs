//! The campaign of faults on this device.

mod ending;
mod steps;
mod world;

use self::world::World;
use super::{Fixture, Plan, TestDevice, Turn, new_allocator};
use crate::engine::tests::campaign::campaign;
use crate::engine::tests::campaign::script::Script;
use crate::engine::tests::campaign::tally::Tally;

fn run(script: &Script, tally: &mut Tally) {
    let mut world = World::new(script);
    for op in &script.operations {
        world.step(op, tally);
    }
    tally.sequences += 1;
    tally.operations += script.operations.len() as u64;
    world.end(script.ending, tally);
}

#[test]
fn faults_lose_no_byte() {
    let name = std::any::type_name::<TestDevice>();
    if let Some(tally) = campaign(name, run) {
        tally.assert_all_fired();
    }
}
