//! Sleeps that wait for the caller's events: they join the queue when the last one completes.
//!
//! The wait is a stream's, not a thread's. Until it ends the regions are simply awake: waking or
//! freeing them takes them from behind the gate, so nobody ever waits for a foreign event.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use dormouse_device::Device;

use super::Engine;
use super::transfers::Way;
use crate::error::OffloadError;
use crate::ids::RegionId;

/// Events to wait for, and the number the regions behind them carry.
pub(super) struct Gate<D: Device> {
    pub(super) ticket: u64,
    events: Vec<D::Event>,
}

impl<D: Device> Engine<D> {
    /// A gate, where some event has not completed.
    pub(super) fn open_gate(&self, after: &[D::Event]) -> Result<Option<Gate<D>>, OffloadError> {
        static TICKETS: AtomicU64 = AtomicU64::new(1);
        let mut events = Vec::new();
        for event in after {
            if !self.device.query(event)? {
                events.push(event.clone());
            }
        }
        if events.is_empty() {
            return Ok(None);
        }
        // Relaxed: only uniqueness matters.
        let ticket = TICKETS.fetch_add(1, Ordering::Relaxed);
        Ok(Some(Gate { ticket, events }))
    }

    /// Lets the regions behind the gate go when its events have completed.
    pub(super) fn arm_gate(&self, gate: Gate<D>, ids: &[RegionId]) -> Result<(), OffloadError> {
        let armed = self.arm(&gate, ids);
        if armed.is_err() {
            self.call_off(ids, gate.ticket);
        }
        armed
    }

    fn arm(&self, gate: &Gate<D>, ids: &[RegionId]) -> Result<(), OffloadError> {
        let stream = self.stream(Way::Gate)?;
        for event in &gate.events {
            self.device.wait(&stream, event)?;
        }
        let engine = self.me.upgrade().ok_or(OffloadError::ShutDown)?;
        let engine = Arc::downgrade(&engine);
        let (ids, ticket) = (ids.to_vec(), gate.ticket);
        self.device.callback(
            &stream,
            Box::new(move |ended| {
                let Some(engine) = engine.upgrade() else { return };
                engine.table.watched(|| match ended {
                    Ok(()) => engine.pass_gate(&ids, ticket),
                    // Nobody knows who still uses them: they stay awake.
                    Err(_) => engine.call_off(&ids, ticket),
                });
            }),
        )?;
        Ok(())
    }

    fn pass_gate(&self, ids: &[RegionId], ticket: u64) {
        {
            let mut inner = self.table.lock();
            for &id in ids {
                let Some((entry, shared)) = inner.get_both(id) else { continue };
                if entry.body.gate == ticket {
                    entry.body.gate = 0;
                    shared.gated_bytes = shared.gated_bytes.saturating_sub(entry.body.bytes());
                    shared.queued_bytes += entry.body.bytes();
                    shared.queue.push_back(id);
                }
            }
        }
        self.table.notify();
        self.pump();
    }
}
