//! What mapping calls add to a training step on a GPU: prints one line of JSON.
//!
//! Argument: large page size in MiB; with the page's 2 there are none. The allocator, the `cuda` device and their calls of the stand-in driver are
//! real; each call costs what `STANDIN_CUDA_COSTS` says on a virtual clock. Kernels, copies and the
//! engine's threads are simulated, one timeline each, with the engine's default limits. The
//! step is that of 32 responses of 2,048 tokens to a prompt of 10,240, on Llama-3-8B's geometry; its
//! seconds are those of `python -m dormouse.headline arithmetic`.
#![allow(clippy::print_stdout, reason = "its output")]

use std::collections::VecDeque;
use std::error::Error;
use std::sync::Arc;

use dormouse_alloc::{Allocator, Block, Config, Request};
use dormouse_device::cuda::{CudaConfig, CudaDevice, Staged};
use dormouse_device::{Device, Fill, SpanId, SpanLabel};
use dormouse_offload::EngineConfig;
use dormouse_timeline::Timeline;

const MIB: usize = 1 << 20;
const SEGMENT_BYTES: usize = 1 << 30;
const GRANULE_BYTES: usize = 512;
const BUDGET_PERCENT: u64 = 90;

const PROMPT_TOKENS: usize = 10_240;
const MICROBATCH_TOKENS: usize = 4_096;
const MICROBATCHES: usize = 16;
const LAYERS: usize = 32;
/// Bytes per token of the tensors that a layer saves, K and V apart: see `docs/evidence/gpu.md`.
const SAVED_KIB: [usize; 12] = [16, 8, 8, 8, 8, 16, 8, 8, 28, 28, 28, 28];
const A_NS: u64 = 280_000_000;
const B_NS: u64 = 7_100_000_000;
const C_NS: u64 = 580_000_000;
/// Bytes per ns of the link, each way.
const LINK: u64 = 55;
/// A backward takes twice as long as its forward.
const PARTS_PER_MICROBATCH: u64 = 3;
/// Layers queued ahead of the GPU: some 1,024 launches.
const RUN_AHEAD_LAYERS: usize = 48;
/// Length of a kernel, for tables in which unmapping waits for one.
const KERNEL_NS: u64 = 1_000_000;
/// Steps of a run. The last one counts: the first one maps all memory anew.
const STEPS: usize = 3;

type Outcome<T> = Result<T, Box<dyn Error>>;

/// A dormant tensor.
struct Dormant {
    block: Block,
    /// Without the rest of its last page.
    bytes: u64,
    span: Option<SpanId>,
    /// When its copy out may begin.
    ready_ns: u64,
}

/// The simulated timelines: the time at which each is free.
#[derive(Default)]
struct Times {
    host: u64,
    gpu: u64,
    copies_out: u64,
    copies_in: u64,
    /// The thread that seals what was copied out.
    sealer: u64,
    /// The thread that stages what wakes.
    stager: u64,
    /// Time in calls, of all threads.
    calls: u64,
}

struct Trainer {
    standin: standin::Standin,
    allocator: Allocator<CudaDevice>,
    stream: u64,
    engine: EngineConfig,
    times: Times,
    /// Ends of the layers that the GPU was given last.
    given: VecDeque<u64>,
    falling: VecDeque<(usize, usize)>,
    /// Regions that are being copied out or sealed: bytes, and when they end.
    inflight: VecDeque<(u64, u64)>,
    layers: Vec<Vec<Dormant>>,
}

fn main() -> Outcome<()> {
    let numbers: Vec<usize> =
        std::env::args().skip(1).map(|word| word.parse()).collect::<Result<_, _>>()?;
    let [large_mib] = numbers[..] else { return Err("accepted is: large page MiB".into()) };
    let mut trainer = Trainer::new(large_mib * MIB)?;
    let (mut begin_ns, mut calls_ns) = (0, 0);
    for _ in 0..STEPS {
        (begin_ns, calls_ns) = (trainer.times.gpu, trainer.times.calls);
        trainer.step()?;
    }
    println!(
        "{{\"step_ns\": {}, \"calls_ns\": {}, \"peak_bytes\": {}}}",
        trainer.times.gpu - begin_ns,
        trainer.times.calls - calls_ns,
        trainer.standin.peak_bytes()
    );
    Ok(())
}

impl Trainer {
    fn new(large_page_bytes: usize) -> Outcome<Self> {
        let standin = standin::load();
        let device = CudaDevice::new(&CudaConfig { large_page_bytes, ..CudaConfig::default() })?;
        let budget_bytes = device.memory_info().capacity_bytes / 100 * BUDGET_PERCENT;
        let stream = device.create_stream("trainer")?;
        let config = Config {
            segment_bytes: SEGMENT_BYTES,
            moves_pages: true,
            thread_cache: true,
            ..Config::new(GRANULE_BYTES, budget_bytes)
        };
        let timeline = Arc::new(Timeline::new(1 << 10));
        let allocator = Allocator::new(Arc::new(device), config, timeline)?;
        allocator.register_stream(1, stream)?;
        Ok(Self {
            standin,
            allocator,
            stream: 1,
            engine: EngineConfig::default(),
            times: Times::default(),
            given: VecDeque::new(),
            falling: VecDeque::new(),
            inflight: VecDeque::new(),
            layers: Vec::new(),
        })
    }

    fn step(&mut self) -> Outcome<()> {
        self.phase_a()?;
        for _ in 0..MICROBATCHES {
            self.microbatch()?;
        }
        self.phase_c()
    }

    /// Makes calls on a thread that is free at `from_ns`. Returns when they are over.
    fn calls<T>(
        &mut self,
        from_ns: u64,
        calls: impl FnOnce(&Allocator<CudaDevice>) -> Outcome<T>,
    ) -> Outcome<(T, u64)> {
        self.standin.set_clock_ns(from_ns);
        self.standin.set_kernels_end_ns(from_ns.next_multiple_of(KERNEL_NS));
        let made = calls(&self.allocator)?;
        let end_ns = self.standin.clock_ns();
        self.times.calls += end_ns - from_ns;
        Ok((made, end_ns))
    }

    /// Allocates a layer's tensors as the trainer's thread, once the queue of the GPU has room.
    fn allocate(&mut self, tokens: usize, whole_pages: bool) -> Outcome<Vec<Block>> {
        if self.given.len() >= RUN_AHEAD_LAYERS {
            self.times.host = self.times.host.max(self.given.pop_front().unwrap_or_default());
        }
        self.fall_asleep(self.times.host)?;
        let stream = self.stream;
        let (blocks, end_ns) = self.calls(self.times.host, |allocator| {
            let allocate = |kib: &usize| {
                let bytes = kib * 1024 * tokens;
                allocator.allocate(&Request { stream, whole_pages, ..Request::new(bytes) })
            };
            Ok(SAVED_KIB.iter().map(allocate).collect::<Result<Vec<_>, _>>()?)
        })?;
        self.times.host = end_ns;
        Ok(blocks)
    }

    fn free(&self, blocks: &[Block]) -> Outcome<()> {
        for block in blocks {
            let _freed = self.allocator.free(block.range.start, self.stream)?;
        }
        Ok(())
    }

    /// Gives the GPU `ns` of kernels. Returns when they end.
    fn compute(&mut self, ns: u64) -> u64 {
        self.times.gpu = self.times.gpu.max(self.times.host) + ns;
        self.given.push_back(self.times.gpu);
        self.times.gpu
    }

    /// The prompt's forward. All layers but the last fall asleep.
    fn phase_a(&mut self) -> Outcome<()> {
        self.layers.clear();
        for layer in 0..LAYERS {
            let blocks = self.allocate(PROMPT_TOKENS, true)?;
            let ready_ns = self.compute(A_NS / LAYERS as u64);
            let dormant = |(block, kib)| {
                let bytes = (kib * 1024 * PROMPT_TOKENS) as u64;
                Dormant { block, bytes, span: None, ready_ns }
            };
            self.layers.push(blocks.into_iter().zip(SAVED_KIB).map(dormant).collect());
            if layer + 1 < LAYERS {
                self.falling.extend((0..SAVED_KIB.len()).map(|at| (layer, at)));
            }
        }
        Ok(())
    }

    /// The sleeps that begin to leave by `until_ns`: a copy, then the pages.
    fn fall_asleep(&mut self, until_ns: u64) -> Outcome<()> {
        while let Some(&(layer, at)) = self.falling.front() {
            let Dormant { block, bytes, ready_ns, .. } = self.layers[layer][at];
            let mut begin_ns = self.times.copies_out.max(ready_ns);
            let mut inflight_bytes: u64 = self.inflight.iter().map(|(bytes, _)| bytes).sum();
            while inflight_bytes > 0 && inflight_bytes + bytes > self.engine.inflight_bytes_max {
                let Some(&(ended_bytes, end_ns)) = self.inflight.front() else { break };
                if end_ns > until_ns {
                    return Ok(());
                }
                begin_ns = begin_ns.max(end_ns);
                inflight_bytes -= ended_bytes;
                self.inflight.pop_front();
            }
            let copied_ns = begin_ns + bytes / LINK;
            let seal_ns = copied_ns.max(self.times.sealer);
            if seal_ns > until_ns {
                return Ok(());
            }
            self.falling.pop_front();
            let (span, end_ns) = self.calls(seal_ns, |allocator| {
                let device = allocator.device();
                allocator.claim(block.range.start, 1)?;
                let span = device.freeze(block.range, SpanLabel::default())?;
                device.seal(span)?;
                allocator.set_asleep(block.id)?;
                Ok(span)
            })?;
            self.times.copies_out = copied_ns;
            self.times.sealer = end_ns;
            self.inflight.push_back((bytes, end_ns));
            self.layers[layer][at].span = Some(span);
        }
        Ok(())
    }

    /// Forward and backward of one microbatch.
    fn microbatch(&mut self) -> Outcome<()> {
        let layer_ns = B_NS / (MICROBATCHES * LAYERS) as u64;
        let mut layers = Vec::new();
        for _ in 0..LAYERS {
            layers.push(self.allocate(MICROBATCH_TOKENS, false)?);
            self.compute(layer_ns / PARTS_PER_MICROBATCH);
        }
        while let Some(blocks) = layers.pop() {
            self.compute(layer_ns - layer_ns / PARTS_PER_MICROBATCH);
            self.free(&blocks)?;
        }
        Ok(())
    }

    /// The prompt's backward, with a window of layers that wake ahead.
    fn phase_c(&mut self) -> Outcome<()> {
        self.fall_asleep(u64::MAX)?;
        self.inflight.clear();
        // When a layer's pages are there, and when its bytes are.
        let (mut staged_ns, mut arrived_ns) = ([0; LAYERS], [0; LAYERS]);
        let mut next = LAYERS;
        for layer in (0..LAYERS).rev() {
            while next > layer.saturating_sub(self.engine.wake_window_layers as usize) {
                next -= 1;
                (staged_ns[next], arrived_ns[next]) = self.wake(next)?;
            }
            self.times.host = self.times.host.max(staged_ns[layer]);
            self.times.gpu = self.times.gpu.max(arrived_ns[layer]);
            self.compute(C_NS / LAYERS as u64);
            // As the mark of a layer: the next window opens when the GPU gets here.
            self.times.host = self.times.host.max(self.times.gpu - C_NS / LAYERS as u64);
            let blocks: Vec<Block> = self.layers[layer].iter().map(|one| one.block).collect();
            self.free(&blocks)?;
        }
        // A step ends with all gradients.
        self.times.host = self.times.host.max(self.times.gpu);
        self.given.clear();
        Ok(())
    }

    /// Wakes a layer as the staging thread. Returns when its pages are there, and its bytes.
    fn wake(&mut self, layer: usize) -> Outcome<(u64, u64)> {
        let mut arrived_ns = 0;
        for at in 0..SAVED_KIB.len() {
            let Dormant { block, bytes, span, .. } = self.layers[layer][at];
            let Some(span) = span else { continue };
            let from_ns = self.times.stager.max(self.times.host);
            let ((), end_ns) = self.calls(from_ns, |allocator| {
                let device = allocator.device();
                allocator.reserve_awake(block.range.bytes as u64)?;
                let staged = match allocator.info(block.id)?.wakes_large {
                    true => device.stage_large(span, Fill::Any)?,
                    false => device.stage(span, Fill::Any)?,
                };
                device.publish(staged).map_err(|(error, _): (_, Staged)| error)?;
                allocator.set_awake(block.id)?;
                allocator.unclaim(block.id)?;
                Ok(())
            })?;
            self.times.stager = end_ns;
            self.times.copies_in = self.times.copies_in.max(end_ns) + bytes / LINK;
            arrived_ns = self.times.copies_in;
        }
        Ok((self.times.stager, arrived_ns))
    }
}
