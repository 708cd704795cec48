//! Tags: memory that sleeps and wakes together under a user's name.

use std::ffi::{c_char, c_void};

use super::structs::{dormouse_runtime_t, dormouse_tag_t};
use crate::boundary::{In, Out, Outcome, RawStream, enter};
use crate::status::dormouse_status_t;
use crate::tag::Tag;

/// Makes a tag. `name` is 1 to `DORMOUSE_NAME_BYTES` - 1 bytes of UTF-8 and is copied; `flags`
/// is 0 or `DORMOUSE_TAG_WITHOUT_BACKUP`.
///
/// Any-thread. The caller owns the handle and gives it to `dormouse_tag_destroy`.
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
        Ok(Outcome::Done)
    })
}

/// Ends a tag. What sleeps under it is woken first, and its memory goes on without it. NULL is
/// fine and does nothing.
///
/// Any-thread. Errors: `HANDLE`, `STALE`, `BUSY` while a thread is between enter and leave, and
/// those of `dormouse_tag_wake` (the tag lives on then).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_destroy(tag: *mut dormouse_tag_t) -> dormouse_status_t {
    enter(|| {
        Tag::destroy(tag)?;
        Ok(Outcome::Done)
    })
}

/// From here on, blocks the calling thread allocates belong to the tag. Nests; the innermost tag
/// wins.
///
/// Any-thread, acts on the calling thread. Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT` past 16
/// tags at a time.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_enter(tag: *mut dormouse_tag_t) -> dormouse_status_t {
    enter(|| {
        Tag::enter(tag)?;
        Ok(Outcome::Done)
    })
}

/// Ends the calling thread's innermost `dormouse_tag_enter`, which must have been of this tag.
///
/// Any-thread, acts on the calling thread. Errors: `NULL`, `HANDLE`, `STALE`, `STATE` when the
/// innermost tag is another or there is none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_leave(tag: *mut dormouse_tag_t) -> dormouse_status_t {
    enter(|| {
        Tag::leave(tag)?;
        Ok(Outcome::Done)
    })
}

/// Puts the block that holds `[ptr, ptr + bytes)` under the tag. What sleeps of it are the pages it
/// has to itself: all of it on the host, and of what was allocated inside a tag or a layer; of
/// other blocks on a GPU not the ends that share a page with a neighbour. A block without a page
/// of its own stays awake.
///
/// Any-thread. Ownership of the memory does not change. Errors: `NULL`, `HANDLE`, `STALE`,
/// `ARGUMENT` for a range that leaves its block, `NOT_OURS`, `BUSY` for memory that belongs to a
/// node or another tag.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_add(
    tag: *mut dormouse_tag_t,
    ptr: *mut c_void,
    bytes: u64,
) -> dormouse_status_t {
    enter(|| {
        Tag::get(tag)?.add(ptr, bytes)?;
        Ok(Outcome::Done)
    })
}

/// Puts everything under the tag to sleep in `tier` (`DORMOUSE_TIER_HOST` or `_NVME`) and waits
/// until it is. Its addresses stay; a touch ends the process with one sentence. What is written
/// to meanwhile stays awake.
///
/// Any-thread; blocks the caller. On `DORMOUSE_DECLINED` (a full or failing tier) what did not
/// fit is awake. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT`, `TIER` for a closed tier, `IO`.
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

/// Wakes everything under the tag at its own addresses and waits until its bytes are there, for every
/// stream.
///
/// Any-thread; blocks the caller. Errors: `NULL`, `HANDLE`, `STALE`, `OUT_OF_MEMORY`, `IO`,
/// `CORRUPT`; what could not wake stays asleep with its bytes where they are.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_wake(
    tag: *mut dormouse_tag_t,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise: NULL, or a live stream of the device.
        let stream = unsafe { RawStream::new(stream) };
        Tag::get(tag)?.wake(stream)?;
        Ok(Outcome::Done)
    })
}
