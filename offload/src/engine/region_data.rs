//! The data of each region, and the totals under the table's lock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dormouse_alloc::pinned::PinnedBuffer;
use dormouse_device::{AddressRange, Device, SpanLabel};
use dormouse_timeline::{NameId, now_ns};

use super::RoleStats;
use super::account::Account;
use super::arrival::Arrival;
use super::host_reads::HostReads;
use super::owner_levels::OwnerLevels;
use super::region_blocks::RegionBlock;
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, Tier, layer_of};
use crate::table::Payload;
use dormouse_residency::region::{
    CopyState, PendingRequest, Region, RegionState, RegionStep, RegionWait, SleepGoal,
};
use dormouse_storage::Extent;

/// The resources and settings of one region.
#[derive(Debug)]
pub(crate) struct RegionData<D: Device> {
    /// Its blocks; empty only while `adopt` claims them.
    pub(crate) blocks: Vec<RegionBlock<D>>,
    /// Addresses of blocks that their owner has freed.
    pub(crate) freed: Vec<usize>,
    /// Bytes of its pages.
    pub(crate) bytes: u64,
    /// Bytes of its copy.
    pub(crate) copy_bytes: usize,
    pub(crate) role: Role,
    pub(crate) label: SpanLabel,
    /// The copy in that may still run although the region is awake.
    pub(crate) arrival: Option<Arrival<D::Event>>,
    /// Events before which reclaim must not remove its pages.
    pub(crate) uses: Vec<D::Event>,
    /// Shared with the threads that read it.
    pub(crate) extent: Option<Arc<Extent>>,
    pub(crate) host: Option<PinnedBuffer>,
    /// Number of its host copies that are given back once the copy in that reads them is over.
    pub(crate) hosts_in_use: u32,
    /// On its way to the file it passes through host memory outside the host tier's budget.
    pub(crate) is_bounced: bool,
    /// Bytes of its host copy, if they count as a load's.
    pub(crate) load_bytes: Option<u64>,
    /// Device memory reserved for its wake.
    pub(crate) reservation: PageReservation,
    pub(crate) cancel: Arc<AtomicBool>,
    /// Error of the last sleep or wake.
    pub(crate) error: Option<Arc<OffloadError>>,
    pub(crate) account: Option<Arc<Account>>,
    /// Whether reclaim may put it to sleep.
    pub(crate) is_eligible: bool,
    /// While it waits for host memory, regions of its owner may move on to the file for it.
    pub(crate) may_displace: bool,
    /// Why it has found no place so far.
    pub(crate) refused: Option<OffloadError>,
    /// No tier can take it. The marks do not ask again before phase B.
    pub(crate) is_declined: bool,
    /// Number of times that a stray access woke it.
    pub(crate) stray_wakes: u32,
    /// Number of times that it ceased to be asleep.
    pub(crate) wakes: u64,
    /// The name of its tag, for [`Role::Tagged`].
    pub(crate) tag: NameId,
    /// When the next copy could begin but for room: the last sleep or wake was asked for, or the copy before it
    /// ended. Nanoseconds of the timeline.
    pub(crate) asked_ns: u64,
}

/// Device memory reserved for a wake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageReservation {
    /// None.
    None,
    /// An I/O thread is to reserve it.
    Promised,
    /// An I/O thread found none and did not wait; the next wake reserves on its own thread.
    Refused,
    /// Reserved with the allocator.
    Reserved,
    /// Reserved and never released: a copy may be filling these pages.
    Lost,
}

impl<D: Device> RegionData<D> {
    pub(crate) fn new(
        role: Role,
        label: SpanLabel,
        tag: NameId,
        account: Option<Arc<Account>>,
    ) -> Self {
        Self {
            blocks: Vec::new(),
            freed: Vec::new(),
            bytes: 0,
            copy_bytes: 0,
            role,
            label,
            arrival: None,
            uses: Vec::new(),
            extent: None,
            host: None,
            hosts_in_use: 0,
            is_bounced: false,
            load_bytes: None,
            reservation: PageReservation::None,
            cancel: Arc::new(AtomicBool::new(false)),
            error: None,
            account,
            is_eligible: false,
            may_displace: false,
            refused: None,
            is_declined: false,
            stray_wakes: 0,
            wakes: 0,
            tag,
            asked_ns: 0,
        }
    }

    /// Returns whether it goes to the file through a bounce buffer.
    fn goes_by_host(&self, region: &Region) -> bool {
        self.is_bounced && region.goal == SleepGoal::Nvme
    }

    /// Returns whether its bytes have left for good while its pages are removed. What goes on to the file
    /// keeps its bounce buffer.
    pub(crate) fn is_sealing(&self, region: &Region) -> bool {
        region.state == RegionState::FallingAsleep
            && region.in_flight == Some(RegionStep::Seal)
            && !self.goes_by_host(region)
    }

    /// Returns its layer, if it belongs to one.
    pub(crate) fn layer(&self) -> Option<u32> {
        layer_of(&self.label)
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Returns the addresses of its first block.
    pub(crate) fn range(&self) -> AddressRange {
        self.blocks.first().map(|part| part.range).unwrap_or_default()
    }

    /// Returns the extent that a write fills. No thread reads it before the write is complete.
    pub(super) fn written_extent(&mut self) -> Option<&mut Extent> {
        self.extent.as_mut().and_then(Arc::get_mut)
    }
}

/// A level and its peak.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level {
    /// Current bytes.
    pub current_bytes: u64,
    /// Peak of `current_bytes` since the last reset.
    pub peak_bytes: u64,
    /// Regions counted in `current_bytes`.
    pub regions: u64,
}

impl Level {
    fn add(&mut self, bytes: u64) {
        self.current_bytes += bytes;
        self.regions += 1;
        self.peak_bytes = self.peak_bytes.max(self.current_bytes);
    }

    fn remove(&mut self, bytes: u64) {
        self.current_bytes = self.current_bytes.saturating_sub(bytes);
        self.regions = self.regions.saturating_sub(1);
    }

    pub(crate) fn reset_peak(&mut self) {
        self.peak_bytes = self.current_bytes;
    }
}

/// Moves a region of `bytes` from one of `levels` to another; `None` is outside of all.
fn change(levels: &mut [Level], from: Option<usize>, to: Option<usize>, bytes: u64) {
    if from != to {
        from.into_iter().for_each(|at| levels[at].remove(bytes));
        to.into_iter().for_each(|at| levels[at].add(bytes));
    }
}

/// Queues and totals, under the table's lock. A queue holds exactly the regions in its wait.
#[derive(Debug, Default)]
pub(crate) struct TableState {
    /// Regions in [`RegionWait::Window`], first come first served.
    pub(crate) window_queue: VecDeque<RegionId>,
    /// Regions in [`RegionWait::Admission`], first come first served.
    pub(crate) admission_queue: VecDeque<RegionId>,
    /// Regions that have left it awake, whose owners are yet to be told.
    pub(crate) unplaced: Vec<RegionId>,
    /// Regions in [`RegionWait::Promotion`], in the order of need.
    pub(crate) promotion_queue: VecDeque<RegionId>,
    /// A thread is serving the admission queue.
    pub(crate) is_admitting: bool,
    /// Another thread found it served: the serving one looks again.
    pub(crate) admit_again: bool,
    pub(crate) inflight_bytes: u64,
    /// Those of them that have left for good and whose pages are being removed. The window does not count
    /// them.
    pub(crate) sealing_bytes: u64,
    /// Bytes in bounce buffers on their way to the file. They count against the window.
    pub(crate) bounced_bytes: u64,
    pub(crate) queued_bytes: u64,
    /// Bytes of regions in [`RegionWait::Events`].
    pub(crate) event_wait_bytes: u64,
    /// Bytes whose pages were removed, in total; reclaim watches it grow.
    pub(crate) sealed_bytes_total: u64,
    pub(crate) tiers: [Level; 3],
    pub(crate) roles: [RoleStats; 4],
    /// Awake bytes by role and tag, on the timeline.
    pub(crate) owners: OwnerLevels,
    pub(crate) is_closed: bool,
    /// Set for the I/O pool when a transfer that may be queued is cancelled.
    pub(crate) called_off: Arc<AtomicBool>,
    /// Host copies that threads read.
    pub(crate) host_reads: HostReads,
}

impl TableState {
    /// Returns the bytes falling asleep that reclaim may wait for. Event waits count only on devices whose
    /// events complete by themselves (a GPU's); elsewhere they may depend on the waiting thread.
    pub(crate) const fn coming_bytes(&self, events_come: bool) -> u64 {
        let event_wait_bytes = if events_come { self.event_wait_bytes } else { 0 };
        self.inflight_bytes + self.queued_bytes + event_wait_bytes
    }

    /// Moves a region of `bytes` from one wait to another.
    fn wait_changed(&mut self, id: RegionId, from: RegionWait, to: RegionWait, bytes: u64) {
        if let Some(queue) = self.queue_of(from)
            && let Some(at) = queue.iter().position(|&waiting| waiting == id)
        {
            queue.remove(at);
        }
        if let Some(total) = self.waiting_bytes(from) {
            *total = total.saturating_sub(bytes);
        }
        if let Some(queue) = self.queue_of(to) {
            queue.push_back(id);
        }
        if let Some(total) = self.waiting_bytes(to) {
            *total += bytes;
        }
    }

    const fn queue_of(&mut self, wait: RegionWait) -> Option<&mut VecDeque<RegionId>> {
        match wait {
            RegionWait::None | RegionWait::Events { .. } => None,
            RegionWait::Admission(_) => Some(&mut self.admission_queue),
            RegionWait::Window(_) => Some(&mut self.window_queue),
            RegionWait::Promotion => Some(&mut self.promotion_queue),
        }
    }

    const fn waiting_bytes(&mut self, wait: RegionWait) -> Option<&mut u64> {
        match wait {
            RegionWait::Events { .. } => Some(&mut self.event_wait_bytes),
            RegionWait::Window(_) => Some(&mut self.queued_bytes),
            _ => None,
        }
    }

    /// Counts a new, awake region.
    pub(crate) fn enter(&mut self, role: Role, tag: NameId, bytes: u64) {
        self.owners.add(role, tag, bytes);
        self.roles[role.index()].all.add(bytes);
        self.tiers[Tier::Device.index()].add(bytes);
    }

    /// Removes the bytes of blocks that leave a region while its pages are removed.
    /// `is_sealing`: [`RegionData::is_sealing`].
    pub(crate) fn detach_blocks(&mut self, role: Role, tag: NameId, bytes: u64, is_sealing: bool) {
        self.owners.remove(role, tag, bytes);
        self.inflight_bytes = self.inflight_bytes.saturating_sub(bytes);
        if is_sealing {
            self.sealing_bytes = self.sealing_bytes.saturating_sub(bytes);
        }
        for level in [&mut self.roles[role.index()].all, &mut self.tiers[Tier::Device.index()]] {
            level.current_bytes = level.current_bytes.saturating_sub(bytes);
        }
    }

    /// Counts a change of an awake region's role.
    pub(crate) fn change_role(&mut self, from: Role, to: Role, tag: NameId, bytes: u64) {
        self.owners.remove(from, tag, bytes);
        self.owners.add(to, tag, bytes);
        self.roles[from.index()].all.remove(bytes);
        self.roles[to.index()].all.add(bytes);
    }
}

/// Counts `bytes` that begin or end to belong to `total`.
const fn recount(total: &mut u64, bytes: u64, before: bool, after: bool) {
    match (before, after) {
        (false, true) => *total += bytes,
        (true, false) => *total = total.saturating_sub(bytes),
        _ => {}
    }
}

/// Returns true if the region's pages are on the device and its own.
const fn is_on_device(region: &Region) -> bool {
    matches!(region.state, RegionState::Awake | RegionState::FallingAsleep)
}

/// Returns true if a sleep or a wake was requested between the two.
fn was_requested(before: &Region, after: &Region) -> bool {
    let sleeps = |r: &Region| {
        matches!(r.state, RegionState::FallingAsleep | RegionState::Spilling)
            || (r.state == RegionState::Awake && r.wait != RegionWait::None)
    };
    let wakes = |r: &Region| {
        r.pending == PendingRequest::Wake
            || matches!(
                r.state,
                RegionState::Promoting | RegionState::Loading | RegionState::Waking
            )
    };
    (sleeps(after) && !sleeps(before)) || (wakes(after) && !wakes(before))
}

/// Returns the tier in which a region's bytes count, if any.
pub(crate) fn tier_of(region: &Region) -> Option<Tier> {
    match region.state {
        RegionState::Awake | RegionState::FallingAsleep => Some(Tier::Device),
        RegionState::Host | RegionState::Spilling => Some(Tier::Host),
        RegionState::Nvme | RegionState::Loading | RegionState::Promoting => Some(Tier::Nvme),
        RegionState::Waking if region.extent == CopyState::Valid => Some(Tier::Nvme),
        RegionState::Waking if region.host == CopyState::Valid => Some(Tier::Host),
        RegionState::Waking | RegionState::Empty | RegionState::Gone => None,
    }
}

impl<D: Device> Payload for RegionData<D> {
    type Shared = TableState;

    fn cancel(&self, shared: &TableState) {
        // Relaxed: a hint to stop early; the completion comes through the table's lock.
        self.cancel.store(true, Ordering::Relaxed);
        // Release: a thread that sees this sees the store before it.
        shared.called_off.store(true, Ordering::Release);
    }

    fn moved(&mut self, id: RegionId, before: &Region, after: &Region, shared: &mut TableState) {
        let bytes = self.bytes();
        if before.wait != after.wait {
            shared.wait_changed(id, before.wait, after.wait, bytes);
            let had_no_place = matches!(before.wait, RegionWait::Admission(_));
            if had_no_place && after.wait == RegionWait::None && after.state == RegionState::Awake {
                shared.unplaced.push(id);
            }
        }
        if before.is_settled() && !after.is_settled() {
            self.error = None; // of an earlier sleep or wake
        }
        if after.in_flight != before.in_flight
            && matches!(after.in_flight, Some(RegionStep::Write | RegionStep::Read))
        {
            // Relaxed: the transfer that reads it starts after this lock.
            self.cancel.store(false, Ordering::Relaxed);
        }
        let is_falling = |r: &Region| r.state == RegionState::FallingAsleep;
        let bounces = |r: &Region| self.goes_by_host(r) && r.state == RegionState::Spilling;
        recount(&mut shared.inflight_bytes, bytes, is_falling(before), is_falling(after));
        recount(&mut shared.sealing_bytes, bytes, self.is_sealing(before), self.is_sealing(after));
        recount(&mut shared.bounced_bytes, bytes, bounces(before), bounces(after));
        let role = self.role.index();
        if after.state.is_asleep() && !before.state.is_asleep() {
            shared.sealed_bytes_total += bytes;
        }
        self.wakes += u64::from(before.state.is_asleep() && !after.state.is_asleep());
        match (is_on_device(before), is_on_device(after)) {
            (true, false) => shared.owners.remove(self.role, self.tag, bytes),
            (false, true) => shared.owners.add(self.role, self.tag, bytes),
            _ => {}
        }
        if self.role == Role::Tagged {
            let (was_asleep, is_asleep) = (before.state.is_asleep(), after.state.is_asleep());
            shared.owners.change_asleep(self.tag, was_asleep, is_asleep, bytes);
        }
        if was_requested(before, after) {
            self.asked_ns = now_ns();
        }
        let asleep = |r: &Region| r.state.is_asleep().then_some(0);
        let levels = std::slice::from_mut(&mut shared.roles[role].asleep);
        change(levels, asleep(before), asleep(after), bytes);
        if after.state == RegionState::Gone && before.state != RegionState::Gone {
            shared.roles[role].all.remove(bytes);
        }
        let tier = |r: &Region| tier_of(r).map(Tier::index);
        change(&mut shared.tiers, tier(before), tier(after), bytes);
        if let Some(account) = &self.account {
            account.moved(before, after, bytes);
        }
    }
}
