//! Columns of a table and their rows.
//!
//! | column | type | meaning |
//! |---|---|---|
//! | ids, or a prompt's and a response's | lists of integers: plain, large, fixed-size, views | token ids |
//! | a mask, in place of `loss` | such lists of 0 and 1, or of booleans | labels that carry loss |
//! | `weight` | float32, float64, integers | weight in the loss; default 1 |
//! | `loss` | integers | position of the first label that carries loss |
//! | `group` | integers or strings: plain, large, views, dictionaries of them | groups |
//! | an id | as `group` | the user's id |
//! | `kind` | integers | sequences of different kinds share nothing |
//!
//! Other columns are ignored.

use std::collections::BTreeSet;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type};
use arrow_array::{Array, ArrayRef, RecordBatch, downcast_integer_array};
use arrow_schema::{DataType, Schema};

use super::{Names, Place, ReadError};
use crate::sequences::{Name, Row, RowLoss, RowTokens, TokenIds};
use crate::{Refusal, Sequences};

const IDS: &str = "lists of an integer type";
const MASKS: &str = "lists of an integer type or of booleans";
const WEIGHTS: &str = "float32, float64 or an integer type";
const INTEGERS: &str = "an integer type";
const GROUPS: &str = "an integer type, strings or a dictionary of strings";
/// Maximum columns in an error message.
const NAMED_MAX: usize = 20;

/// Columns of token ids.
#[derive(Clone, Copy, Debug)]
enum TokenColumns {
    Ids(usize),
    Prompted { prompt: usize, response: usize },
}

/// Indices of the columns, and the number of the next row.
#[derive(Debug)]
pub(super) struct Columns<'a> {
    file: &'a str,
    names: &'a Names,
    tokens: TokenColumns,
    weight: Option<usize>,
    loss: Option<usize>,
    loss_mask: Option<usize>,
    group: Option<usize>,
    kind: Option<usize>,
    id: Option<usize>,
    rows: u64,
}

impl<'a> Columns<'a> {
    pub(super) fn find(
        file: &'a str,
        names: &'a Names,
        schema: &Schema,
    ) -> Result<Self, ReadError> {
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
        let needed = |name: &str, flag, accepted, accepts| {
            one(name, accepted, accepts)?.ok_or_else(|| {
                let all = schema.fields().iter().map(|field| field.name().as_str());
                let columns: Vec<&str> = all.take(NAMED_MAX).collect();
                ReadError::NoColumn {
                    file: file.to_owned(),
                    column: name.to_owned(),
                    flag,
                    columns: columns.join(", "),
                }
            })
        };
        let has = |name: &str| schema.column_with_name(name).is_some();
        let both = has(names.prompt()) && has(names.response());
        let named = names.prompt.is_some() || names.response.is_some();
        let is_prompted = named || (names.ids.is_none() && !has(names.ids()) && both);
        let tokens = if is_prompted {
            let prompt = needed(names.prompt(), "--prompt-column", IDS, is_ids)?;
            let response = needed(names.response(), "--response-column", IDS, is_ids)?;
            TokenColumns::Prompted { prompt, response }
        } else {
            TokenColumns::Ids(needed(names.ids(), "--column", IDS, is_ids)?)
        };
        let loss = one("loss", INTEGERS, DataType::is_integer)?;
        let mask = names.loss_mask.as_deref();
        let loss_mask =
            mask.map(|name| needed(name, "--loss-mask-column", MASKS, is_mask)).transpose()?;
        let id = names.id.as_deref();
        Ok(Self {
            file,
            names,
            tokens,
            weight: one("weight", WEIGHTS, is_weight)?,
            loss: loss.filter(|_| loss_mask.is_none()),
            loss_mask,
            group: one("group", GROUPS, is_group)?,
            kind: one("kind", INTEGERS, DataType::is_integer)?,
            id: id.map(|name| needed(name, "--id-column", GROUPS, is_group)).transpose()?,
            rows: 0,
        })
    }

    /// Returns the indices of the columns.
    pub(super) fn indices(&self) -> impl Iterator<Item = usize> {
        let tokens = match self.tokens {
            TokenColumns::Ids(ids) => [Some(ids), None],
            TokenColumns::Prompted { prompt, response } => [Some(prompt), Some(response)],
        };
        let others = [self.weight, self.loss, self.loss_mask, self.group, self.kind, self.id];
        // A column may have two roles.
        tokens.into_iter().chain(others).flatten().collect::<BTreeSet<_>>().into_iter()
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
                refusal: self.names.in_file(refusal, self.names.ids()),
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
        let named = |field, index| {
            of(field, index).transpose()?.map(|array| name(field, array, row)).transpose()
        };
        let group = named("group", self.group)?;
        let id = named("id", self.id)?;
        let weight = of("weight", self.weight).transpose()?.map(|array| weight(array, row));
        let loss = match self.loss_mask {
            Some(index) => Some(RowLoss::Mask(mask(&columns[index], row)?)),
            None => self.whole("loss", self.loss, columns, row)?.map(RowLoss::From),
        };
        let kind = self.whole("kind", self.kind, columns, row)?;
        let push =
            |tokens: RowTokens<'_>| sequences.push(&Row { tokens, weight, loss, group, kind, id });
        match self.tokens {
            TokenColumns::Ids(index) => {
                let ids = Ints(list("ids", &columns[index], row, "a token id")?);
                push(RowTokens::Ids(&ids))
            }
            TokenColumns::Prompted { prompt, response } => {
                let prompt = Ints(list("prompt_ids", &columns[prompt], row, "a token id")?);
                let response = Ints(list("response_ids", &columns[response], row, "a token id")?);
                push(RowTokens::Prompted { prompt: &prompt, response: &response })
            }
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
}

/// The integers of a row, a slice of the column's buffer.
#[derive(Debug)]
struct Ints(ArrayRef);

impl TokenIds for Ints {
    fn append_to(&self, ids: &mut Vec<i32>, field: &str, vocab: u32) -> Result<(), Refusal> {
        let array = &*self.0;
        downcast_integer_array! {
            array => (&array.values()[..]).append_to(ids, field, vocab),
            _ => Ok(()),
        }
    }
}

/// Returns the values of a list, none of which is null.
fn list(field: &str, array: &ArrayRef, row: usize, accepted: &str) -> Result<ArrayRef, Refusal> {
    filled(field, array, row)?;
    let values = match array.data_type() {
        DataType::LargeList(_) => array.as_list::<i64>().value(row),
        DataType::FixedSizeList(..) => array.as_fixed_size_list().value(row),
        DataType::ListView(_) => array.as_list_view::<i32>().value(row),
        DataType::LargeListView(_) => array.as_list_view::<i64>().value(row),
        _ => array.as_list::<i32>().value(row),
    };
    match (0..values.len()).find(|index| values.null_count() > 0 && values.is_null(*index)) {
        Some(index) => Err(Refusal::new(format!("{field}[{index}]"), "null", accepted)),
        None => Ok(values),
    }
}

/// Returns the values of a mask.
fn mask(array: &ArrayRef, row: usize) -> Result<Vec<bool>, Refusal> {
    let values = list("loss_mask", array, row, "0 or 1")?;
    if let Some(bits) = values.as_boolean_opt() {
        return Ok(bits.values().iter().collect());
    }
    let bit = |index| match integer(&values, index) {
        0 => Ok(false),
        1 => Ok(true),
        seen => Err(Refusal::new(format!("loss_mask[{index}]"), seen, "0 or 1")),
    };
    (0..values.len()).map(bit).collect()
}

/// Returns the array if the row has a value.
fn filled<'a>(name: &str, array: &'a ArrayRef, row: usize) -> Result<&'a ArrayRef, Refusal> {
    if array.is_null(row) {
        return Err(Refusal::new(name, "null", "a value in every row, or no column"));
    }
    Ok(array)
}

fn is_ids(of: &DataType) -> bool {
    item(of).is_some_and(DataType::is_integer)
}

fn is_mask(of: &DataType) -> bool {
    item(of).is_some_and(|item| item.is_integer() || *item == DataType::Boolean)
}

/// Returns the type of a list's values.
fn item(of: &DataType) -> Option<&DataType> {
    match of {
        DataType::List(item)
        | DataType::LargeList(item)
        | DataType::FixedSizeList(item, _)
        | DataType::ListView(item)
        | DataType::LargeListView(item) => Some(item.data_type()),
        _ => None,
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

fn name<'a>(field: &str, array: &'a dyn Array, row: usize) -> Result<Name<'a>, Refusal> {
    match array.data_type() {
        DataType::Utf8 => Ok(Name::Text(array.as_string::<i32>().value(row).into())),
        DataType::LargeUtf8 => Ok(Name::Text(array.as_string::<i64>().value(row).into())),
        DataType::Utf8View => Ok(Name::Text(array.as_string_view().value(row).into())),
        DataType::Dictionary(..) => {
            let of = array.as_any_dictionary();
            // The reader checks that each key is in range.
            let at = integer(of.keys(), row) as usize;
            name(field, filled(field, of.values(), at)?, at)
        }
        _ => {
            let seen = integer(array, row);
            let accepted = || format!("a string, or {} to {}", i64::MIN, i64::MAX);
            let number = i64::try_from(seen);
            number.map(Name::Number).map_err(|_| Refusal::new(field, seen, accepted()))
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
