//! The machine: the real allocator and `cuda` device on the stand-in driver, and a timeline for each thread, the GPU
//! and each direction of the link.

use std::collections::VecDeque;
use std::error::Error;
use std::ptr;
use std::sync::Arc;

use dormouse_alloc::{Allocator, Block, Config, Margin, Request};
use dormouse_device::Device;
use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_timeline::Timeline;

use crate::geometry::SAVED;

const SEGMENT_BYTES: usize = 1 << 30;
const GRANULE_BYTES: usize = 512;
const BUDGET_PERCENT: u64 = 90;
/// Length of a kernel, for tables in which unmapping waits for one.
const KERNEL_NS: u64 = 1_000_000;
/// The trainer's stream.
pub(crate) const STREAM: u64 = 1;

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// The simulated timelines: the time at which each is free.
#[derive(Clone, Copy, Default)]
pub(crate) struct Times {
    pub(crate) host: u64,
    pub(crate) gpu: u64,
    pub(crate) copies_out: u64,
    pub(crate) copies_in: u64,
    /// The thread that seals what was copied out.
    pub(crate) sealer: u64,
    /// The thread that stages what wakes ahead.
    pub(crate) stager: u64,
    /// Costs of calls, and waits for the GPU in them, of all threads.
    pub(crate) calls: u64,
    pub(crate) waits: u64,
}

pub(crate) struct Machine {
    standin: standin::Standin,
    pub(crate) allocator: Allocator<CudaDevice>,
    pub(crate) times: Times,
    /// Works that the host may be ahead of the GPU.
    run_ahead: usize,
    /// Ends of the works that the GPU was given last, as far as the host has not waited for them.
    given: VecDeque<u64>,
    /// Ends of all works of the GPU, from work `works_before` + 1 on.
    work_ends: VecDeque<u64>,
    works_before: u64,
}

impl Machine {
    pub(crate) fn new(large_page_bytes: usize, run_ahead_layers: usize) -> Outcome<Self> {
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
        allocator.register_stream(STREAM, stream)?;
        Ok(Self {
            standin,
            allocator,
            times: Times::default(),
            run_ahead: run_ahead_layers * SAVED,
            given: VecDeque::new(),
            work_ends: VecDeque::new(),
            works_before: 0,
        })
    }

    /// Returns the most bytes mapped and the most in use since the last call.
    pub(crate) fn peak_bytes(&self) -> (u64, u64) {
        let stats = self.allocator.stats();
        self.allocator.reset_peaks();
        (stats.mapped_bytes.peak, stats.active_bytes.peak)
    }

    /// Makes calls on a thread that is free at `from_ns`. Returns when they are over.
    pub(crate) fn calls<T>(
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
        self.times.calls += end_ns - from_ns;
        // The thread waited for a work of the GPU.
        let waited = Some(self.standin.ended_works()).filter(|&waited| waited > ended);
        let place = waited.and_then(|waited| waited.checked_sub(self.works_before + 1));
        if let Some(&waited_ns) = place.and_then(|place| self.work_ends.get(place as usize)) {
            self.times.waits += waited_ns.saturating_sub(end_ns);
            end_ns = end_ns.max(waited_ns);
        }
        Ok((made, end_ns))
    }

    /// Makes calls on the trainer's thread.
    pub(crate) fn host_calls<T>(
        &mut self,
        calls: impl FnOnce(&Allocator<CudaDevice>) -> Outcome<T>,
    ) -> Outcome<T> {
        let (made, end_ns) = self.calls(self.times.host, calls)?;
        self.times.host = end_ns;
        Ok(made)
    }

    pub(crate) fn allocate(&mut self, request: &Request) -> Outcome<Block> {
        self.host_calls(|allocator| Ok(allocator.allocate(request)?))
    }

    pub(crate) fn free(&mut self, block: Block) -> Outcome<()> {
        let _freed = self.host_calls(|it| Ok(it.free(block.range.start, STREAM)?))?;
        Ok(())
    }

    /// Gives the GPU `ns` of kernels, once its queue has room.
    pub(crate) fn launch(&mut self, ns: u64) {
        while self.given.len() > self.run_ahead {
            self.times.host = self.times.host.max(self.given.pop_front().unwrap_or_default());
        }
        self.times.gpu = self.times.gpu.max(self.times.host) + ns;
        self.given.push_back(self.times.gpu);
        self.standin.give_work();
        self.work_ends.push_back(self.times.gpu);
    }

    /// Lets the host wait for all that the GPU was given.
    pub(crate) fn synchronize(&mut self) {
        self.times.host = self.times.host.max(self.times.gpu);
        self.given.clear();
    }
}
