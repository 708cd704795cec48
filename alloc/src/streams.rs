//! Streams and events: when freed memory may be reused.
//!
//! Without effect on a device that is not stream-ordered. Otherwise a use is complete when an event
//! recorded after it has completed. Events are recorded, queried and waited for without the state's
//! lock; only the holder of the ladder waits (I8).

use crate::AllocError;
use crate::allocator::{Allocator, Locked};
use crate::state::{ClosingArena, Need, PendingFree, StreamSet};
use crate::types::{ArenaId, BlockId, Request};
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

/// Memory that waits for streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum ReleaseSubject {
    /// A block that was freed while streams other than its own might use it: its range.
    Block(u32),
    /// An arena that was closed and keeps its pages until then.
    Arena(ArenaId),
}

/// A freed block or closed arena that streams may still use.
#[derive(Debug)]
pub(crate) struct PendingRelease<D: Device> {
    subject: ReleaseSubject,
    bytes: u64,
    /// Streams that no event could be recorded on yet.
    unmarked: StreamSet,
    /// By slot: where the uses of a stream end.
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
    /// The answer, where there is one.
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
    /// Whether so many blocks are pending that any request asks after them.
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
        // A thread that sees the new slot waits here, and then finds the stream. Taken before `state`.
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
        let ends: Vec<_> =
            users.iter().filter_map(|slot| self.record(slot, &mut queries)).collect();
        let refused = queries.last_error.clone();
        self.state.lock().note(queries);
        match refused {
            None => Ok(ends),
            Some(refused) => Err(AllocError::Device(refused)),
        }
    }

    /// Marks where the uses of a block that was just given up end. Never waits (I4).
    #[inline]
    pub(crate) fn mark_pending(&self, pending: Option<PendingFree>) {
        if let Some(pending) = pending {
            self.mark_ends(pending);
        }
    }

    #[cold]
    fn mark_ends(&self, pending: PendingFree) {
        let (unmarked, bytes) = self.state.lock().state.take_uses(pending);
        self.mark_subject(ReleaseSubject::Block(pending.index), bytes, unmarked);
    }

    /// Marks where the uses of a closed arena's pages end. Never waits.
    pub(crate) fn mark_closing(&self, closing: Option<ClosingArena>) {
        if let Some(ClosingArena { arena, bytes, users }) = closing {
            self.mark_subject(ReleaseSubject::Arena(arena), bytes, users);
        }
    }

    fn mark_subject(&self, subject: ReleaseSubject, bytes: u64, unmarked: StreamSet) {
        let mut pending = PendingRelease { subject, bytes, unmarked, ends: Vec::new() };
        let mut queries = EventQueries::default();
        self.mark(&mut pending, &mut queries);
        let mut locked = self.state.lock();
        locked.note(queries);
        locked.pending.push(pending);
    }

    /// Records an event on each stream that has none yet. What is refused stays unmarked; a later
    /// event shows the end of the same uses.
    fn mark(&self, pending: &mut PendingRelease<D>, queries: &mut EventQueries) {
        let mut unmarked = StreamSet::EMPTY;
        for slot in pending.unmarked.iter() {
            match self.record(slot, queries) {
                Some(end) => pending.ends.push((slot, end)),
                None => unmarked.insert(slot),
            }
        }
        pending.unmarked = unmarked;
    }

    fn record(&self, slot: u32, queries: &mut EventQueries) -> Option<D::Event> {
        let stream = self.streams.lock().get(slot as usize).cloned()?;
        queries.note(self.device.record(&stream))
    }

    /// Whether `event` has completed; `None` where the device does not say.
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

    /// Those of `streams` whose work up to now is over. Called with no lock of the state.
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

    /// Whether the stream has nothing to do; no where the device does not say.
    fn is_idle(&self, slot: u32, queries: &mut EventQueries) -> bool {
        let stream = self.streams.lock().get(slot as usize).cloned();
        stream.and_then(|stream| queries.note(self.device.is_idle(&stream))).unwrap_or(false)
    }

    /// Makes pending blocks whose uses are over cached ranges again, and lets the pages of closed
    /// arenas go: all that are over by now, and, with patience, the oldest of the others until
    /// `enough_bytes` have come together.
    /// Returns the bytes.
    pub(crate) fn collect(
        &self,
        _ladder: &MutexGuard<'_, ()>,
        wait_mode: WaitMode,
        enough_bytes: u64,
    ) -> u64 {
        // Out of reach while the device is asked: others have to come by the ladder too.
        let pending = std::mem::take(&mut self.state.lock().pending);
        if pending.is_empty() {
            return 0;
        }
        let mut queries = EventQueries::default();
        let (mut over, mut left, mut over_bytes) = (Vec::new(), Vec::new(), 0);
        let mut busy = StreamSet::EMPTY;
        for mut it in pending {
            let wait_mode = if over_bytes < enough_bytes { wait_mode } else { WaitMode::Poll };
            if self.is_over(&mut it, wait_mode, &mut busy, &mut queries) {
                over_bytes += it.bytes;
                over.push(it);
            } else {
                left.push(it);
            }
        }
        let mut locked = self.state.lock();
        locked.note(queries);
        // What came meanwhile is younger.
        left.append(&mut locked.pending);
        locked.pending_asked_at = PENDING_ASKED_FROM.max(left.len().saturating_mul(2));
        locked.pending = left;
        let mut made_bytes = 0;
        for it in &over {
            made_bytes += match it.subject {
                ReleaseSubject::Block(index) => {
                    locked.state.finish_pending(index);
                    it.bytes
                }
                // More of it may be free than was when it was closed.
                ReleaseSubject::Arena(arena) => locked.state.arena_settle(arena),
            };
        }
        self.record_gauges(&mut locked);
        drop(locked);
        made_bytes
    }

    /// Whether no stream uses the block any more. A stream found busy is not asked again about
    /// what was queued later.
    fn is_over(
        &self,
        pending: &mut PendingRelease<D>,
        wait_mode: WaitMode,
        busy: &mut StreamSet,
        queries: &mut EventQueries,
    ) -> bool {
        if !pending.unmarked.is_empty() {
            self.mark(pending, queries);
        }
        pending.ends.retain(|(slot, end)| {
            let is_passed_over = wait_mode == WaitMode::Poll && busy.contains(*slot);
            let is_over =
                !is_passed_over && self.query_event(end, wait_mode, queries) == Some(true);
            if !is_over {
                busy.insert(*slot);
            }
            !is_over
        });
        pending.unmarked.is_empty() && pending.ends.is_empty()
    }

    /// Before a request: where the cache does not meet it, or many blocks are pending, those that
    /// are over are collected. Not while somebody else is on the ladder, who does the same.
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

    /// Checks that what is pending is on the list once: for tests. (While somebody asks the device
    /// about it, it is not on the list.)
    pub(crate) fn check_pending(locked: &Locked<D>) -> Result<(), String> {
        let mut listed: Vec<ReleaseSubject> = locked.pending.iter().map(|it| it.subject).collect();
        listed.sort_unstable();
        listed.dedup();
        let mut blocks = 0;
        let are_pending = listed.iter().all(|subject| match *subject {
            ReleaseSubject::Block(index) => {
                blocks += 1;
                locked.state.is_pending(index)
            }
            // It may be gone: its last blocks can have left it without pages.
            ReleaseSubject::Arena(arena) => !locked.state.is_open(arena),
        });
        let count = locked.state.stats.pending_blocks.current;
        if !are_pending || listed.len() != locked.pending.len() || blocks > count {
            return Err(format!("{count} blocks are pending, listed: {listed:?}"));
        }
        Ok(())
    }
}
