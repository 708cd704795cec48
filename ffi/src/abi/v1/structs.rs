//! Handles, constants and structs C sees. Fields are only ever appended.

use std::ffi::{c_char, c_void};

pub use super::planning::*;

/// Value of the `version` field of every versioned struct.
pub const DORMOUSE_STRUCT_VERSION: u32 = 1;

/// Handle of a runtime: one device with its memory tiers. Any-thread.
#[derive(Debug)]
pub struct dormouse_runtime_t(());
/// Handle of a tag: a named set of memory that sleeps and wakes together. Any-thread.
#[derive(Debug)]
pub struct dormouse_tag_t(());
/// Handle of a plan: the sequence of operations of one step. Exclusive.
#[derive(Debug)]
pub struct dormouse_plan_t(());
/// Handle of a prefix: one shared prefix across phases A, B and C. Exclusive.
#[derive(Debug)]
pub struct dormouse_prefix_t(());

/// Host memory of this process, managed as a device.
pub const DORMOUSE_DEVICE_HOST: i32 = 1;
/// NVIDIA GPU, through the CUDA driver.
pub const DORMOUSE_DEVICE_CUDA: i32 = 2;

/// Device memory: the memory that kernels access.
pub const DORMOUSE_TIER_DEVICE: i32 = 0;
/// Pinned host memory. On the host device this is ordinary memory: sleep does not reduce the
/// resident set.
pub const DORMOUSE_TIER_HOST: i32 = 1;
/// One preallocated, unlinked file on a local disk.
pub const DORMOUSE_TIER_NVME: i32 = 2;
/// Length of arrays indexed by tier.
pub const DORMOUSE_TIER_COUNT: usize = 3;

/// Memory that the runtime does not track.
pub const DORMOUSE_ROLE_NONE: i32 = 0;
/// Prefix tensor that the suffixes read.
pub const DORMOUSE_ROLE_BOUNDARY: i32 = 1;
/// Gradient accumulator of a boundary tensor.
pub const DORMOUSE_ROLE_BOUNDARY_GRAD: i32 = 2;
/// Activation saved by the prefix forward for its backward. It can sleep in between.
pub const DORMOUSE_ROLE_DORMANT: i32 = 3;
/// Memory of a tag.
pub const DORMOUSE_ROLE_TAGGED: i32 = 4;
/// Length of arrays indexed by role.
pub const DORMOUSE_ROLE_COUNT: usize = 5;

/// Awake: the pages are mapped.
pub const DORMOUSE_STATE_AWAKE: i32 = 0;
/// Being copied out. Reads are allowed; a write cancels the sleep.
pub const DORMOUSE_STATE_FALLING_ASLEEP: i32 = 1;
/// Asleep in the host tier.
pub const DORMOUSE_STATE_HOST: i32 = 2;
/// Asleep, being copied from the host tier to the NVMe tier.
pub const DORMOUSE_STATE_SPILLING: i32 = 3;
/// Asleep in the NVMe tier.
pub const DORMOUSE_STATE_NVME: i32 = 4;
/// Waking, being read from the NVMe tier.
pub const DORMOUSE_STATE_LOADING: i32 = 5;
/// Waking, being copied to its addresses.
pub const DORMOUSE_STATE_WAKING: i32 = 6;
/// Asleep without backup: the data is discarded and wakes as zeros.
pub const DORMOUSE_STATE_EMPTY: i32 = 7;
/// Asleep, being copied from the NVMe tier to the host tier ahead of its wake.
pub const DORMOUSE_STATE_PROMOTING: i32 = 8;

/// From device memory to the host tier.
pub const DORMOUSE_COPY_DEVICE_TO_HOST: i32 = 0;
/// From the host tier to device memory.
pub const DORMOUSE_COPY_HOST_TO_DEVICE: i32 = 1;
/// Write to the NVMe tier.
pub const DORMOUSE_COPY_NVME_WRITE: i32 = 2;
/// Read from the NVMe tier.
pub const DORMOUSE_COPY_NVME_READ: i32 = 3;
/// Length of arrays indexed by copy direction.
pub const DORMOUSE_COPY_COUNT: usize = 4;

/// IEEE binary16.
pub const DORMOUSE_DTYPE_F16: i32 = 1;
/// bfloat16.
pub const DORMOUSE_DTYPE_BF16: i32 = 2;
/// IEEE binary32.
pub const DORMOUSE_DTYPE_F32: i32 = 3;
/// IEEE binary64.
pub const DORMOUSE_DTYPE_F64: i32 = 4;

/// Forward of the prefix.
pub const DORMOUSE_PHASE_A: i32 = 1;
/// Forward and backward of the suffixes.
pub const DORMOUSE_PHASE_B: i32 = 2;
/// Backward of the prefix.
pub const DORMOUSE_PHASE_C: i32 = 3;

/// Before a layer's forward. Memory that the thread allocates from here belongs to the layer.
pub const DORMOUSE_EDGE_FORWARD_BEGIN: i32 = 1;
/// After a layer's forward. The layer below can fall asleep.
pub const DORMOUSE_EDGE_FORWARD_END: i32 = 2;
/// Before a layer's backward. Blocks until the layer and the one below are awake.
pub const DORMOUSE_EDGE_BACKWARD_BEGIN: i32 = 3;
/// After a layer's backward.
pub const DORMOUSE_EDGE_BACKWARD_END: i32 = 4;

/// Timeline as a Perfetto trace (`.pftrace`).
pub const DORMOUSE_FORMAT_PFTRACE: i32 = 1;
/// Timeline as one self-contained HTML page.
pub const DORMOUSE_FORMAT_HTML: i32 = 2;
/// Configuration as a file of `NAME = VALUE` lines.
pub const DORMOUSE_FORMAT_CONFIG: i32 = 3;

/// Sets every peak to its current value after the statistics are read.
pub const DORMOUSE_STATS_RESET_PEAKS: u64 = 1;

/// Run the prefix of `node` forward, keeping its graph.
pub const DORMOUSE_OP_PREFIX_FORWARD: i32 = 1;
/// Run `members` in one packed row, forward and backward.
pub const DORMOUSE_OP_MICROBATCH: i32 = 2;
/// Run the prefix of `node` backward from its accumulators.
pub const DORMOUSE_OP_PREFIX_BACKWARD: i32 = 3;
/// Nothing is left.
pub const DORMOUSE_OP_DONE: i32 = 4;

/// Built-in default.
pub const DORMOUSE_FROM_BUILT_IN: i32 = 0;
/// File named by `DORMOUSE_CONFIG`.
pub const DORMOUSE_FROM_FILE: i32 = 1;
/// Environment variable.
pub const DORMOUSE_FROM_ENVIRONMENT: i32 = 2;
/// Options of the latest `dormouse_runtime_create`.
pub const DORMOUSE_FROM_OPTIONS: i32 = 3;

/// The program allocates with `dormouse_mem_alloc`.
pub const DORMOUSE_MODE_LINKED: u64 = 1;
/// The process' `malloc` is served through the preload library.
pub const DORMOUSE_MODE_PRELOAD: u64 = 2;

/// The host tier is open.
pub const DORMOUSE_TIER_FLAG_HOST: u64 = 1;
/// The NVMe tier is open.
pub const DORMOUSE_TIER_FLAG_NVME: u64 = 2;
/// The NVMe tier uses the page cache instead of direct I/O, and therefore host memory.
pub const DORMOUSE_TIER_FLAG_NVME_BUFFERED: u64 = 4;

/// Sleep discards the data; the memory wakes as zeros.
pub const DORMOUSE_TAG_WITHOUT_BACKUP: u64 = 1;

/// Log-sum-exps are base 2 instead of base e.
pub const DORMOUSE_MERGE_LOG2: u64 = 1;
/// A row without keys has lse +infinity, as the caller's kernel writes it.
pub const DORMOUSE_MERGE_PLUS_INFINITY_IS_EMPTY: u64 = 2;

/// Maximum number of bytes of a tag name or label, including the NUL.
pub const DORMOUSE_NAME_BYTES: usize = 64;
/// Number of bytes of a text field in a struct, including the NUL. Longer text is truncated.
pub const DORMOUSE_TEXT_BYTES: usize = 512;

/// Options of `dormouse_runtime_create`. 0 and NULL mean "not set": the value then comes from the
/// environment, the configuration file or the built-in default.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_options_t {
    /// Size of the struct, set by the caller.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// `DORMOUSE_DEVICE_*`; 0 is the host device.
    pub device_kind: i32,
    /// Index of the device among its kind.
    pub device_ordinal: i32,
    /// Limit on mapped device memory, in bytes (`DORMOUSE_ALLOC_BUDGET_BYTES`).
    pub alloc_budget_bytes: u64,
    /// Limit on the host tier, in bytes (`DORMOUSE_HOST_BUDGET_BYTES`).
    pub host_budget_bytes: u64,
    /// Directory of the NVMe tier's file (`DORMOUSE_NVME_DIR`). The text is copied.
    pub nvme_dir: *const c_char,
    /// Size of the NVMe tier's file, in bytes (`DORMOUSE_NVME_FILE_BYTES`).
    pub nvme_file_bytes: u64,
    /// Limit on bytes that fall asleep at a time (`DORMOUSE_OFFLOAD_INFLIGHT_BYTES`).
    pub inflight_bytes: u64,
    /// Number of I/O threads (`DORMOUSE_OFFLOAD_IO_THREADS`).
    pub io_threads: u32,
    /// Number of layers woken ahead (`DORMOUSE_OFFLOAD_WINDOW_LAYERS`).
    pub window_layers: u32,
    /// Checksum verification on wake (`DORMOUSE_OFFLOAD_CHECKSUM`): 0 not set, 1 on, -1 off.
    pub checksum: i32,
    /// Must be zero.
    pub reserved: u32,
}

/// Properties of a runtime.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_info_t {
    /// In: size of the struct. Out: number of bytes written.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// `DORMOUSE_DEVICE_*`.
    pub device_kind: i32,
    /// Index of the device among its kind.
    pub device_ordinal: i32,
    /// Size of a page, the unit of mapping, in bytes.
    pub page_bytes: u64,
    /// Modes the library is installed in: bitwise OR of `DORMOUSE_MODE_*`.
    pub modes: u64,
    /// Open tiers: bitwise OR of `DORMOUSE_TIER_FLAG_*`.
    pub tier_flags: u64,
    /// Random number of this loaded instance of the library.
    pub instance_id: u64,
    /// Limit on mapped device memory, in bytes.
    pub alloc_budget_bytes: u64,
    /// Limit on the host tier, in bytes.
    pub host_budget_bytes: u64,
    /// Size of the NVMe tier in bytes; 0 if closed.
    pub nvme_file_bytes: u64,
    /// Smallest `malloc` request served in mode `preload`, in bytes.
    pub heap_min_bytes: u64,
    /// Recent write throughput of the NVMe tier in bytes/s, initially measured at startup; 0 if
    /// unknown.
    pub nvme_write_bytes_per_s: u64,
    /// Recent read throughput of the NVMe tier in bytes/s, initially measured at startup; 0 if unknown.
    pub nvme_read_bytes_per_s: u64,
    /// Number of layers woken ahead.
    pub window_layers: u32,
    /// Zero.
    pub reserved: u32,
    /// Reasons why a mode or tier is unavailable, separated by "; "; empty if all are available.
    pub unavailable_reason: [c_char; DORMOUSE_TEXT_BYTES],
}

/// A quantity with its current and peak values.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct dormouse_gauge_t {
    /// Current value in bytes.
    pub current_bytes: u64,
    /// Highest value in bytes since creation or the latest reset of the peaks.
    pub peak_bytes: u64,
    /// Current number of pieces.
    pub count: u64,
}

/// Completed copies in one direction.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct dormouse_copies_t {
    /// Number of copies.
    pub count: u64,
    /// Number of bytes copied.
    pub bytes: u64,
}

/// Memory statistics of a runtime.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_stats_t {
    /// In: size of the struct. Out: number of bytes written.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Awake allocated memory; `count` is the number of live blocks.
    pub allocated: dormouse_gauge_t,
    /// Requested memory, before rounding to pages.
    pub requested: dormouse_gauge_t,
    /// Mapped memory: awake, cached and staged.
    pub mapped: dormouse_gauge_t,
    /// Free memory that stays mapped for reuse.
    pub cached: dormouse_gauge_t,
    /// Allocated memory that is asleep.
    pub asleep: dormouse_gauge_t,
    /// Memory in use by tier, `DORMOUSE_TIER_*`: mapped device memory, host buffers, file extents.
    pub tiers: [dormouse_gauge_t; DORMOUSE_TIER_COUNT],
    /// Tracked memory by role, `DORMOUSE_ROLE_*`, in any tier.
    pub roles: [dormouse_gauge_t; DORMOUSE_ROLE_COUNT],
    /// Copies by direction, `DORMOUSE_COPY_*`.
    pub copies: [dormouse_copies_t; DORMOUSE_COPY_COUNT],
    /// Time that callers were blocked on copies, in nanoseconds.
    pub stall_ns: u64,
    /// Number of allocations that needed memory to be reclaimed first.
    pub alloc_retries: u64,
    /// Number of allocations that failed with a report.
    pub alloc_failures: u64,
    /// Number of regions that stayed awake and stashes that were declined for lack of space.
    pub declined: u64,
    /// Total bytes written to the NVMe tier since creation.
    pub nvme_written_bytes: u64,
    /// Limit on bytes written in 24 hours (`DORMOUSE_NVME_WRITE_BUDGET_BYTES`); 0: no limit.
    pub nvme_write_budget_bytes: u64,
    /// Bytes of that limit that remain; 0 if there is no limit.
    pub nvme_write_left_bytes: u64,
    /// Awake allocated memory, and freed memory that streams can still use; `count` is the number of
    /// blocks.
    pub active: dormouse_gauge_t,
    /// Part of `cached` in segments that also contain memory in use.
    pub inactive_split: dormouse_gauge_t,
}

/// The block that contains an address.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_mem_info_t {
    /// In: size of the struct. Out: number of bytes written.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// First address of the block.
    pub base: *mut c_void,
    /// Size of the block in bytes, a multiple of the page size.
    pub bytes: u64,
    /// Requested size in bytes.
    pub requested_bytes: u64,
    /// `DORMOUSE_STATE_*`.
    pub state: i32,
    /// `DORMOUSE_TIER_*` that holds the data.
    pub tier: i32,
    /// `DORMOUSE_ROLE_*`.
    pub role: i32,
    /// Layer, or -1 if none.
    pub layer: i32,
    /// First 24 bytes of the tag name or label; empty if none.
    pub name: [c_char; DORMOUSE_NAME_BYTES],
}

/// A live block of a GPU heap.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_block_t {
    /// First address of the block.
    pub base: *mut c_void,
    /// Size in bytes, a multiple of the page size.
    pub bytes: u64,
    /// Requested size in bytes.
    pub requested_bytes: u64,
    /// Stream of the allocation.
    pub stream: *mut c_void,
    /// `DORMOUSE_STATE_*`.
    pub state: i32,
    /// Reserved; ignore the value.
    pub reserved: u32,
}

/// One parameter of the configuration.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_param_t {
    /// In: size of the struct. Out: number of bytes written.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Name of the environment variable; static text.
    pub name: *const c_char,
    /// `size`, `count`, `switch`, `choice` or `path`; static text.
    pub kind: *const c_char,
    /// Built-in default; static text.
    pub built_in: *const c_char,
    /// Accepted values; static text.
    pub accepts: *const c_char,
    /// One-line description; static text.
    pub help: *const c_char,
    /// Source of the value, `DORMOUSE_FROM_*`.
    pub provenance: i32,
    /// Zero.
    pub reserved: u32,
    /// Current value, in the syntax of a configuration file.
    pub value: [c_char; DORMOUSE_TEXT_BYTES],
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

/// Report of a prefix.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_prefix_report_t {
    /// In: size of the struct. Out: number of bytes written.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Dormant bytes: allocated between a layer's forward marks and declared by the trainer.
    pub dormant_bytes: u64,
    /// Bytes of boundary tensors.
    pub boundary_bytes: u64,
    /// Highest number of dormant bytes asleep at a time.
    pub asleep_bytes_peak: u64,
    /// Dormant bytes asleep or falling asleep when waking began, at the end of phase B.
    pub asleep_at_b_bytes: u64,
    /// Highest number of bytes asleep at a time by tier, `DORMOUSE_TIER_*`; 0 for the device.
    pub tier_bytes_peak: [u64; DORMOUSE_TIER_COUNT],
    /// Bytes written to the NVMe tier.
    pub written_bytes: u64,
    /// Bytes read from the NVMe tier.
    pub read_bytes: u64,
    /// Write throughput of the NVMe tier in bytes/s; 0 if nothing was written.
    pub write_bytes_per_s: u64,
    /// Read throughput of the NVMe tier in bytes/s; 0 if nothing was read.
    pub read_bytes_per_s: u64,
    /// Time that the trainer waited for copies, in nanoseconds: its threads and, on a GPU, its streams
    /// at the begin of a backward.
    pub stall_ns: u64,
    /// Lower bound of `stall_ns`, from measured rates and layer times.
    pub stall_bound_ns: u64,
    /// Peak of awake bytes in phases A, B and C.
    pub phase_peak_bytes: [u64; 3],
    /// Bytes that could not be woken and stay asleep.
    pub left_asleep_bytes: u64,
    /// Number of declared storages that can sleep.
    pub accepted_count: u64,
    /// Number of declared storages that stay awake.
    pub refused_count: u64,
    /// `DORMOUSE_PHASE_*` with the highest peak; 0 if unknown.
    pub peak_phase: i32,
    /// Zero.
    pub reserved: u32,
    /// Reasons why memory stayed awake, separated by "; "; empty if none did.
    pub declined: [c_char; DORMOUSE_TEXT_BYTES],
    /// 1 if the step was planned from an earlier one (`DORMOUSE_OFFLOAD_RESIDENCY=fit`). Otherwise 0,
    /// as are the fields below.
    pub is_planned: u32,
    /// Zero.
    pub reserved_planned: u32,
    /// Planned dormant bytes by tier, `DORMOUSE_TIER_*`; those of the device stay awake.
    pub planned_bytes: [u64; DORMOUSE_TIER_COUNT],
    /// Planned stall of the step, in nanoseconds.
    pub planned_stall_ns: u64,
}

/// Two partial attention outputs over the same rows and their log-sum-exps. An output can be equal to
/// an input (in place); other overlaps are not accepted.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_merge_args_t {
    /// Size of the struct, set by the caller.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// First partial output, `rows * head_dim` elements.
    pub out1: *const c_void,
    /// Log-sum-exps of `out1`, `rows` elements.
    pub lse1: *const c_void,
    /// Second partial output, `rows * head_dim` elements.
    pub out2: *const c_void,
    /// Log-sum-exps of `out2`, `rows` elements.
    pub lse2: *const c_void,
    /// Merged output, `rows * head_dim` elements.
    pub out: *mut c_void,
    /// Merged log-sum-exps, `rows` elements.
    pub lse: *mut c_void,
    /// Number of rows: batch, heads and queries flattened.
    pub rows: u64,
    /// Number of elements of one row.
    pub head_dim: u64,
    /// `DORMOUSE_DTYPE_F32` or `DORMOUSE_DTYPE_F64`.
    pub dtype: i32,
    /// Must be zero.
    pub reserved: u32,
    /// `DORMOUSE_MERGE_*` added up.
    pub flags: u64,
}
