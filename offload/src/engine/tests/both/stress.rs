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
                // As a prefix does: first nobody may put it to sleep, then it is woken.
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

/// Regions that belong to nobody in particular: each thread sends them to sleep, wakes them ahead of
/// need or at once, and waits, whatever the others do with them.
fn share(house: &House, ids: &[RegionId], seed: u64) {
    let mut random = Random::new(seed);
    for _ in 0..STEPS {
        let from = random.below(ids.len() as u64) as usize;
        let some = &ids[from..ids.len().min(from + 3)];
        match random.below(6) {
            0 => drop(house.engine.sleep(some, Tier::Host, &[]).unwrap()),
            1 | 2 => drop(house.engine.sleep(some, Tier::Nvme, &[]).unwrap()),
            3 => house.engine.wake_ahead(some),
            4 => house.engine.wake(some).unwrap(),
            // Put to sleep again each time by somebody: that is said, and no hang.
            _ => match house.engine.wait_awake(some).map_err(cause) {
                Ok(_) | Err(OffloadError::NotAwake { .. }) => {}
                Err(e) if e.is_out_of_memory() => {}
                Err(e) => panic!("{e}"),
            },
        }
    }
}

#[test]
fn threads_that_sleep_and_wake_the_same_regions_lose_nothing() {
    const REGIONS: u64 = 12;
    for (via_host, seed) in [(false, 21), (true, 22)] {
        // Room for all of them, and for two thirds.
        for budget_bytes in [4 * MIB, MIB] {
            let plan = if via_host { Plan::default().via_host() } else { Plan::default() };
            let house = plan.build();
            let bytes = 128 << 10;
            let regions: Vec<_> = (0..REGIONS).map(|i| house.region(bytes, i)).collect();
            let ids: Vec<_> = regions.iter().map(|&(id, _)| id).collect();
            house.engine.set_tier_budget(Tier::Device, budget_bytes as u64).unwrap();
            house.engine.let_reclaim(&ids, &[]);
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (house, ids) = (&house, &ids);
                    scope.spawn(move || share(house, ids, seed * 1000 + thread * 7919));
                }
            });
            house.engine.wait_settled(&ids).unwrap();
            for (i, (id, address)) in regions.into_iter().enumerate() {
                house.engine.forbid_reclaim(&[id]);
                house.engine.wait_awake(&[id]).unwrap();
                assert!(holds(address, bytes, i as u64));
                house.engine.free(address, 0).unwrap();
            }
            house.assert_empty();
        }
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
