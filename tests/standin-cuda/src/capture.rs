//! Streams being captured into a graph: what is given to them is kept for it and not done, and what
//! would break the capture is refused and breaks it.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use cudarc::driver::sys::{CUstreamCaptureMode_enum as Mode, CUstreamCaptureStatus_enum as Status};

use crate::code::Code;
use crate::entry::{Out, entry};
use crate::graphs::Work;
use crate::state::{Driver, driver, lock, new_name};
use crate::streams::Stream;

const GLOBAL: c_uint = Mode::CU_STREAM_CAPTURE_MODE_GLOBAL as c_uint;
const RELAXED: c_uint = Mode::CU_STREAM_CAPTURE_MODE_RELAXED as c_uint;

thread_local! {
    /// The mode this thread has exchanged to.
    static MODE: Cell<c_uint> = const { Cell::new(GLOBAL) };
    /// This thread's number, or zero before it is asked for.
    static THREAD: Cell<u64> = const { Cell::new(0) };
}

/// Handle of the stream whose capture begins at its next `cuEventRecord`; 0 for none.
static BEGINS_AT_RECORD: AtomicUsize = AtomicUsize::new(0);

/// The capture of `stream` begins at its next `cuEventRecord`, as if another thread had been faster. 0 takes that back.
pub(crate) fn begin_at_record(stream: usize) {
    BEGINS_AT_RECORD.store(stream, Ordering::SeqCst);
}

/// Begins the capture that was to begin at this record.
pub(crate) fn note_record(driver: &Driver, stream: &Stream) -> Result<(), Code> {
    let order = (Ordering::SeqCst, Ordering::SeqCst);
    if stream.is_legacy()
        || BEGINS_AT_RECORD.compare_exchange(stream.handle, 0, order.0, order.1).is_err()
    {
        return Ok(());
    }
    begin(driver, stream, RELAXED)
}

/// Captures that were begun and not ended, by id.
#[derive(Default)]
pub(crate) struct Captures {
    last_id: u64,
    active: BTreeMap<u64, Capture>,
}

struct Capture {
    origin: usize,
    mode: c_uint,
    thread: u64,
    is_invalid: bool,
    graph: usize,
    works: Vec<Work>,
    members: BTreeMap<usize, Member>,
}

/// A stream that takes part in a capture.
struct Member {
    is_blocking: bool,
    /// Works it was given since it takes part.
    given: u64,
    /// How many of them another stream of the capture waits for.
    joined: u64,
}

/// What an event recorded in a capture means.
#[derive(Clone, Copy)]
pub(crate) struct Mark {
    capture: u64,
    stream: usize,
    given: u64,
}

impl Captures {
    fn of(&mut self, stream: &Stream) -> Option<(u64, &mut Capture)> {
        let found = self.active.iter_mut();
        found
            .map(|(id, capture)| (*id, capture))
            .find(|(_, capture)| capture.members.contains_key(&stream.handle))
    }

    /// Captures that work of the legacy stream would become part of.
    fn implicit(&mut self) -> impl Iterator<Item = &mut Capture> {
        let has_blocking =
            |capture: &&mut Capture| capture.members.values().any(|member| member.is_blocking);
        self.active.values_mut().filter(has_blocking)
    }
}

/// A number of the calling thread that no other has.
fn this_thread() -> u64 {
    static LAST: AtomicU64 = AtomicU64::new(0);
    if THREAD.get() == 0 {
        THREAD.set(LAST.fetch_add(1, Ordering::Relaxed) + 1);
    }
    THREAD.get()
}

fn check_mode(mode: c_uint) -> Result<(), Code> {
    if mode <= RELAXED { Ok(()) } else { Err(Code::INVALID_VALUE) }
}

/// Refuses a call that is unsafe during the captures that run, and invalidates those.
pub(crate) fn refuse_unsafe() -> Result<(), Code> {
    let (mode, thread) = (MODE.get(), this_thread());
    let mut outcome = Ok(());
    for capture in lock(&driver()?.captures).active.values_mut() {
        let is_own = capture.thread == thread && capture.mode != RELAXED;
        let is_refused = match mode {
            GLOBAL => is_own || capture.mode == GLOBAL,
            RELAXED => false,
            _ => is_own,
        };
        if is_refused {
            capture.is_invalid = true;
            outcome = Err(Code::CAPTURE_UNSUPPORTED);
        }
    }
    outcome
}

/// Refuses to look at a stream that is being captured, and invalidates the capture.
pub(crate) fn refuse_captured(driver: &Driver, stream: &Stream) -> Result<(), Code> {
    match lock(&driver.captures).of(stream) {
        None => Ok(()),
        Some((_, capture)) => {
            capture.is_invalid = true;
            Err(Code::CAPTURE_UNSUPPORTED)
        }
    }
}

/// Counts work given to a stream that is being captured; `None` if it is not, and the work is to
/// be done.
pub(crate) fn note_work(driver: &Driver, stream: &Stream) -> Result<Option<Mark>, Code> {
    let mut captures = lock(&driver.captures);
    if stream.is_legacy() {
        let mut outcome = Ok(None);
        for capture in captures.implicit() {
            capture.is_invalid = true;
            outcome = Err(Code::CAPTURE_IMPLICIT);
        }
        return outcome;
    }
    let Some((id, capture)) = captures.of(stream) else { return Ok(None) };
    if capture.is_invalid {
        return Err(Code::CAPTURE_INVALIDATED);
    }
    let member = capture.members.get_mut(&stream.handle).ok_or(Code::UNKNOWN)?;
    member.given += 1;
    Ok(Some(Mark { capture: id, stream: stream.handle, given: member.given }))
}

/// Keeps what a stream was given for the graph of its capture.
pub(crate) fn keep(driver: &Driver, mark: &Mark, work: Work) {
    if let Some(capture) = lock(&driver.captures).active.get_mut(&mark.capture) {
        capture.works.push(work);
    }
}

pub(crate) fn is_captured(driver: &Driver, stream: &Stream) -> bool {
    lock(&driver.captures).of(stream).is_some()
}

/// A captured stream was to wait for work outside: that invalidates the capture.
pub(crate) fn isolate(driver: &Driver, stream: &Stream) -> Code {
    if let Some((_, capture)) = lock(&driver.captures).of(stream) {
        capture.is_invalid = true;
    }
    Code::CAPTURE_ISOLATION
}

/// Refuses to look at a captured event, and invalidates its capture.
pub(crate) fn refuse_mark(driver: &Driver, mark: &Mark) -> Code {
    if let Some(capture) = lock(&driver.captures).active.get_mut(&mark.capture) {
        capture.is_invalid = true;
    }
    Code::CAPTURED_EVENT
}

/// A stream waits for captured work: from then on it takes part in the capture.
pub(crate) fn join(driver: &Driver, stream: &Stream, mark: &Mark) -> Result<(), Code> {
    let mut captures = lock(&driver.captures);
    let other = captures.of(stream).map(|(id, _)| id).filter(|id| *id != mark.capture);
    let refused = match other {
        Some(other) => {
            captures.active.get_mut(&other).ok_or(Code::UNKNOWN)?.is_invalid = true;
            Some(Code::CAPTURE_MERGE)
        }
        None if stream.is_legacy() => Some(Code::CAPTURE_IMPLICIT),
        None => None,
    };
    let capture = captures.active.get_mut(&mark.capture).ok_or(Code::CAPTURED_EVENT)?;
    if let Some(code) = refused {
        capture.is_invalid = true;
        return Err(code);
    }
    if capture.is_invalid {
        return Err(Code::CAPTURE_INVALIDATED);
    }
    let is_blocking = stream.is_blocking();
    let fresh = Member { is_blocking, given: 0, joined: 0 };
    capture.members.entry(stream.handle).or_insert(fresh).given += 1;
    if let Some(ahead) = capture.members.get_mut(&mark.stream) {
        ahead.joined = ahead.joined.max(mark.given);
    }
    Ok(())
}

/// A stream is destroyed: a capture that it began is gone, another one is invalid.
pub(crate) fn abandon(driver: &Driver, stream: &Stream) {
    let mut captures = lock(&driver.captures);
    let Some((id, capture)) = captures.of(stream) else { return };
    capture.is_invalid = true;
    if capture.origin == stream.handle {
        captures.active.remove(&id);
    }
}

/// Status, id and graph of a stream's capture.
fn status(driver: &Driver, stream: usize) -> Result<(Status, u64, usize), Code> {
    let stream = driver.streams.find(stream)?;
    let mut captures = lock(&driver.captures);
    if stream.is_legacy() && captures.implicit().next().is_some() {
        return Err(Code::CAPTURE_IMPLICIT);
    }
    Ok(match captures.of(&stream) {
        None => (Status::CU_STREAM_CAPTURE_STATUS_NONE, 0, 0),
        Some((_, capture)) if capture.is_invalid => {
            (Status::CU_STREAM_CAPTURE_STATUS_INVALIDATED, 0, 0)
        }
        Some((id, capture)) => (Status::CU_STREAM_CAPTURE_STATUS_ACTIVE, id, capture.graph),
    })
}

entry! { Context, fn cuStreamIsCapturing(stream: usize, capturing: Out<c_uint>) {
    let (status, ..) = status(driver()?, stream)?;
    capturing.put(status as c_uint)
}}

entry! { Context, fn cuStreamGetCaptureInfo_v2(
    stream: usize,
    capturing: Out<c_uint>,
    id: Out<u64>,
    graph: Out<usize>,
    dependencies: Out<usize>,
    dependency_count: Out<usize>,
) {
    let (status, number, made) = status(driver()?, stream)?;
    capturing.put(status as c_uint)?;
    id.put_if_asked(number);
    graph.put_if_asked(made);
    dependencies.put_if_asked(0);
    dependency_count.put_if_asked(0);
    Ok(())
}}

entry! { Context, fn cuStreamBeginCapture_v2(stream: usize, mode: c_uint) {
    check_mode(mode)?;
    let driver = driver()?;
    begin(driver, &*driver.streams.find(stream)?, mode)
}}

fn begin(driver: &Driver, stream: &Stream, mode: c_uint) -> Result<(), Code> {
    if stream.is_legacy() {
        return Err(Code::CAPTURE_UNSUPPORTED);
    }
    let mut captures = lock(&driver.captures);
    if captures.of(stream).is_some() {
        return Err(Code::ILLEGAL_STATE);
    }
    captures.last_id += 1;
    let id = captures.last_id;
    // What the origin was given is joined by being the origin's.
    let origin = Member { is_blocking: stream.is_blocking(), given: 0, joined: u64::MAX };
    captures.active.insert(
        id,
        Capture {
            origin: stream.handle,
            mode,
            thread: this_thread(),
            is_invalid: false,
            graph: new_name(),
            works: Vec::new(),
            members: BTreeMap::from([(stream.handle, origin)]),
        },
    );
    Ok(())
}

entry! { Context, fn cuStreamEndCapture(stream: usize, graph: Out<usize>) {
    graph.put(0)?;
    let driver = driver()?;
    let stream = driver.streams.find(stream)?;
    let mut captures = lock(&driver.captures);
    let (id, capture) = captures.of(&stream).ok_or(Code::ILLEGAL_STATE)?;
    if capture.origin != stream.handle {
        capture.is_invalid = true;
        return Err(Code::CAPTURE_UNMATCHED);
    }
    if capture.mode != RELAXED && capture.thread != this_thread() {
        return Err(Code::CAPTURE_WRONG_THREAD);
    }
    let ended = captures.active.remove(&id).ok_or(Code::UNKNOWN)?;
    if ended.is_invalid {
        return Err(Code::CAPTURE_INVALIDATED);
    }
    if ended.members.values().any(|member| member.joined < member.given) {
        return Err(Code::CAPTURE_UNJOINED);
    }
    lock(&driver.graphs).add(ended.graph, ended.works);
    graph.put(ended.graph)
}}

entry! { Init, fn cuThreadExchangeStreamCaptureMode(mode: Out<c_uint>) {
    let asked = mode.get()?;
    check_mode(asked)?;
    mode.put(MODE.replace(asked))
}}
