//! Symbols of libraries that the process has loaded: PyTorch and the C++ runtime.

use std::ffi::{CStr, c_void};

/// A library that this process has loaded.
pub(super) struct Library(*mut c_void);

impl Library {
    pub(super) fn loaded(name: &CStr) -> Option<Self> {
        // SAFETY: a NUL-terminated name; NOLOAD only finds loaded libraries.
        let handle = unsafe { libc::dlopen(name.as_ptr(), libc::RTLD_NOLOAD | libc::RTLD_LAZY) };
        (!handle.is_null()).then_some(Self(handle))
    }

    pub(super) fn symbol(&self, name: &CStr) -> Option<*mut c_void> {
        // SAFETY: a live handle and a NUL-terminated name.
        let found = unsafe { libc::dlsym(self.0, name.as_ptr()) };
        (!found.is_null()).then_some(found)
    }

    /// # Safety
    /// `F` is the type of the function of that name.
    pub(super) unsafe fn function<F: Copy>(&self, name: &CStr) -> Option<F> {
        const { assert!(size_of::<F>() == size_of::<*mut c_void>()) };
        // SAFETY: a function pointer, of the type that the caller names.
        self.symbol(name).map(|found| unsafe { std::mem::transmute_copy(&found) })
    }
}
