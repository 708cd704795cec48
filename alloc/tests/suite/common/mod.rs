//! A device of numbers: it maps and unmaps pages of an address space without memory, strictly, and
//! where it is stream-ordered keeps the work of its streams in queues. Where blocks share pages it
//! keeps a tag per granule for their contents. What the allocator never calls is refused.
#![allow(dead_code, reason = "each test file uses its own part")]
#![allow(clippy::unimplemented, reason = "what the allocator must not call is loud")]

mod contents;
pub(crate) mod gpu;
pub(crate) mod random;

use contents::Contents;
use dormouse_alloc::{Allocator, Config, Margin};
use dormouse_device::{
    AddressRange, Callback, Device, DeviceError, DeviceKind, Fill, MemoryInfo, Operation, Sealed,
    SpanId, SpanLabel,
};
use dormouse_timeline::Timeline;
use gpu::{Event, Gpu};
use std::ffi::c_void;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

pub(crate) const PAGE: usize = 4096;
/// Not aligned to anything larger than a page, so that alignment of addresses is not by chance.
pub(crate) const BASE: usize = 0x7_0000_3000;

/// How a chosen call fails.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fault {
    Refused,
    Full,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Page {
    mapped: bool,
    /// Handed out since it was mapped.
    dirty: bool,
    /// Part of a large page.
    is_large: bool,
}

type Hook = Box<dyn FnMut(Operation, AddressRange) + Send>;

#[derive(Default)]
struct Inner {
    pages: Vec<Page>,
    mapped: usize,
    capacity: usize,
    maps: u64,
    unmaps: u64,
    /// Faults by number of the call, from 0.
    map_faults: Vec<(u64, Fault)>,
    unmap_faults: Vec<(u64, Fault)>,
    /// Calls that failed so.
    faulted: u64,
    violations: Vec<String>,
    parked_bytes: u64,
    parking_limit_bytes: u64,
    log: Vec<(Operation, AddressRange)>,
    is_logged: bool,
    contents: Contents,
}

#[derive(Default)]
pub(crate) struct Fake {
    inner: Mutex<Inner>,
    hook: Mutex<Option<Hook>>,
    is_stream_ordered: bool,
    /// Pages of a large page; 0 as 1: there are none.
    large_pages: usize,
    gpu: Mutex<Gpu>,
}

impl fmt::Debug for Fake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Fake")
    }
}

impl Fake {
    pub(crate) fn new(pages: usize) -> Arc<Self> {
        Arc::new(Self::with_pages(pages))
    }

    fn with_pages(pages: usize) -> Self {
        let inner = Inner {
            pages: vec![Page::default(); pages],
            capacity: pages,
            is_logged: true,
            ..Inner::default()
        };
        Self { inner: Mutex::new(inner), ..Self::default() }
    }

    /// The simulated GPU: its streams and their queues.
    pub(crate) fn gpu(&self) -> std::sync::MutexGuard<'_, Gpu> {
        // A violation panics with it locked; the allocator is dropped after that.
        self.gpu.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn inner(&self) -> std::sync::MutexGuard<'_, Inner> {
        self.inner.lock().unwrap()
    }

    pub(crate) fn set_capacity_pages(&self, pages: usize) {
        self.inner().capacity = pages;
    }

    /// The map call after `skip` more ones fails.
    pub(crate) fn fail_map(&self, skip: u64, fault: Fault) {
        let mut inner = self.inner();
        let call = inner.maps + skip;
        inner.map_faults.push((call, fault));
    }

    pub(crate) fn fail_unmap(&self, skip: u64, fault: Fault) {
        let mut inner = self.inner();
        let call = inner.unmaps + skip;
        inner.unmap_faults.push((call, fault));
    }

    /// Map and unmap calls that failed because they were told to.
    pub(crate) fn faulted(&self) -> u64 {
        self.inner().faulted
    }

    /// No call is to fail any more.
    pub(crate) fn forget_faults(&self) {
        let mut inner = self.inner();
        inner.map_faults.clear();
        inner.unmap_faults.clear();
        inner.capacity = inner.pages.len();
        self.gpu().forget_faults();
    }

    /// Runs before each map and unmap, with no lock of the device held.
    pub(crate) fn set_hook(&self, hook: impl FnMut(Operation, AddressRange) + Send + 'static) {
        *self.hook.lock().unwrap() = Some(Box::new(hook));
    }

    pub(crate) fn clear_hook(&self) {
        *self.hook.lock().unwrap() = None;
    }

    /// What the device says to have parked, until it is asked to release it.
    pub(crate) fn set_parked_bytes(&self, bytes: u64) {
        self.inner().parked_bytes = bytes;
    }

    /// The last limit it was given for mapped and parked bytes.
    pub(crate) fn parking_limit_bytes(&self) -> u64 {
        self.inner().parking_limit_bytes
    }

    pub(crate) fn mapped_bytes(&self) -> u64 {
        (self.inner().mapped * PAGE) as u64
    }

    pub(crate) fn maps(&self) -> u64 {
        self.inner().maps
    }

    pub(crate) fn unmaps(&self) -> u64 {
        self.inner().unmaps
    }

    pub(crate) fn log(&self) -> Vec<(Operation, AddressRange)> {
        self.inner().log.clone()
    }

    pub(crate) fn violations(&self) -> Vec<String> {
        self.inner().violations.clone()
    }

    /// What `sleep` and `wake` of another room do to the pages of a block.
    pub(crate) fn take_pages(&self, range: AddressRange) {
        self.gpu().must_be_idle(range);
        assert!(!self.splits(range), "{range:x?} splits a large page");
        self.inner().set(range, true, false);
        self.gpu().set_mapped(pages_of(range), false);
    }

    pub(crate) fn bring_pages(&self, range: AddressRange) {
        self.inner().set(range, false, true);
        self.gpu().set_mapped(pages_of(range), true);
    }

    /// The large pages that lie wholly in `range` are one each from now on.
    pub(crate) fn join(&self, range: AddressRange) {
        let large_bytes = self.large_page_bytes();
        let first = range.start.next_multiple_of(large_bytes);
        let end = range.end() / large_bytes * large_bytes;
        if large_bytes > PAGE && first < end {
            let joined = AddressRange::new(first, end - first);
            self.inner().pages[pages_of(joined)].iter_mut().for_each(|page| page.is_large = true);
        }
    }

    /// Number of the large pages in `range`.
    pub(crate) fn large_pages(&self, range: AddressRange) -> usize {
        let inner = self.inner();
        let pages = &inner.pages[pages_of(range)];
        pages.iter().filter(|page| page.is_large).count() / self.large_pages.max(1)
    }

    /// Whether an end of `range` is inside of a large page.
    fn splits(&self, range: AddressRange) -> bool {
        let inner = self.inner();
        let is_large =
            |at: usize| inner.pages.get((at - BASE) / PAGE).is_some_and(|it| it.is_large);
        let is_inside = |at: usize| !at.is_multiple_of(self.large_page_bytes()) && is_large(at);
        is_inside(range.start) || is_inside(range.end())
    }

    /// A block's user writes to all of it. Returns (all were mapped, any was dirty before).
    pub(crate) fn touch(&self, range: AddressRange) -> (bool, bool) {
        let mut inner = self.inner();
        let pages = &mut inner.pages[pages_of(range)];
        let mapped = pages.iter().all(|page| page.mapped);
        let dirty = pages.iter().any(|page| page.dirty);
        pages.iter_mut().for_each(|page| page.dirty = true);
        (mapped, dirty)
    }

    /// By page: whether it is mapped.
    pub(crate) fn mapped_pages(&self) -> Vec<bool> {
        self.inner().pages.iter().map(|page| page.mapped).collect()
    }

    /// A block's user writes `tag` to every granule of `range`.
    pub(crate) fn write(&self, range: AddressRange, tag: u32) {
        self.inner().contents.write(range, tag);
    }

    /// A granule of `range` that has no page, or holds something other than `tag`: its offset in
    /// the range, and what it holds.
    pub(crate) fn first_other(
        &self,
        range: AddressRange,
        tag: u32,
    ) -> Option<(usize, Option<u32>)> {
        self.inner().contents.first_other(range, tag)
    }

    fn run_hook(&self, operation: Operation, range: AddressRange) {
        // A free within a hook may record an event.
        let mut hook = match operation {
            Operation::Event => self.hook.try_lock().ok(),
            _ => Some(self.hook.lock().unwrap()),
        };
        if let Some(hook) = hook.as_deref_mut().and_then(Option::as_mut) {
            hook(operation, range);
        }
    }

    fn call(&self, operation: Operation, range: AddressRange) -> Result<(), DeviceError> {
        self.run_hook(operation, range);
        self.gpu().must_be_idle(range);
        let mut inner = self.inner();
        let map = operation == Operation::Map;
        let inner = &mut *inner;
        let (calls, faults) = match map {
            true => (&mut inner.maps, &inner.map_faults),
            false => (&mut inner.unmaps, &inner.unmap_faults),
        };
        let fault = faults.iter().find(|(call, _)| call == calls).map(|&(_, fault)| fault);
        *calls += 1;
        inner.faulted += u64::from(fault.is_some());
        let pages = range.bytes / PAGE;
        let full = map && inner.mapped + pages > inner.capacity;
        match fault {
            Some(Fault::Refused) => {
                return Err(DeviceError::Refused {
                    operation,
                    start: range.start,
                    bytes: range.bytes,
                    code: 12,
                    reason: "injected".into(),
                });
            }
            None if !full => {}
            _ => {
                return Err(DeviceError::OutOfMemory {
                    operation,
                    asked_bytes: range.bytes as u64,
                    mapped_bytes: (inner.mapped * PAGE) as u64,
                    capacity_bytes: (inner.capacity * PAGE) as u64,
                });
            }
        }
        inner.set(range, !map, map);
        if inner.is_logged {
            inner.log.push((operation, range));
        }
        self.gpu().set_mapped(pages_of(range), map);
        Ok(())
    }
}

impl Inner {
    fn set(&mut self, range: AddressRange, from: bool, to: bool) {
        let bad = range.bytes == 0
            || range.start < BASE
            || !(range.start - BASE).is_multiple_of(PAGE)
            || !range.bytes.is_multiple_of(PAGE)
            || range.end() > BASE + self.pages.len() * PAGE;
        if bad {
            self.violations.push(format!("{range:x?} is not a range of pages"));
            return;
        }
        for page in &mut self.pages[pages_of(range)] {
            if page.mapped != from {
                self.violations.push(format!("{range:x?} is not all mapped == {from}"));
                return;
            }
            *page = Page { mapped: to, ..Page::default() };
        }
        self.contents.set_mapped(pages_of(range), to);
        let pages = range.bytes / PAGE;
        self.mapped = if to { self.mapped + pages } else { self.mapped - pages };
    }
}

/// The pages that `range` has a part in.
pub(crate) fn pages_of(range: AddressRange) -> std::ops::Range<usize> {
    (range.start - BASE) / PAGE..(range.end() - BASE).div_ceil(PAGE)
}

/// An allocator on a fake of `pages`, with segments of 16 pages.
pub(crate) fn allocator(pages: usize, budget_pages: usize) -> (Arc<Fake>, Arc<Allocator<Fake>>) {
    on(Fake::new(pages), budget_pages)
}

/// The same on a stream-ordered fake that has `streams` streams, known by `key` of their number.
pub(crate) fn ordered(
    pages: usize,
    budget_pages: usize,
    streams: usize,
) -> (Arc<Fake>, Arc<Allocator<Fake>>) {
    let device = Fake { is_stream_ordered: true, ..Fake::with_pages(pages) };
    let (device, allocator) = on(Arc::new(device), budget_pages);
    add_streams(&device, &allocator, streams);
    (device, allocator)
}

fn add_streams(device: &Fake, allocator: &Allocator<Fake>, streams: usize) {
    for stream in 0..streams {
        device.gpu().add_stream();
        allocator.register_stream(key(stream), stream).unwrap();
    }
}

/// By what key an allocator of `ordered` knows a stream.
pub(crate) const fn key(stream: usize) -> u64 {
    0x5700 + stream as u64
}

fn on(device: Arc<Fake>, budget_pages: usize) -> (Arc<Fake>, Arc<Allocator<Fake>>) {
    let config = Config {
        granule_bytes: PAGE,
        budget_bytes: (budget_pages * PAGE) as u64,
        segment_bytes: 16 * PAGE,
        moves_pages: false,
        margin: Margin::TIGHT,
        run_ahead: None,
        thread_cache: false,
    };
    let allocator = Allocator::new(Arc::clone(&device), config, Arc::new(Timeline::new(64)));
    (device, Arc::new(allocator.unwrap()))
}

/// A fake of which nothing is logged and whose contents are not kept, and the allocator that `config` makes of
/// it. It is stream-ordered where it has streams, which are idle.
pub(crate) fn uncounted(
    pages: usize,
    config: Config,
    streams: usize,
    large_pages: usize,
) -> (Arc<Fake>, Arc<Allocator<Fake>>) {
    let device = Fake { is_stream_ordered: streams > 0, large_pages, ..Fake::with_pages(pages) };
    device.inner().is_logged = false;
    let device = Arc::new(device);
    let allocator = Allocator::new(Arc::clone(&device), config, Arc::new(Timeline::new(64)));
    let allocator = Arc::new(allocator.unwrap());
    add_streams(&device, &allocator, streams);
    (device, allocator)
}

/// A fake with contents, of which nothing is logged, and the allocator that `config` makes of it.
/// It is stream-ordered where it has streams.
pub(crate) fn with_contents(
    pages: usize,
    config: Config,
    streams: usize,
) -> (Arc<Fake>, Arc<Allocator<Fake>>) {
    with_large_pages(pages, config, streams, 1)
}

/// The same with large pages of `large_pages`.
pub(crate) fn with_large_pages(
    pages: usize,
    config: Config,
    streams: usize,
    large_pages: usize,
) -> (Arc<Fake>, Arc<Allocator<Fake>>) {
    let device = Fake { is_stream_ordered: streams > 0, large_pages, ..Fake::with_pages(pages) };
    {
        let mut inner = device.inner();
        inner.contents = Contents::new(pages, config.granule_bytes);
        inner.is_logged = false;
    }
    let device = Arc::new(device);
    let allocator = Allocator::new(Arc::clone(&device), config, Arc::new(Timeline::new(64)));
    let allocator = Arc::new(allocator.unwrap());
    add_streams(&device, &allocator, streams);
    (device, allocator)
}

const UNUSED: &str = "the allocator does not call this";

impl Device for Fake {
    type Stream = usize;
    type Event = Event;
    type Staged = ();

    fn kind(&self) -> DeviceKind {
        DeviceKind::Host
    }
    fn is_stream_ordered(&self) -> bool {
        self.is_stream_ordered
    }
    fn page_bytes(&self) -> usize {
        PAGE
    }
    fn address_space(&self) -> AddressRange {
        AddressRange::new(BASE, self.inner().pages.len() * PAGE)
    }
    fn memory_info(&self) -> MemoryInfo {
        let inner = self.inner();
        MemoryInfo {
            capacity_bytes: (inner.capacity * PAGE) as u64,
            mapped_bytes: (inner.mapped * PAGE) as u64,
            parked_bytes: inner.parked_bytes,
            ..MemoryInfo::default()
        }
    }
    fn map(&self, range: AddressRange, fill: Fill) -> Result<(), DeviceError> {
        self.call(Operation::Map, range)?;
        if fill == Fill::Any {
            self.touch(range);
            self.write(range, contents::GARBAGE);
        }
        Ok(())
    }
    fn large_page_bytes(&self) -> usize {
        self.large_pages.max(1) * PAGE
    }
    fn map_large(
        &self,
        range: AddressRange,
        large: AddressRange,
        fill: Fill,
    ) -> Result<(), DeviceError> {
        assert!(
            large.start >= range.start && large.end() <= range.end(),
            "{large:x?} in {range:x?}"
        );
        self.map(range, fill)?;
        self.join(large);
        Ok(())
    }
    fn limit_parked(&self, total_bytes: u64) {
        self.inner().parking_limit_bytes = total_bytes;
    }
    fn release_parked(&self) -> u64 {
        std::mem::take(&mut self.inner().parked_bytes)
    }
    fn unmap(&self, range: AddressRange) -> Result<(), DeviceError> {
        assert!(!self.splits(range), "{range:x?} splits a large page");
        self.call(Operation::Unmap, range)
    }
    fn freeze(&self, _: AddressRange, _: SpanLabel) -> Result<SpanId, DeviceError> {
        unimplemented!("{UNUSED}")
    }
    fn thaw(&self, _: SpanId) -> Result<(), DeviceError> {
        unimplemented!("{UNUSED}")
    }
    fn seal(&self, _: SpanId) -> Result<Sealed, DeviceError> {
        unimplemented!("{UNUSED}")
    }
    fn stage(&self, _: SpanId, _: Fill) -> Result<(), DeviceError> {
        unimplemented!("{UNUSED}")
    }
    fn staged_address(&self, (): &()) -> usize {
        unimplemented!("{UNUSED}")
    }
    fn publish(&self, (): ()) -> Result<(), (DeviceError, ())> {
        unimplemented!("{UNUSED}")
    }
    fn forget(&self, _: SpanId) -> Result<(), DeviceError> {
        unimplemented!("{UNUSED}")
    }
    fn allocate_pinned(&self, _: usize) -> Result<AddressRange, DeviceError> {
        unimplemented!("{UNUSED}")
    }
    unsafe fn free_pinned(&self, _: AddressRange) {
        unimplemented!("{UNUSED}")
    }
    fn create_stream(&self, _: &str) -> Result<usize, DeviceError> {
        unimplemented!("{UNUSED}")
    }
    unsafe fn foreign_stream(&self, _: *mut c_void) -> Result<usize, DeviceError> {
        unimplemented!("{UNUSED}")
    }
    fn record(&self, stream: &usize) -> Result<Event, DeviceError> {
        let event = self.gpu().record(*stream);
        // What is queued meanwhile is behind the event.
        self.run_hook(Operation::Event, AddressRange::default());
        event
    }
    fn wait(&self, stream: &usize, event: &Event) -> Result<(), DeviceError> {
        self.gpu().wait(*stream, *event);
        Ok(())
    }
    fn query(&self, event: &Event) -> Result<bool, DeviceError> {
        self.run_hook(Operation::Event, AddressRange::default());
        self.gpu().query(*event)
    }
    fn synchronize(&self, event: &Event) -> Result<(), DeviceError> {
        self.run_hook(Operation::Event, AddressRange::default());
        let is_complete = self.gpu().synchronize(*event)?;
        assert!(is_complete, "the host and a stream wait for each other for ever");
        Ok(())
    }
    fn synchronize_within(&self, event: &Event, _: Duration) -> Result<bool, DeviceError> {
        self.run_hook(Operation::Event, AddressRange::default());
        self.gpu().synchronize(*event)
    }
    unsafe fn copy(&self, _: usize, _: usize, _: usize, _: &usize) -> Result<(), DeviceError> {
        unimplemented!("{UNUSED}")
    }
    unsafe fn zero(&self, _: usize, _: usize, _: &usize) -> Result<(), DeviceError> {
        unimplemented!("{UNUSED}")
    }
    fn callback(&self, _: &usize, _: Callback) -> Result<(), DeviceError> {
        unimplemented!("{UNUSED}")
    }
}
