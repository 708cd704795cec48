//! Kernels that run beside a measurement, and how long launches of another thread take meanwhile.

use std::ffi::c_void;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use std::sync::Arc;

use crate::plain::Plain;

/// A kernel that lasts as many nanoseconds as its argument says, on all but the smallest of GPUs.
/// PTX of an old version: every driver that maps memory translates it.
const SPIN_PTX: &[u8] = b".version 7.0
.target sm_80
.address_size 64
.visible .entry spin(.param .u64 spin_ns)
{
    .reg .u64 %end, %now;
    .reg .pred %early;
    ld.param.u64 %now, [spin_ns];
    mov.u64 %end, %globaltimer;
    add.u64 %end, %end, %now;
again:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %early, %now, %end;
    @%early bra again;
    ret;
}
\0";
/// Blocks and threads of a kernel that occupies every SM in part, so that another can start.
const BUSY_GRID: (u32, u32) = (128, 64);
const PROBE_GRID: (u32, u32) = (1, 32);
/// Between launches of the probe.
const PROBE_PAUSE: Duration = Duration::from_micros(200);
/// Launches that a probe remembers.
const PROBES_MAX: usize = 100_000;

type Launch = unsafe extern "C" fn(
    usize,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    u32,
    usize,
    *mut *mut c_void,
    *mut *mut c_void,
) -> i32;

/// The spin kernel, loaded into the primary context for the life of the process.
#[derive(Clone, Copy)]
pub(crate) struct Spin {
    function: usize,
    launch: Launch,
}

impl Spin {
    /// Returns the driver's code if it does not translate the kernel.
    pub(crate) fn load(plain: &Plain) -> Result<Self, i32> {
        let (mut module, mut function) = (0_usize, 0_usize);
        // SAFETY: the entry points' types; each writes one handle and reads NUL-terminated text.
        unsafe {
            let load: unsafe extern "C" fn(*mut usize, *const u8) -> i32 =
                plain.entry(c"cuModuleLoadData");
            let find: unsafe extern "C" fn(*mut usize, usize, *const i8) -> i32 =
                plain.entry(c"cuModuleGetFunction");
            match load(&raw mut module, SPIN_PTX.as_ptr()) {
                0 => assert_eq!(find(&raw mut function, module, c"spin".as_ptr()), 0),
                code => return Err(code),
            }
            Ok(Self { function, launch: plain.entry(c"cuLaunchKernel") })
        }
    }

    /// Queues a kernel of `ns`.
    fn queue(&self, (blocks, threads): (u32, u32), mut ns: u64, stream: usize) {
        let mut parameters = [(&raw mut ns).cast::<c_void>()];
        let (none, parameters) = (std::ptr::null_mut(), parameters.as_mut_ptr());
        // SAFETY: a live function with one parameter, which the driver copies, and a live stream.
        let code = unsafe {
            (self.launch)(self.function, blocks, 1, 1, threads, 1, 1, 0, stream, parameters, none)
        };
        assert_eq!(code, 0, "a launch");
    }
}

/// A thread that works until it is told to end.
struct Worker<T> {
    ends: Arc<AtomicBool>,
    thread: JoinHandle<T>,
}

impl<T: Send + 'static> Worker<T> {
    fn start(work: impl FnOnce(&AtomicBool) -> T + Send + 'static) -> Self {
        let ends = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&ends);
        Self { ends, thread: thread::spawn(move || work(&told)) }
    }

    fn end(self) -> T {
        // Relaxed: it guards nothing but itself.
        self.ends.store(true, Ordering::Relaxed);
        self.thread.join().expect("the thread beside a measurement")
    }
}

/// Runs `work` while kernels of `kernel_ns` run one after another on each of two streams, so that one
/// always runs.
pub(crate) fn beside<T>(spin: Spin, kernel_ns: u64, work: impl FnOnce() -> T) -> T {
    let feeder = Worker::start(move |ends| {
        let plain = Plain::open();
        let streams = [plain.stream(), plain.stream()];
        spin.queue(BUSY_GRID, kernel_ns / 2, streams[0]);
        while !ends.load(Ordering::Relaxed) {
            for (one, other) in [(0, 1), (1, 0)] {
                spin.queue(BUSY_GRID, kernel_ns, streams[other]);
                plain.synchronize(streams[one]);
            }
        }
        streams.iter().for_each(|stream| plain.synchronize(*stream));
    });
    let done = work();
    feeder.end();
    done
}

/// Microseconds of launches by another thread: of the call, and until its kernel has ended.
#[derive(Default)]
pub(crate) struct Launches {
    pub(crate) call: Vec<f64>,
    pub(crate) done: Vec<f64>,
}

/// Runs `work` while another thread launches empty kernels on a stream of its own.
pub(crate) fn probed<T>(spin: Spin, work: impl FnOnce() -> T) -> (T, Launches) {
    let probe = Worker::start(move |ends| {
        let plain = Plain::open();
        let (stream, mut seen) = (plain.stream(), Launches::default());
        // At least one, however short the work is.
        while seen.call.is_empty()
            || (!ends.load(Ordering::Relaxed) && seen.call.len() < PROBES_MAX)
        {
            let start = Instant::now();
            spin.queue(PROBE_GRID, 0, stream);
            seen.call.push(start.elapsed().as_secs_f64() * 1e6);
            plain.synchronize(stream);
            seen.done.push(start.elapsed().as_secs_f64() * 1e6);
            thread::sleep(PROBE_PAUSE);
        }
        seen
    });
    let done = work();
    (done, probe.end())
}
