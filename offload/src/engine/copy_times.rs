//! When a copy ran: by the device's own clock where it has one, for a copy waits in its stream
//! long after it was queued.

use dormouse_device::Device;

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
        let at = |event: &Option<D::Event>| {
            let age = device.age(event.as_ref()?)?;
            Some(now_ns.saturating_sub(u64::try_from(age.as_nanos()).unwrap_or(u64::MAX)))
        };
        let start_ns = at(&self.began).unwrap_or(self.queued_ns);
        let end_ns = at(&self.ended).unwrap_or(now_ns);
        (start_ns.min(end_ns), end_ns)
    }
}
