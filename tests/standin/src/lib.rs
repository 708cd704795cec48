//! Loads the stand-in driver into a test's process, and is its control.
//!
//! The stand-in (`tests/standin-cuda`) is a library of the driver's own name. Once [`load`] has put
//! it into the process, a `dlopen` of `libcuda.so.1` returns it, with one device unless [`run_on_two_devices`] says two.
//!
//! What is set through [`Standin`] is the whole process's: tests that set anything, and tests that
//! would notice, hold [`Standin::exclusive`] meanwhile.
#![allow(
    clippy::panic,
    clippy::unwrap_used,
    clippy::expect_used,
    reason = "a helper of tests: a test fails by panicking"
)]

mod again;
pub mod events;
mod library;

pub use again::{run_again_ahead, run_on_two_devices};

use std::ffi::{CString, c_char, c_int, c_void};
use std::sync::{Mutex, MutexGuard, PoisonError};

use library::Library;

/// What there may be too much of when everything was given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Live {
    /// Physical handles that are held or mapped.
    Handles,
    /// Their bytes.
    HandleBytes,
    /// Handles at addresses.
    Mappings,
    /// Reserved ranges.
    Reservations,
    /// Streams that were created.
    Streams,
    /// Events.
    Events,
    /// Host memory that was allocated or registered.
    PinnedBytes,
    /// Memory by `cuMemAlloc`.
    AllocatedBytes,
    /// Retains of the primary context.
    Contexts,
}

impl Live {
    /// All of them.
    pub const ALL: [Self; 9] = [
        Self::Handles,
        Self::HandleBytes,
        Self::Mappings,
        Self::Reservations,
        Self::Streams,
        Self::Events,
        Self::PinnedBytes,
        Self::AllocatedBytes,
        Self::Contexts,
    ];

    fn name(self) -> &'static str {
        match self {
            Self::Handles => "handles",
            Self::HandleBytes => "handle_bytes",
            Self::Mappings => "mappings",
            Self::Reservations => "reservations",
            Self::Streams => "streams",
            Self::Events => "events",
            Self::PinnedBytes => "pinned_bytes",
            Self::AllocatedBytes => "allocated_bytes",
            Self::Contexts => "contexts",
        }
    }
}

/// What one `cuMemUnmap` may do with several mappings side by side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnmapRuns {
    /// Unmaps them all.
    Whole = 0,
    /// Is refused.
    Refused = 1,
    /// Unmaps the first alone, and does not say so.
    First = 2,
}

macro_rules! doors {
    ($($field:ident = $symbol:literal ($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The stand-in's control functions.
        #[derive(Clone, Copy, Debug)]
        struct Doors {
            $($field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
        }

        impl Doors {
            fn of(library: Library) -> Self {
                Self {
                    // SAFETY: the library is ours: its function of that name has that type.
                    $($field: unsafe {
                        std::mem::transmute::<
                            *const c_void,
                            unsafe extern "C" fn($($argument),*) $(-> $result)?,
                        >(library.symbol($symbol))
                    },)*
                }
            }
        }
    };
}

doors! {
    fail = "standin_fail"(*const c_char, u64, u64, c_int) -> c_int;
    heal = "standin_heal"();
    calls = "standin_calls"(*const c_char) -> u64;
    calls_total = "standin_calls_total"() -> u64;
    launches = "standin_launches"(*const c_char) -> u64;
    is_accessible = "standin_is_accessible"(usize, usize) -> c_int;
    hold_events = "standin_hold_events"(c_int);
    capture_at_record = "standin_capture_at_record"(usize);
    unmap_runs = "standin_unmap_runs"(c_int) -> c_int;
    clock_ns = "standin_clock_ns"() -> u64;
    set_clock_ns = "standin_set_clock_ns"(u64);
    set_kernels_end_ns = "standin_set_kernels_end_ns"(u64);
    give_work = "standin_give_work"();
    end_works = "standin_end_works"(u64);
    ended_works = "standin_ended_works"() -> u64;
    lose = "standin_lose"(c_int);
    recover = "standin_recover"();
    live = "standin_live"(*const c_char) -> u64;
}

/// The stand-in of this process.
#[derive(Clone, Copy, Debug)]
pub struct Standin {
    library: Library,
    doors: Doors,
}

/// The stand-in to oneself. When it is dropped, faults, holds and losses are taken back.
#[derive(Debug)]
pub struct Exclusive {
    standin: Standin,
    _turn: MutexGuard<'static, ()>,
}

/// Loads the stand-in as the environment has it: 2 MiB granules and 8 GiB unless it says otherwise.
#[must_use]
pub fn load() -> Standin {
    Standin::of(library::load(None))
}

/// Loads the stand-in with these figures.
///
/// # Panics
/// Where it was loaded with others.
#[must_use]
pub fn load_with(granularity_bytes: usize, total_bytes: u64) -> Standin {
    Standin::of(library::load(Some((granularity_bytes, total_bytes))))
}

/// A C string of a name that has no zero in it.
fn text(name: &str) -> CString {
    CString::new(name).expect("a name without a zero byte")
}

impl Standin {
    fn of(library: Library) -> Self {
        Self { library, doors: Doors::of(library) }
    }

    /// Waits for its turn. While the guard lives, no other thread changes settings.
    #[must_use]
    pub fn exclusive(&self) -> Exclusive {
        static TURN: Mutex<()> = Mutex::new(());
        let turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        Exclusive { standin: *self, _turn: turn }
    }

    /// The address of one of the driver's entry points.
    ///
    /// # Panics
    /// Where the stand-in has none of that name.
    #[must_use]
    pub fn symbol(&self, name: &str) -> *const c_void {
        self.library.symbol(name)
    }

    /// Makes the `nth` call of `entry` from now (1 is the next) and the `count - 1` after it return
    /// `code`, with no effect.
    ///
    /// # Panics
    /// Where the stand-in has no such entry point, or one of the numbers is zero.
    pub fn fail(&self, entry: &str, nth: u64, count: u64, code: i32) {
        let name = text(entry);
        // SAFETY: a string with its zero.
        let status = unsafe { (self.doors.fail)(name.as_ptr(), nth, count, code) };
        assert!(status == 0, "no fault {entry}:{nth}:{count}:{code}");
    }

    /// Takes every fault back.
    pub fn heal(&self) {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.heal)() };
    }

    /// How often `entry` was called so far, refused calls as well.
    ///
    /// # Panics
    /// Where the stand-in has no such entry point.
    #[must_use]
    pub fn calls(&self, entry: &str) -> u64 {
        let name = text(entry);
        // SAFETY: a string with its zero.
        let calls = unsafe { (self.doors.calls)(name.as_ptr()) };
        assert!(calls != u64::MAX, "the stand-in has no {entry}");
        calls
    }

    /// How often all entry points together were called so far, refused calls as well.
    #[must_use]
    pub fn calls_total(&self) -> u64 {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.calls_total)() }
    }

    /// The most bytes of device memory that were ever in use at once: handles and allocations.
    #[must_use]
    pub fn peak_bytes(&self) -> u64 {
        let name = text("peak_bytes");
        // SAFETY: a string with its zero.
        unsafe { (self.doors.live)(name.as_ptr()) }
    }

    /// How many launches of `kernel` a stream has reached.
    #[must_use]
    pub fn launches(&self, kernel: &str) -> u64 {
        let name = text(kernel);
        // SAFETY: a string with its zero.
        unsafe { (self.doors.launches)(name.as_ptr()) }
    }

    /// Whether a device may write at an address now.
    #[must_use]
    pub fn is_accessible(&self, device: u32, address: usize) -> bool {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.is_accessible)(device as usize, address) == 1 }
    }

    /// Events recorded while this is set complete only when it is not set any more.
    pub fn hold_events(&self, hold: bool) {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.hold_events)(c_int::from(hold)) };
    }

    /// A capture of `stream`, a handle, begins at its next `cuEventRecord`, as if another thread had been faster.
    pub fn capture_at_record(&self, stream: usize) {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.capture_at_record)(stream) };
    }

    /// What one `cuMemUnmap` does with several mappings side by side from now on.
    pub fn unmap_runs(&self, way: UnmapRuns) {
        // SAFETY: any time, from any thread.
        let status = unsafe { (self.doors.unmap_runs)(way as c_int) };
        assert!(status == 0, "the stand-in knows no {way:?}");
    }

    /// The virtual time of this thread: calls advance it by what `STANDIN_CUDA_COSTS` says.
    #[must_use]
    pub fn clock_ns(&self) -> u64 {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.clock_ns)() }
    }

    /// Gives the device one more work, on no stream. The legacy stream ends with the last work.
    pub fn give_work(&self) {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.give_work)() };
    }

    /// With `STANDIN_CUDA_RUN_AHEAD`: works up to this number are done.
    pub fn end_works(&self, work: u64) {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.end_works)(work) };
    }

    /// The last work that somebody waited for, or that [`Self::end_works`] named.
    #[must_use]
    pub fn ended_works(&self) -> u64 {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.ended_works)() }
    }

    /// Sets the virtual time of this thread.
    pub fn set_clock_ns(&self, ns: u64) {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.set_clock_ns)(ns) };
    }

    /// Says until which virtual time kernels run, where unmapping waits for them.
    pub fn set_kernels_end_ns(&self, ns: u64) {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.set_kernels_end_ns)(ns) };
    }

    /// Loses the device: every entry point returns `code` from now on.
    pub fn lose(&self, code: i32) {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.lose)(code) };
    }

    /// Takes a loss back. What was queued meanwhile was not done.
    pub fn recover(&self) {
        // SAFETY: any time, from any thread.
        unsafe { (self.doors.recover)() };
    }

    /// How much there is of something now.
    #[must_use]
    pub fn live(&self, what: Live) -> u64 {
        let name = text(what.name());
        // SAFETY: a string with its zero.
        let count = unsafe { (self.doors.live)(name.as_ptr()) };
        assert!(count != u64::MAX, "the stand-in does not count {what:?}");
        count
    }
}

impl Drop for Exclusive {
    fn drop(&mut self) {
        self.standin.heal();
        self.standin.hold_events(false);
        self.standin.capture_at_record(0);
        self.standin.unmap_runs(UnmapRuns::Whole);
        self.standin.set_kernels_end_ns(0);
        self.standin.recover();
    }
}
