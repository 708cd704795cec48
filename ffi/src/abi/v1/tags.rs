//! Tags: named sets of memory that sleep and wake together.

use std::ffi::{c_char, c_void};

use super::structs::{dormouse_runtime_t, dormouse_tag_t};
use crate::boundary::{In, Out, RawStream, enter};
use crate::status::dormouse_status_t;
use crate::tag::Tag;

/// Creates a tag. `name` is 1 to `DORMOUSE_NAME_BYTES` - 1 bytes of UTF-8 and is copied. `flags` is 0
/// or `DORMOUSE_TAG_WITHOUT_BACKUP`.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_tag_destroy`.
/// Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT`, `LIMIT`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_create(
    runtime: *mut dormouse_runtime_t,
    name: *const c_char,
    flags: u64,
    tag_out: *mut *mut dormouse_tag_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(tag_out, "tag_out") }?;
        // SAFETY: as above.
        let name = unsafe { In::text(name, "name") }?;
        out.write(Tag::create(runtime, &name, flags)?);
        Ok(())
    })
}

/// Wakes the tag's memory and destroys the tag. The memory stays allocated. NULL is a no-op.
///
/// Any-thread. Blocks until the memory is awake. Errors: `HANDLE`, `STALE`, `BUSY` while a thread is
/// between `dormouse_tag_enter` and `_leave`, and those of `dormouse_tag_wake`. The tag is not
/// destroyed on an error.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_destroy(tag: *mut dormouse_tag_t) -> dormouse_status_t {
    enter(|| Tag::destroy(tag))
}

/// Adds every block that the calling thread allocates from now on to the tag, until
/// `dormouse_tag_leave`. Tags nest; a block belongs to the innermost tag.
///
/// Any-thread; affects only the calling thread. Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT` for more
/// than 16 nested tags.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_enter(tag: *mut dormouse_tag_t) -> dormouse_status_t {
    enter(|| Tag::enter(tag))
}

/// Ends the calling thread's innermost `dormouse_tag_enter`, which must be of this tag.
///
/// Any-thread; affects only the calling thread. Errors: `NULL`, `HANDLE`, `STALE`, `STATE` if the
/// thread is inside no tag or its innermost tag is another one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_leave(tag: *mut dormouse_tag_t) -> dormouse_status_t {
    enter(|| Tag::leave(tag))
}

/// Adds the existing block that contains `[ptr, ptr + bytes)` to the tag. Only pages that the block
/// does not share with another block can sleep. A host block, and a GPU block allocated inside a tag
/// or a layer, shares no page; another GPU block can share its first and last page. A block without
/// a page of its own stays awake.
///
/// Any-thread. Does not change the ownership of the memory. Errors: `NULL`, `HANDLE`, `STALE`,
/// `ARGUMENT` if the range exceeds the block, `NOT_OURS`, `BUSY` if the block belongs to a prefix or
/// to another tag.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_add(
    tag: *mut dormouse_tag_t,
    ptr: *mut c_void,
    bytes: u64,
) -> dormouse_status_t {
    enter(|| Tag::get(tag)?.add(ptr, bytes))
}

/// Moves the tag's memory to `tier` (`DORMOUSE_TIER_HOST` or `_NVME`) and waits for the copies. The
/// addresses stay reserved; an access to sleeping memory terminates the process. Memory that is
/// written during the call stays awake.
///
/// Any-thread. Blocks. Returns `DORMOUSE_OK` if all of the memory sleeps, `DORMOUSE_PARTIAL` if a
/// part of it sleeps and the rest is awake, and `DORMOUSE_DECLINED` if all of it is awake. The
/// message states the reason, for example a full tier. After `DORMOUSE_PARTIAL`, call
/// `dormouse_tag_wake` before any access to the tag's memory.
/// Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT`, `TIER` for a closed tier, `IO`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_sleep(
    tag: *mut dormouse_tag_t,
    tier: i32,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        Tag::get(tag)?.sleep(tier, stream)
    })
}

/// Moves the tag's memory back to its original addresses and waits for the copies. All streams can
/// then use it.
///
/// Any-thread. Blocks. Errors: `NULL`, `HANDLE`, `STALE`, `OUT_OF_MEMORY`, `IO`, `CORRUPT`. On an
/// error, memory that could not wake stays asleep and its data is kept.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_wake(
    tag: *mut dormouse_tag_t,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        Tag::get(tag)?.wake(stream)
    })
}
