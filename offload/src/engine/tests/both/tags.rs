//! Tags.

use super::*;
use crate::engine::{TAG_NAME_BYTES_MAX, TagId, TagStats};
use crate::ids::Tier;
use dormouse_timeline::Peak;

#[test]
fn a_tag_sleeps_and_wakes_as_one() {
    let fixture = Plan::default().build();
    let engine = &fixture.engine;
    let tag = engine.tag_create("weights", true).unwrap();
    let added = fixture.allocate(MIB, 1);
    let id = engine.tag_add(tag, added + 100).unwrap();
    assert_eq!(engine.tag_add(tag, added).unwrap(), id, "again is the same");
    // Allocated inside the tag: found at its sleep.
    let inside = Request { tag: tag.0, ..Request::new(MIB) };
    let inside = fixture.allocator.allocate(&inside).unwrap().range.start;
    fill(inside, MIB, 2);
    let outcome = engine.tag_sleep(tag, Tier::Nvme, &[]).unwrap();
    assert_eq!(outcome.accepted_bytes, 2 << 20);
    let ids = engine.tag_regions(tag).unwrap();
    engine.wait_settled(&ids).unwrap();
    assert!(ids.len() == 2 && ids.iter().all(|&id| fixture.state(id) == RegionState::Nvme));
    engine.wake(&ids);
    engine.tag_wait(tag).unwrap();
    fixture.finish(&fixture.here());
    assert!(holds(added, MIB, 1) && holds(inside, MIB, 2));
    // Destroyed while asleep: the bytes come back to their owner.
    engine.tag_sleep(tag, Tier::Host, &[]).unwrap();
    engine.tag_destroy(tag).unwrap();
    assert!(holds(added, MIB, 1) && holds(inside, MIB, 2));
    assert!(matches!(engine.tag_wait(tag), Err(OffloadError::Stale { what: "tag", .. })));
    for address in [added, inside] {
        engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

/// On a GPU a thread hears late that no copy reads the host memory any more.
#[test]
fn a_wake_gives_back_the_host_memory_that_the_next_sleep_takes() {
    let mut plan = Plan::default();
    plan.config.host_bytes_max = 12 << 20;
    let fixture = plan.build();
    let engine = &fixture.engine;
    let tag = engine.tag_create("weights", true).unwrap();
    let address = fixture.allocate(8 * MIB, 1);
    let id = engine.tag_add(tag, address).unwrap();
    for _ in 0..10 {
        let outcome = engine.tag_sleep(tag, Tier::Host, &[]).unwrap();
        assert!(outcome.declined.is_none(), "{outcome:?}");
        engine.wait_settled(&[id]).unwrap();
        assert_eq!(fixture.state(id), RegionState::Host);
        engine.tag_wait(tag).unwrap();
        assert_eq!(fixture.host_used(), 0);
    }
    assert!(holds(address, 8 * MIB, 1));
    engine.free(address, 0).unwrap();
    engine.tag_destroy(tag).unwrap();
    fixture.assert_empty();
}

#[test]
fn without_backup_bytes_are_dropped_and_come_back_zero() {
    let fixture = Plan { file_bytes: 4096, ..Plan::default() }.build();
    let engine = &fixture.engine;
    let tag = engine.tag_create("cache", false).unwrap();
    let address = fixture.allocate(2 * MIB, 1);
    let id = engine.tag_add(tag, address).unwrap();
    let before = fixture.device().memory_info().mapped_bytes;
    engine.tag_sleep(tag, Tier::Nvme, &[]).unwrap();
    engine.wait_settled(&[id]).unwrap();
    assert_eq!(fixture.state(id), RegionState::Empty, "nothing is copied");
    assert_eq!(fixture.device().memory_info().mapped_bytes, before - (2 << 20));
    assert_eq!((fixture.nvme_used(), fixture.host_used()), (0, 0));
    engine.tag_wait(tag).unwrap();
    assert!(is_zero(address, 2 * MIB));
    engine.tag_sleep(tag, Tier::Nvme, &[]).unwrap();
    engine.free(address, 0).unwrap();
    assert!(engine.tag_regions(tag).unwrap().is_empty());
    engine.tag_destroy(tag).unwrap();
    fixture.assert_empty();
}

#[test]
fn names_are_checked() {
    let fixture = Plan::default().build();
    let engine = &fixture.engine;
    let tag = engine.tag_create("a", true).unwrap();
    assert_eq!(engine.tag_regions(tag).unwrap(), []);
    for name in ["", "a", "x".repeat(TAG_NAME_BYTES_MAX + 1).as_str()] {
        let error = engine.tag_create(name, true).unwrap_err();
        assert!(matches!(error, OffloadError::Argument { what: "tag name", .. }), "{error}");
    }
    let stale = TagId(77);
    assert!(engine.tag_sleep(stale, Tier::Nvme, &[]).is_err());
    assert!(engine.tag_add(stale, 0x1000).is_err());
    engine.tag_destroy(tag).unwrap();
    assert_ne!(engine.tag_create("a", true).unwrap(), tag, "ids are not reused");
}

/// Blocks keep the number of their tag, and outlive the engine of it.
#[test]
fn a_tag_takes_no_block_of_an_earlier_engine() {
    let fixture = Plan::default().build();
    let tag = fixture.engine.tag_create("weights", true).unwrap();
    let tagged = Request { tag: tag.0, ..Request::new(MIB) };
    let kept = fixture.allocator.allocate(&tagged).unwrap().range.start;
    fill(kept, MIB, 1);
    fixture.engine.tag_destroy(tag).unwrap();
    fixture.engine.shutdown();
    let (allocator, config) = (Arc::clone(&fixture.allocator), EngineConfig::default());
    let later = Engine::new(allocator, config, Arc::new(Timeline::new(64))).unwrap();
    let tag = later.tag_create("cache", false).unwrap();
    let outcome = later.tag_sleep(tag, Tier::Host, &[]).unwrap();
    assert_eq!((outcome.accepted_bytes, outcome.declined_bytes), (0, 0));
    assert_eq!((later.tag_regions(tag).unwrap(), later.region_at(kept)), (Vec::new(), None));
    later.tag_destroy(tag).unwrap();
    assert!(holds(kept, MIB, 1));
    later.free(kept, 0).unwrap();
    later.shutdown();
    drop(later);
    fixture.assert_empty();
}

/// A region added to a tag that is being destroyed would never be released.
#[test]
fn nothing_comes_under_a_tag_that_is_going() {
    let fixture = Plan::default().build();
    let engine = &fixture.engine;
    let tag = engine.tag_create("weights", true).unwrap();
    let (asleep, late) = (fixture.allocate(MIB, 1), fixture.allocate(MIB, 2));
    let id = engine.tag_add(tag, asleep).unwrap();
    engine.tag_sleep(tag, Tier::Nvme, &[]).unwrap();
    engine.wait_settled(&[id]).unwrap();
    fixture.faults.hold(false, true);
    std::thread::scope(|scope| {
        let destroyed = scope.spawn(|| engine.tag_destroy(tag));
        fixture.faults.wait_held(1);
        for refused in [
            engine.tag_add(tag, late).map(drop),
            engine.tag_sleep(tag, Tier::Host, &[]).map(drop),
            engine.tag_destroy(tag),
        ] {
            assert!(matches!(refused, Err(OffloadError::Stale { what: "tag", .. })), "{refused:?}");
        }
        assert_eq!(engine.region_at(late), None, "it is its owner's alone");
        fixture.faults.hold(false, false);
        destroyed.join().unwrap().unwrap();
    });
    // Where it could not be woken the tag is there as before.
    let tag = engine.tag_create("weights", true).unwrap();
    let id = engine.tag_add(tag, asleep).unwrap();
    engine.tag_sleep(tag, Tier::Nvme, &[]).unwrap();
    engine.wait_settled(&[id]).unwrap();
    fixture.faults.fail_next_reads(1, libc::EIO);
    assert!(engine.tag_destroy(tag).is_err());
    engine.tag_add(tag, late).unwrap();
    engine.tag_destroy(tag).unwrap();
    assert!(holds(asleep, MIB, 1) && holds(late, MIB, 2));
    for address in [asleep, late] {
        engine.free(address, 0).unwrap();
    }
    fixture.assert_empty();
}

#[test]
fn the_bytes_of_a_tag_are_counted_once_whether_claimed_asleep_or_freed() {
    let fixture = Plan::default().build();
    let engine = &fixture.engine;
    // The same in their first 24 bytes, which is what a label keeps.
    let names = ["a".repeat(24) + "x", "a".repeat(24) + "y"];
    let [tag, other] = names.each_ref().map(|name| engine.tag_create(name, true).unwrap());
    let stats = |resident_mib: u64, asleep_mib: u64, other_mib: u64| {
        let of = |name: &String, resident_mib: u64, asleep_mib: u64| TagStats {
            name: name.clone(),
            resident_bytes: resident_mib << 20,
            asleep_bytes: asleep_mib << 20,
        };
        let mut all = [of(&names[0], resident_mib, asleep_mib), of(&names[1], other_mib, 0)];
        all.sort_by_key(|it| std::cmp::Reverse(it.resident_bytes + it.asleep_bytes));
        all
    };
    assert_eq!(engine.tag_stats(), stats(0, 0, 0));
    let allocate = |mib: usize, tag: TagId| {
        let request = Request { tag: tag.0, whole_pages: true, ..Request::new(mib * MIB) };
        fixture.allocator.allocate(&request).unwrap().range.start
    };
    let (first, second, theirs) = (allocate(1, tag), allocate(2, tag), allocate(4, other));
    assert_eq!(engine.tag_stats(), stats(3, 0, 4), "no region yet");
    let added = fixture.allocate(8 * MIB, 1);
    engine.tag_add(tag, added).unwrap();
    assert_eq!(engine.tag_stats(), stats(11, 0, 4));
    engine.tag_add(tag, first).unwrap();
    assert_eq!(engine.tag_stats(), stats(11, 0, 4), "a region now");
    engine.tag_sleep(tag, Tier::Host, &[]).unwrap();
    engine.wait_settled(&engine.tag_regions(tag).unwrap()).unwrap();
    assert_eq!(engine.tag_stats(), stats(0, 11, 4));
    engine.free(second, 0).unwrap();
    engine.wait_settled(&engine.tag_regions(tag).unwrap()).unwrap();
    assert_eq!(engine.tag_stats(), stats(0, 9, 4));
    engine.tag_wait(tag).unwrap();
    assert_eq!(engine.tag_stats(), stats(9, 0, 4));
    engine.free(first, 0).unwrap();
    engine.free(theirs, 0).unwrap();
    assert_eq!(engine.tag_stats(), stats(8, 0, 0));
    engine.tag_destroy(tag).unwrap();
    assert_eq!(engine.tag_stats(), stats(0, 0, 0)[1..], "its block is nobody's");
    engine.free(added, 0).unwrap();
    engine.tag_destroy(other).unwrap();
    fixture.assert_empty();
}

/// Small blocks raise the level by less than a step of the gauge, so that peak is recorded when the tag's block goes.
#[test]
fn a_peak_is_recorded_while_its_owner_still_has_its_bytes() {
    for goes in ["freed", "asleep"] {
        let fixture = Plan::default().build();
        let engine = &fixture.engine;
        let tag = engine.tag_create("weights", true).unwrap();
        let large = fixture.allocate(16 * MIB, 1);
        engine.tag_add(tag, large).unwrap();
        let small = fixture.allocate(1 << 12, 2);
        if goes == "freed" {
            engine.free(large, 0).unwrap();
        } else {
            engine.tag_sleep(tag, Tier::Host, &[]).unwrap();
            engine.wait_settled(&engine.tag_regions(tag).unwrap()).unwrap();
            engine.tag_wait(tag).unwrap();
            engine.free(large, 0).unwrap();
        }
        let snapshot = engine.timeline.snapshot();
        let peak = Peak::of(&snapshot).unwrap();
        assert_eq!(peak.bytes, fixture.allocator.stats().active_bytes.peak, "{goes}");
        let (owner, bytes) = peak.owners[0];
        assert_eq!((owner.title(&snapshot).as_str(), bytes), ("tag weights", 16 << 20), "{goes}");
        engine.free(small, 0).unwrap();
        engine.tag_destroy(tag).unwrap();
        fixture.assert_empty();
    }
}
