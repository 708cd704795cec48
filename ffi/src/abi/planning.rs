//! Constants and structs of forests and plans. Fields are only ever appended.

use std::ffi::{c_char, c_void};

use super::structs::DORMOUSE_TEXT_BYTES;

/// A forest: the prefix trees of a batch. Exclusive: one thread at a time.
#[derive(Debug)]
pub struct dormouse_forest_t(());
/// Handle of a plan: the sequence of operations of one step. Exclusive.
#[derive(Debug)]
pub struct dormouse_plan_t(());

/// Run the prefix of `node` forward, keeping its graph.
pub const DORMOUSE_OP_PREFIX_FORWARD: i32 = 1;
/// Run `members` in one packed row, forward and backward.
pub const DORMOUSE_OP_MICROBATCH: i32 = 2;
/// Run the prefix of `node` backward from its accumulators.
pub const DORMOUSE_OP_PREFIX_BACKWARD: i32 = 3;
/// Nothing is left.
pub const DORMOUSE_OP_DONE: i32 = 4;
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

/// A model's shape, as far as costs depend on it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_model_t {
    /// Size of the struct, set by the caller.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Decoder layers.
    pub layers: u32,
    /// Query heads.
    pub heads: u32,
    /// Key and value heads.
    pub kv_heads: u32,
    /// Elements of one head.
    pub head_dim: u32,
    /// Bytes of one element of an activation.
    pub dtype_bytes: u32,
    /// Must be zero.
    pub reserved: u32,
    /// Linear weights of one layer, in elements.
    pub layer_linear_weights: u64,
    /// Those of them that make K and V, in elements.
    pub kv_linear_weights: u64,
    /// Linear weights of the last layer that A runs when it is dead, in elements.
    pub last_layer_prefix_weights: u64,
    /// Weights of the head, in elements.
    pub head_weights: u64,
    /// Bytes one layer saves per token for backward.
    pub saved_bytes_per_token_layer: u64,
}

/// A machine's rates, as far as predictions depend on them. 0 means unknown.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_machine_t {
    /// Size of the struct, set by the caller.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Floating-point operations per second.
    pub flops_per_s: u64,
    /// Bytes of device memory.
    pub device_bytes: u64,
    /// Device to the tier that sleeps, bytes per second.
    pub sleep_bytes_per_s: u64,
    /// The tier that sleeps to device, bytes per second.
    pub wake_bytes_per_s: u64,
    /// Bytes of pinned host memory for what sleeps.
    pub host_bytes: u64,
    /// Host to file, bytes per second.
    pub nvme_write_bytes_per_s: u64,
    /// File to host, bytes per second.
    pub nvme_read_bytes_per_s: u64,
    /// From one rank to another, bytes per second.
    pub link_bytes_per_s: u64,
    /// What an op costs whatever its size, nanoseconds.
    pub op_overhead_ns: u64,
}

/// One suffix in a microbatch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_member_t {
    /// Sequence; of several that share all rows of the leaf, one.
    pub sequence: u32,
    /// Its leaf.
    pub node: u32,
    /// First row in the packed microbatch.
    pub row_begin: u64,
    /// One past the last row in the packed microbatch.
    pub row_end: u64,
    /// Position of the first row in the dense run.
    pub first_position: u64,
    /// First input token within `[P[-1]] + S_i[:-1]`, a leaf's rows.
    pub token_begin: u64,
    /// One past the last input token within `[P[-1]] + S_i[:-1]`.
    pub token_end: u64,
    /// The sequence's weight in the loss.
    pub weight: f64,
}

/// One step of a plan.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_op_t {
    /// In: size of the struct. Out: number of bytes written.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Its id, passed to `dormouse_plan_complete_op`.
    pub id: u64,
    /// `DORMOUSE_OP_*`.
    pub kind: i32,
    /// The node it runs, or whose leaves it runs.
    pub node: u32,
    /// Prefix forward: first position to run.
    pub token_begin: u64,
    /// Prefix forward: one past the last position to run.
    pub token_end: u64,
    /// Microbatch: `member_count` members, borrowed until the next call with this plan.
    pub members: *const dormouse_member_t,
    /// Microbatch: number of members.
    pub member_count: u32,
    /// Microbatch: 1 if the backward of its node is next, else 0.
    pub last: u32,
    /// Prefix backward: layers to wake ahead.
    pub wake_window_layers: u32,
    /// Zero.
    pub reserved: u32,
    /// `DORMOUSE_OP_WITHOUT_GRAPH` or 0.
    pub flags: u64,
    /// Microbatch and node backward: `score_count` runs of rows that carry loss, borrowed until the next
    /// call with this plan. NULL if there is none.
    pub scores: *const dormouse_score_t,
    /// Number of `scores`.
    pub score_count: u64,
    /// Node whose K and V it reads, together with those of all its ancestors, or
    /// `DORMOUSE_NODE_NONE`.
    pub reads: u32,
    /// `DORMOUSE_RESIDENCY_*` of the node that runs.
    pub residency: i32,
    /// Sleeping node whose last layers have left when this op ends, or `DORMOUSE_NODE_NONE`.
    pub asleep: u32,
    /// Sleeping node whose first layers start to wake with this op, or `DORMOUSE_NODE_NONE`. A prefix made
    /// from the plan starts by itself (`dormouse_plan_get_op`).
    pub waking: u32,
    /// Peak device memory in bytes of what the plan counts.
    pub device_bytes: u64,
    /// Peak bytes asleep in host memory.
    pub host_bytes: u64,
}

/// Predicted cost of a plan.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_prediction_t {
    /// In: size of the struct. Out: number of bytes written.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Floating-point operations of the dense run.
    pub flops_dense: f64,
    /// Floating-point operations of this plan.
    pub flops_shared: f64,
    /// Their ratio.
    pub speedup: f64,
    /// Tokens of the dense run over tokens of this plan.
    pub token_ratio: f64,
    /// Highest bytes in phases A, B and C: all awake in A and C, all that may sleep asleep in B.
    pub peak_bytes: [u64; 3],
    /// Bytes the prefix saves that may sleep.
    pub sleep_bytes: u64,
    /// 1 when sharing pays, else 0.
    pub pays: u32,
    /// Zero.
    pub reserved: u32,
    /// Why, in one sentence.
    pub reason: [c_char; DORMOUSE_TEXT_BYTES],
    /// Seconds of the dense run, in microbatches of the same rows; negative where the machine's rate of
    /// operations is not known, as the seconds below.
    pub seconds_dense: f64,
    /// Seconds of this plan; with stalls where the plan says what sleeps.
    pub seconds_shared: f64,
    /// Seconds phase A waits for layers to leave, at least.
    pub sleep_stall_s: f64,
    /// Seconds phase C waits for layers to come back, at least.
    pub wake_stall_s: f64,
    /// What another choice of what sleeps could save at most, in what it was chosen by (seconds
    /// where rates are known); 0 where the choice is the best one, negative where that is not known.
    pub residency_gap: f64,
    /// Rows that run forward twice.
    pub recomputed_rows: u64,
    /// Device bytes of the plan's ops at their most, in phases A, B and C.
    pub device_bytes: [u64; 3],
    /// Host bytes asleep at their most, in phases A, B and C.
    pub host_bytes: [u64; 3],
}
