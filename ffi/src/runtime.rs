//! Runtimes: one device with its tiers, created from the configuration.
//!
//! - **R1** At most one runtime is live per device. Creation and destruction are serialised.
//! - **R2** A runtime with live prefixes, tags or stash ids is not destroyed, nor while a call makes one.

pub(crate) mod create;
pub(crate) mod report;
#[cfg(test)]
mod tests;

use std::sync::Arc;

use dormouse_offload::{Rescuer, Tier};
use parking_lot::{Mutex, MutexGuard};

use crate::abi::c;
use crate::fault::Fault;
use crate::handles::{Kind, Table};
use crate::heap::{Heap, HeapEngine};
use crate::live::Publisher;
use crate::params::Config;
use crate::status;

pub(crate) static RUNTIMES: Table<Runtime> = Table::new(Kind::Runtime);

/// One device with its tiers.
#[derive(Debug)]
pub(crate) struct Runtime {
    pub(crate) heap: &'static Heap,
    pub(crate) engine: Arc<HeapEngine>,
    pub(crate) config: Arc<Config>,
    /// The writer of the live figures, in at most one live runtime of the process.
    pub(crate) live: Mutex<Option<Publisher>>,
    /// The thread that serves stray accesses, on the host device.
    pub(crate) rescuer: Mutex<Option<Rescuer>>,
    /// Calls that make something of it.
    pub(crate) makers: Makers,
    /// Reasons why a tier is unavailable, separated by "; ".
    unavailable_reason: String,
}

/// The calls that are making a prefix, a tag or a stash id of a runtime.
#[derive(Debug, Default)]
pub(crate) struct Makers(Mutex<MakersState>);

#[derive(Debug, Default)]
struct MakersState {
    count: usize,
    /// The runtime is destroyed.
    is_closed: bool,
}

impl Makers {
    /// Lets no call make anything from now on, unless one does or `dependents` names something that was made (R2).
    pub(crate) fn close(&self, dependents: impl FnOnce() -> Vec<String>) -> Result<(), Fault> {
        let mut state = self.0.lock();
        if state.is_closed {
            return Err(Kind::Runtime.stale());
        }
        let mut names = dependents();
        match state.count {
            0 => {}
            1 => names.push("1 call that makes a prefix, a tag or a stash id".to_owned()),
            count => names.push(format!("{count} calls that make prefixes, tags or stash ids")),
        }
        if names.is_empty() {
            state.is_closed = true;
            return Ok(());
        }
        let names = names.join(", ");
        Err(Fault::new(
            status::DORMOUSE_ERR_BUSY,
            format!("the runtime still has {names}; destroy them first"),
        ))
    }
}

/// A call that makes something, until it is dropped: what it has made is known by then.
#[derive(Debug)]
pub(crate) struct Maker(Arc<Runtime>);

impl Drop for Maker {
    fn drop(&mut self) {
        self.0.makers.0.lock().count -= 1;
    }
}

impl Runtime {
    /// Locks out other creations and destructions (R1).
    pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
        static CREATING: Mutex<()> = Mutex::new(());
        CREATING.lock()
    }

    /// Begins to make a prefix, a tag or a stash id (R2).
    pub(crate) fn begin_making(self: &Arc<Self>) -> Result<Maker, Fault> {
        let mut state = self.makers.0.lock();
        if state.is_closed {
            return Err(Kind::Runtime.stale());
        }
        state.count += 1;
        Ok(Maker(Arc::clone(self)))
    }

    pub(crate) fn get(handle: *mut c::dormouse_runtime_t) -> Result<Arc<Self>, Fault> {
        RUNTIMES.get(handle)
    }

    /// Refuses a tier that is closed.
    pub(crate) fn check_open(&self, tier: Tier) -> Result<(), Fault> {
        let budget = self.engine.stats().tiers.get(tier.index()).map(|tier| tier.budget_bytes);
        if budget.is_some_and(|bytes| bytes > 0) { Ok(()) } else { Err(self.closed(tier)) }
    }

    /// Returns the error for a closed tier.
    pub(crate) fn closed(&self, tier: Tier) -> Fault {
        let reason = match self.unavailable_reason.as_str() {
            "" => "its budget is 0",
            reason => reason,
        };
        Fault::new(status::DORMOUSE_ERR_TIER, format!("the {tier:?} tier is closed ({reason})"))
    }
}
