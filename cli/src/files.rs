//! JSON files of one object: read whole, every field known.

use std::fs;
use std::io;
use std::path::Path;

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};

/// Bytes of a model's or a machine's description.
const FILE_BYTES_MAX: u64 = 1 << 20;

/// Why a description was not read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DescriptionError {
    /// It cannot be read.
    #[error("{file}: {source}; {accepted}")]
    Io {
        /// Which file.
        file: String,
        /// Why.
        source: io::Error,
        /// What else could have been named.
        accepted: String,
    },
    /// Too large to be one.
    #[error("{file} has {seen} bytes; accepted: up to {FILE_BYTES_MAX}")]
    Length {
        /// Which file.
        file: String,
        /// Its bytes.
        seen: u64,
    },
    /// No JSON, or not of these fields.
    #[error("{file}: {source}; accepted: {accepted}")]
    Json {
        /// Which file.
        file: String,
        /// What is wrong, and where.
        source: serde_json::Error,
        /// Its fields.
        accepted: String,
    },
    /// A field that nobody reads: a slip of a name that matters.
    #[error("{file} has a field {field}; accepted: {accepted}")]
    Field {
        /// Which file.
        file: String,
        /// The field.
        field: String,
        /// Those known.
        accepted: String,
    },
    /// A value out of bounds, or of a model that is not served.
    #[error("{file}: {what} is {seen}; accepted: {accepted}")]
    Value {
        /// Which file.
        file: String,
        /// Which field.
        what: &'static str,
        /// What it says.
        seen: String,
        /// What it may say.
        accepted: String,
    },
}

/// The object in a file; `otherwise` is what else could have been named.
pub(crate) fn object(path: &Path, otherwise: &str) -> Result<Map<String, Value>, DescriptionError> {
    let file = path.display().to_string();
    let io = |source| {
        let accepted = format!("accepted: {otherwise}");
        DescriptionError::Io { file: file.clone(), source, accepted }
    };
    let seen = fs::metadata(path).map_err(io)?.len();
    if seen > FILE_BYTES_MAX {
        return Err(DescriptionError::Length { file, seen });
    }
    let text = fs::read(path).map_err(io)?;
    serde_json::from_slice(&text).map_err(|source| {
        let accepted = otherwise.to_owned();
        DescriptionError::Json { file, source, accepted }
    })
}

/// An object as a struct; no field may be unknown, those without a default must be there.
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
    let object = object.into_iter().map(|(field, value)| (field, whole(value))).collect();
    serde_json::from_value(Value::Object(object)).map_err(|source| {
        let accepted = format!("a JSON object of {names}");
        DescriptionError::Json { file, source, accepted }
    })
}

/// A rate as people write it, 4e14, is a whole number.
fn whole(value: Value) -> Value {
    /// Up to here, a float is the number that was written.
    const EXACT_MAX: f64 = (1_u64 << 53) as f64;
    match value.as_f64() {
        Some(number)
            if value.is_f64() && number.fract() == 0.0 && (0.0..=EXACT_MAX).contains(&number) =>
        {
            Value::from(number as u64)
        }
        _ => value,
    }
}
