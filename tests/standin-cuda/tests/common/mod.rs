//! What the tests of the stand-in share: its entry points by name, and ways to use them.
#![allow(dead_code, unreachable_pub, reason = "each test binary uses its part")]
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

use std::ffi::{c_char, c_void};
use std::sync::mpsc::{Receiver, Sender, channel};

use standin::{Exclusive, Live, Standin};

/// Granule of these tests, and the whole device.
pub const GRANULE: usize = 64 << 10;
pub const TOTAL: u64 = 64 << 20;

pub const INVALID_VALUE: i32 = 1;
pub const OUT_OF_MEMORY: i32 = 2;
pub const NOT_INITIALIZED: i32 = 3;
pub const INVALID_DEVICE: i32 = 101;
pub const INVALID_CONTEXT: i32 = 201;
pub const INVALID_HANDLE: i32 = 400;
pub const ILLEGAL_STATE: i32 = 401;
pub const NOT_FOUND: i32 = 500;
pub const NOT_READY: i32 = 600;
pub const ILLEGAL_ADDRESS: i32 = 700;
pub const ALREADY_REGISTERED: i32 = 712;
pub const NOT_REGISTERED: i32 = 713;
pub const NOT_PERMITTED: i32 = 800;
pub const NOT_SUPPORTED: i32 = 801;

/// `CU_STREAM_NON_BLOCKING`.
pub const NON_BLOCKING: u32 = 1;
/// `CU_MEM_ACCESS_FLAGS_PROT_*`.
pub const READ: u32 = 1;
pub const READ_WRITE: u32 = 3;

/// `CUmemAllocationProp` of device memory.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Properties {
    pub kind: u32,
    pub handle_types: u32,
    pub location: [i32; 2],
    pub windows: usize,
    pub flags: [u8; 8],
}

pub static PINNED_ON_DEVICE: Properties =
    Properties { kind: 1, handle_types: 0, location: [1, 0], windows: 0, flags: [0; 8] };

/// `CUmemAccessDesc`: location and flags.
pub type Description = [i32; 3];

macro_rules! entries {
    ($($name:ident($($argument:ident: $kind:ty),*);)*) => {
        /// The entry points.
        #[allow(non_snake_case, reason = "the driver's names")]
        #[derive(Clone, Copy)]
        pub struct Entries {
            $($name: unsafe extern "C" fn($($kind),*) -> i32,)*
        }

        impl Entries {
            pub fn find(standin: &Standin) -> Self {
                Self {
                    // SAFETY: the driver's function of that name has these parameters.
                    $($name: unsafe {
                        std::mem::transmute::<
                            *const c_void,
                            unsafe extern "C" fn($($kind),*) -> i32,
                        >(standin.symbol(stringify!($name)))
                    },)*
                }
            }

            $(
                #[allow(non_snake_case, reason = "the driver's name")]
                #[allow(clippy::too_many_arguments, reason = "the driver's parameters")]
                pub fn $name(&self, $($argument: $kind),*) -> i32 {
                    // SAFETY: pointers a test passes are null or valid; all else is checked.
                    unsafe { (self.$name)($($argument),*) }
                }
            )*
        }
    };
}

entries! {
    cuInit(flags: u32);
    cuDriverGetVersion(version: *mut i32);
    cuGetErrorName(code: i32, name: *mut *const c_char);
    cuGetErrorString(code: i32, text: *mut *const c_char);
    cuGetProcAddress_v2(name: *const c_char, function: *mut usize, version: i32, flags: u64,
        status: *mut u32);
    cuDeviceGet(device: *mut i32, ordinal: i32);
    cuDeviceGetCount(count: *mut i32);
    cuDeviceGetName(name: *mut c_char, bytes: i32, device: i32);
    cuDeviceGetUuid_v2(uuid: *mut [u8; 16], device: i32);
    cuDeviceGetAttribute(value: *mut i32, attribute: i32, device: i32);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: i32);
    cuDeviceCanAccessPeer(can: *mut i32, device: i32, peer: i32);
    cuDevicePrimaryCtxRetain(context: *mut usize, device: i32);
    cuDevicePrimaryCtxRelease_v2(device: i32);
    cuDevicePrimaryCtxGetState(device: i32, flags: *mut u32, active: *mut i32);
    cuCtxGetCurrent(context: *mut usize);
    cuCtxSetCurrent(context: usize);
    cuCtxPushCurrent_v2(context: usize);
    cuCtxPopCurrent_v2(context: *mut usize);
    cuCtxGetDevice(device: *mut i32);
    cuCtxSynchronize();
    cuCtxGetStreamPriorityRange(least: *mut i32, greatest: *mut i32);
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuMemAlloc_v2(address: *mut usize, bytes: usize);
    cuMemFree_v2(address: usize);
    cuMemHostAlloc(address: *mut usize, bytes: usize, flags: u32);
    cuMemFreeHost(address: usize);
    cuMemHostRegister_v2(address: usize, bytes: usize, flags: u32);
    cuMemHostUnregister(address: usize);
    cuMemHostGetDevicePointer_v2(device: *mut usize, address: usize, flags: u32);
    cuPointerGetAttribute(data: *mut c_void, attribute: i32, address: usize);
    cuPointerGetAttributes(count: u32, attributes: *const i32, data: *const *mut c_void,
        address: usize);
    cuMemAddressReserve(address: *mut usize, bytes: usize, align: usize, hint: usize, flags: u64);
    cuMemAddressFree(address: usize, bytes: usize);
    cuMemCreate(handle: *mut u64, bytes: usize, properties: *const Properties, flags: u64);
    cuMemRelease(handle: u64);
    cuMemMap(address: usize, bytes: usize, offset: usize, handle: u64, flags: u64);
    cuMemUnmap(address: usize, bytes: usize);
    cuMemSetAccess(address: usize, bytes: usize, descriptions: *const Description, count: usize);
    cuMemGetAccess(flags: *mut u64, location: *const [i32; 2], address: usize);
    cuMemGetAllocationGranularity(bytes: *mut usize, properties: *const Properties, option: u32);
    cuMemRetainAllocationHandle(handle: *mut u64, address: usize);
    cuMemGetAllocationPropertiesFromHandle(properties: *mut Properties, handle: u64);
    cuMemGetAddressRange_v2(base: *mut usize, bytes: *mut usize, address: usize);
    cuMemExportToShareableHandle(shared: *mut c_void, handle: u64, kind: u32, flags: u64);
    cuMemImportFromShareableHandle(handle: *mut u64, shared: usize, kind: u32);
    cuMemcpy(to: usize, from: usize, bytes: usize);
    cuMemcpyAsync(to: usize, from: usize, bytes: usize, stream: usize);
    cuMemcpyHtoD_v2(to: usize, from: usize, bytes: usize);
    cuMemcpyDtoH_v2(to: usize, from: usize, bytes: usize);
    cuMemcpyHtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize);
    cuMemcpyDtoHAsync_v2(to: usize, from: usize, bytes: usize, stream: usize);
    cuMemcpyDtoDAsync_v2(to: usize, from: usize, bytes: usize, stream: usize);
    cuMemsetD8_v2(start: usize, byte: u8, count: usize);
    cuMemsetD8Async(start: usize, byte: u8, count: usize, stream: usize);
    cuMemsetD32Async(start: usize, word: u32, count: usize, stream: usize);
    cuStreamWriteValue32_v2(stream: usize, address: usize, word: u32, flags: u32);
    cuStreamCreate(stream: *mut usize, flags: u32);
    cuStreamCreateWithPriority(stream: *mut usize, flags: u32, priority: i32);
    cuStreamDestroy_v2(stream: usize);
    cuStreamQuery(stream: usize);
    cuStreamSynchronize(stream: usize);
    cuStreamWaitEvent(stream: usize, event: usize, flags: u32);
    cuStreamGetCtx(stream: usize, context: *mut usize);
    cuStreamGetPriority(stream: usize, priority: *mut i32);
    cuStreamGetFlags(stream: usize, flags: *mut u32);
    cuStreamGetId(stream: usize, id: *mut u64);
    cuStreamIsCapturing(stream: usize, status: *mut u32);
    cuStreamGetCaptureInfo_v2(stream: usize, status: *mut u32, id: *mut u64, graph: *mut usize,
        dependencies: *mut usize, count: *mut usize);
    cuStreamBeginCapture_v2(stream: usize, mode: u32);
    cuStreamEndCapture(stream: usize, graph: *mut usize);
    cuThreadExchangeStreamCaptureMode(mode: *mut u32);
    cuGraphGetNodes(graph: usize, nodes: *mut usize, count: *mut usize);
    cuGraphInstantiateWithFlags(instance: *mut usize, graph: usize, flags: u64);
    cuGraphLaunch(instance: usize, stream: usize);
    cuGraphDestroy(graph: usize);
    cuGraphExecDestroy(instance: usize);
    cuEventCreate(event: *mut usize, flags: u32);
    cuEventDestroy_v2(event: usize);
    cuEventRecord(event: usize, stream: usize);
    cuEventRecordWithFlags(event: usize, stream: usize, flags: u32);
    cuEventQuery(event: usize);
    cuEventSynchronize(event: usize);
    cuEventElapsedTime(milliseconds: *mut f32, start: usize, end: usize);
    cuEventElapsedTime_v2(milliseconds: *mut f32, start: usize, end: usize);
    cuLaunchHostFunc(stream: usize, function: Option<unsafe extern "C" fn(*mut c_void)>,
        data: *mut c_void);
    cuModuleLoadData(module: *mut usize, image: *const u8);
    cuModuleUnload(module: usize);
    cuModuleGetFunction(function: *mut usize, module: usize, name: *const c_char);
    cuFuncGetAttribute(value: *mut i32, attribute: i32, function: usize);
    cuLaunchKernel(function: usize, grid_x: u32, grid_y: u32, grid_z: u32, block_x: u32,
        block_y: u32, block_z: u32, shared_bytes: u32, stream: usize, arguments: *const usize,
        extra: *const usize);
}

/// The stand-in to oneself, its context current on this thread. Dropped, everything of it is to be
/// given back.
pub struct Bench {
    pub cu: Entries,
    pub standin: Standin,
    pub context: usize,
    _turn: Exclusive,
}

/// A call that is to succeed.
#[track_caller]
pub fn ok(code: i32) {
    assert_eq!(code, 0, "the call was to succeed");
}

/// A value a call leaves.
#[track_caller]
pub fn get<T: Default>(call: impl FnOnce(*mut T) -> i32) -> T {
    let mut value = T::default();
    ok(call(&raw mut value));
    value
}

/// No address, for callers that leave one out.
pub fn null<T>() -> *mut T {
    std::ptr::null_mut()
}

/// Bytes that differ by place and seed.
pub fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|place| (place.wrapping_mul(31) >> 3) as u8 ^ seed).collect()
}

/// Entry points with nothing done yet.
pub fn entries() -> (Entries, Standin) {
    let standin = standin::load_with(GRANULE, TOTAL);
    (Entries::find(&standin), standin)
}

impl Bench {
    pub fn new() -> Self {
        let (cu, standin) = entries();
        let turn = standin.exclusive();
        ok(cu.cuInit(0));
        let context = get(|context| cu.cuDevicePrimaryCtxRetain(context, 0));
        ok(cu.cuCtxSetCurrent(context));
        Self { cu, standin, context, _turn: turn }
    }

    pub fn reserve(&self, bytes: usize) -> usize {
        get(|address| self.cu.cuMemAddressReserve(address, bytes, 0, 0, 0))
    }

    pub fn create(&self, bytes: usize) -> u64 {
        get(|handle| self.cu.cuMemCreate(handle, bytes, &raw const PINNED_ON_DEVICE, 0))
    }

    pub fn map(&self, address: usize, bytes: usize, handle: u64) {
        ok(self.cu.cuMemMap(address, bytes, 0, handle, 0));
        ok(self.set_access(address, bytes, READ_WRITE));
    }

    pub fn set_access(&self, address: usize, bytes: usize, flags: u32) -> i32 {
        let description: Description = [1, 0, flags as i32];
        self.cu.cuMemSetAccess(address, bytes, &raw const description, 1)
    }

    /// A reservation with one handle behind it, writable.
    pub fn memory(&self, bytes: usize) -> (usize, u64) {
        let (address, handle) = (self.reserve(bytes), self.create(bytes));
        self.map(address, bytes, handle);
        (address, handle)
    }

    /// Gives back what `memory` gave.
    pub fn give(&self, (address, handle): (usize, u64), bytes: usize) {
        ok(self.cu.cuMemUnmap(address, bytes));
        ok(self.cu.cuMemAddressFree(address, bytes));
        ok(self.cu.cuMemRelease(handle));
    }

    pub fn write(&self, address: usize, bytes: &[u8]) {
        ok(self.cu.cuMemcpyHtoD_v2(address, bytes.as_ptr() as usize, bytes.len()));
    }

    pub fn read(&self, address: usize, bytes: usize) -> Vec<u8> {
        let mut found = vec![0; bytes];
        ok(self.cu.cuMemcpyDtoH_v2(found.as_mut_ptr() as usize, address, bytes));
        found
    }

    pub fn stream(&self, flags: u32) -> usize {
        get(|stream| self.cu.cuStreamCreate(stream, flags))
    }

    pub fn event(&self) -> usize {
        get(|event| self.cu.cuEventCreate(event, 0))
    }

    /// Runs `work` when the stream gets there.
    pub fn call(&self, stream: usize, work: impl FnOnce() + Send + 'static) {
        let work: Box<Box<dyn FnOnce() + Send>> = Box::new(Box::new(work));
        let data = Box::into_raw(work).cast();
        ok(self.cu.cuLaunchHostFunc(stream, Some(run_boxed), data));
    }

    /// Holds a stream up until the sender is dropped.
    pub fn block(&self, stream: usize) -> Sender<()> {
        let (sender, receiver): (_, Receiver<()>) = channel();
        self.call(stream, move || {
            let _ = receiver.recv();
        });
        sender
    }

    pub fn live(&self, what: Live) -> u64 {
        self.standin.live(what)
    }
}

impl Default for Bench {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Bench {
    fn drop(&mut self) {
        if std::thread::panicking() {
            return;
        }
        self.standin.recover();
        ok(self.cu.cuCtxSynchronize());
        ok(self.cu.cuCtxSetCurrent(0));
        ok(self.cu.cuDevicePrimaryCtxRelease_v2(0));
        for what in Live::ALL {
            assert_eq!(self.live(what), 0, "{what:?} left");
        }
    }
}

unsafe extern "C" fn run_boxed(data: *mut c_void) {
    // SAFETY: `Bench::call` made it, and the driver calls once.
    let work = unsafe { Box::from_raw(data.cast::<Box<dyn FnOnce() + Send>>()) };
    work();
}
