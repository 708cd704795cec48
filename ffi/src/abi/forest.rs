//! Forests: sequences that share tokens. No runtime is required.

use std::ffi::{c_char, c_void};

use dormouse_parallel::query::Trees;
use dormouse_schedule::NodeId;
use dormouse_schedule::forest::{Ending, Forest as Frozen, GrowingForest, Node};

use super::c::*;
use crate::boundary::{Elements, In, Out, check_flags, enter, usize_of};
use crate::fault::Fault;
use crate::handles::{Exclusive, Kind, Table};
use crate::ids::Ids;
use crate::op::number;
use crate::status::{DORMOUSE_ERR_STATE, dormouse_status_t};

pub(crate) static FORESTS: Table<Exclusive<Forest>> = Table::new(Kind::Forest);

/// A forest behind a handle.
#[derive(Debug, Default)]
pub(crate) struct Forest {
    /// The sequences, if more can be added.
    growing: Option<GrowingForest>,
    /// The forest of all sequences; of a growing one, since the latest query.
    frozen: Option<Frozen>,
}

impl Forest {
    pub(crate) fn frozen(&mut self) -> &mut Frozen {
        let growing = &self.growing;
        self.frozen
            .get_or_insert_with(|| growing.as_ref().map(GrowingForest::freeze).unwrap_or_default())
    }
}

/// Creates a forest from token ids, or from nodes with lengths. The arrays are not kept. With
/// `DORMOUSE_SEQUENCES_GROW` the forest keeps one copy of every tree token, and sequences can be added
/// later, also to an empty forest.
///
/// Any-thread. Reads every id about once. The caller owns the handle and releases it with
/// `dormouse_forest_destroy`.
/// Errors: `NULL`, `VERSION`, `ARGUMENT` for an empty sequence, an id that is not below `vocab`, offsets
/// that do not ascend, both ids and nodes, nodes that are not depth first, or a leaf in which no sequence
/// ends.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_forest_create(
    sequences: *const dormouse_sequences_t,
    forest_out: *mut *mut dormouse_forest_t,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs), for everything `sequences` points to.
        let (out, forest) = unsafe { (Out::new(forest_out, "forest_out")?, read(sequences)?) };
        out.write(FORESTS.insert_exclusive(forest)?);
        Ok(())
    })
}

/// Destroys a forest. Plans created from it stay valid. NULL is a no-op.
///
/// Exclusive. Errors: `HANDLE`, `STALE`, `BUSY` while another thread is inside.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_forest_destroy(
    forest: *mut dormouse_forest_t,
) -> dormouse_status_t {
    enter(|| FORESTS.destroy(forest))
}

/// Adds a sequence of `count` token ids, `int32_t` (`id_bytes` 4) or `int64_t` (8). `kind` is as in
/// `dormouse_sequences_t`. `sequence_out` receives the number of the sequence; numbers count up from 0.
/// The numbers of nodes can change.
///
/// Exclusive. The ids are not kept. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `STATE` for a forest
/// created without `DORMOUSE_SEQUENCES_GROW`, `ARGUMENT` as for `dormouse_forest_create`. On an error the
/// forest is unchanged.
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
        let (out, ids) = unsafe {
            (Out::new(sequence_out, "sequence_out")?, Ids::new(ids, id_bytes, count, "ids")?)
        };
        FORESTS.with(forest, |forest| {
            let Some(growing) = &mut forest.growing else {
                return Err(Fault::new(
                    DORMOUSE_ERR_STATE,
                    "this forest keeps no ids; accepted: one made with DORMOUSE_SEQUENCES_GROW",
                ));
            };
            out.write(ids.add(0, count, kind, growing)?);
            forest.frozen = None;
            Ok(())
        })
    })
}

/// Returns the sizes of a forest, and its nodes and the ends of its sequences, indexed by number.
///
/// `nodes` receives the nodes if `node_capacity` elements are enough, and `endings` the ends if
/// `ending_capacity` elements are enough; otherwise the array is unchanged. Both may be NULL.
/// `info_out` receives the required capacities.
///
/// Exclusive. The caller owns the arrays. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`, `LIMIT`
/// if an array is too small (`info_out` is written).
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
        let (out, nodes, endings) = unsafe {
            (
                Out::sized(info_out, "info_out")?,
                Elements::new(nodes, node_capacity, "nodes")?,
                Elements::new(endings, ending_capacity, "endings")?,
            )
        };
        FORESTS.with(forest, |forest| {
            let it = forest.frozen();
            out.fill(dormouse_forest_info_t {
                sequences: it.endings().len() as u64,
                nodes: it.nodes().len() as u64,
                roots: it.roots().count() as u64,
                leaves: it.leaves().count() as u64,
                tree_tokens: it.tree_tokens(),
                dense_tokens: it.dense_tokens(),
                compression: it.compression(),
                ..dormouse_forest_info_t::default()
            });
            if nodes.is_wanted() {
                nodes.write(&it.nodes().iter().map(node).collect::<Vec<_>>())?;
            }
            if endings.is_wanted() {
                endings.write(&it.endings().iter().map(ending).collect::<Vec<_>>())?;
            }
            Ok(())
        })
    })
}

/// Returns the forest as JSON, in the format of requests of `dormouse_schedule_query`.
///
/// `count_out` receives the number of bytes of the text, including the NUL. `buffer` receives the text
/// if `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query the length.
///
/// Exclusive. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` if the
/// buffer is too small (`count_out` is written).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn dormouse_forest_get_json(
    forest: *mut dormouse_forest_t,
    buffer: *mut c_char,
    capacity: u64,
    count_out: *mut u64,
) -> dormouse_status_t {
    enter(|| {
        // SAFETY: the caller's promise (module docs).
        let count = unsafe { Out::new(count_out, "count_out") }?;
        let text = FORESTS.with(forest, |forest| Ok(Trees::from(&*forest.frozen()).to_json()))?;
        // SAFETY: as above: `buffer` is NULL or writable for `capacity`.
        unsafe { count.text(text, buffer, capacity) }
    })
}

fn node(it: &Node) -> dormouse_forest_node_t {
    dormouse_forest_node_t {
        parent: number(it.parent),
        subtree_end: it.subtree_end,
        sequence: it.sequence,
        reserved: 0,
        token_begin: it.tokens.begin,
        token_end: it.tokens.end,
    }
}

fn ending(it: &Ending) -> dormouse_ending_t {
    dormouse_ending_t { node: it.node.0, reserved: 0, tokens: it.tokens }
}

impl Ids<'_> {
    fn frozen(self, offsets: &[u64], kinds: &[u64], vocab: u32) -> Result<Frozen, Fault> {
        Ok(match self {
            Self::Narrow(ids) => Frozen::from_ids(ids, offsets, kinds, vocab),
            Self::Wide(ids) => Frozen::from_ids(ids, offsets, kinds, vocab),
        }?)
    }

    /// Adds the ids `[begin, end)`, which exist.
    fn add(self, begin: u64, end: u64, kind: u64, to: &mut GrowingForest) -> Result<u32, Fault> {
        let run = begin as usize..end as usize;
        Ok(match self {
            Self::Narrow(ids) => to.add(ids.get(run).unwrap_or_default(), kind),
            Self::Wide(ids) => to.add(ids.get(run).unwrap_or_default(), kind),
        }?)
    }
}

/// Reads sequences, given as ids or as nodes.
///
/// # Safety
/// `pointer` is NULL or a struct with its size set, whose arrays have the lengths that it states.
unsafe fn read(pointer: *const dormouse_sequences_t) -> Result<Forest, Fault> {
    // SAFETY: the caller's contract.
    let it = unsafe { In::structure(pointer, "sequences") }?;
    let grow = DORMOUSE_SEQUENCES_GROW;
    check_flags(it.flags, grow, "sequences.flags", "DORMOUSE_SEQUENCES_GROW")?;
    if it.node_count == 0 {
        // SAFETY: the caller's contract.
        return unsafe { from_ids(&it) };
    }
    if !it.ids.is_null() || it.flags != 0 {
        return Err(Fault::argument(
            "sequences has node_count and ids or DORMOUSE_SEQUENCES_GROW; accepted: nodes alone",
        ));
    }
    // SAFETY: the caller's contract.
    Ok(Forest { frozen: Some(unsafe { from_nodes(&it) }?), growing: None })
}

/// # Safety
/// As [`read`].
unsafe fn from_ids(it: &dormouse_sequences_t) -> Result<Forest, Fault> {
    let count = usize_of(it.sequence_count, "sequences.sequence_count")?;
    let kinds_count = if it.kinds.is_null() { 0 } else { count };
    // SAFETY: the caller's contract, here and below.
    let (offsets, kinds) = unsafe {
        (
            In::offsets(it.offsets, count, "sequences.offsets")?,
            In::slice(it.kinds, kinds_count, "sequences.kinds")?,
        )
    };
    let all = offsets.last().copied().unwrap_or(0);
    // An empty forest has no ids, of no width.
    let id_bytes = if count == 0 { 8 } else { it.id_bytes };
    // SAFETY: as above: the last offset is the largest.
    let ids = unsafe { Ids::new(it.ids, id_bytes, all, "sequences.ids") }?;
    if it.flags & DORMOUSE_SEQUENCES_GROW == 0 {
        return Ok(Forest { frozen: Some(ids.frozen(offsets, kinds, it.vocab)?), growing: None });
    }
    let mut growing = GrowingForest::new(it.vocab)?;
    for (at, ends) in offsets.windows(2).enumerate() {
        let kind = kinds.get(at).copied().unwrap_or(0);
        ids.add(ends[0], ends[1], kind, &mut growing)?;
    }
    Ok(Forest { frozen: None, growing: Some(growing) })
}

/// # Safety
/// As [`read`].
unsafe fn from_nodes(it: &dormouse_sequences_t) -> Result<Frozen, Fault> {
    let count = usize_of(it.node_count, "sequences.node_count")?;
    // SAFETY: the caller's contract, here and below.
    let (parents, lengths) = unsafe {
        (
            In::slice(it.parents, count, "sequences.parents")?,
            In::slice(it.lengths, count, "sequences.lengths")?,
        )
    };
    if it.endings.is_null() {
        return Ok(Frozen::from_nodes(parents, lengths)?);
    }
    let count = usize_of(it.sequence_count, "sequences.sequence_count")?;
    // SAFETY: as above.
    let endings = unsafe { In::slice(it.endings, count, "sequences.endings") }?;
    let ending = |it: &dormouse_ending_t| Ending { node: NodeId(it.node), tokens: it.tokens };
    let endings: Vec<Ending> = endings.iter().map(ending).collect();
    Ok(Frozen::from_nodes_with(parents, lengths, &endings)?)
}
