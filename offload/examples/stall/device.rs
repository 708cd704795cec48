//! The host device behind links of chosen rates.

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::num::NonZeroU64;
use std::sync::{Mutex, MutexGuard, PoisonError};

use dormouse_device::host::{Event, HostDevice, Staged, Stream};
use dormouse_device::{
    AddressRange, Callback, Device, DeviceError, DeviceKind, Fill, MemoryInfo, Sealed, SpanId,
    SpanLabel,
};
use dormouse_kernels::DType;
use dormouse_offload::{Compute, OffloadError};

use crate::pace::{Link, sleep_until};

/// Passes everything on. A copy from or to pinned memory is over when its link has had the time to
/// carry it: the stream sleeps until then. The link is taken when the copy is asked for, whatever
/// its stream has still to wait for.
#[derive(Debug)]
pub(crate) struct Paced {
    inner: HostDevice,
    out: Link,
    inward: Link,
    /// Bytes of what is pinned, by its begin.
    pinned: Mutex<BTreeMap<usize, usize>>,
    /// What was given back: it stays pinned, as a pool keeps it where pinning costs something, so that
    /// no copy touches memory for the first time.
    spare: Mutex<Vec<AddressRange>>,
}

impl Paced {
    pub(crate) fn new(
        inner: HostDevice,
        out_bytes_per_s: NonZeroU64,
        in_bytes_per_s: NonZeroU64,
    ) -> Self {
        let (out, inward) = (Link::new(out_bytes_per_s), Link::new(in_bytes_per_s));
        Self { inner, out, inward, pinned: Mutex::default(), spare: Mutex::default() }
    }

    fn pinned(&self) -> MutexGuard<'_, BTreeMap<usize, usize>> {
        self.pinned.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn spare(&self) -> MutexGuard<'_, Vec<AddressRange>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What was given back of the same length, whose last owner asked for as much.
    fn take_spare(&self, bytes: usize) -> Option<AddressRange> {
        let mut spare = self.spare();
        let at = spare.iter().position(|range| range.bytes == bytes)?;
        Some(spare.swap_remove(at))
    }

    fn is_pinned(&self, address: usize) -> bool {
        let pinned = self.pinned();
        pinned.range(..=address).next_back().is_some_and(|(start, bytes)| address < start + bytes)
    }

    /// What a copy goes over, if anything.
    fn link(&self, destination: usize, source: usize) -> Option<&Link> {
        match (self.is_pinned(destination), self.is_pinned(source)) {
            (true, false) => Some(&self.out),
            (false, true) => Some(&self.inward),
            _ => None,
        }
    }
}

impl Drop for Paced {
    fn drop(&mut self) {
        for range in std::mem::take(&mut *self.spare()) {
            // SAFETY: given back by its owner, who was its last.
            unsafe { self.inner.free_pinned(range) }
        }
    }
}

impl Device for Paced {
    type Stream = Stream;
    type Event = Event;
    type Staged = Staged;

    fn kind(&self) -> DeviceKind {
        self.inner.kind()
    }

    fn is_stream_ordered(&self) -> bool {
        self.inner.is_stream_ordered()
    }

    fn page_bytes(&self) -> usize {
        self.inner.page_bytes()
    }

    fn large_page_bytes(&self) -> usize {
        self.inner.large_page_bytes()
    }

    fn address_space(&self) -> AddressRange {
        self.inner.address_space()
    }

    fn memory_info(&self) -> MemoryInfo {
        self.inner.memory_info()
    }

    fn map(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError> {
        self.inner.map(range, fill)
    }

    fn map_large(
        &self,
        range: AddressRange,
        large: AddressRange,
        fill: Fill,
    ) -> Result<(), DeviceError> {
        self.inner.map_large(range, large, fill)
    }

    fn limit_parked(&self, total_bytes: u64) {
        self.inner.limit_parked(total_bytes);
    }

    fn release_parked(&self) -> u64 {
        self.inner.release_parked()
    }

    fn unmap(&self, range: AddressRange) -> Result<(), DeviceError> {
        self.inner.unmap(range)
    }

    fn freeze(&self, range: AddressRange, label: SpanLabel) -> Result<SpanId, DeviceError> {
        self.inner.freeze(range, label)
    }

    fn thaw(&self, span: SpanId) -> Result<(), DeviceError> {
        self.inner.thaw(span)
    }

    fn seal(&self, span: SpanId) -> Result<Sealed, DeviceError> {
        self.inner.seal(span)
    }

    fn stage(&self, span: SpanId, fill: Fill) -> Result<Staged, DeviceError> {
        self.inner.stage(span, fill)
    }

    fn stage_large(&self, span: SpanId, fill: Fill) -> Result<Staged, DeviceError> {
        self.inner.stage_large(span, fill)
    }

    fn staged_address(&self, staged: &Staged) -> usize {
        self.inner.staged_address(staged)
    }

    fn publish(&self, staged: Staged) -> Result<(), (DeviceError, Staged)> {
        self.inner.publish(staged)
    }

    fn forget(&self, span: SpanId) -> Result<(), DeviceError> {
        self.inner.forget(span)
    }

    fn allocate_pinned(&self, bytes: usize) -> Result<AddressRange, DeviceError> {
        let range = match self.take_spare(bytes) {
            Some(range) => range,
            None => self.inner.allocate_pinned(bytes)?,
        };
        self.pinned().insert(range.start, range.bytes);
        Ok(range)
    }

    unsafe fn free_pinned(&self, range: AddressRange) {
        self.pinned().remove(&range.start);
        self.spare().push(range);
    }

    fn create_stream(&self, name: &str) -> Result<Stream, DeviceError> {
        self.inner.create_stream(name)
    }

    unsafe fn foreign_stream(&self, raw: *mut c_void) -> Result<Stream, DeviceError> {
        // SAFETY: the caller's, of the same device.
        unsafe { self.inner.foreign_stream(raw) }
    }

    fn record(&self, stream: &Stream) -> Result<Event, DeviceError> {
        self.inner.record(stream)
    }

    fn wait(&self, stream: &Stream, event: &Event) -> Result<(), DeviceError> {
        self.inner.wait(stream, event)
    }

    fn query(&self, event: &Event) -> Result<bool, DeviceError> {
        self.inner.query(event)
    }

    fn synchronize(&self, event: &Event) -> Result<(), DeviceError> {
        self.inner.synchronize(event)
    }

    /// What goes over a link is one piece of work, so that nothing is queued where it is refused.
    unsafe fn copy(
        &self,
        destination: usize,
        source: usize,
        bytes: usize,
        stream: &Stream,
    ) -> Result<(), DeviceError> {
        let Some(link) = self.link(destination, source) else {
            // SAFETY: the caller's, of the same device.
            return unsafe { self.inner.copy(destination, source, bytes, stream) };
        };
        let due = link.take(bytes);
        let work = move |_| {
            // SAFETY: the caller keeps both ranges valid until the stream has passed this, and they
            // do not overlap.
            unsafe {
                std::ptr::copy_nonoverlapping(source as *const u8, destination as *mut u8, bytes);
            }
            sleep_until(due);
        };
        self.inner.callback(stream, Box::new(work))
    }

    unsafe fn zero(&self, start: usize, bytes: usize, stream: &Stream) -> Result<(), DeviceError> {
        // SAFETY: the caller's, of the same device.
        unsafe { self.inner.zero(start, bytes, stream) }
    }

    fn callback(&self, stream: &Stream, work: Callback) -> Result<(), DeviceError> {
        self.inner.callback(stream, work)
    }
}

impl Compute for Paced {
    unsafe fn accumulate(
        &self,
        accumulator: usize,
        source: usize,
        elems: usize,
        dtype: DType,
        stream: &Stream,
    ) -> Result<(), OffloadError> {
        // SAFETY: the caller's, of the same device.
        unsafe { self.inner.accumulate(accumulator, source, elems, dtype, stream) }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use dormouse_device::host::{HostConfig, guard, os_page_bytes};
    use dormouse_device::{Hold, conformance};

    use super::*;

    impl Hold for Paced {
        fn hold(
            &self,
            stream: &Stream,
            until: Box<dyn FnOnce() + Send>,
        ) -> Result<(), DeviceError> {
            self.inner.hold(stream, until)
        }
    }

    fn device(bytes_per_s: u64) -> Paced {
        let capacity_bytes = 64 * os_page_bytes() as u64;
        let config = HostConfig::new(4 * capacity_bytes as usize, capacity_bytes);
        let rate = NonZeroU64::new(bytes_per_s).unwrap();
        Paced::new(HostDevice::new(config).unwrap(), rate, rate)
    }

    #[test]
    fn it_does_what_every_device_must() {
        guard::install().unwrap();
        conformance::run(&|| device(u64::MAX));
    }

    #[test]
    fn a_copy_goes_over_the_link_of_its_direction() {
        let device = device(1);
        let memory = device.allocate_pinned(os_page_bytes()).unwrap();
        let (pinned, last) = (memory.start, memory.start + memory.bytes - 1);
        let page = device.address_space().start;
        let goes = |to, from| device.link(to, from).map(std::ptr::from_ref);
        let (out, inward) = (Some(&raw const device.out), Some(&raw const device.inward));
        assert_eq!((goes(pinned, page), goes(last, page)), (out, out));
        assert_eq!((goes(page, pinned), goes(page, last)), (inward, inward));
        assert_eq!((goes(pinned, last), goes(page, page)), (None, None));
        // SAFETY: allocated above, and no copy was made.
        unsafe { device.free_pinned(memory) };
        assert_eq!(goes(pinned, page), None);
    }

    #[test]
    fn pinned_memory_given_back_serves_the_next_who_asks_for_as_much() {
        let (device, page) = (device(1), os_page_bytes());
        let (one, two) =
            (device.allocate_pinned(page).unwrap(), device.allocate_pinned(2 * page).unwrap());
        // SAFETY: allocated above, and no copy was made.
        unsafe {
            device.free_pinned(one);
            device.free_pinned(two);
        }
        assert_eq!(device.allocate_pinned(2 * page), Ok(two));
        let other = device.allocate_pinned(2 * page).unwrap();
        assert!(other != two && device.is_pinned(two.start) && !device.is_pinned(one.start));
        // SAFETY: as above.
        unsafe {
            device.free_pinned(two);
            device.free_pinned(other);
        }
    }

    #[test]
    fn a_copy_takes_its_links_time_and_carries_its_bytes() {
        let bytes = os_page_bytes();
        let device = device(100 * bytes as u64);
        let memory = device.allocate_pinned(bytes).unwrap();
        let page = AddressRange::new(device.address_space().start, bytes);
        device.map(page, Fill::Zero).unwrap();
        let (stream, asked) = (device.create_stream("copies").unwrap(), Instant::now());
        // SAFETY: a page of each, of this test's own, until the stream has passed both copies.
        unsafe {
            (page.start as *mut usize).write(7);
            device.copy(memory.start, page.start, bytes, &stream).unwrap();
            device.copy(page.start + 8, memory.start, 8, &stream).unwrap();
        }
        let taken = |link: &Link| link.take(0) - asked;
        assert!(taken(&device.out) >= Duration::from_millis(10));
        assert!(taken(&device.inward) < taken(&device.out));
        device.synchronize(&device.record(&stream).unwrap()).unwrap();
        assert!(asked.elapsed() >= Duration::from_millis(10), "the bytes are there too early");
        // SAFETY: mapped above, and the copies are over; no other use of what is freed.
        unsafe {
            assert_eq!(((page.start + 8) as *const usize).read(), 7);
            device.free_pinned(memory);
        }
    }
}
