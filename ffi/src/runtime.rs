//! Runtimes: one device with its tiers, made from the configuration.
//!
//! - **R1** At most one runtime is live per device; making and ending one are serialised.
//! - **R2** A runtime with live nodes, tags or stash ids is not ended.

mod create;
mod report;

use std::ffi::c_void;
use std::path::Path;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use dormouse_alloc::AllocError;
use dormouse_device::Fill;
use dormouse_offload::{StashId, Tier};
use dormouse_timeline::{Process, html, pftrace};

pub(crate) use create::Options;
pub(crate) use report::stats_of;

use crate::abi::v1::structs as c;
use crate::boundary::{In, RawStream};
use crate::device::AnyStream;
use crate::fault::Fault;
use crate::handles::{Kind, Table};
use crate::heap::{Heap, HeapEngine};
use crate::params::{self, Config, Key};
use crate::prefix::Prefix;
use crate::tag::Tag;
use crate::{convert, log, status};

static RUNTIMES: Table<Runtime> = Table::new(Kind::Runtime);
/// Serialises create and destroy (R1).
static MAKING: Mutex<()> = Mutex::new(());

/// One device with its tiers.
#[derive(Debug)]
pub(crate) struct Runtime {
    heap: &'static Heap,
    engine: Arc<HeapEngine>,
    config: Arc<Config>,
    /// Reasons why a tier is unavailable, separated by "; ".
    unavailable_reason: String,
}

impl Runtime {
    fn one_at_a_time() -> MutexGuard<'static, ()> {
        MAKING.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The runtime `handle` names.
    pub(crate) fn get(handle: *mut c::dormouse_runtime_t) -> Result<Arc<Self>, Fault> {
        RUNTIMES.get(handle)
    }

    /// Ends a runtime nobody depends on (R2).
    pub(crate) fn destroy(handle: *mut c::dormouse_runtime_t) -> Result<(), Fault> {
        if handle.is_null() {
            return Ok(());
        }
        let _one_at_a_time = Self::one_at_a_time();
        // Looked at before the table is locked: nodes and tags have tables of their own.
        let depends = RUNTIMES.get(handle)?.dependents();
        let runtime = RUNTIMES.remove(handle, |_| match depends {
            None => Ok(()),
            Some(names) => Err(Fault::new(
                status::DORMOUSE_ERR_BUSY,
                format!("the runtime still has {names}; destroy them first"),
            )),
        })?;
        runtime.engine.shutdown();
        runtime.heap.set_engine(None);
        Ok(())
    }

    /// What still depends on this runtime, named; `None` for nothing.
    fn dependents(self: &Arc<Self>) -> Option<String> {
        let mut names = Prefix::labels_of(self);
        names.extend(Tag::labels_of(self));
        match self.engine.stash_count() {
            0 => {}
            1 => names.push("1 stash id".to_owned()),
            count => names.push(format!("{count} stash ids")),
        }
        (!names.is_empty()).then(|| names.join(", "))
    }

    /// The engine.
    pub(crate) fn engine(&self) -> &Arc<HeapEngine> {
        &self.engine
    }

    /// The device's stream for the caller's; one the device has not is turned away.
    pub(crate) fn stream(&self, raw: RawStream) -> Result<AnyStream, Fault> {
        self.heap.stream(raw)
    }

    /// `dormouse_mem_alloc`.
    pub(crate) fn mem_alloc(
        &self,
        bytes: u64,
        align: u64,
        stream: RawStream,
    ) -> Result<*mut c_void, Fault> {
        let _known = self.stream(stream)?;
        let bytes = usize_of(bytes, "bytes")?;
        let align = usize_of(align.max(1), "align")?;
        let block = self.heap.allocate(bytes, align, stream.key(), Fill::Any)?;
        Ok(std::ptr::with_exposed_provenance_mut(block.range.start))
    }

    /// `dormouse_mem_free`.
    pub(crate) fn mem_free(&self, pointer: *mut c_void, stream: RawStream) -> Result<(), Fault> {
        if pointer.is_null() {
            return Ok(());
        }
        let _known = self.stream(stream)?;
        self.heap.free(pointer.addr(), stream.key())
    }

    /// `dormouse_mem_record_stream`.
    pub(crate) fn mem_record_stream(
        &self,
        pointer: *mut c_void,
        stream: RawStream,
    ) -> Result<(), Fault> {
        let _known = self.stream(stream)?;
        if pointer.is_null() {
            return Err(Fault::null("ptr"));
        }
        let block = self.block_at(pointer.addr())?;
        Ok(self.heap.allocator().record_stream(block.range.start, stream.key())?)
    }

    /// The live block around `address`.
    pub(crate) fn block_at(&self, address: usize) -> Result<dormouse_alloc::BlockInfo, Fault> {
        let block = self.heap.allocator().lookup(address);
        block.ok_or_else(|| AllocError::NotABlock { address }.into())
    }

    /// `dormouse_runtime_set_budget`.
    pub(crate) fn set_budget(&self, tier: i32, bytes: u64) -> Result<(), Fault> {
        let tier = convert::tier(tier)?;
        if tier == Tier::Device && bytes == 0 {
            return Err(Fault::argument(
                "bytes is 0 for the device tier; at least 1 is accepted there",
            ));
        }
        if tier == Tier::Nvme && self.config.path(Key::NvmeDir).is_none() && bytes > 0 {
            return Err(self.closed(tier));
        }
        self.engine.set_tier_budget(tier, bytes)?;
        tracing::info!(target: "ffi", ?tier, bytes, "tier budget set");
        Ok(())
    }

    /// Turns a tier that takes nothing away, saying why.
    pub(crate) fn check_open(&self, tier: Tier) -> Result<(), Fault> {
        let budget = self.engine.stats().tiers.get(tier.index()).map(|tier| tier.budget_bytes);
        if budget.is_some_and(|bytes| bytes > 0) { Ok(()) } else { Err(self.closed(tier)) }
    }

    fn closed(&self, tier: Tier) -> Fault {
        let why = if self.unavailable_reason.is_empty() {
            "its budget is 0"
        } else {
            &self.unavailable_reason
        };
        Fault::new(status::DORMOUSE_ERR_TIER, format!("the {tier:?} tier is closed ({why})"))
    }

    /// `dormouse_runtime_trim`.
    pub(crate) fn trim(&self) -> u64 {
        self.heap.allocator().trim(u64::MAX)
    }

    /// Sets every peak to its current value.
    pub(crate) fn reset_peaks(&self) {
        self.heap.allocator().reset_peaks();
        self.engine.reset_peaks();
    }

    /// `dormouse_stash_put`.
    ///
    /// # Safety
    /// `pointer` is NULL or readable for `bytes`.
    pub(crate) unsafe fn stash_put(
        &self,
        pointer: *const c_void,
        bytes: u64,
        storage_key: u64,
        stream: RawStream,
    ) -> Result<Stashed, Fault> {
        let stream = self.stream(stream)?;
        // SAFETY: the caller's contract; the slice only checks NULL and length.
        unsafe {
            In::slice(pointer.cast::<u8>(), usize_of(bytes, "bytes")?.max(1), "ptr")?;
        }
        if bytes == 0 {
            return Err(Fault::argument("bytes is 0; at least 1 is accepted"));
        }
        // SAFETY: the caller's contract; NULL was turned away.
        let put =
            unsafe { self.engine.stash_put(pointer.addr(), bytes as usize, storage_key, &stream) };
        match put {
            Ok(StashId(id)) => Ok(Stashed::Kept(id)),
            Err(error) if error.is_declined() => {
                tracing::info!(target: "offload", bytes, storage_key, reason = %error, "stash declined");
                Ok(Stashed::Declined(error.to_string()))
            }
            Err(error) => Err(error.into()),
        }
    }

    /// `dormouse_stash_get`.
    ///
    /// # Safety
    /// `pointer` is NULL or writable for the stash's bytes.
    pub(crate) unsafe fn stash_get(
        &self,
        id: u64,
        pointer: *mut c_void,
        stream: RawStream,
    ) -> Result<(), Fault> {
        let stream = self.stream(stream)?;
        if pointer.is_null() {
            return Err(Fault::null("dst"));
        }
        // SAFETY: the caller's contract; NULL was turned away.
        let _bytes = unsafe { self.engine.stash_get(StashId(id), pointer.addr(), &stream) }?;
        Ok(())
    }

    /// `dormouse_stash_drop`.
    pub(crate) fn stash_drop(&self, id: u64) -> Result<(), Fault> {
        Ok(self.engine.stash_drop(StashId(id))?)
    }
}

/// `dormouse_runtime_dump`.
pub(crate) fn dump(
    runtime: *mut c::dormouse_runtime_t,
    format: i32,
    path: &str,
) -> Result<(), Fault> {
    let path = Path::new(path);
    let write = match format {
        c::DORMOUSE_FORMAT_PFTRACE => pftrace::write,
        c::DORMOUSE_FORMAT_HTML => html::write,
        c::DORMOUSE_FORMAT_CONFIG => return params::dump_to(path),
        _ => {
            return Err(Fault::argument(format!(
                "format is {format}; accepted: {} (pftrace), {} (html), {} (config)",
                c::DORMOUSE_FORMAT_PFTRACE,
                c::DORMOUSE_FORMAT_HTML,
                c::DORMOUSE_FORMAT_CONFIG
            )));
        }
    };
    let snapshot = Runtime::get(runtime)?.heap.timeline().snapshot();
    let rank = log::rank().and_then(|rank| rank.try_into().ok()).unwrap_or(0);
    let process = Process::current(program_name(), rank);
    params::replace(path, |file| write(&snapshot, &process, file))
}

/// Whether the flags of `dormouse_runtime_get_stats` reset the peaks.
pub(crate) fn stats_flags(flags: u64) -> Result<bool, Fault> {
    if flags & !c::DORMOUSE_STATS_RESET_PEAKS != 0 {
        return Err(Fault::argument(format!(
            "flags is {flags:#x}; accepted: 0, DORMOUSE_STATS_RESET_PEAKS ({:#x})",
            c::DORMOUSE_STATS_RESET_PEAKS
        )));
    }
    Ok(flags != 0)
}

/// How `dormouse_stash_put` ended.
#[derive(Debug)]
pub(crate) enum Stashed {
    /// Under this id.
    Kept(u64),
    /// Tiers full.
    Declined(String),
}

/// A length from C on this machine.
pub(crate) fn usize_of(value: u64, name: &str) -> Result<usize, Fault> {
    usize::try_from(value).ok().filter(|value| isize::try_from(*value).is_ok()).ok_or_else(|| {
        Fault::argument(format!("{name} is {value}; at most {} is accepted", isize::MAX))
    })
}

/// What the process calls itself, for the title of a dump.
fn program_name() -> String {
    let name = std::fs::read_to_string("/proc/self/comm").unwrap_or_default();
    let name = name.trim();
    if name.is_empty() { "process".to_owned() } else { name.to_owned() }
}
