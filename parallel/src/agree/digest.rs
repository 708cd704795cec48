//! A stable hash of plain data, the same on every machine.
//!
//! SipHash-2-4 with 128 bits and a fixed key, over a canonical encoding: every number as 8 bytes,
//! little-endian; every list with its length first; every part with its name first. Against accident
//! only: whoever wants to forge a digest can.

use std::fmt;
use std::hash::Hasher;

use serde::{Deserialize, Serialize};
use siphasher::sip128::{Hasher128, SipHasher24};

/// 128 bits; text as 32 hexadecimal digits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(into = "String", try_from = "String")]
pub struct Digest {
    /// First 64 bits.
    pub high: u64,
    /// Last 64 bits.
    pub low: u64,
}

/// A text that is no digest.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("digest {seen:?}; accepted: 32 hexadecimal digits")]
pub struct NoDigest {
    /// The text.
    pub seen: String,
}

impl fmt::Display for Digest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}{:016x}", self.high, self.low)
    }
}

impl From<Digest> for String {
    fn from(digest: Digest) -> Self {
        digest.to_string()
    }
}

impl TryFrom<String> for Digest {
    type Error = NoDigest;

    fn try_from(text: String) -> Result<Self, NoDigest> {
        let half = |range| {
            let digits: Option<&str> = text.get(range);
            digits
                .filter(|d| d.bytes().all(|b| b.is_ascii_hexdigit()))
                .and_then(|digits| u64::from_str_radix(digits, 16).ok())
        };
        match (text.len(), half(0..16), half(16..32)) {
            (32, Some(high), Some(low)) => Ok(Self { high, low }),
            _ => Err(NoDigest { seen: text }),
        }
    }
}

/// Takes data in order. What is taken, and in which order, is part of [`super::AGREE_VERSION`].
#[derive(Clone, Debug)]
pub struct Encoder(SipHasher24);

impl Encoder {
    /// For one kind of thing, by name.
    #[must_use]
    pub fn new(name: &str) -> Self {
        let mut encoder = Self(SipHasher24::new());
        encoder.text(name);
        encoder
    }

    /// A number.
    pub fn number(&mut self, value: impl Into<u64>) -> &mut Self {
        self.0.write(&value.into().to_le_bytes());
        self
    }

    /// A number with a fraction, by its bits: −0 and 0 differ.
    pub fn fraction(&mut self, value: f64) -> &mut Self {
        self.number(value.to_bits())
    }

    /// A list of numbers, its length first.
    pub fn numbers<T: Into<u64>>(&mut self, values: impl ExactSizeIterator<Item = T>) -> &mut Self {
        self.number(values.len() as u64);
        for value in values {
            self.number(value);
        }
        self
    }

    /// A text, its length first.
    pub fn text(&mut self, text: &str) -> &mut Self {
        self.number(text.len() as u64);
        self.0.write(text.as_bytes());
        self
    }

    /// The digest of all that was taken.
    #[must_use]
    pub fn digest(&self) -> Digest {
        let bits = u128::from(self.0.finish128());
        Digest { high: (bits >> 64) as u64, low: bits as u64 }
    }
}
