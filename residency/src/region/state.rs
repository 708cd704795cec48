//! The state of a region.

/// The residency state of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegionState {
    /// Pages are present and accessible.
    Awake,
    /// Pages are frozen, copied out and sealed.
    FallingAsleep,
    /// Asleep; the bytes are in pinned host memory.
    Host,
    /// Asleep; the bytes are being written from host memory to the file.
    Spilling,
    /// Asleep; the bytes are in the file.
    Nvme,
    /// Asleep without a copy; wakes to zeroed pages.
    Empty,
    /// Waking from the file.
    Loading,
    /// Asleep; the bytes are being read from the file to host memory ahead of a wake.
    Promoting,
    /// Waking: pages are filled from host memory, or published.
    Waking,
    /// Dropped or released by its owner; nothing is held.
    Gone,
}

impl RegionState {
    /// Returns true if the pages are absent and must not be accessed.
    #[must_use]
    pub const fn is_asleep(self) -> bool {
        !matches!(self, Self::Awake | Self::FallingAsleep | Self::Gone)
    }
}

/// A step whose completion is awaited.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum RegionStep {
    /// Make the pages read-only.
    Freeze,
    /// Device pages to the host copy.
    CopyOut,
    /// Device pages (direct) or the host copy to the extent.
    Write,
    /// Remove the pages, unless they were written to since they were frozen.
    Seal,
    /// Prepare new pages aside, within the budget.
    Stage,
    /// The extent to the staged pages (direct) or to a host copy.
    Read,
    /// The host copy to the staged pages.
    CopyIn,
    /// Map the staged pages at the region's address.
    Publish,
}

/// A request that arrived while a step was in flight.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum PendingRequest {
    /// None.
    #[default]
    None,
    /// Wake the region.
    Wake,
    /// Drop the region.
    Drop,
}

/// The destination of a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum SleepGoal {
    /// The bytes are discarded.
    Empty,
    /// Pinned host memory.
    Host,
    /// The file.
    Nvme,
}

/// What a region without an action in flight waits for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum RegionWait {
    /// Nothing.
    #[default]
    None,
    /// Awake, in the admission queue: a sleep without places.
    Admission(SleepGoal),
    /// Awake: an admitted sleep that waits for the events behind a ticket.
    Events {
        /// Where the sleep ends.
        goal: SleepGoal,
        /// Identifies the events.
        ticket: u64,
    },
    /// Awake: an admitted sleep that waits for room in the in-flight window.
    Window(SleepGoal),
    /// In the file, in the promotion queue: waits for room in host memory.
    Promotion,
}

impl RegionWait {
    /// Returns true for a sleep that holds its places and has not begun.
    #[must_use]
    pub const fn is_admitted(self) -> bool {
        matches!(self, Self::Events { .. } | Self::Window(_))
    }
}

/// A copy of a region's bytes outside its pages.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum CopyState {
    /// No place is held.
    #[default]
    None,
    /// A place is held; its content is undefined.
    Granted,
    /// The place holds all bytes.
    Valid,
}

/// The pages of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PageState {
    /// Present and writable.
    Mapped,
    /// Present, watched for writes.
    Frozen,
    /// Absent.
    Away,
    /// Absent; new pages are being filled aside.
    Staged,
}

/// One region. `Copy`: a step makes a new one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Region {
    /// Residency state.
    pub state: RegionState,
    /// The step in flight.
    pub in_flight: Option<RegionStep>,
    /// The request to serve once that completes.
    pub pending: PendingRequest,
    /// What the region waits for, if no step is in flight.
    pub wait: RegionWait,
    /// Destination of the last sleep that began.
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
    /// Returns a new region: awake, nothing held.
    #[must_use]
    pub const fn awake(direct: bool) -> Self {
        Self {
            state: RegionState::Awake,
            in_flight: None,
            pending: PendingRequest::None,
            wait: RegionWait::None,
            goal: SleepGoal::Empty,
            direct,
            pages: PageState::Mapped,
            host: CopyState::None,
            extent: CopyState::None,
        }
    }

    /// Returns true if no step is in flight.
    #[must_use]
    pub const fn is_settled(&self) -> bool {
        self.in_flight.is_none()
    }
}
