//! The table of regions: who may change a region, and who waits.
//!
//! One lock, held for a transition and never while an action executes. The thread that feeds an input
//! with actions becomes the region's *executor*; requests that arrive before it reports back are kept
//! as a pending request, which it executes next. So no two threads act on one region, none waits for an
//! executor, and no request is lost.
//!
//! - **T1** At most one executor per region; a step in flight has none (its completion makes one).
//! - **T2** An input fed while a region is executed takes effect when the executor reports back.
//! - **T3** Every change that could end a wait is followed by a notification; an executor's by one when
//!   it stops, since what it does on the way is over at once. A waiter woken between two of its actions
//!   would find nothing and, on one processor, preempt the executor for that.
//! - **T4** After an executor panics, which is a defect, waits that find no answer end in [`Broken`].

#[cfg(test)]
#[cfg(loom)]
mod loom_tests;

use crate::ids::RegionId;
use dormouse_residency::region::{
    Action, Actions, Input, PendingRequest, RefusedInput, Region, RegionStep, StepOutcome, step,
};
use dormouse_storage::sync::{AtomicUsize, Condvar, Guard, Mutex, Ordering, lock, wait};

/// Limit on regions.
#[cfg(not(loom))]
pub(crate) const REGIONS_MAX: u32 = 1 << 20;
#[cfg(loom)]
pub(crate) const REGIONS_MAX: u32 = 2;

/// Data that the table keeps with each region.
pub(crate) trait Payload {
    /// Data of the whole table, under its lock.
    type Shared: std::fmt::Debug;
    /// Cancels the transfer in flight. Called under the lock.
    fn cancel(&self, shared: &Self::Shared);
    /// Follows a transition. Called under the lock.
    fn moved(&mut self, id: RegionId, before: &Region, after: &Region, shared: &mut Self::Shared);
}

/// One region.
#[derive(Debug)]
pub(crate) struct RegionEntry<P> {
    pub(crate) region: Region,
    pub(crate) data: P,
    executed: bool,
    pending: PendingRequest,
}

impl<P> RegionEntry<P> {
    /// Returns true if nothing is in flight and no thread executes it.
    pub(crate) fn is_idle(&self) -> bool {
        !self.executed && self.region.is_settled()
    }
}

#[derive(Debug)]
struct TableSlot<P> {
    generation: u32,
    entry: Option<RegionEntry<P>>,
}

/// Returns where a table's generations begin, far from those of others: an allocator outlives its engines, and a block
/// that an earlier one left asleep is none of a later one's regions.
fn first_generation() -> u32 {
    /// 2³² over the golden ratio: its multiples spread evenly.
    const STEP: u32 = 0x9e37_79b9;
    static TABLES: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(1);
    let tables = TABLES.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
    tables.wrapping_mul(STEP).max(1)
}

/// The state under the lock.
#[derive(Debug)]
pub(crate) struct Regions<P: Payload> {
    slots: Vec<TableSlot<P>>,
    vacant: Vec<u32>,
    /// Of a slot that is new.
    first_generation: u32,
    /// A thread that others wait for panicked (T4).
    pub(crate) is_broken: bool,
    pub(crate) shared: P::Shared,
}

impl<P: Payload> Regions<P> {
    pub(crate) fn get(&mut self, id: RegionId) -> Option<&mut RegionEntry<P>> {
        self.get_both(id).map(|(entry, _)| entry)
    }

    pub(crate) fn get_both(
        &mut self,
        id: RegionId,
    ) -> Option<(&mut RegionEntry<P>, &mut P::Shared)> {
        let slot = self.slots.get_mut(id.index as usize)?;
        if slot.generation != id.generation {
            return None;
        }
        Some((slot.entry.as_mut()?, &mut self.shared))
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (RegionId, &RegionEntry<P>)> {
        self.slots.iter().enumerate().filter_map(|(index, slot)| {
            let id = RegionId { index: index as u32, generation: slot.generation };
            Some((id, slot.entry.as_ref()?))
        })
    }

    /// Inserts a region. The caller is its executor until [`Table::executed`], so that a racing drop waits
    /// for the set-up.
    pub(crate) fn insert(&mut self, region: Region, data: P) -> Option<RegionId> {
        let entry =
            Some(RegionEntry { region, data, executed: true, pending: PendingRequest::None });
        if let Some(index) = self.vacant.pop() {
            let slot = self.slots.get_mut(index as usize)?;
            slot.entry = entry;
            return Some(RegionId { index, generation: slot.generation });
        }
        let index = u32::try_from(self.slots.len()).ok().filter(|&i| i < REGIONS_MAX)?;
        let generation = self.first_generation;
        self.slots.push(TableSlot { generation, entry });
        Some(RegionId { index, generation })
    }

    pub(crate) fn remove(&mut self, id: RegionId) -> Option<P> {
        self.get(id)?;
        let slot = self.slots.get_mut(id.index as usize)?;
        slot.generation = slot.generation.wrapping_add(1).max(1);
        self.vacant.push(id.index);
        slot.entry.take().map(|entry| entry.data)
    }

    /// Feeds one input under the lock; see [`Table::feed`].
    pub(crate) fn feed(&mut self, id: RegionId, input: Input) -> FeedResult {
        let Some((entry, shared)) = self.get_both(id) else { return FeedResult::Missing };
        if entry.executed {
            match input {
                Input::Drop => entry.pending = PendingRequest::Drop,
                Input::Wake if entry.pending == PendingRequest::None => {
                    entry.pending = PendingRequest::Wake
                }
                Input::Wake => {}
                // Other requests are fed to idle regions only; a completion has no executor before it.
                _ => {
                    let (state, in_flight) = (entry.region.state, entry.region.in_flight);
                    return FeedResult::Refused(RefusedInput { input, state, in_flight });
                }
            }
            return FeedResult::Kept;
        }
        let before = entry.region;
        match step(&before, input) {
            Err(refusal) => FeedResult::Refused(refusal),
            Ok((after, mut actions)) => {
                entry.region = after;
                if actions.contains(&Action::Cancel) {
                    entry.data.cancel(shared);
                    actions.retain(|&a| a != Action::Cancel);
                }
                entry.data.moved(id, &before, &after, shared);
                entry.executed = !actions.is_empty();
                if actions.is_empty() { FeedResult::Kept } else { FeedResult::Execute(actions) }
            }
        }
    }
}

/// The result of feeding an input.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum FeedResult {
    /// The region does not exist any more.
    Missing,
    /// The input does not apply now.
    Refused(RefusedInput),
    /// Taken; no actions for the caller.
    Kept,
    /// Taken; the caller executes these actions.
    Execute(Actions),
}

impl FeedResult {
    /// Returns the actions to execute, if any.
    pub(crate) fn actions(self) -> Option<Actions> {
        match self {
            Self::Execute(actions) => Some(actions),
            Self::Missing | Self::Refused(_) | Self::Kept => None,
        }
    }
}

/// The result of starting a step.
#[derive(Debug)]
pub(crate) enum Launched {
    /// It is over.
    Over(StepOutcome),
    /// Its completion is fed later.
    InFlight,
}

/// Executes actions. Called by a region's executor, without the lock.
pub(crate) trait Executor {
    /// Executes an action that is over when this returns.
    fn at_once(&self, id: RegionId, action: Action);
    /// Starts a step.
    fn launch(&self, id: RegionId, step: RegionStep) -> Launched;
}

/// The awaited change may never come: a thread that was to make it panicked.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Broken;

/// Breaks the table if its thread panics.
struct PanicWatch<'a, P: Payload>(&'a Table<P>);

impl<P: Payload> Drop for PanicWatch<'_, P> {
    fn drop(&mut self) {
        self.0.break_down();
    }
}

/// The table.
#[derive(Debug)]
pub(crate) struct Table<P: Payload> {
    inner: Mutex<Regions<P>>,
    changed: Condvar,
    /// Number of waiters, raised under the lock before their first check.
    waiters: AtomicUsize,
}

impl<P: Payload> Table<P> {
    pub(crate) fn new(shared: P::Shared) -> Self {
        let first_generation = first_generation();
        let (slots, vacant) = (Vec::new(), Vec::new());
        let inner = Regions { slots, vacant, first_generation, is_broken: false, shared };
        Self { inner: Mutex::new(inner), changed: Condvar::new(), waiters: AtomicUsize::new(0) }
    }

    pub(crate) fn lock(&self) -> Guard<'_, Regions<P>> {
        lock(&self.inner)
    }

    /// Runs `f` on a live region.
    pub(crate) fn with<T>(
        &self,
        id: RegionId,
        f: impl FnOnce(&mut RegionEntry<P>) -> T,
    ) -> Option<T> {
        self.lock().get(id).map(f)
    }

    /// Runs `f` on each of these regions that is live, under one lock.
    pub(crate) fn each(&self, ids: &[RegionId], mut f: impl FnMut(&mut RegionEntry<P>)) {
        let mut inner = self.lock();
        for &id in ids {
            inner.get(id).into_iter().for_each(&mut f);
        }
    }

    /// Feeds one input. With `Execute` the caller is the region's executor and passes the actions to
    /// [`Table::execute`].
    pub(crate) fn feed(&self, id: RegionId, input: Input) -> FeedResult {
        let fed = self.lock().feed(id, input);
        if matches!(fed, FeedResult::Kept | FeedResult::Refused(_)) {
            self.notify(); // T3
        }
        fed
    }

    /// The executor reports back. Feeds the pending request and returns its actions, if any.
    pub(crate) fn executed(&self, id: RegionId) -> Option<Actions> {
        let actions = self.reported_back(id);
        if actions.is_none() {
            self.notify(); // T3
        }
        actions
    }

    fn reported_back(&self, id: RegionId) -> Option<Actions> {
        let mut inner = self.lock();
        let entry = inner.get(id)?;
        entry.executed = false;
        let input = match std::mem::take(&mut entry.pending) {
            PendingRequest::None => None,
            PendingRequest::Wake => Some(Input::Wake),
            PendingRequest::Drop => Some(Input::Drop),
        };
        input.and_then(|input| inner.feed(id, input).actions()) // T2
    }

    /// Executes `actions` and those that follow at once. Bounded: every turn executes a list or ends a step,
    /// and the state machine has no cycle without a new request.
    pub(crate) fn execute(&self, id: RegionId, actions: Actions, executor: &impl Executor) {
        self.watched(|| self.execute_all(id, actions, executor));
    }

    fn execute_all(&self, id: RegionId, mut actions: Actions, executor: &impl Executor) {
        loop {
            let mut start = None;
            for &action in &actions {
                match action {
                    Action::Start(step) => start = Some(step),
                    other => executor.at_once(id, other),
                }
            }
            let wished = self.reported_back(id);
            let next = match start {
                None => wished,
                // A request that met a step makes a cancel at most, which has been passed on.
                Some(step) => match executor.launch(id, step) {
                    Launched::InFlight => None,
                    Launched::Over(outcome) => self.lock().feed(id, Input::Done(outcome)).actions(),
                },
            };
            match next {
                Some(next) => actions = next,
                None => return self.notify(), // T3
            }
        }
    }

    /// Runs work that others may wait for (T4).
    pub(crate) fn watched(&self, work: impl FnOnce()) {
        let watch = PanicWatch(self);
        work();
        std::mem::forget(watch);
    }

    /// Ends all waits without an answer, now and later (T4).
    pub(crate) fn break_down(&self) {
        self.lock().is_broken = true;
        self.notify();
        tracing::error!(target: "offload", "a thread panicked; nothing more falls asleep");
    }

    /// Removes a region.
    pub(crate) fn remove(&self, id: RegionId) -> Option<P> {
        let data = self.lock().remove(id);
        self.notify(); // T3
        data
    }

    /// Waits until `check` returns an answer; it is called again after every change. Not for threads of the
    /// runtime, which might be the ones that make the change.
    ///
    /// # Errors
    /// `Broken` if there is no answer and may never be one.
    pub(crate) fn wait_for<T>(
        &self,
        mut check: impl FnMut(&mut Regions<P>) -> Option<T>,
    ) -> Result<T, Broken> {
        debug_assert!(!dormouse_device::is_runtime_thread(), "I4: a thread of ours waits");
        let mut inner = self.lock();
        // Relaxed, all of them: the lock orders them.
        self.waiters.fetch_add(1, Ordering::Relaxed);
        loop {
            let answer = match check(&mut inner) {
                Some(answer) => Some(Ok(answer)),
                None => inner.is_broken.then_some(Err(Broken)),
            };
            if let Some(answer) = answer {
                self.waiters.fetch_sub(1, Ordering::Relaxed);
                return answer;
            }
            inner = wait(&self.changed, inner);
        }
    }

    /// Notifies waiters after a change under [`Table::lock`], if there are any.
    pub(crate) fn notify(&self) {
        if self.waiters.load(Ordering::Relaxed) != 0 {
            self.changed.notify_all();
        }
    }
}
