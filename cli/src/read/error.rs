//! What a file may not say, and where it says so.

use std::fmt;
use std::io;

use arrow_schema::ArrowError;
use parquet::errors::ParquetError;

use super::json_lines::LINE_BYTES_MAX;
use crate::Refusal;

/// Where in a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// A line of a text, from 1, as editors count.
    Line(u64),
    /// A row of a table, from 0, as data frames count.
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

/// Why a file was not read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReadError {
    /// It cannot be opened or read.
    #[error("{file}: {source}")]
    Io {
        /// Which file.
        file: String,
        /// Why.
        source: io::Error,
    },
    /// It has no sequence.
    #[error("{file} has no sequences; accepted: 1 or more")]
    Empty {
        /// Which file.
        file: String,
    },
    /// It is none of the formats.
    #[error(
        "{file} begins with `{seen}`; accepted: JSON lines, Parquet, Arrow IPC (file or stream)"
    )]
    Format {
        /// Which file.
        file: String,
        /// Its first bytes.
        seen: String,
    },
    /// A format that is read from its end.
    #[error("{file} is {format}; accepted from a pipe: JSON lines, an Arrow stream")]
    NotFromPipe {
        /// Which file.
        file: String,
        /// Which one.
        format: &'static str,
    },
    /// A line that goes on and on.
    #[error("{file}, line {line}: longer than {LINE_BYTES_MAX} bytes; accepted: up to as many")]
    LineLength {
        /// Which file.
        file: String,
        /// Which line.
        line: u64,
    },
    /// A line that is no record.
    #[error(
        "{file}, line {line}, character {character}: {what}; accepted: an object on one line, such as {{\"ids\": [1, 2, 3]}}"
    )]
    Json {
        /// Which file.
        file: String,
        /// Which line.
        line: u64,
        /// Which byte of it, from 1.
        character: usize,
        /// What is wrong there.
        what: String,
    },
    /// A value that is not accepted.
    #[error("{file}, {place}: {} is {}; accepted: {}", refusal.field, refusal.seen, refusal.accepted)]
    Value {
        /// Which file.
        file: String,
        /// Where in it.
        place: Place,
        /// Which value, and what is accepted.
        refusal: Refusal,
    },
    /// A table without a column that is asked for.
    #[error(
        "{file} has no column {column}; it has: {columns}; --column names that of the token ids"
    )]
    NoColumn {
        /// Which file.
        file: String,
        /// The column asked for.
        column: String,
        /// Those it has.
        columns: String,
    },
    /// A column of another type.
    #[error("{file}: column {column} is {seen}; accepted: {accepted}")]
    ColumnType {
        /// Which file.
        file: String,
        /// Which column.
        column: String,
        /// Its type.
        seen: String,
        /// What it may be.
        accepted: &'static str,
    },
    /// A table whose parts do not fit together.
    #[error("{file} is damaged: {what}")]
    Damaged {
        /// Which file.
        file: String,
        /// What the reader met.
        what: String,
    },
    /// Not the Parquet that the file says it is, or more of it than is read here.
    #[error("{file}: {source}")]
    Parquet {
        /// Which file.
        file: String,
        /// What is wrong.
        source: ParquetError,
    },
    /// Not the Arrow that the file says it is, or more of it than is read here.
    #[error("{file}: {source}")]
    Arrow {
        /// Which file.
        file: String,
        /// What is wrong.
        source: ArrowError,
    },
}
