//! Names of things: tiers, roles, regions.

use dormouse_device::SpanLabel;

/// Where bytes live.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Tier {
    /// Device pages, at the region's own address.
    Device,
    /// Pinned host memory.
    Host,
    /// The NVMe file.
    Nvme,
}

impl Tier {
    /// Every tier, in the order of [`Tier::index`].
    pub const ALL: [Self; 3] = [Self::Device, Self::Host, Self::Nvme];

    /// Its place in per-tier tables.
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Device => 0,
            Self::Host => 1,
            Self::Nvme => 2,
        }
    }
}

/// What a region is to the schedule.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Read by suffixes (K, V, …): never sleeps.
    Boundary,
    /// FP32 accumulator of a boundary tensor's gradient: never sleeps.
    BoundaryGrad,
    /// Saved by the prefix forward, read again only by the prefix backward.
    Dormant,
    /// Put under a user's tag.
    Tagged,
}

impl Role {
    /// Every role, in the order of [`Role::index`].
    pub const ALL: [Self; 4] = [Self::Boundary, Self::BoundaryGrad, Self::Dormant, Self::Tagged];

    /// Its place in per-role tables.
    #[must_use]
    pub const fn index(self) -> usize {
        match self {
            Self::Boundary => 0,
            Self::BoundaryGrad => 1,
            Self::Dormant => 2,
            Self::Tagged => 3,
        }
    }

    /// Whether a region of this role may ever fall asleep.
    #[must_use]
    pub const fn may_sleep(self) -> bool {
        matches!(self, Self::Dormant | Self::Tagged)
    }
}

/// Names one region. A slot's generation grows at every reuse, so a stale name finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId {
    /// Slot.
    pub index: u32,
    /// Which of the slot's regions; never 0.
    pub generation: u32,
}

impl RegionId {
    /// The id as one nonzero number: the allocator's owner key and the timeline's flow.
    #[must_use]
    pub const fn key(self) -> u64 {
        ((self.generation as u64) << 32) | self.index as u64
    }

    /// The id behind a key; `None` for a number no key can be.
    #[must_use]
    pub const fn from_key(key: u64) -> Option<Self> {
        let generation = (key >> 32) as u32;
        if generation == 0 {
            return None;
        }
        Some(Self { index: key as u32, generation })
    }
}

impl std::fmt::Display for RegionId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.index, self.generation)
    }
}

/// The label shown when a sleeping page is touched: `name` cut at a character boundary to what
/// fits, and the layer, where there is one.
#[must_use]
pub fn label(name: &str, layer: Option<u32>) -> SpanLabel {
    let mut label = SpanLabel { layer: layer.unwrap_or(u32::MAX), ..SpanLabel::default() };
    let mut end = name.len().min(label.name.len());
    while !name.is_char_boundary(end) {
        end -= 1;
    }
    label.name[..end].copy_from_slice(&name.as_bytes()[..end]);
    label
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_nonzero_and_reversible() {
        for id in
            [RegionId { index: 0, generation: 1 }, RegionId { index: 7, generation: u32::MAX }]
        {
            assert_ne!(id.key(), 0);
            assert_eq!(RegionId::from_key(id.key()), Some(id));
        }
        assert_eq!(RegionId::from_key(0), None);
        assert_eq!(RegionId::from_key(17), None);
    }

    #[test]
    fn labels_are_cut_at_characters() {
        let cut = label(&"é".repeat(20), Some(3));
        assert_eq!(std::str::from_utf8(&cut.name).unwrap(), "é".repeat(12));
        let odd = label(&format!("a{}", "é".repeat(20)), None);
        assert_eq!(odd.name[23], 0);
        assert_eq!(odd.layer, u32::MAX);
    }
}
