//! Earlier turns of dialogues. No runtime is required.

use std::ffi::{c_char, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use dormouse_history::dialogue::{Entry, Found, NewEntry};
use dormouse_history::{Dialogue, DialogueOptions};

use super::c::*;
use crate::boundary::{Elements, In, Out, check_reserved, enter, usize_of};
use crate::fault::Fault;
use crate::handles::{Kind, Table};
use crate::status::{DORMOUSE_ERR_LIMIT, dormouse_status_t};

static DIALOGUES: Table<Dialogue> = Table::new(Kind::Dialogue);

/// Texts of an entry.
const TEXTS: usize = 3;

/// Creates a history of dialogues, from which `dormouse_dialogue_retrieve` returns what is relevant and recent.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_dialogue_destroy`.
/// A log that ends within its last record is cut there (`dormouse_dialogue_get_torn`). Errors: `NULL`, `VERSION`,
/// `ARGUMENT`; `BUSY` for a directory in use; `IO`; `CORRUPT` for a log that is damaged before its last record, or of
/// another version or dimension, which stays as it is; `LIMIT`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_dialogue_create(
    options: *const dormouse_dialogue_options_t,
    dialogue_out: *mut *mut dormouse_dialogue_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs), here and below.
        let (out, it) = unsafe {
            (Out::new(dialogue_out, "dialogue_out")?, In::structure(options, "options")?)
        };
        check_reserved(it.reserved, "options.reserved")?;
        // SAFETY: as above.
        let dir = unsafe { In::optional_text(it.dir, "options.dir") }?.map(PathBuf::from);
        let defaults = DialogueOptions::of_dimension(it.dimension as usize);
        let or = |value: u64, default, name| match value {
            0 => Ok(default),
            _ => usize_of(value, name),
        };
        let options = DialogueOptions {
            entries_max: or(it.entries_max, defaults.entries_max, "entries_max")?,
            scanned_entries: or(it.scanned_entries, defaults.scanned_entries, "scanned_entries")?,
            alpha: it.alpha,
            decay_s: if it.decay_s == 0.0 { defaults.decay_s } else { it.decay_s },
            synced: it.unsynced == 0,
            ..defaults
        };
        let dialogue = match dir {
            None => Dialogue::new(options)?,
            Some(dir) => Dialogue::open(options, &dir)?,
        };
        out.write(DIALOGUES.insert(Arc::new(dialogue))?);
        Ok(())
    })
}

/// Destroys a history. NULL is a no-op. Calls of other threads go on; the last one releases the directory.
///
/// Any-thread. Errors: `HANDLE`, `STALE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_dialogue_destroy(
    dialogue: *mut dormouse_dialogue_t,
) -> dormouse_status_t {
    enter(|| DIALOGUES.discard(dialogue))
}

/// Records `count` turns, in their order: all of them or none. Beyond `entries_max` the entries of the least weight for
/// the last of these queries are forgotten.
///
/// `first_id_out` receives the id of the first; the others count up from it.
///
/// Any-thread; retrievals go on. The arrays are not kept. Errors: `NULL`, `HANDLE`, `STALE`; `ARGUMENT` for
/// an embedding of another dimension or with numbers that are not finite, a text of more than 2²⁰ bytes, more than
/// 4096 turns, or a time that is not finite; `LIMIT` after 2⁶³ turns; `IO` if the log could not be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_dialogue_record(
    dialogue: *mut dormouse_dialogue_t,
    turns: *const dormouse_turn_t,
    count: u64,
    first_id_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let (out, turns) = unsafe {
            let out = Out::new(first_id_out, "first_id_out")?;
            (out, In::slice(turns, usize_of(count, "count")?, "turns")?)
        };
        let found = DIALOGUES.get(dialogue)?;
        let mut entries = Vec::with_capacity(turns.len());
        for it in turns {
            // SAFETY: as above, for what each turn points to.
            entries.push(unsafe {
                NewEntry {
                    embedding: numbers(it.embedding, it.dimension)?,
                    query: bytes(&it.query, "query")?,
                    passage: bytes(&it.passage, "passage")?,
                    response: bytes(&it.response, "response")?,
                    time_s: it.time_s,
                }
            });
        }
        out.write(found.record(&entries)?);
        Ok(())
    })
}

/// Retrieves entries: the best first, or in the order of the chain.
///
/// `count_out` receives the number of entries. `found` receives them if `capacity` is enough; otherwise it is
/// unchanged. `found` may be NULL to query the number.
///
/// Any-thread; retrievals run beside each other. The caller owns the array. Errors: `NULL`, `HANDLE`, `STALE`;
/// `ARGUMENT` for an embedding of another dimension or with numbers that are not finite, a time that is not finite,
/// too many entries or another kind; `LIMIT` if the array is too small (`count_out` is written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_dialogue_retrieve(
    dialogue: *mut dormouse_dialogue_t,
    query: *const dormouse_query_t,
    found: *mut dormouse_found_t,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let (out, query, place) = unsafe {
            let place = Elements::new(found, capacity, "found")?;
            (Out::new(count_out, "count_out")?, In::one(query, "query")?, place)
        };
        // SAFETY: as above.
        let entries = unsafe { retrieve(dialogue, query) }?;
        let entries: Vec<_> = entries.iter().map(found_of).collect();
        out.array(&entries, &place)
    })
}

/// Retrieves entries as `dormouse_dialogue_retrieve` does, with their texts: no other call can forget an entry between
/// the two.
///
/// `count_out` receives the number of entries, and `texts_bytes_out` that of all bytes of their texts. `found` receives
/// the entries, and `lengths` 3 × `capacity` numbers: the bytes of what was asked, read and answered in each entry.
/// `texts` receives these bytes, one text behind the other, without a NUL. If `capacity` or `texts_capacity` is not
/// enough, the arrays are unchanged. Each may be NULL.
///
/// Any-thread; retrievals run beside each other. The caller owns the arrays. Errors: those of
/// `dormouse_dialogue_retrieve`; `LIMIT` if an array is too small (both numbers are written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_dialogue_retrieve_texts(
    dialogue: *mut dormouse_dialogue_t,
    query: *const dormouse_query_t,
    found: *mut dormouse_found_t,
    lengths: *mut u64,
    capacity: u64,
    count_out: *mut u64,
    texts: *mut c_char,
    texts_capacity: u64,
    texts_bytes_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs), here and below.
        let (out, texts_out, query) = unsafe {
            let texts_out = Out::new(texts_bytes_out, "texts_bytes_out")?;
            (Out::new(count_out, "count_out")?, texts_out, In::one(query, "query")?)
        };
        let lengths_capacity = capacity.saturating_mul(TEXTS as u64);
        // SAFETY: as above.
        let (found, lengths, texts) = unsafe {
            let texts = Elements::<u8>::new(texts.cast(), texts_capacity, "texts")?;
            let lengths = Elements::new(lengths, lengths_capacity, "lengths")?;
            (Elements::new(found, capacity, "found")?, lengths, texts)
        };
        // SAFETY: as above.
        let entries = unsafe { retrieve(dialogue, query) }?;
        let all: Vec<_> = entries.iter().map(found_of).collect();
        let parts: Vec<&[u8]> = entries.iter().flat_map(|it| texts_of(&it.entry)).collect();
        let all_lengths: Vec<u64> = parts.iter().map(|it| it.len() as u64).collect();
        let (count, bytes) = (all.len() as u64, all_lengths.iter().sum());
        out.write(count);
        texts_out.write(bytes);
        let is_short = found.is_short_of(count) || lengths.is_short_of(all_lengths.len() as u64);
        if is_short || texts.is_short_of(bytes) {
            return Err(Fault::new(
                DORMOUSE_ERR_LIMIT,
                format!(
                    "capacities are {capacity} and {texts_capacity}; accepted: at least {count} \
                     and {bytes}"
                ),
            ));
        }
        found.write(&all)?;
        lengths.write(&all_lengths)?;
        if texts.is_wanted() {
            texts.write(&parts.concat())?;
        }
        Ok(())
    })
}

/// Returns a text of an entry, as it was recorded: bytes without a NUL.
///
/// `count_out` receives the number of bytes. `buffer` receives them if `capacity` bytes are enough; otherwise it is
/// unchanged. `buffer` may be NULL to query the number.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`; `ARGUMENT` for an entry that is not there,
/// which may have been forgotten since it was retrieved, or another text; `LIMIT` if the buffer is too small
/// (`count_out` is written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_dialogue_get_text(
    dialogue: *mut dormouse_dialogue_t,
    id: u64,
    text: i32,
    buffer: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let (out, place) = unsafe {
            let place = Elements::new(buffer.cast(), capacity, "buffer")?;
            (Out::new(count_out, "count_out")?, place)
        };
        let Some(entry) = DIALOGUES.get(dialogue)?.entry(id) else {
            return Err(Fault::argument(format!(
                "id is {id}; accepted: that of an entry that is there"
            )));
        };
        let bytes = match text {
            DORMOUSE_TEXT_QUERY => &entry.query,
            DORMOUSE_TEXT_PASSAGE => &entry.passage,
            DORMOUSE_TEXT_RESPONSE => &entry.response,
            other => {
                return Err(Fault::argument(format!(
                    "text is {other}; accepted: 0 (query), 1 (passage), 2 (response)"
                )));
            }
        };
        out.array(bytes, &place)
    })
}

/// Returns figures of a history.
///
/// Any-thread. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_dialogue_get_stats(
    dialogue: *mut dormouse_dialogue_t,
    stats_out: *mut dormouse_dialogue_stats_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(stats_out, "stats_out") }?;
        let it = DIALOGUES.get(dialogue)?.stats();
        out.fill(dormouse_dialogue_stats_t {
            entries: it.entries,
            forgotten_entries: it.forgotten_entries,
            categories: it.categories,
            summaries: it.summaries,
            log_bytes: it.log_bytes,
            ..dormouse_dialogue_stats_t::default()
        });
        Ok(())
    })
}

/// Returns what was cut off the end of the log when the history was created, an empty text if nothing was.
///
/// `count_out` receives the number of bytes of the text, including the NUL. `buffer` receives the text
/// if `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query the length.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT` if the buffer is too small
/// (`count_out` is written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_dialogue_get_torn(
    dialogue: *mut dormouse_dialogue_t,
    buffer: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let count = unsafe { Out::new(count_out, "count_out") }?;
        let torn = DIALOGUES.get(dialogue)?.torn().unwrap_or_default().to_owned();
        // SAFETY: as above: `buffer` is NULL or writable for `capacity`.
        unsafe { count.text(torn, buffer, capacity) }
    })
}

/// # Safety
/// What the query points to is NULL or readable, as many numbers as it says, which do not change.
unsafe fn retrieve(
    dialogue: *mut dormouse_dialogue_t,
    query: &dormouse_query_t,
) -> Result<Vec<Found>, Fault> {
    let own = DIALOGUES.get(dialogue)?;
    // SAFETY: the caller's contract.
    let embedding = unsafe { numbers(query.embedding, query.dimension) }?;
    let count = query.entries_max as usize;
    match query.kind {
        DORMOUSE_QUERY_BEST => Ok(own.retrieve(embedding, query.now_s, count)?),
        DORMOUSE_QUERY_CHAIN => Ok(own.chain(embedding, query.now_s, count)?),
        other => Err(Fault::argument(format!("kind is {other}; accepted: 0 (best), 1 (chain)"))),
    }
}

fn texts_of(it: &Entry) -> [&[u8]; TEXTS] {
    [&it.query, &it.passage, &it.response]
}

fn found_of(it: &Found) -> dormouse_found_t {
    dormouse_found_t {
        id: it.entry.id,
        time_s: it.entry.time_s,
        weight: it.weight,
        relevance: it.relevance,
        recency: it.recency,
        reserved: 0,
    }
}

/// # Safety
/// `pointer` is NULL or readable for `count` numbers that do not change during `'a`.
unsafe fn numbers<'a>(pointer: *const f32, count: u64) -> Result<&'a [f32], Fault> {
    // SAFETY: the caller's contract.
    unsafe { In::slice(pointer, usize_of(count, "dimension")?, "embedding") }
}

/// # Safety
/// The bytes are NULL or readable, as many as the struct says, and do not change during `'a`.
unsafe fn bytes<'a>(it: &dormouse_bytes_t, name: &str) -> Result<&'a [u8], Fault> {
    let pointer: *const c_void = it.bytes;
    // SAFETY: the caller's contract.
    unsafe { In::slice(pointer.cast(), usize_of(it.count, name)?, name) }
}
