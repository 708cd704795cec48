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
//!
//! Other fields and empty lines are ignored.

use std::io::{BufRead, Read};

use dormouse_schedule::Span;
use serde::Deserialize;
use serde_json::value::RawValue;

use super::{BYTE_ORDER_MARK, Place, ReadError};
use crate::sequences::{Name, Row, RowLoss, RowTokens};
use crate::{Refusal, Sequences};

/// Maximum bytes of a line, some 40 million ids. Small in tests, which reach it.
pub(super) const LINE_BYTES_MAX: u64 = if cfg!(test) { 1 << 10 } else { 1 << 28 };
/// Maximum characters of a value in an error message.
const SHOWN_MAX: usize = 60;

#[derive(Deserialize)]
struct Record<'a> {
    #[serde(alias = "input_ids")]
    ids: Option<Vec<i64>>,
    prompt_ids: Option<Vec<i64>>,
    response_ids: Option<Vec<i64>>,
    length: Option<u64>,
    prompt_length: Option<u64>,
    weight: Option<f64>,
    // Unparsed, to bound memory.
    #[serde(borrow)]
    loss: Option<&'a RawValue>,
    #[serde(borrow)]
    group: Option<&'a RawValue>,
    kind: Option<u64>,
}

pub(super) fn read(
    file: &str,
    mut input: impl BufRead,
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
        let record: Record<'_> =
            serde_json::from_slice(text.trim_ascii_end()).map_err(|error| ReadError::Json {
                file: file.to_owned(),
                line,
                character: error.column(),
                what: without_place(&error),
            })?;
        let place = Place::Line(line);
        let row = record.row().and_then(|row| sequences.push(&row));
        row.map_err(|refusal| ReadError::Value { file: file.to_owned(), place, refusal })?;
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
    fn row(&self) -> Result<Row<'_>, Refusal> {
        Ok(Row {
            tokens: self.tokens()?,
            weight: self.weight,
            loss: self.loss.map(loss).transpose()?,
            group: self.group.map(group).transpose()?,
            kind: self.kind,
        })
    }

    fn tokens(&self) -> Result<RowTokens<'_>, Refusal> {
        match (&self.ids, &self.prompt_ids, &self.response_ids, self.length, self.prompt_length) {
            (Some(ids), None, None, None, None) => Ok(RowTokens::Ids(ids)),
            (None, Some(prompt), Some(response), None, None) => {
                Ok(RowTokens::Prompted { prompt, response })
            }
            (None, None, None, Some(tokens), prompt) => Ok(RowTokens::Length { tokens, prompt }),
            (ids, prompt, response, length, prompt_length) => {
                let fields = [
                    ids.is_some().then_some("ids"),
                    prompt.is_some().then_some("prompt_ids"),
                    response.is_some().then_some("response_ids"),
                    length.is_some().then_some("length"),
                    prompt_length.is_some().then_some("prompt_length"),
                ];
                let seen: Vec<&str> = fields.into_iter().flatten().collect();
                let seen = if seen.is_empty() { "missing".to_owned() } else { seen.join(" and ") };
                let accepted = "ids; or prompt_ids and response_ids; or length, optionally with \
                                prompt_length";
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

fn group(value: &RawValue) -> Result<Name<'_>, Refusal> {
    let text = value.get();
    serde_json::from_str(text)
        .map_err(|_| Refusal::new("group", shown(text), "an integer or a string"))
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
            let read = read("f", text.as_bytes(), &mut Sequences::new(10));
            match read {
                Ok(()) => assert!(is_read),
                Err(ReadError::LineLength { line, .. }) => assert!(!is_read && line == 2),
                Err(other) => panic!("{other}"),
            }
        }
        let endless = std::io::BufReader::new(std::io::repeat(b'{'));
        let read = read("f", endless, &mut Sequences::new(10));
        assert!(matches!(read, Err(ReadError::LineLength { line: 1, .. })));
    }

    #[test]
    fn a_long_value_is_truncated() {
        let shown = shown(&"é".repeat(500));
        assert_eq!(shown.chars().count(), SHOWN_MAX + 1);
    }
}
