//! What there is to plan, and what a plan is.

use crate::{LinkRates, Tier, WorkError};

/// Most operations of one step.
pub const OPERATIONS_MAX: usize = 1 << 18;
/// Most groups of one step.
pub const GROUPS_MAX: usize = 1 << 16;
/// Most bytes of all groups of one step together.
pub const BYTES_MAX: u64 = 1 << 62;
/// Longest that all operations of one step may take together, in nanoseconds.
pub const COMPUTE_MAX_NS: u64 = 1 << 62;

/// One thing the trainer computes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepOperation {
    /// How long it takes where it waits for nothing, in nanoseconds.
    pub compute_ns: u64,
    /// Dormant bytes that may be in device memory while it runs: what the budget leaves beside the
    /// operation's own memory.
    pub room_bytes: u64,
}

/// Bytes that sleep and wake together: a layer's. Operations by their place in [`StepWork`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DormantGroup {
    /// How many.
    pub bytes: u64,
    /// The operation that makes them; they take room from its begin.
    pub made: usize,
    /// They may leave when this one has ended, which is not before the one that makes them.
    pub leaves: usize,
    /// They must be awake when this one begins, and from then on.
    pub needed: usize,
    /// They are gone when this one has ended.
    pub freed: usize,
}

/// One step, as far as residency goes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// In the order in which they run.
    pub operations: Vec<StepOperation>,
    /// In the order in which they are made.
    pub groups: Vec<DormantGroup>,
    /// The links.
    pub links: LinkRates,
    /// Pinned memory that may hold copies.
    pub host_bytes: u64,
    /// What the file may hold.
    pub nvme_bytes: u64,
    /// The file is written from device memory and read into it, not by way of pinned memory.
    pub is_direct: bool,
}

/// What is to happen with one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupPlan {
    /// Tier that it spends its idle time in; in `Device` it stays awake.
    pub choice: Tier,
    /// It leaves when this operation has ended, or as soon after as it can.
    pub sleep_after: usize,
    /// It does not come back into device memory before this operation begins.
    pub wake_from: usize,
}

/// What is to happen with each group of a work, in its order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResidencyPlan {
    /// One for each group.
    pub groups: Vec<GroupPlan>,
}

impl ResidencyPlan {
    /// Each group sleeps where it is told as soon as it may, and wakes from the same operation on.
    #[must_use]
    pub fn new(work: &StepWork, choices: &[Tier], wake_from: usize) -> Self {
        let place = |(group, &choice): (&DormantGroup, &Tier)| GroupPlan {
            choice,
            sleep_after: group.leaves,
            wake_from,
        };
        Self { groups: work.groups.iter().zip(choices).map(place).collect() }
    }
}

impl StepWork {
    /// Whether the figures make sense together.
    ///
    /// # Errors
    /// [`WorkError`], for the first that does not.
    pub fn validate(&self) -> Result<(), WorkError> {
        let count = self.operations.len();
        if count == 0 || count > OPERATIONS_MAX {
            let accepted = format!("1 to {OPERATIONS_MAX}");
            return Err(WorkError::new("operations", count, accepted));
        }
        if self.groups.len() > GROUPS_MAX {
            let accepted = format!("at most {GROUPS_MAX}");
            return Err(WorkError::new("groups", self.groups.len(), accepted));
        }
        for (at, group) in self.groups.iter().enumerate() {
            let in_order = group.made <= group.leaves
                && group.leaves < group.needed
                && group.needed <= group.freed
                && group.freed < count;
            if !in_order {
                let seen = format!("{group:?} (number {at} of {count} operations)");
                let accepted = "made <= leaves < needed <= freed < operations";
                return Err(WorkError::new("group", seen, accepted));
            }
        }
        if !self.groups.is_sorted_by_key(|group| group.made) {
            let accepted = "in the order in which they are made";
            return Err(WorkError::new("groups", "another order", accepted));
        }
        // Twice as much is added up at most: what is there, and what comes back beside it.
        let bytes: u128 = self.groups.iter().map(|group| u128::from(group.bytes)).sum();
        if bytes > u128::from(BYTES_MAX) {
            let accepted = format!("at most {BYTES_MAX}");
            return Err(WorkError::new("bytes of all groups", bytes, accepted));
        }
        let compute_ns: u128 = self.operations.iter().map(|op| u128::from(op.compute_ns)).sum();
        if compute_ns > u128::from(COMPUTE_MAX_NS) {
            let accepted = format!("at most {COMPUTE_MAX_NS}");
            return Err(WorkError::new("ns of all operations", compute_ns, accepted));
        }
        Ok(())
    }

    /// The time all operations take where nothing is waited for.
    #[must_use]
    pub fn compute_ns(&self) -> u64 {
        self.operations.iter().map(|op| op.compute_ns).sum()
    }
}
