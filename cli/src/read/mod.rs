//! Files of sequences: JSON lines, Parquet, Arrow IPC. What a file is, its first bytes say.
//!
//! Rows go into [`Sequences`] as they come; of a file, a batch of rows or a line is held beside
//! them, never all of it.

mod arrow;
mod columns;
mod damage;
mod error;
mod footer;
mod json_lines;
mod message;
mod parquet;
mod tables;

use std::fs::File;
use std::io::{self, BufReader, Cursor, Read, Seek};
use std::os::fd::AsFd;
use std::path::Path;

pub use error::{Place, ReadError};

use self::tables::Task;
use crate::Sequences;

/// The name of standard input where a file is asked for.
pub const STANDARD_INPUT: &str = "-";
/// Bytes by which a file's format is told.
const HEAD_BYTES: u64 = 8;

/// What some editors begin a text in UTF-8 with.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// What a file is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    JsonLines,
    Parquet,
    ArrowFile,
    ArrowStream,
}

impl Format {
    fn of(head: &[u8]) -> Option<Self> {
        const CONTINUATION: &[u8] = &[0xff; 4];
        let head = head.strip_prefix(BYTE_ORDER_MARK).unwrap_or(head);
        match head {
            head if head.starts_with(b"PAR1") => Some(Self::Parquet),
            head if head.starts_with(b"ARROW1") => Some(Self::ArrowFile),
            head if head.starts_with(CONTINUATION) => Some(Self::ArrowStream),
            head => {
                let first = head.iter().find(|byte| !byte.is_ascii_whitespace());
                first.is_none_or(|first| *first == b'{').then_some(Self::JsonLines)
            }
        }
    }
}

/// Reads a file, or standard input where it is named [`STANDARD_INPUT`]. `column` has the token ids
/// in Parquet and Arrow files.
///
/// # Errors
/// See [`ReadError`]; rows before the one refused have been taken.
pub fn read(path: &Path, column: &str, sequences: &mut Sequences) -> Result<(), ReadError> {
    let name = name(path);
    let io = |source| ReadError::Io { file: name.clone(), source };
    let before = sequences.count();
    let mut input = open(path).map_err(io)?;
    let is_whole = matches!(input.stream_position(), Ok(0));
    let (format, head) = format(&name, &mut input)?;
    let mut task = Task { file: &name, column, sequences };
    if is_whole {
        input.rewind().map_err(io)?;
        match format {
            Format::JsonLines => json_lines::read(&name, BufReader::new(input), sequences)?,
            Format::ArrowStream => {
                damage::caught(&name, || task.arrow_stream(BufReader::new(input)))?;
            }
            Format::ArrowFile => damage::caught(&name, || task.arrow_file(input))?,
            Format::Parquet => damage::caught(&name, || task.parquet(input))?,
        }
    } else {
        let input = BufReader::new(Cursor::new(head).chain(input));
        match format {
            Format::JsonLines => json_lines::read(&name, input, sequences)?,
            Format::ArrowStream => damage::caught(&name, || task.arrow_stream(input))?,
            Format::ArrowFile => {
                return Err(ReadError::NotFromPipe { file: name, format: "an Arrow file" });
            }
            Format::Parquet => {
                return Err(ReadError::NotFromPipe { file: name, format: "a Parquet file" });
            }
        }
    }
    if sequences.count() == before {
        return Err(ReadError::Empty { file: name });
    }
    Ok(())
}

/// Standard input is a file like others, and where a file was redirected to it, one that has an end.
fn open(path: &Path) -> io::Result<File> {
    if path.as_os_str() == STANDARD_INPUT {
        return Ok(File::from(io::stdin().as_fd().try_clone_to_owned()?));
    }
    File::open(path)
}

fn name(path: &Path) -> String {
    if path.as_os_str() == STANDARD_INPUT {
        "standard input".to_owned()
    } else {
        path.display().to_string()
    }
}

fn format(name: &str, input: &mut impl Read) -> Result<(Format, Vec<u8>), ReadError> {
    let mut head = Vec::new();
    let read = input.by_ref().take(HEAD_BYTES).read_to_end(&mut head);
    read.map_err(|source| ReadError::Io { file: name.to_owned(), source })?;
    match Format::of(&head) {
        Some(format) => Ok((format, head)),
        None => {
            Err(ReadError::Format { file: name.to_owned(), seen: head.escape_ascii().to_string() })
        }
    }
}
