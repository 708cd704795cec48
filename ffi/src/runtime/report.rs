//! Properties and statistics of a runtime.

use std::hash::{BuildHasher, RandomState};
use std::sync::OnceLock;

use dormouse_alloc::{Amount, PoolStats, Stats};
use dormouse_device::{Device, DeviceKind};
use dormouse_offload::{Level, Role, TagStats, TierStats};
use dormouse_timeline::live::{Figures, PAGE_TAGS_MAX, TagFigures};
use dormouse_timeline::now_ns;

use super::Runtime;
use crate::abi::c;
use crate::convert;
use crate::dumps;
use crate::fault::c_text;
use crate::heap::{Heap, symbols};
use crate::live;
use crate::params::Config;

impl Runtime {
    /// Returns the properties of the runtime.
    pub(crate) fn info(&self) -> c::dormouse_info_t {
        let allocator = self.heap.allocator();
        let (kind, ordinal) = self.heap.device();
        let stats = self.engine.stats();
        let [_, host, nvme] = stats.tiers;
        let rates = self.engine.link_rates();
        let flag = |is_set: bool, bit: u64| if is_set { bit } else { 0 };
        let is_preloaded = symbols::is_preloaded();
        let modes = c::DORMOUSE_MODE_LINKED | flag(is_preloaded, c::DORMOUSE_MODE_PRELOAD);
        let tier_flags = flag(host.budget_bytes > 0, c::DORMOUSE_TIER_FLAG_HOST)
            | flag(nvme.budget_bytes > 0, c::DORMOUSE_TIER_FLAG_NVME)
            | flag(stats.nvme_buffered, c::DORMOUSE_TIER_FLAG_NVME_BUFFERED);
        let mut unavailable = self.unavailable_reason.clone();
        if !is_preloaded {
            unavailable.push_str("; preload: libdormouse_preload.so is not in LD_PRELOAD");
        }
        for reason in [&stats.nvme_stopped, &stats.nvme_io_note].into_iter().flatten() {
            unavailable.push_str("; nvme: ");
            unavailable.push_str(reason);
        }
        c::dormouse_info_t {
            device_kind: match kind {
                DeviceKind::Host => c::DORMOUSE_DEVICE_HOST,
                DeviceKind::Cuda => c::DORMOUSE_DEVICE_CUDA,
            },
            device_ordinal: ordinal as i32,
            page_bytes: allocator.device().page_bytes() as u64,
            modes,
            tier_flags,
            instance_id: instance_id(),
            alloc_budget_bytes: allocator.stats().budget_bytes,
            host_budget_bytes: host.budget_bytes,
            nvme_file_bytes: stats.nvme_limit_bytes,
            heap_min_bytes: self.heap.min_bytes(),
            nvme_write_bytes_per_s: rates.device_to_nvme_bytes_per_s,
            nvme_read_bytes_per_s: rates.nvme_to_device_bytes_per_s,
            window_layers: self.engine.window_layers(),
            unavailable_reason: c_text(unavailable.trim_start_matches("; ")),
            ..c::dormouse_info_t::default()
        }
    }
}

/// Returns the statistics of a heap. Figures of the offload engine are 0 without a runtime.
pub(crate) fn stats_of(heap: &Heap) -> c::dormouse_stats_t {
    stats_with(heap, &heap.allocator().stats())
}

/// As [`stats_of`], with the figures of the pools, for which every block is counted.
pub(crate) fn stats_by_pool(heap: &Heap) -> c::dormouse_stats_t {
    let (memory, [small, large]) = heap.allocator().stats_by_kind();
    let mut stats = stats_with(heap, &memory);
    stats.pools[c::DORMOUSE_POOL_SMALL as usize] = pool(small);
    stats.pools[c::DORMOUSE_POOL_LARGE as usize] = pool(large);
    stats
}

fn stats_with(heap: &Heap, memory: &Stats) -> c::dormouse_stats_t {
    let engine = heap.engine().map(|engine| engine.stats()).unwrap_or_default();
    let [device, host, nvme] = engine.tiers;
    let mut roles = [c::dormouse_gauge_t::default(); c::DORMOUSE_ROLE_COUNT];
    for (role, stats) in Role::ALL.into_iter().zip(engine.roles) {
        roles[convert::role_code(role) as usize] = gauge_of_level(stats.all);
    }
    let mut copies = [c::dormouse_copies_t::default(); c::DORMOUSE_COPY_COUNT];
    for (direction, seen) in [
        (c::DORMOUSE_COPY_DEVICE_TO_HOST, engine.device_to_host),
        (c::DORMOUSE_COPY_HOST_TO_DEVICE, engine.host_to_device),
        (c::DORMOUSE_COPY_NVME_WRITE, engine.nvme_write),
        (c::DORMOUSE_COPY_NVME_READ, engine.nvme_read),
    ] {
        copies[direction as usize] = c::dormouse_copies_t { count: seen.copies, bytes: seen.bytes };
    }
    let mut asleep = gauge(memory.asleep_bytes, 0);
    asleep.count = engine.roles.iter().map(|role| role.asleep.regions).sum();
    c::dormouse_stats_t {
        allocated: gauge(memory.allocated_bytes, memory.allocations.current),
        requested: gauge(memory.requested_bytes, memory.allocations.current),
        mapped: gauge(memory.mapped_bytes, memory.segments.current),
        cached: gauge(memory.cached_bytes, 0),
        asleep,
        tiers: [
            gauge(memory.mapped_bytes, device.regions.regions),
            gauge_of_tier(host),
            gauge_of_tier(nvme),
        ],
        roles,
        copies,
        stall_ns: engine.stall_ns,
        alloc_retries: memory.retries,
        alloc_failures: memory.ooms,
        declined: engine.declined,
        nvme_written_bytes: engine.nvme_written_bytes,
        nvme_write_budget_bytes: engine.nvme_write_budget_bytes,
        nvme_write_left_bytes: engine.nvme_write_left_bytes,
        active: gauge(
            memory.active_bytes,
            memory.allocations.current + memory.pending_blocks.current,
        ),
        inactive_split: gauge(memory.inactive_split_bytes, 0),
        stray_wakes: engine.stray.count,
        allocations: amount(memory.allocations),
        segments: amount(memory.segments),
        allocated_total_bytes: memory.allocated_bytes.added_total,
        active_total_bytes: memory.active_bytes.added_total,
        requested_total_bytes: memory.requested_bytes.added_total,
        mapped_total_bytes: memory.mapped_bytes.added_total,
        inactive_split_total_bytes: memory.inactive_split_bytes.added_total,
        map_calls: memory.maps,
        unmap_calls: memory.unmaps,
        stream_waits: memory.stream_waits,
        allocated_interval_peak_bytes: memory.allocated_interval_peak_bytes,
        ..c::dormouse_stats_t::default()
    }
}

/// Returns the statistics of a heap and the settings of its runtime as live figures.
pub(crate) fn figures_of(heap: &Heap, config: &Config) -> Figures {
    let stats = stats_of(heap);
    let engine = heap.engine();
    let rates = engine.as_ref().map(|engine| engine.link_rates()).unwrap_or_default();
    let tags = engine.as_ref().map(|engine| engine.tag_stats()).unwrap_or_default();
    let tiers = engine.map(|engine| engine.stats().tiers).unwrap_or_default();
    Figures {
        updated_ns: now_ns(),
        tier_used_bytes: stats.tiers.map(|tier| tier.current_bytes),
        tier_peak_bytes: stats.tiers.map(|tier| tier.peak_bytes),
        tier_budget_bytes: tiers.map(|tier| tier.budget_bytes),
        link_copied_bytes: stats.copies.map(|copies| copies.bytes),
        link_bytes_per_s: [
            rates.device_to_host_bytes_per_s,
            rates.host_to_device_bytes_per_s,
            rates.device_to_nvme_bytes_per_s,
            rates.nvme_to_device_bytes_per_s,
        ],
        asleep_bytes: stats.asleep.current_bytes,
        cached_bytes: stats.cached.current_bytes,
        stall_ns: stats.stall_ns,
        alloc_failures: stats.alloc_failures,
        tag_count: tags.len() as u64,
        tags: tags.into_iter().take(PAGE_TAGS_MAX).map(tag_figures).collect(),
        last_dump: dumps::last(),
        settings: live::settings(config),
    }
}

fn tag_figures(TagStats { name, resident_bytes, asleep_bytes }: TagStats) -> TagFigures {
    TagFigures { name, resident_bytes, asleep_bytes }
}

fn gauge(amount: Amount, count: u64) -> c::dormouse_gauge_t {
    c::dormouse_gauge_t { current_bytes: amount.current, peak_bytes: amount.peak, count }
}

fn amount(amount: Amount) -> c::dormouse_amount_t {
    let Amount { current, peak, added_total } = amount;
    c::dormouse_amount_t { current, peak, added_total }
}

fn pool(pool: PoolStats) -> c::dormouse_pool_t {
    c::dormouse_pool_t {
        allocated_bytes: pool.allocated_bytes,
        active_bytes: pool.active_bytes,
        requested_bytes: pool.requested_bytes,
        mapped_bytes: pool.mapped_bytes,
        inactive_split_bytes: pool.inactive_split_bytes,
        allocations: pool.allocations,
        active_blocks: pool.allocations + pool.pending_blocks,
        segments: pool.segments,
        inactive_splits: pool.inactive_splits,
    }
}

fn gauge_of_level(level: Level) -> c::dormouse_gauge_t {
    c::dormouse_gauge_t {
        current_bytes: level.current_bytes,
        peak_bytes: level.peak_bytes,
        count: level.regions,
    }
}

fn gauge_of_tier(tier: TierStats) -> c::dormouse_gauge_t {
    c::dormouse_gauge_t {
        current_bytes: tier.used_bytes,
        peak_bytes: tier.peak_bytes,
        count: tier.regions.regions,
    }
}

/// Returns a random number that identifies this loaded instance of the library.
fn instance_id() -> u64 {
    static ID: OnceLock<u64> = OnceLock::new();
    *ID.get_or_init(|| RandomState::new().hash_one(&raw const ID as usize) | 1)
}
