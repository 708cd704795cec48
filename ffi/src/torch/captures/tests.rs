//! Captures on the stand-in driver, in the strictest mode: any call that could break one does.

use std::ffi::c_void;

use standin::{Exclusive, Standin};

use super::request_flags::{Needs, set_announced};
use super::*;
use crate::abi::torch::{dormouse_torch_empty_cache as empty_cache, dormouse_torch_record_stream};
use crate::boundary::RawStream;
use crate::runtime::report::stats_of;
use crate::torch;

const PAGE_BYTES: usize = 2 << 20;
const TOTAL_BYTES: u64 = 256 << 20;
const GPU: i32 = 0;

type Begin = unsafe extern "C" fn(usize, i32) -> i32;
type End = unsafe extern "C" fn(usize, *mut usize) -> i32;

/// Exclusive use of the stand-in driver, with two streams.
struct Bench {
    standin: Standin,
    streams: [usize; 2],
    _turn: Exclusive,
}

impl Bench {
    /// Sets the graph hooks and empties the heap.
    fn new(are_announced: bool) -> Self {
        let standin = standin::load_with(PAGE_BYTES, TOTAL_BYTES);
        let turn = standin.exclusive();
        let mut bench = Self { standin, streams: [0; 2], _turn: turn };
        empty_cache();
        // The first request makes the heap, and the context.
        free(bench.ordinary(PAGE_BYTES), 0);
        empty_cache();
        bench.make_current();
        const NON_BLOCKING: u32 = 1;
        type Create = unsafe extern "C" fn(*mut usize, u32) -> i32;
        let create: Create = bench.entry("cuStreamCreate");
        for stream in &mut bench.streams {
            // SAFETY: it writes one handle.
            assert_eq!(unsafe { create(stream, NON_BLOCKING) }, 0);
        }
        set_announced(are_announced);
        bench
    }

    fn make_current(&self) {
        let mut context = 0;
        type Retain = unsafe extern "C" fn(*mut usize, i32) -> i32;
        let retain: Retain = self.entry("cuDevicePrimaryCtxRetain");
        let set: unsafe extern "C" fn(usize) -> i32 = self.entry("cuCtxSetCurrent");
        // SAFETY: one writes a handle, the other takes it.
        unsafe {
            assert_eq!(retain(&raw mut context, GPU), 0);
            assert_eq!(set(context), 0);
        }
    }

    fn entry<F: Copy>(&self, name: &str) -> F {
        const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
        // SAFETY: a function pointer; every use here names the type of that entry point.
        unsafe { std::mem::transmute_copy(&self.standin.symbol(name)) }
    }

    /// Begins the capture of a stream as PyTorch does, in pool `id` if given.
    fn begin(&self, stream: usize, id: Option<PoolId>) {
        const GLOBAL: i32 = 0;
        if let Some(id) = id {
            super::begin(GPU, id);
        }
        let begin: Begin = self.entry("cuStreamBeginCapture_v2");
        // SAFETY: a live stream.
        assert_eq!(unsafe { begin(self.streams[stream], GLOBAL) }, 0);
    }

    /// Ends a capture, which must be intact, and announces the end if it has an id.
    fn end(&self, stream: usize, id: Option<PoolId>) {
        let mut graph = 0;
        let end: End = self.entry("cuStreamEndCapture");
        // SAFETY: a live stream; it writes one handle.
        assert_eq!(unsafe { end(self.streams[stream], &raw mut graph) }, 0, "the capture broke");
        if let Some(id) = id {
            super::end(GPU, id);
        }
    }

    fn captured(&self, stream: usize, bytes: usize) -> Result<usize, torch::Failure> {
        allocate(bytes, self.streams[stream])
    }

    fn ordinary(&self, bytes: usize) -> usize {
        allocate(bytes, 0).unwrap()
    }

    /// Number of capture queries to the driver so far.
    fn driver_queries(&self) -> u64 {
        self.standin.calls("cuStreamIsCapturing")
    }

    /// As [`Self::driver_queries`], without those of a mark behind a free of a busy stream, which queries before and
    /// after it records its event.
    fn queries_of_requests(&self) -> u64 {
        self.driver_queries() - 2 * self.standin.calls("cuEventRecord")
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        set_announced(false);
    }
}

fn raw(stream: usize) -> RawStream {
    // SAFETY: 0, or a stream of the bench, which is never destroyed.
    unsafe { RawStream::new(std::ptr::without_provenance_mut(stream)) }
}

fn allocate(bytes: usize, stream: usize) -> Result<usize, torch::Failure> {
    torch::malloc(bytes.cast_signed(), GPU, raw(stream), Needs::of(GPU), true)
        .map(|pointer| pointer.addr())
}

fn free(address: usize, stream: usize) {
    torch::free(std::ptr::with_exposed_provenance_mut(address), GPU, raw(stream));
}

fn mapped_bytes() -> u64 {
    stats_of(Heap::existing_gpu(GPU).unwrap()).mapped.current_bytes
}

fn arenas() -> u64 {
    Heap::existing_gpu(GPU).unwrap().allocator().stats().arenas.current
}

/// Each test has its own pool.
const fn id(test: u64) -> PoolId {
    (0, 1000 + test)
}

#[test]
fn without_hooks_each_request_queries_the_driver_and_a_capture_is_refused() {
    let bench = Bench::new(false);
    let before = bench.queries_of_requests();
    free(bench.ordinary(PAGE_BYTES), 0);
    assert_eq!(bench.queries_of_requests(), before + 1);
    bench.begin(0, None);
    let refused = bench.captured(0, PAGE_BYTES).unwrap_err();
    assert!(refused.text.contains("CUDA graph") && !refused.is_out_of_memory, "{}", refused.text);
    assert!(refused.text.contains("no capture was announced"), "{}", refused.text);
    bench.end(0, None);
    // An announced capture is served without hooks.
    bench.begin(0, Some(id(1)));
    free(bench.captured(0, PAGE_BYTES).unwrap(), bench.streams[0]);
    bench.end(0, Some(id(1)));
    release(GPU, id(1));
    assert_eq!(arenas(), 1, "until the cache is emptied");
    empty_cache();
    assert_eq!((arenas(), mapped_bytes()), (0, 0));
}

#[test]
fn with_hooks_only_requests_during_a_capture_query_the_driver() {
    let bench = Bench::new(true);
    assert!(!Needs::of(GPU).driver_query());
    assert!(
        Needs::of(-1).driver_query() && Needs::of(i32::MAX).driver_query(),
        "an unknown GPU takes the slow path"
    );
    let before = bench.queries_of_requests();
    free(bench.ordinary(PAGE_BYTES), 0);
    assert_eq!(bench.queries_of_requests(), before);
    bench.begin(0, Some(id(2)));
    assert!(Needs::of(GPU).driver_query());
    let before = bench.driver_queries();
    free(bench.captured(0, PAGE_BYTES).unwrap(), bench.streams[0]);
    // A stream is queried again if work is queued on it for the request.
    assert!(bench.driver_queries() > before);
    bench.end(0, Some(id(2)));
    assert!(!Needs::of(GPU).driver_query());
    release(GPU, id(2));
    empty_cache();
}

#[test]
fn memory_of_a_capture_is_reserved_until_its_release() {
    let bench = Bench::new(true);
    bench.begin(0, Some(id(3)));
    let (held, freed) = (bench.captured(0, PAGE_BYTES), bench.captured(0, 3 * PAGE_BYTES));
    let (held, freed) = (held.unwrap(), freed.unwrap());
    free(freed, bench.streams[0]);
    assert_eq!(bench.captured(0, 3 * PAGE_BYTES).unwrap(), freed, "the capture reuses its memory");
    free(freed, bench.streams[0]);
    // Other requests are served meanwhile and do not break the capture.
    let other = allocate(3 * PAGE_BYTES, bench.streams[1]).unwrap();
    assert_ne!(other, freed);
    empty_cache();
    bench.end(0, Some(id(3)));
    let kept_bytes = 4 * PAGE_BYTES as u64;
    assert_eq!(mapped_bytes(), kept_bytes + 3 * PAGE_BYTES as u64);
    let again = allocate(3 * PAGE_BYTES, bench.streams[0]).unwrap();
    assert!(![held, freed].contains(&again), "not even for its stream, after the capture");
    free(again, bench.streams[0]);
    free(other, bench.streams[1]);
    empty_cache();
    assert_eq!(mapped_bytes(), kept_bytes);
    release(GPU, id(3));
    empty_cache();
    assert_eq!(mapped_bytes(), PAGE_BYTES as u64, "the other block is in use");
    free(held, bench.streams[0]);
    empty_cache();
    assert_eq!((arenas(), mapped_bytes()), (0, 0));
}

#[test]
fn graphs_share_a_pool_until_the_last_is_released() {
    let bench = Bench::new(true);
    let mut seen = Vec::new();
    for _ in 0..2 {
        bench.begin(0, Some(id(4)));
        let address = bench.captured(0, PAGE_BYTES).unwrap();
        free(address, bench.streams[0]);
        bench.end(0, Some(id(4)));
        seen.push(address);
    }
    assert_eq!(seen[0], seen[1]);
    release(GPU, id(4));
    empty_cache();
    assert_eq!(mapped_bytes(), PAGE_BYTES as u64, "the other graph replays on it");
    release(GPU, id(4));
    empty_cache();
    assert_eq!(mapped_bytes(), 0);
}

#[test]
fn of_two_concurrent_captures_neither_gets_memory() {
    let bench = Bench::new(true);
    bench.begin(0, Some(id(5)));
    let served = bench.captured(0, PAGE_BYTES).unwrap();
    bench.begin(1, Some(id(6)));
    for stream in [0, 1] {
        let refused = bench.captured(stream, PAGE_BYTES).unwrap_err().text;
        assert!(refused.contains("2 captures run on one GPU"), "{refused}");
        assert!(refused.contains("(0, 1005)"), "{refused}");
    }
    bench.end(0, Some(id(5)));
    let refused = bench.captured(1, PAGE_BYTES).unwrap_err().text;
    assert!(refused.contains("began while another one was running"), "{refused}");
    bench.end(1, Some(id(6)));
    assert!(!Needs::of(GPU).driver_query());
    free(served, bench.streams[0]);
    release(GPU, id(5));
    release(GPU, id(6));
    empty_cache();
    assert_eq!((arenas(), mapped_bytes()), (0, 0));
}

/// PyTorch releases the pool for it too; another graph of the pool must keep its memory.
#[test]
fn a_refused_capture_counts_in_its_pool() {
    let bench = Bench::new(true);
    bench.begin(0, Some(id(15)));
    let kept = bench.captured(0, PAGE_BYTES).unwrap();
    free(kept, bench.streams[0]);
    bench.end(0, Some(id(15)));
    bench.begin(0, Some(id(16)));
    bench.begin(1, Some(id(15)));
    bench.end(1, Some(id(15)));
    let served = bench.captured(0, PAGE_BYTES).unwrap();
    assert_ne!(served, kept, "the running capture uses its own pool");
    bench.end(0, Some(id(16)));
    release(GPU, id(15));
    empty_cache();
    assert_eq!(mapped_bytes(), 2 * PAGE_BYTES as u64, "the first graph replays on it");
    free(served, bench.streams[0]);
    for id in [id(15), id(16)] {
        release(GPU, id);
    }
    empty_cache();
    assert_eq!((arenas(), mapped_bytes()), (0, 0));
}

/// Some versions of PyTorch do not announce its end.
#[test]
fn a_failed_capture_ends_when_the_next_begins() {
    let bench = Bench::new(true);
    for next in [id(8), id(7)] {
        bench.begin(0, Some(id(7)));
        let lost = bench.captured(0, PAGE_BYTES).unwrap();
        bench.end(0, None);
        assert!(Needs::of(GPU).driver_query());
        bench.begin(0, Some(next));
        let served = bench.captured(0, PAGE_BYTES).unwrap();
        assert_ne!(served, lost);
        bench.end(0, Some(next));
        assert!(!Needs::of(GPU).driver_query());
        for address in [lost, served] {
            free(address, bench.streams[0]);
        }
        // One release for each begin: one too few keeps memory, one too many would lose it.
        release(GPU, next);
        empty_cache();
        assert!(mapped_bytes() > 0, "the pool of the failed capture");
        release(GPU, id(7));
        empty_cache();
        assert_eq!((arenas(), mapped_bytes()), (0, 0));
    }
}

/// The heap does not know the first stream: no query tells whether it is captured.
#[test]
fn a_second_capture_is_refused_before_the_first_has_requested_anything() {
    let bench = Bench::new(true);
    bench.begin(0, Some(id(17)));
    on_another_thread(&bench, || {
        bench.begin(1, Some(id(18)));
        for stream in [0, 1] {
            let refused = bench.captured(stream, PAGE_BYTES).unwrap_err().text;
            assert!(refused.contains("2 captures run on one GPU"), "{refused}");
        }
        bench.end(1, Some(id(18)));
    });
    let served = bench.captured(0, PAGE_BYTES).unwrap();
    free(served, bench.streams[0]);
    bench.end(0, Some(id(17)));
    release(GPU, id(17));
    release(GPU, id(18));
    empty_cache();
    assert_eq!((arenas(), mapped_bytes()), (0, 0));
}

/// A capture that has failed, and whose end was not announced, holds up no other one: a query tells that it has ended,
/// or the thread that began it begins again.
#[test]
fn a_failed_capture_holds_up_no_other_one() {
    let bench = Bench::new(true);
    bench.begin(0, Some(id(19)));
    free(bench.captured(0, PAGE_BYTES).unwrap(), bench.streams[0]);
    bench.end(0, None);
    on_another_thread(&bench, || {
        bench.begin(0, Some(id(20)));
        free(bench.captured(0, PAGE_BYTES).unwrap(), bench.streams[0]);
        bench.end(0, Some(id(20)));
    });
    bench.begin(1, Some(id(19)));
    bench.end(1, None);
    bench.begin(1, Some(id(20)));
    free(bench.captured(1, PAGE_BYTES).unwrap(), bench.streams[1]);
    bench.end(1, Some(id(20)));
    [19, 19, 20, 20].into_iter().for_each(|of| release(GPU, id(of)));
    empty_cache();
    assert_eq!((arenas(), mapped_bytes()), (0, 0));
}

fn on_another_thread(bench: &Bench, work: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let made = scope.spawn(|| {
            bench.make_current();
            work();
        });
        made.join().unwrap();
    });
}

#[test]
fn an_end_or_release_without_a_begin_is_refused() {
    let bench = Bench::new(true);
    bench.begin(0, Some(id(9)));
    super::end(GPU, id(10));
    assert!(fault_text().contains("the running one is into (0, 1009)"), "{}", fault_text());
    release(GPU, id(10));
    assert!(fault_text().contains("unknown (1 pools exist)"), "{}", fault_text());
    let served = bench.captured(0, PAGE_BYTES).unwrap();
    bench.end(0, Some(id(9)));
    super::end(GPU, id(9));
    assert!(fault_text().contains("no capture is running"), "{}", fault_text());
    super::begin(99, id(9));
    assert!(fault_text().contains("CUDA device 99; accepted: 0 to 63"), "{}", fault_text());
    super::end(63, id(9));
    assert!(fault_text().contains("CUDA device 63 has no heap"), "{}", fault_text());
    free(served, bench.streams[0]);
    release(GPU, id(9));
    empty_cache();
    assert_eq!(mapped_bytes(), 0);
}

/// The message of the latest failure.
fn fault_text() -> String {
    // SAFETY: this thread's own buffer, with its NUL.
    unsafe { std::ffi::CStr::from_ptr(crate::fault::last_error()) }.to_string_lossy().into_owned()
}

#[test]
fn a_failed_driver_query_refuses_the_request() {
    let bench = Bench::new(true);
    bench.begin(0, Some(id(11)));
    const NOT_PERMITTED: i32 = 800;
    bench.standin.fail("cuStreamIsCapturing", 1, 1, NOT_PERMITTED);
    let refused = bench.captured(0, PAGE_BYTES).unwrap_err();
    assert!(refused.text.contains("CUDA_ERROR_NOT_PERMITTED"), "{}", refused.text);
    bench.end(0, Some(id(11)));
    release(GPU, id(11));
    assert_eq!((arenas(), mapped_bytes()), (0, 0));
}

#[test]
fn exhausted_memory_during_a_capture_is_an_out_of_memory_error() {
    let bench = Bench::new(true);
    let kept = |bench: &Bench| bench.captured(0, 64 * PAGE_BYTES);
    bench.begin(0, Some(id(12)));
    free(kept(&bench).unwrap(), bench.streams[0]);
    bench.end(0, Some(id(12)));
    bench.begin(0, Some(id(13)));
    let refused = bench.captured(0, 100 * PAGE_BYTES).unwrap_err();
    assert!(refused.is_out_of_memory, "{}", refused.text);
    assert!(refused.text.contains("128.0 MiB kept for graphs"), "{}", refused.text);
    // A full GPU, with room in the budget, is no different.
    const OUT_OF_MEMORY: i32 = 2;
    bench.standin.fail("cuMemCreate", 1, u64::MAX / 2, OUT_OF_MEMORY);
    let refused = bench.captured(0, PAGE_BYTES).unwrap_err();
    assert!(refused.is_out_of_memory, "{}", refused.text);
    bench.standin.heal();
    free(bench.captured(0, PAGE_BYTES).unwrap(), bench.streams[0]);
    bench.end(0, Some(id(13)));
    release(GPU, id(12));
    release(GPU, id(13));
    empty_cache();
    assert_eq!((arenas(), mapped_bytes()), (0, 0));
}

/// No event can be recorded on a captured stream before the end of the capture.
#[test]
fn a_freed_block_that_a_captured_stream_uses_is_pending() {
    let bench = Bench::new(true);
    let used = bench.ordinary(PAGE_BYTES);
    bench.begin(0, Some(id(14)));
    let stream = std::ptr::without_provenance_mut(bench.streams[0]);
    // SAFETY: a live stream.
    unsafe { dormouse_torch_record_stream(std::ptr::with_exposed_provenance_mut(used), stream) };
    free(used, 0);
    let other = bench.ordinary(PAGE_BYTES);
    assert_ne!(other, used);
    empty_cache();
    let stats = || Heap::existing_gpu(GPU).unwrap().allocator().stats();
    assert_eq!(stats().pending_blocks.current, 1);
    bench.end(0, Some(id(14)));
    empty_cache();
    assert_eq!(stats().pending_blocks.current, 0);
    free(other, 0);
    release(GPU, id(14));
    empty_cache();
    assert_eq!((arenas(), mapped_bytes()), (0, 0));
}
