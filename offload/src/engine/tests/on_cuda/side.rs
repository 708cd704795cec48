//! A trainer's own stream: it writes and reads memory in the order of the stream, whatever the CPU
//! would find there.

use std::cell::RefCell;
use std::ffi::c_void;

use dormouse_alloc::Request;
use dormouse_device::{AddressRange, Device};

use super::TestDevice;
use super::both::Fixture;
use crate::engine::tests::{fill, holds};
use crate::ids::{RegionId, Role, label};

pub(crate) struct Side<'a> {
    fixture: &'a Fixture,
    pub(crate) stream: <TestDevice as Device>::Stream,
    key: u64,
    /// In use by what is queued.
    pinned: RefCell<Vec<AddressRange>>,
}

/// What a read brings, once the stream has passed it.
#[derive(Clone, Copy)]
pub(crate) struct Read(AddressRange);

impl<'a> Side<'a> {
    /// A new stream, which the allocator knows as `key`.
    pub(crate) fn new(fixture: &'a Fixture, key: u64) -> Self {
        let stream = fixture.device().create_stream("side").unwrap();
        fixture.allocator.register_stream(key, stream.clone()).unwrap();
        Self::on(fixture, stream, key)
    }

    /// A stream that the allocator knows.
    pub(crate) fn on(
        fixture: &'a Fixture,
        stream: <TestDevice as Device>::Stream,
        key: u64,
    ) -> Self {
        Self { fixture, stream, key, pinned: RefCell::default() }
    }

    /// A block for this stream, unwritten, under the engine's care.
    pub(crate) fn region(&self, bytes: usize) -> (RegionId, usize) {
        let address = self.allocate(bytes);
        let name = label("side", Some(0));
        (self.fixture.engine.adopt(address, Role::Dormant, name).unwrap(), address)
    }

    pub(crate) fn allocate(&self, bytes: usize) -> usize {
        let request = Request { stream: self.key, ..Request::new(bytes) };
        self.fixture.allocator.allocate(&request).unwrap().range.start
    }

    /// Frees after what is queued by now.
    pub(crate) fn free(&self, address: usize) {
        self.fixture.engine.free(address, self.key).unwrap();
    }

    fn pin(&self, bytes: usize) -> AddressRange {
        let range = self.fixture.device().allocate_pinned(bytes).unwrap();
        self.pinned.borrow_mut().push(range);
        range
    }

    fn copy(&self, to: usize, from: usize, bytes: usize) {
        // SAFETY: a block of the test's own and pinned memory that stays until the stream is
        // finished with.
        unsafe { self.fixture.device().copy(to, from, bytes, &self.stream).unwrap() };
    }

    pub(crate) fn write(&self, address: usize, bytes: usize, seed: u64) {
        let from = self.pin(bytes);
        fill(from.start, bytes, seed);
        self.copy(address, from.start, bytes);
    }

    pub(crate) fn read(&self, address: usize, bytes: usize) -> Read {
        let to = self.pin(bytes);
        fill(to.start, bytes, !0); // nothing that is looked for
        self.copy(to.start, address, bytes);
        Read(AddressRange::new(to.start, bytes))
    }

    pub(crate) fn mark(&self) -> <TestDevice as Device>::Event {
        self.fixture.device().record(&self.stream).unwrap()
    }

    pub(crate) fn is_done(&self) -> bool {
        self.fixture.device().query(&self.mark()).unwrap()
    }

    /// Waits for the stream; what `reads` brought is what these seeds make.
    pub(crate) fn finish(&self, reads: &[(Read, u64)]) {
        self.fixture.finish(&self.stream);
        for (Read(range), seed) in reads {
            assert!(holds(range.start, range.bytes, *seed), "seed {seed}");
        }
        self.unpin();
    }

    fn unpin(&self) {
        for range in self.pinned.take() {
            // SAFETY: from `allocate_pinned`; the stream has passed all that used it.
            unsafe { self.fixture.device().free_pinned(range) };
        }
    }
}

/// A stream that the trainer made itself: it may be destroyed, or captured into a graph.
pub(crate) struct Foreign<'a> {
    fixture: &'a Fixture,
    pub(crate) handle: usize,
    pub(crate) stream: <TestDevice as Device>::Stream,
}

impl<'a> Foreign<'a> {
    /// A new stream, which the allocator knows as `key`. The context is current on this thread from here on.
    pub(crate) fn new(fixture: &'a Fixture, key: u64) -> Self {
        const NON_BLOCKING: u32 = 1;
        type Retain = unsafe extern "C" fn(*mut usize, i32) -> i32;
        type Create = unsafe extern "C" fn(*mut usize, u32) -> i32;
        let retain: Retain = entry(fixture, "cuDevicePrimaryCtxRetain");
        let set: SetCurrent = entry(fixture, "cuCtxSetCurrent");
        let create: Create = entry(fixture, "cuStreamCreate");
        let (mut context, mut handle) = (0, 0);
        // SAFETY: two write one handle each, and one takes one.
        unsafe {
            assert_eq!((retain(&raw mut context, 0), set(context)), (0, 0));
            assert_eq!(create(&raw mut handle, NON_BLOCKING), 0);
        }
        let raw = std::ptr::without_provenance_mut(handle);
        // SAFETY: the stream is live. Tests that destroy it check how the device handles a destroyed stream.
        let stream = unsafe { fixture.device().foreign_stream(raw) }.unwrap();
        fixture.allocator.register_stream(key, stream.clone()).unwrap();
        Self { fixture, handle, stream }
    }

    /// The driver does not know it any more.
    pub(crate) fn destroy(&self) {
        let destroy: unsafe extern "C" fn(usize) -> i32 = entry(self.fixture, "cuStreamDestroy_v2");
        // SAFETY: it takes one handle.
        assert_eq!(unsafe { destroy(self.handle) }, 0);
    }

    /// Ends its capture, which is whole: nothing of ours is in it.
    pub(crate) fn end_capture(&self) {
        type End = unsafe extern "C" fn(usize, *mut usize) -> i32;
        let (end, mut graph): (End, usize) = (entry(self.fixture, "cuStreamEndCapture"), 0);
        // SAFETY: it takes one handle and writes one.
        assert_eq!(unsafe { end(self.handle, &raw mut graph) }, 0, "the capture broke");
    }
}

type SetCurrent = unsafe extern "C" fn(usize) -> i32;

impl Drop for Foreign<'_> {
    fn drop(&mut self) {
        let set: SetCurrent = entry(self.fixture, "cuCtxSetCurrent");
        let release: unsafe extern "C" fn(i32) -> i32 =
            entry(self.fixture, "cuDevicePrimaryCtxRelease_v2");
        // SAFETY: what `new` did is undone.
        unsafe { (set(0), release(0)) };
    }
}

/// An entry point of the driver; every use here names its type.
fn entry<F: Copy>(fixture: &Fixture, name: &str) -> F {
    const { assert!(size_of::<F>() == size_of::<*const c_void>()) };
    // SAFETY: a function pointer, of the type that the caller names.
    unsafe { std::mem::transmute_copy(&fixture.turn.standin.symbol(name)) }
}

impl Drop for Side<'_> {
    fn drop(&mut self) {
        let device = self.fixture.device();
        // A device that is lost uses it no more.
        let _ = device.record(&self.stream).and_then(|event| device.synchronize(&event));
        self.unpin();
    }
}
