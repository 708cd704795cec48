//! Constants and structs of forests and plans. Fields are only ever appended.

use std::ffi::c_void;

use super::structs::{dormouse_machine_t, dormouse_model_t};

/// A forest: the prefix trees of a batch. Exclusive: one thread at a time.
#[derive(Debug)]
pub struct dormouse_forest_t(());

/// Run the rows of `node` forward a second time, with their graph. Its backward is next.
pub const DORMOUSE_OP_FORWARD_AGAIN: i32 = 5;

/// Run without a graph: the node runs forward again before its backward.
pub const DORMOUSE_OP_WITHOUT_GRAPH: u64 = 1;

/// No shared node runs: a microbatch, or the end of the plan.
pub const DORMOUSE_RESIDENCY_NONE: i32 = 0;
/// The tensors that the node saves stay on the device: none is passed to `dormouse_prefix_add_dormant`.
pub const DORMOUSE_RESIDENCY_KEEP: i32 = 1;
/// The tensors that the node saves sleep while its subtree runs: passed to `dormouse_prefix_add_dormant`, asleep from
/// its marks and phase B on, awake layer by layer from phase C and its marks.
pub const DORMOUSE_RESIDENCY_SLEEP: i32 = 2;
/// The node saves nothing and runs forward again.
pub const DORMOUSE_RESIDENCY_RECOMPUTE: i32 = 3;

/// No node: the parent of a root, or `reads` of a microbatch that shares nothing.
pub const DORMOUSE_NODE_NONE: u32 = 0xffff_ffff;

/// Keep a copy of every tree token, 4 bytes each, to add sequences later.
pub const DORMOUSE_SEQUENCES_GROW: u64 = 1;

/// The model's last layer needs no output on rows that nothing scores.
pub const DORMOUSE_PLAN_LAST_LAYER_DEAD: u64 = 1;
/// Share even if the additional ops take longer than sharing saves.
pub const DORMOUSE_PLAN_ALWAYS_SHARE: u64 = 2;
/// The runtime decides what sleeps: every shared node may, none must, and subtrees run in the order given.
/// Memory budgets then set the verdict and refuse no plan.
pub const DORMOUSE_PLAN_RUNTIME_RESIDENCY: u64 = 4;

/// Half-open range of tokens, labels or rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_span_t {
    /// First.
    pub begin: u64,
    /// One past the last.
    pub end: u64,
}

/// The end of a sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_ending_t {
    /// The node it ends in.
    pub node: u32,
    /// Must be ignored.
    pub reserved: u32,
    /// Number of its tokens, from the root on.
    pub tokens: u64,
}

/// Sequences that share prefixes: by token ids, or by the nodes of their trees. Everything is read during
/// the call and not kept.
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
    /// `sequence_count` caller-defined numbers for anything else that a token's identity depends on (images,
    /// adapters): sequences of different kinds share nothing. NULL for a single kind.
    pub kinds: *const u64,
    /// Number of sequences; with nodes, of `endings`.
    pub sequence_count: u64,
    /// Bytes of one id: 4 or 8.
    pub id_bytes: u32,
    /// Upper bound on token ids (exclusive). Ignored with nodes.
    pub vocab: u32,
    /// `node_count` parents, depth first, `DORMOUSE_NODE_NONE` for a root; NULL with ids.
    pub parents: *const u32,
    /// `node_count` numbers of tokens.
    pub lengths: *const u64,
    /// `sequence_count` ends of sequences, or NULL if one sequence ends in each leaf, in order.
    pub endings: *const dormouse_ending_t,
    /// Number of nodes.
    pub node_count: u64,
    /// Sum of `DORMOUSE_SEQUENCES_*` flags.
    pub flags: u64,
}

/// Sizes of a forest.
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
    /// Nodes without children.
    pub leaves: u64,
    /// Tokens with shared ones counted once.
    pub tree_tokens: u64,
    /// Tokens of all sequences.
    pub dense_tokens: u64,
    /// Dense tokens over tree tokens.
    pub compression: f64,
}

/// A run of tokens that the same sequences share. Nodes are numbered depth first: a subtree is a range of
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

/// A node of a plan: a node of the forest, a block of one, or a leaf with all its rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_plan_node_t {
    /// Its parent, or `DORMOUSE_NODE_NONE` if it reads nothing.
    pub parent: u32,
    /// One past the last node of its subtree.
    pub subtree_end: u32,
    /// A sequence that runs through it: its ids are that sequence's.
    pub sequence: u32,
    /// The forest node that it is, is a block of, or ends in.
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

/// How to run the sequences of a forest, and which of their tokens are scored. Everything is copied by
/// `dormouse_plan_create`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_plan_options_t {
    /// `sizeof` this struct as the caller knows it.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Number of sequences; equal to the forest's.
    pub sequence_count: u64,
    /// `sequence_count` positions: the tokens of a sequence from its position on are labels that carry
    /// loss, none if it is the sequence's length. NULL for all tokens but the first, or with spans. For a
    /// flat group, the prompt's length for each response.
    pub loss_from: *const u64,
    /// `sequence_count + 1` ascending offsets: sequence i has spans `[offsets[i], offsets[i + 1])`.
    /// NULL without spans.
    pub span_offsets: *const u64,
    /// Positions of labels, in ascending order within a sequence.
    pub spans: *const dormouse_span_t,
    /// `sequence_count` finite weights, or NULL for 1 each.
    pub weights: *const f64,
    /// Upper bound on token ids (exclusive); also the logits of a row.
    pub vocab: u32,
    /// Maximum rows of a microbatch. 0 selects the largest size that fits the device budget, or a smaller
    /// one that is predicted to be faster; it requires that budget.
    pub microbatch_rows: u32,
    /// Maximum rows computed at once; 0 for no limit.
    pub block_rows: u64,
    /// Layers woken ahead of need; 0 selects the default, and the minimum is 2.
    pub wake_window_layers: u32,
    /// Must be zero.
    pub reserved: u32,
    /// Sum of `DORMOUSE_PLAN_*` flags.
    pub flags: u64,
    /// Device memory budget in bytes for what a plan counts; 0 for the machine's.
    pub device_bytes: u64,
    /// Host memory budget in bytes for what sleeps; 0 for the machine's.
    pub host_bytes: u64,
    /// The model.
    pub model: *const dormouse_model_t,
    /// The machine, or NULL if unknown.
    pub machine: *const dormouse_machine_t,
}

/// Rows that carry loss: row `row_begin + k` of the op predicts label `first_label + k` of the
/// sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_score_t {
    /// The sequence of the labels.
    pub sequence: u32,
    /// Must be ignored.
    pub reserved: u32,
    /// First row: of the packed microbatch, or of the node, counted from its first.
    pub row_begin: u64,
    /// One past the last row.
    pub row_end: u64,
    /// Position of the first label in its sequence.
    pub first_label: u64,
    /// The sequence's weight in the loss.
    pub weight: f64,
}
