//! Where one region's bytes are and what happens next: a pure state machine.
//!
//! Requests (sleep, spill, wake, drop) and completions go in; the new region and the actions to
//! carry out come out. No clocks, no locks, no I/O: `engine` carries the actions out.
//!
//! ```text
//!          Sleep              Seal              Spill          Write
//!  Awake ───────► FallingAsleep ──────► Host ──────► Spilling ──────► Nvme
//!    ▲ ◄─ back out ─┘   │  └─ direct: written from the frozen pages ─► │
//!    │                  └─ no backup ─► Empty                          │ Wake
//!    │        Publish            Read                                  ▼
//!    └────────────────── Waking ◄────────────────────────────────── Loading
//!                          ▲── Wake from Host, Empty        Drop: from anywhere, to Gone
//!               Host ◄── Promoting ◄── Promote from Nvme
//! ```
//!
//! Rules, each held by the tests beside this file:
//! - **R1** At most one awaited action is in flight per region, and exactly its completion is
//!   accepted; every request is accepted or refused without losing anything.
//! - **R2** Until a drop, some place holds the region's bytes whole: mapped pages, frozen pages, a
//!   valid host copy or a valid extent (an `Empty` region has none by its owner's wish).
//! - **R3** Pages become visible only when filled (publish follows read or copy-in).
//! - **R4** A drop always reaches `Gone`, and what the region held is released exactly once.

mod state;
mod step;

#[cfg(test)]
mod tests;

pub use state::{CopyState, PageState, PendingRequest, Region, RegionState, RegionStep, SleepGoal};
pub use step::{Action, Actions, Input, RefusedInput, StepOutcome, step};
