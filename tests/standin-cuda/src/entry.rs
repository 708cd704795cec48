//! What every entry point does first, and how it takes its arguments.

use std::cell::Cell;
use std::ffi::c_int;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::code::Code;
use crate::table::Entry;
use crate::{context, faults, state};

thread_local! {
    /// Whether a host function runs on this thread. No destructor, so that it costs nothing at exit.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// What must be there before an entry point does anything.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Needs {
    /// Nothing: it answers even after a loss.
    Nothing,
    /// A driver that is not lost; `cuInit` itself makes it.
    Driver,
    /// `cuInit`.
    Init,
    /// A current context as well.
    Context,
}

/// Declares an entry point: its body runs behind [`enter`].
macro_rules! entry {
    ($needs:ident, fn $name:ident($($argument:ident: $kind:ty),* $(,)?) $body:block) => {
        #[doc = concat!("The driver's `", stringify!($name), "`.")]
        #[unsafe(no_mangle)]
        #[allow(non_snake_case, reason = "the driver's name")]
        pub(crate) extern "C" fn $name($($argument: $kind),*) -> ::std::ffi::c_int {
            $crate::entry::enter(
                $crate::table::Entry::$name,
                $crate::entry::Needs::$needs,
                move || $body,
            )
        }
    };
}
pub(crate) use entry;

/// Counts the call, applies faults, and does `body` if the driver's state allows it (D5).
pub(crate) fn enter(entry: Entry, needs: Needs, body: impl FnOnce() -> Result<(), Code>) -> c_int {
    let checked = || {
        faults::count(entry)?;
        admit(needs)?;
        body()
    };
    match catch_unwind(AssertUnwindSafe(checked)) {
        Ok(Ok(())) => Code::SUCCESS.0,
        Ok(Err(code)) => code.0,
        Err(_) => Code::UNKNOWN.0,
    }
}

fn admit(needs: Needs) -> Result<(), Code> {
    if needs == Needs::Nothing {
        return Ok(());
    }
    if IN_HOST_FUNCTION.get() {
        return Err(Code::NOT_PERMITTED);
    }
    if needs != Needs::Driver {
        state::driver()?;
    }
    state::check_not_lost()?;
    if needs == Needs::Context && context::current().is_none() {
        return Err(Code::INVALID_CONTEXT);
    }
    Ok(())
}

/// Runs a host function: the driver may not be called meanwhile.
pub(crate) fn in_host_function(function: impl FnOnce()) {
    IN_HOST_FUNCTION.set(true);
    function();
    IN_HOST_FUNCTION.set(false);
}

/// Where an entry point leaves what it found: null, or valid for one write, as the driver asks of
/// its callers. Only they make one.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct Out<T>(*mut T);

impl<T: Copy> Out<T> {
    /// What is there, of a place that is both handed over and left; `T` allows any bytes.
    pub(crate) fn get(self) -> Result<T, Code> {
        In(self.0.cast_const()).get()
    }

    /// Leaves `value`; a null is refused.
    pub(crate) fn put(self, value: T) -> Result<(), Code> {
        self.check()?;
        self.put_if_asked(value);
        Ok(())
    }

    /// Refuses a null: for what must not be done if its outcome cannot be told (D2).
    pub(crate) fn check(self) -> Result<(), Code> {
        if self.0.is_null() { Err(Code::INVALID_VALUE) } else { Ok(()) }
    }

    /// Leaves `value` where the caller wants it.
    pub(crate) fn put_if_asked(self, value: T) {
        if !self.0.is_null() {
            // SAFETY: not null, so valid by this type's contract; callers' memory may be unaligned.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// The place as bare memory, for values whose type only the call says.
    pub(crate) fn cast<U>(self) -> Out<U> {
        Out(self.0.cast())
    }

    /// The place `count` values further on.
    pub(crate) fn at(self, count: usize) -> Self {
        Self(self.0.wrapping_add(count))
    }
}

/// What a caller hands over by address: null, or valid for reads, as the driver asks.
#[repr(transparent)]
#[derive(Clone, Copy)]
pub(crate) struct In<T>(*const T);

impl<T: Copy> In<T> {
    /// The value; a null is refused. `T` allows any bytes.
    pub(crate) fn get(self) -> Result<T, Code> {
        self.get_at(0)
    }

    /// The value at `index` of an array.
    pub(crate) fn get_at(self, index: usize) -> Result<T, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so valid by this type's contract.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }

    /// Whether nothing was handed over.
    pub(crate) fn is_null(self) -> bool {
        self.0.is_null()
    }
}

impl In<std::ffi::c_char> {
    /// The string; a null, or one that is not UTF-8, is refused.
    pub(crate) fn text(self) -> Result<String, Code> {
        if self.0.is_null() {
            return Err(Code::INVALID_VALUE);
        }
        // SAFETY: not null, so a string with its zero, by the driver's contract.
        let text = unsafe { std::ffi::CStr::from_ptr(self.0) };
        text.to_str().map(str::to_owned).map_err(|_| Code::INVALID_VALUE)
    }
}
