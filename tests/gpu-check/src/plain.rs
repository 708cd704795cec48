//! The driver without us: what our figures are held against.

use std::ffi::{CStr, c_void};

/// Plain calls of the driver on the primary context.
pub(crate) struct Plain {
    library: *mut c_void,
}

impl Plain {
    /// Makes the primary context current on this thread.
    pub(crate) fn open() -> Self {
        // SAFETY: the driver's library, loaded already by the device.
        let library = unsafe { libc::dlopen(c"libcuda.so.1".as_ptr(), libc::RTLD_NOW) };
        assert!(!library.is_null(), "libcuda.so.1 is not there");
        let plain = Self { library };
        let mut context = 0_usize;
        // SAFETY: the entry points' types; each writes or takes one handle.
        unsafe {
            let retain: unsafe extern "C" fn(*mut usize, i32) -> i32 =
                plain.entry(c"cuDevicePrimaryCtxRetain");
            let set: unsafe extern "C" fn(usize) -> i32 = plain.entry(c"cuCtxSetCurrent");
            assert_eq!(retain(&raw mut context, 0), 0);
            assert_eq!(set(context), 0);
        }
        plain
    }

    /// # Safety
    /// `F` is the entry point's type.
    pub(crate) unsafe fn entry<F: Copy>(&self, name: &CStr) -> F {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: a live library and a name.
        let found = unsafe { libc::dlsym(self.library, name.as_ptr()) };
        assert!(!found.is_null(), "the driver has no {name:?}");
        // SAFETY: the caller's.
        unsafe { std::mem::transmute_copy(&found) }
    }

    /// Memory by `cuMemAlloc`, for the life of the process.
    pub(crate) fn device_memory(&self, bytes: usize) -> usize {
        let mut address = 0_u64;
        // SAFETY: it writes one address.
        unsafe {
            let allocate: unsafe extern "C" fn(*mut u64, usize) -> i32 =
                self.entry(c"cuMemAlloc_v2");
            assert_eq!(allocate(&raw mut address, bytes), 0, "cuMemAlloc of {bytes}");
        }
        address as usize
    }

    /// Pinned memory by `cuMemHostAlloc`, for the life of the process.
    pub(crate) fn pinned_memory(&self, bytes: usize) -> usize {
        let mut address = std::ptr::null_mut();
        // SAFETY: it writes one address.
        unsafe {
            let allocate: unsafe extern "C" fn(*mut *mut c_void, usize, u32) -> i32 =
                self.entry(c"cuMemHostAlloc");
            assert_eq!(allocate(&raw mut address, bytes, 0), 0, "cuMemHostAlloc of {bytes}");
        }
        address as usize
    }

    /// A non-blocking stream, for the life of the process.
    pub(crate) fn stream(&self) -> usize {
        let mut stream = 0_usize;
        // SAFETY: it writes one handle.
        unsafe {
            let create: unsafe extern "C" fn(*mut usize, u32) -> i32 =
                self.entry(c"cuStreamCreate");
            assert_eq!(create(&raw mut stream, 1), 0);
        }
        stream
    }

    /// Queues one copy.
    pub(crate) fn copy(&self, to: usize, from: usize, bytes: usize, stream: usize) {
        // SAFETY: both are memory of this process's, as long as it lives, of at least that length.
        unsafe {
            let copy: unsafe extern "C" fn(u64, u64, usize, usize) -> i32 =
                self.entry(c"cuMemcpyAsync");
            assert_eq!(copy(to as u64, from as u64, bytes, stream), 0);
        }
    }

    /// Waits for a stream.
    pub(crate) fn synchronize(&self, stream: usize) {
        // SAFETY: a live stream.
        unsafe {
            let synchronize: unsafe extern "C" fn(usize) -> i32 =
                self.entry(c"cuStreamSynchronize");
            assert_eq!(synchronize(stream), 0);
        }
    }

    /// Bytes of the GPU in use by anybody, as the driver says.
    pub(crate) fn used_bytes(&self) -> u64 {
        let (mut free, mut total) = (0_usize, 0_usize);
        // SAFETY: it writes two numbers.
        unsafe {
            let info: unsafe extern "C" fn(*mut usize, *mut usize) -> i32 =
                self.entry(c"cuMemGetInfo_v2");
            assert_eq!(info(&raw mut free, &raw mut total), 0);
        }
        (total - free) as u64
    }
}
