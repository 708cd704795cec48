//! Failed calls: the status, and the message that `dormouse_get_last_error` returns.
//!
//! The message is in a fixed thread-local buffer without a destructor, so it can be read while a
//! thread exits.

use std::borrow::Cow;
use std::cell::UnsafeCell;
use std::ffi::c_char;

use crate::status::{self, dormouse_status_t};

/// Maximum length of a message with its NUL, in bytes. An out-of-memory report of 12 lines fits.
const MESSAGE_BYTES_MAX: usize = 2048;

/// A failed call: a negative status, and a message with the value seen and the values accepted.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) status: dormouse_status_t,
    pub(crate) message: Cow<'static, str>,
}

impl Fault {
    pub(crate) fn new(status: dormouse_status_t, message: impl Into<Cow<'static, str>>) -> Self {
        Self { status, message: message.into() }
    }

    pub(crate) fn null(name: &str) -> Self {
        Self::new(status::DORMOUSE_ERR_NULL, format!("{name} is NULL; accepted: a valid pointer"))
    }

    pub(crate) fn argument(message: impl Into<Cow<'static, str>>) -> Self {
        Self::new(status::DORMOUSE_ERR_ARGUMENT, message)
    }
}

thread_local! {
    static MESSAGE: UnsafeCell<[u8; MESSAGE_BYTES_MAX]> = const { UnsafeCell::new([0; MESSAGE_BYTES_MAX]) };
}

/// Sets the message of this thread. One that is too long is [`shortened`].
pub(crate) fn set_last_error(message: &str) {
    MESSAGE.with(|cell| {
        // SAFETY: only this thread accesses its buffer, and no reference into it outlives this function. C
        // holds a pointer, whose contents the next call replaces (documented in the header).
        let buffer = unsafe { &mut *cell.get() };
        copy_text(message, buffer);
    });
}

/// Returns this thread's message: NUL-terminated, never NULL.
pub(crate) fn last_error() -> *const c_char {
    MESSAGE.with(|cell| cell.get().cast::<c_char>().cast_const())
}

/// Copies `text` into an array of a C struct, as [`copy_text`] does.
pub(crate) fn c_text<const BYTES: usize>(text: &str) -> [c_char; BYTES] {
    let mut buffer = [0_u8; BYTES];
    copy_text(text, &mut buffer);
    buffer.map(|byte| byte as c_char)
}

/// Copies `text` into `buffer` with a NUL, [`shortened`] to it. NULs inside become '?'.
fn copy_text(text: &str, buffer: &mut [u8]) {
    let Some(bytes_max) = buffer.len().checked_sub(1) else { return };
    let text = shortened(text, bytes_max);
    let (kept, rest) = buffer.split_at_mut(text.len());
    for (to, from) in kept.iter_mut().zip(text.bytes()) {
        *to = if from == 0 { b'?' } else { from };
    }
    rest.fill(0);
}

/// Returns `text` in at most `bytes_max` bytes, with `…` where some are missing. The last of several lines stays if it
/// fits: that of an out-of-memory error names the dump.
fn shortened(text: &str, bytes_max: usize) -> Cow<'_, str> {
    const MARK: &str = "…";
    if text.len() <= bytes_max {
        return text.into();
    }
    let Some(room) = bytes_max.checked_sub(MARK.len()) else { return "".into() };
    let last_line = text.rfind('\n').map_or("", |at| &text[at..]);
    let last_line = if last_line.len() <= room { last_line } else { "" };
    let kept = text.floor_char_boundary(room - last_line.len());
    format!("{}{MARK}{last_line}", &text[..kept]).into()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last() -> String {
        // SAFETY: the buffer is NUL-terminated and this thread's own.
        unsafe { CStr::from_ptr(last_error()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn each_thread_has_its_own_message() {
        set_last_error("mine");
        std::thread::spawn(|| {
            assert_eq!(last(), "");
            set_last_error("theirs");
        })
        .join()
        .unwrap();
        assert_eq!(last(), "mine");
    }

    #[test]
    fn long_text_is_cut_at_a_character_and_short_text_is_padded() {
        set_last_error(&"é".repeat(MESSAGE_BYTES_MAX));
        assert_eq!(last().len(), MESSAGE_BYTES_MAX - 1);
        assert!(last().ends_with("éé…"));
        set_last_error("a\0b");
        assert_eq!(last(), "a?b");
        assert_eq!(shortened("aéé", 4), "a…", "a character is kept whole");
        assert_eq!((&*shortened("abcd", 4), &*shortened("abcd", 2)), ("abcd", ""));
    }

    #[test]
    fn the_last_line_of_a_long_message_stays() {
        let dump = format!("The dump shows it: xdg-open /{}.html", "long/".repeat(100));
        set_last_error(&format!("out of memory\n{}\n{dump}", "held by a tag\n".repeat(200)));
        let seen = last();
        assert_eq!(seen.len(), MESSAGE_BYTES_MAX - 1);
        assert!(seen.starts_with("out of memory\nheld") && seen.ends_with(&format!("…\n{dump}")));
        set_last_error(&format!("out of memory\n/{}", "x".repeat(MESSAGE_BYTES_MAX)));
        assert!(last().starts_with("out of memory\n/xxx") && last().ends_with("xx…"));
    }
}
