//! Sleeps: places are granted first, then the sleep waits for the in-flight window.

use std::collections::HashSet;
use std::sync::Arc;

use dormouse_alloc::pinned::{PinMode, PinnedBuffer};
use dormouse_alloc::{BlockId, UsesEnd};
use dormouse_device::Device;
use dormouse_timeline::{Gauge, Lane};

use super::{Engine, RegionData, TableState};
use crate::error::OffloadError;
use crate::ids::{RegionId, Tier};
use crate::table::FeedResult;
use dormouse_residency::region::{Input, RegionState, SleepGoal};
use dormouse_storage::Extent;
use dormouse_storage::sync::lock;

/// Why a region without a known end of its uses stays awake.
pub(super) const NO_END: &str =
    "a stream that was destroyed may use it, and the end of that use is unknown";

/// Why a region stays awake that no tier has refused: others were before it in the admission queue.
const NO_ROOM_IN_TIME: &str = "its tier had no room until the region left the admission queue";

/// The result of a sleep request. No byte has been copied yet.
#[derive(Clone, Debug, Default)]
pub struct SleepOutcome {
    /// Bytes accepted: asleep already, or falling asleep unless woken, freed or written to first.
    pub accepted_bytes: u64,
    /// Bytes that stay awake.
    pub declined_bytes: u64,
    /// Reason for the first declined region.
    pub declined: Option<String>,
    /// Regions that the tier has no place for.
    pub(super) without_place: Vec<WithoutPlace>,
    /// Part of `declined_bytes`: regions that the tier was not asked about, as they are in transition.
    pub(super) busy_bytes: u64,
}

/// The end of the uses of regions: see [`Engine::uses_end`].
#[derive(Clone, Debug)]
pub struct RegionUses<D: Device> {
    /// Regions whose uses end with `events`.
    pub known: Vec<RegionId>,
    /// Regions whose uses have no known end.
    pub without_end: Vec<RegionId>,
    /// The events.
    pub events: Vec<D::Event>,
}

/// A region that a tier has no place for.
#[derive(Clone, Debug)]
pub(super) struct WithoutPlace {
    pub(super) id: RegionId,
    pub(super) refused: OffloadError,
}

impl SleepOutcome {
    /// Declines a region that is in transition.
    fn decline_busy(&mut self, bytes: u64, reason: impl Into<String>) {
        self.busy_bytes += bytes;
        self.decline(bytes, reason);
    }

    pub(super) fn decline(&mut self, bytes: u64, reason: impl Into<String>) {
        self.declined_bytes += bytes;
        self.declined.get_or_insert_with(|| reason.into());
    }
}

/// Returns the goal of a sleep into `tier`.
pub(super) fn goal_of(tier: Tier) -> SleepGoal {
    if tier == Tier::Nvme { SleepGoal::Nvme } else { SleepGoal::Host }
}

/// Places held for a sleep that has not begun.
#[derive(Debug, Default)]
pub(super) struct Grant {
    pub(super) extent: Option<Arc<Extent>>,
    pub(super) host: Option<PinnedBuffer>,
}

/// The initiator of a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Initiator {
    /// The owner, who knows the next use.
    Caller,
    /// Reclaim: eligible regions only, checked under the lock, so that a region its prefix has just marked as
    /// needed never falls asleep.
    Reclaim,
}

/// The state of a region that is to sleep.
enum SleepCheck {
    Gone,
    Sleeping(u64),
    InHost(u64),
    Refused(u64, String),
    Ready { bytes: u64, copy_bytes: u64 },
}

impl<D: Device> Engine<D> {
    /// Puts regions to sleep in `tier` once the events in `after` have completed; they must follow every
    /// use of the regions ([`Engine::uses_end`] returns those that the allocator knows). Returns at once.
    /// A region without a place is declined and stays awake, as does one that is written to. Regions
    /// that are gone are skipped; those asleep are accepted, and move on to the file if they are in host
    /// memory and `tier` is `Nvme`.
    ///
    /// # Errors
    /// `Argument` for `Tier::Device`; `Device` if an event cannot be waited for.
    pub fn sleep(
        &self,
        ids: &[RegionId],
        tier: Tier,
        after: &[D::Event],
    ) -> Result<SleepOutcome, OffloadError> {
        if tier == Tier::Device {
            return Err(OffloadError::argument("tier", "Device", "Host or Nvme"));
        }
        self.sleep_to(ids, goal_of(tier), after, Initiator::Caller)
    }

    /// Returns the end of the uses of these regions: an event on each stream that the allocator knows to use them,
    /// behind its work so far. A region that a destroyed stream may use is to stay awake, and the report of its owner
    /// says why.
    ///
    /// # Errors
    /// `Alloc` if a stream takes no event, for example during a capture.
    pub fn uses_end(&self, ids: &[RegionId]) -> Result<RegionUses<D>, OffloadError> {
        let UsesEnd { events, without_end } = self.allocator.uses_end(&self.blocks(ids))?;
        let blocks: HashSet<BlockId> = without_end.into_iter().collect();
        let has_no_end = |id: RegionId| {
            let parts = |body: &mut RegionData<D>| {
                Some(body.blocks.iter().any(|part| blocks.contains(&part.block)))
            };
            !blocks.is_empty() && self.body(id, parts) == Some(true)
        };
        let (without_end, known): (Vec<_>, Vec<_>) = ids.iter().partition(|id| has_no_end(**id));
        for &id in &without_end {
            self.note_reason(id, NO_END);
            tracing::debug!(target: "offload", region = id.key(), reason = NO_END, "sleep declined");
        }
        Ok(RegionUses { known, without_end, events })
    }

    pub(super) fn sleep_to(
        &self,
        ids: &[RegionId],
        goal: SleepGoal,
        after: &[D::Event],
        who: Initiator,
    ) -> Result<SleepOutcome, OffloadError> {
        let outcome = self.try_sleep(ids, goal, after, who)?;
        for place in &outcome.without_place {
            self.decline(place.id, Some(&place.refused));
        }
        self.pump();
        Ok(outcome)
    }

    /// As [`Engine::sleep_to`], without starting the queued sleeps. Only the outcome tells of regions without a place:
    /// another tier may have one.
    pub(super) fn try_sleep(
        &self,
        ids: &[RegionId],
        goal: SleepGoal,
        after: &[D::Event],
        who: Initiator,
    ) -> Result<SleepOutcome, OffloadError> {
        let event_wait = match who {
            // Without a copy out, only these events order the sleep behind a copy in.
            Initiator::Caller if goal == SleepGoal::Empty => {
                let arriving = ids.iter().filter_map(|&id| self.arrival(id)).map(|a| a.event);
                self.make_event_wait(&after.iter().cloned().chain(arriving).collect::<Vec<_>>())?
            }
            Initiator::Caller => self.make_event_wait(after)?,
            Initiator::Reclaim => self.make_event_wait(&self.uses(ids))?,
        };
        let ticket = event_wait.as_ref().map(|wait| wait.ticket);
        let mut outcome = SleepOutcome::default();
        for &id in ids {
            match self.look(id) {
                SleepCheck::Gone => {}
                SleepCheck::Sleeping(bytes) => outcome.accepted_bytes += bytes,
                SleepCheck::InHost(bytes) => {
                    outcome.accepted_bytes += bytes;
                    // If the file has no room, the region stays in host memory.
                    if goal == SleepGoal::Nvme
                        && let Err(e) = self.spill(id)
                    {
                        outcome.decline(0, e.to_string());
                    }
                }
                SleepCheck::Refused(bytes, reason) => outcome.decline_busy(bytes, reason),
                SleepCheck::Ready { bytes, copy_bytes } => match self.grant(copy_bytes, goal) {
                    Ok(grant) => {
                        if self.agree(id, goal, ticket, grant, who) {
                            outcome.accepted_bytes += bytes;
                        } else {
                            outcome.decline_busy(bytes, "the region changed during the request");
                        }
                    }
                    Err(refused) => {
                        outcome.decline(bytes, refused.to_string());
                        outcome.without_place.push(WithoutPlace { id, refused });
                    }
                },
            }
        }
        if let Some(event_wait) = event_wait {
            self.arm_event_wait(event_wait, ids)?;
        }
        Ok(outcome)
    }

    /// Counts a region that stays awake because it has found no place, and notes why in the report of its owner: its last
    /// refusal, if it had one.
    pub(super) fn decline(&self, id: RegionId, refused: Option<&OffloadError>) {
        let bytes = self.body(id, |body| Some(body.bytes())).unwrap_or_default();
        let reason = refused.map_or_else(|| NO_ROOM_IN_TIME.to_owned(), ToString::to_string);
        lock(&self.counts).declined += 1;
        self.timeline.instant(Lane::Notice, self.names.declined, bytes);
        self.note_reason(id, &reason);
        tracing::debug!(target: "offload", region = id.key(), bytes, %reason, "sleep declined");
    }

    /// Notes the reason in the report of the region's owner.
    pub(super) fn note_decline(&self, id: RegionId, error: &OffloadError) {
        self.note_reason(id, &error.to_string());
    }

    fn note_reason(&self, id: RegionId, reason: &str) {
        if let Some(account) = self.body(id, |body| body.account.clone()) {
            account.decline(reason);
        }
    }

    fn look(&self, id: RegionId) -> SleepCheck {
        let mut inner = self.table.lock();
        let closed = if inner.is_broken {
            Some(OffloadError::Broken)
        } else {
            inner.shared.is_closed.then_some(OffloadError::ShutDown)
        };
        let Some(entry) = inner.get(id) else { return SleepCheck::Gone };
        let bytes = entry.data.bytes();
        let state = entry.region.state;
        if !entry.data.role.may_sleep() {
            return SleepCheck::Refused(
                bytes,
                format!("{:?} regions never sleep", entry.data.role),
            );
        }
        if entry.region.wait.is_admitted() || state == RegionState::FallingAsleep {
            return SleepCheck::Sleeping(bytes);
        }
        match state {
            RegionState::Gone => SleepCheck::Gone,
            _ if closed.is_some() => {
                SleepCheck::Refused(bytes, closed.map(|why| why.to_string()).unwrap_or_default())
            }
            RegionState::Awake if entry.is_idle() => {
                SleepCheck::Ready { bytes, copy_bytes: entry.data.copy_bytes as u64 }
            }
            RegionState::Host if entry.is_idle() => SleepCheck::InHost(bytes),
            RegionState::Host
            | RegionState::Spilling
            | RegionState::Nvme
            | RegionState::Promoting
            | RegionState::Empty => SleepCheck::Sleeping(bytes),
            _ => SleepCheck::Refused(bytes, format!("the region is {state:?}")),
        }
    }

    /// Takes the places that `goal` needs.
    fn grant(&self, bytes: u64, goal: SleepGoal) -> Result<Grant, OffloadError> {
        let mut grant = Grant::default();
        if goal == SleepGoal::Nvme {
            grant.extent = Some(Arc::new(self.take_extent(bytes)?));
        }
        // On a direct device, host memory on the way to the file is taken when it is needed, bounded by the
        // in-flight window instead of the tier's budget.
        if goal == SleepGoal::Host || (goal == SleepGoal::Nvme && !self.is_direct) {
            let whole = usize::try_from(bytes).unwrap_or(usize::MAX);
            match self.take(whole, PinMode::Now) {
                Ok(buffer) => grant.host = Some(buffer),
                Err(e) => {
                    self.give_back(grant);
                    return Err(e.into());
                }
            }
        }
        Ok(grant)
    }

    /// Admits a sleep. Returns false if the region has changed since [`Engine::look`].
    fn agree(
        &self,
        id: RegionId,
        goal: SleepGoal,
        ticket: Option<u64>,
        grant: Grant,
        who: Initiator,
    ) -> bool {
        {
            let mut inner = self.table.lock();
            let may = inner.get(id).is_some_and(|e| who == Initiator::Caller || e.data.is_eligible);
            if may
                && inner.feed(id, Input::Admit { goal, ticket }) == FeedResult::Kept
                && let Some(entry) = inner.get(id)
            {
                (entry.data.extent, entry.data.host) = (grant.extent, grant.host);
                entry.data.refused = None;
                return true;
            }
        }
        self.give_back(grant);
        false
    }

    /// Serves the queues: starts loads, admits sleeps, starts admitted ones as far as the window allows, and
    /// promotes regions while host memory is left.
    pub(super) fn pump(&self) {
        self.serve_loads();
        self.serve_admissions();
        self.decline_unplaced();
        while self.start_queued_sleep() {}
        self.serve_promotions();
    }

    /// Starts the next admitted sleep if the window has room for it. Returns false if none started.
    pub(super) fn start_queued_sleep(&self) -> bool {
        let Some((id, actions)) = self.next_queued_sleep() else { return false };
        self.execute(id, actions);
        true
    }

    /// As [`Engine::pump`], on an I/O thread: starting a sleep may wait for a stream's queue, and a free
    /// must not.
    pub(super) fn pump_in_background(&self) {
        let has_work = {
            let mut inner = self.table.lock();
            let first = inner.shared.window_queue.front().copied();
            let bytes = first.and_then(|id| Some(inner.get(id)?.data.bytes()));
            let has_waiting = !(inner.shared.admission_queue.is_empty()
                && inner.shared.promotion_queue.is_empty());
            let is_next = bytes.is_some_and(|bytes| self.fits(&inner.shared, bytes));
            !inner.shared.is_closed && (has_waiting || is_next)
        };
        // Loads also behind a shutdown: what waits for them is told.
        if (has_work || self.has_load_to_start())
            && let Some(engine) = self.me.upgrade()
        {
            self.run_blocking(Box::new(move || engine.pump()));
        }
    }

    /// Returns true if the window has room for a sleep of `bytes`. A larger one goes alone.
    fn fits(&self, shared: &TableState, bytes: u64) -> bool {
        let copied_bytes = shared.inflight_bytes.saturating_sub(shared.sealing_bytes);
        let inflight_bytes = copied_bytes + shared.bounced_bytes;
        inflight_bytes == 0 || inflight_bytes + bytes <= self.tuning.inflight_bytes_max()
    }

    fn next_queued_sleep(&self) -> Option<(RegionId, dormouse_residency::region::Actions)> {
        let mut inner = self.table.lock();
        if inner.is_broken {
            return None; // awake regions stay awake
        }
        let &id = inner.shared.window_queue.front()?;
        let (entry, shared) = inner.get_both(id)?;
        let bytes = entry.data.bytes();
        let actions = self.fits(shared, bytes).then(|| inner.feed(id, Input::Sleep).actions());
        Some((id, actions??))
    }

    pub(super) fn give_back(&self, grant: Grant) {
        if let Some(extent) = grant.extent {
            self.release_shared_extent(extent);
        }
        if let Some(buffer) = grant.host {
            self.give(buffer);
        }
    }

    pub(super) fn take_extent(&self, bytes: u64) -> Result<Extent, OffloadError> {
        let none = || OffloadError::TierFull {
            tier: Tier::Nvme,
            asked_bytes: bytes,
            used_bytes: 0,
            budget_bytes: 0,
        };
        let nvme = self.nvme.as_ref().ok_or_else(none)?;
        let extent = nvme.allocate(bytes)?;
        self.allocator.file_tier().note_taken(file_address(&extent), extent.whole_bytes());
        self.timeline.gauge(Gauge::NvmeUsed, nvme.usage().used_bytes);
        Ok(extent)
    }

    /// Releases a region's extent, unless another thread reads it; then that one does.
    pub(super) fn release_shared_extent(&self, extent: Arc<Extent>) {
        if let Some(extent) = Arc::into_inner(extent) {
            self.release_extent(extent);
        }
    }

    pub(super) fn release_extent(&self, extent: Extent) {
        if let Some(nvme) = &self.nvme {
            // First: its place may be another's as soon as it is free.
            self.allocator.file_tier().note_given(file_address(&extent));
            let used_bytes = nvme.release(extent);
            self.timeline.gauge(Gauge::NvmeUsed, used_bytes);
        }
    }
}

/// The place of an extent in the history of the file tier.
fn file_address(extent: &Extent) -> usize {
    usize::try_from(extent.offset()).unwrap_or(usize::MAX)
}
