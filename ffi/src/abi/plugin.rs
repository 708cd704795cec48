//! The entry of a host that loads the library with `dlopen`.

use std::ffi::{CStr, c_char, c_void};
use std::mem::{MaybeUninit, transmute};

use super::structs::DORMOUSE_STRUCT_VERSION;

/// A function of this header. It is cast to its own type before it is called.
pub type dormouse_proc_t = Option<unsafe extern "C" fn()>;

/// What `dlsym` returns for `dormousePlugin_v1`. The struct never changes; a successor would be
/// `dormousePlugin_v2`, exported beside it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_plugin_v1_t {
    /// Size of the struct.
    pub size: u32,
    /// Version of the structs that the functions accept, `DORMOUSE_STRUCT_VERSION`.
    pub abi_version: u32,
    /// `dormouse`; static text.
    pub name: *const c_char,
    /// Returns the function of this header called `name`, or NULL if the library has none. Any-thread.
    pub get_proc: unsafe extern "C" fn(name: *const c_char) -> dormouse_proc_t,
}

// SAFETY: constant; its text and function live as long as the library, which is never unloaded.
unsafe impl Sync for dormouse_plugin_v1_t {}

/// Entry of a host that loads the library with `dlopen`.
#[unsafe(no_mangle)]
#[allow(non_upper_case_globals, reason = "the name C sees")]
pub static dormousePlugin_v1: dormouse_plugin_v1_t = dormouse_plugin_v1_t {
    size: size_of::<dormouse_plugin_v1_t>() as u32,
    abi_version: DORMOUSE_STRUCT_VERSION,
    name: c"dormouse".as_ptr(),
    get_proc,
};

/// What the names of the header's functions begin with, and those of no other library.
const PREFIX: &[u8] = b"dormouse_";
/// Names that the preload library alone calls.
const PRIVATE: &[u8] = b"dormouse_heap_";

unsafe extern "C" fn get_proc(name: *const c_char) -> dormouse_proc_t {
    if name.is_null() {
        return None;
    }
    // SAFETY: the caller's promise (module docs): NUL-terminated text.
    let text = unsafe { CStr::from_ptr(name) }.to_bytes();
    if !text.starts_with(PREFIX) || text.starts_with(PRIVATE) {
        return None;
    }
    let library = own_handle()?;
    // SAFETY: an open handle. What the prefix names in this library and what it links are our functions.
    let found = unsafe { libc::dlsym(library, name) };
    // SAFETY: the handle was opened above; the library stays loaded.
    unsafe { libc::dlclose(library) };
    // SAFETY: NULL is None, and another value the address of a function.
    unsafe { transmute::<*mut c_void, dormouse_proc_t>(found) }
}

/// Opens this library, which is loaded, once more: a host may have kept its symbols from the global scope.
fn own_handle() -> Option<*mut c_void> {
    let mut about = MaybeUninit::<libc::Dl_info>::uninit();
    // SAFETY: an address in this library, and room for the answer.
    let is_known =
        unsafe { libc::dladdr((&raw const dormousePlugin_v1).cast(), about.as_mut_ptr()) };
    if is_known == 0 {
        return None;
    }
    // SAFETY: filled by the call; its text lives as long as the library.
    let path = unsafe { about.assume_init() }.dli_fname;
    // SAFETY: as above. Nothing is loaded.
    let handle = unsafe { libc::dlopen(path, libc::RTLD_LAZY | libc::RTLD_NOLOAD) };
    (!handle.is_null()).then_some(handle)
}
