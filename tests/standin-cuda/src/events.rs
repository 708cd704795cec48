//! Events: handles whose meaning is replaced by each record.

use std::ffi::c_uint;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::time::Instant;

use dormouse_device::Device;
use dormouse_device::host::Event as HostEvent;

use crate::capture::{self, Mark};
use crate::code::Code;
use crate::entry::{Out, entry};
use crate::hold::{self, Gate};
use crate::legacy;
use crate::state::{Driver, check_not_lost, driver, lock, new_name};
use crate::streams::{Stream, is_done, refused};

/// `CU_EVENT_BLOCKING_SYNC`, `CU_EVENT_DISABLE_TIMING` and `CU_EVENT_INTERPROCESS`.
const FLAGS: c_uint = 7;
const DISABLE_TIMING: c_uint = 2;
const INTERPROCESS: c_uint = 4;
/// `CU_EVENT_RECORD_EXTERNAL` and `CU_EVENT_WAIT_EXTERNAL`: a node of a graph, for captures only.
const EXTERNAL: c_uint = 1;

/// An event.
pub(crate) struct Event {
    is_timed: bool,
    meaning: Mutex<Meaning>,
}

/// What the last record meant. Waits keep what they found.
#[derive(Clone)]
enum Meaning {
    Never,
    At(Point),
    Captured(Mark),
}

/// A point in a stream.
#[derive(Clone)]
struct Point {
    reached: HostEvent,
    /// The hold it was recorded in.
    gate: Option<Arc<Gate>>,
    /// The work before it, by number.
    work: u64,
    /// [`Stream::passed`] of its stream.
    passed: Arc<AtomicU64>,
    time: Arc<OnceLock<Instant>>,
}

impl Point {
    fn is_complete(&self, driver: &Driver) -> bool {
        self.gate.as_ref().is_none_or(|gate| gate.is_open())
            && driver.ahead.is_reached(self.work, self.passed.load(Ordering::Relaxed))
            && is_done(driver, &self.reached)
    }

    fn wait(&self, driver: &Driver) -> Result<(), Code> {
        if let Some(gate) = &self.gate {
            gate.wait();
        }
        driver.ahead.wait(self.work);
        driver.host.synchronize(&self.reached).map_err(refused)
    }
}

impl Event {
    fn meaning(&self) -> Meaning {
        lock(&self.meaning).clone()
    }
}

pub(crate) fn find(driver: &Driver, event: usize) -> Result<Arc<Event>, Code> {
    lock(&driver.events).get(&event).cloned().ok_or(Code::INVALID_HANDLE)
}

/// Records `event` behind all that was given to `stream`.
fn record(driver: &Driver, event: &Event, stream: &Stream, flags: c_uint) -> Result<(), Code> {
    let mark = capture::note_work(driver, stream)?;
    match (mark, flags) {
        (Some(mark), 0) => {
            *lock(&event.meaning) = Meaning::Captured(mark);
            return Ok(());
        }
        (Some(_), EXTERNAL) => return Ok(()),
        (None, 0) => {}
        _ => return Err(Code::INVALID_VALUE),
    }
    legacy::order(driver, stream)?;
    let gate = hold::current();
    let time = Arc::new(OnceLock::new());
    if event.is_timed {
        let stamped = Arc::clone(&time);
        let stamp = move |_| {
            stamped.get_or_init(Instant::now);
        };
        driver.host.callback(&stream.host, Box::new(stamp)).map_err(refused)?;
    }
    let (given, work) = (stream.given(), stream.last(driver));
    let reached = driver.host.record(&stream.host).map_err(refused)?;
    stream.count_end(given, &reached);
    let passed = Arc::clone(&stream.passed);
    *lock(&event.meaning) = Meaning::At(Point { reached, gate, work, passed, time });
    Ok(())
}

/// Lets later work of `stream` wait for what `event` means now.
pub(crate) fn wait(
    driver: &Driver,
    stream: &Stream,
    event: &Event,
    flags: c_uint,
) -> Result<(), Code> {
    let is_captured = capture::is_captured(driver, stream);
    match flags {
        0 => {}
        EXTERNAL if is_captured => return capture::note_work(driver, stream).map(|_| ()),
        _ => return Err(Code::INVALID_VALUE),
    }
    let point = match event.meaning() {
        Meaning::Never => return Ok(()),
        Meaning::Captured(mark) => return capture::join(driver, stream, &mark),
        Meaning::At(_) if is_captured => return Err(capture::isolate(driver, stream)),
        Meaning::At(point) => point,
    };
    capture::note_work(driver, stream)?;
    legacy::order(driver, stream)?;
    if let Some(gate) = point.gate.filter(|gate| !gate.is_open()) {
        driver.host.callback(&stream.host, Box::new(move |_| gate.wait())).map_err(refused)?;
    }
    driver.host.wait(&stream.host, &point.reached).map_err(refused)?;
    stream.follow(point.work);
    stream.count_work();
    Ok(())
}

/// Milliseconds from one event to another.
fn elapsed(milliseconds: Out<f32>, start: usize, end: usize) -> Result<(), Code> {
    let driver = driver()?;
    milliseconds.check()?;
    let times = [find(driver, start)?, find(driver, end)?].map(|event| match event.meaning() {
        Meaning::At(point) if event.is_timed => {
            if !point.is_complete(driver) {
                return Err(Code::NOT_READY);
            }
            point.time.get().copied().ok_or(Code::NOT_READY)
        }
        Meaning::Captured(_) => Err(Code::CAPTURED_EVENT),
        _ => Err(Code::INVALID_HANDLE),
    });
    let [start, end] = times;
    let (start, end) = (start?, end?);
    let passed = match end.checked_duration_since(start) {
        Some(passed) => passed.as_secs_f32(),
        None => -start.duration_since(end).as_secs_f32(),
    };
    milliseconds.put(passed * 1e3)
}
entry! { Context, fn cuEventCreate(event: Out<usize>, flags: c_uint) {
    event.check()?;
    let is_timed = flags & DISABLE_TIMING == 0;
    if flags & !FLAGS != 0 || (flags & INTERPROCESS != 0 && is_timed) {
        return Err(Code::INVALID_VALUE);
    }
    let handle = new_name();
    let made = Arc::new(Event { is_timed, meaning: Mutex::new(Meaning::Never) });
    lock(&driver()?.events).insert(handle, made);
    event.put(handle)
}}

entry! { Context, fn cuEventDestroy_v2(event: usize) {
    lock(&driver()?.events).remove(&event).map(|_| ()).ok_or(Code::INVALID_HANDLE)
}}

entry! { Context, fn cuEventRecord(event: usize, stream: usize) {
    let driver = driver()?;
    let stream = driver.streams.find(stream)?;
    capture::note_record(driver, &stream)?;
    record(driver, &*find(driver, event)?, &stream, 0)
}}

entry! { Context, fn cuEventRecordWithFlags(event: usize, stream: usize, flags: c_uint) {
    let driver = driver()?;
    record(driver, &*find(driver, event)?, &*driver.streams.find(stream)?, flags)
}}

entry! { Context, fn cuEventQuery(event: usize) {
    let driver = driver()?;
    let event = find(driver, event)?;
    capture::refuse_unsafe()?;
    match event.meaning() {
        Meaning::Captured(mark) => Err(capture::refuse_mark(driver, &mark)),
        Meaning::At(point) if !point.is_complete(driver) => {
            if point.gate.as_ref().is_none_or(|gate| gate.is_open()) {
                driver.ahead.ask(point.work);
            }
            Err(Code::NOT_READY)
        }
        // Work before it may have lost the device meanwhile.
        _ => check_not_lost(),
    }
}}

entry! { Context, fn cuEventSynchronize(event: usize) {
    let driver = driver()?;
    let event = find(driver, event)?;
    capture::refuse_unsafe()?;
    match event.meaning() {
        Meaning::Captured(mark) => return Err(capture::refuse_mark(driver, &mark)),
        Meaning::At(point) => point.wait(driver)?,
        Meaning::Never => {}
    }
    check_not_lost()
}}

entry! { Context, fn cuEventElapsedTime(milliseconds: Out<f32>, start: usize, end: usize) {
    elapsed(milliseconds, start, end)
}}

// The same since CUDA 13, under the name programs of then ask for.
entry! { Context, fn cuEventElapsedTime_v2(milliseconds: Out<f32>, start: usize, end: usize) {
    elapsed(milliseconds, start, end)
}}
