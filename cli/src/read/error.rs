//! Errors of reading sequences, with their location.

use std::fmt;
use std::io;

use arrow_schema::ArrowError;
use parquet::errors::ParquetError;

use super::json_lines::LINE_BYTES_MAX;
use crate::Refusal;

/// A location in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// Line of a text file, from 1.
    Line(u64),
    /// Row of a table, from 0.
    Row(u64),
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Line(line) => write!(f, "line {line}"),
            Self::Row(row) => write!(f, "row {row}"),
        }
    }
}

/// An error of reading a file of sequences.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// The file cannot be opened or read.
    #[error("{file}: {source}")]
    Io {
        /// The file.
        file: String,
        /// The cause.
        source: io::Error,
    },
    /// The file has no sequences.
    #[error("{file} has no sequences; accepted: 1 or more")]
    Empty {
        /// The file.
        file: String,
    },
    /// The file has an unknown format.
    #[error(
        "{file} begins with `{seen}`; accepted: JSON lines (also gzip), Parquet, Arrow IPC (file or stream)"
    )]
    Format {
        /// The file.
        file: String,
        /// The first bytes.
        seen: String,
    },
    /// A compressed file that has no JSON lines.
    #[error("{file} is gzip of {format}; accepted: gzip of JSON lines")]
    Compressed {
        /// The file.
        file: String,
        /// The format inside.
        format: &'static str,
    },
    /// The format needs random access; the input is a stream.
    #[error("{file} is {format}; accepted from a pipe: JSON lines (also gzip), an Arrow stream")]
    NotFromPipe {
        /// The file.
        file: String,
        /// The format.
        format: &'static str,
    },
    /// A line exceeds the length limit.
    #[error("{file}, line {line} is longer than {LINE_BYTES_MAX} bytes; accepted: at most that")]
    LineLength {
        /// The file.
        file: String,
        /// Line number, from 1.
        line: u64,
    },
    /// A line is not a valid record.
    #[error(
        "{file}, line {line}, character {character}: {what}; accepted: an object on one line, such as {{\"ids\": [1, 2, 3]}}"
    )]
    Json {
        /// The file.
        file: String,
        /// Line number, from 1.
        line: u64,
        /// Column in bytes, from 1.
        character: usize,
        /// Description of the problem.
        what: String,
    },
    /// A value is not accepted.
    #[error("{file}, {place}: {} is {}; accepted: {}", refusal.field, refusal.seen, refusal.accepted)]
    Value {
        /// The file.
        file: String,
        /// Location in the file.
        place: Place,
        /// The value seen and the values accepted.
        refusal: Refusal,
    },
    /// The table lacks the requested column.
    #[error("{file} has no column {column}; accepted with {flag}: {columns}")]
    NoColumn {
        /// The file.
        file: String,
        /// The requested column.
        column: String,
        /// The flag that names another.
        flag: &'static str,
        /// Columns of the table.
        columns: String,
    },
    /// A column has the wrong type.
    #[error("{file}: column {column} is {seen}; accepted: {accepted}")]
    ColumnType {
        /// The file.
        file: String,
        /// The column.
        column: String,
        /// Its type.
        seen: String,
        /// Accepted types.
        accepted: &'static str,
    },
    /// Parts of the table are inconsistent.
    #[error("{file} is damaged: {what}")]
    Damaged {
        /// The file.
        file: String,
        /// The inconsistency.
        what: String,
    },
    /// Invalid Parquet, or an unsupported feature.
    #[error("{file}: {source}")]
    Parquet {
        /// The file.
        file: String,
        /// Description of the problem.
        source: ParquetError,
    },
    /// Invalid Arrow, or an unsupported feature.
    #[error("{file}: {source}")]
    Arrow {
        /// The file.
        file: String,
        /// Description of the problem.
        source: ArrowError,
    },
}
