//! Kernels a trainer may call directly.

use std::ffi::c_void;

use super::structs::dormouse_merge_args_t;
use crate::boundary::{Outcome, RawStream, enter};
use crate::merge;
use crate::status::dormouse_status_t;

/// Merges two partial attention outputs over the same rows by their log-sum-exps:
/// `lse = log(exp(lse1) + exp(lse2))`, `out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)`.
/// A row without keys has lse -infinity and takes the other part; both empty gives 0.
///
/// It runs where `out` lies: in memory of a GPU's heap on that GPU, in the order of `stream`; any
/// other memory is taken for the host's, at once.
///
/// Any-thread. Buffers stay the caller's and are not used after the call returns (on a GPU: after
/// the stream has passed). Errors: `NULL`, `VERSION`, `ARGUMENT`, and on a GPU `DEVICE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_kernel_merge_lse(
    args: *const dormouse_merge_args_t,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        // SAFETY: the caller's promise (module docs), for every buffer `args` names.
        unsafe { merge::run(args, stream) }?;
        Ok(Outcome::Done)
    })
}
