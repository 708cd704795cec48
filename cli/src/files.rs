//! JSON files of one object with known fields.

use std::fmt;
use std::fs::File;
use std::io::{self, Read};
use std::path::Path;

use serde::de::{DeserializeOwned, Error as _, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

/// Maximum size of a description in bytes.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// An error of reading a description.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptionError {
    /// The file cannot be read.
    #[error("{file}: {source}; {accepted}")]
    Io {
        /// The file.
        file: String,
        /// The cause.
        source: io::Error,
        /// Accepted alternatives.
        accepted: String,
    },
    /// The file exceeds the size limit.
    #[error("{file} is longer than {FILE_BYTES_MAX} bytes; accepted: at most that")]
    Length {
        /// The file.
        file: String,
    },
    /// The file is not JSON with these fields.
    #[error("{file}: {source}; accepted: {accepted}")]
    Json {
        /// The file.
        file: String,
        /// The problem and its location.
        source: serde_json::Error,
        /// Accepted fields.
        accepted: String,
    },
    /// The file has an unknown field, probably a misspelling.
    #[error("{file} has unknown field {field}; accepted: {accepted}")]
    Field {
        /// The file.
        file: String,
        /// The unknown field.
        field: String,
        /// Known fields.
        accepted: String,
    },
    /// A value is out of range, or the model is not supported.
    #[error("{file}: {what} is {seen}; accepted: {accepted}")]
    Value {
        /// The file.
        file: String,
        /// The field.
        what: String,
        /// The value seen.
        seen: String,
        /// The values accepted.
        accepted: String,
    },
}

/// Reads the JSON object of a file; `otherwise` names the accepted alternatives.
pub(crate) fn object(path: &Path, otherwise: &str) -> Result<Map<String, Value>, DescriptionError> {
    let file = path.display().to_string();
    let io = |source| {
        let accepted = format!("accepted: {otherwise}");
        DescriptionError::Io { file: file.clone(), source, accepted }
    };
    // A special file has no size and may have no end.
    let mut text = Vec::new();
    File::open(path).map_err(io)?.take(FILE_BYTES_MAX + 1).read_to_end(&mut text).map_err(io)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(DescriptionError::Length { file });
    }
    parsed(&file, &text, otherwise)
}

/// Parses the JSON object of a file; `otherwise` names the accepted alternatives.
pub(crate) fn parsed(
    file: &str,
    text: &[u8],
    otherwise: &str,
) -> Result<Map<String, Value>, DescriptionError> {
    let object: serde_json::Result<Once> = serde_json::from_slice(text);
    object.map(|Once(object)| object).map_err(|source| {
        let (file, accepted) = (file.to_owned(), otherwise.to_owned());
        DescriptionError::Json { file, source, accepted }
    })
}

/// Converts an object to a struct. Unknown fields, and missing fields without a default, are refused.
pub(crate) fn fields<T>(
    file: &Path,
    object: Map<String, Value>,
    like: &T,
) -> Result<T, DescriptionError>
where
    T: Serialize + DeserializeOwned,
{
    let known = match serde_json::to_value(like) {
        Ok(Value::Object(known)) => known,
        _ => Map::new(),
    };
    let names = known.keys().map(String::as_str).collect::<Vec<_>>().join(", ");
    let file = file.display().to_string();
    if let Some(field) = object.keys().find(|field| !known.contains_key(*field)) {
        return Err(DescriptionError::Field { file, field: field.clone(), accepted: names });
    }
    let object: Map<String, Value> =
        object.into_iter().map(|(field, value)| (field, whole(value))).collect();
    let takes = |field: &str, value: Value| {
        let mut known = known.clone();
        known.insert(field.to_owned(), value);
        serde_json::from_value::<T>(Value::Object(known)).is_ok()
    };
    if let Some((field, value)) =
        object.iter().find(|(field, value)| !takes(field, (*value).clone()))
    {
        let most = if takes(field, u64::MAX.into()) { u64::MAX } else { u32::MAX.into() };
        let accepted = format!("integers, 0 to {most}");
        let (what, seen) = (field.clone(), value.to_string());
        return Err(DescriptionError::Value { file, what, seen, accepted });
    }
    serde_json::from_value(Value::Object(object)).map_err(|source| {
        let accepted = format!("a JSON object of {names}");
        DescriptionError::Json { file, source, accepted }
    })
}

/// A JSON object without duplicate fields.
struct Once(Map<String, Value>);

impl<'de> Deserialize<'de> for Once {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Fields;
        impl<'de> Visitor<'de> for Fields {
            type Value = Once;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut fields: A) -> Result<Once, A::Error> {
                let mut object = Map::new();
                while let Some((field, value)) = fields.next_entry::<String, Value>()? {
                    if object.contains_key(&field) {
                        return Err(A::Error::custom(format!("duplicate field {field}")));
                    }
                    object.insert(field, value);
                }
                Ok(Once(object))
            }
        }
        deserializer.deserialize_map(Fields)
    }
}

/// Converts a float with an integral value below 2^64, such as the rate 4e14, to an integer.
fn whole(value: Value) -> Value {
    /// The smallest integer beyond 64 bits, which a float has exactly.
    const END: f64 = 18_446_744_073_709_551_616.0;
    match value.as_f64() {
        Some(number) if value.is_f64() && number.fract() == 0.0 && (0.0..END).contains(&number) => {
            Value::from(number as u64)
        }
        _ => value,
    }
}
