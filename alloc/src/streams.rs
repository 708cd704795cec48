//! Streams and events: when freed memory may be reused.
//!
//! It has no effect on a device that is not stream-ordered. Otherwise a use is complete when an event
//! recorded after it has completed. Events are recorded, queried and waited for without the state's
//! lock; only the holder of the ladder waits (I8).

use crate::AllocError;
use crate::allocator::{Allocator, Locked};
use crate::marks::{MARKS_MAX, Mark, Marks};
use crate::run_ahead::RunAhead;
use crate::state::{Need, Release, ReleaseSubject, StreamSet};
use crate::types::{BlockId, Request};
use dormouse_device::sync::MutexGuard;
use dormouse_device::{Device, DeviceError};
use std::time::Instant;

/// Limit of the marks of a stream that one trim queries.
const MARKS_QUERIED_MAX: usize = 2 * MARKS_MAX;
/// The number of pending blocks from which requests that the cache can serve query them too.
pub const PENDING_ASKED_FROM: usize = 64;

/// Whether to wait for the end of a use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum WaitMode {
    /// Query only.
    Poll,
    /// Wait, but only for the stream of the request.
    OwnStream,
    /// Wait for any stream, but only until a deadline: see [`Patience`](crate::patience::Patience).
    Briefly,
    /// Wait.
    Wait,
}

/// The ends of the uses of some blocks: see [`Allocator::uses_end`].
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UsesEnd<E> {
    /// One event on each stream that the device knows.
    pub events: Vec<E>,
    /// Blocks that a stream may use which the device does not know any more: the end of that use is unknown.
    pub without_end: Vec<BlockId>,
}

impl<E> Default for UsesEnd<E> {
    fn default() -> Self {
        Self { events: Vec::new(), without_end: Vec::new() }
    }
}

/// What the device says of a stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum StreamAnswer {
    Idle,
    Busy,
    /// It does not know the stream any more.
    Gone,
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

    /// Records that the work of a stream before a mark is complete.
    fn pass_mark(&mut self, slot: u32, frees: u64) {
        self.state.note_quiet(slot, frees);
        if let Some(marks) = self.marks.get_mut(slot as usize) {
            marks.pass(frees);
        }
    }

    /// Records that a stream was idle after free number `frees`.
    pub(crate) fn note_idle(&mut self, slot: u32, frees: u64) {
        self.state.note_idle(slot);
        self.pass_mark(slot, frees);
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
        let mut locked = self.state.lock();
        if locked.state.register_stream(key)? {
            locked.marks.push(Marks::default());
            locked.run_ahead.push(RunAhead::default());
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
    /// sleep. Returns no events if the device is not stream-ordered; freed blocks are skipped. A stream that was
    /// destroyed holds up the blocks that it may use, and no others.
    ///
    /// # Errors
    /// `Device` if an event cannot be recorded on a stream that the device knows: the end of the uses is then unknown.
    pub fn uses_end(&self, blocks: &[BlockId]) -> Result<UsesEnd<D::Event>, AllocError> {
        let mut end = UsesEnd::default();
        if !self.is_stream_ordered {
            return Ok(end);
        }
        let users = self.state.lock().state.users(blocks);
        let (mut queries, mut refused, mut gone) =
            (EventQueries::default(), None, StreamSet::EMPTY);
        for slot in users.iter() {
            match self.try_record(slot, &mut queries) {
                Ok(event) => end.events.push(event),
                Err(Some(error)) if error.is_unknown_handle() => gone.insert(slot),
                Err(error) => refused = error.or(refused),
            }
        }
        let mut locked = self.state.lock();
        locked.note(queries);
        if let Some(refused) = refused {
            return Err(AllocError::Device(refused));
        }
        if !gone.is_empty() {
            let is_user =
                |id: &&BlockId| locked.state.users(&[**id]).iter().any(|it| gone.contains(it));
            end.without_end = blocks.iter().filter(is_user).copied().collect();
        }
        Ok(end)
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
    /// same uses. A stream that the device does not know any more is left out where it holds up only pages of others.
    fn record_ends(&self, pending: &mut PendingRelease<D>, queries: &mut EventQueries) {
        for slot in std::mem::take(&mut pending.release.users).iter() {
            match self.try_record(slot, queries) {
                Ok(end) => pending.ends.push((slot, end)),
                Err(Some(error)) if error.is_unknown_handle() && self.is_foreign(pending, slot) => {
                }
                Err(_) => pending.release.users.insert(slot),
            }
        }
    }

    /// Whether a stream has neither used the memory of a release nor been requested for it, as far as is known.
    fn is_foreign(&self, pending: &PendingRelease<D>, slot: u32) -> bool {
        match pending.release.subject {
            ReleaseSubject::Block(_) => false,
            ReleaseSubject::Arena(arena) => !self.state.lock().state.has_segments_of(arena, slot),
        }
    }

    fn record(&self, slot: u32, queries: &mut EventQueries) -> Option<D::Event> {
        self.try_record(slot, queries).ok()
    }

    /// As [`Self::record`], with the error of the device; `None` for a stream that is not registered.
    fn try_record(
        &self,
        slot: u32,
        queries: &mut EventQueries,
    ) -> Result<D::Event, Option<DeviceError>> {
        let stream = self.streams.lock().get(slot as usize).cloned().ok_or(None)?;
        let recorded = self.device.record(&stream);
        recorded.map_err(|error| {
            let _: Option<D::Event> = queries.note(Err(error.clone()));
            Some(error)
        })
    }

    /// Whether `event` has completed; `None` after an error of the device.
    fn query_event(
        &self,
        event: &D::Event,
        wait_mode: WaitMode,
        queries: &mut EventQueries,
    ) -> Option<bool> {
        let is_complete = queries.note(self.device.query(event))?;
        if is_complete || wait_mode != WaitMode::Wait {
            return Some(is_complete);
        }
        queries.waits += 1;
        queries.note(self.device.synchronize(event)).map(|()| true)
    }

    /// Whether `event` has completed by the deadline; `None` after an error of the device.
    fn wait_until(
        &self,
        event: &D::Event,
        deadline: Instant,
        queries: &mut EventQueries,
    ) -> Option<bool> {
        if self.query_event(event, WaitMode::Poll, queries)? {
            return Some(true);
        }
        queries.waits += 1;
        let limit = deadline.saturating_duration_since(Instant::now());
        let is_complete = queries.note(self.device.synchronize_within(event, limit))?;
        if is_complete {
            self.state.lock().patience.note_ended();
        } else {
            let left_out = self.state.lock().patience.note_unended();
            tracing::warn!(
                target: "alloc",
                left_out,
                "a stream did not end in time: more memory is mapped, and the next waits are left out"
            );
        }
        Some(is_complete)
    }

    /// Marks the streams that are due: records an event behind what was freed on them. Never waits (I4).
    #[cold]
    pub(crate) fn mark_frees(&self) {
        let (due, frees) = self.state.lock().state.take_due_marks();
        let mut queries = EventQueries::default();
        let record = |slot| Some((slot, self.record(slot, &mut queries)?));
        let events: Vec<(u32, D::Event)> = due.iter().filter_map(record).collect();
        let mut locked = self.state.lock();
        locked.note(queries);
        for (slot, event) in events {
            if let Some(marks) = locked.marks.get_mut(slot as usize) {
                marks.add(Mark { frees, event });
            }
        }
    }

    /// Queries the marks of all streams. Returns the streams with
    /// an incomplete one. Called without the state's lock, by the holder of the ladder.
    pub(crate) fn query_marks(&self) -> StreamSet {
        let (mut busy, mut queries) = (StreamSet::EMPTY, EventQueries::default());
        let marked: Vec<u32> = {
            let locked = self.state.lock();
            let slots = (0_u32..).zip(&locked.marks);
            slots.filter(|(_, marks)| marks.oldest().is_some()).map(|(slot, _)| slot).collect()
        };
        for slot in marked {
            // Each round removes a mark, or ends.
            for _ in 0..MARKS_QUERIED_MAX {
                let mark = self.state.lock().marks[slot as usize].oldest().cloned();
                let Some(Mark { frees, event }) = mark else { break };
                match self.query_event(&event, WaitMode::Poll, &mut queries) {
                    Some(true) => self.state.lock().pass_mark(slot, frees),
                    Some(false) => {
                        busy.insert(slot);
                        break;
                    }
                    // An event that a capture took is never complete. The next mark covers its frees.
                    None => self.state.lock().marks[slot as usize].pass(frees),
                }
            }
        }
        self.state.lock().note(queries);
        busy
    }

    /// Waits for streams, each until it is through with what it had queued before a free: for its oldest mark behind
    /// that free, or for what it has queued by now. Returns the streams that could not be waited for. After the
    /// `deadline` it waits for none.
    pub(crate) fn wait_for_frees(
        &self,
        ends: &[(u32, u64)],
        deadline: Option<Instant>,
    ) -> StreamSet {
        let (mut silent, mut queries) = (StreamSet::EMPTY, EventQueries::default());
        for &(slot, freed_at) in ends {
            let (mark, frees) = {
                let locked = self.state.lock();
                let marks = locked.marks.get(slot as usize);
                (marks.and_then(|marks| marks.covering(freed_at)).cloned(), locked.state.frees())
            };
            let record = |queries: &mut EventQueries| {
                self.record(slot, queries).map(|event| Mark { frees, event })
            };
            let mark = mark.or_else(|| record(&mut queries));
            let ended = mark.map(|Mark { frees, event }| {
                let is_complete = match deadline {
                    Some(deadline) => self.wait_until(&event, deadline, &mut queries),
                    None => self.query_event(&event, WaitMode::Wait, &mut queries),
                };
                (frees, is_complete)
            });
            match ended {
                Some((frees, Some(true))) => self.state.lock().pass_mark(slot, frees),
                _ => silent.insert(slot),
            }
        }
        self.state.lock().note(queries);
        silent
    }

    /// Waits until a request near the maximum use is not too far ahead of its stream: see
    /// [`Config::run_ahead`](crate::Config::run_ahead).
    #[cold]
    pub(crate) fn limit_run_ahead<'a>(
        &'a self,
        mut locked: MutexGuard<'a, Locked<D>>,
        request: &Request,
        bytes: u64,
        limit_bytes: u64,
    ) -> MutexGuard<'a, Locked<D>> {
        let Ok(slot) = locked.state.slot_of(request.stream) else { return locked };
        let Some(run_ahead) = locked.run_ahead.get_mut(slot as usize) else { return locked };
        let is_due = run_ahead.count(bytes, limit_bytes);
        if !is_due || self.strongest_wait() != WaitMode::Wait {
            return locked;
        }
        drop(locked);
        let mut queries = EventQueries::default();
        // A stream under capture takes none.
        if let Some(event) = self.record(slot, &mut queries) {
            let oldest = self.state.lock().run_ahead[slot as usize].add(event);
            oldest.map(|event| self.query_event(&event, WaitMode::Wait, &mut queries));
        }
        let mut locked = self.state.lock();
        locked.note(queries);
        locked
    }

    /// Queries the streams, except those in `busy`, that are not known to be through with all frees. Called without the
    /// state's lock, by the holder of the ladder.
    pub(crate) fn query_streams(&self, busy: StreamSet) {
        let (asked, frees) = {
            let locked = self.state.lock();
            let has_cached = locked.state.stats.cached_bytes.current > 0;
            let behind = has_cached.then(|| locked.state.streams_behind(busy));
            (behind.unwrap_or_default(), locked.state.frees())
        };
        if asked.is_empty() {
            return;
        }
        let mut queries = EventQueries::default();
        let answers: Vec<(u32, Option<StreamAnswer>)> = self.device.during(|| {
            asked.iter().map(|slot| (slot, self.query_stream(slot, &mut queries))).collect()
        });
        let mut locked = self.state.lock();
        locked.note(queries);
        for (slot, answer) in answers {
            match answer {
                Some(StreamAnswer::Idle) => locked.note_idle(slot, frees),
                Some(StreamAnswer::Busy) => locked.state.note_busy(slot),
                Some(StreamAnswer::Gone) => locked.state.note_gone(slot),
                // As a stream that is busy, but it takes no marks: it is under capture.
                None => {}
            }
        }
    }

    /// Queries a stream; `None` after an error that tells nothing of it.
    fn query_stream(&self, slot: u32, queries: &mut EventQueries) -> Option<StreamAnswer> {
        let stream = self.streams.lock().get(slot as usize).cloned()?;
        match self.device.is_idle(&stream) {
            Ok(true) => Some(StreamAnswer::Idle),
            Ok(false) => Some(StreamAnswer::Busy),
            Err(error) => {
                let is_gone = error.is_unknown_handle();
                let _: Option<bool> = queries.note(Err(error));
                is_gone.then_some(StreamAnswer::Gone)
            }
        }
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
        let mut passed = Vec::new();
        let mut busy = StreamSet::EMPTY;
        for mut it in pending {
            let wait_mode = if complete_bytes < enough_bytes { wait_mode } else { WaitMode::Poll };
            if self.is_complete(&mut it, wait_mode, &mut busy, &mut passed, &mut queries) {
                complete_bytes += it.release.bytes;
                complete.push(it.release);
            } else {
                left.push(it);
            }
        }
        let mut locked = self.state.lock();
        locked.note(queries);
        passed.into_iter().for_each(|(slot, frees)| locked.pass_mark(slot, frees));
        // Releases of the meantime are younger.
        left.append(&mut locked.pending);
        locked.pending_asked_at = PENDING_ASKED_FROM.max(left.len().saturating_mul(2));
        locked.pending = left;
        let mut made_bytes = 0;
        for it in complete {
            made_bytes += match it.subject {
                ReleaseSubject::Block(index) => {
                    locked.state.finish_pending(index, it.freed_at);
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

    /// Whether all uses are complete. A stream found busy is not queried again for later uses. Adds the streams whose
    /// event is complete to `passed`, with the number of the free before it.
    fn is_complete(
        &self,
        pending: &mut PendingRelease<D>,
        wait_mode: WaitMode,
        busy: &mut StreamSet,
        passed: &mut Vec<(u32, u64)>,
        queries: &mut EventQueries,
    ) -> bool {
        self.record_ends(pending, queries);
        let PendingRelease { release, ends } = pending;
        ends.retain(|(slot, end)| {
            if wait_mode != WaitMode::Wait && busy.contains(*slot) {
                return true;
            }
            match self.query_event(end, wait_mode, queries) {
                Some(true) => {
                    passed.push((*slot, release.freed_at));
                    false
                }
                Some(false) => {
                    busy.insert(*slot);
                    true
                }
                // An event that a capture took is never complete. A later one follows the same uses.
                None => {
                    busy.insert(*slot);
                    release.users.insert(*slot);
                    false
                }
            }
        });
        release.users.is_empty() && ends.is_empty()
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
