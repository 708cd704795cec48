//! What mapping calls add to a training step on a GPU: prints one line of JSON.
//!
//! Arguments: large page size in MiB (with the page's 2 there are none), layers that the host may be ahead of the GPU,
//! steps that stay awake before those that sleep, and whether free pages go back to the driver before the step that
//! counts (1), as they do where programs take turns, or stay (0). The allocator, the `cuda` device and their calls of
//! the stand-in driver are real; each call costs what `STANDIN_CUDA_COSTS` says on a virtual clock. Kernels, copies and
//! the engine's threads are simulated, one timeline each, with the engine's default limits. What the host frees is quiet
//! once the GPU's timeline is there: `STANDIN_CUDA_RUN_AHEAD` has to be more than the works of the run, and
//! `STANDIN_CUDA_EXACT` 1.
#![allow(clippy::print_stdout, reason = "its output")]

mod engine;
mod geometry;
mod machine;

use dormouse_alloc::{ArenaId, Block, Request};

use crate::engine::Engine;
use crate::geometry::{
    A_NS, ACCUMULATOR_BYTES, ATTENTION, BACKWARD_NS, BOUNDARY, C_NS, FORWARD_NS, HEAD_NS,
    HEAD_TENSORS, KEYS_BYTES, LAYERS, LOGITS_BYTES, MIB, MICROBATCH_TOKENS, MICROBATCHES,
    PROMPT_TOKENS, RESPONSES, SAVED, SAVED_OF_LAST, WIDE_LOGITS_BYTES, parameter_bytes,
    saved_bytes,
};
use crate::machine::{Machine, Outcome, STREAM, Times};

/// Steps that sleep. The last one counts: the first one maps all memory anew, and what the second to the fourth map still
/// depends on where it lies.
const STEPS: usize = 6;
const STEPS_AWAKE_MAX: usize = 4;
/// Number of the microbatch in the middle of B, from 0.
const MIDDLE: usize = MICROBATCHES / 2;

/// The most bytes mapped: in A, in all of B, in B before its last microbatch, in its middle and last microbatch, and in
/// C. Of the middle one also the most bytes in use. All above parameters and gradients.
#[derive(Clone, Copy, Default)]
struct Peaks {
    a: u64,
    b: u64,
    before_last: u64,
    middle: u64,
    middle_in_use: u64,
    last_microbatch: u64,
    c: u64,
}

struct Trainer {
    machine: Machine,
    engine: Engine,
    /// Bytes of parameters and gradients.
    held_bytes: u64,
    sleeps: bool,
    /// The arena of the prompt's forward, while it runs.
    arena: Option<ArenaId>,
    /// What the prompt's layers saved.
    layers: Vec<Vec<Block>>,
    /// K and V of the prompt, and their accumulators.
    boundary: Vec<Block>,
    accumulators: Vec<Block>,
}

fn main() -> Outcome<()> {
    let numbers: Vec<usize> =
        std::env::args().skip(1).map(|word| word.parse()).collect::<Result<_, _>>()?;
    let [large_mib, run_ahead_layers, steps_awake, gives_back] = numbers[..] else {
        return Err("accepted are: large page MiB, layers, steps awake, 0 or 1".into());
    };
    if steps_awake > STEPS_AWAKE_MAX || gives_back > 1 {
        let seen = format!("{steps_awake} steps awake, {gives_back}");
        return Err(format!("{seen}; accepted are 0 to {STEPS_AWAKE_MAX}, 0 or 1").into());
    }
    let mut trainer = Trainer::new(large_mib * MIB, run_ahead_layers)?;
    for _ in 0..steps_awake {
        trainer.step(false)?;
    }
    for _ in 1..STEPS {
        trainer.step(true)?;
    }
    if gives_back == 1 {
        trainer.machine.host_calls(|allocator| Ok(allocator.trim(u64::MAX)))?;
    }
    let Times { host, gpu, calls: calls_ns, waits: waits_ns, .. } = trainer.machine.times;
    let begin_ns = gpu.max(host);
    let Peaks { a, b, before_last, middle, middle_in_use, last_microbatch, c } =
        trainer.step(true)?;
    let times = &trainer.machine.times;
    println!(
        "{{\"step_ns\": {}, \"calls_ns\": {}, \"waits_ns\": {}, \"a_bytes\": {a}, \
         \"b_bytes\": {b}, \"before_last_bytes\": {before_last}, \"middle_bytes\": {middle}, \
         \"middle_in_use_bytes\": {middle_in_use}, \
         \"last_microbatch_bytes\": {last_microbatch}, \"c_bytes\": {c}, \
         \"woken_beside_bytes\": {}}}",
        times.gpu - begin_ns,
        times.calls - calls_ns,
        times.waits - waits_ns,
        trainer.engine.woken_beside_bytes,
    );
    Ok(())
}

impl Trainer {
    fn new(large_page_bytes: usize, run_ahead_layers: usize) -> Outcome<Self> {
        let mut machine = Machine::new(large_page_bytes, run_ahead_layers)?;
        for bytes in parameter_bytes() {
            machine.allocate(&Request { stream: STREAM, ..Request::new(bytes) })?;
        }
        let engine = Engine::new(&machine);
        Ok(Self {
            held_bytes: machine.allocator.stats().active_bytes.current,
            machine,
            engine,
            sleeps: true,
            arena: None,
            layers: Vec::new(),
            boundary: Vec::new(),
            accumulators: Vec::new(),
        })
    }

    /// Runs a step, in which what is dormant sleeps or not. Returns its peaks.
    fn step(&mut self, sleeps: bool) -> Outcome<Peaks> {
        self.sleeps = sleeps;
        self.peak_bytes();
        self.phase_a()?;
        let mut peaks = Peaks { a: self.peak_bytes().0, ..Peaks::default() };
        for number in 0..MICROBATCHES {
            self.engine.begin_microbatch(&mut self.machine, MICROBATCHES - 1 - number)?;
            self.peak_bytes();
            self.microbatch()?;
            let (mapped_bytes, in_use_bytes) = self.peak_bytes();
            peaks.before_last = peaks.before_last.max(peaks.last_microbatch);
            peaks.last_microbatch = mapped_bytes;
            if number == MIDDLE {
                (peaks.middle, peaks.middle_in_use) = (mapped_bytes, in_use_bytes);
            }
            peaks.b = peaks.b.max(mapped_bytes);
        }
        self.phase_c()?;
        peaks.c = self.peak_bytes().0;
        Ok(peaks)
    }

    /// Returns the most bytes mapped and the most in use since the last call, above parameters and gradients.
    fn peak_bytes(&self) -> (u64, u64) {
        let (mapped_bytes, in_use_bytes) = self.machine.peak_bytes();
        (mapped_bytes - self.held_bytes, in_use_bytes - self.held_bytes)
    }

    /// Allocates for the general pool.
    fn allocate(&mut self, bytes: usize) -> Outcome<Block> {
        self.allocate_by(&Request { stream: STREAM, ..Request::new(bytes) })
    }

    /// Allocates for a layer of the prompt while its forward runs, otherwise for the general pool.
    fn allocate_in_layer(&mut self, bytes: usize) -> Outcome<Block> {
        let (arena, is_prompt) = (self.arena, self.arena.is_some());
        let scope = is_prompt.into();
        self.allocate_by(&Request {
            stream: STREAM,
            arena,
            scope,
            whole_pages: is_prompt,
            ..Request::new(bytes)
        })
    }

    fn allocate_by(&mut self, request: &Request) -> Outcome<Block> {
        self.engine.fall_asleep(&mut self.machine)?;
        self.machine.allocate(request)
    }

    /// Gives the GPU a kernel.
    fn compute(&mut self, ns: u64) -> Outcome<()> {
        self.engine.fall_asleep(&mut self.machine)?;
        self.machine.launch(ns);
        Ok(())
    }

    fn free(&mut self, blocks: Vec<Block>) -> Outcome<()> {
        blocks.into_iter().try_for_each(|block| self.machine.free(block))
    }

    /// The forward of a layer: allocates each tensor and computes it.
    fn forward(&mut self, tokens: usize, ns: u64) -> Outcome<Vec<Block>> {
        let mut saved = Vec::with_capacity(SAVED);
        for (at, bytes) in saved_bytes(tokens).into_iter().enumerate() {
            if at == ATTENTION && self.arena.is_some() {
                self.allocate_boundary()?;
            }
            saved.push(self.allocate_in_layer(bytes)?);
            self.compute(ns / SAVED as u64)?;
        }
        Ok(saved)
    }

    /// K and V of a layer of the prompt, which stay awake, and their accumulators.
    fn allocate_boundary(&mut self) -> Outcome<()> {
        for _ in 0..BOUNDARY {
            let keys = self.allocate_in_layer(KEYS_BYTES)?;
            self.boundary.push(keys);
        }
        for _ in 0..BOUNDARY {
            let sums = self.allocate(ACCUMULATOR_BYTES)?;
            self.accumulators.push(sums);
        }
        Ok(())
    }

    /// The backward of a layer, which frees each tensor once it is read. `gradients` of boundary tensors arrive with
    /// that of the attention.
    fn backward(&mut self, saved: Vec<Block>, ns: u64, gradients: usize) -> Outcome<()> {
        let mut saved: Vec<Option<Block>> = saved.into_iter().map(Some).collect();
        saved.resize(SAVED, None);
        for (at, block) in saved.into_iter().enumerate().rev() {
            self.compute(ns / SAVED as u64)?;
            if at == ATTENTION {
                for _ in 0..gradients {
                    self.engine.gradient(&mut self.machine)?;
                }
            }
            block.map_or(Ok(()), |block| self.machine.free(block))?;
        }
        Ok(())
    }

    /// The prompt's forward. A layer falls asleep when the next one has run.
    fn phase_a(&mut self) -> Outcome<()> {
        let engine = Engine::new(&self.machine);
        std::mem::replace(&mut self.engine, engine).end(&self.machine);
        self.arena = Some(self.machine.allocator.arena_create()?);
        for layer in 0..LAYERS {
            let saved = self.forward(PROMPT_TOKENS, A_NS / LAYERS as u64)?;
            let kept = if layer + 1 == LAYERS { SAVED_OF_LAST } else { SAVED };
            if self.sleeps {
                let dormant = saved.iter().copied().zip(saved_bytes(PROMPT_TOKENS));
                self.engine.name(layer, dormant.take(kept));
            }
            self.layers.push(saved);
            if let Some(below) = layer.checked_sub(1) {
                self.engine.let_sleep(below, self.machine.times.gpu);
            }
        }
        let unread = self.layers[LAYERS - 1].split_off(SAVED_OF_LAST);
        self.free(unread)?;
        self.arena.take().into_iter().for_each(|it| self.machine.allocator.arena_close(it));
        self.engine.let_sleep(LAYERS - 1, self.machine.times.gpu);
        Ok(())
    }

    /// Forward and backward of one microbatch.
    fn microbatch(&mut self) -> Outcome<()> {
        let mut layers = Vec::with_capacity(LAYERS);
        for _ in 0..LAYERS {
            layers.push(self.forward(MICROBATCH_TOKENS, FORWARD_NS)?);
        }
        self.head()?;
        while let Some(saved) = layers.pop() {
            self.backward(saved, BACKWARD_NS, BOUNDARY)?;
        }
        Ok(())
    }

    /// Forward and backward of a microbatch's logits and loss. The loss of each response has its logits in FP32, their
    /// log-softmax and its gradient; the gradient in BF16 goes on to the head.
    fn head(&mut self) -> Outcome<()> {
        let logits = self.head_tensors(1, RESPONSES * LOGITS_BYTES)?;
        let losses = self.head_tensors(2 * RESPONSES, WIDE_LOGITS_BYTES)?;
        let wide_gradients = self.head_tensors(RESPONSES, WIDE_LOGITS_BYTES)?;
        self.free(losses)?;
        let gradients = self.head_tensors(RESPONSES, LOGITS_BYTES)?;
        self.free(wide_gradients)?;
        self.free(logits)?;
        self.free(gradients)
    }

    fn head_tensors(&mut self, count: usize, bytes: usize) -> Outcome<Vec<Block>> {
        let mut tensors = Vec::with_capacity(count);
        for _ in 0..count {
            tensors.push(self.allocate(bytes)?);
            self.compute(HEAD_NS / HEAD_TENSORS)?;
        }
        Ok(tensors)
    }

    /// The prompt's backward. It begins with the gradients of K and V in BF16.
    fn phase_c(&mut self) -> Outcome<()> {
        self.engine.begin_wake(&mut self.machine)?;
        let mut seeds = Vec::with_capacity(LAYERS * BOUNDARY);
        for _ in 0..LAYERS * BOUNDARY {
            seeds.push(self.allocate(KEYS_BYTES)?);
        }
        while let Some(saved) = self.layers.pop() {
            self.engine.begin_backward(&mut self.machine, self.layers.len())?;
            self.backward(saved, C_NS / LAYERS as u64, 0)?;
        }
        let boundary = std::mem::take(&mut self.boundary);
        self.free(seeds)?;
        self.free(boundary)?;
        // A step ends with all gradients.
        self.machine.synchronize();
        let accumulators = std::mem::take(&mut self.accumulators);
        self.free(accumulators)
    }
}
