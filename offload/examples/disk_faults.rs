//! Puts regions to sleep in a file and checks every byte that wakes, while its caller makes the disk fail.
//!
//! `disk_faults DIR ENGINE ROUNDS` writes `asleep` after each sleep and waits for a line on standard input; then
//! it wakes all regions and writes one line of JSON: regions with `right` and with `wrong` bytes, those whose wake was
//! `refused`, those `kept` in memory because the file did not take them, and the distinct errors.
//! A region whose wake is refused keeps its place in the file, and is woken again in later rounds.
//! `tests/disk-faults/run` is the caller.
#![allow(clippy::unwrap_used, clippy::expect_used, reason = "an example fails by panicking")]

use std::collections::BTreeSet;
use std::io::{BufRead, Write};
use std::path::PathBuf;
use std::sync::Arc;

use dormouse_alloc::{Allocator, Config, Request};
use dormouse_device::Device;
use dormouse_device::host::{HostConfig, HostDevice, guard};
use dormouse_offload::{
    Engine, EngineConfig, NvmeConfig, RegionId, RegionState, Role, Tier, label,
};
use dormouse_storage::IoEngine;
use dormouse_timeline::Timeline;

const REGIONS: usize = 8;
const REGION_BYTES: usize = 4 << 20;
const FILE_BYTES: u64 = 40 << 20;
const WORD_BYTES: usize = size_of::<u64>();

/// One region and its words, which only these know.
struct Owned {
    address: usize,
    id: RegionId,
    /// Seed of its words.
    seed: u64,
    /// Its last wake was refused: it sleeps.
    refused: bool,
}

/// Returns the words of a seed: splitmix64.
fn words(seed: u64) -> impl Iterator<Item = u64> {
    (0..(REGION_BYTES / WORD_BYTES) as u64).map(move |at| {
        let mut word = seed ^ at.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    })
}

impl Owned {
    fn memory(&mut self) -> &mut [u64] {
        // SAFETY: a live block of this process's own, awake and not in flight when this is called.
        unsafe {
            std::slice::from_raw_parts_mut(self.address as *mut u64, REGION_BYTES / WORD_BYTES)
        }
    }

    fn fill(&mut self, seed: u64) {
        self.seed = seed;
        self.memory().iter_mut().zip(words(seed)).for_each(|(word, value)| *word = value);
    }

    fn is_right(&mut self) -> bool {
        let seed = self.seed;
        self.memory().iter().copied().eq(words(seed))
    }
}

/// Reads one line of the caller; false at its end.
fn wait_for_caller() -> bool {
    std::io::stdin().lock().read_line(&mut String::new()).unwrap() > 0
}

fn say(line: &str) {
    println!("{line}");
    std::io::stdout().flush().unwrap();
}

fn main() {
    let mut arguments = std::env::args().skip(1);
    let dir = PathBuf::from(arguments.next().expect("DIR"));
    let io_engine = IoEngine::named(&arguments.next().expect("ENGINE")).expect("an engine's name");
    let rounds: u64 = arguments.next().expect("ROUNDS").parse().unwrap();
    guard::install().unwrap();
    let bytes = REGIONS * REGION_BYTES;
    let device = HostDevice::new(HostConfig::new(16 * bytes, 4 * bytes as u64)).unwrap();
    let config = Config::new(device.page_bytes(), 4 * bytes as u64);
    let timeline = Arc::new(Timeline::new(1024));
    let allocator = Allocator::new(Arc::new(device), config, Arc::clone(&timeline)).unwrap();
    let allocator = Arc::new(allocator);
    let nvme = NvmeConfig {
        dir,
        file_bytes: FILE_BYTES,
        file_bytes_max: 0,
        io_threads: 2,
        io_engine,
        queue_depth: 4,
        write_budget_bytes: 0,
    };
    let config = EngineConfig { nvme: Some(nvme), ..EngineConfig::default() };
    let engine = match Engine::new(Arc::clone(&allocator), config, timeline) {
        Ok(engine) => engine,
        Err(error) => return say(&format!("no engine: {error}")),
    };
    let mut owned: Vec<Owned> = (0..REGIONS)
        .map(|_| {
            let address = allocator.allocate(&Request::new(REGION_BYTES)).unwrap().range.start;
            let id = engine.adopt(address, Role::Dormant, label("disk", None)).unwrap();
            Owned { address, id, seed: 0, refused: false }
        })
        .collect();
    for round in 0..rounds {
        for (number, region) in (0..).zip(&mut owned) {
            if !region.refused {
                region.fill((round << 8) + number);
            }
        }
        let ids: Vec<_> = owned.iter().map(|region| region.id).collect();
        engine.sleep(&ids, Tier::Nvme, &[]).unwrap();
        say("sleeping");
        engine.wait_settled(&ids).unwrap();
        let slept = |id: &&RegionId| engine.region_info(**id).unwrap().state == RegionState::Nvme;
        let kept = REGIONS - ids.iter().filter(slept).count();
        say("asleep");
        if !wait_for_caller() {
            return;
        }
        let (mut right, mut wrong, mut refused, mut errors) = (0, 0, 0, BTreeSet::new());
        for region in &mut owned {
            let woken = engine.wait_awake(&[region.id]);
            region.refused = woken.is_err();
            match woken {
                Ok(_) if region.is_right() => right += 1,
                Ok(_) => wrong += 1,
                Err(error) => {
                    refused += 1;
                    errors.insert(error.to_string());
                }
            }
        }
        let errors: Vec<_> = errors.iter().map(|text| format!("{text:?}")).collect();
        let errors = errors.join(",");
        say(&format!(
            r#"{{"right":{right},"wrong":{wrong},"refused":{refused},"kept":{kept},"errors":[{errors}]}}"#
        ));
    }
}
