//! Kernels a trainer may call directly.

use std::ffi::c_void;

use super::structs::dormouse_merge_args_t;
use crate::boundary::{Outcome, enter};
use crate::merge;
use crate::status::dormouse_status_t;

/// Merges two partial attention outputs over the same rows by their log-sum-exps:
/// `lse = log(exp(lse1) + exp(lse2))`, `out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)`.
/// A row without keys has lse -infinity and takes the other part; both empty gives 0.
///
/// Any-thread. Buffers stay the caller's and are not used after the call returns (NULL stream).
/// Errors: `NULL`, `VERSION`, `ARGUMENT`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_kernel_merge_lse(
    args: *const dormouse_merge_args_t,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs), for every buffer `args` names.
        unsafe { merge::run(args, stream) }?;
        Ok(Outcome::Done)
    })
}
