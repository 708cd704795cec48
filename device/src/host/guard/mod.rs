//! The guard: what happens when somebody touches a span (I4).
//!
//! One table of all spans of the process (`table`, `protocol`) and one `SIGSEGV` handler
//! ([`install`]) that reads it. A *write* to a frozen span cancels the sleep: the handler makes
//! the range writable, marks the span written, and the write is tried again, unnoticed by its
//! thread. Any touch of a sleeping span writes one sentence to stderr, lets the handler installed
//! before ours have its say (a Python traceback, say), and the process dies by `SIGSEGV`. A fault
//! anywhere else goes to the handler before ours as it came.
//!
//! # What it does not see
//! - A *system call* given such an address does not fault: it fails with `EFAULT` (`read` into a
//!   frozen or sleeping range, `write` from a sleeping one), and the sleep goes on.
//! - A device that writes to pages pinned before the freeze (direct I/O in flight, RDMA) is not
//!   noticed: such ranges must not be put to sleep.
//! - A handler installed after ours that does not call ours takes the guard away:
//!   [`is_installed`] tells.
//!
//! # Stack
//! The handler asks for the faulting thread's alternate stack (`SA_ONSTACK`). Threads without one
//! run it on their own; it needs less than 2 KiB.

mod handler;
mod message;
mod probe;
mod protocol;
mod spaces;
mod sync;
mod table;

#[cfg(all(test, loom))]
mod loom_model;
#[cfg(all(test, not(loom)))]
mod tests;

pub use handler::{install, is_installed};

pub(super) use protocol::Failed;
pub(super) use table::State;

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

use crate::{AddressRange, DeviceError, Operation, SpanLabel};
use spaces::Spaces;
use table::{SPANS_MAX, Slot, Table};

/// The most spans at once, of all devices of the process.
pub(super) const LIMIT: u32 = SPANS_MAX as u32;

/// All spans of the process: 1 MiB of zeroes, touched as far as it is used.
pub(crate) static TABLE: Table<SPANS_MAX> = empty();

/// A table without spans: all zeroes.
const fn empty<const N: usize>() -> Table<N> {
    Table {
        slots: [const {
            Slot {
                control: AtomicU64::new(0),
                start: AtomicUsize::new(0),
                bytes: AtomicUsize::new(0),
                name: [const { AtomicU64::new(0) }; 3],
                layer: AtomicU32::new(0),
                next_free: AtomicU32::new(0),
            }
        }; N],
        used: AtomicU32::new(0),
        entered: AtomicU64::new(0),
        free: AtomicU64::new(0),
    }
}

/// The address spaces of all host devices of the process.
static SPACES: Spaces = Spaces::new();

/// Makes the handler look at faults in `range`.
pub(super) fn add_space(range: AddressRange) -> Result<(), DeviceError> {
    if SPACES.add(range) {
        return Ok(());
    }
    Err(DeviceError::Refused {
        operation: Operation::Reserve,
        start: range.start,
        bytes: range.bytes,
        code: libc::ENOSPC,
        reason: format!("host device limit reached ({})", spaces::SPACES_MAX),
    })
}

/// Ends the spans in `range` and makes the handler pass faults in it on.
pub(super) fn remove_space(range: AddressRange) {
    TABLE.clear(range);
    SPACES.remove(range);
}

/// The label's name as text, up to its first zero byte.
fn name_bytes(label: &SpanLabel) -> &[u8] {
    let end = label.name.iter().position(|byte| *byte == 0).unwrap_or(label.name.len());
    label.name.get(..end).unwrap_or_default()
}
