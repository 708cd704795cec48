//! Throws C++ exceptions into PyTorch.
//!
//! PyTorch's pluggable allocator uses a returned NULL as a pointer, so an allocation that fails must
//! not return. PyTorch raises `torch.OutOfMemoryError` for its own class, which is constructed by what
//! the loaded PyTorch exports ([`Construction`]) and thrown as the Itanium C++ ABI specifies ("Exception
//! Handling", 2.4). A PyTorch that exports neither gets a `std::runtime_error`, whose text trainers
//! search for "CUDA out of memory".

use std::ffi::{CStr, CString, c_char, c_int, c_void};

use super::library::Library;
use crate::fault::Fault;
use crate::stderr;

/// Room for a `c10::OutOfMemoryError`, several times the size in any known PyTorch.
const EXCEPTION_BYTES: usize = 4096;
/// Room for a `std::string` (32 bytes in libstdc++).
const STRING_WORDS: usize = 8;

/// A failed request of PyTorch.
#[derive(Debug)]
pub(crate) struct Failure {
    pub(crate) text: String,
    pub(crate) is_out_of_memory: bool,
}

impl Failure {
    pub(super) fn other(text: impl Into<String>) -> Self {
        Self { text: text.into(), is_out_of_memory: false }
    }
}

impl From<Fault> for Failure {
    fn from(fault: Fault) -> Self {
        Self::other(fault.message)
    }
}

/// `c10::SourceLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

type Destructor = unsafe extern "C" fn(*mut c_void);
type Allocate = unsafe extern "C" fn(usize) -> *mut c_void;
type Throw = unsafe extern "C-unwind" fn(*mut c_void, *mut c_void, Option<Destructor>) -> !;
type MakeString = unsafe extern "C-unwind" fn(*mut c_void, *const c_char, usize, *const c_void);
type MakeError = unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut c_void);
type MakeRuntimeError = unsafe extern "C-unwind" fn(*mut c_void, *const c_char);

/// The constructor of the class (since torch 2.13).
const MAKE_OUT_OF_MEMORY: &CStr = c"_ZN3c1016OutOfMemoryErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
/// The constructor of its base class (torch 2.11 and later).
const MAKE_ERROR: &CStr =
    c"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE";
const TYPE_INFO: &CStr = c"_ZTIN3c1016OutOfMemoryErrorE";
const VIRTUAL_TABLE: &CStr = c"_ZTVN3c1016OutOfMemoryErrorE";
/// The first function in a virtual table, behind the offset to top and the type.
const TABLE_HEAD_WORDS: usize = 2;

/// How `c10::OutOfMemoryError` is constructed, by what the loaded PyTorch exports.
/// `scripts/check-torch-exports` compares each version's wheel with `python/dormouse/modes/exports.py`.
enum Construction {
    /// By its own constructor, exported with its type.
    Own { make: MakeError, type_info: *mut c_void },
    /// By the constructor of `c10::Error`, which it adds no member to, and its virtual table. The class is
    /// inline: its type and table are those of a library that throws it.
    Base { make: MakeError, type_info: *mut c_void, functions: *mut c_void },
}

impl Construction {
    /// `None` if PyTorch is not loaded, or exports too little.
    fn of_loaded_torch() -> Option<Self> {
        let torch = Library::loaded(c"libc10.so")?;
        // SAFETY: the mangled names of functions with these parameters: a `SourceLocation` is passed by
        // value in memory, a `std::string` by the address of the caller's.
        let (own, base) = unsafe {
            (
                torch.function::<MakeError>(MAKE_OUT_OF_MEMORY),
                torch.function::<MakeError>(MAKE_ERROR),
            )
        };
        if let (Some(make), Some(type_info)) = (own, torch.symbol(TYPE_INFO)) {
            return Some(Self::Own { make, type_info });
        }
        let cuda = Library::loaded(c"libc10_cuda.so")?;
        let type_info = cuda.symbol(TYPE_INFO)?;
        let table = cuda.symbol(VIRTUAL_TABLE)?.cast::<*mut c_void>();
        let functions = table.wrapping_add(TABLE_HEAD_WORDS).cast();
        Some(Self::Base { make: base?, type_info, functions })
    }
}

/// `dormouse_torch_get_out_of_memory_construction`.
pub(crate) fn construction_code() -> c_int {
    match Construction::of_loaded_torch() {
        None => 0,
        Some(Construction::Own { .. }) => 1,
        Some(Construction::Base { .. }) => 2,
    }
}

/// Throws `failure` as a C++ exception.
///
/// # Safety
/// The caller may unwind, and so may its callers.
pub(crate) unsafe fn throw(failure: &Failure) -> ! {
    let text = CString::new(failure.text.replace('\0', " ")).unwrap_or_default();
    // SAFETY: the caller's contract.
    unsafe {
        if failure.is_out_of_memory {
            throw_out_of_memory(&text);
        }
        throw_runtime_error(&text);
    }
    // No C++ runtime in this process: no caller can catch, and would write through a returned NULL.
    stderr::print(&failure.text);
    std::process::abort()
}

/// Throws `c10::OutOfMemoryError`. Returns if a symbol is missing.
///
/// # Safety
/// As [`throw`].
unsafe fn throw_out_of_memory(text: &CStr) -> Option<()> {
    let construction = Construction::of_loaded_torch()?;
    let cpp = Library::loaded(c"libstdc++.so.6")?;
    // SAFETY: the mangled names of functions with these parameters; an exception of `EXCEPTION_BYTES`
    // holds the class, whose table replaces that of its base before anything uses it.
    unsafe {
        let allocate: Allocate = cpp.function(c"__cxa_allocate_exception")?;
        let throw: Throw = cpp.function(c"__cxa_throw")?;
        let make_string: MakeString =
            cpp.function(c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcmRKS3_")?;
        let drop_string: Destructor =
            cpp.function(c"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev")?;
        let exception = allocate(EXCEPTION_BYTES);
        let mut string = [0_usize; STRING_WORDS];
        let string = (&raw mut string).cast::<c_void>();
        let allocator = 0_u8; // `std::allocator` is empty: any address is valid
        make_string(string, text.as_ptr(), text.count_bytes(), (&raw const allocator).cast());
        let location =
            SourceLocation { function: c"malloc".as_ptr(), file: c"dormouse".as_ptr(), line: 0 };
        let type_info = match construction {
            Construction::Own { make, type_info } => {
                make(exception, location, string);
                type_info
            }
            Construction::Base { make, type_info, functions } => {
                make(exception, location, string);
                exception.cast::<*mut c_void>().write(functions);
                type_info
            }
        };
        drop_string(string);
        throw(exception, type_info, Some(destroy))
    }
}

/// Destroys an exception derived from `std::exception`: its complete-object destructor is the first
/// entry of its virtual table.
unsafe extern "C" fn destroy(exception: *mut c_void) {
    // SAFETY: the C++ runtime passes the thrown object, whose first word is the address of its table.
    unsafe {
        let table = *exception.cast::<*const Destructor>();
        (*table)(exception);
    }
}

/// Throws `std::runtime_error`. Returns if the process has no C++ runtime.
///
/// # Safety
/// As [`throw`].
unsafe fn throw_runtime_error(text: &CStr) -> Option<()> {
    let cpp = Library::loaded(c"libstdc++.so.6")?;
    // SAFETY: the mangled names of functions with these parameters.
    unsafe {
        let allocate: Allocate = cpp.function(c"__cxa_allocate_exception")?;
        let throw: Throw = cpp.function(c"__cxa_throw")?;
        let make: MakeRuntimeError = cpp.function(c"_ZNSt13runtime_errorC1EPKc")?;
        let type_info = cpp.symbol(c"_ZTISt13runtime_error")?;
        let exception = allocate(EXCEPTION_BYTES);
        make(exception, text.as_ptr());
        throw(exception, type_info, Some(destroy))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_process_without_torch_has_no_class_to_throw() {
        assert_eq!(construction_code(), 0);
    }
}
