//! Random requests to a host device against a naive model of it: pages as an array, spans as a
//! list, one byte standing for a page's content.

use dormouse_device::host::{HostConfig, HostDevice, Staged, guard, os_page_bytes};
use dormouse_device::{AddressRange, Device, DeviceError, Fill, Sealed, SpanId, SpanLabel};
use proptest::prelude::*;

const PAGES: usize = 12;
const CAPACITY_PAGES: usize = 8;

/// A request. Spans are named by age, for ids are not known when requests are made up.
#[derive(Clone, Debug)]
enum Request {
    Map(usize, usize, Fill),
    Unmap(usize, usize),
    Write(usize, u8),
    Freeze(usize, usize),
    Thaw(usize),
    Seal(usize),
    Stage(usize, Fill),
    Fill(usize, u8),
    Publish(usize),
    Discard(usize),
    Forget(usize),
    ReleaseParked,
}

fn request() -> impl Strategy<Value = Request> {
    let run = || (0..PAGES).prop_flat_map(|first| (Just(first), 1..=(PAGES - first).min(4)));
    let span = || 0..3_usize;
    let fill = || prop_oneof![Just(Fill::Any), Just(Fill::Zero)];
    prop_oneof![
        4 => (run(), fill()).prop_map(|((first, count), fill)| Request::Map(first, count, fill)),
        1 => run().prop_map(|(first, count)| Request::Unmap(first, count)),
        4 => (0..PAGES, 1..=255_u8).prop_map(|(page, byte)| Request::Write(page, byte)),
        4 => run().prop_map(|(first, count)| Request::Freeze(first, count)),
        1 => span().prop_map(Request::Thaw),
        4 => span().prop_map(Request::Seal),
        4 => (span(), fill()).prop_map(|(span, fill)| Request::Stage(span, fill)),
        2 => (span(), 1..=255_u8).prop_map(|(span, byte)| Request::Fill(span, byte)),
        3 => span().prop_map(Request::Publish),
        1 => span().prop_map(Request::Discard),
        1 => span().prop_map(Request::Forget),
        1 => Just(Request::ReleaseParked),
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

/// Writes a byte at both ends of a page, as a thread would.
fn poke(address: usize, page_bytes: usize, byte: u8) {
    // SAFETY: the model says that the page is accessible, and the test is its only owner.
    unsafe {
        (address as *mut u8).write_volatile(byte);
        ((address + page_bytes - 1) as *mut u8).write_volatile(byte);
    }
}

struct World {
    device: HostDevice,
    page_bytes: usize,
    pages: [Page; PAGES],
    spans: Vec<Span>,
    /// The last span that ended: every request on it is refused.
    gone: Option<SpanId>,
}

impl World {
    fn new(page_bytes: usize) -> Self {
        guard::install().unwrap();
        let capacity_bytes = (CAPACITY_PAGES * page_bytes) as u64;
        let config = HostConfig { reserve_bytes: PAGES * page_bytes, capacity_bytes, page_bytes };
        let device = HostDevice::new(config).unwrap();
        Self { device, page_bytes, pages: [Page::Unmapped; PAGES], spans: Vec::new(), gone: None }
    }

    fn range(&self, first: usize, count: usize) -> AddressRange {
        let page = self.page_bytes;
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

    fn poke(&self, address: usize, byte: u8) {
        poke(address, self.page_bytes, byte);
    }

    fn peek(&self, address: usize) -> (u8, u8) {
        let last = address + self.page_bytes - 1;
        // SAFETY: as in `poke`.
        unsafe { ((address as *const u8).read_volatile(), (last as *const u8).read_volatile()) }
    }

    fn carry_out(&mut self, request: &Request) {
        match *request {
            Request::Map(first, count, fill) => self.map(first, count, fill),
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
            Request::Stage(age, fill) => self.stage(age, fill),
            Request::Fill(age, byte) => self.fill(age, byte),
            Request::Publish(age) => self.publish(age),
            Request::Discard(age) => {
                if let Some(span) = self.spans.get_mut(age)
                    && matches!(span.stage, Stage::Staged(..))
                    && let Stage::Staged(staged, _) =
                        std::mem::replace(&mut span.stage, Stage::Asleep)
                {
                    drop(staged);
                }
            }
            Request::Forget(age) => self.forget(age),
            Request::ReleaseParked => {
                let parked_bytes = self.device.memory_info().parked_bytes;
                assert_eq!(self.device.release_parked(), parked_bytes);
                assert_eq!(self.device.memory_info().parked_bytes, 0);
            }
        }
    }

    fn fill(&mut self, age: usize, byte: u8) {
        let Some(Stage::Staged(staged, _)) = self.spans.get(age).map(|span| &span.stage) else {
            return;
        };
        let start = self.device.staged_address(staged);
        for page in 0..self.spans[age].bytes.len() {
            self.poke(start + page * self.page_bytes, byte);
        }
        if let Stage::Staged(_, filled) = &mut self.spans[age].stage {
            *filled = byte;
        }
    }

    fn all_mapped(&self, first: usize, count: usize) -> bool {
        self.pages[first..first + count].iter().all(|page| matches!(page, Page::Mapped(_)))
    }

    fn map(&mut self, first: usize, count: usize, fill: Fill) {
        let free = self.pages[first..first + count].iter().all(|page| *page == Page::Unmapped);
        let fits = self.has_room(count);
        let result = self.device.map(self.range(first, count), fill);
        match result {
            Ok(()) => {
                assert!(free && fits);
                self.pages[first..first + count].fill(Page::Mapped(0));
                if fill == Fill::Any {
                    (first..first + count).for_each(|page| self.write(page, 0));
                }
            }
            Err(DeviceError::WrongPages { .. }) => assert!(!free),
            Err(DeviceError::OutOfMemory { .. }) => assert!(free && !fits),
            Err(other) => unreachable!("{other}"),
        }
    }

    fn write(&mut self, page: usize, byte: u8) {
        let address = self.range(page, 1).start;
        if let Page::Mapped(_) = self.pages[page] {
            self.poke(address, byte);
            self.pages[page] = Page::Mapped(byte);
        }
        let page_bytes = self.page_bytes;
        for span in &mut self.spans {
            let inside = (span.first..span.first + span.bytes.len()).contains(&page);
            if inside && matches!(span.stage, Stage::Frozen | Stage::Written) {
                poke(address, page_bytes, byte);
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

    fn stage(&mut self, age: usize, fill: Fill) {
        let Some(id) = self.id(age) else { return };
        let asleep = self.is(age, |stage| matches!(stage, Stage::Asleep));
        match self.device.stage(id, fill) {
            Ok(staged) => {
                assert!(asleep);
                if fill == Fill::Zero {
                    let start = self.device.staged_address(&staged);
                    for page in 0..self.spans[age].bytes.len() {
                        assert_eq!(self.peek(start + page * self.page_bytes), (0, 0));
                    }
                }
                self.spans[age].stage = Stage::Staged(staged, 0);
                self.fill(age, 0);
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
        let page_bytes = self.page_bytes;
        let info = self.device.memory_info();
        assert_eq!(info.mapped_bytes, (self.mapped_pages() * page_bytes) as u64);
        let staged = |span: &&Span| matches!(span.stage, Stage::Staged(..));
        let staged: usize = self.spans.iter().filter(staged).map(|span| span.bytes.len()).sum();
        assert_eq!(info.staged_bytes, (staged * page_bytes) as u64);
        assert!(info.mapped_bytes + info.parked_bytes <= info.capacity_bytes, "{info:?}");
        for (page, state) in self.pages.iter().enumerate() {
            if let Page::Mapped(byte) = state {
                assert_eq!(self.peek(self.range(page, 1).start), (*byte, *byte), "page {page}");
            }
        }
        for span in &self.spans {
            for (page, byte) in (span.first..).zip(&span.bytes) {
                if matches!(span.stage, Stage::Frozen | Stage::Written) {
                    assert_eq!(self.peek(self.range(page, 1).start), (*byte, *byte));
                }
            }
        }
    }
}

fn agree(page_bytes: usize, requests: &[Request]) {
    let mut world = World::new(page_bytes);
    for request in requests {
        world.carry_out(request);
        world.check();
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, ..ProptestConfig::default() })]
    #[test]
    fn the_device_and_its_model_agree(requests in prop::collection::vec(request(), 1..60)) {
        agree(os_page_bytes(), &requests);
    }

    #[test]
    fn so_they_do_with_pages_worth_parking(requests in prop::collection::vec(request(), 1..60)) {
        agree(256 << 10, &requests);
    }
}
