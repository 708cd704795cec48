//! What goes wrong: disks, files, devices. Each is a typed answer, and nothing is lost.

use std::panic::{AssertUnwindSafe, catch_unwind};

use dormouse_device::{DeviceError, Operation};
use standin::events;

use super::*;
use crate::ids::Tier;
use crate::table::{Executor, Launched};
use dormouse_residency::region::{Action, Input, RegionStep, SleepGoal};
use dormouse_storage::testing::CachedFile;
use dormouse_storage::{NvmeError, Storage};

#[test]
fn a_full_disk_keeps_data_where_it_is_and_says_so() {
    for errno in [libc::ENOSPC, libc::EIO] {
        for plan in [Plan::default(), Plan::default().via_host()] {
            let fixture = plan.build();
            let faults = fixture.faults.clone();
            fill_the_disk(fixture, || faults.fail_writes_after(8192, errno));
        }
    }
}

/// A lost write of one region makes every write doubtful, although the system reports it once.
#[test]
fn data_of_a_failed_write_back_stays_where_it_is() {
    for plan in [Plan::default(), Plan::default().via_host()] {
        let file = Arc::new(CachedFile::new(plan.file_bytes));
        let fixture = plan.build_over(Faults::over(Arc::clone(&file) as Arc<dyn Storage>));
        fill_the_disk(fixture, || file.fail_write_backs(1, libc::EIO));
    }
}

fn fill_the_disk(fixture: Fixture, give_out: impl FnOnce()) {
    // By way of host memory they have been asleep for a while when the file fails.
    let kept = if fixture.engine.is_direct { RegionState::Awake } else { RegionState::Host };
    let regions: Vec<_> = (0..4).map(|i| fixture.region(MIB, i)).collect();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    fixture.engine.sleep(&ids[..1], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&ids).unwrap();
    give_out();
    fixture.engine.sleep(&ids[1..3], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&ids).unwrap();
    assert_eq!((fixture.state(ids[1]), fixture.state(ids[2])), (kept, kept));
    fixture.engine.wait_awake(&ids[1..3]).unwrap();
    assert!(holds(regions[1].1, MIB, 1) && holds(regions[2].1, MIB, 2));

    let outcome = fixture.engine.sleep(&ids[3..], Tier::Nvme, &[]).unwrap();
    let why = outcome.declined.unwrap();
    assert!(why.starts_with("the NVMe tier takes no more data: Write of "), "{why}");
    assert_eq!(outcome.declined_bytes, MIB as u64);
    let stats = fixture.engine.stats();
    assert!(stats.nvme_stopped.is_some());
    assert_eq!(stats.sleep_failures >= 1, kept == RegionState::Awake);
    assert_eq!(stats.declined, 1);
    // What is in the file can still be had.
    fixture.engine.wait_awake(&ids[..1]).unwrap();
    for (i, &(_, address)) in regions.iter().enumerate() {
        assert!(holds(address, MIB, i as u64));
        fixture.engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

#[test]
fn a_tier_without_room_declines() {
    let mut plan = Plan { file_bytes: 2 * MIB, ..Plan::default() };
    plan.config.host_bytes_max = 0;
    let fixture = plan.build();
    let (id, address) = fixture.region(3 * MIB, 1);
    let (outcome, seen) = events::collect(|| fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap());
    let declined = events::with_message(&seen, "sleep declined");
    assert_eq!(declined.len(), 1, "{seen:?}");
    assert_eq!((declined[0].target, &*declined[0].fields["bytes"]), ("offload", "3145728"));
    assert_eq!(Some(&*declined[0].fields["reason"]), outcome.declined.as_deref());
    assert_eq!(
        outcome.declined.as_deref(),
        Some("the NVMe file has no room for 3145728 bytes: 0 of 2097152 bytes are used")
    );
    let outcome = fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    assert_eq!(
        outcome.declined.as_deref(),
        Some("the Host tier has no room for 3145728 bytes: 0 of 0 bytes are used")
    );
    fixture.engine.set_tier_budget(Tier::Host, 4 << 20).unwrap();
    fixture.engine.set_tier_budget(Tier::Nvme, 0).unwrap();
    assert!(fixture.engine.set_tier_budget(Tier::Device, 0).is_err());
    let outcome = fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    assert_eq!(outcome.accepted_bytes, 3 << 20);
    fixture.engine.wait_settled(&[id]).unwrap();
    assert_eq!(fixture.state(id), RegionState::Host);
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn a_corrupted_extent_is_typed_and_leaves_the_rest_intact() {
    for plan in [Plan::default(), Plan::default().via_host()] {
        let fixture = plan.build();
        let regions: Vec<_> = (0..3).map(|i| fixture.region(MIB, i)).collect();
        let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
        fixture.engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
        fixture.engine.wait_settled(&ids).unwrap();
        let offset = fixture.engine.extent_offset(ids[1]).unwrap();
        fixture.faults.flip_bit(offset + 12_345);

        let error = fixture.engine.wait_awake(&ids).unwrap_err();
        let OffloadError::WakeFailed { region, start, bytes, .. } = error else {
            panic!("{error}")
        };
        assert_eq!((region, start, bytes), (ids[1], regions[1].1, MIB as u64));
        let OffloadError::Nvme(NvmeError::Corrupted { extent, offset: at, expected, seen }) =
            cause(error)
        else {
            panic!()
        };
        assert_eq!((extent, at), (offset, offset));
        assert_ne!(expected, seen);
        assert_eq!(fixture.state(ids[1]), RegionState::Nvme);
        fixture.engine.wait_awake(&[ids[0], ids[2]]).unwrap();
        assert!(holds(regions[0].1, MIB, 0) && holds(regions[2].1, MIB, 2));
        // The bytes are where they were: once the disk is right they come back.
        fixture.faults.flip_bit(offset + 12_345);
        fixture.engine.wait_awake(&ids).unwrap();
        assert!(holds(regions[1].1, MIB, 1));
        for (_, address) in regions {
            fixture.engine.free(address, 0).unwrap();
        }
        fixture.assert_empty();
    }
}

#[test]
fn a_passing_bit_flip_is_read_again_and_counted() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 7);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    fixture.faults.flip_next_reads(1);
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(holds(address, MIB, 7));
    assert_eq!(fixture.engine.stats().reread_chunks, 1);
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}

#[test]
fn configurations_out_of_range_say_what_is_accepted() {
    let _turn = Turn::take();
    let new = |config| {
        let timeline = Arc::new(Timeline::new(1024));
        Engine::new(new_allocator(MIB), config, timeline).unwrap_err().to_string()
    };
    let ok = EngineConfig::default();
    let zero_window = EngineConfig { inflight_bytes_max: 0, ..ok.clone() };
    assert_eq!(new(zero_window), "inflight_bytes_max is 0; accepted: at least 1");
    let zero_layers = EngineConfig { wake_window_layers: 0, ..ok.clone() };
    assert_eq!(new(zero_layers), "wake_window_layers is 0; accepted: 1 to 1024");
    let file = |dir: &str| {
        let nvme = NvmeConfig { dir: dir.into(), ..real_file(MIB) };
        EngineConfig { nvme: Some(nvme), ..ok.clone() }
    };
    assert!(new(file("/dev/shm")).contains("tmpfs, which is memory"));
    assert!(new(file("/proc")).starts_with("NVMe tier in /proc: creating the file failed:"));
}

#[test]
fn an_engine_without_tiers_declines_everything() {
    let _turn = Turn::take();
    let allocator = new_allocator(16 * MIB);
    let timeline = Arc::new(Timeline::new(1024));
    let engine = Engine::new(Arc::clone(&allocator), EngineConfig::default(), timeline).unwrap();
    let address = allocator.allocate(&Request::new(MIB)).unwrap().range.start;
    let id = engine.adopt(address, Role::Tagged, label("x", None)).unwrap();
    for tier in [Tier::Host, Tier::Nvme] {
        assert_eq!(engine.sleep(&[id], tier, &[]).unwrap().declined_bytes, MIB as u64);
    }
    engine.free(address, 0).unwrap();
}

/// The device refuses once, at each place where it can: the data survives, and the next try works.
#[test]
fn a_refusing_device_costs_a_try_and_no_byte() {
    let operations = [
        (Operation::Freeze, false),
        (Operation::Seal, false),
        (Operation::Stage, true),
        (Operation::Publish, true),
        (Operation::Pin, false),
        (Operation::Copy, false),
        (Operation::Callback, false),
        (Operation::CreateStream, false),
    ];
    for (operation, at_wake) in operations {
        let fixture = Plan::default().via_host().build();
        let device = fixture.device();
        let (id, address) = fixture.region(MIB, 3);
        let refused = DeviceError::Refused {
            operation,
            start: 0,
            bytes: 0,
            code: libc::EAGAIN,
            reason: "injected".to_owned(),
        };
        device.fail(operation, 1, refused);
        let first = fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        if at_wake {
            assert_eq!(fixture.state(id), RegionState::Nvme, "{operation:?}");
            let error = cause(fixture.engine.wait_awake(&[id]).unwrap_err());
            assert!(error.to_string().contains("injected"), "{operation:?}: {error}");
            assert_eq!(fixture.state(id), RegionState::Nvme, "{operation:?}");
        } else {
            assert_eq!(fixture.state(id), RegionState::Awake, "{operation:?}");
            assert!(holds(address, MIB, 3), "{operation:?}");
            assert!(first.declined.is_some() || fixture.engine.stats().sleep_failures == 1);
            fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
            fixture.engine.wait_settled(&[id]).unwrap();
            assert_eq!(fixture.state(id), RegionState::Nvme, "{operation:?}");
        }
        fixture.engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, MIB, 3), "{operation:?}");
        fixture.engine.free(address, 0).unwrap();
        fixture.assert_empty();
    }
}

/// A defect of ours, which is not to hang a trainer.
struct Panics;

impl Executor for Panics {
    fn at_once(&self, _: RegionId, action: Action) {
        panic!("on purpose, at {action:?}");
    }

    fn launch(&self, _: RegionId, step: RegionStep) -> Launched {
        panic!("on purpose, at {step:?}");
    }
}

#[test]
fn a_wait_for_an_executor_that_panicked_ends_in_an_error() {
    let fixture = Plan::default().build();
    let (id, address) = fixture.region(MIB, 1);
    let (other, _) = fixture.region(MIB, 2);
    let table = &fixture.engine.table;
    let begun = {
        let mut inner = table.lock();
        inner.feed(id, Input::Admit { goal: SleepGoal::Host, ticket: None });
        inner.feed(id, Input::Sleep).actions().unwrap()
    };
    let waits = std::thread::scope(|scope| {
        let waits = scope.spawn(|| fixture.engine.wait_awake(&[id]));
        let carried = catch_unwind(AssertUnwindSafe(|| table.execute(id, begun, &Panics)));
        assert!(carried.is_err());
        waits.join().unwrap()
    });
    assert!(matches!(waits, Err(OffloadError::Broken)), "{waits:?}");
    // Nothing more falls asleep; what needs no wait goes on, and what is short of memory is told.
    let outcome = fixture.engine.sleep(&[other], Tier::Host, &[]).unwrap();
    assert_eq!((outcome.accepted_bytes, outcome.declined_bytes), (0, MIB as u64));
    fixture.engine.wait_awake(&[other]).unwrap();
    assert!(fixture.allocator.allocate(&Request::new(63 * MIB)).is_err());
    assert!(holds(address, MIB, 1));
}

#[test]
fn a_wait_for_an_io_thread_that_panicked_ends_in_an_error() {
    let fixture = Plan::default().build();
    let (id, _) = fixture.region(MIB, 1);
    fixture.faults.hold(true, false);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.faults.wait_held(1);
    let waits = std::thread::scope(|scope| {
        let waits = scope.spawn(|| fixture.engine.wait_settled(&[id]));
        fixture.engine.run_blocking(Box::new(|| panic!("on purpose")));
        waits.join().unwrap()
    });
    assert!(matches!(waits, Err(OffloadError::Broken)), "{waits:?}");
    fixture.faults.hold(false, false);
}

/// It was accepted, so that no decline names the reason.
#[test]
fn a_region_knows_why_its_accepted_sleep_failed() {
    let fixture = Plan::default().via_host().build();
    let (id, address) = fixture.region(MIB, 1);
    fixture.device().fail(Operation::Seal, 1, DeviceError::TooManySpans { limit: 1 });
    let outcome = fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    assert_eq!((outcome.accepted_bytes, outcome.declined), (MIB as u64, None));
    fixture.engine.wait_settled(&[id]).unwrap();
    let info = fixture.engine.region_info(id).unwrap();
    assert_eq!(info.state, RegionState::Awake);
    let seen = info.error.as_deref();
    assert!(
        matches!(seen, Some(OffloadError::Device(DeviceError::TooManySpans { .. }))),
        "{seen:?}"
    );
    // What succeeds after it, or is called off, has no error.
    fixture.engine.sleep(&[id], Tier::Host, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    fixture.engine.wait_awake(&[id]).unwrap();
    assert!(fixture.engine.region_info(id).unwrap().error.is_none());
    fixture.engine.free(address, 0).unwrap();
    fixture.assert_empty();
}
