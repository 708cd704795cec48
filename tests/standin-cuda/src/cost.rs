//! What calls that change the memory of the device cost on top of what they do here.
//!
//! Two clocks. A uniform cost is spun for, so that allocators can be compared by wall time. A table of
//! costs is charged to a virtual clock of the calling thread, so that a simulated step takes the same
//! time on every machine, however busy.
//!
//! Each line of the table is a name, ns per handle and ns per MiB; `#` begins a comment. Names are the
//! entry points of [`Call`], `map_after_release` (the first `cuMemMap` after a `cuMemRelease`, in
//! addition), and `unmap_waits_for_kernels` (no figures: `cuMemUnmap` begins when the kernels end).

use std::cell::Cell;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// Limit of one figure, a second: a typing error is found, not waited for.
pub(crate) const COST_NS_MAX: u64 = 1_000_000_000;
/// Limit of the table's file.
const TABLE_BYTES_MAX: u64 = 64 << 10;
const MIB: u64 = 1 << 20;
const AFTER_RELEASE: &str = "map_after_release";
const UNMAP_WAITS: &str = "unmap_waits_for_kernels";

thread_local! {
    /// The virtual time of this thread.
    static CLOCK_NS: Cell<u64> = const { Cell::new(0) };
}
/// The virtual time at which the kernels that run end. Relaxed: it guards no other memory.
static KERNELS_END_NS: AtomicU64 = AtomicU64::new(0);

/// Calls with a line in the table.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Call {
    Create,
    Map,
    SetAccess,
    Unmap,
    Release,
}

impl Call {
    const NAMES: [&str; 5] =
        ["cuMemCreate", "cuMemMap", "cuMemSetAccess", "cuMemUnmap", "cuMemRelease"];
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Cost {
    handle_ns: u64,
    mib_ns: u64,
}

impl Cost {
    fn of(self, handles: usize, bytes: usize) -> u64 {
        let mib_ns = u128::from(self.mib_ns) * bytes as u128 / u128::from(MIB);
        let handles_ns = self.handle_ns.saturating_mul(handles as u64);
        handles_ns.saturating_add(u64::try_from(mib_ns).unwrap_or(u64::MAX))
    }
}

/// The costs of a driver.
#[derive(Default)]
pub(crate) struct Costs {
    /// Spun for by all calls but `cuMemSetAccess`.
    spin: Duration,
    calls: [Cost; Call::NAMES.len()],
    after_release: Cost,
    unmap_waits: bool,
    /// Whether the next map is the first after a release. Relaxed: one of the maps pays.
    has_released: AtomicBool,
}

impl Costs {
    pub(crate) fn new(spin: Duration) -> Self {
        Self { spin, ..Self::default() }
    }

    /// Adds the table in a file.
    pub(crate) fn read_table(&mut self, path: &Path) -> Result<(), String> {
        let seen = path.display();
        let bytes = std::fs::metadata(path).map_err(|error| format!("{seen}: {error}"))?.len();
        if bytes > TABLE_BYTES_MAX {
            return Err(format!("{seen}: {bytes} bytes; accepted are {TABLE_BYTES_MAX}"));
        }
        let text = std::fs::read_to_string(path).map_err(|error| format!("{seen}: {error}"))?;
        self.parse(&text).map_err(|(line, why)| format!("{seen}:{line}: {why}"))
    }

    /// Returns the number of the refused line, and why it is refused.
    fn parse(&mut self, text: &str) -> Result<(), (usize, String)> {
        for (at, line) in text.lines().enumerate() {
            let words = line.split('#').next().unwrap_or_default();
            let words: Vec<&str> = words.split_whitespace().collect();
            self.take(&words).map_err(|why| (at + 1, why))?;
        }
        Ok(())
    }

    fn take(&mut self, words: &[&str]) -> Result<(), String> {
        let figure = |word: &str| {
            word.parse()
                .ok()
                .filter(|ns| *ns <= COST_NS_MAX)
                .ok_or_else(|| format!("{word:?}: accepted are 0 to {COST_NS_MAX} ns"))
        };
        match *words {
            [] => {}
            [UNMAP_WAITS] => self.unmap_waits = true,
            [name, handle, mib] => {
                let cost = Cost { handle_ns: figure(handle)?, mib_ns: figure(mib)? };
                let known = Call::NAMES.iter().position(|known| *known == name);
                match known {
                    Some(call) => self.calls[call] = cost,
                    None if name == AFTER_RELEASE => self.after_release = cost,
                    None => {
                        let names = Call::NAMES.join(", ");
                        return Err(format!("{name:?}: accepted are {names}, {AFTER_RELEASE}"));
                    }
                }
            }
            _ => return Err(format!("{words:?}: accepted are a name, ns per handle, ns per MiB")),
        }
        Ok(())
    }

    /// Spins for the uniform cost of one call, before it takes any lock.
    pub(crate) fn spin(&self) {
        if self.spin.is_zero() {
            return;
        }
        let begin = Instant::now();
        while begin.elapsed() < self.spin {
            std::hint::spin_loop();
        }
    }

    /// Charges a call on `handles` of `bytes` in all to this thread's clock, before it takes any lock.
    pub(crate) fn charge(&self, call: Call, handles: usize, bytes: usize) {
        let mut now_ns = CLOCK_NS.get();
        if call == Call::Unmap && self.unmap_waits {
            now_ns = now_ns.max(KERNELS_END_NS.load(Ordering::Relaxed));
        }
        if call == Call::Release {
            self.has_released.store(true, Ordering::Relaxed);
        }
        if call == Call::Map && self.has_released.swap(false, Ordering::Relaxed) {
            now_ns = now_ns.saturating_add(self.after_release.of(handles, bytes));
        }
        CLOCK_NS.set(now_ns.saturating_add(self.calls[call as usize].of(handles, bytes)));
    }
}

/// The virtual time of this thread.
pub(crate) fn clock_ns() -> u64 {
    CLOCK_NS.get()
}

/// Sets the virtual time of this thread.
pub(crate) fn set_clock_ns(ns: u64) {
    CLOCK_NS.set(ns);
}

/// Says until when kernels run.
pub(crate) fn set_kernels_end_ns(ns: u64) {
    KERNELS_END_NS.store(ns, Ordering::Relaxed);
}
