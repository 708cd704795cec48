//! Streams and events: when freed memory may be reused.
//!
//! It has no effect on a device that is not stream-ordered. Otherwise a use is complete when an event
//! recorded after it has completed. Events are recorded, queried and waited for without the state's
//! lock; only the holder of the ladder waits (I8).

use crate::AllocError;
use crate::allocator::{Allocator, Locked};
use crate::state::{Need, Release, ReleaseSubject, StreamSet};
use crate::types::{BlockId, Request};
use dormouse_device::sync::MutexGuard;
use dormouse_device::{Device, DeviceError};

/// The number of pending blocks from which requests that the cache can serve query them too.
pub const PENDING_ASKED_FROM: usize = 64;

/// Whether to wait for the end of a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitMode {
    /// Query only.
    Poll,
    /// Wait.
    Wait,
}

/// A release with the events after the uses.
#[derive(Debug)]
pub(crate) struct PendingRelease<D: Device> {
    /// Its users are the streams without an event.
    pub(crate) release: Release,
    /// Slots of streams, with the event after their uses.
    ends: Vec<(u32, D::Event)>,
}

/// Results of event calls of the device.
#[derive(Debug, Default)]
pub(crate) struct EventQueries {
    waits: u64,
    refusals: u64,
    last_error: Option<DeviceError>,
}

impl EventQueries {
    /// Returns the value; counts an error.
    fn note<T>(&mut self, answer: Result<T, DeviceError>) -> Option<T> {
        answer
            .inspect_err(|error| {
                self.refusals += 1;
                self.last_error = Some(error.clone());
            })
            .ok()
    }
}

impl<D: Device> Locked<D> {
    /// Whether every request queries the pending blocks.
    #[inline]
    pub(crate) fn are_many_pending(&self) -> bool {
        self.pending.len() >= self.pending_asked_at
    }

    pub(crate) fn note(&mut self, queries: EventQueries) {
        self.state.stats.stream_waits += queries.waits;
        self.state.stats.event_refusals += queries.refusals;
        self.last_error = queries.last_error.or(self.last_error.take());
    }
}

impl<D: Device> Allocator<D> {
    /// Registers `stream` under `key`; a registered key keeps its stream. The stream must outlive the
    /// allocator. Ignored if the device is not stream-ordered.
    ///
    /// # Errors
    /// `TooManyStreams` at [`crate::STREAMS_MAX`].
    pub fn register_stream(&self, key: u64, stream: D::Stream) -> Result<(), AllocError> {
        if !self.is_stream_ordered {
            return Ok(());
        }
        // A thread that sees the new slot waits for this lock, and then finds the stream.
        let mut streams = self.streams.lock();
        if self.state.lock().state.register_stream(key)? {
            streams.push(stream);
        }
        Ok(())
    }

    /// Returns the first key of `stream`. `None` if it has none, or the device is not stream-ordered.
    pub fn key_of(&self, stream: &D::Stream) -> Option<u64> {
        let slot = self.streams.lock().iter().position(|known| known == stream)?;
        self.state.lock().state.key_of(slot)
    }

    /// Records that stream `key` uses the block around `address` until its free: its pages are not reused
    /// before the work that the stream has queued by then is complete.
    ///
    /// # Errors
    /// `NotABlock`; `FreeDeferred`; `UnknownStream`.
    pub fn record_stream(&self, address: usize, key: u64) -> Result<(), AllocError> {
        self.change(|state| state.record_stream(address, key))
    }

    /// Records an event on each stream that may use one of these blocks, for a caller that puts them to
    /// sleep. Returns no events if the device is not stream-ordered; freed blocks are skipped.
    ///
    /// # Errors
    /// `Device` if an event cannot be recorded: the end of the uses is then unknown.
    pub fn uses_end(&self, blocks: &[BlockId]) -> Result<Vec<D::Event>, AllocError> {
        if !self.is_stream_ordered {
            return Ok(Vec::new());
        }
        let users = self.state.lock().state.users(blocks);
        let mut queries = EventQueries::default();
        let ends = users.iter().filter_map(|slot| self.record(slot, &mut queries)).collect();
        let refused = queries.last_error.clone();
        self.state.lock().note(queries);
        refused.map_or(Ok(ends), |refused| Err(AllocError::Device(refused)))
    }

    /// Records the events of a release, and makes it pending. Never waits (I4).
    pub(crate) fn make_pending(&self, release: Option<Release>) {
        if let Some(release) = release {
            let mut pending = PendingRelease { release, ends: Vec::new() };
            let mut queries = EventQueries::default();
            self.record_ends(&mut pending, &mut queries);
            let mut locked = self.state.lock();
            locked.note(queries);
            locked.pending.push(pending);
        }
    }

    /// Records an event on each stream that has none. After an error a later event is recorded: it follows the
    /// same uses.
    fn record_ends(&self, pending: &mut PendingRelease<D>, queries: &mut EventQueries) {
        for slot in std::mem::take(&mut pending.release.users).iter() {
            match self.record(slot, queries) {
                Some(end) => pending.ends.push((slot, end)),
                None => pending.release.users.insert(slot),
            }
        }
    }

    fn record(&self, slot: u32, queries: &mut EventQueries) -> Option<D::Event> {
        let stream = self.streams.lock().get(slot as usize).cloned()?;
        queries.note(self.device.record(&stream))
    }

    /// Whether `event` has completed; `None` after an error of the device.
    fn query_event(
        &self,
        event: &D::Event,
        wait_mode: WaitMode,
        queries: &mut EventQueries,
    ) -> Option<bool> {
        let is_complete = queries.note(self.device.query(event))?;
        if is_complete || wait_mode == WaitMode::Poll {
            return Some(is_complete);
        }
        queries.waits += 1;
        queries.note(self.device.synchronize(event)).map(|()| true)
    }

    /// Returns those of `streams` whose queued work has completed. Called without the state's lock.
    pub(crate) fn quiet(
        &self,
        streams: StreamSet,
        wait_mode: WaitMode,
    ) -> (StreamSet, EventQueries) {
        let mut queries = EventQueries::default();
        if !self.is_stream_ordered {
            return (streams, queries);
        }
        let mut quiet = StreamSet::EMPTY;
        let mut ends = Vec::new();
        for slot in streams.iter() {
            if self.is_idle(slot, &mut queries) {
                quiet.insert(slot);
            } else if wait_mode == WaitMode::Wait {
                ends.extend(self.record(slot, &mut queries).map(|end| (slot, end)));
            }
        }
        for (slot, end) in ends {
            if self.query_event(&end, wait_mode, &mut queries) == Some(true) {
                quiet.insert(slot);
            }
        }
        (quiet, queries)
    }

    /// Whether the stream is idle; false after an error of the device.
    fn is_idle(&self, slot: u32, queries: &mut EventQueries) -> bool {
        let stream = self.streams.lock().get(slot as usize).cloned();
        stream.and_then(|stream| queries.note(self.device.is_idle(&stream))).unwrap_or(false)
    }

    /// Turns pending blocks whose uses are complete into cached ranges, and releases the pages of closed
    /// arenas. With [`WaitMode::Wait`] waits for the oldest of the others until `enough_bytes` are collected.
    /// Returns the collected bytes.
    pub(crate) fn collect(
        &self,
        _ladder: &MutexGuard<'_, ()>,
        wait_mode: WaitMode,
        enough_bytes: u64,
    ) -> u64 {
        // Other threads need the ladder to collect them.
        let pending = std::mem::take(&mut self.state.lock().pending);
        if pending.is_empty() {
            return 0;
        }
        let mut queries = EventQueries::default();
        let (mut complete, mut left, mut complete_bytes) = (Vec::new(), Vec::new(), 0);
        let mut busy = StreamSet::EMPTY;
        for mut it in pending {
            let wait_mode = if complete_bytes < enough_bytes { wait_mode } else { WaitMode::Poll };
            if self.is_complete(&mut it, wait_mode, &mut busy, &mut queries) {
                complete_bytes += it.release.bytes;
                complete.push(it.release);
            } else {
                left.push(it);
            }
        }
        let mut locked = self.state.lock();
        locked.note(queries);
        // Releases of the meantime are younger.
        left.append(&mut locked.pending);
        locked.pending_asked_at = PENDING_ASKED_FROM.max(left.len().saturating_mul(2));
        locked.pending = left;
        let mut made_bytes = 0;
        for it in complete {
            made_bytes += match it.subject {
                ReleaseSubject::Block(index) => {
                    locked.state.finish_pending(index);
                    it.bytes
                }
                // More of it may be free than when it was closed.
                ReleaseSubject::Arena(arena) => locked.state.arena_settle(arena),
            };
        }
        self.record_gauges(&mut locked);
        drop(locked);
        made_bytes
    }

    /// Whether all uses are complete. A stream found busy is not queried again for later uses.
    fn is_complete(
        &self,
        pending: &mut PendingRelease<D>,
        wait_mode: WaitMode,
        busy: &mut StreamSet,
        queries: &mut EventQueries,
    ) -> bool {
        self.record_ends(pending, queries);
        pending.ends.retain(|(slot, end)| {
            let is_skipped = wait_mode == WaitMode::Poll && busy.contains(*slot);
            let is_complete =
                !is_skipped && self.query_event(end, wait_mode, queries) == Some(true);
            if !is_complete {
                busy.insert(*slot);
            }
            !is_complete
        });
        pending.release.users.is_empty() && pending.ends.is_empty()
    }

    /// Before a request: collects completed pending blocks if the cache cannot serve it, or if many are pending.
    /// Skipped if another thread holds the ladder, since it does the same.
    #[cold]
    pub(crate) fn collect_before<'a>(
        &'a self,
        locked: MutexGuard<'a, Locked<D>>,
        request: &Request,
        need: &Need,
    ) -> MutexGuard<'a, Locked<D>> {
        if !locked.are_many_pending() && locked.state.has_cached(request, need.fit) {
            return locked;
        }
        drop(locked);
        if let Some(ladder) = self.ladder.try_lock() {
            self.collect(&ladder, WaitMode::Poll, 0);
        }
        self.state.lock()
    }
}
