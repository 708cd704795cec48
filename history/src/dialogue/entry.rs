//! Entries, and what is accepted as one.

use crate::error::HistoryError;
use crate::limits::TEXT_BYTES_MAX;

/// A turn to record. Texts are bytes that are only stored.
#[derive(Clone, Copy, Debug)]
pub struct NewEntry<'a> {
    /// The query's embedding: finite numbers, as many as [`crate::DialogueOptions::dimension`].
    pub embedding: &'a [f32],
    /// What was asked.
    pub query: &'a [u8],
    /// What was read for it.
    pub passage: &'a [u8],
    /// What was answered.
    pub response: &'a [u8],
    /// When, in seconds of a clock of the caller.
    pub time_s: f64,
}

/// A recorded turn.
#[derive(Clone, Debug, PartialEq)]
pub struct Entry {
    /// Entries count up as they are recorded.
    pub id: u64,
    /// What was asked.
    pub query: Box<[u8]>,
    /// What was read for it.
    pub passage: Box<[u8]>,
    /// What was answered.
    pub response: Box<[u8]>,
    /// When, in seconds of a clock of the caller.
    pub time_s: f64,
}

impl NewEntry<'_> {
    pub(crate) fn check(&self, dimension: usize) -> Result<(), HistoryError> {
        check_embedding(self.embedding, dimension)?;
        check_finite("time_s", self.time_s)?;
        let texts = [("query", self.query), ("passage", self.passage), ("response", self.response)];
        match texts.iter().find(|(_, text)| text.len() > TEXT_BYTES_MAX) {
            None => Ok(()),
            Some((name, text)) => Err(HistoryError::Length {
                name,
                length: text.len(),
                min: 0,
                max: TEXT_BYTES_MAX,
                unit: "bytes",
            }),
        }
    }

    pub(crate) fn entry(&self, id: u64) -> Entry {
        Entry {
            id,
            query: self.query.into(),
            passage: self.passage.into(),
            response: self.response.into(),
            time_s: self.time_s,
        }
    }
}

pub(crate) fn check_embedding(embedding: &[f32], dimension: usize) -> Result<(), HistoryError> {
    if embedding.len() != dimension {
        return Err(HistoryError::Length {
            name: "embedding",
            length: embedding.len(),
            min: dimension,
            max: dimension,
            unit: "numbers",
        });
    }
    match embedding.iter().position(|it| !it.is_finite()) {
        None => Ok(()),
        Some(index) => {
            let value = embedding.get(index).copied().unwrap_or_default().into();
            Err(HistoryError::Number { name: "embedding", value, accepted: "finite numbers" })
        }
    }
}

pub(crate) fn check_finite(name: &'static str, value: f64) -> Result<(), HistoryError> {
    match value.is_finite() {
        true => Ok(()),
        false => Err(HistoryError::Number { name, value, accepted: "a finite number" }),
    }
}
