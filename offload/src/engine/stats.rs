//! Figures, as one plain picture.

use dormouse_device::Device;
use dormouse_residency::LinkRates;

use super::counters::{Copies, get};
use super::{Engine, Level};
use crate::error::OffloadError;
use crate::ids::{Role, Tier};
use dormouse_storage::IoEngine;

/// One tier.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct TierStats {
    /// Regions counted there. For `Device`: awake regions.
    pub regions: Level,
    /// Bytes taken there for any reason (stashes and bounce buffers too).
    pub used_bytes: u64,
    /// The most since the last reset.
    pub peak_bytes: u64,
    /// The limit; 0 where the tier is closed.
    pub budget_bytes: u64,
}

/// One role.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RoleStats {
    /// All regions of it.
    pub all: Level,
    /// Those asleep.
    pub asleep: Level,
}

/// One direction of travel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CopyStats {
    /// Transfers.
    pub copies: u64,
    /// Bytes.
    pub bytes: u64,
    /// Nanoseconds in which at least one was under way, whatever became of it.
    pub busy_ns: u64,
}

/// Everything the engine counts.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stats {
    /// By [`Tier::index`].
    pub tiers: [TierStats; 3],
    /// By [`Role::index`].
    pub roles: [RoleStats; 4],
    /// Device pages to pinned memory.
    pub device_to_host: CopyStats,
    /// Pinned memory to device pages.
    pub host_to_device: CopyStats,
    /// Into the file.
    pub nvme_write: CopyStats,
    /// Out of the file.
    pub nvme_read: CopyStats,
    /// Bytes falling asleep now.
    pub inflight_bytes: u64,
    /// Bytes that wait for their turn to.
    pub queued_bytes: u64,
    /// Sleeps that reached the end.
    pub sleeps: u64,
    /// Wakes that reached the end.
    pub wakes: u64,
    /// Sleeps called off by a wake, a free or a write of the owner's.
    pub sleeps_backed_out: u64,
    /// Those of them that the owner's write called off.
    pub written_meanwhile: u64,
    /// Regions that had no place to sleep, and stashes that had none.
    pub declined: u64,
    /// Sleeps that an error ended; the data stayed awake.
    pub sleep_failures: u64,
    /// Wakes that an error ended; the data stayed asleep.
    pub wake_failures: u64,
    /// Chunks whose checksum was right only when read again.
    pub reread_chunks: u64,
    /// Refusals of the device in places where nothing could be done about it.
    pub device_faults: u64,
    /// Times room was made for somebody.
    pub reclaims: u64,
    /// Nanoseconds callers waited for copies.
    pub stall_ns: u64,
    /// Waits that blocked.
    pub waits: u64,
    /// Bytes written to the file since it was made, whatever became of them.
    pub nvme_written_bytes: u64,
    /// Bytes that may be written to it in 24 hours; 0: no limit.
    pub nvme_write_budget_bytes: u64,
    /// Bytes of that which may be written now; 0 too where there is no limit.
    pub nvme_write_left_bytes: u64,
    /// Why the file tier takes nothing more.
    pub nvme_stopped: Option<String>,
    /// Whether the system keeps the file in memory too: its bytes then count as memory.
    pub nvme_buffered: bool,
    /// Initiator does its I/O, `Uring` or `Threads`, where there is such a tier.
    pub nvme_io_engine: Option<IoEngine>,
    /// Why that is less than was hoped for.
    pub nvme_io_note: Option<String>,
}

impl Copies {
    fn picture(&self) -> CopyStats {
        CopyStats { copies: get(&self.copies), bytes: get(&self.bytes), busy_ns: self.busy_ns() }
    }
}

impl CopyStats {
    /// Bytes per second while busy; 0 where nothing moved.
    #[must_use]
    pub fn bytes_per_s(&self) -> u64 {
        per_second(self.bytes, self.busy_ns)
    }
}

/// Bytes per second, 0 where no time passed.
pub(super) fn per_second(bytes: u64, ns: u64) -> u64 {
    if ns == 0 {
        return 0;
    }
    u64::try_from(u128::from(bytes) * 1_000_000_000 / u128::from(ns)).unwrap_or(u64::MAX)
}

impl<D: Device> Engine<D> {
    /// All figures. Each is exact; together they are of about the same moment.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let counters = &self.counters;
        let mut stats = Stats {
            device_to_host: counters.device_to_host.picture(),
            host_to_device: counters.host_to_device.picture(),
            nvme_write: counters.nvme_write.picture(),
            nvme_read: counters.nvme_read.picture(),
            sleeps: get(&counters.sleeps),
            wakes: get(&counters.wakes),
            sleeps_backed_out: get(&counters.sleeps_backed_out),
            written_meanwhile: get(&counters.written_meanwhile),
            declined: get(&counters.declined),
            sleep_failures: get(&counters.sleep_failures),
            wake_failures: get(&counters.wake_failures),
            reread_chunks: get(&counters.reread_chunks),
            device_faults: get(&counters.device_faults),
            reclaims: get(&counters.reclaims),
            stall_ns: get(&counters.stall_ns),
            waits: get(&counters.waits),
            ..Stats::default()
        };
        {
            let inner = self.table.lock();
            let shared = &inner.shared;
            for (tier, level) in stats.tiers.iter_mut().zip(shared.tiers) {
                tier.regions = level;
            }
            for (at, role) in stats.roles.iter_mut().enumerate() {
                role.all = shared.roles.get(at).copied().unwrap_or_default();
                role.asleep = shared.roles_asleep.get(at).copied().unwrap_or_default();
            }
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
        host.peak_bytes = usage.peak_bytes;
        host.budget_bytes = usage.budget_bytes;
        if let Some(nvme) = &self.nvme {
            let usage = nvme.usage();
            let tier = &mut stats.tiers[Tier::Nvme.index()];
            tier.used_bytes = usage.used_bytes;
            tier.peak_bytes = usage.peak_bytes;
            tier.budget_bytes = usage.budget_bytes;
            stats.nvme_written_bytes = usage.written_bytes;
            stats.nvme_write_budget_bytes = usage.write_budget_bytes;
            stats.nvme_write_left_bytes = usage.write_left_bytes;
            stats.nvme_stopped = usage.stopped;
            stats.nvme_buffered = usage.buffered;
            stats.nvme_io_engine = Some(usage.io_engine);
            stats.nvme_io_note = usage.io_note;
        }
    }

    /// Makes every peak what it is now, the allocator's included.
    pub fn reset_peaks(&self) {
        {
            let mut inner = self.table.lock();
            let shared = &mut inner.shared;
            let levels = shared.tiers.iter_mut().chain(&mut shared.roles);
            for level in levels.chain(&mut shared.roles_asleep) {
                level.reset_peak();
            }
        }
        self.host.reset_peak();
        if let Some(nvme) = &self.nvme {
            nvme.reset_peak();
        }
        self.allocator.reset_peaks();
    }

    /// Sets a tier's limit. What is there stays; 0 closes `Host` or `Nvme` for new data.
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
                self.host.set_budget(bytes);
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

    /// What the links carry: the file as measured at creation until enough has gone over since, then
    /// as seen of late; the rest as seen so far, and then of late.
    #[must_use]
    pub fn link_rates(&self) -> LinkRates {
        self.rates_of(|measured, links| match (links.late_bytes_per_s(), measured) {
            (0, 0) => links.bytes_per_s(),
            (0, measured) => measured,
            (late, _) => late,
        })
    }

    /// The most that the links have shown to carry, for what no schedule could do better.
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

    /// Bytes of one role, all and asleep.
    #[must_use]
    pub fn role_stats(&self, role: Role) -> RoleStats {
        self.stats().roles.get(role.index()).copied().unwrap_or_default()
    }
}
