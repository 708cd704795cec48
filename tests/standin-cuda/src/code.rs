//! The driver's result codes, and their names.

use std::ffi::{CStr, c_char, c_int};

use cudarc::driver::sys::CUresult;

use crate::entry::{Out, entry};

/// A result that is not success. Faults may be any number, so it is not an enum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Code(pub(crate) c_int);

macro_rules! codes {
    ($($short:ident = $name:ident: $text:literal;)*) => {
        #[allow(dead_code, reason = "those that only faults use are here for their names")]
        impl Code {
            $(pub(crate) const $short: Self = Self(CUresult::$name as c_int);)*
        }

        /// Code, name and description.
        const TEXTS: &[(c_int, &CStr, &CStr)] = &[
            $((CUresult::$name as c_int, text(concat!(stringify!($name), "\0")),
               text(concat!($text, "\0")))),*
        ];
    };
}

/// A C string of a literal with its zero.
const fn text(bytes: &'static str) -> &'static CStr {
    match CStr::from_bytes_with_nul(bytes.as_bytes()) {
        Ok(text) => text,
        Err(_) => c"",
    }
}

codes! {
    SUCCESS = CUDA_SUCCESS: "no error";
    INVALID_VALUE = CUDA_ERROR_INVALID_VALUE: "invalid argument";
    OUT_OF_MEMORY = CUDA_ERROR_OUT_OF_MEMORY: "out of memory";
    NOT_INITIALIZED = CUDA_ERROR_NOT_INITIALIZED: "initialization error";
    DEINITIALIZED = CUDA_ERROR_DEINITIALIZED: "driver shutting down";
    STUB_LIBRARY = CUDA_ERROR_STUB_LIBRARY: "CUDA driver is a stub library";
    NO_DEVICE = CUDA_ERROR_NO_DEVICE: "no CUDA-capable device is detected";
    INVALID_DEVICE = CUDA_ERROR_INVALID_DEVICE: "invalid device ordinal";
    INVALID_IMAGE = CUDA_ERROR_INVALID_IMAGE: "device kernel image is invalid";
    INVALID_CONTEXT = CUDA_ERROR_INVALID_CONTEXT: "invalid device context";
    PEER_ACCESS_UNSUPPORTED = CUDA_ERROR_PEER_ACCESS_UNSUPPORTED: "peer access is not supported between these two devices";
    MAP_FAILED = CUDA_ERROR_MAP_FAILED: "mapping of buffer object failed";
    UNMAP_FAILED = CUDA_ERROR_UNMAP_FAILED: "unmapping of buffer object failed";
    NO_BINARY_FOR_GPU = CUDA_ERROR_NO_BINARY_FOR_GPU: "no kernel image is available";
    ECC_UNCORRECTABLE = CUDA_ERROR_ECC_UNCORRECTABLE: "uncorrectable ECC error encountered";
    INVALID_PTX = CUDA_ERROR_INVALID_PTX: "a PTX JIT compilation failed";
    OPERATING_SYSTEM = CUDA_ERROR_OPERATING_SYSTEM: "OS call failed";
    INVALID_HANDLE = CUDA_ERROR_INVALID_HANDLE: "invalid resource handle";
    ILLEGAL_STATE = CUDA_ERROR_ILLEGAL_STATE: "the operation cannot be performed in this state";
    NOT_FOUND = CUDA_ERROR_NOT_FOUND: "named symbol not found";
    NOT_READY = CUDA_ERROR_NOT_READY: "device not ready";
    ILLEGAL_ADDRESS = CUDA_ERROR_ILLEGAL_ADDRESS: "an illegal memory access was encountered";
    LAUNCH_OUT_OF_RESOURCES = CUDA_ERROR_LAUNCH_OUT_OF_RESOURCES: "too many resources requested";
    LAUNCH_TIMEOUT = CUDA_ERROR_LAUNCH_TIMEOUT: "the launch timed out and was terminated";
    CONTEXT_IS_DESTROYED = CUDA_ERROR_CONTEXT_IS_DESTROYED: "context is destroyed";
    ASSERT = CUDA_ERROR_ASSERT: "device-side assert triggered";
    ALREADY_REGISTERED = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED:
        "part or all of the requested memory range is already mapped";
    NOT_REGISTERED = CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED:
        "pointer does not correspond to a registered memory region";
    HARDWARE_STACK_ERROR = CUDA_ERROR_HARDWARE_STACK_ERROR: "hardware stack error";
    ILLEGAL_INSTRUCTION = CUDA_ERROR_ILLEGAL_INSTRUCTION: "an illegal instruction was encountered";
    MISALIGNED_ADDRESS = CUDA_ERROR_MISALIGNED_ADDRESS: "misaligned address";
    LAUNCH_FAILED = CUDA_ERROR_LAUNCH_FAILED: "unspecified launch failure";
    NOT_PERMITTED = CUDA_ERROR_NOT_PERMITTED: "operation not permitted";
    NOT_SUPPORTED = CUDA_ERROR_NOT_SUPPORTED: "operation not supported";
    SYSTEM_NOT_READY = CUDA_ERROR_SYSTEM_NOT_READY: "system not yet initialized";
    DRIVER_MISMATCH = CUDA_ERROR_SYSTEM_DRIVER_MISMATCH: "system has unsupported driver";
    CAPTURE_UNSUPPORTED = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED:
        "operation not permitted when stream is capturing";
    CAPTURE_INVALIDATED = CUDA_ERROR_STREAM_CAPTURE_INVALIDATED:
        "operation failed due to a previous error during capture";
    CAPTURE_MERGE = CUDA_ERROR_STREAM_CAPTURE_MERGE:
        "operation would result in a merge of separate capture sequences";
    CAPTURE_UNMATCHED = CUDA_ERROR_STREAM_CAPTURE_UNMATCHED:
        "capture was not ended in the same stream as it began";
    CAPTURE_UNJOINED = CUDA_ERROR_STREAM_CAPTURE_UNJOINED:
        "capturing stream has unjoined work";
    CAPTURE_ISOLATION = CUDA_ERROR_STREAM_CAPTURE_ISOLATION:
        "dependency created on uncaptured work in another stream";
    CAPTURE_IMPLICIT = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT:
        "operation would make the legacy stream depend on a capturing blocking stream";
    CAPTURED_EVENT = CUDA_ERROR_CAPTURED_EVENT:
        "operation not permitted on an event last recorded in a capturing stream";
    CAPTURE_WRONG_THREAD = CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD:
        "attempt to terminate a thread-local capture sequence from another thread";
    UNKNOWN = CUDA_ERROR_UNKNOWN: "unknown error";
}

fn find(code: c_int) -> Option<&'static (c_int, &'static CStr, &'static CStr)> {
    TEXTS.iter().find(|(known, _, _)| *known == code)
}

/// Hands out a text, or a null with the driver's refusal.
fn hand_out(found: Option<&'static CStr>, text: Out<*const c_char>) -> Result<(), Code> {
    text.put(found.map_or(std::ptr::null(), CStr::as_ptr))?;
    found.map(|_| ()).ok_or(Code::INVALID_VALUE)
}

entry! { Nothing, fn cuGetErrorName(code: c_int, name: Out<*const c_char>) {
    hand_out(find(code).map(|(_, name, _)| *name), name)
}}

entry! { Nothing, fn cuGetErrorString(code: c_int, text: Out<*const c_char>) {
    hand_out(find(code).map(|(_, _, text)| *text), text)
}}
