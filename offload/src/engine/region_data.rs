//! The data kept with each region, and the totals counted under the table's lock.

use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use dormouse_alloc::pinned::PinnedBuffer;
use dormouse_device::{AddressRange, Device, SpanLabel};

use super::account::Account;
use super::arrival::Arrival;
use super::region_blocks::RegionBlock;
use crate::error::OffloadError;
use crate::ids::{RegionId, Role, Tier};
use crate::table::Payload;
use dormouse_residency::region::{
    CopyState, Region, RegionState, RegionStep, RegionWait, SleepGoal,
};
use dormouse_storage::Extent;

/// One region's belongings.
#[derive(Debug)]
pub(crate) struct RegionData<D: Device> {
    /// Its blocks; none only while `adopt` is claiming them.
    pub(crate) blocks: Vec<RegionBlock<D>>,
    /// Starts of blocks that their owner has freed meanwhile.
    pub(crate) freed: Vec<usize>,
    /// What it counts for: its pages.
    pub(crate) bytes: u64,
    /// Bytes of a copy of it.
    pub(crate) copy_bytes: usize,
    pub(crate) requested_bytes: u64,
    pub(crate) role: Role,
    pub(crate) label: SpanLabel,
    /// Where the bytes may still be on their way, though it is awake.
    pub(crate) arrival: Option<Arrival<D::Event>>,
    /// What comes before pages may go, wherever reclaim chooses it.
    pub(crate) uses: Vec<D::Event>,
    pub(crate) extent: Option<Extent>,
    pub(crate) host: Option<PinnedBuffer>,
    /// On its way to the file it passes through host memory that is no tier's.
    pub(crate) is_bounced: bool,
    /// Room for its pages, where it wakes.
    pub(crate) reservation: PageReservation,
    pub(crate) cancel: Arc<AtomicBool>,
    /// Why the last sleep or wake failed.
    pub(crate) error: Option<Arc<OffloadError>>,
    pub(crate) account: Option<Arc<Account>>,
    /// Reclaim may put it to sleep.
    pub(crate) is_eligible: bool,
}

/// Room for the pages of a region that wakes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum PageReservation {
    /// Not asked for.
    None,
    /// An I/O thread is to reserve it.
    Promised,
    /// None was to be had by an I/O thread, which waits for nobody: the next wake asks at once.
    Refused,
    /// Reserved with the allocator.
    Reserved,
    /// Reserved, and nobody's for good: a copy may be filling pages that are in it.
    Lost,
}

impl<D: Device> RegionData<D> {
    pub(crate) fn new(role: Role, label: SpanLabel, account: Option<Arc<Account>>) -> Self {
        Self {
            blocks: Vec::new(),
            freed: Vec::new(),
            bytes: 0,
            copy_bytes: 0,
            requested_bytes: 0,
            role,
            label,
            arrival: None,
            uses: Vec::new(),
            extent: None,
            host: None,
            is_bounced: false,
            reservation: PageReservation::None,
            cancel: Arc::new(AtomicBool::new(false)),
            error: None,
            account,
            is_eligible: false,
        }
    }

    pub(crate) const fn bytes(&self) -> u64 {
        self.bytes
    }

    /// The addresses of its first block.
    pub(crate) fn range(&self) -> AddressRange {
        self.blocks.first().map(|part| part.range).unwrap_or_default()
    }
}

/// A figure and its highest.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Level {
    /// Now.
    pub current_bytes: u64,
    /// The highest since the last reset.
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

/// Queues and totals of the table, under its lock. The queues hold exactly the regions in that wait.
#[derive(Debug, Default)]
pub(crate) struct TableState {
    /// Regions in [`RegionWait::Window`], first come first served.
    pub(crate) window_queue: VecDeque<RegionId>,
    /// Regions in [`RegionWait::Admission`], first come first served.
    pub(crate) admission_queue: VecDeque<RegionId>,
    /// Regions in [`RegionWait::Promotion`], in the order of need.
    pub(crate) promotion_queue: VecDeque<RegionId>,
    /// A thread is serving the admission queue.
    pub(crate) is_admitting: bool,
    /// Another thread wanted to meanwhile: the serving one looks again.
    pub(crate) admit_again: bool,
    pub(crate) inflight_bytes: u64,
    /// Asleep, in a bounce buffer until the file has them: they hold up the window too.
    pub(crate) bounced_bytes: u64,
    pub(crate) queued_bytes: u64,
    /// Sleeps that wait for the caller's events.
    pub(crate) event_wait_bytes: u64,
    /// Bytes whose pages have gone, ever: reclaim watches it grow.
    pub(crate) sealed_bytes_total: u64,
    pub(crate) tiers: [Level; 3],
    pub(crate) roles: [Level; 4],
    pub(crate) roles_asleep: [Level; 4],
    pub(crate) is_closed: bool,
    /// For the pool: a transfer has been called off that may not have begun.
    pub(crate) called_off: Arc<AtomicBool>,
}

impl TableState {
    /// Bytes on their way to sleep that somebody short of memory may wait for. What waits for
    /// events counts where these come by themselves, as work that is queued on a GPU does; on
    /// other devices they may depend on whoever would wait.
    pub(crate) const fn coming_bytes(&self, events_come: bool) -> u64 {
        let event_wait_bytes = if events_come { self.event_wait_bytes } else { 0 };
        self.inflight_bytes + self.queued_bytes + event_wait_bytes
    }

    /// A region of `bytes` waits for something else than before.
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

    /// A region came under the engine's care, awake.
    pub(crate) fn enter(&mut self, role: Role, bytes: u64) {
        self.roles[role.index()].add(bytes);
        self.tiers[Tier::Device.index()].add(bytes);
    }

    /// So many bytes of a region that is falling asleep stay awake, and are its owner's alone.
    pub(crate) fn detach_blocks(&mut self, role: Role, bytes: u64) {
        self.inflight_bytes = self.inflight_bytes.saturating_sub(bytes);
        for level in [&mut self.roles[role.index()], &mut self.tiers[Tier::Device.index()]] {
            level.current_bytes = level.current_bytes.saturating_sub(bytes);
        }
    }

    /// An awake region changes its role.
    pub(crate) fn change_role(&mut self, from: Role, to: Role, bytes: u64) {
        self.roles[from.index()].remove(bytes);
        self.roles[to.index()].add(bytes);
    }
}

/// Where a region's bytes count; `None` where they are nowhere.
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
        // Release: whoever sees this sees that.
        shared.called_off.store(true, Ordering::Release);
    }

    fn moved(&mut self, id: RegionId, before: &Region, after: &Region, shared: &mut TableState) {
        let bytes = self.bytes();
        if before.wait != after.wait {
            shared.wait_changed(id, before.wait, after.wait, bytes);
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
        let was_falling = before.state == RegionState::FallingAsleep;
        let is_falling = after.state == RegionState::FallingAsleep;
        if is_falling && !was_falling {
            shared.inflight_bytes += bytes;
        }
        if was_falling && !is_falling {
            shared.inflight_bytes = shared.inflight_bytes.saturating_sub(bytes);
        }
        let bounces = |r: &Region| {
            self.is_bounced && r.goal == SleepGoal::Nvme && r.state == RegionState::Spilling
        };
        match (bounces(before), bounces(after)) {
            (false, true) => shared.bounced_bytes += bytes,
            (true, false) => {
                shared.bounced_bytes = shared.bounced_bytes.saturating_sub(bytes);
            }
            _ => {}
        }
        let role = self.role.index();
        if after.state.is_asleep() && !before.state.is_asleep() {
            shared.sealed_bytes_total += bytes;
            shared.roles_asleep[role].add(bytes);
        }
        if before.state.is_asleep() && !after.state.is_asleep() {
            shared.roles_asleep[role].remove(bytes);
        }
        if after.state == RegionState::Gone && before.state != RegionState::Gone {
            shared.roles[role].remove(bytes);
        }
        let (from, to) = (tier_of(before), tier_of(after));
        if from != to {
            if let Some(tier) = from {
                shared.tiers[tier.index()].remove(bytes);
            }
            if let Some(tier) = to {
                shared.tiers[tier.index()].add(bytes);
            }
        }
        if let Some(account) = &self.account {
            account.moved(before, after, bytes);
        }
    }
}
