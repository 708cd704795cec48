//! Counts of one shard since they were last added to the allocator's statistics.

use crate::stats::{Amount, Stats};

/// Allocations and frees of one shard.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ShardCounts {
    allocated: Sums,
    freed: Sums,
    /// The highest value of `allocated` less `freed`; all fields of the same moment.
    peak: Sums,
}

/// In this order the compiler adds to memory directly, instead of combining two fields in a register.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct Sums {
    requested_bytes: u64,
    bytes: u64,
    blocks: u64,
}

impl Sums {
    #[inline]
    fn add(&mut self, bytes: u64, requested_bytes: u64) {
        self.bytes += bytes;
        self.requested_bytes += requested_bytes;
        self.blocks += 1;
    }
}

impl ShardCounts {
    #[inline]
    pub(super) fn add_allocated(&mut self, bytes: u64, requested_bytes: u64) {
        self.allocated.add(bytes, requested_bytes);
        // Negative if more was freed than allocated.
        let above = self.allocated.bytes.wrapping_sub(self.freed.bytes);
        if above.cast_signed() > self.peak.bytes.cast_signed() {
            self.new_peak();
        }
    }

    #[inline(never)]
    fn new_peak(&mut self) {
        let Self { allocated, freed, .. } = *self;
        self.peak = Sums {
            bytes: allocated.bytes - freed.bytes,
            requested_bytes: allocated.requested_bytes.saturating_sub(freed.requested_bytes),
            blocks: allocated.blocks.saturating_sub(freed.blocks),
        };
    }

    #[inline]
    pub(super) fn add_freed(&mut self, bytes: u64, requested_bytes: u64) {
        self.freed.add(bytes, requested_bytes);
    }

    /// The change of the bytes in the shard, as a wrapping difference.
    pub(super) const fn cached_bytes_change(&self) -> u64 {
        self.freed.bytes.wrapping_sub(self.allocated.bytes)
    }

    /// Adds the counts to `stats`: allocated blocks are active, freed ones cached.
    pub(super) fn add_to(self, stats: &mut Stats) {
        let Self { allocated, freed, peak } = self;
        let (added, removed) = (allocated.bytes, freed.bytes);
        change(&mut stats.allocated_bytes, added, removed, peak.bytes);
        change(&mut stats.active_bytes, added, removed, peak.bytes);
        let requested = (allocated.requested_bytes, freed.requested_bytes);
        change(&mut stats.requested_bytes, requested.0, requested.1, peak.requested_bytes);
        change(&mut stats.allocations, allocated.blocks, freed.blocks, peak.blocks);
        for amount in [&mut stats.cached_bytes, &mut stats.inactive_split_bytes] {
            change(amount, removed, added, 0);
        }
    }
}

/// `peak` is relative to the current value.
fn change(amount: &mut Amount, added: u64, removed: u64, peak: u64) {
    amount.peak = amount.peak.max(amount.current + peak);
    amount.current = (amount.current + added).saturating_sub(removed);
    amount.added_total += added;
    amount.touch();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_the_maximum_not_the_final_value() {
        let mut stats = Stats::default();
        stats.allocated_bytes.add(100);
        stats.active_bytes.add(100);
        stats.requested_bytes.add(90);
        stats.allocations.add(2);
        let mut counts = ShardCounts::default();
        counts.add_freed(30, 25);
        counts.add_allocated(30, 28);
        counts.add_allocated(30, 20);
        counts.add_freed(30, 28);
        counts.add_freed(30, 20);
        counts.add_to(&mut stats);
        let Amount { current, peak, added_total } = stats.allocated_bytes;
        assert_eq!((current, peak, added_total), (70, 130, 160));
        assert_eq!((stats.requested_bytes.current, stats.requested_bytes.peak), (65, 113));
        assert_eq!((stats.allocations.current, stats.allocations.peak), (1, 3));
        assert_eq!((stats.cached_bytes.current, stats.cached_bytes.peak), (30, 30));
    }
}
