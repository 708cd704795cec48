//! Status codes: what every function of the C boundary returns.
//!
//! Errors come in blocks of a hundred; a retired number stays reserved, and no number ever
//! doubles as a size.
#![allow(unreachable_pub, reason = "`pub` is what goes into the C header")]

/// What a call came to: `DORMOUSE_OK`, a positive notice, or a negative error.
#[allow(non_camel_case_types)] // reason: the name C sees
pub type dormouse_status_t = i32;

/// Done.
pub const DORMOUSE_OK: dormouse_status_t = 0;
/// Begun and not finished; nothing to do about it.
pub const DORMOUSE_IN_PROGRESS: dormouse_status_t = 1;
/// Nothing was done, the data is awake where it was; `dormouse_get_last_error()` has the reason.
pub const DORMOUSE_DECLINED: dormouse_status_t = 2;

/// A pointer that must not be NULL was.
pub const DORMOUSE_ERR_NULL: dormouse_status_t = -101;
/// A value is outside what is accepted; the sentence names both.
pub const DORMOUSE_ERR_ARGUMENT: dormouse_status_t = -102;
/// A value that is no handle of this library, or one of another kind.
pub const DORMOUSE_ERR_HANDLE: dormouse_status_t = -103;
/// A handle that was destroyed.
pub const DORMOUSE_ERR_STALE: dormouse_status_t = -104;
/// A struct whose `size` or `version` this library does not know.
pub const DORMOUSE_ERR_VERSION: dormouse_status_t = -105;
/// A parameter in the environment, the file or the options has a value that is not accepted.
pub const DORMOUSE_ERR_CONFIG: dormouse_status_t = -106;
/// Recognised, and refused by name: this build or device cannot do it.
pub const DORMOUSE_ERR_UNSUPPORTED: dormouse_status_t = -107;

/// The budget is spent; the sentence is the report.
pub const DORMOUSE_ERR_OUT_OF_MEMORY: dormouse_status_t = -201;
/// A tier is closed or was never opened.
pub const DORMOUSE_ERR_TIER: dormouse_status_t = -202;
/// An address that lies in no live block of this library.
pub const DORMOUSE_ERR_NOT_OURS: dormouse_status_t = -203;
/// A named limit is reached.
pub const DORMOUSE_ERR_LIMIT: dormouse_status_t = -204;

/// The device or its driver refused.
pub const DORMOUSE_ERR_DEVICE: dormouse_status_t = -301;

/// A file could not be created, written or read.
pub const DORMOUSE_ERR_IO: dormouse_status_t = -401;
/// Bytes came back different from what was written, and stayed so when read again.
pub const DORMOUSE_ERR_CORRUPT: dormouse_status_t = -402;

/// Not legal now: a repeated or skipped phase, a mark out of place.
pub const DORMOUSE_ERR_STATE: dormouse_status_t = -501;
/// Something else is inside or still depends on it.
pub const DORMOUSE_ERR_BUSY: dormouse_status_t = -502;
/// Plan operations completed out of order.
pub const DORMOUSE_ERR_ORDER: dormouse_status_t = -503;
/// Called in a child process after fork; only the parent may.
pub const DORMOUSE_ERR_FORKED: dormouse_status_t = -504;

/// A defect of this library, caught at its boundary.
pub const DORMOUSE_ERR_PANIC: dormouse_status_t = -901;

/// Every status with its name and meaning: one table for text, tests and the check that the
/// numbers stay unique. NUL-terminated, so C can be given the text as it is.
pub(crate) const TABLE: &[(dormouse_status_t, &std::ffi::CStr)] = &[
    (DORMOUSE_OK, c"DORMOUSE_OK: done"),
    (DORMOUSE_IN_PROGRESS, c"DORMOUSE_IN_PROGRESS: begun and not finished"),
    (DORMOUSE_DECLINED, c"DORMOUSE_DECLINED: nothing done, data awake"),
    (DORMOUSE_ERR_NULL, c"DORMOUSE_ERR_NULL: a pointer must not be NULL"),
    (DORMOUSE_ERR_ARGUMENT, c"DORMOUSE_ERR_ARGUMENT: a value is outside what is accepted"),
    (DORMOUSE_ERR_HANDLE, c"DORMOUSE_ERR_HANDLE: not a handle of this library and kind"),
    (DORMOUSE_ERR_STALE, c"DORMOUSE_ERR_STALE: the handle was destroyed"),
    (DORMOUSE_ERR_VERSION, c"DORMOUSE_ERR_VERSION: unknown struct size or version"),
    (DORMOUSE_ERR_CONFIG, c"DORMOUSE_ERR_CONFIG: a parameter has a value that is not accepted"),
    (DORMOUSE_ERR_UNSUPPORTED, c"DORMOUSE_ERR_UNSUPPORTED: this build or device cannot do it"),
    (DORMOUSE_ERR_OUT_OF_MEMORY, c"DORMOUSE_ERR_OUT_OF_MEMORY: the budget is spent"),
    (DORMOUSE_ERR_TIER, c"DORMOUSE_ERR_TIER: a tier is closed"),
    (DORMOUSE_ERR_NOT_OURS, c"DORMOUSE_ERR_NOT_OURS: the address lies in no live block"),
    (DORMOUSE_ERR_LIMIT, c"DORMOUSE_ERR_LIMIT: a named limit is reached"),
    (DORMOUSE_ERR_DEVICE, c"DORMOUSE_ERR_DEVICE: the device refused"),
    (DORMOUSE_ERR_IO, c"DORMOUSE_ERR_IO: a file could not be created, written or read"),
    (DORMOUSE_ERR_CORRUPT, c"DORMOUSE_ERR_CORRUPT: bytes came back changed"),
    (DORMOUSE_ERR_STATE, c"DORMOUSE_ERR_STATE: not legal now"),
    (DORMOUSE_ERR_BUSY, c"DORMOUSE_ERR_BUSY: in use"),
    (DORMOUSE_ERR_ORDER, c"DORMOUSE_ERR_ORDER: completed out of order"),
    (DORMOUSE_ERR_FORKED, c"DORMOUSE_ERR_FORKED: called in a forked child"),
    (DORMOUSE_ERR_PANIC, c"DORMOUSE_ERR_PANIC: a defect of this library"),
];

/// The static text of `status`, also for numbers nobody knows.
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
