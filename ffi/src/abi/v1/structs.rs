//! Handles, constants and structs C sees. Fields are only ever appended.

use std::ffi::{c_char, c_void};

pub use super::planning::*;

/// The `version` every struct of this header opens with.
pub const DORMOUSE_STRUCT_VERSION: u32 = 1;

/// A runtime: one device with its tiers. Any-thread. Never dereferenced: a number that looks
/// like a pointer.
#[derive(Debug)]
pub struct dormouse_runtime_t(());
/// A tag: a name for a set of memory that sleeps and wakes together. Any-thread.
#[derive(Debug)]
pub struct dormouse_tag_t(());
/// A plan: what a trainer is told to do, step by step. Exclusive: one thread at a time.
#[derive(Debug)]
pub struct dormouse_plan_t(());
/// A node: one prefix held across phases A, B and C. Exclusive: one thread at a time.
#[derive(Debug)]
pub struct dormouse_prefix_t(());

/// The CPU memory of this process, managed as a device.
pub const DORMOUSE_DEVICE_HOST: i32 = 1;
/// An NVIDIA GPU through the CUDA driver.
pub const DORMOUSE_DEVICE_CUDA: i32 = 2;

/// Memory the trainer computes in.
pub const DORMOUSE_TIER_DEVICE: i32 = 0;
/// Pinned host memory; on the host device ordinary memory, which lowers no resident set.
pub const DORMOUSE_TIER_HOST: i32 = 1;
/// One preallocated, unlinked file.
pub const DORMOUSE_TIER_NVME: i32 = 2;
/// Length of arrays indexed by tier.
pub const DORMOUSE_TIER_COUNT: usize = 3;

/// No role: memory the runtime does not track for residency.
pub const DORMOUSE_ROLE_NONE: i32 = 0;
/// What suffixes read from the prefix.
pub const DORMOUSE_ROLE_BOUNDARY: i32 = 1;
/// The accumulator of a boundary tensor's gradient.
pub const DORMOUSE_ROLE_BOUNDARY_GRAD: i32 = 2;
/// Saved by the prefix forward for its backward; may sleep in between.
pub const DORMOUSE_ROLE_DORMANT: i32 = 3;
/// Put under a tag by its user.
pub const DORMOUSE_ROLE_TAGGED: i32 = 4;
/// Length of arrays indexed by role.
pub const DORMOUSE_ROLE_COUNT: usize = 5;

/// Pages present.
pub const DORMOUSE_STATE_AWAKE: i32 = 0;
/// Being copied out; still readable, a write cancels the sleep.
pub const DORMOUSE_STATE_FALLING_ASLEEP: i32 = 1;
/// Pages gone, bytes in the host tier.
pub const DORMOUSE_STATE_HOST: i32 = 2;
/// On the way from the host tier to the file.
pub const DORMOUSE_STATE_SPILLING: i32 = 3;
/// Pages gone, bytes in the file.
pub const DORMOUSE_STATE_NVME: i32 = 4;
/// On the way back from the file.
pub const DORMOUSE_STATE_LOADING: i32 = 5;
/// Pages on their way back to their addresses.
pub const DORMOUSE_STATE_WAKING: i32 = 6;
/// Asleep without backup: pages and bytes gone, wakes as zeros.
pub const DORMOUSE_STATE_EMPTY: i32 = 7;
/// On the way from the file to the host tier, ahead of its wake.
pub const DORMOUSE_STATE_PROMOTING: i32 = 8;

/// Device memory to the host tier.
pub const DORMOUSE_COPY_DEVICE_TO_HOST: i32 = 0;
/// Host tier to device memory.
pub const DORMOUSE_COPY_HOST_TO_DEVICE: i32 = 1;
/// Into the file.
pub const DORMOUSE_COPY_NVME_WRITE: i32 = 2;
/// Out of the file.
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

/// Prefix forward.
pub const DORMOUSE_PHASE_A: i32 = 1;
/// Suffixes.
pub const DORMOUSE_PHASE_B: i32 = 2;
/// Prefix backward.
pub const DORMOUSE_PHASE_C: i32 = 3;

/// Before a layer's forward: this thread's new memory is collected as that layer's.
pub const DORMOUSE_EDGE_FORWARD_BEGIN: i32 = 1;
/// After a layer's forward: the layer below may fall asleep.
pub const DORMOUSE_EDGE_FORWARD_END: i32 = 2;
/// Before a layer's backward: blocks until it and the layer below are awake.
pub const DORMOUSE_EDGE_BACKWARD_BEGIN: i32 = 3;
/// After a layer's backward.
pub const DORMOUSE_EDGE_BACKWARD_END: i32 = 4;

/// A Perfetto trace (`.pftrace`).
pub const DORMOUSE_FORMAT_PFTRACE: i32 = 1;
/// One self-contained HTML page with a real time axis.
pub const DORMOUSE_FORMAT_HTML: i32 = 2;

/// Run the prefix of `node` forward, keeping its graph.
pub const DORMOUSE_OP_PREFIX_FORWARD: i32 = 1;
/// Run `members` in one packed row, forward and backward.
pub const DORMOUSE_OP_MICROBATCH: i32 = 2;
/// Run the prefix of `node` backward from its accumulators.
pub const DORMOUSE_OP_PREFIX_BACKWARD: i32 = 3;
/// Nothing is left.
pub const DORMOUSE_OP_DONE: i32 = 4;

/// The value is built in.
pub const DORMOUSE_FROM_BUILT_IN: i32 = 0;
/// The value comes from the file `DORMOUSE_CONFIG` names.
pub const DORMOUSE_FROM_FILE: i32 = 1;
/// The value comes from the environment.
pub const DORMOUSE_FROM_ENVIRONMENT: i32 = 2;
/// The value comes from the options of the latest `dormouse_runtime_create`.
pub const DORMOUSE_FROM_OPTIONS: i32 = 3;

/// Memory handed out by `dormouse_mem_alloc`.
pub const DORMOUSE_DOOR_LINKED: u64 = 1;
/// The process' own malloc family, through the preload library.
pub const DORMOUSE_DOOR_PRELOAD: u64 = 2;
/// The host tier is open.
pub const DORMOUSE_DOOR_HOST: u64 = 4;
/// The file tier is open.
pub const DORMOUSE_DOOR_NVME: u64 = 8;
/// The file tier goes through the page cache, which is memory.
pub const DORMOUSE_DOOR_NVME_BUFFERED: u64 = 16;

/// Sleep drops the bytes; wake gives zero pages.
pub const DORMOUSE_TAG_WITHOUT_BACKUP: u64 = 1;

/// The model's last layer needs no output on prefix rows: only its K and V path runs in A.
pub const DORMOUSE_SPEC_LAST_LAYER_DEAD: u64 = 1;

/// Log-sum-exps are in base two instead of the natural base.
pub const DORMOUSE_MERGE_LOG2: u64 = 1;
/// A row without keys is written as plus infinity by the caller's kernel.
pub const DORMOUSE_MERGE_PLUS_INFINITY_IS_EMPTY: u64 = 2;

/// Most bytes of a tag's name or a label, with its NUL.
pub const DORMOUSE_NAME_BYTES: usize = 64;
/// Most bytes of a path, a value or a sentence held in a struct, with its NUL; longer text is cut.
pub const DORMOUSE_TEXT_BYTES: usize = 512;

/// How to make a runtime. Zero and NULL mean "not set": the environment, the file or the
/// built-in value then holds; what is set here beats them all.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_options_t {
    /// `sizeof` this struct as the caller knows it.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// `DORMOUSE_DEVICE_*`; 0 is the host device.
    pub device_kind: i32,
    /// Which device of that kind.
    pub device_ordinal: i32,
    /// Most bytes of device memory to map (`DORMOUSE_ALLOC_BUDGET_BYTES`).
    pub alloc_budget_bytes: u64,
    /// Most bytes of the host tier (`DORMOUSE_HOST_BUDGET_BYTES`).
    pub host_budget_bytes: u64,
    /// Directory of the file tier (`DORMOUSE_NVME_DIR`), NUL-terminated; copied.
    pub nvme_dir: *const c_char,
    /// Bytes of the file (`DORMOUSE_NVME_FILE_BYTES`).
    pub nvme_file_bytes: u64,
    /// Most bytes of sleeps in flight (`DORMOUSE_OFFLOAD_INFLIGHT_BYTES`).
    pub inflight_bytes: u64,
    /// Threads that do file I/O (`DORMOUSE_OFFLOAD_IO_THREADS`).
    pub io_threads: u32,
    /// Layers woken ahead of need (`DORMOUSE_OFFLOAD_WINDOW_LAYERS`).
    pub window_layers: u32,
    /// Verify a checksum of every extent (`DORMOUSE_OFFLOAD_CHECKSUM`): 0 not set, 1 on, -1 off.
    pub checksum: i32,
    /// Must be zero.
    pub reserved: u32,
}

/// What a runtime is and which doors are open.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_info_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// `DORMOUSE_DEVICE_*`.
    pub device_kind: i32,
    /// Which device of that kind.
    pub device_ordinal: i32,
    /// Unit of physical mapping, in bytes.
    pub page_bytes: u64,
    /// Open doors, `DORMOUSE_DOOR_*` added up.
    pub doors: u64,
    /// Random number of this loaded library: the same everywhere in one process.
    pub instance_id: u64,
    /// Most bytes of device memory to map.
    pub alloc_budget_bytes: u64,
    /// Most bytes of the host tier.
    pub host_budget_bytes: u64,
    /// Bytes of the file tier; 0 while closed.
    pub nvme_file_bytes: u64,
    /// Smallest request the preload door serves, in bytes.
    pub heap_min_bytes: u64,
    /// Measured at the start, then as seen of late, in bytes per second; 0 where neither.
    pub nvme_write_bytes_per_s: u64,
    /// Measured at the start, then as seen of late, in bytes per second; 0 where neither.
    pub nvme_read_bytes_per_s: u64,
    /// Layers woken ahead of need.
    pub window_layers: u32,
    /// Zero.
    pub reserved: u32,
    /// Why doors are closed, one sentence each; empty when none is.
    pub closed_because: [c_char; DORMOUSE_TEXT_BYTES],
}

/// A quantity with its highest value since the runtime was made or `_reset_peaks`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct dormouse_gauge_t {
    /// Bytes now.
    pub current_bytes: u64,
    /// Most bytes since the last reset.
    pub peak_bytes: u64,
    /// Pieces now.
    pub count: u64,
}

/// Copies of one direction.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct dormouse_copies_t {
    /// Copies finished.
    pub count: u64,
    /// Bytes they moved.
    pub bytes: u64,
}

/// What a runtime holds.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_stats_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Awake bytes handed out to callers; `count` is live blocks.
    pub allocated: dormouse_gauge_t,
    /// Bytes callers asked for.
    pub requested: dormouse_gauge_t,
    /// Bytes with pages behind them: awake, cached and staged.
    pub mapped: dormouse_gauge_t,
    /// Free bytes kept mapped for reuse.
    pub cached: dormouse_gauge_t,
    /// Bytes handed out whose pages are gone.
    pub asleep: dormouse_gauge_t,
    /// Bytes in each tier, by `DORMOUSE_TIER_*`: mapped device memory, host buffers, file extents.
    pub tiers: [dormouse_gauge_t; DORMOUSE_TIER_COUNT],
    /// Tracked bytes of each role, by `DORMOUSE_ROLE_*`, wherever they are.
    pub roles: [dormouse_gauge_t; DORMOUSE_ROLE_COUNT],
    /// Copies of each direction, by `DORMOUSE_COPY_*`.
    pub copies: [dormouse_copies_t; DORMOUSE_COPY_COUNT],
    /// Nanoseconds callers were blocked on copies.
    pub stall_ns: u64,
    /// Allocations that went down the out-of-memory ladder.
    pub alloc_retries: u64,
    /// Allocations that ended in a report.
    pub alloc_failures: u64,
    /// Regions that had no place to sleep and stayed awake, and stashes that had none.
    pub declined: u64,
    /// Bytes written to the file since the runtime was made, whatever became of them.
    pub nvme_written_bytes: u64,
    /// Bytes that may be written in 24 hours (`DORMOUSE_NVME_WRITE_BUDGET_BYTES`); 0: no limit.
    pub nvme_write_budget_bytes: u64,
    /// Bytes of that which may be written now; 0 too where there is no limit.
    pub nvme_write_left_bytes: u64,
    /// Awake bytes handed out, and freed ones that other streams may still use; `count` is blocks.
    pub active: dormouse_gauge_t,
    /// The part of `cached` that shares a run of addresses with something in use.
    pub inactive_split: dormouse_gauge_t,
}

/// What lies at an address.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_mem_info_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Start of the block.
    pub base: *mut c_void,
    /// Bytes of the block, whole pages.
    pub bytes: u64,
    /// Bytes its owner asked for.
    pub requested_bytes: u64,
    /// `DORMOUSE_STATE_*`.
    pub state: i32,
    /// `DORMOUSE_TIER_*`: where the bytes are.
    pub tier: i32,
    /// `DORMOUSE_ROLE_*`.
    pub role: i32,
    /// Layer, or -1.
    pub layer: i32,
    /// Tag or label, its first 24 bytes; empty where there is none.
    pub name: [c_char; DORMOUSE_NAME_BYTES],
}

/// A block of a GPU's heap in somebody's hands.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_block_t {
    /// First address.
    pub base: *mut c_void,
    /// Bytes, whole pages.
    pub bytes: u64,
    /// Bytes its owner asked for.
    pub requested_bytes: u64,
    /// The stream it was asked for on.
    pub stream: *mut c_void,
    /// `DORMOUSE_STATE_*`.
    pub state: i32,
    /// Must be ignored.
    pub reserved: u32,
}

/// One parameter of the environment table.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_param_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Static text.
    pub name: *const c_char,
    /// Static text: `size`, `count`, `switch` or `path`.
    pub kind: *const c_char,
    /// Static text: the built-in value.
    pub built_in: *const c_char,
    /// Static text: what is accepted.
    pub accepts: *const c_char,
    /// Static text: what it does.
    pub help: *const c_char,
    /// `DORMOUSE_FROM_*`: who set the value.
    pub provenance: i32,
    /// Zero.
    pub reserved: u32,
    /// The value in effect, as a file would say it.
    pub value: [c_char; DORMOUSE_TEXT_BYTES],
}

/// A model's shape, as far as costs depend on it.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_model_t {
    /// `sizeof` this struct as the caller knows it.
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
    /// `sizeof` this struct as the caller knows it.
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

/// A rollout group and how to run it. Everything is copied by `dormouse_plan_create`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_spec_t {
    /// `sizeof` this struct as the caller knows it.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// `prompt_length` token ids, or NULL when only lengths are known.
    pub prompt_ids: *const i64,
    /// Tokens of the shared prompt, at least 2.
    pub prompt_length: u64,
    /// All response token ids one after another, or NULL when only lengths are known.
    pub response_ids: *const i64,
    /// `response_count + 1` ascending offsets: response i is `[offsets[i], offsets[i + 1])`.
    pub response_offsets: *const u64,
    /// `response_count` finite weights, or NULL for 1 each.
    pub weights: *const f64,
    /// Responses of the group, at least 1.
    pub response_count: u32,
    /// Token ids are below this.
    pub vocab: u32,
    /// Most suffix tokens of one microbatch, at least 1.
    pub microbatch_tokens: u32,
    /// Layers woken ahead of need in C; 0 takes the schedule's own, and 1 is 2.
    pub wake_window_layers: u32,
    /// `DORMOUSE_SPEC_*` added up.
    pub flags: u64,
    /// The model.
    pub model: *const dormouse_model_t,
    /// The machine, or NULL when unknown.
    pub machine: *const dormouse_machine_t,
}

/// One suffix in a microbatch.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_member_t {
    /// Which response; of several sequences that share all the leaf's rows, one.
    pub sequence: u32,
    /// A batch's leaf; 0 for a flat group's.
    pub node: u32,
    /// First row in the packed microbatch.
    pub row_begin: u64,
    /// One past the last row in the packed microbatch.
    pub row_end: u64,
    /// Position of the first row, as the dense run numbers it.
    pub first_position: u64,
    /// First input token within `[P[-1]] + S_i[:-1]`, a leaf's rows.
    pub token_begin: u64,
    /// One past the last input token within `[P[-1]] + S_i[:-1]`.
    pub token_end: u64,
    /// Weight of this response in the loss.
    pub weight: f64,
}

/// One thing a trainer is told to do.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_op_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Names it to `dormouse_plan_complete`.
    pub id: u64,
    /// `DORMOUSE_OP_*`.
    pub kind: i32,
    /// Prefix it works on.
    pub node: u32,
    /// Prefix forward: first prompt token run.
    pub token_begin: u64,
    /// Prefix forward: one past the last prompt token run.
    pub token_end: u64,
    /// Microbatch: `member_count` members, borrowed until the next call with this plan.
    pub members: *const dormouse_member_t,
    /// Microbatch: how many.
    pub member_count: u32,
    /// Microbatch: 1 when it is the node's last, else 0.
    pub last: u32,
    /// Prefix backward: layers to wake ahead.
    pub wake_window_layers: u32,
    /// Zero.
    pub reserved: u32,
    /// `DORMOUSE_OP_WITHOUT_GRAPH` or 0.
    pub flags: u64,
    /// Microbatch and node backward: `score_count` runs of rows that carry loss, borrowed until the next
    /// call with this plan. NULL where there is none.
    pub scores: *const dormouse_score_t,
    /// How many.
    pub score_count: u64,
    /// Prefix whose K and V it reads, with those of all that node's ancestors, or
    /// `DORMOUSE_NODE_NONE`.
    pub reads: u32,
    /// `DORMOUSE_RESIDENCY_*` of the node that runs.
    pub residency: i32,
    /// Sleeping node whose last layers have left when this op ends, or `DORMOUSE_NODE_NONE`.
    pub asleep: u32,
    /// Sleeping node whose first layers come back from the beginning of this op, or
    /// `DORMOUSE_NODE_NONE`. One made from the plan begins by itself (`dormouse_plan_next`).
    pub waking: u32,
    /// Bytes of device memory at its most, of what the plan makes.
    pub device_bytes: u64,
    /// Bytes asleep in host memory at its most.
    pub host_bytes: u64,
}

/// What a plan costs and saves.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_prediction_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
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

/// What a node did.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_prefix_report_t {
    /// In: `sizeof` as the caller knows it. Out: bytes filled.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Bytes found dormant: collected in a layer's window and named by the trainer.
    pub dormant_bytes: u64,
    /// Boundary bytes held.
    pub boundary_bytes: u64,
    /// Most dormant bytes asleep at one time.
    pub asleep_bytes_peak: u64,
    /// Dormant bytes asleep, or on their way, when waking began: at the end of phase B.
    pub asleep_at_b_bytes: u64,
    /// Most bytes asleep in each tier at one time, by `DORMOUSE_TIER_*`; 0 for the device.
    pub tier_bytes_peak: [u64; DORMOUSE_TIER_COUNT],
    /// Bytes written to the file over the node's life.
    pub written_bytes: u64,
    /// Bytes read from the file over the node's life.
    pub read_bytes: u64,
    /// Rate of writing to the file, bytes per second; 0 when nothing was written.
    pub write_bytes_per_s: u64,
    /// Rate of reading from the file, bytes per second; 0 when nothing was read.
    pub read_bytes_per_s: u64,
    /// Nanoseconds the trainer's work waited for copies: its threads, and on a GPU its streams where
    /// backwards begin.
    pub stall_ns: u64,
    /// The least that could be, from measured rates and measured layer times.
    pub stall_bound_ns: u64,
    /// Highest awake bytes in phases A, B and C.
    pub phase_peak_bytes: [u64; 3],
    /// Bytes that could not be woken and sleep on at their addresses.
    pub left_asleep_bytes: u64,
    /// Named storages that were accepted.
    pub accepted_count: u64,
    /// Named storages that stay awake.
    pub refused_count: u64,
    /// `DORMOUSE_PHASE_*` that sets the peak; 0 before there is one.
    pub peak_phase: i32,
    /// Zero.
    pub reserved: u32,
    /// Why something stayed awake, reasons separated by "; "; empty when nothing did.
    pub declined: [c_char; DORMOUSE_TEXT_BYTES],
    /// 1 where the step was planned from the one before (`DORMOUSE_OFFLOAD_RESIDENCY=fit`), else 0,
    /// as the figures below.
    pub is_planned: u32,
    /// Zero.
    pub reserved_planned: u32,
    /// Dormant bytes the plan leaves in each tier, by `DORMOUSE_TIER_*`; those of the device stay
    /// awake.
    pub planned_bytes: [u64; DORMOUSE_TIER_COUNT],
    /// Nanoseconds the plan expects the step to wait for copies.
    pub planned_stall_ns: u64,
}

/// Two partial attention outputs over the same rows and their log-sum-exps. Outputs may be the
/// inputs in place; other overlaps are not allowed.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_merge_args_t {
    /// `sizeof` this struct as the caller knows it.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// First output, `rows * head_dim` elements.
    pub out1: *const c_void,
    /// Its log-sum-exps, `rows` elements.
    pub lse1: *const c_void,
    /// Second output, `rows * head_dim` elements.
    pub out2: *const c_void,
    /// Its log-sum-exps, `rows` elements.
    pub lse2: *const c_void,
    /// Merged output, `rows * head_dim` elements.
    pub out: *mut c_void,
    /// Merged log-sum-exps, `rows` elements.
    pub lse: *mut c_void,
    /// Rows: batch, heads and queries flattened.
    pub rows: u64,
    /// Elements of one row.
    pub head_dim: u64,
    /// `DORMOUSE_DTYPE_F32` or `DORMOUSE_DTYPE_F64`.
    pub dtype: i32,
    /// Must be zero.
    pub reserved: u32,
    /// `DORMOUSE_MERGE_*` added up.
    pub flags: u64,
}
