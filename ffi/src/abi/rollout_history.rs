//! Drafts from earlier rollouts. No runtime is required.

use std::ffi::c_char;
use std::path::PathBuf;
use std::sync::Arc;

use dormouse_history::{CONTEXT_TOKENS, Digest, History, HistoryDir, Options, Weighing, Window};

use super::c::*;
use crate::boundary::{In, Out, check_reserved, enter, usize_of};
use crate::fault::Fault;
use crate::handles::{Kind, Table};
use crate::ids::Ids;
use crate::status::{DORMOUSE_ERR_STATE, dormouse_status_t};

static HISTORIES: Table<Rollouts> = Table::new(Kind::History);

/// `epochs_kept` of 0.
const EPOCHS_KEPT: u32 = 2;

/// A history behind a handle.
#[derive(Debug)]
struct Rollouts {
    history: History,
    /// Its locked directory.
    dir: Option<HistoryDir>,
}

/// Creates a history of rollouts, from which `dormouse_history_draft` drafts the next ones.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_history_destroy`.
/// Errors: `NULL`, `VERSION`, `ARGUMENT`; `BUSY` for a directory that another process or history uses; `IO`;
/// `CORRUPT` for a saved history that is damaged or of another version, which stays as it is.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_history_create(
    options: *const dormouse_history_options_t,
    history_out: *mut *mut dormouse_history_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs), here and below.
        let (out, it) =
            unsafe { (Out::new(history_out, "history_out")?, In::structure(options, "options")?) };
        check_reserved(it.reserved, "options.reserved")?;
        let weighing = match it.weighing {
            DORMOUSE_WEIGHING_REWARD => Weighing::Reward,
            DORMOUSE_WEIGHING_COUNT => Weighing::Count,
            other => {
                return Err(Fault::argument(format!(
                    "options.weighing is {other}; accepted: 0 (reward), 1 (count)"
                )));
            }
        };
        // SAFETY: as above.
        let dir = unsafe { In::optional_text(it.dir, "options.dir") }?.map(PathBuf::from);
        let cold = match (it.cold_bytes, &dir) {
            (0, _) => None,
            (bytes, Some(dir)) => Some((dir.clone(), bytes)),
            (bytes, None) => {
                return Err(Fault::argument(format!(
                    "options.cold_bytes is {bytes} without options.dir; accepted: 0, or a directory"
                )));
            }
        };
        let epochs_kept = if it.epochs_kept == 0 { EPOCHS_KEPT } else { it.epochs_kept };
        let dir = dir.as_deref().map(HistoryDir::lock).transpose()?;
        let budget_bytes = it.budget_bytes;
        let history =
            History::new(Options { vocab: it.vocab, budget_bytes, epochs_kept, weighing, cold })?;
        if let Some(saved) = dir.as_ref().and_then(HistoryDir::saved) {
            history.load(&saved)?;
        }
        out.write(HISTORIES.insert(Arc::new(Rollouts { history, dir }))?);
        Ok(())
    })
}

/// Destroys a history, unsaved. NULL is a no-op. Calls of other threads go on; the last one releases the directory.
///
/// Any-thread. Errors: `HANDLE`, `STALE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_history_destroy(
    history: *mut dormouse_history_t,
) -> dormouse_status_t {
    enter(|| HISTORIES.discard(history))
}

/// Returns the name of a prompt, by which drafts are asked for. It needs no history and is the same everywhere.
///
/// Any-thread. Errors: `NULL`, `ARGUMENT` for an id that is negative or above 2³¹ - 1.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_history_digest(
    prompt: *const dormouse_tokens_t,
    digest_out: *mut dormouse_digest_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let (out, ids) =
            unsafe { (Out::new(digest_out, "digest_out")?, In::one(prompt, "prompt")?) };
        // SAFETY: as above.
        let ids = unsafe { tokens(ids, 1 << 31, "prompt") }?;
        let Digest(digest) = Digest::of(&ids);
        out.write(dormouse_digest_t { low: digest as u64, high: (digest >> 64) as u64 });
        Ok(())
    })
}

/// Records `count` rollouts, in their order. The first of a later epoch forgets the prompt's responses of epochs
/// that are no longer kept.
///
/// `recorded_out` receives the number that were recorded: `count`, or the index of the one that failed.
///
/// Any-thread; drafts wait meanwhile. The arrays are not kept. Errors: `NULL`, `HANDLE`, `STALE`; `ARGUMENT` for an
/// id outside the vocabulary, a reward that is not finite, or an epoch that is no longer kept; `LIMIT`. Rollouts
/// before the failed one are recorded (`recorded_out` is written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_history_record(
    history: *mut dormouse_history_t,
    rollouts: *const dormouse_rollout_t,
    count: u64,
    recorded_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let (out, rollouts) = unsafe {
            let out = Out::new(recorded_out, "recorded_out")?;
            (out, In::slice(rollouts, usize_of(count, "count")?, "rollouts")?)
        };
        let found = HISTORIES.get(history)?;
        let vocab = found.history.options().vocab;
        for (index, it) in rollouts.iter().enumerate() {
            out.write(index as u64);
            // SAFETY: as above, for what each rollout points to.
            let (prompt, response) = unsafe {
                (tokens(&it.prompt, vocab, "prompt")?, tokens(&it.response, vocab, "response")?)
            };
            found.history.record(&prompt, &response, it.reward, it.epoch)?;
        }
        out.write(count);
        Ok(())
    })
}

/// Drafts what comes next in `count` sequences: for each at most `capacity` tokens, and at most its window. A prompt
/// without responses, and an end that matches nowhere, have 0 tokens.
///
/// Any-thread, with other arrays; records and cold prompts wait for each other. The caller owns the arrays. Errors:
/// `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for an id outside the vocabulary or `ids` that are not aligned. On an error no
/// draft is changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_history_draft(
    history: *mut dormouse_history_t,
    drafts: *mut dormouse_draft_t,
    count: u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs): the structs are written at the end alone.
        let all = unsafe { In::slice(drafts.cast_const(), usize_of(count, "count")?, "drafts") }?;
        let found = HISTORIES.get(history)?;
        let vocab = found.history.options().vocab;
        let mut made = Vec::with_capacity(all.len());
        for it in all {
            check_reserved(it.reserved, "reserved of a draft")?;
            let window = window(it);
            let most = window.tokens().min(it.capacity) as usize;
            if most > 0 {
                // SAFETY: as above: writable; NULL and misaligned are refused.
                unsafe { Out::new(it.ids, "ids") }?;
            }
            // SAFETY: as above, for what each draft points to.
            let end = unsafe { last_tokens(&it.end, CONTEXT_TOKENS, vocab, "end") }?;
            let draft = found.history.draft(digest(it.prompt), &end, most)?;
            made.push((window, draft));
        }
        for (index, (window, draft)) in made.iter().enumerate() {
            // SAFETY: as above: writable, and `index` is below `count`.
            let it = unsafe { &mut *drafts.add(index) };
            for (place, id) in draft.tokens.iter().enumerate() {
                // SAFETY: as above: `ids` has `capacity` elements, and the draft at most as many. They are aligned.
                unsafe { it.ids.add(place).write(id.cast_signed()) };
            }
            it.count = draft.tokens.len() as u32;
            it.matched_tokens = draft.matched_tokens as u32;
            it.window_tokens = window.tokens();
        }
        Ok(())
    })
}

/// Says how many tokens of `count` drafts were accepted (`accepted`). The windows are set for the next drafts, and
/// `count` of each becomes 0, so that a draft is counted once.
///
/// Any-thread, with other arrays. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for more accepted tokens than drafted
/// ones. On an error no draft is changed.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_history_feedback(
    history: *mut dormouse_history_t,
    drafts: *mut dormouse_draft_t,
    count: u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let all = unsafe { In::slice(drafts.cast_const(), usize_of(count, "count")?, "drafts") }?;
        let found = HISTORIES.get(history)?;
        for it in all {
            check_reserved(it.reserved, "reserved of a draft")?;
            if it.accepted > it.count {
                return Err(Fault::argument(format!(
                    "accepted is {}; accepted: at most {}, the drafted tokens",
                    it.accepted, it.count
                )));
            }
        }
        for index in 0..all.len() {
            // SAFETY: as above: writable, and `index` is below `count`.
            let it = unsafe { &mut *drafts.add(index) };
            found.history.count_feedback(it.count, it.accepted);
            it.window_tokens = window(it).after(it.count, it.accepted).tokens();
            it.count = 0;
        }
        Ok(())
    })
}

/// Saves everything into the directory of the history, in the place of what is there, as a whole or not at all.
///
/// Any-thread. Other threads may record during the save; the file holds each prompt as it was at some moment of the save.
/// A cold prompt that cannot be read is forgotten, with a count, and the others are saved. Errors: `NULL`, `HANDLE`,
/// `STALE`, `STATE` for a history without a directory, `IO`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_history_save(
    history: *mut dormouse_history_t,
) -> dormouse_status_t {
    enter(|| {
        let found = HISTORIES.get(history)?;
        let Some(dir) = &found.dir else {
            return Err(Fault::new(
                DORMOUSE_ERR_STATE,
                "this history has no directory; accepted: one created with options.dir",
            ));
        };
        Ok(found.history.save(&dir.path())?)
    })
}

/// Moves the least recently used prompts out of memory until at most `bytes` are in use, once.
///
/// Any-thread; drafts wait meanwhile. Errors: `NULL`, `HANDLE`, `STALE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_history_release(
    history: *mut dormouse_history_t,
    bytes: u64,
) -> dormouse_status_t {
    enter(|| {
        HISTORIES.get(history)?.history.release(bytes);
        Ok(())
    })
}

/// Returns figures of a history.
///
/// Any-thread. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_history_get_stats(
    history: *mut dormouse_history_t,
    stats_out: *mut dormouse_history_stats_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(stats_out, "stats_out") }?;
        let it = HISTORIES.get(history)?.history.stats();
        out.fill(dormouse_history_stats_t {
            prompts: it.prompts,
            tokens: it.tokens,
            bytes: it.bytes,
            cold_prompts: it.cold_prompts,
            cold_bytes: it.cold_bytes,
            forgotten_prompts: it.forgotten_prompts,
            drafted_tokens: it.drafted_tokens,
            accepted_tokens: it.accepted_tokens,
            ..dormouse_history_stats_t::default()
        });
        Ok(())
    })
}

/// Returns the reason that the file of cold prompts last failed, an empty text if it never did.
///
/// `count_out` receives the number of bytes of the text, including the NUL. `buffer` receives the text
/// if `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query the length.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT` if the buffer is too small
/// (`count_out` is written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_history_get_failure(
    history: *mut dormouse_history_t,
    buffer: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let count = unsafe { Out::new(count_out, "count_out") }?;
        let reason = HISTORIES.get(history)?.history.cold_failure().unwrap_or_default();
        // SAFETY: as above: `buffer` is NULL or writable for `capacity`.
        unsafe { count.text(reason, buffer, capacity) }
    })
}

fn digest(it: dormouse_digest_t) -> Digest {
    Digest(u128::from(it.high) << 64 | u128::from(it.low))
}

fn window(it: &dormouse_draft_t) -> Window {
    Window::of(it.window_tokens)
}

/// # Safety
/// The ids are NULL or readable, as many as the struct says, and do not change.
unsafe fn tokens(
    it: &dormouse_tokens_t,
    vocab: u32,
    name: &'static str,
) -> Result<Vec<u32>, Fault> {
    // SAFETY: the caller's contract.
    unsafe { last_tokens(it, usize::MAX, vocab, name) }
}

/// # Safety
/// As for [`tokens`].
unsafe fn last_tokens(
    it: &dormouse_tokens_t,
    most: usize,
    vocab: u32,
    name: &'static str,
) -> Result<Vec<u32>, Fault> {
    check_reserved(it.reserved, format_args!("reserved of {name}"))?;
    // SAFETY: the caller's contract.
    let ids = unsafe { Ids::new(it.ids, it.id_bytes, it.count, name) }?;
    Ok(ids.last_below(most, vocab, name)?)
}
