//! A device that fails when a test says so.
//!
//! [`Faulty`] wraps any device and passes everything on, except: the calls a test chose fail with
//! the error it chose, without reaching the device; the copies it chose are taken and then move
//! nothing; and while events are held, those recorded complete only after
//! [`Faulty::release_events`], whatever the device did. Every call is
//! counted, and a test may have a question asked at each.

use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::Arc;
use std::thread::{self, ThreadId};

use crate::sync::{Condvar, Mutex, MutexGuard};
use crate::{
    AddressRange, Callback, Device, DeviceError, DeviceKind, Fill, Hold, MemoryInfo, Operation,
    Sealed, SpanId, SpanLabel,
};

/// A device that fails when told to. Any thread may tell it while others use it.
#[derive(Debug)]
pub struct Faulty<D> {
    inner: D,
    script: Mutex<Script>,
}

/// What was asked so far and what shall fail.
#[derive(Debug, Default)]
struct Script {
    calls: HashMap<Operation, u64>,
    faults: Vec<Fault>,
    failures: HashMap<Operation, u64>,
    /// Copies that move nothing: their numbers, counted from 1.
    torn: Vec<(u64, DeviceError)>,
    torn_copies: u64,
    /// How a torn copy ended, by the thread that is to hear of it.
    untold: HashMap<ThreadId, DeviceError>,
    /// The gate new events stand behind, while events are held.
    gate: Option<Arc<Gate>>,
    /// Asked at every call, on the caller's thread.
    is_wrong: Option<fn() -> bool>,
    /// Calls at which it said yes.
    wrong: Vec<Operation>,
    /// Calls in their order, while they are recorded.
    recorded: Option<Vec<Operation>>,
}

/// Calls number `first..=last` (counted from 1) of `operation` fail.
#[derive(Debug)]
struct Fault {
    operation: Operation,
    first: u64,
    last: u64,
    error: DeviceError,
}

/// Closed when made, opened once.
#[derive(Debug, Default)]
struct Gate {
    open: Mutex<bool>,
    changed: Condvar,
}

impl Gate {
    fn lock(&self) -> MutexGuard<'_, bool> {
        self.open.lock()
    }

    fn is_open(&self) -> bool {
        *self.lock()
    }

    fn open(&self) {
        *self.lock() = true;
        self.changed.notify_all();
    }

    fn wait(&self) {
        let mut open = self.lock();
        while !*open {
            self.changed.wait(&mut open);
        }
    }
}

/// An event that may be late.
#[derive(Clone, Debug)]
pub struct LateEvent<E> {
    inner: E,
    gate: Option<Arc<Gate>>,
}

impl<D: Device> Faulty<D> {
    /// Passes everything on to `inner` until told otherwise.
    pub fn new(inner: D) -> Self {
        Self { inner, script: Mutex::new(Script::default()) }
    }

    /// The device behind.
    pub fn inner(&self) -> &D {
        &self.inner
    }

    /// Makes the `nth` call of `operation` from now fail (1 is the next), once. Zero is taken for 1.
    pub fn fail(&self, operation: Operation, nth: u64, error: DeviceError) {
        self.add(operation, nth, 1, error);
    }

    /// Makes every call of `operation` fail, from the `nth` from now on until [`Faulty::heal`].
    pub fn fail_from(&self, operation: Operation, nth: u64, error: DeviceError) {
        self.add(operation, nth, u64::MAX, error);
    }

    /// Makes the `nth` copy from now (1 is the next; zero is taken for 1) move nothing, once, though
    /// it is taken. Its end is told as `error` to the thread that queued it, where it next records
    /// an event or queues a callback: at once by the one, through the callback by the other.
    pub fn tear(&self, nth: u64, error: DeviceError) {
        let mut script = self.script();
        let asked = script.calls.get(&Operation::Copy).copied().unwrap_or(0);
        script.torn.push((asked + nth.max(1), error));
    }

    /// Forgets all failures still to come.
    pub fn heal(&self) {
        let mut script = self.script();
        script.faults.clear();
        script.torn.clear();
    }

    /// How often a call of `operation` was made to fail.
    pub fn failures(&self, operation: Operation) -> u64 {
        self.script().failures.get(&operation).copied().unwrap_or(0)
    }

    /// How many copies moved nothing.
    pub fn torn_copies(&self) -> u64 {
        self.script().torn_copies
    }

    /// How often `operation` was asked for, failed calls included.
    pub fn calls(&self, operation: Operation) -> u64 {
        self.script().calls.get(&operation).copied().unwrap_or(0)
    }

    /// Asks `is_wrong` on the caller's thread at every call from now on: whether it holds a lock, say.
    pub fn watch(&self, is_wrong: fn() -> bool) {
        self.script().is_wrong = Some(is_wrong);
    }

    /// Calls at which the answer was yes.
    pub fn wrong_calls(&self) -> Vec<Operation> {
        self.script().wrong.clone()
    }

    /// Records the order of calls from now on.
    pub fn record_calls(&self) {
        self.script().recorded = Some(Vec::new());
    }

    /// Returns the calls since [`Faulty::record_calls`], which ends, in their order.
    pub fn take_calls(&self) -> Vec<Operation> {
        self.script().recorded.take().unwrap_or_default()
    }

    /// Holds every event recorded from now on incomplete until [`Faulty::release_events`].
    pub fn hold_events(&self) {
        self.script().gate.get_or_insert_default();
    }

    /// Lets held events complete, and later ones as the device has it.
    pub fn release_events(&self) {
        if let Some(gate) = self.script().gate.take() {
            gate.open();
        }
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock()
    }

    fn add(&self, operation: Operation, nth: u64, count: u64, error: DeviceError) {
        let mut script = self.script();
        let asked = script.calls.get(&operation).copied().unwrap_or(0);
        let first = asked + nth.max(1);
        let last = first.saturating_add(count - 1);
        script.faults.push(Fault { operation, first, last, error });
    }

    /// Counts a call, and fails it if it was chosen.
    fn enter(&self, operation: Operation) -> Result<(), DeviceError> {
        let mut script = self.script();
        if script.is_wrong.is_some_and(|is_wrong| is_wrong()) {
            script.wrong.push(operation);
        }
        if let Some(recorded) = &mut script.recorded {
            recorded.push(operation);
        }
        let calls = script.calls.entry(operation).or_insert(0);
        *calls += 1;
        let number = *calls;
        let hit = |fault: &&Fault| {
            fault.operation == operation && (fault.first..=fault.last).contains(&number)
        };
        let Some(error) = script.faults.iter().find(hit).map(|fault| fault.error.clone()) else {
            return Ok(());
        };
        *script.failures.entry(operation).or_insert(0) += 1;
        Err(error)
    }

    /// Whether the copy just counted is torn; its end is then told to this thread.
    fn is_torn(&self) -> bool {
        let mut script = self.script();
        let number = script.calls.get(&Operation::Copy).copied().unwrap_or(0);
        let Some(at) = script.torn.iter().position(|torn| torn.0 <= number) else { return false };
        let (_, error) = script.torn.swap_remove(at);
        script.torn_copies += 1;
        script.untold.insert(thread::current().id(), error);
        true
    }

    /// How a torn copy of this thread ended that it has not heard of.
    fn untold(&self) -> Result<(), DeviceError> {
        self.script().untold.remove(&thread::current().id()).map_or(Ok(()), Err)
    }
}

impl<D> Drop for Faulty<D> {
    /// Held events are let go, or a stream that waits for one would never end.
    fn drop(&mut self) {
        let script = self.script.get_mut();
        if let Some(gate) = script.gate.take() {
            gate.open();
        }
    }
}

impl<D: Hold> Device for Faulty<D> {
    type Stream = D::Stream;
    type Event = LateEvent<D::Event>;
    type Staged = D::Staged;

    fn kind(&self) -> DeviceKind {
        self.inner.kind()
    }

    fn is_stream_ordered(&self) -> bool {
        self.inner.is_stream_ordered()
    }

    fn page_bytes(&self) -> usize {
        self.inner.page_bytes()
    }

    fn large_page_bytes(&self) -> usize {
        self.inner.large_page_bytes()
    }

    fn address_space(&self) -> AddressRange {
        self.inner.address_space()
    }

    fn memory_info(&self) -> MemoryInfo {
        self.inner.memory_info()
    }

    fn during<T>(&self, work: impl FnOnce() -> T) -> T {
        self.inner.during(work)
    }

    fn map(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError> {
        self.enter(Operation::Map)?;
        self.inner.map(range, fill)
    }

    fn map_large(
        &self,
        range: AddressRange,
        large: AddressRange,
        fill: Fill,
    ) -> Result<(), DeviceError> {
        self.enter(Operation::Map)?;
        self.inner.map_large(range, large, fill)
    }

    fn limit_parked(&self, total_bytes: u64) {
        self.inner.limit_parked(total_bytes);
    }

    fn release_parked(&self) -> u64 {
        self.inner.release_parked()
    }

    fn unmap(&self, range: AddressRange) -> Result<(), DeviceError> {
        self.enter(Operation::Unmap)?;
        self.inner.unmap(range)
    }

    fn freeze(&self, range: AddressRange, label: SpanLabel) -> Result<SpanId, DeviceError> {
        self.enter(Operation::Freeze)?;
        self.inner.freeze(range, label)
    }

    fn thaw(&self, span: SpanId) -> Result<(), DeviceError> {
        self.enter(Operation::Thaw)?;
        self.inner.thaw(span)
    }

    fn seal(&self, span: SpanId) -> Result<Sealed, DeviceError> {
        self.enter(Operation::Seal)?;
        self.inner.seal(span)
    }

    fn stage(&self, span: SpanId, fill: Fill) -> Result<Self::Staged, DeviceError> {
        self.enter(Operation::Stage)?;
        self.inner.stage(span, fill)
    }

    fn stage_large(&self, span: SpanId, fill: Fill) -> Result<Self::Staged, DeviceError> {
        self.enter(Operation::Stage)?;
        self.inner.stage_large(span, fill)
    }

    fn staged_address(&self, staged: &Self::Staged) -> usize {
        self.inner.staged_address(staged)
    }

    fn publish(&self, staged: Self::Staged) -> Result<(), (DeviceError, Self::Staged)> {
        match self.enter(Operation::Publish) {
            Ok(()) => self.inner.publish(staged),
            Err(error) => Err((error, staged)),
        }
    }

    fn forget(&self, span: SpanId) -> Result<(), DeviceError> {
        self.enter(Operation::Forget)?;
        self.inner.forget(span)
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<AddressRange, DeviceError> {
        self.enter(Operation::Pin)?;
        self.inner.allocate_pinned(bytes)
    }

    unsafe fn free_pinned(&self, range: AddressRange) {
        // SAFETY: the caller's, of the same device.
        unsafe { self.inner.free_pinned(range) }
    }

    fn create_stream(&self, name: &str) -> Result<Self::Stream, DeviceError> {
        self.enter(Operation::CreateStream)?;
        self.inner.create_stream(name)
    }

    unsafe fn foreign_stream(&self, raw: *mut c_void) -> Result<Self::Stream, DeviceError> {
        // SAFETY: the caller's, of the same device.
        unsafe { self.inner.foreign_stream(raw) }
    }

    fn record(&self, stream: &Self::Stream) -> Result<Self::Event, DeviceError> {
        self.untold()?;
        self.enter(Operation::Event)?;
        let inner = self.inner.record(stream)?;
        Ok(LateEvent { inner, gate: self.script().gate.clone() })
    }

    /// Not counted: it is for figures only.
    fn record_timed(&self, stream: &Self::Stream) -> Result<Self::Event, DeviceError> {
        let inner = self.inner.record_timed(stream)?;
        Ok(LateEvent { inner, gate: self.script().gate.clone() })
    }

    fn age(&self, event: &Self::Event) -> Option<std::time::Duration> {
        self.inner.age(&event.inner)
    }

    fn between(&self, earlier: &Self::Event, later: &Self::Event) -> Option<std::time::Duration> {
        self.inner.between(&earlier.inner, &later.inner)
    }

    fn wait(&self, stream: &Self::Stream, event: &Self::Event) -> Result<(), DeviceError> {
        self.enter(Operation::Event)?;
        if let Some(gate) = event.gate.clone().filter(|gate| !gate.is_open()) {
            self.inner.hold(stream, Box::new(move || gate.wait()))?;
        }
        self.inner.wait(stream, &event.inner)
    }

    fn query(&self, event: &Self::Event) -> Result<bool, DeviceError> {
        self.enter(Operation::Event)?;
        let held = event.gate.as_ref().is_some_and(|gate| !gate.is_open());
        Ok(!held && self.inner.query(&event.inner)?)
    }

    fn synchronize(&self, event: &Self::Event) -> Result<(), DeviceError> {
        self.enter(Operation::Event)?;
        if let Some(gate) = &event.gate {
            gate.wait();
        }
        self.inner.synchronize(&event.inner)
    }

    unsafe fn copy(
        &self,
        destination: usize,
        source: usize,
        bytes: usize,
        stream: &Self::Stream,
    ) -> Result<(), DeviceError> {
        self.enter(Operation::Copy)?;
        if self.is_torn() {
            return Ok(());
        }
        // SAFETY: the caller's, of the same device.
        unsafe { self.inner.copy(destination, source, bytes, stream) }
    }

    unsafe fn zero(
        &self,
        start: usize,
        bytes: usize,
        stream: &Self::Stream,
    ) -> Result<(), DeviceError> {
        self.enter(Operation::Zero)?;
        // SAFETY: the caller's, of the same device.
        unsafe { self.inner.zero(start, bytes, stream) }
    }

    fn callback(&self, stream: &Self::Stream, work: Callback) -> Result<(), DeviceError> {
        let untold = self.untold();
        self.enter(Operation::Callback)?;
        match untold {
            Ok(()) => self.inner.callback(stream, work),
            Err(error) => {
                self.inner.callback(stream, Box::new(move |ended| work(ended.and(Err(error)))))
            }
        }
    }
}
