//! Kernels that a trainer can call directly.

use std::ffi::c_void;

use super::structs::dormouse_merge_args_t;
use crate::boundary::{RawStream, enter};
use crate::merge;
use crate::status::dormouse_status_t;

/// Merges two partial attention outputs over the same rows by their log-sum-exps:
/// `lse = log(exp(lse1) + exp(lse2))`, `out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)`.
/// A row without keys has lse -infinity and takes the other partial output. If both are empty, the
/// output is 0.
///
/// The kernel runs on the device that holds `out`: on a GPU in the order of `stream` if `out` is
/// memory of that GPU's heap, otherwise on the calling thread.
///
/// Any-thread. The caller owns the buffers. They are not used after the call returns or, on a GPU,
/// after the stream has passed. Errors: `NULL`, `VERSION`, `ARGUMENT`, and `DEVICE` on a GPU.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_kernel_merge_lse(
    args: *const dormouse_merge_args_t,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        // SAFETY: the caller's promise (module docs), for every buffer `args` names.
        unsafe { merge::run(args, stream) }
    })
}
