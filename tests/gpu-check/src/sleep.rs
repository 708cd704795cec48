//! Gigabytes asleep and awake again, every byte compared, by the driver's own figure of memory. One cycle
//! warms up. What was given back is judged by the suite.

use std::sync::Arc;
use std::time::Instant;

use dormouse_alloc::{Allocator, Config, Request};
use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_device::{AddressRange, Device};
use dormouse_offload::{Engine, EngineConfig, Role, Tier, label};
use dormouse_timeline::Timeline;
use serde_json::{Value, json};

use crate::Options;
use crate::plain::Plain;

const MIB: usize = 1 << 20;
/// Bytes of one block.
const BLOCK_BYTES: usize = 64 * MIB;

/// Bytes that differ by block and by place.
fn pattern(block: usize, into: AddressRange) {
    // SAFETY: pinned memory of ours, that long.
    let words = unsafe {
        std::slice::from_raw_parts_mut(into.start as *mut u64, into.bytes / size_of::<u64>())
    };
    let mut state = block as u64 + 1;
    for word in words {
        // splitmix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators".
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        *word = mixed ^ (mixed >> 27);
    }
}

/// `mib`: how much sleeps (4096).
pub(crate) fn check(options: &Options) -> Value {
    let count = (options.number("mib", 4096) * MIB / BLOCK_BYTES).max(1);
    let bytes = (count * BLOCK_BYTES) as u64;
    let device = Arc::new(CudaDevice::new(&CudaConfig::default()).unwrap());
    let budget_bytes = device.memory_info().capacity_bytes;
    let timeline = Arc::new(Timeline::new(1 << 12));
    let config = Config::new(device.page_bytes(), budget_bytes);
    let allocator = Allocator::new(Arc::clone(&device), config, Arc::clone(&timeline)).unwrap();
    let allocator = Arc::new(allocator);
    // SAFETY: NULL is the default stream.
    let stream = unsafe { device.foreign_stream(std::ptr::null_mut()) }.unwrap();
    allocator.register_stream(0, stream.clone()).unwrap();
    let tiers = EngineConfig { host_bytes_max: 2 * bytes, ..EngineConfig::default() };
    let engine = Engine::new(Arc::clone(&allocator), tiers, timeline).unwrap();
    let (wanted, found) = (
        device.allocate_pinned(BLOCK_BYTES).unwrap(),
        device.allocate_pinned(BLOCK_BYTES).unwrap(),
    );
    let plain = Plain::open();
    let copy = |to: usize, from: usize| {
        // SAFETY: blocks that are awake and pinned memory, all of them ours and that long.
        unsafe { device.copy(to, from, BLOCK_BYTES, &stream) }.unwrap();
        device.synchronize(&device.record(&stream).unwrap()).unwrap();
    };
    let mut blocks = Vec::new();
    for block in 0..count {
        let address = allocator.allocate(&Request::new(BLOCK_BYTES)).unwrap().range.start;
        pattern(block, wanted);
        copy(address, wanted.start);
        let label = label("gpu-check", Some(block as u32));
        blocks.push((address, engine.adopt(address, Role::Dormant, label).unwrap()));
    }
    let ids: Vec<_> = blocks.iter().map(|(_, id)| *id).collect();
    allocator.trim(u64::MAX);
    let sleep = || {
        let start = Instant::now();
        let after = [device.record(&stream).unwrap()];
        let outcome = engine.sleep(&ids, Tier::Host, &after).unwrap();
        assert_eq!(outcome.declined_bytes, 0, "{:?}", outcome.declined);
        engine.wait_settled(&ids).unwrap();
        start.elapsed().as_secs_f64()
    };
    // The driver keeps memory for registered host memory and for streams from their first use on.
    sleep();
    engine.wait_awake(&ids).unwrap();
    let awake_bytes = plain.used_bytes();
    let sleep_s = sleep();
    device.release_parked();
    let asleep_bytes = plain.used_bytes();
    let start = Instant::now();
    engine.wait_awake(&ids).unwrap();
    let wake_s = start.elapsed().as_secs_f64();
    let compared: usize = blocks
        .iter()
        .enumerate()
        .map(|(block, (address, _))| {
            pattern(block, wanted);
            copy(found.start, *address);
            // SAFETY: both are pinned memory of ours, that long, and no copy is under way.
            let same = unsafe {
                libc::memcmp(wanted.start as *const _, found.start as *const _, BLOCK_BYTES) == 0
            };
            assert!(same, "block {block} came back with other bytes");
            BLOCK_BYTES
        })
        .sum();
    let given_back_bytes = awake_bytes.saturating_sub(asleep_bytes);
    json!({
        "bytes": bytes,
        "compared_bytes": compared,
        "given_back_bytes": given_back_bytes,
        "sleep_gb_per_s": bytes as f64 / sleep_s / 1e9,
        "wake_gb_per_s": bytes as f64 / wake_s / 1e9,
    })
}
