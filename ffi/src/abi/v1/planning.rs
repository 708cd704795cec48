//! Forests and plans of batches: constants and structs C sees. Fields are only ever appended.

use std::ffi::c_void;

use super::structs::{dormouse_machine_t, dormouse_model_t};

/// A forest: the prefix trees of a batch. Exclusive: one thread at a time.
#[derive(Debug)]
pub struct dormouse_forest_t(());

/// Run the rows of `node` forward a second time, now with their graph; its backward is next.
pub const DORMOUSE_OP_FORWARD_AGAIN: i32 = 5;

/// Run without a graph: the node runs forward again before its backward.
pub const DORMOUSE_OP_WITHOUT_GRAPH: u64 = 1;

/// No node runs by itself: a microbatch, or the end.
pub const DORMOUSE_RESIDENCY_NONE: i32 = 0;
/// What the node saves stays on the device: nothing of it is named to `dormouse_prefix_add_dormant`.
pub const DORMOUSE_RESIDENCY_KEEP: i32 = 1;
/// What the node saves sleeps while its subtree runs: named to `dormouse_prefix_add_dormant`, asleep from
/// its marks and phase B on, awake layer by layer from phase C and its marks.
pub const DORMOUSE_RESIDENCY_SLEEP: i32 = 2;
/// The node saves nothing and runs forward again.
pub const DORMOUSE_RESIDENCY_RECOMPUTE: i32 = 3;

/// Number of no node: a root's parent, or what a microbatch reads that shares nothing.
pub const DORMOUSE_NODE_NONE: u32 = 0xffff_ffff;

/// Keep what is needed to add sequences later: one copy of every tree token, 4 bytes each.
pub const DORMOUSE_SEQUENCES_GROW: u64 = 1;

/// The model's last layer needs no output on rows that nothing scores.
pub const DORMOUSE_BATCH_LAST_LAYER_DEAD: u64 = 1;
/// Share also where the ops that sharing costs take longer than what it saves.
pub const DORMOUSE_BATCH_ALWAYS_SHARE: u64 = 2;

/// Half-open run of tokens, labels or rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_span_t {
    /// First.
    pub begin: u64,
    /// One past the last.
    pub end: u64,
}

/// Where a sequence ends.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_ending_t {
    /// In which node.
    pub node: u32,
    /// Must be ignored.
    pub reserved: u32,
    /// Its tokens, from the root on.
    pub tokens: u64,
}

/// Sequences that share prefixes: by their token ids, or by the nodes they make. Everything is read
/// during the call and not kept.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_sequences_t {
    /// `sizeof` this struct as the caller knows it.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Token ids of all sequences, `int32_t` or `int64_t`; NULL with nodes, or with no sequences.
    pub ids: *const c_void,
    /// `sequence_count + 1` ascending offsets: sequence i is `[offsets[i], offsets[i + 1])`.
    pub offsets: *const u64,
    /// `sequence_count` numbers of the caller's for whatever else a token's identity depends on
    /// (images, adapters): sequences of different kinds share nothing. NULL for one kind.
    pub kinds: *const u64,
    /// Sequences; with nodes, as many as `endings`.
    pub sequence_count: u64,
    /// Bytes of one id: 4 or 8.
    pub id_bytes: u32,
    /// Token ids are below this. Not read with nodes.
    pub vocab: u32,
    /// `node_count` parents, depth first, `DORMOUSE_NODE_NONE` for a root; NULL with ids.
    pub parents: *const u32,
    /// `node_count` numbers of tokens.
    pub lengths: *const u64,
    /// `sequence_count` places where sequences end, or NULL where each leaf ends one, in order.
    pub endings: *const dormouse_ending_t,
    /// Nodes.
    pub node_count: u64,
    /// `DORMOUSE_SEQUENCES_*` added up.
    pub flags: u64,
}

/// What a forest has.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_forest_info_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Sequences.
    pub sequences: u64,
    /// Nodes of all trees.
    pub nodes: u64,
    /// Trees.
    pub roots: u64,
    /// Nodes from which nothing goes on.
    pub leaves: u64,
    /// Tokens when everything shared is counted once.
    pub tree_tokens: u64,
    /// Tokens of all sequences.
    pub dense_tokens: u64,
    /// Dense tokens over tree tokens.
    pub compression: f64,
}

/// One run of tokens that the same sequences share. Numbered depth first: a subtree is a run of
/// numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_forest_node_t {
    /// Its parent, or `DORMOUSE_NODE_NONE`.
    pub parent: u32,
    /// One past the last node of its subtree.
    pub subtree_end: u32,
    /// The lowest sequence that runs through all of it: its ids are that sequence's.
    pub sequence: u32,
    /// Must be ignored.
    pub reserved: u32,
    /// Position of its first token on every path through it.
    pub token_begin: u64,
    /// One past the last.
    pub token_end: u64,
}

/// One node of a plan: of the forest's, or a block of one, or a leaf run by itself.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_plan_node_t {
    /// Its parent, or `DORMOUSE_NODE_NONE` where it reads nothing.
    pub parent: u32,
    /// One past the last node of its subtree.
    pub subtree_end: u32,
    /// A sequence that runs through it: its ids are that sequence's.
    pub sequence: u32,
    /// The forest's node it is, is a block of, or ends in.
    pub origin: u32,
    /// Position of its first row; row r predicts token r + 1.
    pub row_begin: u64,
    /// One past the last.
    pub row_end: u64,
    /// `DORMOUSE_RESIDENCY_*`.
    pub residency: i32,
    /// Must be ignored.
    pub reserved: u32,
}

/// What of a forest's sequences is scored, and how to run it. Everything is copied by
/// `dormouse_plan_create_batch`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_batch_t {
    /// `sizeof` this struct as the caller knows it.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Sequences: as many as the forest has.
    pub sequence_count: u64,
    /// `sequence_count` positions from which on a sequence's tokens are labels that carry loss; its
    /// length for none. NULL for all but the first token, or with spans.
    pub loss_from: *const u64,
    /// `sequence_count + 1` ascending offsets: sequence i has spans `[offsets[i], offsets[i + 1])`.
    /// NULL without spans.
    pub span_offsets: *const u64,
    /// Positions of labels, each sequence's after one another.
    pub spans: *const dormouse_span_t,
    /// `sequence_count` finite weights, or NULL for 1 each.
    pub weights: *const f64,
    /// Token ids are below this; also the logits of a row.
    pub vocab: u32,
    /// Most rows of one microbatch; 0 takes the most that fit, or fewer where that is predicted faster, which
    /// needs a budget of device memory.
    pub microbatch_rows: u32,
    /// Longest run of rows computed at once; 0 for any.
    pub block_rows: u64,
    /// Layers woken ahead of need; 0 takes the schedule's own, and 1 is 2.
    pub wake_window_layers: u32,
    /// Must be zero.
    pub reserved: u32,
    /// `DORMOUSE_BATCH_*` added up.
    pub flags: u64,
    /// Bytes of device memory for what a plan counts; 0 for the machine's.
    pub device_bytes: u64,
    /// Bytes of host memory for what sleeps; 0 for the machine's.
    pub host_bytes: u64,
    /// The model.
    pub model: *const dormouse_model_t,
    /// The machine, or NULL when unknown.
    pub machine: *const dormouse_machine_t,
}

/// Rows that carry loss: row `row_begin + k` of the op predicts label `first_label + k` of the
/// sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_score_t {
    /// Whose labels.
    pub sequence: u32,
    /// Must be ignored.
    pub reserved: u32,
    /// First row: a microbatch's packed rows, or the node's, counted from its first.
    pub row_begin: u64,
    /// One past the last row.
    pub row_end: u64,
    /// Position of the first label in its sequence.
    pub first_label: u64,
    /// Weight of the sequence in the loss.
    pub weight: f64,
}
