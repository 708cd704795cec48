//! Bytes that are still on their way when their region is awake.
//!
//! On a stream-ordered device a wake is over once its copy is queued: nobody's thread waits for
//! it, for whoever uses the bytes makes a stream wait for the region's *arrival*. Until some stream
//! of the owner's has done so, or the copy is over, the pages and the host copy stay.

use std::sync::Arc;

use dormouse_device::{AddressRange, Device};

use super::Engine;
use super::transfers::Way;
use crate::error::OffloadError;
use crate::ids::RegionId;

/// When the bytes of an awake region are there.
#[derive(Clone, Debug)]
pub(crate) struct Arrival<E> {
    pub(crate) event: E,
    /// A stream of the owner's waits for it: what the owner does later comes later.
    is_ordered: bool,
}

impl<E> Arrival<E> {
    pub(super) const fn new(event: E) -> Self {
        Self { event, is_ordered: false }
    }
}

impl<D: Device> Engine<D> {
    /// The region's arrival, unless it is over.
    fn arrival(&self, id: RegionId) -> Option<Arrival<D::Event>> {
        let arrival = self.body(id, |b| b.arrival.clone())?;
        match self.device.query(&arrival.event) {
            Ok(true) => {
                self.table.with(id, |e| e.body.arrival = None);
                None
            }
            // A device that is lost brings nothing any more; whoever waits will hear of it.
            Ok(false) | Err(_) => Some(arrival),
        }
    }

    /// Makes later work of `stream` wait for the bytes of awake regions.
    pub(super) fn order_behind_arrivals(
        &self,
        ids: &[RegionId],
        stream: &D::Stream,
    ) -> Result<(), OffloadError> {
        for &id in ids {
            let Some(arrival) = self.arrival(id) else { continue };
            self.device.wait(stream, &arrival.event)?;
            self.table.with(id, |e| {
                if let Some(arrival) = &mut e.body.arrival {
                    arrival.is_ordered = true;
                }
            });
        }
        Ok(())
    }

    /// Blocks until the bytes of awake regions are there.
    pub(super) fn wait_for_arrivals(&self, ids: &[RegionId]) -> Result<(), OffloadError> {
        for &id in ids {
            if let Some(arrival) = self.arrival(id) {
                self.device.synchronize(&arrival.event)?;
            }
        }
        Ok(())
    }

    /// Before pages are taken away that a copy in may still be filling.
    pub(super) fn settle_arrival(&self, id: RegionId) {
        if let Some(arrival) = self.arrival(id) {
            // A device that is lost copies no more.
            let _ = self.device.synchronize(&arrival.event);
        }
        self.table.with(id, |e| e.body.arrival = None);
    }

    /// Gives a host copy back once no copy reads it any more.
    pub(super) fn give_after_arrival(&self, id: RegionId, buffer: AddressRange) {
        let Some(arrival) = self.arrival(id) else { return self.host.give(buffer) };
        let told =
            self.me.upgrade().zip(self.stream(Way::In).ok()).is_some_and(|(engine, stream)| {
                let give = move |_| engine.host.give(buffer);
                self.device.callback(&stream, Box::new(give)).is_ok()
            });
        if !told {
            let _ = self.device.synchronize(&arrival.event);
            self.host.give(buffer);
        }
    }

    /// Finishes a region whose owner freed it: now, or once the copy that nobody of the owner's
    /// waits for has come to its end.
    pub(super) fn finish_after_arrival(&self, id: RegionId) {
        let Some(arrival) = self.arrival(id).filter(|arrival| !arrival.is_ordered) else {
            return self.finish(id);
        };
        let told =
            self.me.upgrade().zip(self.stream(Way::In).ok()).is_some_and(|(engine, stream)| {
                let engine: Arc<Self> = engine;
                self.device.callback(&stream, Box::new(move |_| engine.finish(id))).is_ok()
            });
        if !told {
            let _ = self.device.synchronize(&arrival.event);
            self.finish(id);
        }
    }
}
