//! The host device: the CPU memory of this process, managed as a device.
//!
//! A device's memory is one reserved range. Mapping a page makes it accessible, unmapping makes it
//! inaccessible and parks its memory for the next owner, or returns it to the system. Spans are
//! guarded by write protection and a fault handler ([`guard`]); streams are threads. The foreign
//! stream `NULL` is the calling thread.
//!
//! `map` and `unmap` may run inside `malloc`: they allocate nothing, log nothing, use no
//! thread-local data, and take one lock, under which no thread waits.

mod edges;
mod end;
mod event;
pub mod guard;
mod pages;
mod parked;
mod spans;
mod stream;
pub(crate) mod system;

#[cfg(all(test, loom))]
mod loom_end;
#[cfg(all(test, not(loom)))]
mod tests;

pub use event::Event;
pub use parked::PARKED_BYTES_MAX;
pub use spans::Staged;
pub use stream::Stream;
pub use system::os_page_bytes;

use std::ffi::c_void;
use std::sync::{Arc, Weak};

use crate::sync::Mutex;
use crate::worker::Worker;
use crate::{
    AddressRange, Callback, Device, DeviceError, DeviceKind, Fill, MemoryInfo, Operation, Sealed,
    SpanId, SpanLabel,
};
use event::Flag;
use pages::Space;
use stream::Work;

/// Limit of the streams of one device.
pub const STREAMS_MAX: usize = 256;

/// Configuration of a host device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostConfig {
    /// Bytes of addresses to reserve, rounded up to whole pages. They cost nothing until mapped.
    pub reserve_bytes: usize,
    /// Limit of the mapped bytes (I5).
    pub capacity_bytes: u64,
    /// Unit of mapping: a power of two, at least the system's page size.
    pub page_bytes: usize,
}

impl HostConfig {
    /// Creates a configuration with the system's page size.
    #[must_use]
    pub fn new(reserve_bytes: usize, capacity_bytes: u64) -> Self {
        Self { reserve_bytes, capacity_bytes, page_bytes: os_page_bytes() }
    }

    fn validate(&self) -> Result<(), DeviceError> {
        let bad = |field, seen, accepted| Err(DeviceError::BadConfig { field, seen, accepted });
        if !self.page_bytes.is_power_of_two() || self.page_bytes < os_page_bytes() {
            let accepted = "powers of two, from the system's page size up";
            return bad("page_bytes", self.page_bytes as u64, accepted);
        }
        // A quarter of the address space is what the system can ever give.
        if self.reserve_bytes == 0 || self.reserve_bytes > usize::MAX / 4 {
            let accepted = "1 byte to a quarter of the address space";
            return bad("reserve_bytes", self.reserve_bytes as u64, accepted);
        }
        if self.capacity_bytes == 0 {
            return bad("capacity_bytes", self.capacity_bytes, "at least 1 byte");
        }
        Ok(())
    }
}

/// The CPU memory of this process, managed as a device.
///
/// Dropping it completes the pending work of its streams, ends them and returns its addresses to the
/// system: no caller may use them afterwards.
#[derive(Debug)]
pub struct HostDevice {
    space: Arc<Space>,
    /// The streams, to end them with the device. Not locked by calls that run inside `malloc`.
    streams: Mutex<Vec<Weak<Worker<Work>>>>,
}

impl HostDevice {
    /// Reserves the addresses. Maps no page and starts no thread.
    ///
    /// # Errors
    /// `BadConfig`; `Refused` if the system cannot reserve the addresses.
    pub fn new(config: HostConfig) -> Result<Self, DeviceError> {
        Ok(Self { space: Arc::new(Space::new(&config)?), streams: Mutex::new(Vec::new()) })
    }

    /// Lowers the end of the address space to `end`, a multiple of the page size, and returns the addresses from there
    /// on to the system; an `end` above it is ignored. Any-thread. Other threads may lower it at the same time.
    ///
    /// The system may keep addresses whose mapping it cannot split. They are then lost to the process.
    ///
    /// # Safety
    /// No page from `end` on is mapped or in a span, and none is mapped later. No reader of a copy of the end takes
    /// addresses from there on for the device's: the copies are lowered before this call.
    pub unsafe fn shrink(&self, end: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.space.shrink(end) };
    }

    /// Returns the end of the last page that is mapped, being mapped or in a span; the start of the address space
    /// without any. Lock-free. The result holds while no other thread uses the
    /// device: it is for forked children.
    #[must_use]
    pub fn used_end(&self) -> usize {
        self.space.states.used_end()
    }

    /// [`Self::shrink`] in a forked child: it takes no lock, and parked pages are lost.
    ///
    /// # Safety
    /// As [`Self::shrink`], and the device maps no page in this process any more.
    pub unsafe fn shrink_in_child(&self, end: usize) {
        // SAFETY: the caller's contract.
        unsafe { self.space.release_from(end) };
    }
}

impl Drop for HostDevice {
    fn drop(&mut self) {
        for worker in self.streams.get_mut().iter().filter_map(Weak::upgrade) {
            worker.end();
        }
    }
}

impl Device for HostDevice {
    type Stream = Stream;
    type Event = Event;
    type Staged = Staged;

    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }

    /// The calling threads access memory themselves.
    fn is_stream_ordered(&self) -> bool {
        false
    }

    fn page_bytes(&self) -> usize {
        self.space.page_bytes
    }

    fn address_space(&self) -> AddressRange {
        self.space.range()
    }

    fn memory_info(&self) -> MemoryInfo {
        self.space.accounts.info(self.space.parked.bytes())
    }

    fn map(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError> {
        self.space.map(range, fill)
    }

    fn unmap(&self, range: AddressRange) -> Result<(), DeviceError> {
        self.space.unmap(range)
    }

    fn freeze(&self, range: AddressRange, label: SpanLabel) -> Result<SpanId, DeviceError> {
        self.space.freeze(range, &label)
    }

    fn thaw(&self, span: SpanId) -> Result<(), DeviceError> {
        self.space.thaw(span)
    }

    fn seal(&self, span: SpanId) -> Result<Sealed, DeviceError> {
        self.space.seal(span)
    }

    fn limit_parked(&self, total_bytes: u64) {
        self.space.limit_parked(total_bytes);
    }

    fn release_parked(&self) -> u64 {
        self.space.parked.shrink(0)
    }

    fn stage(&self, span: SpanId, fill: Fill) -> Result<Staged, DeviceError> {
        spans::stage(&self.space, span, fill)
    }

    fn staged_address(&self, staged: &Staged) -> usize {
        staged.aside.start
    }

    fn publish(&self, staged: Staged) -> Result<(), (DeviceError, Staged)> {
        spans::publish(staged)
    }

    fn forget(&self, span: SpanId) -> Result<(), DeviceError> {
        self.space.forget(span)
    }

    /// Ordinary memory, not locked: no other device reads it.
    fn allocate_pinned(&self, bytes: usize) -> Result<AddressRange, DeviceError> {
        let rounded = bytes.max(1).checked_next_multiple_of(self.space.page_bytes);
        system::fresh(rounded.unwrap_or(usize::MAX), Operation::Pin)
    }

    unsafe fn free_pinned(&self, range: AddressRange) {
        // SAFETY: the caller's contract: from `allocate_pinned`, and unused.
        unsafe { system::release(range) };
    }

    fn create_stream(&self, name: &str) -> Result<Stream, DeviceError> {
        let mut streams = self.streams.lock();
        streams.retain(|worker| worker.strong_count() > 0);
        if streams.len() >= STREAMS_MAX {
            let (operation, range) = (Operation::CreateStream, AddressRange::default());
            let reason = format!("stream limit reached ({STREAMS_MAX})");
            return Err(DeviceError::refused(operation, range, libc::EAGAIN, reason));
        }
        let worker = stream::start(name, Arc::clone(&self.space))?;
        streams.push(Arc::downgrade(&worker));
        Ok(Stream(Some(worker)))
    }

    unsafe fn foreign_stream(&self, raw: *mut c_void) -> Result<Stream, DeviceError> {
        if raw.is_null() {
            return Ok(Stream(None));
        }
        let accepted = "NULL, the calling thread";
        Err(DeviceError::ForeignStream { raw: raw as usize, kind: "host", accepted })
    }

    fn record(&self, stream: &Stream) -> Result<Event, DeviceError> {
        let Some(worker) = &stream.0 else { return Ok(Event(None)) };
        let flag = Arc::new(Flag::default());
        worker.submit(Work::Signal(Arc::clone(&flag)), Operation::Event)?;
        Ok(Event(Some(flag)))
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), DeviceError> {
        match &stream.0 {
            Some(worker) => worker.submit(Work::Wait(event.clone()), Operation::Event),
            None => self.synchronize(event),
        }
    }

    fn query(&self, event: &Event) -> Result<bool, DeviceError> {
        Ok(event.is_complete())
    }

    fn synchronize(&self, event: &Event) -> Result<(), DeviceError> {
        event.wait();
        Ok(())
    }

    unsafe fn copy(
        &self,
        destination: usize,
        source: usize,
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let copy = Work::Copy { destination, source, bytes };
        // SAFETY: the caller's contract.
        unsafe { stream::run_or_submit(stream, copy, Operation::Copy) }
    }

    unsafe fn zero(&self, start: usize, bytes: usize, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: the caller's contract.
        unsafe { stream::run_or_submit(stream, Work::Zero { start, bytes }, Operation::Zero) }
    }

    /// Later work of the stream waits for the callback.
    fn callback(&self, stream: &Stream, work: Callback) -> Result<(), DeviceError> {
        // SAFETY: a callback has no memory operands.
        unsafe { stream::run_or_submit(stream, Work::Run(work), Operation::Callback) }
    }
}
