//! Tables in every accepted format.

use std::fs::File;
use std::path::Path;

use arrow_array::RecordBatch;
use arrow_ipc::CompressionType;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;

/// How a table is written.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Way {
    Parquet(Compression),
    File(Option<CompressionType>),
    Stream(Option<CompressionType>),
}

pub(crate) fn ways() -> [Way; 10] {
    [
        Way::Parquet(Compression::UNCOMPRESSED),
        Way::Parquet(Compression::SNAPPY),
        Way::Parquet(Compression::LZ4_RAW),
        Way::Parquet(Compression::ZSTD(ZstdLevel::default())),
        Way::File(None),
        Way::File(Some(CompressionType::LZ4_FRAME)),
        Way::File(Some(CompressionType::ZSTD)),
        Way::Stream(None),
        Way::Stream(Some(CompressionType::LZ4_FRAME)),
        Way::Stream(Some(CompressionType::ZSTD)),
    ]
}

/// Writes a table in batches of `rows`.
pub(crate) fn write(table: &RecordBatch, way: Way, rows: usize, path: &Path) {
    let file = File::create(path).unwrap();
    let batches = (0..table.num_rows())
        .step_by(rows)
        .map(|at| table.slice(at, rows.min(table.num_rows() - at)));
    let options =
        |compression| IpcWriteOptions::default().try_with_compression(compression).unwrap();
    match way {
        Way::Parquet(compression) => {
            let properties = WriterProperties::builder()
                .set_compression(compression)
                .set_max_row_group_row_count(Some(rows))
                .build();
            let mut writer = ArrowWriter::try_new(file, table.schema(), Some(properties)).unwrap();
            batches.for_each(|batch| writer.write(&batch).unwrap());
            writer.close().unwrap();
        }
        Way::File(compression) => {
            let mut writer =
                FileWriter::try_new_with_options(file, &table.schema(), options(compression))
                    .unwrap();
            batches.for_each(|batch| writer.write(&batch).unwrap());
            writer.finish().unwrap();
        }
        Way::Stream(compression) => {
            let mut writer =
                StreamWriter::try_new_with_options(file, &table.schema(), options(compression))
                    .unwrap();
            batches.for_each(|batch| writer.write(&batch).unwrap());
            writer.finish().unwrap();
        }
    }
}
