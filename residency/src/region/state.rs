//! What a region is, as far as residency goes.

/// Where a region stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegionState {
    /// Pages present; the owner may touch them.
    Awake,
    /// On its way out: frozen, being copied, being sealed.
    FallingAsleep,
    /// Asleep; the bytes are in pinned host memory.
    Host,
    /// Asleep; on the way from host memory to the file.
    Spilling,
    /// Asleep; the bytes are in the file.
    Nvme,
    /// Asleep with no bytes kept: wakes to zeroed pages.
    Empty,
    /// On its way in from the file.
    Loading,
    /// Asleep; on the way from the file to host memory, ahead of its wake.
    Promoting,
    /// On its way in: pages being filled from host memory, or published.
    Waking,
    /// Dropped by its owner; nothing is held.
    Gone,
}

impl RegionState {
    /// Whether the region rests here: nothing is in flight.
    #[must_use]
    pub const fn is_settled(self) -> bool {
        matches!(self, Self::Awake | Self::Host | Self::Nvme | Self::Empty | Self::Gone)
    }

    /// Whether the pages are gone and nobody may touch them.
    #[must_use]
    pub const fn is_asleep(self) -> bool {
        !matches!(self, Self::Awake | Self::FallingAsleep | Self::Gone)
    }
}

/// The one action in flight, whose completion is awaited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegionStep {
    /// Make the pages read-only.
    Freeze,
    /// Device pages to the host copy.
    CopyOut,
    /// Device pages (direct) or the host copy to the extent.
    Write,
    /// Take the pages away, unless written to meanwhile.
    Seal,
    /// Prepare pages aside, within the budget.
    Stage,
    /// The extent to the staged pages (direct) or to a host copy.
    Read,
    /// The host copy to the staged pages.
    CopyIn,
    /// Put the staged pages behind the region's address.
    Publish,
}

/// What the owner asked for while an action was in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PendingRequest {
    /// Nothing: go on.
    #[default]
    None,
    /// To be awake again.
    Wake,
    /// To be gone.
    Drop,
}

/// Where a falling region is to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SleepGoal {
    /// Nowhere: its bytes are not wanted.
    Empty,
    /// In pinned host memory.
    Host,
    /// In the file.
    Nvme,
}

/// A place that can hold a copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CopyState {
    /// Not ours.
    #[default]
    None,
    /// Ours, its content meaningless.
    Granted,
    /// Ours, holding the bytes whole.
    Valid,
}

/// The region's pages.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// Present and writable.
    Mapped,
    /// Present, watched for writes.
    Frozen,
    /// Gone.
    Away,
    /// Gone, with new ones being filled aside.
    Staged,
}

/// One region. `Copy`: a step makes a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// Where it stands.
    pub state: RegionState,
    /// The action in flight.
    pub in_flight: Option<RegionStep>,
    /// What to do once that completes.
    pub pending: PendingRequest,
    /// Where the last sleep was to end.
    pub goal: SleepGoal,
    /// Whether the device's own memory can do file I/O (no bounce through host memory).
    pub direct: bool,
    /// The pages.
    pub pages: PageState,
    /// The pinned host copy.
    pub host: CopyState,
    /// The extent.
    pub extent: CopyState,
}

impl Region {
    /// A new region: awake, nothing held.
    #[must_use]
    pub const fn awake(direct: bool) -> Self {
        Self {
            state: RegionState::Awake,
            in_flight: None,
            pending: PendingRequest::None,
            goal: SleepGoal::Empty,
            direct,
            pages: PageState::Mapped,
            host: CopyState::None,
            extent: CopyState::None,
        }
    }

    /// Whether the owner may touch the bytes and no action is pending.
    #[must_use]
    pub const fn is_awake(&self) -> bool {
        matches!(self.state, RegionState::Awake)
    }

    /// Whether nothing is in flight.
    #[must_use]
    pub const fn is_settled(&self) -> bool {
        self.in_flight.is_none()
    }
}
