//! Files of sequences: JSON lines, also compressed by gzip, Parquet, Arrow IPC, detected by their first bytes.
//!
//! Rows are appended to [`Sequences`] as they are read; at most one line or batch of rows is buffered.

mod arrow;
mod columns;
mod damage;
mod error;
mod footer;
mod gzip;
mod json_lines;
mod message;
mod names;
mod parquet;

use std::fs::File;
use std::io::{self, BufReader, Cursor, Read, Seek};
use std::os::fd::AsFd;
use std::path::Path;

pub use error::{Place, ReadError};
pub use names::Names;

use arrow_schema::ArrowError;

use crate::Sequences;
use crate::progress::Progress;

/// The file name that means standard input.
pub const STANDARD_INPUT: &str = "-";
/// Number of bytes that determine the format.
const HEAD_BYTES: u64 = 8;

/// The byte order mark that some editors put before UTF-8 text.
const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";

/// A file format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Format {
    JsonLines,
    Parquet,
    ArrowFile,
    ArrowStream,
    Gzip,
}

impl Format {
    fn of(head: &[u8]) -> Option<Self> {
        const CONTINUATION: &[u8] = &[0xff; 4];
        let head = head.strip_prefix(BYTE_ORDER_MARK).unwrap_or(head);
        match head {
            head if head.starts_with(b"PAR1") => Some(Self::Parquet),
            head if head.starts_with(b"ARROW1") => Some(Self::ArrowFile),
            head if head.starts_with(CONTINUATION) => Some(Self::ArrowStream),
            head if head.starts_with(gzip::MAGIC) => Some(Self::Gzip),
            head => {
                let first = head.iter().find(|byte| !byte.is_ascii_whitespace());
                first.is_none_or(|first| *first == b'{').then_some(Self::JsonLines)
            }
        }
    }

    const fn described(self) -> &'static str {
        match self {
            Self::JsonLines => "JSON lines",
            Self::Parquet => "a Parquet file",
            Self::ArrowFile => "an Arrow file",
            Self::ArrowStream => "an Arrow stream",
            Self::Gzip => "compressed again",
        }
    }
}

/// Reads a file, or standard input for [`STANDARD_INPUT`]. `names`: the fields and columns to read.
///
/// # Errors
/// See [`ReadError`]; the rows before the error have been appended.
pub fn read(path: &Path, names: &Names, sequences: &mut Sequences) -> Result<(), ReadError> {
    read_with(path, names, sequences, &Progress::hidden())
}

/// Reads a file as [`read`]. `bar` is told how much has been read.
pub(crate) fn read_with(
    path: &Path,
    names: &Names,
    sequences: &mut Sequences,
    bar: &Progress,
) -> Result<(), ReadError> {
    let name = name(path);
    let io = |source| ReadError::Io { file: name.clone(), source };
    let before = sequences.count();
    let mut input = open(path).map_err(io)?;
    let is_whole = matches!(input.stream_position(), Ok(0));
    let rewound = |mut input: File| input.rewind().map(|()| input).map_err(io);
    let (format, head) = format(&name, &mut input)?;
    let mut task = Task { file: &name, names, sequences, bar };
    let refuse = |format| ReadError::NotFromPipe { file: name.clone(), format };
    // The first bytes were read already.
    let whole = |head, input| BufReader::new(Cursor::new(head).chain(bar.counted(input)));
    match format {
        Format::ArrowFile if !is_whole => return Err(refuse("an Arrow file")),
        Format::Parquet if !is_whole => return Err(refuse("a Parquet file")),
        Format::ArrowFile => damage::caught(&name, || task.arrow_file(rewound(input)?))?,
        Format::Parquet => damage::caught(&name, || task.parquet(rewound(input)?))?,
        Format::ArrowStream => damage::caught(&name, || task.arrow_stream(whole(head, input)))?,
        Format::JsonLines => json_lines::read(&name, whole(head, input), names, sequences)?,
        Format::Gzip => {
            let mut input = gzip::Inflated::new(whole(head, input));
            let (inner, head) = self::format(&name, &mut input)?;
            if inner != Format::JsonLines {
                return Err(ReadError::Compressed { file: name, format: inner.described() });
            }
            let input = BufReader::new(Cursor::new(head).chain(input));
            json_lines::read(&name, input, names, sequences)?;
        }
    }
    if sequences.count() == before {
        return Err(ReadError::Empty { file: name });
    }
    Ok(())
}

/// Opens a file. Standard input redirected from a file is seekable.
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

/// A Parquet or Arrow file to read, and where its rows go.
struct Task<'a> {
    file: &'a str,
    names: &'a Names,
    sequences: &'a mut Sequences,
    bar: &'a Progress,
}

impl Task<'_> {
    fn refuse(&self, source: ArrowError) -> ReadError {
        ReadError::Arrow { file: self.file.to_owned(), source }
    }
}
