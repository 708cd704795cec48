//! Steps without end, for `make soak`: each falls asleep in the file and in host memory and wakes.
//!
//! ```text
//! soak_steps DIR
//! ```
//! answers each line of its input, a number of milliseconds, by running steps for as long, and
//! then with a line of JSON: how many, and what the engine holds now and held at most meanwhile.
//! A byte that did not come back as it was ends it.
#![expect(unsafe_code, reason = "plays the trainer, who touches memory by address")]

use std::error::Error;
use std::io::{self, BufRead, Write};
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dormouse_alloc::{Allocator, Config, Request};
use dormouse_device::Device;
use dormouse_device::host::{HostConfig, HostDevice};
use dormouse_offload::{
    Edge, Engine, EngineConfig, NvmeConfig, Phase, Prefix, Role, Stats, TagId, Tier,
};
use dormouse_storage::IoEngine;
use dormouse_timeline::Timeline;

const LAYERS: u32 = 32;
const REGIONS_PER_LAYER: usize = 4;
const REGION_BYTES: usize = 64 << 10;
/// Half of what a step puts to sleep; the rest goes to host memory. All of it sleeps.
const FILE_BYTES: u64 = LAYERS as u64 * REGIONS_PER_LAYER as u64 * REGION_BYTES as u64 / 2;
const BUDGET_BYTES: u64 = 256 << 20;
/// How long the suffixes of a step take: it is a machine's disk, and others use it too.
const SUFFIXES: Duration = Duration::from_millis(50);
/// How long a step may take to fall asleep, however busy the machine.
const PATIENCE: Duration = Duration::from_secs(60);

type Outcome<T> = Result<T, Box<dyn Error>>;

fn main() -> Outcome<()> {
    let dir = std::env::args().nth(1).ok_or("usage: soak_steps DIR")?;
    let soak = Soak::new(Path::new(&dir))?;
    let mut steps = 0;
    for line in io::stdin().lock().lines() {
        let until = Instant::now() + Duration::from_millis(line?.trim().parse()?);
        soak.engine.reset_peaks();
        while Instant::now() < until {
            soak.step(steps)?;
            steps += 1;
        }
        let line = figures(steps, &soak.engine.stats());
        writeln!(io::stdout().lock(), "{line}")?;
    }
    Ok(())
}

fn figures(steps: u64, stats: &Stats) -> String {
    let regions: u64 = stats.roles.iter().map(|role| role.all.regions).sum();
    let [_, host, nvme] = stats.tiers;
    format!(
        "{{\"steps\": {steps}, \"regions\": {regions}, \"extent_bytes\": {}, \"pinned_bytes\": {}, \
         \"extent_bytes_peak\": {}, \"pinned_bytes_peak\": {}}}",
        nvme.used_bytes, host.used_bytes, nvme.peak_bytes, host.peak_bytes
    )
}

struct Soak {
    engine: Arc<Engine<HostDevice>>,
    allocator: Arc<Allocator<HostDevice>>,
    stream: <HostDevice as Device>::Stream,
    weights: TagId,
    weight: usize,
}

impl Soak {
    fn new(dir: &Path) -> Outcome<Self> {
        let timeline = Arc::new(Timeline::new(1 << 12));
        let device = Arc::new(HostDevice::new(HostConfig::new(1 << 30, BUDGET_BYTES))?);
        let config = Config::new(device.page_bytes(), BUDGET_BYTES);
        let allocator = Arc::new(Allocator::new(device, config, Arc::clone(&timeline))?);
        // SAFETY: NULL is the calling thread.
        let stream = unsafe { allocator.device().foreign_stream(std::ptr::null_mut())? };
        allocator.register_stream(0, stream.clone())?;
        let settings = EngineConfig {
            nvme: Some(NvmeConfig {
                dir: dir.to_owned(),
                file_bytes: FILE_BYTES,
                file_bytes_max: 0,
                io_threads: 2,
                io_engine: IoEngine::Auto,
                queue_depth: 4,
                write_budget_bytes: 0,
            }),
            host_bytes_max: BUDGET_BYTES,
            ..EngineConfig::default()
        };
        let engine = Engine::new(Arc::clone(&allocator), settings, timeline)?;
        let weights = engine.tag_create("weights", true)?;
        let weight = allocator.allocate(&whole_pages(Request::new(REGION_BYTES)))?.range.start;
        engine.tag_add(weights, weight)?;
        Ok(Self { engine, allocator, stream, weights, weight })
    }

    fn step(&self, number: u64) -> Outcome<()> {
        self.move_weights(number)?;
        self.copy_away(number)?;
        let mut prefix = self.engine.prefix(LAYERS, "soak")?;
        prefix.enter(Phase::A, &self.stream)?;
        let blocks = self.forward(&mut prefix, number)?;
        prefix.enter(Phase::B, &self.stream)?;
        std::thread::sleep(SUFFIXES);
        self.wait_asleep()?;
        prefix.enter(Phase::C, &self.stream)?;
        self.backward(&mut prefix, &blocks, number)?;
        drop(prefix.close());
        Ok(())
    }

    /// Until all that is dormant is asleep.
    fn wait_asleep(&self) -> Outcome<()> {
        let begun = Instant::now();
        loop {
            let dormant = self.engine.stats().roles[Role::Dormant.index()];
            if dormant.asleep.regions == dormant.all.regions {
                return Ok(());
            }
            if begun.elapsed() > PATIENCE {
                return Err(format!("not asleep within {PATIENCE:?}: {dormant:?}").into());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// A tag sleeps in host memory, moves on to the file, and wakes.
    fn move_weights(&self, number: u64) -> Outcome<()> {
        fill(self.weight, number);
        for tier in [Tier::Host, Tier::Nvme] {
            self.engine.tag_sleep(self.weights, tier, &[])?;
        }
        self.engine.tag_wait(self.weights)?;
        check(self.weight, number)
    }

    /// The same bytes by copy.
    fn copy_away(&self, number: u64) -> Outcome<()> {
        // SAFETY: the weights are awake, with no other user.
        let stash =
            unsafe { self.engine.stash_put(self.weight, REGION_BYTES, number, &self.stream)? };
        fill(self.weight, !number);
        // SAFETY: as above.
        unsafe { self.engine.stash_get(stash, self.weight, &self.stream)? };
        self.engine.stash_drop(stash)?;
        check(self.weight, number)
    }

    fn forward(&self, prefix: &mut Prefix<HostDevice>, number: u64) -> Outcome<Vec<Vec<usize>>> {
        let mut blocks = Vec::new();
        for layer in 0..LAYERS {
            prefix.mark(Edge::ForwardBegin, layer, &self.stream)?;
            let (scope, arena) = (prefix.scope(layer)?, prefix.arena());
            let request = whole_pages(Request { scope, arena, ..Request::new(REGION_BYTES) });
            let mut saved = Vec::new();
            for _ in 0..REGIONS_PER_LAYER {
                let start = self.allocator.allocate(&request)?.range.start;
                fill(start, number + start as u64);
                saved.push(start);
            }
            prefix.dormant(layer, &saved)?;
            blocks.push(saved);
            prefix.mark(Edge::ForwardEnd, layer, &self.stream)?;
        }
        Ok(blocks)
    }

    fn backward(
        &self,
        prefix: &mut Prefix<HostDevice>,
        blocks: &[Vec<usize>],
        number: u64,
    ) -> Outcome<()> {
        for (layer, saved) in (0..LAYERS).zip(blocks).rev() {
            prefix.mark(Edge::BackwardBegin, layer, &self.stream)?;
            for &start in saved {
                check(start, number + start as u64)?;
                self.engine.free(start, 0)?;
            }
            prefix.mark(Edge::BackwardEnd, layer, &self.stream)?;
        }
        Ok(())
    }
}

fn whole_pages(request: Request) -> Request {
    Request { whole_pages: true, ..request }
}

fn word(seed: u64, at: usize) -> u64 {
    (seed ^ at as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
}

fn fill(start: usize, seed: u64) {
    // SAFETY: a live, awake block of this length with no other user.
    let words = unsafe { std::slice::from_raw_parts_mut(start as *mut u64, REGION_BYTES / 8) };
    for (at, value) in words.iter_mut().enumerate() {
        *value = word(seed, at);
    }
}

fn check(start: usize, seed: u64) -> Outcome<()> {
    // SAFETY: as in `fill`.
    let words = unsafe { std::slice::from_raw_parts(start as *const u64, REGION_BYTES / 8) };
    match words.iter().enumerate().find(|&(at, &value)| value != word(seed, at)) {
        Some((at, value)) => Err(format!("word {at} at {start:#x} is {value:#x}").into()),
        None => Ok(()),
    }
}
