//! Admission queues for host memory: sleeps without a place yet, then promotions from the file.
//!
//! A plan may count on host memory that is free only once earlier regions have moved on. A queued
//! region stays awake and holds nothing; reclaim may put it to sleep first. It waits while its tier is full, by its
//! budget or because others have taken the memory.

use std::sync::Arc;

use dormouse_alloc::pinned::PinMode;
use dormouse_device::Device;

use super::sleep::{Initiator, WithoutPlace, goal_of};
use super::{Account, Engine, RegionData};
use crate::error::OffloadError;
use crate::ids::{RegionId, Tier};
use crate::table::{RegionEntry, Regions};
use dormouse_residency::region::{Input, RegionState, RegionWait, SleepGoal};

impl<D: Device> Engine<D> {
    /// Puts eligible regions ([`Engine::let_reclaim`]) to sleep once the events in `after` have completed, each in
    /// the first tier that has a place for it. One without a place waits in the admission queue for the first
    /// tier that may have one later. Where that is host memory and the file is the next tier, as many bytes of the
    /// owner as lack move on to the file, the lowest layer first. One that no tier can take is declined, and not asked
    /// again until [`Engine::retry_declined`]. Returns at once; false if some are to be asked again.
    pub(crate) fn sleep_in_order(
        &self,
        ids: &[RegionId],
        after: &[D::Event],
    ) -> Result<bool, OffloadError> {
        let tiers = self.tiers_in_order();
        let mut asked = self.unanswered(ids);
        let mut refused = Vec::new();
        let mut is_all = asked.is_empty() || !tiers.is_empty();
        for (at, &tier) in tiers.iter().enumerate() {
            let next = tiers.get(at + 1).copied();
            let (mut later, never, is_busy) = self.sleep_or_split(&asked, tier, after)?;
            is_all &= !is_busy;
            let displaces = tier == Tier::Host && next == Some(Tier::Nvme);
            if let Some(next) = next.filter(|_| !displaces) {
                let (left, lost, is_busy) = self.sleep_or_split(&ids_of(&later), next, after)?;
                later = [left, lost].concat();
                is_all &= !is_busy;
            }
            for place in &later {
                self.note_refusal(place.id, place.refused.clone());
            }
            is_all &= self.queue_for_admission(&ids_of(&later), tier, displaces);
            asked = ids_of(&never);
            refused = never;
        }
        for place in refused {
            is_all &= place.refused.is_final();
            self.note_refusal(place.id, place.refused);
            self.decline_noted(place.id);
        }
        Ok(is_all)
    }

    /// Puts regions to sleep in `tier`. Returns those that it may have a place for later, those that it has none
    /// for, and whether some were busy.
    fn sleep_or_split(
        &self,
        ids: &[RegionId],
        tier: Tier,
        after: &[D::Event],
    ) -> Result<(Vec<WithoutPlace>, Vec<WithoutPlace>, bool), OffloadError> {
        if ids.is_empty() {
            return Ok((Vec::new(), Vec::new(), false));
        }
        let outcome = self.try_sleep(ids, goal_of(tier), after, Initiator::Caller)?;
        self.pump();
        if let Some(reason) =
            outcome.declined.as_ref().filter(|_| !outcome.without_place.is_empty())
        {
            let (regions, bytes) = (outcome.without_place.len(), outcome.declined_bytes);
            tracing::debug!(target: "offload", full = ?tier, regions, bytes, reason, "no place in a tier");
        }
        let (later, never) =
            outcome.without_place.into_iter().partition(|place| place.refused.is_full_for_now());
        Ok((later, never, outcome.busy_bytes > 0))
    }

    /// Returns those of the regions that neither wait in the admission queue nor have been declined.
    fn unanswered(&self, ids: &[RegionId]) -> Vec<RegionId> {
        let mut inner = self.table.lock();
        let mut is_answered = |id: &RegionId| {
            inner.get(*id).is_some_and(|e| {
                e.data.is_declined || matches!(e.region.wait, RegionWait::Admission(_))
            })
        };
        ids.iter().filter(|id| !is_answered(id)).copied().collect()
    }

    /// Lets declined regions be asked again.
    pub(crate) fn retry_declined(&self, ids: &[RegionId]) {
        self.table.each(ids, |entry| entry.data.is_declined = false);
    }

    /// Notes why a region has no place yet.
    fn note_refusal(&self, id: RegionId, refused: OffloadError) {
        self.table.with(id, |entry| entry.data.refused = Some(refused));
    }

    /// Declines a region, for the reason noted last.
    fn decline_noted(&self, id: RegionId) {
        let refused = self.body(id, |body| {
            body.is_declined = body.refused.as_ref().is_some_and(OffloadError::is_final);
            body.refused.take()
        });
        self.decline(id, refused.as_ref());
    }

    /// Declines regions that no tier had a place for. Those in the admission queue may still get one.
    pub(super) fn decline_each(&self, refused: Vec<WithoutPlace>) {
        let ids = self.unanswered(&ids_of(&refused));
        for place in refused.iter().filter(|place| ids.contains(&place.id)) {
            self.decline(place.id, Some(&place.refused));
        }
    }

    /// Declines the regions that have left the admission queue without a place.
    pub(super) fn decline_unplaced(&self) {
        let unplaced = std::mem::take(&mut self.table.lock().shared.unplaced);
        unplaced.into_iter().for_each(|id| self.decline_noted(id));
    }

    /// Withdraws the sleeps of regions that wait in the admission queue.
    pub(crate) fn withdraw_waiting(&self, ids: &[RegionId]) {
        {
            let mut inner = self.table.lock();
            ids.iter().for_each(|&id| leave_admission_queue(&mut inner, id));
        }
        self.pump(); // those behind them
    }

    /// Queues eligible regions ([`Engine::let_reclaim`]) to fall asleep into `tier` behind their uses, in
    /// order, each when the tier has room. Returns at once; false if some could not be queued. One that leaves the
    /// queue without a place stays awake and is declined; if the tier can never take it, it is not queued again until
    /// [`Engine::retry_declined`].
    pub(crate) fn sleep_when_admitted(&self, ids: &[RegionId], tier: Tier) -> bool {
        self.queue_for_admission(ids, tier, false)
    }

    /// As [`Engine::sleep_when_admitted`]. If it may `displace`, room is made in host memory by moving regions of
    /// the same owner to the file.
    fn queue_for_admission(&self, ids: &[RegionId], tier: Tier, may_displace: bool) -> bool {
        if ids.is_empty() {
            return true;
        }
        let goal = goal_of(tier);
        let mut all = true;
        {
            let mut inner = self.table.lock();
            for &id in ids {
                let Some(entry) = inner.get(id).filter(|e| !e.data.is_declined) else { continue };
                if !entry.data.is_eligible {
                    all = false;
                    continue;
                }
                entry.data.may_displace = may_displace;
                inner.feed(id, Input::AwaitAdmission(goal));
                // Refused under an executor: the next mark tries again.
                let settled = |e: &mut RegionEntry<_>| {
                    e.region.state != RegionState::Awake || e.region.wait != RegionWait::None
                };
                all &= inner.get(id).is_none_or(settled);
            }
        }
        self.pump();
        all
    }

    /// Queues regions in the file to be read into host memory ahead of their wakes, in order, each when the
    /// tier has room and no sleep waits for it. Returns at once. Does nothing on a device that wakes from
    /// the file itself; a failed read leaves the region where it was.
    pub(crate) fn promote_when_admitted(&self, ids: &[RegionId]) {
        if self.is_direct {
            return;
        }
        {
            let mut inner = self.table.lock();
            for &id in ids {
                inner.feed(id, Input::AwaitPromotion);
            }
        }
        self.pump();
    }

    pub(super) fn serve_promotions(&self) {
        while let Some((id, bytes)) = self.next_promotion() {
            let Ok(buffer) = self.take(bytes, PinMode::Now) else { return };
            let mut inner = self.table.lock();
            let actions = inner.feed(id, Input::Promote).actions();
            if let Some(actions) = actions
                && let Some(entry) = inner.get(id)
            {
                entry.data.host = Some(buffer);
                drop(inner);
                self.execute(id, actions);
            } else {
                drop(inner);
                self.give(buffer);
            }
        }
    }

    fn next_promotion(&self) -> Option<(RegionId, usize)> {
        let mut inner = self.table.lock();
        if !inner.shared.admission_queue.is_empty() || inner.shared.is_closed {
            return None;
        }
        let &id = inner.shared.promotion_queue.front()?;
        Some((id, inner.get(id)?.data.copy_bytes))
    }

    /// Admits sleeps from the head of the queue while there is room. One thread at a time: another one
    /// makes it look again.
    pub(super) fn serve_admissions(&self) {
        while let Some((id, goal)) = self.next_admission() {
            let mut is_full = !self.has_tier_room(id, goal);
            if !is_full {
                // As for reclaim: a region that its prefix needs by now is not taken.
                match self.try_sleep(&[id], goal, &[], Initiator::Reclaim) {
                    Ok(outcome) => {
                        for WithoutPlace { id, refused } in outcome.without_place {
                            // Its budget had room: a host tier that is full lacks memory, which others may free.
                            is_full |= refused.is_full_for_now() || refused.is_host_full();
                            self.note_refusal(id, refused);
                        }
                    }
                    Err(e) => self.note_refusal(id, e),
                }
            }
            if is_full {
                self.displace_for(id);
            }
            let mut inner = self.table.lock();
            inner.shared.is_admitting = false;
            if !is_full {
                leave_admission_queue(&mut inner, id);
            } else if !std::mem::take(&mut inner.shared.admit_again) {
                return;
            }
        }
    }

    /// Returns the head of the queue. The thread that gets it serves the queue.
    fn next_admission(&self) -> Option<(RegionId, SleepGoal)> {
        let mut inner = self.table.lock();
        if inner.shared.is_admitting {
            inner.shared.admit_again = true;
            return None;
        }
        loop {
            let &id = inner.shared.admission_queue.front()?;
            let entry = inner.get(id)?;
            if entry.data.is_eligible
                && let RegionWait::Admission(goal) = entry.region.wait
            {
                inner.shared.is_admitting = true;
                inner.shared.admit_again = false;
                return Some((id, goal));
            }
            leave_admission_queue(&mut inner, id);
        }
    }

    /// Moves regions from host memory to the file until those in the queue that may displace others have room, beside
    /// what is on its way there: regions of the owner of the first one, the lowest layer first. Stops at the
    /// first that the file has no place for.
    fn displace_for(&self, first: RegionId) {
        let mut resting: Vec<(u32, u64, RegionId)> = Vec::new();
        let (mut asked_bytes, mut leaving_bytes) = (0_u64, 0_u64);
        {
            let mut inner = self.table.lock();
            let Some(entry) = inner.get(first).filter(|e| e.data.may_displace) else { return };
            let owner = entry.data.account.clone();
            let line: Vec<RegionId> = inner.shared.admission_queue.iter().copied().collect();
            for id in line {
                let entry = inner.get(id).filter(|e| e.data.may_displace);
                asked_bytes += entry.map_or(0, |e| e.data.copy_bytes as u64);
            }
            for (id, entry) in inner.iter() {
                let bytes = entry.data.copy_bytes as u64;
                match entry.region.state {
                    RegionState::Spilling => leaving_bytes += bytes,
                    RegionState::Host if entry.is_idle() => {
                        let is_same = same_owner(owner.as_ref(), entry.data.account.as_ref());
                        if is_same && entry.data.is_eligible {
                            resting.push((entry.data.label.layer, bytes, id));
                        }
                    }
                    _ => {}
                }
            }
        }
        let host = self.host.usage();
        let free_bytes = host.cap_bytes.saturating_sub(host.used_bytes);
        let mut lacking_bytes = asked_bytes.saturating_sub(free_bytes + leaving_bytes);
        if free_bytes >= asked_bytes && leaving_bytes == 0 {
            lacking_bytes = 1; // what is free is in pieces: one more leaves
        }
        resting.sort_unstable();
        for (_, bytes, id) in resting {
            if lacking_bytes == 0 {
                break;
            }
            if let Err(refused) = self.spill(id) {
                self.note_refusal(first, refused);
                break;
            }
            lacking_bytes = lacking_bytes.saturating_sub(bytes);
        }
    }

    /// Returns true if the tiers of a sleep have room for it. A stopped tier declines it when asked.
    fn has_tier_room(&self, id: RegionId, goal: SleepGoal) -> bool {
        let bytes = self.body(id, |body| Some(body.copy_bytes as u64)).unwrap_or_default();
        let host = self.host.usage();
        let needs_host = goal == SleepGoal::Host || !self.is_direct;
        let is_full = host.cap_bytes.saturating_sub(host.used_bytes) < bytes;
        if needs_host && is_full && !self.revise_host_bytes(bytes) {
            return false;
        }
        let file = self.nvme.as_ref().filter(|_| goal == SleepGoal::Nvme).map(|nvme| nvme.usage());
        file.is_none_or(|file| {
            let left_bytes = file.budget_bytes.saturating_sub(file.used_bytes);
            file.stopped.is_some() || left_bytes >= bytes
        })
    }
}

fn ids_of(places: &[WithoutPlace]) -> Vec<RegionId> {
    places.iter().map(|place| place.id).collect()
}

/// Returns true if regions of these accounts have one owner.
fn same_owner(one: Option<&Arc<Account>>, other: Option<&Arc<Account>>) -> bool {
    match (one, other) {
        (Some(one), Some(other)) => Arc::ptr_eq(one, other),
        (one, other) => one.is_none() && other.is_none(),
    }
}

/// Withdraws the sleep of a region that is still in the queue.
fn leave_admission_queue<D: Device>(inner: &mut Regions<RegionData<D>>, id: RegionId) {
    if inner.get(id).is_some_and(|e| matches!(e.region.wait, RegionWait::Admission(_))) {
        inner.feed(id, Input::Withdraw);
    }
}
