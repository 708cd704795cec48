//! The boundary: how a call comes in from C and how it leaves.
//!
//! Panics stop here (B1), a forked child is turned away here (B2), pointers are checked here and
//! nowhere else (B3), and results are written only on success (B4).

use std::ffi::{CStr, c_char, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use crate::abi::v1::structs as c;
use crate::fault::{self, Fault};
use crate::status::{self, dormouse_status_t};
use crate::{fork, log};

/// Longest text taken from C, in bytes.
const TEXT_BYTES_MAX: usize = 4096;
/// Largest struct taken from C, in bytes: what says it is larger was never started.
const STRUCT_BYTES_MAX: usize = 4096;

/// How a call ended well.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// Done.
    Done,
    /// Nothing was done, and why.
    Declined(String),
}

/// Runs the body of an exported function.
pub(crate) fn enter(body: impl FnOnce() -> Result<Outcome, Fault>) -> dormouse_status_t {
    if fork::in_child() {
        fault::keep("this process was forked after dormouse was loaded; only the parent may call");
        return status::DORMOUSE_ERR_FORKED;
    }
    // Unwind safety: shared state sits behind mutexes whose poison every reader looks at.
    let outcome = catch_unwind(AssertUnwindSafe(body));
    let status = match outcome {
        Ok(Ok(Outcome::Done)) => status::DORMOUSE_OK,
        Ok(Ok(Outcome::Declined(reason))) => {
            fault::keep(&reason);
            tracing::debug!(target: "ffi", reason, "declined");
            status::DORMOUSE_DECLINED
        }
        Ok(Err(fault)) => {
            fault::keep(&fault.sentence);
            tracing::debug!(target: "ffi", status = fault.status, reason = %fault.sentence, "call failed");
            fault.status
        }
        Err(payload) => {
            let text = payload
                .downcast_ref::<&str>()
                .copied()
                .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
                .unwrap_or("no text");
            fault::keep(&format!("defect in dormouse, please report it: {text}"));
            tracing::error!(target: "ffi", text, "defect: a panic was caught at the boundary");
            // A payload whose own drop panics must not get past either.
            std::mem::forget(payload);
            status::DORMOUSE_ERR_PANIC
        }
    };
    log::drain();
    status
}

/// A stream as C names it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawStream(*mut c_void);

impl RawStream {
    /// # Safety
    /// `raw` is NULL, or on a GPU a live stream of the device it is used with.
    pub(crate) const unsafe fn new(raw: *mut c_void) -> Self {
        Self(raw)
    }

    /// The caller's handle.
    pub(crate) const fn get(self) -> *mut c_void {
        self.0
    }

    /// What the allocator calls it.
    pub(crate) fn key(self) -> u64 {
        self.0.addr() as u64
    }
}

/// A struct C shares with us.
///
/// # Safety
/// `#[repr(C)]`, opens with `size: u32, version: u32`, and all-zero bytes are a valid value.
pub(crate) unsafe trait Shared: Copy {
    /// Its name in C.
    const NAME: &'static str;
    /// `sizeof` in the first release that had it: the least an input may be.
    const FIRST_BYTES: usize;
}

macro_rules! shared {
    ($($name:ident: $bytes:literal,)*) => {$(
        // SAFETY: declared `#[repr(C)]` with the two leading fields, and only numbers, raw
        // pointers and arrays of them after.
        unsafe impl Shared for c::$name {
            const NAME: &'static str = stringify!($name);
            const FIRST_BYTES: usize = $bytes;
        }
        const _: () = {
            assert!(size_of::<c::$name>() >= $bytes, "a released struct only grows");
            assert!(std::mem::offset_of!(c::$name, size) == 0);
            assert!(std::mem::offset_of!(c::$name, version) == 4);
        };
    )*};
}

// Golden sizes of version 1 on 64-bit Linux; never lowered.
shared! {
    dormouse_options_t: 72,
    dormouse_info_t: 608,
    dormouse_stats_t: 416,
    dormouse_mem_info_t: 112,
    dormouse_param_t: 568,
    dormouse_model_t: 72,
    dormouse_machine_t: 40,
    dormouse_spec_t: 88,
    dormouse_op_t: 64,
    dormouse_prediction_t: 592,
    dormouse_sequences_t: 88,
    dormouse_forest_info_t: 64,
    dormouse_batch_t: 112,
    dormouse_prefix_report_t: 680,
    dormouse_merge_args_t: 88,
}

/// Elements of arrays and parts of other structs say no size of their own: theirs are for ever.
const _: () = {
    assert!(size_of::<c::dormouse_gauge_t>() == 24);
    assert!(size_of::<c::dormouse_copies_t>() == 16);
    assert!(size_of::<c::dormouse_block_t>() == 40);
    assert!(size_of::<c::dormouse_member_t>() == 56);
    assert!(size_of::<c::dormouse_score_t>() == 40);
    assert!(size_of::<c::dormouse_span_t>() == 16);
    assert!(size_of::<c::dormouse_ending_t>() == 16);
    assert!(size_of::<c::dormouse_forest_node_t>() == 32);
    assert!(size_of::<c::dormouse_plan_node_t>() == 40);
};

/// Reads from C.
#[derive(Debug)]
pub(crate) struct In;

impl In {
    /// NUL-terminated UTF-8.
    ///
    /// # Safety
    /// `pointer` is NULL or points to NUL-terminated text.
    pub(crate) unsafe fn text(pointer: *const c_char, name: &str) -> Result<String, Fault> {
        // SAFETY: the caller's contract.
        unsafe { Self::borrowed_text(pointer, TEXT_BYTES_MAX, name) }.map(str::to_owned)
    }

    /// The same, of at most `bytes_max` bytes, where it lies.
    ///
    /// # Safety
    /// As [`In::text`], and nobody writes to it during `'a`.
    pub(crate) unsafe fn borrowed_text<'a>(
        pointer: *const c_char,
        bytes_max: usize,
        name: &str,
    ) -> Result<&'a str, Fault> {
        if pointer.is_null() {
            return Err(Fault::null(name));
        }
        // SAFETY: the caller's contract.
        let text = unsafe { CStr::from_ptr(pointer) };
        if text.count_bytes() > bytes_max {
            return Err(Fault::argument(format!(
                "{name} has {} bytes; at most {bytes_max} are accepted",
                text.count_bytes()
            )));
        }
        text.to_str().map_err(|_| {
            Fault::argument(format!("{name} is {text:?}, which is not UTF-8; UTF-8 is accepted"))
        })
    }

    /// A struct by its own `size` and `version`: shorter ones get zeros, longer ones must have
    /// zeros where this library knows nothing.
    ///
    /// # Safety
    /// `pointer` is NULL or readable for as many bytes as its `size` field says, at least 8.
    pub(crate) unsafe fn structure<T: Shared>(pointer: *const T, name: &str) -> Result<T, Fault> {
        check(pointer, name)?;
        // SAFETY: the caller's contract; `Shared` says where the fields lie.
        let seen = unsafe { header(pointer, name) }?;
        let ours = size_of::<T>();
        if !(T::FIRST_BYTES..=STRUCT_BYTES_MAX).contains(&seen) {
            return Err(wrong_size::<T>(name, seen, T::FIRST_BYTES));
        }
        // SAFETY: the caller's contract: `seen` bytes are readable.
        let bytes = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), seen) };
        if bytes.iter().skip(ours).any(|byte| *byte != 0) {
            return Err(Fault::new(
                status::DORMOUSE_ERR_VERSION,
                format!(
                    "{name}: {} sets fields past the {ours} bytes this library knows; zeros are \
                     accepted there",
                    T::NAME
                ),
            ));
        }
        // SAFETY: `Shared`: zeros are a valid value, as is what C wrote over its own fields.
        let mut value = unsafe { std::mem::zeroed::<T>() };
        // SAFETY: both are valid for the lesser length and do not overlap: one is a local.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                (&raw mut value).cast::<u8>(),
                seen.min(ours),
            );
        }
        Ok(value)
    }

    /// `count` values, or an empty slice when `count` is 0.
    ///
    /// # Safety
    /// `pointer` is NULL or readable for `count` values that nobody writes during `'a`.
    pub(crate) unsafe fn slice<'a, T>(
        pointer: *const T,
        count: usize,
        name: &str,
    ) -> Result<&'a [T], Fault> {
        if count == 0 {
            return Ok(&[]);
        }
        check(pointer, name)?;
        if count > isize::MAX as usize / size_of::<T>() {
            return Err(Fault::argument(format!("{name} has {count} values; no array is as long")));
        }
        // SAFETY: the caller's contract; NULL, misaligned and overlong were turned away.
        Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
    }
}

/// A checked place for a result.
#[derive(Debug)]
pub(crate) struct Out<T> {
    place: NonNull<T>,
    /// Bytes the caller's struct has; `size_of::<T>()` for plain values.
    room: usize,
}

impl<T> Out<T> {
    /// A place for a plain value.
    ///
    /// # Safety
    /// `pointer` is NULL or writable for a `T` for as long as the `Out` is used.
    pub(crate) unsafe fn new(pointer: *mut T, name: &str) -> Result<Self, Fault> {
        let place = check(pointer, name)?;
        Ok(Self { place, room: size_of::<T>() })
    }

    /// Writes the result.
    pub(crate) fn write(&self, value: T) {
        // SAFETY: `new`'s contract; alignment was checked there.
        unsafe { self.place.write(value) }
    }
}

impl<T: Shared> Out<T> {
    /// A place for a struct that says its own size.
    ///
    /// # Safety
    /// `pointer` is NULL or readable and writable for as many bytes as its `size` field says, at
    /// least 8, for as long as the `Out` is used.
    pub(crate) unsafe fn sized(pointer: *mut T, name: &str) -> Result<Self, Fault> {
        let place = check(pointer, name)?;
        // SAFETY: the caller's contract; `Shared` says where the fields lie.
        let room = unsafe { header(pointer, name) }?;
        if room < 8 {
            return Err(wrong_size::<T>(name, room, T::FIRST_BYTES));
        }
        Ok(Self { place, room })
    }

    /// Fills as much of the struct as the caller knows, and says how much.
    pub(crate) fn fill(&self, value: T) {
        let bytes = self.room.min(size_of::<T>());
        // SAFETY: `sized`'s contract: `room` bytes are writable; `value` is a local.
        unsafe {
            std::ptr::copy_nonoverlapping(
                (&raw const value).cast::<u8>(),
                self.place.as_ptr().cast::<u8>(),
                bytes,
            );
        }
        let header = [u32::try_from(bytes).unwrap_or(u32::MAX), c::DORMOUSE_STRUCT_VERSION];
        // SAFETY: as above; `Shared` says that the first eight bytes are these two numbers.
        unsafe { self.place.cast::<[u32; 2]>().write(header) }
    }
}

impl Out<u64> {
    /// Text by the two-call rule: the length always, the bytes where there is room for all.
    ///
    /// # Safety
    /// `buffer` is NULL or writable for `capacity_bytes`.
    pub(crate) unsafe fn text(
        &self,
        text: &str,
        buffer: *mut c_char,
        capacity_bytes: u64,
    ) -> Result<(), Fault> {
        let needed = text.len() as u64 + 1;
        self.write(needed);
        if buffer.is_null() {
            return Ok(());
        }
        if capacity_bytes < needed {
            return Err(Fault::new(
                status::DORMOUSE_ERR_LIMIT,
                format!("the buffer has {capacity_bytes} bytes; {needed} are needed"),
            ));
        }
        // SAFETY: the caller's contract; `needed` fits.
        unsafe {
            std::ptr::copy_nonoverlapping(text.as_ptr(), buffer.cast::<u8>(), text.len());
            buffer.add(text.len()).write(0);
        }
        Ok(())
    }

    /// An array by the two-call rule: the count always, the elements where there is room for all.
    ///
    /// # Safety
    /// `array` is NULL or writable for `capacity` elements.
    pub(crate) unsafe fn array<T: Copy>(
        &self,
        elements: &[T],
        array: *mut T,
        capacity: u64,
    ) -> Result<(), Fault> {
        let needed = elements.len() as u64;
        self.write(needed);
        if array.is_null() {
            return Ok(());
        }
        let place = check(array, "array")?;
        if capacity < needed {
            return Err(Fault::new(
                status::DORMOUSE_ERR_LIMIT,
                format!("the array has room for {capacity}; {needed} are needed"),
            ));
        }
        // SAFETY: the caller's contract; `needed` fits, and it is aligned.
        unsafe {
            std::ptr::copy_nonoverlapping(elements.as_ptr(), place.as_ptr(), elements.len());
        }
        Ok(())
    }
}

/// Turns NULL and misaligned pointers away.
fn check<T>(pointer: *const T, name: &str) -> Result<NonNull<T>, Fault> {
    let Some(place) = NonNull::new(pointer.cast_mut()) else { return Err(Fault::null(name)) };
    if !place.is_aligned() {
        return Err(Fault::argument(format!(
            "{name} is {:#x}; a multiple of {} is accepted",
            place.addr(),
            align_of::<T>()
        )));
    }
    Ok(place)
}

/// The size a struct says it has, its version being one we know.
///
/// # Safety
/// `pointer` is aligned and readable for 8 bytes.
unsafe fn header<T: Shared>(pointer: *const T, name: &str) -> Result<usize, Fault> {
    // SAFETY: the caller's contract; `Shared` says that the first eight bytes are two numbers.
    let [size, version] = unsafe { pointer.cast::<[u32; 2]>().read() };
    if version != c::DORMOUSE_STRUCT_VERSION {
        return Err(Fault::new(
            status::DORMOUSE_ERR_VERSION,
            format!(
                "{name}: {} has version {version}; {} is accepted (start it with DORMOUSE_INIT)",
                T::NAME,
                c::DORMOUSE_STRUCT_VERSION
            ),
        ));
    }
    Ok(size as usize)
}

fn wrong_size<T: Shared>(name: &str, seen: usize, least: usize) -> Fault {
    Fault::new(
        status::DORMOUSE_ERR_VERSION,
        format!(
            "{name}: {} has size {seen}; at least {least} is accepted, {STRUCT_BYTES_MAX} at most \
             (start it with DORMOUSE_INIT)",
            T::NAME
        ),
    )
}

#[cfg(test)]
mod tests;
