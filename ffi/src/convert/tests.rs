use std::path::PathBuf;
use std::sync::Arc;

use dormouse_alloc::{Cause, OutOfMemory, Stats, Tried};
use dormouse_device::Operation;
use dormouse_offload::RegionId;
use dormouse_storage::{IoOperation, ThreadError};

use super::*;

/// Checks the status of each variant. The rows are the arms of a match: a variant without a row does not compile.
macro_rules! check {
    ($kind:ident: $($pattern:pat => $value:expr, $status:ident;)*) => {{
        let row_of = |error: &$kind| match error {
            $($pattern => stringify!($pattern),)*
        };
        $({
            let error: $kind = $value;
            assert_eq!(row_of(&error), stringify!($pattern));
            let text = error.to_string();
            let fault = Fault::from(OffloadError::from(error));
            assert_eq!(fault.status, status::$status, "{}: {text}", stringify!($pattern));
            assert_eq!(fault.message, text);
        })*
    }};
}

fn out_of_memory() -> Box<OutOfMemory> {
    Box::new(OutOfMemory {
        cause: Cause::Budget,
        asked_bytes: 1,
        align_bytes: 1,
        asked_for: None,
        activity: None,
        stats: Stats::default(),
        kept_bytes: 0,
        largest_cached_bytes: 0,
        largest_bare_bytes: 0,
        holders: Vec::new(),
        holders_left_out: 0,
        tried: Tried::default(),
        device: None,
    })
}

#[test]
fn each_error_of_the_allocator_has_its_status() {
    check! { AllocError:
        AllocError::BadConfig { .. } => AllocError::BadConfig { field: "x", value: 1, accepted: "0" },
            DORMOUSE_ERR_CONFIG;
        AllocError::BadRequest { .. } => AllocError::BadRequest { field: "x", value: 1, accepted: "0" },
            DORMOUSE_ERR_ARGUMENT;
        AllocError::OutOfMemory(_) => AllocError::OutOfMemory(out_of_memory()),
            DORMOUSE_ERR_OUT_OF_MEMORY;
        AllocError::NoAddresses { .. } => AllocError::NoAddresses { asked_bytes: 1, space_bytes: 0 },
            DORMOUSE_ERR_OUT_OF_MEMORY;
        AllocError::NoRoom { .. } => AllocError::NoRoom {
            asked_bytes: 1, mapped_bytes: 0, staged_bytes: 0, budget_bytes: 0
        }, DORMOUSE_ERR_OUT_OF_MEMORY;
        AllocError::NotReserved { .. } => AllocError::NotReserved { asked_bytes: 1, staged_bytes: 0 },
            DORMOUSE_ERR_STATE;
        AllocError::NotABlock { .. } => AllocError::NotABlock { address: 1 }, DORMOUSE_ERR_NOT_OURS;
        AllocError::NotBlockStart { .. } => AllocError::NotBlockStart { address: 1, start: 0 },
            DORMOUSE_ERR_NOT_OURS;
        AllocError::FreeDeferred { .. } => AllocError::FreeDeferred { start: 0, owner_key: 1 },
            DORMOUSE_ERR_NOT_OURS;
        AllocError::StaleBlock { .. } => AllocError::StaleBlock { index: 0, generation: 1, current: 2 },
            DORMOUSE_ERR_STATE;
        AllocError::AlreadyClaimed { .. } => AllocError::AlreadyClaimed { start: 0, owner_key: 1 },
            DORMOUSE_ERR_BUSY;
        AllocError::WrongState { .. } => AllocError::WrongState {
            operation: "x", start: 0, state: "a", needed: "b"
        }, DORMOUSE_ERR_STATE;
        AllocError::UnknownArena { .. } => AllocError::UnknownArena { index: 0, generation: 1 },
            DORMOUSE_ERR_STATE;
        AllocError::UnknownStream { .. } => AllocError::UnknownStream { key: 1 }, DORMOUSE_ERR_STATE;
        AllocError::TooManyStreams { .. } => AllocError::TooManyStreams { limit: 1 }, DORMOUSE_ERR_LIMIT;
        AllocError::TooManyArenas { .. } => AllocError::TooManyArenas { limit: 1 }, DORMOUSE_ERR_LIMIT;
        AllocError::TooManyRanges { .. } => AllocError::TooManyRanges { limit: 1 }, DORMOUSE_ERR_LIMIT;
        AllocError::NoBookkeeping { .. } => AllocError::NoBookkeeping { ranges: 1 },
            DORMOUSE_ERR_OUT_OF_MEMORY;
        AllocError::Device(_) => AllocError::Device(DeviceError::TooManySpans { limit: 1 }),
            DORMOUSE_ERR_LIMIT;
    }
}

#[test]
fn each_error_of_a_device_has_its_status() {
    let operation = Operation::Copy;
    check! { DeviceError:
        DeviceError::OutOfMemory { .. } => DeviceError::OutOfMemory {
            operation, asked_bytes: 1, mapped_bytes: 0, capacity_bytes: 0
        }, DORMOUSE_ERR_OUT_OF_MEMORY;
        DeviceError::BadRange { .. } => DeviceError::BadRange {
            operation, start: 0, bytes: 1, page_bytes: 2, space_start: 0, space_end: 2
        }, DORMOUSE_ERR_DEVICE;
        DeviceError::WrongPages { .. } => DeviceError::WrongPages {
            operation, start: 0, state: "a", needed: "b"
        }, DORMOUSE_ERR_DEVICE;
        DeviceError::BadConfig { .. } => DeviceError::BadConfig { field: "x", seen: 1, accepted: "0" },
            DORMOUSE_ERR_DEVICE;
        DeviceError::WrongState { .. } => DeviceError::WrongState {
            operation, span: 0, state: "a", needed: "b"
        }, DORMOUSE_ERR_DEVICE;
        DeviceError::TooManySpans { .. } => DeviceError::TooManySpans { limit: 1 }, DORMOUSE_ERR_LIMIT;
        DeviceError::Refused { .. } => DeviceError::Refused {
            operation, start: 0, bytes: 1, code: libc::ENOMEM, reason: String::new()
        }, DORMOUSE_ERR_DEVICE;
        DeviceError::ForeignStream { .. } => DeviceError::ForeignStream {
            raw: 1, kind: "host", accepted: "0"
        }, DORMOUSE_ERR_ARGUMENT;
        DeviceError::DeviceLost { .. } => DeviceError::DeviceLost { operation, reason: String::new() },
            DORMOUSE_ERR_DEVICE;
    }
}

#[test]
fn each_error_of_the_engine_has_its_status() {
    let region = RegionId { index: 0, generation: 1 };
    let types = KernelError::Types { source_type: DType::F64, accumulator: DType::F32 };
    check! { OffloadError:
        OffloadError::Alloc(_) => OffloadError::Alloc(Arc::new(AllocError::TooManyStreams { limit: 1 })),
            DORMOUSE_ERR_LIMIT;
        OffloadError::Device(_) => OffloadError::Device(DeviceError::TooManySpans { limit: 1 }),
            DORMOUSE_ERR_LIMIT;
        OffloadError::Pinned(_) => OffloadError::Pinned(PinnedError::TooManyRanges { limit: 1 }),
            DORMOUSE_ERR_OUT_OF_MEMORY;
        OffloadError::Nvme(_) => OffloadError::Nvme(NvmeError::Cancelled), DORMOUSE_ERR_IO;
        OffloadError::Kernel(_) => OffloadError::Kernel(types), DORMOUSE_ERR_ARGUMENT;
        OffloadError::Thread(_) => OffloadError::Thread(ThreadError {
            name: "x".into(), reason: String::new()
        }), DORMOUSE_ERR_LIMIT;
        OffloadError::Argument { .. } => OffloadError::Argument {
            what: "x", seen: "1".into(), accepted: "0".into()
        }, DORMOUSE_ERR_ARGUMENT;
        OffloadError::Order { .. } => OffloadError::Order {
            what: "x", seen: "a".into(), expected: "b".into()
        }, DORMOUSE_ERR_STATE;
        OffloadError::Stale { .. } => OffloadError::Stale { what: "tag", id: "1".into() },
            DORMOUSE_ERR_STALE;
        OffloadError::NotOurs { .. } => OffloadError::NotOurs { address: 1 }, DORMOUSE_ERR_NOT_OURS;
        OffloadError::Claimed { .. } => OffloadError::Claimed { address: 1, owner: "x".into() },
            DORMOUSE_ERR_BUSY;
        OffloadError::NoWholePage { .. } => OffloadError::NoWholePage { address: 1, page_bytes: 2 },
            DORMOUSE_ERR_STATE;
        OffloadError::NotAwake { .. } => OffloadError::NotAwake {
            region, state: RegionState::Nvme, what: "x"
        }, DORMOUSE_ERR_STATE;
        OffloadError::WakeFailed { .. } => OffloadError::WakeFailed {
            region, start: 0, bytes: 1, source: Arc::new(OffloadError::Broken)
        }, DORMOUSE_ERR_PANIC;
        OffloadError::TierFull { .. } => OffloadError::TierFull {
            tier: Tier::Host, asked_bytes: 1, used_bytes: 0, budget_bytes: 0
        }, DORMOUSE_ERR_TIER;
        OffloadError::TooMany { .. } => OffloadError::TooMany { what: "x", limit: 1 }, DORMOUSE_ERR_LIMIT;
        OffloadError::ShutDown => OffloadError::ShutDown, DORMOUSE_ERR_STATE;
        OffloadError::Broken => OffloadError::Broken, DORMOUSE_ERR_PANIC;
    }
}

#[test]
fn each_error_of_the_file_tier_has_its_status() {
    let (dir, operation) = (PathBuf::new, IoOperation::Read);
    check! { NvmeError:
        NvmeError::Setup { .. } => NvmeError::Setup {
            dir: dir(), what: "x", reason: String::new(), code: libc::EIO
        }, DORMOUSE_ERR_IO;
        NvmeError::IsMemory { .. } => NvmeError::IsMemory { dir: dir(), filesystem: "tmpfs" },
            DORMOUSE_ERR_TIER;
        NvmeError::NoRoom { .. } => NvmeError::NoRoom { dir: dir(), asked_bytes: 1, free_bytes: 0 },
            DORMOUSE_ERR_IO;
        NvmeError::Config { .. } => NvmeError::Config { what: "x", seen: 1, accepted: "0".into() },
            DORMOUSE_ERR_CONFIG;
        NvmeError::Full { .. } => NvmeError::Full { asked_bytes: 1, used_bytes: 0, budget_bytes: 0 },
            DORMOUSE_ERR_TIER;
        NvmeError::Spent { .. } => NvmeError::Spent {
            asked_bytes: 1, left_bytes: 0, budget_bytes: 0, enough_in_s: None
        }, DORMOUSE_ERR_IO;
        NvmeError::Stopped { .. } => NvmeError::Stopped { reason: String::new() }, DORMOUSE_ERR_TIER;
        NvmeError::Failed { .. } => NvmeError::Failed {
            operation, offset: 0, bytes: 0, code: libc::EIO, reason: String::new()
        }, DORMOUSE_ERR_IO;
        NvmeError::Truncated { .. } => NvmeError::Truncated {
            offset: 0, expected_bytes: 1, seen_bytes: 0
        }, DORMOUSE_ERR_CORRUPT;
        NvmeError::Short { .. } => NvmeError::Short {
            operation, offset: 0, bytes: 1, done_bytes: 0, attempts: 1
        }, DORMOUSE_ERR_IO;
        NvmeError::Corrupted { .. } => NvmeError::Corrupted { extent: 0, offset: 0, expected: 1, seen: 2 },
            DORMOUSE_ERR_CORRUPT;
        NvmeError::Cancelled => NvmeError::Cancelled, DORMOUSE_ERR_IO;
    }
}

/// As the pool's own errors, and as what the engine makes of them.
#[test]
fn each_error_of_the_pinned_pool_has_its_status() {
    let row_of = |error: &PinnedError| match error {
        PinnedError::BadConfig { .. } => (0, status::DORMOUSE_ERR_ARGUMENT),
        PinnedError::BadSize { .. } => (1, status::DORMOUSE_ERR_ARGUMENT),
        PinnedError::Full { .. } => (2, status::DORMOUSE_ERR_TIER),
        PinnedError::TooManyRanges { .. } => (3, status::DORMOUSE_ERR_OUT_OF_MEMORY),
        PinnedError::NotOut { .. } => (4, status::DORMOUSE_ERR_ARGUMENT),
        PinnedError::Thread { .. } => (5, status::DORMOUSE_ERR_LIMIT),
        PinnedError::Device(_) => (6, status::DORMOUSE_ERR_LIMIT),
    };
    for (at, error) in [
        PinnedError::BadConfig { field: "x", value: 1, accepted: "0" },
        PinnedError::BadSize { asked_bytes: 1, accepted_bytes: 0 },
        PinnedError::Full { asked_bytes: 1, used_bytes: 0, pinned_bytes: 0, cap_bytes: 0 },
        PinnedError::TooManyRanges { limit: 1 },
        PinnedError::NotOut { start: 0, bytes: 1 },
        PinnedError::Thread { name: "x", reason: String::new() },
        PinnedError::Device(DeviceError::TooManySpans { limit: 1 }),
    ]
    .into_iter()
    .enumerate()
    {
        let (row, status) = row_of(&error);
        assert_eq!(row, at, "{error}");
        assert_eq!(pinned_status(&error), status, "{error}");
        assert_eq!(offload_status(&error.into()), status);
    }
}
