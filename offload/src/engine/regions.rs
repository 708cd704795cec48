//! The life of regions outside sleep and wake: adopt, release, free, queries.

use std::sync::Arc;

use dormouse_alloc::{AllocError, BlockId, BlockInfo, Freed};
use dormouse_device::{Device, DeviceKind, SpanLabel};
use dormouse_timeline::NameId;

use super::arrival::Arrival;
use super::region_blocks::{REGION_BLOCKS_MAX, RegionBlock};
use super::region_data::{PageReservation, tier_of};
use super::sleep::Grant;
use super::transfers::is_indeterminate;
use super::{Account, Engine, RegionData, RegionInfo};
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, Tier, name_of};
use crate::table::{FeedResult, REGIONS_MAX};
use dormouse_residency::region::{
    Input, PendingRequest, RefusedInput, Region, RegionState, RegionWait,
};
use dormouse_storage::UNIT_BYTES;

/// The result of adopting blocks as one region.
#[derive(Debug)]
pub(crate) struct Adopted {
    /// `None` if no block could be part of it.
    pub(crate) id: Option<RegionId>,
    /// Refused addresses, with the reasons.
    pub(crate) refused: Vec<(usize, OffloadError)>,
}

/// The residency of some regions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerResidency {
    /// Bytes of all of them.
    pub(crate) bytes: u64,
    /// Bytes in device memory, or with room reserved or promised there.
    pub(crate) resident_bytes: u64,
    /// The part of `resident_bytes` whose room is still to be reserved.
    pub(crate) promised_bytes: u64,
    /// Whether all are awake or waking, and none is about to sleep.
    pub(crate) is_awake: bool,
    /// Whether some are falling asleep, or about to.
    pub(crate) is_leaving: bool,
    /// Whether some are in the file.
    pub(crate) is_in_file: bool,
}

/// Bytes that asleep regions need over each link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BytesToLoad {
    /// From the file.
    pub(crate) from_file_bytes: u64,
    /// From host memory, including bytes from the file that pass through it.
    pub(crate) from_host_bytes: u64,
}

impl<D: Device> Engine<D> {
    /// Adopts the block around `address` as one region, awake.
    ///
    /// # Errors
    /// `NotOurs`; `Claimed` by another region; `NoWholePage` for a role that sleeps; `TooMany`;
    /// `Alloc` for a block that is freed.
    pub fn adopt(
        &self,
        address: usize,
        role: Role,
        label: SpanLabel,
    ) -> Result<RegionId, OffloadError> {
        let tag = match role {
            Role::Tagged => self.timeline.intern(&name_of(&label)),
            _ => NameId::OTHER,
        };
        self.adopt_for(address, role, label, tag)
    }

    /// As [`Engine::adopt`]; a tag's region counts as `tag` on the timeline.
    pub(super) fn adopt_for(
        &self,
        address: usize,
        role: Role,
        label: SpanLabel,
        tag: NameId,
    ) -> Result<RegionId, OffloadError> {
        let mut adopted = self.adopt_blocks(&[address], role, label, tag, None)?;
        match (adopted.id, adopted.refused.pop()) {
            (Some(id), _) => Ok(id),
            (None, Some((_, e))) => Err(e),
            (None, None) => Err(OffloadError::NotOurs { address }),
        }
    }

    /// As [`Engine::adopt`] for up to [`REGION_BLOCKS_MAX`] blocks, as one region that sleeps and wakes as one
    /// copy. Blocks of such a region that their owner frees are held until it is
    /// [released](Engine::release) or all of them are freed.
    ///
    /// # Errors
    /// `TooMany`.
    pub(crate) fn adopt_together(
        &self,
        addresses: &[usize],
        role: Role,
        label: SpanLabel,
        account: Option<Arc<Account>>,
    ) -> Result<Adopted, OffloadError> {
        self.adopt_blocks(addresses, role, label, NameId::OTHER, account)
    }

    fn adopt_blocks(
        &self,
        addresses: &[usize],
        role: Role,
        label: SpanLabel,
        tag: NameId,
        account: Option<Arc<Account>>,
    ) -> Result<Adopted, OffloadError> {
        debug_assert!(addresses.len() <= REGION_BLOCKS_MAX);
        // I/O needs one range of memory, which several blocks have in host memory only.
        let is_direct = self.is_direct && addresses.len() == 1;
        let inserted = self
            .table
            .lock()
            .insert(Region::awake(is_direct), RegionData::new(role, label, tag, account));
        let limit = u64::from(REGIONS_MAX);
        let id = inserted.ok_or(OffloadError::TooMany { what: "regions", limit })?;
        let (mut blocks, mut refused) = (Vec::new(), Vec::new());
        let (mut bytes, mut total_copy_bytes) = (0, 0);
        // A role that never sleeps covers the whole block; one that sleeps, its own pages.
        let sleeps = matches!(role, Role::Dormant | Role::Tagged);
        for &address in addresses {
            match self.allocator.claim(address, id.key()) {
                Ok(info) => {
                    let range = if sleeps { info.pages } else { info.range };
                    let (block, start) = (info.id, info.range.start);
                    let (offset_bytes, copy_bytes) = (total_copy_bytes, self.copied_bytes(&info));
                    let (span, staged, wakes_large) = (None, None, info.wakes_large);
                    blocks.push(RegionBlock {
                        block,
                        start,
                        range,
                        wakes_large,
                        offset_bytes,
                        copy_bytes,
                        span,
                        staged,
                    });
                    bytes += range.bytes;
                    total_copy_bytes += copy_bytes;
                }
                Err(e) => refused.push((address, self.not_claimed(e))),
            }
        }
        if bytes == 0 {
            self.table.remove(id);
            for part in blocks {
                self.allocator.unclaim(part.block)?;
                let page_bytes = self.device.page_bytes();
                let none = OffloadError::NoWholePage { address: part.start, page_bytes };
                refused.push((part.start, none));
            }
            return Ok(Adopted { id: None, refused });
        }
        {
            let mut inner = self.table.lock();
            if let Some((entry, shared)) = inner.get_both(id) {
                entry.data.blocks = blocks;
                entry.data.is_bounced = self.is_direct && !is_direct;
                entry.data.bytes = bytes as u64;
                entry.data.copy_bytes = total_copy_bytes;
                shared.enter(role, tag, bytes as u64);
                // Freed between claim and here: the drop runs now.
                if entry.data.is_freed() {
                    inner.feed(id, Input::Drop);
                }
            }
        }
        if let Some(actions) = self.table.executed(id) {
            self.drive(id, actions);
        }
        Ok(Adopted { id: Some(id), refused })
    }

    /// Returns the bytes of a block that are copied: on a GPU, whose pages are large, only the bytes requested.
    /// On the host the owner may use all that `malloc_usable_size` reports.
    fn copied_bytes(&self, block: &BlockInfo) -> usize {
        let pages = block.pages;
        if self.device.kind() == DeviceKind::Host {
            return pages.bytes;
        }
        let end = block.range.start.saturating_add(block.requested_bytes);
        end.saturating_sub(pages.start).next_multiple_of(UNIT_BYTES).min(pages.bytes)
    }

    fn not_claimed(&self, error: AllocError) -> OffloadError {
        match error {
            AllocError::NotABlock { address } => OffloadError::NotOurs { address },
            AllocError::AlreadyClaimed { start, owner_key } => {
                let owner = RegionId::from_key(owner_key)
                    .map_or_else(|| format!("{owner_key:#x}"), |o| o.to_string());
                OffloadError::Claimed { address: start, owner }
            }
            other => other.into(),
        }
    }

    /// Releases an awake region: its blocks are the owner's alone again. Blocks until its bytes have
    /// arrived, unless a stream of the owner waits for that.
    ///
    /// # Errors
    /// `NotAwake`; `Stale`; `Device` if the bytes did not arrive: the region is released, but its memory is
    /// not reused if the device does not report the end of the copy.
    pub fn release(&self, id: RegionId) -> Result<(), OffloadError> {
        let body = {
            let mut inner = self.table.lock();
            match inner.feed(id, Input::Release) {
                FeedResult::Refused(RefusedInput { state, .. }) if state != RegionState::Gone => {
                    return Err(OffloadError::NotAwake { region: id, state, what: "release" });
                }
                FeedResult::Missing | FeedResult::Refused(_) => return Err(self.stale(id)),
                FeedResult::Kept | FeedResult::Execute(_) => inner.remove(id),
            }
        };
        self.table.notify();
        let Some(mut body) = body else { return Err(self.stale(id)) };
        let (extent, host) = (body.extent.take(), body.host.take());
        if extent.is_some() || host.is_some() {
            self.give_back(Grant { extent, host });
            // The place may admit a queued sleep.
            self.pump_in_background();
        }
        // The owner may reuse the memory at once, and does not know of the copy.
        let arrival = body.arrival.as_ref().and_then(Arrival::unordered);
        let arrived = arrival.map_or(Ok(()), |event| match self.device.synchronize(event) {
            Err(e) if is_indeterminate(&e) => self.await_event(event),
            answer => answer,
        });
        if let Err(e) = &arrived
            && is_indeterminate(e)
        {
            // The copy may still run: the memory it fills is never reused.
            return Ok(arrived?);
        }
        // Blocks freed before the owner's stream waited for the copy may be reused on another stream.
        let early = body.arrival.as_ref().map_or(0, Arrival::freed_before);
        let early = body.freed.get(..early).unwrap_or_default();
        let mut unclaimed = Ok(());
        for part in body.blocks {
            match &body.arrival {
                Some(arrival) if early.contains(&part.start) => {
                    self.unclaim_once_over(arrival.event.clone(), part.block);
                }
                _ => unclaimed = unclaimed.and(self.allocator.unclaim(part.block)),
            }
        }
        unclaimed?;
        Ok(arrived?)
    }

    /// Unclaims a block when the copy into it is over.
    fn unclaim_once_over(&self, event: D::Event, block: BlockId) {
        self.once_over(event, move |engine| {
            engine.fault(engine.allocator.unclaim(block));
        });
    }

    /// Frees the block that starts at `address`, in any state of its region. Never blocks: memory under a
    /// copy is reused when the copy is over.
    ///
    /// # Errors
    /// `Alloc`: not the start of a live block, or freed before.
    pub fn free(&self, address: usize, stream: u64) -> Result<(), OffloadError> {
        match self.allocator.free(address, stream)? {
            Freed::Done => {}
            Freed::Claimed(key) => {
                if let Some(id) = RegionId::from_key(key)
                    // Missing if a release is unclaiming the block: that frees it.
                    && self.body(id, |body| body.note_free(address)).is_some()
                {
                    match self.table.feed(id, Input::Drop) {
                        FeedResult::Execute(actions) => {
                            dormouse_device::without_waiting(|| self.execute(id, actions));
                            self.pump_in_background();
                        }
                        // It may be a load that waits.
                        FeedResult::Kept => {
                            dormouse_device::without_waiting(|| self.end_cancelled_loads());
                        }
                        FeedResult::Missing | FeedResult::Refused(_) => {}
                    }
                }
            }
        }
        Ok(())
    }

    /// Returns the region around `address`.
    #[must_use]
    pub fn region_at(&self, address: usize) -> Option<RegionId> {
        let id = RegionId::from_key(self.allocator.lookup(address)?.claimed?)?;
        self.table.with(id, |_| id)
    }

    /// Returns the properties of a region.
    ///
    /// # Errors
    /// `Stale`.
    pub fn region_info(&self, id: RegionId) -> Result<RegionInfo, OffloadError> {
        let info = self.table.with(id, |entry| RegionInfo {
            range: entry.data.range(),
            bytes: entry.data.bytes(),
            role: entry.data.role,
            state: entry.region.state,
            tier: tier_of(&entry.region).unwrap_or(Tier::Device),
            label: entry.data.label,
            error: entry.data.error.clone(),
        });
        info.ok_or_else(|| self.stale(id))
    }

    /// Returns the size below which dormant blocks share a region. Such regions go through host memory,
    /// one copy more on a direct device. Measured there, relative to separate regions: 64 KiB 0.74, 96 KiB
    /// 0.87, 112 KiB 0.96 to 1.15, 256 KiB 1.3.
    pub(crate) const fn coalesced_bytes_max(&self) -> u64 {
        self.config.coalesced_bytes_max / if self.is_direct { 12 } else { 1 }
    }

    /// Returns true if several blocks share this region.
    pub(crate) fn has_several_blocks(&self, id: RegionId) -> bool {
        self.table.with(id, |entry| entry.data.blocks.len() > 1).unwrap_or(false)
    }

    /// Makes regions eligible for reclaim, after the events in `uses`.
    pub(crate) fn let_reclaim(&self, ids: &[RegionId], uses: &[D::Event]) {
        self.table.each(ids, |entry| {
            entry.data.is_eligible = true;
            entry.data.uses = uses.to_vec();
        });
    }

    /// Makes regions ineligible for reclaim.
    pub(crate) fn forbid_reclaim(&self, ids: &[RegionId]) {
        self.table.each(ids, |entry| {
            entry.data.is_eligible = false;
            entry.data.uses.clear();
        });
    }

    /// Returns the events before which the pages of these regions must stay.
    pub(crate) fn uses(&self, ids: &[RegionId]) -> Vec<D::Event> {
        let mut events = Vec::new();
        self.table.each(ids, |entry| events.extend_from_slice(&entry.data.uses));
        events
    }

    /// Changes the role of an awake region.
    pub(crate) fn set_role(&self, id: RegionId, role: Role) -> Result<(), OffloadError> {
        let withdrawn = {
            let mut inner = self.table.lock();
            let Some((entry, shared)) = inner.get_both(id) else { return Err(self.stale(id)) };
            if entry.region.state != RegionState::Awake {
                let state = entry.region.state;
                return Err(OffloadError::NotAwake { region: id, state, what: "a change of role" });
            }
            let (from, tag, bytes) = (entry.data.role, entry.data.tag, entry.data.bytes());
            shared.change_role(from, role, tag, bytes);
            entry.data.role = role;
            entry.data.is_eligible = false;
            inner.feed(id, Input::Withdraw) // refused if it waits for nothing
        };
        match withdrawn.actions() {
            Some(actions) => self.drive(id, actions),
            None => self.table.notify(),
        }
        Ok(())
    }

    /// Returns the bytes of these regions that are asleep or falling asleep.
    pub(crate) fn bytes_not_awake(&self, ids: &[RegionId]) -> u64 {
        let mut bytes = 0;
        self.table.each(ids, |entry| {
            if !matches!(entry.region.state, RegionState::Awake | RegionState::Gone) {
                bytes += entry.data.bytes();
            }
        });
        bytes
    }

    /// Returns the bytes that each link must transfer before these regions are awake. A sleep that has not
    /// ended can be cancelled, and dropped regions need none.
    pub(crate) fn bytes_to_load(&self, ids: &[RegionId]) -> BytesToLoad {
        let mut found = BytesToLoad::default();
        self.table.each(ids, |entry| {
            let bytes = entry.data.copy_bytes as u64;
            match entry.region.state {
                RegionState::Nvme | RegionState::Loading => {
                    found.from_file_bytes += bytes;
                    found.from_host_bytes += if entry.region.direct { 0 } else { bytes };
                }
                // The part that the file must still deliver is not known.
                RegionState::Host | RegionState::Spilling | RegionState::Promoting => {
                    found.from_host_bytes += bytes
                }
                _ => {}
            }
        });
        found
    }

    /// Returns the residency of these regions; those that are gone do not count.
    pub(crate) fn residence(&self, ids: &[RegionId]) -> LayerResidency {
        let mut found = LayerResidency { is_awake: true, ..LayerResidency::default() };
        self.table.each(ids, |entry| {
            let (bytes, state) = (entry.data.bytes(), entry.region.state);
            found.bytes += bytes;
            // A pending wake takes its room when the step in flight ends, before other wakes.
            let is_promised = match entry.data.reservation {
                PageReservation::Promised => true,
                PageReservation::Reserved => false,
                PageReservation::None | PageReservation::Refused | PageReservation::Lost => {
                    state.is_asleep() && entry.region.pending == PendingRequest::Wake
                }
            };
            if !state.is_asleep()
                || is_promised
                || entry.data.reservation == PageReservation::Reserved
            {
                found.resident_bytes += bytes;
            }
            found.promised_bytes += if is_promised { bytes } else { 0 };
            let waits = state == RegionState::Awake && entry.region.wait != RegionWait::None;
            let wakes = entry.region.pending == PendingRequest::Wake
                || matches!(state, RegionState::Awake | RegionState::Loading | RegionState::Waking);
            found.is_awake &= wakes && !waits;
            found.is_leaving |=
                waits || matches!(state, RegionState::FallingAsleep | RegionState::Spilling);
            found.is_in_file |= state == RegionState::Nvme;
        });
        found
    }

    /// Returns device memory that is neither used nor reserved.
    pub(crate) fn free_bytes(&self) -> u64 {
        let stats = self.allocator.stats();
        let used_bytes = stats.active_bytes.current + stats.staged_bytes.current;
        stats.budget_bytes.saturating_sub(used_bytes)
    }

    /// Returns the tiers for dormant memory, preferred first: the file if device memory is host memory
    /// (sleeping there would free none), otherwise pinned memory, then the file.
    pub(crate) fn tiers_in_order(&self) -> Vec<Tier> {
        let nvme = self.nvme.is_some().then_some(Tier::Nvme);
        let host = (self.host.usage().cap_bytes > 0).then_some(Tier::Host);
        let order = if self.is_direct { [nvme, host] } else { [host, nvme] };
        order.into_iter().flatten().collect()
    }

    /// Moves a region from host memory to the file, if it rests there and the file has room.
    pub(super) fn spill(&self, id: RegionId) -> Result<(), OffloadError> {
        let bytes = self.body(id, |b| Some(b.copy_bytes as u64)).unwrap_or(0);
        let extent = self.take_extent(bytes)?;
        let mut inner = self.table.lock();
        let actions = inner.feed(id, Input::Spill).actions();
        if let Some(actions) = actions
            && let Some(entry) = inner.get(id)
        {
            entry.data.extent = Some(Arc::new(extent));
            drop(inner);
            self.drive(id, actions);
        } else {
            drop(inner);
            self.release_extent(extent);
        }
        Ok(())
    }
}
