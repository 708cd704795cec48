//! Stashes, for the `copy` mode: bytes are copied out and back; addresses are not kept.
//!
//! A stash goes where dormant memory goes: on a GPU to pinned memory, then to the file through a bounce
//! buffer; on the host device to the file first. Calls block for their copy; they use the engine's
//! streams and no I/O thread.
#![expect(unsafe_code, reason = "callers lend memory by address: the contract is on each function")]

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use dormouse_alloc::pinned::{PinMode, PinnedBuffer};
use dormouse_device::Device;
use dormouse_timeline::Lane;

use super::Engine;
use super::counters::Copies;
use super::raw_memory;
use super::transfers::{CopyStream, waited_memory};
use crate::error::OffloadError;
use crate::ids::Tier;
use dormouse_storage::sync::lock;
use dormouse_storage::{CHUNK_BYTES, Extent, NvmeError, UNIT_BYTES};

/// Limit on stashes.
pub const STASHES_MAX: usize = 1 << 20;

/// Identifies a stash; never 0, never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct StashId(pub u64);

#[derive(Debug)]
enum StashLocation {
    Host(PinnedBuffer),
    Nvme(Extent),
}

#[derive(Debug)]
struct StashCopy {
    bytes: usize,
    location: StashLocation,
}

#[derive(Debug)]
struct StashEntry {
    key: u64,
    users: u64,
    copy: Arc<StashCopy>,
}

/// All stashes.
#[derive(Debug, Default)]
pub(crate) struct Stashes {
    by_id: BTreeMap<StashId, StashEntry>,
    by_key: HashMap<u64, StashId>,
    last: u64,
}

impl Stashes {
    /// Adds a user to the stash of `key`, if there is one.
    fn share(&mut self, key: u64, bytes: usize) -> Result<Option<StashId>, OffloadError> {
        let Some(&id) = self.by_key.get(&key) else { return Ok(None) };
        let Some(kept) = self.by_id.get_mut(&id) else { return Ok(None) };
        if kept.copy.bytes != bytes {
            let accepted = format!("{} bytes, as put under this key before", kept.copy.bytes);
            return Err(OffloadError::argument("stash length", bytes, accepted));
        }
        kept.users += 1;
        Ok(Some(id))
    }
}

impl<D: Device> Engine<D> {
    /// Copies bytes out. The key is the storage's identity with its generation: the same key returns the
    /// same id and copies nothing.
    ///
    /// # Errors
    /// `Argument` for no bytes or another length than before; `TooMany`; `TierFull` or `Nvme` if no tier has
    /// room (after a failed write the file tier accepts no more data); `Device`; `Broken` if the device does
    /// not report the end of a copy; `Order` on a thread of the runtime.
    ///
    /// # Safety
    /// `address..address + bytes` is device memory, readable until this returns, and last written by work
    /// on `stream`.
    pub unsafe fn stash_put(
        &self,
        address: usize,
        bytes: usize,
        storage_key: u64,
        stream: &D::Stream,
    ) -> Result<StashId, OffloadError> {
        self.refuse_worker()?;
        if bytes == 0 {
            return Err(OffloadError::argument("stash length", 0, "at least 1"));
        }
        {
            let mut stashes = lock(&self.stashes);
            if let Some(id) = stashes.share(storage_key, bytes)? {
                return Ok(id);
            }
            if stashes.by_id.len() >= STASHES_MAX {
                return Err(OffloadError::TooMany { what: "stashes", limit: STASHES_MAX as u64 });
            }
        }
        self.order_behind(CopyStream::Out, stream)?;
        let copy = Arc::new(self.copy_away(address, bytes)?);
        let mut stashes = lock(&self.stashes);
        // Two threads may have copied the same storage: the first copy is kept, and so is its length.
        if let Some(shared) = stashes.share(storage_key, bytes).transpose() {
            drop(stashes);
            self.release_copy(copy);
            return shared;
        }
        stashes.last += 1;
        let id = StashId(stashes.last);
        stashes.by_key.insert(storage_key, id);
        stashes.by_id.insert(id, StashEntry { key: storage_key, users: 1, copy });
        Ok(id)
    }

    /// Copies a stash back and returns its length. The id stays valid.
    ///
    /// # Errors
    /// `Stale`; `Nvme` if the file lost or changed bytes (the destination is then undefined); `Device`,
    /// `Broken` and `Order` as above.
    ///
    /// # Safety
    /// `destination` is device memory, writable for the stash's length until this returns, and last used by
    /// work on `stream`.
    pub unsafe fn stash_get(
        &self,
        id: StashId,
        destination: usize,
        stream: &D::Stream,
    ) -> Result<u64, OffloadError> {
        self.refuse_worker()?;
        // First: from here on this call may be the one to release the copy, which no early return does.
        self.order_behind(CopyStream::In, stream)?;
        let copy = lock(&self.stashes).by_id.get(&id).map(|k| Arc::clone(&k.copy));
        let copy = copy.ok_or_else(|| stale(id))?;
        let result = match &copy.location {
            StashLocation::Host(buffer) => {
                self.copy_now(destination, buffer.start(), copy.bytes, CopyStream::In)
            }
            StashLocation::Nvme(extent) => self.read_back(extent, destination, copy.bytes),
        };
        let bytes = copy.bytes as u64;
        match &result {
            // The copy may still read it: never released.
            Err(OffloadError::Broken) => std::mem::forget(copy),
            _ => self.release_copy(copy),
        }
        result.map(|()| bytes)
    }

    /// Removes one user; the last one releases the copy.
    ///
    /// # Errors
    /// `Stale`.
    pub fn stash_drop(&self, id: StashId) -> Result<(), OffloadError> {
        let mut stashes = lock(&self.stashes);
        let kept = stashes.by_id.get_mut(&id).ok_or_else(|| stale(id))?;
        kept.users -= 1;
        if kept.users > 0 {
            return Ok(());
        }
        let kept = stashes.by_id.remove(&id);
        if let Some(kept) = &kept
            && stashes.by_key.get(&kept.key) == Some(&id)
        {
            stashes.by_key.remove(&kept.key);
        }
        drop(stashes);
        if let Some(kept) = kept {
            self.release_copy(kept.copy);
        }
        Ok(())
    }

    /// Returns the number of stashes.
    #[must_use]
    pub fn stash_count(&self) -> usize {
        lock(&self.stashes).by_id.len()
    }

    /// Takes the pinned buffers of all stashes when the engine is dropped.
    pub(super) fn stash_buffers(&self) -> Vec<PinnedBuffer> {
        let kept = std::mem::take(&mut lock(&self.stashes).by_id);
        let items = kept.into_values().filter_map(|k| Arc::into_inner(k.copy));
        items
            .filter_map(|copy| match copy.location {
                StashLocation::Host(buffer) => Some(buffer),
                StashLocation::Nvme(_) => None,
            })
            .collect()
    }

    /// Copies to the first tier that has room; counts a decline if none has.
    fn copy_away(&self, address: usize, bytes: usize) -> Result<StashCopy, OffloadError> {
        let mut refused = OffloadError::TierFull {
            tier: Tier::Host,
            asked_bytes: bytes as u64,
            used_bytes: 0,
            budget_bytes: 0,
        };
        for tier in self.tiers_in_order() {
            let location = match tier {
                Tier::Nvme => self.take_extent(bytes as u64).map(StashLocation::Nvme),
                Tier::Host | Tier::Device => {
                    let buffer = self.take(bytes, PinMode::Now);
                    buffer.map(StashLocation::Host).map_err(OffloadError::from)
                }
            };
            match location.map(|location| self.fill(location, address, bytes)) {
                Ok(Ok(location)) => return Ok(StashCopy { bytes, location }),
                Ok(Err(e)) if !e.is_declined() => return Err(e),
                // Any failure to pin memory leaves the file.
                Ok(Err(e)) | Err(e) => {
                    tracing::debug!(target: "offload", ?tier, bytes, reason = %e, "tier refused a stash");
                    refused = e;
                }
            }
        }
        lock(&self.counts).declined += 1;
        self.timeline.instant(Lane::Notice, self.names.declined, bytes as u64);
        Err(refused)
    }

    /// Copies into `location`, or releases it.
    fn fill(
        &self,
        location: StashLocation,
        address: usize,
        bytes: usize,
    ) -> Result<StashLocation, OffloadError> {
        match location {
            StashLocation::Host(buffer) => {
                match self.copy_now(buffer.start(), address, bytes, CopyStream::Out) {
                    Ok(()) => Ok(StashLocation::Host(buffer)),
                    Err(e) => {
                        self.give_after(&e, buffer);
                        Err(e)
                    }
                }
            }
            StashLocation::Nvme(mut extent) => match self.write_away(&mut extent, address, bytes) {
                Ok(()) => Ok(StashLocation::Nvme(extent)),
                Err(e) => {
                    self.release_extent(extent);
                    Err(e)
                }
            },
        }
    }

    fn write_away(
        &self,
        extent: &mut Extent,
        address: usize,
        bytes: usize,
    ) -> Result<(), OffloadError> {
        let nvme = self.nvme.as_ref().ok_or(OffloadError::ShutDown)?;
        let mut sums = Vec::new();
        self.in_chunks(bytes, |bounce, at, part| {
            self.copy_now(bounce, address + at, part, CopyStream::Out)?;
            let memory = waited_memory(bounce, part.next_multiple_of(UNIT_BYTES));
            let write = || nvme.write_chunk(extent, at as u64, memory);
            match self.timed(&self.counters.nvme_write, memory.bytes(), write) {
                Ok(sum) => sums.extend(sum),
                // The source bytes are unchanged: the stash is declined.
                Err(e) => {
                    let reason = e.to_string();
                    nvme.stop(&reason);
                    return Err(NvmeError::Stopped { reason }.into());
                }
            }
            Ok(())
        })?;
        self.counters.nvme_write.note_whole(bytes as u64);
        extent.set_sums(sums);
        Ok(())
    }

    fn read_back(
        &self,
        extent: &Extent,
        destination: usize,
        bytes: usize,
    ) -> Result<(), OffloadError> {
        self.in_chunks(bytes, |bounce, at, part| {
            self.read_chunk(extent, at, bounce, part)?;
            self.copy_now(destination + at, bounce, part, CopyStream::In)
        })?;
        self.counters.nvme_read.note_whole(bytes as u64);
        Ok(())
    }

    /// Reads a chunk of an extent to a bounce buffer and verifies its checksum.
    pub(super) fn read_chunk(
        &self,
        extent: &Extent,
        at: usize,
        bounce: usize,
        bytes: usize,
    ) -> Result<(), OffloadError> {
        let nvme = self.nvme.as_ref().ok_or(OffloadError::ShutDown)?;
        let memory = waited_memory(bounce, bytes.next_multiple_of(UNIT_BYTES));
        let read = || nvme.read_chunk(extent, at as u64, memory);
        let again = self.timed(&self.counters.nvme_read, memory.bytes(), read)?;
        lock(&self.counts).reread_chunks += u64::from(again);
        Ok(())
    }

    /// Counts the time of `work`, which moves `bytes`.
    fn timed<T>(
        &self,
        link: &Copies,
        bytes: usize,
        work: impl FnOnce() -> Result<T, NvmeError>,
    ) -> Result<T, NvmeError> {
        link.begin(self.timeline.now_ns());
        let result = work();
        link.end(self.timeline.now_ns(), if result.is_ok() { bytes as u64 } else { 0 });
        result
    }

    /// Calls `each(bounce address, offset, length)` for every chunk, with one bounce buffer.
    pub(super) fn in_chunks(
        &self,
        bytes: usize,
        mut each: impl FnMut(usize, usize, usize) -> Result<(), OffloadError>,
    ) -> Result<(), OffloadError> {
        let whole = bytes.next_multiple_of(UNIT_BYTES).min(CHUNK_BYTES);
        let bounce = self.take(whole, PinMode::Bounce)?;
        let mut result = Ok(());
        for at in (0..bytes).step_by(CHUNK_BYTES) {
            result = each(bounce.start(), at, (bytes - at).min(CHUNK_BYTES));
            if result.is_err() {
                break;
            }
        }
        match &result {
            Ok(()) => self.give(bounce),
            Err(e) => self.give_after(e, bounce),
        }
        // The place may admit a queued sleep.
        self.pump_in_background();
        result
    }

    /// Releases a buffer after a failed copy, unless the copy may still run.
    fn give_after(&self, error: &OffloadError, buffer: PinnedBuffer) {
        if !matches!(error, OffloadError::Broken) {
            self.give(buffer);
        }
    }

    /// Makes our copies wait for the work queued on `stream`.
    ///
    /// # Errors
    /// `Device` with a refusal if the stream is being captured. Another thread may begin that between the question and
    /// the record: a wait for an event of the capture would draw our stream, which all copies share, into it.
    pub(super) fn order_behind(
        &self,
        way: CopyStream,
        stream: &D::Stream,
    ) -> Result<(), OffloadError> {
        let reached = self.device.record(stream)?;
        // Refused for an event of a capture. One that was recorded before a capture is none of its.
        if !self.device.query(&reached)? {
            self.device.wait(&self.stream(way)?, &reached)?;
        }
        Ok(())
    }

    /// Copies and waits. After `Broken` neither end of the copy may be reused.
    pub(super) fn copy_now(
        &self,
        destination: usize,
        source: usize,
        bytes: usize,
        way: CopyStream,
    ) -> Result<(), OffloadError> {
        let stream = self.stream(way)?;
        let start_ns = self.timeline.now_ns();
        raw_memory::copy(&*self.device, destination, source, bytes, &stream)?;
        let ended = self.device.record(&stream).and_then(|event| self.device.synchronize(&event));
        // The copy is queued all the same, and this call releases its ends.
        if ended.is_err() && !self.await_copies(&stream) {
            lock(&self.counts).device_faults += 1;
            self.table.break_down();
            return Err(OffloadError::Broken);
        }
        ended?;
        let copies = match way {
            CopyStream::In => &self.counters.host_to_device,
            CopyStream::Out | CopyStream::EventWait => &self.counters.device_to_host,
        };
        copies.add(bytes as u64, self.timeline.now_ns().saturating_sub(start_ns));
        Ok(())
    }

    /// Releases a copy's place, unless another thread is reading it; then that one does.
    fn release_copy(&self, copy: Arc<StashCopy>) {
        match Arc::into_inner(copy).map(|copy| copy.location) {
            Some(StashLocation::Host(buffer)) => self.give(buffer),
            Some(StashLocation::Nvme(extent)) => self.release_extent(extent),
            None => return,
        }
        // The place may admit a queued sleep.
        self.pump_in_background();
    }
}

fn stale(id: StashId) -> OffloadError {
    OffloadError::Stale { what: "stash", id: id.0.to_string() }
}
