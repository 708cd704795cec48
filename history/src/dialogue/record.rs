//! The format of the log, and what is made of bytes that a disk returns.
//!
//! ```text
//! magic [8] · version u32 · dimension u32 · first free id u64 · CRC-32C of these u32
//! for each record: bytes u32 · kind u32 · CRC-32C of these u32 · payload · CRC-32C of the payload u32
//! kind 1, an entry: id u64 · time f64 · bytes of query, passage, response 3 × u32 · embedding f32 × dimension · texts
//! kind 2, entries that are forgotten: their ids u64
//! ```

use std::collections::BTreeMap;

use super::entry::Entry;
use crate::bytes::take;
use crate::limits::{ENTRY_IDS_MAX, LOG_RECORD_BYTES_MAX, TEXT_BYTES_MAX};

const MAGIC: [u8; 8] = *b"dmdialog";
/// Version of the format. It counts up with every change.
pub(crate) const LOG_VERSION: u32 = 1;
const ENTRY: u32 = 1;
const FORGET: u32 = 2;
pub(crate) const HEAD_BYTES: usize = 12;
const SUM_BYTES: usize = 4;
/// Bytes of a record beside its texts and its embedding.
const ENTRY_OVERHEAD_BYTES: usize = HEAD_BYTES + 28 + SUM_BYTES;
/// How far the length of an embedding may be from 1.
const LENGTH_ERROR: f32 = 1e-3;

/// Entries with their embeddings, by id.
pub(crate) type Entries = BTreeMap<u64, (Entry, Vec<f32>)>;

/// What a log holds.
#[derive(Debug, Default)]
pub(crate) struct Contents {
    pub(crate) entries: Entries,
    pub(crate) next_id: u64,
    /// Bytes up to the end of the last sound record.
    pub(crate) sound_bytes: usize,
    /// What is wrong with the bytes after them, if there are any.
    pub(crate) torn: Option<String>,
}

pub(crate) fn encode_header(dimension: usize, next_id: u64) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend_from_slice(&LOG_VERSION.to_le_bytes());
    bytes.extend_from_slice(&(dimension as u32).to_le_bytes());
    bytes.extend_from_slice(&next_id.to_le_bytes());
    let sum = crc32c::crc32c(&bytes);
    bytes.extend_from_slice(&sum.to_le_bytes());
    bytes
}

/// Returns the bytes that an entry takes in a log.
pub(crate) fn entry_bytes(entry: &Entry, dimension: usize) -> u64 {
    let texts = entry.query.len() + entry.passage.len() + entry.response.len();
    (ENTRY_OVERHEAD_BYTES + 4 * dimension + texts) as u64
}

pub(crate) fn encode_entry(entry: &Entry, embedding: &[f32], bytes: &mut Vec<u8>) {
    let texts = [&entry.query, &entry.passage, &entry.response];
    record(bytes, ENTRY, |bytes| {
        bytes.extend_from_slice(&entry.id.to_le_bytes());
        bytes.extend_from_slice(&entry.time_s.to_le_bytes());
        texts.iter().for_each(|it| bytes.extend_from_slice(&(it.len() as u32).to_le_bytes()));
        embedding.iter().for_each(|it| bytes.extend_from_slice(&it.to_le_bytes()));
        texts.iter().for_each(|it| bytes.extend_from_slice(it));
    });
}

pub(crate) fn encode_forget(ids: &[u64], bytes: &mut Vec<u8>) {
    for ids in ids.chunks(LOG_RECORD_BYTES_MAX / 16) {
        record(bytes, FORGET, |bytes| {
            ids.iter().for_each(|id| bytes.extend_from_slice(&id.to_le_bytes()));
        });
    }
}

/// Reads a log back. An error says what is damaged.
pub(crate) fn decode(bytes: &[u8], dimension: usize) -> Result<Contents, String> {
    let mut rest = bytes;
    let mut contents = Contents { next_id: header(&mut rest, dimension)?, ..Contents::default() };
    while !rest.is_empty() {
        let at = bytes.len() - rest.len();
        match next(rest) {
            Ok((kind, payload, after)) => {
                contents
                    .apply(kind, payload, dimension)
                    .map_err(|it| format!("byte {at}: {it}"))?;
                rest = after;
            }
            Err(unsound) if unsound.is_last(rest) => {
                let left = rest.len();
                contents.torn = Some(format!("byte {at}: {}, {left} bytes left", unsound.reason));
                break;
            }
            Err(unsound) => return Err(format!("byte {at}: {}", unsound.reason)),
        }
    }
    contents.sound_bytes = bytes.len() - rest.len();
    Ok(contents)
}

fn header(rest: &mut &[u8], dimension: usize) -> Result<u64, String> {
    let bytes = *rest;
    if take::<8>(rest)? != MAGIC {
        return Err("it does not begin as a log of dialogues does".into());
    }
    let version = u32::from_le_bytes(take(rest)?);
    if version != LOG_VERSION {
        return Err(format!("its version is {version}, and this release reads {LOG_VERSION}"));
    }
    let own = u32::from_le_bytes(take(rest)?) as usize;
    let next_id = u64::from_le_bytes(take(rest)?);
    let covered = bytes.get(..bytes.len() - rest.len()).unwrap_or_default();
    if u32::from_le_bytes(take(rest)?) != crc32c::crc32c(covered) {
        return Err("the checksum of its head is wrong".into());
    }
    if next_id > ENTRY_IDS_MAX {
        return Err(format!("its first free id is {next_id}"));
    }
    match own == dimension {
        true => Ok(next_id),
        false => Err(format!("its embeddings have {own} numbers, and this dialogue's {dimension}")),
    }
}

fn record(bytes: &mut Vec<u8>, kind: u32, payload: impl FnOnce(&mut Vec<u8>)) {
    let begin = bytes.len();
    bytes.extend_from_slice(&[0; HEAD_BYTES]);
    payload(bytes);
    let own = bytes.split_off(begin + HEAD_BYTES);
    bytes.truncate(begin);
    bytes.extend_from_slice(&(own.len() as u32).to_le_bytes());
    bytes.extend_from_slice(&kind.to_le_bytes());
    let head = crc32c::crc32c(bytes.get(begin..).unwrap_or_default());
    bytes.extend_from_slice(&head.to_le_bytes());
    bytes.extend_from_slice(&own);
    bytes.extend_from_slice(&crc32c::crc32c(&own).to_le_bytes());
}

/// Bytes that are no record.
struct Unsound {
    reason: String,
    /// Where the record ends, if its head is sound.
    end: Option<usize>,
}

impl Unsound {
    fn new(reason: impl Into<String>, end: Option<usize>) -> Self {
        Self { reason: reason.into(), end }
    }

    /// Returns whether `bytes`, which begin with it, may be one record that was not written to its end. Behind it may
    /// be zeros, places that were not written at all. With a sound record behind it, it was written.
    fn is_last(&self, bytes: &[u8]) -> bool {
        let written = bytes.iter().rposition(|it| *it != 0).map_or(0, |last| last + 1);
        match self.end {
            Some(end) => end >= written,
            None => {
                written <= LOG_RECORD_BYTES_MAX + HEAD_BYTES + SUM_BYTES
                    && !(1..written).any(|at| bytes.get(at..).is_some_and(|it| next(it).is_ok()))
            }
        }
    }
}

/// Returns the kind and the payload of the first record, and the bytes behind it.
fn next(bytes: &[u8]) -> Result<(u32, &[u8], &[u8]), Unsound> {
    let Some((head, rest)) = bytes.split_first_chunk::<HEAD_BYTES>() else {
        return Err(Unsound::new("a record without its head", Some(bytes.len())));
    };
    let mut words = head.as_chunks::<4>().0.iter().map(|it| u32::from_le_bytes(*it));
    let mut word = || words.next().unwrap_or_default();
    let (length, kind, sum) = (word() as usize, word(), word());
    let covered = head.get(..HEAD_BYTES - SUM_BYTES).unwrap_or_default();
    if crc32c::crc32c(covered) != sum || length > LOG_RECORD_BYTES_MAX {
        return Err(Unsound::new("the checksum of a record's head is wrong", None));
    }
    let end = HEAD_BYTES + length + SUM_BYTES;
    let Some((payload, rest)) = rest.split_at_checked(length) else {
        return Err(Unsound::new(format!("a record of {length} bytes that ends early"), Some(end)));
    };
    let Some((sum, rest)) = rest.split_first_chunk::<SUM_BYTES>() else {
        return Err(Unsound::new("a record without its checksum", Some(end)));
    };
    match u32::from_le_bytes(*sum) == crc32c::crc32c(payload) {
        true => Ok((kind, payload, rest)),
        false => Err(Unsound::new("the checksum of a record is wrong", Some(end))),
    }
}

impl Contents {
    fn apply(&mut self, kind: u32, payload: &[u8], dimension: usize) -> Result<(), String> {
        let mut rest = payload;
        match kind {
            ENTRY => {
                let (entry, embedding) = entry(&mut rest, dimension)?;
                if self.entries.last_key_value().is_some_and(|(last, _)| entry.id <= *last) {
                    return Err(format!("entry {} comes late", entry.id));
                }
                if entry.id >= ENTRY_IDS_MAX {
                    return Err(format!("entry {}, an id that no record gives", entry.id));
                }
                self.next_id = self.next_id.max(entry.id + 1);
                self.entries.insert(entry.id, (entry, embedding));
            }
            FORGET => {
                while !rest.is_empty() {
                    let id = u64::from_le_bytes(take(&mut rest)?);
                    if self.entries.remove(&id).is_none() {
                        return Err(format!("entry {id}, which is forgotten, is not there"));
                    }
                }
            }
            other => return Err(format!("a record of kind {other}")),
        }
        match rest.len() {
            0 => Ok(()),
            left => Err(format!("a record with {left} bytes too many")),
        }
    }
}

fn entry(rest: &mut &[u8], dimension: usize) -> Result<(Entry, Vec<f32>), String> {
    let id = u64::from_le_bytes(take(rest)?);
    let time_s = f64::from_le_bytes(take(rest)?);
    let lengths = [
        u32::from_le_bytes(take(rest)?),
        u32::from_le_bytes(take(rest)?),
        u32::from_le_bytes(take(rest)?),
    ];
    let mut embedding = Vec::with_capacity(dimension);
    for _ in 0..dimension {
        embedding.push(f32::from_le_bytes(take(rest)?));
    }
    let length: f32 = embedding.iter().map(|it| it * it).sum();
    let is_unit = length == 0.0 || (length - 1.0).abs() < LENGTH_ERROR;
    if !time_s.is_finite() || !is_unit {
        return Err(format!(
            "entry {id} with the time {time_s} and an embedding of length {length}"
        ));
    }
    let [query, passage, response] = lengths.map(|length| text(rest, length as usize));
    let entry = Entry { id, query: query?, passage: passage?, response: response?, time_s };
    Ok((entry, embedding))
}

fn text(rest: &mut &[u8], length: usize) -> Result<Box<[u8]>, String> {
    let own = rest.split_at_checked(length).filter(|_| length <= TEXT_BYTES_MAX);
    let (own, after) = own.ok_or_else(|| format!("a text of {length} bytes"))?;
    *rest = after;
    Ok(own.into())
}
