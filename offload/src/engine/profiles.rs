//! What steps took, kept for planning the next, and what there is for them.

use std::sync::Arc;

use dormouse_device::Device;

use super::Engine;
use crate::ids::Tier;
use crate::node::{Means, Profile};
use crate::sync::lock;

/// Numbers of layers that steps are told apart by.
const PROFILES_MAX: usize = 64;

impl<D: Device> Engine<D> {
    /// The last step of so many layers.
    pub(crate) fn profile(&self, layers: u32) -> Option<Arc<Profile>> {
        lock(&self.profiles).get(&layers).cloned()
    }

    pub(crate) fn keep_profile(&self, layers: u32, profile: Profile) {
        let mut profiles = lock(&self.profiles);
        if profiles.len() < PROFILES_MAX || profiles.contains_key(&layers) {
            profiles.insert(layers, Arc::new(profile));
        }
    }

    /// What there is for a step's memory now. Where memory does its own I/O, sleeping in memory
    /// would free none, and the file is all there is.
    pub(crate) fn means(&self) -> Means {
        let stats = self.stats();
        let free_bytes = |tier: Tier| {
            let tier = stats.tiers[tier.index()];
            tier.budget_bytes.saturating_sub(tier.used_bytes)
        };
        let may_be_written = match stats.nvme_write_budget_bytes {
            0 => u64::MAX,
            _ => stats.nvme_write_left_bytes,
        };
        let file_bytes = free_bytes(Tier::Nvme).min(may_be_written);
        Means {
            budget_bytes: stats.tiers[Tier::Device.index()].budget_bytes,
            host_bytes: if self.is_direct { 0 } else { free_bytes(Tier::Host) },
            nvme_bytes: if stats.nvme_stopped.is_some() { 0 } else { file_bytes },
            rates: self.link_rates(),
            is_direct: self.is_direct,
        }
    }
}
