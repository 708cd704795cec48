//! A record of the log, as a line of text and as JSON.

use std::fmt::{Debug, Write};
use std::time::{SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value};
use tracing::field::{Field, Visit};
use tracing::{Level, Metadata};

/// Maximum number of fields of a record; others are dropped.
const FIELDS_MAX: usize = 16;
/// Maximum length of one text, in bytes; longer ones are cut.
const TEXT_BYTES_MAX: usize = 480;

/// An event, or the begin or end of a span.
#[derive(Debug)]
pub(super) struct Record {
    time_ns: u64,
    level: Level,
    target: &'static str,
    message: String,
    fields: Map<String, Value>,
}

impl Record {
    pub(super) fn new(metadata: &Metadata<'static>) -> Self {
        Self::at(*metadata.level(), metadata.target())
    }

    fn at(level: Level, target: &'static str) -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let time_ns = u64::try_from(since.as_nanos()).unwrap_or(u64::MAX);
        Self { time_ns, level, target, message: String::new(), fields: Map::new() }
    }

    /// Makes this the begin of span `number`.
    pub(super) fn begin(&mut self, name: &str, number: u64) {
        self.message = format!("{name} begins");
        self.set("span", number.into());
    }

    /// The end of span `number`.
    pub(super) fn end(target: &'static str, number: u64) -> Self {
        let mut record = Self::at(Level::DEBUG, target);
        "span ends".clone_into(&mut record.message);
        record.set("span", number.into());
        record
    }

    /// A warning that `count` records were dropped.
    pub(super) fn dropped(count: u64) -> Self {
        let mut record = Self::at(Level::WARN, "ffi");
        "log records dropped: the queue was full".clone_into(&mut record.message);
        record.set("count", count.into());
        record
    }

    fn set(&mut self, name: &str, value: Value) {
        if self.fields.len() < FIELDS_MAX {
            self.fields.insert(name.to_owned(), value);
        }
    }

    /// Returns a line: time, level, target, message, fields.
    pub(super) fn line(&self, bytes_max: usize) -> String {
        let mut line = time(self.time_ns);
        // Writing to a String never fails.
        let _ = write!(line, " {:>5} dormouse::{}: {}", self.level, self.target, self.message);
        for (name, value) in &self.fields {
            let _ = write!(line, " {name}={value}");
        }
        // One record is one line, also if a text contains a line break.
        line.retain(|c| !c.is_control());
        line.truncate(line.floor_char_boundary(bytes_max - 1));
        line.push('\n');
        line
    }

    /// Returns a line of JSON, without the fields if it would be longer than `bytes_max`.
    pub(super) fn json(&self, bytes_max: usize) -> String {
        let render = |fields: Value| {
            let mut text = serde_json::json!({
                "time_ns": self.time_ns,
                "level": self.level.as_str(),
                "target": self.target,
                "message": self.message,
                "fields": fields,
            })
            .to_string();
            text.push('\n');
            text
        };
        let text = render(Value::Object(self.fields.clone()));
        if text.len() <= bytes_max { text } else { render(Value::Object(Map::new())) }
    }
}

impl Visit for Record {
    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field.name(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field.name(), value.into());
    }

    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field.name(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field.name(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        let text = &value[..value.floor_char_boundary(TEXT_BYTES_MAX)];
        if field.name() == "message" {
            text.clone_into(&mut self.message);
        } else {
            self.set(field.name(), text.into());
        }
    }

    fn record_debug(&mut self, field: &Field, value: &dyn Debug) {
        self.record_str(field, &format!("{value:?}"));
    }
}

/// Formats UTC to the microsecond (RFC 3339). Days to a date: Howard Hinnant's `civil_from_days`.
fn time(time_ns: u64) -> String {
    let (seconds, micros) = (time_ns / 1_000_000_000, time_ns / 1000 % 1_000_000);
    let (day, second) = (seconds / 86_400, seconds % 86_400);
    let shifted = day + 719_468;
    let (era, of_era) = (shifted / 146_097, shifted % 146_097);
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_from_march = (5 * of_year + 2) / 153;
    let date = of_year - (153 * month_from_march + 2) / 5 + 1;
    let month = if month_from_march < 10 { month_from_march + 3 } else { month_from_march - 9 };
    let year = year_of_era + era * 400 + u64::from(month <= 2);
    format!(
        "{year:04}-{month:02}-{date:02}T{:02}:{:02}:{:02}.{micros:06}Z",
        second / 3600,
        second / 60 % 60,
        second % 60
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_are_formatted_in_utc() {
        for (seconds, text) in [
            (0, "1970-01-01T00:00:00.000000Z"),
            (951_782_400, "2000-02-29T00:00:00.000000Z"),
            (1_709_251_199, "2024-02-29T23:59:59.000000Z"),
            (4_102_444_800, "2100-01-01T00:00:00.000000Z"),
        ] {
            assert_eq!(time(seconds * 1_000_000_000), text);
        }
        assert_eq!(time(1_234_567), "1970-01-01T00:00:00.001234Z");
    }

    #[test]
    fn a_record_is_one_line_and_one_json_object_within_its_limit() {
        let mut record = Record::dropped(3);
        record.message = "two\nlines".to_owned();
        record.set("why", "a \"quote\"\n".into());
        let line = record.line(4096);
        assert!(
            line.ends_with(" WARN dormouse::ffi: twolines count=3 why=\"a \\\"quote\\\"\\n\"\n")
        );
        assert_eq!(line.matches('\n').count(), 1);
        let read: Value = serde_json::from_str(&record.json(4096)).unwrap();
        assert_eq!(read["fields"]["why"], "a \"quote\"\n");
        assert_eq!((&read["level"], &read["target"]), (&"WARN".into(), &"ffi".into()));
        // Too long: the fields are dropped, and the rest is still an object.
        let read: Value = serde_json::from_str(&record.json(120)).unwrap();
        assert_eq!(read["message"], "two\nlines");
        assert_eq!(read["fields"], Value::Object(Map::new()));
    }
}
