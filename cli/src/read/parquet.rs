//! Parquet files, one batch of rows at a time. The number of values decoded per batch is bounded: a page of a
//! few bytes can claim billions of values.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use arrow_schema::ArrowError;
use parquet::arrow::arrow_reader::{
    ArrowReaderMetadata, ArrowReaderOptions, ParquetRecordBatchReader, RowGroups,
};
use parquet::arrow::{ProjectionMask, parquet_to_arrow_field_levels};
use parquet::basic::Compression;
use parquet::column::page::{Page, PageIterator, PageMetadata, PageReader};
use parquet::errors::{ParquetError, Result as ParquetResult};
use parquet::file::metadata::{ParquetMetaData, RowGroupMetaData};
use parquet::file::serialized_reader::SerializedPageReader;

use super::columns::Columns;
use super::footer;
use super::{ReadError, Task};

/// Rows per batch; 100,000 ids each take 50 MB.
const BATCH_ROWS: usize = 64;
/// Maximum values per batch: two million per row, 1 GiB of 64-bit ids. Small in tests, which reach it.
const BATCH_VALUES_MAX: u64 = if cfg!(test) { 1 << 9 } else { 1 << 27 };
/// Size of the footer length and the magic bytes at the end of a file.
const TAIL_BYTES: u64 = 8;
const COMPRESSIONS: &str = "none, SNAPPY, LZ4, LZ4_RAW, ZSTD";

impl Task<'_> {
    /// Reads a Parquet file; decodes only the needed columns.
    pub(super) fn parquet(&mut self, mut input: File) -> Result<(), ReadError> {
        let name = self.file;
        let refuse = |source| ReadError::Parquet { file: name.to_owned(), source };
        let damaged = |what| ReadError::Damaged { file: name.to_owned(), what };
        let tail = footer_bytes(&mut input);
        let tail = tail.map_err(|source| ReadError::Io { file: name.to_owned(), source })?;
        // The reader refuses a missing footer.
        tail.map_or(Ok(()), |bytes| footer::check_depth(&bytes)).map_err(damaged)?;
        let described = ArrowReaderMetadata::load(&input, ArrowReaderOptions::default());
        let described = described.map_err(refuse)?;
        let metadata = described.metadata();
        let found = Columns::find(name, self.names, described.schema())?;
        let schema = metadata.file_metadata().schema_descr();
        let mask = ProjectionMask::roots(schema, found.indices());
        self.compressions(metadata, &mask)?;
        let hint = Some(described.schema().fields());
        let levels = parquet_to_arrow_field_levels(schema, mask, hint).map_err(refuse)?;
        let groups = Groups {
            file: Arc::new(input),
            metadata: Arc::clone(metadata),
            left: Arc::new(AtomicU64::new(BATCH_VALUES_MAX)),
        };
        let rows = groups.num_rows() as u64;
        let reader =
            ParquetRecordBatchReader::try_new_with_row_groups(&levels, &groups, BATCH_ROWS, None);
        let mut columns = None;
        for batch in reader.map_err(refuse)? {
            let batch = batch.map_err(|error| refuse(plain(error)))?;
            let columns = match &mut columns {
                Some(columns) => columns,
                None => columns.insert(Columns::find(name, self.names, &batch.schema())?),
            };
            columns.take(&batch, self.sequences)?;
            self.bar.at_part(columns.rows(), rows);
            groups.left.store(BATCH_VALUES_MAX, Ordering::Relaxed);
        }
        match columns.map_or(0, |columns| columns.rows()) {
            seen if seen == rows => Ok(()),
            seen => Err(damaged(format!("it has {seen} rows; its footer claims {rows}"))),
        }
    }

    /// Refuses unsupported compressions.
    fn compressions(
        &self,
        metadata: &ParquetMetaData,
        mask: &ProjectionMask,
    ) -> Result<(), ReadError> {
        let chunks =
            metadata.row_groups().iter().flat_map(|group| group.columns().iter().enumerate());
        for (_, chunk) in chunks.filter(|(leaf, _)| mask.leaf_included(*leaf)) {
            let seen = match chunk.compression() {
                Compression::GZIP(_) => "GZIP",
                Compression::BROTLI(_) => "BROTLI",
                Compression::LZO => "LZO",
                _ => continue,
            };
            let column = chunk.column_path().parts().first().cloned().unwrap_or_default();
            let (file, seen) = (self.file.to_owned(), format!("compressed with {seen}"));
            return Err(ReadError::ColumnType { file, column, seen, accepted: COMPRESSIONS });
        }
        Ok(())
    }
}

/// Unwraps the decoder's error, which has two prefixes.
fn plain(error: ArrowError) -> ParquetError {
    let ArrowError::ParquetError(text) = error else { return ParquetError::External(error.into()) };
    let text = text.strip_prefix("Parquet error: ").unwrap_or(&text);
    ParquetError::General(text.to_owned())
}

/// Returns the footer if the file has one.
fn footer_bytes(input: &mut File) -> io::Result<Option<Vec<u8>>> {
    let size = input.seek(SeekFrom::End(0))?;
    let mut tail = [0; TAIL_BYTES as usize];
    let Some(end) = size.checked_sub(TAIL_BYTES) else { return Ok(None) };
    input.seek(SeekFrom::Start(end))?;
    input.read_exact(&mut tail)?;
    let [a, b, c, d, known @ ..] = tail;
    let length = u32::from_le_bytes([a, b, c, d]).into();
    let Some(begin) = end.checked_sub(length).filter(|_| known == *b"PAR1") else {
        return Ok(None);
    };
    input.seek(SeekFrom::Start(begin))?;
    let mut bytes = Vec::new();
    input.take(length).read_to_end(&mut bytes)?;
    Ok(Some(bytes))
}

/// All row groups of a file and the remaining values of the batch.
struct Groups {
    file: Arc<File>,
    metadata: Arc<ParquetMetaData>,
    left: Arc<AtomicU64>,
}

impl RowGroups for Groups {
    fn num_rows(&self) -> usize {
        let rows = self.row_groups().map(|group| group.num_rows().max(0) as usize);
        rows.fold(0, usize::saturating_add)
    }

    fn column_chunks(&self, column: usize) -> ParquetResult<Box<dyn PageIterator>> {
        let file = Arc::clone(&self.file);
        let (metadata, left) = (Arc::clone(&self.metadata), Arc::clone(&self.left));
        Ok(Box::new(Chunks { file, metadata, left, column, group: 0 }))
    }

    fn row_groups(&self) -> Box<dyn Iterator<Item = &RowGroupMetaData> + '_> {
        Box::new(self.metadata.row_groups().iter())
    }

    fn metadata(&self) -> &ParquetMetaData {
        &self.metadata
    }
}

/// The pages of a column, by row group.
struct Chunks {
    file: Arc<File>,
    metadata: Arc<ParquetMetaData>,
    left: Arc<AtomicU64>,
    column: usize,
    group: usize,
}

impl Iterator for Chunks {
    type Item = ParquetResult<Box<dyn PageReader>>;

    fn next(&mut self) -> Option<Self::Item> {
        let group = self.metadata.row_groups().get(self.group)?;
        self.group += 1;
        let rows = group.num_rows().max(0) as usize;
        let chunk = group.column(self.column);
        let pages = SerializedPageReader::new(Arc::clone(&self.file), chunk, rows, None);
        let left = Arc::clone(&self.left);
        Some(pages.map(|inner| Box::new(Pages { inner, left }) as _))
    }
}

impl PageIterator for Chunks {}

/// Pages whose values are counted before decoding.
struct Pages {
    inner: SerializedPageReader<File>,
    left: Arc<AtomicU64>,
}

impl Pages {
    fn counted(&self, page: Page) -> ParquetResult<Page> {
        let values = u64::from(page.num_values());
        // A dictionary value takes at least a byte; elsewhere many values may share one.
        let held = page.buffer().len() as u64;
        if page.is_dictionary_page() && values > held {
            let what = format!("a dictionary claims {values} values in {held} bytes");
            return Err(ParquetError::General(what));
        }
        let left = self.left.load(Ordering::Relaxed);
        let Some(left) = left.checked_sub(values) else {
            let what = format!(
                "{BATCH_ROWS} rows have at least {} values; accepted: at most {BATCH_VALUES_MAX}",
                (BATCH_VALUES_MAX - left).saturating_add(values)
            );
            return Err(ParquetError::General(what));
        };
        self.left.store(left, Ordering::Relaxed);
        Ok(page)
    }
}

impl Iterator for Pages {
    type Item = ParquetResult<Page>;

    fn next(&mut self) -> Option<Self::Item> {
        self.get_next_page().transpose()
    }
}

impl PageReader for Pages {
    fn get_next_page(&mut self) -> ParquetResult<Option<Page>> {
        let page = self.inner.get_next_page()?;
        page.map(|page| self.counted(page)).transpose()
    }

    fn peek_next_page(&mut self) -> ParquetResult<Option<PageMetadata>> {
        self.inner.peek_next_page()
    }

    fn skip_next_page(&mut self) -> ParquetResult<()> {
        self.inner.skip_next_page()
    }

    fn at_record_boundary(&mut self) -> ParquetResult<bool> {
        self.inner.at_record_boundary()
    }
}

#[cfg(test)]
mod tests {
    use arrow_array::builder::{ListBuilder, PrimitiveBuilder};
    use arrow_array::types::Int32Type;
    use arrow_array::{ArrayRef, RecordBatch};
    use parquet::arrow::ArrowWriter;
    use parquet::file::properties::WriterProperties;

    use super::*;
    use crate::Sequences;
    use crate::progress::Progress;
    use crate::read::Names;

    /// Writes `rows` rows of `ids` ids, sixteen rows per page, and reads them.
    fn read_of(rows: usize, ids: usize) -> Result<usize, String> {
        let mut lists = ListBuilder::new(PrimitiveBuilder::<Int32Type>::new());
        (0..rows).for_each(|row| lists.append_value((0..ids).map(|at| Some((row + at) as i32))));
        let lists: ArrayRef = Arc::new(lists.finish());
        let table = RecordBatch::try_from_iter([("ids", lists)]).unwrap();
        let path = std::env::temp_dir().join(format!("dormouse-{}-{ids}", std::process::id()));
        let properties = WriterProperties::builder()
            .set_data_page_row_count_limit(16)
            .set_write_batch_size(16)
            .set_dictionary_enabled(false)
            .build();
        let file = File::create(&path).unwrap();
        let mut writer = ArrowWriter::try_new(file, table.schema(), Some(properties)).unwrap();
        writer.write(&table).unwrap();
        writer.close().unwrap();
        let mut sequences = Sequences::new(1 << 20);
        let file = File::open(&path).unwrap();
        std::fs::remove_file(path).unwrap();
        let names = Names { ids: Some("ids".to_owned()), ..Names::default() };
        let bar = Progress::hidden();
        let task = Task { file: "f", names: &names, sequences: &mut sequences, bar: &bar };
        let read = { task }.parquet(file);
        read.map(|()| sequences.count()).map_err(|error| error.to_string())
    }

    #[test]
    fn the_value_limit_applies_per_batch() {
        assert_eq!(read_of(200, 5), Ok(200), "1,000 values, but 320 at a time");
        let said = read_of(64, 20).unwrap_err();
        assert!(said.ends_with(" values; accepted: at most 512"), "{said}");
    }
}
