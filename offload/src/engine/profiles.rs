//! What steps took, kept for planning the next, and what there is for them.

use std::sync::Arc;

use dormouse_device::Device;

use super::Engine;
use crate::ids::Tier;
use crate::node::{Means, Pending, Profile};
use crate::sync::lock;

/// Numbers of layers that steps are told apart by.
const PROFILES_MAX: usize = 64;

/// Steps of one number of layers.
#[derive(Debug)]
pub(super) struct Kept<D: Device> {
    last: Option<Arc<Profile>>,
    /// The one after it.
    pending: Option<Pending<D>>,
}

impl<D: Device> Default for Kept<D> {
    fn default() -> Self {
        Self { last: None, pending: None }
    }
}

impl<D: Device> Engine<D> {
    /// The last step of so many layers that the trainer's stream has come to the end of.
    pub(crate) fn profile(&self, layers: u32) -> Option<Arc<Profile>> {
        let pending = lock(&self.profiles).get_mut(&layers)?.pending.take();
        // With no lock held: it asks the device.
        let finished = pending.map(|mut it| (it.finish(&self.device, &self.timeline), it));
        let mut later = None;
        let mut profiles = lock(&self.profiles);
        let kept = profiles.get_mut(&layers)?;
        match finished {
            Some((Some(profile), _)) => kept.last = Some(Arc::new(profile)),
            // Unless a later step is there by now.
            Some((None, pending)) if kept.pending.is_none() => kept.pending = Some(pending),
            Some((None, pending)) => later = Some(pending),
            None => {}
        }
        let last = kept.last.clone();
        drop(profiles);
        drop(later);
        last
    }

    /// Keeps a step whose marks are all made, for [`Engine::profile`]. The one before it is looked at
    /// first: a trainer that is always ahead of its stream would never come to see one.
    pub(crate) fn keep_profile(&self, layers: u32, step: Pending<D>) {
        let _last = self.profile(layers);
        let mut dropped = None;
        {
            let mut profiles = lock(&self.profiles);
            if profiles.len() < PROFILES_MAX || profiles.contains_key(&layers) {
                let kept = profiles.entry(layers).or_default();
                // Whichever comes to its end sooner.
                match kept.pending {
                    Some(_) => dropped = Some(step),
                    None => kept.pending = Some(step),
                }
            }
        }
        // With no lock held: its events go back to the device.
        drop(dropped);
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
