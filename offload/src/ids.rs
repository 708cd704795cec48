//! Tiers, roles and region ids.

use dormouse_device::SpanLabel;
pub use dormouse_residency::Tier;

/// The role of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Role {
    /// Read by suffixes (K, V, …): never sleeps.
    Boundary,
    /// FP32 accumulator of a boundary tensor's gradient: never sleeps.
    BoundaryGrad,
    /// Saved by the prefix forward; read again only by the prefix backward.
    Dormant,
    /// Memory of a tag.
    Tagged,
}

impl Role {
    /// All roles, in the order of [`Role::index`].
    pub const ALL: [Self; 4] = [Self::Boundary, Self::BoundaryGrad, Self::Dormant, Self::Tagged];

    /// Returns its index in per-role tables.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }

    /// Returns true if regions of this role may sleep.
    #[must_use]
    pub const fn may_sleep(self) -> bool {
        matches!(self, Self::Dormant | Self::Tagged)
    }
}

/// Identifies a region. A slot's generation grows at every reuse, so a stale id finds nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct RegionId {
    /// The slot.
    pub index: u32,
    /// The generation of the slot; never 0.
    pub generation: u32,
}

impl RegionId {
    /// Returns the id as one nonzero number: the allocator's owner key and the timeline's flow.
    #[must_use]
    pub const fn key(self) -> u64 {
        ((self.generation as u64) << 32) | self.index as u64
    }

    /// Returns the id of a key; `None` if no key has that number.
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

/// Returns the label shown when a sleeping page is touched: `name`, cut at a character boundary, and the
/// layer, if any.
#[must_use]
pub fn label(name: &str, layer: Option<u32>) -> SpanLabel {
    let mut label = SpanLabel { layer: layer.unwrap_or(u32::MAX), ..SpanLabel::default() };
    let end = name.floor_char_boundary(label.name.len());
    label.name[..end].copy_from_slice(&name.as_bytes()[..end]);
    label
}

/// Returns the layer of a label, if any.
#[must_use]
pub(crate) fn layer_of(label: &SpanLabel) -> Option<u32> {
    (label.layer != u32::MAX).then_some(label.layer)
}

/// Returns the name of a label.
#[must_use]
pub(crate) fn name_of(label: &SpanLabel) -> String {
    let end = label.name.iter().position(|byte| *byte == 0).unwrap_or(label.name.len());
    String::from_utf8_lossy(&label.name[..end]).into_owned()
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
        assert_eq!((name_of(&cut), layer_of(&cut)), ("é".repeat(12), Some(3)));
        assert_eq!(
            (name_of(&label("kv", None)), layer_of(&label("kv", None))),
            ("kv".to_owned(), None)
        );
        let odd = label(&format!("a{}", "é".repeat(20)), None);
        assert_eq!(odd.name[23], 0);
        assert_eq!(odd.layer, u32::MAX);
    }
}
