//! A device on the bench: ways to read and write its memory.

use crate::{AddressRange, Device, Fill, Sealed, SpanId, SpanLabel};

/// A device, a stream of it, and pinned memory to copy through.
#[derive(Debug)]
pub(super) struct Bench<D: Device> {
    pub(super) device: D,
    pub(super) stream: D::Stream,
    pinned: AddressRange,
}

/// Pages that copies of this bench can hold, beside those of a large page.
const PINNED_PAGES: usize = 16;

impl<D: Device> Bench<D> {
    pub(super) fn new(device: D) -> Self {
        let page = device.page_bytes();
        let pages = device.memory_info().capacity_bytes / page as u64;
        assert!((16..=1024).contains(&pages), "a capacity of 16 to 1024 pages, not {pages}");
        assert_eq!(device.memory_info().capacity_bytes % page as u64, 0, "capacity in pages");
        assert!(device.address_space().bytes as u64 >= 2 * device.memory_info().capacity_bytes);
        let stream = device.create_stream("bench").unwrap();
        let pinned =
            device.allocate_pinned(PINNED_PAGES * page + device.large_page_bytes()).unwrap();
        Self { device, stream, pinned }
    }

    /// `count` pages of the space from page `first` on.
    pub(super) fn range(&self, first: usize, count: usize) -> AddressRange {
        let page = self.device.page_bytes();
        AddressRange::new(self.device.address_space().start + first * page, count * page)
    }

    /// Number of pages of a large page.
    pub(super) fn large_pages(&self) -> usize {
        self.device.large_page_bytes() / self.device.page_bytes()
    }

    /// The second large page of the space, and a page on each side.
    pub(super) fn around_large(&self) -> AddressRange {
        self.range(self.large_pages() - 1, self.large_pages() + 2)
    }

    /// Maps `count` pages from page `first` on and fills them from `seed`.
    pub(super) fn mapped(&self, first: usize, count: usize, seed: u8) -> AddressRange {
        let range = self.range(first, count);
        self.device.map(range, Fill::Zero).unwrap();
        self.write(range.start, &pattern(range.bytes, seed));
        range
    }

    /// Mapped bytes now.
    pub(super) fn mapped_bytes(&self) -> u64 {
        self.device.memory_info().mapped_bytes
    }

    pub(super) fn write(&self, address: usize, bytes: &[u8]) {
        assert!(bytes.len() <= self.pinned.bytes, "the bench is too small");
        // SAFETY: the pinned memory is ours, at least that long, and no copy uses it now.
        let pinned =
            unsafe { std::slice::from_raw_parts_mut(self.pinned.start as *mut u8, bytes.len()) };
        pinned.copy_from_slice(bytes);
        self.copy(address, self.pinned.start, bytes.len());
    }

    pub(super) fn read(&self, range: AddressRange) -> Vec<u8> {
        assert!(range.bytes <= self.pinned.bytes, "the bench is too small");
        self.copy(self.pinned.start, range.start, range.bytes);
        // SAFETY: as in `write`; the copy is done.
        unsafe { std::slice::from_raw_parts(self.pinned.start as *const u8, range.bytes) }.to_vec()
    }

    /// Copies and waits.
    fn copy(&self, destination: usize, source: usize, bytes: usize) {
        // SAFETY: one side is pinned memory of ours; the other is named by the case, which keeps
        // it accessible; the event is waited for.
        unsafe { self.device.copy(destination, source, bytes, &self.stream).unwrap() };
        self.device.synchronize(&self.device.record(&self.stream).unwrap()).unwrap();
    }

    /// Asserts that `range` holds the pattern of `seed`.
    pub(super) fn assert_holds(&self, range: AddressRange, seed: u8) {
        assert!(self.read(range) == pattern(range.bytes, seed), "{range:x?} lost its bytes");
    }

    /// Asserts that `range` holds zeroes.
    pub(super) fn assert_zero(&self, range: AddressRange) {
        assert!(self.read(range).iter().all(|byte| *byte == 0), "{range:x?} is not zero");
    }

    pub(super) fn freeze(&self, range: AddressRange) -> SpanId {
        self.device.freeze(range, label()).unwrap()
    }

    /// Puts a mapped range to sleep.
    pub(super) fn sleep(&self, range: AddressRange) -> SpanId {
        let span = self.freeze(range);
        assert_eq!(self.device.seal(span), Ok(Sealed::Asleep));
        span
    }

    /// Wakes a span with the pattern of `seed`.
    pub(super) fn wake(&self, span: SpanId, range: AddressRange, seed: u8) {
        let staged = self.device.stage(span, Fill::Any).unwrap();
        self.write(self.device.staged_address(&staged), &pattern(range.bytes, seed));
        self.device.publish(staged).map_err(|(error, _)| error).unwrap();
    }
}

impl<D: Device> Drop for Bench<D> {
    fn drop(&mut self) {
        // SAFETY: allocated in `new`, freed once; every copy was waited for.
        unsafe { self.device.free_pinned(self.pinned) };
    }
}

/// The label of every span of the suite.
pub(super) fn label() -> SpanLabel {
    let mut label = SpanLabel { layer: 3, ..SpanLabel::default() };
    label.name[..11].copy_from_slice(b"conformance");
    label
}

/// Bytes that differ by place and by seed, and are never zero.
pub(super) fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    let byte = |place: usize| (place.wrapping_mul(31) as u8 ^ (place >> 12) as u8 ^ seed) | 1;
    (0..bytes).map(byte).collect()
}
