/*
 * dormouse: a memory manager and offload runtime for trainers with shared prefixes.
 * Generated from ffi/src by ffi/tests/header.rs; edit there and run it with UPDATE=1.
 *
 * Conventions
 * - Every fallible function returns a status: 0 done, positive a notice, negative an error.
 *   Results come last, through pointers, written only when the status is not an error.
 * - Handles look like pointers and are numbers: looked up, never dereferenced. After destroy they
 *   give DORMOUSE_ERR_STALE, foreign values DORMOUSE_ERR_HANDLE, NULL DORMOUSE_ERR_NULL.
 *   "Errors" below leaves the DORMOUSE_ERR_ prefix out. Every function but dormouse_get_version,
 *   _get_status_string and _get_last_error may also give FORKED (a child after fork) and PANIC (a defect
 *   of the library).
 * - "Any-thread": from any thread, at the same time. "Exclusive": one thread at a time inside a
 *   handle; a second gets DORMOUSE_ERR_BUSY.
 * - Structs open with `size` and `version` and only grow: start each with DORMOUSE_INIT(&it). Those
 *   without, elements of arrays and parts of others, never change.
 * - Streams are `void *` (a CUstream on CUDA). On the host device only NULL, the calling thread.
 * - Strings are UTF-8 and end with NUL. Bytes, nanoseconds and elements are in the names.
 * - A touch of sleeping memory ends the process with one sentence; a system call given such an
 *   address fails with EFAULT.
 */


#ifndef DORMOUSE_H
#define DORMOUSE_H

#include <stdint.h>
#include <string.h>

/// Clears a struct and says how the caller knows it.
#define DORMOUSE_INIT(it) \
    (memset((it), 0, sizeof *(it)), (it)->size = (uint32_t)sizeof *(it), \
     (void)((it)->version = DORMOUSE_STRUCT_VERSION))


/// The `version` every struct of this header opens with.
#define DORMOUSE_STRUCT_VERSION 1

/// The CPU memory of this process, managed as a device.
#define DORMOUSE_DEVICE_HOST 1

/// An NVIDIA GPU through the CUDA driver.
#define DORMOUSE_DEVICE_CUDA 2

/// Memory the trainer computes in.
#define DORMOUSE_TIER_DEVICE 0

/// Pinned host memory; on the host device ordinary memory, which lowers no resident set.
#define DORMOUSE_TIER_HOST 1

/// One preallocated, unlinked file.
#define DORMOUSE_TIER_NVME 2

/// Length of arrays indexed by tier.
#define DORMOUSE_TIER_COUNT 3

/// No role: memory the runtime does not track for residency.
#define DORMOUSE_ROLE_NONE 0

/// What suffixes read from the prefix.
#define DORMOUSE_ROLE_BOUNDARY 1

/// The accumulator of a boundary tensor's gradient.
#define DORMOUSE_ROLE_BOUNDARY_GRAD 2

/// Saved by the prefix forward for its backward; may sleep in between.
#define DORMOUSE_ROLE_DORMANT 3

/// Put under a tag by its user.
#define DORMOUSE_ROLE_TAGGED 4

/// Length of arrays indexed by role.
#define DORMOUSE_ROLE_COUNT 5

/// Pages present.
#define DORMOUSE_STATE_AWAKE 0

/// Being copied out; still readable, a write cancels the sleep.
#define DORMOUSE_STATE_FALLING_ASLEEP 1

/// Pages gone, bytes in the host tier.
#define DORMOUSE_STATE_HOST 2

/// On the way from the host tier to the file.
#define DORMOUSE_STATE_SPILLING 3

/// Pages gone, bytes in the file.
#define DORMOUSE_STATE_NVME 4

/// On the way back from the file.
#define DORMOUSE_STATE_LOADING 5

/// Pages on their way back to their addresses.
#define DORMOUSE_STATE_WAKING 6

/// Asleep without backup: pages and bytes gone, wakes as zeros.
#define DORMOUSE_STATE_EMPTY 7

/// On the way from the file to the host tier, ahead of its wake.
#define DORMOUSE_STATE_PROMOTING 8

/// Device memory to the host tier.
#define DORMOUSE_COPY_DEVICE_TO_HOST 0

/// Host tier to device memory.
#define DORMOUSE_COPY_HOST_TO_DEVICE 1

/// Into the file.
#define DORMOUSE_COPY_NVME_WRITE 2

/// Out of the file.
#define DORMOUSE_COPY_NVME_READ 3

/// Length of arrays indexed by copy direction.
#define DORMOUSE_COPY_COUNT 4

/// IEEE binary16.
#define DORMOUSE_DTYPE_F16 1

/// bfloat16.
#define DORMOUSE_DTYPE_BF16 2

/// IEEE binary32.
#define DORMOUSE_DTYPE_F32 3

/// IEEE binary64.
#define DORMOUSE_DTYPE_F64 4

/// Prefix forward.
#define DORMOUSE_PHASE_A 1

/// Suffixes.
#define DORMOUSE_PHASE_B 2

/// Prefix backward.
#define DORMOUSE_PHASE_C 3

/// Before a layer's forward: this thread's new memory is collected as that layer's.
#define DORMOUSE_EDGE_FORWARD_BEGIN 1

/// After a layer's forward: the layer below may fall asleep.
#define DORMOUSE_EDGE_FORWARD_END 2

/// Before a layer's backward: blocks until it and the layer below are awake.
#define DORMOUSE_EDGE_BACKWARD_BEGIN 3

/// After a layer's backward.
#define DORMOUSE_EDGE_BACKWARD_END 4

/// A Perfetto trace (`.pftrace`).
#define DORMOUSE_FORMAT_PFTRACE 1

/// One self-contained HTML page with a real time axis.
#define DORMOUSE_FORMAT_HTML 2

/// Run the prefix of `node` forward, keeping its graph.
#define DORMOUSE_OP_PREFIX_FORWARD 1

/// Run `members` in one packed row, forward and backward.
#define DORMOUSE_OP_MICROBATCH 2

/// Run the prefix of `node` backward from its accumulators.
#define DORMOUSE_OP_PREFIX_BACKWARD 3

/// Nothing is left.
#define DORMOUSE_OP_DONE 4

/// The value is built in.
#define DORMOUSE_FROM_BUILT_IN 0

/// The value comes from the file `DORMOUSE_CONFIG` names.
#define DORMOUSE_FROM_FILE 1

/// The value comes from the environment.
#define DORMOUSE_FROM_ENVIRONMENT 2

/// The value comes from the options of the latest `dormouse_runtime_create`.
#define DORMOUSE_FROM_OPTIONS 3

/// Memory handed out by `dormouse_mem_alloc`.
#define DORMOUSE_DOOR_LINKED 1

/// The process' own malloc family, through the preload library.
#define DORMOUSE_DOOR_PRELOAD 2

/// The host tier is open.
#define DORMOUSE_DOOR_HOST 4

/// The file tier is open.
#define DORMOUSE_DOOR_NVME 8

/// The file tier goes through the page cache, which is memory.
#define DORMOUSE_DOOR_NVME_BUFFERED 16

/// Sleep drops the bytes; wake gives zero pages.
#define DORMOUSE_TAG_WITHOUT_BACKUP 1

/// The model's last layer needs no output on prefix rows: only its K and V path runs in A.
#define DORMOUSE_SPEC_LAST_LAYER_DEAD 1

/// Log-sum-exps are in base two instead of the natural base.
#define DORMOUSE_MERGE_LOG2 1

/// A row without keys is written as plus infinity by the caller's kernel.
#define DORMOUSE_MERGE_PLUS_INFINITY_IS_EMPTY 2

/// Most bytes of a tag's name or a label, with its NUL.
#define DORMOUSE_NAME_BYTES 64

/// Most bytes of a path, a value or a sentence held in a struct, with its NUL; longer text is cut.
#define DORMOUSE_TEXT_BYTES 512

/// Run the rows of `node` forward a second time, now with their graph; its backward is next.
#define DORMOUSE_OP_FORWARD_AGAIN 5

/// Run without a graph: the node runs forward again before its backward.
#define DORMOUSE_OP_WITHOUT_GRAPH 1

/// No node runs by itself: a microbatch, or the end.
#define DORMOUSE_RESIDENCY_NONE 0

/// What the node saves stays on the device: nothing of it is named to `dormouse_prefix_add_dormant`.
#define DORMOUSE_RESIDENCY_KEEP 1

/// What the node saves sleeps while its subtree runs: named to `dormouse_prefix_add_dormant`, asleep from
/// its marks and phase B on, awake layer by layer from phase C and its marks.
#define DORMOUSE_RESIDENCY_SLEEP 2

/// The node saves nothing and runs forward again.
#define DORMOUSE_RESIDENCY_RECOMPUTE 3

/// Number of no node: a root's parent, or what a microbatch reads that shares nothing.
#define DORMOUSE_NODE_NONE 4294967295

/// Keep what is needed to add sequences later: one copy of every tree token, 4 bytes each.
#define DORMOUSE_SEQUENCES_GROW 1

/// The model's last layer needs no output on rows that nothing scores.
#define DORMOUSE_BATCH_LAST_LAYER_DEAD 1

/// Share also where the ops that sharing costs take longer than what it saves.
#define DORMOUSE_BATCH_ALWAYS_SHARE 2

/// A forest: the prefix trees of a batch. Exclusive: one thread at a time.
typedef struct dormouse_forest_t dormouse_forest_t;

/// A plan: what a trainer is told to do, step by step. Exclusive: one thread at a time.
typedef struct dormouse_plan_t dormouse_plan_t;

/// A node: one prefix held across phases A, B and C. Exclusive: one thread at a time.
typedef struct dormouse_prefix_t dormouse_prefix_t;

/// A runtime: one device with its tiers. Any-thread. Never dereferenced: a number that looks
/// like a pointer.
typedef struct dormouse_runtime_t dormouse_runtime_t;

/// A tag: a name for a set of memory that sleeps and wakes together. Any-thread.
typedef struct dormouse_tag_t dormouse_tag_t;

/// What a call came to: `DORMOUSE_OK`, a positive notice, or a negative error.
typedef int32_t dormouse_status_t;

/// One parameter of the environment table.
typedef struct dormouse_param_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Static text.
    const char *name;
    /// Static text: `size`, `count`, `switch` or `path`.
    const char *kind;
    /// Static text: the built-in value.
    const char *built_in;
    /// Static text: what is accepted.
    const char *accepts;
    /// Static text: what it does.
    const char *help;
    /// `DORMOUSE_FROM_*`: who set the value.
    int32_t provenance;
    /// Zero.
    uint32_t reserved;
    /// The value in effect, as a file would say it.
    char value[DORMOUSE_TEXT_BYTES];
} dormouse_param_t;

/// How to make a runtime. Zero and NULL mean "not set": the environment, the file or the
/// built-in value then holds; what is set here beats them all.
typedef struct dormouse_options_t {
    /// `sizeof` this struct as the caller knows it.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// `DORMOUSE_DEVICE_*`; 0 is the host device.
    int32_t device_kind;
    /// Which device of that kind.
    int32_t device_ordinal;
    /// Most bytes of device memory to map (`DORMOUSE_ALLOC_BUDGET_BYTES`).
    uint64_t alloc_budget_bytes;
    /// Most bytes of the host tier (`DORMOUSE_HOST_BUDGET_BYTES`).
    uint64_t host_budget_bytes;
    /// Directory of the file tier (`DORMOUSE_NVME_DIR`), NUL-terminated; copied.
    const char *nvme_dir;
    /// Bytes of the file (`DORMOUSE_NVME_FILE_BYTES`).
    uint64_t nvme_file_bytes;
    /// Most bytes of sleeps in flight (`DORMOUSE_OFFLOAD_INFLIGHT_BYTES`).
    uint64_t inflight_bytes;
    /// Threads that do file I/O (`DORMOUSE_OFFLOAD_IO_THREADS`).
    uint32_t io_threads;
    /// Layers woken ahead of need (`DORMOUSE_OFFLOAD_WINDOW_LAYERS`).
    uint32_t window_layers;
    /// Verify a checksum of every extent (`DORMOUSE_OFFLOAD_CHECKSUM`): 0 not set, 1 on, -1 off.
    int32_t checksum;
    /// Must be zero.
    uint32_t reserved;
} dormouse_options_t;

/// What a runtime is and which doors are open.
typedef struct dormouse_info_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// `DORMOUSE_DEVICE_*`.
    int32_t device_kind;
    /// Which device of that kind.
    int32_t device_ordinal;
    /// Unit of physical mapping, in bytes.
    uint64_t page_bytes;
    /// Open doors, `DORMOUSE_DOOR_*` added up.
    uint64_t doors;
    /// Random number of this loaded library: the same everywhere in one process.
    uint64_t instance_id;
    /// Most bytes of device memory to map.
    uint64_t alloc_budget_bytes;
    /// Most bytes of the host tier.
    uint64_t host_budget_bytes;
    /// Bytes of the file tier; 0 while closed.
    uint64_t nvme_file_bytes;
    /// Smallest request the preload door serves, in bytes.
    uint64_t heap_min_bytes;
    /// Measured at the start, then as seen of late, in bytes per second; 0 where neither.
    uint64_t nvme_write_bytes_per_s;
    /// Measured at the start, then as seen of late, in bytes per second; 0 where neither.
    uint64_t nvme_read_bytes_per_s;
    /// Layers woken ahead of need.
    uint32_t window_layers;
    /// Zero.
    uint32_t reserved;
    /// Why doors are closed, one sentence each; empty when none is.
    char closed_because[DORMOUSE_TEXT_BYTES];
} dormouse_info_t;

/// A quantity with its highest value since the runtime was made or `_reset_peaks`.
typedef struct dormouse_gauge_t {
    /// Bytes now.
    uint64_t current_bytes;
    /// Most bytes since the last reset.
    uint64_t peak_bytes;
    /// Pieces now.
    uint64_t count;
} dormouse_gauge_t;

/// Copies of one direction.
typedef struct dormouse_copies_t {
    /// Copies finished.
    uint64_t count;
    /// Bytes they moved.
    uint64_t bytes;
} dormouse_copies_t;

/// What a runtime holds.
typedef struct dormouse_stats_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Awake bytes handed out to callers; `count` is live blocks.
    struct dormouse_gauge_t allocated;
    /// Bytes callers asked for.
    struct dormouse_gauge_t requested;
    /// Bytes with pages behind them: awake, cached and staged.
    struct dormouse_gauge_t mapped;
    /// Free bytes kept mapped for reuse.
    struct dormouse_gauge_t cached;
    /// Bytes handed out whose pages are gone.
    struct dormouse_gauge_t asleep;
    /// Bytes in each tier, by `DORMOUSE_TIER_*`: mapped device memory, host buffers, file extents.
    struct dormouse_gauge_t tiers[DORMOUSE_TIER_COUNT];
    /// Tracked bytes of each role, by `DORMOUSE_ROLE_*`, wherever they are.
    struct dormouse_gauge_t roles[DORMOUSE_ROLE_COUNT];
    /// Copies of each direction, by `DORMOUSE_COPY_*`.
    struct dormouse_copies_t copies[DORMOUSE_COPY_COUNT];
    /// Nanoseconds callers were blocked on copies.
    uint64_t stall_ns;
    /// Allocations that went down the out-of-memory ladder.
    uint64_t alloc_retries;
    /// Allocations that ended in a report.
    uint64_t alloc_failures;
    /// Regions that had no place to sleep and stayed awake, and stashes that had none.
    uint64_t declined;
    /// Bytes written to the file since the runtime was made, whatever became of them.
    uint64_t nvme_written_bytes;
    /// Bytes that may be written in 24 hours (`DORMOUSE_NVME_WRITE_BUDGET_BYTES`); 0: no limit.
    uint64_t nvme_write_budget_bytes;
    /// Bytes of that which may be written now; 0 too where there is no limit.
    uint64_t nvme_write_left_bytes;
    /// Awake bytes handed out, and freed ones that other streams may still use; `count` is blocks.
    struct dormouse_gauge_t active;
    /// The part of `cached` that shares a run of addresses with something in use.
    struct dormouse_gauge_t inactive_split;
} dormouse_stats_t;

/// What lies at an address.
typedef struct dormouse_mem_info_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Start of the block.
    void *base;
    /// Bytes of the block, whole pages.
    uint64_t bytes;
    /// Bytes its owner asked for.
    uint64_t requested_bytes;
    /// `DORMOUSE_STATE_*`.
    int32_t state;
    /// `DORMOUSE_TIER_*`: where the bytes are.
    int32_t tier;
    /// `DORMOUSE_ROLE_*`.
    int32_t role;
    /// Layer, or -1.
    int32_t layer;
    /// Tag or label, its first 24 bytes; empty where there is none.
    char name[DORMOUSE_NAME_BYTES];
} dormouse_mem_info_t;

/// Where a sequence ends.
typedef struct dormouse_ending_t {
    /// In which node.
    uint32_t node;
    /// Must be ignored.
    uint32_t reserved;
    /// Its tokens, from the root on.
    uint64_t tokens;
} dormouse_ending_t;

/// Sequences that share prefixes: by their token ids, or by the nodes they make. Everything is read
/// during the call and not kept.
typedef struct dormouse_sequences_t {
    /// `sizeof` this struct as the caller knows it.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Token ids of all sequences, `int32_t` or `int64_t`; NULL with nodes, or with no sequences.
    const void *ids;
    /// `sequence_count + 1` ascending offsets: sequence i is `[offsets[i], offsets[i + 1])`.
    const uint64_t *offsets;
    /// `sequence_count` numbers of the caller's for whatever else a token's identity depends on
    /// (images, adapters): sequences of different kinds share nothing. NULL for one kind.
    const uint64_t *kinds;
    /// Sequences; with nodes, as many as `endings`.
    uint64_t sequence_count;
    /// Bytes of one id: 4 or 8.
    uint32_t id_bytes;
    /// Token ids are below this. Not read with nodes.
    uint32_t vocab;
    /// `node_count` parents, depth first, `DORMOUSE_NODE_NONE` for a root; NULL with ids.
    const uint32_t *parents;
    /// `node_count` numbers of tokens.
    const uint64_t *lengths;
    /// `sequence_count` places where sequences end, or NULL where each leaf ends one, in order.
    const struct dormouse_ending_t *endings;
    /// Nodes.
    uint64_t node_count;
    /// `DORMOUSE_SEQUENCES_*` added up.
    uint64_t flags;
} dormouse_sequences_t;

/// What a forest has.
typedef struct dormouse_forest_info_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Sequences.
    uint64_t sequences;
    /// Nodes of all trees.
    uint64_t nodes;
    /// Trees.
    uint64_t roots;
    /// Nodes from which nothing goes on.
    uint64_t leaves;
    /// Tokens when everything shared is counted once.
    uint64_t tree_tokens;
    /// Tokens of all sequences.
    uint64_t dense_tokens;
    /// Dense tokens over tree tokens.
    double compression;
} dormouse_forest_info_t;

/// One run of tokens that the same sequences share. Numbered depth first: a subtree is a run of
/// numbers.
typedef struct dormouse_forest_node_t {
    /// Its parent, or `DORMOUSE_NODE_NONE`.
    uint32_t parent;
    /// One past the last node of its subtree.
    uint32_t subtree_end;
    /// The lowest sequence that runs through all of it: its ids are that sequence's.
    uint32_t sequence;
    /// Must be ignored.
    uint32_t reserved;
    /// Position of its first token on every path through it.
    uint64_t token_begin;
    /// One past the last.
    uint64_t token_end;
} dormouse_forest_node_t;

/// A model's shape, as far as costs depend on it.
typedef struct dormouse_model_t {
    /// `sizeof` this struct as the caller knows it.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Decoder layers.
    uint32_t layers;
    /// Query heads.
    uint32_t heads;
    /// Key and value heads.
    uint32_t kv_heads;
    /// Elements of one head.
    uint32_t head_dim;
    /// Bytes of one element of an activation.
    uint32_t dtype_bytes;
    /// Must be zero.
    uint32_t reserved;
    /// Linear weights of one layer, in elements.
    uint64_t layer_linear_weights;
    /// Those of them that make K and V, in elements.
    uint64_t kv_linear_weights;
    /// Linear weights of the last layer that A runs when it is dead, in elements.
    uint64_t last_layer_prefix_weights;
    /// Weights of the head, in elements.
    uint64_t head_weights;
    /// Bytes one layer saves per token for backward.
    uint64_t saved_bytes_per_token_layer;
} dormouse_model_t;

/// A machine's rates, as far as predictions depend on them. 0 means unknown.
typedef struct dormouse_machine_t {
    /// `sizeof` this struct as the caller knows it.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Floating-point operations per second.
    uint64_t flops_per_s;
    /// Bytes of device memory.
    uint64_t device_bytes;
    /// Device to the tier that sleeps, bytes per second.
    uint64_t sleep_bytes_per_s;
    /// The tier that sleeps to device, bytes per second.
    uint64_t wake_bytes_per_s;
    /// Bytes of pinned host memory for what sleeps.
    uint64_t host_bytes;
    /// Host to file, bytes per second.
    uint64_t nvme_write_bytes_per_s;
    /// File to host, bytes per second.
    uint64_t nvme_read_bytes_per_s;
    /// From one rank to another, bytes per second.
    uint64_t link_bytes_per_s;
    /// What an op costs whatever its size, nanoseconds.
    uint64_t op_overhead_ns;
} dormouse_machine_t;

/// A rollout group and how to run it. Everything is copied by `dormouse_plan_create`.
typedef struct dormouse_spec_t {
    /// `sizeof` this struct as the caller knows it.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// `prompt_length` token ids, or NULL when only lengths are known.
    const int64_t *prompt_ids;
    /// Tokens of the shared prompt, at least 2.
    uint64_t prompt_length;
    /// All response token ids one after another, or NULL when only lengths are known.
    const int64_t *response_ids;
    /// `response_count + 1` ascending offsets: response i is `[offsets[i], offsets[i + 1])`.
    const uint64_t *response_offsets;
    /// `response_count` finite weights, or NULL for 1 each.
    const double *weights;
    /// Responses of the group, at least 1.
    uint32_t response_count;
    /// Token ids are below this.
    uint32_t vocab;
    /// Most suffix tokens of one microbatch, at least 1.
    uint32_t microbatch_tokens;
    /// Layers woken ahead of need in C; 0 takes the schedule's own, and 1 is 2.
    uint32_t wake_window_layers;
    /// `DORMOUSE_SPEC_*` added up.
    uint64_t flags;
    /// The model.
    const struct dormouse_model_t *model;
    /// The machine, or NULL when unknown.
    const struct dormouse_machine_t *machine;
} dormouse_spec_t;

/// Half-open run of tokens, labels or rows.
typedef struct dormouse_span_t {
    /// First.
    uint64_t begin;
    /// One past the last.
    uint64_t end;
} dormouse_span_t;

/// What of a forest's sequences is scored, and how to run it. Everything is copied by
/// `dormouse_plan_create_batch`.
typedef struct dormouse_batch_t {
    /// `sizeof` this struct as the caller knows it.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Sequences: as many as the forest has.
    uint64_t sequence_count;
    /// `sequence_count` positions from which on a sequence's tokens are labels that carry loss; its
    /// length for none. NULL for all but the first token, or with spans.
    const uint64_t *loss_from;
    /// `sequence_count + 1` ascending offsets: sequence i has spans `[offsets[i], offsets[i + 1])`.
    /// NULL without spans.
    const uint64_t *span_offsets;
    /// Positions of labels, each sequence's after one another.
    const struct dormouse_span_t *spans;
    /// `sequence_count` finite weights, or NULL for 1 each.
    const double *weights;
    /// Token ids are below this; also the logits of a row.
    uint32_t vocab;
    /// Most rows of one microbatch; 0 takes the most that fit, or fewer where that is predicted faster, which
    /// needs a budget of device memory.
    uint32_t microbatch_rows;
    /// Longest run of rows computed at once; 0 for any.
    uint64_t block_rows;
    /// Layers woken ahead of need; 0 takes the schedule's own, and 1 is 2.
    uint32_t wake_window_layers;
    /// Must be zero.
    uint32_t reserved;
    /// `DORMOUSE_BATCH_*` added up.
    uint64_t flags;
    /// Bytes of device memory for what a plan counts; 0 for the machine's.
    uint64_t device_bytes;
    /// Bytes of host memory for what sleeps; 0 for the machine's.
    uint64_t host_bytes;
    /// The model.
    const struct dormouse_model_t *model;
    /// The machine, or NULL when unknown.
    const struct dormouse_machine_t *machine;
} dormouse_batch_t;

/// One suffix in a microbatch.
typedef struct dormouse_member_t {
    /// Which response; of several sequences that share all the leaf's rows, one.
    uint32_t sequence;
    /// A batch's leaf; 0 for a flat group's.
    uint32_t node;
    /// First row in the packed microbatch.
    uint64_t row_begin;
    /// One past the last row in the packed microbatch.
    uint64_t row_end;
    /// Position of the first row, as the dense run numbers it.
    uint64_t first_position;
    /// First input token within `[P[-1]] + S_i[:-1]`, a leaf's rows.
    uint64_t token_begin;
    /// One past the last input token within `[P[-1]] + S_i[:-1]`.
    uint64_t token_end;
    /// Weight of this response in the loss.
    double weight;
} dormouse_member_t;

/// Rows that carry loss: row `row_begin + k` of the op predicts label `first_label + k` of the
/// sequence.
typedef struct dormouse_score_t {
    /// Whose labels.
    uint32_t sequence;
    /// Must be ignored.
    uint32_t reserved;
    /// First row: a microbatch's packed rows, or the node's, counted from its first.
    uint64_t row_begin;
    /// One past the last row.
    uint64_t row_end;
    /// Position of the first label in its sequence.
    uint64_t first_label;
    /// Weight of the sequence in the loss.
    double weight;
} dormouse_score_t;

/// One thing a trainer is told to do.
typedef struct dormouse_op_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Names it to `dormouse_plan_complete`.
    uint64_t id;
    /// `DORMOUSE_OP_*`.
    int32_t kind;
    /// Prefix it works on.
    uint32_t node;
    /// Prefix forward: first prompt token run.
    uint64_t token_begin;
    /// Prefix forward: one past the last prompt token run.
    uint64_t token_end;
    /// Microbatch: `member_count` members, borrowed until the next call with this plan.
    const struct dormouse_member_t *members;
    /// Microbatch: how many.
    uint32_t member_count;
    /// Microbatch: 1 when it is the node's last, else 0.
    uint32_t last;
    /// Prefix backward: layers to wake ahead.
    uint32_t wake_window_layers;
    /// Zero.
    uint32_t reserved;
    /// `DORMOUSE_OP_WITHOUT_GRAPH` or 0.
    uint64_t flags;
    /// Microbatch and node backward: `score_count` runs of rows that carry loss, borrowed until the next
    /// call with this plan. NULL where there is none.
    const struct dormouse_score_t *scores;
    /// How many.
    uint64_t score_count;
    /// Prefix whose K and V it reads, with those of all that node's ancestors, or
    /// `DORMOUSE_NODE_NONE`.
    uint32_t reads;
    /// `DORMOUSE_RESIDENCY_*` of the node that runs.
    int32_t residency;
    /// Sleeping node whose last layers have left when this op ends, or `DORMOUSE_NODE_NONE`.
    uint32_t asleep;
    /// Sleeping node whose first layers come back from the beginning of this op, or
    /// `DORMOUSE_NODE_NONE`. One made from the plan begins by itself (`dormouse_plan_next`).
    uint32_t waking;
    /// Bytes of device memory at its most, of what the plan makes.
    uint64_t device_bytes;
    /// Bytes asleep in host memory at its most.
    uint64_t host_bytes;
} dormouse_op_t;

/// One node of a plan: of the forest's, or a block of one, or a leaf run by itself.
typedef struct dormouse_plan_node_t {
    /// Its parent, or `DORMOUSE_NODE_NONE` where it reads nothing.
    uint32_t parent;
    /// One past the last node of its subtree.
    uint32_t subtree_end;
    /// A sequence that runs through it: its ids are that sequence's.
    uint32_t sequence;
    /// The forest's node it is, is a block of, or ends in.
    uint32_t origin;
    /// Position of its first row; row r predicts token r + 1.
    uint64_t row_begin;
    /// One past the last.
    uint64_t row_end;
    /// `DORMOUSE_RESIDENCY_*`.
    int32_t residency;
    /// Must be ignored.
    uint32_t reserved;
} dormouse_plan_node_t;

/// What a plan costs and saves.
typedef struct dormouse_prediction_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Floating-point operations of the dense run.
    double flops_dense;
    /// Floating-point operations of this plan.
    double flops_shared;
    /// Their ratio.
    double speedup;
    /// Tokens of the dense run over tokens of this plan.
    double token_ratio;
    /// Highest bytes in phases A, B and C: all awake in A and C, all that may sleep asleep in B.
    uint64_t peak_bytes[3];
    /// Bytes the prefix saves that may sleep.
    uint64_t sleep_bytes;
    /// 1 when sharing pays, else 0.
    uint32_t pays;
    /// Zero.
    uint32_t reserved;
    /// Why, in one sentence.
    char reason[DORMOUSE_TEXT_BYTES];
    /// Seconds of the dense run, in microbatches of the same rows; negative where the machine's rate of
    /// operations is not known, as the seconds below.
    double seconds_dense;
    /// Seconds of this plan; with stalls where the plan says what sleeps.
    double seconds_shared;
    /// Seconds phase A waits for layers to leave, at least.
    double sleep_stall_s;
    /// Seconds phase C waits for layers to come back, at least.
    double wake_stall_s;
    /// What another choice of what sleeps could save at most, in what it was chosen by (seconds
    /// where rates are known); 0 where the choice is the best one, negative where that is not known.
    double residency_gap;
    /// Rows that run forward twice.
    uint64_t recomputed_rows;
    /// Device bytes of the plan's ops at their most, in phases A, B and C.
    uint64_t device_bytes[3];
    /// Host bytes asleep at their most, in phases A, B and C.
    uint64_t host_bytes[3];
} dormouse_prediction_t;

/// What a node did.
typedef struct dormouse_prefix_report_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Bytes found dormant: collected in a layer's window and named by the trainer.
    uint64_t dormant_bytes;
    /// Boundary bytes held.
    uint64_t boundary_bytes;
    /// Most dormant bytes asleep at one time.
    uint64_t asleep_bytes_peak;
    /// Dormant bytes asleep, or on their way, when waking began: at the end of phase B.
    uint64_t asleep_at_b_bytes;
    /// Most bytes asleep in each tier at one time, by `DORMOUSE_TIER_*`; 0 for the device.
    uint64_t tier_bytes_peak[DORMOUSE_TIER_COUNT];
    /// Bytes written to the file over the node's life.
    uint64_t written_bytes;
    /// Bytes read from the file over the node's life.
    uint64_t read_bytes;
    /// Rate of writing to the file, bytes per second; 0 when nothing was written.
    uint64_t write_bytes_per_s;
    /// Rate of reading from the file, bytes per second; 0 when nothing was read.
    uint64_t read_bytes_per_s;
    /// Nanoseconds the trainer's work waited for copies: its threads, and on a GPU its streams where
    /// backwards begin.
    uint64_t stall_ns;
    /// The least that could be, from measured rates and measured layer times.
    uint64_t stall_bound_ns;
    /// Highest awake bytes in phases A, B and C.
    uint64_t phase_peak_bytes[3];
    /// Bytes that could not be woken and sleep on at their addresses.
    uint64_t left_asleep_bytes;
    /// Named storages that were accepted.
    uint64_t accepted_count;
    /// Named storages that stay awake.
    uint64_t refused_count;
    /// `DORMOUSE_PHASE_*` that sets the peak; 0 before there is one.
    int32_t peak_phase;
    /// Zero.
    uint32_t reserved;
    /// Why something stayed awake, reasons separated by "; "; empty when nothing did.
    char declined[DORMOUSE_TEXT_BYTES];
    /// 1 where the step was planned from the one before (`DORMOUSE_OFFLOAD_RESIDENCY=fit`), else 0,
    /// as the figures below.
    uint32_t is_planned;
    /// Zero.
    uint32_t reserved_planned;
    /// Dormant bytes the plan leaves in each tier, by `DORMOUSE_TIER_*`; those of the device stay
    /// awake.
    uint64_t planned_bytes[DORMOUSE_TIER_COUNT];
    /// Nanoseconds the plan expects the step to wait for copies.
    uint64_t planned_stall_ns;
} dormouse_prefix_report_t;

/// Two partial attention outputs over the same rows and their log-sum-exps. Outputs may be the
/// inputs in place; other overlaps are not allowed.
typedef struct dormouse_merge_args_t {
    /// `sizeof` this struct as the caller knows it.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// First output, `rows * head_dim` elements.
    const void *out1;
    /// Its log-sum-exps, `rows` elements.
    const void *lse1;
    /// Second output, `rows * head_dim` elements.
    const void *out2;
    /// Its log-sum-exps, `rows` elements.
    const void *lse2;
    /// Merged output, `rows * head_dim` elements.
    void *out;
    /// Merged log-sum-exps, `rows` elements.
    void *lse;
    /// Rows: batch, heads and queries flattened.
    uint64_t rows;
    /// Elements of one row.
    uint64_t head_dim;
    /// `DORMOUSE_DTYPE_F32` or `DORMOUSE_DTYPE_F64`.
    int32_t dtype;
    /// Must be zero.
    uint32_t reserved;
    /// `DORMOUSE_MERGE_*` added up.
    uint64_t flags;
} dormouse_merge_args_t;

/// A block of a GPU's heap in somebody's hands.
typedef struct dormouse_block_t {
    /// First address.
    void *base;
    /// Bytes, whole pages.
    uint64_t bytes;
    /// Bytes its owner asked for.
    uint64_t requested_bytes;
    /// The stream it was asked for on.
    void *stream;
    /// `DORMOUSE_STATE_*`.
    int32_t state;
    /// Must be ignored.
    uint32_t reserved;
} dormouse_block_t;

/// Done.
#define DORMOUSE_OK 0

/// Begun and not finished; nothing to do about it.
#define DORMOUSE_IN_PROGRESS 1

/// Nothing was done, the data is awake where it was; `dormouse_get_last_error()` has the reason.
#define DORMOUSE_DECLINED 2

/// A pointer that must not be NULL was.
#define DORMOUSE_ERR_NULL -101

/// A value is outside what is accepted; the sentence names both.
#define DORMOUSE_ERR_ARGUMENT -102

/// A value that is no handle of this library, or one of another kind.
#define DORMOUSE_ERR_HANDLE -103

/// A handle that was destroyed.
#define DORMOUSE_ERR_STALE -104

/// A struct whose `size` or `version` this library does not know.
#define DORMOUSE_ERR_VERSION -105

/// A parameter in the environment, the file or the options has a value that is not accepted.
#define DORMOUSE_ERR_CONFIG -106

/// Recognised, and refused by name: this build or device cannot do it.
#define DORMOUSE_ERR_UNSUPPORTED -107

/// The budget is spent; the sentence is the report.
#define DORMOUSE_ERR_OUT_OF_MEMORY -201

/// A tier is closed or was never opened.
#define DORMOUSE_ERR_TIER -202

/// An address that lies in no live block of this library.
#define DORMOUSE_ERR_NOT_OURS -203

/// A named limit is reached.
#define DORMOUSE_ERR_LIMIT -204

/// The device or its driver refused.
#define DORMOUSE_ERR_DEVICE -301

/// A file could not be created, written or read.
#define DORMOUSE_ERR_IO -401

/// Bytes came back different from what was written, and stayed so when read again.
#define DORMOUSE_ERR_CORRUPT -402

/// Not legal now: a repeated or skipped phase, a mark out of place.
#define DORMOUSE_ERR_STATE -501

/// Something else is inside or still depends on it.
#define DORMOUSE_ERR_BUSY -502

/// Plan operations completed out of order.
#define DORMOUSE_ERR_ORDER -503

/// Called in a child process after fork; only the parent may.
#define DORMOUSE_ERR_FORKED -504

/// A defect of this library, caught at its boundary.
#define DORMOUSE_ERR_PANIC -901

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/// Version of the loaded library: major * 1000000 + minor * 1000 + patch.
///
/// Any-thread. Never fails.
uint32_t dormouse_get_version(void);

/// The name and meaning of `status`: static text, never NULL, also for unknown numbers.
///
/// Any-thread. Never fails; the text is the library's and lives as long as the process.
const char *dormouse_get_status_string(dormouse_status_t status);

/// One sentence about this thread's latest call that did not return `DORMOUSE_OK`: the value
/// seen and what is accepted. Empty before there was one; never NULL.
///
/// Any-thread. The text is the library's, valid until this thread's next call into it; copy it
/// to keep it.
const char *dormouse_get_last_error(void);

/// How many parameters there are.
///
/// Any-thread. Errors: `NULL`.
dormouse_status_t dormouse_param_count(uint32_t *count_out);

/// Parameter `index` with its value now and who set it. Indices are those of this library's
/// table, `0` to count - 1, and may move between versions; names do not.
///
/// Any-thread. The struct's pointers are static text of the library. Errors: `NULL`, `VERSION`,
/// `ARGUMENT` for an index past the table, `CONFIG` when the configuration itself is not accepted.
dormouse_status_t dormouse_param_get(uint32_t index, struct dormouse_param_t *param_out);

/// Writes the configuration in effect, as a file `DORMOUSE_CONFIG` can load, with the
/// provenance of every value in comments. An existing file is replaced.
///
/// Any-thread. Errors: `NULL`, `ARGUMENT` for a path that is not UTF-8, `CONFIG`, `IO`.
dormouse_status_t dormouse_params_dump(const char *path);

/// Takes log events, the oldest first, as lines of JSON in `buffer`, NUL-terminated: `time_ns`
/// (since 1970), `level` (`ERROR`, `WARN`, `INFO`, `DEBUG`), `target`, `message` and `fields`.
/// `DORMOUSE_LOG` says which events there are. Writes 1 and an empty text if there is none.
///
/// The first call starts the queue, which keeps the newest 4096 events and reports how many it
/// dropped. From then on nothing is written to standard error; `DORMOUSE_LOG_FILE` is still written.
/// `bytes_out` receives the bytes written with the NUL. Call again until there is no event left.
///
/// Any-thread. The buffer is the caller's. Errors: `NULL`, `ARGUMENT` if `capacity_bytes` is less
/// than 4097.
dormouse_status_t dormouse_log_read(char *buffer,
                                    uint64_t capacity_bytes,
                                    uint64_t *bytes_out);

/// Makes the runtime of one device. At most one is live per device. The process' heap is made
/// here unless the preload library made it before.
///
/// Any-thread. `options` may be NULL: nothing set. What is set in `options` beats the
/// environment, that beats the file `DORMOUSE_CONFIG` names, that beats what is built in. The
/// caller owns the handle and gives it to `dormouse_runtime_destroy`.
/// Errors: `NULL`, `VERSION`, `CONFIG` naming the value seen and what is accepted,
/// `UNSUPPORTED` for a device this build cannot drive, `BUSY` when the device has a runtime,
/// `IO` or `TIER` when the file tier was asked for and cannot be had, `DEVICE`.
dormouse_status_t dormouse_runtime_create(const struct dormouse_options_t *options,
                                          struct dormouse_runtime_t **runtime_out);

/// Drains the runtime's copies, closes its tiers and ends it. Memory handed out stays valid.
/// NULL is fine and does nothing.
///
/// Any-thread. Errors: `HANDLE`, `STALE`, `BUSY` while it has live nodes, stash ids or tags
/// (the sentence names them; nothing is destroyed then).
dormouse_status_t dormouse_runtime_destroy(struct dormouse_runtime_t *runtime);

/// What the runtime is: device, pages, open doors and why the others are closed.
///
/// Any-thread. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`.
dormouse_status_t dormouse_runtime_get_info(struct dormouse_runtime_t *runtime,
                                            struct dormouse_info_t *info_out);

/// What the runtime holds per tier and role: now, peak, counts; copies per direction; stall.
/// Bytes and nanoseconds throughout.
///
/// Any-thread. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`.
dormouse_status_t dormouse_runtime_get_stats(struct dormouse_runtime_t *runtime,
                                             struct dormouse_stats_t *stats_out);

/// Sets every peak to the value now.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`.
dormouse_status_t dormouse_runtime_reset_peaks(struct dormouse_runtime_t *runtime);

/// Gives cached free pages back to the system.
///
/// Any-thread. Writes the bytes given back. Errors: `NULL`, `HANDLE`, `STALE`.
dormouse_status_t dormouse_runtime_trim(struct dormouse_runtime_t *runtime,
                                        uint64_t *freed_bytes_out);

/// Changes the budget of a tier, in bytes. 0 is refused for the device tier and closes the
/// others to new sleeps; what sleeps there stays and can wake.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for an unknown tier or 0 for the
/// device, `TIER` for a tier that was never opened.
dormouse_status_t dormouse_runtime_set_budget(struct dormouse_runtime_t *runtime,
                                              int32_t tier,
                                              uint64_t bytes);

/// Writes the timeline recorded so far. `format` is `DORMOUSE_FORMAT_*`; an existing file is
/// replaced in one step.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for an unknown format or a path
/// that is not UTF-8, `IO`.
dormouse_status_t dormouse_runtime_dump(struct dormouse_runtime_t *runtime,
                                        int32_t format,
                                        const char *path);

/// Allocates `bytes` of device memory at a multiple of `align` (0: the page). Whole pages, so
/// the block can sleep. On the host device memory of a block that never was used is zero.
///
/// Any-thread. The caller owns the block and gives it to `dormouse_mem_free`. `stream` is where
/// it is used first; NULL is the calling thread. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT`
/// for 0 bytes, an `align` that is no power of two, or a stream the device has not,
/// `OUT_OF_MEMORY` with a report.
dormouse_status_t dormouse_mem_alloc(struct dormouse_runtime_t *runtime,
                                     uint64_t bytes,
                                     uint64_t align,
                                     void *stream,
                                     void **ptr_out);

/// Frees a block: its start, as `dormouse_mem_alloc` gave it. A sleeping block is dropped with
/// its bytes. Never blocks. NULL is fine and does nothing.
///
/// Any-thread. `stream` is where it was used last. Errors: `HANDLE`, `STALE`, `NOT_OURS` for an
/// address that is not the start of a live block, `ARGUMENT` for a stream the device has not.
dormouse_status_t dormouse_mem_free(struct dormouse_runtime_t *runtime, void *ptr, void *stream);

/// Says that `stream` uses the block as well, so its memory is reused only after that use. On
/// the host device only the calling thread exists, and this checks its arguments.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`, `NOT_OURS`, `ARGUMENT` for a stream the device
/// has not.
dormouse_status_t dormouse_mem_record_stream(struct dormouse_runtime_t *runtime,
                                             void *ptr,
                                             void *stream);

/// What lies at `ptr`, any address inside a block: base, bytes, state, tier, role, the first 24
/// bytes of its name. Also answers "is it ours".
///
/// Any-thread; the answer may be old by the time it is read. Errors: `NULL`, `VERSION`,
/// `HANDLE`, `STALE`, `NOT_OURS`.
dormouse_status_t dormouse_mem_query(struct dormouse_runtime_t *runtime,
                                     const void *ptr,
                                     struct dormouse_mem_info_t *info_out);

/// Makes a tag. `name` is 1 to `DORMOUSE_NAME_BYTES` - 1 bytes of UTF-8 and is copied; `flags`
/// is 0 or `DORMOUSE_TAG_WITHOUT_BACKUP`.
///
/// Any-thread. The caller owns the handle and gives it to `dormouse_tag_destroy`.
/// Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT`, `LIMIT`.
dormouse_status_t dormouse_tag_create(struct dormouse_runtime_t *runtime,
                                      const char *name,
                                      uint64_t flags,
                                      struct dormouse_tag_t **tag_out);

/// Ends a tag. What sleeps under it is woken first, and its memory goes on without it. NULL is
/// fine and does nothing.
///
/// Any-thread. Errors: `HANDLE`, `STALE`, `BUSY` while a thread is between enter and leave, and
/// those of `dormouse_tag_wake` (the tag lives on then).
dormouse_status_t dormouse_tag_destroy(struct dormouse_tag_t *tag);

/// From here on, blocks the calling thread allocates belong to the tag. Nests; the innermost tag
/// wins.
///
/// Any-thread, acts on the calling thread. Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT` past 16
/// tags at a time.
dormouse_status_t dormouse_tag_enter(struct dormouse_tag_t *tag);

/// Ends the calling thread's innermost `dormouse_tag_enter`, which must have been of this tag.
///
/// Any-thread, acts on the calling thread. Errors: `NULL`, `HANDLE`, `STALE`, `STATE` when the
/// innermost tag is another or there is none.
dormouse_status_t dormouse_tag_leave(struct dormouse_tag_t *tag);

/// Puts the block that holds `[ptr, ptr + bytes)` under the tag. What sleeps of it are the pages it
/// has to itself: all of it on the host, and of what was allocated inside a tag or a layer; of
/// other blocks on a GPU not the ends that share a page with a neighbour. A block without a page
/// of its own stays awake.
///
/// Any-thread. Ownership of the memory does not change. Errors: `NULL`, `HANDLE`, `STALE`,
/// `ARGUMENT` for a range that leaves its block, `NOT_OURS`, `BUSY` for memory that belongs to a
/// node or another tag.
dormouse_status_t dormouse_tag_add(struct dormouse_tag_t *tag, void *ptr, uint64_t bytes);

/// Puts everything under the tag to sleep in `tier` (`DORMOUSE_TIER_HOST` or `_NVME`) and waits
/// until it is. Its addresses stay; a touch ends the process with one sentence. What is written
/// to meanwhile stays awake.
///
/// Any-thread; blocks the caller. On `DORMOUSE_DECLINED` (a full or failing tier) what did not
/// fit is awake. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT`, `TIER` for a closed tier, `IO`.
dormouse_status_t dormouse_tag_sleep(struct dormouse_tag_t *tag, int32_t tier, void *stream);

/// Wakes everything under the tag at its own addresses and waits until its bytes are there, for every
/// stream.
///
/// Any-thread; blocks the caller. Errors: `NULL`, `HANDLE`, `STALE`, `OUT_OF_MEMORY`, `IO`,
/// `CORRUPT`; what could not wake stays asleep with its bytes where they are.
dormouse_status_t dormouse_tag_wake(struct dormouse_tag_t *tag,
                                    void *stream);

/// Keeps a copy of `bytes` bytes at `ptr` in the host tier, or in the file when that is full; on
/// the host device in the file first.
/// `storage_key` is the storage's identity with its generation: the same key gives the same id,
/// one copy, and one more `dormouse_stash_drop` to come.
///
/// Any-thread. The memory is read before the call returns and stays the caller's. On
/// `DORMOUSE_DECLINED` (tiers full, or the disk failed the write, which ends the file tier) nothing
/// is kept and no id written; `declined` of the statistics counts it.
/// Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT`, `OUT_OF_MEMORY`, `DEVICE`, `ARGUMENT` for 0 bytes,
/// another length under the same key or a stream the device has not.
dormouse_status_t dormouse_stash_put(struct dormouse_runtime_t *runtime,
                                     const void *ptr,
                                     uint64_t bytes,
                                     uint64_t storage_key,
                                     void *stream,
                                     uint64_t *id_out);

/// Copies a stash back to `dst`, which has room for all its bytes. The id stays valid.
///
/// Any-thread; blocks the caller. Errors: `NULL`, `HANDLE`, `STALE` (the runtime's handle or a
/// dropped id), `ARGUMENT` for a stream that is not the device's, `OUT_OF_MEMORY` where no pinned
/// memory is left to read the file through, `DEVICE`, `IO`, `CORRUPT`, and `PANIC` once the device
/// has left copies nobody can wait for. `dst` is then unspecified and the stash is kept.
dormouse_status_t dormouse_stash_get(struct dormouse_runtime_t *runtime,
                                     uint64_t id,
                                     void *dst,
                                     void *stream);

/// Ends one `dormouse_stash_put` of `id`; with the last, the copy goes.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE` (the runtime's handle or a dropped id).
dormouse_status_t dormouse_stash_drop(struct dormouse_runtime_t *runtime, uint64_t id);

/// Makes a forest from token ids, or from nodes whose tokens only were counted. Nothing `sequences`
/// points to is kept; with `DORMOUSE_SEQUENCES_GROW` one copy of every tree token is, and sequences
/// may be added later, also to none.
///
/// Any-thread. Reads every id about once. The caller owns the handle and gives it to
/// `dormouse_forest_destroy`.
/// Errors: `NULL`, `VERSION`, `ARGUMENT` naming the value seen and what is accepted: an empty
/// sequence, an id not below `vocab`, offsets that do not ascend, ids and nodes at once, nodes that
/// are not depth first, a leaf that no sequence ends in.
dormouse_status_t dormouse_forest_create(const struct dormouse_sequences_t *sequences,
                                         struct dormouse_forest_t **forest_out);

/// Ends a forest. Plans made from it live on. NULL is fine and does nothing.
///
/// Exclusive. Errors: `HANDLE`, `STALE`, `BUSY` while another thread is inside.
dormouse_status_t dormouse_forest_destroy(struct dormouse_forest_t *forest);

/// Adds one sequence of `count` token ids, `int32_t` (`id_bytes` 4) or `int64_t` (8), of one kind.
/// `sequence_out` gets its number: they count up from 0. Nodes may have other numbers afterwards.
///
/// Exclusive. The ids are the caller's again at once.
/// Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `STATE` for a forest made without
/// `DORMOUSE_SEQUENCES_GROW`, `ARGUMENT` as `dormouse_forest_create`; the forest stays as it was.
dormouse_status_t dormouse_forest_add(struct dormouse_forest_t *forest,
                                      const void *ids,
                                      uint32_t id_bytes,
                                      uint64_t count,
                                      uint64_t kind,
                                      uint32_t *sequence_out);

/// How many sequences, nodes and tokens a forest has.
///
/// Exclusive. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`.
dormouse_status_t dormouse_forest_info(struct dormouse_forest_t *forest,
                                       struct dormouse_forest_info_t *info_out);

/// Every node by number. `needed_out` gets how many there are; `nodes` gets them when `capacity`
/// has room for all and is untouched otherwise. `nodes` may be NULL to ask for the number.
///
/// Exclusive. The array is the caller's. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` when an
/// array was given and is too small (`needed_out` is written then too).
dormouse_status_t dormouse_forest_nodes(struct dormouse_forest_t *forest,
                                        struct dormouse_forest_node_t *nodes,
                                        uint64_t capacity,
                                        uint64_t *needed_out);

/// Where each sequence ends, by its number; otherwise as `dormouse_forest_nodes`.
///
/// Exclusive. The array is the caller's. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT`.
dormouse_status_t dormouse_forest_endings(struct dormouse_forest_t *forest,
                                          struct dormouse_ending_t *endings,
                                          uint64_t capacity,
                                          uint64_t *needed_out);

/// The forest as JSON text, as requests of `dormouse_schedule_query` have it; buffer as
/// `dormouse_plan_to_json`.
///
/// Exclusive. The buffer is the caller's. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT`
/// when a buffer was given and is too small (`needed_out` is written then too).
dormouse_status_t dormouse_forest_to_json(struct dormouse_forest_t *forest,
                                          char *buffer,
                                          uint64_t capacity_bytes,
                                          uint64_t *needed_out);

/// Makes a plan for one rollout group. Everything `spec` points to is copied.
///
/// Any-thread. The caller owns the handle and gives it to `dormouse_plan_destroy`.
/// Errors: `NULL`, `VERSION`, `ARGUMENT` naming the value seen and what is accepted: an empty
/// response, a prompt shorter than 2, a token id not below `vocab`, a weight that is not finite,
/// 0 microbatch tokens, no responses, offsets that do not ascend.
dormouse_status_t dormouse_plan_create(const struct dormouse_spec_t *spec,
                                       struct dormouse_plan_t **plan_out);

/// Makes the plan of a forest's sequences: its nodes depth first, leaves in microbatches, what sleeps and
/// what is recomputed, within the memory there is. Everything `batch` points to is copied; the
/// forest may grow or end afterwards.
///
/// Exclusive: the forest. The caller owns the handle and gives it to `dormouse_plan_destroy`.
/// Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` naming the value seen and what is
/// accepted: scoring that is not one a sequence, labels a sequence does not have, a batch that no
/// choice of what sleeps brings within memory.
dormouse_status_t dormouse_plan_create_batch(struct dormouse_forest_t *forest,
                                             const struct dormouse_batch_t *batch,
                                             struct dormouse_plan_t **plan_out);

/// Ends a plan. Nodes made from it live on. NULL is fine and does nothing.
///
/// Exclusive. Errors: `HANDLE`, `STALE`, `BUSY` while another thread is inside.
dormouse_status_t dormouse_plan_destroy(struct dormouse_plan_t *plan);

/// The next thing to do. Asked again before `dormouse_plan_complete`, the answer is the same.
/// A node made from this plan is told, and begins to wake its last layers by itself: a flat group's at
/// the first gradient of the last microbatch, a batch's as the op begins that names it in `waking`, or else
/// the op before its backward. Its own marks wait for what is needed in any case.
///
/// Exclusive. What `op_out->members` and `op_out->scores` point to is the library's, valid until the
/// next call with this plan.
/// Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`.
dormouse_status_t dormouse_plan_next(struct dormouse_plan_t *plan,
                                     struct dormouse_op_t *op_out);

/// Says that operation `op_id` is done.
///
/// Exclusive. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ORDER` for any id but that of the
/// operation `dormouse_plan_next` gave last.
dormouse_status_t dormouse_plan_complete(struct dormouse_plan_t *plan, uint64_t op_id);

/// Every node that operations name, by number: what a node reads is its ancestors by `parent`.
/// `needed_out` gets how many there are; `nodes` gets them when `capacity` has room for all and is
/// untouched otherwise. `nodes` may be NULL to ask for the number.
///
/// Exclusive. The array is the caller's. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` when an
/// array was given and is too small (`needed_out` is written then too).
dormouse_status_t dormouse_plan_nodes(struct dormouse_plan_t *plan,
                                      struct dormouse_plan_node_t *nodes,
                                      uint64_t capacity,
                                      uint64_t *needed_out);

/// What the plan costs and saves: floating-point operations, bytes.
///
/// Exclusive. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`.
dormouse_status_t dormouse_plan_predict(struct dormouse_plan_t *plan,
                                        struct dormouse_prediction_t *prediction_out);

/// The plan as JSON text. `needed_out` gets its bytes with the NUL; `buffer` gets the text when
/// `capacity_bytes` has room for all of it and is untouched otherwise. `buffer` may be NULL to
/// ask for the length.
///
/// Exclusive. The buffer is the caller's. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT`
/// when a buffer was given and is too small (`needed_out` is written then too).
dormouse_status_t dormouse_plan_to_json(struct dormouse_plan_t *plan,
                                        char *buffer,
                                        uint64_t capacity_bytes,
                                        uint64_t *needed_out);

/// Answers `{"version": 1, "query": "shares", ...}` with `{"version": 1, "answer": ...}`:
/// shares of ranks, lists of pipeline stages, layouts, context shards, router accounting,
/// assignments of rollouts, fitted rates, plans and simulations as text. docs/queries.md has every ask
/// with an example. Equal requests have equal answers.
///
/// `needed_out` gets the answer's bytes with the NUL; `buffer` gets the answer when `capacity_bytes`
/// has room for all of it and is untouched otherwise. `buffer` may be NULL to ask for the length,
/// which takes as long as the answer.
///
/// Any-thread. The buffer is the caller's. Errors: `NULL`, `ARGUMENT` for a request that is none,
/// an ask or a field that is not known, and whatever the ask refuses, naming the value seen and what
/// is accepted; `LIMIT` when a buffer was given and is too small (`needed_out` is written then too).
dormouse_status_t dormouse_schedule_query(const char *request,
                                          char *buffer,
                                          uint64_t capacity_bytes,
                                          uint64_t *needed_out);

/// Makes a prefix of `layers` layers. `plan` may be NULL; with a plan, `prefix_id` is the prefix its
/// operations name and the plan's window holds. Where residency is `fit`, the last step of the prefix
/// with this `prefix_id` and as many layers is what the next is planned from.
///
/// Any-thread. The caller owns the handle and gives it to `dormouse_prefix_destroy`.
/// Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for 0 layers or too many, or a prefix that the plan
/// runs no backward of, `BUSY` when the plan already has this prefix or a thread inside.
dormouse_status_t dormouse_prefix_create(struct dormouse_runtime_t *runtime,
                                         struct dormouse_plan_t *plan,
                                         uint32_t prefix_id,
                                         uint32_t layers,
                                         struct dormouse_prefix_t **prefix_out);

/// Ends a prefix in any phase: whatever still sleeps is woken and left to its owner, accumulators
/// are freed. NULL is fine and does nothing.
///
/// Exclusive; blocks while the last blocks wake. Errors: `HANDLE`, `STALE`, `BUSY`; `IO` when
/// bytes could not be woken: the prefix is gone all the same, those bytes sleep on at their
/// addresses, and freeing them is legal.
dormouse_status_t dormouse_prefix_destroy(struct dormouse_prefix_t *prefix);

/// Enters phase A, B or C (`DORMOUSE_PHASE_*`), the only legal order. B puts the last layers to
/// sleep as well; C raises the wake window.
///
/// Exclusive. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` for an unknown phase,
/// `STATE` for a repeated or skipped one.
dormouse_status_t dormouse_prefix_enter_phase(struct dormouse_prefix_t *prefix,
                                              int32_t phase,
                                              void *stream);

/// Marks an edge of `layer` (`DORMOUSE_EDGE_*`). Between `FORWARD_BEGIN` and `FORWARD_END` the
/// blocks the calling thread allocates are collected as the layer's; `FORWARD_END` lets the
/// layer below fall asleep. `BACKWARD_BEGIN` blocks until the layer and the one below are awake.
///
/// Exclusive; forward marks of one layer come from one thread. Errors: `NULL`, `HANDLE`,
/// `STALE`, `BUSY`, `ARGUMENT` for an unknown edge or layer, `STATE` for a mark out of place,
/// and those of a wake (`OUT_OF_MEMORY`, `IO`, `CORRUPT`): nothing is lost then.
dormouse_status_t dormouse_prefix_mark_edge(struct dormouse_prefix_t *prefix,
                                            int32_t edge,
                                            uint32_t layer,
                                            void *stream);

/// Names `count` storages that the prefix graph saved in `layer`: any address inside each. Only
/// those also collected in the layer's forward window may sleep; the others stay awake and are
/// counted in the report, foreign addresses too.
///
/// Exclusive; before the layer's `FORWARD_END`. The array is read and not kept. `ptrs` may be
/// NULL when `count` is 0. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT`, `STATE`.
dormouse_status_t dormouse_prefix_add_dormant(struct dormouse_prefix_t *prefix,
                                              uint32_t layer,
                                              const void *const *ptrs,
                                              uint64_t count);

/// Presents boundary tensor `slot` of `layer`: `elems` elements of `dtype` (`DORMOUSE_DTYPE_*`)
/// in `bytes` bytes at `ptr`. Its block never sleeps. Makes the zeroed accumulator of `elems`
/// elements, FP64 for FP64 and FP32 for every other dtype.
///
/// Exclusive; inside the layer's forward window. The memory stays the caller's; memory of
/// another allocator is accepted and simply never sleeps. Errors: `NULL`, `HANDLE`, `STALE`,
/// `BUSY`, `ARGUMENT`, `STATE`, `OUT_OF_MEMORY`.
dormouse_status_t dormouse_prefix_add_boundary(struct dormouse_prefix_t *prefix,
                                               uint32_t layer,
                                               uint32_t slot,
                                               const void *ptr,
                                               uint64_t bytes,
                                               uint64_t elems,
                                               int32_t dtype,
                                               void *stream);

/// Adds `elems` elements of `dtype` at `grad` into the accumulator of (`layer`, `slot`).
///
/// Exclusive. `grad` is contiguous, read before the call returns (NULL stream) and stays the
/// caller's. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` for another count of elements
/// or a slot without boundary, `STATE`.
dormouse_status_t dormouse_prefix_accumulate(struct dormouse_prefix_t *prefix,
                                             uint32_t layer,
                                             uint32_t slot,
                                             const void *grad,
                                             uint64_t elems,
                                             int32_t dtype,
                                             void *stream);

/// The accumulator of (`layer`, `slot`). The trainer may read it and add into it in place. Streams
/// other than those of `dormouse_prefix_add_boundary` and `dormouse_prefix_accumulate` are named to
/// `dormouse_mem_record_stream`, or are done with it before the prefix ends.
///
/// Exclusive. Borrowed: the library's, valid until `dormouse_prefix_destroy`.
/// Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` for a slot without boundary.
dormouse_status_t dormouse_prefix_get_gradient(struct dormouse_prefix_t *prefix,
                                               uint32_t layer,
                                               uint32_t slot,
                                               void **ptr_out);

/// What the prefix did so far: bytes per tier, stall and its bound, rates, reasons. On a GPU it waits
/// for the streams of the prefix's marks to come to the last of them.
///
/// Exclusive. Blocks. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`.
dormouse_status_t dormouse_prefix_get_report(struct dormouse_prefix_t *prefix,
                                             struct dormouse_prefix_report_t *report_out);

/// The same for a reader: which phase sets the peak, bytes by tier, the plan, rates, the longest
/// waits beside what could be, and why something stayed awake. `needed_out` gets its bytes with the
/// NUL; `buffer` gets the text when `capacity_bytes` has room for all of it and is untouched
/// otherwise. `buffer` may be NULL to ask for the length, which figures that grow may change. Waits as
/// `dormouse_prefix_get_report` does.
///
/// Exclusive. Blocks. The buffer is the caller's. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT`
/// when a buffer was given and is too small (`needed_out` is written then too).
dormouse_status_t dormouse_prefix_explain(struct dormouse_prefix_t *prefix,
                                          char *buffer,
                                          uint64_t capacity_bytes,
                                          uint64_t *needed_out);

/// Merges two partial attention outputs over the same rows by their log-sum-exps:
/// `lse = log(exp(lse1) + exp(lse2))`, `out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)`.
/// A row without keys has lse -infinity and takes the other part; both empty gives 0.
///
/// It runs where `out` lies: in memory of a GPU's heap on that GPU, in the order of `stream`; any
/// other memory is taken for the host's, at once.
///
/// Any-thread. Buffers stay the caller's and are not used after the call returns (on a GPU: after
/// the stream has passed). Errors: `NULL`, `VERSION`, `ARGUMENT`, and on a GPU `DEVICE`.
dormouse_status_t dormouse_kernel_merge_lse(const struct dormouse_merge_args_t *args, void *stream);

/// Allocates `bytes` of GPU `device` for use on `stream`; NULL for 0 bytes or less. Where there is
/// no memory it does not return: it throws what PyTorch turns into `torch.OutOfMemoryError`, with
/// a report; where PyTorch's own exception cannot be had, a `std::runtime_error` of that text.
///
/// Any-thread. Errors: none is returned; every failure is thrown.
void *dormouse_torch_malloc(intptr_t bytes, int32_t device, void *stream);

/// As `dormouse_torch_malloc`, for a memory pool: NULL where there is no memory, with the report
/// in `dormouse_get_last_error`.
///
/// Any-thread. Errors: NULL.
void *dormouse_torch_pool_malloc(intptr_t bytes, int32_t device, void *stream);

/// Frees what one of the two above gave. Never blocks: the memory is reused in the order of the
/// stream it was allocated for, and after what other streams have recorded. In a forked child it
/// does nothing.
///
/// Any-thread. Errors: none is returned; the first few are written to standard error.
void dormouse_torch_free(void *ptr, uintptr_t bytes, int32_t device, void *stream);

/// `Tensor.record_stream`: `stream` uses the block around `ptr` as well.
///
/// Any-thread. Errors: none is returned; the first few are written to standard error.
void dormouse_torch_record_stream(void *ptr, void *stream);

/// `torch.cuda.empty_cache`: gives cached pages of every GPU back to the driver.
///
/// Any-thread; waits for GPU work that uses what is given back. Never fails.
void dormouse_torch_empty_cache(void);

/// `torch.cuda.set_per_process_memory_fraction`: a budget of that share of the GPU's memory.
///
/// Any-thread. Errors: none is returned; the first few are written to standard error.
void dormouse_torch_set_memory_fraction(double fraction, int32_t device);

/// Promises (1), or takes back (0), that whatever captures a stream of this process into a graph
/// calls the three functions below around it. Without the promise every request asks the driver
/// whether its stream is being captured; with it only those do that come between a begin and its
/// end, and a capture that nobody announced gets memory that others will use as well.
///
/// Any-thread, and init-only: before the first request. Never fails.
void dormouse_torch_set_graph_hooks(int registered);

/// A capture on GPU `device` is about to begin: until its end, requests of streams that are being
/// captured are served from the pool of this id, which nobody else is served from before the pool is
/// released. Several graphs may share an id, one after the other. A capture while another one runs
/// on the same GPU is refused: it gets no memory. `filter` is torch's, good for this call only; it is
/// not used.
///
/// Any-thread. Errors: none is returned; the first few are written to standard error.
void dormouse_torch_begin_pool(int device,
                               unsigned long long id_first,
                               unsigned long long id_second,
                               void *filter);

/// The capture that began with this id is over.
///
/// Any-thread. Errors: none is returned; the first few are written to standard error.
void dormouse_torch_end_pool(int device, unsigned long long id_first, unsigned long long id_second);

/// A graph that was captured with this id is gone. After the last one the pool's memory returns:
/// what is free of it once the streams are through, the rest as it is freed.
///
/// Any-thread; waits for nothing. Errors: none is returned; the first few are written to standard
/// error.
void dormouse_torch_release_pool(int device,
                                 unsigned long long id_first,
                                 unsigned long long id_second);

/// The block around `ptr`: its begin, and its length in `bytes_out`. NULL where it is not ours.
///
/// Any-thread. Errors: NULL.
void *dormouse_torch_get_base(void *ptr, uintptr_t *bytes_out);

/// Memory of GPU `device`, with or without a runtime; fields that only a runtime has are 0.
///
/// Any-thread. Errors: `NULL`, `VERSION`, `ARGUMENT` for a device that has no heap yet.
dormouse_status_t dormouse_torch_get_stats(int32_t device, struct dormouse_stats_t *stats_out);

/// Lists the blocks of GPU `device` that somebody has, asleep or awake, in no particular order.
/// Their number always; the blocks where `blocks` has room for all (`capacity` of them), so ask
/// with NULL first.
///
/// Any-thread. Errors: `NULL`, `LIMIT` for too little room, `ARGUMENT` for a device that has no
/// heap yet.
dormouse_status_t dormouse_torch_get_blocks(int32_t device,
                                            struct dormouse_block_t *blocks,
                                            uint64_t capacity,
                                            uint64_t *count_out);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DORMOUSE_H */
