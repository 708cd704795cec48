//! Settings of an engine.

use std::fmt::Debug;
use std::sync::Arc;

use crate::error::OffloadError;
use dormouse_storage::NvmeConfig;

/// The route of bytes between device pages and the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Route {
    /// Direct if the device's memory can do file I/O (the host device), otherwise through pinned memory.
    #[default]
    Auto,
    /// Always through pinned memory.
    ViaHost,
}

/// Which dormant bytes sleep, and what wakes them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ResidencyPolicy {
    /// All of them; a window of layers wakes ahead of need. The least device memory.
    #[default]
    All,
    /// Those that do not fit the budget, by a plan made from the last step of a prefix of the same name
    /// and number of layers. A step without a plan, such as the first, runs as under `All`.
    Fit,
}

impl ResidencyPolicy {
    /// Returns the policy of a setting's name: `all` or `fit`.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        match name {
            "all" => Some(Self::All),
            "fit" => Some(Self::Fit),
            _ => None,
        }
    }
}

/// Reads how much memory the process can still take. Any-thread.
pub trait AvailableMemory: Debug + Send + Sync {
    /// Returns the bytes; `None` if they are not known.
    fn available_bytes(&self) -> Option<u64>;
}

/// The settings that the engine revises by what it measures ([`dormouse_residency::tune`]). The values of
/// [`EngineConfig`] are then the first ones.
#[derive(Clone, Debug, Default)]
pub struct Automatic {
    /// `inflight_bytes_max`, between steps.
    pub inflight_bytes: bool,
    /// `wake_window_layers`, between steps.
    pub window_layers: bool,
    /// `host_bytes_max`, between steps and when the tier is full, unless [`crate::Engine::set_tier_budget`] sets it.
    pub host_bytes: bool,
    /// `queue_depth` of the file, once, after it was measured.
    pub queue_depth: bool,
    /// `file_bytes` of the file, when it is created on a disk that has no room for it: less is taken.
    pub file_bytes: bool,
    /// The memory that limits them.
    pub memory: Option<Arc<dyn AvailableMemory>>,
}

/// Settings of one engine.
#[derive(Clone, Debug)]
pub struct EngineConfig {
    /// The NVMe tier, if enabled.
    pub nvme: Option<NvmeConfig>,
    /// Limit of the host tier in bytes; 0 disables the tier.
    pub host_bytes_max: u64,
    /// Limit on bytes falling asleep at a time, at least 1; a larger region falls asleep alone. Also a limit on host memory
    /// of loads at a time, of which two are always under way.
    pub inflight_bytes_max: u64,
    /// Which dormant bytes sleep, and what wakes them.
    pub residency: ResidencyPolicy,
    /// Layers woken ahead of the one whose backward runs, 1 to [`WINDOW_LAYERS_MAX`].
    pub wake_window_layers: u32,
    /// Whether chunks of the file have checksums that are verified on read.
    pub checksums: bool,
    /// Dormant blocks below this size in bytes stay awake.
    pub size_floor_bytes: u64,
    /// Dormant blocks of a layer below this size in bytes sleep and wake together, as one copy; 0 disables.
    /// A twelfth of it applies where the device's memory can do file I/O, which coalesced blocks cannot.
    pub coalesced_bytes_max: u64,
    /// The route of bytes between device pages and the file.
    pub route: Route,
    /// What is revised; nothing by default.
    pub automatic: Automatic,
}

/// Limit of `wake_window_layers`.
pub const WINDOW_LAYERS_MAX: u32 = 1024;
/// I/O threads where no file tier says how many.
pub(crate) const IO_THREADS_DEFAULT: usize = 2;

impl Default for EngineConfig {
    fn default() -> Self {
        Self {
            nvme: None,
            host_bytes_max: 0,
            inflight_bytes_max: 256 << 20,
            residency: ResidencyPolicy::All,
            wake_window_layers: 3,
            checksums: true,
            size_floor_bytes: 64 << 10,
            coalesced_bytes_max: 1 << 20,
            route: Route::Auto,
            automatic: Automatic::default(),
        }
    }
}

impl EngineConfig {
    pub(crate) fn validate(&self) -> Result<(), OffloadError> {
        if self.inflight_bytes_max == 0 {
            return Err(OffloadError::argument("inflight_bytes_max", 0, "at least 1"));
        }
        if self.wake_window_layers == 0 || self.wake_window_layers > WINDOW_LAYERS_MAX {
            let accepted = format!("1 to {WINDOW_LAYERS_MAX}");
            let seen = self.wake_window_layers;
            return Err(OffloadError::argument("wake_window_layers", seen, accepted));
        }
        Ok(())
    }
}
