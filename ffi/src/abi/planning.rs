//! Constants and structs of forests and plans. Fields are only appended.

use std::ffi::{c_char, c_void};

use super::structs::DORMOUSE_TEXT_BYTES;

/// Handle of a forest: the prefix trees of a batch. Exclusive.
#[derive(Debug)]
pub struct dormouse_forest_t(());
/// Handle of a plan: the operations (ops) of one step, in order. Exclusive.
#[derive(Debug)]
pub struct dormouse_plan_t(());

/// Run the prefix of `node` forward, keeping its graph.
pub const DORMOUSE_OP_PREFIX_FORWARD: i32 = 1;
/// Run `members` in one packed row, forward and backward.
pub const DORMOUSE_OP_MICROBATCH: i32 = 2;
/// Run the prefix of `node` backward from its accumulators.
pub const DORMOUSE_OP_PREFIX_BACKWARD: i32 = 3;
/// End of the plan.
pub const DORMOUSE_OP_DONE: i32 = 4;
/// Run the prefix of `node` forward again, keeping its graph. Its backward is the next op.
pub const DORMOUSE_OP_FORWARD_AGAIN: i32 = 5;

/// Run without a graph. The node runs forward again before its backward.
pub const DORMOUSE_OP_WITHOUT_GRAPH: u64 = 1;

/// The op runs no shared node: a microbatch, or the end of the plan.
pub const DORMOUSE_RESIDENCY_NONE: i32 = 0;
/// The saved tensors of the node stay on the device. They are not passed to
/// `dormouse_prefix_add_dormant`.
pub const DORMOUSE_RESIDENCY_KEEP: i32 = 1;
/// The saved tensors of the node sleep while its subtree runs. They are passed to
/// `dormouse_prefix_add_dormant`, fall asleep at the forward marks and in phase B, and wake layer by layer
/// in phase C.
pub const DORMOUSE_RESIDENCY_SLEEP: i32 = 2;
/// The node saves no tensors and runs forward again.
pub const DORMOUSE_RESIDENCY_RECOMPUTE: i32 = 3;

/// No node, for example as the parent of a root.
pub const DORMOUSE_NODE_NONE: u32 = 0xffff_ffff;

/// Keep a copy of every tree token (4 bytes each), so that sequences can be added later.
pub const DORMOUSE_SEQUENCES_GROW: u64 = 1;

/// The last layer computes no output for rows that are not scored.
pub const DORMOUSE_PLAN_LAST_LAYER_DEAD: u64 = 1;
/// Share prefixes even if the additional ops take longer than sharing saves.
pub const DORMOUSE_PLAN_ALWAYS_SHARE: u64 = 2;
/// The runtime decides what sleeps: every shared node can sleep, and subtrees run in the given order.
/// Memory budgets affect the prediction but do not refuse the plan.
pub const DORMOUSE_PLAN_RUNTIME_RESIDENCY: u64 = 4;

/// Half-open range of tokens, labels or rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_span_t {
    /// First element.
    pub begin: u64,
    /// One past the last element.
    pub end: u64,
}

/// The end of a sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_ending_t {
    /// Node that the sequence ends in.
    pub node: u32,
    /// Reserved; ignore the value.
    pub reserved: u32,
    /// Number of tokens of the sequence, counted from the root.
    pub tokens: u64,
}

/// Sequences that share prefixes, given as token ids or as nodes of trees. The arrays are not kept after
/// the call.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_sequences_t {
    /// Size of the struct, set by the caller.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Token ids of all sequences, `int32_t` or `int64_t`; NULL if nodes are given.
    pub ids: *const c_void,
    /// `sequence_count + 1` ascending offsets into `ids`: sequence i is `[offsets[i], offsets[i + 1])`.
    pub offsets: *const u64,
    /// `sequence_count` caller-defined numbers. Sequences of different kinds (images, adapters) share no
    /// tokens. NULL for a single kind.
    pub kinds: *const u64,
    /// Number of sequences; if nodes are given, number of `endings`.
    pub sequence_count: u64,
    /// Size of one id in bytes: 4 or 8.
    pub id_bytes: u32,
    /// Number of token ids: each id is below it. Ignored if nodes are given.
    pub vocab: u32,
    /// `node_count` parents, depth first, `DORMOUSE_NODE_NONE` for a root; NULL if ids are given.
    pub parents: *const u32,
    /// `node_count` lengths in tokens.
    pub lengths: *const u64,
    /// `sequence_count` ends of sequences. NULL: sequence i ends in the i-th leaf.
    pub endings: *const dormouse_ending_t,
    /// Number of nodes.
    pub node_count: u64,
    /// Bitwise OR of `DORMOUSE_SEQUENCES_*`.
    pub flags: u64,
}

/// Sizes of a forest.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_forest_info_t {
    /// In: size of the struct. Out: number of bytes written.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Number of sequences.
    pub sequences: u64,
    /// Number of nodes of all trees.
    pub nodes: u64,
    /// Number of trees.
    pub roots: u64,
    /// Number of nodes without children.
    pub leaves: u64,
    /// Number of tokens, shared ones counted once.
    pub tree_tokens: u64,
    /// Number of tokens of all sequences.
    pub dense_tokens: u64,
    /// `dense_tokens` divided by `tree_tokens`.
    pub compression: f64,
}

/// A run of tokens that the same sequences share. Nodes are numbered depth first, so a subtree is a range
/// of numbers.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_forest_node_t {
    /// Parent node, or `DORMOUSE_NODE_NONE`.
    pub parent: u32,
    /// One past the last node of the subtree.
    pub subtree_end: u32,
    /// Lowest sequence that contains the node. The node has its token ids.
    pub sequence: u32,
    /// Reserved; ignore the value.
    pub reserved: u32,
    /// Position of the first token in every sequence that contains the node.
    pub token_begin: u64,
    /// One past the position of the last token.
    pub token_end: u64,
}

/// A node of a plan: a node of the forest, a part of one, or a leaf with all its rows.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_plan_node_t {
    /// Parent node, or `DORMOUSE_NODE_NONE`.
    pub parent: u32,
    /// One past the last node of the subtree.
    pub subtree_end: u32,
    /// A sequence that contains the node. The node has its token ids.
    pub sequence: u32,
    /// Node of the forest that this node equals, is a part of, or ends in.
    pub origin: u32,
    /// Position of the first row; row r predicts token r + 1.
    pub row_begin: u64,
    /// One past the position of the last row.
    pub row_end: u64,
    /// `DORMOUSE_RESIDENCY_*`.
    pub residency: i32,
    /// Reserved; ignore the value.
    pub reserved: u32,
}

/// Options of `dormouse_plan_create`: how the sequences of a forest run, and which tokens are scored. The
/// arrays are copied.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_plan_options_t {
    /// Size of the struct, set by the caller.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Number of sequences of the forest.
    pub sequence_count: u64,
    /// `sequence_count` positions: the tokens of a sequence from this position on are labels. The length
    /// of the sequence means no labels. For a flat group, the length of the prompt. NULL: all tokens but
    /// the first are labels, unless spans are given.
    pub loss_from: *const u64,
    /// `sequence_count + 1` ascending offsets into `spans`: sequence i has spans
    /// `[span_offsets[i], span_offsets[i + 1])`. NULL: no spans.
    pub span_offsets: *const u64,
    /// Positions of labels, ascending within a sequence.
    pub spans: *const dormouse_span_t,
    /// `sequence_count` finite weights. NULL: all are 1.
    pub weights: *const f64,
    /// Number of token ids, and of logits per row.
    pub vocab: u32,
    /// Maximum number of rows of a microbatch. 0: the largest number that fits the device budget, or a
    /// smaller one that is predicted to be faster; requires a device budget.
    pub microbatch_rows: u32,
    /// Maximum number of rows that a forward computes at a time; 0: no limit.
    pub block_rows: u64,
    /// Number of layers woken ahead, at least 2; 0: the default.
    pub wake_window_layers: u32,
    /// Must be zero.
    pub reserved: u32,
    /// Bitwise OR of `DORMOUSE_PLAN_*`.
    pub flags: u64,
    /// Device memory budget of the plan, in bytes; 0: that of the machine.
    pub device_bytes: u64,
    /// Host memory budget of sleeping tensors, in bytes; 0: that of the machine.
    pub host_bytes: u64,
    /// Shape of the model.
    pub model: *const dormouse_model_t,
    /// Rates of the machine, or NULL if unknown.
    pub machine: *const dormouse_machine_t,
}

/// Rows that carry loss: row `row_begin + k` of the op predicts label `first_label + k` of the
/// sequence.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_score_t {
    /// Sequence of the labels.
    pub sequence: u32,
    /// Reserved; ignore the value.
    pub reserved: u32,
    /// First row, in the packed microbatch or in the node.
    pub row_begin: u64,
    /// One past the last row.
    pub row_end: u64,
    /// Position of the first label in its sequence.
    pub first_label: u64,
    /// Weight of the sequence in the loss.
    pub weight: f64,
}

/// Shape of a model, as far as costs depend on it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_model_t {
    /// Size of the struct, set by the caller.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Number of decoder layers.
    pub layers: u32,
    /// Number of query heads.
    pub heads: u32,
    /// Number of key and value heads.
    pub kv_heads: u32,
    /// Number of elements of one head.
    pub head_dim: u32,
    /// Size of one activation element, in bytes.
    pub dtype_bytes: u32,
    /// Must be zero.
    pub reserved: u32,
    /// Number of weights of the linear modules of one layer.
    pub layer_linear_weights: u64,
    /// Number of these weights that compute K and V.
    pub kv_linear_weights: u64,
    /// Number of weights of the last layer that run in phase A with `DORMOUSE_PLAN_LAST_LAYER_DEAD`.
    pub last_layer_prefix_weights: u64,
    /// Number of weights of the output head.
    pub head_weights: u64,
    /// Bytes that one layer saves per token for its backward.
    pub saved_bytes_per_token_layer: u64,
}

/// Rates and sizes of a machine, as far as predictions depend on them. 0: unknown.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_machine_t {
    /// Size of the struct, set by the caller.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Throughput of products with weights in floating-point operations/s.
    pub flops_per_s: u64,
    /// Device memory in bytes.
    pub device_bytes: u64,
    /// Throughput of sleep, from the device to the sleeping tier, in bytes/s.
    pub sleep_bytes_per_s: u64,
    /// Throughput of wake, from the sleeping tier to the device, in bytes/s.
    pub wake_bytes_per_s: u64,
    /// Pinned host memory for sleeping tensors, in bytes.
    pub host_bytes: u64,
    /// Write throughput of the NVMe tier in bytes/s.
    pub nvme_write_bytes_per_s: u64,
    /// Read throughput of the NVMe tier in bytes/s.
    pub nvme_read_bytes_per_s: u64,
    /// Throughput between two ranks in bytes/s.
    pub link_bytes_per_s: u64,
    /// Fixed cost of an op in nanoseconds.
    pub op_overhead_ns: u64,
    /// Throughput of attention to the keys of a prefix in floating-point operations/s. 0: `flops_per_s`.
    pub prefix_attention_flops_per_s: u64,
    /// Throughput of causal attention in floating-point operations/s, where masked pairs do not count: a kernel
    /// that computes them too has half its other throughput. 0: `prefix_attention_flops_per_s`.
    pub causal_attention_flops_per_s: u64,
}

/// One suffix in a microbatch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_member_t {
    /// Sequence; one of them if several share all rows of the leaf.
    pub sequence: u32,
    /// Leaf of the sequence.
    pub node: u32,
    /// First row in the packed microbatch.
    pub row_begin: u64,
    /// One past the last row in the packed microbatch.
    pub row_end: u64,
    /// Position of the first row, as in the dense run.
    pub first_position: u64,
    /// First input token within `[P[-1]] + S_i[:-1]`, a leaf's rows.
    pub token_begin: u64,
    /// One past the last input token within `[P[-1]] + S_i[:-1]`.
    pub token_end: u64,
    /// Weight of the sequence in the loss.
    pub weight: f64,
}

/// One op of a plan.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_op_t {
    /// In: size of the struct. Out: number of bytes written.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Id for `dormouse_plan_complete_op`.
    pub id: u64,
    /// `DORMOUSE_OP_*`.
    pub kind: i32,
    /// Node that runs, or whose leaves run.
    pub node: u32,
    /// Forward: first position to run.
    pub token_begin: u64,
    /// Forward: one past the last position to run.
    pub token_end: u64,
    /// Microbatch: `member_count` members, valid until the next call with this plan.
    pub members: *const dormouse_member_t,
    /// Microbatch: number of members.
    pub member_count: u32,
    /// Microbatch: 1 if the backward of `node` is next, otherwise 0.
    pub last: u32,
    /// Prefix backward: number of layers to wake ahead.
    pub wake_window_layers: u32,
    /// Reserved; ignore the value.
    pub reserved: u32,
    /// `DORMOUSE_OP_WITHOUT_GRAPH` or 0.
    pub flags: u64,
    /// Microbatch and prefix backward: `score_count` ranges of rows that carry loss, valid until the next
    /// call with this plan. NULL if there are none.
    pub scores: *const dormouse_score_t,
    /// Number of `scores`.
    pub score_count: u64,
    /// Node whose K and V are read, with those of all its ancestors, or `DORMOUSE_NODE_NONE`.
    pub reads: u32,
    /// `DORMOUSE_RESIDENCY_*` of the node that runs.
    pub residency: i32,
    /// Node whose last layers are asleep when this op ends, or `DORMOUSE_NODE_NONE`.
    pub asleep: u32,
    /// Sleeping node whose layers start to wake when this op begins, or `DORMOUSE_NODE_NONE`. A prefix
    /// created from the plan starts automatically (`dormouse_plan_get_op`).
    pub waking: u32,
    /// Peak of the planned device memory during the op, in bytes.
    pub device_bytes: u64,
    /// Peak of the planned host memory during the op, in bytes.
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
    /// `flops_dense` divided by `flops_shared`.
    pub speedup: f64,
    /// Tokens of the dense run divided by tokens of this plan.
    pub token_ratio: f64,
    /// Peak device memory in phases A, B and C, in bytes, if all dormant memory is awake in A and C and
    /// asleep in B.
    pub peak_bytes: [u64; 3],
    /// Dormant memory of the prefixes in bytes.
    pub sleep_bytes: u64,
    /// 1 if sharing is faster than the dense run, otherwise 0.
    pub pays: u32,
    /// Reserved; ignore the value.
    pub reserved: u32,
    /// Reason for `pays`.
    pub reason: [c_char; DORMOUSE_TEXT_BYTES],
    /// Duration of the dense run in seconds, with microbatches of the same size. This and the durations
    /// below are negative if the compute throughput is unknown.
    pub seconds_dense: f64,
    /// Duration of this plan in seconds, including stalls if the plan decides what sleeps.
    pub seconds_shared: f64,
    /// Lower bound of the time that phase A waits for sleeps, in seconds.
    pub sleep_stall_s: f64,
    /// Lower bound of the time that phase C waits for wakes, in seconds.
    pub wake_stall_s: f64,
    /// Upper bound of what another choice of sleeping nodes could save, in the unit that the choice
    /// minimises: seconds if rates are known. 0: the choice is optimal; negative: unknown.
    pub residency_gap: f64,
    /// Number of rows that run forward twice.
    pub recomputed_rows: u64,
    /// Peak of the ops' device memory in phases A, B and C, in bytes.
    pub device_bytes: [u64; 3],
    /// Peak of sleeping host memory in phases A, B and C, in bytes.
    pub host_bytes: [u64; 3],
}
