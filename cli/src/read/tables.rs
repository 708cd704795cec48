//! Parquet and Arrow IPC files, a batch of rows at a time.

use std::fs::File;
use std::io::{BufReader, Read};

use arrow_array::RecordBatchReader;
use arrow_ipc::reader::{FileReader, StreamReader};
use arrow_schema::ArrowError;
use parquet::arrow::ProjectionMask;
use parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use parquet::errors::ParquetError;

use super::ReadError;
use super::columns::Columns;
use crate::Sequences;

/// Rows of a Parquet file decoded at a time: of 100,000 ids each, 50 MB.
const BATCH_ROWS: usize = 64;

/// What is read, and into what.
pub(super) struct Task<'a> {
    pub(super) file: &'a str,
    /// The column of token ids.
    pub(super) column: &'a str,
    pub(super) sequences: &'a mut Sequences,
}

impl Task<'_> {
    /// Only the columns that are asked for are decoded.
    pub(super) fn parquet(&mut self, input: File) -> Result<(), ReadError> {
        let file = || self.file.to_owned();
        let refuse = |source: ParquetError| ReadError::Parquet { file: file(), source };
        let builder = ParquetRecordBatchReaderBuilder::try_new(input).map_err(refuse)?;
        let columns = Columns::find(self.file, self.column, builder.schema())?;
        let mask = ProjectionMask::roots(builder.parquet_schema(), columns.indices());
        let builder = builder.with_projection(mask).with_batch_size(BATCH_ROWS);
        let reader = builder.build().map_err(refuse)?;
        self.take(reader)
    }

    pub(super) fn arrow_file(&mut self, input: File) -> Result<(), ReadError> {
        let reader = FileReader::try_new(BufReader::new(input), None);
        self.take(reader.map_err(|source| self.refuse(source))?)
    }

    pub(super) fn arrow_stream(&mut self, input: impl Read) -> Result<(), ReadError> {
        let reader = StreamReader::try_new(BufReader::new(input), None);
        self.take(reader.map_err(|source| self.refuse(source))?)
    }

    fn take(&mut self, reader: impl RecordBatchReader) -> Result<(), ReadError> {
        let mut columns = Columns::find(self.file, self.column, &reader.schema())?;
        for batch in reader {
            let batch = batch.map_err(|source| self.refuse(source))?;
            columns.take(&batch, self.sequences)?;
        }
        Ok(())
    }

    fn refuse(&self, source: ArrowError) -> ReadError {
        ReadError::Arrow { file: self.file.to_owned(), source }
    }
}
