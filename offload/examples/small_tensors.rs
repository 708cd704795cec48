//! What it costs that small tensors of a layer sleep and wake, together and each alone.
//!
//! ```text
//! small_tensors DIR
//! ```
//! prints one line of JSON: for each size of tensor and place to sleep, the median time in
//! milliseconds from the last forward until all sleeps, then through the backward of every layer.
//! Pages are the host device's; the two ways run in turn.
#![allow(clippy::print_stdout, reason = "its output")]
#![expect(unsafe_code, reason = "plays the trainer, who touches memory by address")]

use std::error::Error;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use dormouse_alloc::{Allocator, Config, Request};
use dormouse_device::Device;
use dormouse_device::host::{HostConfig, HostDevice};
use dormouse_offload::{Edge, Engine, EngineConfig, NvmeConfig, Phase, Route};
use dormouse_storage::IoEngine;
use dormouse_timeline::Timeline;

const LAYERS: u32 = 24;
const TENSORS_PER_LAYER: usize = 12;
/// Sizes that are coalesced by default in each place.
const PLACES: [(&str, &[usize]); 2] =
    [("file", &[64 << 10, 80 << 10]), ("host", &[64 << 10, 256 << 10, 960 << 10])];
const BUDGET_BYTES: u64 = 1 << 30;
const FILE_BYTES: u64 = 512 << 20;
const ROUNDS: usize = 15;
/// How long falling asleep may take, however busy the machine.
const PATIENCE: Duration = Duration::from_secs(60);

type Outcome<T> = Result<T, Box<dyn Error>>;
type Stream = <HostDevice as Device>::Stream;

fn main() -> Outcome<()> {
    let dir = std::env::args().nth(1).ok_or("usage: small_tensors DIR")?;
    let mut figures = Vec::new();
    for (place, sizes) in PLACES {
        for &bytes in sizes {
            let ways = [("together", u64::MAX), ("alone", 0)].map(|(way, coalesced_bytes_max)| {
                Fixture::new(Path::new(&dir), place, coalesced_bytes_max)
                    .map(|fixture| (way, fixture))
            });
            let ways: Vec<_> = ways.into_iter().collect::<Outcome<_>>()?;
            let mut times = vec![Vec::new(); ways.len()];
            for round in 0..=ROUNDS {
                for (times, (_, fixture)) in times.iter_mut().zip(&ways) {
                    let took = fixture.step(bytes)?;
                    // The first makes threads and touches pinned memory.
                    times.extend((round > 0).then_some(took.as_secs_f64() * 1e3));
                }
            }
            for (times, (way, _)) in times.into_iter().zip(&ways) {
                figures.push(format!("\"{place}_{}_{way}_ms\": {:.3}", bytes >> 10, median(times)));
            }
        }
    }
    println!("{{{}}}", figures.join(", "));
    Ok(())
}

struct Fixture {
    allocator: Arc<Allocator<HostDevice>>,
    engine: Arc<Engine<HostDevice>>,
    stream: Stream,
}

impl Fixture {
    fn new(dir: &Path, place: &str, coalesced_bytes_max: u64) -> Outcome<Self> {
        let device = Arc::new(HostDevice::new(HostConfig::new(4 << 30, BUDGET_BYTES))?);
        let config = Config::new(device.page_bytes(), BUDGET_BYTES);
        let timeline = || Arc::new(Timeline::new(1 << 12));
        let allocator = Arc::new(Allocator::new(device, config, timeline())?);
        // SAFETY: NULL is the calling thread.
        let stream = unsafe { allocator.device().foreign_stream(std::ptr::null_mut())? };
        allocator.register_stream(0, stream.clone())?;
        let is_file = place == "file";
        let settings = EngineConfig {
            nvme: is_file.then(|| NvmeConfig {
                dir: dir.to_owned(),
                file_bytes: FILE_BYTES,
                file_bytes_max: 0,
                io_threads: 2,
                io_engine: IoEngine::Auto,
                queue_depth: 4,
                write_budget_bytes: 0,
            }),
            host_bytes_max: if is_file { 0 } else { BUDGET_BYTES },
            route: if is_file { Route::Auto } else { Route::ViaHost },
            coalesced_bytes_max,
            ..EngineConfig::default()
        };
        let engine = Engine::new(Arc::clone(&allocator), settings, timeline())?;
        Ok(Self { allocator, engine, stream })
    }

    fn step(&self, bytes: usize) -> Outcome<Duration> {
        let mut prefix = self.engine.prefix(LAYERS, "bench")?;
        prefix.enter(Phase::A, &self.stream)?;
        let mut saved = Vec::new();
        let mut marking = Duration::ZERO;
        for layer in 0..LAYERS {
            prefix.mark(Edge::ForwardBegin, layer, &self.stream)?;
            let (scope, arena) = (prefix.scope(layer)?, prefix.arena());
            let request = Request { scope, arena, whole_pages: true, ..Request::new(bytes) };
            let mut blocks = Vec::new();
            for _ in 0..TENSORS_PER_LAYER {
                let address = self.allocator.allocate(&request)?.range.start;
                // SAFETY: a live block of `bytes`, with no other user.
                unsafe {
                    std::ptr::with_exposed_provenance_mut::<u8>(address)
                        .write_bytes(layer as u8, bytes);
                }
                blocks.push(address);
            }
            let begin = Instant::now();
            prefix.dormant(layer, &blocks)?;
            prefix.mark(Edge::ForwardEnd, layer, &self.stream)?;
            marking += begin.elapsed();
            saved.push(blocks);
        }
        let begin = Instant::now();
        prefix.enter(Phase::B, &self.stream)?;
        let all = u64::from(LAYERS) * (TENSORS_PER_LAYER * bytes) as u64;
        while !self.is_asleep(all) {
            if begin.elapsed() > PATIENCE {
                return Err(
                    format!("not asleep within {PATIENCE:?}: {:?}", self.engine.stats()).into()
                );
            }
            std::thread::yield_now();
        }
        prefix.enter(Phase::C, &self.stream)?;
        for (layer, blocks) in saved.into_iter().enumerate().rev() {
            prefix.mark(Edge::BackwardBegin, layer as u32, &self.stream)?;
            for block in blocks {
                // SAFETY: a live block, awake by now.
                let byte = unsafe { *std::ptr::with_exposed_provenance::<u8>(block + bytes - 1) };
                if byte != layer as u8 {
                    return Err(format!("byte {byte} in layer {layer}").into());
                }
                self.engine.free(block, 0)?;
            }
            prefix.mark(Edge::BackwardEnd, layer as u32, &self.stream)?;
        }
        let took = marking + begin.elapsed();
        drop(prefix.close());
        Ok(took)
    }

    /// All of it where it is to sleep.
    fn is_asleep(&self, bytes: u64) -> bool {
        let stats = self.engine.stats();
        let [_, host, file] = stats.tiers.map(|tier| tier.regions.current_bytes);
        let place = if self.engine.config().nvme.is_some() { file } else { host };
        // What goes to the file counts there when it is all in it.
        place == bytes
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len() / 2).copied().unwrap_or(f64::NAN)
}
