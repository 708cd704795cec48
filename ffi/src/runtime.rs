//! Runtimes: one device with its tiers, created from the configuration.
//!
//! - **R1** At most one runtime is live per device. Creation and destruction are serialised.
//! - **R2** A runtime with live prefixes, tags or stash ids is not destroyed.

pub(crate) mod create;
pub(crate) mod report;

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
    /// Reasons why a tier is unavailable, separated by "; ".
    unavailable_reason: String,
}

impl Runtime {
    /// Locks out other creations and destructions (R1).
    pub(crate) fn one_at_a_time() -> MutexGuard<'static, ()> {
        static CREATING: Mutex<()> = Mutex::new(());
        CREATING.lock()
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
