//! Tags: a user's name for memory that sleeps and wakes together.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use dormouse_device::Device;
use dormouse_offload::RegionState;
use dormouse_offload::{OffloadError, TagId, Tier};

use crate::abi::v1::structs as c;
use crate::boundary::{Outcome, RawStream};
use crate::fault::Fault;
use crate::handles::{Kind, Table};
use crate::runtime::{Runtime, usize_of};
use crate::{collect, convert, status};

static TAGS: Table<Tag> = Table::new(Kind::Tag);

/// A tag of one runtime.
#[derive(Debug)]
pub(crate) struct Tag {
    runtime: Arc<Runtime>,
    id: TagId,
    name: String,
    backup: bool,
    /// Threads between enter and leave, nested ones counted again.
    inside: AtomicUsize,
}

impl Tag {
    /// Makes a tag and gives its handle.
    pub(crate) fn create(
        runtime: *mut c::dormouse_runtime_t,
        name: &str,
        flags: u64,
    ) -> Result<*mut c::dormouse_tag_t, Fault> {
        let runtime = Runtime::get(runtime)?;
        if name.is_empty() || name.len() >= c::DORMOUSE_NAME_BYTES {
            return Err(Fault::argument(format!(
                "name has {} bytes; 1 to {} are accepted",
                name.len(),
                c::DORMOUSE_NAME_BYTES - 1
            )));
        }
        if flags & !c::DORMOUSE_TAG_WITHOUT_BACKUP != 0 {
            return Err(Fault::argument(format!(
                "flags is {flags:#x}; 0 and DORMOUSE_TAG_WITHOUT_BACKUP ({:#x}) are accepted",
                c::DORMOUSE_TAG_WITHOUT_BACKUP
            )));
        }
        let backup = flags & c::DORMOUSE_TAG_WITHOUT_BACKUP == 0;
        let id = runtime.engine().tag_create(name, backup)?;
        let inside = AtomicUsize::new(0);
        TAGS.insert(Arc::new(Self { runtime, id, name: name.to_owned(), backup, inside }))
    }

    /// The tag `handle` names.
    pub(crate) fn get(handle: *mut c::dormouse_tag_t) -> Result<Arc<Self>, Fault> {
        TAGS.get(handle)
    }

    /// Wakes what sleeps and ends the tag.
    pub(crate) fn destroy(handle: *mut c::dormouse_tag_t) -> Result<(), Fault> {
        if handle.is_null() {
            return Ok(());
        }
        let tag = TAGS.get(handle)?;
        match tag.inside.load(Ordering::Acquire) {
            0 => {}
            inside => {
                return Err(Fault::new(
                    status::DORMOUSE_ERR_BUSY,
                    format!("tag {} was entered {inside} times and not left", tag.name),
                ));
            }
        }
        // The name goes first: two destroys at once end in one of them finding it gone.
        tag.runtime.engine().tag_destroy(tag.id)?;
        TAGS.remove(handle, |_| Ok(())).map(drop)
    }

    /// What `runtime` still has, named.
    pub(crate) fn labels_of(runtime: &Arc<Runtime>) -> Vec<String> {
        let live = TAGS.live().into_iter().filter(|tag| Arc::ptr_eq(&tag.runtime, runtime));
        live.map(|tag| format!("tag {}", tag.name)).collect()
    }

    /// The calling thread's new blocks belong to the tag from here on.
    pub(crate) fn enter(handle: *mut c::dormouse_tag_t) -> Result<(), Fault> {
        let tag = TAGS.get(handle)?;
        collect::enter_tag(tag.id.0)?;
        // Release pairs with the acquire in `destroy`.
        tag.inside.fetch_add(1, Ordering::Release);
        Ok(())
    }

    /// Ends the innermost `enter`, which must have been of this tag.
    pub(crate) fn leave(handle: *mut c::dormouse_tag_t) -> Result<(), Fault> {
        let tag = TAGS.get(handle)?;
        collect::leave_tag(tag.id.0)?;
        tag.inside.fetch_sub(1, Ordering::Release);
        Ok(())
    }

    /// Puts the block around `[pointer, pointer + bytes)` under the tag.
    pub(crate) fn add(&self, pointer: *mut c_void, bytes: u64) -> Result<(), Fault> {
        if pointer.is_null() {
            return Err(Fault::null("ptr"));
        }
        let bytes = usize_of(bytes, "bytes")?;
        let block = self.runtime.block_at(pointer.addr())?;
        let room = block.range.end() - pointer.addr();
        if bytes == 0 || bytes > room {
            return Err(Fault::argument(format!(
                "bytes is {bytes} at {pointer:p}, whose block ends after {room}; 1 to {room} are \
                 accepted"
            )));
        }
        match self.runtime.engine().tag_add(self.id, pointer.addr()) {
            // Small, and packed with others: it stays awake.
            Ok(_) | Err(OffloadError::NoWholePage { .. }) => {}
            Err(refused) => return Err(refused.into()),
        }
        Ok(())
    }

    /// Puts everything under the tag to sleep and waits until it is.
    pub(crate) fn sleep(&self, tier: i32, stream: RawStream) -> Result<Outcome, Fault> {
        let stream = self.runtime.stream(stream)?;
        let tier = convert::tier(tier)?;
        if tier == Tier::Device {
            return Err(Fault::argument(
                "tier is DORMOUSE_TIER_DEVICE; DORMOUSE_TIER_HOST and DORMOUSE_TIER_NVME are \
                 accepted",
            ));
        }
        let engine = self.runtime.engine();
        if self.backup {
            self.runtime.check_open(tier)?;
        }
        let after = [engine.allocator().device().record(&stream)?];
        let declined = match engine.tag_sleep(self.id, tier, &after) {
            Ok(outcome) => outcome.declined,
            Err(error) if error.is_declined() => Some(error.to_string()),
            Err(error) => return Err(error.into()),
        };
        let regions = engine.tag_regions(self.id)?;
        let _stall = engine.wait_settled(&regions)?;
        // An accepted sleep can still fail: a disk write fails, or the memory is written meanwhile.
        let states = regions.iter().filter_map(|id| engine.region_info(*id).ok());
        let (mut awake_bytes, mut asleep_bytes) = (0_u64, 0_u64);
        for region in states {
            match region.state {
                RegionState::Awake => awake_bytes += region.range.bytes as u64,
                RegionState::Gone => {}
                _ => asleep_bytes += region.range.bytes as u64,
            }
        }
        if awake_bytes == 0 && (declined.is_none() || asleep_bytes > 0) {
            return Ok(Outcome::Done);
        }
        let reason = declined
            .or_else(|| engine.stats().nvme_stopped)
            .unwrap_or_else(|| "it was written during the copy".to_owned());
        let name = &self.name;
        Ok(if asleep_bytes == 0 {
            Outcome::Declined(format!("{awake_bytes} bytes of tag {name} stay awake: {reason}"))
        } else {
            Outcome::Partial(format!(
                "{awake_bytes} bytes of tag {name} stay awake and {asleep_bytes} bytes sleep: {reason}"
            ))
        })
    }

    /// Wakes everything under the tag and waits until its bytes are there: streams that nobody named
    /// may use it then.
    pub(crate) fn wake(&self, stream: RawStream) -> Result<(), Fault> {
        let _known = self.runtime.stream(stream)?;
        let _stall = self.runtime.engine().tag_wait(self.id)?;
        Ok(())
    }
}
