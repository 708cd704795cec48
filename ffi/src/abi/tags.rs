//! Tags: named sets of memory that sleep and wake together.

use std::ffi::{c_char, c_void};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dormouse_device::Device;
use dormouse_offload::{OffloadError, RegionState, TagId, Tier};

use super::c::*;
use crate::boundary::{In, Out, Outcome, RawStream, check_flags, enter, usize_of};
use crate::fault::Fault;
use crate::handles::{Kind, Table};
use crate::runtime::Runtime;
use crate::status::{self, dormouse_status_t};
use crate::{collect, convert};

static TAGS: Table<Tag> = Table::new(Kind::Tag);

/// A tag of one runtime.
#[derive(Debug)]
pub(crate) struct Tag {
    runtime: Arc<Runtime>,
    id: TagId,
    name: String,
    has_backup: bool,
    enters: Enters,
}

/// Number of enters of a tag without a leave, of all threads; `CLOSED` from the start of a destroy on.
#[derive(Debug, Default)]
struct Enters(AtomicUsize);

const CLOSED: usize = usize::MAX;

impl Enters {
    /// Counts an enter, unless the tag is being destroyed: its thread could not leave it.
    fn count(&self) -> Result<(), Fault> {
        // Acquire and Release, here and below: enters, leaves and destroys of all threads are in one order.
        let add = |enters| (enters != CLOSED).then(|| enters + 1);
        let counted = self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, add);
        counted.map(drop).map_err(|_| Kind::Tag.stale())
    }

    fn uncount(&self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }

    /// Refuses later enters. Fails if a thread is inside, or another one destroys the tag.
    fn close(&self, name: &str) -> Result<(), Fault> {
        let closed = self.0.compare_exchange(0, CLOSED, Ordering::AcqRel, Ordering::Acquire);
        closed.map(drop).map_err(|enters| match enters {
            CLOSED => Kind::Tag.stale(),
            _ => Fault::new(
                status::DORMOUSE_ERR_BUSY,
                format!("tag {name} was entered {enters} times and not left"),
            ),
        })
    }

    fn reopen(&self) {
        self.0.store(0, Ordering::Release);
    }
}

/// Returns the names of the live tags of `runtime`.
pub(crate) fn labels_of(runtime: &Arc<Runtime>) -> impl Iterator<Item = String> {
    let live = TAGS.live().into_iter().filter(|tag| Arc::ptr_eq(&tag.runtime, runtime));
    live.map(|tag| format!("tag {}", tag.name))
}

/// Creates a tag. `name` is 1 to `DORMOUSE_NAME_BYTES` - 1 bytes of UTF-8 and is copied. `flags` is 0
/// or `DORMOUSE_TAG_WITHOUT_BACKUP`.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_tag_destroy`.
/// Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT`, `LIMIT` for more than 4096 tags at a time or 2^32 - 1 in the
/// life of the process.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_create(
    runtime: *mut dormouse_runtime_t,
    name: *const c_char,
    flags: u64,
    tag_out: *mut *mut dormouse_tag_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let (out, name) = unsafe { (Out::new(tag_out, "tag_out")?, In::text(name, "name")?) };
        let runtime = Runtime::get(runtime)?;
        let bytes = name.len();
        if bytes == 0 || bytes >= DORMOUSE_NAME_BYTES {
            let most = DORMOUSE_NAME_BYTES - 1;
            return Err(Fault::argument(format!("name has {bytes} bytes; accepted: 1 to {most}")));
        }
        check_flags(flags, DORMOUSE_TAG_WITHOUT_BACKUP, "flags", "DORMOUSE_TAG_WITHOUT_BACKUP")?;
        let has_backup = flags == 0;
        let _maker = runtime.begin_making()?;
        let id = runtime.engine.tag_create(&name, has_backup)?;
        let enters = Enters::default();
        out.write(TAGS.insert(Arc::new(Tag { runtime, id, name, has_backup, enters }))?);
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
    enter(|| {
        if tag.is_null() {
            return Ok(());
        }
        let it = TAGS.get(tag)?;
        // First, so that neither a second destroy nor an enter finds the tag.
        it.enters.close(&it.name)?;
        it.runtime.engine.tag_destroy(it.id).inspect_err(|_| it.enters.reopen())?;
        TAGS.remove(tag).map(drop)
    })
}

/// Adds every block that the calling thread allocates on the tag's device from now on to the tag, until
/// `dormouse_tag_leave`. Tags nest; a block belongs to the innermost tag of its device.
///
/// Any-thread; affects only the calling thread. A thread leaves its tags before it ends; a tag that it did
/// not leave cannot be destroyed. Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT` for more than 16 nested tags.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_enter(tag: *mut dormouse_tag_t) -> dormouse_status_t {
    enter(|| {
        let tag = TAGS.get(tag)?;
        tag.enters.count()?;
        let device = tag.runtime.heap.device();
        collect::enter_tag(tag.id.0, device).inspect_err(|_| tag.enters.uncount())
    })
}

/// Ends the calling thread's innermost `dormouse_tag_enter`, which must be of this tag.
///
/// Any-thread; affects only the calling thread. Errors: `NULL`, `HANDLE`, `STALE`, `STATE` if the
/// thread is inside no tag or its innermost tag is another one.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_leave(tag: *mut dormouse_tag_t) -> dormouse_status_t {
    enter(|| {
        let tag = TAGS.get(tag)?;
        collect::leave_tag(tag.id.0)?;
        tag.enters.uncount();
        Ok(())
    })
}

/// Adds the existing block that contains `[ptr, ptr + bytes)` to the tag. Only pages that the block
/// does not share with another block can sleep. A host block, and a GPU block allocated inside a tag
/// or a layer, shares no page; another GPU block can share its first and last page. A block without
/// a page of its own stays awake. Memory that is registered with NCCL or exported by CUDA IPC must not be
/// added, nor belong to a tag or a layer that sleeps; nothing checks it.
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
    enter(|| {
        let Tag { runtime, id, .. } = &*TAGS.get(tag)?;
        if ptr.is_null() {
            return Err(Fault::null("ptr"));
        }
        let bytes = usize_of(bytes, "bytes")?;
        let room = runtime.heap.block_at(ptr.addr())?.range.end() - ptr.addr();
        if bytes == 0 || bytes > room {
            return Err(Fault::argument(format!(
                "bytes is {bytes} at {ptr:p}, whose block ends after {room}; accepted: 1 to {room}"
            )));
        }
        match runtime.engine.tag_add(*id, ptr.addr()) {
            // A block without a page of its own stays awake.
            Ok(_) | Err(OffloadError::NoWholePage { .. }) => Ok(()),
            Err(error) => Err(error.into()),
        }
    })
}

/// Moves the tag's memory to `tier` (`DORMOUSE_TIER_HOST` or `_NVME`) and waits for the copies. The
/// addresses stay reserved, and the pages are returned to the system or the driver. On the host device
/// an access to sleeping memory wakes it; with `DORMOUSE_OFFLOAD_STRAY=stop` it ends the process. On a
/// GPU it destroys the CUDA context. Memory that is written during the call stays awake.
///
/// The copies wait for the work queued on `stream`, on the streams that the memory was allocated for, and on those that
/// `dormouse_mem_record_stream` named. Work of other streams on the memory must be complete.
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
        let Tag { runtime, id, name, has_backup, .. } = &*TAGS.get(tag)?;
        // SAFETY: the caller's promise (module docs).
        let stream = runtime.heap.stream(unsafe { RawStream::new(stream) })?;
        let tier = convert::tier(tier)?;
        if tier == Tier::Device {
            return Err(Fault::argument(
                "tier is DORMOUSE_TIER_DEVICE; accepted: DORMOUSE_TIER_HOST, DORMOUSE_TIER_NVME",
            ));
        }
        if *has_backup {
            runtime.check_open(tier)?;
        }
        let engine = &runtime.engine;
        let after = [engine.allocator().device().record(&stream)?];
        let declined = match engine.tag_sleep(*id, tier, &after) {
            Ok(outcome) => outcome.declined,
            Err(error) if error.is_declined() => Some(error.to_string()),
            Err(error) => return Err(error.into()),
        };
        let regions = engine.tag_regions(*id)?;
        let _stall = engine.wait_settled(&regions)?;
        // Memory is put to sleep for other users of the device, whom parked pages cannot serve.
        engine.allocator().device().release_parked();
        // An accepted sleep can still fail: a disk write fails, or the memory is written meanwhile.
        let (mut awake_bytes, mut asleep_bytes, mut failed) = (0, 0, None);
        for region in regions.iter().filter_map(|id| engine.region_info(*id).ok()) {
            match region.state {
                RegionState::Awake => {
                    awake_bytes += region.range.bytes;
                    failed = failed.or(region.error);
                }
                RegionState::Gone => {}
                _ => asleep_bytes += region.range.bytes,
            }
        }
        if awake_bytes == 0 && (declined.is_none() || asleep_bytes > 0) {
            return Ok(Outcome::Done);
        }
        let reason = why_awake(declined, failed.as_deref());
        Ok(if asleep_bytes == 0 {
            let reason = format!("{awake_bytes} bytes of tag {name} stay awake: {reason}");
            Outcome::Notice(status::DORMOUSE_DECLINED, reason)
        } else {
            let bytes =
                format!("{awake_bytes} bytes of tag {name} stay awake and {asleep_bytes} sleep");
            Outcome::Notice(status::DORMOUSE_PARTIAL, format!("{bytes}: {reason}"))
        })
    })
}

/// Returns why memory of a tag stays awake: its sleep was declined, or failed after it was accepted.
fn why_awake(declined: Option<String>, failed: Option<&OffloadError>) -> String {
    declined
        .or_else(|| failed.map(ToString::to_string))
        .unwrap_or_else(|| "it was written during the copy".to_owned())
}

/// Moves the tag's memory back to its original addresses and waits for the copies. All streams can
/// then use it.
///
/// Any-thread. Blocks. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for a stream of another device,
/// `OUT_OF_MEMORY`, `IO`, `CORRUPT`, `STATE` if another thread puts the memory to sleep during the call.
/// On an error, memory that could not wake stays asleep and its data is kept.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_tag_wake(
    tag: *mut dormouse_tag_t,
    stream: *mut c_void,
) -> dormouse_status_t {
    enter(|| {
        let Tag { runtime, id, .. } = &*TAGS.get(tag)?;
        // SAFETY: the caller's promise (module docs).
        let _known = runtime.heap.stream(unsafe { RawStream::new(stream) })?;
        // Waits for the bytes: any stream can use the memory afterwards.
        let woken = runtime.engine.tag_wait(*id);
        // A wake that found no room leaves the pages it did find parked.
        let _stall = woken.map_err(|error| {
            runtime.heap.allocator().device().release_parked();
            runtime.heap.fault_of(error)
        })?;
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn status_of(result: Result<(), Fault>) -> i32 {
        result.map_or_else(|fault| fault.status, |()| status::DORMOUSE_OK)
    }

    #[test]
    fn a_tag_is_closed_to_enters_or_entered_but_never_both() {
        let enters = Enters::default();
        assert_eq!(status_of(enters.count()), status::DORMOUSE_OK);
        assert_eq!(status_of(enters.close("raced")), status::DORMOUSE_ERR_BUSY);
        enters.uncount();
        assert_eq!(status_of(enters.close("raced")), status::DORMOUSE_OK);
        assert_eq!(status_of(enters.count()), status::DORMOUSE_ERR_STALE);
        assert_eq!(status_of(enters.close("raced")), status::DORMOUSE_ERR_STALE);
        enters.reopen();
        assert_eq!(status_of(enters.count()), status::DORMOUSE_OK);
    }

    #[test]
    fn memory_that_stays_awake_says_what_its_sleep_met() {
        let failed = OffloadError::ShutDown;
        let declined = Some("full".to_owned());
        assert_eq!(why_awake(declined, Some(&failed)), "full");
        assert_eq!(why_awake(None, Some(&failed)), failed.to_string());
        assert_eq!(why_awake(None, None), "it was written during the copy");
    }
}
