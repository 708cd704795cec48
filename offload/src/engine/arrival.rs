//! Arrivals: copies in that are queued but not over although their region is awake.
//!
//! On a stream-ordered device a wake is complete once its copy is queued. No thread waits for the copy;
//! users make their stream wait for the region's *arrival*. Until a stream of the owner does that, or the
//! copy is over, the pages and the host copy stay.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_alloc::pinned::PinnedBuffer;
use dormouse_device::{Device, DeviceError};

use super::transfers::{CopyStream, is_indeterminate};
use super::{Engine, RegionData};
use crate::error::OffloadError;
use crate::ids::RegionId;
use crate::table::Regions;
use dormouse_residency::region::RegionState;

/// The copy that fills an awake region.
#[derive(Clone, Debug)]
pub(crate) struct Arrival<E> {
    pub(crate) event: E,
    /// Unique: the region may have slept and woken since it was read.
    number: u64,
    /// The number of blocks freed before a stream of the owner waited for the event, if one did. The
    /// owner's later work, and later frees, are ordered behind the copy.
    freed_before: Option<usize>,
}

impl<E> Arrival<E> {
    pub(super) fn new(event: E) -> Self {
        static NUMBERS: AtomicU64 = AtomicU64::new(1);
        // Relaxed: only uniqueness matters.
        let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
        Self { event, number, freed_before: None }
    }

    /// Returns the event, unless a stream of the owner waits for it.
    pub(super) fn unordered(&self) -> Option<&E> {
        self.freed_before.is_none().then_some(&self.event)
    }

    /// Returns the number of blocks freed before a stream of the owner waited for the event.
    pub(super) fn freed_before(&self) -> usize {
        self.freed_before.unwrap_or_default()
    }
}

impl<D: Device> Engine<D> {
    /// Returns the region's arrival, unless it is over.
    pub(super) fn arrival(&self, id: RegionId) -> Option<Arrival<D::Event>> {
        let arrival = self.body(id, |b| b.arrival.clone())?;
        match self.device.query(&arrival.event) {
            Ok(true) => {
                self.forget_arrival(id, &arrival);
                None
            }
            // A lost device completes nothing; waiters get its error.
            Ok(false) | Err(_) => Some(arrival),
        }
    }

    /// Clears an arrival that is over; never a later one.
    pub(super) fn forget_arrival(&self, id: RegionId, arrival: &Arrival<D::Event>) {
        self.body(id, |b| b.arrival.take_if(|now| now.number == arrival.number));
    }

    /// Makes later work of `stream` wait for the bytes of awake regions, and records it as a use of their
    /// blocks.
    pub(super) fn order_behind_arrivals(
        &self,
        ids: &[RegionId],
        stream: &D::Stream,
    ) -> Result<(), OffloadError> {
        let mut key = None;
        for &id in ids {
            let Some(arrival) = self.arrival(id) else { continue };
            self.device.wait(stream, &arrival.event)?;
            let key = *key.get_or_insert_with(|| self.allocator.key_of(stream));
            if !key.is_some_and(|key| self.record_use(id, key)) {
                continue; // not recorded with the allocator: a free waits for the copy itself
            }
            self.table.with(id, |e| {
                let freed = e.data.freed.len();
                if let Some(now) = e.data.arrival.as_mut().filter(|a| a.number == arrival.number) {
                    now.freed_before.get_or_insert(freed);
                }
            });
        }
        Ok(())
    }

    /// Records a use of the region's blocks that are not freed. Returns false if the allocator refuses it
    /// for any of them.
    fn record_use(&self, id: RegionId, key: u64) -> bool {
        let starts: Option<Vec<usize>> = self.body(id, |body| {
            let kept = body.blocks.iter().filter(|part| !body.freed.contains(&part.start));
            Some(kept.map(|part| part.start).collect())
        });
        let takes = |&start: &usize| self.allocator.record_stream(start, key).is_ok();
        starts.is_some_and(|starts| starts.iter().all(takes))
    }

    /// Blocks until the bytes of awake regions have arrived. Returns true if any had not.
    pub(super) fn wait_for_arrivals(&self, ids: &[RegionId]) -> Result<bool, OffloadError> {
        let mut has_waited = false;
        for arrival in ids.iter().filter_map(|&id| self.arrival(id)) {
            self.device.synchronize(&arrival.event)?;
            has_waited = true;
        }
        Ok(has_waited)
    }

    /// Waits for a copy in before its pages are removed. An error means that it may still be running.
    pub(super) fn settle_arrival(&self, id: RegionId) -> Result<(), DeviceError> {
        if let Some(arrival) = self.arrival(id) {
            self.await_event(&arrival.event)?;
            self.forget_arrival(id, &arrival);
        }
        Ok(())
    }

    /// Releases a host copy once no copy reads it, and ends its load, if it is one.
    pub(super) fn give_after_arrival(
        &self,
        id: RegionId,
        buffer: PinnedBuffer,
        load_bytes: Option<u64>,
    ) {
        match self.arrival(id) {
            Some(arrival) => {
                self.count_hosts_in_use(id, |count| count + 1);
                self.once_over(arrival.event, move |engine| {
                    engine.give_unless_read(buffer);
                    engine.end_load(load_bytes);
                    engine.count_hosts_in_use(id, |count| count - 1);
                    engine.table.notify();
                    // The place may admit a queued sleep, or start a load.
                    engine.pump_in_background();
                });
            }
            None => {
                self.give_unless_read(buffer);
                self.end_load(load_bytes);
            }
        }
    }

    /// Frees a region's host copy, or leaves that to the last of the threads that read it.
    fn give_unless_read(&self, buffer: PinnedBuffer) {
        let is_free = self.table.lock().shared.host_reads.leave(buffer);
        if is_free {
            self.give(buffer);
        }
    }

    fn count_hosts_in_use(&self, id: RegionId, next: impl FnOnce(u32) -> u32) {
        self.table.with(id, |entry| entry.data.hosts_in_use = next(entry.data.hosts_in_use));
    }

    /// Blocks until the host copies of awake regions are given back. Their owner may have freed some.
    pub(super) fn wait_for_hosts(&self, ids: &[RegionId]) -> Result<(), OffloadError> {
        let is_given = |inner: &mut Regions<RegionData<D>>, id| {
            inner.get(id).is_none_or(|entry| {
                entry.region.state == RegionState::Gone || entry.data.hosts_in_use == 0
            })
        };
        self.table.wait_for(|inner| ids.iter().all(|&id| is_given(inner, id)).then_some(()))?;
        Ok(())
    }

    /// Finishes a region that its owner freed: now, or when the copy into it is over if no stream of the
    /// owner waits for that.
    pub(super) fn finish_after_arrival(&self, id: RegionId) {
        match self.arrival(id).filter(|arrival| arrival.freed_before != Some(0)) {
            Some(arrival) => self.once_over(arrival.event, move |engine| engine.finish(id)),
            None => self.finish(id),
        }
    }

    /// Runs `work` when a copy in is over, however it ended: on the stream's callback or, without one, on an
    /// I/O thread, since the caller may be in a free.
    pub(super) fn once_over(&self, event: D::Event, work: impl Fn(&Self) + Copy + Send + 'static) {
        let Some(engine) = self.me.upgrade() else {
            // The engine is being dropped by its last thread.
            if self.await_event(&event).is_ok() {
                work(self);
            }
            return;
        };
        let teller = Arc::clone(&engine);
        let told = self.stream(CopyStream::In).is_ok_and(|stream| {
            let event = event.clone();
            let tell = move |ended: Result<(), DeviceError>| {
                let waiter = Arc::clone(&teller);
                teller.table.watched(|| match ended {
                    Err(e) if is_indeterminate(&e) => await_in_background(waiter, event, work),
                    _ => work(&waiter),
                });
            };
            self.device.callback(&stream, Box::new(tell)).is_ok()
        });
        if !told {
            await_in_background(engine, event, work);
        }
    }
}

/// Runs `work` on an I/O thread after the event. If the device does not report its end, the memory is
/// never reused.
fn await_in_background<D: Device>(
    engine: Arc<Engine<D>>,
    event: D::Event,
    work: impl Fn(&Engine<D>) + Send + 'static,
) {
    let waiter = Arc::clone(&engine);
    engine.run_blocking(Box::new(move || match waiter.await_event(&event) {
        Ok(()) => work(&waiter),
        Err(_) => waiter.table.break_down(),
    }));
}
