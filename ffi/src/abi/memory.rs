//! Memory: blocks of the linked mode. The preload mode uses the same heap.

use std::ffi::c_void;

use dormouse_device::AddressRange;

use super::c::*;
use crate::boundary::{Out, RawStream, enter, usize_of};
use crate::convert;
use crate::fault::{Fault, c_text};
use crate::runtime::Runtime;
use crate::status::dormouse_status_t;

/// Allocates `bytes` of device memory, aligned to `align` bytes (0: the page size). A block consists
/// of whole pages, so that it can sleep. Its contents are unspecified.
///
/// `stream` is the stream that uses the block first; NULL is the calling thread.
///
/// Any-thread. The caller owns the block and releases it with `dormouse_mem_free`. Errors: `NULL`,
/// `HANDLE`, `STALE`, `ARGUMENT` for 0 bytes, an `align` that is not a power of two or a stream of
/// another device, `OUT_OF_MEMORY` with a report in the message.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_mem_alloc(
    runtime: *mut dormouse_runtime_t,
    bytes: u64,
    align: u64,
    stream: *mut c_void,
    ptr_out: *mut *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let (stream, out) = unsafe { (RawStream::new(stream), Out::new(ptr_out, "ptr_out")?) };
        let heap = Runtime::get(runtime)?.heap;
        let _known = heap.stream(stream)?;
        let (bytes, align) = (usize_of(bytes, "bytes")?, usize_of(align, "align")?);
        let allocated = heap.allocate_pages(bytes, align, stream.key());
        let block = allocated.map_err(|error| heap.fault_of(error))?;
        out.write(std::ptr::with_exposed_provenance_mut(block.range.start));
        Ok(())
    })
}

/// Frees the block that starts at `ptr`. The data of a sleeping block is discarded. `stream` is the
/// stream that used the block last. NULL is a no-op.
///
/// Any-thread. Does not block. Errors: `NULL`, `HANDLE`, `STALE`, `NOT_OURS` if `ptr` is not the start of a
/// live block, `ARGUMENT` for a stream of another device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_mem_free(
    runtime: *mut dormouse_runtime_t,
    ptr: *mut c_void,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let stream = unsafe { RawStream::new(stream) };
        let heap = Runtime::get(runtime)?.heap;
        if ptr.is_null() {
            return Ok(());
        }
        let _known = heap.stream(stream)?;
        heap.free(ptr.addr(), stream.key())
    })
}

/// Records that `stream` uses the block at `ptr`. After the block is freed, its memory is reused only
/// when the work recorded here is complete. On the host device this only checks the arguments.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`, `NOT_OURS`, `ARGUMENT` for a stream of another
/// device.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_mem_record_stream(
    runtime: *mut dormouse_runtime_t,
    ptr: *mut c_void,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let stream = unsafe { RawStream::new(stream) };
        let heap = Runtime::get(runtime)?.heap;
        let _known = heap.stream(stream)?;
        if ptr.is_null() {
            return Err(Fault::null("ptr"));
        }
        let start = heap.block_at(ptr.addr())?.range.start;
        Ok(heap.allocator().record_stream(start, stream.key())?)
    })
}

/// Copies `bytes` bytes at `ptr`, inside one sleeping block, to host memory at `dst`. The block stays
/// asleep, in host memory or in the file. Parts of the block that never sleep are copied behind the work on
/// `stream`.
///
/// Any-thread, but do not free the block during the call. Blocks. `dst` must have room for `bytes` bytes, and
/// is undefined after an error. Errors: `NULL`, `HANDLE`, `STALE`, `NOT_OURS`, `STATE` if the block is not
/// asleep, has no copy or wakes during the call, `ARGUMENT` for more bytes than the block was allocated
/// with or a stream of another device, `OUT_OF_MEMORY` if no pinned staging memory is available, `IO`, `CORRUPT`
/// if the file lost or changed bytes, `DEVICE`, and `PANIC` after a device failure that left copies incomplete.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_mem_read(
    runtime: *mut dormouse_runtime_t,
    ptr: *const c_void,
    bytes: u64,
    dst: *mut c_void,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        let runtime = Runtime::get(runtime)?;
        // SAFETY: the caller's promise (module docs).
        let stream = runtime.heap.stream(unsafe { RawStream::new(stream) })?;
        for (pointer, name) in [(ptr, "ptr"), (dst.cast_const(), "dst")] {
            if pointer.is_null() {
                return Err(Fault::null(name));
            }
        }
        let range = AddressRange::new(ptr.addr(), usize_of(bytes, "bytes")?);
        // SAFETY: as above: `dst` is writable for `bytes`, and the block is live.
        Ok(unsafe { runtime.engine.read_asleep(range, dst.expose_provenance(), &stream) }?)
    })
}

/// Describes the block that contains `ptr`: base, size, state, tier, role and name. `NOT_OURS` means
/// that no live block of this library contains `ptr`.
///
/// Any-thread. Other threads can change the block before the result is read. Errors: `NULL`,
/// `VERSION`, `HANDLE`, `STALE`, `NOT_OURS`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_mem_query(
    runtime: *mut dormouse_runtime_t,
    ptr: *const c_void,
    info_out: *mut dormouse_mem_info_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(info_out, "info_out") }?;
        let runtime = Runtime::get(runtime)?;
        if ptr.is_null() {
            return Err(Fault::null("ptr"));
        }
        let block = runtime.heap.block_at(ptr.addr())?;
        let mut info = dormouse_mem_info_t {
            base: std::ptr::with_exposed_provenance_mut(block.range.start),
            bytes: block.range.bytes as u64,
            requested_bytes: block.requested_bytes as u64,
            state: DORMOUSE_STATE_AWAKE,
            tier: DORMOUSE_TIER_DEVICE,
            role: DORMOUSE_ROLE_NONE,
            layer: -1,
            ..dormouse_mem_info_t::default()
        };
        // A region that is released between the two calls leaves an untracked block.
        let region = runtime.engine.region_at(ptr.addr());
        if let Some(region) = region.and_then(|id| runtime.engine.region_info(id).ok()) {
            info.state = convert::state_code(region.state);
            info.tier = convert::tier_code(region.tier);
            info.role = convert::role_code(region.role);
            info.layer = i32::try_from(region.label.layer).unwrap_or(-1);
            let name = region.label.name.split(|byte| *byte == 0).next().unwrap_or_default();
            info.name = c_text(&String::from_utf8_lossy(name));
        }
        out.fill(info);
        Ok(())
    })
}
