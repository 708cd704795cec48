//! Stash: the by-copy door, for memory that is not ours.

use std::ffi::c_void;

use super::structs::dormouse_runtime_t;
use crate::boundary::{Out, Outcome, RawStream, enter};
use crate::runtime::{Runtime, Stashed};
use crate::status::dormouse_status_t;

/// Keeps a copy of `bytes` bytes at `ptr` in the host tier, or in the file when that is full; on
/// the host device in the file first.
/// `storage_key` is the storage's identity with its generation: the same key gives the same id,
/// one copy, and one more `dormouse_stash_drop` to come.
///
/// Any-thread. The memory is read before the call returns and stays the caller's. On
/// `DORMOUSE_DECLINED` (tiers full, or the disk failed the write, which ends the file tier) nothing
/// is kept and no id written; `declined` of the statistics counts it.
/// Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT`, `OUT_OF_MEMORY`, `DEVICE`, `ARGUMENT` for 0 bytes,
/// another length under the same key or a stream the device has not.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_stash_put(
    runtime: *mut dormouse_runtime_t,
    ptr: *const c_void,
    bytes: u64,
    storage_key: u64,
    stream: *mut c_void,
    id_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(id_out, "id_out") }?;
        // SAFETY: as above: `ptr` is readable for `bytes`.
        let put = unsafe { Runtime::get(runtime)?.stash_put(ptr, bytes, storage_key, stream) }?;
        Ok(match put {
            Stashed::Kept(id) => {
                out.write(id);
                Outcome::Done
            }
            Stashed::Declined(reason) => Outcome::Declined(reason),
        })
    })
}

/// Copies a stash back to `dst`, which has room for all its bytes. The id stays valid.
///
/// Any-thread; blocks the caller. Errors: `NULL`, `HANDLE`, `STALE` (the runtime's handle or a
/// dropped id), `ARGUMENT` for a stream that is not the device's, `OUT_OF_MEMORY` where no pinned
/// memory is left to read the file through, `DEVICE`, `IO`, `CORRUPT`, and `PANIC` once the device
/// has left copies nobody can wait for. `dst` is then unspecified and the stash is kept.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_stash_get(
    runtime: *mut dormouse_runtime_t,
    id: u64,
    dst: *mut c_void,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        // SAFETY: the caller's promise (module docs): `dst` is writable for the stash's bytes.
        unsafe { Runtime::get(runtime)?.stash_get(id, dst, stream) }?;
        Ok(Outcome::Done)
    })
}

/// Ends one `dormouse_stash_put` of `id`; with the last, the copy goes.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE` (the runtime's handle or a dropped id).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_stash_drop(
    runtime: *mut dormouse_runtime_t,
    id: u64,
) -> dormouse_status_t {
    enter(|| {
        Runtime::get(runtime)?.stash_drop(id)?;
        Ok(Outcome::Done)
    })
}
