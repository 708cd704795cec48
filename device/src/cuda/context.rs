//! The primary context, and the calls that need it current.
//!
//! The caller may have another context current, or may be capturing a stream into a graph. Every call
//! therefore goes through [`Gpu`], which makes our context current, excludes the calls from the capture,
//! and restores both on drop. That costs three driver calls, more than the mapping of a page. So a nested
//! `Gpu` does only what the outer one has not done; and calls for pages, which name their device, run
//! without a current context, and are repeated with it if the driver requires one.

use std::cell::Cell;
use std::ffi::c_void;
use std::marker::PhantomData;

use cudarc::driver::sys::{
    CUdevice_attribute, CUmemAccess_flags, CUmemAccessDesc, CUmemAllocationGranularity_flags,
    CUmemAllocationProp, CUmemAllocationType, CUmemLocation, CUmemLocationType,
};

use super::entries::{Entries, Handle, check, read};
use super::error::{Code, Unavailable};
use crate::{AddressRange, DeviceError, Operation};

/// `CU_STREAM_CAPTURE_MODE_RELAXED`: captures do not restrict this thread's calls.
const CAPTURE_RELAXED: i32 = 2;
/// `CU_MEMHOSTALLOC_PORTABLE` and `CU_MEMHOSTREGISTER_PORTABLE`: pinned for every context.
const HOST_PORTABLE: u32 = 1;

/// State of a thread while a [`Gpu`] exists on it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Ready {
    /// The capture mode is relaxed.
    is_relaxed: bool,
    /// Our context that is known to be current, or 0.
    current: Handle,
}

thread_local! {
    /// No destructor: no cost at thread exit.
    static READY: Cell<Ready> = const { Cell::new(Ready { is_relaxed: false, current: 0 }) };
}

/// The retained primary context of a GPU.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) entries: &'static Entries,
    pub(super) device: i32,
    handle: Handle,
    is_rdma_capable: bool,
}

impl Context {
    /// Retains the primary context of GPU `ordinal`, which the whole process shares.
    pub(super) fn retain(ordinal: u32) -> Result<Self, Unavailable> {
        let entries = Entries::get()?;
        let refused = |code: Code| code.error(entries, Operation::Reserve, AddressRange::default());
        // SAFETY: it writes one number.
        let count = read(|count| unsafe { (entries.device_count)(count) }).map_err(refused)?;
        let asked = i32::try_from(ordinal).unwrap_or(i32::MAX);
        if asked >= count {
            let count = u32::try_from(count).unwrap_or(0);
            return Err(Unavailable::NoDevice { ordinal, count });
        }
        // SAFETY: it writes one number.
        let device = read(|device| unsafe { (entries.device_get)(device, asked) });
        let device = device.map_err(refused)?;
        let has = |attribute: CUdevice_attribute| {
            // SAFETY: it writes one number. An unknown attribute counts as absent.
            read(|value| unsafe { (entries.device_attribute)(value, attribute as i32, device) })
                .is_ok_and(|value| value != 0)
        };
        use CUdevice_attribute as Attribute;
        if !has(Attribute::CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED) {
            return Err(Unavailable::NoVirtualMemory { ordinal });
        }
        let is_rdma_capable =
            has(Attribute::CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED);
        // SAFETY: it writes one handle, released on drop.
        let handle = read(|handle| unsafe { (entries.context_retain)(handle, device) });
        let handle = handle.map_err(refused)?;
        Ok(Self { entries, device, handle, is_rdma_capable })
    }

    /// Runs `call` with the context current.
    pub(super) fn call<T>(
        &self,
        operation: Operation,
        range: AddressRange,
        call: impl FnOnce(&'static Entries) -> Result<T, Code>,
    ) -> Result<T, DeviceError> {
        let _gpu = self.enter(operation)?;
        call(self.entries).map_err(|code| self.error(code, operation, range))
    }

    /// Enters the GPU for calls that need the context current.
    pub(super) fn enter(&self, operation: Operation) -> Result<Gpu<'_>, DeviceError> {
        let gpu = self.enter_paging(operation)?;
        let refused = |code| self.error(code, operation, AddressRange::default());
        gpu.make_current().map_err(refused).map(|()| gpu)
    }

    /// Enters the GPU for calls for pages only.
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

    /// Swaps `mode` with the capture mode of this thread.
    fn exchange_capture_mode(&self, mode: &mut i32) -> Result<(), Code> {
        // SAFETY: it reads and writes one number.
        check(unsafe { (self.entries.capture_mode_exchange)(mode) })
    }

    /// Whether GPU `peer` can access this one's memory.
    pub(super) fn is_accessible_from(&self, peer: i32) -> Result<bool, Code> {
        let query = self.entries.device_can_access;
        // SAFETY: it writes one number.
        read(|can| unsafe { query(can, peer, self.device) }).map(|can| can != 0)
    }

    /// Returns the NUMA node nearest to the GPU, if the driver knows it.
    pub(super) fn host_node(&self) -> Option<u32> {
        let attribute = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID as i32;
        let query = self.entries.device_attribute;
        // SAFETY: it writes one number. An older driver does not know the attribute.
        let node = read(|node| unsafe { query(node, attribute, self.device) }).ok()?;
        u32::try_from(node).ok()
    }

    pub(super) fn error(
        &self,
        code: Code,
        operation: Operation,
        range: AddressRange,
    ) -> DeviceError {
        code.error(self.entries, operation, range)
    }

    /// Returns the properties of our physical memory: this GPU's, RDMA-capable if supported.
    fn properties(&self) -> CUmemAllocationProp {
        // SAFETY: plain numbers and pointers, for which zero is the default.
        let mut properties: CUmemAllocationProp = unsafe { std::mem::zeroed() };
        properties.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED;
        properties.location = location(self.device);
        properties.allocFlags.gpuDirectRDMACapable = u8::from(self.is_rdma_capable);
        properties
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // It fails only if the driver is gone, and the context with it.
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

/// Access to the driver from this thread.
pub(super) struct Gpu<'a> {
    context: &'a Context,
    /// The state to restore.
    before: Ready,
    is_pushed: Cell<bool>,
    /// The capture mode to restore.
    capture_mode: i32,
    /// The state belongs to one thread.
    _thread: PhantomData<*const ()>,
}

impl Drop for Gpu<'_> {
    fn drop(&mut self) {
        READY.set(self.before);
        // These fail only if the driver is gone, and the thread's state with it.
        if !self.before.is_relaxed {
            let _ = self.context.exchange_capture_mode(&mut self.capture_mode);
        }
        if self.is_pushed.get() {
            let mut popped = 0;
            // SAFETY: pushed by `make_current` on this thread: a `Gpu` is not `Send`.
            unsafe { (self.context.entries.context_pop)(&raw mut popped) };
        }
    }
}

impl Gpu<'_> {
    fn entries(&self) -> &'static Entries {
        self.context.entries
    }

    /// Makes the context current.
    fn make_current(&self) -> Result<(), Code> {
        let ready = READY.get();
        if ready.current == self.context.handle {
            return Ok(());
        }
        // SAFETY: it writes one handle.
        let current = read(|current| unsafe { (self.entries().context_current)(current) })?;
        if current != self.context.handle {
            // SAFETY: our own context; popped on drop.
            check(unsafe { (self.entries().context_push)(self.context.handle) })?;
            self.is_pushed.set(true);
        }
        READY.set(Ready { current: self.context.handle, ..ready });
        Ok(())
    }

    /// Makes a call for pages, and repeats it with the context current if the driver requires one. (A refused
    /// call has no effect.)
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
        let query = self.entries().device_total_memory;
        // SAFETY: it writes one number.
        read(|bytes| unsafe { query(bytes, self.context.device) }).map(|bytes: usize| bytes as u64)
    }

    pub(super) fn granularity_bytes(&self) -> Result<usize, Code> {
        let properties = self.context.properties();
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM as i32;
        let query = self.entries().memory_granularity;
        // SAFETY: it writes one number and reads one struct.
        read(|bytes| unsafe { query(bytes, &raw const properties, minimum) })
    }

    pub(super) fn reserve(&self, bytes: usize, align: usize) -> Result<AddressRange, Code> {
        let reserve = self.entries().address_reserve;
        // SAFETY: it writes one address.
        let start = read(|start| unsafe { reserve(start, bytes, align, 0, 0) })?;
        Ok(AddressRange::new(start as usize, bytes))
    }

    /// Releases a reservation without pages.
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

    /// Releases physical memory after its last mapping is gone.
    pub(super) fn release(&self, handle: u64) -> Result<(), Code> {
        // SAFETY: the driver refuses an invalid handle.
        self.paging(|| unsafe { (self.entries().memory_release)(handle) })
    }

    /// Maps all of `handle` at `range`, without access.
    pub(super) fn map(&self, range: AddressRange, handle: u64) -> Result<(), Code> {
        let map = self.entries().memory_map;
        // SAFETY: the driver refuses a range that is not reserved, is mapped, or has another length.
        self.paging(|| unsafe { map(range.start as u64, range.bytes, 0, handle, 0) })
    }

    /// Unmaps `range`.
    ///
    /// # Safety
    /// `range` consists of mappings of ours, and no work that uses it is queued or running.
    pub(super) unsafe fn unmap(&self, range: AddressRange) -> Result<(), Code> {
        let unmap = self.entries().memory_unmap;
        // SAFETY: the caller's.
        self.paging(|| unsafe { unmap(range.start as u64, range.bytes) })
    }

    /// Grants GPUs access to a wholly mapped `range`.
    pub(super) fn open(&self, range: AddressRange, devices: &[i32]) -> Result<(), Code> {
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = |device: &i32| CUmemAccessDesc { location: location(*device), flags };
        let access: Vec<_> = devices.iter().map(access).collect();
        let set_access = self.entries().memory_set_access;
        // SAFETY: it reads these structs; access is only added.
        self.paging(|| unsafe {
            set_access(range.start as u64, range.bytes, access.as_ptr(), access.len())
        })
    }

    pub(super) fn allocate_host(&self, bytes: usize) -> Result<AddressRange, Code> {
        let allocate = self.entries().host_allocate;
        // SAFETY: it writes one address.
        let start =
            read(|start: *mut usize| unsafe { allocate(start.cast(), bytes, HOST_PORTABLE) })?;
        Ok(AddressRange::new(start, bytes))
    }

    /// Pins existing host memory.
    pub(super) fn register_host(&self, range: AddressRange) -> Result<(), Code> {
        let start = range.start as *mut c_void;
        // SAFETY: the driver pins pages of this process or refuses; it writes to none.
        check(unsafe { (self.entries().host_register)(start, range.bytes, HOST_PORTABLE) })
    }

    /// Unpins registered memory.
    ///
    /// # Safety
    /// It is registered, and no device uses it.
    pub(super) unsafe fn unregister_host(&self, start: usize) -> Result<(), Code> {
        // SAFETY: the caller's.
        check(unsafe { (self.entries().host_unregister)(start as *mut c_void) })
    }

    /// Frees pinned memory.
    ///
    /// # Safety
    /// It is from `allocate_host`, and nothing uses it.
    pub(super) unsafe fn free_host(&self, start: usize) -> Result<(), Code> {
        // SAFETY: the caller's.
        check(unsafe { (self.entries().host_free)(start as *mut c_void) })
    }
}
