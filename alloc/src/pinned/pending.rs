//! Buffers that were given back before their readers were done.
//!
//! Not a queue with a head: a look takes the next few in turn and puts back those that are not
//! over, so an event that is late keeps nobody's buffer but its own.

use std::collections::VecDeque;

use dormouse_device::{Device, DeviceError};

use super::slabs::Piece;

/// A piece and the events of its readers that have not been seen complete.
#[derive(Debug)]
pub(super) struct PendingBuffer<D: Device> {
    pub(super) piece: Piece,
    pub(super) events: Vec<D::Event>,
}

impl<D: Device> PendingBuffer<D> {
    /// Whether every reader is done, as far as the device says so. What it does not say (a device
    /// that is lost) leaves the piece pending: a reader may be running yet.
    pub(super) fn is_over(&mut self, device: &D) -> Result<bool, DeviceError> {
        while let Some(event) = self.events.last() {
            if !device.query(event)? {
                return Ok(false);
            }
            self.events.pop();
        }
        Ok(true)
    }
}

/// The next `count` of `pending`, out of it.
pub(super) fn next<D: Device>(
    pending: &mut VecDeque<PendingBuffer<D>>,
    count: usize,
) -> Vec<PendingBuffer<D>> {
    let count = count.min(pending.len());
    pending.drain(..count).collect()
}
