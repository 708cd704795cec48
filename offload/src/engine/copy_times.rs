//! The times of a copy, by the device's clock if it has one: a copy waits in its stream long after it was
//! queued.

use dormouse_device::Device;

use crate::step_profile::before;

/// The times of one copy, as far as they are known.
#[derive(Debug)]
pub(super) struct CopyTimes<D: Device> {
    queued_ns: u64,
    began: Option<D::Event>,
    ended: Option<D::Event>,
}

impl<D: Device> CopyTimes<D> {
    /// Call before the copy is queued on `stream`.
    pub(super) fn begin(device: &D, stream: &D::Stream, now_ns: u64) -> Self {
        // Statistics only: the copy does not depend on the event.
        let began = device.is_stream_ordered().then(|| device.record_timed(stream).ok()).flatten();
        Self { queued_ns: now_ns, began, ended: None }
    }

    /// Call after it was queued.
    pub(super) fn end(&mut self, device: &D, stream: &D::Stream) {
        if self.began.is_some() {
            self.ended = device.record_timed(stream).ok();
        }
    }

    /// Returns when it was queued.
    pub(super) const fn queued_ns(&self) -> u64 {
        self.queued_ns
    }

    /// Returns its begin and end in nanoseconds of the timeline, whose time is `now_ns`.
    pub(super) fn span(&self, device: &D, now_ns: u64) -> (u64, u64) {
        let ended = self.ended.as_ref();
        let end_ns =
            ended.and_then(|event| device.age(event)).map_or(now_ns, |by| before(now_ns, by));
        // Not two ages: time passes between the calls.
        let took =
            self.began.as_ref().zip(ended).and_then(|(began, ended)| device.between(began, ended));
        let start_ns = took.map_or(self.queued_ns, |by| before(end_ns, by));
        (start_ns.min(end_ns), end_ns)
    }
}
