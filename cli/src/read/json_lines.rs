//! JSON lines: one object per line.
//!
//! | field | meaning |
//! |---|---|
//! | `ids` or `input_ids` | token ids |
//! | `prompt_ids`, `response_ids` | the same in two parts; the response is scored |
//! | `length`, `prompt_length` | tokens of the sequence and of its prompt, if ids are unknown |
//! | `weight` | weight in the loss; default 1 |
//! | `loss` | a position, or `[[begin, end], …]`: labels that carry loss |
//! | `group` | a number or a string; sequences given by length share its prompt |
//! | `kind` | a number; sequences of different kinds share nothing |
//! | a named field, in place of `loss` | 0 or 1 for each token, or for each of the response: labels that carry loss |
//! | a named field | the user's id, a number or a string |
//!
//! Fields of ids may have other names ([`Names`]). Other fields and empty lines are ignored.

use std::borrow::Cow;
use std::fmt;
use std::io::{BufRead, Read};

use dormouse_schedule::Span;
use serde::de::{self, DeserializeSeed, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::value::RawValue;

use super::{BYTE_ORDER_MARK, Names, Place, ReadError};
use crate::sequences::{Name, Row, RowLoss, RowTokens};
use crate::{Refusal, Sequences};

/// Maximum bytes of a line, some 40 million ids. Small in tests, which reach it.
pub(super) const LINE_BYTES_MAX: u64 = if cfg!(test) { 1 << 10 } else { 1 << 28 };
/// Maximum characters of a value in an error message.
const SHOWN_MAX: usize = 60;

/// The fields of a line.
#[derive(Debug, Default)]
struct Record<'a> {
    ids: Option<Vec<i64>>,
    prompt: Option<Vec<i64>>,
    response: Option<Vec<i64>>,
    length: Option<u64>,
    prompt_length: Option<u64>,
    weight: Option<f64>,
    // Unparsed, to bound memory.
    loss: Option<&'a RawValue>,
    loss_mask: Option<Vec<Bit>>,
    group: Option<&'a RawValue>,
    kind: Option<u64>,
    id: Option<&'a RawValue>,
}

/// Reads the fields of a line by their names.
struct Fields<'n>(&'n Names);

/// A value of a mask.
#[derive(Clone, Copy, Debug)]
struct Bit(bool);

impl<'de> Deserialize<'de> for Bit {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Mask;
        impl Visitor<'_> for Mask {
            type Value = Bit;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("0 or 1")
            }

            fn visit_bool<E: de::Error>(self, bit: bool) -> Result<Bit, E> {
                Ok(Bit(bit))
            }

            fn visit_u64<E: de::Error>(self, bit: u64) -> Result<Bit, E> {
                match bit {
                    0 | 1 => Ok(Bit(bit == 1)),
                    _ => Err(E::invalid_value(de::Unexpected::Unsigned(bit), &self)),
                }
            }
        }
        deserializer.deserialize_any(Mask)
    }
}

impl<'de> DeserializeSeed<'de> for Fields<'_> {
    type Value = Record<'de>;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Record<'de>, D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for Fields<'_> {
    type Value = Record<'de>;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Record<'de>, A::Error> {
        let (names, mut record) = (self.0, Record::default());
        while let Some(Key(field)) = map.next_key::<Key<'_>>()? {
            let is = |name: &Option<String>| name.as_deref() == Some(&*field);
            match &*field {
                name if names.is_ids(name) => next(&mut map, name, &mut record.ids)?,
                name if name == names.prompt() => next(&mut map, name, &mut record.prompt)?,
                name if name == names.response() => next(&mut map, name, &mut record.response)?,
                name if is(&names.loss_mask) => next(&mut map, name, &mut record.loss_mask)?,
                name if is(&names.id) => next(&mut map, name, &mut record.id)?,
                "length" => next(&mut map, &field, &mut record.length)?,
                "prompt_length" => next(&mut map, &field, &mut record.prompt_length)?,
                "weight" => next(&mut map, &field, &mut record.weight)?,
                "loss" => next(&mut map, &field, &mut record.loss)?,
                "group" => next(&mut map, &field, &mut record.group)?,
                "kind" => next(&mut map, &field, &mut record.kind)?,
                _ => {
                    map.next_value::<IgnoredAny>()?;
                }
            }
        }
        Ok(record)
    }
}

/// A field's name, borrowed from the line unless it has escapes.
#[derive(Deserialize)]
struct Key<'a>(#[serde(borrow)] Cow<'a, str>);

/// Reads the value of a field, which may be there once; `null` is as absent.
fn next<'de, A, T>(map: &mut A, name: &str, into: &mut Option<T>) -> Result<(), A::Error>
where
    A: MapAccess<'de>,
    T: Deserialize<'de>,
{
    if into.is_some() {
        return Err(de::Error::custom(format_args!("duplicate field `{name}`")));
    }
    *into = map.next_value::<Option<T>>()?;
    Ok(())
}

/// Parses a line.
fn record<'a>(text: &'a [u8], names: &Names) -> serde_json::Result<Record<'a>> {
    let mut line = serde_json::Deserializer::from_slice(text);
    let record = Fields(names).deserialize(&mut line)?;
    line.end().map(|()| record)
}

pub(super) fn read(
    file: &str,
    mut input: impl BufRead,
    names: &Names,
    sequences: &mut Sequences,
) -> Result<(), ReadError> {
    let mut text = Vec::new();
    for line in 1.. {
        text.clear();
        let io = |source| ReadError::Io { file: file.to_owned(), source };
        let mut limited = input.by_ref().take(LINE_BYTES_MAX + 1);
        if limited.read_until(b'\n', &mut text).map_err(io)? == 0 {
            break;
        }
        if text.len() as u64 > LINE_BYTES_MAX {
            return Err(ReadError::LineLength { file: file.to_owned(), line });
        }
        if line == 1 && text.starts_with(BYTE_ORDER_MARK) {
            text.drain(..BYTE_ORDER_MARK.len());
        }
        match text.trim_ascii_start().first() {
            None => continue,
            Some(b'{') => {}
            // serde would accept an array as a record.
            Some(_) => {
                let (file, what) = (file.to_owned(), "not an object".to_owned());
                return Err(ReadError::Json { file, line, character: 1, what });
            }
        }
        let record = record(text.trim_ascii_end(), names).map_err(|error| ReadError::Json {
            file: file.to_owned(),
            line,
            character: error.column(),
            what: without_place(&error),
        })?;
        let place = Place::Line(line);
        let row = record.row(names).and_then(|row| sequences.push(&row));
        row.map_err(|refusal| {
            let ids = names.ids.as_deref().unwrap_or("ids");
            let refusal = names.in_file(refusal, ids);
            ReadError::Value { file: file.to_owned(), place, refusal }
        })?;
    }
    Ok(())
}

/// Returns the text of an error without its location and Rust's type names.
fn without_place(error: &serde_json::Error) -> String {
    let text = error.to_string();
    let place = format!(" at line {} column {}", error.line(), error.column());
    let text = text.strip_suffix(&place).unwrap_or(&text);
    // Types have names of Rust there.
    let types = [
        ("expected i64", "expected an integer"),
        ("expected u64", "expected an integer, 0 or more"),
        ("expected f64", "expected a number"),
        ("expected a sequence", "expected a list"),
    ];
    let plain = |(name, words)| text.strip_suffix(name).map(|text| format!("{text}{words}"));
    types.into_iter().find_map(plain).unwrap_or_else(|| text.to_owned())
}

impl Record<'_> {
    fn row(&self, names: &Names) -> Result<Row<'_>, Refusal> {
        let mask = self.loss_mask.as_ref();
        let loss = match (self.loss, mask) {
            (Some(_), Some(_)) => {
                let mask = names.loss_mask.as_deref().unwrap_or_default();
                return Err(Refusal::new("the loss", format!("loss and {mask}"), "one of them"));
            }
            (Some(value), None) => Some(loss(value)?),
            (None, mask) => mask.map(|mask| RowLoss::Mask(mask.iter().map(|bit| bit.0).collect())),
        };
        Ok(Row {
            tokens: self.tokens(names)?,
            weight: self.weight,
            loss,
            group: self.group.map(|value| name("group", value)).transpose()?,
            kind: self.kind,
            id: self.id.map(|value| name("id", value)).transpose()?,
        })
    }

    fn tokens(&self, names: &Names) -> Result<RowTokens<'_>, Refusal> {
        match (&self.ids, &self.prompt, &self.response, self.length, self.prompt_length) {
            (Some(ids), None, None, None, None) => Ok(RowTokens::Ids(ids)),
            (None, Some(prompt), Some(response), None, None) => {
                Ok(RowTokens::Prompted { prompt, response })
            }
            (None, None, None, Some(tokens), prompt) => Ok(RowTokens::Length { tokens, prompt }),
            (ids, prompt, response, length, prompt_length) => {
                let ids_name = names.ids.as_deref().unwrap_or("ids");
                let fields = [
                    ids.is_some().then_some(ids_name),
                    prompt.is_some().then_some(names.prompt()),
                    response.is_some().then_some(names.response()),
                    length.is_some().then_some("length"),
                    prompt_length.is_some().then_some("prompt_length"),
                ];
                let seen: Vec<&str> = fields.into_iter().flatten().collect();
                let seen = if seen.is_empty() { "missing".to_owned() } else { seen.join(" and ") };
                let accepted = format!(
                    "{ids_name}; or {} and {}; or length, optionally with prompt_length",
                    names.prompt(),
                    names.response()
                );
                Err(Refusal::new("the token field", seen, accepted))
            }
        }
    }
}

fn loss(value: &RawValue) -> Result<RowLoss, Refusal> {
    let text = value.get();
    if let Ok(first) = serde_json::from_str(text) {
        return Ok(RowLoss::From(first));
    }
    let spans: Vec<(u64, u64)> = serde_json::from_str(text).map_err(|_| {
        Refusal::new("loss", shown(text), "a position, or spans such as [[4, 9], [12, 20]]")
    })?;
    Ok(RowLoss::Spans(spans.into_iter().map(|(begin, end)| Span { begin, end }).collect()))
}

fn name<'a>(field: &str, value: &'a RawValue) -> Result<Name<'a>, Refusal> {
    let text = value.get();
    serde_json::from_str(text)
        .map_err(|_| Refusal::new(field, shown(text), "an integer or a string"))
}

/// Truncates a value for an error message.
fn shown(text: &str) -> String {
    match text.char_indices().nth(SHOWN_MAX) {
        Some((end, _)) => format!("{}…", text.get(..end).unwrap_or_default()),
        None => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refuses_a_line_that_is_too_long() {
        let line = "{\"ids\": [1]}\n".to_owned();
        let most = LINE_BYTES_MAX as usize;
        // As long as accepted, with the end of the line; then a byte longer.
        for (length, is_read) in [(most, true), (most + 1, false)] {
            let text =
                line.clone() + &line.trim_end().replace(' ', &" ".repeat(length - 12)) + "\n";
            assert_eq!(text.len(), line.len() + length);
            let read = read("f", text.as_bytes(), &Names::default(), &mut Sequences::new(10));
            match read {
                Ok(()) => assert!(is_read),
                Err(ReadError::LineLength { line, .. }) => assert!(!is_read && line == 2),
                Err(other) => panic!("{other}"),
            }
        }
        let endless = std::io::BufReader::new(std::io::repeat(b'{'));
        let read = read("f", endless, &Names::default(), &mut Sequences::new(10));
        assert!(matches!(read, Err(ReadError::LineLength { line: 1, .. })));
    }

    #[test]
    fn a_long_value_is_truncated() {
        let shown = shown(&"é".repeat(500));
        assert_eq!(shown.chars().count(), SHOWN_MAX + 1);
    }
}
