/** @file
 * dormouse: a memory manager and offload runtime for LLM trainers with shared prefixes.
 * Generated from ffi/src by ffi/tests/suite/header.rs; edit there and run it with UPDATE=1.
 *
 * Conventions
 * - Status. A function that can fail returns a dormouse_status_t: 0 is success, a positive value a
 *   notice, a negative value an error. Results are the last parameters; they are written on success,
 *   and on an error only where documented.
 * - Errors. "Errors" in a comment lists status codes without their DORMOUSE_ERR_ prefix. Every
 *   function except dormouse_get_version, dormouse_get_status_string and dormouse_get_last_error can
 *   also return FORKED and PANIC, and ARGUMENT for a pointer that is not aligned for its type.
 *   dormouse_get_last_error returns the message of a notice or error.
 * - Handles. A handle is an opaque value and is never dereferenced. A destroyed handle returns STALE,
 *   also after others were created; another value, or a handle of another type, returns HANDLE; NULL
 *   returns NULL.
 * - Threads. "Any-thread": any number of threads can call the function at the same time.
 *   "Exclusive": one thread at a time per handle; a second thread receives BUSY. Any thread may destroy
 *   a handle that others use: their calls succeed or return BUSY or STALE.
 * - Exit. Functions can be called while a thread or the process exits: in destructors of thread-specific
 *   data, in atexit handlers and in destructors of libraries.
 * - Forks. In a forked child functions return FORKED, and those without a status do nothing. The parent
 *   is unaffected.
 * - Structs. A versioned struct starts with `size` and `version`; new fields are appended. Initialise
 *   it with DORMOUSE_INIT(&it). Structs without these fields (array elements, nested structs) have a
 *   fixed layout.
 * - Arrays and text. `capacity` is the number of elements (of bytes, for text) that a buffer can hold.
 *   `count_out` receives the number required. A NULL buffer queries that number.
 * - Streams. A stream is a CUstream on CUDA. On the host device it must be NULL: the calling thread.
 * - Text is UTF-8 and NUL-terminated, at most 4096 bytes. Names contain the unit: `_bytes`, `_ns`, `_s`.
 * - Sleeping memory. On the host device an access wakes it and waits; with DORMOUSE_OFFLOAD_STRAY=stop
 *   it ends the process with a message. On a GPU an access destroys the CUDA context. A system call
 *   with such an address fails with EFAULT.
 * - Undefined, because it cannot be checked: a pointer, not NULL, to less memory than documented, or to
 *   memory that is written or freed during the call; a stream that does not exist; an access to a freed
 *   block; a call in a signal handler; a call, or an observer that the library calls, that is left by
 *   longjmp, by a C++ exception other than that of dormouse_torch_malloc, or by pthread_cancel.
 */


#ifndef DORMOUSE_H
#define DORMOUSE_H

#include <stdint.h>
#include <string.h>

/* ---- Versions -------------------------------------------------------------------------------- */

/// First part of this header's version.
#define DORMOUSE_VERSION_MAJOR 0
/// Second part of this header's version.
#define DORMOUSE_VERSION_MINOR 1
/// Third part of this header's version.
#define DORMOUSE_VERSION_PATCH 0
/// Version of this header, as one number. dormouse_get_version() returns that of the loaded library.
#define DORMOUSE_VERSION \
    (DORMOUSE_VERSION_MAJOR * 1000000 + DORMOUSE_VERSION_MINOR * 1000 + DORMOUSE_VERSION_PATCH)

/// Zeroes the struct and sets `size` and `version`.
#define DORMOUSE_INIT(it) \
    (memset((it), 0, sizeof *(it)), (it)->size = sizeof *(it), \
     (void)((it)->version = DORMOUSE_STRUCT_VERSION))


/// Value of the `version` field of every versioned struct.
#define DORMOUSE_STRUCT_VERSION 1

/* ---- Constants ------------------------------------------------------------------------------- */

/// Host memory of this process, managed as a device.
#define DORMOUSE_DEVICE_HOST 1

/// NVIDIA GPU, through the CUDA driver.
#define DORMOUSE_DEVICE_CUDA 2

/// Device memory: the memory that kernels access.
#define DORMOUSE_TIER_DEVICE 0

/// Pinned host memory. On the host device this is ordinary memory: sleep does not reduce the
/// resident set.
#define DORMOUSE_TIER_HOST 1

/// One preallocated, unlinked file on a local disk.
#define DORMOUSE_TIER_NVME 2

/// Length of arrays indexed by tier.
#define DORMOUSE_TIER_COUNT 3

/// Memory that the runtime does not track.
#define DORMOUSE_ROLE_NONE 0

/// Prefix tensor that the suffixes read.
#define DORMOUSE_ROLE_BOUNDARY 1

/// Gradient accumulator of a boundary tensor.
#define DORMOUSE_ROLE_BOUNDARY_GRAD 2

/// Activation saved by the prefix forward for its backward. It can sleep in between.
#define DORMOUSE_ROLE_DORMANT 3

/// Memory of a tag.
#define DORMOUSE_ROLE_TAGGED 4

/// Length of arrays indexed by role.
#define DORMOUSE_ROLE_COUNT 5

/// Awake: the pages are mapped.
#define DORMOUSE_STATE_AWAKE 0

/// Being copied out. Reads are allowed; a write cancels the sleep.
#define DORMOUSE_STATE_FALLING_ASLEEP 1

/// Asleep in the host tier.
#define DORMOUSE_STATE_HOST 2

/// Asleep, being copied from the host tier to the NVMe tier.
#define DORMOUSE_STATE_SPILLING 3

/// Asleep in the NVMe tier.
#define DORMOUSE_STATE_NVME 4

/// Waking, being read from the NVMe tier.
#define DORMOUSE_STATE_LOADING 5

/// Waking, being copied to its addresses.
#define DORMOUSE_STATE_WAKING 6

/// Asleep without backup: the data is discarded and wakes as zeros.
#define DORMOUSE_STATE_EMPTY 7

/// Asleep, being copied from the NVMe tier to the host tier ahead of its wake.
#define DORMOUSE_STATE_PROMOTING 8

/// From device memory to the host tier.
#define DORMOUSE_COPY_DEVICE_TO_HOST 0

/// From the host tier to device memory.
#define DORMOUSE_COPY_HOST_TO_DEVICE 1

/// Write to the NVMe tier.
#define DORMOUSE_COPY_NVME_WRITE 2

/// Read from the NVMe tier.
#define DORMOUSE_COPY_NVME_READ 3

/// Length of arrays indexed by copy direction.
#define DORMOUSE_COPY_COUNT 4

/// Pools of small blocks: of up to half a page, 1 MiB by default, as of torch's own allocator.
#define DORMOUSE_POOL_SMALL 0

/// Pools of large blocks.
#define DORMOUSE_POOL_LARGE 1

/// Length of arrays indexed by pool.
#define DORMOUSE_POOL_COUNT 2

/// IEEE binary16.
#define DORMOUSE_DTYPE_F16 1

/// bfloat16.
#define DORMOUSE_DTYPE_BF16 2

/// IEEE binary32.
#define DORMOUSE_DTYPE_F32 3

/// IEEE binary64.
#define DORMOUSE_DTYPE_F64 4

/// Forward of the prefix.
#define DORMOUSE_PHASE_A 1

/// Forward and backward of the suffixes.
#define DORMOUSE_PHASE_B 2

/// Backward of the prefix.
#define DORMOUSE_PHASE_C 3

/// Before a layer's forward. Memory that the thread allocates from here belongs to the layer.
#define DORMOUSE_EDGE_FORWARD_BEGIN 1

/// After a layer's forward. The layer below can fall asleep.
#define DORMOUSE_EDGE_FORWARD_END 2

/// Before a layer's backward. Blocks until the layer and the one below are awake.
#define DORMOUSE_EDGE_BACKWARD_BEGIN 3

/// After a layer's backward.
#define DORMOUSE_EDGE_BACKWARD_END 4

/// Timeline as a Perfetto trace (`.pftrace`).
#define DORMOUSE_FORMAT_PFTRACE 1

/// Timeline as one self-contained HTML page.
#define DORMOUSE_FORMAT_HTML 2

/// Configuration as a file of `NAME = VALUE` lines.
#define DORMOUSE_FORMAT_CONFIG 3

/// Sets every peak, except that of the interval, to its current value after the statistics are read.
#define DORMOUSE_STATS_RESET_PEAKS 1

/// Begins an interval after the statistics are read. Peaks other than that of the interval stay.
#define DORMOUSE_STATS_BEGIN_INTERVAL 2

/// Built-in default.
#define DORMOUSE_FROM_BUILT_IN 0

/// File named by `DORMOUSE_CONFIG`.
#define DORMOUSE_FROM_FILE 1

/// Environment variable.
#define DORMOUSE_FROM_ENVIRONMENT 2

/// Options of the latest `dormouse_runtime_create`.
#define DORMOUSE_FROM_OPTIONS 3

/// Chosen by the runtime from the facts of the machine, and revised by what it measures; `reason` says why.
#define DORMOUSE_FROM_AUTOMATIC 4

/// The program allocates with `dormouse_mem_alloc`.
#define DORMOUSE_MODE_LINKED 1

/// The process' `malloc` is served through the preload library.
#define DORMOUSE_MODE_PRELOAD 2

/// The host tier is open.
#define DORMOUSE_TIER_FLAG_HOST 1

/// The NVMe tier is open.
#define DORMOUSE_TIER_FLAG_NVME 2

/// The NVMe tier uses the page cache instead of direct I/O, and therefore host memory.
#define DORMOUSE_TIER_FLAG_NVME_BUFFERED 4

/// Sleep discards the data; the memory wakes as zeros.
#define DORMOUSE_TAG_WITHOUT_BACKUP 1

/// Log-sum-exps are base 2 instead of base e.
#define DORMOUSE_MERGE_LOG2 1

/// A row without keys has lse +infinity, as the caller's kernel writes it.
#define DORMOUSE_MERGE_PLUS_INFINITY_IS_EMPTY 2

/// The memory is a GPU's. The call is refused if it is not of a GPU's heap, as that of another allocator.
#define DORMOUSE_MERGE_ON_GPU 4

/// Maximum number of bytes of a tag name or label, including the NUL.
#define DORMOUSE_NAME_BYTES 64

/// Number of bytes of a text field in a struct, including the NUL. Longer text is truncated.
#define DORMOUSE_TEXT_BYTES 512

/// Kinds of events in a memory history, in the numbers of `dormouse_memory_event_t`: a block was allocated.
#define DORMOUSE_ACTION_ALLOCATED 0

/// A block was freed, and no other stream uses it.
#define DORMOUSE_ACTION_FREED 1

/// A block was freed. Another stream or a copy may still use it.
#define DORMOUSE_ACTION_FREE_REQUESTED 2

/// The uses of a freed block are over.
#define DORMOUSE_ACTION_FREE_COMPLETED 3

/// Pages were mapped.
#define DORMOUSE_ACTION_MAPPED 4

/// Pages were unmapped.
#define DORMOUSE_ACTION_UNMAPPED 5

/// A block fell asleep: its pages, unmapped next, hold none of it any more.
#define DORMOUSE_ACTION_FELL_ASLEEP 6

/// A block awoke.
#define DORMOUSE_ACTION_AWOKE 7

/// A request found no memory. `address` is the number of bytes that were left.
#define DORMOUSE_ACTION_OUT_OF_MEMORY 8

/// The history was read.
#define DORMOUSE_ACTION_READ 9

/// A remark on a block.
#define DORMOUSE_ACTION_ANNOTATED 10

/// Use of a mapped range: none.
#define DORMOUSE_USE_FREE 0

/// A block, or a part of a sleeping block that shares its page with others.
#define DORMOUSE_USE_ALLOCATED 1

/// The same, freed; another stream or a copy may still use it.
#define DORMOUSE_USE_PENDING_FREE 2

/// Run the prefix of `node` forward, keeping its graph.
#define DORMOUSE_OP_PREFIX_FORWARD 1

/// Run `members` in one packed row, forward and backward.
#define DORMOUSE_OP_MICROBATCH 2

/// Run the prefix of `node` backward from its accumulators.
#define DORMOUSE_OP_PREFIX_BACKWARD 3

/// End of the plan.
#define DORMOUSE_OP_DONE 4

/// Run the prefix of `node` forward again, keeping its graph. Its backward is the next op.
#define DORMOUSE_OP_FORWARD_AGAIN 5

/// Run without a graph. The node runs forward again before its backward.
#define DORMOUSE_OP_WITHOUT_GRAPH 1

/// The op runs no shared node: a microbatch, or the end of the plan.
#define DORMOUSE_RESIDENCY_NONE 0

/// The saved tensors of the node stay on the device. They are not passed to
/// `dormouse_prefix_add_dormant`.
#define DORMOUSE_RESIDENCY_KEEP 1

/// The saved tensors of the node sleep while its subtree runs. They are passed to
/// `dormouse_prefix_add_dormant`, fall asleep at the forward marks and in phase B, and wake layer by layer
/// in phase C.
#define DORMOUSE_RESIDENCY_SLEEP 2

/// The node saves no tensors and runs forward again.
#define DORMOUSE_RESIDENCY_RECOMPUTE 3

/// No node, for example as the parent of a root.
#define DORMOUSE_NODE_NONE 4294967295

/// Keep a copy of every tree token (4 bytes each), so that sequences can be added later.
#define DORMOUSE_SEQUENCES_GROW 1

/// The last layer computes no output for rows that are not scored.
#define DORMOUSE_PLAN_LAST_LAYER_DEAD 1

/// Share prefixes even if the additional ops take longer than sharing saves.
#define DORMOUSE_PLAN_ALWAYS_SHARE 2

/// The runtime decides what sleeps: every shared node can sleep, and subtrees run in the given order.
/// Memory budgets affect the prediction but do not refuse the plan.
#define DORMOUSE_PLAN_RUNTIME_RESIDENCY 4

/// `weighing` of a history: an occurrence weighs by its response's reward and epoch.
#define DORMOUSE_WEIGHING_REWARD 0

/// Each occurrence weighs the same.
#define DORMOUSE_WEIGHING_COUNT 1

/// `kind` of a query: the entries of the greatest weight.
#define DORMOUSE_QUERY_BEST 0

/// The most relevant entry to the query, then the most relevant one to both, and so on; at most 64, and none with a
/// relevance below 0.4.
#define DORMOUSE_QUERY_CHAIN 1

/// Texts of an entry, for `dormouse_dialogue_get_text`: what was asked.
#define DORMOUSE_TEXT_QUERY 0

/// What was read for it.
#define DORMOUSE_TEXT_PASSAGE 1

/// What was answered.
#define DORMOUSE_TEXT_RESPONSE 2

/// Earlier turns of dialogues. Any-thread.
typedef struct dormouse_dialogue_t dormouse_dialogue_t;

/* ---- Handles --------------------------------------------------------------------------------- */

/// Handle of a forest: the prefix trees of a batch. Exclusive.
typedef struct dormouse_forest_t dormouse_forest_t;

/// A history of rollouts. Any-thread.
typedef struct dormouse_history_t dormouse_history_t;

/// Handle of a plan: the operations (ops) of one step, in order. Exclusive.
typedef struct dormouse_plan_t dormouse_plan_t;

/// Handle of a prefix: one shared prefix across phases A, B and C. Exclusive.
typedef struct dormouse_prefix_t dormouse_prefix_t;

/// Handle of a runtime: one device with its memory tiers. Any-thread.
typedef struct dormouse_runtime_t dormouse_runtime_t;

/// Handle of a tag: a named set of memory that sleeps and wakes together. Any-thread.
typedef struct dormouse_tag_t dormouse_tag_t;

/// Result of a call: `DORMOUSE_OK`, a positive notice, or a negative error.
typedef int32_t dormouse_status_t;

/* ---- Structs --------------------------------------------------------------------------------- */

/// One parameter of the configuration.
typedef struct dormouse_param_t {
    /// In: size of the struct. Out: number of bytes written.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Name of the environment variable; static text.
    const char *name;
    /// `size`, `count`, `switch`, `choice`, `set`, `path` or `filter`; static text.
    const char *kind;
    /// Built-in default; static text.
    const char *built_in;
    /// Accepted values; static text.
    const char *accepts;
    /// One-line description; static text.
    const char *help;
    /// Source of the value, `DORMOUSE_FROM_*`.
    int32_t provenance;
    /// Reserved; ignore the value.
    uint32_t reserved;
    /// Current value, in the syntax of a configuration file.
    char value[DORMOUSE_TEXT_BYTES];
    /// Why a value of `DORMOUSE_FROM_AUTOMATIC` is what it is; empty for the other sources.
    char reason[DORMOUSE_TEXT_BYTES];
} dormouse_param_t;

/// Options of `dormouse_runtime_create`. 0 and NULL mean "not set": the value then comes from the
/// environment, the configuration file or the built-in default, or is automatic.
typedef struct dormouse_options_t {
    /// Size of the struct, set by the caller.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// `DORMOUSE_DEVICE_*`; 0 is the host device.
    int32_t device_kind;
    /// Index of the device among its kind.
    int32_t device_ordinal;
    /// Limit on mapped device memory, in bytes (`DORMOUSE_CPU_BUDGET_BYTES`, `DORMOUSE_CUDA_BUDGET_BYTES`).
    uint64_t alloc_budget_bytes;
    /// Limit on the host tier, in bytes (`DORMOUSE_HOST_BUDGET_BYTES`).
    uint64_t host_budget_bytes;
    /// Directory of the NVMe tier's file (`DORMOUSE_NVME_DIR`). The text is copied.
    const char *nvme_dir;
    /// Size of the NVMe tier's file, in bytes (`DORMOUSE_NVME_FILE_BYTES`).
    uint64_t nvme_file_bytes;
    /// Limit on bytes that fall asleep at a time (`DORMOUSE_OFFLOAD_INFLIGHT_BYTES`).
    uint64_t inflight_bytes;
    /// Number of I/O threads (`DORMOUSE_OFFLOAD_IO_THREADS`).
    uint32_t io_threads;
    /// Number of layers woken ahead (`DORMOUSE_OFFLOAD_WINDOW_LAYERS`).
    uint32_t window_layers;
    /// Checksum verification on wake (`DORMOUSE_OFFLOAD_CHECKSUM`): 0 not set, 1 on, -1 off.
    int32_t checksum;
    /// Must be zero.
    uint32_t reserved;
} dormouse_options_t;

/// Properties of a runtime.
typedef struct dormouse_info_t {
    /// In: size of the struct. Out: number of bytes written.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// `DORMOUSE_DEVICE_*`.
    int32_t device_kind;
    /// Index of the device among its kind.
    int32_t device_ordinal;
    /// Size of a page, the unit of mapping, in bytes.
    uint64_t page_bytes;
    /// Modes the library is installed in: bitwise OR of `DORMOUSE_MODE_*`.
    uint64_t modes;
    /// Open tiers: bitwise OR of `DORMOUSE_TIER_FLAG_*`.
    uint64_t tier_flags;
    /// Random number of this loaded instance of the library.
    uint64_t instance_id;
    /// Limit on mapped device memory, in bytes.
    uint64_t alloc_budget_bytes;
    /// Limit on the host tier, in bytes.
    uint64_t host_budget_bytes;
    /// Size of the NVMe tier in bytes; 0 if closed.
    uint64_t nvme_file_bytes;
    /// Smallest `malloc` request served in mode `preload`, in bytes.
    uint64_t heap_min_bytes;
    /// Recent write throughput of the NVMe tier in bytes/s, initially measured at startup; 0 if
    /// unknown.
    uint64_t nvme_write_bytes_per_s;
    /// Recent read throughput of the NVMe tier in bytes/s, initially measured at startup; 0 if unknown.
    uint64_t nvme_read_bytes_per_s;
    /// Number of layers woken ahead.
    uint32_t window_layers;
    /// Reserved; ignore the value.
    uint32_t reserved;
    /// Reasons why a mode or tier is unavailable, separated by "; "; empty if all are available.
    char unavailable_reason[DORMOUSE_TEXT_BYTES];
} dormouse_info_t;

/// A quantity with its current and peak values.
typedef struct dormouse_gauge_t {
    /// Current value in bytes.
    uint64_t current_bytes;
    /// Highest value in bytes since creation or the latest reset of the peaks.
    uint64_t peak_bytes;
    /// Current number of pieces.
    uint64_t count;
} dormouse_gauge_t;

/// Completed copies in one direction.
typedef struct dormouse_copies_t {
    /// Number of copies.
    uint64_t count;
    /// Number of bytes copied.
    uint64_t bytes;
} dormouse_copies_t;

/// A number of pieces with its current, peak and total values.
typedef struct dormouse_amount_t {
    /// Current value.
    uint64_t current;
    /// Highest value since creation or the latest reset of the peaks.
    uint64_t peak;
    /// Sum of all increases since creation.
    uint64_t added_total;
} dormouse_amount_t;

/// What pools of one kind hold at a moment.
typedef struct dormouse_pool_t {
    /// Awake allocated memory in bytes.
    uint64_t allocated_bytes;
    /// The same, and freed memory that streams can still use, in bytes.
    uint64_t active_bytes;
    /// Requested memory in bytes, asleep or awake.
    uint64_t requested_bytes;
    /// Mapped memory in bytes; what is staged is counted as large.
    uint64_t mapped_bytes;
    /// Free mapped memory in bytes, in segments that also contain memory in use.
    uint64_t inactive_split_bytes;
    /// Number of live blocks, asleep or awake.
    uint64_t allocations;
    /// Number of live blocks, and of freed ones that streams can still use.
    uint64_t active_blocks;
    /// Number of segments.
    uint64_t segments;
    /// Number of ranges of `inactive_split_bytes`.
    uint64_t inactive_splits;
} dormouse_pool_t;

/// Memory statistics of a runtime.
typedef struct dormouse_stats_t {
    /// In: size of the struct. Out: number of bytes written.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Awake allocated memory; `count` is the number of live blocks.
    struct dormouse_gauge_t allocated;
    /// Requested memory, before rounding to pages.
    struct dormouse_gauge_t requested;
    /// Mapped memory: awake, cached and staged.
    struct dormouse_gauge_t mapped;
    /// Free memory that stays mapped for reuse.
    struct dormouse_gauge_t cached;
    /// Allocated memory that is asleep.
    struct dormouse_gauge_t asleep;
    /// Memory in use by tier, `DORMOUSE_TIER_*`: mapped device memory, host buffers, file extents.
    struct dormouse_gauge_t tiers[DORMOUSE_TIER_COUNT];
    /// Tracked memory by role, `DORMOUSE_ROLE_*`, in any tier.
    struct dormouse_gauge_t roles[DORMOUSE_ROLE_COUNT];
    /// Copies by direction, `DORMOUSE_COPY_*`.
    struct dormouse_copies_t copies[DORMOUSE_COPY_COUNT];
    /// Time that callers were blocked on copies, in nanoseconds.
    uint64_t stall_ns;
    /// Number of allocations that needed memory to be reclaimed first.
    uint64_t alloc_retries;
    /// Number of allocations that failed with a report.
    uint64_t alloc_failures;
    /// Number of regions that stayed awake and stashes that were declined for lack of space.
    uint64_t declined;
    /// Total bytes written to the NVMe tier since creation.
    uint64_t nvme_written_bytes;
    /// Limit on bytes written in 24 hours (`DORMOUSE_NVME_WRITE_BUDGET_BYTES`); 0: no limit.
    uint64_t nvme_write_budget_bytes;
    /// Bytes of that limit that remain; 0 if there is no limit.
    uint64_t nvme_write_left_bytes;
    /// Awake allocated memory, and freed memory that streams can still use; `count` is the number of
    /// blocks.
    struct dormouse_gauge_t active;
    /// Part of `cached` in segments that also contain memory in use.
    struct dormouse_gauge_t inactive_split;
    /// Number of times that sleeping memory was accessed and woke (`DORMOUSE_OFFLOAD_STRAY`).
    uint64_t stray_wakes;
    /// Live blocks, asleep or awake.
    struct dormouse_amount_t allocations;
    /// Segments: runs of addresses that belong to one pool.
    struct dormouse_amount_t segments;
    /// Sum of all increases of `allocated`, in bytes.
    uint64_t allocated_total_bytes;
    /// Sum of all increases of `active`, in bytes.
    uint64_t active_total_bytes;
    /// Sum of all increases of `requested`, in bytes.
    uint64_t requested_total_bytes;
    /// Sum of all increases of `mapped`, in bytes.
    uint64_t mapped_total_bytes;
    /// Sum of all increases of `inactive_split`, in bytes.
    uint64_t inactive_split_total_bytes;
    /// Number of successful map calls of the device.
    uint64_t map_calls;
    /// Number of successful unmap calls of the device.
    uint64_t unmap_calls;
    /// Number of waits for a stream to free memory.
    uint64_t stream_waits;
    /// Highest value of `allocated` since creation or the latest `DORMOUSE_STATS_BEGIN_INTERVAL`, in
    /// bytes.
    uint64_t allocated_interval_peak_bytes;
    /// Parts of the current figures above by pool, `DORMOUSE_POOL_*`. Only `dormouse_torch_get_stats` counts them, block
    /// by block; else 0. Their sums are the whole figures.
    struct dormouse_pool_t pools[DORMOUSE_POOL_COUNT];
} dormouse_stats_t;

/// The block that contains an address.
typedef struct dormouse_mem_info_t {
    /// In: size of the struct. Out: number of bytes written.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// First address of the block.
    void *base;
    /// Size of the block in bytes, a multiple of the page size.
    uint64_t bytes;
    /// Requested size in bytes.
    uint64_t requested_bytes;
    /// `DORMOUSE_STATE_*`.
    int32_t state;
    /// `DORMOUSE_TIER_*` that holds the data.
    int32_t tier;
    /// `DORMOUSE_ROLE_*`.
    int32_t role;
    /// Layer, or -1 if none.
    int32_t layer;
    /// First 24 bytes of the tag name or label; empty if none.
    char name[DORMOUSE_NAME_BYTES];
} dormouse_mem_info_t;

/// The end of a sequence.
typedef struct dormouse_ending_t {
    /// Node that the sequence ends in.
    uint32_t node;
    /// Reserved; ignore the value.
    uint32_t reserved;
    /// Number of tokens of the sequence, counted from the root.
    uint64_t tokens;
} dormouse_ending_t;

/// Sequences that share prefixes, given as token ids or as nodes of trees. The arrays are not kept after
/// the call.
typedef struct dormouse_sequences_t {
    /// Size of the struct, set by the caller.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Token ids of all sequences, `int32_t` or `int64_t`; NULL if nodes are given.
    const void *ids;
    /// `sequence_count + 1` ascending offsets into `ids`: sequence i is `[offsets[i], offsets[i + 1])`.
    const uint64_t *offsets;
    /// `sequence_count` caller-defined numbers. Sequences of different kinds (images, adapters) share no
    /// tokens. NULL for a single kind.
    const uint64_t *kinds;
    /// Number of sequences; if nodes are given, number of `endings`.
    uint64_t sequence_count;
    /// Size of one id in bytes: 4 or 8.
    uint32_t id_bytes;
    /// Number of token ids: each id is below it. Ignored if nodes are given.
    uint32_t vocab;
    /// `node_count` parents, depth first, `DORMOUSE_NODE_NONE` for a root; NULL if ids are given.
    const uint32_t *parents;
    /// `node_count` lengths in tokens.
    const uint64_t *lengths;
    /// `sequence_count` ends of sequences. NULL: sequence i ends in the i-th leaf.
    const struct dormouse_ending_t *endings;
    /// Number of nodes.
    uint64_t node_count;
    /// Bitwise OR of `DORMOUSE_SEQUENCES_*`.
    uint64_t flags;
} dormouse_sequences_t;

/// Sizes of a forest.
typedef struct dormouse_forest_info_t {
    /// In: size of the struct. Out: number of bytes written.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Number of sequences.
    uint64_t sequences;
    /// Number of nodes of all trees.
    uint64_t nodes;
    /// Number of trees.
    uint64_t roots;
    /// Number of nodes without children.
    uint64_t leaves;
    /// Number of tokens, shared ones counted once.
    uint64_t tree_tokens;
    /// Number of tokens of all sequences.
    uint64_t dense_tokens;
    /// `dense_tokens` divided by `tree_tokens`.
    double compression;
} dormouse_forest_info_t;

/// A run of tokens that the same sequences share. Nodes are numbered depth first, so a subtree is a range
/// of numbers.
typedef struct dormouse_forest_node_t {
    /// Parent node, or `DORMOUSE_NODE_NONE`.
    uint32_t parent;
    /// One past the last node of the subtree.
    uint32_t subtree_end;
    /// Lowest sequence that contains the node. The node has its token ids.
    uint32_t sequence;
    /// Reserved; ignore the value.
    uint32_t reserved;
    /// Position of the first token in every sequence that contains the node.
    uint64_t token_begin;
    /// One past the position of the last token.
    uint64_t token_end;
} dormouse_forest_node_t;

/// Half-open range of tokens, labels or rows.
typedef struct dormouse_span_t {
    /// First element.
    uint64_t begin;
    /// One past the last element.
    uint64_t end;
} dormouse_span_t;

/// Shape of a model, as far as costs depend on it.
typedef struct dormouse_model_t {
    /// Size of the struct, set by the caller.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Number of decoder layers.
    uint32_t layers;
    /// Number of query heads.
    uint32_t heads;
    /// Number of key and value heads.
    uint32_t kv_heads;
    /// Number of elements of one head.
    uint32_t head_dim;
    /// Size of one activation element, in bytes.
    uint32_t dtype_bytes;
    /// Must be zero.
    uint32_t reserved;
    /// Number of weights of the linear modules of one layer.
    uint64_t layer_linear_weights;
    /// Number of these weights that compute K and V.
    uint64_t kv_linear_weights;
    /// Number of weights of the last layer that run in phase A with `DORMOUSE_PLAN_LAST_LAYER_DEAD`.
    uint64_t last_layer_prefix_weights;
    /// Number of weights of the output head.
    uint64_t head_weights;
    /// Bytes that one layer saves per token for its backward.
    uint64_t saved_bytes_per_token_layer;
} dormouse_model_t;

/// Rates and sizes of a machine, as far as predictions depend on them. 0: unknown.
typedef struct dormouse_machine_t {
    /// Size of the struct, set by the caller.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Throughput of products with weights in floating-point operations/s.
    uint64_t flops_per_s;
    /// Device memory in bytes.
    uint64_t device_bytes;
    /// Throughput of sleep, from the device to the sleeping tier, in bytes/s.
    uint64_t sleep_bytes_per_s;
    /// Throughput of wake, from the sleeping tier to the device, in bytes/s.
    uint64_t wake_bytes_per_s;
    /// Pinned host memory for sleeping tensors, in bytes.
    uint64_t host_bytes;
    /// Write throughput of the NVMe tier in bytes/s.
    uint64_t nvme_write_bytes_per_s;
    /// Read throughput of the NVMe tier in bytes/s.
    uint64_t nvme_read_bytes_per_s;
    /// Throughput between two ranks in bytes/s.
    uint64_t link_bytes_per_s;
    /// Fixed cost of an op in nanoseconds.
    uint64_t op_overhead_ns;
    /// Throughput of attention to the keys of a prefix in floating-point operations/s. 0: `flops_per_s`.
    uint64_t prefix_attention_flops_per_s;
    /// Throughput of causal attention in floating-point operations/s, where masked pairs do not count: a kernel
    /// that computes them too has half its other throughput. 0: `prefix_attention_flops_per_s`.
    uint64_t causal_attention_flops_per_s;
} dormouse_machine_t;

/// Options of `dormouse_plan_create`: how the sequences of a forest run, and which tokens are scored. The
/// arrays are copied.
typedef struct dormouse_plan_options_t {
    /// Size of the struct, set by the caller.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Number of sequences of the forest.
    uint64_t sequence_count;
    /// `sequence_count` positions: the tokens of a sequence from this position on are labels. The length
    /// of the sequence means no labels. For a flat group, the length of the prompt. NULL: all tokens but
    /// the first are labels, unless spans are given.
    const uint64_t *loss_from;
    /// `sequence_count + 1` ascending offsets into `spans`: sequence i has spans
    /// `[span_offsets[i], span_offsets[i + 1])`. NULL: no spans.
    const uint64_t *span_offsets;
    /// Positions of labels, ascending within a sequence.
    const struct dormouse_span_t *spans;
    /// `sequence_count` finite weights. NULL: all are 1.
    const double *weights;
    /// Number of token ids, and of logits per row.
    uint32_t vocab;
    /// Maximum number of rows of a microbatch. 0: the largest number that fits the device budget, or a
    /// smaller one that is predicted to be faster; requires a device budget.
    uint32_t microbatch_rows;
    /// Maximum number of rows that a forward computes at a time; 0: no limit.
    uint64_t block_rows;
    /// Number of layers woken ahead, at least 2; 0: the default.
    uint32_t wake_window_layers;
    /// Must be zero.
    uint32_t reserved;
    /// Bitwise OR of `DORMOUSE_PLAN_*`.
    uint64_t flags;
    /// Device memory budget of the plan, in bytes; 0: that of the machine.
    uint64_t device_bytes;
    /// Host memory budget of sleeping tensors, in bytes; 0: that of the machine.
    uint64_t host_bytes;
    /// Shape of the model.
    const struct dormouse_model_t *model;
    /// Rates of the machine, or NULL if unknown.
    const struct dormouse_machine_t *machine;
} dormouse_plan_options_t;

/// One suffix in a microbatch.
typedef struct dormouse_member_t {
    /// Sequence; one of them if several share all rows of the leaf.
    uint32_t sequence;
    /// Leaf of the sequence.
    uint32_t node;
    /// First row in the packed microbatch.
    uint64_t row_begin;
    /// One past the last row in the packed microbatch.
    uint64_t row_end;
    /// Position of the first row, as in the dense run.
    uint64_t first_position;
    /// First input token within `[P[-1]] + S_i[:-1]`, a leaf's rows.
    uint64_t token_begin;
    /// One past the last input token within `[P[-1]] + S_i[:-1]`.
    uint64_t token_end;
    /// Weight of the sequence in the loss.
    double weight;
} dormouse_member_t;

/// Rows that carry loss: row `row_begin + k` of the op predicts label `first_label + k` of the
/// sequence.
typedef struct dormouse_score_t {
    /// Sequence of the labels.
    uint32_t sequence;
    /// Reserved; ignore the value.
    uint32_t reserved;
    /// First row, in the packed microbatch or in the node.
    uint64_t row_begin;
    /// One past the last row.
    uint64_t row_end;
    /// Position of the first label in its sequence.
    uint64_t first_label;
    /// Weight of the sequence in the loss.
    double weight;
} dormouse_score_t;

/// One op of a plan.
typedef struct dormouse_op_t {
    /// In: size of the struct. Out: number of bytes written.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Id for `dormouse_plan_complete_op`.
    uint64_t id;
    /// `DORMOUSE_OP_*`.
    int32_t kind;
    /// Node that runs, or whose leaves run.
    uint32_t node;
    /// Forward: first position to run.
    uint64_t token_begin;
    /// Forward: one past the last position to run.
    uint64_t token_end;
    /// Microbatch: `member_count` members, valid until the next call with this plan.
    const struct dormouse_member_t *members;
    /// Microbatch: number of members.
    uint32_t member_count;
    /// Microbatch: 1 if the backward of `node` is next, otherwise 0.
    uint32_t last;
    /// Prefix backward: number of layers to wake ahead.
    uint32_t wake_window_layers;
    /// Reserved; ignore the value.
    uint32_t reserved;
    /// `DORMOUSE_OP_WITHOUT_GRAPH` or 0.
    uint64_t flags;
    /// Microbatch and prefix backward: `score_count` ranges of rows that carry loss, valid until the next
    /// call with this plan. NULL if there are none.
    const struct dormouse_score_t *scores;
    /// Number of `scores`.
    uint64_t score_count;
    /// Node whose K and V are read, with those of all its ancestors, or `DORMOUSE_NODE_NONE`.
    uint32_t reads;
    /// `DORMOUSE_RESIDENCY_*` of the node that runs.
    int32_t residency;
    /// Node whose last layers are asleep when this op ends, or `DORMOUSE_NODE_NONE`.
    uint32_t asleep;
    /// Sleeping node whose layers start to wake when this op begins, or `DORMOUSE_NODE_NONE`. A prefix
    /// created from the plan starts automatically (`dormouse_plan_get_op`).
    uint32_t waking;
    /// Peak of the planned device memory during the op, in bytes.
    uint64_t device_bytes;
    /// Peak of the planned host memory during the op, in bytes.
    uint64_t host_bytes;
} dormouse_op_t;

/// A node of a plan: a node of the forest, a part of one, or a leaf with all its rows.
typedef struct dormouse_plan_node_t {
    /// Parent node, or `DORMOUSE_NODE_NONE`.
    uint32_t parent;
    /// One past the last node of the subtree.
    uint32_t subtree_end;
    /// A sequence that contains the node. The node has its token ids.
    uint32_t sequence;
    /// Node of the forest that this node equals, is a part of, or ends in.
    uint32_t origin;
    /// Position of the first row; row r predicts token r + 1.
    uint64_t row_begin;
    /// One past the position of the last row.
    uint64_t row_end;
    /// `DORMOUSE_RESIDENCY_*`.
    int32_t residency;
    /// Reserved; ignore the value.
    uint32_t reserved;
} dormouse_plan_node_t;

/// Predicted cost of a plan.
typedef struct dormouse_prediction_t {
    /// In: size of the struct. Out: number of bytes written.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Floating-point operations of the dense run.
    double flops_dense;
    /// Floating-point operations of this plan.
    double flops_shared;
    /// `flops_dense` divided by `flops_shared`.
    double speedup;
    /// Tokens of the dense run divided by tokens of this plan.
    double token_ratio;
    /// Peak device memory in phases A, B and C, in bytes, if all dormant memory is awake in A and C and
    /// asleep in B.
    uint64_t peak_bytes[3];
    /// Dormant memory of the prefixes in bytes.
    uint64_t sleep_bytes;
    /// 1 if sharing is faster than the dense run, otherwise 0.
    uint32_t pays;
    /// Reserved; ignore the value.
    uint32_t reserved;
    /// Reason for `pays`.
    char reason[DORMOUSE_TEXT_BYTES];
    /// Duration of the dense run in seconds, with microbatches of the same size. This and the durations
    /// below are negative if the compute throughput is unknown.
    double seconds_dense;
    /// Duration of this plan in seconds, including stalls if the plan decides what sleeps.
    double seconds_shared;
    /// Lower bound of the time that phase A waits for sleeps, in seconds.
    double sleep_stall_s;
    /// Lower bound of the time that phase C waits for wakes, in seconds.
    double wake_stall_s;
    /// Upper bound of what another choice of sleeping nodes could save, in the unit that the choice
    /// minimises: seconds if rates are known. 0: the choice is optimal; negative: unknown.
    double residency_gap;
    /// Number of rows that run forward twice.
    uint64_t recomputed_rows;
    /// Peak of the ops' device memory in phases A, B and C, in bytes.
    uint64_t device_bytes[3];
    /// Peak of sleeping host memory in phases A, B and C, in bytes.
    uint64_t host_bytes[3];
} dormouse_prediction_t;

/// Report of a prefix.
typedef struct dormouse_prefix_report_t {
    /// In: size of the struct. Out: number of bytes written.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Dormant bytes: allocated between a layer's forward marks and declared by the trainer.
    uint64_t dormant_bytes;
    /// Bytes of boundary tensors.
    uint64_t boundary_bytes;
    /// Highest number of dormant bytes asleep at a time.
    uint64_t asleep_bytes_peak;
    /// Dormant bytes asleep or falling asleep when waking began, at the end of phase B.
    uint64_t asleep_at_b_bytes;
    /// Highest number of bytes asleep at a time by tier, `DORMOUSE_TIER_*`; 0 for the device.
    uint64_t tier_bytes_peak[DORMOUSE_TIER_COUNT];
    /// Bytes written to the NVMe tier.
    uint64_t written_bytes;
    /// Bytes read from the NVMe tier.
    uint64_t read_bytes;
    /// Write throughput of the NVMe tier in bytes/s; 0 if nothing was written.
    uint64_t write_bytes_per_s;
    /// Read throughput of the NVMe tier in bytes/s; 0 if nothing was read.
    uint64_t read_bytes_per_s;
    /// Time that the trainer waited for copies, in nanoseconds: its threads and, on a GPU, its streams
    /// at the begin of a backward.
    uint64_t stall_ns;
    /// Lower bound of `stall_ns`, from measured rates and layer times.
    uint64_t stall_bound_ns;
    /// Peak of awake bytes in phases A, B and C.
    uint64_t phase_peak_bytes[3];
    /// Bytes that could not be woken and stay asleep.
    uint64_t left_asleep_bytes;
    /// Number of declared storages that can sleep.
    uint64_t accepted_count;
    /// Number of declared storages that stay awake.
    uint64_t refused_count;
    /// `DORMOUSE_PHASE_*` with the highest peak; 0 if unknown.
    int32_t peak_phase;
    /// Reserved; ignore the value.
    uint32_t reserved;
    /// Reasons why memory stayed awake, separated by "; "; empty if none did.
    char declined[DORMOUSE_TEXT_BYTES];
    /// 1 if the step was planned from an earlier one (`DORMOUSE_OFFLOAD_RESIDENCY=fit`). Otherwise 0,
    /// as are the fields below.
    uint32_t is_planned;
    /// Reserved; ignore the value.
    uint32_t reserved_planned;
    /// Planned dormant bytes by tier, `DORMOUSE_TIER_*`; those of the device stay awake.
    uint64_t planned_bytes[DORMOUSE_TIER_COUNT];
    /// Planned stall of the step, in nanoseconds.
    uint64_t planned_stall_ns;
    /// Number of times that its sleeping memory was accessed and woke (`DORMOUSE_OFFLOAD_STRAY`).
    uint64_t stray_wakes;
    /// The first of these accesses: kind, address, thread, layer and prefix; empty if there was none.
    char first_stray[DORMOUSE_TEXT_BYTES];
} dormouse_prefix_report_t;

/// Two partial attention outputs over the same rows and their log-sum-exps. Log-sum-exps are FP64 for FP64
/// outputs, otherwise FP32. On a GPU an output can be equal to an input (in place). Other overlaps are not
/// accepted, and none are on the host.
typedef struct dormouse_merge_args_t {
    /// Size of the struct, set by the caller.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// First partial output, `rows * head_dim` elements.
    const void *out1;
    /// Log-sum-exps of `out1`, `rows` elements.
    const void *lse1;
    /// Second partial output, `rows * head_dim` elements.
    const void *out2;
    /// Log-sum-exps of `out2`, `rows` elements.
    const void *lse2;
    /// Merged output, `rows * head_dim` elements.
    void *out;
    /// Merged log-sum-exps, `rows` elements.
    void *lse;
    /// Number of rows: batch, heads and queries flattened.
    uint64_t rows;
    /// Number of elements of one row.
    uint64_t head_dim;
    /// Type of the outputs, `DORMOUSE_DTYPE_*`. Outputs of FP16 and BF16 are summed in FP32 and rounded once.
    int32_t dtype;
    /// Must be zero.
    uint32_t reserved;
    /// Bitwise OR of `DORMOUSE_MERGE_*`.
    uint64_t flags;
} dormouse_merge_args_t;

/// Settings of a history.
typedef struct dormouse_history_options_t {
    /// Size of the struct.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Token ids are from 0 to this less 1; at most 2³¹.
    uint32_t vocab;
    /// Epochs of a prompt whose responses are kept, the latest included; at most 64. 0: 2.
    uint32_t epochs_kept;
    /// Bytes of memory that prompts may take. Beyond it the least recently used ones go into the file of cold
    /// prompts, or are forgotten if it has no room for them.
    uint64_t budget_bytes;
    /// `DORMOUSE_WEIGHING_*`.
    int32_t weighing;
    /// Must be zero.
    uint32_t reserved;
    /// Directory of the saved history, which no other process may use meanwhile. A history that is there is loaded.
    /// NULL: nothing is saved.
    const char *dir;
    /// Size in bytes of the file of cold prompts, which is in `dir` and has no name. 0: no file.
    uint64_t cold_bytes;
} dormouse_history_options_t;

/// Token ids.
typedef struct dormouse_tokens_t {
    /// The ids; may be NULL if there are none.
    const void *ids;
    /// Number of ids.
    uint64_t count;
    /// 4: `int32_t`; 8: `int64_t`.
    uint32_t id_bytes;
    /// Must be zero.
    uint32_t reserved;
} dormouse_tokens_t;

/// Name of a prompt: XXH3-128, seed 0, of its ids as little-endian 32-bit numbers.
typedef struct dormouse_digest_t {
    /// The lower 64 bits.
    uint64_t low;
    /// The upper 64 bits.
    uint64_t high;
} dormouse_digest_t;

/// A response to record.
typedef struct dormouse_rollout_t {
    /// The prompt.
    struct dormouse_tokens_t prompt;
    /// The response.
    struct dormouse_tokens_t response;
    /// Its reward: a finite number. Rewards are compared within a prompt alone.
    float reward;
    /// Its epoch.
    uint32_t epoch;
} dormouse_rollout_t;

/// The draft of one sequence, and its window. Zero it for a new sequence.
typedef struct dormouse_draft_t {
    /// In: the prompt.
    struct dormouse_digest_t prompt;
    /// In: the last tokens of the sequence, prompt included. Of more than 7 the last 7 are read.
    struct dormouse_tokens_t end;
    /// Where the drafted ids go: `capacity` elements of the caller.
    int32_t *ids;
    /// In: most tokens to draft; the window may be smaller.
    uint32_t capacity;
    /// The window of the sequence: 2, and 2 more up to 32 with each draft that was accepted as a whole. Set by
    /// `dormouse_history_draft` if it is 0, and by `dormouse_history_feedback`.
    uint32_t window_tokens;
    /// Out: number of drafted tokens; 0 if too few match.
    uint32_t count;
    /// Out: number of tokens that match, 3 to 7; 0 without a match.
    uint32_t matched_tokens;
    /// In, for `dormouse_history_feedback`: how many of the drafted tokens were accepted.
    uint32_t accepted;
    /// Must be zero.
    uint32_t reserved;
} dormouse_draft_t;

/// Figures of a history.
typedef struct dormouse_history_stats_t {
    /// In: size of the struct. Out: number of bytes written.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Prompts in memory.
    uint64_t prompts;
    /// Recorded tokens in memory.
    uint64_t tokens;
    /// Bytes of memory that they take.
    uint64_t bytes;
    /// Prompts in the file of cold prompts.
    uint64_t cold_prompts;
    /// Bytes of that file in use.
    uint64_t cold_bytes;
    /// Prompts that were forgotten: neither memory nor the file had room for them, or the file failed.
    uint64_t forgotten_prompts;
    /// Drafted tokens of which `dormouse_history_feedback` was told.
    uint64_t drafted_tokens;
    /// Those that were accepted.
    uint64_t accepted_tokens;
} dormouse_history_stats_t;

/// Settings of a dialogue history.
typedef struct dormouse_dialogue_options_t {
    /// Size of the struct.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Numbers of an embedding; at most 4096.
    uint32_t dimension;
    /// The share α of relevance in a weight, from 0 to 1; recency has the rest.
    float alpha;
    /// Most entries; at most 2²⁰. 0: 100,000.
    uint64_t entries_max;
    /// Entries that a retrieval looks at, at least; with as many as there are it is exact. 0: 2048.
    uint64_t scanned_entries;
    /// Seconds in which recency falls to 1/e. 0: 7 days.
    double decay_s;
    /// Directory of the log, which no other process or history may use meanwhile. Entries that are there are loaded.
    /// NULL: nothing is written.
    const char *dir;
    /// 1: a record does not wait for the disk. The death of the process loses nothing, that of the machine perhaps the
    /// last seconds.
    uint32_t unsynced;
    /// Must be zero.
    uint32_t reserved;
} dormouse_dialogue_options_t;

/// Bytes.
typedef struct dormouse_bytes_t {
    /// The bytes; may be NULL if there are none.
    const void *bytes;
    /// Number of bytes; at most 2²⁰.
    uint64_t count;
} dormouse_bytes_t;

/// A turn to record. Its texts are bytes that are only stored.
typedef struct dormouse_turn_t {
    /// The query's embedding: finite numbers. It need not be of length 1.
    const float *embedding;
    /// Number of numbers.
    uint64_t dimension;
    /// What was asked.
    struct dormouse_bytes_t query;
    /// What was read for it.
    struct dormouse_bytes_t passage;
    /// What was answered.
    struct dormouse_bytes_t response;
    /// When, in seconds of a clock of the caller.
    double time_s;
} dormouse_turn_t;

/// What to retrieve.
typedef struct dormouse_query_t {
    /// The query's embedding.
    const float *embedding;
    /// Number of numbers.
    uint64_t dimension;
    /// The time at which entries are weighed, in seconds.
    double now_s;
    /// Most entries; at most 1024.
    uint32_t entries_max;
    /// `DORMOUSE_QUERY_*`.
    int32_t kind;
} dormouse_query_t;

/// An entry that was retrieved.
typedef struct dormouse_found_t {
    /// The entry.
    uint64_t id;
    /// Its time.
    double time_s;
    /// α · relevance + (1 − α) · recency.
    float weight;
    /// Cosine of the queries' embeddings; 0 for an embedding of zeros.
    float relevance;
    /// exp(−age / decay), 1 for an entry of a later time.
    float recency;
    /// Reserved; ignore the value.
    uint32_t reserved;
} dormouse_found_t;

/// Figures of a dialogue history.
typedef struct dormouse_dialogue_stats_t {
    /// In: size of the struct. Out: number of bytes written.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Entries.
    uint64_t entries;
    /// Entries that were forgotten for better ones since the history was created.
    uint64_t forgotten_entries;
    /// Categories of summaries.
    uint64_t categories;
    /// Summaries of entries.
    uint64_t summaries;
    /// Bytes of the log.
    uint64_t log_bytes;
} dormouse_dialogue_stats_t;

/// A live block of a GPU heap.
typedef struct dormouse_block_t {
    /// First address of the block.
    void *base;
    /// Size in bytes, a multiple of the page size.
    uint64_t bytes;
    /// Requested size in bytes.
    uint64_t requested_bytes;
    /// Stream of the allocation.
    void *stream;
    /// `DORMOUSE_STATE_*`.
    int32_t state;
    /// Reserved; ignore the value.
    uint32_t reserved;
} dormouse_block_t;

/// The memory history of a GPU: figures.
typedef struct dormouse_memory_history_t {
    /// In: size of the struct. Out: number of bytes written.
    uint32_t size;
    /// `DORMOUSE_STRUCT_VERSION`.
    uint32_t version;
    /// Number of mapped ranges.
    uint64_t range_count;
    /// Number of events that are kept.
    uint64_t event_count;
    /// Number of events since the history was last empty.
    uint64_t recorded_count;
    /// Most events that are kept; 0 while none is recorded.
    uint64_t events_max;
} dormouse_memory_history_t;

/// A mapped range of a GPU's addresses.
typedef struct dormouse_range_t {
    /// First address.
    uint64_t address;
    /// Size in bytes.
    uint64_t bytes;
    /// Requested size of the block in bytes; 0 for free memory.
    uint64_t requested_bytes;
    /// Stream of the range.
    uint64_t stream;
    /// Layer of the block's allocation in its lower half, prefix in its upper half; 0: none.
    uint64_t scope;
    /// Id of the pool for CUDA graphs that the range belongs to; both parts are 0 for none.
    uint64_t pool_first;
    /// The second part.
    uint64_t pool_second;
    /// `DORMOUSE_USE_*`.
    int32_t usage;
    /// Number of the segment. Neighbours with the same number are one piece of memory.
    uint32_t segment;
    /// Number of the block's tag; 0: none.
    uint32_t tag;
    /// Stack of the block's allocation, for `dormouse_torch_get_frames`; 0: none.
    uint32_t stack;
    /// Number of `dormouse_torch_set_metadata` at the block's allocation.
    uint32_t metadata;
    /// 1 if small blocks are allocated there, else 0.
    uint32_t is_small;
} dormouse_range_t;

/// An event of a memory history.
typedef struct dormouse_memory_event_t {
    /// Unix time in nanoseconds.
    uint64_t unix_ns;
    /// Address of the block or pages.
    uint64_t address;
    /// Requested size of the block, or size of the pages, in bytes.
    uint64_t bytes;
    /// Stream of the allocation.
    uint64_t stream;
    /// Layer of the block's allocation in its lower half, prefix in its upper half; 0: none.
    uint64_t scope;
    /// Id of the pool for CUDA graphs that the block belongs to; both parts are 0 for none.
    uint64_t pool_first;
    /// The second part.
    uint64_t pool_second;
    /// `DORMOUSE_ACTION_*`.
    int32_t action;
    /// Number of the block's tag; 0: none.
    uint32_t tag;
    /// Stack of the event, for `dormouse_torch_get_frames`; 0: none.
    uint32_t stack;
    /// Number of `dormouse_torch_set_metadata` of the event's thread.
    uint32_t metadata;
} dormouse_memory_event_t;

/// A frame of a Python stack.
typedef struct dormouse_frame_t {
    /// The code object, which stays alive.
    void *code;
    /// Offset of the instruction in bytes, as `PyCode_Addr2Line` expects it.
    int32_t offset;
    /// Number of the caller's frame; 0: none. Frame `n` is the `n`-th of the table, from 1.
    uint32_t caller;
} dormouse_frame_t;

/// Called where a request finds no memory: the device, the requested bytes, the limit of its mapped bytes, and the bytes
/// of it that are left.
typedef void (*dormouse_out_of_memory_fn)(int32_t device,
                                          uint64_t requested_bytes,
                                          uint64_t limit_bytes,
                                          uint64_t left_bytes);

/// A function of this header. It is cast to its own type before it is called.
typedef void (*dormouse_proc_t)(void);

/// What `dlsym` returns for `dormousePlugin_v1`. The struct never changes; a successor would be
/// `dormousePlugin_v2`, exported beside it.
typedef struct dormouse_plugin_v1_t {
    /// Size of the struct.
    uint32_t size;
    /// Version of the structs that the functions accept, `DORMOUSE_STRUCT_VERSION`.
    uint32_t abi_version;
    /// `dormouse`; static text.
    const char *name;
    /// Returns the function of this header called `name`, or NULL if the library has none. Any-thread.
    dormouse_proc_t (*get_proc)(const char *name);
} dormouse_plugin_v1_t;

/* ---- Status codes ---------------------------------------------------------------------------- */

/// Success.
#define DORMOUSE_OK 0

/// Nothing was done and the data is awake. `dormouse_get_last_error` returns the reason.
#define DORMOUSE_DECLINED 2

/// A part of the data is asleep and the rest is awake. `dormouse_get_last_error` returns the reason.
#define DORMOUSE_PARTIAL 3

/// The index is past the end of the list.
#define DORMOUSE_END 4

/// A required pointer is NULL.
#define DORMOUSE_ERR_NULL -101

/// An argument is outside the accepted range. The message names both.
#define DORMOUSE_ERR_ARGUMENT -102

/// The value is not a handle of this library, or a handle of another kind.
#define DORMOUSE_ERR_HANDLE -103

/// The handle was destroyed.
#define DORMOUSE_ERR_STALE -104

/// The `size` or `version` of a struct is not supported by this library.
#define DORMOUSE_ERR_VERSION -105

/// A parameter from the environment, the configuration file or the options is invalid.
#define DORMOUSE_ERR_CONFIG -106

/// This build or device does not support the operation.
#define DORMOUSE_ERR_UNSUPPORTED -107

/// The memory budget is exhausted. The message is an allocation report.
#define DORMOUSE_ERR_OUT_OF_MEMORY -201

/// A memory tier is closed.
#define DORMOUSE_ERR_TIER -202

/// The address is not in a live block of this library.
#define DORMOUSE_ERR_NOT_OURS -203

/// A limit is reached. The message names it.
#define DORMOUSE_ERR_LIMIT -204

/// The device or its driver returned an error.
#define DORMOUSE_ERR_DEVICE -301

/// A file could not be created, written or read.
#define DORMOUSE_ERR_IO -401

/// Data read back does not match its checksum, after a second read.
#define DORMOUSE_ERR_CORRUPT -402

/// The call is not valid in the current state, for example a repeated phase.
#define DORMOUSE_ERR_STATE -501

/// The object is in use by another thread or object.
#define DORMOUSE_ERR_BUSY -502

/// A plan operation was completed out of order.
#define DORMOUSE_ERR_ORDER -503

/// The process was forked after the library was loaded. Only the parent can call it.
#define DORMOUSE_ERR_FORKED -504

/// Internal error of this library.
#define DORMOUSE_ERR_PANIC -901

#ifdef __cplusplus
extern "C" {
#endif // __cplusplus

/* ---- Plugin ---------------------------------------------------------------------------------- */

/// Entry of a host that loads the library with `dlopen`.
extern const struct dormouse_plugin_v1_t dormousePlugin_v1;

/* ---- Library and parameters ------------------------------------------------------------------ */

/// Returns the version of the loaded library, packed as `DORMOUSE_VERSION`. It differs from
/// `DORMOUSE_VERSION` when the program was compiled against another header.
///
/// Any-thread. Never fails.
uint32_t dormouse_get_version(void);

/// Returns the name and meaning of `status`. Unknown values return a generic text, never NULL.
///
/// Any-thread. Never fails. The text is static.
const char *dormouse_get_status_string(dormouse_status_t status);

/// Returns the message of the calling thread's latest call that did not return `DORMOUSE_OK`. For
/// an invalid value it names the value and the accepted range. Returns an empty string if there was
/// no such call, never NULL.
///
/// Any-thread. Never fails. The library owns the text. It is valid until the calling thread's next
/// call into the library.
const char *dormouse_get_last_error(void);

/// Copies parameter `index` with its current value and the source of that value. To enumerate the
/// table, start at 0 and stop at `DORMOUSE_END`. An index can change between versions; a name does
/// not.
///
/// Any-thread. The pointers in the struct refer to static text. Returns `DORMOUSE_END` if `index`
/// is past the last parameter; `param_out` is unchanged. Errors: `NULL`, `VERSION`, `CONFIG` if the
/// configuration contains an invalid value.
dormouse_status_t dormouse_param_get(uint32_t index, struct dormouse_param_t *param_out);

/// Removes log events from the queue, oldest first, and writes them to `buffer` as lines of JSON:
/// `time_ns` (since 1970), `level` (`ERROR`, `WARN`, `INFO`, `DEBUG`), `target`, `message` and
/// `fields`. `DORMOUSE_LOG` selects the events. `count_out` receives the number of bytes written,
/// including the NUL; it is 1 if the queue is empty. Repeat the call until then.
///
/// The first call starts the queue, which keeps the newest 4096 events and reports the number
/// dropped. From then on, events are not written to standard error. `DORMOUSE_LOG_FILE` is still
/// written.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `ARGUMENT` if `capacity` is below 4097.
dormouse_status_t dormouse_log_read(char *buffer, uint64_t capacity, uint64_t *count_out);

/* ---- Runtime --------------------------------------------------------------------------------- */

/// Creates the runtime of one device. A device has at most one live runtime. The first call creates
/// the process heap, unless the preload library created it earlier.
///
/// `options` may be NULL. Precedence of a setting, highest first: `options`, the environment, the
/// file named by `DORMOUSE_CONFIG`, the built-in default.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_runtime_destroy`.
/// Errors: `NULL`, `VERSION`, `CONFIG` for an invalid setting, `UNSUPPORTED` if this build or machine
/// cannot drive the device, `BUSY` if the device already has a runtime, `IO` or `TIER` if the NVMe
/// tier was requested and cannot be opened, `LIMIT` if a thread cannot be started, `DEVICE`.
dormouse_status_t dormouse_runtime_create(const struct dormouse_options_t *options,
                                          struct dormouse_runtime_t **runtime_out);

/// Waits for the runtime's copies, closes its tiers and destroys it. Memory that was allocated from
/// it stays valid, and is freed through the next runtime of the device. NULL is a no-op.
///
/// Any-thread. Blocks until the copies are complete. Errors: `HANDLE`, `STALE`, `BUSY` if prefixes,
/// tags or stash ids of the runtime still exist, or another thread's call is making one; the message names
/// them and nothing is destroyed.
dormouse_status_t dormouse_runtime_destroy(struct dormouse_runtime_t *runtime);

/// Returns the properties of a runtime: device, page size, budgets, modes and tiers.
///
/// Any-thread. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`.
dormouse_status_t dormouse_runtime_get_info(struct dormouse_runtime_t *runtime,
                                            struct dormouse_info_t *info_out);

/// Returns the memory statistics of a runtime. `flags` is the bitwise OR of `DORMOUSE_STATS_*`: what
/// is done after the statistics are read.
///
/// Any-thread. A runtime has one interval, which the latest caller began. `stats_out` may be NULL if a
/// flag is set. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `ARGUMENT` for an unknown flag.
dormouse_status_t dormouse_runtime_get_stats(struct dormouse_runtime_t *runtime,
                                             uint64_t flags,
                                             struct dormouse_stats_t *stats_out);

/// Returns cached free pages to the operating system or the driver.
///
/// Any-thread. `freed_bytes_out` receives the number of bytes returned. Errors: `NULL`, `HANDLE`,
/// `STALE`.
dormouse_status_t dormouse_runtime_trim(struct dormouse_runtime_t *runtime,
                                        uint64_t *freed_bytes_out);

/// Sets the budget of a tier, in bytes. 0 is not accepted for the device tier. For another tier, 0
/// closes it to new sleeps; data already asleep there stays and can wake.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for an unknown tier or 0 for the device
/// tier, `TIER` if the tier was not opened at creation.
dormouse_status_t dormouse_runtime_set_budget(struct dormouse_runtime_t *runtime,
                                              int32_t tier,
                                              uint64_t bytes);

/// Writes a file: the recorded timeline (`DORMOUSE_FORMAT_PFTRACE` or `_HTML`), or the current
/// configuration with the source of each value (`DORMOUSE_FORMAT_CONFIG`), which `DORMOUSE_CONFIG`
/// can load. An existing regular file is replaced atomically, also behind a symbolic link. A device, a
/// FIFO and an open file behind `/proc` are written in place; a FIFO that no process reads is an error.
///
/// Any-thread. `runtime` may be NULL for `DORMOUSE_FORMAT_CONFIG`. Errors: `NULL`, `HANDLE`, `STALE`,
/// `ARGUMENT` for an unknown format or a path that is not UTF-8, `CONFIG`, `OUT_OF_MEMORY` without memory to write it,
/// `IO`.
dormouse_status_t dormouse_runtime_dump(struct dormouse_runtime_t *runtime,
                                        int32_t format,
                                        const char *path);

/// Writes the recorded timeline as an HTML page into `DORMOUSE_DUMP_DIR`, under the name of the dumps that
/// `DORMOUSE_DUMP` requests, with `call` as the reason. `buffer` receives the path, and `count_out` its
/// length with the NUL. Any number of calls write as many files.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` if `capacity` is
/// below 4097, `CONFIG` if no directory was set when the first runtime was created, `OUT_OF_MEMORY` without memory to
/// write it, `IO`.
dormouse_status_t dormouse_runtime_write_dump(struct dormouse_runtime_t *runtime,
                                              char *buffer,
                                              uint64_t capacity,
                                              uint64_t *count_out);

/* ---- Memory ---------------------------------------------------------------------------------- */

/// Allocates `bytes` of device memory, aligned to `align` bytes (0: the page size). A block consists
/// of whole pages, so that it can sleep. Its contents are unspecified.
///
/// `stream` is the stream that uses the block first; NULL is the calling thread.
///
/// Any-thread. The caller owns the block and releases it with `dormouse_mem_free`. Errors: `NULL`,
/// `HANDLE`, `STALE`, `ARGUMENT` for 0 bytes, an `align` that is not a power of two or a stream of
/// another device, `OUT_OF_MEMORY` with a report in the message.
dormouse_status_t dormouse_mem_alloc(struct dormouse_runtime_t *runtime,
                                     uint64_t bytes,
                                     uint64_t align,
                                     void *stream,
                                     void **ptr_out);

/// Frees the block that starts at `ptr`. The data of a sleeping block is discarded. `stream` is the
/// stream that used the block last. NULL is a no-op.
///
/// Any-thread. Does not block. Errors: `NULL`, `HANDLE`, `STALE`, `NOT_OURS` if `ptr` is not the start of a
/// live block, `ARGUMENT` for a stream of another device.
dormouse_status_t dormouse_mem_free(struct dormouse_runtime_t *runtime,
                                    void *ptr,
                                    void *stream);

/// Records that `stream` uses the block at `ptr`. After the block is freed, its memory is reused only
/// when the work recorded here is complete. On the host device this only checks the arguments.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE`, `NOT_OURS`, `ARGUMENT` for a stream of another
/// device.
dormouse_status_t dormouse_mem_record_stream(struct dormouse_runtime_t *runtime,
                                             void *ptr,
                                             void *stream);

/// Copies `bytes` bytes at `ptr`, inside one sleeping block, to host memory at `dst`. The block stays
/// asleep, in host memory or in the file. Parts of the block that never sleep are copied behind the work on
/// `stream`.
///
/// Any-thread, but do not free the block during the call. Blocks. `dst` must have room for `bytes` bytes, and
/// is undefined after an error. Errors: `NULL`, `HANDLE`, `STALE`, `NOT_OURS`, `STATE` if the block is not
/// asleep, has no copy or wakes during the call, `ARGUMENT` for more bytes than the block was allocated
/// with or a stream of another device, `OUT_OF_MEMORY` if no pinned staging memory is available, `IO`, `CORRUPT`
/// if the file lost or changed bytes, `DEVICE`, and `PANIC` after a device failure that left copies incomplete.
dormouse_status_t dormouse_mem_read(struct dormouse_runtime_t *runtime,
                                    const void *ptr,
                                    uint64_t bytes,
                                    void *dst,
                                    void *stream);

/// Describes the block that contains `ptr`: base, size, state, tier, role and name. `NOT_OURS` means
/// that no live block of this library contains `ptr`.
///
/// Any-thread. Other threads can change the block before the result is read. Errors: `NULL`,
/// `VERSION`, `HANDLE`, `STALE`, `NOT_OURS`.
dormouse_status_t dormouse_mem_query(struct dormouse_runtime_t *runtime,
                                     const void *ptr,
                                     struct dormouse_mem_info_t *info_out);

/* ---- Tags ------------------------------------------------------------------------------------ */

/// Creates a tag. `name` is 1 to `DORMOUSE_NAME_BYTES` - 1 bytes of UTF-8 and is copied. `flags` is 0
/// or `DORMOUSE_TAG_WITHOUT_BACKUP`.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_tag_destroy`.
/// Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT`, `LIMIT` for more than 4096 tags at a time or 2^32 - 1 in the
/// life of the process.
dormouse_status_t dormouse_tag_create(struct dormouse_runtime_t *runtime,
                                      const char *name,
                                      uint64_t flags,
                                      struct dormouse_tag_t **tag_out);

/// Wakes the tag's memory and destroys the tag. The memory stays allocated. NULL is a no-op.
///
/// Any-thread. Blocks until the memory is awake. Errors: `HANDLE`, `STALE`, `BUSY` while a thread is
/// between `dormouse_tag_enter` and `_leave`, and those of `dormouse_tag_wake`. The tag is not
/// destroyed on an error.
dormouse_status_t dormouse_tag_destroy(struct dormouse_tag_t *tag);

/// Adds every block that the calling thread allocates on the tag's device from now on to the tag, until
/// `dormouse_tag_leave`. Tags nest; a block belongs to the innermost tag of its device.
///
/// Any-thread; affects only the calling thread. A thread leaves its tags before it ends; a tag that it did
/// not leave cannot be destroyed. Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT` for more than 16 nested tags.
dormouse_status_t dormouse_tag_enter(struct dormouse_tag_t *tag);

/// Ends the calling thread's innermost `dormouse_tag_enter`, which must be of this tag.
///
/// Any-thread; affects only the calling thread. Errors: `NULL`, `HANDLE`, `STALE`, `STATE` if the
/// thread is inside no tag or its innermost tag is another one.
dormouse_status_t dormouse_tag_leave(struct dormouse_tag_t *tag);

/// Adds the existing block that contains `[ptr, ptr + bytes)` to the tag. Only pages that the block
/// does not share with another block can sleep. A host block, and a GPU block allocated inside a tag
/// or a layer, shares no page; another GPU block can share its first and last page. A block without
/// a page of its own stays awake. Memory that is registered with NCCL or exported by CUDA IPC must not be
/// added, nor belong to a tag or a layer that sleeps; nothing checks it.
///
/// Any-thread. Does not change the ownership of the memory. Errors: `NULL`, `HANDLE`, `STALE`,
/// `ARGUMENT` if the range exceeds the block, `NOT_OURS`, `BUSY` if the block belongs to a prefix or
/// to another tag.
dormouse_status_t dormouse_tag_add(struct dormouse_tag_t *tag,
                                   void *ptr,
                                   uint64_t bytes);

/// Moves the tag's memory to `tier` (`DORMOUSE_TIER_HOST` or `_NVME`) and waits for the copies. The
/// addresses stay reserved, and the pages are returned to the system or the driver. On the host device
/// an access to sleeping memory wakes it; with `DORMOUSE_OFFLOAD_STRAY=stop` it ends the process. On a
/// GPU it destroys the CUDA context. Memory that is written during the call stays awake.
///
/// The copies wait for the work queued on `stream`, on the streams that the memory was allocated for, and on those that
/// `dormouse_mem_record_stream` named. Work of other streams on the memory must be complete.
///
/// Any-thread. Blocks. Returns `DORMOUSE_OK` if all of the memory sleeps, `DORMOUSE_PARTIAL` if a
/// part of it sleeps and the rest is awake, and `DORMOUSE_DECLINED` if all of it is awake. The
/// message states the reason, for example a full tier. After `DORMOUSE_PARTIAL`, call
/// `dormouse_tag_wake` before any access to the tag's memory.
/// Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT`, `TIER` for a closed tier, `IO`.
dormouse_status_t dormouse_tag_sleep(struct dormouse_tag_t *tag,
                                     int32_t tier,
                                     void *stream);

/// Moves the tag's memory back to its original addresses and waits for the copies. All streams can
/// then use it.
///
/// Any-thread. Blocks. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for a stream of another device,
/// `OUT_OF_MEMORY`, `IO`, `CORRUPT`, `STATE` if another thread puts the memory to sleep during the call.
/// On an error, memory that could not wake stays asleep and its data is kept.
dormouse_status_t dormouse_tag_wake(struct dormouse_tag_t *tag,
                                    void *stream);

/* ---- Stash ----------------------------------------------------------------------------------- */

/// Copies `bytes` bytes at `ptr` to the host tier, or to the NVMe tier if the host tier is full. On
/// the host device the NVMe tier comes first. `storage_key` identifies the storage and its
/// generation: a second call with the same key makes no second copy, returns the same id, and
/// requires one more `dormouse_stash_drop`.
///
/// Any-thread. The memory is read before the call returns and stays the caller's. Returns
/// `DORMOUSE_DECLINED` if the tiers are full or the disk write failed, which closes the NVMe tier; no
/// copy is kept and `id_out` is unchanged. Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT`,
/// `OUT_OF_MEMORY`, `DEVICE`, `ARGUMENT` for 0 bytes, for a known key with another length or for a
/// stream of another device.
dormouse_status_t dormouse_stash_put(struct dormouse_runtime_t *runtime,
                                     const void *ptr,
                                     uint64_t bytes,
                                     uint64_t storage_key,
                                     void *stream,
                                     uint64_t *id_out);

/// Copies a stash to `dst`, which must have room for all of its bytes. The stash is kept.
///
/// Any-thread. Blocks. Errors: `NULL`, `HANDLE`, `STALE` for the runtime or a dropped id, `ARGUMENT`
/// for a stream of another device, `OUT_OF_MEMORY` if no pinned staging memory is available,
/// `DEVICE`, `IO`, `CORRUPT`, and `PANIC` after a device failure that left copies incomplete. After
/// an error the contents of `dst` are unspecified.
dormouse_status_t dormouse_stash_get(struct dormouse_runtime_t *runtime,
                                     uint64_t id,
                                     void *dst,
                                     void *stream);

/// Releases one `dormouse_stash_put` of `id`. The last release frees the copy.
///
/// Any-thread. Errors: `NULL`, `HANDLE`, `STALE` for the runtime or a dropped id.
dormouse_status_t dormouse_stash_drop(struct dormouse_runtime_t *runtime, uint64_t id);

/* ---- Forest and plan ------------------------------------------------------------------------- */

/// Creates a forest from token ids, or from nodes with lengths. The arrays are not kept. With
/// `DORMOUSE_SEQUENCES_GROW` the forest keeps one copy of every tree token, and sequences can be added
/// later, also to an empty forest.
///
/// Any-thread. Reads every id about once. The caller owns the handle and releases it with
/// `dormouse_forest_destroy`.
/// Errors: `NULL`, `VERSION`, `ARGUMENT` for an empty sequence, an id that is not below `vocab`, offsets
/// that do not ascend, both ids and nodes, nodes that are not depth first, or a leaf in which no sequence
/// ends.
dormouse_status_t dormouse_forest_create(const struct dormouse_sequences_t *sequences,
                                         struct dormouse_forest_t **forest_out);

/// Destroys a forest. Plans created from it stay valid. NULL is a no-op.
///
/// Exclusive. Errors: `HANDLE`, `STALE`, `BUSY` while another thread is inside.
dormouse_status_t dormouse_forest_destroy(struct dormouse_forest_t *forest);

/// Adds a sequence of `count` token ids, `int32_t` (`id_bytes` 4) or `int64_t` (8). `kind` is as in
/// `dormouse_sequences_t`. `sequence_out` receives the number of the sequence; numbers count up from 0.
/// The numbers of nodes can change.
///
/// Exclusive. The ids are not kept. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `STATE` for a forest
/// created without `DORMOUSE_SEQUENCES_GROW`, `ARGUMENT` as for `dormouse_forest_create`. On an error the
/// forest is unchanged.
dormouse_status_t dormouse_forest_add(struct dormouse_forest_t *forest,
                                      const void *ids,
                                      uint32_t id_bytes,
                                      uint64_t count,
                                      uint64_t kind,
                                      uint32_t *sequence_out);

/// Returns the sizes of a forest, and its nodes and the ends of its sequences, indexed by number.
///
/// `nodes` receives the nodes if `node_capacity` elements are enough, and `endings` the ends if
/// `ending_capacity` elements are enough; otherwise the array is unchanged. Both may be NULL.
/// `info_out` receives the required capacities.
///
/// Exclusive. The caller owns the arrays. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`, `LIMIT`
/// if an array is too small (`info_out` is written).
dormouse_status_t dormouse_forest_get_info(struct dormouse_forest_t *forest,
                                           struct dormouse_forest_info_t *info_out,
                                           struct dormouse_forest_node_t *nodes,
                                           uint64_t node_capacity,
                                           struct dormouse_ending_t *endings,
                                           uint64_t ending_capacity);

/// Returns the forest as JSON, in the format of requests of `dormouse_schedule_query`.
///
/// `count_out` receives the number of bytes of the text, including the NUL. `buffer` receives the text
/// if `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query the length.
///
/// Exclusive. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` if the
/// buffer is too small (`count_out` is written).
dormouse_status_t dormouse_forest_get_json(struct dormouse_forest_t *forest,
                                           char *buffer,
                                           uint64_t capacity,
                                           uint64_t *count_out);

/// Creates a plan for the sequences of a forest: its nodes depth first, its leaves in microbatches, and
/// the nodes that sleep or are recomputed, within the memory budgets. A flat group is a forest of depth
/// one: the prompt, and a child for each response. The arrays of `options` are copied. The forest can grow
/// or be destroyed afterwards.
///
/// Exclusive (the forest). The caller owns the handle and releases it with `dormouse_plan_destroy`.
/// Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` for another number of sequences than
/// the forest's, labels outside a sequence, a weight that is not finite, 0 `microbatch_rows` without a
/// device budget, or a budget that no plan meets.
dormouse_status_t dormouse_plan_create(struct dormouse_forest_t *forest,
                                       const struct dormouse_plan_options_t *options,
                                       struct dormouse_plan_t **plan_out);

/// Creates the plan of a plan file, which `dormouse plan --out` writes for each rank. `text` is the whole file.
/// It is copied. A file that was changed or cut, is of another version, or has ops that no plan has, is refused.
/// The second line of the file lists the sequences with their numbers, names, tokens and checksums.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_plan_destroy`. Errors: `NULL`,
/// `ARGUMENT`.
dormouse_status_t dormouse_plan_load(const char *text,
                                     struct dormouse_plan_t **plan_out);

/// Destroys a plan. Prefixes created from it stay valid. NULL is a no-op.
///
/// Exclusive. Errors: `HANDLE`, `STALE`, `BUSY` while another thread is inside.
dormouse_status_t dormouse_plan_destroy(struct dormouse_plan_t *plan);

/// Returns the next op. It is the same one until `dormouse_plan_complete_op`.
///
/// Prefixes created from this plan are notified and start to wake their last layers: with
/// `DORMOUSE_PLAN_RUNTIME_RESIDENCY` at the first gradient of the last microbatch, otherwise at the op
/// that names the prefix in `waking`, or at the op before its backward. A backward mark waits for its
/// layers in any case.
///
/// Exclusive. The library owns `op_out->members` and `op_out->scores`; they are valid until the next call
/// with this plan. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`.
dormouse_status_t dormouse_plan_get_op(struct dormouse_plan_t *plan,
                                       struct dormouse_op_t *op_out);

/// Completes op `op_id`, which must be the one that `dormouse_plan_get_op` returned last.
///
/// Exclusive. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ORDER` for another id.
dormouse_status_t dormouse_plan_complete_op(struct dormouse_plan_t *plan, uint64_t op_id);

/// Returns the nodes of the plan, indexed by the number that ops use. A node reads K and V of all its
/// ancestors.
///
/// `count_out` receives the number of nodes. `nodes` receives them if `capacity` elements are enough;
/// otherwise it is unchanged. `nodes` may be NULL to query the number.
///
/// Exclusive. The caller owns the array. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` if the array
/// is too small (`count_out` is written).
dormouse_status_t dormouse_plan_get_nodes(struct dormouse_plan_t *plan,
                                          struct dormouse_plan_node_t *nodes,
                                          uint64_t capacity,
                                          uint64_t *count_out);

/// Returns the predicted cost of the plan.
///
/// Exclusive. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`, `BUSY`.
dormouse_status_t dormouse_plan_predict(struct dormouse_plan_t *plan,
                                        struct dormouse_prediction_t *prediction_out);

/// Returns the plan as JSON.
///
/// `count_out` receives the number of bytes of the text, including the NUL. `buffer` receives the text
/// if `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query the length.
///
/// Exclusive. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` if the
/// buffer is too small (`count_out` is written).
dormouse_status_t dormouse_plan_get_json(struct dormouse_plan_t *plan,
                                         char *buffer,
                                         uint64_t capacity,
                                         uint64_t *count_out);

/// Answers a JSON request, `{"version": 1, "query": "shares", ...}`, with
/// `{"version": 1, "answer": ...}`. Queries cover rank shares, pipeline stages, layouts, context
/// shards, router accounting, rollout assignment, fitted rates, plans and simulations;
/// docs/queries/ documents each with an example. Equal requests have equal answers.
///
/// `count_out` receives the number of bytes of the answer, including the NUL. `buffer` receives the
/// answer if `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query
/// the length, which computes the whole answer.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `ARGUMENT` for an invalid request, with the
/// value and the accepted values in the message, `LIMIT` if the buffer is too small (`count_out` is
/// written).
dormouse_status_t dormouse_schedule_query(const char *request,
                                          char *buffer,
                                          uint64_t capacity,
                                          uint64_t *count_out);

/* ---- Prefix ---------------------------------------------------------------------------------- */

/// Creates a prefix of `layers` layers. `plan` may be NULL. With a plan, `prefix_id` is the number of
/// a plan node that runs backward, and the plan sets the wake window. With
/// `DORMOUSE_OFFLOAD_RESIDENCY=fit`, the step is planned from the latest prefix with the same
/// `prefix_id` and number of layers.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_prefix_destroy`.
/// Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for an invalid number of layers or a node that the
/// plan does not run backward, `BUSY` if the plan is in use or already has this prefix.
dormouse_status_t dormouse_prefix_create(struct dormouse_runtime_t *runtime,
                                         struct dormouse_plan_t *plan,
                                         uint32_t prefix_id,
                                         uint32_t layers,
                                         struct dormouse_prefix_t **prefix_out);

/// Destroys a prefix, in any phase. Its sleeping memory is woken and stays with its owner. Its
/// gradient accumulators are freed. NULL is a no-op.
///
/// Exclusive. Blocks until the memory is awake. Errors: `HANDLE`, `STALE`, `BUSY`, `IO` if memory
/// could not be woken. After `IO` the prefix no longer exists; that memory stays asleep at its
/// addresses and can be freed.
dormouse_status_t dormouse_prefix_destroy(struct dormouse_prefix_t *prefix);

/// Enters phase A, B or C (`DORMOUSE_PHASE_*`), in this order. Entering B also puts the last layers
/// to sleep. Entering C starts the wake of the last layers.
///
/// `stream` is the stream that runs the phases: copies out wait for the work queued on it. Work of other streams on
/// dormant memory must be complete, or `dormouse_mem_record_stream` must name them.
///
/// Exclusive. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` for an unknown phase, `STATE` for a
/// repeated or skipped phase.
dormouse_status_t dormouse_prefix_enter_phase(struct dormouse_prefix_t *prefix,
                                              int32_t phase,
                                              void *stream);

/// Marks the begin or end of a layer's forward or backward (`DORMOUSE_EDGE_*`). Between
/// `FORWARD_BEGIN` and `FORWARD_END`, blocks that the calling thread allocates on the runtime's device
/// belong to the layer. After `FORWARD_END`, the layer below can fall asleep. `BACKWARD_BEGIN` blocks
/// until the layer and the one below are awake; on a GPU work that is queued on `stream` afterwards finds
/// them awake. `stream` is as of `dormouse_prefix_enter_phase`.
///
/// Exclusive; the forward marks of one layer come from one thread. Errors: `NULL`, `HANDLE`, `STALE`,
/// `BUSY`, `ARGUMENT` for an unknown edge or layer, `STATE` for a mark out of order, and
/// `OUT_OF_MEMORY`, `IO` or `CORRUPT` if a layer could not wake; its data is kept.
dormouse_status_t dormouse_prefix_mark_edge(struct dormouse_prefix_t *prefix,
                                            int32_t edge,
                                            uint32_t layer,
                                            void *stream);

/// Declares `count` storages that autograd saved in `layer`, each by any address inside it. A storage
/// can sleep only if its block was allocated between the layer's forward marks and has 64 KiB or more.
/// The others, including memory of another allocator, stay awake; the report counts them.
///
/// Exclusive; call it before the layer's `FORWARD_END`. The array is not kept. `ptrs` may be NULL if
/// `count` is 0. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT`, `STATE`.
dormouse_status_t dormouse_prefix_add_dormant(struct dormouse_prefix_t *prefix,
                                              uint32_t layer,
                                              const void *const *ptrs,
                                              uint64_t count);

/// Declares boundary tensor `slot` of `layer`: `elems` elements of `dtype` (`DORMOUSE_DTYPE_*`) in
/// `bytes` bytes at `ptr`. Its block stays awake. Allocates the zeroed gradient accumulator of `elems`
/// elements, FP64 for an FP64 tensor and FP32 otherwise.
///
/// `gradient_out` receives the accumulator's address and may be NULL. The caller can read the
/// accumulator and add to it in place. A stream other than those passed to this function and to
/// `dormouse_prefix_accumulate` requires `dormouse_mem_record_stream`, or must finish with the
/// accumulator before the prefix is destroyed.
///
/// Exclusive; call it between the layer's forward marks. The tensor stays the caller's and can come
/// from another allocator. The library owns the accumulator; it is valid until
/// `dormouse_prefix_destroy`. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT`, `STATE`,
/// `OUT_OF_MEMORY`.
dormouse_status_t dormouse_prefix_add_boundary(struct dormouse_prefix_t *prefix,
                                               uint32_t layer,
                                               uint32_t slot,
                                               const void *ptr,
                                               uint64_t bytes,
                                               uint64_t elems,
                                               int32_t dtype,
                                               void *stream,
                                               void **gradient_out);

/// Adds `elems` contiguous elements of `dtype` at `grad` to the accumulator of (`layer`, `slot`).
///
/// Exclusive. `grad` stays the caller's. On the NULL stream it is read before the call returns,
/// otherwise in the order of `stream`. Errors: `NULL`, `HANDLE`, `STALE`, `BUSY`, `ARGUMENT` for another
/// number of elements or a slot that was not declared, `STATE`.
dormouse_status_t dormouse_prefix_accumulate(struct dormouse_prefix_t *prefix,
                                             uint32_t layer,
                                             uint32_t slot,
                                             const void *grad,
                                             uint64_t elems,
                                             int32_t dtype,
                                             void *stream);

/// Reports on the prefix so far, as figures and as text: bytes per tier, stall time and its lower
/// bound, rates, the peak, the reasons why memory stayed awake.
///
/// `report_out` receives the figures and may be NULL. `count_out` receives the number of bytes of the
/// text, including the NUL, and may be NULL if no text is wanted. `buffer` receives the text if
/// `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query the length,
/// which can grow between two calls.
///
/// Exclusive. On a GPU, blocks until the streams have passed the prefix's latest marks. The caller owns
/// the buffer. Errors: `NULL` if both results are NULL, `VERSION`, `HANDLE`, `STALE`, `BUSY`, `LIMIT` if
/// the buffer is too small (`report_out` and `count_out` are written).
dormouse_status_t dormouse_prefix_get_report(struct dormouse_prefix_t *prefix,
                                             struct dormouse_prefix_report_t *report_out,
                                             char *buffer,
                                             uint64_t capacity,
                                             uint64_t *count_out);

/* ---- Kernels --------------------------------------------------------------------------------- */

/// Merges two partial attention outputs over the same rows by their log-sum-exps:
/// `lse = log(exp(lse1) + exp(lse2))`, `out = out1 * exp(lse1 - lse) + out2 * exp(lse2 - lse)`.
/// A row without keys has lse -infinity and takes the other partial output. If both are empty, the
/// output is 0.
///
/// The kernel runs on the device that holds `out`: on a GPU in the order of `stream` if `out` is
/// memory of that GPU's heap, otherwise on the calling thread, unless `DORMOUSE_MERGE_ON_GPU` is set.
///
/// Any-thread. The caller owns the buffers. They are not used after the call returns or, on a GPU,
/// after the stream has passed. Errors: `NULL`, `VERSION`, `ARGUMENT`, and `DEVICE` on a GPU.
dormouse_status_t dormouse_kernel_merge_lse(const struct dormouse_merge_args_t *args,
                                            void *stream);

/* ---- Rollout history ------------------------------------------------------------------------- */

/// Creates a history of rollouts, from which `dormouse_history_draft` drafts the next ones.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_history_destroy`.
/// Errors: `NULL`, `VERSION`, `ARGUMENT`; `BUSY` for a directory that another process or history uses; `IO`;
/// `CORRUPT` for a saved history that is damaged or of another version, which stays as it is.
dormouse_status_t dormouse_history_create(const struct dormouse_history_options_t *options,
                                          struct dormouse_history_t **history_out);

/// Destroys a history, unsaved. NULL is a no-op. Calls of other threads go on; the last one releases the directory.
///
/// Any-thread. Errors: `HANDLE`, `STALE`.
dormouse_status_t dormouse_history_destroy(struct dormouse_history_t *history);

/// Returns the name of a prompt, by which drafts are asked for. It needs no history and is the same everywhere.
///
/// Any-thread. Errors: `NULL`, `ARGUMENT` for an id that is negative or above 2³¹ - 1.
dormouse_status_t dormouse_history_digest(const struct dormouse_tokens_t *prompt,
                                          struct dormouse_digest_t *digest_out);

/// Records `count` rollouts, in their order. The first of a later epoch forgets the prompt's responses of epochs
/// that are no longer kept.
///
/// `recorded_out` receives the number that were recorded: `count`, or the index of the one that failed.
///
/// Any-thread; drafts wait meanwhile. The arrays are not kept. Errors: `NULL`, `HANDLE`, `STALE`; `ARGUMENT` for an
/// id outside the vocabulary, a reward that is not finite, or an epoch that is no longer kept; `LIMIT`. Rollouts
/// before the failed one are recorded (`recorded_out` is written).
dormouse_status_t dormouse_history_record(struct dormouse_history_t *history,
                                          const struct dormouse_rollout_t *rollouts,
                                          uint64_t count,
                                          uint64_t *recorded_out);

/// Drafts what comes next in `count` sequences: for each at most `capacity` tokens, and at most its window. A prompt
/// without responses, and an end that matches nowhere, have 0 tokens.
///
/// Any-thread, with other arrays; records and cold prompts wait for each other. The caller owns the arrays. Errors:
/// `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for an id outside the vocabulary or `ids` that are not aligned. On an error no
/// draft is changed.
dormouse_status_t dormouse_history_draft(struct dormouse_history_t *history,
                                         struct dormouse_draft_t *drafts,
                                         uint64_t count);

/// Says how many tokens of `count` drafts were accepted (`accepted`). The windows are set for the next drafts, and
/// `count` of each becomes 0, so that a draft is counted once.
///
/// Any-thread, with other arrays. Errors: `NULL`, `HANDLE`, `STALE`, `ARGUMENT` for more accepted tokens than drafted
/// ones. On an error no draft is changed.
dormouse_status_t dormouse_history_feedback(struct dormouse_history_t *history,
                                            struct dormouse_draft_t *drafts,
                                            uint64_t count);

/// Saves everything into the directory of the history, in the place of what is there, as a whole or not at all.
///
/// Any-thread. Other threads may record during the save; the file holds each prompt as it was at some moment of the save.
/// A cold prompt that cannot be read is forgotten, with a count, and the others are saved. Errors: `NULL`, `HANDLE`,
/// `STALE`, `STATE` for a history without a directory, `IO`.
dormouse_status_t dormouse_history_save(struct dormouse_history_t *history);

/// Moves the least recently used prompts out of memory until at most `bytes` are in use, once.
///
/// Any-thread; drafts wait meanwhile. Errors: `NULL`, `HANDLE`, `STALE`.
dormouse_status_t dormouse_history_release(struct dormouse_history_t *history, uint64_t bytes);

/// Returns figures of a history.
///
/// Any-thread. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`.
dormouse_status_t dormouse_history_get_stats(struct dormouse_history_t *history,
                                             struct dormouse_history_stats_t *stats_out);

/// Returns the reason that the file of cold prompts last failed, an empty text if it never did.
///
/// `count_out` receives the number of bytes of the text, including the NUL. `buffer` receives the text
/// if `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query the length.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT` if the buffer is too small
/// (`count_out` is written).
dormouse_status_t dormouse_history_get_failure(struct dormouse_history_t *history,
                                               char *buffer,
                                               uint64_t capacity,
                                               uint64_t *count_out);

/* ---- Dialogue history ------------------------------------------------------------------------ */

/// Creates a history of dialogues, from which `dormouse_dialogue_retrieve` returns what is relevant and recent.
///
/// Any-thread. The caller owns the handle and releases it with `dormouse_dialogue_destroy`.
/// A log that ends within its last record is cut there (`dormouse_dialogue_get_torn`). Errors: `NULL`, `VERSION`,
/// `ARGUMENT`; `BUSY` for a directory in use; `IO`; `CORRUPT` for a log that is damaged before its last record, or of
/// another version or dimension, which stays as it is; `LIMIT`.
dormouse_status_t dormouse_dialogue_create(const struct dormouse_dialogue_options_t *options,
                                           struct dormouse_dialogue_t **dialogue_out);

/// Destroys a history. NULL is a no-op. Calls of other threads go on; the last one releases the directory.
///
/// Any-thread. Errors: `HANDLE`, `STALE`.
dormouse_status_t dormouse_dialogue_destroy(struct dormouse_dialogue_t *dialogue);

/// Records `count` turns, in their order: all of them or none. Beyond `entries_max` the entries of the least weight for
/// the last of these queries are forgotten.
///
/// `first_id_out` receives the id of the first; the others count up from it.
///
/// Any-thread; retrievals go on. The arrays are not kept. Errors: `NULL`, `HANDLE`, `STALE`; `ARGUMENT` for
/// an embedding of another dimension or with numbers that are not finite, a text of more than 2²⁰ bytes, more than
/// 4096 turns, or a time that is not finite; `LIMIT` after 2⁶³ turns; `IO` if the log could not be written.
dormouse_status_t dormouse_dialogue_record(struct dormouse_dialogue_t *dialogue,
                                           const struct dormouse_turn_t *turns,
                                           uint64_t count,
                                           uint64_t *first_id_out);

/// Retrieves entries: the best first, or in the order of the chain.
///
/// `count_out` receives the number of entries. `found` receives them if `capacity` is enough; otherwise it is
/// unchanged. `found` may be NULL to query the number.
///
/// Any-thread; retrievals run beside each other. The caller owns the array. Errors: `NULL`, `HANDLE`, `STALE`;
/// `ARGUMENT` for an embedding of another dimension or with numbers that are not finite, a time that is not finite,
/// too many entries or another kind; `LIMIT` if the array is too small (`count_out` is written).
dormouse_status_t dormouse_dialogue_retrieve(struct dormouse_dialogue_t *dialogue,
                                             const struct dormouse_query_t *query,
                                             struct dormouse_found_t *found,
                                             uint64_t capacity,
                                             uint64_t *count_out);

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
dormouse_status_t dormouse_dialogue_retrieve_texts(struct dormouse_dialogue_t *dialogue,
                                                   const struct dormouse_query_t *query,
                                                   struct dormouse_found_t *found,
                                                   uint64_t *lengths,
                                                   uint64_t capacity,
                                                   uint64_t *count_out,
                                                   char *texts,
                                                   uint64_t texts_capacity,
                                                   uint64_t *texts_bytes_out);

/// Returns a text of an entry, as it was recorded: bytes without a NUL.
///
/// `count_out` receives the number of bytes. `buffer` receives them if `capacity` bytes are enough; otherwise it is
/// unchanged. `buffer` may be NULL to query the number.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`; `ARGUMENT` for an entry that is not there,
/// which may have been forgotten since it was retrieved, or another text; `LIMIT` if the buffer is too small
/// (`count_out` is written).
dormouse_status_t dormouse_dialogue_get_text(struct dormouse_dialogue_t *dialogue,
                                             uint64_t id,
                                             int32_t text,
                                             char *buffer,
                                             uint64_t capacity,
                                             uint64_t *count_out);

/// Returns figures of a history.
///
/// Any-thread. Errors: `NULL`, `VERSION`, `HANDLE`, `STALE`.
dormouse_status_t dormouse_dialogue_get_stats(struct dormouse_dialogue_t *dialogue,
                                              struct dormouse_dialogue_stats_t *stats_out);

/// Returns what was cut off the end of the log when the history was created, an empty text if nothing was.
///
/// `count_out` receives the number of bytes of the text, including the NUL. `buffer` receives the text
/// if `capacity` bytes are enough; otherwise it is unchanged. `buffer` may be NULL to query the length.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `HANDLE`, `STALE`, `LIMIT` if the buffer is too small
/// (`count_out` is written).
dormouse_status_t dormouse_dialogue_get_torn(struct dormouse_dialogue_t *dialogue,
                                             char *buffer,
                                             uint64_t capacity,
                                             uint64_t *count_out);

/* ---- PyTorch entry points -------------------------------------------------------------------- */

/// Allocates `bytes` bytes on GPU `device` for use on `stream`. Returns NULL for 0 bytes or less. If
/// memory is exhausted it throws the exception that PyTorch reports as `torch.OutOfMemoryError`, or a
/// `std::runtime_error` where that class is unavailable, with an allocation report.
///
/// Any-thread. The caller owns the block and releases it with `dormouse_torch_free`. Errors: every
/// failure is thrown as a C++ exception.
void *dormouse_torch_malloc(intptr_t bytes,
                            int32_t device,
                            void *stream);

/// Returns how the loaded PyTorch's out-of-memory error is constructed: 1 by its own constructor, 2 by that
/// of its base class, 0 if PyTorch is not loaded or exports neither; `dormouse_torch_malloc` then throws
/// a `std::runtime_error`.
///
/// Any-thread. Never fails.
int dormouse_torch_get_out_of_memory_construction(void);

/// Allocates like `dormouse_torch_malloc`, for a memory pool. Returns NULL if memory is exhausted;
/// `dormouse_get_last_error` returns the report.
///
/// Any-thread. The caller owns the block and releases it with `dormouse_torch_free`. Errors: NULL is
/// returned.
void *dormouse_torch_pool_malloc(intptr_t bytes,
                                 int32_t device,
                                 void *stream);

/// Frees a block of `dormouse_torch_malloc` or `dormouse_torch_pool_malloc`. The memory is reused in
/// the order of the stream it was allocated for, after the work of recorded streams. In a forked
/// child it does nothing.
///
/// Any-thread. Does not block. Errors: not returned; the first few are written to standard error.
void dormouse_torch_free(void *ptr,
                         uintptr_t bytes,
                         int32_t device,
                         void *stream);

/// Frees a block like `dormouse_torch_free` and returns all cached pages of its GPU to the driver, like
/// `cudaFree`: PyTorch's own allocator shares the GPU with the pool.
///
/// Any-thread. Blocks until GPU work that uses these pages is complete. Errors: not returned; the first
/// few are written to standard error.
void dormouse_torch_pool_free(void *ptr,
                              uintptr_t bytes,
                              int32_t device,
                              void *stream);

/// Records that `stream` uses the block that contains `ptr` (`Tensor.record_stream`).
///
/// Any-thread. Errors: not returned; the first few are written to standard error.
void dormouse_torch_record_stream(void *ptr, void *stream);

/// Returns the cached pages of every GPU to the driver (`torch.cuda.empty_cache`).
///
/// Any-thread. Blocks until GPU work that uses these pages is complete. Never fails.
void dormouse_torch_empty_cache(void);

/// Sets the budget of GPU `device` to a fraction of its memory, above 0 and up to 1
/// (`torch.cuda.set_per_process_memory_fraction`).
///
/// Any-thread. Errors: not returned; the first few are written to standard error.
void dormouse_torch_set_memory_fraction(double fraction, int32_t device);

/// Returns the budget of GPU `device` as a fraction of its memory, at most 1
/// (`torch.cuda.get_per_process_memory_fraction`). Returns 1 for a device without a heap.
///
/// Any-thread. Never fails.
double dormouse_torch_get_memory_fraction(int32_t device);

/// Declares (1) or withdraws (0) that every CUDA graph capture of this process calls
/// `dormouse_torch_begin_pool`, `_end_pool` and `_release_pool`. If it is not declared, each request
/// queries the driver whether its stream is being captured. If it is declared, only requests between a
/// begin and its end do, and a capture without a begin receives memory that is not reserved for its
/// graph.
///
/// Any-thread; call it before the first request. Never fails.
void dormouse_torch_set_graph_hooks(int registered);

/// Declares that PyTorch's profiler runs (1) or has ended (0). While it runs, `dormouse_torch_malloc` and
/// `dormouse_torch_free` report every block to the profiler of the calling thread, which records it if it
/// was started with `profile_memory`. Returns 1 if the loaded PyTorch exports the functions for it, else
/// 0, and nothing is reported.
///
/// Any-thread. Never fails.
int dormouse_torch_set_profiled(int profiled);

/// Begins a graph capture on GPU `device`. Until its end, requests on captured streams are served
/// from the pool of this id; the pool is reserved until it is released. Successive captures can share
/// an id. A second capture on a GPU during the first is refused: neither receives memory while both
/// run. `filter` is unused.
///
/// Any-thread. Errors: not returned; the first few are written to standard error.
void dormouse_torch_begin_pool(int device,
                               unsigned long long id_first,
                               unsigned long long id_second,
                               void *filter);

/// Ends the graph capture that began with this id.
///
/// Any-thread. Errors: not returned; the first few are written to standard error.
void dormouse_torch_end_pool(int device, unsigned long long id_first, unsigned long long id_second);

/// Releases one graph captured with this id. After the last release, the pool's free memory is
/// returned when its streams have passed, and the rest when it is freed.
///
/// Any-thread. Does not block. Errors: not returned; the first few are written to standard error.
void dormouse_torch_release_pool(int device,
                                 unsigned long long id_first,
                                 unsigned long long id_second);

/// Returns the id of the pool that holds the block around `ptr`, as given to `dormouse_torch_begin_pool`.
/// Both parts are 0 for a block of no pool or of a released one, and if no live block contains `ptr`.
///
/// Any-thread. The results must not be NULL. Never fails.
void dormouse_torch_get_pool_id(const void *ptr,
                                unsigned long long *id_first_out,
                                unsigned long long *id_second_out);

/// Returns the start of the block that contains `ptr`. `bytes_out` receives its length and may be
/// NULL.
///
/// Any-thread. Errors: NULL is returned if no live block of a GPU contains `ptr`.
void *dormouse_torch_get_base(void *ptr, uintptr_t *bytes_out);

/// Returns the memory statistics and the live blocks of GPU `device`, with or without a runtime.
/// Figures that only a runtime counts are 0 without one. Requests of the GPU wait while blocks are counted.
///
/// `stats_out` receives the statistics and may be NULL. `count_out` receives the number of live
/// blocks, asleep or awake, and may be NULL if no blocks are wanted. `blocks` receives the blocks, in
/// no particular order, if `capacity` elements are enough; otherwise it is unchanged. `blocks` may be
/// NULL to query the number.
///
/// Any-thread. The caller owns the array. Errors: `NULL` if both results are NULL, `VERSION`,
/// `ARGUMENT` for a device without a heap, `LIMIT` if the array is too small (`stats_out` and
/// `count_out` are written).
dormouse_status_t dormouse_torch_get_stats(int32_t device,
                                           struct dormouse_stats_t *stats_out,
                                           struct dormouse_block_t *blocks,
                                           uint64_t capacity,
                                           uint64_t *count_out);

/* ---- Memory history -------------------------------------------------------------------------- */

/// Records the history of all GPUs: the newest `events_max` events, none if it is 0, and their history is forgotten.
/// `skipped` has bit `n` set for each `DORMOUSE_ACTION_*` n that is not recorded. `stacks` is 0 for events without a
/// Python stack, 1 for stacks of allocations, 2 for stacks of frees too; stacks take Python's global lock at each
/// event. `forgets` is 1 to forget earlier events. While it records, small blocks take a lock too.
///
/// Any-thread. Errors: `ARGUMENT`; `UNSUPPORTED` for stacks in a process without CPython 3.11 or later.
dormouse_status_t dormouse_torch_record_history(uint64_t events_max,
                                                uint32_t skipped,
                                                int stacks,
                                                int forgets);

/// Returns what is mapped on GPU `device`, by segment and address, and the events of its history, oldest first: undone
/// from the newest on, they lead from these ranges to those of the oldest event. The last event is this reading.
/// `tier` is `DORMOUSE_TIER_DEVICE`; with `_HOST` or `_NVME` it is what that tier holds of the GPU's sleeping memory.
/// Addresses of the NVMe tier are offsets in its file.
///
/// `history_out` receives the figures. `ranges` and `events` receive the elements if both capacities are enough;
/// otherwise they are unchanged. Each may be NULL: without `events` there is no event of this reading.
///
/// Any-thread; requests of the GPU wait meanwhile. The caller owns the arrays. Errors: `NULL`, `VERSION`, `ARGUMENT`
/// for a device without a heap, `LIMIT` if an array is too small (`history_out` is written).
dormouse_status_t dormouse_torch_get_history(int32_t device,
                                             int32_t tier,
                                             struct dormouse_memory_history_t *history_out,
                                             struct dormouse_range_t *ranges,
                                             uint64_t range_capacity,
                                             struct dormouse_memory_event_t *events,
                                             uint64_t event_capacity);

/// Returns the frames of all Python stacks in histories. `count_out` receives their number; `frames` receives them if
/// `capacity` elements are enough, and may be NULL to query the number. They stay, and more may come.
///
/// Any-thread. The caller owns the array. Errors: `NULL`, `LIMIT` if the array is too small (`count_out` is written).
dormouse_status_t dormouse_torch_get_frames(struct dormouse_frame_t *frames,
                                            uint64_t capacity,
                                            uint64_t *count_out);

/// Returns the name of tag `tag` of the runtime of GPU `device`, as ranges and events name it by number. `count_out`
/// receives the length with its NUL, 1 for a tag that was destroyed; `text` receives the name if `capacity` bytes are
/// enough, and may be NULL to query the length.
///
/// Any-thread. The caller owns the buffer. Errors: `NULL`, `ARGUMENT` for a device without a heap, `LIMIT`.
dormouse_status_t dormouse_torch_get_tag_name(int32_t device,
                                              uint32_t tag,
                                              char *text,
                                              uint64_t capacity,
                                              uint64_t *count_out);

/// Sets the number that events of the calling thread carry in `metadata`; 0 at first. The caller keeps what it stands
/// for.
///
/// Any-thread. Never fails.
void dormouse_torch_set_metadata(uint32_t number);

/// Records a remark on the block around `ptr`: an event with `number` in `metadata`. Nothing happens while no history is
/// recorded, or if no live block contains `ptr`.
///
/// Any-thread. Never fails.
void dormouse_torch_annotate(const void *ptr,
                             uint32_t number);

/// Has `observer` called where a request of `dormouse_torch_malloc` finds no memory, before its exception. NULL: none.
/// It may call any function of this header, and must return: no exception or `longjmp` may leave it.
///
/// Any-thread. Never fails.
void dormouse_torch_set_out_of_memory_observer(dormouse_out_of_memory_fn observer);

#ifdef __cplusplus
}  // extern "C"
#endif  // __cplusplus

#endif  /* DORMOUSE_H */
