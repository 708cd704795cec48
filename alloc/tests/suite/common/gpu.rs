//! A simulated GPU: streams are queues of work on address ranges, which go on when the test says
//! so, or when a thread waits for an event. Pages that queued work uses must not change.
//! With a run-ahead the GPU goes on by itself, a number of launches behind the host.

use super::contents::Contents;
use dormouse_device::{AddressRange, DeviceError, Operation};
use std::collections::VecDeque;
use std::ops::Range;

/// A point in a stream: complete when this number of items of the stream is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Event {
    pub(crate) stream: usize,
    pub(crate) items: u64,
}

/// The items of an event that went into a graph: never complete, and refused by every call.
const CAPTURED: u64 = u64::MAX;

#[derive(Clone, Copy, Debug)]
enum Work {
    Use(AddressRange),
    /// Writes a tag to every granule.
    Write(AddressRange, u32),
    /// Must find this tag in every granule.
    Read(AddressRange, u32),
    WaitFor(Event),
}

#[derive(Debug, Default)]
struct Queue {
    done: u64,
    /// With the number of launches when it was queued.
    work: VecDeque<(u64, Work)>,
    /// Waits for its events.
    waits: u64,
    /// Being captured: no event can be recorded on it.
    is_captured: bool,
    /// Destroyed: its handle is unknown.
    is_destroyed: bool,
}

/// What a call about an event is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Call {
    Record,
    Query,
    Synchronize,
}

#[derive(Debug, Default)]
pub(crate) struct Gpu {
    streams: Vec<Queue>,
    /// Launches so far, on all streams.
    launches: u64,
    /// Launches that the host is ahead by.
    run_ahead: Option<u64>,
    /// Calls so far, by kind.
    calls: [u64; 3],
    /// Calls that fail, by number from 0.
    faults: Vec<(Call, u64)>,
    is_lost: bool,
    /// Calls that failed.
    failed: u64,
    /// What the pages hold when the work is done.
    memory: Contents,
    /// A capture begins between the check of a stream and the next record.
    captures_next: bool,
}

impl Gpu {
    pub(crate) fn add_stream(&mut self) {
        self.streams.push(Queue::default());
    }

    pub(crate) fn calls(&self, call: Call) -> u64 {
        self.calls[call as usize]
    }

    /// Waits for events of streams other than `stream`.
    pub(crate) fn waits_for_others(&self, stream: usize) -> u64 {
        let waits = |other: &usize| if *other == stream { 0 } else { self.streams[*other].waits };
        (0..self.streams.len()).map(|other| waits(&other)).sum()
    }

    pub(crate) fn failed(&self) -> u64 {
        self.failed
    }

    /// The call of this kind after `skip` more ones fails.
    pub(crate) fn fail(&mut self, call: Call, skip: u64) {
        let at = self.calls(call) + skip;
        self.faults.push((call, at));
    }

    pub(crate) fn forget_faults(&mut self) {
        self.faults.clear();
    }

    /// Every call about an event fails from here on, or works again.
    pub(crate) fn set_lost(&mut self, is_lost: bool) {
        self.is_lost = is_lost;
    }

    pub(crate) fn set_captured(&mut self, stream: usize, is_captured: bool) {
        self.streams[stream].is_captured = is_captured;
    }

    pub(crate) fn set_destroyed(&mut self, stream: usize, is_destroyed: bool) {
        self.streams[stream].is_destroyed = is_destroyed;
    }

    /// The host runs ahead by this number of launches from here on: what was queued before is done, as far as
    /// streams do not wait for each other.
    pub(crate) fn set_run_ahead(&mut self, launches: u64) {
        self.run_ahead = Some(launches);
    }

    /// The contents of pages are kept from here on, by granule.
    pub(crate) fn keep_contents(&mut self, pages: usize, granule_bytes: usize) {
        self.memory = Contents::new(pages, granule_bytes);
    }

    pub(super) fn set_mapped(&mut self, pages: Range<usize>, is_mapped: bool) {
        self.memory.set_mapped(pages, is_mapped);
    }

    /// The next event that is recorded goes into a graph.
    pub(crate) fn capture_next(&mut self) {
        self.captures_next = true;
    }

    /// Queues work of `stream` on `range`.
    pub(crate) fn launch(&mut self, stream: usize, range: AddressRange) {
        self.queue(stream, Work::Use(range));
    }

    /// Queues work that writes `tag` to `range`.
    pub(crate) fn write(&mut self, stream: usize, range: AddressRange, tag: u32) {
        self.queue(stream, Work::Write(range, tag));
    }

    /// Queues work that must find `tag` in `range` when it is done.
    pub(crate) fn read(&mut self, stream: usize, range: AddressRange, tag: u32) {
        self.queue(stream, Work::Read(range, tag));
    }

    fn queue(&mut self, stream: usize, work: Work) {
        self.launches += 1;
        self.streams[stream].work.push_back((self.launches, work));
        let Some(run_ahead) = self.run_ahead else { return };
        let is_behind = |queue: &Queue| {
            queue.work.front().is_some_and(|(launch, _)| launch + run_ahead <= self.launches)
        };
        let behind: Vec<usize> =
            (0..self.streams.len()).filter(|&stream| is_behind(&self.streams[stream])).collect();
        for stream in behind {
            self.advance(stream);
        }
    }

    /// Does the next item of `stream`; `false` where it has none, or waits for another stream.
    pub(crate) fn advance(&mut self, stream: usize) -> bool {
        match self.streams[stream].work.front() {
            Some((_, Work::WaitFor(event))) if !self.is_complete(*event) => return false,
            Some(&(_, Work::Write(range, tag))) => self.memory.write(range, tag),
            Some(&(_, Work::Read(range, tag))) => {
                let other = self.memory.first_other(range, tag);
                let is_first = !std::thread::panicking();
                assert!(
                    other.is_none() || !is_first,
                    "late work of stream {stream} finds {other:x?} in {range:x?} instead of {tag:x}"
                );
            }
            Some(_) => {}
            None => return false,
        }
        let queue = &mut self.streams[stream];
        queue.work.pop_front();
        queue.done += 1;
        true
    }

    /// Does everything that is queued.
    pub(crate) fn drain(&mut self) {
        while (0..self.streams.len()).any(|stream| self.advance(stream)) {}
    }

    /// Items queued on `stream` and not done.
    pub(crate) fn queued(&self, stream: usize) -> usize {
        self.streams[stream].work.len()
    }

    /// Where `stream` ends now.
    pub(crate) fn end(&self, stream: usize) -> Event {
        let queue = &self.streams[stream];
        Event { stream, items: queue.done + queue.work.len() as u64 }
    }

    pub(crate) fn is_complete(&self, event: Event) -> bool {
        self.streams[event.stream].done >= event.items
    }

    /// Streams with work queued that uses part of `range`.
    pub(crate) fn users(&self, range: AddressRange) -> Vec<usize> {
        let overlaps = |(_, work): &(u64, Work)| match work {
            Work::Use(used) | Work::Write(used, _) | Work::Read(used, _) => {
                used.start < range.end() && range.start < used.end()
            }
            Work::WaitFor(_) => false,
        };
        let is_user = |stream: &usize| self.streams[*stream].work.iter().any(overlaps);
        (0..self.streams.len()).filter(is_user).collect()
    }

    pub(crate) fn must_be_idle(&self, range: AddressRange) {
        let users = self.users(range);
        let is_first = !std::thread::panicking();
        assert!(
            users.is_empty() || !is_first,
            "pages at {range:x?} change while streams {users:?} use them"
        );
    }

    /// Whether later work of `stream` waits for work of `other`.
    fn waits_for(&self, stream: usize, other: usize) -> bool {
        let is_wait =
            |(_, work): &(u64, Work)| matches!(work, Work::WaitFor(event) if event.stream == other);
        self.streams[stream].work.iter().any(is_wait)
    }

    /// `stream` is handed `range`: no other may still use it that it does not wait for.
    pub(crate) fn must_suit(&self, range: AddressRange, stream: usize) {
        let users = self.users(range);
        let is_own = users.iter().all(|&user| user == stream || self.waits_for(stream, user));
        assert!(is_own, "stream {stream} is handed {range:x?} while streams {users:?} use it");
    }

    fn call(&mut self, call: Call) -> Result<(), DeviceError> {
        let number = self.calls(call);
        self.calls[call as usize] += 1;
        if self.is_lost || self.faults.contains(&(call, number)) {
            self.failed += 1;
            let reason = format!("injected into {call:?}");
            return Err(DeviceError::DeviceLost { operation: Operation::Event, reason });
        }
        Ok(())
    }

    pub(crate) fn record(&mut self, stream: usize) -> Result<Event, DeviceError> {
        self.call(Call::Record)?;
        if self.streams[stream].is_destroyed {
            self.failed += 1;
            return Err(DeviceError::Refused {
                operation: Operation::Event,
                start: 0,
                bytes: 0,
                code: 400,
                reason: "the handle is unknown".into(),
            });
        }
        if self.streams[stream].is_captured {
            self.failed += 1;
            return Err(DeviceError::Refused {
                operation: Operation::Event,
                start: 0,
                bytes: 0,
                code: 900,
                reason: "the stream is being captured".into(),
            });
        }
        if std::mem::take(&mut self.captures_next) {
            return Ok(Event { stream, items: CAPTURED });
        }
        Ok(self.end(stream))
    }

    fn must_not_be_captured(&mut self, event: Event) -> Result<(), DeviceError> {
        if event.items != CAPTURED {
            return Ok(());
        }
        self.failed += 1;
        Err(DeviceError::Refused {
            operation: Operation::Event,
            start: 0,
            bytes: 0,
            code: 907,
            reason: "the event was recorded in a capture".into(),
        })
    }

    pub(crate) fn wait(&mut self, stream: usize, event: Event) {
        self.streams[stream].work.push_back((self.launches, Work::WaitFor(event)));
    }

    pub(crate) fn query(&mut self, event: Event) -> Result<bool, DeviceError> {
        self.call(Call::Query)?;
        self.must_not_be_captured(event)?;
        Ok(self.is_complete(event))
    }

    /// While the caller waits, the GPU works: no more than it has to. Returns whether `event` is complete: not if it
    /// takes work that the host has yet to queue.
    pub(crate) fn synchronize(&mut self, event: Event) -> Result<bool, DeviceError> {
        self.call(Call::Synchronize)?;
        self.must_not_be_captured(event)?;
        self.streams[event.stream].waits += 1;
        Ok(self.try_finish(event))
    }

    /// Does what it takes for `event` to complete.
    pub(crate) fn finish(&mut self, event: Event) {
        assert!(self.try_finish(event), "streams wait for each other for ever");
    }

    /// As `finish`; `false` if it takes work that the host has yet to queue.
    fn try_finish(&mut self, event: Event) -> bool {
        while !self.is_complete(event) {
            let is_moving = self.advance(event.stream)
                || (0..self.streams.len()).any(|stream| self.advance(stream));
            if !is_moving {
                return false;
            }
        }
        true
    }
}
