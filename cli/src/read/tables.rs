//! What Parquet and Arrow files have in common.

use arrow_schema::ArrowError;

use super::ReadError;
use crate::Sequences;

/// What is read, and into what.
pub(super) struct Task<'a> {
    pub(super) file: &'a str,
    /// The column of token ids.
    pub(super) column: &'a str,
    pub(super) sequences: &'a mut Sequences,
}

impl Task<'_> {
    pub(super) fn refuse(&self, source: ArrowError) -> ReadError {
        ReadError::Arrow { file: self.file.to_owned(), source }
    }
}
