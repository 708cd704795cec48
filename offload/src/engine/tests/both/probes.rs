//! Six things that a library of the field reports success for (docs/evidence/offload.md has the
//! table): each is either done, byte for byte, or refused with a typed error and nothing lost. On
//! a real file, through both I/O engines.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use super::*;
use crate::engine::StashId;
use crate::ids::Tier;
use dormouse_storage::testing::{in_a_process_of_its_own, skip_without_io_uring};
use dormouse_storage::{Aligned, NvmeError, Request as FileRequest, Transfer, UNIT_BYTES};

const ENGINES: [IoEngine; 2] = [IoEngine::Uring, IoEngine::Threads];
/// What the probes write to a disk, and what it has free.
const REGIONS: u64 = 24;
const REGION_BYTES: usize = CHUNK_BYTES;
const FREE_BYTES: u64 = 51 * MIB as u64;
/// Room for all of them, where they go through host memory.
const HOST_BYTES: u64 = 128 * MIB as u64;
/// No multiple of anything a disk knows.
const ODD_BYTES: usize = 1_000_003;

/// An engine over a real file of that length; `None` where this system has no io_uring for us.
fn engine_on(
    allocator: &Arc<Allocator<TestDevice>>,
    nvme: NvmeConfig,
) -> Result<Option<Arc<Engine<TestDevice>>>, OffloadError> {
    let (asked, timeline) = (nvme.io_engine, Arc::new(Timeline::new(1024)));
    let (nvme, host_bytes_max) = (Some(nvme), HOST_BYTES);
    let config = EngineConfig { nvme, host_bytes_max, ..Plan::default().config };
    match Engine::new(Arc::clone(allocator), config, timeline) {
        Err(OffloadError::Nvme(NvmeError::Setup { what, code, .. }))
            if asked == IoEngine::Uring && what != "reserving its space" =>
        {
            skip_without_io_uring(format!("{what}, errno {code}"));
            Ok(None)
        }
        made => made.map(Some),
    }
}

/// A filled block of its own pages, and its region.
fn region(engine: &Arc<Engine<TestDevice>>, bytes: usize, seed: u64) -> (RegionId, usize) {
    let request = Request { whole_pages: true, ..Request::new(bytes) };
    let address = engine.allocator().allocate(&request).unwrap().range.start;
    fill(address, bytes, seed);
    (engine.adopt(address, Role::Dormant, label("probe", None)).unwrap(), address)
}

fn to_file(engine: &Engine<TestDevice>, ids: &[RegionId]) {
    engine.sleep(ids, Tier::Nvme, &[]).unwrap();
    engine.wait_settled(ids).unwrap();
}

/// Our file among this process's descriptors, told from other tests' by its length.
fn file_of_length(bytes: u64) -> PathBuf {
    let is_ours = |path: &PathBuf| {
        let named =
            std::fs::read_link(path).is_ok_and(|l| l.to_string_lossy().ends_with("(deleted)"));
        named && std::fs::metadata(path).is_ok_and(|m| m.size() == bytes)
    };
    let mut entries = std::fs::read_dir("/proc/self/fd").unwrap().map(|e| e.unwrap().path());
    entries.find(is_ours).unwrap()
}

/// A length that no other test's file has.
fn length(probe: u64, io_engine: IoEngine) -> usize {
    let device = u64::from(ASLEEP_FIRST == RegionState::Host);
    let units = 1000 + probe * 8 + device * 4 + u64::from(io_engine == IoEngine::Uring);
    units as usize * UNIT_BYTES
}

/// From here on a file of this process ends at `bytes`: a write across that is short, as on a disk
/// that is full, and one behind it fails. (The signal that comes with it is not for us.)
fn limit_files(bytes: u64) {
    // SAFETY: plain system calls; the limit is a live local. Only the soft limit: it can be raised.
    unsafe {
        libc::signal(libc::SIGXFSZ, libc::SIG_IGN);
        let limit = libc::rlimit { rlim_cur: bytes, rlim_max: libc::RLIM_INFINITY };
        assert_eq!(libc::setrlimit(libc::RLIMIT_FSIZE, &raw const limit), 0);
    }
}

/// Writes 96 MiB where 51 are free: the file is that long already, and the disk says no only when it
/// is written to.
fn overfill(
    engine: &Arc<Engine<TestDevice>>,
    expected: i32,
    end: Option<u64>,
    give_out: impl FnOnce(),
) {
    let regions: Vec<_> = (0..REGIONS).map(|seed| region(engine, REGION_BYTES, seed)).collect();
    let ids: Vec<_> = regions.iter().map(|r| r.0).collect();
    give_out();
    to_file(engine, &ids);
    let error = |&id: &RegionId| engine.body(id, |b| b.error.clone());
    let (failed, whole): (Vec<RegionId>, Vec<RegionId>) =
        ids.iter().partition(|id| error(id).is_some());
    assert!(!failed.is_empty() && !whole.is_empty(), "{failed:?} {whole:?}");
    assert!(whole.len() as u64 <= FREE_BYTES / REGION_BYTES as u64, "{}", whole.len());
    for id in &failed {
        let OffloadError::Nvme(NvmeError::Failed { operation, code, offset, .. }) =
            (*error(id).unwrap()).clone()
        else {
            panic!("{:?}", error(id))
        };
        assert_eq!((operation, code), (IoOperation::Write, expected));
        assert!(end.is_none_or(|end| offset >= end), "{offset}");
        assert_ne!(engine.region_info(*id).unwrap().state, RegionState::Nvme);
    }
    assert!(whole.iter().all(|&id| engine.region_info(id).unwrap().state == RegionState::Nvme));
    let (late, _) = region(engine, REGION_BYTES, 99);
    let declined = engine.sleep(&[late], Tier::Nvme, &[]).unwrap().declined.unwrap();
    assert!(declined.starts_with("the NVMe tier takes no more data: Write of "), "{declined}");
    engine.wait_awake(&ids).unwrap();
    for (seed, (_, address)) in regions.iter().enumerate() {
        assert!(holds(*address, REGION_BYTES, seed as u64), "region {seed}");
    }
}

/// A disk that is full, as far as a process without privileges can have one: a limit on the length of
/// files, and where no limit is needed, an injected ENOSPC.
fn full_disk(io_threads: usize, queue_depth: usize) {
    let file_bytes = REGIONS * REGION_BYTES as u64;
    for io_engine in ENGINES {
        let _turn = Turn::take();
        let allocator = new_allocator(160 * MIB);
        let nvme = NvmeConfig { io_engine, io_threads, queue_depth, ..real_file(96 * MIB) };
        assert_eq!(nvme.file_bytes, file_bytes);
        // Found at once where the file system reserves space: nothing begins that cannot end.
        limit_files(FREE_BYTES);
        let refused = engine_on(&allocator, nvme.clone()).unwrap_err();
        let OffloadError::Nvme(NvmeError::Setup { what, code, .. }) = refused else {
            panic!("{refused}")
        };
        assert_eq!((what, code), ("reserving its space", libc::EFBIG));
        limit_files(libc::RLIM_INFINITY);
        if let Some(engine) = engine_on(&allocator, nvme).unwrap() {
            overfill(&engine, libc::EFBIG, Some(FREE_BYTES), || limit_files(FREE_BYTES));
            limit_files(libc::RLIM_INFINITY);
        }
    }
    for io_engine in [IoEngine::Auto, IoEngine::Threads] {
        let (budget_bytes, file_bytes) = (160 * MIB, 96 * MIB);
        let config = EngineConfig { host_bytes_max: HOST_BYTES, ..Plan::default().config };
        let fixture =
            Plan { budget_bytes, file_bytes, config, io_engine, ..Plan::default() }.build();
        let give_out = || fixture.faults.fail_writes_after(FREE_BYTES, libc::ENOSPC);
        overfill(&fixture.engine, libc::ENOSPC, None, give_out);
    }
}

#[test]
fn probe_1_more_than_the_disk_has_room_for_with_writes_on_their_way_together() {
    if in_a_process_of_its_own(
        module_path!(),
        "probe_1_more_than_the_disk_has_room_for_with_writes_on_their_way_together",
    ) {
        full_disk(2, 4);
    }
}

#[test]
fn probe_2_more_than_the_disk_has_room_for_one_write_at_a_time() {
    if in_a_process_of_its_own(
        module_path!(),
        "probe_2_more_than_the_disk_has_room_for_one_write_at_a_time",
    ) {
        full_disk(1, 1);
    }
}

#[test]
fn probe_3_a_length_that_no_disk_knows_is_written_whole() {
    for io_engine in ENGINES {
        let _turn = Turn::take();
        let (allocator, file_bytes) = (new_allocator(64 * MIB), length(3, io_engine));
        let nvme = NvmeConfig { io_engine, ..real_file(file_bytes) };
        let Some(engine) = engine_on(&allocator, nvme).unwrap() else { continue };
        let (id, address) = region(&engine, ODD_BYTES, 3);
        // SAFETY: a live, awake block of the test's own.
        let expected =
            unsafe { std::slice::from_raw_parts(address as *const u8, ODD_BYTES) }.to_vec();
        to_file(&engine, &[id]);
        assert_eq!(engine.region_info(id).unwrap().state, RegionState::Nvme);
        // What lies on the disk, asked of the system and not of us.
        let mut there = vec![0; ODD_BYTES];
        let file = File::open(file_of_length(file_bytes as u64)).unwrap();
        file.read_exact_at(&mut there, engine.extent_offset(id).unwrap()).unwrap();
        assert!(there == expected);
        engine.free(address, 0).unwrap();
    }
}

#[test]
fn probe_4_a_length_that_no_disk_knows_comes_back_whole() {
    for io_engine in ENGINES {
        let _turn = Turn::take();
        let allocator = new_allocator(64 * MIB);
        let nvme = NvmeConfig { io_engine, ..real_file(length(4, io_engine)) };
        let Some(engine) = engine_on(&allocator, nvme).unwrap() else { continue };
        let (id, address) = region(&engine, ODD_BYTES, 4);
        to_file(&engine, &[id]);
        engine.wait_awake(&[id]).unwrap();
        assert!(holds(address, ODD_BYTES, 4));
        // By copy, from and to addresses that are as odd.
        engine.set_tier_budget(Tier::Host, 0).unwrap();
        let here = default_stream(allocator.device());
        let (_, from) = region(&engine, ODD_BYTES + 8, 5);
        let (_, to) = region(&engine, ODD_BYTES + 8, 6);
        // SAFETY: live, awake blocks of the test's own.
        let stash: StashId = unsafe { engine.stash_put(from + 3, ODD_BYTES, 1, &here) }.unwrap();
        // SAFETY: as above.
        unsafe { engine.stash_get(stash, to + 3, &here) }.unwrap();
        // SAFETY: as above.
        let at = |start: usize| unsafe {
            std::slice::from_raw_parts((start + 3) as *const u8, ODD_BYTES)
        };
        assert!(at(from) == at(to));
        engine.stash_drop(stash).unwrap();
        for address in [address, from, to] {
            engine.free(address, 0).unwrap();
        }
    }
}

#[test]
fn probe_5_an_offset_that_no_disk_knows_is_refused_or_read_right() {
    const OFFSET: u64 = 100;
    for io_engine in ENGINES {
        let nvme = match Nvme::create(&NvmeConfig { io_engine, ..real_file(MIB) }, true) {
            Err(NvmeError::Setup { what, .. }) if io_engine == IoEngine::Uring => {
                skip_without_io_uring(what);
                continue;
            }
            made => made.unwrap(),
        };
        let mut queue = nvme.take_queue();
        let mut data = Aligned::zeroed(2 * UNIT_BYTES).unwrap();
        for (at, byte) in data.as_mut_slice().iter_mut().enumerate() {
            *byte = (at % 251) as u8;
        }
        let mut ask = |operation, offset, memory| {
            queue.push(0, FileRequest { operation, offset, memory });
            queue.wait().unwrap().result
        };
        assert_eq!(ask(IoOperation::Write, 0, data.memory()).unwrap(), 2 * UNIT_BYTES);
        let mut back = Aligned::zeroed(UNIT_BYTES).unwrap();
        let expected = &data.as_slice()[OFFSET as usize..][..UNIT_BYTES];
        match ask(IoOperation::Read, OFFSET, back.memory()) {
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(libc::EINVAL));
                assert!(back.as_slice().iter().all(|&byte| byte == 0), "refused, and yet read");
                let mut transfer = Transfer::reader(OFFSET, back.memory(), Vec::new());
                let typed = transfer.run(&mut *nvme.take_queue());
                let is_it = matches!(
                    typed,
                    Err(NvmeError::Failed { offset: OFFSET, code: libc::EINVAL, .. })
                );
                assert!(is_it, "{typed:?}");
            }
            // A file system that has no O_DIRECT reads from anywhere.
            Ok(bytes) => assert!(bytes == UNIT_BYTES && back.as_slice() == expected),
        }
    }
}

#[test]
fn probe_6_a_file_truncated_behind_our_back_is_named_as_such() {
    for io_engine in ENGINES {
        let _turn = Turn::take();
        let (allocator, file_bytes) = (new_allocator(64 * MIB), length(6, io_engine));
        let nvme = NvmeConfig { io_engine, ..real_file(file_bytes) };
        let Some(engine) = engine_on(&allocator, nvme).unwrap() else { continue };
        let regions = [region(&engine, MIB, 0), region(&engine, 2 * MIB, 1)];
        let ids = regions.map(|r| r.0);
        to_file(&engine, &ids[..1]);
        to_file(&engine, &ids[1..]);
        let [low, high] = ids.map(|id| engine.extent_offset(id).unwrap());
        assert!(low < high);
        let path = file_of_length(file_bytes as u64);
        let file = File::options().write(true).open(path).unwrap();
        assert_eq!(file.metadata().unwrap().mode() & 0o777, 0o600);
        file.set_len(high + MIB as u64).unwrap();

        let error = cause(engine.wait_awake(&ids[1..]).unwrap_err());
        let OffloadError::Nvme(NvmeError::Truncated { offset, expected_bytes, seen_bytes }) = error
        else {
            panic!("{error}")
        };
        let mib = MIB as u64;
        assert_eq!((offset, expected_bytes, seen_bytes), (high, 2 * mib, mib));
        assert_eq!(engine.region_info(ids[1]).unwrap().state, RegionState::Nvme);
        engine.wait_awake(&ids[..1]).unwrap();
        assert!(holds(regions[0].1, MIB, 0), "what is there still comes back");
        for (_, address) in regions {
            engine.free(address, 0).unwrap();
        }
        assert!(allocator.blocks().is_empty());
    }
}
