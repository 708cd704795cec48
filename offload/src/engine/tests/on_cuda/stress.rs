//! Two trainers' streams, which the CPU never waits for but to look, and events that are late.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::both::{Fixture, Plan};
use super::side::Side;
use crate::engine::tests::MIB;
use crate::ids::{RegionId, Tier};
use dormouse_storage::testing::Random;

const STEPS: u64 = 150;
const REGIONS_MAX: usize = 6;

struct Mine {
    id: RegionId,
    address: usize,
    bytes: usize,
    seed: u64,
}

fn live(fixture: &Fixture, key: u64) {
    let mut random = Random::new(key);
    let side = Side::new(fixture, key);
    let mut mine: Vec<Mine> = Vec::new();
    let mut reads = Vec::new();
    for step in 0..STEPS {
        let pick = random.below(mine.len().max(1) as u64) as usize;
        match random.below(8) {
            0 | 1 if mine.len() < REGIONS_MAX => {
                let bytes = (1 + random.below(64) as usize) * 4096;
                let (id, address) = side.region(bytes);
                side.write(address, bytes, step);
                fixture.engine.let_reclaim(&[id], &[side.mark()]);
                mine.push(Mine { id, address, bytes, seed: step });
            }
            2 | 3 if !mine.is_empty() => {
                let tier = if random.below(3) == 0 { Tier::Nvme } else { Tier::Host };
                fixture.engine.sleep(&[mine[pick].id], tier, &[side.mark()]).unwrap();
            }
            4 if !mine.is_empty() => fixture.engine.wake(&[mine[pick].id]),
            5 | 6 if !mine.is_empty() => {
                let it = &mut mine[pick];
                fixture.engine.forbid_reclaim(&[it.id]);
                fixture.engine.wait_awake_on(&[it.id], &side.stream).unwrap();
                reads.push((side.read(it.address, it.bytes), it.seed));
                if random.below(2) == 0 {
                    it.seed = step + STEPS;
                    side.write(it.address, it.bytes, it.seed);
                }
                fixture.engine.let_reclaim(&[it.id], &[side.mark()]);
            }
            7 if !mine.is_empty() => side.free(mine.swap_remove(pick).address),
            _ => side.finish(&std::mem::take(&mut reads)),
        }
    }
    for it in mine {
        fixture.engine.forbid_reclaim(&[it.id]);
        fixture.engine.wait_awake_on(&[it.id], &side.stream).unwrap();
        reads.push((side.read(it.address, it.bytes), it.seed));
        side.free(it.address);
    }
    side.finish(&reads);
}

#[test]
fn two_streams_late_events_and_a_tight_budget_lose_nothing() {
    let mut plan = Plan { budget_bytes: 3 * MIB / 2, ..Plan::default() };
    plan.config.inflight_bytes_max = 512 << 10;
    let fixture = plan.build();
    let is_over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let late = scope.spawn(|| {
            let mut random = Random::new(3);
            while !is_over.load(Ordering::SeqCst) {
                fixture.turn.standin.hold_events(random.below(2) == 0);
                std::thread::sleep(Duration::from_micros(random.below(300)));
            }
            fixture.turn.standin.hold_events(false);
        });
        let trainers = [7, 8].map(|key| {
            scope.spawn({
                let fixture = &fixture;
                move || live(fixture, key)
            })
        });
        let ended = trainers.map(|trainer| trainer.join().is_ok());
        is_over.store(true, Ordering::SeqCst);
        late.join().unwrap();
        assert_eq!(ended, [true; 2]);
    });
    fixture.assert_empty();
}
