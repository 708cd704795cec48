//! How an allocator is set up.

use crate::error::AllocError;
use crate::thread_cache::GRANULE_BYTES_MAX;

/// Settings of one [`crate::Allocator`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Config {
    /// Unit of block sizes: a power of two. Where it is less than the device's page, blocks share
    /// pages, but for those asked for with [`crate::Request::whole_pages`].
    pub granule_bytes: usize,
    /// The most pages that may be held at any time, in bytes. Not 0.
    pub budget_bytes: u64,
    /// Addresses given to a pool at a time, a multiple of the granule and of the page. A larger request gets a
    /// segment of a whole multiple of this. Addresses are cheap: 64 MiB suits most.
    pub segment_bytes: usize,
    /// Whether free pages are moved to where they are needed before the device is asked for more
    /// than ever were in use, though the budget has room. It saves memory that others can use, and
    /// costs calls of the device.
    pub moves_pages: bool,
    /// Whether small blocks that are freed are kept as they are, by thread, for the next request
    /// like it, or for one that is a little smaller: up to 2048 granules (of 4 KiB at most) each, in
    /// classes of a sixteenth, a few MiB for each thread and stream.
    pub thread_cache: bool,
    /// Whether [`crate::Allocator::leak_report`] has something to say.
    pub leak_report: bool,
}

/// The usual size of a segment.
const SEGMENT_BYTES_DEFAULT: usize = 64 << 20;

impl Config {
    /// The usual settings: granules of `granule_bytes`, 64 MiB segments, leaks reported.
    #[must_use]
    pub const fn new(granule_bytes: usize, budget_bytes: u64) -> Self {
        Self {
            granule_bytes,
            budget_bytes,
            segment_bytes: SEGMENT_BYTES_DEFAULT,
            moves_pages: false,
            thread_cache: false,
            leak_report: true,
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
            let accepted = "up to 4096 where small blocks are kept";
            return bad("granule_bytes", self.granule_bytes, accepted);
        }
        let unit_bytes = self.granule_bytes.max(page_bytes);
        if self.segment_bytes == 0 || !self.segment_bytes.is_multiple_of(unit_bytes) {
            return bad(
                "segment_bytes",
                self.segment_bytes,
                "a positive multiple of granule_bytes and of the device's page",
            );
        }
        if self.budget_bytes == 0 {
            return bad("budget_bytes", 0, "at least 1");
        }
        Ok(())
    }
}
