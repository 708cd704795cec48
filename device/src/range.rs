//! Address ranges.

/// Device virtual addresses `[start, start + bytes)`. Plain numbers: never dereferenced here.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct AddressRange {
    /// First address.
    pub start: usize,
    /// Length in bytes.
    pub bytes: usize,
}

impl AddressRange {
    /// A range from its first address and length.
    #[must_use]
    pub const fn new(start: usize, bytes: usize) -> Self {
        Self { start, bytes }
    }

    /// One past the last address (saturating: a range at the top of the space ends there).
    #[must_use]
    pub const fn end(self) -> usize {
        self.start.saturating_add(self.bytes)
    }

    /// Whether `address` lies inside.
    #[must_use]
    pub const fn contains(self, address: usize) -> bool {
        address.wrapping_sub(self.start) < self.bytes
    }

    /// The first `bytes` of it (all, where it has no more) and the rest.
    #[must_use]
    pub const fn split_at(self, bytes: usize) -> (Self, Self) {
        let bytes = if bytes < self.bytes { bytes } else { self.bytes };
        (Self::new(self.start, bytes), Self::new(self.start + bytes, self.bytes - bytes))
    }

    /// Whether `other` lies wholly inside.
    #[must_use]
    pub const fn covers(self, other: Self) -> bool {
        other.start >= self.start && other.end() <= self.end()
    }
}
