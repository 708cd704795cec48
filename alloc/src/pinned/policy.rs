//! How much to pin at a time, and how much may lie about unused. Numbers in, numbers out.
//!
//! Pinned memory beyond what is asked for comes from four places, each held to a part of the most
//! that was ever in use (*high*), so that the peak stays within 3 % of it:
//! ```text
//!   what small requests left open     their share of the bytes (1/16 of log-uniform sizes up to
//!                                     256 MiB) · what a good fit loses (1/8)          ≈ 0.8 %
//!   the last slab for small ones      ≤ high / 128                                    ≤ 0.8 %
//!   one slab prepared ahead           ≤ high / 128                                    ≤ 0.8 %
//!   what large requests left open     new holes only while all come to ≤ high / 256   ≈ 0.4 %
//! ```
//! (In a step that rises from nothing, holes may come to half of what is missing to the peak.)
//! Idle slabs do not count: they go when the peak would grow past `high` + 1/64 with them.

use super::UNIT_BYTES;

const MIB_UNITS: u64 = (1 << 20) / UNIT_BYTES as u64;

/// A slab for small requests is this part of the most ever in use, within the two limits below.
const SLAB_DIVISOR: u64 = 128;
/// The least pinned at a time for small requests: a driver call costs as much for less.
pub(super) const SLAB_UNITS_MIN: u64 = 2 * MIB_UNITS;
/// The most: by then the call itself no longer counts.
pub(super) const SLAB_UNITS_MAX: u64 = 64 * MIB_UNITS;
/// A request is small up to this part of such a slab: then its holes are, too.
const SMALL_DIVISOR: u64 = 4;
/// Idle slabs may make up this part of the most ever in use, beside what was in use then.
const IDLE_DIVISOR: u64 = 64;
/// A large request takes any idle slab that is no more than this part larger.
const TIGHT_DIVISOR: u64 = 256;
/// Open ranges of large slabs may make up this part of the most ever in use.
const OPEN_DIVISOR: u64 = 256;
/// And this part of what is missing to that, in a rise: a training step fills the pool and empties
/// it, so holes of this step are gone before the next. Where buffers come and go at random they
/// would still be there at the peak.
const MISSING_DIVISOR: u64 = 2;
/// A rise begins when no more than this part of the most ever in use is,
const LOW_DIVISOR: u64 = 8;
/// and ends when this part of it has been given back since.
const FALL_DIVISOR: u64 = 8;

/// How much is in use, which everything here is a part of.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct UsageLevel {
    /// Units in buffers now.
    pub(super) used: u64,
    /// The most there ever were.
    pub(super) high: u64,
    /// Units given back since next to nothing was in use.
    pub(super) given: u64,
}

impl UsageLevel {
    /// With `units` more in use.
    pub(super) fn plus(self, units: u32) -> Self {
        let used = self.used + u64::from(units);
        Self { used, high: self.high.max(used), ..self }
    }

    /// Units to pin for small requests.
    pub(super) fn slab_units(self) -> u32 {
        let units = (self.high / SLAB_DIVISOR).clamp(SLAB_UNITS_MIN, SLAB_UNITS_MAX);
        // At most `SLAB_UNITS_MAX`.
        u32::try_from(units).unwrap_or(u32::MAX)
    }

    /// Whether so little is in use that what comes next is a new rise.
    pub(super) fn is_low(self) -> bool {
        self.used <= self.high / LOW_DIVISOR
    }

    /// Whether what is in use has been growing, by and large, since it was next to nothing.
    fn is_rising(self) -> bool {
        self.given <= self.high / FALL_DIVISOR
    }

    pub(super) fn is_small(self, units: u32) -> bool {
        u64::from(units) * SMALL_DIVISOR <= u64::from(self.slab_units())
    }

    /// The most to have pinned: idle slabs make way for more.
    pub(super) fn pinned_units_max(self) -> u64 {
        self.high + (self.high / IDLE_DIVISOR).max(2 * SLAB_UNITS_MIN)
    }

    /// Whether a large request of `units` (counted in `self` already) may take an idle slab that
    /// leaves `rest` units open, where `open` are open in large slabs already.
    pub(super) fn may_open(self, units: u32, rest: u32, open: u64) -> bool {
        let rest = u64::from(rest);
        let missing = if self.is_rising() { self.high - self.used } else { 0 };
        let allowed = self.high / OPEN_DIVISOR + missing / MISSING_DIVISOR;
        rest <= u64::from(units) / TIGHT_DIVISOR || open + rest <= allowed
    }

    /// Whether `units` may be prepared before anybody asks.
    pub(super) fn may_prepare(self, units: u32) -> bool {
        u64::from(units) <= (self.high / SLAB_DIVISOR).max(SLAB_UNITS_MIN)
    }
}
