//! Configuration of an allocator.

use crate::error::AllocError;
use crate::thread_cache::GRANULE_BYTES_MAX;

/// Settings of one [`crate::Allocator`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Unit of block sizes in bytes, a power of two. If it is smaller than the device's page, blocks
    /// share pages, except those with [`crate::Request::whole_pages`].
    pub granule_bytes: usize,
    /// Limit of the mapped bytes. Not 0.
    pub budget_bytes: u64,
    /// Bytes of addresses of a segment, a multiple of the granule and of the page. A larger request gets
    /// a segment of a whole multiple of it.
    pub segment_bytes: usize,
    /// Whether free pages are moved before more pages are mapped than were ever in use, even within
    /// the budget. Saves memory at the cost of device calls.
    pub moves_pages: bool,
    /// Mapped bytes beyond the maximum use before pages move.
    pub margin: Margin,
    /// Limit of the bytes that the requests of a stream near the maximum use are ahead of its work, as soon as a block
    /// with [`crate::Request::scope`] was requested: see Run-ahead on the crate page. `None`: no limit.
    pub run_ahead: Option<Margin>,
    /// Whether freed small blocks are cached by thread for requests of the same or a slightly smaller
    /// size: blocks of up to 2048 granules of at most 4 KiB, in classes of a sixteenth, a few MiB for
    /// each thread and stream.
    pub thread_cache: bool,
}

/// Bytes that may be mapped beyond the maximum ever in use before free pages are moved, or stay cached in
/// [`Allocator::trim_beyond_margin`](crate::Allocator::trim_beyond_margin): the larger of `1 / divisor` of the bytes
/// in use and `bytes_min`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Margin {
    /// Divisor of the use. Not 0.
    pub divisor: u64,
    /// Least bytes of the margin.
    pub bytes_min: u64,
}

impl Margin {
    /// For memory that others could use: a GPU's.
    pub const TIGHT: Self = Self { divisor: 256, bytes_min: 0 };
    /// For [`Config::run_ahead`] on a GPU. Less than what counts as near the maximum: requests wait before they exceed
    /// it.
    pub const RUN_AHEAD: Self = Self { divisor: 64, bytes_min: 32 << 20 };

    /// Returns the bytes of the margin for a use of `use_bytes`.
    pub(crate) const fn of(self, use_bytes: u64) -> u64 {
        let part_bytes = use_bytes / self.divisor;
        if part_bytes > self.bytes_min { part_bytes } else { self.bytes_min }
    }
}

/// Default size of a segment.
const SEGMENT_BYTES_DEFAULT: usize = 64 << 20;

impl Config {
    /// Creates the default configuration: 64 MiB segments, no moves, no thread cache.
    #[must_use]
    pub const fn new(granule_bytes: usize, budget_bytes: u64) -> Self {
        Self {
            granule_bytes,
            budget_bytes,
            segment_bytes: SEGMENT_BYTES_DEFAULT,
            moves_pages: false,
            margin: Margin::TIGHT,
            run_ahead: None,
            thread_cache: false,
        }
    }

    /// Checks every field against the device's page size.
    pub(crate) fn validate(&self, page_bytes: usize) -> Result<(), AllocError> {
        let bad = |field, value: usize, accepted| {
            Err(AllocError::BadConfig { field, value: value as u64, accepted })
        };
        if !self.granule_bytes.is_power_of_two() {
            return bad("granule_bytes", self.granule_bytes, "a power of two");
        }
        if self.thread_cache && self.granule_bytes > GRANULE_BYTES_MAX {
            let accepted = "up to 4096 with thread_cache";
            return bad("granule_bytes", self.granule_bytes, accepted);
        }
        let unit_bytes = self.granule_bytes.max(page_bytes);
        if self.segment_bytes == 0 || !self.segment_bytes.is_multiple_of(unit_bytes) {
            return bad(
                "segment_bytes",
                self.segment_bytes,
                "a positive multiple of granule_bytes and of the device's page size",
            );
        }
        if self.budget_bytes == 0 {
            return bad("budget_bytes", 0, "at least 1");
        }
        if self.margin.divisor == 0 {
            return bad("margin.divisor", 0, "at least 1");
        }
        if self.run_ahead.is_some_and(|limit| limit.divisor == 0) {
            return bad("run_ahead.divisor", 0, "at least 1");
        }
        Ok(())
    }
}
