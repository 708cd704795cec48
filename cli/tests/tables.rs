//! Parquet and Arrow IPC of every accepted type give the same sequences as JSON lines.
#![allow(clippy::unwrap_used, clippy::panic, reason = "a test fails by panicking")]

mod common;

use std::path::{Path, PathBuf};
use std::sync::Arc;

use arrow_array::builder::{
    BooleanBuilder, LargeListBuilder, LargeListViewBuilder, ListBuilder, ListViewBuilder,
    PrimitiveBuilder,
};
use arrow_array::types::{
    ArrowPrimitiveType, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type,
    UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{
    ArrayRef, DictionaryArray, FixedSizeListArray, LargeStringArray, PrimitiveArray, RecordBatch,
    StringArray, StringViewArray,
};
use common::Folder;
use common::tables::{Way, ways, write};
use dormouse_cli::read::{Names, Place, read};
use dormouse_cli::{ReadError, Refusal, Sequences};
use proptest::prelude::*;

const VOCAB: u32 = 1000;

/// A row as a JSON line.
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

    fn ids<T: ArrowPrimitiveType>(&self, lists: Lists) -> ArrayRef
    where
        T::Native: TryFrom<i64, Error: std::fmt::Debug>,
    {
        let values = PrimitiveBuilder::<T>::new();
        let rows = self.0.iter().map(|it| -> Vec<Option<T::Native>> {
            it.ids.iter().map(|id| Some(T::Native::try_from(*id).unwrap())).collect()
        });
        match lists {
            Lists::Plain => {
                let mut lists = ListBuilder::new(values);
                rows.for_each(|row| lists.append_value(row));
                Arc::new(lists.finish())
            }
            Lists::Large => {
                let mut lists = LargeListBuilder::new(values);
                rows.for_each(|row| lists.append_value(row));
                Arc::new(lists.finish())
            }
            Lists::View => {
                let mut lists = ListViewBuilder::new(values);
                rows.for_each(|row| lists.append_value(row));
                Arc::new(lists.finish())
            }
            Lists::LargeView => {
                let mut lists = LargeListViewBuilder::new(values);
                rows.for_each(|row| lists.append_value(row));
                Arc::new(lists.finish())
            }
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

    /// A table whose first and last columns are ignored.
    fn table(&self, style: Style) -> RecordBatch {
        let ids = match style.ids {
            0 => self.ids::<Int32Type>(style.lists),
            1 => self.ids::<Int64Type>(style.lists),
            2 => self.ids::<UInt32Type>(style.lists),
            3 => self.ids::<Int16Type>(style.lists),
            4 => self.ids::<UInt16Type>(style.lists),
            _ => self.ids::<UInt64Type>(style.lists),
        };
        let texts = || self.0.iter().map(|it| it.group.to_string());
        let group: ArrayRef = match style.integers {
            0 => self.integers::<Int8Type>(|it| it.group),
            1 => self.integers::<Int16Type>(|it| it.group),
            2 => self.integers::<Int32Type>(|it| it.group),
            3 => self.integers::<Int64Type>(|it| it.group),
            4 => Arc::new(StringArray::from_iter_values(texts())),
            5 => Arc::new(LargeStringArray::from_iter_values(texts())),
            6 => Arc::new(StringViewArray::from_iter_values(texts())),
            _ => {
                let texts: Vec<String> = texts().collect();
                let texts = texts.iter().map(String::as_str);
                Arc::new(texts.collect::<DictionaryArray<UInt8Type>>())
            }
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
            ("weight", self.weights(style.ids == 0)),
            ("loss", loss),
            ("group", group),
            ("last", notes()),
        ])
        .unwrap()
    }
}

/// Types of a table's columns.
#[derive(Clone, Copy, Debug)]
struct Style {
    ids: u8,
    lists: Lists,
    integers: u8,
}

/// Type of the lists of ids.
#[derive(Clone, Copy, Debug)]
enum Lists {
    Plain,
    Large,
    View,
    LargeView,
}

const LISTS: [Lists; 4] = [Lists::Plain, Lists::Large, Lists::View, Lists::LargeView];

fn sequences(path: &Path) -> Sequences {
    let mut sequences = Sequences::new(VOCAB);
    read(path, &Names::default(), &mut sequences).unwrap();
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
        (ids, lists, integers) in (0_u8..6, 0..LISTS.len(), 0_u8..8),
        way in 0..ways().len(),
        batch in 1_usize..100,
    ) {
        let here = Folder::new();
        let wanted = sequences(&here.put("batch.jsonl", rows.json_lines()));
        prop_assert_eq!(wanted.count(), rows.0.len());
        let path = here.path().join("batch");
        write(&rows.table(Style { ids, lists: LISTS[lists], integers }), ways()[way], batch, &path);
        assert_same(&sequences(&path), &wanted);
    }
}

#[test]
fn all_formats_have_the_same_errors() {
    let rows = Rows(vec![line(&[1, 2]), line(&[3, 1000])]);
    for way in ways() {
        let here = Folder::new();
        let path = here.path().join("batch");
        write(&rows.table(Style { ids: 1, lists: Lists::Plain, integers: 3 }), way, 1, &path);
        let error = read(&path, &Names::default(), &mut Sequences::new(VOCAB)).unwrap_err();
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
    Rows(vec![line(&[1, 2]), line(&[3])]).ids::<Int32Type>(Lists::Plain)
}

fn refusal(here: &Folder, columns: Vec<(&str, ArrayRef)>) -> String {
    let path = file(here, columns);
    let error = read(&path, &Names::default(), &mut Sequences::new(VOCAB)).unwrap_err().to_string();
    error.replace(&here.path().display().to_string(), "…")
}

#[test]
fn an_error_names_the_invalid_column() {
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
            "…/batch.arrow has no column input_ids; accepted with --column: tokens, weight",
        ),
        (
            vec![("input_ids", texts())],
            "…/batch.arrow: column input_ids is Utf8; accepted: lists of an integer type",
        ),
        (
            vec![("input_ids", ids()), ("weight", texts())],
            "…/batch.arrow: column weight is Utf8; accepted: float32, float64 or an integer type",
        ),
        (
            vec![("input_ids", ids()), ("group", floats())],
            "…/batch.arrow: column group is Float64; accepted: an integer type, strings or a \
             dictionary of strings",
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
            "…/batch.arrow, row 1: group is 18446744073709551615; accepted: a string, or \
             -9223372036854775808 to 9223372036854775807",
        ),
    ];
    for (columns, wanted) in cases {
        assert_eq!(refusal(&here, columns), wanted);
    }
}

#[test]
fn an_error_names_the_row_of_a_null() {
    let here = Folder::new();
    let nothing = "null; accepted: a value in every row, or no column";
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

/// Files of pyarrow 26, written by `testdata/write_tables.py`.
#[test]
fn reads_files_of_pyarrow() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/testdata");
    let here = Folder::new();
    let wanted = "{\"ids\": [5, 6, 7], \"weight\": 0.5, \"group\": \"a\"}\n\
                  {\"ids\": [5, 6], \"weight\": -0.5, \"group\": \"a\"}\n\
                  {\"ids\": [8], \"weight\": 0.25, \"group\": \"b\"}\n";
    let wanted = sequences(&here.put("batch.jsonl", wanted));
    for name in ["snappy.parquet", "zstd.parquet", "lz4.feather", "stream.arrows"] {
        assert_same(&sequences(&folder.join(name)), &wanted);
    }
    let refused = read(&folder.join("gzip.parquet"), &Names::default(), &mut Sequences::new(VOCAB));
    let said = refused.unwrap_err().to_string();
    let wanted = "gzip.parquet: column input_ids is compressed with GZIP; accepted: none, SNAPPY, \
                  LZ4, LZ4_RAW, ZSTD";
    assert!(said.ends_with(wanted), "{said}");
}

#[test]
fn reads_the_named_column() {
    let here = Folder::new();
    let path = file(&here, vec![("tokens", ids())]);
    let mut sequences = Sequences::new(VOCAB);
    read(&path, &Names { ids: Some("tokens".to_owned()), ..Names::default() }, &mut sequences)
        .unwrap();
    assert_eq!(sequences.count(), 2);
}

/// Prompts and responses apart, masks of both kinds, and names.
#[test]
fn reads_prompts_responses_and_masks() {
    let here = Folder::new();
    let lists = |rows: &[&[i64]]| -> ArrayRef {
        let mut lists = ListBuilder::new(PrimitiveBuilder::<Int64Type>::new());
        rows.iter().for_each(|row| lists.append_value(row.iter().map(|id| Some(*id))));
        Arc::new(lists.finish())
    };
    let mut bits = ListBuilder::new(BooleanBuilder::new());
    bits.append_value([Some(true), Some(false)]);
    bits.append_value([Some(false), Some(false), Some(true), Some(true)]);
    let bits: ArrayRef = Arc::new(bits.finish());
    let uid: ArrayRef = Arc::new(StringArray::from_iter([Some("a"), Some("b")]));
    let (prompts, responses) = (lists(&[&[1, 2], &[1]]), lists(&[&[3, 4], &[5, 6, 7]]));
    let named = Names {
        prompt: Some("question".to_owned()),
        response: Some("answer".to_owned()),
        loss_mask: Some("scored".to_owned()),
        id: Some("uid".to_owned()),
        ..Names::default()
    };
    let lines = "{\"question\": [1, 2], \"answer\": [3, 4], \"scored\": [1, 0], \"uid\": \"a\"}\n\
                 {\"question\": [1], \"answer\": [5, 6, 7], \"scored\": [0, 0, 1, 1], \"uid\": \"b\"}\n";
    let lines = here.put("batch.jsonl", lines);
    let read_as = |path: &Path, names: &Names| {
        let mut sequences = Sequences::new(VOCAB);
        read(path, names, &mut sequences).map(|()| sequences)
    };
    let wanted = read_as(&lines, &named).unwrap();
    let span = |begin, end| dormouse_schedule::Span { begin, end };
    let spans = |spans| dormouse_schedule::Loss::Spans(spans);
    assert_eq!(wanted.scoring()[0].loss, spans(vec![span(2, 3)]));
    assert_eq!(wanted.scoring()[1].loss, spans(vec![span(2, 4)]));
    let mask = lists(&[&[1, 0], &[0, 0, 1, 1]]);
    for mask in [bits, mask] {
        let columns = [
            ("question", prompts.clone()),
            ("answer", responses.clone()),
            ("scored", mask),
            ("uid", uid.clone()),
        ];
        let table = RecordBatch::try_from_iter(columns).unwrap();
        for way in ways() {
            let path = here.path().join("batch");
            write(&table, way, 1, &path);
            assert_same(&read_as(&path, &named).unwrap(), &wanted);
        }
    }
    // The usual names of a prompt and a response need no flag.
    let path = file(&here, vec![("response_ids", responses), ("prompt_ids", prompts.clone())]);
    let usual = read_as(&path, &Names::default()).unwrap();
    assert_eq!(usual.tokens(), wanted.tokens());
    assert_eq!(usual.scoring()[0].loss, dormouse_schedule::Loss::From(2));
    let refused = |path: &Path, names: &Names| {
        let text = read_as(path, names).unwrap_err().to_string();
        text.replace(&here.path().display().to_string(), "…")
    };
    assert_eq!(
        refused(&path, &named),
        "…/batch.arrow has no column question; accepted with --prompt-column: response_ids, prompt_ids"
    );
    let mask = lists(&[&[1, 0], &[0, 2, 1, 1]]);
    let columns = vec![("input_ids", prompts.clone()), ("scored", mask)];
    let masked = Names { loss_mask: named.loss_mask.clone(), ..Names::default() };
    assert_eq!(
        refused(&file(&here, columns), &masked),
        "…/batch.arrow, row 1: scored[1] is 2; accepted: 0 or 1"
    );
    let columns = vec![("input_ids", prompts), ("scored", uid)];
    assert_eq!(
        refused(&file(&here, columns), &masked),
        "…/batch.arrow: column scored is Utf8; accepted: lists of an integer type or of booleans"
    );
    let mask = lists(&[&[1, 1], &[1]]);
    let short = vec![("input_ids", lists(&[&[1, 2], &[1, 2]])), ("scored", mask)];
    assert_eq!(
        refused(&file(&here, short), &masked),
        "…/batch.arrow, row 1: scored is 1 values; accepted: 2, one for each token"
    );
}

/// Rows of one length, and integer weights.
#[test]
fn reads_fixed_size_lists_and_integer_weights() {
    let here = Folder::new();
    let wanted = "{\"ids\": [1, 2], \"weight\": 3}\n{\"ids\": [1, 4], \"weight\": -1}\n";
    let wanted = sequences(&here.put("batch.jsonl", wanted));
    let rows = [[1, 2], [1, 4]].map(|row| Some(row.map(Some)));
    let ids: ArrayRef =
        Arc::new(FixedSizeListArray::from_iter_primitive::<UInt8Type, _, _>(rows, 2));
    let weights: ArrayRef = Arc::new(PrimitiveArray::<Int8Type>::from_iter_values([3, -1]));
    let table = RecordBatch::try_from_iter([("input_ids", ids), ("weight", weights)]).unwrap();
    for way in ways() {
        let path = here.path().join("batch");
        write(&table, way, 1, &path);
        assert_same(&sequences(&path), &wanted);
    }
}

/// A dictionary may have a null value for a valid key.
#[test]
fn refuses_a_null_in_a_dictionary() {
    let here = Folder::new();
    let names: DictionaryArray<Int32Type> = [Some("a"), None].into_iter().collect();
    let nothing =
        "…/batch.arrow, row 1: group is null; accepted: a value in every row, or no column";
    assert_eq!(refusal(&here, vec![("input_ids", ids()), ("group", Arc::new(names))]), nothing);
    let values: ArrayRef = Arc::new(StringArray::from_iter([Some("a"), None]));
    let keys = PrimitiveArray::<Int32Type>::from_iter_values([0, 1]);
    let names = DictionaryArray::new(keys, values);
    assert_eq!(refusal(&here, vec![("input_ids", ids()), ("group", Arc::new(names))]), nothing);
}
