//! The residency state machine of one region. Pure.
//!
//! Inputs are requests and completions; [`step`] returns the new region and the actions to execute.
//! The engine of `offload` executes the actions.
//!
//! ```text
//!          Sleep              Seal              Spill          Write
//!  Awake ───────► FallingAsleep ──────► Host ──────► Spilling ──────► Nvme
//!    ▲ ◄─ back out ─┘   │  └─ direct: written from the frozen pages ─► │
//!    │                  └─ no backup ─► Empty                          │ Wake
//!    │        Publish            Read                                  ▼
//!    └────────────────── Waking ◄────────────────────────────────── Loading
//!                          ▲── Wake from Host, Empty        Drop: from anywhere, to Gone
//!               Host ◄── Promoting ◄── Promote from Nvme    Release: from Awake, to Gone
//!
//!  Awake waits:  None ── AwaitAdmission ──► Admission ── Admit ──► Events ── EventsOver ──► Window ── Sleep
//!                 └───────────────────── Admit ───────────────────►└── or directly ──────────►│
//!  Nvme waits:   None ── AwaitPromotion ──► Promotion ── Promote
//!  Wake, Drop, Release and Withdraw end any wait.
//! ```
//!
//! Rules, each checked by the tests beside this file:
//! - **R1** At most one step is in flight per region, and only its completion is accepted; every
//!   request is accepted or refused without losing anything.
//! - **R2** Until a drop, some place holds all bytes of the region: mapped pages, frozen pages, a
//!   valid host copy or a valid extent (an `Empty` region has none by its owner's wish).
//! - **R3** Pages become visible only when filled (publish follows read or copy-in).
//! - **R4** A drop always reaches `Gone`, and what the region held is released exactly once.
//! - **R5** A region waits only with no step in flight, in the state that the wait is for: `Promotion`
//!   in `Nvme`, every other one in `Awake`. Only an admitted sleep (`Events`, `Window`) holds places,
//!   and leaving it either begins the sleep or releases them.

mod state;
mod step;

#[cfg(test)]
mod tests;

pub use state::{
    CopyState, PageState, PendingRequest, Region, RegionState, RegionStep, RegionWait, SleepGoal,
};
pub use step::{Action, Actions, Input, RefusedInput, StepOutcome, step};
