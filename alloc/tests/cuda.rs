//! The allocator on the `cuda` device, over the stand-in driver: copies are the GPU's work here,
//! late ones too, and every byte they read is compared.
//!
//! A binary of its own: the stand-in driver is process-wide.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

use dormouse_alloc::{AllocError, Allocator, Block, Cause, Config, Request};
use dormouse_device::cuda::{CudaConfig, CudaDevice};
use dormouse_device::{AddressRange, Device, Hold};
use dormouse_timeline::Timeline;
use proptest::prelude::*;
use standin::{Exclusive, Live, Standin};

const PAGE_BYTES: usize = 4096;
/// Pages within the budget.
const BUDGET_PAGES: usize = 48;
/// Streams of the trainer's, by key.
const STREAMS: u64 = 3;
/// The largest request.
const PAGES_MAX: usize = 12;
/// Pages of a large page, where there are some: requests of eight and more have them.
const LARGE_PAGES: usize = 4;
/// How long a stream is held up at most: a request may wait for it.
const HELD_MAX: Duration = Duration::from_millis(2);

type Stream = <CudaDevice as Device>::Stream;
type Event = <CudaDevice as Device>::Event;

fn driver() -> (Standin, Exclusive) {
    let standin = standin::load_with(PAGE_BYTES, 64 << 20);
    (standin, standin.exclusive())
}

/// A copy that reads a block, perhaps later, and what it must find.
struct Reading {
    seed: u8,
    into: AddressRange,
    bytes: usize,
    done: Event,
}

/// A trainer on one GPU: it writes each block when it gets it, and reads it on any stream.
struct Trainer {
    readings: VecDeque<Reading>,
    blocks: Vec<(Block, u64, u8)>,
    held: Vec<Option<Sender<()>>>,
    streams: Vec<Stream>,
    allocator: Arc<Allocator<CudaDevice>>,
    device: Arc<CudaDevice>,
    next_seed: u8,
}

impl Trainer {
    fn new() -> Self {
        Self::with(1, false)
    }

    /// On a device whose large pages have that many pages.
    fn with(large_pages: usize, moves_pages: bool) -> Self {
        let config = CudaConfig {
            capacity_bytes: (2 * BUDGET_PAGES * PAGE_BYTES) as u64,
            reserve_bytes: 64 << 20,
            large_page_bytes: large_pages * PAGE_BYTES,
            ..CudaConfig::default()
        };
        let device = Arc::new(CudaDevice::new(&config).unwrap());
        let mut config = Config::new(PAGE_BYTES, (BUDGET_PAGES * PAGE_BYTES) as u64);
        config.segment_bytes = 16 * PAGE_BYTES;
        config.moves_pages = moves_pages;
        let timeline = Arc::new(Timeline::new(64));
        let allocator = Allocator::new(Arc::clone(&device), config, timeline).unwrap();
        let allocator = Arc::new(allocator);
        let streams: Vec<_> = (0..STREAMS).map(|_| device.create_stream("own").unwrap()).collect();
        for (key, stream) in streams.iter().enumerate() {
            allocator.register_stream(key as u64, stream.clone()).unwrap();
        }
        Self {
            readings: VecDeque::new(),
            blocks: Vec::new(),
            held: (0..STREAMS).map(|_| None).collect(),
            streams,
            allocator,
            device,
            next_seed: 1,
        }
    }

    /// Keeps a stream's later work waiting until it is let go, at most for [`HELD_MAX`].
    fn hold(&mut self, stream: usize) {
        if self.held[stream].is_none() {
            let (go, gate) = channel::<()>();
            let until = Box::new(move || {
                let _ = gate.recv_timeout(HELD_MAX);
            });
            self.device.hold(&self.streams[stream], until).unwrap();
            self.held[stream] = Some(go);
        }
    }

    fn release_held_back(&mut self) {
        self.held.iter_mut().for_each(|held| *held = None);
    }

    fn allocate(&mut self, pages: usize, stream: usize) -> Result<(), AllocError> {
        let request =
            Request { stream: stream as u64, ..Request::new(pages * PAGE_BYTES - PAGE_BYTES / 2) };
        let block = self.allocator.allocate(&request)?;
        let seed = self.next_seed;
        self.next_seed = self.next_seed.wrapping_add(1).max(1);
        let from = self.device.allocate_pinned(block.range.bytes).unwrap();
        // SAFETY: pinned memory of ours, and a block of ours; the source is kept to the end.
        unsafe {
            std::ptr::write_bytes(from.start as *mut u8, seed, from.bytes);
            let (to, bytes) = (block.range.start, block.range.bytes);
            self.device.copy(to, from.start, bytes, &self.streams[stream]).unwrap();
        }
        self.blocks.push((block, stream as u64, seed));
        Ok(())
    }

    /// Reads a block on a stream that comes after its writing, as torch's users see to.
    fn read(&mut self, at: usize, stream: usize) {
        let (block, own, seed) = self.blocks[at];
        let stream_of = &self.streams[stream];
        if own != stream as u64 {
            let written = self.device.record(&self.streams[own as usize]).unwrap();
            self.device.wait(stream_of, &written).unwrap();
            self.allocator.record_stream(block.range.start, stream as u64).unwrap();
        }
        let bytes = block.range.bytes;
        let into = self.device.allocate_pinned(bytes).unwrap();
        // SAFETY: a live block of ours, and pinned memory that is kept until the copy is over.
        unsafe { self.device.copy(into.start, block.range.start, bytes, stream_of) }.unwrap();
        let done = self.device.record(stream_of).unwrap();
        self.readings.push_back(Reading { seed, into, bytes, done });
    }

    fn free(&mut self, at: usize) {
        let (block, stream, _) = self.blocks.swap_remove(at);
        let _ = self.allocator.free(block.range.start, stream).unwrap();
    }

    /// Waits for every reading and compares it.
    fn settle(&mut self) {
        self.release_held_back();
        for reading in self.readings.drain(..) {
            self.device.synchronize(&reading.done).unwrap();
            // SAFETY: pinned memory of ours; the copy into it is over.
            let bytes = unsafe {
                std::slice::from_raw_parts(reading.into.start as *const u8, reading.bytes)
            };
            assert!(bytes.iter().all(|byte| *byte == reading.seed), "bytes of another block");
            // SAFETY: allocated in `read`, compared just now.
            unsafe { self.device.free_pinned(reading.into) };
        }
    }
}

impl Drop for Trainer {
    /// Streams end only when they are let go.
    fn drop(&mut self) {
        self.release_held_back();
    }
}

#[derive(Clone, Debug)]
enum Step {
    Allocate(usize, usize),
    Read(usize, usize),
    Free(usize),
    Hold(usize),
    LetGo,
    Settle,
    Trim,
}

fn step() -> impl Strategy<Value = Step> {
    let stream = 0..STREAMS as usize;
    prop_oneof![
        6 => (1..=PAGES_MAX, stream.clone()).prop_map(|(pages, on)| Step::Allocate(pages, on)),
        6 => (any::<usize>(), stream.clone()).prop_map(|(at, on)| Step::Read(at, on)),
        6 => any::<usize>().prop_map(Step::Free),
        2 => stream.prop_map(Step::Hold),
        2 => Just(Step::LetGo),
        1 => Just(Step::Settle),
        1 => Just(Step::Trim),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(40))]
    #[test]
    fn late_work_finds_the_bytes_it_was_queued_for(
        moves_pages: bool,
        is_large: bool,
        steps in prop::collection::vec(step(), 1..120),
    ) {
        let (_, _turn) = driver();
        let mut trainer = Trainer::with(if is_large { LARGE_PAGES } else { 1 }, moves_pages);
        for step in steps {
            match step {
                Step::Allocate(pages, stream) => {
                    // Out of memory would wait for a held stream, which this test does not release.
                    let held = trainer.held.iter().any(Option::is_some);
                    let live: usize = trainer.blocks.iter().map(|(b, ..)| b.range.bytes).sum();
                    let fits = live / PAGE_BYTES + pages <= BUDGET_PAGES;
                    if held && trainer.allocator.stats().mapped_bytes.current as usize / PAGE_BYTES
                        + pages > BUDGET_PAGES
                    {
                        trainer.release_held_back();
                    }
                    match trainer.allocate(pages, stream) {
                        Ok(()) => prop_assert!(fits),
                        Err(AllocError::OutOfMemory(report)) => {
                            prop_assert!(!fits, "a false out of memory: {report}");
                        }
                        Err(other) => prop_assert!(false, "{other}"),
                    }
                }
                Step::Read(at, stream) if !trainer.blocks.is_empty() => {
                    trainer.read(at % trainer.blocks.len(), stream);
                }
                Step::Free(at) if !trainer.blocks.is_empty() => {
                    trainer.free(at % trainer.blocks.len());
                }
                Step::Hold(stream) => trainer.hold(stream),
                Step::LetGo => trainer.release_held_back(),
                Step::Settle => trainer.settle(),
                Step::Trim => {
                    trainer.release_held_back();
                    trainer.allocator.trim(u64::MAX);
                }
                Step::Read(..) | Step::Free(_) => {}
            }
            prop_assert_eq!(trainer.allocator.check(), Ok(()));
        }
        trainer.settle();
        while !trainer.blocks.is_empty() {
            trainer.free(0);
        }
        trainer.allocator.trim(u64::MAX);
        prop_assert_eq!(trainer.allocator.stats().mapped_bytes.current, 0);
        prop_assert_eq!(trainer.device.memory_info().mapped_bytes, 0);
    }
}

#[test]
fn a_driver_out_of_memory_is_served_from_the_cache_or_reported() {
    let (driver, _turn) = driver();
    let mut trainer = Trainer::new();
    let before = driver.live(Live::Handles);
    // Cached on one stream, wanted on another, and the driver has nothing new to give.
    trainer.allocate(8, 0).unwrap();
    trainer.free(0);
    driver.fail("cuMemCreate", 1, u64::MAX, 2);
    trainer.allocate(8, 1).unwrap();
    assert_eq!(driver.live(Live::Handles), before + 8, "the same pages, on another stream");
    match trainer.allocate(4, 1) {
        Err(AllocError::OutOfMemory(report)) => assert_eq!(report.cause, Cause::Device),
        other => panic!("{other:?}"),
    }
    driver.heal();
    trainer.allocate(4, 1).unwrap();
    trainer.read(0, 2);
    trainer.read(1, 1);
    trainer.settle();
}

#[test]
fn maps_that_fail_at_any_call_cost_a_request_and_nothing_else() {
    let (driver, _turn) = driver();
    for entry in ["cuMemCreate", "cuMemMap", "cuMemSetAccess"] {
        for nth in 1..=6 {
            let mut trainer = Trainer::new();
            trainer.allocate(3, 0).unwrap();
            driver.fail(entry, nth, 1, 999);
            let failed = trainer.allocate(6, 0);
            driver.heal();
            assert_eq!(trainer.allocator.check(), Ok(()));
            if let Err(error) = failed {
                assert!(matches!(error, AllocError::Device(_)), "{entry} {nth}: {error}");
                trainer.allocate(6, 0).unwrap();
            }
            trainer.read(0, 1);
            trainer.read(1, 0);
            trainer.settle();
        }
    }
}

#[test]
fn a_lost_device_is_reported_and_no_page_is_reused() {
    let (driver, _turn) = driver();
    let mut trainer = Trainer::new();
    trainer.allocate(4, 0).unwrap();
    trainer.allocate(4, 1).unwrap();
    trainer.read(0, 1);
    driver.lose(700);
    let first = trainer.blocks[0].0.range;
    trainer.free(0);
    // The event of the other stream's use cannot be recorded: the pages stay out of use.
    for _ in 0..4 {
        match trainer.allocate(4, 0) {
            Ok(()) => panic!("mapped on a lost device"),
            Err(error) => assert!(matches!(error, AllocError::Device(_)), "{error}"),
        }
    }
    assert!(trainer.allocator.lookup(first.start).is_none());
    trainer.readings.clear();
}

/// Streams are never idle, and events are late.
#[test]
fn all_of_it_holds_while_the_host_is_ahead() {
    [1, 4].into_iter().for_each(|works| standin::run_again_ahead(works, "", &[]));
}
