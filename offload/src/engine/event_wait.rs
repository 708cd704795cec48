//! Event waits: admitted sleeps that wait for the caller's events, then for the in-flight window.
//!
//! A stream waits, not a thread. Until then the regions are awake, and a wake or a free withdraws the
//! sleep, so no thread waits for a foreign event.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_device::Device;

use super::Engine;
use super::transfers::CopyStream;
use crate::error::OffloadError;
use crate::ids::RegionId;
use crate::table::FeedResult;
use dormouse_residency::region::{Input, RegionWait};

/// The events of a set of sleeps, and the ticket that its regions wait under.
pub(super) struct EventWait<D: Device> {
    pub(super) ticket: u64,
    events: Vec<D::Event>,
}

impl<D: Device> Engine<D> {
    /// Returns an event wait if some event has not completed.
    pub(super) fn make_event_wait(
        &self,
        after: &[D::Event],
    ) -> Result<Option<EventWait<D>>, OffloadError> {
        static TICKETS: AtomicU64 = AtomicU64::new(1);
        let events = self.unended(after)?;
        if events.is_empty() {
            return Ok(None);
        }
        // Relaxed: only uniqueness matters.
        let ticket = TICKETS.fetch_add(1, Ordering::Relaxed);
        Ok(Some(EventWait { ticket, events }))
    }

    /// Returns the events that have not completed.
    ///
    /// # Errors
    /// `Device` with a refusal for an event that a capture took: no stream of ours may wait for it.
    pub(crate) fn unended(&self, events: &[D::Event]) -> Result<Vec<D::Event>, OffloadError> {
        let mut unended = Vec::new();
        for event in events {
            if !self.device.query(event)? {
                unended.push(event.clone());
            }
        }
        Ok(unended)
    }

    /// Moves the regions on when the events have completed.
    pub(super) fn arm_event_wait(
        &self,
        event_wait: EventWait<D>,
        ids: &[RegionId],
    ) -> Result<(), OffloadError> {
        let armed = self.arm(&event_wait, ids);
        if armed.is_err() {
            self.call_off(ids, event_wait.ticket);
        }
        armed
    }

    fn arm(&self, event_wait: &EventWait<D>, ids: &[RegionId]) -> Result<(), OffloadError> {
        let stream = self.stream(CopyStream::EventWait)?;
        for event in &event_wait.events {
            self.device.wait(&stream, event)?;
        }
        let engine = self.me.upgrade().ok_or(OffloadError::ShutDown)?;
        let engine = Arc::downgrade(&engine);
        let (ids, ticket) = (ids.to_vec(), event_wait.ticket);
        self.device.callback(
            &stream,
            Box::new(move |ended| {
                let Some(engine) = engine.upgrade() else { return };
                engine.table.watched(|| match ended {
                    Ok(()) => engine.event_wait_over(&ids, ticket),
                    // Their users are unknown: they stay awake.
                    Err(_) => engine.call_off(&ids, ticket),
                });
            }),
        )?;
        Ok(())
    }

    fn event_wait_over(&self, ids: &[RegionId], ticket: u64) {
        {
            let mut inner = self.table.lock();
            for &id in ids {
                inner.feed(id, Input::EventsOver(ticket));
            }
        }
        self.table.notify();
        self.pump();
    }

    /// Withdraws the sleeps that wait for the events of this ticket.
    pub(super) fn call_off(&self, ids: &[RegionId], ticket: u64) {
        let waits = |wait| matches!(wait, RegionWait::Events { ticket: its, .. } if its == ticket);
        for &id in ids {
            let fed = {
                let mut inner = self.table.lock();
                let is_behind = inner.get(id).is_some_and(|e| waits(e.region.wait));
                is_behind.then(|| inner.feed(id, Input::Withdraw))
            };
            if let Some(actions) = fed.and_then(FeedResult::actions) {
                self.execute(id, actions);
            }
        }
        self.table.notify();
        self.pump_in_background();
    }
}
