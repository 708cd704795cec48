//! Memory tiers, the links between them, and the time a copy takes.

use serde::{Deserialize, Serialize};

/// A tier that holds bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Tier {
    /// Device pages, at the region's own address.
    #[default]
    Device,
    /// Pinned host memory.
    Host,
    /// The NVMe file.
    Nvme,
}

impl Tier {
    /// All tiers, in the order of [`Tier::index`].
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Nvme];

    /// Returns its index in per-tier tables.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// One direction of a link. Each carries one copy at a time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinkDirection {
    /// Device pages to pinned host memory.
    Sleep,
    /// To the file: from host memory, or from device pages that can do file I/O.
    Write,
    /// From the file, to host memory or such device pages.
    Read,
    /// Pinned host memory to device pages.
    Wake,
}

impl LinkDirection {
    /// All directions. Copies that can begin at the same time take room in this order.
    pub const ALL: [Self; 4] = [Self::Sleep, Self::Write, Self::Read, Self::Wake];
}

/// Link bandwidths in bytes per second; 0 for a link that does not exist or was not measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LinkRates {
    /// Device pages to the file.
    pub device_to_nvme_bytes_per_s: u64,
    /// The file to device pages.
    pub nvme_to_device_bytes_per_s: u64,
    /// Device pages to pinned host memory.
    pub device_to_host_bytes_per_s: u64,
    /// Pinned host memory to device pages.
    pub host_to_device_bytes_per_s: u64,
}

impl LinkRates {
    /// Returns the bandwidth of one direction in bytes per second.
    #[must_use]
    pub const fn of(&self, direction: LinkDirection) -> u64 {
        match direction {
            LinkDirection::Sleep => self.device_to_host_bytes_per_s,
            LinkDirection::Write => self.device_to_nvme_bytes_per_s,
            LinkDirection::Read => self.nvme_to_device_bytes_per_s,
            LinkDirection::Wake => self.host_to_device_bytes_per_s,
        }
    }

    /// Returns the time of a copy of `bytes` in each direction, by [`LinkDirection`].
    #[must_use]
    pub fn copies_ns(&self, bytes: u64) -> [Option<u64>; LinkDirection::ALL.len()] {
        LinkDirection::ALL.map(|direction| copy_ns(bytes.into(), self.of(direction)))
    }
}

/// Returns the time of a copy of `bytes` in nanoseconds, rounded up; at most `u64::MAX`. `None` if the rate
/// is 0.
#[must_use]
pub fn copy_ns(bytes: u128, bytes_per_s: u64) -> Option<u64> {
    if bytes_per_s == 0 {
        return None;
    }
    let ns = bytes.saturating_mul(1_000_000_000).div_ceil(bytes_per_s.into());
    Some(u64::try_from(ns).unwrap_or(u64::MAX))
}
