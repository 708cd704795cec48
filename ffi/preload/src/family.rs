//! Whose malloc family this process uses. Called by the constructor; allocates nothing here.

use std::ffi::{CStr, c_char, c_int, c_void};
use std::mem::MaybeUninit;
use std::ptr::{null, null_mut};

/// `RTLD_DL_SYMENT` of `<dlfcn.h>`.
const RTLD_DL_SYMENT: c_int = 1;

/// `Elf64_Sym` of `<elf.h>`, of which only `section` is read.
#[repr(C)]
struct Symbol {
    name: u32,
    info: u8,
    other: u8,
    /// 0: undefined here.
    section: u16,
}

unsafe extern "C" {
    fn dladdr1(
        address: *const c_void,
        info: *mut libc::Dl_info,
        extra: *mut *const c_void,
        flags: c_int,
    ) -> c_int;
}

/// Where an address lies.
struct Place {
    base: *const c_void,
    file: *const c_char,
    /// Its symbol is only referred to there: an entry of the procedure linkage table.
    is_reference: bool,
}

fn place(address: *const c_void) -> Option<Place> {
    let mut info = MaybeUninit::<libc::Dl_info>::zeroed();
    let mut symbol = null();
    // SAFETY: both results are writable, and dladdr1 accepts any address.
    let found =
        unsafe { dladdr1(address, info.as_mut_ptr(), &raw mut symbol, RTLD_DL_SYMENT) } != 0;
    // SAFETY: written, or zero, which is valid for it.
    let info = unsafe { info.assume_init() };
    // SAFETY: null, or the entry of a loaded library.
    let symbol = unsafe { symbol.cast::<Symbol>().as_ref() };
    let is_reference = symbol.is_some_and(|symbol| symbol.section == 0);
    found.then_some(Place { base: info.dli_fbase, file: info.dli_fname, is_reference })
}

fn of_process(name: &CStr) -> *mut c_void {
    // SAFETY: a static name; dlsym is thread-safe.
    unsafe { libc::dlsym(libc::RTLD_DEFAULT, name.as_ptr()) }
}

/// Returns the `realloc` of a program that defines its own malloc family before this library in the order
/// of symbols, for example by static linking; null if the family is ours.
pub(crate) fn other_realloc() -> *mut c_void {
    let own = place((&raw const ANCHOR).cast());
    let used = place(of_process(c"malloc"));
    match (own, used) {
        (Some(own), Some(used)) if used.base != own.base && !used.is_reference => {
            of_process(c"realloc")
        }
        _ => null_mut(),
    }
}

/// Returns the function of this name behind this library in the order of symbols, null if there is none.
pub(crate) fn next(name: &CStr) -> *mut c_void {
    // SAFETY: a static name; dlsym is thread-safe.
    unsafe { libc::dlsym(libc::RTLD_NEXT, name.as_ptr()) }
}

/// An address in this library.
static ANCHOR: u8 = 0;

/// Returns the function of this name in the library that defines `__libc_free`, null if there is none. Not the
/// next one in the order of symbols: that may be of an allocator that never gets a pointer.
pub(crate) fn of_libc(name: &CStr) -> *mut c_void {
    let Some(place) = place(of_process(c"__libc_free")) else { return null_mut() };
    let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD;
    // SAFETY: the path of a loaded library, from the loader.
    let library = unsafe { libc::dlopen(place.file, flags) };
    if library.is_null() {
        return null_mut();
    }
    // SAFETY: an open handle and a static name. The handle stays open, like this library.
    unsafe { libc::dlsym(library, name.as_ptr()) }
}
