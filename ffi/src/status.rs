//! Status codes: the result of every function of the C boundary.
//!
//! Errors are grouped in blocks of a hundred. A retired number stays reserved.
#![allow(unreachable_pub, reason = "`pub` is what goes into the C header")]

/// Result of a call: `DORMOUSE_OK`, a positive notice, or a negative error.
#[allow(non_camel_case_types)] // reason: the name C sees
pub type dormouse_status_t = i32;

/// Success.
pub const DORMOUSE_OK: dormouse_status_t = 0;
/// Nothing was done and the data is awake. `dormouse_get_last_error` returns the reason.
pub const DORMOUSE_DECLINED: dormouse_status_t = 2;
/// A part of the data is asleep and the rest is awake. `dormouse_get_last_error` returns the reason.
pub const DORMOUSE_PARTIAL: dormouse_status_t = 3;
/// The index is past the end of the list.
pub const DORMOUSE_END: dormouse_status_t = 4;

/// A required pointer is NULL.
pub const DORMOUSE_ERR_NULL: dormouse_status_t = -101;
/// An argument is outside the accepted range. The message names both.
pub const DORMOUSE_ERR_ARGUMENT: dormouse_status_t = -102;
/// The value is not a handle of this library, or a handle of another kind.
pub const DORMOUSE_ERR_HANDLE: dormouse_status_t = -103;
/// The handle was destroyed.
pub const DORMOUSE_ERR_STALE: dormouse_status_t = -104;
/// The `size` or `version` of a struct is not supported by this library.
pub const DORMOUSE_ERR_VERSION: dormouse_status_t = -105;
/// A parameter from the environment, the configuration file or the options is invalid.
pub const DORMOUSE_ERR_CONFIG: dormouse_status_t = -106;
/// This build or device does not support the operation.
pub const DORMOUSE_ERR_UNSUPPORTED: dormouse_status_t = -107;

/// The memory budget is exhausted. The message is an allocation report.
pub const DORMOUSE_ERR_OUT_OF_MEMORY: dormouse_status_t = -201;
/// A memory tier is closed.
pub const DORMOUSE_ERR_TIER: dormouse_status_t = -202;
/// The address is not in a live block of this library.
pub const DORMOUSE_ERR_NOT_OURS: dormouse_status_t = -203;
/// A limit is reached. The message names it.
pub const DORMOUSE_ERR_LIMIT: dormouse_status_t = -204;

/// The device or its driver returned an error.
pub const DORMOUSE_ERR_DEVICE: dormouse_status_t = -301;

/// A file could not be created, written or read.
pub const DORMOUSE_ERR_IO: dormouse_status_t = -401;
/// Data read back does not match its checksum, after a second read.
pub const DORMOUSE_ERR_CORRUPT: dormouse_status_t = -402;

/// The call is not valid in the current state, for example a repeated phase.
pub const DORMOUSE_ERR_STATE: dormouse_status_t = -501;
/// The object is in use by another thread or object.
pub const DORMOUSE_ERR_BUSY: dormouse_status_t = -502;
/// A plan operation was completed out of order.
pub const DORMOUSE_ERR_ORDER: dormouse_status_t = -503;
/// The process was forked after the library was loaded. Only the parent can call it.
pub const DORMOUSE_ERR_FORKED: dormouse_status_t = -504;

/// Internal error of this library.
pub const DORMOUSE_ERR_PANIC: dormouse_status_t = -901;

/// Name and meaning of every status, NUL-terminated for C.
pub(crate) const TABLE: &[(dormouse_status_t, &std::ffi::CStr)] = &[
    (DORMOUSE_OK, c"DORMOUSE_OK: success"),
    (DORMOUSE_DECLINED, c"DORMOUSE_DECLINED: nothing was done, the data is awake"),
    (DORMOUSE_PARTIAL, c"DORMOUSE_PARTIAL: a part of the data is asleep, the rest is awake"),
    (DORMOUSE_END, c"DORMOUSE_END: the index is past the end of the list"),
    (DORMOUSE_ERR_NULL, c"DORMOUSE_ERR_NULL: a required pointer is NULL"),
    (DORMOUSE_ERR_ARGUMENT, c"DORMOUSE_ERR_ARGUMENT: an argument is outside the accepted range"),
    (DORMOUSE_ERR_HANDLE, c"DORMOUSE_ERR_HANDLE: not a handle of this library and kind"),
    (DORMOUSE_ERR_STALE, c"DORMOUSE_ERR_STALE: the handle was destroyed"),
    (DORMOUSE_ERR_VERSION, c"DORMOUSE_ERR_VERSION: unsupported struct size or version"),
    (DORMOUSE_ERR_CONFIG, c"DORMOUSE_ERR_CONFIG: a parameter is invalid"),
    (DORMOUSE_ERR_UNSUPPORTED, c"DORMOUSE_ERR_UNSUPPORTED: not supported by this build or device"),
    (DORMOUSE_ERR_OUT_OF_MEMORY, c"DORMOUSE_ERR_OUT_OF_MEMORY: the memory budget is exhausted"),
    (DORMOUSE_ERR_TIER, c"DORMOUSE_ERR_TIER: the memory tier is closed"),
    (DORMOUSE_ERR_NOT_OURS, c"DORMOUSE_ERR_NOT_OURS: the address is not in a live block"),
    (DORMOUSE_ERR_LIMIT, c"DORMOUSE_ERR_LIMIT: a limit is reached"),
    (DORMOUSE_ERR_DEVICE, c"DORMOUSE_ERR_DEVICE: the device or its driver returned an error"),
    (DORMOUSE_ERR_IO, c"DORMOUSE_ERR_IO: a file could not be created, written or read"),
    (DORMOUSE_ERR_CORRUPT, c"DORMOUSE_ERR_CORRUPT: data does not match its checksum"),
    (DORMOUSE_ERR_STATE, c"DORMOUSE_ERR_STATE: not valid in the current state"),
    (DORMOUSE_ERR_BUSY, c"DORMOUSE_ERR_BUSY: in use"),
    (DORMOUSE_ERR_ORDER, c"DORMOUSE_ERR_ORDER: completed out of order"),
    (DORMOUSE_ERR_FORKED, c"DORMOUSE_ERR_FORKED: called in a forked child"),
    (DORMOUSE_ERR_PANIC, c"DORMOUSE_ERR_PANIC: internal error"),
];

/// Returns the text of `status`, and a generic one for an unknown number.
pub(crate) fn text(status: dormouse_status_t) -> &'static std::ffi::CStr {
    TABLE
        .iter()
        .find(|(known, _)| *known == status)
        .map_or(c"unknown dormouse status", |(_, text)| *text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_unique_and_lie_in_their_blocks() {
        for (at, (status, text)) in TABLE.iter().enumerate() {
            assert!(TABLE.iter().skip(at + 1).all(|(other, _)| other != status), "{text:?} twice");
            let block = match text.to_str().unwrap() {
                t if t.starts_with("DORMOUSE_ERR_") => -status / 100,
                _ => 0,
            };
            assert!([0, 1, 2, 3, 4, 5, 9].contains(&block), "{text:?} lies in no block");
        }
    }

    #[test]
    fn an_unknown_number_has_a_text() {
        assert_eq!(text(-12345), c"unknown dormouse status");
        assert!(text(DORMOUSE_ERR_BUSY).to_str().unwrap().starts_with("DORMOUSE_ERR_BUSY"));
    }
}
