//! Residency of memory across device pages, pinned host memory and one file.
//!
//! The engine moves the bytes of whole blocks between tiers, at unchanged addresses, while compute
//! continues. It is not an allocator (`alloc` hands blocks out and asks for room through
//! [`dormouse_alloc::Reclaim`]), and it knows no tokens (`schedule` plans; a [`Prefix`] sees layers).
//!
//! # Glossary
//! - *region*: a block, or several small ones, whose residency is tracked ([`RegionId`]), with a [`Role`].
//! - *tier*: a place that holds bytes ([`Tier`]); *asleep*: pages absent; *settled*: nothing in flight.
//! - *extent*: a piece of the file; *chunk*: one read or write of it, with a checksum of its own.
//! - *direct*: device memory can do file I/O itself (the host device); otherwise bytes *bounce*
//!   through pinned memory.
//! - *prefix*: one prefix across phases A, B, C; *boundary*: what suffixes read of it.
//! - *tag*: a user's name for regions; *stash*: bytes copied out, without their address.
//! - *grant*: the places of a sleep, taken before it begins; *window*: bytes that may be falling
//!   asleep at a time; *eligible*: reclaim may put the region to sleep.
//! - *plan*: where each layer of a step sleeps, when it leaves and returns ([`dormouse_residency::plan`]).
//! - *admission queue*: sleeps without a place yet; *event wait*: sleeps that wait for the caller's
//!   events; *executor*: the thread that executes a region's actions, at most one per region.
//! - *stall*: time a caller waited here for a copy.
//!
//! # The life of a region
//! ```text
//!  caller's thread          I/O thread                      caller's thread     I/O thread
//!  grant, freeze ──► write chunk by chunk, seal ──► Nvme ──► reserve, stage ──► read, publish
//!        ▲  thaw ◄── cancelled, written to, failed               │ no room: asleep, as before
//!        └──────────────────── Awake ◄───────────────────────────┴──────────────────┘
//! ```
//! Only file I/O and stray accesses ([`Engine::rescue`]) have threads of their own: [`dormouse_residency::region`] says what comes next, and the
//! thread that completed the last step executes it (`table`: one executor at a time).
//!
//! # Invariants
//! - **I1** No byte is lost: until its owner frees it, a region's bytes are whole in some place,
//!   and a failure leaves them where they were (R2 of [`dormouse_residency::region`]).
//! - **I2** Memory under a copy is not reused: a freed block returns to the allocator only after the
//!   last step that touches it (R4).
//! - **I3** `free` never blocks and takes only short locks.
//! - **I4** Waiters wait for our own I/O only, and it always ends: every retry has a named limit, and
//!   completions take no lock that is held while waiting.
//! - **I5** Only whole, verified bytes are published: every length is checked, every chunk summed.
//! - **I6** Reclaim never puts a region to sleep that its prefix has marked as needed.
//! - **I7** Device memory in use stays within the allocator's budget, waking included: room is
//!   reserved before pages are staged.
//! - **I8** Locks are taken in one order: table, then that of a tier, the figures or the allocator;
//!   device calls and I/O are made under none of them.
#![deny(unsafe_code)]

mod compute;
mod config;
mod engine;
mod error;
mod ids;
mod places;
mod prefix;
mod step_profile;
mod table;

pub use compute::{Compute, merge_lse};
pub use config::{
    Automatic, AvailableMemory, EngineConfig, ResidencyPolicy, Route, WINDOW_LAYERS_MAX,
};
pub use dormouse_device::SpanLabel as Label;
pub use dormouse_residency::LinkRates;
pub use dormouse_residency::region::RegionState;
pub use dormouse_residency::tune;
pub use dormouse_storage::{NvmeConfig, NvmeError};
pub use engine::{
    CopyStats, Engine, Level, RegionInfo, RegionUses, Rescuer, Revised, RoleStats, STASHES_MAX,
    STRAY_WAIT_MAX, SleepOutcome, StashId, Stats, StrayAccess, StrayWakes, TAG_NAME_BYTES_MAX,
    TAGS_MADE_MAX, TAGS_MAX, TagId, TagStats, TierStats, WAKE_ATTEMPTS_MAX, Waited,
    allocator_facts,
};
pub use error::OffloadError;
pub use ids::{RegionId, Role, Tier, label};
pub use prefix::{
    Edge, LAYERS_MAX, LayerReport, Named, Phase, Planned, Prefix, PrefixReport, Refused,
    RefusedReason, SLOTS_MAX, Tensor, UNUSED_BYTES_MAX,
};
