//! What steps took, kept for planning the next, and what there is for them.

use std::sync::Arc;

use dormouse_device::Device;

use super::Engine;
use crate::ids::Tier;
use crate::step_profile::{Means, Pending, Profile};
use dormouse_storage::sync::lock;

/// Prefixes that steps are told apart by.
pub(crate) const PROFILES_MAX: usize = 64;

/// Steps of the prefix of one name, while it has as many layers: prefixes of a tree have as many each, and
/// their names from step to step.
#[derive(Debug)]
pub(super) struct StepProfiles<D: Device> {
    label: String,
    layers: u32,
    last: Option<Arc<Profile>>,
    /// The one after it.
    pending: Option<Pending<D>>,
}

impl<D: Device> StepProfiles<D> {
    fn new(label: &str, layers: u32) -> Self {
        Self { label: label.to_owned(), layers, last: None, pending: None }
    }

    fn is_of(&self, label: &str, layers: u32) -> bool {
        self.layers == layers && self.label == label
    }
}

impl<D: Device> Engine<D> {
    /// The last step of the prefix of this name, with so many layers, that the trainer's stream has come
    /// to the end of. No other prefix's will do: it has other microbatches, and other memory in use beside them.
    pub(crate) fn profile(&self, label: &str, layers: u32) -> Option<Arc<Profile>> {
        let is_this = |kept: &&mut StepProfiles<D>| kept.is_of(label, layers);
        let pending = lock(&self.profiles).iter_mut().find(is_this)?.pending.take();
        // With no lock held: it asks the device.
        let finished = pending.map(|mut it| (it.finish(&self.device, &self.timeline), it));
        let mut later = None;
        let mut profiles = lock(&self.profiles);
        let kept = profiles.iter_mut().find(is_this)?;
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
    /// first: a trainer that is always ahead of its stream would never come to see one. Where there are
    /// as many prefixes as there can be, the one whose last step was kept longest ago makes room.
    pub(crate) fn keep_profile(&self, label: &str, layers: u32, step: Pending<D>) {
        let _last = self.profile(label, layers);
        let (mut dropped, mut oldest) = (None, None);
        {
            let mut profiles = lock(&self.profiles);
            let at = profiles.iter().position(|kept| kept.is_of(label, layers));
            let found = at.and_then(|at| profiles.remove(at));
            let mut kept = found.unwrap_or_else(|| StepProfiles::new(label, layers));
            // Whichever comes to its end sooner.
            match kept.pending {
                Some(_) => dropped = Some(step),
                None => kept.pending = Some(step),
            }
            if profiles.len() >= PROFILES_MAX {
                oldest = profiles.pop_front();
            }
            profiles.push_back(kept);
        }
        // With no lock held: their events go back to the device.
        drop((dropped, oldest));
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
