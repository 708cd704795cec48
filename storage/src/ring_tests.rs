//! The tier through io_uring: against a failing file, and on systems that refuse parts of it.

use proptest::prelude::*;

use super::testing::seccomp::refuse;
use super::testing::{Faults, disk_dir, skip_without_io_uring};
use super::*;

const MIB: u64 = 1 << 20;
const DEPTH: usize = 4;
/// `IORING_REGISTER_BUFFERS2`: a table of memory.
const REGISTER_TABLE: u32 = 15;
/// `IORING_REGISTER_BUFFERS_UPDATE`: a place in it.
const REGISTER_PLACE: u32 = 16;

fn config(io_engine: IoEngine) -> NvmeConfig {
    let dir = disk_dir();
    NvmeConfig {
        dir,
        file_bytes: 96 * MIB,
        file_bytes_max: 0,
        io_threads: 1,
        io_engine,
        queue_depth: DEPTH,
        write_budget_bytes: 0,
    }
}

/// A tier on io_uring; `None` where this system has none for us.
fn ring_tier() -> Option<Nvme> {
    let nvme = Nvme::create(&config(IoEngine::Auto), true).unwrap();
    let usage = nvme.usage();
    if usage.io_engine == IoEngine::Uring {
        return Some(nvme);
    }
    assert!(usage.io_note.is_some(), "a reason is given");
    skip_without_io_uring(usage.io_note.unwrap_or_default());
    None
}

fn filled(bytes: usize, seed: u64) -> Aligned {
    let mut buffer = Aligned::zeroed(bytes).unwrap();
    for (at, word) in buffer.as_mut_slice().chunks_exact_mut(8).enumerate() {
        let value = (at as u64 ^ seed.rotate_left(40)).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word.copy_from_slice(&value.to_le_bytes());
    }
    buffer
}

/// WriteBudget, reads back and compares.
fn round(nvme: &Nvme, queue: &mut dyn Queue, data: &mut Aligned) {
    let mut extent = nvme.allocate(data.as_slice().len() as u64).unwrap();
    let sums = extent.writer(data.memory(), true).run(queue).unwrap();
    extent.set_sums(sums.unwrap());
    let mut back = Aligned::zeroed(data.as_slice().len()).unwrap();
    extent.reader(back.memory()).run(queue).unwrap();
    assert!(back.as_slice() == data.as_slice());
    nvme.release(extent);
}

/// On a thread of its own, which `refuse` is for.
fn elsewhere(test: impl FnOnce() + Send + 'static) {
    std::thread::spawn(test).join().unwrap();
}

#[test]
fn many_chunks_come_back_as_they_went_lent_or_not() {
    let Some(nvme) = ring_tier() else { return };
    assert_eq!(nvme.usage().io_note, None);
    assert!(nvme.rates().write_bytes_per_s > 0 && nvme.rates().read_bytes_per_s > 0);
    let mut queue = nvme.take_queue();
    assert_eq!(queue.depth(), DEPTH);
    for bytes in [UNIT_BYTES, CHUNK_BYTES, 7 * CHUNK_BYTES + 3 * UNIT_BYTES] {
        let mut data = filled(bytes, bytes as u64);
        round(&nvme, &mut *queue, &mut data);
        assert!(nvme.lend(&data.memory()));
        round(&nvme, &mut *queue, &mut data);
        nvme.take_back(&data.memory());
        round(&nvme, &mut *queue, &mut data);
    }
    assert_eq!(nvme.usage().used_bytes, 0);
}

#[test]
fn lent_memory_that_was_taken_back_is_never_written_behind_its_successors_back() {
    let Some(nvme) = ring_tier() else { return };
    let mut queue = nvme.take_queue();
    // Allocations as large as this are mappings of their own: one that comes after another often
    // has its addresses, and always other pages.
    for seed in 0..8 {
        let mut data = filled(9 * CHUNK_BYTES, seed);
        let is_lent = seed % 2 == 0;
        if is_lent {
            assert!(nvme.lend(&data.memory()));
        }
        round(&nvme, &mut *queue, &mut data);
        if is_lent {
            nvme.take_back(&data.memory());
        }
    }
}

#[test]
fn chunk_reads_detect_truncation_and_flipped_bits() {
    let faults = Faults::new(64 * MIB);
    let nvme = faults.tier(64 * MIB, true, 1, DEPTH);
    let mut queue = nvme.take_queue();
    let mut data = filled(6 * CHUNK_BYTES, 5);
    let mut extent = nvme.allocate(data.as_slice().len() as u64).unwrap();
    extent.set_sums(extent.writer(data.memory(), true).run(&mut *queue).unwrap().unwrap());
    let mut back = Aligned::zeroed(data.as_slice().len()).unwrap();
    let end = extent.offset() + 5 * CHUNK_BYTES as u64 + 4096;
    faults.end_at(end);
    let error = extent.reader(back.memory()).run(&mut *queue).unwrap_err();
    let NvmeError::Truncated { offset, seen_bytes, .. } = error else { panic!("{error}") };
    assert_eq!(offset + seen_bytes, end);
    faults.heal();
    faults.flip_next_reads(1);
    let mut transfer = extent.reader(back.memory());
    transfer.run(&mut *queue).unwrap();
    assert_eq!(transfer.reread(), 1);
    assert!(back.as_slice() == data.as_slice());
    let bad = extent.offset() + 3 * CHUNK_BYTES as u64;
    faults.flip_bit(bad + 99);
    let error = extent.reader(back.memory()).run(&mut *queue).unwrap_err();
    assert!(matches!(error, NvmeError::Corrupted { offset, .. } if offset == bad), "{error}");
    nvme.release(extent);
}

#[test]
fn a_forced_engine_is_that_one_or_an_error() {
    let nvme = Nvme::create(&config(IoEngine::Threads), true).unwrap();
    let usage = nvme.usage();
    assert_eq!((usage.io_engine, usage.io_note), (IoEngine::Threads, None));
    assert!(!nvme.lend(&filled(UNIT_BYTES, 0).memory()));
    assert_eq!(nvme.take_queue().depth(), 1);
    for queue_depth in [0, QUEUE_DEPTH_MAX + 1] {
        let config = NvmeConfig { queue_depth, ..config(IoEngine::Auto) };
        let error = Nvme::create(&config, true).unwrap_err().to_string();
        let said = format!("NVMe tier: queue_depth is {queue_depth}; accepted: 1 to 256");
        assert_eq!(error, said);
    }
}

#[test]
fn without_io_uring_threads_do_the_io_with_a_note() {
    for (call, errno) in [
        (libc::SYS_io_uring_setup, libc::EPERM),
        (libc::SYS_io_uring_setup, libc::ENOSYS),
        (libc::SYS_io_uring_register, libc::EACCES),
    ] {
        elsewhere(move || {
            refuse(call, None, errno);
            let nvme = Nvme::create(&config(IoEngine::Auto), true).unwrap();
            let usage = nvme.usage();
            assert_eq!(usage.io_engine, IoEngine::Threads);
            let note = usage.io_note.unwrap();
            assert!(note.starts_with("threads do the file I/O"), "{note}");
            assert!(note.contains(&std::io::Error::from_raw_os_error(errno).to_string()), "{note}");
            round(&nvme, &mut *nvme.take_queue(), &mut filled(2 * CHUNK_BYTES, 1));
            let error = Nvme::create(&config(IoEngine::Uring), true).unwrap_err();
            assert!(matches!(error, NvmeError::Setup { code, .. } if code == errno), "{error}");
        });
    }
}

#[test]
fn unregistered_memory_is_passed_by_address() {
    for opcode in [REGISTER_TABLE, REGISTER_PLACE] {
        if ring_tier().is_none() {
            return;
        }
        elsewhere(move || {
            refuse(libc::SYS_io_uring_register, Some(opcode), libc::ENOMEM);
            let nvme = Nvme::create(&config(IoEngine::Uring), true).unwrap();
            let mut data = filled(3 * CHUNK_BYTES, 2);
            assert!(!nvme.lend(&data.memory()));
            let note = nvme.usage().io_note.unwrap();
            assert!(note.contains("not registered with io_uring"), "{note}");
            round(&nvme, &mut *nvme.take_queue(), &mut data);
        });
    }
}

#[test]
fn a_ring_that_stops_taking_requests_loses_none() {
    let Some(nvme) = ring_tier() else { return };
    elsewhere(move || {
        let mut queue = nvme.take_queue();
        let mut data = filled(5 * CHUNK_BYTES, 3);
        round(&nvme, &mut *queue, &mut data);
        // From here on `io_uring_enter` fails, also with requests in the ring.
        refuse(libc::SYS_io_uring_enter, None, libc::EPERM);
        round(&nvme, &mut *queue, &mut data);
        let note = nvme.usage().io_note.unwrap();
        assert!(note.contains("a thread continues without it"), "{note}");
    });
}

#[test]
fn a_queue_that_is_dropped_waits_for_the_kernel() {
    let Some(nvme) = ring_tier() else { return };
    let mut queue = nvme.take_queue();
    let mut data = filled(DEPTH * CHUNK_BYTES, 4);
    let memory = data.memory();
    for at in 0..DEPTH {
        let offset = (at * CHUNK_BYTES) as u64;
        let memory = memory.part(at * CHUNK_BYTES, CHUNK_BYTES);
        queue.push(at as u64, Request { operation: IoOperation::Read, offset, memory });
    }
    drop(queue);
    // No thread writes to it any more.
    data.as_mut_slice().fill(7);
    std::thread::sleep(std::time::Duration::from_millis(50));
    assert!(data.as_slice().iter().all(|&byte| byte == 7));
}

/// What befalls one transfer.
#[derive(Clone, Debug)]
struct Fault {
    cuts: Vec<usize>,
    flips: u32,
    writes_left: Option<u64>,
    read_fails: bool,
}

fn fault() -> impl Strategy<Value = Fault> {
    let cuts = prop::collection::vec(0..2 * CHUNK_BYTES, 0..5);
    let left = prop::option::weighted(0.2, 0..12 * MIB);
    (cuts, 0..2_u32, left, prop::bool::weighted(0.1)).prop_map(
        |(cuts, flips, writes_left, read_fails)| Fault { cuts, flips, writes_left, read_fails },
    )
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    /// Whatever the file does, and in whatever order it answers: bytes come back as they were, or
    /// an error that says what happened.
    #[test]
    fn no_fault_passes_for_success(
        steps in prop::collection::vec((1..3000_usize, fault()), 1..5),
        depth in 1..7_usize,
    ) {
        let faults = Faults::new(64 * MIB);
        let nvme = faults.tier(64 * MIB, true, 1, depth);
        let mut queue = nvme.take_queue();
        for (units, fault) in steps {
            let mut data = filled(units * UNIT_BYTES, units as u64);
            let mut extent = nvme.allocate((units * UNIT_BYTES) as u64).unwrap();
            faults.cut_next(&fault.cuts);
            if let Some(left) = fault.writes_left {
                faults.fail_writes_after(left, libc::ENOSPC);
            }
            match extent.writer(data.memory(), true).run(&mut *queue) {
                Ok(sums) => extent.set_sums(sums.unwrap()),
                Err(error) => {
                    let is_full = matches!(error, NvmeError::Failed { code: libc::ENOSPC, .. });
                    prop_assert!(is_full && fault.writes_left.is_some(), "{}", error);
                    faults.heal();
                    nvme.release(extent);
                    continue;
                }
            }
            faults.heal();
            faults.flip_next_reads(fault.flips);
            if fault.read_fails {
                faults.fail_reads(libc::EIO);
            }
            let mut back = Aligned::zeroed(units * UNIT_BYTES).unwrap();
            match extent.reader(back.memory()).run(&mut *queue) {
                Ok(_) => prop_assert!(back.as_slice() == data.as_slice()),
                Err(NvmeError::Failed { code, .. }) => {
                    prop_assert!(fault.read_fails && code == libc::EIO);
                }
                // The cuts that the write left over: nothing where something should be.
                Err(NvmeError::Truncated { .. }) => prop_assert!(!fault.cuts.is_empty()),
                Err(other) => prop_assert!(false, "{}", other),
            }
            faults.forget();
            let read = extent.reader(back.memory()).run(&mut *queue);
            prop_assert!(read.is_ok() && back.as_slice() == data.as_slice());
            nvme.release(extent);
        }
    }
}
