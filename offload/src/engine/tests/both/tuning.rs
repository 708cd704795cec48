//! Settings that follow what was measured.

use std::sync::atomic::{AtomicU64, Ordering};

use super::*;
use crate::config::{Automatic, AvailableMemory};
use crate::engine::tuning::LOOK_AGAIN_NS;
use crate::ids::Tier;
use dormouse_residency::region::{RegionWait, SleepGoal};
use dormouse_storage::sync::lock;

/// Memory that is available, as a test says, and the number of looks at it.
#[derive(Debug)]
struct Memory {
    bytes: AtomicU64,
    looks: AtomicU64,
}

impl Memory {
    fn of(bytes: u64) -> Arc<Self> {
        Arc::new(Self { bytes: AtomicU64::new(bytes), looks: AtomicU64::new(0) })
    }

    /// Sets the bytes. The engine looks again, as it would after a while.
    fn set(&self, bytes: u64, fixture: &Fixture) {
        self.bytes.store(bytes, Ordering::Relaxed);
        *lock(&fixture.engine.tuning.host_memory.as_ref().unwrap().seen) = None;
    }

    fn looks(&self) -> u64 {
        self.looks.load(Ordering::Relaxed)
    }
}

impl AvailableMemory for Memory {
    fn available_bytes(&self) -> Option<u64> {
        self.looks.fetch_add(1, Ordering::Relaxed);
        Some(self.bytes.load(Ordering::Relaxed))
    }
}

/// All is automatic, and the first values are small.
fn automatic(memory: &Arc<Memory>) -> EngineConfig {
    let memory = Arc::clone(memory) as Arc<dyn AvailableMemory>;
    let automatic = Automatic {
        inflight_bytes: true,
        window_layers: true,
        host_bytes: true,
        queue_depth: true,
        file_bytes: true,
        memory: Some(memory),
    };
    EngineConfig { automatic, host_bytes_max: MIB as u64, ..Plan::default().config }
}

#[test]
fn the_host_tier_takes_memory_when_it_is_full_and_memory_is_there() {
    let memory = Memory::of(0);
    let fixture = Plan { config: automatic(&memory), ..Plan::default() }.via_host().build();
    let limit = || fixture.engine.stats().tiers[1].budget_bytes;
    let slept = |id| {
        let outcome = fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        outcome.accepted_bytes > 0
    };
    let regions: Vec<_> = (0..3).map(|at| fixture.region(4 * MIB, at)).collect();
    let [first, second, third] = [0, 1, 2].map(|at: usize| regions[at].0);
    assert!(!slept(first) && limit() == MIB as u64, "no memory is available");
    memory.set(16 * MIB as u64, &fixture);
    assert!(slept(first) && limit() == 8 * MIB as u64, "{}", limit());
    // 4 MiB in use, and half of what is available then.
    memory.set(8 * MIB as u64, &fixture);
    assert!(slept(second), "{}", limit());
    assert_eq!(limit(), 8 * MIB as u64);
    let reason = fixture.engine.revised().host_bytes.unwrap().reason;
    assert!(reason.contains("half of the 16 MiB"), "{reason}");
    // Memory is short: after a step no more is promised than is there.
    memory.set(0, &fixture);
    assert!(!slept(third));
    fixture.engine.revise(None);
    assert_eq!(limit(), 8 * MIB as u64, "what it holds stays");
    memory.set(8 * MIB as u64, &fixture);
    fixture.engine.revise(None);
    assert_eq!(limit(), 12 * MIB as u64);
    // A set limit stays.
    memory.set(1 << 30, &fixture);
    fixture.engine.set_tier_budget(Tier::Host, 8 * MIB as u64).unwrap();
    fixture.engine.revise(None);
    assert!(!slept(third) && limit() == 8 * MIB as u64);
    assert_eq!(fixture.engine.revised().host_bytes, None);
    fixture.engine.wait_awake(&[first, second]).unwrap();
    for (at, (_, address)) in regions.into_iter().enumerate() {
        assert!(holds(address, 4 * MIB, at as u64));
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

/// Half of 100 MiB was the limit when the engine was made. Then another program took the memory.
#[test]
fn the_host_tier_takes_no_memory_that_is_gone() {
    const BYTES: usize = 40 * MIB;
    let memory = Memory::of(100 * MIB as u64);
    let config = EngineConfig { host_bytes_max: 50 * MIB as u64, ..automatic(&memory) };
    let fixture = Plan { config, ..Plan::default() }.via_host().build();
    let (id, address) = fixture.region(BYTES, 1);
    let sleep = || {
        let outcome = fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        outcome
    };
    memory.set(MIB as u64, &fixture);
    let outcome = sleep();
    assert_eq!((outcome.declined_bytes, fixture.host_used()), (BYTES as u64, 0), "{outcome:?}");
    memory.set(100 * MIB as u64, &fixture);
    assert_eq!(sleep().accepted_bytes, BYTES as u64);
    assert_eq!(fixture.state(id), RegionState::Host);
    fixture.engine.wait_awake(&[id]).unwrap();
    fixture.engine.wait_for_hosts(&[id]).unwrap();
    // What a caller has set is not asked about.
    memory.set(0, &fixture);
    fixture.engine.set_tier_budget(Tier::Host, 50 * MIB as u64).unwrap();
    assert_eq!(sleep().accepted_bytes, BYTES as u64);
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, BYTES, 1));
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

/// A region waits in line for host memory. By the time its tier has room, others have taken the memory.
#[test]
fn one_in_line_waits_for_memory_that_is_gone() {
    const BYTES: usize = 4 * MIB;
    let memory = Memory::of(100 * MIB as u64);
    let config = EngineConfig { host_bytes_max: 6 * MIB as u64, ..automatic(&memory) };
    let fixture = Plan { config, ..Plan::default() }.via_host().build();
    let [(first, first_at), (second, second_at)] = [1, 2].map(|seed| fixture.region(BYTES, seed));
    fixture.engine.sleep(&[first], Tier::Host, &[]).unwrap();
    fixture.engine.wait_settled(&[first]).unwrap();
    memory.set(0, &fixture);
    fixture.engine.let_reclaim(&[second], &[]);
    assert!(fixture.engine.sleep_when_admitted(&[second], Tier::Host));
    fixture.engine.free(first_at, 0).unwrap();
    fixture.engine.pump();
    let waits = || {
        let wait = fixture.engine.table.with(second, |entry| entry.region.wait);
        matches!(wait, Some(RegionWait::Admission(SleepGoal::Host)))
    };
    // A pool that keeps memory has it from the first.
    fixture.engine.wait_settled(&[second]).unwrap();
    assert!(waits() || fixture.state(second) == RegionState::Host);
    memory.set(100 * MIB as u64, &fixture);
    fixture.engine.pump();
    soon("it sleeps", || fixture.state(second) == RegionState::Host);
    fixture.engine.wait_awake(&[second]).unwrap();
    assert!(holds(second_at, BYTES, 2));
    fixture.engine.free(second_at, 0).unwrap();
    fixture.assert_empty();
}

/// A look reads files of the system. A full tier is asked by every region and every time that something moves on.
#[test]
fn a_full_host_tier_looks_at_the_memory_now_and_then() {
    let memory = Memory::of(2 * MIB as u64);
    let fixture = Plan { config: automatic(&memory), ..Plan::default() }.via_host().build();
    fixture.engine.set_tier_budget(Tier::Nvme, 8 * MIB as u64).unwrap();
    let regions: Vec<_> = (0..51).map(|seed| fixture.region(MIB, seed)).collect();
    let ids: Vec<_> = regions.iter().map(|region| region.0).collect();
    fixture.engine.sleep(&ids[..1], Tier::Host, &[]).unwrap();
    fixture.engine.wait_settled(&ids[..1]).unwrap();
    assert_eq!(fixture.host_used(), MIB as u64, "it is full");
    let ask = || {
        let (looks, began_ns) = (memory.looks(), fixture.engine.timeline.now_ns());
        for id in &ids[1..] {
            fixture.engine.sleep(&[*id], Tier::Host, &[]).unwrap();
            fixture.engine.pump();
        }
        let elapsed_ns = fixture.engine.timeline.now_ns() - began_ns;
        (memory.looks() - looks, 2 + elapsed_ns / LOOK_AGAIN_NS)
    };
    let (looks, looks_max) = ask();
    assert!(looks <= looks_max, "{looks} looks, at most {looks_max} by the time");
    fixture.engine.set_tier_budget(Tier::Host, MIB as u64).unwrap();
    assert_eq!(ask().0, 0, "the limit is set");
    for (_, address) in regions {
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

#[test]
fn more_may_fall_asleep_over_faster_links() {
    let memory = Memory::of(1 << 40);
    let fixture = measured(automatic(&memory), 200_000_000_000);
    assert_eq!(fixture.engine.tuning.inflight_bytes_max(), 256 * MIB as u64);
    fixture.engine.revise(None);
    assert_eq!(fixture.engine.tuning.inflight_bytes_max(), 1_000_000_000);
    let seen = fixture.engine.revised().inflight_bytes.unwrap();
    assert_eq!(seen.value, 1_000_000_000);
    assert!(seen.reason.contains("/s until a finished copy starts the next"), "{}", seen.reason);
}

#[test]
fn set_values_are_not_revised() {
    let memory = Memory::of(1 << 40);
    let config = EngineConfig { automatic: Automatic::default(), ..automatic(&memory) };
    let fixture = measured(config, 200_000_000_000);
    fixture.engine.revise(None);
    assert_eq!(fixture.engine.tuning.inflight_bytes_max(), 256 * MIB as u64);
    assert_eq!(fixture.engine.stats().tiers[1].budget_bytes, MIB as u64);
    assert_eq!(fixture.engine.revised(), crate::Revised::default());
}

#[test]
fn queues_are_as_deep_as_the_disk_asks_for() {
    let memory = Memory::of(0);
    let create = |config: EngineConfig| {
        let (_turn, allocator) = (Turn::take(), new_allocator(64 * MIB));
        Engine::new(allocator, config, Arc::new(Timeline::new(64))).unwrap().revised().queue_depth
    };
    let config = EngineConfig { nvme: Some(real_file(96 * MIB)), ..automatic(&memory) };
    let chosen = create(config.clone()).unwrap();
    assert!((4..=32).contains(&chosen.value) && chosen.reason.contains(" at a latency of "));
    assert_eq!(create(EngineConfig { automatic: Automatic::default(), ..config }), None);
}
