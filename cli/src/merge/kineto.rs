//! What a JSON trace of torch.profiler says about its time. Reads the file once, in constant memory.

use std::fmt;
use std::io::Read;

use serde::de::{IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};

/// Times of events are in microseconds.
const NS_PER_US: f64 = 1000.0;

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
pub(super) fn read(reader: impl Read) -> serde_json::Result<Kineto> {
    serde_json::from_reader(reader)
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
