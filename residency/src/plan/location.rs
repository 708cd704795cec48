//! The location of a dormant group, its transitions, and the memory it takes.

use crate::LinkDirection;

/// The location of one group.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum GroupLocation {
    #[default]
    Unmade,
    /// In device memory, before any copy.
    Awake,
    /// From device memory to host memory.
    Leaving,
    /// From device memory to the file.
    LeavingDirect,
    Host,
    /// From host memory to the file.
    Writing,
    File,
    /// From the file to host memory.
    Reading,
    /// In host memory, after the file.
    Read,
    /// From host memory to device memory.
    Waking,
    /// From the file to device memory.
    WakingDirect,
    /// In device memory, after a wake.
    Back,
    #[cfg(any(test, feature = "optimum"))]
    Gone,
}

impl GroupLocation {
    /// Returns true if it takes device memory.
    pub(crate) const fn is_on_device(self) -> bool {
        matches!(self, Self::Awake | Self::Back) || self.is_leaving() || self.is_coming()
    }

    pub(crate) const fn is_leaving(self) -> bool {
        matches!(self, Self::Leaving | Self::LeavingDirect)
    }

    pub(crate) const fn is_coming(self) -> bool {
        matches!(self, Self::Waking | Self::WakingDirect)
    }

    /// Returns true if it is in host memory without a copy in progress.
    pub(crate) const fn rests_in_host(self) -> bool {
        matches!(self, Self::Host | Self::Read)
    }

    /// Returns true if it is asleep or falling asleep.
    pub(crate) const fn is_out(self) -> bool {
        matches!(self, Self::Writing | Self::File | Self::Reading)
            || self.rests_in_host()
            || self.is_leaving()
    }

    pub(crate) const fn takes_host(self) -> bool {
        matches!(self, Self::Leaving | Self::Writing | Self::Reading | Self::Waking)
            || self.rests_in_host()
    }

    pub(crate) const fn takes_file(self) -> bool {
        let in_flight = matches!(self, Self::Writing | Self::Reading);
        in_flight || matches!(self, Self::LeavingDirect | Self::File | Self::WakingDirect)
    }

    /// Returns the location during a copy in `direction`; `None` if none can begin.
    pub(crate) const fn begun(self, direction: LinkDirection, is_direct: bool) -> Option<Self> {
        match (direction, self) {
            (LinkDirection::Sleep, Self::Awake) => Some(Self::Leaving),
            (LinkDirection::Write, Self::Awake) if is_direct => Some(Self::LeavingDirect),
            (LinkDirection::Write, Self::Host) if !is_direct => Some(Self::Writing),
            (LinkDirection::Read, Self::File) if is_direct => Some(Self::WakingDirect),
            (LinkDirection::Read, Self::File) => Some(Self::Reading),
            (LinkDirection::Wake, Self::Host | Self::Read) => Some(Self::Waking),
            _ => None,
        }
    }

    /// Returns the location after the copy in progress.
    pub(crate) const fn arrived(self) -> Self {
        match self {
            Self::Leaving => Self::Host,
            Self::LeavingDirect | Self::Writing => Self::File,
            Self::Reading => Self::Read,
            Self::Waking | Self::WakingDirect => Self::Back,
            other => other,
        }
    }
}

/// Bytes taken of each tier.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Occupancy {
    pub(crate) device_bytes: u64,
    pub(crate) host_bytes: u64,
    pub(crate) file_bytes: u64,
}

impl Occupancy {
    /// Moves a group of `bytes` from one location to another.
    pub(crate) fn moves(&mut self, from: GroupLocation, to: GroupLocation, bytes: u64) {
        let moved = |taken: &mut u64, takes: fn(GroupLocation) -> bool| {
            *taken += if takes(to) { bytes } else { 0 };
            *taken -= if takes(from) { bytes } else { 0 };
        };
        moved(&mut self.device_bytes, GroupLocation::is_on_device);
        moved(&mut self.host_bytes, GroupLocation::takes_host);
        moved(&mut self.file_bytes, GroupLocation::takes_file);
    }
}
