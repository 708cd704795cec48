//! Reads of sleeping memory: the caller gets a copy of the bytes, and the memory stays asleep.
#![expect(unsafe_code, reason = "callers lend memory by address: the contract is on the function")]

use dormouse_device::{AddressRange, Device};

use super::transfers::CopyStream;
use super::{Engine, RegionData, raw_memory};
use crate::error::OffloadError;
use crate::ids::RegionId;
use crate::table::RegionEntry;
use dormouse_residency::region::CopyState;

/// Bytes copied at once under the table's lock: 0.1 ms at 10 GB/s.
const CHUNK_BYTES: usize = 1 << 20;

impl<D: Device> Engine<D> {
    /// Copies bytes of one sleeping block to host memory. Blocks until they are there. The bytes that sleep
    /// must be in host memory. The others, at the ends of a block that shares pages, are read from the
    /// device, behind the work on `stream`.
    ///
    /// # Errors
    /// `NotOurs` for an address outside every live block; `Argument` for bytes beyond the block's copy;
    /// `Order` if the block is not asleep in host memory, or wakes during the call; `Pinned` or `Device` if
    /// the ends cannot be read; `Broken`; `Order` on a thread of the runtime. After an error the
    /// destination's bytes are unspecified.
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
        let (id, asleep) = self.asleep_part(range)?;
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
        for at in (0..asleep.bytes).step_by(CHUNK_BYTES) {
            let (address, bytes) = (asleep.start + at, (asleep.bytes - at).min(CHUNK_BYTES));
            let copied = self.table.with(id, |entry| {
                // Under the lock the region keeps a valid copy.
                let source = in_host_copy(entry, address)?;
                raw_memory::copy_on_host(destination + address - range.start, source, bytes);
                Some(())
            });
            copied.flatten().ok_or_else(|| self.not_in_host_memory(address))?;
        }
        Ok(())
    }

    /// Returns the region around `range`, and the part of `range` that sleeps with it.
    fn asleep_part(&self, range: AddressRange) -> Result<(RegionId, AddressRange), OffloadError> {
        let address = range.start;
        let block = self.allocator.lookup(address).ok_or(OffloadError::NotOurs { address })?;
        let id = block.claimed.and_then(RegionId::from_key);
        let found = id.and_then(|id| {
            let of = |body: &mut RegionData<D>| {
                let part = body.blocks.iter().find(|part| part.start == block.range.start)?;
                Some((id, part.range, part.copy_bytes))
            };
            self.body(id, of)
        });
        let (id, pages, copy_bytes) = found.ok_or_else(|| self.not_in_host_memory(address))?;
        let start = pages.start.clamp(range.start, range.end());
        let end = pages.end().clamp(start, range.end());
        let is_whole = copy_bytes == pages.bytes;
        let accepted_end = if is_whole { block.range.end() } else { pages.start + copy_bytes };
        if range.end() > accepted_end {
            let accepted = format!("up to {} there", accepted_end.saturating_sub(address));
            return Err(OffloadError::argument("bytes to read", range.bytes, accepted));
        }
        Ok((id, AddressRange::new(start, end - start)))
    }

    fn not_in_host_memory(&self, address: usize) -> OffloadError {
        let state = self.region_at(address).and_then(|id| self.region_info(id).ok());
        OffloadError::Order {
            what: "reading sleeping memory",
            seen: state
                .map_or_else(|| "awake memory".to_owned(), |info| format!("{:?}", info.state)),
            expected: "memory asleep in host memory".to_owned(),
        }
    }
}

/// Returns where the host copy has the byte of `address`, while it is valid and the region sleeps.
fn in_host_copy<D: Device>(entry: &RegionEntry<RegionData<D>>, address: usize) -> Option<usize> {
    let (region, body) = (&entry.region, &entry.data);
    if region.host != CopyState::Valid || !region.state.is_asleep() {
        return None;
    }
    let part = body.blocks.iter().find(|part| part.range.contains(address))?;
    Some(body.host?.start() + part.offset_bytes + (address - part.range.start))
}
