//! Faults: what a failed call comes to, and the sentence its thread can ask for afterwards.
//!
//! The sentence lives in a fixed thread-local buffer that has no destructor, so asking for it is
//! safe in every corner of a thread's life, its exit included.

use std::borrow::Cow;
use std::cell::UnsafeCell;
use std::ffi::c_char;

use crate::status::{self, dormouse_status_t};

/// Most bytes of a sentence, with its NUL. An out-of-memory report of 12 lines fits.
const SENTENCE_BYTES: usize = 2048;

/// A failed call: its status and one sentence with the value seen and what is accepted.
#[derive(Debug)]
pub(crate) struct Fault {
    /// Negative.
    pub(crate) status: dormouse_status_t,
    /// For `dormouse_get_last_error`.
    pub(crate) sentence: Cow<'static, str>,
}

impl Fault {
    /// A fault with `status`, saying `sentence`.
    pub(crate) fn new(status: dormouse_status_t, sentence: impl Into<Cow<'static, str>>) -> Self {
        Self { status, sentence: sentence.into() }
    }

    /// A pointer called `name` that must not be NULL was.
    pub(crate) fn null(name: &str) -> Self {
        Self::new(status::DORMOUSE_ERR_NULL, format!("{name} is NULL; a valid pointer is required"))
    }

    /// A value outside what is accepted.
    pub(crate) fn argument(sentence: impl Into<Cow<'static, str>>) -> Self {
        Self::new(status::DORMOUSE_ERR_ARGUMENT, sentence)
    }
}

thread_local! {
    static SENTENCE: UnsafeCell<[u8; SENTENCE_BYTES]> = const { UnsafeCell::new([0; SENTENCE_BYTES]) };
}

/// Keeps `sentence` for this thread, cut at a character where it is too long.
pub(crate) fn keep(sentence: &str) {
    SENTENCE.with(|cell| {
        // SAFETY: only this thread reaches its buffer, and no reference into it outlives `keep`;
        // C holds a bare pointer whose contents the header says the next call replaces.
        let buffer = unsafe { &mut *cell.get() };
        copy_text(sentence, buffer);
    });
}

/// This thread's sentence: NUL-terminated, never NULL.
pub(crate) fn last_sentence() -> *const c_char {
    SENTENCE.with(|cell| cell.get().cast::<c_char>().cast_const())
}

/// Copies `text` into `buffer` with a NUL, cut at a character boundary; NULs inside become '?'.
pub(crate) fn copy_text(text: &str, buffer: &mut [u8]) {
    let Some(room) = buffer.len().checked_sub(1) else { return };
    let end = text.floor_char_boundary(room);
    let (kept, rest) = buffer.split_at_mut(end);
    for (to, from) in kept.iter_mut().zip(text.bytes()) {
        *to = if from == 0 { b'?' } else { from };
    }
    rest.fill(0);
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::ffi::CStr;

    fn last() -> String {
        // SAFETY: the buffer is NUL-terminated and this thread's own.
        unsafe { CStr::from_ptr(last_sentence()) }.to_str().unwrap().to_owned()
    }

    #[test]
    fn each_thread_has_its_own_sentence() {
        keep("mine");
        std::thread::spawn(|| {
            assert_eq!(last(), "");
            keep("theirs");
        })
        .join()
        .unwrap();
        assert_eq!(last(), "mine");
    }

    #[test]
    fn long_text_is_cut_at_a_character_and_shorter_text_leaves_no_tail() {
        keep(&"é".repeat(SENTENCE_BYTES));
        assert_eq!(last().len(), SENTENCE_BYTES - 2, "odd room, two-byte characters");
        keep("a\0b");
        assert_eq!(last(), "a?b");
    }
}
