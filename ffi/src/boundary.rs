//! The C boundary: argument checks, panics, forked children and results.
//!
//! - **B1** No panic unwinds into C.
//! - **B2** A call in a forked child is refused.
//! - **B3** Pointers are checked here and nowhere else.
//! - **B4** Results are written only on success.

use std::ffi::{c_char, c_void};
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr::NonNull;

use crate::abi::c;
use crate::fault::{self, Fault};
use crate::status::{self, dormouse_status_t};
use crate::{fork, log};

/// Maximum length of a text from C, in bytes.
const TEXT_BYTES_MAX: usize = 4096;
/// Size of the leading `size` and `version` of a struct, in bytes: the least that a result can have.
const HEADER_BYTES: usize = size_of::<[u32; 2]>();
/// Maximum size of a struct, in bytes. A larger `size` is an uninitialised field.
const STRUCT_BYTES_MAX: usize = 4096;

/// Result of a call that did not fail.
#[derive(Debug)]
pub(crate) enum Outcome {
    /// `DORMOUSE_OK`.
    Done,
    /// A positive status with its reason.
    Notice(dormouse_status_t, String),
}

impl From<()> for Outcome {
    fn from((): ()) -> Self {
        Self::Done
    }
}

/// Runs the body of an exported function.
pub(crate) fn enter<T: Into<Outcome>>(
    body: impl FnOnce() -> Result<T, Fault>,
) -> dormouse_status_t {
    if fork::in_child() {
        fault::set_last_error(
            "the process was forked after dormouse was loaded; only the parent can call it",
        );
        return status::DORMOUSE_ERR_FORKED;
    }
    // Unwind safety: a panic marks an exclusive handle as inconsistent; other locks have no poison
    // (decision 0014).
    let outcome = catch_unwind(AssertUnwindSafe(|| body().map(Into::into)));
    let status = match outcome {
        Ok(Ok(Outcome::Done)) => status::DORMOUSE_OK,
        Ok(Ok(Outcome::Notice(status, reason))) => {
            fault::set_last_error(&reason);
            tracing::debug!(target: "ffi", status, reason, "notice");
            status
        }
        Ok(Err(fault)) => {
            fault::set_last_error(&fault.message);
            tracing::debug!(target: "ffi", status = fault.status, reason = %fault.message, "call failed");
            fault.status
        }
        Err(payload) => {
            let text = payload
                .downcast_ref::<&str>()
                .copied()
                .or_else(|| payload.downcast_ref::<String>().map(String::as_str))
                .unwrap_or("no message");
            fault::set_last_error(&format!("internal error in dormouse, please report it: {text}"));
            tracing::error!(target: "ffi", text, "internal error: a panic was caught");
            // The payload's own drop can panic: it must not unwind into C.
            std::mem::forget(payload);
            status::DORMOUSE_ERR_PANIC
        }
    };
    log::drain();
    status
}

/// A stream as C passes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct RawStream(*mut c_void);

impl RawStream {
    /// # Safety
    /// `raw` is NULL, or on a GPU a live stream of the device it is used with.
    pub(crate) const unsafe fn new(raw: *mut c_void) -> Self {
        Self(raw)
    }

    pub(crate) const fn get(self) -> *mut c_void {
        self.0
    }

    /// Its key in the allocator.
    pub(crate) fn key(self) -> u64 {
        self.0.addr() as u64
    }
}

/// A versioned struct of the header.
///
/// # Safety
/// `#[repr(C)]`, starts with `size: u32, version: u32`, and all-zero bytes are a valid value.
pub(crate) unsafe trait Shared: Copy + Default {
    /// Its name in C.
    const NAME: &'static str;
    /// Its size in the first release, the smallest that is accepted as an input.
    const FIRST_BYTES: usize;
}

macro_rules! shared {
    ($($name:ident: $bytes:literal,)*) => {$(
        impl Default for c::$name {
            fn default() -> Self {
                // SAFETY: `Shared`: zeros are a valid value.
                unsafe { std::mem::zeroed() }
            }
        }
        // SAFETY: declared `#[repr(C)]` with the two leading fields; the others are numbers, raw
        // pointers and arrays of them.
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

// Sizes of version 1 on 64-bit Linux. They never change.
shared! {
    dormouse_options_t: 72,
    dormouse_info_t: 616,
    dormouse_stats_t: 416,
    dormouse_mem_info_t: 112,
    dormouse_param_t: 568,
    dormouse_model_t: 72,
    dormouse_machine_t: 40,
    dormouse_op_t: 64,
    dormouse_prediction_t: 592,
    dormouse_sequences_t: 88,
    dormouse_forest_info_t: 64,
    dormouse_plan_options_t: 112,
    dormouse_prefix_report_t: 680,
    dormouse_merge_args_t: 88,
    dormouse_memory_history_t: 40,
    dormouse_history_options_t: 48,
    dormouse_history_stats_t: 72,
    dormouse_dialogue_options_t: 56,
    dormouse_dialogue_stats_t: 48,
}

/// Array elements and nested structs have no `size` field: their layout is fixed.
const _: () = {
    assert!(size_of::<c::dormouse_gauge_t>() == 24);
    assert!(size_of::<c::dormouse_amount_t>() == 24);
    assert!(size_of::<c::dormouse_copies_t>() == 16);
    assert!(size_of::<c::dormouse_pool_t>() == 72);
    assert!(size_of::<c::dormouse_block_t>() == 40);
    assert!(size_of::<c::dormouse_range_t>() == 80);
    assert!(size_of::<c::dormouse_memory_event_t>() == 72);
    assert!(size_of::<c::dormouse_frame_t>() == 16);
    assert!(size_of::<c::dormouse_tokens_t>() == 24);
    assert!(size_of::<c::dormouse_rollout_t>() == 56);
    assert!(size_of::<c::dormouse_draft_t>() == 72);
    assert!(size_of::<c::dormouse_bytes_t>() == 16);
    assert!(size_of::<c::dormouse_turn_t>() == 72);
    assert!(size_of::<c::dormouse_query_t>() == 32);
    assert!(size_of::<c::dormouse_found_t>() == 32);
    assert!(size_of::<c::dormouse_member_t>() == 56);
    assert!(size_of::<c::dormouse_score_t>() == 40);
    assert!(size_of::<c::dormouse_span_t>() == 16);
    assert!(size_of::<c::dormouse_ending_t>() == 16);
    assert!(size_of::<c::dormouse_forest_node_t>() == 32);
    assert!(size_of::<c::dormouse_plan_node_t>() == 40);
};

/// Arguments from C.
#[derive(Debug)]
pub(crate) struct In;

impl In {
    /// NUL-terminated UTF-8 of at most [`TEXT_BYTES_MAX`] bytes.
    ///
    /// # Safety
    /// `pointer` is NULL or points to NUL-terminated text.
    pub(crate) unsafe fn text(pointer: *const c_char, name: &str) -> Result<String, Fault> {
        // SAFETY: the caller's contract.
        unsafe { Self::borrowed_text(pointer, TEXT_BYTES_MAX, name) }.map(str::to_owned)
    }

    /// As [`In::text`]; `None` for NULL.
    ///
    /// # Safety
    /// As [`In::text`].
    pub(crate) unsafe fn optional_text(
        pointer: *const c_char,
        name: &str,
    ) -> Result<Option<String>, Fault> {
        // SAFETY: the caller's contract.
        (!pointer.is_null()).then(|| unsafe { Self::text(pointer, name) }).transpose()
    }

    /// NUL-terminated UTF-8 of at most `bytes_max` bytes, without a copy.
    ///
    /// # Safety
    /// As [`In::text`], and the text does not change during `'a`.
    pub(crate) unsafe fn borrowed_text<'a>(
        pointer: *const c_char,
        bytes_max: usize,
        name: &str,
    ) -> Result<&'a str, Fault> {
        if pointer.is_null() {
            return Err(Fault::null(name));
        }
        // Bounded: text without a NUL is refused where it is too long.
        // SAFETY: the caller's contract.
        let bytes = unsafe { libc::strnlen(pointer, bytes_max + 1) };
        if bytes > bytes_max {
            return Err(Fault::argument(format!(
                "{name} has more than {bytes_max} bytes; accepted: at most {bytes_max} and a NUL"
            )));
        }
        // SAFETY: the caller's contract; so many bytes have just been read.
        let bytes = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), bytes) };
        std::str::from_utf8(bytes).map_err(|_| {
            Fault::argument(format!("{name} is \"{}\"; accepted: UTF-8", bytes.escape_ascii()))
        })
    }

    /// A versioned struct. Fields that an older caller does not have are zero; fields that this
    /// library does not have must be zero.
    ///
    /// # Safety
    /// `pointer` is NULL or readable for the number of bytes in its `size` field, at least 8.
    pub(crate) unsafe fn structure<T: Shared>(pointer: *const T, name: &str) -> Result<T, Fault> {
        check(pointer, name)?;
        // SAFETY: the caller's contract.
        let seen = unsafe { header(pointer, name, T::FIRST_BYTES) }?;
        let ours = size_of::<T>();
        // SAFETY: the caller's contract: `seen` bytes are readable.
        let bytes = unsafe { std::slice::from_raw_parts(pointer.cast::<u8>(), seen) };
        if bytes.iter().skip(ours).any(|byte| *byte != 0) {
            let accepted = format!("zeros past the {ours} bytes that this library supports");
            return Err(Fault::new(
                status::DORMOUSE_ERR_VERSION,
                format!("{name}: {} sets unknown fields; accepted: {accepted}", T::NAME),
            ));
        }
        let mut value = T::default();
        // SAFETY: both are valid for the smaller length and do not overlap: one is a local. Any bytes
        // are a valid value of the fields.
        unsafe {
            std::ptr::copy_nonoverlapping(
                bytes.as_ptr(),
                (&raw mut value).cast::<u8>(),
                seen.min(ours),
            );
        }
        Ok(value)
    }

    /// `count` values, or an empty slice if `count` is 0.
    ///
    /// # Safety
    /// `pointer` is NULL or readable for `count` values that do not change during `'a`.
    pub(crate) unsafe fn slice<'a, T>(
        pointer: *const T,
        count: usize,
        name: &str,
    ) -> Result<&'a [T], Fault> {
        if count == 0 {
            return Ok(&[]);
        }
        check(pointer, name)?;
        let most = isize::MAX as usize / size_of::<T>();
        if count > most {
            return Err(Fault::argument(format!(
                "{name} has {count} elements; accepted: at most {most}"
            )));
        }
        // SAFETY: the caller's contract; NULL, misaligned and too long were refused.
        Ok(unsafe { std::slice::from_raw_parts(pointer, count) })
    }

    /// A struct without a version.
    ///
    /// # Safety
    /// As [`In::slice`], for one value.
    pub(crate) unsafe fn one<'a, T>(pointer: *const T, name: &str) -> Result<&'a T, Fault> {
        // SAFETY: the caller's contract.
        let all = unsafe { Self::slice(pointer, 1, name) }?;
        all.first().ok_or_else(|| Fault::null(name))
    }

    /// `count + 1` ascending offsets, or none if `count` is 0.
    ///
    /// # Safety
    /// As [`In::slice`], for `count + 1` values.
    pub(crate) unsafe fn offsets<'a>(
        pointer: *const u64,
        count: usize,
        name: &str,
    ) -> Result<&'a [u64], Fault> {
        let length = if count == 0 { 0 } else { count + 1 };
        // SAFETY: the caller's contract.
        let offsets = unsafe { Self::slice(pointer, length, name) }?;
        for (at, pair) in offsets.windows(2).enumerate() {
            if let [from, to] = pair
                && to < from
            {
                return Err(Fault::argument(format!(
                    "{name} falls from {from} to {to} at {}; accepted: ascending offsets",
                    at + 1
                )));
            }
        }
        Ok(offsets)
    }
}

/// A length from C that an allocation can have.
pub(crate) fn usize_of(value: u64, name: &str) -> Result<usize, Fault> {
    isize::try_from(value).map(isize::cast_unsigned).map_err(|_| {
        Fault::argument(format!("{name} is {value}; accepted: at most {}", isize::MAX))
    })
}

/// Refuses `flags` with a bit outside `known`, which `names` describes.
pub(crate) fn check_flags(flags: u64, known: u64, name: &str, names: &str) -> Result<(), Fault> {
    if flags & !known == 0 {
        return Ok(());
    }
    Err(Fault::argument(format!("{name} is {flags:#x}; accepted: 0, {names} (mask {known:#x})")))
}

/// Refuses the value of a reserved field that is not zero: a later release can give it a meaning.
pub(crate) fn check_reserved(value: u32, name: impl Display) -> Result<(), Fault> {
    if value == 0 {
        return Ok(());
    }
    Err(Fault::argument(format!("{name} is {value}; accepted: 0")))
}

/// A checked pointer to a result.
#[derive(Debug)]
pub(crate) struct Out<T> {
    place: NonNull<T>,
    /// Bytes of the caller's struct; `size_of::<T>()` for plain values.
    room: usize,
}

impl<T> Out<T> {
    /// A place for a plain value.
    ///
    /// # Safety
    /// `pointer` is NULL or writable for a `T` while the `Out` exists.
    pub(crate) unsafe fn new(pointer: *mut T, name: &str) -> Result<Self, Fault> {
        Ok(Self { place: check(pointer, name)?, room: size_of::<T>() })
    }

    /// As [`Out::new`]; `None` for NULL.
    ///
    /// # Safety
    /// As [`Out::new`].
    pub(crate) unsafe fn optional(pointer: *mut T, name: &str) -> Result<Option<Self>, Fault> {
        // SAFETY: the caller's contract.
        (!pointer.is_null()).then(|| unsafe { Self::new(pointer, name) }).transpose()
    }

    pub(crate) fn write(&self, value: T) {
        // SAFETY: `new`'s contract; alignment was checked there.
        unsafe { self.place.write(value) }
    }
}

impl<T: Shared> Out<T> {
    /// A place for a versioned struct.
    ///
    /// # Safety
    /// `pointer` is NULL, or readable and writable for the number of bytes in its `size` field, at
    /// least 8, while the `Out` exists.
    pub(crate) unsafe fn sized(pointer: *mut T, name: &str) -> Result<Self, Fault> {
        let place = check(pointer, name)?;
        // SAFETY: the caller's contract.
        Ok(Self { place, room: unsafe { header(pointer, name, HEADER_BYTES) }? })
    }

    /// As [`Out::sized`]; `None` for NULL.
    ///
    /// # Safety
    /// As [`Out::sized`].
    pub(crate) unsafe fn optional_sized(
        pointer: *mut T,
        name: &str,
    ) -> Result<Option<Self>, Fault> {
        // SAFETY: the caller's contract.
        (!pointer.is_null()).then(|| unsafe { Self::sized(pointer, name) }).transpose()
    }

    /// Writes the fields that the caller's struct has, and its `size` and `version`.
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
        // SAFETY: as above; `Shared`: the first eight bytes are these two numbers.
        unsafe { self.place.cast().write([bytes as u32, c::DORMOUSE_STRUCT_VERSION]) }
    }
}

impl Out<u64> {
    /// Writes the length of `text` with its NUL, and the text if `buffer` has room for it.
    ///
    /// # Safety
    /// `buffer` is NULL or writable for `capacity` bytes.
    pub(crate) unsafe fn text(
        &self,
        text: String,
        buffer: *mut c_char,
        capacity: u64,
    ) -> Result<(), Fault> {
        let mut bytes = text.into_bytes();
        bytes.push(0);
        // SAFETY: the caller's contract.
        let place = unsafe { Elements::new(buffer.cast(), capacity, "buffer") }?;
        self.array(&bytes, &place)
    }

    /// Writes the number of `elements`, and the elements if `place` has room for them.
    pub(crate) fn array<T: Copy>(&self, elements: &[T], place: &Elements<T>) -> Result<(), Fault> {
        self.write(elements.len() as u64);
        place.write(elements)
    }
}

/// A checked pointer to an array of results. NULL: the caller asks for their number alone.
#[derive(Debug)]
pub(crate) struct Elements<T> {
    place: Option<NonNull<T>>,
    capacity: u64,
}

impl<T: Copy> Elements<T> {
    /// # Safety
    /// `pointer` is NULL, or writable for `capacity` elements while the `Elements` exist.
    pub(crate) unsafe fn new(pointer: *mut T, capacity: u64, name: &str) -> Result<Self, Fault> {
        let place = (!pointer.is_null()).then(|| check(pointer, name)).transpose()?;
        Ok(Self { place, capacity })
    }

    pub(crate) const fn is_wanted(&self) -> bool {
        self.place.is_some()
    }

    /// Whether `count` elements are wanted and do not fit.
    pub(crate) const fn is_short_of(&self, count: u64) -> bool {
        self.is_wanted() && self.capacity < count
    }

    /// Writes `elements`, if they are wanted.
    pub(crate) fn write(&self, elements: &[T]) -> Result<(), Fault> {
        let Some(place) = self.place else { return Ok(()) };
        let count = elements.len() as u64;
        if self.is_short_of(count) {
            return Err(Fault::new(
                status::DORMOUSE_ERR_LIMIT,
                format!("capacity is {}; accepted: at least {count}", self.capacity),
            ));
        }
        // SAFETY: `new`'s contract; `count` elements fit, and it is aligned.
        unsafe {
            std::ptr::copy_nonoverlapping(elements.as_ptr(), place.as_ptr(), elements.len());
        }
        Ok(())
    }
}

/// Refuses NULL and misaligned pointers.
fn check<T>(pointer: *const T, name: &str) -> Result<NonNull<T>, Fault> {
    let place = NonNull::new(pointer.cast_mut()).ok_or_else(|| Fault::null(name))?;
    if !place.is_aligned() {
        let (seen, align) = (place.addr(), align_of::<T>());
        return Err(Fault::argument(format!(
            "{name} is {seen:#x}; accepted: a multiple of {align}"
        )));
    }
    Ok(place)
}

/// Reads the `size` of a struct, `least` to [`STRUCT_BYTES_MAX`], and checks its `version`.
///
/// # Safety
/// `pointer` is aligned and readable for 8 bytes.
unsafe fn header<T: Shared>(pointer: *const T, name: &str, least: usize) -> Result<usize, Fault> {
    // SAFETY: the caller's contract; `Shared`: the first eight bytes are two numbers.
    let [size, version] = unsafe { pointer.cast::<[u32; 2]>().read() };
    if version != c::DORMOUSE_STRUCT_VERSION {
        return Err(Fault::new(
            status::DORMOUSE_ERR_VERSION,
            format!(
                "{name}: {} has version {version}; accepted: {} (initialise it with DORMOUSE_INIT)",
                T::NAME,
                c::DORMOUSE_STRUCT_VERSION
            ),
        ));
    }
    let size = size as usize;
    if !(least..=STRUCT_BYTES_MAX).contains(&size) {
        return Err(Fault::new(
            status::DORMOUSE_ERR_VERSION,
            format!(
                "{name}: {} has size {size}; accepted: {least} to {STRUCT_BYTES_MAX} (initialise \
                 it with DORMOUSE_INIT)",
                T::NAME
            ),
        ));
    }
    Ok(size)
}

#[cfg(test)]
mod tests;
