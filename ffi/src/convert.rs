//! Numbers of C into types of the crates and back, and errors of the crates into statuses.
//!
//! An enumeration of C is a number that is checked: as a Rust enum, an unknown value would be
//! undefined behaviour.

use std::ffi::c_void;

use dormouse_alloc::AllocError;
use dormouse_alloc::pinned::PinnedError;
use dormouse_device::DeviceError;
use dormouse_device::cuda::Unavailable;
use dormouse_history::HistoryError;
use dormouse_kernels::{DType, KernelError};
use dormouse_offload::{Edge, OffloadError, Phase, RegionState, Role, Tensor, Tier};
use dormouse_schedule::PlanError;
use dormouse_storage::NvmeError;

use crate::abi::c;
use crate::boundary::usize_of;
use crate::fault::Fault;
use crate::status::{self, dormouse_status_t};

pub(crate) fn tier(code: i32) -> Result<Tier, Fault> {
    match code {
        c::DORMOUSE_TIER_DEVICE => Ok(Tier::Device),
        c::DORMOUSE_TIER_HOST => Ok(Tier::Host),
        c::DORMOUSE_TIER_NVME => Ok(Tier::Nvme),
        _ => Err(unknown("tier", code, "0 (device), 1 (host), 2 (nvme)")),
    }
}

pub(crate) fn tier_code(tier: Tier) -> i32 {
    match tier {
        Tier::Device => c::DORMOUSE_TIER_DEVICE,
        Tier::Host => c::DORMOUSE_TIER_HOST,
        Tier::Nvme => c::DORMOUSE_TIER_NVME,
    }
}

pub(crate) fn role_code(role: Role) -> i32 {
    match role {
        Role::Boundary => c::DORMOUSE_ROLE_BOUNDARY,
        Role::BoundaryGrad => c::DORMOUSE_ROLE_BOUNDARY_GRAD,
        Role::Dormant => c::DORMOUSE_ROLE_DORMANT,
        Role::Tagged => c::DORMOUSE_ROLE_TAGGED,
    }
}

/// A region that is gone has no memory; its block, if any, is awake.
pub(crate) fn state_code(state: RegionState) -> i32 {
    match state {
        RegionState::Awake | RegionState::Gone => c::DORMOUSE_STATE_AWAKE,
        RegionState::FallingAsleep => c::DORMOUSE_STATE_FALLING_ASLEEP,
        RegionState::Host => c::DORMOUSE_STATE_HOST,
        RegionState::Spilling => c::DORMOUSE_STATE_SPILLING,
        RegionState::Nvme => c::DORMOUSE_STATE_NVME,
        RegionState::Loading => c::DORMOUSE_STATE_LOADING,
        RegionState::Waking => c::DORMOUSE_STATE_WAKING,
        RegionState::Empty => c::DORMOUSE_STATE_EMPTY,
        RegionState::Promoting => c::DORMOUSE_STATE_PROMOTING,
    }
}

pub(crate) fn phase(code: i32) -> Result<Phase, Fault> {
    match code {
        c::DORMOUSE_PHASE_A => Ok(Phase::A),
        c::DORMOUSE_PHASE_B => Ok(Phase::B),
        c::DORMOUSE_PHASE_C => Ok(Phase::C),
        _ => Err(unknown("phase", code, "1 (A), 2 (B), 3 (C)")),
    }
}

pub(crate) fn phase_code(phase: Phase) -> i32 {
    match phase {
        Phase::A => c::DORMOUSE_PHASE_A,
        Phase::B => c::DORMOUSE_PHASE_B,
        Phase::C => c::DORMOUSE_PHASE_C,
    }
}

pub(crate) fn edge(code: i32) -> Result<Edge, Fault> {
    match code {
        c::DORMOUSE_EDGE_FORWARD_BEGIN => Ok(Edge::ForwardBegin),
        c::DORMOUSE_EDGE_FORWARD_END => Ok(Edge::ForwardEnd),
        c::DORMOUSE_EDGE_BACKWARD_BEGIN => Ok(Edge::BackwardBegin),
        c::DORMOUSE_EDGE_BACKWARD_END => Ok(Edge::BackwardEnd),
        _ => Err(unknown("edge", code, "1, 2 (forward begin, end), 3, 4 (backward begin, end)")),
    }
}

/// The codes of the kernels are those of the header.
const _: () = {
    assert!(DType::F16 as i32 == c::DORMOUSE_DTYPE_F16);
    assert!(DType::Bf16 as i32 == c::DORMOUSE_DTYPE_BF16);
    assert!(DType::F32 as i32 == c::DORMOUSE_DTYPE_F32);
    assert!(DType::F64 as i32 == c::DORMOUSE_DTYPE_F64);
};

pub(crate) fn dtype(code: i32) -> Result<DType, Fault> {
    let accepted = "1 (f16), 2 (bf16), 3 (f32), 4 (f64)";
    DType::try_from(code).map_err(|_| unknown("dtype", code, accepted))
}

fn unknown(name: &str, code: i32, accepted: &str) -> Fault {
    Fault::argument(format!("{name} is {code}; accepted: {accepted}"))
}

pub(crate) fn tensor(
    pointer: *const c_void,
    bytes: u64,
    elems: u64,
    dtype: i32,
) -> Result<Tensor, Fault> {
    if pointer.is_null() {
        return Err(Fault::null("ptr"));
    }
    Ok(Tensor {
        address: pointer.addr(),
        bytes: usize_of(bytes, "bytes")?,
        elems: usize_of(elems, "elems")?,
        dtype: self::dtype(dtype)?,
    })
}

impl From<AllocError> for Fault {
    fn from(error: AllocError) -> Self {
        Self::new(alloc_status(&error), error.to_string())
    }
}

impl From<DeviceError> for Fault {
    fn from(error: DeviceError) -> Self {
        Self::new(device_status(&error), error.to_string())
    }
}

impl From<Unavailable> for Fault {
    fn from(error: Unavailable) -> Self {
        match error {
            Unavailable::Device(error) => error.into(),
            other => Self::new(status::DORMOUSE_ERR_UNSUPPORTED, other.to_string()),
        }
    }
}

impl From<OffloadError> for Fault {
    fn from(error: OffloadError) -> Self {
        Self::new(offload_status(&error), error.to_string())
    }
}

impl From<KernelError> for Fault {
    fn from(error: KernelError) -> Self {
        match error {
            KernelError::Address { what, address: 0, .. } => Self::null(what),
            other => Self::argument(other.to_string()),
        }
    }
}

impl From<PlanError> for Fault {
    fn from(error: PlanError) -> Self {
        let status = match error {
            PlanError::Order { .. } => status::DORMOUSE_ERR_ORDER,
            _ => status::DORMOUSE_ERR_ARGUMENT,
        };
        Self::new(status, error.to_string())
    }
}

impl From<HistoryError> for Fault {
    fn from(error: HistoryError) -> Self {
        let status = match &error {
            HistoryError::Range { .. }
            | HistoryError::Id { .. }
            | HistoryError::Number { .. }
            | HistoryError::Length { .. }
            | HistoryError::Reward { .. }
            | HistoryError::Epoch { .. } => status::DORMOUSE_ERR_ARGUMENT,
            HistoryError::Limit { .. } => status::DORMOUSE_ERR_LIMIT,
            HistoryError::File { .. } => status::DORMOUSE_ERR_IO,
            HistoryError::Damaged { .. } => status::DORMOUSE_ERR_CORRUPT,
            HistoryError::InUse { .. } => status::DORMOUSE_ERR_BUSY,
            HistoryError::Cold(cold) => nvme_status(cold),
        };
        Self::new(status, error.to_string())
    }
}

// Without catch-all arms: a new error has a status of its own, or does not compile.

fn alloc_status(error: &AllocError) -> dormouse_status_t {
    match error {
        AllocError::BadConfig { .. } => status::DORMOUSE_ERR_CONFIG,
        AllocError::BadRequest { .. } => status::DORMOUSE_ERR_ARGUMENT,
        AllocError::OutOfMemory(_)
        | AllocError::NoAddresses { .. }
        | AllocError::NoRoom { .. }
        | AllocError::NoBookkeeping { .. } => status::DORMOUSE_ERR_OUT_OF_MEMORY,
        AllocError::NotABlock { .. }
        | AllocError::NotBlockStart { .. }
        | AllocError::FreeDeferred { .. } => status::DORMOUSE_ERR_NOT_OURS,
        AllocError::AlreadyClaimed { .. } => status::DORMOUSE_ERR_BUSY,
        AllocError::TooManyStreams { .. }
        | AllocError::TooManyArenas { .. }
        | AllocError::TooManyRanges { .. } => status::DORMOUSE_ERR_LIMIT,
        AllocError::Device(error) => device_status(error),
        AllocError::NotReserved { .. }
        | AllocError::StaleBlock { .. }
        | AllocError::WrongState { .. }
        | AllocError::UnknownArena { .. }
        | AllocError::UnknownStream { .. } => status::DORMOUSE_ERR_STATE,
    }
}

fn device_status(error: &DeviceError) -> dormouse_status_t {
    match error {
        DeviceError::OutOfMemory { .. } => status::DORMOUSE_ERR_OUT_OF_MEMORY,
        DeviceError::TooManySpans { .. } => status::DORMOUSE_ERR_LIMIT,
        DeviceError::ForeignStream { .. } => status::DORMOUSE_ERR_ARGUMENT,
        DeviceError::BadRange { .. }
        | DeviceError::WrongPages { .. }
        | DeviceError::BadConfig { .. }
        | DeviceError::WrongState { .. }
        | DeviceError::Refused { .. }
        | DeviceError::DeviceLost { .. } => status::DORMOUSE_ERR_DEVICE,
    }
}

fn offload_status(error: &OffloadError) -> dormouse_status_t {
    match error {
        OffloadError::Alloc(error) => alloc_status(error),
        OffloadError::Device(error) => device_status(error),
        OffloadError::Nvme(error) => nvme_status(error),
        OffloadError::Pinned(error) => pinned_status(error),
        OffloadError::WakeFailed { source, .. } => offload_status(source),
        OffloadError::Stale { .. } => status::DORMOUSE_ERR_STALE,
        OffloadError::NotOurs { .. } => status::DORMOUSE_ERR_NOT_OURS,
        OffloadError::Claimed { .. } => status::DORMOUSE_ERR_BUSY,
        OffloadError::TierFull { .. } => status::DORMOUSE_ERR_TIER,
        OffloadError::TooMany { .. } | OffloadError::Thread(_) => status::DORMOUSE_ERR_LIMIT,
        OffloadError::Kernel(_) | OffloadError::Argument { .. } => status::DORMOUSE_ERR_ARGUMENT,
        OffloadError::Broken => status::DORMOUSE_ERR_PANIC,
        OffloadError::Order { .. }
        | OffloadError::NoWholePage { .. }
        | OffloadError::NotAwake { .. }
        | OffloadError::ShutDown => status::DORMOUSE_ERR_STATE,
    }
}

fn pinned_status(error: &PinnedError) -> dormouse_status_t {
    match error {
        PinnedError::Full { .. } => status::DORMOUSE_ERR_TIER,
        PinnedError::TooManyRanges { .. } => status::DORMOUSE_ERR_OUT_OF_MEMORY,
        PinnedError::Thread { .. } => status::DORMOUSE_ERR_LIMIT,
        PinnedError::Device(error) => device_status(error),
        PinnedError::BadConfig { .. }
        | PinnedError::BadSize { .. }
        | PinnedError::NotOut { .. } => status::DORMOUSE_ERR_ARGUMENT,
    }
}

fn nvme_status(error: &NvmeError) -> dormouse_status_t {
    match error {
        NvmeError::IsMemory { .. } | NvmeError::Full { .. } | NvmeError::Stopped { .. } => {
            status::DORMOUSE_ERR_TIER
        }
        NvmeError::Config { .. } => status::DORMOUSE_ERR_CONFIG,
        NvmeError::Truncated { .. } | NvmeError::Corrupted { .. } => status::DORMOUSE_ERR_CORRUPT,
        NvmeError::Setup { .. }
        | NvmeError::NoRoom { .. }
        | NvmeError::Spent { .. }
        | NvmeError::Failed { .. }
        | NvmeError::Short { .. }
        | NvmeError::Cancelled => status::DORMOUSE_ERR_IO,
    }
}

#[cfg(test)]
mod tests;
