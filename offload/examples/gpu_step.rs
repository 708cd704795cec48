//! What mapping calls add to a training step on a GPU: prints one line of JSON.
//!
//! Arguments: large page size in MiB (with the page's 2 there are none), layers that the host may be ahead of the
//! GPU. The allocator, the `cuda` device and their calls of the stand-in driver are real; each call costs what
//! `STANDIN_CUDA_COSTS` says on a virtual clock. Kernels, copies and the engine's threads are simulated, one timeline
//! each, with the engine's default limits. What the host frees is quiet once the GPU's timeline is there:
//! `STANDIN_CUDA_RUN_AHEAD` has to be more than the works of the run, and `STANDIN_CUDA_EXACT` 1. The step is that of 32 responses of 2,048
//! tokens to a prompt of 10,240, on Llama-3-8B's geometry; its
//! seconds are those of `python -m dormouse.headline arithmetic`.
#![allow(clippy::print_stdout, reason = "its output")]

use std::collections::VecDeque;
use std::error::Error;
use std::ptr;
use std::sync::Arc;

use dormouse_alloc::{Allocator, ArenaId, Block, Config, Margin, Request};
use dormouse_device::cuda::{CudaConfig, CudaDevice, Staged};
use dormouse_device::{Device, Fill, SpanId, SpanLabel};
use dormouse_offload::{EngineConfig, UNUSED_BYTES_MAX};
use dormouse_timeline::Timeline;

const MIB: usize = 1 << 20;
const SEGMENT_BYTES: usize = 1 << 30;
const GRANULE_BYTES: usize = 512;
const BUDGET_PERCENT: u64 = 90;

const PROMPT_TOKENS: usize = 10_240;
const MICROBATCH_TOKENS: usize = 4_096;
const MICROBATCHES: usize = 16;
/// Number of the microbatch in the middle of B, from 0.
const MIDDLE: usize = MICROBATCHES / 2;
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

/// The most bytes mapped: in A, in all of B, in its middle and last microbatch, and in C. Of the middle one also the
/// most bytes in use.
#[derive(Clone, Copy, Default)]
struct Peaks {
    a: u64,
    b: u64,
    middle: u64,
    middle_in_use: u64,
    last_microbatch: u64,
    c: u64,
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
    /// Works that the host may be ahead of the GPU.
    run_ahead: usize,
    /// Ends of the works that the GPU was given last, as far as the host has not waited for them.
    given: VecDeque<u64>,
    /// Ends of all works of the GPU, from work `works_before` + 1 on.
    work_ends: VecDeque<u64>,
    works_before: u64,
    /// The arena of the prompt's forward, while it runs.
    arena: Option<ArenaId>,
    peaks: Peaks,
    /// Times of the allocator at the begins of the two microbatches before.
    unused_from: [Option<u64>; 2],
    falling: VecDeque<(usize, usize)>,
    /// Regions that are being copied out or sealed: bytes, and when they end.
    inflight: VecDeque<(u64, u64)>,
    layers: Vec<Vec<Dormant>>,
    /// When a layer's pages are there, and when its bytes are.
    staged_ns: [u64; LAYERS],
    arrived_ns: [u64; LAYERS],
}

fn main() -> Outcome<()> {
    let numbers: Vec<usize> =
        std::env::args().skip(1).map(|word| word.parse()).collect::<Result<_, _>>()?;
    let [large_mib, run_ahead_layers] = numbers[..] else {
        return Err("accepted are: large page MiB, layers".into());
    };
    let mut trainer = Trainer::new(large_mib * MIB, run_ahead_layers)?;
    let (mut begin_ns, mut calls_ns) = (0, 0);
    for _ in 0..STEPS {
        (begin_ns, calls_ns) = (trainer.times.gpu, trainer.times.calls);
        trainer.step()?;
    }
    let Peaks { a, b, middle, middle_in_use, last_microbatch, c } = trainer.peaks;
    println!(
        "{{\"step_ns\": {}, \"calls_ns\": {}, \"a_bytes\": {a}, \"b_bytes\": {b}, \
         \"middle_bytes\": {middle}, \"middle_in_use_bytes\": {middle_in_use}, \
         \"last_microbatch_bytes\": {last_microbatch}, \"c_bytes\": {c}}}",
        trainer.times.gpu - begin_ns,
        trainer.times.calls - calls_ns,
    );
    Ok(())
}

impl Trainer {
    fn new(large_page_bytes: usize, run_ahead_layers: usize) -> Outcome<Self> {
        let standin = standin::load();
        let device = CudaDevice::new(&CudaConfig { large_page_bytes, ..CudaConfig::default() })?;
        let budget_bytes = device.memory_info().capacity_bytes / 100 * BUDGET_PERCENT;
        // SAFETY: the legacy stream, which ends with the last work given to the device.
        let stream = unsafe { device.foreign_stream(ptr::null_mut()) }?;
        let config = Config {
            segment_bytes: SEGMENT_BYTES,
            moves_pages: true,
            run_ahead: Some(Margin::RUN_AHEAD),
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
            run_ahead: run_ahead_layers * SAVED_KIB.len(),
            given: VecDeque::new(),
            work_ends: VecDeque::new(),
            works_before: 0,
            arena: None,
            peaks: Peaks::default(),
            unused_from: [None; 2],
            falling: VecDeque::new(),
            inflight: VecDeque::new(),
            layers: Vec::new(),
            staged_ns: [0; LAYERS],
            arrived_ns: [0; LAYERS],
        })
    }

    fn step(&mut self) -> Outcome<()> {
        self.allocator.reset_peaks();
        self.phase_a()?;
        self.peaks = Peaks { a: self.mapped_peak_bytes(), ..Peaks::default() };
        for number in 0..MICROBATCHES {
            self.give_back_unused(number)?;
            self.mapped_peak_bytes();
            self.microbatch(number + 1 == MICROBATCHES)?;
            let in_use_bytes = self.allocator.stats().active_bytes.peak;
            self.peaks.last_microbatch = self.mapped_peak_bytes();
            if number == MIDDLE {
                self.peaks.middle = self.peaks.last_microbatch;
                self.peaks.middle_in_use = in_use_bytes;
            }
            self.peaks.b = self.peaks.b.max(self.peaks.last_microbatch);
        }
        self.phase_c()?;
        self.peaks.c = self.mapped_peak_bytes();
        Ok(())
    }

    /// Returns the most bytes mapped since the last call.
    fn mapped_peak_bytes(&self) -> u64 {
        let peak_bytes = self.allocator.stats().mapped_bytes.peak;
        self.allocator.reset_peaks();
        peak_bytes
    }

    /// Makes calls on a thread that is free at `from_ns`. Returns when they are over.
    fn calls<T>(
        &mut self,
        from_ns: u64,
        calls: impl FnOnce(&Allocator<CudaDevice>) -> Outcome<T>,
    ) -> Outcome<(T, u64)> {
        self.standin.set_clock_ns(from_ns);
        while self.work_ends.front().is_some_and(|&end_ns| end_ns <= from_ns) {
            self.work_ends.pop_front();
            self.works_before += 1;
        }
        self.standin.end_works(self.works_before);
        let ended = self.standin.ended_works();
        self.standin.set_kernels_end_ns(from_ns.next_multiple_of(KERNEL_NS));
        let made = calls(&self.allocator)?;
        let mut end_ns = self.standin.clock_ns();
        // The thread waited for a work of the GPU.
        let waited = Some(self.standin.ended_works()).filter(|&waited| waited > ended);
        let place = waited.and_then(|waited| waited.checked_sub(self.works_before + 1));
        if let Some(&waited_ns) = place.and_then(|place| self.work_ends.get(place as usize)) {
            end_ns = end_ns.max(waited_ns);
        }
        self.times.calls += end_ns - from_ns;
        Ok((made, end_ns))
    }

    /// The forward of a layer: allocates each tensor as the trainer's thread, and gives the GPU its kernels.
    fn forward(&mut self, tokens: usize, ns: u64) -> Outcome<Vec<Block>> {
        SAVED_KIB.iter().map(|kib| self.forward_one(kib * 1024 * tokens, ns)).collect()
    }

    fn forward_one(&mut self, bytes: usize, layer_ns: u64) -> Outcome<Block> {
        self.fall_asleep(self.times.host)?;
        let (stream, arena) = (self.stream, self.arena);
        let is_dormant = arena.is_some();
        let request = Request {
            stream,
            arena,
            scope: is_dormant.into(),
            whole_pages: is_dormant,
            ..Request::new(bytes)
        };
        let (block, end_ns) =
            self.calls(self.times.host, |allocator| Ok(allocator.allocate(&request)?))?;
        self.times.host = end_ns;
        self.launch(layer_ns / SAVED_KIB.len() as u64);
        Ok(block)
    }

    fn free(&self, blocks: &[Block]) -> Outcome<()> {
        for block in blocks {
            let _freed = self.allocator.free(block.range.start, self.stream)?;
        }
        Ok(())
    }

    /// Gives the GPU the kernels of a layer.
    fn compute(&mut self, ns: u64) {
        SAVED_KIB.iter().for_each(|_| self.launch(ns / SAVED_KIB.len() as u64));
    }

    /// Gives the GPU `ns` of kernels, once its queue has room.
    fn launch(&mut self, ns: u64) {
        while self.given.len() > self.run_ahead {
            self.times.host = self.times.host.max(self.given.pop_front().unwrap_or_default());
        }
        self.times.gpu = self.times.gpu.max(self.times.host) + ns;
        self.given.push_back(self.times.gpu);
        self.standin.give_work();
        self.work_ends.push_back(self.times.gpu);
    }

    /// The prompt's forward. All layers but the last fall asleep.
    fn phase_a(&mut self) -> Outcome<()> {
        self.layers.clear();
        self.arena = Some(self.allocator.arena_create()?);
        for layer in 0..LAYERS {
            let blocks = self.forward(PROMPT_TOKENS, A_NS / LAYERS as u64)?;
            let ready_ns = self.times.gpu;
            let dormant = |(block, kib)| {
                let bytes = (kib * 1024 * PROMPT_TOKENS) as u64;
                Dormant { block, bytes, span: None, ready_ns }
            };
            self.layers.push(blocks.into_iter().zip(SAVED_KIB).map(dormant).collect());
            if layer + 1 < LAYERS {
                self.falling.extend((0..SAVED_KIB.len()).map(|at| (layer, at)));
            }
        }
        self.arena.take().into_iter().for_each(|arena| self.allocator.arena_close(arena));
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
            self.inflight.push_back((bytes, copied_ns));
            self.layers[layer][at].span = Some(span);
        }
        Ok(())
    }

    /// As the mark of a microbatch: pages that neither of the last two has used leave, but not for the last one.
    fn give_back_unused(&mut self, number: usize) -> Outcome<()> {
        let now = self.allocator.watch_unused();
        let [since, last] = std::mem::take(&mut self.unused_from);
        self.unused_from = if number == 0 { [None, Some(now)] } else { [last, Some(now)] };
        let Some(since) = since.filter(|_| number > 0 && number + 1 < MICROBATCHES) else {
            return Ok(());
        };
        let (_, end_ns) = self.calls(self.times.host, |allocator| {
            Ok(allocator.trim_unused(since, UNUSED_BYTES_MAX))
        })?;
        self.times.host = end_ns;
        Ok(())
    }

    /// Forward and backward of one microbatch.
    fn microbatch(&mut self, is_last: bool) -> Outcome<()> {
        let layer_ns = B_NS / (MICROBATCHES * LAYERS) as u64;
        let mut layers = Vec::new();
        for _ in 0..LAYERS {
            layers.push(self.forward(MICROBATCH_TOKENS, layer_ns / PARTS_PER_MICROBATCH)?);
        }
        while let Some(blocks) = layers.pop() {
            self.compute(layer_ns - layer_ns / PARTS_PER_MICROBATCH);
            self.free(&blocks)?;
            // As the first gradient of the last microbatch.
            if is_last && self.falling.is_empty() {
                self.wake_for(LAYERS - 1)?;
            }
        }
        Ok(())
    }

    /// The prompt's backward, with a window of layers that wake ahead.
    fn phase_c(&mut self) -> Outcome<()> {
        self.fall_asleep(u64::MAX)?;
        self.inflight.clear();
        for layer in (0..LAYERS).rev() {
            // As the mark of a layer.
            self.wake_for(layer)?;
            self.times.host = self.times.host.max(self.staged_ns[layer]);
            self.times.gpu = self.times.gpu.max(self.arrived_ns[layer]);
            self.compute(C_NS / LAYERS as u64);
            let blocks: Vec<Block> = self.layers[layer].iter().map(|one| one.block).collect();
            self.free(&blocks)?;
        }
        // A step ends with all gradients.
        self.times.host = self.times.host.max(self.times.gpu);
        self.given.clear();
        (self.staged_ns, self.arrived_ns) = ([0; LAYERS], [0; LAYERS]);
        Ok(())
    }

    /// Wakes the layers that the backward of `layer` reads and those of its window, and others below while
    /// there is memory to spare.
    fn wake_for(&mut self, layer: usize) -> Outcome<()> {
        let window = self.engine.wake_window_layers as usize;
        for ahead in (0..=layer).rev() {
            let is_asleep = self.layers[ahead].iter().any(|one| one.span.is_some());
            let bytes: u64 =
                self.layers[ahead].iter().map(|one| one.block.range.bytes as u64).sum();
            if ahead + window < layer && is_asleep && bytes > self.allocator.spare_bytes() {
                break;
            }
            self.wake(ahead)?;
        }
        Ok(())
    }

    /// Wakes a layer, unless it is awake: the trainer's thread makes room, the staging thread maps.
    fn wake(&mut self, layer: usize) -> Outcome<()> {
        for at in 0..SAVED_KIB.len() {
            let Dormant { block, bytes, span, .. } = self.layers[layer][at];
            let Some(span) = span else { continue };
            let ((), reserved_ns) = self.calls(self.times.host, |allocator| {
                Ok(allocator.reserve_awake(block.range.bytes as u64)?)
            })?;
            self.times.host = reserved_ns;
            let from_ns = self.times.stager.max(self.times.host);
            let ((), end_ns) = self.calls(from_ns, |allocator| {
                let device = allocator.device();
                let staged = match allocator.info(block.id)?.wakes_large {
                    true => device.stage_large(span, Fill::Any)?,
                    false => device.stage(span, Fill::Any)?,
                };
                device.publish(staged).map_err(|(error, _): (_, Staged)| error)?;
                allocator.set_awake(block.id)?;
                allocator.unclaim(block.id)?;
                Ok(())
            })?;
            self.layers[layer][at].span = None;
            self.times.stager = end_ns;
            self.times.copies_in = self.times.copies_in.max(end_ns) + bytes / LINK;
            self.staged_ns[layer] = end_ns;
            self.arrived_ns[layer] = self.times.copies_in;
        }
        Ok(())
    }
}
