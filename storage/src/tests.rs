//! The file tier against a failing file.

use std::path::PathBuf;
use std::sync::Arc;

use proptest::prelude::*;

use super::testing::seccomp::limit_files;
use super::testing::{Faults, disk_dir, in_a_process_of_its_own};
use super::*;

const MIB: u64 = 1 << 20;

fn tier(file_bytes: u64) -> (Nvme, Faults) {
    let faults = Faults::new(file_bytes);
    (Nvme::with_storage(Arc::new(faults.clone()), file_bytes, true), faults)
}

fn filled(bytes: usize, seed: u8) -> Aligned {
    let mut buffer = Aligned::zeroed(bytes).unwrap();
    for (i, byte) in buffer.as_mut_slice().iter_mut().enumerate() {
        *byte = (i / 7) as u8 ^ (i >> 12) as u8 ^ seed;
    }
    buffer
}

fn put(nvme: &Nvme, extent: &mut Extent, buffer: &mut Aligned) -> Result<(), NvmeError> {
    let mut transfer = extent.writer(buffer.memory(), nvme.checksums());
    extent.set_sums(transfer.run(&mut *nvme.take_queue())?.unwrap_or_default());
    Ok(())
}

fn get(nvme: &Nvme, extent: &Extent, buffer: &mut Aligned) -> Result<u64, NvmeError> {
    let mut transfer = extent.reader(buffer.memory());
    transfer.run(&mut *nvme.take_queue())?;
    Ok(transfer.reread())
}

fn config(dir: PathBuf, file_bytes: u64) -> NvmeConfig {
    NvmeConfig {
        dir,
        file_bytes,
        file_bytes_max: 0,
        io_threads: 1,
        io_engine: IoEngine::Auto,
        queue_depth: 4,
        write_budget_bytes: 0,
    }
}

#[test]
fn a_file_grows_to_its_limit_and_returns_the_written_bytes() {
    let config = NvmeConfig { file_bytes_max: 8 * MIB, ..config(disk_dir(), MIB) };
    let nvme = Nvme::create(&config, true).unwrap();
    assert_eq!(nvme.usage().budget_bytes, 8 * MIB);
    let mut written = Vec::new();
    for seed in 0..2 {
        let mut data = filled(3 * MIB as usize, seed);
        let mut extent = nvme.allocate(3 * MIB).unwrap();
        put(&nvme, &mut extent, &mut data).unwrap();
        written.push((extent, data));
    }
    let full = nvme.allocate(3 * MIB).unwrap_err();
    assert!(matches!(full, NvmeError::Full { used_bytes, .. } if used_bytes == 6 * MIB), "{full}");
    for (extent, data) in written {
        let mut back = Aligned::zeroed(data.as_slice().len()).unwrap();
        assert_eq!(get(&nvme, &extent, &mut back), Ok(0));
        assert!(back.as_slice() == data.as_slice());
        nvme.release(extent);
    }
}

#[test]
fn a_file_that_cannot_grow_is_full_and_keeps_what_it_has() {
    const TEST: &str = "a_file_that_cannot_grow_is_full_and_keeps_what_it_has";
    if !in_a_process_of_its_own(module_path!(), TEST) {
        return;
    }
    let config = NvmeConfig { file_bytes_max: 64 * MIB, ..config(disk_dir(), MIB) };
    let nvme = Nvme::create(&config, true).unwrap();
    limit_files(4 * MIB);
    let (first, second) = (nvme.allocate(MIB).unwrap(), nvme.allocate(2 * MIB).unwrap());
    // The system would end the process with a signal if the file grew beyond the limit.
    let full = nvme.allocate(2 * MIB).unwrap_err();
    assert!(matches!(full, NvmeError::Full { used_bytes, .. } if used_bytes == 3 * MIB), "{full}");
    let usage = nvme.usage();
    assert_eq!((usage.used_bytes, usage.budget_bytes), (3 * MIB, 3 * MIB));
    nvme.release(first);
    nvme.release(nvme.allocate(MIB).unwrap());
    nvme.release(second);
    assert_eq!(nvme.usage().used_bytes, 0);
}

#[test]
fn a_disk_is_looked_at_without_a_trace() {
    let before = std::fs::read_dir(disk_dir()).unwrap().count();
    let seen = probe(&disk_dir()).unwrap();
    assert!(seen.free_bytes > 0 && seen.free_bytes <= seen.total_bytes, "{seen:?}");
    assert!(std::fs::read_dir(disk_dir()).unwrap().count() <= before + 1, "tests beside this one");
    assert!(matches!(probe("/dev/shm".as_ref()), Err(NvmeError::IsMemory { .. })));
    assert!(matches!(probe("/nowhere".as_ref()), Err(NvmeError::Setup { .. })));
}

#[test]
fn queues_have_the_depth_that_the_measured_rates_ask_for() {
    let config = NvmeConfig { io_threads: 2, ..config(disk_dir(), 96 * MIB) };
    let nvme = Nvme::create_with(&config, true, |rates| {
        assert!(rates.read_latency_ns > 0 && rates.read_bytes_per_s > 0, "{rates:?}");
        7
    });
    let nvme = nvme.unwrap();
    let depth = if nvme.usage().io_engine == IoEngine::Uring { 7 } else { 1 };
    assert_eq!([nvme.take_queue().depth(), nvme.take_queue().depth()], [depth; 2]);
}

#[test]
fn a_real_file_returns_the_written_bytes() {
    let config = config(disk_dir(), 64 * MIB);
    let nvme = Nvme::create(&config, true).unwrap();
    assert!(nvme.rates().write_bytes_per_s > 0 && nvme.rates().read_bytes_per_s > 0);
    // Two chunks and a bit.
    let mut data = filled(2 * CHUNK_BYTES + UNIT_BYTES, 3);
    let mut extent = nvme.allocate(data.as_slice().len() as u64).unwrap();
    put(&nvme, &mut extent, &mut data).unwrap();
    let mut back = Aligned::zeroed(data.as_slice().len()).unwrap();
    assert_eq!(get(&nvme, &extent, &mut back), Ok(0));
    assert!(back.as_slice() == data.as_slice());
    assert_eq!(nvme.usage().used_bytes, extent.whole_bytes());
    assert_eq!(nvme.release(extent), 0);
}

#[test]
fn measuring_is_written_within_the_budget_or_left_out() {
    let created = |write_budget_bytes| {
        let config = NvmeConfig { write_budget_bytes, ..config(disk_dir(), 64 * MIB) };
        let nvme = Nvme::create(&config, true).unwrap();
        (nvme.usage(), nvme.rates().write_bytes_per_s > 0)
    };
    let (usage, is_measured) = created(96 * MIB);
    assert!(is_measured && usage.written_bytes == 64 * MIB);
    assert!((32 * MIB..33 * MIB).contains(&usage.write_left_bytes), "{usage:?}");
    let (usage, is_measured) = created(63 * MIB);
    assert!(!is_measured && usage.written_bytes == 0);
    assert_eq!((usage.write_left_bytes, usage.write_budget_bytes), (63 * MIB, 63 * MIB));
}

#[test]
fn setup_errors_state_the_accepted_values() {
    let create = |dir: &str, file_bytes, io_threads| {
        let config = NvmeConfig { io_threads, ..config(dir.into(), file_bytes) };
        Nvme::create(&config, true).unwrap_err()
    };
    let disk = disk_dir();
    let disk = disk.to_str().unwrap();
    assert!(matches!(create("/dev/shm", MIB, 1), NvmeError::IsMemory { filesystem: "tmpfs", .. }));
    assert!(matches!(create("/nonexistent-dir", MIB, 1), NvmeError::Setup { code: 2, .. }));
    // procfs accepts no files: an unwritable directory even for root.
    assert!(matches!(create("/proc", MIB, 1), NvmeError::Setup { what: "creating the file", .. }));
    assert_eq!(
        create(disk, 0, 1).to_string(),
        format!("NVMe tier: file_bytes is 0; accepted: 4096 to {FILE_BYTES_MAX}")
    );
    let bad_threads = create(disk, MIB, 0).to_string();
    assert_eq!(bad_threads, "NVMe tier: io_threads is 0; accepted: 1 to 64");
}

#[test]
fn the_file_has_no_name_and_is_private() {
    let dir = disk_dir().join(format!("nameless-{}", std::process::id()));
    std::fs::create_dir(&dir).unwrap();
    let config = config(dir.clone(), MIB);
    let nvme = Nvme::create(&config, true).unwrap();
    // Removing the directory needs it empty, while the file lives on.
    std::fs::remove_dir(&dir).unwrap();
    let extent = nvme.allocate(MIB).unwrap();
    nvme.release(extent);
}

#[test]
fn a_full_tier_refuses_and_takes_again_after_a_release() {
    let (nvme, _) = tier(MIB);
    let all = nvme.allocate(MIB).unwrap();
    let refused = nvme.allocate(1).unwrap_err();
    let full = NvmeError::Full { asked_bytes: 1, used_bytes: MIB, budget_bytes: MIB };
    assert_eq!(refused, full);
    nvme.release(all);
    nvme.set_budget(MIB / 2);
    assert!(nvme.allocate(MIB / 2 + 1).is_err());
    let half = nvme.allocate(MIB / 2).unwrap();
    assert_eq!(nvme.usage().peak_bytes, MIB);
    nvme.reset_peak();
    assert_eq!(nvme.usage().peak_bytes, MIB / 2);
    nvme.release(half);
}

#[test]
fn a_stopped_tier_says_why_and_still_reads() {
    let (nvme, _) = tier(MIB);
    let mut data = filled(UNIT_BYTES, 1);
    let mut extent = nvme.allocate(UNIT_BYTES as u64).unwrap();
    put(&nvme, &mut extent, &mut data).unwrap();
    nvme.stop("first reason");
    nvme.stop("second reason");
    let refused = nvme.allocate(1).unwrap_err().to_string();
    assert_eq!(refused, "the NVMe tier takes no more data: first reason");
    let mut back = Aligned::zeroed(UNIT_BYTES).unwrap();
    get(&nvme, &extent, &mut back).unwrap();
    assert!(back.as_slice() == data.as_slice());
    nvme.release(extent);
}

#[test]
fn a_disk_full_at_byte_k_is_an_error_with_its_offset() {
    for k in [0, 1, 4095, 4096, 5000, CHUNK_BYTES as u64, CHUNK_BYTES as u64 + 8192] {
        let (nvme, faults) = tier(16 * MIB);
        let mut data = filled(2 * CHUNK_BYTES, 9);
        let mut extent = nvme.allocate(2 * CHUNK_BYTES as u64).unwrap();
        faults.fail_writes_after(k, libc::ENOSPC);
        let error = put(&nvme, &mut extent, &mut data).unwrap_err();
        let NvmeError::Failed { operation, offset, code, .. } = &error else { panic!("{error}") };
        assert_eq!((*operation, *code), (IoOperation::Write, libc::ENOSPC));
        assert_eq!(*offset, k / UNIT_BYTES as u64 * UNIT_BYTES as u64);
        nvme.release(extent);
    }
}

#[test]
fn short_transfers_go_on_and_endless_ones_end() {
    let (nvme, faults) = tier(16 * MIB);
    let mut data = filled(CHUNK_BYTES, 5);
    let mut extent = nvme.allocate(CHUNK_BYTES as u64).unwrap();
    faults.cut_next(&[1, 4096, 4097, 0, 100_000, 12_288]);
    put(&nvme, &mut extent, &mut data).unwrap();
    let mut back = Aligned::zeroed(CHUNK_BYTES).unwrap();
    faults.cut_next(&[1, 8192, 4097, 100, 65_536]);
    assert_eq!(get(&nvme, &extent, &mut back), Ok(0));
    assert!(back.as_slice() == data.as_slice());

    faults.cut_next(&[4096; SHORT_ATTEMPTS_MAX as usize]);
    let error = get(&nvme, &extent, &mut back).unwrap_err();
    let done_bytes = u64::from(SHORT_ATTEMPTS_MAX) * 4096;
    assert!(matches!(error, NvmeError::Short { done_bytes: d, .. } if d == done_bytes), "{error}");
    faults.cut_next(&[0; SHORT_ATTEMPTS_MAX as usize]);
    let error = put(&nvme, &mut extent, &mut data).unwrap_err();
    assert!(matches!(error, NvmeError::Short { done_bytes: 0, .. }), "{error}");
    nvme.release(extent);
}

#[test]
fn a_truncated_file_is_named_as_such() {
    for end in [0, 4096, 5000, 3 * 4096 - 1] {
        let (nvme, faults) = tier(MIB);
        let mut data = filled(3 * UNIT_BYTES, 7);
        let mut extent = nvme.allocate(3 * UNIT_BYTES as u64).unwrap();
        put(&nvme, &mut extent, &mut data).unwrap();
        faults.end_at(end);
        let mut back = Aligned::zeroed(3 * UNIT_BYTES).unwrap();
        let error = get(&nvme, &extent, &mut back).unwrap_err();
        let expected = NvmeError::Truncated { offset: 0, expected_bytes: 12_288, seen_bytes: end };
        assert_eq!(error, expected);
        nvme.release(extent);
    }
}

#[test]
fn a_flipped_bit_is_read_again_then_an_error() {
    let (nvme, faults) = tier(16 * MIB);
    let _first = nvme.allocate(UNIT_BYTES as u64).unwrap();
    let mut data = filled(2 * CHUNK_BYTES, 2);
    let mut extent = nvme.allocate(2 * CHUNK_BYTES as u64).unwrap();
    put(&nvme, &mut extent, &mut data).unwrap();
    let mut back = Aligned::zeroed(2 * CHUNK_BYTES).unwrap();

    faults.flip_next_reads(1);
    assert_eq!(get(&nvme, &extent, &mut back), Ok(1));
    assert!(back.as_slice() == data.as_slice());

    let bad_chunk = extent.offset() + CHUNK_BYTES as u64;
    faults.flip_bit(bad_chunk + 17);
    let reads_before = faults.counts().0;
    let error = get(&nvme, &extent, &mut back).unwrap_err();
    let NvmeError::Corrupted { extent: e, offset, expected, seen } = error else { panic!() };
    assert_eq!((e, offset), (extent.offset(), bad_chunk));
    assert_eq!(Some(expected), extent.sum(1));
    assert_ne!(expected, seen);
    assert_eq!(faults.counts().0 - reads_before, 3, "one good chunk, one read twice");
    faults.flip_bit(bad_chunk + 17);
    assert_eq!(get(&nvme, &extent, &mut back), Ok(0));
    nvme.release(extent);
}

#[test]
fn a_failing_read_is_an_error_and_heals() {
    let (nvme, faults) = tier(MIB);
    let mut data = filled(UNIT_BYTES, 4);
    let mut extent = nvme.allocate(UNIT_BYTES as u64).unwrap();
    put(&nvme, &mut extent, &mut data).unwrap();
    faults.fail_reads(libc::EIO);
    let mut back = Aligned::zeroed(UNIT_BYTES).unwrap();
    let error = get(&nvme, &extent, &mut back).unwrap_err();
    assert!(matches!(error, NvmeError::Failed { operation: IoOperation::Read, code: 5, .. }));
    faults.heal();
    get(&nvme, &extent, &mut back).unwrap();
    nvme.release(extent);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    /// Any sequence of puts and releases: everything alive reads back as written.
    #[test]
    fn extents_never_share_bytes(ops in prop::collection::vec((1..40_usize, any::<u8>(), any::<bool>()), 1..24)) {
        let (nvme, faults) = tier(MIB);
        let mut alive: Vec<(Extent, Aligned)> = Vec::new();
        for (units, seed, release) in ops {
            if release && !alive.is_empty() {
                let (extent, _) = alive.swap_remove(usize::from(seed) % alive.len());
                nvme.release(extent);
                continue;
            }
            let mut data = filled(units * UNIT_BYTES, seed);
            let Ok(mut extent) = nvme.allocate((units * UNIT_BYTES) as u64) else { continue };
            faults.cut_next(&[usize::from(seed) * 97]);
            put(&nvme, &mut extent, &mut data).unwrap();
            alive.push((extent, data));
        }
        let mut used = 0;
        for (extent, data) in &alive {
            let mut back = Aligned::zeroed(data.as_slice().len()).unwrap();
            get(&nvme, extent, &mut back).unwrap();
            prop_assert!(back.as_slice() == data.as_slice());
            used += extent.whole_bytes();
        }
        prop_assert_eq!(nvme.usage().used_bytes, used);
        for (extent, _) in alive {
            nvme.release(extent);
        }
    }
}
