//! The trainer's primary context, and the calls that need it current.
//!
//! Whoever calls us may have another context current, or be capturing a stream into a graph: a
//! call goes through [`Gpu`], which makes ours current, says that what we do is no part of the
//! capture, and puts both back. These are three calls of the driver, more than what they are made
//! for where that is one page. So one `Gpu` within another does only what is left to do; and calls
//! for pages, which name their device and have no error for a missing context in the driver's
//! documentation, are made without ours being current: again with it, where the driver asks for one.

use std::cell::Cell;
use std::ffi::c_void;
use std::marker::PhantomData;

use cudarc::driver::sys::{
    CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationProp, CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

use super::entries::{Entries, Handle, check};
use super::error::{Code, Unavailable};
use crate::{AddressRange, DeviceError, Operation};

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: this thread's calls leave captures alone.
const CAPTURE_RELAXED: i32 = 2;
/// `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
const HOST_PORTABLE: u32 = 1;

/// What the [`Gpu`]s of a thread have made ready on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ready {
    /// The thread's calls leave captures alone.
    is_relaxed: bool,
    /// The context of ours that is current; 0 where we have not made sure of one.
    current: Handle,
}

thread_local! {
    /// No destructor, so that it costs nothing at exit.
    static READY: Cell<Ready> = const { Cell::new(Ready { is_relaxed: false, current: 0 }) };
}

/// One GPU's primary context, retained.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) entries: &'static Entries,
    device: i32,
    handle: Handle,
    /// Other GPUs that may reach our memory.
    peers: Vec<i32>,
    is_rdma_capable: bool,
}

impl Context {
    /// Retains the primary context of GPU `ordinal`: the one that everybody else in the process
    /// uses.
    pub(super) fn retain(ordinal: u32, peers: &[u32]) -> Result<Self, Unavailable> {
        let entries = Entries::get()?;
        let refused = |code: Code| code.error(entries, Operation::Reserve, AddressRange::default());
        let mut count = 0;
        // SAFETY: it writes one number.
        check(unsafe { (entries.device_count)(&raw mut count) }).map_err(refused)?;
        let find = |ordinal: u32| {
            let mut device = 0;
            let asked = i32::try_from(ordinal).unwrap_or(i32::MAX);
            if asked >= count {
                let count = u32::try_from(count).unwrap_or(0);
                return Err(Unavailable::NoDevice { ordinal, count });
            }
            // SAFETY: it writes one number.
            check(unsafe { (entries.device_get)(&raw mut device, asked) }).map_err(refused)?;
            Ok(device)
        };
        let device = find(ordinal)?;
        let peers = peers.iter().map(|peer| find(*peer)).collect::<Result<_, _>>()?;
        let has = |attribute: CUdevice_attribute| {
            let mut value = 0;
            // SAFETY: it writes one number. One it does not know counts as absent.
            let status =
                unsafe { (entries.device_attribute)(&raw mut value, attribute as i32, device) };
            check(status).is_ok() && value != 0
        };
        use CUdevice_attribute as Attribute;
        if !has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
            return Err(Unavailable::NoVirtualMemory { ordinal });
        }
        let is_rdma_capable =
            has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        let mut handle = 0;
        // SAFETY: it writes one handle, released on drop.
        check(unsafe { (entries.context_retain)(&raw mut handle, device) }).map_err(refused)?;
        Ok(Self { entries, device, handle, peers, is_rdma_capable })
    }

    /// The way to every call that needs the context.
    pub(super) fn enter(&self, operation: Operation) -> Result<Gpu<'_>, DeviceError> {
        let gpu = self.enter_paging(operation)?;
        match gpu.make_current() {
            Ok(()) => Ok(gpu),
            Err(code) => Err(self.error(code, operation, AddressRange::default())),
        }
    }

    /// The way to calls for pages alone.
    pub(super) fn enter_paging(&self, operation: Operation) -> Result<Gpu<'_>, DeviceError> {
        let before = READY.get();
        let mut capture_mode = CAPTURE_RELAXED;
        if !before.is_relaxed {
            self.exchange_capture_mode(&mut capture_mode)
                .map_err(|code| self.error(code, operation, AddressRange::default()))?;
            READY.set(Ready { is_relaxed: true, ..before });
        }
        let is_pushed = Cell::new(false);
        Ok(Gpu { context: self, before, is_pushed, capture_mode, _thread: PhantomData })
    }

    /// Puts a capture mode in place on this thread; leaves what was there before in `mode`.
    fn exchange_capture_mode(&self, mode: &mut i32) -> Result<(), Code> {
        // SAFETY: it reads and writes one number, a mode.
        check(unsafe { (self.entries.capture_mode_exchange)(mode) })
    }

    /// The node of the machine's memory that is nearest to the GPU, where the driver knows.
    pub(super) fn host_node(&self) -> Option<u32> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID as i32;
        let mut node = -1;
        // SAFETY: it writes one number. An older driver does not know the attribute.
        let status =
            unsafe { (self.entries.device_attribute)(&raw mut node, attribute, self.device) };
        check(status).ok().and_then(|()| u32::try_from(node).ok())
    }

    /// The error of `operation` on `range`.
    pub(super) fn error(
        &self,
        code: Code,
        operation: Operation,
        range: AddressRange,
    ) -> DeviceError {
        code.error(self.entries, operation, range)
    }

    /// What physical memory we ask for: this GPU's, and reachable by network cards where that works.
    fn properties(&self) -> CUmemAllocationProp {
        // SAFETY: plain numbers and pointers; zero is "nothing special" for each.
        let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = location(self.device);
        properties.allocFlags.gpuDirectRDMACapable = u8::from(self.is_rdma_capable);
        properties
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // Fails only where the driver is gone already, and the context with it.
        // SAFETY: retained once, in `retain`.
        unsafe { (self.entries.context_release)(self.device) };
    }
}

fn location(device: i32) -> CUmemLocation {
    // SAFETY: plain numbers, set below; newer bindings wrap the id in a union.
    let mut location: CUmemLocation = unsafe { std::mem::zeroed() };
    location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    location.id = device;
    location
}

/// The way to the driver from this thread, while this lives.
pub(super) struct Gpu<'a> {
    context: &'a Context,
    /// What was ready before, and is again afterwards.
    before: Ready,
    is_pushed: Cell<bool>,
    /// The mode to put back.
    capture_mode: i32,
    /// What is ready is so for one thread.
    _thread: PhantomData<*const ()>,
}

impl Drop for Gpu<'_> {
    fn drop(&mut self) {
        READY.set(self.before);
        // Neither fails but where the driver is gone, and the thread's state with it.
        if !self.before.is_relaxed {
            let _ = self.context.exchange_capture_mode(&mut self.capture_mode);
        }
        if self.is_pushed.get() {
            let mut popped = 0;
            // SAFETY: pushed by `make_current` on this very thread: a `Gpu` is not `Send`.
            unsafe { (self.context.entries.context_pop)(&raw mut popped) };
        }
    }
}

impl Gpu<'_> {
    fn entries(&self) -> &'static Entries {
        self.context.entries
    }

    /// Makes the context current, where it is not known to be.
    fn make_current(&self) -> Result<(), Code> {
        let ready = READY.get();
        if ready.current == self.context.handle {
            return Ok(());
        }
        let mut current = 0;
        // SAFETY: it writes one handle.
        check(unsafe { (self.entries().context_current)(&raw mut current) })?;
        if current != self.context.handle {
            // SAFETY: our own context; popped on drop.
            check(unsafe { (self.entries().context_push)(self.context.handle) })?;
            self.is_pushed.set(true);
        }
        READY.set(Ready { current: self.context.handle, ..ready });
        Ok(())
    }

    /// Makes a call for pages: again with the context current, where the driver asks for one. (A
    /// call that was refused has done nothing.)
    fn paging(&self, call: impl Fn() -> i32) -> Result<(), Code> {
        match check(call()) {
            Err(Code::INVALID_CONTEXT | Code::NOT_INITIALIZED)
                if READY.get().current != self.context.handle =>
            {
                self.make_current()?;
                check(call())
            }
            outcome => outcome,
        }
    }

    pub(super) fn total_memory_bytes(&self) -> Result<u64, Code> {
        let mut bytes = 0;
        // SAFETY: it writes one number.
        let status =
            unsafe { (self.entries().device_total_memory)(&raw mut bytes, self.context.device) };
        check(status).map(|()| bytes as u64)
    }

    pub(super) fn granularity_bytes(&self) -> Result<usize, Code> {
        let properties = self.context.properties();
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let mut bytes = 0;
        // SAFETY: it writes one number and reads one struct.
        let status = unsafe {
            (self.entries().memory_granularity)(
                &raw mut bytes,
                &raw const properties,
                minimum as i32,
            )
        };
        check(status).map(|()| bytes)
    }

    pub(super) fn reserve(&self, bytes: usize, align: usize) -> Result<AddressRange, Code> {
        let mut start = 0;
        // SAFETY: it writes one address.
        let status =
            unsafe { (self.entries().address_reserve)(&raw mut start, bytes, align, 0, 0) };
        check(status).map(|()| AddressRange::new(start as usize, bytes))
    }

    /// Gives a reservation back that has no page behind it.
    pub(super) fn unreserve(&self, range: AddressRange) -> Result<(), Code> {
        // SAFETY: the driver refuses what is not a reservation, or is mapped.
        check(unsafe { (self.entries().address_free)(range.start as u64, range.bytes) })
    }

    pub(super) fn create(&self, bytes: usize) -> Result<u64, Code> {
        let properties = self.context.properties();
        let handle = Cell::new(0);
        self.paging(|| {
            // SAFETY: it writes one handle and reads one struct.
            unsafe {
                (self.entries().memory_create)(handle.as_ptr(), bytes, &raw const properties, 0)
            }
        })?;
        Ok(handle.get())
    }

    /// Gives physical memory back, once it is mapped nowhere any more.
    pub(super) fn release(&self, handle: u64) -> Result<(), Code> {
        // SAFETY: the driver refuses what is no handle.
        self.paging(|| unsafe { (self.entries().memory_release)(handle) })
    }

    /// Maps the whole of `handle` behind `range`, without access yet.
    pub(super) fn map(&self, range: AddressRange, handle: u64) -> Result<(), Code> {
        let map = self.entries().memory_map;
        // SAFETY: the driver refuses what is not reserved, is mapped, or is of another length.
        self.paging(|| unsafe { map(range.start as u64, range.bytes, 0, handle, 0) })
    }

    /// Unmaps `range`.
    ///
    /// # Safety
    /// `range` is mappings of ours, and no work that uses it is queued or running.
    pub(super) unsafe fn unmap(&self, range: AddressRange) -> Result<(), Code> {
        let unmap = self.entries().memory_unmap;
        // SAFETY: the caller's.
        self.paging(|| unsafe { unmap(range.start as u64, range.bytes) })
    }

    /// Opens a wholly mapped `range` to this GPU and its peers.
    pub(super) fn open(&self, range: AddressRange) -> Result<(), Code> {
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let devices = std::iter::once(&self.context.device).chain(&self.context.peers);
        let access: Vec<_> =
            devices.map(|device| CUmemAccessDesc { location: location(*device), flags }).collect();
        let set_access = self.entries().memory_set_access;
        // SAFETY: it reads that many structs; access is only added.
        self.paging(|| unsafe {
            set_access(range.start as u64, range.bytes, access.as_ptr(), access.len())
        })
    }

    pub(super) fn allocate_host(&self, bytes: usize) -> Result<AddressRange, Code> {
        let mut start = std::ptr::null_mut();
        // SAFETY: it writes one address.
        let status =
            unsafe { (self.entries().host_allocate)(&raw mut start, bytes, HOST_PORTABLE) };
        check(status).map(|()| AddressRange::new(start as usize, bytes))
    }

    /// Pins host memory that is there already.
    pub(super) fn register_host(&self, range: AddressRange) -> Result<(), Code> {
        let start = range.start as *mut c_void;
        // SAFETY: the driver pins pages of this process, or refuses; it changes none.
        check(unsafe { (self.entries().host_register)(start, range.bytes, HOST_PORTABLE) })
    }

    /// Unpins it.
    ///
    /// # Safety
    /// It was registered, and nothing on a device uses it.
    pub(super) unsafe fn unregister_host(&self, start: usize) -> Result<(), Code> {
        // SAFETY: the caller's.
        check(unsafe { (self.entries().host_unregister)(start as *mut c_void) })
    }

    /// Frees pinned memory.
    ///
    /// # Safety
    /// It came from `allocate_host`, and nothing uses it.
    pub(super) unsafe fn free_host(&self, start: usize) -> Result<(), Code> {
        // SAFETY: the caller's.
        check(unsafe { (self.entries().host_free)(start as *mut c_void) })
    }
}
