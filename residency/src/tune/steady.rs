//! A value that follows what steps need, without going back and forth.

/// Steps in a row that need less before a value falls.
pub const FALL_STEPS: u32 = 8;
/// A need within this part of the value changes nothing: that much is noise.
const BAND_DIVISOR: u64 = 8;

/// A value that rises at once and falls late.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Steady {
    value: u64,
    /// Steps in a row that needed less, and the most that one of them needed.
    low_steps: u32,
    low_most: u64,
}

impl Steady {
    /// Creates it with its first value.
    #[must_use]
    pub const fn new(value: u64) -> Self {
        Self { value, low_steps: 0, low_most: 0 }
    }

    /// Returns the value.
    #[must_use]
    pub const fn value(&self) -> u64 {
        self.value
    }

    /// Takes what a step needed. Returns true if the value changed.
    pub fn follow(&mut self, need: u64) -> bool {
        let band = self.value / BAND_DIVISOR;
        if need > self.value.saturating_add(band) {
            *self = Self::new(need);
            return true;
        }
        if need.saturating_add(band) >= self.value {
            *self = Self::new(self.value);
            return false;
        }
        self.low_steps += 1;
        self.low_most = self.low_most.max(need);
        let falls = self.low_steps == FALL_STEPS;
        if falls {
            *self = Self::new(self.low_most);
        }
        falls
    }
}
