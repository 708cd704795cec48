//! The input of a plan, and the plan.

use crate::{LinkRates, Tier, WorkError};

/// Limit on operations per step.
pub const OPERATIONS_MAX: usize = 1 << 18;
/// Limit on groups per step.
pub const GROUPS_MAX: usize = 1 << 16;
/// Limit on the total bytes of the groups of a step.
pub const BYTES_MAX: u64 = 1 << 62;
/// Limit on the total compute time of a step, in nanoseconds.
pub const COMPUTE_MAX_NS: u64 = 1 << 62;

/// One operation of the trainer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepOperation {
    /// Duration without waits, in nanoseconds.
    pub compute_ns: u64,
    /// Dormant bytes that may be in device memory while it runs: the budget minus the operation's own memory.
    pub room_bytes: u64,
}

/// Bytes that sleep and wake together, those of a layer. Operations are indices into [`StepWork`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DormantGroup {
    /// Number of bytes.
    pub bytes: u64,
    /// The operation that makes them; they take room from its begin.
    pub made: usize,
    /// The operation at whose end they may leave, not before `made`.
    pub leaves: usize,
    /// The operation from whose begin they must be awake.
    pub needed: usize,
    /// The operation at whose end they are freed.
    pub freed: usize,
}

/// The data of one step that residency depends on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StepWork {
    /// In the order in which they run.
    pub operations: Vec<StepOperation>,
    /// In the order in which they are made.
    pub groups: Vec<DormantGroup>,
    /// The links.
    pub links: LinkRates,
    /// Limit on copies in pinned memory, in bytes.
    pub host_bytes: u64,
    /// Limit on copies in the file, in bytes.
    pub nvme_bytes: u64,
    /// Whether the file is written from device memory and read into it, not through pinned memory.
    pub is_direct: bool,
}

/// The plan of one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct GroupPlan {
    /// Tier that it spends its idle time in; in `Device` it stays awake.
    pub choice: Tier,
    /// The operation at whose end it leaves, or as soon afterwards as possible.
    pub sleep_after: usize,
    /// The operation before whose begin it does not return to device memory.
    pub wake_from: usize,
}

/// The plan of each group of a work, in its order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ResidencyPlan {
    /// One for each group.
    pub groups: Vec<GroupPlan>,
}

impl ResidencyPlan {
    /// Creates a plan in which each group leaves as soon as it may and all wake from the same operation on.
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
    /// Checks that the figures are consistent.
    ///
    /// # Errors
    /// [`WorkError`] for the first one that is not.
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
        // Sums reach twice this at most: the bytes present, and those that come back beside them.
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

    /// Returns the time of all operations without waits.
    #[must_use]
    pub fn compute_ns(&self) -> u64 {
        self.operations.iter().map(|op| op.compute_ns).sum()
    }
}
