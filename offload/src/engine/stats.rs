//! Statistics of an engine.

use dormouse_device::Device;
use dormouse_residency::LinkRates;

use super::counters::Copies;
use super::{Engine, Level, StrayWakes};
use crate::error::OffloadError;
use crate::ids::Tier;
use dormouse_storage::IoEngine;
use dormouse_storage::sync::lock;

/// Statistics of one tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Regions in this tier. For `Device`: awake regions.
    pub regions: Level,
    /// Bytes in use, including stashes and bounce buffers.
    pub used_bytes: u64,
    /// Peak of `used_bytes` since the last reset.
    pub peak_bytes: u64,
    /// Limit in bytes; 0 if the tier is disabled.
    pub budget_bytes: u64,
}

/// Statistics of one role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoleStats {
    /// All regions of the role.
    pub all: Level,
    /// Regions asleep.
    pub asleep: Level,
}

/// Transfers in one direction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyStats {
    /// Completed transfers.
    pub copies: u64,
    /// Bytes of completed transfers.
    pub bytes: u64,
    /// Nanoseconds in which at least one transfer was in progress, including failed ones.
    pub busy_ns: u64,
}

/// Statistics of an engine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// Tiers, by [`Tier::index`].
    pub tiers: [TierStats; 3],
    /// Roles, by [`crate::Role::index`].
    pub roles: [RoleStats; 4],
    /// Copies from device pages to pinned memory.
    pub device_to_host: CopyStats,
    /// Copies from pinned memory to device pages.
    pub host_to_device: CopyStats,
    /// Writes to the file.
    pub nvme_write: CopyStats,
    /// Reads from the file.
    pub nvme_read: CopyStats,
    /// Bytes falling asleep.
    pub inflight_bytes: u64,
    /// Bytes queued for the in-flight window.
    pub queued_bytes: u64,
    /// Completed sleeps.
    pub sleeps: u64,
    /// Completed wakes.
    pub wakes: u64,
    /// Sleeps cancelled by a wake, a free or a write.
    pub sleeps_backed_out: u64,
    /// Sleeps cancelled by a write.
    pub written_meanwhile: u64,
    /// Regions and stashes declined because no tier had room.
    pub declined: u64,
    /// Sleeps that failed; the data stayed awake.
    pub sleep_failures: u64,
    /// Wakes that failed; the data stayed asleep.
    pub wake_failures: u64,
    /// Chunks whose checksum matched only on the second read.
    pub reread_chunks: u64,
    /// Device errors without a caller to report them to.
    pub device_faults: u64,
    /// Reclaims for an allocation or a wake.
    pub reclaims: u64,
    /// Time callers waited for copies, in nanoseconds.
    pub stall_ns: u64,
    /// Waits that blocked.
    pub waits: u64,
    /// Wakes by stray accesses, of all regions.
    pub stray: StrayWakes,
    /// Limit of the NVMe tier that is set, or what its file may grow to. The budget of the tier is what the disk gives of it.
    pub nvme_limit_bytes: u64,
    /// Bytes written to the file since its creation, including failed transfers.
    pub nvme_written_bytes: u64,
    /// Write budget in bytes per 24 hours; 0 if unlimited.
    pub nvme_write_budget_bytes: u64,
    /// Bytes left of the write budget; 0 if unlimited.
    pub nvme_write_left_bytes: u64,
    /// Reason that the NVMe tier stopped accepting data.
    pub nvme_stopped: Option<String>,
    /// Whether file I/O is buffered: its bytes then use page cache memory.
    pub nvme_buffered: bool,
    /// I/O engine in use, `Uring` or `Threads`, if the tier is enabled.
    pub nvme_io_engine: Option<IoEngine>,
    /// Reason for a fallback of the I/O engine.
    pub nvme_io_note: Option<String>,
}

impl<D: Device> Engine<D> {
    /// Returns statistics. Each value is exact; the values are not read at one instant.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let counters = &self.counters;
        let mut stats = lock(&self.counts).clone();
        stats.device_to_host = counters.device_to_host.stats();
        stats.host_to_device = counters.host_to_device.stats();
        stats.nvme_write = counters.nvme_write.stats();
        stats.nvme_read = counters.nvme_read.stats();
        {
            let inner = self.table.lock();
            let shared = &inner.shared;
            for (tier, level) in stats.tiers.iter_mut().zip(shared.tiers) {
                tier.regions = level;
            }
            stats.roles = shared.roles;
            stats.inflight_bytes = shared.inflight_bytes;
            stats.queued_bytes = shared.queued_bytes;
        }
        self.fill_tiers(&mut stats);
        stats
    }

    fn fill_tiers(&self, stats: &mut Stats) {
        let alloc = self.allocator.stats();
        let device = &mut stats.tiers[Tier::Device.index()];
        device.used_bytes = alloc.allocated_bytes.current;
        device.peak_bytes = alloc.allocated_bytes.peak;
        device.budget_bytes = alloc.budget_bytes;
        let usage = self.host.usage();
        let host = &mut stats.tiers[Tier::Host.index()];
        host.used_bytes = usage.used_bytes;
        host.peak_bytes = usage.peak_used_bytes;
        host.budget_bytes = usage.cap_bytes;
        if let Some(nvme) = &self.nvme {
            let usage = nvme.usage();
            let tier = &mut stats.tiers[Tier::Nvme.index()];
            tier.used_bytes = usage.used_bytes;
            tier.peak_bytes = usage.peak_bytes;
            tier.budget_bytes = usage.budget_bytes;
            stats.nvme_limit_bytes = usage.limit_bytes;
            stats.nvme_written_bytes = usage.written_bytes;
            stats.nvme_write_budget_bytes = usage.write_budget_bytes;
            stats.nvme_write_left_bytes = usage.write_left_bytes;
            stats.nvme_stopped = usage.stopped;
            stats.nvme_buffered = usage.buffered;
            stats.nvme_io_engine = Some(usage.io_engine);
            stats.nvme_io_note = usage.io_note;
        }
    }

    /// Resets every peak to its current value, including the allocator's.
    pub fn reset_peaks(&self) {
        {
            let mut inner = self.table.lock();
            let shared = &mut inner.shared;
            let roles = shared.roles.iter_mut().flat_map(|role| [&mut role.all, &mut role.asleep]);
            shared.tiers.iter_mut().chain(roles).for_each(Level::reset_peak);
        }
        self.host.reset_peaks();
        if let Some(nvme) = &self.nvme {
            nvme.reset_peak();
        }
        self.forget_largest();
        self.allocator.reset_peaks();
    }

    /// Sets the limit of a tier. Existing data stays; 0 disables `Host` or `Nvme` for new data.
    ///
    /// # Errors
    /// `Argument` for 0 bytes of `Device`, or for `Nvme` where no file was configured.
    pub fn set_tier_budget(&self, tier: Tier, bytes: u64) -> Result<(), OffloadError> {
        match (tier, &self.nvme) {
            (Tier::Device, _) if bytes == 0 => {
                Err(OffloadError::argument("device budget", 0, "at least 1"))
            }
            (Tier::Device, _) => Ok(self.allocator.set_budget(bytes)?),
            (Tier::Host, _) => {
                self.tuning.set_host_bytes(bytes);
                self.host.set_cap(bytes);
                self.pump_in_background();
                Ok(())
            }
            (Tier::Nvme, Some(nvme)) => {
                nvme.set_budget(bytes);
                self.pump_in_background();
                Ok(())
            }
            (Tier::Nvme, None) if bytes == 0 => Ok(()),
            (Tier::Nvme, None) => {
                let accepted = "0: this engine was made without a file";
                Err(OffloadError::argument("NVMe budget", bytes, accepted))
            }
        }
    }

    /// Returns the throughput of the links: recent throughput once enough bytes have moved, before that
    /// the measurement at creation (the file), or the average so far.
    #[must_use]
    pub fn link_rates(&self) -> LinkRates {
        self.rates_of(|measured, links| match (links.late_bytes_per_s(), measured) {
            (0, 0) => links.bytes_per_s(),
            (0, measured) => measured,
            (late, _) => late,
        })
    }

    /// Returns the best throughput that the links have shown, for lower bounds.
    pub(crate) fn best_rates(&self) -> LinkRates {
        self.rates_of(|measured, links| {
            measured.max(links.bytes_per_s()).max(links.best_bytes_per_s())
        })
    }

    fn rates_of(&self, rate: impl Fn(u64, &Copies) -> u64) -> LinkRates {
        let measured = self.nvme.as_ref().map(|n| n.rates()).unwrap_or_default();
        let counters = &self.counters;
        LinkRates {
            device_to_nvme_bytes_per_s: rate(measured.write_bytes_per_s, &counters.nvme_write),
            nvme_to_device_bytes_per_s: rate(measured.read_bytes_per_s, &counters.nvme_read),
            device_to_host_bytes_per_s: rate(0, &counters.device_to_host),
            host_to_device_bytes_per_s: rate(0, &counters.host_to_device),
        }
    }
}
