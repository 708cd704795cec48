//! Profiles of past steps, kept for planning the next, and the resources of a step.

use std::sync::Arc;

use dormouse_device::Device;

use super::Engine;
use crate::ids::Tier;
use crate::step_profile::{Means, Pending, Profile};
use dormouse_storage::sync::lock;

/// Limit on prefixes with a profile.
pub(crate) const PROFILES_MAX: usize = 64;

/// Profiles of one prefix, identified from step to step by its name and number of layers.
#[derive(Debug)]
pub(super) struct StepProfiles<D: Device> {
    label: String,
    layers: u32,
    last: Option<Arc<Profile>>,
    /// The step after `last`, until the stream has reached its end.
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
    /// Returns the last step of the prefix with this name and number of layers that the trainer's stream has
    /// finished. Another prefix has other microbatches, and other memory in use beside them.
    pub(crate) fn profile(&self, label: &str, layers: u32) -> Option<Arc<Profile>> {
        let is_this = |kept: &&mut StepProfiles<D>| kept.is_of(label, layers);
        let pending = lock(&self.profiles).iter_mut().find(is_this)?.pending.take();
        // With no lock held: it queries the device.
        let finished = pending.map(|mut it| (it.finish(&self.device, &self.timeline), it));
        let mut later = None;
        let mut profiles = lock(&self.profiles);
        let kept = profiles.iter_mut().find(is_this)?;
        match finished {
            Some((Some(profile), _)) => kept.last = Some(Arc::new(profile)),
            // Unless a later step has been kept since.
            Some((None, pending)) if kept.pending.is_none() => kept.pending = Some(pending),
            Some((None, pending)) => later = Some(pending),
            None => {}
        }
        let last = kept.last.clone();
        drop(profiles);
        drop(later);
        last
    }

    /// Keeps a step whose marks are all made, for [`Engine::profile`]. The step before it is finished
    /// first, for trainers that are always ahead of their stream. At the limit the prefix whose step was
    /// kept longest ago is dropped.
    pub(crate) fn keep_profile(&self, label: &str, layers: u32, step: Pending<D>) {
        let _last = self.profile(label, layers);
        let (mut dropped, mut oldest) = (None, None);
        {
            let mut profiles = lock(&self.profiles);
            let at = profiles.iter().position(|kept| kept.is_of(label, layers));
            let found = at.and_then(|at| profiles.remove(at));
            let mut kept = found.unwrap_or_else(|| StepProfiles::new(label, layers));
            // Of two pending steps the earlier one finishes first.
            match kept.pending {
                Some(_) => dropped = Some(step),
                None => kept.pending = Some(step),
            }
            if profiles.len() >= PROFILES_MAX {
                oldest = profiles.pop_front();
            }
            profiles.push_back(kept);
        }
        // With no lock held: their events return to the device.
        drop((dropped, oldest));
    }

    /// Returns the resources of a step. If device memory is host memory, sleeping in host memory would
    /// free none, so only the file counts.
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
