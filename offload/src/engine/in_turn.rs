//! Lines for host memory: sleeps that have no place yet, and then what is read ahead of its wake.
//!
//! A plan knows that host memory will have room once what is there has gone on. Until then those in
//! line are simply where they are, and nothing is held for them: waking or freeing one takes it
//! from the line, and whoever runs short may put it to sleep first.

use dormouse_device::Device;

use super::sleep::Who;
use super::{Body, Engine};
use crate::ids::{RegionId, Tier};
use crate::table::{Entry, Fed};
use dormouse_residency::region::{Input, RegionState, SleepGoal};

impl<D: Device> Engine<D> {
    /// Lets regions that reclaim may take ([`Engine::let_reclaim`]) fall asleep into `tier` behind
    /// their uses, each when it has a place there and those before it have had theirs. Returns at
    /// once, false where some may not be taken: those stay awake. What cannot sleep for another
    /// reason than room stays awake too, and its owner is told.
    pub(crate) fn sleep_in_turn(&self, ids: &[RegionId], tier: Tier) -> bool {
        let goal = if tier == Tier::Nvme { SleepGoal::Nvme } else { SleepGoal::Host };
        let mut all = true;
        {
            let mut inner = self.table.lock();
            for &id in ids {
                let Some((entry, shared)) = inner.get_both(id) else { continue };
                all &= entry.body.is_eligible;
                if entry.body.is_eligible && entry.body.in_line.replace(goal).is_none() {
                    shared.line.push_back(id);
                }
            }
        }
        self.pump();
        all
    }

    /// Lets regions that rest in the file come to host memory ahead of their wakes, in this order,
    /// each when the tier has room and nobody is in line to sleep there. Returns at once. Not for a
    /// device that wakes from the file itself; a read that fails leaves the region where it was.
    pub(crate) fn promote_in_turn(&self, ids: &[RegionId]) {
        if self.is_direct {
            return;
        }
        {
            let mut inner = self.table.lock();
            for &id in ids {
                let Some((entry, shared)) = inner.get_both(id) else { continue };
                if may_promote(entry) && !std::mem::replace(&mut entry.body.is_to_promote, true) {
                    shared.promotions.push_back(id);
                }
            }
        }
        self.pump();
    }

    pub(super) fn serve_promotions(&self) {
        while let Some((id, bytes)) = self.next_promotion() {
            let Ok(buffer) = self.host.take(bytes, false) else { return };
            let mut left = Some(buffer);
            let fed = {
                let mut inner = self.table.lock();
                inner.shared.promotions.retain(|&waiting| waiting != id);
                match inner.get(id) {
                    Some(e) if may_promote(e) && e.body.is_to_promote => {
                        e.body.is_to_promote = false;
                        e.body.host = left.take();
                        e.body.error = None;
                        inner.feed(id, Input::Promote)
                    }
                    _ => Fed::Missing,
                }
            };
            self.table.notify();
            if let Some(buffer) = left {
                self.host.give(buffer);
            }
            if let Some(actions) = fed.actions() {
                self.carry_on(id, actions);
            }
        }
    }

    fn next_promotion(&self) -> Option<(RegionId, usize)> {
        let mut inner = self.table.lock();
        if !inner.shared.line.is_empty() || inner.shared.is_closed {
            return None;
        }
        loop {
            let &id = inner.shared.promotions.front()?;
            let waiting = inner.get(id).filter(|e| e.body.is_to_promote && may_promote(e));
            if let Some(entry) = waiting {
                return Some((id, entry.body.copy_bytes));
            }
            inner.shared.promotions.pop_front();
            if let Some(entry) = inner.get(id) {
                entry.body.is_to_promote = false;
            }
        }
    }

    /// Lets those at the head of the line sleep, as far as there are places. One thread at a time:
    /// another that finds one at it leaves it a note to look again.
    pub(super) fn serve_line(&self) {
        while let Some((id, goal)) = self.head_of_line() {
            let mut is_full = !self.has_place(id, goal);
            if !is_full {
                // As for reclaim: a region that is needed by now is not taken.
                match self.try_sleep(&[id], goal, &[], Who::Reclaim) {
                    Ok(outcome) => is_full = outcome.is_full,
                    Err(e) => self.tell_owner(id, &e),
                }
            }
            let mut inner = self.table.lock();
            inner.shared.is_line_served = false;
            if !is_full {
                leave_line(&mut inner, id);
            } else if !std::mem::take(&mut inner.shared.is_line_noted) {
                return;
            }
        }
    }

    /// The first that still wants to sleep. Whoever is given it serves the line.
    fn head_of_line(&self) -> Option<(RegionId, SleepGoal)> {
        let mut inner = self.table.lock();
        if inner.shared.is_line_served {
            inner.shared.is_line_noted = true;
            return None;
        }
        loop {
            let &id = inner.shared.line.front()?;
            let wanted = inner.get(id).and_then(|entry| {
                let may = entry.body.is_eligible && entry.region.state == RegionState::Awake;
                entry.body.in_line.filter(|_| may && !entry.body.is_waiting_to_sleep())
            });
            if let Some(goal) = wanted {
                inner.shared.is_line_served = true;
                inner.shared.is_line_noted = false;
                return Some((id, goal));
            }
            leave_line(&mut inner, id);
        }
    }

    /// Whether the tiers on the region's way have room for it. A tier that takes nothing more says
    /// so when it is asked.
    fn has_place(&self, id: RegionId, goal: SleepGoal) -> bool {
        let bytes = self.body(id, |body| Some(body.copy_bytes as u64)).unwrap_or_default();
        let host = self.host.usage();
        let needs_host = goal == SleepGoal::Host || !self.is_direct;
        if needs_host && host.budget_bytes.saturating_sub(host.used_bytes) < bytes {
            return false;
        }
        let file = self.nvme.as_ref().filter(|_| goal == SleepGoal::Nvme).map(|nvme| nvme.usage());
        file.is_none_or(|file| {
            let left_bytes = file.budget_bytes.saturating_sub(file.used_bytes);
            file.stopped.is_some() || left_bytes >= bytes
        })
    }
}

/// Whether it rests in the file, on a device that wakes from host memory.
fn may_promote<D: Device>(entry: &Entry<Body<D>>) -> bool {
    entry.is_idle() && entry.region.state == RegionState::Nvme && !entry.region.direct
}

/// Takes the head out, unless somebody else is there by now.
fn leave_line<D: Device>(inner: &mut super::sleep::Table<D>, id: RegionId) {
    if inner.shared.line.front() == Some(&id) {
        inner.shared.line.pop_front();
    }
    if let Some(entry) = inner.get(id) {
        entry.body.in_line = None;
    }
}
