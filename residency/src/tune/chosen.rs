//! A value with its reason.

/// A setting, and why it has this value.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Chosen {
    /// In bytes, or a count.
    pub value: u64,
    /// One line for people.
    pub reason: String,
}

impl Chosen {
    pub(super) fn new(value: u64, reason: impl Into<String>) -> Self {
        Self { value, reason: reason.into() }
    }
}
