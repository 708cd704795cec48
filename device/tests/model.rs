//! Random requests to a host device against a naive model of it: pages as an array, spans as a
//! list, one byte standing for a page's content.
#![cfg(not(loom))]
#![allow(clippy::unwrap_used, reason = "helpers of tests")]

use dormouse_device::host::{HostConfig, HostDevice, Staged, guard, os_page_bytes};
use dormouse_device::{AddressRange, Device, DeviceError, Sealed, SpanId, SpanLabel};
use proptest::prelude::*;

const PAGES: usize = 12;
const CAPACITY_PAGES: usize = 8;

/// A request. Spans are named by age, for ids are not known when requests are made up.
#[derive(Clone, Debug)]
enum Request {
    Map(usize, usize),
    Unmap(usize, usize),
    Write(usize, u8),
    Freeze(usize, usize),
    Thaw(usize),
    Seal(usize),
    Stage(usize),
    Fill(usize, u8),
    Publish(usize),
    Discard(usize),
    Forget(usize),
}

fn request() -> impl Strategy<Value = Request> {
    let run = || (0..PAGES).prop_flat_map(|first| (Just(first), 1..=(PAGES - first).min(4)));
    let span = || 0..3_usize;
    prop_oneof![
        4 => run().prop_map(|(first, count)| Request::Map(first, count)),
        1 => run().prop_map(|(first, count)| Request::Unmap(first, count)),
        4 => (0..PAGES, 1..=255_u8).prop_map(|(page, byte)| Request::Write(page, byte)),
        4 => run().prop_map(|(first, count)| Request::Freeze(first, count)),
        1 => span().prop_map(Request::Thaw),
        4 => span().prop_map(Request::Seal),
        4 => span().prop_map(Request::Stage),
        2 => (span(), 1..=255_u8).prop_map(|(span, byte)| Request::Fill(span, byte)),
        3 => span().prop_map(Request::Publish),
        1 => span().prop_map(Request::Discard),
        1 => span().prop_map(Request::Forget),
    ]
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Page {
    Unmapped,
    Mapped(u8),
    InSpan,
}

#[derive(Debug)]
enum Stage {
    Frozen,
    Written,
    Asleep,
    Staged(Staged, u8),
}

#[derive(Debug)]
struct Span {
    id: SpanId,
    first: usize,
    bytes: Vec<u8>,
    stage: Stage,
}

struct World {
    device: HostDevice,
    pages: [Page; PAGES],
    spans: Vec<Span>,
    /// The last span that ended: every request on it is refused.
    gone: Option<SpanId>,
}

impl World {
    fn new() -> Self {
        guard::install().unwrap();
        let page = os_page_bytes();
        let capacity_bytes = (CAPACITY_PAGES * page) as u64;
        let device = HostDevice::new(HostConfig::new(PAGES * page, capacity_bytes)).unwrap();
        Self { device, pages: [Page::Unmapped; PAGES], spans: Vec::new(), gone: None }
    }

    fn range(&self, first: usize, count: usize) -> AddressRange {
        let page = self.device.page_bytes();
        AddressRange::new(self.device.address_space().start + first * page, count * page)
    }

    fn mapped_pages(&self) -> usize {
        let plain = self.pages.iter().filter(|page| matches!(page, Page::Mapped(_))).count();
        let asleep = |span: &&Span| !matches!(span.stage, Stage::Asleep);
        plain + self.spans.iter().filter(asleep).map(|span| span.bytes.len()).sum::<usize>()
    }

    fn has_room(&self, count: usize) -> bool {
        self.mapped_pages() + count <= CAPACITY_PAGES
    }

    /// Writes a byte at both ends of a page, as a thread would.
    fn poke(address: usize, byte: u8) {
        let last = address + os_page_bytes() - 1;
        // SAFETY: the model says that the page is accessible, and the test is its only owner.
        unsafe {
            (address as *mut u8).write_volatile(byte);
            (last as *mut u8).write_volatile(byte);
        }
    }

    fn peek(address: usize) -> (u8, u8) {
        let last = address + os_page_bytes() - 1;
        // SAFETY: as in `poke`.
        unsafe { ((address as *const u8).read_volatile(), (last as *const u8).read_volatile()) }
    }

    fn carry_out(&mut self, request: &Request) {
        match *request {
            Request::Map(first, count) => self.map(first, count),
            Request::Unmap(first, count) => {
                let all = self.all_mapped(first, count);
                let result = self.device.unmap(self.range(first, count));
                assert_eq!(result.is_ok(), all, "{result:?}");
                if all {
                    self.pages[first..first + count].fill(Page::Unmapped);
                }
            }
            Request::Write(page, byte) => self.write(page, byte),
            Request::Freeze(first, count) => self.freeze(first, count),
            Request::Thaw(age) => self.thaw(age),
            Request::Seal(age) => self.seal(age),
            Request::Stage(age) => self.stage(age),
            Request::Fill(age, byte) => {
                if let Some(span) = self.spans.get_mut(age)
                    && let Stage::Staged(staged, filled) = &mut span.stage
                {
                    let start = self.device.staged_address(staged);
                    for page in 0..span.bytes.len() {
                        Self::poke(start + page * os_page_bytes(), byte);
                    }
                    *filled = byte;
                }
            }
            Request::Publish(age) => self.publish(age),
            Request::Discard(age) => {
                if let Some(span) = self.spans.get_mut(age)
                    && matches!(span.stage, Stage::Staged(..))
                    && let Stage::Staged(staged, _) =
                        std::mem::replace(&mut span.stage, Stage::Asleep)
                {
                    self.device.discard(staged);
                }
            }
            Request::Forget(age) => self.forget(age),
        }
    }

    fn all_mapped(&self, first: usize, count: usize) -> bool {
        self.pages[first..first + count].iter().all(|page| matches!(page, Page::Mapped(_)))
    }

    fn map(&mut self, first: usize, count: usize) {
        let free = self.pages[first..first + count].iter().all(|page| *page == Page::Unmapped);
        let fits = self.has_room(count);
        let result = self.device.map(self.range(first, count));
        match result {
            Ok(()) => {
                assert!(free && fits);
                self.pages[first..first + count].fill(Page::Mapped(0));
            }
            Err(DeviceError::WrongPages { .. }) => assert!(!free),
            Err(DeviceError::OutOfMemory { .. }) => assert!(free && !fits),
            Err(other) => unreachable!("{other}"),
        }
    }

    fn write(&mut self, page: usize, byte: u8) {
        let address = self.range(page, 1).start;
        if let Page::Mapped(now) = &mut self.pages[page] {
            Self::poke(address, byte);
            *now = byte;
        }
        for span in &mut self.spans {
            let inside = (span.first..span.first + span.bytes.len()).contains(&page);
            if inside && matches!(span.stage, Stage::Frozen | Stage::Written) {
                Self::poke(address, byte);
                span.bytes[page - span.first] = byte;
                span.stage = Stage::Written;
            }
        }
    }

    fn freeze(&mut self, first: usize, count: usize) {
        let all = self.all_mapped(first, count);
        let result = self.device.freeze(self.range(first, count), SpanLabel::default());
        assert_eq!(result.is_ok(), all, "{result:?}");
        let Ok(id) = result else { return };
        let bytes = self.pages[first..first + count]
            .iter()
            .map(|page| if let Page::Mapped(byte) = page { *byte } else { 0 })
            .collect();
        self.pages[first..first + count].fill(Page::InSpan);
        self.spans.push(Span { id, first, bytes, stage: Stage::Frozen });
    }

    /// The id of span `age`, or of one that is gone.
    fn id(&self, age: usize) -> Option<SpanId> {
        self.spans.get(age).map(|span| span.id).or(self.gone)
    }

    /// Ends span `age`; its pages become plain memory or nothing.
    fn end(&mut self, age: usize, mapped: bool) {
        let span = self.spans.remove(age);
        self.gone = Some(span.id);
        for (page, byte) in (span.first..).zip(span.bytes) {
            self.pages[page] = if mapped { Page::Mapped(byte) } else { Page::Unmapped };
        }
    }

    fn is(&self, age: usize, wanted: fn(&Stage) -> bool) -> bool {
        self.spans.get(age).is_some_and(|span| wanted(&span.stage))
    }

    fn thaw(&mut self, age: usize) {
        let Some(id) = self.id(age) else { return };
        let can = self.is(age, |stage| matches!(stage, Stage::Frozen | Stage::Written));
        let result = self.device.thaw(id);
        assert_eq!(result.is_ok(), can, "{result:?}");
        if can {
            self.end(age, true);
        }
    }

    fn seal(&mut self, age: usize) {
        let Some(id) = self.id(age) else { return };
        let frozen = self.is(age, |stage| matches!(stage, Stage::Frozen));
        let written = self.is(age, |stage| matches!(stage, Stage::Written));
        match self.device.seal(id) {
            Ok(Sealed::Asleep) => {
                assert!(frozen);
                self.spans[age].stage = Stage::Asleep;
            }
            Ok(Sealed::Written) => {
                assert!(written);
                self.end(age, true);
            }
            Err(error) => assert!(!frozen && !written, "{error}"),
        }
    }

    fn stage(&mut self, age: usize) {
        let Some(id) = self.id(age) else { return };
        let asleep = self.is(age, |stage| matches!(stage, Stage::Asleep));
        match self.device.stage(id) {
            Ok(staged) => {
                assert!(asleep);
                self.spans[age].stage = Stage::Staged(staged, 0);
            }
            Err(DeviceError::OutOfMemory { .. }) => {
                assert!(asleep && !self.has_room(self.spans[age].bytes.len()));
            }
            Err(error) => assert!(!asleep, "{error}"),
        }
    }

    fn publish(&mut self, age: usize) {
        if !self.is(age, |stage| matches!(stage, Stage::Staged(..))) {
            return;
        }
        let stage = std::mem::replace(&mut self.spans[age].stage, Stage::Asleep);
        let Stage::Staged(staged, byte) = stage else { return };
        self.device.publish(staged).map_err(|(error, _)| error).unwrap();
        self.spans[age].bytes.fill(byte);
        self.end(age, true);
    }

    fn forget(&mut self, age: usize) {
        let Some(id) = self.id(age) else { return };
        let can = self.is(age, |stage| matches!(stage, Stage::Asleep));
        let result = self.device.forget(id);
        assert_eq!(result.is_ok(), can, "{result:?}");
        if can {
            self.end(age, false);
        }
    }

    fn check(&self) {
        let page_bytes = os_page_bytes();
        let info = self.device.memory_info();
        assert_eq!(info.mapped_bytes, (self.mapped_pages() * page_bytes) as u64);
        let staged = |span: &&Span| matches!(span.stage, Stage::Staged(..));
        let staged: usize = self.spans.iter().filter(staged).map(|span| span.bytes.len()).sum();
        assert_eq!(info.staged_bytes, (staged * page_bytes) as u64);
        for (page, state) in self.pages.iter().enumerate() {
            if let Page::Mapped(byte) = state {
                assert_eq!(Self::peek(self.range(page, 1).start), (*byte, *byte), "page {page}");
            }
        }
        for span in &self.spans {
            for (page, byte) in (span.first..).zip(&span.bytes) {
                if matches!(span.stage, Stage::Frozen | Stage::Written) {
                    assert_eq!(Self::peek(self.range(page, 1).start), (*byte, *byte));
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn the_device_and_its_model_agree(requests in prop::collection::vec(request(), 1..60)) {
        let mut world = World::new();
        for request in &requests {
            world.carry_out(request);
            world.check();
        }
    }
}
