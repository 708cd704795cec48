//! Limits of the memory that is pinned but unused.
//!
//! Unused pinned memory has four sources, each limited to a part of the maximum ever in use (*high*), so
//! that the peak stays within 3 % of it:
//! ```text
//!   open ranges of small slabs        share of the bytes (1/16 of log-uniform sizes up to
//!                                     256 MiB) · loss of a good fit (1/8)             ≈ 0.8 %
//!   the last slab for small requests  ≤ high / 128                                    ≤ 0.8 %
//!   one slab pinned in advance        ≤ high / 128                                    ≤ 0.8 %
//!   open ranges of large slabs        opened only up to high / 256                    ≈ 0.4 %
//! ```
//! (In a step that rises from nothing, the last may reach half of the distance to the peak. Not for the sizes of the step
//! before, if a request was refused there while such ranges were open: at equal lengths they would be as open again.)
//! Idle slabs do not count: they are unpinned before the peak exceeds `high` + 1/64.

use super::UNIT_BYTES;

const MIB_UNITS: u64 = (1 << 20) / UNIT_BYTES as u64;

/// A slab for small requests is this part of `high`, within the two limits below.
const SLAB_DIVISOR: u64 = 128;
/// Smallest slab for small requests: a driver call for less costs as much.
pub(super) const SLAB_UNITS_MIN: u64 = 2 * MIB_UNITS;
/// Largest slab for small requests: the cost of the call is negligible by then.
pub(super) const SLAB_UNITS_MAX: u64 = 64 * MIB_UNITS;
/// A request is small up to this part of such a slab.
const SMALL_DIVISOR: u64 = 4;
/// Pinned bytes may exceed `high` by this part of it.
const IDLE_DIVISOR: u64 = 64;
/// A large request takes any idle slab that is at most this part larger.
const TIGHT_DIVISOR: u64 = 256;
/// Limit of the open ranges of large slabs, as a part of `high`.
const OPEN_DIVISOR: u64 = 256;
/// In a rise, this part of the distance to `high` may be open in addition: a training step fills the pool
/// and empties it, so open ranges of one step are gone before the next. With random lifetimes they
/// would remain at the peak.
const MISSING_DIVISOR: u64 = 2;
/// A rise begins when at most this part of `high` is in use,
const LOW_DIVISOR: u64 = 8;
/// and ends when this part of it has been freed since.
const FALL_DIVISOR: u64 = 8;

/// Units in use.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UsageLevel {
    /// Units in buffers.
    pub(super) used: u64,
    /// Maximum of `used`.
    pub(super) high: u64,
    /// Units freed since the usage was last low.
    pub(super) given: u64,
}

impl UsageLevel {
    /// Returns the level as it is outside of a rise.
    pub(super) fn settled(self) -> Self {
        Self { given: self.high, ..self }
    }

    /// Returns the level with `units` more in use.
    pub(super) fn plus(self, units: u32) -> Self {
        let used = self.used + u64::from(units);
        Self { used, high: self.high.max(used), ..self }
    }

    /// Returns the units to pin for small requests.
    pub(super) fn slab_units(self) -> u32 {
        let units = (self.high / SLAB_DIVISOR).clamp(SLAB_UNITS_MIN, SLAB_UNITS_MAX);
        // At most `SLAB_UNITS_MAX`.
        u32::try_from(units).unwrap_or(u32::MAX)
    }

    /// Whether the next request begins a rise.
    pub(super) fn is_low(self) -> bool {
        self.used <= self.high / LOW_DIVISOR
    }

    /// Whether usage has mostly grown since it was last low.
    fn is_rising(self) -> bool {
        self.given <= self.high / FALL_DIVISOR
    }

    pub(super) fn is_small(self, units: u32) -> bool {
        u64::from(units) * SMALL_DIVISOR <= u64::from(self.slab_units())
    }

    /// Returns the limit of the pinned units; idle slabs are unpinned beyond it.
    pub(super) fn pinned_units_max(self) -> u64 {
        self.high + (self.high / IDLE_DIVISOR).max(2 * SLAB_UNITS_MIN)
    }

    /// Whether a large request of `units` (included in `self`) may take an idle slab and leave `rest` units
    /// open, with `open` units already open in large slabs.
    pub(super) fn may_open(self, units: u32, rest: u32, open: u64) -> bool {
        let rest = u64::from(rest);
        let missing = if self.is_rising() { self.high - self.used } else { 0 };
        let allowed = self.high / OPEN_DIVISOR + missing / MISSING_DIVISOR;
        rest <= u64::from(units) / TIGHT_DIVISOR || open + rest <= allowed
    }

    /// Whether `units` may be pinned in advance.
    pub(super) fn may_prepare(self, units: u32) -> bool {
        u64::from(units) <= (self.high / SLAB_DIVISOR).max(SLAB_UNITS_MIN)
    }
}
