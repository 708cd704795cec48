//! Handles, constants and structs of the header. Fields are only appended.

use std::ffi::{c_char, c_void};

/// Value of the `version` field of every versioned struct.
pub const DORMOUSE_STRUCT_VERSION: u32 = 1;

/// Handle of a runtime: one device with its memory tiers. Any-thread.
#[derive(Debug)]
pub struct dormouse_runtime_t(());
/// Handle of a tag: a named set of memory that sleeps and wakes together. Any-thread.
#[derive(Debug)]
pub struct dormouse_tag_t(());
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

/// Pools of small blocks: of up to half a page, 1 MiB by default, as of torch's own allocator.
pub const DORMOUSE_POOL_SMALL: i32 = 0;
/// Pools of large blocks.
pub const DORMOUSE_POOL_LARGE: i32 = 1;
/// Length of arrays indexed by pool.
pub const DORMOUSE_POOL_COUNT: usize = 2;

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

/// Sets every peak, except that of the interval, to its current value after the statistics are read.
pub const DORMOUSE_STATS_RESET_PEAKS: u64 = 1;
/// Begins an interval after the statistics are read. Peaks other than that of the interval stay.
pub const DORMOUSE_STATS_BEGIN_INTERVAL: u64 = 2;

/// Built-in default.
pub const DORMOUSE_FROM_BUILT_IN: i32 = 0;
/// File named by `DORMOUSE_CONFIG`.
pub const DORMOUSE_FROM_FILE: i32 = 1;
/// Environment variable.
pub const DORMOUSE_FROM_ENVIRONMENT: i32 = 2;
/// Options of the latest `dormouse_runtime_create`.
pub const DORMOUSE_FROM_OPTIONS: i32 = 3;
/// Chosen by the runtime from the facts of the machine, and revised by what it measures; `reason` says why.
pub const DORMOUSE_FROM_AUTOMATIC: i32 = 4;

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
/// The memory is a GPU's. The call is refused if it is not of a GPU's heap, as that of another allocator.
pub const DORMOUSE_MERGE_ON_GPU: u64 = 4;

/// Maximum number of bytes of a tag name or label, including the NUL.
pub const DORMOUSE_NAME_BYTES: usize = 64;
/// Number of bytes of a text field in a struct, including the NUL. Longer text is truncated.
pub const DORMOUSE_TEXT_BYTES: usize = 512;

/// Options of `dormouse_runtime_create`. 0 and NULL mean "not set": the value then comes from the
/// environment, the configuration file or the built-in default, or is automatic.
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
    /// Limit on mapped device memory, in bytes (`DORMOUSE_CPU_BUDGET_BYTES`, `DORMOUSE_CUDA_BUDGET_BYTES`).
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
    /// Reserved; ignore the value.
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

/// A number of pieces with its current, peak and total values.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct dormouse_amount_t {
    /// Current value.
    pub current: u64,
    /// Highest value since creation or the latest reset of the peaks.
    pub peak: u64,
    /// Sum of all increases since creation.
    pub added_total: u64,
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

/// What pools of one kind hold at a moment.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
pub struct dormouse_pool_t {
    /// Awake allocated memory in bytes.
    pub allocated_bytes: u64,
    /// The same, and freed memory that streams can still use, in bytes.
    pub active_bytes: u64,
    /// Requested memory in bytes, asleep or awake.
    pub requested_bytes: u64,
    /// Mapped memory in bytes; what is staged is counted as large.
    pub mapped_bytes: u64,
    /// Free mapped memory in bytes, in segments that also contain memory in use.
    pub inactive_split_bytes: u64,
    /// Number of live blocks, asleep or awake.
    pub allocations: u64,
    /// Number of live blocks, and of freed ones that streams can still use.
    pub active_blocks: u64,
    /// Number of segments.
    pub segments: u64,
    /// Number of ranges of `inactive_split_bytes`.
    pub inactive_splits: u64,
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
    /// Number of times that sleeping memory was accessed and woke (`DORMOUSE_OFFLOAD_STRAY`).
    pub stray_wakes: u64,
    /// Live blocks, asleep or awake.
    pub allocations: dormouse_amount_t,
    /// Segments: runs of addresses that belong to one pool.
    pub segments: dormouse_amount_t,
    /// Sum of all increases of `allocated`, in bytes.
    pub allocated_total_bytes: u64,
    /// Sum of all increases of `active`, in bytes.
    pub active_total_bytes: u64,
    /// Sum of all increases of `requested`, in bytes.
    pub requested_total_bytes: u64,
    /// Sum of all increases of `mapped`, in bytes.
    pub mapped_total_bytes: u64,
    /// Sum of all increases of `inactive_split`, in bytes.
    pub inactive_split_total_bytes: u64,
    /// Number of successful map calls of the device.
    pub map_calls: u64,
    /// Number of successful unmap calls of the device.
    pub unmap_calls: u64,
    /// Number of waits for a stream to free memory.
    pub stream_waits: u64,
    /// Highest value of `allocated` since creation or the latest `DORMOUSE_STATS_BEGIN_INTERVAL`, in
    /// bytes.
    pub allocated_interval_peak_bytes: u64,
    /// Parts of the current figures above by pool, `DORMOUSE_POOL_*`. Only `dormouse_torch_get_stats` counts them, block
    /// by block; else 0. Their sums are the whole figures.
    pub pools: [dormouse_pool_t; DORMOUSE_POOL_COUNT],
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

/// Kinds of events in a memory history, in the numbers of `dormouse_memory_event_t`: a block was allocated.
pub const DORMOUSE_ACTION_ALLOCATED: i32 = 0;
/// A block was freed, and no other stream uses it.
pub const DORMOUSE_ACTION_FREED: i32 = 1;
/// A block was freed. Another stream or a copy may still use it.
pub const DORMOUSE_ACTION_FREE_REQUESTED: i32 = 2;
/// The uses of a freed block are over.
pub const DORMOUSE_ACTION_FREE_COMPLETED: i32 = 3;
/// Pages were mapped.
pub const DORMOUSE_ACTION_MAPPED: i32 = 4;
/// Pages were unmapped.
pub const DORMOUSE_ACTION_UNMAPPED: i32 = 5;
/// A block fell asleep: its pages, unmapped next, hold none of it any more.
pub const DORMOUSE_ACTION_FELL_ASLEEP: i32 = 6;
/// A block awoke.
pub const DORMOUSE_ACTION_AWOKE: i32 = 7;
/// A request found no memory. `address` is the number of bytes that were left.
pub const DORMOUSE_ACTION_OUT_OF_MEMORY: i32 = 8;
/// The history was read.
pub const DORMOUSE_ACTION_READ: i32 = 9;
/// A remark on a block.
pub const DORMOUSE_ACTION_ANNOTATED: i32 = 10;

/// Use of a mapped range: none.
pub const DORMOUSE_USE_FREE: i32 = 0;
/// A block, or a part of a sleeping block that shares its page with others.
pub const DORMOUSE_USE_ALLOCATED: i32 = 1;
/// The same, freed; another stream or a copy may still use it.
pub const DORMOUSE_USE_PENDING_FREE: i32 = 2;

/// The memory history of a GPU: figures.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_memory_history_t {
    /// In: size of the struct. Out: number of bytes written.
    pub size: u32,
    /// `DORMOUSE_STRUCT_VERSION`.
    pub version: u32,
    /// Number of mapped ranges.
    pub range_count: u64,
    /// Number of events that are kept.
    pub event_count: u64,
    /// Number of events since the history was last empty.
    pub recorded_count: u64,
    /// Most events that are kept; 0 while none is recorded.
    pub events_max: u64,
}

/// A mapped range of a GPU's addresses.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_range_t {
    /// First address.
    pub address: u64,
    /// Size in bytes.
    pub bytes: u64,
    /// Requested size of the block in bytes; 0 for free memory.
    pub requested_bytes: u64,
    /// Stream of the range.
    pub stream: u64,
    /// Layer of the block's allocation in its lower half, prefix in its upper half; 0: none.
    pub scope: u64,
    /// Id of the pool for CUDA graphs that the range belongs to; both parts are 0 for none.
    pub pool_first: u64,
    /// The second part.
    pub pool_second: u64,
    /// `DORMOUSE_USE_*`.
    pub usage: i32,
    /// Number of the segment. Neighbours with the same number are one piece of memory.
    pub segment: u32,
    /// Number of the block's tag; 0: none.
    pub tag: u32,
    /// Stack of the block's allocation, for `dormouse_torch_get_frames`; 0: none.
    pub stack: u32,
    /// Number of `dormouse_torch_set_metadata` at the block's allocation.
    pub metadata: u32,
    /// 1 if small blocks are allocated there, else 0.
    pub is_small: u32,
}

/// An event of a memory history.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_memory_event_t {
    /// Unix time in nanoseconds.
    pub unix_ns: u64,
    /// Address of the block or pages.
    pub address: u64,
    /// Requested size of the block, or size of the pages, in bytes.
    pub bytes: u64,
    /// Stream of the allocation.
    pub stream: u64,
    /// Layer of the block's allocation in its lower half, prefix in its upper half; 0: none.
    pub scope: u64,
    /// Id of the pool for CUDA graphs that the block belongs to; both parts are 0 for none.
    pub pool_first: u64,
    /// The second part.
    pub pool_second: u64,
    /// `DORMOUSE_ACTION_*`.
    pub action: i32,
    /// Number of the block's tag; 0: none.
    pub tag: u32,
    /// Stack of the event, for `dormouse_torch_get_frames`; 0: none.
    pub stack: u32,
    /// Number of `dormouse_torch_set_metadata` of the event's thread.
    pub metadata: u32,
}

/// Called where a request finds no memory: the device, the requested bytes, the limit of its mapped bytes, and the bytes
/// of it that are left.
pub type dormouse_out_of_memory_fn =
    Option<extern "C" fn(device: i32, requested_bytes: u64, limit_bytes: u64, left_bytes: u64)>;

/// A frame of a Python stack.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct dormouse_frame_t {
    /// The code object, which stays alive.
    pub code: *mut c_void,
    /// Offset of the instruction in bytes, as `PyCode_Addr2Line` expects it.
    pub offset: i32,
    /// Number of the caller's frame; 0: none. Frame `n` is the `n`-th of the table, from 1.
    pub caller: u32,
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
    /// `size`, `count`, `switch`, `choice`, `set`, `path` or `filter`; static text.
    pub kind: *const c_char,
    /// Built-in default; static text.
    pub built_in: *const c_char,
    /// Accepted values; static text.
    pub accepts: *const c_char,
    /// One-line description; static text.
    pub help: *const c_char,
    /// Source of the value, `DORMOUSE_FROM_*`.
    pub provenance: i32,
    /// Reserved; ignore the value.
    pub reserved: u32,
    /// Current value, in the syntax of a configuration file.
    pub value: [c_char; DORMOUSE_TEXT_BYTES],
    /// Why a value of `DORMOUSE_FROM_AUTOMATIC` is what it is; empty for the other sources.
    pub reason: [c_char; DORMOUSE_TEXT_BYTES],
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
    /// Reserved; ignore the value.
    pub reserved: u32,
    /// Reasons why memory stayed awake, separated by "; "; empty if none did.
    pub declined: [c_char; DORMOUSE_TEXT_BYTES],
    /// 1 if the step was planned from an earlier one (`DORMOUSE_OFFLOAD_RESIDENCY=fit`). Otherwise 0,
    /// as are the fields below.
    pub is_planned: u32,
    /// Reserved; ignore the value.
    pub reserved_planned: u32,
    /// Planned dormant bytes by tier, `DORMOUSE_TIER_*`; those of the device stay awake.
    pub planned_bytes: [u64; DORMOUSE_TIER_COUNT],
    /// Planned stall of the step, in nanoseconds.
    pub planned_stall_ns: u64,
    /// Number of times that its sleeping memory was accessed and woke (`DORMOUSE_OFFLOAD_STRAY`).
    pub stray_wakes: u64,
    /// The first of these accesses: kind, address, thread, layer and prefix; empty if there was none.
    pub first_stray: [c_char; DORMOUSE_TEXT_BYTES],
}

/// Two partial attention outputs over the same rows and their log-sum-exps. Log-sum-exps are FP64 for FP64
/// outputs, otherwise FP32. On a GPU an output can be equal to an input (in place). Other overlaps are not
/// accepted, and none are on the host.
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
    /// Type of the outputs, `DORMOUSE_DTYPE_*`. Outputs of FP16 and BF16 are summed in FP32 and rounded once.
    pub dtype: i32,
    /// Must be zero.
    pub reserved: u32,
    /// Bitwise OR of `DORMOUSE_MERGE_*`.
    pub flags: u64,
}
