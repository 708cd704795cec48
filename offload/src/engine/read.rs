//! Reads of sleeping memory: the caller gets a copy of the bytes, and the memory stays asleep.
#![expect(unsafe_code, reason = "callers lend memory by address: the contract is on the function")]

use std::sync::Arc;

use dormouse_alloc::pinned::PinnedBuffer;
use dormouse_device::{AddressRange, Device};

use super::transfers::CopyStream;
use super::{Engine, RegionData, raw_memory};
use crate::error::OffloadError;
use crate::ids::RegionId;
use crate::table::RegionEntry;
use dormouse_residency::region::{CopyState, RegionState};
use dormouse_storage::{CHUNK_BYTES, Extent};

/// A region that slept when a read began.
#[derive(Clone, Copy)]
struct Sleeper {
    id: RegionId,
    /// Its wakes by then: after another one its bytes may have changed.
    wakes: u64,
}

/// Where the copy of a sleeping region has a byte.
enum CopyPlace {
    /// At this offset of the buffer, which stays until the read [ends](super::host_reads::HostReads::end).
    Host(PinnedBuffer, usize),
    /// At this offset of the extent.
    File(Arc<Extent>, usize),
}

impl<D: Device> Engine<D> {
    /// Copies bytes of one sleeping block to host memory. Blocks until they are there. The file is read on the
    /// calling thread. Bytes that never sleep, at the ends of a block that shares pages, are read from the
    /// device, behind the work on `stream`.
    ///
    /// # Errors
    /// `NotOurs` for an address outside every live block; `Argument` for bytes beyond the block's copy;
    /// `Order` if the block is not asleep or has no copy, or wakes before its bytes are read; `Nvme` if the file
    /// lost or changed bytes; `Pinned` without a bounce buffer; `Device` if the ends cannot be read; `Broken`;
    /// `Order` on a thread of the runtime. After an error the destination's bytes are unspecified, and those
    /// that sleep are unchanged.
    ///
    /// # Safety
    /// `destination` is host memory, writable for the bytes of `range` until this returns. The block is not
    /// freed before.
    pub unsafe fn read_asleep(
        &self,
        range: AddressRange,
        destination: usize,
        stream: &D::Stream,
    ) -> Result<(), OffloadError> {
        self.refuse_worker()?;
        let (sleeper, asleep) = self.asleep_part(range)?;
        let (before, rest) = range.split_at(asleep.start - range.start);
        let (_, after) = rest.split_at(asleep.bytes);
        for end in [before, after].into_iter().filter(|end| end.bytes > 0) {
            self.order_behind(CopyStream::Out, stream)?;
            self.in_chunks(end.bytes, |bounce, at, bytes| {
                self.copy_now(bounce, end.start + at, bytes, CopyStream::Out)?;
                raw_memory::copy_on_host(destination + end.start + at - range.start, bounce, bytes);
                Ok(())
            })?;
        }
        if asleep.bytes == 0 {
            return Ok(());
        }
        self.read_copy(sleeper, asleep, destination + asleep.start - range.start)
    }

    /// Copies `range`, which sleeps with a region. Holds no lock during the copy: the destination may sleep too, and its
    /// wake takes the table's lock (decision 0025).
    fn read_copy(
        &self,
        sleeper: Sleeper,
        range: AddressRange,
        destination: usize,
    ) -> Result<(), OffloadError> {
        let place = self.share_copy(sleeper, range.start);
        match place.ok_or_else(|| self.not_asleep(range.start))? {
            CopyPlace::Host(buffer, offset) => {
                raw_memory::copy_on_host(destination, buffer.start() + offset, range.bytes);
                let is_left = self.table.lock().shared.host_reads.end(buffer);
                if is_left {
                    self.give(buffer);
                    // The place may admit a queued sleep.
                    self.pump_in_background();
                }
                Ok(())
            }
            CopyPlace::File(extent, offset) => {
                let read = self.read_extent(&extent, offset, range.bytes, destination);
                // The region may have woken: then its extent is released here.
                self.release_shared_extent(extent);
                self.pump_in_background();
                read
            }
        }
    }

    /// Returns where the copy has the byte of `address`, if the region has not woken since. The copy stays there until
    /// the caller releases it, also if the region wakes.
    fn share_copy(&self, sleeper: Sleeper, address: usize) -> Option<CopyPlace> {
        let mut inner = self.table.lock();
        let (entry, shared) = inner.get_both(sleeper.id)?;
        let place = copy_place(entry, address).filter(|_| entry.data.wakes == sleeper.wakes)?;
        if let CopyPlace::Host(buffer, _) = place {
            shared.host_reads.begin(buffer);
        }
        Some(place)
    }

    /// Copies bytes of an extent to host memory. Whole chunks are read, since each has one checksum.
    fn read_extent(
        &self,
        extent: &Extent,
        offset: usize,
        bytes: usize,
        destination: usize,
    ) -> Result<(), OffloadError> {
        let wanted_end = offset + bytes;
        let first = offset / CHUNK_BYTES * CHUNK_BYTES;
        let end = wanted_end.next_multiple_of(CHUNK_BYTES).min(extent.bytes() as usize);
        self.in_chunks(end - first, |bounce, at, chunk_bytes| {
            let chunk = first + at;
            self.read_chunk(extent, chunk, bounce, chunk_bytes)?;
            let start = chunk.max(offset);
            let copied_bytes = (chunk + chunk_bytes).min(wanted_end) - start;
            let (to, from) = (destination + start - offset, bounce + start - chunk);
            raw_memory::copy_on_host(to, from, copied_bytes);
            Ok(())
        })?;
        self.counters.nvme_read.note_whole((end - first) as u64);
        Ok(())
    }

    /// Returns the region around `range`, and the part of `range` that sleeps with it.
    fn asleep_part(&self, range: AddressRange) -> Result<(Sleeper, AddressRange), OffloadError> {
        let address = range.start;
        let block = self.allocator.lookup(address).ok_or(OffloadError::NotOurs { address })?;
        let id = block.claimed.and_then(RegionId::from_key);
        let found = id.and_then(|id| {
            let of = |body: &mut RegionData<D>| {
                let part = body.blocks.iter().find(|part| part.start == block.range.start)?;
                Some((Sleeper { id, wakes: body.wakes }, part.range, part.copy_bytes))
            };
            self.body(id, of)
        });
        let (sleeper, pages, copy_bytes) = found.ok_or_else(|| self.not_asleep(address))?;
        let start = pages.start.clamp(range.start, range.end());
        let end = pages.end().clamp(start, range.end());
        let is_whole = copy_bytes == pages.bytes;
        let accepted_end = if is_whole { block.range.end() } else { pages.start + copy_bytes };
        if range.end() > accepted_end {
            let accepted = format!("up to {} there", accepted_end.saturating_sub(address));
            return Err(OffloadError::argument("bytes to read", range.bytes, accepted));
        }
        Ok((sleeper, AddressRange::new(start, end - start)))
    }

    fn not_asleep(&self, address: usize) -> OffloadError {
        let region = self.region_at(address).and_then(|id| self.region_info(id).ok());
        let seen = match region.map(|info| info.state) {
            None => "awake memory".to_owned(),
            Some(state) if state.is_asleep() && state != RegionState::Empty => {
                "memory that woke during the call".to_owned()
            }
            Some(state) => format!("{state:?}"),
        };
        OffloadError::Order {
            what: "reading sleeping memory",
            seen,
            expected: "memory asleep in host memory or in the file".to_owned(),
        }
    }
}

/// Returns where the copy has the byte of `address`, while the region sleeps.
fn copy_place<D: Device>(entry: &RegionEntry<RegionData<D>>, address: usize) -> Option<CopyPlace> {
    let (region, body) = (&entry.region, &entry.data);
    if !region.state.is_asleep() {
        return None;
    }
    let part = body.blocks.iter().find(|part| part.range.contains(address))?;
    let offset = part.offset_bytes + (address - part.range.start);
    if region.host == CopyState::Valid {
        return Some(CopyPlace::Host(body.host?, offset));
    }
    let extent = body.extent.as_ref().filter(|_| region.extent == CopyState::Valid)?;
    Some(CopyPlace::File(Arc::clone(extent), offset))
}
