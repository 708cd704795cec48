//! Streams: queues of the host device, by handle.

use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use dormouse_device::host::{Event as HostEvent, HostDevice, Stream as HostStream};
use dormouse_device::{Device, DeviceError};

use crate::capture;
use crate::code::Code;
use crate::context::{self, GREATEST_PRIORITY, LEAST_PRIORITY};
use crate::entry::{Out, entry, in_host_function};
use crate::events;
use crate::legacy;
use crate::state::{Driver, check_not_lost, driver, lock, new_name};

/// `CU_STREAM_LEGACY`, another name of stream 0.
const LEGACY: usize = 1;
/// `CU_STREAM_PER_THREAD`.
const PER_THREAD: usize = 2;
/// `CU_STREAM_NON_BLOCKING`, the only flag there is.
const NON_BLOCKING: c_uint = 1;

/// A stream.
pub(crate) struct Stream {
    pub(crate) handle: usize,
    pub(crate) host: HostStream,
    /// Of the context it was created in.
    device: usize,
    pub(crate) flags: c_uint,
    priority: c_int,
    /// Number of queued works. Counted when they are in the queue: a reader of the count records behind all
    /// of them.
    given: AtomicU64,
    /// The last work, or what it waits for last, by its number among those of all streams.
    last: AtomicU64,
    /// The last work that is known to be done, because a host function behind it was called. Relaxed: it
    /// guards no other memory.
    pub(crate) passed: Arc<AtomicU64>,
    /// An event, and the number of works before it.
    tail: Mutex<Option<(u64, HostEvent)>>,
    /// How many works of this stream the legacy stream waits for.
    pub(crate) seen_by_legacy: AtomicU64,
    /// How many works of the legacy stream this stream waits for.
    pub(crate) legacy_seen: AtomicU64,
}

impl Stream {
    fn new(host: &HostDevice, handle: usize, flags: c_uint, priority: c_int) -> Result<Self, Code> {
        Ok(Self {
            handle,
            host: host.create_stream("standin").map_err(refused)?,
            device: context::current().unwrap_or(0),
            flags,
            priority,
            given: AtomicU64::new(0),
            last: AtomicU64::new(0),
            passed: Arc::default(),
            tail: Mutex::default(),
            seen_by_legacy: AtomicU64::new(0),
            legacy_seen: AtomicU64::new(0),
        })
    }

    pub(crate) fn is_legacy(&self) -> bool {
        self.handle == LEGACY
    }

    /// Whether it is ordered with the legacy stream.
    pub(crate) fn is_blocking(&self) -> bool {
        !self.is_legacy() && self.flags & NON_BLOCKING == 0
    }

    pub(crate) fn given(&self) -> u64 {
        self.given.load(Ordering::Acquire)
    }

    /// The number of the last work before what is given to it now.
    pub(crate) fn last(&self, driver: &Driver) -> u64 {
        // The legacy stream waits for others.
        if self.is_legacy() { driver.ahead.last() } else { self.last.load(Ordering::Relaxed) }
    }

    /// Says that what is given to it now is behind a work.
    pub(crate) fn follow(&self, work: u64) {
        self.last.fetch_max(work, Ordering::Relaxed);
    }

    /// Says that work is in the queue.
    pub(crate) fn count_work(&self) {
        // Release: pairs with the Acquire of the recorder.
        self.given.fetch_add(1, Ordering::Release);
    }

    /// Says that `event` was recorded behind `given` works: nothing else is left once it is reached,
    /// unless others gave work meanwhile.
    pub(crate) fn count_end(&self, given: u64, event: &HostEvent) {
        // AcqRel: as in `count_work` and `given`.
        if self.given.fetch_add(1, Ordering::AcqRel) == given {
            *lock(&self.tail) = Some((given + 1, event.clone()));
        }
    }

    /// An event behind all that was given to it, or none if that is nothing. Polling makes no new
    /// one each time: a thread that wakes up slower than it is asked would never be found idle.
    fn tail(&self, driver: &Driver) -> Result<Option<HostEvent>, Code> {
        let waits_anew = self.is_legacy() && legacy::order(driver, self)?;
        let given = self.given();
        if !waits_anew {
            match &*lock(&self.tail) {
                Some((count, event)) if *count == given => return Ok(Some(event.clone())),
                None if given == 0 => return Ok(None),
                _ => {}
            }
        }
        let event = driver.host.record(&self.host).map_err(refused)?;
        *lock(&self.tail) = Some((given, event.clone()));
        Ok(Some(event))
    }
}

/// All streams.
pub(crate) struct Streams {
    pub(crate) legacy: Arc<Stream>,
    created: Mutex<BTreeMap<usize, Arc<Stream>>>,
    /// The ends of destroyed streams that may still have work.
    ends: Mutex<Vec<HostEvent>>,
}

impl Streams {
    pub(crate) fn new(host: &HostDevice) -> Result<Self, Code> {
        let legacy = Arc::new(Stream::new(host, LEGACY, 0, LEAST_PRIORITY)?);
        Ok(Self { legacy, created: Mutex::default(), ends: Mutex::default() })
    }

    pub(crate) fn find(&self, handle: usize) -> Result<Arc<Stream>, Code> {
        match handle {
            0 | LEGACY => Ok(Arc::clone(&self.legacy)),
            PER_THREAD => Err(Code::NOT_SUPPORTED),
            _ => lock(&self.created).get(&handle).cloned().ok_or(Code::INVALID_HANDLE),
        }
    }

    /// Streams that were created and not destroyed.
    pub(crate) fn count(&self) -> usize {
        lock(&self.created).len()
    }

    /// Those that the legacy stream is ordered with.
    pub(crate) fn blocking(&self) -> Vec<Arc<Stream>> {
        lock(&self.created).values().filter(|stream| stream.is_blocking()).cloned().collect()
    }
}

/// What the host device refuses is what the system refuses it.
pub(crate) fn refused(_error: DeviceError) -> Code {
    Code::OPERATING_SYSTEM
}

/// Puts `work` at the end of a stream; where the stream is being captured, into its graph.
pub(crate) fn give(
    driver: &Driver,
    stream: &Stream,
    work: impl Fn() + Send + Sync + 'static,
) -> Result<(), Code> {
    if let Some(mark) = capture::note_work(driver, stream)? {
        capture::keep(driver, &mark, Arc::new(work));
        return Ok(());
    }
    legacy::order(driver, stream)?;
    stream.follow(driver.ahead.give());
    let timed = move |_| {
        // Streams have threads in the process that made the driver only.
        if let Ok(driver) = crate::state::driver() {
            driver.ahead.work();
        }
        work();
    };
    driver.host.callback(&stream.host, Box::new(timed)).map_err(refused)?;
    stream.count_work();
    Ok(())
}

/// Whether the host device has done what is before `event`.
pub(crate) fn is_done(driver: &Driver, event: &HostEvent) -> bool {
    if driver.ahead.is_exact() {
        return driver.host.synchronize(event).is_ok();
    }
    driver.host.query(event) == Ok(true)
}

/// Waits for all that was given to a stream.
pub(crate) fn synchronize(driver: &Driver, stream: &Stream) -> Result<(), Code> {
    driver.ahead.wait(stream.last(driver));
    if let Some(tail) = stream.tail(driver)? {
        driver.host.synchronize(&tail).map_err(refused)?;
    }
    check_not_lost()
}

/// Waits for all that was given to any stream.
pub(crate) fn synchronize_all(driver: &Driver) -> Result<(), Code> {
    driver.ahead.wait(driver.ahead.last());
    let mut streams: Vec<Arc<Stream>> = lock(&driver.streams.created).values().cloned().collect();
    streams.push(Arc::clone(&driver.streams.legacy));
    let mut tails = std::mem::take(&mut *lock(&driver.streams.ends));
    for stream in streams {
        tails.extend(stream.tail(driver)?);
    }
    for tail in tails {
        driver.host.synchronize(&tail).map_err(refused)?;
    }
    check_not_lost()
}

fn create(handle: Out<usize>, flags: c_uint, priority: c_int) -> Result<(), Code> {
    handle.check()?;
    if flags & !NON_BLOCKING != 0 {
        return Err(Code::INVALID_VALUE);
    }
    let priority = priority.clamp(GREATEST_PRIORITY, LEAST_PRIORITY);
    let driver = driver()?;
    let stream = Stream::new(&driver.host, new_name(), flags, priority)?;
    handle.put(stream.handle)?;
    lock(&driver.streams.created).insert(stream.handle, Arc::new(stream));
    Ok(())
}

entry! { Context, fn cuStreamCreate(stream: Out<usize>, flags: c_uint) {
    create(stream, flags, LEAST_PRIORITY)
}}

entry! { Context, fn cuStreamCreateWithPriority(
    stream: Out<usize>,
    flags: c_uint,
    priority: c_int,
) {
    create(stream, flags, priority)
}}

entry! { Context, fn cuStreamDestroy_v2(stream: usize) {
    let driver = driver()?;
    let stream = driver.streams.find(stream)?;
    if stream.is_legacy() {
        return Err(Code::INVALID_HANDLE);
    }
    lock(&driver.streams.created).remove(&stream.handle).ok_or(Code::INVALID_HANDLE)?;
    capture::abandon(driver, &stream);
    legacy::follow(driver, &stream)?;
    if let Some(end) = stream.tail(driver)? {
        let mut ends = lock(&driver.streams.ends);
        ends.retain(|end| driver.host.query(end) == Ok(false));
        ends.push(end);
    }
    // The last to let go of a queue waits for its work, unless it is the queue itself.
    let last = stream.host.clone();
    driver.host.callback(&stream.host, Box::new(move |_| drop(last))).map_err(refused)
}}

entry! { Context, fn cuStreamQuery(stream: usize) {
    let driver = driver()?;
    let stream = driver.streams.find(stream)?;
    capture::refuse_captured(driver, &stream)?;
    capture::refuse_unsafe()?;
    driver.ahead.ask_stream();
    let tail = stream.tail(driver)?;
    let passed = stream.passed.load(Ordering::Relaxed);
    let is_reached = driver.ahead.is_reached(stream.last(driver), passed);
    if !is_reached || tail.is_some_and(|tail| !is_done(driver, &tail)) {
        return Err(Code::NOT_READY);
    }
    // Work that was just done may have lost the device.
    check_not_lost()
}}

entry! { Context, fn cuStreamSynchronize(stream: usize) {
    let driver = driver()?;
    let stream = driver.streams.find(stream)?;
    capture::refuse_captured(driver, &stream)?;
    capture::refuse_unsafe()?;
    synchronize(driver, &stream)
}}

entry! { Context, fn cuStreamWaitEvent(stream: usize, event: usize, flags: c_uint) {
    let driver = driver()?;
    let stream = driver.streams.find(stream)?;
    events::wait(driver, &stream, &*events::find(driver, event)?, flags)
}}

entry! { Context, fn cuStreamGetCtx(stream: usize, context: Out<usize>) {
    let stream = driver()?.streams.find(stream)?;
    let device = if stream.is_legacy() { context::current().unwrap_or(0) } else { stream.device };
    context.put(context::handle(device))
}}

entry! { Context, fn cuStreamGetPriority(stream: usize, priority: Out<c_int>) {
    priority.put(driver()?.streams.find(stream)?.priority)
}}

entry! { Context, fn cuStreamGetFlags(stream: usize, flags: Out<c_uint>) {
    flags.put(driver()?.streams.find(stream)?.flags)
}}

entry! { Context, fn cuStreamGetId(stream: usize, id: Out<u64>) {
    // Handles are never used twice, so they are ids as well.
    id.put(driver()?.streams.find(stream)?.handle as u64)
}}

/// `CUhostFn`.
type HostFunction = Option<unsafe extern "C" fn(*mut c_void)>;

entry! { Context, fn cuLaunchHostFunc(stream: usize, function: HostFunction, data: usize) {
    let driver = driver()?;
    let stream = driver.streams.find(stream)?;
    let function = function.ok_or(Code::INVALID_VALUE)?;
    let (passed, before) = (Arc::clone(&stream.passed), stream.last(driver));
    give(driver, &stream, move || {
        passed.fetch_max(before, Ordering::Relaxed);
        // The driver does not call it either once the context is lost.
        if check_not_lost().is_ok() {
            // SAFETY: the caller handed function and argument over to be called so.
            in_host_function(|| unsafe { function(data as *mut c_void) });
        }
    })
}}
