//! Many threads, one engine: each owns its regions, all share window, file, budget and table.

use super::*;
use crate::engine::tests::random::Random;
use crate::ids::Tier;

const THREADS: u64 = 4;
const STEPS: u64 = 120;
/// How often a thread asks for memory that others were quicker to take, every time it was made.
const TRIES_MAX: u32 = 8;

fn region(house: &House, bytes: usize, seed: u64) -> (RegionId, usize) {
    let mut blocks = (0..TRIES_MAX).map(|_| house.allocator.allocate(&Request::new(bytes)));
    let address = blocks.find_map(Result::ok).unwrap().range.start;
    fill(address, bytes, seed);
    (house.engine.adopt(address, Role::Dormant, label("test", Some(0))).unwrap(), address)
}

fn live(house: &House, seed: u64) {
    let mut random = Random::new(seed);
    let mut mine: Vec<(RegionId, usize, usize, u64)> = Vec::new();
    for step in 0..STEPS {
        let pick = random.below(mine.len().max(1) as u64) as usize;
        match random.below(6) {
            0 | 1 if mine.len() < 8 => {
                let bytes = (1 + random.below(64) as usize) * 4096;
                let (id, address) = region(house, bytes, step);
                house.engine.let_reclaim(&[id], &[]);
                mine.push((id, address, bytes, step));
            }
            2 | 3 if !mine.is_empty() => {
                let tier = if random.below(3) == 0 { Tier::Host } else { Tier::Nvme };
                house.engine.sleep(&[mine[pick].0], tier, &[]).unwrap();
            }
            4 if !mine.is_empty() => {
                let (id, address, bytes, seed) = mine[pick];
                // As a node does: first nobody may put it to sleep, then it is woken.
                house.engine.forbid_reclaim(&[id]);
                house.engine.wait_awake(&[id]).unwrap();
                assert!(holds(address, bytes, seed));
                house.engine.let_reclaim(&[id], &[]);
            }
            _ if !mine.is_empty() => {
                let (_, address, ..) = mine.swap_remove(pick);
                house.engine.free(address, 0).unwrap();
            }
            _ => {}
        }
    }
    for (id, address, bytes, seed) in mine {
        house.engine.forbid_reclaim(&[id]);
        house.engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, bytes, seed));
        house.engine.free(address, 0).unwrap();
    }
}

#[test]
fn many_threads_and_a_tight_budget_lose_nothing() {
    let threads = Plan { io_engine: IoEngine::Threads, ..Plan::default() };
    for (plan, seed) in [(Plan::default(), 11), (Plan::default().via_host(), 12), (threads, 13)] {
        let mut plan = Plan { budget_bytes: 3 * MIB, ..plan };
        plan.config.inflight_bytes_max = 512 << 10;
        let house = plan.build();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let house = &house;
                scope.spawn(move || live(house, seed * 1000 + thread * 7919));
            }
        });
        house.assert_empty();
    }
}
