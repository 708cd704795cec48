//! Plans of residency: which groups sleep, in which tier, when they leave and when they may return.
//!
//! [`StepWork`] describes one step: operations one after another, each with the room that it leaves for
//! dormant memory, and groups of dormant bytes with the operations between which they are idle.
//! [`choose`] finds a [`ResidencyPlan`] for it, [`replay`] computes the duration of a plan, and
//! [`lower_bound`] a lower bound for every plan.
//!
//! Links and memory obey the same rules in all three:
//! - An operation begins when the one before has ended, the groups it needs are awake, and the bytes in
//!   device memory (with the groups it makes) are within its room. While it waits, its room counts.
//! - A group is in device memory from the begin of the operation that makes it to the end of its
//!   copy out, and from the begin of its copy in to the end of the operation that frees it.
//! - Each direction of each link carries one group at a time, whole. The file is written from host
//!   memory and read into it: a group takes host memory from the begin of its copy out to the end
//!   of its write, and from the begin of its read (or, if it stays there, all along) to the end of
//!   its copy in. Where the file is [`StepWork::is_direct`], it is written from device memory and read
//!   into it instead.
//! - A copy that has begun is not cancelled.

mod choose;
pub(crate) mod location;
pub(crate) mod lower_bound;
mod replay;
#[cfg(test)]
mod replay_model_tests;
pub(crate) mod work;

#[cfg(test)]
mod tests;

pub use choose::choose;
pub use lower_bound::lower_bound;
pub use replay::{ReplayOutcome, replay};
pub use work::{
    BYTES_MAX, COMPUTE_MAX_NS, DormantGroup, GROUPS_MAX, GroupPlan, OPERATIONS_MAX, ResidencyPlan,
    StepOperation, StepWork,
};
