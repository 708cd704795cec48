//! Stash: copies of memory that another allocator owns.

use std::ffi::c_void;

use super::structs::dormouse_runtime_t;
use crate::boundary::{Out, Outcome, RawStream, enter};
use crate::runtime::{Runtime, Stashed};
use crate::status::dormouse_status_t;

/// Copies `bytes` bytes at `ptr` to the host tier, or to the NVMe tier if the host tier is full. On
/// the host device the NVMe tier comes first. `storage_key` identifies the storage and its
/// generation: a second call with the same key makes no second copy, returns the same id, and
/// requires one more `dormouse_stash_drop`.
///
/// Any-thread. The memory is read before the call returns and stays the caller's. Returns
/// `DORMOUSE_DECLINED` if the tiers are full or the disk write failed, which closes the NVMe tier; no
/// copy is kept and `id_out` is unchanged. Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT`,
/// `OUT_OF_MEMORY`, `DEVICE`, `ARGUMENT` for 0 bytes, for a known key with another length or for a
/// stream of another device.
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

/// Copies a stash to `dst`, which must have room for all of its bytes. The stash is kept.
///
/// Any-thread. Blocks. Errors: `NULL`, `HANDLE`, `STALE` for the runtime or a dropped id, `ARGUMENT`
/// for a stream of another device, `OUT_OF_MEMORY` if no pinned staging memory is available,
/// `DEVICE`, `IO`, `CORRUPT`, and `PANIC` after a device failure that left copies incomplete. After
/// an error the contents of `dst` are unspecified.
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
        unsafe { Runtime::get(runtime)?.stash_get(id, dst, stream) }
    })
}

/// Releases one `dormouse_stash_put` of `id`. The last release frees the copy.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE` for the runtime or a dropped id.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_stash_drop(
    runtime: *mut dormouse_runtime_t,
    id: u64,
) -> dormouse_status_t {
    enter(|| Runtime::get(runtime)?.stash_drop(id))
}
