//! Regions coming and going: adopt, release, free, and looking at them.

use std::sync::Arc;

use dormouse_alloc::{AllocError, BlockId, BlockInfo, Freed};
use dormouse_device::{Device, DeviceKind, SpanLabel};

use super::arrival::Arrival;
use super::counters::bump;
use super::region_blocks::{REGION_BLOCKS_MAX, RegionBlock};
use super::region_data::{PageReservation, tier_of};
use super::sleep::Grant;
use super::transfers::is_indeterminate;
use super::{Account, Engine, RegionData, RegionInfo};
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, Tier};
use crate::table::{FeedResult, REGIONS_MAX};
use dormouse_residency::region::{
    Input, PendingRequest, RefusedInput, Region, RegionState, RegionWait,
};
use dormouse_storage::UNIT_BYTES;

/// What became of blocks that were to be one region.
#[derive(Debug)]
pub(crate) struct Adopted {
    /// `None` where none of them could be part of it.
    pub(crate) id: Option<RegionId>,
    /// Those that could not, by the addresses given, and why.
    pub(crate) refused: Vec<(usize, OffloadError)>,
}

/// Where the bytes of some regions are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerResidency {
    /// All of them.
    pub(crate) bytes: u64,
    /// In device memory, or with room reserved or promised there.
    pub(crate) resident_bytes: u64,
    /// The part of those for which room has still to be reserved.
    pub(crate) promised_bytes: u64,
    /// Nothing of them sleeps or is about to, or its wake is under way.
    pub(crate) is_awake: bool,
    /// Some are on the way to where they are to sleep.
    pub(crate) is_leaving: bool,
    /// Some rest in the file.
    pub(crate) is_in_file: bool,
}

/// Bytes that asleep regions need over each link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct BytesToLoad {
    /// From the file.
    pub(crate) from_file_bytes: u64,
    /// From host memory, those from the file included that pass through it.
    pub(crate) from_host_bytes: u64,
}

impl<D: Device> Engine<D> {
    /// Takes the block around `address` under the engine's care, awake, as one region.
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
        self.adopt_for(address, role, label, None)
    }

    pub(crate) fn adopt_for(
        &self,
        address: usize,
        role: Role,
        label: SpanLabel,
        account: Option<Arc<Account>>,
    ) -> Result<RegionId, OffloadError> {
        let mut adopted = self.adopt_together(&[address], role, label, account)?;
        match (adopted.id, adopted.refused.pop()) {
            (Some(id), _) => Ok(id),
            (None, Some((_, e))) => Err(e),
            (None, None) => Err(OffloadError::NotOurs { address }),
        }
    }

    /// As [`Engine::adopt`], the blocks around up to [`REGION_BLOCKS_MAX`] addresses as one region: one copy
    /// that sleeps and wakes with it. Of several blocks it holds what their owner frees until it
    /// is [released](Engine::release) or all of them are.
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
        debug_assert!(addresses.len() <= REGION_BLOCKS_MAX);
        // I/O wants one range of memory, which several blocks have in host memory only.
        let is_direct = self.is_direct && addresses.len() == 1;
        let inserted = self
            .table
            .lock()
            .insert(Region::awake(is_direct), RegionData::new(role, label, account));
        let limit = u64::from(REGIONS_MAX);
        let id = inserted.ok_or(OffloadError::TooMany { what: "regions", limit })?;
        let (mut blocks, mut refused) = (Vec::new(), Vec::new());
        let (mut bytes, mut total_copy_bytes, mut requested_bytes) = (0, 0, 0);
        // What never sleeps is the whole block; of what does, the pages that are its own.
        let sleeps = matches!(role, Role::Dormant | Role::Tagged);
        for &address in addresses {
            match self.allocator.claim(address, id.key()) {
                Ok(info) => {
                    let range = if sleeps { info.pages } else { info.range };
                    let (block, start) = (info.id, info.range.start);
                    let (offset_bytes, copy_bytes) = (total_copy_bytes, self.copied_bytes(&info));
                    let (span, staged) = (None, None);
                    blocks.push(RegionBlock {
                        block,
                        start,
                        range,
                        offset_bytes,
                        copy_bytes,
                        span,
                        staged,
                    });
                    bytes += range.bytes;
                    total_copy_bytes += copy_bytes;
                    requested_bytes += info.requested_bytes as u64;
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
                entry.data.requested_bytes = requested_bytes;
                shared.enter(role, bytes as u64);
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

    /// How much of a block's pages a copy of them has: on a GPU, whose pages are large, no more than
    /// its owner asked for. On the host he may use all that `malloc_usable_size` tells him.
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

    /// Gives an awake region back to its owner: the engine forgets it. Blocks where its bytes are
    /// still on their way and no stream of the owner's waits for them.
    ///
    /// # Errors
    /// `NotAwake`; `Stale`; `Device` where the bytes did not come: it is its owner's all the same,
    /// but memory is not reused where the device does not say whether they are still coming.
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
        // Its owner may reuse the memory at once, and knows nothing of the copy.
        let arrival = body.arrival.as_ref().and_then(Arrival::unordered);
        let arrived = arrival.map_or(Ok(()), |event| match self.device.synchronize(event) {
            Err(e) if is_indeterminate(&e) => self.await_event(event),
            answer => answer,
        });
        if let Err(e) = &arrived
            && is_indeterminate(e)
        {
            // The copy may be running: what it fills is nobody's again.
            return Ok(arrived?);
        }
        // What he had freed before his stream waited for the copy may be another stream's at once.
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

    /// Gives a block up when nobody copies into it any more.
    fn unclaim_once_over(&self, event: D::Event, block: BlockId) {
        self.once_over(event, move |engine| {
            if engine.allocator.unclaim(block).is_err() {
                bump(&engine.counters.device_faults, 1);
            }
        });
    }

    /// Frees the block that starts at `address`, in any state of its region. Never blocks: memory
    /// under a copy is reused when the copy completes.
    ///
    /// # Errors
    /// `Alloc`: not the start of a live block, or freed before.
    pub fn free(&self, address: usize, stream: u64) -> Result<(), OffloadError> {
        match self.allocator.free(address, stream)? {
            Freed::Done => {}
            Freed::Claimed(key) => {
                if let Some(id) = RegionId::from_key(key)
                    // No region where a release is just giving the block up: its unclaim frees.
                    && self.body(id, |body| body.note_free(address)).is_some()
                {
                    if let Some(actions) = self.table.feed(id, Input::Drop).actions() {
                        dormouse_device::without_waiting(|| self.execute(id, actions));
                        self.pump_in_background();
                    }
                }
            }
        }
        Ok(())
    }

    /// The region around `address`.
    #[must_use]
    pub fn region_at(&self, address: usize) -> Option<RegionId> {
        let id = RegionId::from_key(self.allocator.lookup(address)?.claimed?)?;
        self.table.with(id, |_| id)
    }

    /// What is known of a region.
    ///
    /// # Errors
    /// `Stale`.
    pub fn region_info(&self, id: RegionId) -> Result<RegionInfo, OffloadError> {
        let info = self.table.with(id, |entry| RegionInfo {
            id,
            range: entry.data.range(),
            bytes: entry.data.bytes(),
            requested_bytes: entry.data.requested_bytes,
            role: entry.data.role,
            state: entry.region.state,
            tier: tier_of(&entry.region).unwrap_or(Tier::Device),
            label: entry.data.label,
        });
        info.ok_or_else(|| self.stale(id))
    }

    /// Dormant blocks below this are worth one region with others. Together they go through host
    /// memory, and on a direct device that is one copy more: measured, those of 64 KiB take 0.74 of
    /// the time there, those of 96 KiB 0.87, of 112 KiB 0.96 to 1.15 and of 256 KiB 1.3.
    pub(crate) const fn coalesced_bytes_max(&self) -> u64 {
        self.config.coalesced_bytes_max / if self.is_direct { 12 } else { 1 }
    }

    /// Whether several blocks sleep and wake as this region.
    pub(crate) fn has_several_blocks(&self, id: RegionId) -> bool {
        self.table.with(id, |entry| entry.data.blocks.len() > 1).unwrap_or(false)
    }

    /// From now on reclaim may put these regions to sleep, after the events in `uses`.
    pub(crate) fn let_reclaim(&self, ids: &[RegionId], uses: &[D::Event]) {
        let mut inner = self.table.lock();
        for &id in ids {
            if let Some(entry) = inner.get(id) {
                entry.data.is_eligible = true;
                entry.data.uses = uses.to_vec();
            }
        }
    }

    /// From now on reclaim leaves these regions alone.
    pub(crate) fn forbid_reclaim(&self, ids: &[RegionId]) {
        let mut inner = self.table.lock();
        for &id in ids {
            if let Some(entry) = inner.get(id) {
                entry.data.is_eligible = false;
                entry.data.uses.clear();
            }
        }
    }

    /// What comes before the pages of these regions may go.
    pub(crate) fn uses(&self, ids: &[RegionId]) -> Vec<D::Event> {
        let mut inner = self.table.lock();
        let mut events = Vec::new();
        for &id in ids {
            events.extend(inner.get(id).into_iter().flat_map(|entry| entry.data.uses.clone()));
        }
        events
    }

    /// Changes what an awake region is to the schedule.
    pub(crate) fn set_role(&self, id: RegionId, role: Role) -> Result<(), OffloadError> {
        let withdrawn = {
            let mut inner = self.table.lock();
            let Some((entry, shared)) = inner.get_both(id) else { return Err(self.stale(id)) };
            if entry.region.state != RegionState::Awake {
                let state = entry.region.state;
                return Err(OffloadError::NotAwake { region: id, state, what: "a change of role" });
            }
            shared.change_role(entry.data.role, role, entry.data.bytes());
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

    /// Bytes of these regions that are asleep or on their way there.
    pub(crate) fn bytes_not_awake(&self, ids: &[RegionId]) -> u64 {
        let mut inner = self.table.lock();
        let mut bytes = 0;
        for &id in ids {
            let Some(entry) = inner.get(id) else { continue };
            if !matches!(entry.region.state, RegionState::Awake | RegionState::Gone) {
                bytes += entry.data.bytes();
            }
        }
        bytes
    }

    /// What has to come over each link before these regions are awake. What is only on its way out
    /// can be called back, and what was dropped comes over none.
    pub(crate) fn bytes_to_load(&self, ids: &[RegionId]) -> BytesToLoad {
        let mut inner = self.table.lock();
        let mut found = BytesToLoad::default();
        for &id in ids {
            let Some(entry) = inner.get(id) else { continue };
            let bytes = entry.data.copy_bytes as u64;
            match entry.region.state {
                RegionState::Nvme | RegionState::Loading => {
                    found.from_file_bytes += bytes;
                    found.from_host_bytes += if entry.region.direct { 0 } else { bytes };
                }
                // Nobody knows how much of it the file has still to give.
                RegionState::Host | RegionState::Spilling | RegionState::Promoting => {
                    found.from_host_bytes += bytes
                }
                _ => {}
            }
        }
        found
    }

    /// Where these regions are. Those that are gone count nowhere.
    pub(crate) fn residence(&self, ids: &[RegionId]) -> LayerResidency {
        let mut inner = self.table.lock();
        let mut found = LayerResidency { is_awake: true, ..LayerResidency::default() };
        for &id in ids {
            let Some(entry) = inner.get(id) else { continue };
            let (bytes, state) = (entry.data.bytes(), entry.region.state);
            found.bytes += bytes;
            // What is to wake once a transfer is over takes its room then, and was chosen before others.
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
        }
        found
    }

    /// Device memory that nobody uses nor has reserved.
    pub(crate) fn free_bytes(&self) -> u64 {
        let stats = self.allocator.stats();
        let used_bytes = stats.active_bytes.current + stats.staged_bytes.current;
        stats.budget_bytes.saturating_sub(used_bytes)
    }

    /// Where dormant memory goes, the better place first: the file where the device's memory is
    /// the host's own (sleeping in memory would free none), else pinned memory, then the file.
    pub(crate) fn tiers_in_order(&self) -> Vec<Tier> {
        let nvme = self.nvme.is_some().then_some(Tier::Nvme);
        let host = (self.host.usage().budget_bytes > 0).then_some(Tier::Host);
        let order = if self.is_direct { [nvme, host] } else { [host, nvme] };
        order.into_iter().flatten().collect()
    }

    /// Moves a region from host memory on to the file, if it rests there and there is room.
    pub(super) fn spill(&self, id: RegionId) -> Result<(), OffloadError> {
        let bytes = self.body(id, |b| Some(b.copy_bytes as u64)).unwrap_or(0);
        let extent = self.take_extent(bytes)?;
        let mut inner = self.table.lock();
        let actions = inner.feed(id, Input::Spill).actions();
        if let Some(actions) = actions
            && let Some(entry) = inner.get(id)
        {
            entry.data.extent = Some(extent);
            drop(inner);
            self.drive(id, actions);
        } else {
            drop(inner);
            self.release_extent(extent);
        }
        Ok(())
    }
}
