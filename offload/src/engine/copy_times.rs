//! When a copy ran: by the device's own clock where it has one, for a copy waits in its stream
//! long after it was queued.

use dormouse_device::Device;

use crate::step_profile::before;

/// A copy's times, as far as they are known.
#[derive(Debug)]
pub(super) struct CopyTimes<D: Device> {
    queued_ns: u64,
    began: Option<D::Event>,
    ended: Option<D::Event>,
}

impl<D: Device> CopyTimes<D> {
    /// Before the copy is queued on `stream`.
    pub(super) fn begin(device: &D, stream: &D::Stream, now_ns: u64) -> Self {
        // Figures only: a device that takes no such event copies all the same.
        let began = device.is_stream_ordered().then(|| device.record_timed(stream).ok()).flatten();
        Self { queued_ns: now_ns, began, ended: None }
    }

    /// After it was queued.
    pub(super) fn end(&mut self, device: &D, stream: &D::Stream) {
        if self.began.is_some() {
            self.ended = device.record_timed(stream).ok();
        }
    }

    /// From when to when, in nanoseconds of the timeline whose time is `now_ns`.
    pub(super) fn span(&self, device: &D, now_ns: u64) -> (u64, u64) {
        let ended = self.ended.as_ref();
        let end_ns =
            ended.and_then(|event| device.age(event)).map_or(now_ns, |by| before(now_ns, by));
        // Not two ages: time passes between asking for them.
        let took =
            self.began.as_ref().zip(ended).and_then(|(began, ended)| device.between(began, ended));
        let start_ns = took.map_or(self.queued_ns, |by| before(end_ns, by));
        (start_ns.min(end_ns), end_ns)
    }
}
