//! One line to the user where no status can carry it: `malloc` has no way to say why.

/// Most bytes of one note.
const NOTE_BYTES_MAX: usize = 4096;

/// Writes `text` to standard error in one system call, so notes of threads do not mix.
pub(crate) fn say(text: &str) {
    let mut line = String::with_capacity(text.len() + 16);
    line.push_str("dormouse: ");
    line.push_str(text);
    line.truncate(line.floor_char_boundary(NOTE_BYTES_MAX - 1));
    line.push('\n');
    write(line.as_bytes());
}

/// Writes bytes as they are.
pub(crate) fn write(bytes: &[u8]) {
    // SAFETY: the pointer and length are those of a live slice. A failed or short write to
    // standard error has nobody to be reported to.
    let _ignored = unsafe { libc::write(libc::STDERR_FILENO, bytes.as_ptr().cast(), bytes.len()) };
}
