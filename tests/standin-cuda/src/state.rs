//! The driver's state, from `cuInit` on.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{
    Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard,
};
use std::time::Duration;

use dormouse_device::host::{HostConfig, HostDevice, os_page_bytes};

use crate::ahead::{Ahead, RUN_AHEAD_MAX};
use crate::capture::Captures;
use crate::code::Code;
use crate::cost::{COST_NS_MAX, Costs};
use crate::device_info::DEVICES_MAX;
use crate::entry::entry;
use crate::events::Event;
use crate::faults;
use crate::graphs::Graphs;
use crate::modules::Modules;
use crate::space::Space;
use crate::streams::Streams;

const GRANULARITY_VARIABLE: &str = "STANDIN_CUDA_GRANULARITY_BYTES";
const DEVICES_VARIABLE: &str = "STANDIN_CUDA_DEVICES";
const TOTAL_VARIABLE: &str = "STANDIN_CUDA_TOTAL_BYTES";
/// Whether there are bytes at device addresses.
const RUN_AHEAD_VARIABLE: &str = "STANDIN_CUDA_RUN_AHEAD";
const EXACT_VARIABLE: &str = "STANDIN_CUDA_EXACT";
const WORK_VARIABLE: &str = "STANDIN_CUDA_WORK_NS";
const BACKED_VARIABLE: &str = "STANDIN_CUDA_BACKED";
const COST_VARIABLE: &str = "STANDIN_CUDA_COST_NS";
/// A file with a table of costs.
const COSTS_VARIABLE: &str = "STANDIN_CUDA_COSTS";
/// What GPUs of the last years have.
const GRANULARITY_BYTES: usize = 2 << 20;
const GRANULARITY_BYTES_MIN: usize = 4096;
const TOTAL_BYTES: usize = 8 << 30;
/// More than any machine has: sums of sizes stay far from overflow.
const TOTAL_BYTES_MAX: usize = 1 << 46;

/// Everything behind the entry points.
pub(crate) struct Driver {
    pub(crate) granularity: usize,
    pub(crate) devices: usize,
    pub(crate) total_bytes: usize,
    pub(crate) costs: Costs,
    pub(crate) ahead: Ahead,
    /// Streams and events are its.
    pub(crate) host: HostDevice,
    memory: RwLock<Space>,
    pub(crate) streams: Streams,
    pub(crate) events: Mutex<BTreeMap<usize, Arc<Event>>>,
    pub(crate) modules: Mutex<Modules>,
    pub(crate) captures: Mutex<Captures>,
    pub(crate) graphs: Mutex<Graphs>,
    /// A forked child has the memory, but not the threads.
    process: u32,
}

static DRIVER: OnceLock<Result<Driver, Code>> = OnceLock::new();
/// The code of the loss, or zero.
static LOST: AtomicI32 = AtomicI32::new(0);
/// Unique for ever (D3). They look like addresses, and are none.
static NEXT_NAME: AtomicU64 = AtomicU64::new(0x5d00_0000_0000);

/// The driver, once `cuInit` has made it, in the process where it did.
pub(crate) fn driver() -> Result<&'static Driver, Code> {
    match DRIVER.get() {
        Some(Ok(driver)) if driver.process == std::process::id() => Ok(driver),
        _ => Err(Code::NOT_INITIALIZED),
    }
}

/// Takes a lock whatever a panicking holder did: D2 keeps what it guards whole.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A handle value that was never given out.
pub(crate) fn new_name() -> usize {
    NEXT_NAME.fetch_add(16, Ordering::Relaxed) as usize
}

/// From here on every entry point returns `code`. The first loss stays.
pub(crate) fn lose(code: Code) {
    // Relaxed: it guards no other memory.
    let _already = LOST.compare_exchange(0, code.0, Ordering::Relaxed, Ordering::Relaxed);
}

/// Takes a loss back, which no driver does: for tests.
pub(crate) fn recover() {
    LOST.store(0, Ordering::Relaxed);
}

/// Returns the code of the loss, if there was one.
pub(crate) fn check_not_lost() -> Result<(), Code> {
    match LOST.load(Ordering::Relaxed) {
        0 => Ok(()),
        code => Err(Code(code)),
    }
}

impl Driver {
    fn new() -> Result<Self, Code> {
        let granularity =
            read(GRANULARITY_VARIABLE, GRANULARITY_BYTES, "a power of two >= 4096", |bytes| {
                bytes.is_power_of_two() && bytes >= GRANULARITY_BYTES_MIN.max(os_page_bytes())
            })?;
        let total_bytes = read(TOTAL_VARIABLE, TOTAL_BYTES, "1 byte to 64 TiB", |bytes| {
            (1..=TOTAL_BYTES_MAX).contains(&bytes)
        })?;
        let devices = read(DEVICES_VARIABLE, 1, "1 to 8 devices", |devices| {
            (1..=DEVICES_MAX).contains(&devices)
        })?;
        let cost_ns = read(COST_VARIABLE, 0, "0 to 1000000000 ns", |ns| ns as u64 <= COST_NS_MAX)?;
        let mut costs = Costs::new(Duration::from_nanos(cost_ns as u64));
        if let Some(path) = std::env::var_os(COSTS_VARIABLE) {
            costs
                .read_table(path.as_ref())
                .map_err(|why| complain(&format!("{COSTS_VARIABLE}={why}")))?;
        }
        let works = read(RUN_AHEAD_VARIABLE, 0, "0 to 1048576 works", |it| it <= RUN_AHEAD_MAX)?;
        let work_ns = read(WORK_VARIABLE, 0, "0 to 1000000000 ns", |ns| ns as u64 <= COST_NS_MAX)?;
        let is_exact = read(EXACT_VARIABLE, 0, "0 or 1", |exact| exact <= 1)? == 1;
        let is_backed = read(BACKED_VARIABLE, 1, "0 or 1", |backed| backed <= 1)? == 1;
        if let Some(wrong) = faults::read_environment() {
            return Err(complain(wrong));
        }
        // Only its streams are used: it needs no memory.
        let host = HostDevice::new(HostConfig::new(os_page_bytes(), os_page_bytes() as u64))
            .map_err(|_| Code::OPERATING_SYSTEM)?;
        Ok(Self {
            granularity,
            devices,
            total_bytes,
            costs,
            ahead: Ahead::new(works as u64, Duration::from_nanos(work_ns as u64), is_exact),
            streams: Streams::new(&host)?,
            host,
            memory: RwLock::new(Space::new(granularity, total_bytes, is_backed)?),
            events: Mutex::default(),
            modules: Mutex::default(),
            captures: Mutex::default(),
            graphs: Mutex::default(),
            process: std::process::id(),
        })
    }

    /// The memory as it is, kept so while the guard lives.
    pub(crate) fn memory(&self) -> RwLockReadGuard<'_, Space> {
        self.memory.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// The memory, to change it.
    pub(crate) fn memory_mut(&self) -> RwLockWriteGuard<'_, Space> {
        self.memory.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Reads a size from the environment.
fn read(
    name: &str,
    unset: usize,
    accepted: &str,
    is_accepted: impl Fn(usize) -> bool,
) -> Result<usize, Code> {
    let Some(value) = std::env::var_os(name) else { return Ok(unset) };
    let text = value.to_string_lossy();
    let bytes = text.parse().ok().filter(|bytes| is_accepted(*bytes));
    bytes.ok_or_else(|| complain(&format!("{name}={text:?}: accepted is {accepted}")))
}

/// Says on standard error why `cuInit` fails: a code alone would not.
fn complain(what: &str) -> Code {
    eprintln!("standin-cuda: {what}");
    Code::INVALID_VALUE
}

entry! { Driver, fn cuInit(flags: c_uint) {
    if flags != 0 {
        return Err(Code::INVALID_VALUE);
    }
    DRIVER.get_or_init(Driver::new).as_ref().map_err(|code| *code)?;
    driver().map(|_| ())
}}

/// The type of codes is what `CUresult` is in C.
const _: () = assert!(size_of::<c_int>() == size_of::<cudarc::driver::sys::CUresult>());
