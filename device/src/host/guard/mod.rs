//! The guard: handles accesses to spans (I4).
//!
//! It consists of a table of all spans of the process (`table`, `protocol`) and a `SIGSEGV` handler
//! ([`install`]). A *write* to a frozen span cancels the sleep: the handler makes the range writable and
//! marks the span as written, and the write is repeated. Any access to an asleep span is *stray*:
//! - If the process has a [`Listener`], the thread waits in the handler while the listener wakes the span. It then
//!   repeats its access, a read or a write, and goes on (`channel`, `rescue`). A span that is waking already is
//!   waited for in the same way.
//! - Otherwise, or if the span does not wake, the handler writes a message to stderr and calls the previous
//!   handler (for example for a Python traceback), and the process ends by `SIGSEGV`. So do stray accesses of a
//!   forked child and of a thread of the runtime ([`own_thread`]).
//!
//! Other faults are passed to the previous handler unchanged, with the effects of its own action's flags and mask
//! (`previous`).
//!
//! # Limits
//! - A *system call* with such an address does not fault: it fails with `EFAULT` (`read` into a frozen or
//!   asleep range, `write` from an asleep one), and the sleep continues.
//! - Device writes to pages pinned before the freeze (direct I/O in flight, RDMA) are not detected: such
//!   ranges must not be put to sleep.
//! - A handler installed later comes first, until the next freeze: it finds the handler displaced and installs it again,
//!   in front of the later one. From `LEVELS_MAX` times on it fails, so nothing falls asleep.
//!
//! The handler runs on the thread's alternate stack (`SA_ONSTACK`), if there is one and the previous handler did. It
//! needs less than 3 KiB.

mod channel;
mod handler;
mod message;
mod own_threads;
mod previous;
mod probe;
mod protocol;
mod rescue;
mod spaces;
pub(super) mod sync;
mod table;

#[cfg(all(test, loom))]
mod loom_channel;
#[cfg(all(test, loom))]
mod loom_model;
#[cfg(all(test, not(loom)))]
mod tests;

pub(super) use handler::keep_installed;
pub use handler::{install, is_installed};
pub use own_threads::{OwnThread, own_thread};
pub use rescue::{Listener, RESCUES_MAX, Request, Stopper, listen, note_progress};

pub(super) use protocol::Failed;
pub(super) use table::State;

use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize};

use crate::{AddressRange, DeviceError, Operation, SpanLabel};
use spaces::Spaces;
use table::{SPANS_MAX, Slot, Table};

/// Limit of the spans of all devices of the process.
pub(super) const LIMIT: u32 = SPANS_MAX as u32;

/// All spans of the process: 1 MiB of zeroes, used sparsely.
pub(crate) static TABLE: Table<SPANS_MAX> = empty();

/// An empty table, all zeroes.
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

/// Makes the handler serve faults in `range`.
pub(super) fn add_space(range: AddressRange) -> Result<(), DeviceError> {
    if SPACES.add(range) {
        return Ok(());
    }
    let reason = format!("host device limit reached ({})", spaces::SPACES_MAX);
    Err(DeviceError::refused(Operation::Reserve, range, libc::ENOSPC, reason))
}

/// Makes the handler pass on faults from `end` on in the space that begins at `start`.
pub(super) fn shrink_space(start: usize, end: usize) {
    SPACES.shrink(start, end);
}

/// Removes the spans in `range`; the handler passes faults in it on.
pub(super) fn remove_space(range: AddressRange) {
    TABLE.clear(range);
    SPACES.remove(range);
}

/// Returns the label's name up to its first zero byte.
fn name_bytes(label: &SpanLabel) -> &[u8] {
    let end = label.name.iter().position(|byte| *byte == 0).unwrap_or(label.name.len());
    label.name.get(..end).unwrap_or_default()
}
