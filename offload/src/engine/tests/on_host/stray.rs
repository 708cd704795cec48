//! Stray accesses, through the engine: what sleeps wakes under the hands of who reads or writes it.

use std::os::unix::process::ExitStatusExt;
use std::process::{Command, Output};
use std::sync::{Barrier, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use dormouse_device::AddressRange;
use dormouse_device::host::guard;

use super::both::{Fixture, Plan};
use crate::engine::Rescuer;
use crate::engine::stray::RECLAIMED_WAKES_MAX;
use crate::engine::tests::{A_WHILE, MIB, fill, holds, peek, poke};
use crate::error::OffloadError;
use crate::ids::{RegionId, Tier};
use dormouse_residency::region::RegionState;
use dormouse_storage::{CHUNK_BYTES, IoEngine};

/// A process has one rescuer: a test at a time.
static TURN: Mutex<()> = Mutex::new(());
/// Set in child processes.
const CHILD: &str = "DORMOUSE_TEST_STRAY_CHILD";

/// The rescuer of this fixture, and the turn to have one.
pub(crate) fn rescuer(fixture: &Fixture) -> (Rescuer, MutexGuard<'static, ()>) {
    guard::install().unwrap();
    let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    (fixture.engine.rescue().unwrap(), turn)
}

/// A region that sleeps in `tier`.
fn asleep(fixture: &Fixture, bytes: usize, seed: u64, tier: Tier) -> (RegionId, usize) {
    let (id, address) = fixture.region(bytes, seed);
    fixture.engine.sleep(&[id], tier, &[]).unwrap();
    fixture.engine.wait_settled(&[id]).unwrap();
    assert!(fixture.state(id).is_asleep());
    (id, address)
}

fn free_all(fixture: &Fixture, addresses: impl IntoIterator<Item = usize>) {
    addresses.into_iter().for_each(|address| fixture.engine.free(address, 0).unwrap());
    fixture.assert_empty();
}

#[test]
fn a_stray_access_wakes_its_region_from_each_tier() {
    for tier in [Tier::Nvme, Tier::Host] {
        let fixture = Plan::default().build();
        let _rescuer = rescuer(&fixture);
        let (read, read_at) = asleep(&fixture, MIB, 3, tier);
        let (written, written_at) = asleep(&fixture, MIB, 4, tier);
        assert!(holds(read_at, MIB, 3));
        poke(written_at + 4096, 77);
        assert_eq!(peek(written_at + 4096), 77);
        assert_eq!([read, written].map(|id| fixture.state(id)), [RegionState::Awake; 2]);
        let stats = fixture.engine.stats();
        assert_eq!((stats.stray.count, stats.wakes), (2, 2));
        let first = stats.stray.first.unwrap();
        assert_eq!((first.address, first.access), (read_at, "read"));
        let seen =
            format!("read of {read_at:#x} by thread {} in layer 0 of \"test\"", first.thread);
        assert_eq!(first.to_string(), seen);
        // The rest of what was written to is as it was, and it sleeps and wakes as ever.
        fixture.engine.sleep(&[written], tier, &[]).unwrap();
        fixture.engine.wait_settled(&[written]).unwrap();
        fixture.engine.wait_awake(&[written]).unwrap();
        assert_eq!(peek(written_at + 4096), 77);
        poke(written_at + 4096, (4096 / 8 + 1) * 5);
        assert!(holds(written_at, MIB, 4));
        free_all(&fixture, [read_at, written_at]);
    }
}

/// The second round finds them awake: only the first counts.
#[test]
fn threads_on_the_same_and_on_different_regions() {
    const REGIONS: usize = 6;
    const THREADS: usize = 24;
    let fixture = Plan::default().build();
    let _rescuer = rescuer(&fixture);
    let regions: Vec<_> =
        (0..REGIONS).map(|at| asleep(&fixture, MIB, at as u64, Tier::Nvme)).collect();
    let together = Barrier::new(THREADS);
    std::thread::scope(|scope| {
        for thread in 0..THREADS {
            let (regions, together) = (&regions, &together);
            scope.spawn(move || {
                together.wait();
                for round in 0..2 * REGIONS {
                    let at = (thread + round) % REGIONS;
                    assert!(holds(regions[at].1, MIB, at as u64));
                }
            });
        }
    });
    assert_eq!(fixture.engine.stats().stray.count, REGIONS as u64);
    free_all(&fixture, regions.into_iter().map(|(_, address)| address));
}

#[test]
fn a_wake_in_flight_is_waited_for() {
    let fixture = Plan::default().build();
    let _rescuer = rescuer(&fixture);
    let (id, address) = asleep(&fixture, MIB, 5, Tier::Nvme);
    fixture.faults.hold(false, true);
    fixture.engine.wake(&[id]);
    fixture.faults.wait_held(1);
    let faults = fixture.faults.clone();
    let later = std::thread::spawn(move || {
        std::thread::sleep(A_WHILE);
        faults.hold(false, false);
    });
    assert!(holds(address, MIB, 5));
    later.join().unwrap();
    assert_eq!(fixture.engine.stats().wakes, 1);
    free_all(&fixture, [address]);
}

/// The second read of the file is under way while the first is.
#[test]
fn an_access_is_taken_up_while_another_waits() {
    if is_parent_of("an_access_is_taken_up_while_another_waits") {
        return;
    }
    let fixture = Plan::default().build();
    let _rescuer = rescuer(&fixture);
    let [(_, first), (_, second)] = [1, 2].map(|seed| asleep(&fixture, MIB, seed, Tier::Nvme));
    fixture.faults.hold(false, true);
    std::thread::scope(|scope| {
        let readers = [(first, 1), (second, 2)].map(|(address, seed)| {
            let reader = scope.spawn(move || holds(address, MIB, seed));
            fixture.faults.wait_held(seed as usize);
            reader
        });
        fixture.faults.hold(false, false);
        assert!(readers.map(|reader| reader.join().unwrap()) == [true; 2]);
    });
    assert_eq!(fixture.engine.stats().stray.count, 2);
    free_all(&fixture, [first, second]);
}

/// A sleep that is being written is cancelled by the owner's write, and it takes no rescue.
#[test]
fn memory_on_its_way_to_sleep_needs_no_rescue() {
    let fixture = Plan::default().build();
    let _rescuer = rescuer(&fixture);
    let (id, address) = fixture.region(MIB, 6);
    fixture.faults.hold(true, false);
    fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
    fixture.faults.wait_held(1);
    poke(address, 7);
    fixture.faults.hold(false, false);
    fixture.engine.wait_settled(&[id]).unwrap();
    assert_eq!(fixture.engine.stats().stray.count, 0);
    free_all(&fixture, [address]);
}

/// A reader and a thread that puts the region to sleep again and again, as reclaim may.
#[test]
fn a_region_that_keeps_falling_asleep_is_read_all_the_same() {
    let fixture = Plan::default().build();
    let _rescuer = rescuer(&fixture);
    let (id, address) = asleep(&fixture, MIB, 8, Tier::Nvme);
    fixture.engine.let_reclaim(&[id], &[]);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| (0..20).all(|_| holds(address, MIB, 8)));
        while !reader.is_finished() {
            fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
            fixture.engine.wait_settled(&[id]).unwrap();
        }
        assert!(reader.join().unwrap());
    });
    for _ in 0..RECLAIMED_WAKES_MAX {
        fixture.engine.sleep(&[id], Tier::Nvme, &[]).unwrap();
        fixture.engine.wait_settled(&[id]).unwrap();
        assert!(holds(address, MIB, 8));
    }
    let is_eligible = fixture.engine.table.with(id, |entry| entry.data.is_eligible);
    assert_eq!(is_eligible, Some(false), "reclaim leaves it alone");
    free_all(&fixture, [address]);
}

/// Room for one of two: what reclaim may take falls asleep for the other.
#[test]
fn a_stray_access_without_room_makes_some() {
    let mut plan = Plan { budget_bytes: 3 * MIB / 2, ..Plan::default() };
    plan.config.host_bytes_max = 0;
    let fixture = plan.build();
    let _rescuer = rescuer(&fixture);
    let (first, first_at) = asleep(&fixture, MIB, 1, Tier::Nvme);
    let (second, second_at) = asleep(&fixture, MIB, 2, Tier::Nvme);
    fixture.engine.let_reclaim(&[first, second], &[]);
    for _ in 0..2 {
        assert!(holds(first_at, MIB, 1));
        assert!(holds(second_at, MIB, 2));
    }
    assert!(fixture.engine.stats().stray.count >= 4);
    fixture.engine.forbid_reclaim(&[first, second]);
    free_all(&fixture, [first_at, second_at]);
}

/// A limit that no test reaches while its wakes go on.
const SHORT: Duration = Duration::from_millis(1500);
/// Requests, one at a time, whose delays are longer than that limit in all.
const SLOW_CHUNKS: usize = 6;
const SLOW: Duration = Duration::from_millis(400);

/// A file whose requests come one at a time, and room for a region and a half of [`SLOW_CHUNKS`].
fn slow_plan() -> Plan {
    let budget_bytes = 3 * SLOW_CHUNKS * CHUNK_BYTES / 2;
    Plan { budget_bytes, io_engine: IoEngine::Threads, ..Plan::default() }
}

/// An access to a sleeping region of seed 1 is served, although the requests are slower in all than the limit.
fn assert_is_waited_for(fixture: &Fixture, address: usize, bytes: usize) {
    guard::install().unwrap();
    let _rescuer = fixture.engine.rescue_within(SHORT).unwrap();
    fixture.faults.delay_next_by(SLOW_CHUNKS as u32, SLOW);
    assert!(holds(address, bytes, 1));
}

/// The only progress is that of the one wake that is waited for.
#[test]
fn a_slow_read_is_waited_for_while_its_requests_are_answered() {
    const BYTES: usize = SLOW_CHUNKS * CHUNK_BYTES;
    if is_parent_of("a_slow_read_is_waited_for_while_its_requests_are_answered") {
        return;
    }
    let fixture = slow_plan().build();
    let (_, address) = asleep(&fixture, BYTES, 1, Tier::Nvme);
    assert_is_waited_for(&fixture, address, BYTES);
    free_all(&fixture, [address]);
}

/// The only progress is that of the writes which make room.
#[test]
fn a_wake_waits_for_room_while_others_are_written() {
    const BYTES: usize = SLOW_CHUNKS * CHUNK_BYTES;
    if is_parent_of("a_wake_waits_for_room_while_others_are_written") {
        return;
    }
    let fixture = slow_plan().build();
    let (_, address) = asleep(&fixture, BYTES, 1, Tier::Nvme);
    let (displaced, displaced_at) = fixture.region(BYTES, 2);
    fixture.engine.let_reclaim(&[displaced], &[]);
    assert_is_waited_for(&fixture, address, BYTES);
    assert_eq!(fixture.state(displaced), RegionState::Nvme);
    free_all(&fixture, [address, displaced_at]);
}

/// The first region waits for room that is held up. The second fits beside it.
#[test]
fn an_access_is_taken_up_while_another_waits_for_room() {
    if is_parent_of("an_access_is_taken_up_while_another_waits_for_room") {
        return;
    }
    let fixture = Plan { budget_bytes: 6 * MIB, ..Plan::default() }.build();
    let _rescuer = rescuer(&fixture);
    let (_, large_at) = asleep(&fixture, 4 * MIB, 1, Tier::Nvme);
    let (_, small_at) = asleep(&fixture, MIB, 2, Tier::Nvme);
    let (displaced, displaced_at) = fixture.region(4 * MIB, 3);
    fixture.engine.let_reclaim(&[displaced], &[]);
    fixture.faults.hold(true, false);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| holds(large_at, 4 * MIB, 1));
        fixture.faults.wait_held(1);
        assert!(holds(small_at, MIB, 2));
        assert!(!reader.is_finished());
        fixture.faults.hold(false, false);
        assert!(reader.join().unwrap());
    });
    free_all(&fixture, [large_at, small_at, displaced_at]);
}

/// The thread that copies waits in the handler for a wake, which needs the table. Without an end it is killed.
#[test]
fn a_read_of_sleeping_memory_into_sleeping_memory_ends() {
    const BYTES: usize = 3 * MIB;
    if is_parent_of("a_read_of_sleeping_memory_into_sleeping_memory_ends") {
        return;
    }
    let fixture = Plan::default().build();
    let _rescuer = rescuer(&fixture);
    let (_, from) = asleep(&fixture, BYTES, 1, Tier::Host);
    let (_, to) = asleep(&fixture, BYTES, 2, Tier::Nvme);
    fixture.faults.hold(false, true);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let range = AddressRange::new(from, BYTES);
            // SAFETY: a live block of the test, which the access wakes.
            unsafe { fixture.engine.read_asleep(range, to, &fixture.here()) }
        });
        // The reader waits for this wake.
        fixture.faults.wait_held(1);
        assert_eq!(fixture.engine.stats().stray.count, 1);
        assert_eq!(fixture.state(fixture.engine.region_at(from).unwrap()), RegionState::Host);
        fixture.faults.hold(false, false);
        reader.join().unwrap().unwrap();
    });
    assert!(holds(to, BYTES, 1) && fixture.host_used() == BYTES as u64);
    free_all(&fixture, [from, to]);
}

/// The region wakes while its copy is read: the reader frees the copy.
#[test]
fn a_copy_that_is_read_outlives_the_sleep() {
    if is_parent_of("a_copy_that_is_read_outlives_the_sleep") {
        return;
    }
    let fixture = Plan::default().build();
    let _rescuer = rescuer(&fixture);
    let (id, from) = asleep(&fixture, MIB, 1, Tier::Host);
    let (_, to) = asleep(&fixture, MIB, 2, Tier::Nvme);
    fixture.faults.hold(false, true);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            let range = AddressRange::new(from, MIB);
            // SAFETY: as above.
            unsafe { fixture.engine.read_asleep(range, to, &fixture.here()) }
        });
        fixture.faults.wait_held(1);
        fixture.engine.wait_awake(&[id]).unwrap();
        assert_eq!(fixture.host_used(), MIB as u64, "it is being read");
        fill(from, MIB, 3);
        fixture.faults.hold(false, false);
        reader.join().unwrap().unwrap();
    });
    assert!(holds(to, MIB, 1) && fixture.host_used() == 0);
    free_all(&fixture, [from, to]);
}

#[test]
fn a_process_has_one_rescuer_at_a_time() {
    let (fixture, other) = (Plan::default().build(), Plan::default().build());
    let (rescuer, _turn) = rescuer(&fixture);
    let refused = other.engine.rescue();
    assert!(matches!(refused, Err(OffloadError::TooMany { limit: 1, .. })), "{refused:?}");
    drop(rescuer);
    drop(other.engine.rescue().unwrap());
}

/// Runs the test again in a child process, which must end well and is killed where it does not end. Returns false in
/// the child.
fn is_parent_of(test: &str) -> bool {
    const SECONDS_MAX: u32 = 20;
    if std::env::var_os(CHILD).is_some() {
        // SAFETY: a plain system call.
        unsafe { libc::alarm(SECONDS_MAX) };
        return false;
    }
    let child = child_of(test);
    assert!(child.status.success(), "{child:?}");
    true
}

fn child_of(test: &str) -> Output {
    let name = format!("engine::tests::on_host::stray::{test}");
    let exe = std::env::current_exe().unwrap();
    Command::new(exe).args(["--exact", &name]).env(CHILD, "1").output().unwrap()
}

/// Runs `deed` in a child process and returns what it wrote before it was killed.
fn last_words(test: &str, deed: impl FnOnce(&Fixture) -> usize) -> String {
    if std::env::var_os(CHILD).is_some() {
        let fixture = Plan::default().build();
        let address = deed(&fixture);
        let _rescuer = fixture.engine.rescue().unwrap();
        guard::install().unwrap();
        peek(address);
        unreachable!("the access ends the process");
    }
    let child = child_of(test);
    assert_eq!(child.status.signal(), Some(libc::SIGSEGV), "{child:?}");
    String::from_utf8_lossy(&child.stderr).into_owned()
}

#[test]
fn a_wake_that_fails_ends_the_process_and_says_why() {
    let test = "a_wake_that_fails_ends_the_process_and_says_why";
    let said = last_words(test, |fixture| {
        let (_, address) = asleep(fixture, MIB, 1, Tier::Nvme);
        fixture.faults.fail_reads(libc::EIO);
        address
    });
    assert!(said.contains("(tag \"test\", layer 0, asleep): it did not wake (Read of "), "{said}");
    assert!(said.contains("Input/output error"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn a_wrong_checksum_ends_the_process_and_says_so() {
    let test = "a_wrong_checksum_ends_the_process_and_says_so";
    let said = last_words(test, |fixture| {
        let (id, address) = asleep(fixture, MIB, 1, Tier::Nvme);
        fixture.faults.spoil(fixture.engine.extent_offset(id).unwrap() + 9);
        address
    });
    assert!(said.contains("it did not wake (") && said.contains("CRC-32C"), "{said}");
}

#[test]
fn an_engine_that_is_shut_down_wakes_nothing() {
    let said = last_words("an_engine_that_is_shut_down_wakes_nothing", |fixture| {
        let (_, address) = asleep(fixture, MIB, 1, Tier::Nvme);
        fixture.engine.shutdown();
        address
    });
    assert!(said.contains("it did not wake (the engine is shut down)"), "{said}");
}
