//! Settings that nobody has set, revised from what was measured. The rules are `residency::tune`'s.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use dormouse_alloc::pinned::PinLimit;
use dormouse_device::Device;
use dormouse_residency::tune::{self, Chosen, Steady, Step};
use dormouse_storage::sync::{Mutex, lock};
use dormouse_storage::{CHUNK_BYTES, IoEngine, Nvme, NvmeConfig, NvmeError, Rates};
use dormouse_timeline::now_ns;

use super::Engine;
use crate::config::{Automatic, AvailableMemory, EngineConfig, WINDOW_LAYERS_MAX};

/// The limit of the host tier changes by more than this part of it, or stays.
const HOST_BAND_DIVISOR: u64 = 8;

/// Time after which the available memory is looked at again: a look reads files of the system, and every sleep into a full
/// host tier asks.
pub(super) const LOOK_AGAIN_NS: u64 = 100_000_000;

/// Settings that differ from those of [`EngineConfig`] because of what was measured, with their reasons.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Revised {
    /// Layers woken ahead.
    pub window_layers: Option<Chosen>,
    /// Limit on bytes falling asleep at a time.
    pub inflight_bytes: Option<Chosen>,
    /// Limit of the host tier in bytes.
    pub host_bytes: Option<Chosen>,
    /// Requests in flight per I/O thread.
    pub queue_depth: Option<Chosen>,
}

/// While the limit of the host tier is automatic, memory is pinned only within the limit that the memory available by then
/// gives: others may have taken it since the limit was chosen.
#[derive(Debug)]
struct HostLimit {
    memory: Arc<MemoryWatch>,
    is_set: Arc<AtomicBool>,
}

impl PinLimit for HostLimit {
    fn limit_bytes(&self, pinned_bytes: u64) -> u64 {
        // Relaxed: the value before serves as well.
        if self.is_set.load(Ordering::Relaxed) {
            return u64::MAX;
        }
        // Neither an allocation nor an event: the pool is locked.
        let seen = self.memory.at(now_ns(), pinned_bytes);
        seen.map_or(u64::MAX, |seen| tune::host_limit_bytes(seen.available_bytes, seen.held_bytes))
    }
}

/// The available memory, looked at now and then.
#[derive(Debug)]
pub(super) struct MemoryWatch {
    memory: Arc<dyn AvailableMemory>,
    pub(super) seen: Mutex<Option<MemorySeen>>,
}

/// Memory at one moment: what is available, and what the host tier holds beside it.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemorySeen {
    seen_ns: u64,
    available_bytes: u64,
    held_bytes: u64,
}

impl MemoryWatch {
    /// Returns the memory as of `now_ns`, or of less than [`LOOK_AGAIN_NS`] before. `held_bytes`: what the host tier holds
    /// now.
    fn at(&self, now_ns: u64, held_bytes: u64) -> Option<MemorySeen> {
        let mut seen = lock(&self.seen);
        if seen.is_none_or(|seen| now_ns.saturating_sub(seen.seen_ns) >= LOOK_AGAIN_NS) {
            let looked =
                |available_bytes| MemorySeen { seen_ns: now_ns, available_bytes, held_bytes };
            *seen = self.memory.available_bytes().map(looked);
        }
        *seen
    }
}

/// The values in effect.
#[derive(Debug)]
pub(super) struct Tuning {
    automatic: Automatic,
    inflight_bytes_max: AtomicU64,
    window_layers: AtomicU32,
    /// Whether a caller has set the limit of the host tier.
    is_host_set: Arc<AtomicBool>,
    /// The memory that limits the host tier, if its limit is automatic.
    pub(super) host_memory: Option<Arc<MemoryWatch>>,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    /// The limit of the host tier that a caller has set.
    set_host_bytes: Option<u64>,
    window: Steady,
    inflight: Steady,
    revised: Revised,
}

/// Creates the file. With an automatic depth its queues are as deep as its measured throughput asks for; returns it. With
/// an automatic size it is smaller where the disk has no room.
pub(super) fn create_file(
    config: &NvmeConfig,
    checksums: bool,
    automatic: &Automatic,
) -> Result<(Nvme, Option<Chosen>), NvmeError> {
    let attempts_max = if automatic.file_bytes { tune::FILE_ATTEMPTS_MAX } else { 1 };
    with_room(config.file_bytes, attempts_max, |file_bytes| {
        let config = NvmeConfig { file_bytes, ..config.clone() };
        let mut chosen = None;
        let depth = |rates: Rates| {
            let rate = rates.write_bytes_per_s.max(rates.read_bytes_per_s);
            let threads = config.io_threads as u64;
            let depth = tune::queue_depth(threads, CHUNK_BYTES as u64, rate, rates.read_latency_ns);
            chosen.insert(depth).value as usize
        };
        let file = match automatic.queue_depth {
            true => Nvme::create_with(&config, checksums, depth)?,
            false => Nvme::create(&config, checksums)?,
        };
        Ok((file, chosen))
    })
}

/// Creates a file of `bytes`, or of less if the disk has no room for it: other processes may have taken what was free when
/// the size was chosen.
fn with_room<T>(
    mut bytes: u64,
    attempts_max: u32,
    mut create: impl FnMut(u64) -> Result<T, NvmeError>,
) -> Result<T, NvmeError> {
    let mut attempt = 1;
    loop {
        match create(bytes) {
            Err(NvmeError::NoRoom { free_bytes, .. }) if attempt < attempts_max => {
                let refused_bytes = bytes;
                bytes = tune::less_file_bytes(refused_bytes, free_bytes);
                tracing::info!(target: "offload", refused_bytes, free_bytes, bytes, "the file begins smaller");
            }
            created => return created,
        }
        attempt += 1;
    }
}

impl Tuning {
    pub(super) fn new(config: &EngineConfig, queue_depth: Option<Chosen>) -> Self {
        let state = State {
            set_host_bytes: None,
            window: Steady::new(config.wake_window_layers.into()),
            inflight: Steady::new(config.inflight_bytes_max),
            revised: Revised { queue_depth, ..Revised::default() },
        };
        let host_memory = config.automatic.memory.clone().filter(|_| config.automatic.host_bytes);
        Self {
            automatic: config.automatic.clone(),
            inflight_bytes_max: AtomicU64::new(config.inflight_bytes_max),
            window_layers: AtomicU32::new(config.wake_window_layers),
            is_host_set: Arc::default(),
            host_memory: host_memory
                .map(|memory| Arc::new(MemoryWatch { memory, seen: Mutex::default() })),
            state: Mutex::new(state),
        }
    }

    // Relaxed: each value is complete in itself, and the one before it serves as well.

    pub(super) fn inflight_bytes_max(&self) -> u64 {
        self.inflight_bytes_max.load(Ordering::Relaxed)
    }

    /// Returns what limits the memory of the host tier beside its limit in bytes, if that is automatic.
    pub(super) fn host_limit(&self) -> Option<Arc<dyn PinLimit>> {
        let memory = self.host_memory.clone()?;
        Some(Arc::new(HostLimit { memory, is_set: Arc::clone(&self.is_host_set) }))
    }

    /// Notes that a caller sets the limit of the host tier, which then stays.
    pub(super) fn set_host_bytes(&self, bytes: u64) {
        self.is_host_set.store(true, Ordering::Relaxed);
        let mut state = lock(&self.state);
        state.set_host_bytes = Some(bytes);
        state.revised.host_bytes = None;
    }

    fn available_bytes(&self) -> Option<u64> {
        self.automatic.memory.as_ref().and_then(|memory| memory.available_bytes())
    }

    fn revise_window(&self, step: &Step) {
        if !self.automatic.window_layers {
            return;
        }
        let Some(chosen) = tune::window_layers(step) else { return };
        let mut state = lock(&self.state);
        if !state.window.follow(chosen.value) {
            return;
        }
        let (value, reason) = (state.window.value(), chosen.reason);
        let layers = u32::try_from(value).unwrap_or(WINDOW_LAYERS_MAX).clamp(1, WINDOW_LAYERS_MAX);
        self.window_layers.store(layers, Ordering::Relaxed);
        state.revised.window_layers = Some(Chosen { value, reason: reason.clone() });
        drop(state);
        tracing::info!(target: "offload", layers, reason, "wake window revised");
    }

    /// Returns true if more bytes may fall asleep than before.
    fn revise_inflight(&self, bytes_per_s: u64, queue_bytes: u64) -> bool {
        if !self.automatic.inflight_bytes {
            return false;
        }
        let chosen = tune::inflight_bytes(bytes_per_s, queue_bytes, self.available_bytes());
        let mut state = lock(&self.state);
        let before = state.inflight.value();
        if !state.inflight.follow(chosen.value) {
            return false;
        }
        let (bytes, reason) = (state.inflight.value(), chosen.reason);
        self.inflight_bytes_max.store(bytes, Ordering::Relaxed);
        state.revised.inflight_bytes = Some(Chosen { value: bytes, reason: reason.clone() });
        drop(state);
        tracing::info!(target: "offload", bytes, reason, "bytes in flight revised");
        bytes > before
    }
}

impl<D: Device> Engine<D> {
    /// Returns the settings that were revised.
    #[must_use]
    pub fn revised(&self) -> Revised {
        lock(&self.tuning.state).revised.clone()
    }

    /// Returns the layers that a prefix wakes ahead.
    #[must_use]
    pub fn window_layers(&self) -> u32 {
        self.tuning.window_layers.load(Ordering::Relaxed)
    }

    /// Revises the automatic settings after a step of a prefix. `step`: its figures, if its layers slept and it came to
    /// its end.
    pub(crate) fn revise(&self, step: Option<&Step>) {
        if let Some(step) = step {
            self.tuning.revise_window(step);
        }
        let rates = self.link_rates();
        let rate = rates.device_to_host_bytes_per_s.max(rates.device_to_nvme_bytes_per_s);
        let has_more = self.tuning.revise_inflight(rate, self.queue_bytes());
        if self.revise_host_bytes(0) || has_more {
            self.pump_in_background();
        }
    }

    /// Revises the limit of the host tier by the memory that is available. Returns true if it rose and `asked_bytes`
    /// more fit now.
    pub(super) fn revise_host_bytes(&self, asked_bytes: u64) -> bool {
        // Relaxed: checked again below.
        let is_set = self.tuning.is_host_set.load(Ordering::Relaxed);
        let Some(memory) = self.tuning.host_memory.as_ref().filter(|_| !is_set) else {
            return false;
        };
        let usage = self.host.usage();
        // Memory that the pool keeps pinned is not available any more, in use or not.
        let held_bytes = usage.used_bytes.max(usage.pinned_bytes);
        let Some(seen) = memory.at(now_ns(), held_bytes) else { return false };
        let chosen = tune::host_bytes(0, Some(seen.available_bytes), seen.held_bytes);
        let Chosen { value, reason } = &chosen;
        // A request that finds the tier full only wants more, and enough for it.
        let is_wanted = match asked_bytes {
            0 => value.abs_diff(usage.cap_bytes) > usage.cap_bytes / HOST_BAND_DIVISOR,
            asked => *value > usage.cap_bytes && *value >= usage.used_bytes.saturating_add(asked),
        };
        if !is_wanted {
            return false;
        }
        // With no lock held (I8): a lower limit unpins memory.
        self.host.set_cap(*value);
        let set_bytes = lock(&self.tuning.state).set_host_bytes;
        if let Some(set_bytes) = set_bytes {
            // By another thread, meanwhile.
            self.host.set_cap(set_bytes);
            return false;
        }
        lock(&self.tuning.state).revised.host_bytes = Some(chosen.clone());
        tracing::info!(target: "offload", bytes = value, reason, "host tier revised");
        *value > usage.cap_bytes
    }

    /// Returns the bytes that the queues to the file hold.
    fn queue_bytes(&self) -> u64 {
        let Some(config) = &self.config.nvme else { return 0 };
        let is_ring = self.stats().nvme_io_engine == Some(IoEngine::Uring);
        let chosen = lock(&self.tuning.state).revised.queue_depth.as_ref().map(|depth| depth.value);
        let depth = if is_ring { chosen.unwrap_or(config.queue_depth as u64) } else { 1 };
        config.io_threads as u64 * depth * CHUNK_BYTES as u64
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    /// Creates a file of 4 GiB on a disk that has this much free at each attempt. Returns its size and the attempts.
    fn on_disk(free: &[u64], attempts_max: u32) -> (Result<u64, NvmeError>, usize) {
        let mut attempts = 0;
        let created = with_room(4 * GIB, attempts_max, |asked_bytes| {
            let free_bytes = free[attempts.min(free.len() - 1)];
            attempts += 1;
            let refused = NvmeError::NoRoom { dir: "/disk".into(), asked_bytes, free_bytes };
            if asked_bytes <= free_bytes { Ok(asked_bytes) } else { Err(refused) }
        });
        (created, attempts)
    }

    #[test]
    fn an_automatic_file_takes_less_where_others_were_faster() {
        assert_eq!(on_disk(&[5 * GIB], 4), (Ok(4 * GIB), 1));
        assert_eq!(on_disk(&[3 * GIB], 4), (Ok(3 * GIB / 2), 2));
        assert_eq!(on_disk(&[3 * GIB, GIB, GIB], 4), (Ok(GIB / 2), 3));
        // A quota that the figure of the free bytes does not show.
        let created = with_room(4 * GIB, 4, |asked_bytes| {
            let free_bytes = 100 * GIB;
            let refused = NvmeError::NoRoom { dir: "/disk".into(), asked_bytes, free_bytes };
            if asked_bytes <= GIB { Ok(asked_bytes) } else { Err(refused) }
        });
        assert_eq!(created, Ok(GIB));
        let (refused, attempts) = on_disk(&[0], 4);
        assert!(matches!(refused, Err(NvmeError::NoRoom { asked_bytes: 0x10_0000, .. })));
        assert_eq!(attempts, 4);
        let (refused, attempts) = on_disk(&[3 * GIB], 1);
        assert!(
            matches!(refused, Err(NvmeError::NoRoom { asked_bytes, .. }) if asked_bytes == 4 * GIB)
        );
        assert_eq!(attempts, 1, "a size that was set stays");
    }
}
