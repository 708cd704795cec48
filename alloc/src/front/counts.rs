//! What one shard did since its figures were last added to the state's.

use crate::stats::{Amount, Stats};

/// The figures of one shard: what was handed out, and what was taken back.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Counts {
    out: Sums,
    back: Sums,
    /// The most that was out, less what was back, at any one time; all of the same moment.
    top: Sums,
}

/// In this order the compiler adds to memory, rather than gather two of them in a register.
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

impl Counts {
    #[inline]
    pub(super) fn handed_out(&mut self, bytes: u64, requested_bytes: u64) {
        self.out.add(bytes, requested_bytes);
        // Where more is back than out, that is no new top.
        let above = self.out.bytes.wrapping_sub(self.back.bytes);
        if above.cast_signed() > self.top.bytes.cast_signed() {
            self.new_top();
        }
    }

    #[inline(never)]
    fn new_top(&mut self) {
        let Self { out, back, .. } = *self;
        self.top = Sums {
            bytes: out.bytes - back.bytes,
            requested_bytes: out.requested_bytes.saturating_sub(back.requested_bytes),
            blocks: out.blocks.saturating_sub(back.blocks),
        };
    }

    #[inline]
    pub(super) fn taken_back(&mut self, bytes: u64, requested_bytes: u64) {
        self.back.add(bytes, requested_bytes);
    }

    /// By how much more there is in the shard than before: it wraps where there is less.
    pub(super) const fn kept_bytes(&self) -> u64 {
        self.back.bytes.wrapping_sub(self.out.bytes)
    }

    /// Adds them to `stats`. What is out of the front's hands is active; what is in them, cached.
    pub(super) fn add_to(self, stats: &mut Stats) {
        let Self { out, back, top } = self;
        let blocks = &mut stats.allocations;
        change(&mut stats.allocated_bytes, out.bytes, back.bytes, top.bytes);
        change(&mut stats.active_bytes, out.bytes, back.bytes, top.bytes);
        let (asked, given_up) = (out.requested_bytes, back.requested_bytes);
        change(&mut stats.requested_bytes, asked, given_up, top.requested_bytes);
        change(blocks, out.blocks, back.blocks, top.blocks);
        for amount in [&mut stats.cached_bytes, &mut stats.inactive_split_bytes] {
            change(amount, back.bytes, out.bytes, 0);
        }
    }
}

/// `top` is how far it was above where it began.
fn change(amount: &mut Amount, added: u64, removed: u64, top: u64) {
    amount.peak = amount.peak.max(amount.current + top);
    amount.current = (amount.current + added).saturating_sub(removed);
    amount.added_total += added;
    amount.touch();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_peak_is_that_of_the_way_not_of_its_end() {
        let mut stats = Stats::default();
        stats.allocated_bytes.add(100);
        stats.active_bytes.add(100);
        stats.requested_bytes.add(90);
        stats.allocations.add(2);
        let mut counts = Counts::default();
        counts.taken_back(30, 25);
        counts.handed_out(30, 28);
        counts.handed_out(30, 20);
        counts.taken_back(30, 28);
        counts.taken_back(30, 20);
        counts.add_to(&mut stats);
        let Amount { current, peak, added_total } = stats.allocated_bytes;
        assert_eq!((current, peak, added_total), (70, 130, 160));
        assert_eq!(stats.allocated_bytes.removed_total(), 90);
        assert_eq!((stats.requested_bytes.current, stats.requested_bytes.peak), (65, 113));
        assert_eq!((stats.allocations.current, stats.allocations.peak), (1, 3));
        assert_eq!((stats.cached_bytes.current, stats.cached_bytes.peak), (30, 30));
    }
}
