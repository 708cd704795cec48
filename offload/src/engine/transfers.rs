//! Steps that move bytes: file I/O on the pool, copies on the engine's streams.

use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use dormouse_alloc::pinned::PinMode;
use dormouse_device::{Device, DeviceError, with_signals_blocked};
use dormouse_timeline::{Lane, Slice};

use super::account::Account;
use super::arrival::Arrival;
use super::copy_times::CopyTimes;
use super::counters::Copies;
use super::raw_memory;
use super::{Engine, RegionData};
use crate::error::OffloadError;
use crate::ids::RegionId;
use crate::table::{Launched, RegionEntry};
use dormouse_residency::region::{CopyState, PageState, StepOutcome};
use dormouse_storage::BlockingTask;
use dormouse_storage::sync::lock;
use dormouse_storage::{IoMemory, NvmeError, Request, Transfer};
use dormouse_storage::{Priority, TransferJob};

/// Limit on queries for the end of a copy that was not reported, and the pause between them.
const UNREPORTED_ATTEMPTS_MAX: u32 = 100;
const UNREPORTED_PAUSE: Duration = Duration::from_millis(10);

/// One of the engine's streams: one per direction and one for event waits, each created when first used.
#[derive(Clone, Copy, Debug)]
pub(super) enum CopyStream {
    Out,
    In,
    EventWait,
}

/// Names of the streams, in the order of [`CopyStream`].
const STREAM_NAMES: [&str; 3] = ["out", "in", "event wait"];

impl<D: Device> Engine<D> {
    pub(super) fn stream(&self, way: CopyStream) -> Result<D::Stream, OffloadError> {
        if let Some(stream) = &lock(&self.streams)[way as usize] {
            return Ok(stream.clone());
        }
        // Created with no lock held. If another thread was faster, its stream is used.
        let made = self.device.create_stream(STREAM_NAMES[way as usize])?;
        Ok(lock(&self.streams)[way as usize].get_or_insert_with(|| made.clone()).clone())
    }

    /// Starts a write of the frozen pages (direct) or the host copy to the extent.
    pub(super) fn start_write(&self, id: RegionId) -> Launched {
        let prepared = self.table.with(id, |entry| {
            let body = &entry.data;
            let memory = match entry.region.pages {
                PageState::Frozen => raw_memory::io_memory(body.range().start, body.range().bytes),
                _ => raw_memory::io_memory(body.host?.start(), body.copy_bytes),
            };
            let takes_sums = self.nvme.as_ref().is_some_and(|nvme| nvme.checksums());
            Some((body.extent.as_ref()?.writer(memory, takes_sums), Arc::clone(&body.cancel)))
        });
        let Some(Some((transfer, cancel))) = prepared else { return self.not_started(id) };
        self.submit(id, Priority::Write, transfer, cancel)
    }

    /// Starts a read of the extent into the staged pages (direct), the host copy, or a bounce buffer. The load queue has
    /// room for the latter.
    pub(super) fn read(&self, id: RegionId) -> Launched {
        if let Err(e) = self.take_bounce(id) {
            return Launched::Over(self.failed(id, e));
        }
        let prepared = self.table.with(id, |entry| {
            let body = &entry.data;
            let start = match body.host {
                Some(buffer) => buffer.start(),
                None => self.device.staged_address(body.blocks.first()?.staged.as_ref()?),
            };
            let memory = raw_memory::io_memory(start, body.copy_bytes);
            Some((body.extent.as_ref()?.reader(memory), Arc::clone(&body.cancel)))
        });
        let Some(Some((transfer, cancel))) = prepared else { return self.not_started(id) };
        self.submit(id, Priority::Read, transfer, cancel)
    }

    /// Takes a bounce buffer for a host copy that was granted without one.
    fn take_bounce(&self, id: RegionId) -> Result<(), OffloadError> {
        if let Some(bytes) = self.table.with(id, |e| bounce_bytes(e)).flatten() {
            // It may exceed the budget: the copy must be able to finish, and windows bound their sum.
            let buffer = self.take(bytes, PinMode::Bounce)?;
            self.table.with(id, |e| e.data.host = Some(buffer));
        }
        Ok(())
    }

    fn not_started(&self, id: RegionId) -> Launched {
        Launched::Over(self.failed(id, self.stale(id)))
    }

    fn submit(
        &self,
        id: RegionId,
        priority: Priority,
        transfer: Transfer,
        cancel: Arc<AtomicBool>,
    ) -> Launched {
        let Some(engine) = self.me.upgrade() else {
            return Launched::Over(self.failed(id, OffloadError::ShutDown));
        };
        let account = self.body(id, |b| b.account.clone());
        let (queued_ns, start_ns) = (self.timeline.now_ns(), 0);
        let job =
            RegionTransfer { engine, id, account, priority, transfer, cancel, queued_ns, start_ns };
        match self.pool.submit(priority, Box::new(job)) {
            Ok(()) => Launched::InFlight,
            Err(_) => Launched::Over(self.failed(id, OffloadError::ShutDown)),
        }
    }

    fn transfer_over(
        &self,
        id: RegionId,
        account: Option<&Account>,
        priority: Priority,
        moved: TransferResult,
    ) {
        let now_ns = self.timeline.now_ns();
        self.links(account, priority).for_each(|link| link.end(now_ns, moved.moved_bytes));
        if priority == Priority::Write
            && let Some(nvme) = &self.nvme
        {
            self.body(id, |b| b.written_extent().map(|e| nvme.wrote(e, moved.moved_bytes)));
        }
        let outcome = match moved.result {
            Ok(sums) => {
                let (lane, name) = match priority {
                    Priority::Write => (Lane::NvmeWrite, self.names.write),
                    Priority::Read => (Lane::NvmeRead, self.names.read),
                };
                let (queued_ns, bytes) = (moved.queued_ns, moved.bytes);
                let slice = Slice::new(lane, name, moved.start_ns, now_ns);
                self.record(id, Slice { queued_ns, bytes, ..slice });
                self.links(account, priority).for_each(|link| link.note_whole(moved.bytes));
                if let Some(sums) = sums {
                    self.body(id, |b| b.written_extent().map(|extent| extent.set_sums(sums)));
                }
                StepOutcome::Ok
            }
            Err(NvmeError::Cancelled) => StepOutcome::Cancelled,
            Err(e) => {
                if priority == Priority::Write
                    && let Some(nvme) = &self.nvme
                {
                    nvme.stop(&e.to_string());
                }
                self.failed(id, e.into())
            }
        };
        self.complete(id, outcome);
    }

    /// Returns the counters of a transfer: the engine's and the owner's.
    fn links<'a>(
        &'a self,
        account: Option<&'a Account>,
        priority: Priority,
    ) -> impl Iterator<Item = &'a Copies> {
        let (ours, theirs) = match priority {
            Priority::Write => (&self.counters.nvme_write, account.map(|account| &account.written)),
            Priority::Read => (&self.counters.nvme_read, account.map(|account| &account.read)),
        };
        std::iter::once(ours).chain(theirs)
    }

    /// Records a copy of the region, with its layer and when it was asked for.
    fn record(&self, id: RegionId, copy: Slice) {
        let of_region = self.table.with(id, |entry| {
            let asked_ns = std::mem::replace(&mut entry.data.asked_ns, copy.end_ns);
            (entry.data.layer(), asked_ns)
        });
        let (layer, asked_ns) = of_region.unwrap_or((None, copy.queued_ns));
        self.timeline.slice(Slice { layer, asked_ns, flow: id.key(), ..copy });
    }

    /// Queues a copy with the device.
    pub(super) fn submit_copy(&self, id: RegionId, out: bool) -> Result<Launched, OffloadError> {
        if out {
            self.take_bounce(id)?;
        }
        let ends = self
            .body(id, |body| Some((body.host?.start(), body.copy_ranges(&self.device, out))))
            .ok_or_else(|| self.stale(id))?;
        let (host_start, copy_ranges) = ends;
        let bytes = copy_ranges.iter().map(|range| range.bytes).sum();
        let engine = self.me.upgrade().ok_or(OffloadError::ShutDown)?;
        let stream = self.stream(if out { CopyStream::Out } else { CopyStream::In })?;
        if out && let Some(arrival) = self.body(id, |b| b.arrival.clone()) {
            self.device.wait(&stream, &arrival.event)?;
        }
        let mut times = CopyTimes::begin(&*self.device, &stream, self.timeline.now_ns());
        let mut refused = None;
        for (at, range) in copy_ranges.iter().enumerate() {
            let (host, device) = (host_start + range.offset_bytes, range.device_start);
            let (to, from) = if out { (host, device) } else { (device, host) };
            match raw_memory::copy(&*self.device, to, from, range.bytes, &stream) {
                Ok(()) => {}
                Err(e) if at == 0 => return Err(e.into()),
                // The copies queued before it complete first.
                Err(e) => {
                    refused = Some(e);
                    break;
                }
            }
        }
        times.end(&*self.device, &stream);
        let after = Arc::clone(&engine);
        if !out && self.device.is_stream_ordered() && refused.is_none() {
            return Ok(self.queued_in(engine, id, &stream, times, bytes));
        }
        let told = self.device.callback(
            &stream,
            Box::new(move |ended| {
                let teller = Arc::clone(&after);
                after.table.watched(|| match ended {
                    Err(e) if is_indeterminate(&e) => await_unreported(teller, id, out, e.into()),
                    _ => teller.copied(id, out, &times, bytes, refused.map_or(ended, Err)),
                });
            }),
        );
        if let Err(e) = told {
            await_unreported(engine, id, out, e.into());
        }
        Ok(Launched::InFlight)
    }

    /// Ends the step of a copy in that is queued: its users wait for the event.
    fn queued_in(
        &self,
        engine: Arc<Self>,
        id: RegionId,
        stream: &D::Stream,
        times: CopyTimes<D>,
        bytes: usize,
    ) -> Launched {
        match self.device.record(stream) {
            Ok(event) => {
                self.table.with(id, |e| e.data.arrival = Some(Arrival::new(event)));
                let note = move |ended: Result<(), DeviceError>| match ended {
                    Ok(()) => engine.note_copy(id, false, &times, bytes as u64),
                    Err(_) => lock(&engine.counts).device_faults += 1,
                };
                // Statistics only: the step does not depend on it.
                let _ = self.device.callback(stream, Box::new(note));
                Launched::Over(StepOutcome::Ok)
            }
            Err(e) => {
                await_unreported(engine, id, false, e.into());
                Launched::InFlight
            }
        }
    }

    fn copied(
        &self,
        id: RegionId,
        out: bool,
        times: &CopyTimes<D>,
        bytes: usize,
        ended: Result<(), DeviceError>,
    ) {
        self.finish_copy(out, if ended.is_ok() { bytes as u64 } else { 0 });
        if let Err(e) = ended {
            let outcome = self.failed(id, e.into());
            return self.complete(id, outcome);
        }
        self.note_copy(id, out, times, bytes as u64);
        self.complete(id, StepOutcome::Ok);
    }

    fn note_copy(&self, id: RegionId, out: bool, times: &CopyTimes<D>, bytes: u64) {
        let (start_ns, end_ns) = times.span(&*self.device, self.timeline.now_ns());
        let (lane, name) = if out {
            (Lane::DeviceToHost, self.names.copy_out)
        } else {
            (Lane::HostToDevice, self.names.copy_in)
        };
        let queued_ns = times.queued_ns();
        self.record(id, Slice { queued_ns, bytes, ..Slice::new(lane, name, start_ns, end_ns) });
        if self.device.is_stream_ordered() {
            self.copies(out).add(bytes, end_ns.saturating_sub(start_ns));
        } else {
            self.copies(out).note_whole(bytes);
        }
    }
}

/// The result of a transfer; for a write, with the checksums of its chunks.
struct TransferResult {
    result: Result<Option<Vec<u32>>, NvmeError>,
    queued_ns: u64,
    start_ns: u64,
    bytes: u64,
    /// Bytes transferred, however it ended.
    moved_bytes: u64,
}

/// A region's transfer on an I/O thread.
struct RegionTransfer<D: Device> {
    engine: Arc<Engine<D>>,
    id: RegionId,
    account: Option<Arc<Account>>,
    priority: Priority,
    transfer: Transfer,
    cancel: Arc<AtomicBool>,
    queued_ns: u64,
    /// 0 before it begins.
    start_ns: u64,
}

impl<D: Device> TransferJob for RegionTransfer<D> {
    /// Checks for a cancel before each chunk.
    fn next_request(&mut self) -> Option<(u32, Request)> {
        if self.start_ns == 0 {
            self.start_ns = self.engine.timeline.now_ns();
            let links = self.engine.links(self.account.as_deref(), self.priority);
            links.for_each(|link| link.begin(self.start_ns));
        }
        // Relaxed: a hint; the request itself is under the table's lock.
        if self.cancel.load(Ordering::Relaxed) {
            self.transfer.cancel();
        }
        self.transfer.next_request()
    }

    fn answer(&mut self, chunk: u32, result: io::Result<usize>) {
        if result.as_ref().is_ok_and(|&bytes| bytes > 0) {
            // Relaxed: a count.
            self.engine.counters.answers.fetch_add(1, Ordering::Relaxed);
        }
        self.transfer.answer(chunk, result);
    }

    fn is_over(&self) -> bool {
        self.transfer.is_over()
    }

    fn is_called_off(&self) -> bool {
        // Relaxed: as above.
        self.start_ns == 0 && self.cancel.load(Ordering::Relaxed)
    }

    fn finish(mut self: Box<Self>) {
        lock(&self.engine.counts).reread_chunks += self.transfer.reread();
        let (result, bytes) = (self.transfer.outcome(), self.transfer.bytes());
        let moved_bytes = self.transfer.moved_bytes();
        let (queued_ns, start_ns) = (self.queued_ns, self.start_ns);
        let moved = TransferResult { result, queued_ns, start_ns, bytes, moved_bytes };
        self.engine.transfer_over(self.id, self.account.as_deref(), self.priority, moved);
    }
}

/// Waits on an I/O thread, since the caller may be the stream's own, for a queued copy whose end will
/// not be reported, then fails the step: its memory must not be reused before. If the device does not
/// say when that is, the step stays in flight and its memory is never reused.
fn await_unreported<D: Device>(
    engine: Arc<Engine<D>>,
    id: RegionId,
    out: bool,
    error: OffloadError,
) {
    let waiter = Arc::clone(&engine);
    engine.run_blocking(Box::new(move || {
        let stream = waiter.stream(if out { CopyStream::Out } else { CopyStream::In });
        let is_over = stream.is_ok_and(|stream| waiter.await_copies(&stream));
        waiter.finish_copy(out, 0);
        if is_over {
            let outcome = waiter.failed(id, error.clone());
            waiter.complete(id, outcome);
        } else {
            waiter.table.break_down();
        }
    }));
}

/// Returns the size of the host copy of a region that was granted one but has none.
pub(super) fn bounce_bytes<D: Device>(entry: &RegionEntry<RegionData<D>>) -> Option<usize> {
    let has_none = entry.region.host == CopyState::Granted && entry.data.host.is_none();
    has_none.then_some(entry.data.copy_bytes)
}

/// Returns true if, after this error of a wait, the work may still run. A lost device runs nothing.
pub(super) const fn is_indeterminate(error: &DeviceError) -> bool {
    !matches!(error, DeviceError::DeviceLost { .. })
}

/// Repeats a wait until the device says that the work is over. A lost device copies nothing more.
fn repeat_until_known(wait: impl Fn() -> Result<(), DeviceError>) -> Result<(), DeviceError> {
    for _ in 1..UNREPORTED_ATTEMPTS_MAX {
        match wait() {
            Err(e) if is_indeterminate(&e) => std::thread::sleep(UNREPORTED_PAUSE),
            _ => return Ok(()),
        }
    }
    wait().or_else(|e| if is_indeterminate(&e) { Err(e) } else { Ok(()) })
}

impl<D: Device> Engine<D> {
    /// Blocks until the work queued on one of our streams is over. False if the device does not say.
    pub(super) fn await_copies(&self, stream: &D::Stream) -> bool {
        let reached = || self.device.record(stream).and_then(|e| self.device.synchronize(&e));
        repeat_until_known(reached).is_ok()
    }

    /// Blocks until one of our events is over. An error if the device does not say.
    pub(super) fn await_event(&self, event: &D::Event) -> Result<(), DeviceError> {
        repeat_until_known(|| self.device.synchronize(event))
    }

    /// Runs a task on an I/O thread.
    pub(super) fn run_blocking(&self, task: BlockingTask) {
        if let Err(task) = self.pool.run_blocking(task) {
            // The engine is shut down. Without a thread the task never runs: the resources it would
            // release are then never reused.
            let _ = with_signals_blocked(|| std::thread::Builder::new().spawn(task));
        }
    }
}

/// Returns memory for I/O by a stash call, which waits for it.
pub(super) fn waited_memory(start: usize, bytes: usize) -> IoMemory {
    raw_memory::io_memory(start, bytes)
}
