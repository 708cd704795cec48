//! Stash: copies of memory that another allocator owns.

use std::ffi::c_void;

use dormouse_offload::StashId;

use super::c::*;
use crate::boundary::{In, Out, Outcome, RawStream, enter, usize_of};
use crate::fault::Fault;
use crate::runtime::Runtime;
use crate::status::{DORMOUSE_DECLINED, dormouse_status_t};

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
        // SAFETY: the caller's promise (module docs).
        let (stream, out) = unsafe { (RawStream::new(stream), Out::new(id_out, "id_out")?) };
        let runtime = Runtime::get(runtime)?;
        let stream = runtime.heap.stream(stream)?;
        let length = usize_of(bytes, "bytes")?;
        // SAFETY: as above: `ptr` is readable for `bytes`; this refuses NULL.
        unsafe { In::slice(ptr.cast::<u8>(), length.max(1), "ptr") }?;
        if length == 0 {
            return Err(Fault::argument("bytes is 0; accepted: at least 1"));
        }
        let _maker = runtime.begin_making()?;
        // SAFETY: as above.
        match unsafe { runtime.engine.stash_put(ptr.addr(), length, storage_key, &stream) } {
            Ok(StashId(id)) => {
                out.write(id);
                Ok(Outcome::Done)
            }
            Err(error) if error.is_declined() => {
                tracing::info!(target: "offload", bytes, storage_key, reason = %error, "stash declined");
                Ok(Outcome::Notice(DORMOUSE_DECLINED, error.to_string()))
            }
            Err(error) => Err(error.into()),
        }
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
        let runtime = Runtime::get(runtime)?;
        // SAFETY: the caller's promise (module docs).
        let stream = runtime.heap.stream(unsafe { RawStream::new(stream) })?;
        if dst.is_null() {
            return Err(Fault::null("dst"));
        }
        // SAFETY: as above: `dst` is writable for the stash's bytes.
        let _bytes = unsafe { runtime.engine.stash_get(StashId(id), dst.addr(), &stream) }?;
        Ok(())
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
    enter(|| Ok(Runtime::get(runtime)?.engine.stash_drop(StashId(id))?))
}
