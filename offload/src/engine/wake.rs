//! Wakes and waits. Every wait ends, because it waits for I/O of our own that ends.

use std::sync::Arc;

use dormouse_device::Device;
use dormouse_timeline::{Lane, Slice};

use super::Engine;
use crate::error::OffloadError;
use crate::ids::RegionId;
use crate::table::Regions;
use dormouse_residency::region::{Input, RegionState};
use dormouse_storage::sync::lock;

/// Limit on attempts of a wait to wake a region without room. More than a few happen only if room was made
/// each time and others took it.
pub const WAKE_ATTEMPTS_MAX: u32 = 64;
/// Limit on attempts after which no room was made; another thread may have freed some.
const FRUITLESS_ATTEMPTS_MAX: u32 = 3;

/// How long a call blocked.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Waited {
    /// Nanoseconds the caller waited for copies.
    pub stall_ns: u64,
}

/// A region that settled asleep although it was to wake.
pub(super) struct Unwoken {
    id: RegionId,
    bytes: u64,
    pub(super) error: OffloadError,
}

/// The attempts of a wait to wake its regions.
#[derive(Debug, Default)]
struct WakeAttempts {
    count: u32,
    /// Those after which no room was made.
    fruitless: u32,
}

impl<D: Device> Engine<D> {
    /// Starts waking regions and returns at once. Regions that are awake or gone are skipped; a sleep in
    /// progress is cancelled. All wakes of a call are submitted before any is waited for. The error of a
    /// failed wake is returned by its waiters.
    pub fn wake(&self, ids: &[RegionId]) {
        for &id in ids {
            if let Some(actions) = self.table.feed(id, Input::Wake).actions() {
                self.execute(id, actions);
            }
        }
        self.pump();
    }

    /// Wakes regions and blocks until their bytes are there. Without room, unmaps free pages or puts eligible regions
    /// to sleep, and retries, at most [`WAKE_ATTEMPTS_MAX`] times.
    ///
    /// # Errors
    /// `WakeFailed` with the cause; the region is still asleep and the call can be repeated. `Device` if
    /// the device was lost during the last copy. `Broken`.
    pub fn wait_awake(&self, ids: &[RegionId]) -> Result<Waited, OffloadError> {
        let waited = self.make_awake(ids)?;
        let start_ns = self.timeline.now_ns();
        if !self.wait_for_arrivals(ids)? {
            return Ok(waited);
        }
        Ok(Waited { stall_ns: waited.stall_ns + self.waited(start_ns, ids).stall_ns })
    }

    /// As [`Engine::wait_awake`], for users on `stream`: blocks only until the last copy is queued, makes
    /// later work of the stream wait for it, and records that as a use of the blocks.
    ///
    /// # Errors
    /// As [`Engine::wait_awake`]; `Device` if the stream refuses the wait.
    pub fn wait_awake_on(
        &self,
        ids: &[RegionId],
        stream: &D::Stream,
    ) -> Result<Waited, OffloadError> {
        let waited = self.make_awake(ids)?;
        self.order_behind_arrivals(ids, stream)?;
        Ok(waited)
    }

    fn make_awake(&self, ids: &[RegionId]) -> Result<Waited, OffloadError> {
        self.refuse_worker()?;
        if self.are_awake(ids) {
            return Ok(Waited::default());
        }
        let start_ns = self.timeline.now_ns();
        let result = self.wake_with_room(ids);
        let waited = self.waited(start_ns, ids);
        result.map(|()| waited)
    }

    /// Wakes regions, makes room for those that have none, and blocks until all are awake. Records no wait.
    ///
    /// # Errors
    /// As [`Engine::wait_awake`].
    pub(super) fn wake_with_room(&self, ids: &[RegionId]) -> Result<(), OffloadError> {
        let mut attempts = WakeAttempts::default();
        loop {
            self.wake(ids);
            let Some(unwoken) = self.table.wait_for(|inner| settled_or_unwoken(inner, ids))? else {
                return Ok(());
            };
            self.make_room_for(unwoken, &mut attempts)?;
        }
    }

    /// Makes room for a region that did not wake. `Ok`: the wake is to be tried again.
    ///
    /// # Errors
    /// `WakeFailed` if room would not help, or was made too often.
    fn make_room_for(
        &self,
        unwoken: Unwoken,
        attempts: &mut WakeAttempts,
    ) -> Result<(), OffloadError> {
        let (bytes, may_help) = (unwoken.bytes, unwoken.error.is_out_of_memory());
        let is_device_full = unwoken.error.is_device_full();
        let failed = self.wake_failed(unwoken);
        if !may_help || attempts.fruitless == FRUITLESS_ATTEMPTS_MAX {
            return Err(failed);
        }
        // An I/O thread that found no room did not wait for streams that hold freed memory. This thread
        // does, before any region is put to sleep.
        let is_first_own = self.device.is_stream_ordered() && attempts.count == 0;
        attempts.count += 1;
        // Within the budget the device can still be full, of others' memory and of the allocator's own free
        // pages. Those go first: no region sleeps for them.
        let has_trimmed = is_device_full && self.allocator.trim(bytes) > 0;
        if !has_trimmed && !is_first_own && self.make_room(bytes).freed_bytes == 0 {
            attempts.fruitless += 1;
        }
        if attempts.count == WAKE_ATTEMPTS_MAX { Err(failed) } else { Ok(()) }
    }

    /// Returns what [`settled_or_unwoken`] says of a region now.
    #[expect(clippy::option_option, reason = "as there")]
    pub(super) fn settled(&self, id: RegionId) -> Result<Option<Option<Unwoken>>, OffloadError> {
        let mut inner = self.table.lock();
        match settled_or_unwoken(&mut inner, &[id]) {
            None if inner.is_broken => Err(OffloadError::Broken),
            settled => Ok(settled),
        }
    }

    /// Blocks until nothing of these regions is in flight or waits to sleep, however it ended. That includes
    /// the events given to a sleep: they must not depend on the caller.
    ///
    /// # Errors
    /// `Order` on a thread of the runtime; `Broken`.
    pub fn wait_settled(&self, ids: &[RegionId]) -> Result<Waited, OffloadError> {
        self.refuse_worker()?;
        let start_ns = self.timeline.now_ns();
        let mut blocked = false;
        self.table.wait_for(|inner| {
            let busy = ids.iter().any(|&id| {
                inner.get(id).is_some_and(|e| !e.is_idle() || e.region.wait.is_admitted())
            });
            blocked |= busy;
            (!busy).then_some(())
        })?;
        Ok(if blocked { self.waited(start_ns, ids) } else { Waited::default() })
    }

    /// Wakes the region around `address`, if any, and blocks until it is awake.
    ///
    /// # Errors
    /// As [`Engine::wait_awake`].
    pub fn wake_address(&self, address: usize) -> Result<Waited, OffloadError> {
        match self.region_at(address) {
            Some(id) => self.wait_awake(&[id]),
            None => Ok(Waited::default()),
        }
    }

    pub(crate) fn are_awake(&self, ids: &[RegionId]) -> bool {
        let mut inner = self.table.lock();
        ids.iter().all(|&id| {
            inner.get(id).is_none_or(|e| {
                e.region.state == RegionState::Gone
                    || (e.region.state == RegionState::Awake
                        && e.is_idle()
                        && !e.region.wait.is_admitted())
            })
        })
    }

    /// Returns true if all of them are awake or in transition.
    pub(crate) fn are_under_way(&self, ids: &[RegionId]) -> bool {
        let mut inner = self.table.lock();
        ids.iter()
            .all(|&id| inner.get(id).is_none_or(|e| !e.region.state.is_asleep() || !e.is_idle()))
    }

    fn wake_failed(&self, unwoken: Unwoken) -> OffloadError {
        let start = self.body(unwoken.id, |b| Some(b.range().start)).unwrap_or_default();
        OffloadError::WakeFailed {
            region: unwoken.id,
            start,
            bytes: unwoken.bytes,
            source: Arc::new(unwoken.error),
        }
    }

    /// Records a wait for these regions, under the layer of the first.
    pub(super) fn waited(&self, start_ns: u64, ids: &[RegionId]) -> Waited {
        let end_ns = self.timeline.now_ns();
        let stall_ns = end_ns.saturating_sub(start_ns);
        let layer = ids.first().and_then(|&id| self.table.with(id, |entry| entry.data.layer()));
        let wait = Slice::new(Lane::Stall, self.names.wait, start_ns, end_ns);
        self.timeline.slice(Slice { layer: layer.flatten(), ..wait });
        lock(&self.counts).stall_ns += stall_ns;
        lock(&self.counts).waits += 1;
        Waited { stall_ns }
    }

    /// Refuses a wait on a thread of the runtime, which might wait for itself.
    pub(super) fn refuse_worker(&self) -> Result<(), OffloadError> {
        if dormouse_device::is_runtime_thread() {
            return Err(OffloadError::Order {
                what: "waiting",
                seen: "a thread of the runtime's own".to_owned(),
                expected: "any other thread".to_owned(),
            });
        }
        Ok(())
    }
}

/// `Some(None)`: all awake or gone. `Some(Some(_))`: nothing moves any more and one is asleep.
/// `None`: the wait continues.
#[expect(clippy::option_option, reason = "wait's answer is itself an option")]
fn settled_or_unwoken<D: Device>(
    inner: &mut Regions<super::RegionData<D>>,
    ids: &[RegionId],
) -> Option<Option<Unwoken>> {
    let mut unwoken = None;
    for &id in ids {
        let Some(entry) = inner.get(id) else { continue };
        if !entry.is_idle() {
            return None;
        }
        // A region that is gone stays in the table until its last copy is over.
        if !matches!(entry.region.state, RegionState::Awake | RegionState::Gone)
            && unwoken.is_none()
        {
            let error = match &entry.data.error {
                Some(error) => (**error).clone(),
                None => OffloadError::NotAwake {
                    region: id,
                    state: entry.region.state,
                    what: "waiting for it (it was put to sleep again)",
                },
            };
            unwoken = Some(Unwoken { id, bytes: entry.data.bytes(), error });
        }
    }
    Some(unwoken)
}
