//! Parquet and Arrow IPC: what is read of them is what JSON lines say, whatever their types.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{LargeListBuilder, ListBuilder, PrimitiveBuilder};
use arrow_array::types::{
    ArrowPrimitiveType, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{ArrayRef, LargeStringArray, PrimitiveArray, RecordBatch, StringArray};
use arrow_ipc::CompressionType;
use arrow_ipc::writer::{FileWriter, IpcWriteOptions, StreamWriter};
use common::Folder;
use dormouse_cli::read::{Place, read};
use dormouse_cli::{ReadError, Refusal, Sequences};
use parquet::arrow::ArrowWriter;
use parquet::basic::{Compression, ZstdLevel};
use parquet::file::properties::WriterProperties;
use proptest::prelude::*;

const VOCAB: u32 = 1000;

/// A row as a text has it.
#[derive(Clone, Debug, serde::Serialize)]
struct Line {
    ids: Vec<i64>,
    weight: f64,
    loss: i64,
    group: i64,
    kind: i64,
}

fn line(ids: &[i64]) -> Line {
    Line { ids: ids.to_vec(), weight: 1.0, loss: 1, group: 0, kind: 0 }
}

#[derive(Clone, Debug)]
struct Rows(Vec<Line>);

impl Rows {
    fn any() -> impl Strategy<Value = Self> {
        let ids = proptest::collection::vec(0..i64::from(VOCAB), 1..6);
        let row = ids.prop_flat_map(|ids| {
            let tokens = ids.len() as i64;
            // Weights that a 32-bit float has too.
            let weight = (-8_i32..8).prop_map(|it| f64::from(it) / 4.0);
            (Just(ids), weight, 0..=tokens, 0_i64..4, 0_i64..2)
        });
        let row = row.prop_map(|(ids, weight, loss, group, kind)| Line {
            ids,
            weight,
            loss,
            group,
            kind,
        });
        proptest::collection::vec(row, 1..150).prop_map(Self)
    }

    fn json_lines(&self) -> String {
        self.0.iter().map(|it| serde_json::to_string(it).unwrap() + "\n").collect()
    }

    fn ids<T: ArrowPrimitiveType>(&self, large: bool) -> ArrayRef
    where
        T::Native: TryFrom<i64, Error: std::fmt::Debug>,
    {
        let values = PrimitiveBuilder::<T>::new();
        let row = |ids: &[i64]| -> Vec<Option<T::Native>> {
            ids.iter().map(|id| Some(T::Native::try_from(*id).unwrap())).collect()
        };
        if large {
            let mut lists = LargeListBuilder::new(values);
            self.0.iter().for_each(|it| lists.append_value(row(&it.ids)));
            Arc::new(lists.finish())
        } else {
            let mut lists = ListBuilder::new(values);
            self.0.iter().for_each(|it| lists.append_value(row(&it.ids)));
            Arc::new(lists.finish())
        }
    }

    fn integers<T: ArrowPrimitiveType>(&self, of: fn(&Line) -> i64) -> ArrayRef
    where
        T::Native: TryFrom<i64, Error: std::fmt::Debug>,
    {
        let values = self.0.iter().map(|it| T::Native::try_from(of(it)).unwrap());
        Arc::new(PrimitiveArray::<T>::from_iter_values(values))
    }

    fn weights(&self, narrow: bool) -> ArrayRef {
        let weights = self.0.iter().map(|it| it.weight);
        if narrow {
            let weights = weights.map(|weight| weight as f32);
            Arc::new(PrimitiveArray::<Float32Type>::from_iter_values(weights))
        } else {
            Arc::new(PrimitiveArray::<Float64Type>::from_iter_values(weights))
        }
    }

    /// A table with a column that is nobody's first, and one last.
    fn table(&self, style: Style) -> RecordBatch {
        let ids = match style.ids {
            0 => self.ids::<Int32Type>(style.large),
            1 => self.ids::<Int64Type>(style.large),
            _ => self.ids::<UInt32Type>(style.large),
        };
        let texts = || self.0.iter().map(|it| it.group.to_string());
        let group: ArrayRef = match style.integers {
            0 => self.integers::<Int8Type>(|it| it.group),
            1 => self.integers::<Int16Type>(|it| it.group),
            2 => self.integers::<Int32Type>(|it| it.group),
            3 => self.integers::<Int64Type>(|it| it.group),
            4 => Arc::new(StringArray::from_iter_values(texts())),
            _ => Arc::new(LargeStringArray::from_iter_values(texts())),
        };
        let loss = |it: &Line| it.loss;
        let kind = |it: &Line| it.kind;
        let (loss, kind) = match style.integers {
            0 => (self.integers::<UInt8Type>(loss), self.integers::<UInt64Type>(kind)),
            1 => (self.integers::<UInt16Type>(loss), self.integers::<Int8Type>(kind)),
            2 => (self.integers::<UInt32Type>(loss), self.integers::<Int16Type>(kind)),
            _ => (self.integers::<UInt64Type>(loss), self.integers::<UInt8Type>(kind)),
        };
        let notes = || -> ArrayRef { Arc::new(StringArray::from_iter_values(texts())) };
        RecordBatch::try_from_iter([
            ("note", notes()),
            ("kind", kind),
            ("input_ids", ids),
            ("weight", self.weights(style.large)),
            ("loss", loss),
            ("group", group),
            ("last", notes()),
        ])
        .unwrap()
    }
}

/// Which types a table's columns have.
#[derive(Clone, Copy, Debug)]
struct Style {
    ids: u8,
    large: bool,
    integers: u8,
}

/// How a table is written.
#[derive(Clone, Copy, Debug)]
enum Way {
    Parquet(Compression),
    File(Option<CompressionType>),
    Stream(Option<CompressionType>),
}

fn ways() -> [Way; 10] {
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
fn write(table: &RecordBatch, way: Way, rows: usize, path: &Path) {
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

fn sequences(path: &Path) -> Sequences {
    let mut sequences = Sequences::new(VOCAB);
    read(path, "input_ids", &mut sequences).unwrap();
    sequences
}

fn assert_same(seen: &Sequences, wanted: &Sequences) {
    assert_eq!(seen.tokens(), wanted.tokens());
    assert_eq!(seen.scoring(), wanted.scoring());
    assert_eq!(seen.groups(), wanted.groups());
    assert_eq!(seen.kinds(), wanted.kinds());
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn a_table_says_what_its_lines_say(
        rows in Rows::any(),
        (ids, large, integers) in (0_u8..3, any::<bool>(), 0_u8..6),
        way in 0..ways().len(),
        batch in 1_usize..100,
    ) {
        let here = Folder::new();
        let wanted = sequences(&here.put("batch.jsonl", rows.json_lines()));
        prop_assert_eq!(wanted.count(), rows.0.len());
        let path = here.path().join("batch");
        write(&rows.table(Style { ids, large, integers }), ways()[way], batch, &path);
        assert_same(&sequences(&path), &wanted);
    }

    /// What is damaged is read or refused; nothing panics, nothing is endless.
    #[test]
    fn damage_is_no_panic(
        way in 0..ways().len(),
        damage in proptest::collection::vec((any::<proptest::sample::Index>(), 1_u8..), 1..8),
        cut in proptest::option::of(any::<proptest::sample::Index>()),
    ) {
        let rows = Rows((0..40).map(|it| line(&[it, it + 1, 7])).collect());
        let here = Folder::new();
        let path = here.path().join("batch");
        write(&rows.table(Style { ids: 1, large: false, integers: 4 }), ways()[way], 16, &path);
        let mut bytes = std::fs::read(&path).unwrap();
        for (at, flip) in damage {
            let at = at.index(bytes.len());
            bytes[at] ^= flip;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let path = here.put("damaged", bytes);
        let _ = read(&path, "input_ids", &mut Sequences::new(VOCAB));
    }
}

#[test]
fn every_format_is_refused_with_the_same_words() {
    let rows = Rows(vec![line(&[1, 2]), line(&[3, 1000])]);
    for way in ways() {
        let here = Folder::new();
        let path = here.path().join("batch");
        write(&rows.table(Style { ids: 1, large: false, integers: 3 }), way, 1, &path);
        let error = read(&path, "input_ids", &mut Sequences::new(VOCAB)).unwrap_err();
        let ReadError::Value { place, refusal, .. } = error else { panic!("{way:?}: {error}") };
        assert_eq!(place, Place::Row(1), "{way:?}");
        let wanted = Refusal {
            field: "input_ids[1]".to_owned(),
            seen: "1000".to_owned(),
            accepted: "0 to 999".to_owned(),
        };
        assert_eq!(refusal, wanted, "{way:?}");
    }
}

/// One table of two rows with these columns, as an Arrow file.
fn file(here: &Folder, columns: Vec<(&str, ArrayRef)>) -> PathBuf {
    let path = here.path().join("batch.arrow");
    write(&RecordBatch::try_from_iter(columns).unwrap(), Way::File(None), 10, &path);
    path
}

fn ids() -> ArrayRef {
    Rows(vec![line(&[1, 2]), line(&[3])]).ids::<Int32Type>(false)
}

fn refusal(here: &Folder, columns: Vec<(&str, ArrayRef)>) -> String {
    let path = file(here, columns);
    let error = read(&path, "input_ids", &mut Sequences::new(VOCAB)).unwrap_err().to_string();
    error.replace(&here.path().display().to_string(), "…")
}

#[test]
fn columns_that_are_not_accepted_are_named() {
    let here = Folder::new();
    let texts = || -> ArrayRef { Arc::new(StringArray::from_iter_values(["a", "b"])) };
    let floats = || -> ArrayRef {
        Arc::new(PrimitiveArray::<Float64Type>::from_iter_values([1.0, f64::NAN]))
    };
    let whole =
        |it: [i64; 2]| -> ArrayRef { Arc::new(PrimitiveArray::<Int64Type>::from_iter_values(it)) };
    let cases = [
        (
            vec![("tokens", ids()), ("weight", floats())],
            "…/batch.arrow has no column input_ids; it has: tokens, weight; --column names that of \
             the token ids",
        ),
        (
            vec![("input_ids", texts())],
            "…/batch.arrow: column input_ids is Utf8; accepted: a list or large list of int32, \
             int64 or uint32",
        ),
        (
            vec![("input_ids", ids()), ("weight", texts())],
            "…/batch.arrow: column weight is Utf8; accepted: float32 or float64",
        ),
        (
            vec![("input_ids", ids()), ("group", floats())],
            "…/batch.arrow: column group is Float64; accepted: an integer type, utf8 or large utf8",
        ),
        (
            vec![("input_ids", ids()), ("loss", floats())],
            "…/batch.arrow: column loss is Float64; accepted: an integer type",
        ),
        (
            vec![("input_ids", ids()), ("kind", texts())],
            "…/batch.arrow: column kind is Utf8; accepted: an integer type",
        ),
        (
            vec![("input_ids", ids()), ("weight", floats())],
            "…/batch.arrow, row 1: weight is NaN; accepted: finite numbers",
        ),
        (
            vec![("input_ids", ids()), ("loss", whole([1, 2]))],
            "…/batch.arrow, row 1: loss is 2; accepted: a position, 0 to 1",
        ),
        (
            vec![("input_ids", ids()), ("kind", whole([0, -1]))],
            "…/batch.arrow, row 1: kind is -1; accepted: 0 to 18446744073709551615",
        ),
        (
            vec![
                ("input_ids", ids()),
                ("group", Arc::new(PrimitiveArray::<UInt64Type>::from_iter_values([0, u64::MAX]))),
            ],
            "…/batch.arrow, row 1: group is 18446744073709551615; accepted: a text, or \
             -9223372036854775808 to 9223372036854775807",
        ),
    ];
    for (columns, wanted) in cases {
        assert_eq!(refusal(&here, columns), wanted);
    }
}

#[test]
fn nulls_are_refused_where_they_are() {
    let here = Folder::new();
    let nothing = "null; accepted: a value in every row, or no such column";
    let mut lists = ListBuilder::new(PrimitiveBuilder::<Int32Type>::new());
    lists.append_value([Some(1)]);
    lists.append_null();
    let lists: ArrayRef = Arc::new(lists.finish());
    let wanted = format!("…/batch.arrow, row 1: input_ids is {nothing}");
    assert_eq!(refusal(&here, vec![("input_ids", lists)]), wanted);

    let mut lists = ListBuilder::new(PrimitiveBuilder::<Int32Type>::new());
    lists.append_value([Some(1)]);
    lists.append_value([Some(1), None, Some(2)]);
    let lists: ArrayRef = Arc::new(lists.finish());
    let wanted = "…/batch.arrow, row 1: input_ids[1] is null; accepted: a token id";
    assert_eq!(refusal(&here, vec![("input_ids", lists)]), wanted);

    for name in ["loss", "group", "kind"] {
        let values: ArrayRef = Arc::new(PrimitiveArray::<Int32Type>::from_iter([Some(1), None]));
        let wanted = format!("…/batch.arrow, row 1: {name} is {nothing}");
        assert_eq!(refusal(&here, vec![("input_ids", ids()), (name, values)]), wanted);
    }
    let values: ArrayRef = Arc::new(PrimitiveArray::<Float32Type>::from_iter([Some(1.0), None]));
    let wanted = format!("…/batch.arrow, row 1: weight is {nothing}");
    assert_eq!(refusal(&here, vec![("input_ids", ids()), ("weight", values)]), wanted);
}

/// What pyarrow 26 writes: `testdata/write_tables.py` has how.
#[test]
fn what_pyarrow_writes_is_read() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata");
    let here = Folder::new();
    let wanted = "{\"ids\": [5, 6, 7], \"weight\": 0.5, \"group\": \"a\"}\n\
                  {\"ids\": [5, 6], \"weight\": -0.5, \"group\": \"a\"}\n\
                  {\"ids\": [8], \"weight\": 0.25, \"group\": \"b\"}\n";
    let wanted = sequences(&here.put("batch.jsonl", wanted));
    for name in ["snappy.parquet", "zstd.parquet", "lz4.feather", "stream.arrows"] {
        assert_same(&sequences(&folder.join(name)), &wanted);
    }
    let refused = read(&folder.join("gzip.parquet"), "input_ids", &mut Sequences::new(VOCAB));
    let said = refused.unwrap_err().to_string();
    assert!(said.to_lowercase().contains("gzip"), "{said}");
}

#[test]
fn another_column_is_read_where_it_is_named() {
    let here = Folder::new();
    let path = file(&here, vec![("tokens", ids())]);
    let mut sequences = Sequences::new(VOCAB);
    read(&path, "tokens", &mut sequences).unwrap();
    assert_eq!(sequences.count(), 2);
}
