//! Prefixes: one shared prefix across phases A, B and C.

use std::sync::Arc;

use dormouse_offload as offload;

use crate::device::AnyDevice;
use crate::handles::{Exclusive, Kind, Table};
use crate::runtime::Runtime;

pub(crate) static PREFIXES: Table<Prefix> = Table::new(Kind::Prefix);

/// A prefix of one runtime.
#[derive(Debug)]
pub(crate) struct Prefix {
    pub(crate) runtime: Arc<Runtime>,
    pub(crate) label: String,
    pub(crate) state: Exclusive<PrefixState>,
}

#[derive(Debug)]
pub(crate) struct PrefixState {
    pub(crate) prefix: offload::Prefix<AnyDevice>,
    /// Number of declared storages that can sleep.
    pub(crate) accepted_count: u64,
    pub(crate) refused_count: u64,
}

impl Prefix {
    /// Returns the names of the live prefixes of `runtime`.
    pub(crate) fn labels_of(runtime: &Arc<Runtime>) -> impl Iterator<Item = String> {
        let live = PREFIXES.live().into_iter();
        let live = live.filter(|prefix| Arc::ptr_eq(&prefix.runtime, runtime));
        live.map(|prefix| prefix.label.clone())
    }

    /// Notifies the prefix that a microbatch of its plan begins, with `after` more to come. A prefix in
    /// use or in error is not notified; its next mark returns the error.
    pub(crate) fn microbatch(&self, after: u32) {
        let _best_effort = self.state.with(|state| {
            state.prefix.microbatch(after);
            Ok(())
        });
    }

    /// Starts to wake the last layers. Best effort, as [`Self::microbatch`]: a layer that does not wake
    /// now wakes at the mark that needs it.
    pub(crate) fn begin_wake(&self) {
        let _best_effort = self.state.with(|state| Ok(state.prefix.begin_wake()?));
    }
}
