//! Admission queues for host memory: sleeps without a place yet, then promotions from the file.
//!
//! A plan may count on host memory that is free only once earlier regions have moved on. A queued
//! region stays awake and holds nothing; reclaim may put it to sleep first.

use dormouse_alloc::pinned::PinMode;
use dormouse_device::Device;

use super::sleep::Initiator;
use super::{Engine, RegionData};
use crate::ids::{RegionId, Tier};
use crate::table::{RegionEntry, Regions};
use dormouse_residency::region::{Input, RegionState, RegionWait, SleepGoal};

impl<D: Device> Engine<D> {
    /// Queues eligible regions ([`Engine::let_reclaim`]) to fall asleep into `tier` behind their uses, in
    /// order, each when the tier has room. Returns at once; false if some could not be queued. Those, and
    /// regions that cannot sleep for another reason than room, stay awake; their owner's report says why.
    pub(crate) fn sleep_when_admitted(&self, ids: &[RegionId], tier: Tier) -> bool {
        let goal = if tier == Tier::Nvme { SleepGoal::Nvme } else { SleepGoal::Host };
        let mut all = true;
        {
            let mut inner = self.table.lock();
            for &id in ids {
                let Some(entry) = inner.get(id) else { continue };
                if !entry.data.is_eligible {
                    all = false;
                    continue;
                }
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
                    Ok(outcome) => is_full = outcome.is_full,
                    Err(e) => self.note_decline(id, &e),
                }
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

/// Withdraws the sleep of a region that is still in the queue.
fn leave_admission_queue<D: Device>(inner: &mut Regions<RegionData<D>>, id: RegionId) {
    if inner.get(id).is_some_and(|e| matches!(e.region.wait, RegionWait::Admission(_))) {
        inner.feed(id, Input::Withdraw);
    }
}
