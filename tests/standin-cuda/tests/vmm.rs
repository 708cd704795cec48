//! Physical handles, addresses and what is between them.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    reason = "a test fails by panicking"
)]

mod common;

use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;

use common::*;
use standin::{Live, UnmapRuns};

const TWO: usize = 2 * GRANULE;

#[test]
fn bytes_stay_with_a_handle_wherever_it_is_mapped() {
    let bench = Bench::new();
    let handle = bench.create(TWO);
    let (here, there) = (bench.reserve(TWO), bench.reserve(TWO));
    let bytes = pattern(TWO, 7);
    bench.map(here, TWO, handle);
    assert!(bench.read(here, TWO).iter().all(|byte| *byte == 0), "new memory is zeroes");
    bench.write(here, &bytes);
    ok(bench.cu.cuMemUnmap(here, TWO));
    bench.map(there, TWO, handle);
    assert!(bench.read(there, TWO) == bytes);
    ok(bench.cu.cuMemUnmap(there, TWO));
    // Another handle at the first address does not have them.
    let other = bench.create(TWO);
    bench.map(here, TWO, other);
    assert!(bench.read(here, TWO).iter().all(|byte| *byte == 0));
    bench.give((here, other), TWO);
    ok(bench.cu.cuMemAddressFree(there, TWO));
    ok(bench.cu.cuMemRelease(handle));
}

/// What the driver's documentation leaves open can be had either way.
#[test]
fn several_mappings_may_go_by_one_call_or_not() {
    let bench = Bench::new();
    let handles = [bench.create(GRANULE), bench.create(GRANULE)];
    let start = bench.reserve(TWO);
    let second = start + GRANULE;
    let map = || {
        bench.map(start, GRANULE, handles[0]);
        bench.map(second, GRANULE, handles[1]);
    };
    map();
    bench.standin.unmap_runs(UnmapRuns::Refused);
    assert_eq!(bench.cu.cuMemUnmap(start, TWO), 1, "CUDA_ERROR_INVALID_VALUE");
    assert_eq!(bench.live(Live::Mappings), 2);
    bench.standin.unmap_runs(UnmapRuns::First);
    ok(bench.cu.cuMemUnmap(start, TWO));
    assert_eq!(bench.live(Live::Mappings), 1);
    ok(bench.cu.cuMemUnmap(second, GRANULE));
    map();
    bench.standin.unmap_runs(UnmapRuns::Whole);
    ok(bench.cu.cuMemUnmap(start, TWO));
    assert_eq!(bench.live(Live::Mappings), 0);
    handles.iter().for_each(|handle| ok(bench.cu.cuMemRelease(*handle)));
    ok(bench.cu.cuMemAddressFree(start, TWO));
}

#[test]
fn one_handle_may_be_at_several_addresses() {
    let bench = Bench::new();
    let handle = bench.create(TWO);
    let (here, there) = (bench.reserve(TWO), bench.reserve(TWO));
    bench.map(here, TWO, handle);
    bench.map(there, TWO, handle);
    assert_eq!((bench.live(Live::Handles), bench.live(Live::Mappings)), (1, 2));
    let bytes = pattern(TWO, 3);
    bench.write(here, &bytes);
    assert!(bench.read(there, TWO) == bytes);
    ok(bench.cu.cuMemUnmap(here, TWO));
    assert!(bench.read(there, TWO) == bytes, "the other mapping stays");
    ok(bench.cu.cuMemUnmap(there, TWO));
    ok(bench.cu.cuMemRelease(handle));
    ok(bench.cu.cuMemAddressFree(here, TWO));
    ok(bench.cu.cuMemAddressFree(there, TWO));
}

#[test]
fn memory_lives_until_it_is_released_and_unmapped() {
    let bench = Bench::new();
    let (address, handle) = bench.memory(TWO);
    let bytes = pattern(TWO, 9);
    bench.write(address, &bytes);
    ok(bench.cu.cuMemRelease(handle));
    assert_eq!(bench.cu.cuMemRelease(handle), INVALID_VALUE, "released twice");
    assert_eq!(bench.live(Live::HandleBytes), TWO as u64, "mapped memory is in use");
    assert!(bench.read(address, TWO) == bytes);
    let again = get(|handle| bench.cu.cuMemRetainAllocationHandle(handle, address + GRANULE));
    assert_eq!(again, handle);
    ok(bench.cu.cuMemUnmap(address, TWO));
    assert_eq!(bench.live(Live::HandleBytes), TWO as u64, "retained memory is in use");
    bench.map(address, TWO, handle);
    assert!(bench.read(address, TWO) == bytes);
    bench.give((address, handle), TWO);
    assert_eq!(bench.cu.cuMemRelease(handle), INVALID_VALUE, "gone");
    assert_eq!(bench.live(Live::HandleBytes), 0);
}

/// Blocks of the file that is physical memory.
fn blocks_in_use() -> u64 {
    let files = std::fs::read_dir("/proc/self/fd").unwrap().flatten().map(|entry| entry.path());
    let is_ours = |path: &PathBuf| {
        std::fs::read_link(path)
            .is_ok_and(|name| name.to_string_lossy().starts_with("/memfd:standin-cuda"))
    };
    let path = files.into_iter().find(is_ours).expect("the stand-in has a memory file");
    std::fs::metadata(path).unwrap().blocks()
}

#[test]
fn memory_that_is_gone_goes_back_to_the_system() {
    let bench = Bench::new();
    assert_eq!(blocks_in_use(), 0);
    let memory = bench.memory(TWO);
    bench.write(memory.0, &pattern(TWO, 1));
    assert!(blocks_in_use() > 0);
    bench.give(memory, TWO);
    assert_eq!(blocks_in_use(), 0);
}

#[test]
fn misuse_is_refused_and_changes_nothing() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let (base, handle) = (bench.reserve(4 * GRANULE), bench.create(TWO));
    let small = bench.create(GRANULE);
    bench.map(base, TWO, handle);
    ok(cu.cuMemMap(base + TWO, GRANULE, 0, small, 0));
    let bytes = pattern(TWO, 1);
    bench.write(base, &bytes);
    let prop = &raw const PINNED_ON_DEVICE;
    let with = |change: fn(&mut Properties)| {
        let mut properties = PINNED_ON_DEVICE;
        change(&mut properties);
        let mut made = 0;
        cu.cuMemCreate(&raw mut made, GRANULE, &raw const properties, 0)
    };
    let access = |location: [i32; 2], flags: i32| {
        let description = [location[0], location[1], flags];
        cu.cuMemSetAccess(base, TWO, &raw const description, 1)
    };
    let (mut a, mut h) = (0_usize, 0_u64);
    let (a, h) = (&raw mut a, &raw mut h);
    let end = base + 3 * GRANULE;
    let cases = [
        ("reserve nothing", cu.cuMemAddressReserve(a, 0, 0, 0, 0), INVALID_VALUE),
        ("reserve half a granule", cu.cuMemAddressReserve(a, GRANULE / 2, 0, 0, 0), INVALID_VALUE),
        ("reserve at an odd alignment", cu.cuMemAddressReserve(a, GRANULE, 3, 0, 0), INVALID_VALUE),
        ("reserve with flags", cu.cuMemAddressReserve(a, GRANULE, 0, 0, 1), INVALID_VALUE),
        ("reserve into nowhere", cu.cuMemAddressReserve(null(), GRANULE, 0, 0, 0), INVALID_VALUE),
        ("reserve more than there is", cu.cuMemAddressReserve(a, 1 << 60, 0, 0, 0), OUT_OF_MEMORY),
        ("free what is mapped", cu.cuMemAddressFree(base, 4 * GRANULE), INVALID_VALUE),
        ("free a part", cu.cuMemAddressFree(base + 3 * GRANULE, GRANULE), INVALID_VALUE),
        ("free nothing of ours", cu.cuMemAddressFree(GRANULE, GRANULE), INVALID_VALUE),
        ("create half a granule", cu.cuMemCreate(h, GRANULE / 2, prop, 0), INVALID_VALUE),
        ("create nothing", cu.cuMemCreate(h, 0, prop, 0), INVALID_VALUE),
        ("create with flags", cu.cuMemCreate(h, GRANULE, prop, 1), INVALID_VALUE),
        ("create of nothing said", cu.cuMemCreate(h, GRANULE, null(), 0), INVALID_VALUE),
        ("create into nowhere", cu.cuMemCreate(null(), GRANULE, prop, 0), INVALID_VALUE),
        ("create unpinned", with(|p| p.kind = 0), INVALID_VALUE),
        ("create elsewhere", with(|p| p.location = [1, 1]), INVALID_DEVICE),
        ("create on the host", with(|p| p.location = [2, 0]), INVALID_VALUE),
        ("create for a fabric", with(|p| p.handle_types = 8), NOT_SUPPORTED),
        ("export", cu.cuMemExportToShareableHandle(null(), handle, 1, 0), NOT_SUPPORTED),
        ("import", cu.cuMemImportFromShareableHandle(h, 0, 1), NOT_SUPPORTED),
        ("release what never was", cu.cuMemRelease(77), INVALID_VALUE),
        ("map over a mapping", cu.cuMemMap(base, TWO, 0, handle, 0), INVALID_VALUE),
        ("map into a mapping", cu.cuMemMap(base + TWO, TWO, 0, handle, 0), INVALID_VALUE),
        ("map over the end", cu.cuMemMap(end, TWO, 0, handle, 0), INVALID_VALUE),
        ("map where nothing is reserved", cu.cuMemMap(GRANULE, TWO, 0, handle, 0), INVALID_VALUE),
        ("map a part", cu.cuMemMap(end, GRANULE, 0, handle, 0), INVALID_VALUE),
        ("map at an offset", cu.cuMemMap(end, GRANULE, GRANULE, small, 0), INVALID_VALUE),
        ("map off the granule", cu.cuMemMap(end + 4096, GRANULE, 0, small, 0), INVALID_VALUE),
        ("map with flags", cu.cuMemMap(end, GRANULE, 0, small, 1), INVALID_VALUE),
        ("map no handle", cu.cuMemMap(end, GRANULE, 0, 77, 0), INVALID_VALUE),
        ("unmap a part", cu.cuMemUnmap(base, GRANULE), INVALID_VALUE),
        ("unmap the other part", cu.cuMemUnmap(base + GRANULE, GRANULE), INVALID_VALUE),
        ("unmap more than is mapped", cu.cuMemUnmap(base, 4 * GRANULE), INVALID_VALUE),
        ("unmap what is not mapped", cu.cuMemUnmap(end, GRANULE), INVALID_VALUE),
        ("open a part", bench.set_access(base, GRANULE, READ_WRITE), INVALID_VALUE),
        ("open what is not mapped", bench.set_access(base, 4 * GRANULE, READ), INVALID_VALUE),
        ("open in an unknown way", access([1, 0], 2), INVALID_VALUE),
        ("open to another device", access([1, 1], 3), INVALID_DEVICE),
        ("open to the host", access([2, 0], 3), INVALID_VALUE),
        ("open to nobody", cu.cuMemSetAccess(base, TWO, null(), 0), INVALID_VALUE),
        ("retain what is not mapped", cu.cuMemRetainAllocationHandle(h, end), INVALID_VALUE),
        ("a third granularity", cu.cuMemGetAllocationGranularity(a, prop, 2), INVALID_VALUE),
    ];
    for (what, code, expected) in cases {
        assert_eq!(code, expected, "{what}");
    }
    assert_eq!(bench.live(Live::Handles), 2);
    assert_eq!(bench.live(Live::Mappings), 2);
    assert_eq!(bench.live(Live::Reservations), 1);
    assert!(bench.read(base, TWO) == bytes, "the mapping is as it was");
    // A run of whole mappings goes at once.
    ok(cu.cuMemUnmap(base, 3 * GRANULE));
    ok(cu.cuMemAddressFree(base, 4 * GRANULE));
    assert_eq!(cu.cuMemAddressFree(base, 4 * GRANULE), INVALID_VALUE, "freed twice");
    assert_eq!(cu.cuMemMap(base, TWO, 0, handle, 0), INVALID_VALUE, "no reservation any more");
    ok(cu.cuMemRelease(handle));
    assert_eq!(cu.cuMemMap(base, TWO, 0, handle, 0), INVALID_VALUE, "a stale handle");
    ok(cu.cuMemRelease(small));
}

#[test]
fn properties_stay_with_a_handle() {
    let bench = Bench::new();
    // The second of the flags says that network cards may reach it.
    let flags = [0, 1, 0, 0, 0, 0, 0, 0];
    let asked = Properties { handle_types: 1, flags, ..PINNED_ON_DEVICE };
    let handle: u64 = get(|handle| bench.cu.cuMemCreate(handle, GRANULE, &raw const asked, 0));
    let told = |handle| {
        let mut found = Properties::default();
        (bench.cu.cuMemGetAllocationPropertiesFromHandle(&raw mut found, handle), found)
    };
    assert_eq!(told(handle), (0, asked));
    ok(bench.cu.cuMemRelease(handle));
    assert_eq!(told(handle).0, INVALID_VALUE);
}

#[test]
fn granularity_and_access_are_told() {
    let bench = Bench::new();
    let prop = &raw const PINNED_ON_DEVICE;
    for option in [0, 1] {
        let found = get(|bytes| bench.cu.cuMemGetAllocationGranularity(bytes, prop, option));
        assert_eq!(found, GRANULE);
    }
    let (address, handle) = bench.memory(GRANULE);
    let location = [1, 0];
    let access =
        || get::<u64>(|flags| bench.cu.cuMemGetAccess(flags, &raw const location, address));
    assert_eq!(access(), u64::from(READ_WRITE));
    ok(bench.set_access(address, GRANULE, READ));
    assert_eq!(access(), u64::from(READ));
    ok(bench.set_access(address, GRANULE, 0));
    assert_eq!(access(), 0);
    ok(bench.cu.cuMemUnmap(address, GRANULE));
    let mut flags = 0;
    assert_eq!(
        bench.cu.cuMemGetAccess(&raw mut flags, &raw const location, address),
        INVALID_VALUE
    );
    bench.map(address, GRANULE, handle);
    assert_eq!(access(), u64::from(READ_WRITE), "access is set again after every map");
    bench.give((address, handle), GRANULE);
}

#[test]
fn addresses_are_as_asked_and_do_not_meet() {
    let bench = Bench::new();
    let align = 64 * GRANULE;
    let aligned: usize = get(|at| bench.cu.cuMemAddressReserve(at, GRANULE, align, 0, 0));
    assert!(aligned.is_multiple_of(align));
    let mut ranges: Vec<usize> = (0..100).map(|_| bench.reserve(3 * GRANULE)).collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0] + 3 * GRANULE <= pair[1]), "{ranges:x?}");
    let hint = ranges[50];
    ok(bench.cu.cuMemAddressFree(hint, 3 * GRANULE));
    let there = get(|at| bench.cu.cuMemAddressReserve(at, GRANULE, 0, hint, 0));
    assert_eq!(there, hint, "a free place that is asked for is given");
    let elsewhere = get(|at| bench.cu.cuMemAddressReserve(at, GRANULE, 0, hint, 0));
    assert_ne!(elsewhere, hint, "a taken place is not");
    ok(bench.cu.cuMemAddressFree(elsewhere, GRANULE));
    let again = bench.reserve(GRANULE);
    assert_ne!(again, elsewhere, "what was freed stays nobody's for a while");
    ranges.remove(50);
    for range in ranges {
        ok(bench.cu.cuMemAddressFree(range, 3 * GRANULE));
    }
    for one in [aligned, there, again] {
        ok(bench.cu.cuMemAddressFree(one, GRANULE));
    }
}

#[test]
fn the_total_is_shared_and_is_a_limit() {
    let bench = Bench::new();
    let cu = &bench.cu;
    let info = || {
        let (mut free, mut total) = (0, 0);
        ok(cu.cuMemGetInfo_v2(&raw mut free, &raw mut total));
        assert_eq!(total as u64, TOTAL);
        free
    };
    assert_eq!(info() as u64, TOTAL);
    let half = TOTAL as usize / 2;
    let handle = bench.create(half);
    let block: usize = get(|address| cu.cuMemAlloc_v2(address, half - GRANULE));
    assert_eq!(info(), GRANULE);
    let (mut none, mut at) = (0, 0);
    let prop = &raw const PINNED_ON_DEVICE;
    assert_eq!(cu.cuMemCreate(&raw mut none, 2 * GRANULE, prop, 0), OUT_OF_MEMORY);
    assert_eq!(cu.cuMemAlloc_v2(&raw mut at, 2 * GRANULE), OUT_OF_MEMORY);
    let last = bench.create(GRANULE);
    assert_eq!(info(), 0);
    assert_eq!(cu.cuMemAlloc_v2(&raw mut at, 1), OUT_OF_MEMORY);
    ok(cu.cuMemFree_v2(block));
    assert_eq!(info(), half - GRANULE);
    ok(cu.cuMemRelease(handle));
    ok(cu.cuMemRelease(last));
    assert_eq!(info() as u64, TOTAL);
}
