//! The blocks of a region and the operations on their pages.
//!
//! Most regions are one block. Small blocks that a layer saved share a region: one copy, one extent,
//! one transfer, and pages of their own each. Only the region's executor changes its blocks, so
//! indices stay valid while it acts.

use dormouse_alloc::BlockId;
use dormouse_device::{AddressRange, Device, Fill, Sealed, SpanId};

use super::region_data::PageReservation;
use super::{Engine, RegionData};
use crate::error::OffloadError;
use crate::ids::RegionId;
use dormouse_residency::region::{Input, StepOutcome};
use dormouse_storage::sync::lock;

/// Limit on blocks per region.
pub(crate) const REGION_BLOCKS_MAX: usize = 16;

/// One block of a region.
#[derive(Debug)]
pub(crate) struct RegionBlock<D: Device> {
    pub(crate) block: BlockId,
    /// Its address, by which the owner frees it.
    pub(crate) start: usize,
    /// Its pages that sleep and wake; the whole block if its role never sleeps.
    pub(crate) range: AddressRange,
    /// Whether it wakes to large pages.
    pub(crate) wakes_large: bool,
    /// Offset of its bytes in the region's copy.
    pub(crate) offset_bytes: usize,
    /// Bytes of it in the copy.
    pub(crate) copy_bytes: usize,
    pub(crate) span: Option<SpanId>,
    pub(crate) staged: Option<D::Staged>,
}

/// A piece of a copy: device address, offset in the copy, length.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyRange {
    pub(super) device_start: usize,
    pub(super) offset_bytes: usize,
    pub(super) bytes: usize,
}

impl<D: Device> RegionBlock<D> {
    /// Returns false for a block without a whole page; it belongs to the region for its free only.
    const fn may_sleep(&self) -> bool {
        self.range.bytes > 0
    }
}

impl<D: Device> RegionData<D> {
    /// Returns the bytes whose pages are absent or being replaced.
    pub(super) fn away_bytes(&self) -> u64 {
        let away = self.blocks.iter().filter(|part| part.span.is_some());
        away.map(|part| part.range.bytes as u64).sum()
    }

    /// Returns true if the owner has freed all blocks.
    pub(super) fn is_freed(&self) -> bool {
        !self.blocks.is_empty() && self.blocks.iter().all(|part| self.freed.contains(&part.start))
    }

    /// Notes that the owner freed a block; `Some` once all are freed.
    pub(super) fn note_free(&mut self, start: usize) -> Option<()> {
        self.freed.push(start);
        self.is_freed().then_some(())
    }

    /// Returns the ranges of a copy: out of the pages at their addresses, or into the staged ones.
    pub(super) fn copy_ranges(&self, device: &D, out: bool) -> Vec<CopyRange> {
        let range = |part: &RegionBlock<D>| {
            let device_start = match &part.staged {
                Some(staged) if !out => device.staged_address(staged),
                // Published by a wake that failed on another block: its bytes are there.
                None if !out => return None,
                _ => part.range.start,
            };
            let (offset_bytes, bytes) = (part.offset_bytes, part.copy_bytes);
            Some(CopyRange { device_start, offset_bytes, bytes })
        };
        self.blocks.iter().filter(|part| part.may_sleep()).filter_map(range).collect()
    }
}

impl<D: Device> Engine<D> {
    fn part(&self, id: RegionId, at: usize, change: impl FnOnce(&mut RegionBlock<D>)) {
        self.body(id, |body| body.blocks.get_mut(at).map(change));
    }

    /// Returns the results of `of` for the blocks of a region and their indices.
    fn parts<T>(
        &self,
        id: RegionId,
        of: impl FnMut((usize, &mut RegionBlock<D>)) -> Option<T>,
    ) -> Vec<T> {
        let found =
            self.table.with(id, |e| e.data.blocks.iter_mut().enumerate().filter_map(of).collect());
        found.unwrap_or_default()
    }

    fn take_spans(&self, id: RegionId) -> Vec<SpanId> {
        self.parts(id, |(_, part)| part.span.take())
    }

    pub(super) fn freeze(&self, id: RegionId) -> Result<(), OffloadError> {
        let label = self.body(id, |body| Some(body.label)).unwrap_or_default();
        for (at, range) in self.parts(id, |(at, part)| part.may_sleep().then_some((at, part.range)))
        {
            match self.device.freeze(range, label) {
                Ok(span) => self.part(id, at, |part| part.span = Some(span)),
                Err(e) => {
                    self.thaw(id);
                    return Err(e.into());
                }
            }
        }
        Ok(())
    }

    pub(super) fn thaw(&self, id: RegionId) {
        self.take_spans(id).into_iter().for_each(|span| self.fault(self.device.thaw(span)));
    }

    pub(super) fn forget(&self, id: RegionId) {
        self.take_spans(id).into_iter().for_each(|span| self.fault(self.device.forget(span)));
    }

    /// Removes the pages. Blocks that were written to, or that the device keeps, leave the region: they stay
    /// awake as their owner's. If that is all of them, the region stays awake.
    pub(super) fn seal(&self, id: RegionId) -> StepOutcome {
        // If the bytes are discarded, no copy out has waited for the arrival.
        if let Err(e) = self.settle_arrival(id) {
            return self.failed(id, e.into());
        }
        let frozen = self.parts(id, |(at, part)| Some((at, part.span?, part.block)));
        let (mut kept, mut is_written, mut refused) = (Vec::new(), false, None);
        for &(at, span, block) in &frozen {
            match self.device.seal(span) {
                Ok(Sealed::Asleep) => {
                    self.fault(self.allocator.set_asleep(block));
                    continue;
                }
                Ok(Sealed::Written) => {
                    self.part(id, at, |part| part.span = None);
                    lock(&self.counts).written_meanwhile += 1;
                    is_written = true;
                }
                Err(e) => refused = Some(e),
            }
            kept.push(at);
        }
        if kept.len() < frozen.len() {
            if let Some(e) = refused {
                lock(&self.counts).sleep_failures += 1;
                self.note_decline(id, &e.into());
            }
            self.detach_blocks(id, &kept);
            lock(&self.counts).sleeps += 1;
            return StepOutcome::Ok;
        }
        match refused {
            Some(e) if !is_written => self.failed(id, e.into()),
            None if !is_written => StepOutcome::Failed,
            _ => {
                // After `Written` the state machine holds no spans.
                self.thaw(id);
                StepOutcome::Written
            }
        }
    }

    /// Returns blocks that stay awake to their owner.
    fn detach_blocks(&self, id: RegionId, places: &[usize]) {
        let mut leaving = Vec::new();
        {
            let mut inner = self.table.lock();
            let Some((entry, shared)) = inner.get_both(id) else { return };
            let is_sealing = entry.data.is_sealing(&entry.region);
            for &at in places.iter().rev() {
                let part = entry.data.blocks.remove(at);
                let bytes = part.range.bytes as u64;
                entry.data.bytes -= bytes;
                shared.detach_blocks(entry.data.role, entry.data.tag, bytes, is_sealing);
                leaving.push(part);
            }
            if entry.data.is_freed() {
                inner.feed(id, Input::Drop); // in flight: kept as a pending request
            }
        }
        for part in leaving {
            if let Some(span) = part.span {
                self.fault(self.device.thaw(span));
            }
            self.fault(self.allocator.unclaim(part.block));
        }
    }

    pub(super) fn stage(&self, id: RegionId) -> Result<(), OffloadError> {
        let asleep = self.body(id, |body| {
            // No copy: the bytes were discarded, and the region wakes to zeroed pages.
            let is_empty = body.extent.is_none() && body.host.is_none();
            Some((body.reservation, if is_empty { Fill::Zero } else { Fill::Any }))
        });
        let Some((reservation, fill)) = asleep else { return Err(self.stale(id)) };
        match reservation {
            PageReservation::Reserved => {}
            PageReservation::Lost => return Err(OffloadError::Broken),
            PageReservation::None | PageReservation::Promised | PageReservation::Refused => {
                self.reserve(id)?
            }
        }
        for (at, span, wakes_large) in
            self.parts(id, |(at, part)| Some((at, part.span?, part.wakes_large)))
        {
            let staged = match wakes_large {
                true => self.device.stage_large(span, fill),
                false => self.device.stage(span, fill),
            };
            match staged {
                Ok(staged) => self.part(id, at, |part| part.staged = Some(staged)),
                Err(e) => {
                    drop(self.take_staged(id));
                    self.unreserve(id);
                    return Err(e.into());
                }
            }
        }
        Ok(())
    }

    fn take_staged(&self, id: RegionId) -> Vec<D::Staged> {
        self.parts(id, |(_, part)| part.staged.take())
    }

    pub(super) fn discard(&self, id: RegionId) {
        let is_settled = self.settle_arrival(id).is_ok();
        let staged = self.take_staged(id);
        if !is_settled {
            // A copy may still fill them: these pages and their room are never reused.
            lock(&self.counts).device_faults += 1;
            self.table.with(id, |e| e.data.reservation = PageReservation::Lost);
            self.table.break_down();
            return staged.into_iter().for_each(std::mem::forget);
        }
        drop(staged);
        self.unreserve(id);
    }

    /// Maps the staged pages at their addresses. Published blocks stay awake if a later one fails.
    pub(super) fn publish(&self, id: RegionId) -> Result<(), OffloadError> {
        let mut refused = None;
        for (at, staged, block) in
            self.parts(id, |(at, part)| Some((at, part.staged.take()?, part.block)))
        {
            if refused.is_some() {
                self.part(id, at, |part| part.staged = Some(staged));
                continue;
            }
            match self.device.publish(staged) {
                Ok(()) => {
                    self.part(id, at, |part| part.span = None);
                    self.fault(self.allocator.set_awake(block));
                }
                Err((e, staged)) => {
                    self.part(id, at, |part| part.staged = Some(staged));
                    refused = Some(e);
                }
            }
        }
        match refused {
            Some(e) => Err(e.into()),
            None => {
                self.table.with(id, |e| e.data.reservation = PageReservation::None);
                Ok(())
            }
        }
    }

    /// Frees the blocks, then the slot: once the region is gone, its memory is free.
    pub(super) fn finish(&self, id: RegionId) {
        if self.body(id, |body| (body.reservation == PageReservation::Lost).then_some(())).is_some()
        {
            return; // its addresses are never reused
        }
        for block in self.blocks(&[id]) {
            // The block's free is deferred: a drop brought us here. An error means that the allocator lost
            // the block, which its consistency check reports.
            self.fault(self.allocator.finish_free(block));
        }
        self.table.remove(id);
    }

    pub(super) fn blocks(&self, ids: &[RegionId]) -> Vec<BlockId> {
        let mut blocks = Vec::new();
        self.table.each(ids, |e| blocks.extend(e.data.blocks.iter().map(|part| part.block)));
        blocks
    }

    pub(super) fn unreserve(&self, id: RegionId) {
        let reserved = self.body(id, |body| {
            (body.reservation == PageReservation::Reserved).then(|| {
                body.reservation = PageReservation::None;
                body.away_bytes()
            })
        });
        if let Some(bytes) = reserved {
            self.fault(self.allocator.unreserve_awake(bytes));
        }
    }
}
