//! The entry points of the driver, looked up once.
//!
//! Types and library names are `cudarc`'s. Its functions are not called: they panic if an entry point is
//! missing, and convert result codes to an `enum` of known codes.

use std::ffi::{CStr, c_char, c_void};
use std::panic::catch_unwind;
use std::sync::OnceLock;

use cudarc::driver::sys::{self, CUmemAccessDesc, CUmemAllocationProp};

use super::error::{Code, SUCCESS, Unavailable};

/// Handles of the driver: pointer-sized numbers, never dereferenced.
pub(super) type Handle = usize;
/// A callback of the driver.
#[cfg(any(feature = "conformance", feature = "faults"))]
pub(super) type HostFunction = unsafe extern "C" fn(*mut c_void);

macro_rules! entry_points {
    ($($(#[$meta:meta])* $field:ident = $name:literal ($($argument:ty),*);)*) => {
        /// The entry points. Each returns the driver's result code.
        #[derive(Debug)]
        pub(super) struct Entries {
            $($(#[$meta])* pub(super) $field: unsafe extern "C" fn($($argument),*) -> i32,)*
        }

        impl Entries {
            /// Returns all entry points, or the name of the first missing one.
            fn find(look_up: &dyn Fn(&str) -> Option<*const c_void>) -> Result<Self, &'static str> {
                Ok(Self {
                    $($(#[$meta])* $field: {
                        let found = look_up($name).ok_or($name)?;
                        // SAFETY: the driver exports this name with these parameters: its ABI does
                        // not change under a name.
                        unsafe {
                            std::mem::transmute::<
                                *const c_void,
                                unsafe extern "C" fn($($argument),*) -> i32,
                            >(found)
                        }
                    },)*
                })
            }
        }

        /// All names, for a test.
        #[cfg(all(test, not(loom)))]
        const NAMES: &[&str] = &[$($(#[$meta])* $name),*];
    };
}

entry_points! {
    init = "cuInit"(u32);
    error_name = "cuGetErrorName"(i32, *mut *const c_char);
    error_string = "cuGetErrorString"(i32, *mut *const c_char);
    device_count = "cuDeviceGetCount"(*mut i32);
    device_get = "cuDeviceGet"(*mut i32, i32);
    device_attribute = "cuDeviceGetAttribute"(*mut i32, i32, i32);
    device_can_access = "cuDeviceCanAccessPeer"(*mut i32, i32, i32);
    device_total_memory = "cuDeviceTotalMem_v2"(*mut usize, i32);
    context_retain = "cuDevicePrimaryCtxRetain"(*mut Handle, i32);
    context_release = "cuDevicePrimaryCtxRelease_v2"(i32);
    context_current = "cuCtxGetCurrent"(*mut Handle);
    context_push = "cuCtxPushCurrent_v2"(Handle);
    context_pop = "cuCtxPopCurrent_v2"(*mut Handle);
    capture_mode_exchange = "cuThreadExchangeStreamCaptureMode"(*mut i32);
    address_reserve = "cuMemAddressReserve"(*mut u64, usize, usize, u64, u64);
    address_free = "cuMemAddressFree"(u64, usize);
    memory_granularity = "cuMemGetAllocationGranularity"(*mut usize, *const CUmemAllocationProp, i32);
    memory_create = "cuMemCreate"(*mut u64, usize, *const CUmemAllocationProp, u64);
    memory_release = "cuMemRelease"(u64);
    memory_map = "cuMemMap"(u64, usize, usize, u64, u64);
    memory_unmap = "cuMemUnmap"(u64, usize);
    memory_set_access = "cuMemSetAccess"(u64, usize, *const CUmemAccessDesc, usize);
    host_allocate = "cuMemHostAlloc"(*mut *mut c_void, usize, u32);
    host_free = "cuMemFreeHost"(*mut c_void);
    host_register = "cuMemHostRegister_v2"(*mut c_void, usize, u32);
    host_unregister = "cuMemHostUnregister"(*mut c_void);
    copy = "cuMemcpyAsync"(u64, u64, usize, Handle);
    set_bytes = "cuMemsetD8Async"(u64, u8, usize, Handle);
    stream_create = "cuStreamCreateWithPriority"(*mut Handle, u32, i32);
    stream_destroy = "cuStreamDestroy_v2"(Handle);
    stream_wait = "cuStreamWaitEvent"(Handle, Handle, u32);
    stream_synchronize = "cuStreamSynchronize"(Handle);
    stream_is_capturing = "cuStreamIsCapturing"(Handle, *mut i32);
    event_create = "cuEventCreate"(*mut Handle, u32);
    event_destroy = "cuEventDestroy_v2"(Handle);
    event_record = "cuEventRecord"(Handle, Handle);
    event_query = "cuEventQuery"(Handle);
    stream_query = "cuStreamQuery"(Handle);
    event_elapsed = "cuEventElapsedTime"(*mut f32, Handle, Handle);
    event_synchronize = "cuEventSynchronize"(Handle);
    module_load = "cuModuleLoadData"(*mut Handle, *const c_void);
    module_unload = "cuModuleUnload"(Handle);
    module_function = "cuModuleGetFunction"(*mut Handle, Handle, *const c_char);
    launch_kernel = "cuLaunchKernel"(
        Handle, u32, u32, u32, u32, u32, u32, u32, Handle, *mut *mut c_void, *mut *mut c_void
    );
    #[cfg(any(feature = "conformance", feature = "faults"))]
    launch_host_function = "cuLaunchHostFunc"(Handle, HostFunction, *mut c_void);
}

/// Converts a result code.
pub(super) fn check(code: i32) -> Result<(), Code> {
    if code == SUCCESS { Ok(()) } else { Err(Code(code)) }
}

/// Converts the result code of a query: whether the work is complete.
pub(super) fn is_complete(code: i32) -> Result<bool, Code> {
    match check(code) {
        Err(Code::NOT_READY) => Ok(false),
        other => other.map(|()| true),
    }
}

/// Returns the value that `call` writes to its argument.
pub(super) fn read<T: Default>(call: impl FnOnce(*mut T) -> i32) -> Result<T, Code> {
    let mut value = T::default();
    check(call(&raw mut value)).map(|()| value)
}

impl Entries {
    /// Returns the initialised driver. It is loaded once per process.
    pub(super) fn get() -> Result<&'static Self, Unavailable> {
        static FOUND: OnceLock<Result<Entries, Unavailable>> = OnceLock::new();
        FOUND.get_or_init(Self::load).as_ref().map_err(Clone::clone)
    }

    fn load() -> Result<Self, Unavailable> {
        // SAFETY: loading the driver's library runs its initialisers, as in any CUDA program.
        if !unsafe { sys::is_culib_present() } {
            return Err(Unavailable::NoDriver);
        }
        // It panics if the library has disappeared.
        // SAFETY: as above; it stays loaded.
        let library =
            catch_unwind(|| unsafe { sys::culib() }).map_err(|_| Unavailable::NoDriver)?;
        let look_up = |name: &str| {
            // SAFETY: only the address is used; `find` knows the parameters.
            let symbol = unsafe { library.get::<unsafe extern "C" fn()>(name.as_bytes()) };
            symbol.ok().map(|symbol| *symbol as *const c_void)
        };
        let entries = Self::find(&look_up)
            .map_err(|name| Unavailable::MissingEntryPoint { name, version: version(&look_up) })?;
        // SAFETY: flags must be 0.
        check(unsafe { (entries.init)(0) }).map_err(|code| {
            let range = crate::AddressRange::default();
            code.error(&entries, crate::Operation::Reserve, range)
        })?;
        Ok(entries)
    }

    /// Returns the driver's name and message for `code`.
    pub(super) fn describe(&self, code: Code) -> String {
        let text = |entry: unsafe extern "C" fn(i32, *mut *const c_char) -> i32| {
            let mut text = std::ptr::null();
            // SAFETY: it writes one pointer, to static text or NULL for an unknown code.
            let known = unsafe { entry(code.0, &raw mut text) } == SUCCESS && !text.is_null();
            // SAFETY: static, NUL-terminated text of the driver.
            known.then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy())
        };
        match (text(self.error_name), text(self.error_string)) {
            (Some(name), Some(words)) => format!("{name}: {words}"),
            _ => format!("the driver's code {}", code.0),
        }
    }
}

/// Returns the version of a driver that may lack any entry point; 0 if unknown.
fn version(look_up: &dyn Fn(&str) -> Option<*const c_void>) -> i32 {
    let Some(found) = look_up("cuDriverGetVersion") else { return 0 };
    // SAFETY: as in `find`.
    let entry = unsafe {
        std::mem::transmute::<*const c_void, unsafe extern "C" fn(*mut i32) -> i32>(found)
    };
    // SAFETY: it writes one number, and needs no initialisation.
    read(|version| unsafe { entry(version) }).unwrap_or(0)
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn each_missing_entry_point_is_named() {
        let anything = std::ptr::NonNull::<c_void>::dangling().as_ptr().cast_const();
        assert!(Entries::find(&|_| Some(anything)).is_ok());
        for missing in NAMES {
            let found = Entries::find(&|name| (name != *missing).then_some(anything));
            assert_eq!(found.err(), Some(*missing));
        }
    }
}
