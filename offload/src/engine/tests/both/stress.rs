//! Many threads, one engine: each owns its regions, all share window, file, budget and table.

use super::*;
use crate::ids::Tier;
use dormouse_storage::testing::Random;

const THREADS: u64 = 4;
const STEPS: u64 = 120;
/// How often a thread asks for memory that others were quicker to take, every time it was made.
const TRIES_MAX: u32 = 8;

fn region(fixture: &Fixture, bytes: usize, seed: u64) -> (RegionId, usize) {
    let mut blocks = (0..TRIES_MAX).map(|_| fixture.allocator.allocate(&Request::new(bytes)));
    let address = blocks.find_map(Result::ok).unwrap().range.start;
    fill(address, bytes, seed);
    (fixture.engine.adopt(address, Role::Dormant, label("test", Some(0))).unwrap(), address)
}

fn live(fixture: &Fixture, seed: u64) {
    let mut random = Random::new(seed);
    let mut mine: Vec<(RegionId, usize, usize, u64)> = Vec::new();
    for step in 0..STEPS {
        let pick = random.below(mine.len().max(1) as u64) as usize;
        match random.below(6) {
            0 | 1 if mine.len() < 8 => {
                let bytes = (1 + random.below(64) as usize) * 4096;
                let (id, address) = region(fixture, bytes, step);
                fixture.engine.let_reclaim(&[id], &[]);
                mine.push((id, address, bytes, step));
            }
            2 | 3 if !mine.is_empty() => {
                let tier = if random.below(3) == 0 { Tier::Host } else { Tier::Nvme };
                fixture.engine.sleep(&[mine[pick].0], tier, &[]).unwrap();
            }
            4 if !mine.is_empty() => {
                let (id, address, bytes, seed) = mine[pick];
                // As a prefix does: it first forbids the sleep, then wakes.
                fixture.engine.forbid_reclaim(&[id]);
                fixture.engine.wait_awake(&[id]).unwrap();
                assert!(holds(address, bytes, seed));
                fixture.engine.let_reclaim(&[id], &[]);
            }
            _ if !mine.is_empty() => {
                let (_, address, ..) = mine.swap_remove(pick);
                fixture.engine.free(address, 0).unwrap();
            }
            _ => {}
        }
    }
    for (id, address, bytes, seed) in mine {
        fixture.engine.forbid_reclaim(&[id]);
        fixture.engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, bytes, seed));
        fixture.engine.free(address, 0).unwrap();
    }
}

/// Shared regions: each thread puts them to sleep, wakes them ahead or at once, and waits, regardless of
/// the others.
fn share(fixture: &Fixture, ids: &[RegionId], seed: u64) {
    let mut random = Random::new(seed);
    for _ in 0..STEPS {
        let from = random.below(ids.len() as u64) as usize;
        let some = &ids[from..ids.len().min(from + 3)];
        match random.below(6) {
            0 => drop(fixture.engine.sleep(some, Tier::Host, &[]).unwrap()),
            1 | 2 => drop(fixture.engine.sleep(some, Tier::Nvme, &[]).unwrap()),
            3 => fixture.engine.wake_ahead(some),
            4 => fixture.engine.wake(some),
            // Put to sleep again each time by somebody: that is said, and no hang.
            _ => match fixture.engine.wait_awake(some).map_err(cause) {
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
            let fixture = plan.build();
            let bytes = 128 << 10;
            let regions: Vec<_> = (0..REGIONS).map(|i| fixture.region(bytes, i)).collect();
            let ids: Vec<_> = regions.iter().map(|&(id, _)| id).collect();
            fixture.engine.set_tier_budget(Tier::Device, budget_bytes as u64).unwrap();
            fixture.engine.let_reclaim(&ids, &[]);
            std::thread::scope(|scope| {
                for thread in 0..THREADS {
                    let (fixture, ids) = (&fixture, &ids);
                    scope.spawn(move || share(fixture, ids, seed * 1000 + thread * 7919));
                }
            });
            fixture.engine.wait_settled(&ids).unwrap();
            for (i, (id, address)) in regions.into_iter().enumerate() {
                fixture.engine.forbid_reclaim(&[id]);
                fixture.engine.wait_awake(&[id]).unwrap();
                assert!(holds(address, bytes, i as u64));
                fixture.engine.free(address, 0).unwrap();
            }
            fixture.assert_empty();
        }
    }
}

#[test]
fn many_threads_and_a_tight_budget_lose_nothing() {
    let threads = Plan { io_engine: IoEngine::Threads, ..Plan::default() };
    for (plan, seed) in [(Plan::default(), 11), (Plan::default().via_host(), 12), (threads, 13)] {
        let mut plan = Plan { budget_bytes: 3 * MIB, ..plan };
        plan.config.inflight_bytes_max = 512 << 10;
        let fixture = plan.build();
        std::thread::scope(|scope| {
            for thread in 0..THREADS {
                let fixture = &fixture;
                scope.spawn(move || live(fixture, seed * 1000 + thread * 7919));
            }
        });
        fixture.assert_empty();
    }
}
