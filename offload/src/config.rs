//! How an engine is set up.

use crate::error::OffloadError;
use dormouse_storage::NvmeConfig;

/// How bytes travel between device pages and the file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Route {
    /// Straight, where the device's memory can do I/O (the host device), else through host memory.
    #[default]
    Auto,
    /// Through pinned host memory always.
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

/// Settings of one engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EngineConfig {
    /// The file tier, where there is one.
    pub nvme: Option<NvmeConfig>,
    /// Pinned host memory to hold copies at most; 0 closes the tier.
    pub host_bytes_max: u64,
    /// Bytes falling asleep at one time at most (one region may exceed it alone). Not 0.
    pub inflight_bytes_max: u64,
    /// Which dormant bytes sleep, and what wakes them.
    pub residency: ResidencyPolicy,
    /// Layers woken ahead of the one whose backward runs, 1 to [`WINDOW_LAYERS_MAX`].
    pub wake_window_layers: u32,
    /// Whether what goes to the file is summed and verified.
    pub checksums: bool,
    /// Dormant blocks below this stay awake: a copy would cost more than it frees.
    pub size_floor_bytes: u64,
    /// Dormant blocks of a layer below this sleep and wake together, as one copy; 0: each alone. A
    /// twelfth of it where the device's memory does its own I/O, which together they do not.
    pub coalesced_bytes_max: u64,
    /// How bytes travel.
    pub route: Route,
}

/// Most layers a wake window may have.
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
