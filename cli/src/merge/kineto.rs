//! What a JSON trace of torch.profiler says about its time. Reads the file once, in limited memory.

use std::fmt;
use std::io::{self, BufReader, Read};

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Times of events are in microseconds.
const NS_PER_US: f64 = 1000.0;
/// Maximum bytes of one string or number: the parser keeps it whole. Of a small file, gzip makes gigabytes of one.
const TEXT_BYTES_MAX: u32 = 16 << 20;
/// Maximum depth of values within values: the parser keeps a byte of each.
const DEPTH_MAX: u32 = 128;

/// A file that is no trace.
#[derive(Debug, thiserror::Error)]
pub(super) enum KinetoError {
    /// A string or number is too long.
    #[error("a string or number has more than {TEXT_BYTES_MAX} bytes")]
    Text,
    /// Values are nested too deep.
    #[error("values are nested more than {DEPTH_MAX} deep")]
    Depth,
    /// The file cannot be read.
    #[error(transparent)]
    Io(io::Error),
    /// The file is other JSON, or none.
    #[error(transparent)]
    Json(serde_json::Error),
}

/// The times of a trace.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Kineto {
    /// Unix time from which events count, in nanoseconds; 0 in traces of before torch 2.4, which have Unix times.
    pub(super) base_ns: u64,
    events: Times,
}

impl Kineto {
    /// Returns the Unix times of the first start and the last end.
    pub(super) fn span_ns(&self) -> Option<(i128, i128)> {
        let unix = |us: f64| i128::from(self.base_ns) + (us * NS_PER_US) as i128;
        (self.events.count > 0).then(|| (unix(self.events.first_us), unix(self.events.last_us)))
    }
}

/// Reads a trace.
pub(super) fn read(reader: impl Read) -> Result<Kineto, KinetoError> {
    let bounded = Bounded { reader, depth: 0, text_bytes: 0, place: Place::Outside };
    serde_json::from_reader(BufReader::new(bounded)).map_err(|error| match error.is_io() {
        true => io::Error::from(error).downcast().unwrap_or_else(KinetoError::Io),
        false => KinetoError::Json(error),
    })
}

/// Reads JSON up to the limits of what its parser keeps in memory.
struct Bounded<R> {
    reader: R,
    depth: u32,
    /// Bytes so far of the string or number.
    text_bytes: u32,
    place: Place,
}

#[derive(Clone, Copy)]
enum Place {
    Outside,
    InString,
    /// Behind a backslash.
    Escaped,
}

impl<R: Read> Read for Bounded<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.reader.read(buffer)?;
        let mut bytes = buffer[..count].iter();
        bytes.try_for_each(|&byte| self.pass(byte)).map_err(io::Error::other)?;
        Ok(count)
    }
}

impl<R> Bounded<R> {
    fn pass(&mut self, byte: u8) -> Result<(), KinetoError> {
        self.text_bytes += 1;
        self.place = match (self.place, byte) {
            (Place::Outside, b'"') => {
                self.text_bytes = 0;
                Place::InString
            }
            (
                Place::Outside,
                b'[' | b'{' | b']' | b'}' | b',' | b':' | b' ' | b'\t' | b'\r' | b'\n',
            ) => {
                self.text_bytes = 0;
                match byte {
                    b'[' | b'{' => self.depth += 1,
                    b']' | b'}' => self.depth = self.depth.saturating_sub(1),
                    _ => {}
                }
                Place::Outside
            }
            (Place::InString, b'\\') => Place::Escaped,
            (Place::InString, b'"') | (Place::Outside, _) => Place::Outside,
            (Place::InString | Place::Escaped, _) => Place::InString,
        };
        if self.text_bytes > TEXT_BYTES_MAX {
            return Err(KinetoError::Text);
        }
        if self.depth > DEPTH_MAX {
            return Err(KinetoError::Depth);
        }
        Ok(())
    }
}

impl<'de> Deserialize<'de> for Kineto {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Kineto;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object with traceEvents")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Kineto, A::Error> {
                let (mut base_ns, mut events) = (0, None);
                while let Some(field) = fields.next_key::<String>()? {
                    match field.as_str() {
                        "baseTimeNanoseconds" => base_ns = fields.next_value()?,
                        "traceEvents" => events = Some(fields.next_value()?),
                        _ => drop(fields.next_value::<IgnoredAny>()?),
                    }
                }
                let events =
                    events.ok_or_else(|| serde::de::Error::missing_field("traceEvents"))?;
                Ok(Kineto { base_ns, events })
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

/// The first start and the last end of events.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Times {
    count: u64,
    first_us: f64,
    last_us: f64,
}

/// An event; metadata has no time.
#[derive(Deserialize)]
struct Event {
    ts: Option<f64>,
    dur: Option<f64>,
}

impl<'de> Deserialize<'de> for Times {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Events;
        impl<'de> Visitor<'de> for Events {
            type Value = Times;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an array of events")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut events: A) -> Result<Times, A::Error> {
                let mut times = Times { count: 0, first_us: f64::MAX, last_us: f64::MIN };
                while let Some(event) = events.next_element::<Event>()? {
                    // Metadata is written at time 0 by some versions.
                    let Some(ts) = event.ts.filter(|ts| *ts != 0.0) else { continue };
                    times.count += 1;
                    times.first_us = times.first_us.min(ts);
                    times.last_us = times.last_us.max(ts + event.dur.unwrap_or(0.0));
                }
                Ok(times)
            }
        }
        deserializer.deserialize_seq(Events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_count_from_the_base() {
        let text = r#"{"schemaVersion": 1, "baseTimeNanoseconds": 1759999999000000000, "deep": [{"ts": 1}],
            "traceEvents": [{"ph": "M", "ts": 0}, {"ph": "M"}, {"ph": "X", "ts": 2000000.5, "dur": 10},
                            {"ph": "X", "ts": 1000000.25, "dur": 1.5}]}"#;
        let trace = read(text.as_bytes()).unwrap();
        assert_eq!(trace.span_ns(), Some((1_760_000_000_000_000_250, 1_760_000_001_000_010_500)));
    }

    #[test]
    fn traces_without_a_base_have_unix_times() {
        let trace = read(&br#"{"traceEvents": [{"ts": 1760000000000000}]}"#[..]).unwrap();
        assert_eq!(trace.base_ns, 0);
        assert_eq!(trace.span_ns(), Some((1_760_000_000_000_000_000, 1_760_000_000_000_000_000)));
        assert_eq!(read(&br#"{"traceEvents": []}"#[..]).unwrap().span_ns(), None);
    }

    /// A text again and again.
    struct Endless {
        text: &'static str,
        at: usize,
    }

    impl Read for Endless {
        fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
            for byte in &mut *buffer {
                *byte = self.text.as_bytes()[self.at % self.text.len()];
                self.at += 1;
            }
            Ok(buffer.len())
        }
    }

    #[test]
    fn what_a_parser_would_keep_is_limited() {
        let refusal = |begin: &'static str, text| {
            let more = Endless { text, at: 0 }.take(4 * u64::from(TEXT_BYTES_MAX));
            read(begin.as_bytes().chain(more)).unwrap_err()
        };
        for begin in
            ["{\"", "{\"a\": \"", "{\"traceEvents\": [{\"", "{\"traceEvents\": [{\"ts\": 1"]
        {
            let error = refusal(begin, "1");
            assert!(matches!(error, KinetoError::Text), "{begin}: {error}");
        }
        let error = refusal("{\"", "\\\"");
        assert!(matches!(error, KinetoError::Text), "quotes of a name: {error}");
        for begin in ["{\"a\": ", "{\"traceEvents\": [{\"args\": "] {
            let error = refusal(begin, "[");
            assert!(matches!(error, KinetoError::Depth), "{begin}: {error}");
        }
        assert_eq!(KinetoError::Depth.to_string(), "values are nested more than 128 deep");
    }

    #[test]
    fn what_is_within_the_limits_is_read() {
        let long = "\\\"x".repeat(1 << 20);
        let nested = "[".repeat(100) + &"]".repeat(100);
        let text = format!(
            r#"{{"{long}": "{long}", "flat": [[], {{}}, [1]], "deep": {nested}, "traceEvents": [{{"ts": 1e3}}]}}"#
        );
        assert_eq!(read(text.as_bytes()).unwrap().span_ns(), Some((1_000_000, 1_000_000)));
    }

    #[test]
    fn a_file_that_cannot_be_read_says_so() {
        struct Broken;
        impl Read for Broken {
            fn read(&mut self, _: &mut [u8]) -> io::Result<usize> {
                Err(io::Error::from_raw_os_error(5))
            }
        }
        let error = read(br#"{"a": "#.chain(Broken)).unwrap_err();
        assert!(matches!(error, KinetoError::Io(_)), "{error}");
    }

    #[test]
    fn other_files_are_refused() {
        for text in [
            "",
            "{",
            "[]",
            "{}",
            r#"{"traceEvents": 1}"#,
            r#"{"traceEvents": [{"ts": "x"}]}"#,
            r#"{"traceEvents": []"#,
            r#"{"baseTimeNanoseconds": -1, "traceEvents": []}"#,
        ] {
            assert!(read(text.as_bytes()).is_err(), "{text}");
        }
    }
}
