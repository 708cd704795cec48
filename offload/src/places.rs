//! Places in a step: its phases, and the marks of its layers.

/// A phase of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Phase {
    /// Prefix forward.
    A,
    /// Suffixes.
    B,
    /// Prefix backward.
    C,
}

impl Phase {
    /// Returns its index in per-phase tables.
    #[must_use]
    pub const fn index(self) -> usize {
        self as usize
    }
}

/// Begin or end of one layer's forward or backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Edge {
    /// Before a layer's forward.
    ForwardBegin,
    /// After a layer's forward.
    ForwardEnd,
    /// Before a layer's backward.
    BackwardBegin,
    /// After a layer's backward.
    BackwardEnd,
}
