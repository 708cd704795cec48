//! Forest: which sequences share which tokens. Pure planning, no runtime needed.

use std::ffi::{c_char, c_void};

use super::structs::{
    dormouse_ending_t, dormouse_forest_info_t, dormouse_forest_node_t, dormouse_forest_t,
    dormouse_sequences_t,
};
use crate::boundary::{Out, Outcome, enter};
use crate::forest::Forest;
use crate::status::dormouse_status_t;

/// Makes a forest from token ids, or from nodes whose tokens only were counted. Nothing `sequences`
/// points to is kept; with `DORMOUSE_SEQUENCES_GROW` one copy of every tree token is, and sequences
/// may be added later, also to none.
///
/// Any-thread. Reads every id about once. The caller owns the handle and gives it to
/// `dormouse_forest_destroy`.
/// Errors: `NULL`, `VERSION`, `ARGUMENT` naming the value seen and what is accepted: an empty
/// sequence, an id not below `vocab`, offsets that do not ascend, ids and nodes at once, nodes that
/// are not depth first, a leaf that no sequence ends in.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_forest_create(
    sequences: *const dormouse_sequences_t,
    forest_out: *mut *mut dormouse_forest_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(forest_out, "forest_out") }?;
        // SAFETY: as above, for everything `sequences` points to.
        out.write(unsafe { Forest::create(sequences) }?);
        Ok(Outcome::Done)
    })
}

/// Ends a forest. Plans made from it live on. NULL is fine and does nothing.
///
/// Exclusive. Errors: `HANDLE`, `STALE`, `BUSY` while another thread is inside.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_forest_destroy(
    forest: *mut dormouse_forest_t,
) -> dormouse_status_t {
    enter(|| {
        Forest::destroy(forest)?;
        Ok(Outcome::Done)
    })
}

/// Adds one sequence of `count` token ids, `int32_t` (`id_bytes` 4) or `int64_t` (8), of one kind.
/// `sequence_out` gets its number: they count up from 0. Nodes may have other numbers afterwards.
///
/// Exclusive. The ids are the caller's again at once.
/// Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `STATE` for a forest made without
/// `DORMOUSE_SEQUENCES_GROW`, `ARGUMENT` as `dormouse_forest_create`; the forest stays as it was.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_forest_add(
    forest: *mut dormouse_forest_t,
    ids: *const c_void,
    id_bytes: u32,
    count: u64,
    kind: u64,
    sequence_out: *mut u32,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::new(sequence_out, "sequence_out") }?;
        // SAFETY: as above.
        out.write(unsafe { Forest::add(forest, ids, id_bytes, count, kind) }?);
        Ok(Outcome::Done)
    })
}

/// Returns the counts of a forest and, where arrays are given, its nodes and the ends of its
/// sequences, both by number.
///
/// `nodes` and `endings` may be NULL. Otherwise `node_capacity` is at least the number of nodes and
/// `ending_capacity` at least the number of sequences, which `info_out` receives.
///
/// Exclusive. The arrays are the caller's. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`,
/// `LIMIT` for an array that is too small (`info_out` is written then too, the array is not).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_forest_get_info(
    forest: *mut dormouse_forest_t,
    info_out: *mut dormouse_forest_info_t,
    nodes: *mut dormouse_forest_node_t,
    node_capacity: u64,
    endings: *mut dormouse_ending_t,
    ending_capacity: u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let out = unsafe { Out::sized(info_out, "info_out") }?;
        out.fill(Forest::info(forest)?);
        let mut written = 0_u64;
        // SAFETY: the pointer is to a local variable that outlives `count`.
        let count = unsafe { Out::new(&raw mut written, "count") }?;
        if !nodes.is_null() {
            // SAFETY: the caller's promise: `nodes` is writable for `node_capacity` elements.
            Forest::nodes(forest, |all| unsafe { count.array(all, nodes, node_capacity) })?;
        }
        if !endings.is_null() {
            // SAFETY: the caller's promise: `endings` is writable for `ending_capacity` elements.
            Forest::endings(forest, |all| unsafe { count.array(all, endings, ending_capacity) })?;
        }
        Ok(Outcome::Done)
    })
}

/// The forest as JSON text, as requests of `dormouse_schedule_query` have it; buffer as
/// `dormouse_plan_get_json`.
///
/// Exclusive. The buffer is the caller's. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT`
/// when a buffer was given and is too small (`count_out` is written then too).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_forest_get_json(
    forest: *mut dormouse_forest_t,
    buffer: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let needed = unsafe { Out::new(count_out, "count_out") }?;
        let text = Forest::to_json(forest)?;
        // SAFETY: as above: `buffer` is NULL or writable for `capacity`.
        unsafe { needed.text(&text, buffer, capacity) }?;
        Ok(Outcome::Done)
    })
}
