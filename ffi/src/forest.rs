//! Forests: the schedule's, behind a handle.

use std::ffi::c_void;
use std::sync::Arc;

use dormouse_parallel::query::Trees;
use dormouse_schedule::NodeId;
use dormouse_schedule::forest::{Ending, Forest as Frozen, GrowingForest, Node};

use crate::abi::v1::structs as c;
use crate::boundary::In;
use crate::fault::Fault;
use crate::handles::{Exclusive, Kind, Table};
use crate::op::number;
use crate::plan::check_ascending;
use crate::runtime::usize_of;
use crate::status;

static FORESTS: Table<Forest> = Table::new(Kind::Forest);

/// A forest behind a handle.
#[derive(Debug)]
pub(crate) struct Forest {
    state: Exclusive<State>,
}

#[derive(Debug, Default)]
struct State {
    /// Where sequences are added.
    growing: Option<GrowingForest>,
    /// The forest of those there are; of one that grows, since it was asked for last.
    frozen: Option<Frozen>,
}

impl State {
    fn frozen(&mut self) -> &mut Frozen {
        let growing = &self.growing;
        self.frozen
            .get_or_insert_with(|| growing.as_ref().map(GrowingForest::freeze).unwrap_or_default())
    }
}

/// Token ids of one width.
#[derive(Clone, Copy)]
enum Ids<'a> {
    Narrow(&'a [i32]),
    Wide(&'a [i64]),
}

impl<'a> Ids<'a> {
    /// # Safety
    /// `pointer` is NULL or readable for `count` ids of `id_bytes` bytes that nobody writes in `'a`.
    unsafe fn new(
        pointer: *const c_void,
        id_bytes: u32,
        count: u64,
        name: &str,
    ) -> Result<Self, Fault> {
        let count = usize_of(count, name)?;
        match id_bytes {
            // SAFETY: the caller's contract.
            4 => Ok(Self::Narrow(unsafe { In::slice(pointer.cast(), count, name) }?)),
            // SAFETY: the caller's contract.
            8 => Ok(Self::Wide(unsafe { In::slice(pointer.cast(), count, name) }?)),
            _ => Err(Fault::argument(format!(
                "id_bytes is {id_bytes}; 4 (int32_t) and 8 (int64_t) are accepted"
            ))),
        }
    }

    fn frozen(self, offsets: &[u64], kinds: &[u64], vocab: u32) -> Result<Frozen, Fault> {
        Ok(match self {
            Self::Narrow(ids) => Frozen::from_ids(ids, offsets, kinds, vocab),
            Self::Wide(ids) => Frozen::from_ids(ids, offsets, kinds, vocab),
        }?)
    }

    /// Adds the ids `[begin, end)`, which the caller has checked to be there.
    fn add(self, begin: u64, end: u64, kind: u64, to: &mut GrowingForest) -> Result<u32, Fault> {
        let run = begin as usize..end as usize;
        Ok(match self {
            Self::Narrow(ids) => to.add(ids.get(run).unwrap_or_default(), kind),
            Self::Wide(ids) => to.add(ids.get(run).unwrap_or_default(), kind),
        }?)
    }
}

impl Forest {
    /// Makes a forest and gives its handle.
    ///
    /// # Safety
    /// `sequences` is NULL or a struct that says its size, whose arrays have the lengths it says.
    pub(crate) unsafe fn create(
        sequences: *const c::dormouse_sequences_t,
    ) -> Result<*mut c::dormouse_forest_t, Fault> {
        // SAFETY: the caller's contract.
        let state = unsafe { read(sequences) }?;
        FORESTS.insert(Arc::new(Self { state: Exclusive::new(Kind::Forest, state) }))
    }

    /// Ends a forest; plans made from it live on.
    pub(crate) fn destroy(handle: *mut c::dormouse_forest_t) -> Result<(), Fault> {
        if handle.is_null() {
            return Ok(());
        }
        FORESTS.get(handle)?.state.take()?;
        FORESTS.remove(handle, |_| Ok(())).map(drop)
    }

    fn with<T>(
        handle: *mut c::dormouse_forest_t,
        work: impl FnOnce(&mut State) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        let forest = FORESTS.get(handle)?;
        let mut inside = forest.state.enter()?;
        work(inside.value()?)
    }

    /// Lends the forest of the sequences there are; `work` leaves it as it was.
    pub(crate) fn lend<T>(
        handle: *mut c::dormouse_forest_t,
        work: impl FnOnce(&mut Frozen) -> Result<T, Fault>,
    ) -> Result<T, Fault> {
        Self::with(handle, |state| work(state.frozen()))
    }

    /// Adds one sequence and gives its number.
    ///
    /// # Safety
    /// `ids` is NULL or readable for `count` ids of `id_bytes` bytes.
    pub(crate) unsafe fn add(
        handle: *mut c::dormouse_forest_t,
        ids: *const c_void,
        id_bytes: u32,
        count: u64,
        kind: u64,
    ) -> Result<u32, Fault> {
        // SAFETY: the caller's contract.
        let ids = unsafe { Ids::new(ids, id_bytes, count, "ids") }?;
        Self::with(handle, |state| {
            let Some(growing) = &mut state.growing else {
                return Err(Fault::new(
                    status::DORMOUSE_ERR_STATE,
                    "this forest keeps no ids; one made with DORMOUSE_SEQUENCES_GROW is accepted",
                ));
            };
            let sequence = ids.add(0, count, kind, growing)?;
            state.frozen = None;
            Ok(sequence)
        })
    }

    /// What it has.
    pub(crate) fn info(
        handle: *mut c::dormouse_forest_t,
    ) -> Result<c::dormouse_forest_info_t, Fault> {
        Self::lend(handle, |it| {
            Ok(c::dormouse_forest_info_t {
                size: 0,
                version: 0,
                sequences: it.endings().len() as u64,
                nodes: it.nodes().len() as u64,
                roots: it.roots().count() as u64,
                leaves: it.leaves().count() as u64,
                tree_tokens: it.tree_tokens(),
                dense_tokens: it.dense_tokens(),
                compression: it.compression(),
            })
        })
    }

    /// Its nodes, handed to `give`.
    pub(crate) fn nodes(
        handle: *mut c::dormouse_forest_t,
        give: impl FnOnce(&[c::dormouse_forest_node_t]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let node = |it: &Node| c::dormouse_forest_node_t {
            parent: number(it.parent),
            subtree_end: it.subtree_end,
            sequence: it.sequence,
            reserved: 0,
            token_begin: it.tokens.begin,
            token_end: it.tokens.end,
        };
        Self::lend(handle, |it| give(&it.nodes().iter().map(node).collect::<Vec<_>>()))
    }

    /// Where its sequences end, handed to `give`.
    pub(crate) fn endings(
        handle: *mut c::dormouse_forest_t,
        give: impl FnOnce(&[c::dormouse_ending_t]) -> Result<(), Fault>,
    ) -> Result<(), Fault> {
        let ending =
            |it: &Ending| c::dormouse_ending_t { node: it.node.0, reserved: 0, tokens: it.tokens };
        Self::lend(handle, |it| give(&it.endings().iter().map(ending).collect::<Vec<_>>()))
    }

    /// It as asks take it.
    pub(crate) fn to_json(handle: *mut c::dormouse_forest_t) -> Result<String, Fault> {
        Self::lend(handle, |it| Ok(Trees::from(&*it).to_json()))
    }
}

/// Reads sequences, by ids or by nodes.
///
/// # Safety
/// As [`Forest::create`].
unsafe fn read(pointer: *const c::dormouse_sequences_t) -> Result<State, Fault> {
    // SAFETY: the caller's contract.
    let it = unsafe { In::structure(pointer, "sequences") }?;
    if it.flags & !c::DORMOUSE_SEQUENCES_GROW != 0 {
        return Err(Fault::argument(format!(
            "sequences.flags is {}; 0 and DORMOUSE_SEQUENCES_GROW ({}) are accepted",
            it.flags,
            c::DORMOUSE_SEQUENCES_GROW
        )));
    }
    if it.node_count == 0 {
        // SAFETY: the caller's contract.
        return unsafe { of_ids(&it) };
    }
    if !it.ids.is_null() || it.flags != 0 {
        return Err(Fault::argument(
            "sequences has node_count and ids, or DORMOUSE_SEQUENCES_GROW; nodes alone are accepted",
        ));
    }
    // SAFETY: the caller's contract.
    Ok(State { frozen: Some(unsafe { of_nodes(&it) }?), growing: None })
}

/// # Safety
/// As [`Forest::create`].
unsafe fn of_ids(it: &c::dormouse_sequences_t) -> Result<State, Fault> {
    let count = usize_of(it.sequence_count, "sequences.sequence_count")?;
    let offsets: &[u64] = if count == 0 {
        &[]
    } else {
        // SAFETY: the caller's contract, here and below.
        unsafe { In::slice(it.offsets, count + 1, "sequences.offsets") }?
    };
    check_ascending(offsets, "sequences.offsets")?;
    let kinds = if it.kinds.is_null() {
        &[]
    } else {
        // SAFETY: as above.
        unsafe { In::slice(it.kinds, count, "sequences.kinds") }?
    };
    let all = offsets.last().copied().unwrap_or(0);
    // An empty forest has no ids, of no width.
    let id_bytes = if count == 0 { 8 } else { it.id_bytes };
    // SAFETY: as above: the last offset is the largest.
    let ids = unsafe { Ids::new(it.ids, id_bytes, all, "sequences.ids") }?;
    if it.flags & c::DORMOUSE_SEQUENCES_GROW == 0 {
        return Ok(State { frozen: Some(ids.frozen(offsets, kinds, it.vocab)?), growing: None });
    }
    let mut growing = GrowingForest::new(it.vocab)?;
    for (at, ends) in offsets.windows(2).enumerate() {
        let &[begin, end] = ends else { continue };
        ids.add(begin, end, kinds.get(at).copied().unwrap_or(0), &mut growing)?;
    }
    Ok(State { frozen: None, growing: Some(growing) })
}

/// # Safety
/// As [`Forest::create`].
unsafe fn of_nodes(it: &c::dormouse_sequences_t) -> Result<Frozen, Fault> {
    let count = usize_of(it.node_count, "sequences.node_count")?;
    // SAFETY: the caller's contract, here and below.
    let parents = unsafe { In::slice(it.parents, count, "sequences.parents") }?;
    // SAFETY: as above.
    let lengths = unsafe { In::slice(it.lengths, count, "sequences.lengths") }?;
    if it.endings.is_null() {
        return Ok(Frozen::from_nodes(parents, lengths)?);
    }
    let count = usize_of(it.sequence_count, "sequences.sequence_count")?;
    // SAFETY: as above.
    let endings = unsafe { In::slice(it.endings, count, "sequences.endings") }?;
    let ending = |it: &c::dormouse_ending_t| Ending { node: NodeId(it.node), tokens: it.tokens };
    let endings: Vec<Ending> = endings.iter().map(ending).collect();
    Ok(Frozen::from_nodes_with(parents, lengths, &endings)?)
}
