//! Columns of a table and their rows.
//!
//! | column | type | meaning |
//! |---|---|---|
//! | the named column | lists of integers: plain, large, fixed-size, views | token ids |
//! | `weight` | float32, float64, integers | weight in the loss; default 1 |
//! | `loss` | integers | position of the first label that carries loss |
//! | `group` | integers or strings: plain, large, views, dictionaries of them | groups |
//! | `kind` | integers | sequences of different kinds share nothing |
//!
//! Other columns are ignored.

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type};
use arrow_array::{Array, ArrayRef, RecordBatch, downcast_integer_array};
use arrow_schema::{DataType, Schema};

use super::{Place, ReadError};
use crate::sequences::{Name, Row, RowLoss, RowTokens, TokenIds};
use crate::{Refusal, Sequences};

const IDS: &str = "lists of an integer type";
const WEIGHTS: &str = "float32, float64 or an integer type";
const INTEGERS: &str = "an integer type";
const GROUPS: &str = "an integer type, strings or a dictionary of strings";
/// Maximum columns in an error message.
const NAMED_MAX: usize = 20;

/// Indices of the columns, and the number of the next row.
#[derive(Debug)]
pub(super) struct Columns<'a> {
    file: &'a str,
    /// The name of the column of token ids.
    named: &'a str,
    ids: usize,
    weight: Option<usize>,
    loss: Option<usize>,
    group: Option<usize>,
    kind: Option<usize>,
    rows: u64,
}

impl<'a> Columns<'a> {
    pub(super) fn find(file: &'a str, named: &'a str, schema: &Schema) -> Result<Self, ReadError> {
        let one = |name: &str, accepted: &'static str, accepts: fn(&DataType) -> bool| {
            let Some((index, field)) = schema.column_with_name(name) else { return Ok(None) };
            if accepts(field.data_type()) {
                return Ok(Some(index));
            }
            Err(ReadError::ColumnType {
                file: file.to_owned(),
                column: name.to_owned(),
                seen: field.data_type().to_string(),
                accepted,
            })
        };
        let Some(ids) = one(named, IDS, is_ids)? else {
            let names: Vec<&str> =
                schema.fields().iter().map(|field| field.name().as_str()).take(NAMED_MAX).collect();
            return Err(ReadError::NoColumn {
                file: file.to_owned(),
                column: named.to_owned(),
                columns: names.join(", "),
            });
        };
        Ok(Self {
            file,
            named,
            ids,
            weight: one("weight", WEIGHTS, is_weight)?,
            loss: one("loss", INTEGERS, DataType::is_integer)?,
            group: one("group", GROUPS, is_group)?,
            kind: one("kind", INTEGERS, DataType::is_integer)?,
            rows: 0,
        })
    }

    /// Returns the indices of the columns.
    pub(super) fn indices(&self) -> impl Iterator<Item = usize> {
        [Some(self.ids), self.weight, self.loss, self.group, self.kind].into_iter().flatten()
    }

    /// Returns the number of rows read.
    pub(super) fn rows(&self) -> u64 {
        self.rows
    }

    /// Appends the rows of a batch.
    pub(super) fn take(
        &mut self,
        batch: &RecordBatch,
        sequences: &mut Sequences,
    ) -> Result<(), ReadError> {
        for row in 0..batch.num_rows() {
            self.take_row(batch, row, sequences).map_err(|refusal| ReadError::Value {
                file: self.file.to_owned(),
                place: Place::Row(self.rows),
                refusal: self.with_name(refusal),
            })?;
            self.rows += 1;
        }
        Ok(())
    }

    fn take_row(
        &self,
        batch: &RecordBatch,
        row: usize,
        sequences: &mut Sequences,
    ) -> Result<(), Refusal> {
        let columns = batch.columns();
        let of = |name, index: Option<usize>| index.map(|index| filled(name, &columns[index], row));
        let ids = &columns[self.ids];
        filled("ids", ids, row)?;
        // The ids of a row are a slice of the column's buffer.
        let ids = match ids.data_type() {
            DataType::LargeList(_) => ids.as_list::<i64>().value(row),
            DataType::FixedSizeList(..) => ids.as_fixed_size_list().value(row),
            DataType::ListView(_) => ids.as_list_view::<i32>().value(row),
            DataType::LargeListView(_) => ids.as_list_view::<i64>().value(row),
            _ => ids.as_list::<i32>().value(row),
        };
        if ids.null_count() > 0
            && let Some(index) = (0..ids.len()).find(|index| ids.is_null(*index))
        {
            return Err(Refusal::new(format!("ids[{index}]"), "null", "a token id"));
        }
        let group = of("group", self.group).transpose()?;
        let group = group.map(|array| name(array, row)).transpose()?;
        let weight = of("weight", self.weight).transpose()?.map(|array| weight(array, row));
        let loss = self.whole("loss", self.loss, columns, row)?.map(RowLoss::From);
        let kind = self.whole("kind", self.kind, columns, row)?;
        let mut push = |ids: &dyn TokenIds| {
            sequences.push(&Row {
                tokens: RowTokens::Ids(ids),
                weight,
                loss: loss.clone(),
                group: group.clone(),
                kind,
            })
        };
        let ids = &*ids;
        downcast_integer_array! {
            ids => push(&&ids.values()[..]),
            _ => push(&Vec::new()),
        }
    }

    /// Returns a value that must not be negative.
    fn whole(
        &self,
        name: &str,
        index: Option<usize>,
        columns: &[ArrayRef],
        row: usize,
    ) -> Result<Option<u64>, Refusal> {
        let Some(index) = index else { return Ok(None) };
        let seen = integer(filled(name, &columns[index], row)?, row);
        let whole = u64::try_from(seen);
        whole.map(Some).map_err(|_| Refusal::new(name, seen, format!("0 to {}", u64::MAX)))
    }

    /// Replaces `ids` in a refusal by the name of the column.
    fn with_name(&self, refusal: Refusal) -> Refusal {
        match refusal.field.strip_prefix("ids") {
            Some(index) => Refusal { field: format!("{}{index}", self.named), ..refusal },
            None => refusal,
        }
    }
}

/// Returns the array if the row has a value.
fn filled<'a>(name: &str, array: &'a ArrayRef, row: usize) -> Result<&'a ArrayRef, Refusal> {
    if array.is_null(row) {
        return Err(Refusal::new(name, "null", "a value in every row, or no column"));
    }
    Ok(array)
}

fn is_ids(of: &DataType) -> bool {
    match of {
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::FixedSizeList(item, _)
        | DataType::ListView(item)
        | DataType::LargeListView(item) => item.data_type().is_integer(),
        _ => false,
    }
}

fn is_weight(of: &DataType) -> bool {
    of.is_integer() || matches!(of, DataType::Float32 | DataType::Float64)
}

fn is_group(of: &DataType) -> bool {
    match of {
        DataType::Dictionary(_, values) => is_text(values),
        of => of.is_integer() || is_text(of),
    }
}

fn is_text(of: &DataType) -> bool {
    matches!(of, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View)
}

fn weight(array: &ArrayRef, row: usize) -> f64 {
    match array.data_type() {
        DataType::Float32 => f64::from(array.as_primitive::<Float32Type>().value(row)),
        DataType::Float64 => array.as_primitive::<Float64Type>().value(row),
        _ => integer(array, row) as f64,
    }
}

fn name(array: &dyn Array, row: usize) -> Result<Name<'_>, Refusal> {
    match array.data_type() {
        DataType::Utf8 => Ok(Name::Text(array.as_string::<i32>().value(row).into())),
        DataType::LargeUtf8 => Ok(Name::Text(array.as_string::<i64>().value(row).into())),
        DataType::Utf8View => Ok(Name::Text(array.as_string_view().value(row).into())),
        DataType::Dictionary(..) => {
            let of = array.as_any_dictionary();
            // The reader checks that each key is in range.
            let at = integer(of.keys(), row) as usize;
            name(filled("group", of.values(), at)?, at)
        }
        _ => {
            let seen = integer(array, row);
            let accepted = || format!("a string, or {} to {}", i64::MIN, i64::MAX);
            let number = i64::try_from(seen);
            number.map(Name::Number).map_err(|_| Refusal::new("group", seen, accepted()))
        }
    }
}

/// Returns a value of an integer array.
fn integer(array: &dyn Array, row: usize) -> i128 {
    downcast_integer_array! {
        array => array.value(row).into(),
        _ => 0,
    }
}
