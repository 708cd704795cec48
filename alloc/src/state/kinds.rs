//! Statistics of the pools of small and of large blocks. Huge blocks count as large.

use super::pools::PoolKind;
use super::segments::Segment;
use super::{RangeKind, Record, State, bare_list};
use crate::stats::{PoolStats, Stats};

impl State {
    /// Returns all statistics, and the parts of pools of small and of large blocks. Walks all segments.
    ///
    /// The walk counts large blocks, which change only under the state's lock. The figures of small blocks, which the
    /// thread cache also changes, are the differences from the totals.
    pub(crate) fn stats_by_kind(&mut self) -> (Stats, [PoolStats; 2]) {
        let stats = self.settled_stats();
        let mut large =
            PoolStats { mapped_bytes: stats.staged_bytes.current, ..PoolStats::default() };
        let mut small_splits = 0;
        for segment in self.segments.iter().flatten() {
            if self.pools[segment.pool as usize].kind == PoolKind::Small {
                small_splits += self.inactive_splits(segment);
            } else {
                self.count_segment(segment, &mut large);
            }
        }
        (stats, [stats.beside(&large, small_splits), large])
    }

    /// Returns the number of free mapped ranges of a segment that has memory in use.
    fn inactive_splits(&self, segment: &Segment) -> u64 {
        if segment.used_units == 0 {
            return 0;
        }
        let is_free = |&index: &u32| match self.ranges.list(index) {
            Some(list) => list != bare_list(segment.pool),
            None => self.is_in_cache(index),
        };
        self.ranges_in(segment).filter(is_free).count() as u64
    }

    fn count_segment(&self, segment: &Segment, count: &mut PoolStats) {
        count.segments += 1;
        count.inactive_splits += self.inactive_splits(segment);
        for index in self.ranges_in(segment) {
            let bytes = self.range_bytes(index);
            match self.ranges.list(index) {
                Some(list) if list == bare_list(segment.pool) => {}
                Some(_) => {
                    count.mapped_bytes += bytes;
                    count.inactive_split_bytes += if segment.used_units > 0 { bytes } else { 0 };
                }
                None => self.count_used(index, count),
            }
        }
    }

    /// Counts a range that is in no list of free ones.
    fn count_used(&self, index: u32, count: &mut PoolStats) {
        let bytes = self.range_bytes(index);
        let record = self.records.get(index as usize).unwrap_or(&Record::NOTHING);
        match record.kind {
            RangeKind::Nothing | RangeKind::Trimming => count.mapped_bytes += bytes,
            RangeKind::Mapping => count.mapped_bytes += self.bytes(record.cached_units),
            RangeKind::Pending => {
                count.mapped_bytes += bytes;
                count.active_bytes += bytes;
                count.pending_blocks += 1;
            }
            RangeKind::Live if self.is_in_cache(index) => {
                count.mapped_bytes += bytes;
                count.inactive_split_bytes += bytes;
            }
            RangeKind::Live => {
                let awake_bytes = self.awake_bytes(index);
                count.mapped_bytes += awake_bytes;
                count.active_bytes += awake_bytes;
                if !record.free_deferred {
                    count.allocated_bytes += awake_bytes;
                    count.requested_bytes += self.requested_bytes(index) as u64;
                    count.allocations += 1;
                }
            }
        }
    }
}
