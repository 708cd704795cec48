//! Awake device bytes by role and tag, recorded on the timeline at each change.

use std::collections::HashMap;
use std::sync::Arc;

use dormouse_timeline::{Gauge, NameId, Timeline};

use crate::ids::Role;

/// The levels. Under the table's lock, so that the timeline has them in order.
#[derive(Debug, Default)]
pub(crate) struct OwnerLevels {
    /// `None` until the engine is complete.
    timeline: Option<Arc<Timeline>>,
    /// By role. That of tags is not used.
    roles: [u64; Role::ALL.len()],
    /// At most as many as names fit the timeline.
    tags: HashMap<NameId, u64>,
}

impl OwnerLevels {
    pub(crate) fn new(timeline: Arc<Timeline>) -> Self {
        Self { timeline: Some(timeline), ..Self::default() }
    }

    pub(crate) fn add(&mut self, role: Role, tag: NameId, bytes: u64) {
        self.change(role, tag, |level| level.saturating_add(bytes));
    }

    pub(crate) fn remove(&mut self, role: Role, tag: NameId, bytes: u64) {
        self.change(role, tag, |level| level.saturating_sub(bytes));
    }

    fn change(&mut self, role: Role, tag: NameId, to: impl FnOnce(u64) -> u64) {
        let gauge = match role {
            Role::Boundary => Gauge::DeviceBoundary,
            Role::BoundaryGrad => Gauge::DeviceBoundaryGrad,
            Role::Dormant => Gauge::DeviceDormant,
            Role::Tagged => {
                let level = self.tags.entry(tag).or_default();
                *level = to(*level);
                let value_bytes = *level;
                self.timeline.iter().for_each(|it| it.tag_gauge(tag, value_bytes));
                return;
            }
        };
        let level = &mut self.roles[role.index()];
        *level = to(*level);
        let value_bytes = *level;
        self.timeline.iter().for_each(|it| it.gauge(gauge, value_bytes));
    }
}
