//! The out-of-memory ladder: its order, its bounds, its report; and who never climbs it.

use crate::common::{Fake, PAGE, allocator};
use dormouse_alloc::{
    AllocError, Allocator, BlockId, Cause, Freed, Holder, OutOfMemory, RECLAIM_ROUNDS_MAX, Reclaim,
    Reclaimed, Request, Stats, TOP_HOLDERS_MAX, Tried,
};
use dormouse_device::{Device, Fill, Operation};
use standin::events;
use std::fmt;
use std::sync::{Arc, Mutex, Weak};
use std::time::Duration;

/// Long enough for a thread to come to the ladder.
const A_WHILE: Duration = Duration::from_millis(20);

type Step = Box<dyn FnMut(u64) -> Reclaimed + Send>;

/// A `Reclaim` that does as the test says and remembers what it was asked.
struct Script {
    asked: Mutex<Vec<u64>>,
    step: Mutex<Step>,
}

impl fmt::Debug for Script {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Script")
    }
}

impl Script {
    fn install(
        allocator: &Allocator<Fake>,
        step: impl FnMut(u64) -> Reclaimed + Send + 'static,
    ) -> Arc<Self> {
        let it = Arc::new(Self { asked: Mutex::default(), step: Mutex::new(Box::new(step)) });
        let weak: Weak<Self> = Arc::downgrade(&it);
        allocator.set_reclaim(weak);
        it
    }

    fn asked(&self) -> Vec<u64> {
        self.asked.lock().unwrap().clone()
    }
}

impl Reclaim for Script {
    fn reclaim(&self, bytes_needed: u64) -> Reclaimed {
        self.asked.lock().unwrap().push(bytes_needed);
        (self.step.lock().unwrap())(bytes_needed)
    }
}

fn pages(count: usize) -> Request {
    Request { fill: Fill::Zero, ..Request::new(count * PAGE) }
}

fn bytes(pages: usize) -> u64 {
    (pages * PAGE) as u64
}

fn out_of_memory(allocator: &Allocator<Fake>, request: &Request) -> Box<OutOfMemory> {
    let result = allocator.allocate(request);
    allocator.check().unwrap();
    match result {
        Err(AllocError::OutOfMemory(report)) => {
            assert!(report.to_string().lines().count() <= 12, "{report}");
            report
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn the_budget_is_exact() {
    let (device, allocator) = allocator(512, 10);
    let all = allocator.allocate(&pages(10)).unwrap();
    assert_eq!(device.mapped_bytes(), bytes(10));
    let maps = device.maps();
    let report = out_of_memory(&allocator, &Request::new(1));
    assert_eq!((report.cause, report.asked_bytes), (Cause::Budget, 1));
    assert_eq!(device.maps(), maps, "the device is not asked for what the budget forbids");
    let _ = allocator.free(all.range.start, 0).unwrap();
    for _ in 0..10 {
        allocator.allocate(&Request::new(1)).unwrap();
    }
    out_of_memory(&allocator, &Request::new(1));
    assert_eq!(device.mapped_bytes(), bytes(10));
    assert_eq!(allocator.stats().mapped_bytes.peak, bytes(10));
    assert_eq!(allocator.stats().ooms, 2);
}

#[test]
fn retries_and_refusals_are_logged_plain_requests_are_not() {
    let (_device, allocator) = allocator(512, 10);
    let _script = Script::install(&allocator, |_| Reclaimed::default());
    let ((), seen) = events::collect(|| {
        let block = allocator.allocate(&pages(10)).unwrap();
        let _ = allocator.free(block.range.start, 0).unwrap();
        let _block = allocator.allocate(&pages(10)).unwrap();
    });
    assert!(seen.is_empty(), "{seen:?}");
    let (_report, seen) = events::collect(|| out_of_memory(&allocator, &pages(3)));
    let reclaims = events::with_message(&seen, "memory reclaimed");
    assert_eq!(reclaims.len(), 1, "{seen:?}");
    assert_eq!(reclaims[0].fields["bytes"], bytes(3).to_string());
    let retried = events::with_message(&seen, "allocation retried after making room");
    assert_eq!(retried.len(), 1, "{seen:?}");
    let refused = events::with_message(&seen, "allocation refused");
    assert_eq!(refused.len(), 1, "{seen:?}");
    assert_eq!((refused[0].target, refused[0].fields["cause"].as_str()), ("alloc", "Budget"));
    assert_eq!(refused[0].fields["budget_bytes"], bytes(10).to_string());
}

#[test]
fn a_cached_range_is_reused_with_no_device_call() {
    let (device, allocator) = allocator(512, 40);
    let block = allocator.allocate(&pages(20)).unwrap();
    assert!(block.zeroed);
    let _ = allocator.free(block.range.start, 0).unwrap();
    let calls = device.log().len();
    for smaller in [20, 15, 1] {
        let again = allocator.allocate(&pages(smaller)).unwrap();
        assert_eq!((again.range.start, again.zeroed), (block.range.start, false));
        let _ = allocator.free(again.range.start, 0).unwrap();
    }
    assert_eq!(device.log().len(), calls);
}

#[test]
fn fresh_pages_come_before_trimming_and_trimming_before_reclaim() {
    let (device, allocator) = allocator(512, 40);
    let script = Script::install(&allocator, |_| Reclaimed::default());
    let cached = allocator.allocate(&pages(10)).unwrap();
    let _ = allocator.free(cached.range.start, 0).unwrap();
    // Does not fit into the cache, fits under the budget: no trim.
    allocator.allocate(&pages(25)).unwrap();
    assert!(device.log().iter().all(|(operation, _)| *operation == Operation::Map));
    assert_eq!(allocator.stats().retries, 0);
    // 35 mapped, 10 of them cached; 12 more are 7 too many: exactly these are trimmed.
    allocator.allocate(&pages(12)).unwrap();
    let unmapped: u64 = device
        .log()
        .iter()
        .filter(|(operation, _)| *operation == Operation::Unmap)
        .map(|(_, range)| range.bytes as u64)
        .sum();
    assert_eq!(unmapped, bytes(7));
    assert_eq!(allocator.stats().retries, 1);
    assert!(script.asked().is_empty(), "no reclaim while the cache has enough");
    // 37 awake, 3 cached. Only `Reclaim` can help, with the missing bytes.
    let report = out_of_memory(&allocator, &pages(8));
    assert_eq!(script.asked(), [bytes(5)]);
    assert_eq!(report.tried.trimmed_bytes, bytes(3));
    assert_eq!(report.tried.reclaim_rounds, 1);
    assert_eq!(allocator.stats().reclaims, 1);
}

/// A runtime that names every owner and knows what the program does.
#[derive(Debug)]
struct Names;

impl Reclaim for Names {
    fn reclaim(&self, _: u64) -> Reclaimed {
        Reclaimed::default()
    }

    fn owner_name(&self, tag: u32, scope: u64) -> Option<String> {
        (tag != 0).then(|| format!("tag \"t{tag}\", layer {scope}"))
    }

    fn activity(&self) -> Option<String> {
        Some("phase B of prefix 3".to_owned())
    }
}

#[test]
fn the_report_has_the_names_of_the_runtime_in_at_most_ten_lines() {
    let (_, allocator) = allocator(512, 100);
    let names = Arc::new(Names);
    let weak: Weak<Names> = Arc::downgrade(&names);
    allocator.set_reclaim(weak);
    for holder in 0..=TOP_HOLDERS_MAX + 1 {
        let tag = u32::try_from(holder).unwrap();
        let request = Request { tag, scope: 10 + u64::from(tag), ..pages(20 - holder) };
        allocator.allocate(&request).unwrap();
    }
    let request = Request { tag: 2, scope: 12, ..pages(90) };
    let text = out_of_memory(&allocator, &request).to_string();
    let lines: Vec<&str> = text.lines().collect();
    assert!(lines.len() <= 10, "{text}");
    assert_eq!(lines[1], "  requested for tag \"t2\", layer 12, in phase B of prefix 3");
    // The first owner has no name, and the last line of the holders counts the others.
    let held: Vec<&&str> = lines.iter().filter(|line| line.contains("held by")).collect();
    assert!(held[0].starts_with("  held by tag 0, scope 0xa: 80.0 KiB awake"), "{text}");
    assert!(held[1].starts_with("  held by tag \"t1\", layer 11: 76.0 KiB awake"), "{text}");
    assert_eq!(held.len(), TOP_HOLDERS_MAX);
    assert!(held[3].ends_with("in 1 blocks; and 2 more holders"), "{text}");
    drop(names);
    let text = out_of_memory(&allocator, &request).to_string();
    assert!(text.contains("held by tag 1, scope 0xb"), "no runtime, no names: {text}");
    assert!(!text.contains("requested for"), "{text}");
}

/// A `Reclaim` that does its work: it calls the allocator back, which no held lock must prevent.
#[test]
fn reclaim_puts_claimed_blocks_to_sleep() {
    let (device, allocator) = allocator(512, 40);
    let sleepy: Vec<BlockId> = (0..4)
        .map(|owner| {
            let block = allocator.allocate(&pages(10)).unwrap();
            allocator.claim(block.range.start, owner).unwrap().id
        })
        .collect();
    let (weak, fake) = (Arc::downgrade(&allocator), Arc::clone(&device));
    let mut left = sleepy.into_iter();
    let script = Script::install(&allocator, move |_| {
        let (Some(allocator), Some(id)) = (weak.upgrade(), left.next()) else {
            return Reclaimed::default();
        };
        fake.take_pages(allocator.info(id).unwrap().range);
        allocator.set_asleep(id).unwrap();
        allocator.trim(0);
        allocator.reserve_awake(bytes(1)).unwrap();
        allocator.unreserve_awake(bytes(1)).unwrap();
        Reclaimed { freed_bytes: bytes(10), in_flight_bytes: 0 }
    });
    let block = allocator.allocate(&pages(25)).unwrap();
    assert!(block.zeroed);
    assert_eq!(script.asked(), [bytes(25), bytes(15), bytes(5)]);
    assert_eq!(allocator.stats().asleep_bytes.current, bytes(30));
    assert_eq!(device.violations(), Vec::<String>::new());
    allocator.check().unwrap();
}

#[test]
fn a_reclaim_that_frees_nothing_is_asked_once() {
    let (_, allocator) = allocator(512, 10);
    let script = Script::install(&allocator, |_| Reclaimed::default());
    allocator.allocate(&pages(10)).unwrap();
    let report = out_of_memory(&allocator, &pages(1));
    assert_eq!(script.asked().len(), 1);
    assert_eq!(report.tried, Tried { reclaim_rounds: 1, ..Tried::default() });
}

#[test]
fn a_reclaim_that_only_promises_is_asked_a_bounded_number_of_times() {
    for reserve_ranges in [
        Reclaimed { freed_bytes: 0, in_flight_bytes: 1 << 30 },
        Reclaimed { freed_bytes: 1 << 30, in_flight_bytes: 0 },
        Reclaimed { freed_bytes: u64::MAX, in_flight_bytes: u64::MAX },
    ] {
        let (_, allocator) = allocator(512, 10);
        let script = Script::install(&allocator, move |_| reserve_ranges);
        allocator.allocate(&pages(10)).unwrap();
        let report = out_of_memory(&allocator, &pages(1));
        assert_eq!(script.asked().len(), RECLAIM_ROUNDS_MAX as usize);
        assert_eq!(report.tried.reclaim_rounds, RECLAIM_ROUNDS_MAX);
    }
}

/// What is in flight when the first call returns is there on the next.
#[test]
fn memory_in_flight_is_worth_another_round() {
    let (device, allocator) = allocator(512, 10);
    let block = allocator.allocate(&pages(10)).unwrap();
    let id = allocator.claim(block.range.start, 1).unwrap().id;
    let (weak, mut round) = (Arc::downgrade(&allocator), 0);
    let script = Script::install(&allocator, move |_| {
        round += 1;
        if round == 3 {
            device.take_pages(block.range);
            weak.upgrade().unwrap().set_asleep(id).unwrap();
            return Reclaimed { freed_bytes: bytes(10), in_flight_bytes: 0 };
        }
        Reclaimed { freed_bytes: 0, in_flight_bytes: bytes(10) }
    });
    allocator.allocate(&pages(1)).unwrap();
    assert_eq!(script.asked().len(), 3);
}

/// A block freed while `Reclaim` frees nothing is found by the last attempt.
#[test]
fn the_last_attempt_comes_after_the_last_reclaim() {
    let (_, allocator) = allocator(512, 10);
    let block = allocator.allocate(&pages(10)).unwrap();
    let weak = Arc::downgrade(&allocator);
    let script = Script::install(&allocator, move |_| {
        let _ = weak.upgrade().unwrap().free(block.range.start, 0).unwrap();
        Reclaimed::default()
    });
    allocator.allocate(&pages(3)).unwrap();
    assert_eq!(script.asked().len(), 1);
}

#[test]
fn a_dropped_reclaim_is_ignored() {
    let (_, allocator) = allocator(512, 10);
    drop(Script::install(&allocator, |_| Reclaimed::default()));
    allocator.allocate(&pages(10)).unwrap();
    assert_eq!(out_of_memory(&allocator, &pages(1)).tried, Tried::default());
}

/// A request that never fits has no side effect.
#[test]
fn an_impossible_request_trims_and_reclaims_nothing() {
    let (device, allocator) = allocator(64, 100);
    let script = Script::install(&allocator, |_| Reclaimed::default());
    let block = allocator.allocate(&pages(10)).unwrap();
    let _ = allocator.free(block.range.start, 0).unwrap();
    let calls = device.log().len();
    for request in [
        pages(101),
        pages(65),
        Request::new(usize::MAX),
        Request::new(1 << 50),
        Request { align: 64 * PAGE, ..pages(64) },
    ] {
        let report = out_of_memory(&allocator, &request);
        assert!(report.tried.impossible && report.to_string().contains("nothing"), "{report}");
    }
    assert!(matches!(allocator.reserve_awake(bytes(101)), Err(AllocError::NoRoom { .. })));
    assert_eq!(device.log().len(), calls);
    assert_eq!((script.asked().len(), allocator.stats().retries), (0, 0));
    assert_eq!(allocator.stats().cached_bytes.current, bytes(10));
}

/// Cached segments hold the addresses: giving their pages up joins them.
#[test]
fn addresses_run_out_only_when_no_trim_can_join_them() {
    let (_, allocator) = allocator(64, 64);
    let script = Script::install(&allocator, |_| Reclaimed::default());
    let blocks: Vec<_> = (0..4).map(|_| allocator.allocate(&pages(16)).unwrap()).collect();
    for block in &blocks {
        let _ = allocator.free(block.range.start, 0).unwrap();
    }
    let whole = allocator.allocate(&pages(64)).unwrap();
    let _ = allocator.free(whole.range.start, 0).unwrap();
    allocator.trim(u64::MAX);
    // One page in the second segment: no run of more than 32 pages is left around it.
    let first = allocator.allocate(&pages(16)).unwrap();
    let second = allocator.allocate(&pages(16)).unwrap();
    let _ = allocator.free(first.range.start, 0).unwrap();
    let report = out_of_memory(&allocator, &pages(40));
    assert_eq!(report.cause, Cause::AddressSpace);
    assert!(script.asked().is_empty(), "sleeping blocks keep their addresses: no reclaim");
    let _ = allocator.free(second.range.start, 0).unwrap();
    allocator.allocate(&pages(64)).unwrap();
}

#[test]
fn room_to_wake_is_trimmed_for_but_never_reclaimed() {
    let (device, allocator) = allocator(512, 20);
    let script = Script::install(&allocator, |_| Reclaimed::default());
    let block = allocator.allocate(&pages(10)).unwrap();
    let id = allocator.claim(block.range.start, 1).unwrap().id;
    device.take_pages(block.range);
    allocator.set_asleep(id).unwrap();
    let cached = allocator.allocate(&pages(20)).unwrap();
    let refused = allocator.reserve_awake(bytes(10)).unwrap_err();
    assert!(matches!(refused, AllocError::NoRoom { .. }), "{refused}");
    let _ = allocator.free(cached.range.start, 0).unwrap();
    allocator.reserve_awake(bytes(10)).unwrap();
    assert_eq!(device.mapped_bytes(), bytes(10), "trimmed for just what is missing");
    // The room is taken: an allocation has to do with the rest.
    assert_eq!(allocator.stats().staged_bytes.current, bytes(10));
    out_of_memory(&allocator, &pages(11));
    allocator.allocate(&pages(10)).unwrap();
    device.bring_pages(block.range);
    allocator.set_awake(id).unwrap();
    assert_eq!(allocator.stats().staged_bytes.current, 0);
    assert_eq!(allocator.stats().mapped_bytes.current, bytes(20));
    assert!(script.asked().len() == 1, "by the allocation that failed, by nothing else");
    allocator.check().unwrap();
}

/// After a refusal no trimmed bytes are held back.
#[test]
fn bytes_trimmed_in_vain_serve_others() {
    let (device, allocator) = allocator(512, 10);
    let _held = allocator.allocate(&pages(4)).unwrap();
    let cached = allocator.allocate(&pages(6)).unwrap();
    let _ = allocator.free(cached.range.start, 0).unwrap();
    assert_eq!(out_of_memory(&allocator, &pages(8)).tried.trimmed_bytes, bytes(6));
    assert_eq!(device.mapped_bytes(), bytes(4));
    let retries = allocator.stats().retries;
    allocator.reserve_awake(bytes(6)).unwrap();
    assert_eq!(allocator.stats().retries, retries, "it fitted at once");
}

#[test]
fn a_budget_below_the_awake_bytes_refuses_all_requests() {
    let (device, allocator) = allocator(512, 20);
    let awake = allocator.allocate(&pages(10)).unwrap();
    let cached = allocator.allocate(&pages(10)).unwrap();
    let _ = allocator.free(cached.range.start, 0).unwrap();
    assert!(matches!(allocator.set_budget(0), Err(AllocError::BadConfig { value: 0, .. })));
    allocator.set_budget(bytes(5)).unwrap();
    assert_eq!(device.mapped_bytes(), bytes(10), "the cache is given up, the block is not");
    out_of_memory(&allocator, &pages(1));
    let _ = allocator.free(awake.range.start, 0).unwrap();
    allocator.allocate(&pages(1)).unwrap();
    assert_eq!(device.mapped_bytes(), bytes(5));
    allocator.set_budget(bytes(20)).unwrap();
    allocator.allocate(&pages(19)).unwrap();
}

#[test]
fn the_report_names_who_holds_most_in_at_most_twelve_lines() {
    let (_, allocator) = allocator(512, 100);
    let holders = TOP_HOLDERS_MAX + 3;
    for holder in 1..=holders {
        let tag = u32::try_from(holder).unwrap();
        let request = Request { tag, scope: 0xa0 + u64::from(tag), ..pages(2 * holder) };
        allocator.allocate(&request).unwrap();
    }
    let report = out_of_memory(&allocator, &Request { align: 2 * PAGE, ..pages(90) });
    let top = |tag: usize| Holder {
        name: None,
        tag: u32::try_from(tag).unwrap(),
        scope: 0xa0 + tag as u64,
        blocks: 1,
        awake_bytes: bytes(2 * tag),
        asleep_bytes: 0,
    };
    assert_eq!(report.holders, [top(7), top(6), top(5), top(4)]);
    assert_eq!(report.holders_left_out, 3);
    let Stats { budget_bytes, mapped_bytes, cached_bytes, staged_bytes, .. } = report.stats;
    assert_eq!((budget_bytes, mapped_bytes.current), (bytes(100), bytes(56)));
    assert_eq!(report.awake_bytes(), bytes(56));
    assert_eq!((cached_bytes.current, staged_bytes.current), (0, 0));
    let text = report.to_string();
    for words in ["368640 bytes", "budget", "tag 7, scope 0xa7", "and 3 more holders", "tried:"] {
        assert!(text.contains(words), "{words} in {text}");
    }
}

#[test]
fn a_wake_uses_idle_pages_before_new_ones() {
    const MIB: usize = 1 << 20;
    let (device, allocator) = allocator(64 * MIB / PAGE, 64 * MIB / PAGE);
    let arena = allocator.arena_create().unwrap();
    let of = |arena, mib: usize| {
        allocator.allocate(&Request { arena, ..Request::new(mib * MIB) }).unwrap().range.start
    };
    let (idle, kept, general) = (of(Some(arena), 8), of(Some(arena), 1), of(None, 4));
    let sleeper = allocator.allocate(&Request::new(2 * MIB)).unwrap();
    allocator.claim(sleeper.range.start, 1).unwrap();
    device.take_pages(sleeper.range);
    allocator.set_asleep(sleeper.id).unwrap();
    for address in [idle, general] {
        let _ = allocator.free(address, 0).unwrap();
    }
    let mapped_bytes = device.mapped_bytes();
    // An open arena may still serve requests.
    allocator.reserve_awake(2 * MIB as u64).unwrap();
    allocator.unreserve_awake(2 * MIB as u64).unwrap();
    assert_eq!(device.mapped_bytes(), mapped_bytes);
    allocator.arena_close(arena);
    // The device has pages at hand.
    device.set_parked_bytes(2 * MIB as u64);
    allocator.reserve_awake(2 * MIB as u64).unwrap();
    allocator.unreserve_awake(2 * MIB as u64).unwrap();
    assert_eq!(device.mapped_bytes(), mapped_bytes);
    device.set_parked_bytes(0);
    allocator.reserve_awake(2 * MIB as u64).unwrap();
    assert_eq!(device.mapped_bytes(), mapped_bytes - 8 * MIB as u64, "the closed arena's cache");
    assert_eq!(allocator.stats().cached_bytes.current, 4 * MIB as u64, "the general pool's stays");
    assert!(allocator.lookup(kept).is_some());
    device.bring_pages(sleeper.range);
    allocator.set_awake(sleeper.id).unwrap();
    allocator.check().unwrap();
}

#[test]
fn parked_pages_are_kept_within_the_budget() {
    let (device, allocator) = allocator(512, 40);
    assert_eq!(device.parking_limit_bytes(), bytes(40));
    allocator.set_budget(bytes(30)).unwrap();
    assert_eq!(device.parking_limit_bytes(), bytes(30));
}

#[test]
fn a_trim_gives_the_devices_parked_pages_back_too() {
    let (device, allocator) = allocator(512, 40);
    device.set_parked_bytes(7);
    allocator.trim(0);
    assert_eq!(device.memory_info().parked_bytes, 0);
}

/// With idle streams a thread leaves the out-of-memory ladder soon. A thread of the runtime waits for that
/// and is then served from the cache.
#[test]
fn room_to_wake_is_found_beside_a_trim() {
    let (device, allocator) = allocator(8, 8);
    let block = allocator.allocate(&pages(8)).unwrap();
    assert!(matches!(allocator.free(block.range.start, 0), Ok(Freed::Done)));
    let (waker, other) = (Arc::clone(&allocator), Arc::new(Mutex::new(None)));
    let begun = Arc::clone(&other);
    device.set_hook(move |operation, _| {
        let mut begun = begun.lock().unwrap();
        if operation == Operation::Unmap && begun.is_none() {
            let waker = Arc::clone(&waker);
            *begun = Some(std::thread::spawn(move || {
                dormouse_device::register_runtime_thread();
                waker.reserve_awake(bytes(4))
            }));
            std::thread::sleep(A_WHILE);
        }
    });
    assert!(allocator.trim(bytes(1)) >= bytes(1));
    let other = other.lock().unwrap().take().unwrap();
    let reserved = other.join().unwrap();
    assert!(reserved.is_ok(), "{reserved:?}");
    device.clear_hook();
    allocator.unreserve_awake(bytes(4)).unwrap();
}
