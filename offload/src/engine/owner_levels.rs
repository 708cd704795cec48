//! Awake device bytes by role and tag, recorded on the timeline at each change, and sleeping bytes by tag.

use std::collections::HashMap;
use std::fmt;
use std::sync::Arc;

use dormouse_alloc::Allocator;
use dormouse_device::Device;
use dormouse_timeline::{Gauge, NameId, Timeline};

use crate::ids::Role;

/// Bytes of a tag's regions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TagLevels {
    pub(crate) awake_bytes: u64,
    pub(crate) asleep_bytes: u64,
}

/// The allocator of the bytes, of any device.
pub(crate) trait AwakeBytes: fmt::Debug + Send + Sync {
    /// Records their peak, if it is not recorded yet or is now.
    fn record_peak(&self);
}

impl<D: Device> AwakeBytes for Allocator<D> {
    fn record_peak(&self) {
        self.record_peak();
    }
}

/// The levels. Under the table's lock, so that the timeline has them in order.
#[derive(Debug, Default)]
pub(crate) struct OwnerLevels {
    /// `None` until the engine is complete.
    recorded: Option<(Arc<Timeline>, Arc<dyn AwakeBytes>)>,
    /// By role. That of tags is not used.
    roles: [u64; Role::ALL.len()],
    /// At most as many as names fit the timeline.
    tags: HashMap<NameId, TagLevels>,
}

impl OwnerLevels {
    pub(crate) fn new(timeline: Arc<Timeline>, allocator: Arc<dyn AwakeBytes>) -> Self {
        Self { recorded: Some((timeline, allocator)), ..Self::default() }
    }

    /// The allocator has recorded the bytes of a wake before: a peak is recorded again, now that they are the owner's.
    pub(crate) fn add(&mut self, role: Role, tag: NameId, bytes: u64) {
        self.change(role, tag, |level| level.saturating_add(bytes));
        self.record_peak();
    }

    /// The allocator records a peak late, when its level falls. The bytes are the owner's until then, so that is done
    /// first. No lock is taken under the allocator's.
    pub(crate) fn remove(&mut self, role: Role, tag: NameId, bytes: u64) {
        self.record_peak();
        self.change(role, tag, |level| level.saturating_sub(bytes));
    }

    /// Counts `bytes` of a tag that fell asleep, or were asleep and are no longer.
    pub(crate) fn change_asleep(
        &mut self,
        tag: NameId,
        was_asleep: bool,
        is_asleep: bool,
        bytes: u64,
    ) {
        let level = &mut self.tags.entry(tag).or_default().asleep_bytes;
        match (was_asleep, is_asleep) {
            (false, true) => *level = level.saturating_add(bytes),
            (true, false) => *level = level.saturating_sub(bytes),
            _ => {}
        }
    }

    /// Returns the bytes of each tag that has had regions, by the number of its name.
    pub(crate) fn tags(&self) -> impl Iterator<Item = (NameId, TagLevels)> {
        self.tags.iter().map(|(tag, levels)| (*tag, *levels))
    }

    fn record_peak(&self) {
        self.recorded.iter().for_each(|(_, allocator)| allocator.record_peak());
    }

    fn change(&mut self, role: Role, tag: NameId, to: impl FnOnce(u64) -> u64) {
        let gauge = match role {
            Role::Boundary => Gauge::DeviceBoundary,
            Role::BoundaryGrad => Gauge::DeviceBoundaryGrad,
            Role::Dormant => Gauge::DeviceDormant,
            Role::Tagged => {
                let level = &mut self.tags.entry(tag).or_default().awake_bytes;
                *level = to(*level);
                let value_bytes = *level;
                self.recorded.iter().for_each(|(timeline, _)| timeline.tag_gauge(tag, value_bytes));
                return;
            }
        };
        let level = &mut self.roles[role.index()];
        *level = to(*level);
        let value_bytes = *level;
        self.recorded.iter().for_each(|(timeline, _)| timeline.gauge(gauge, value_bytes));
    }
}
