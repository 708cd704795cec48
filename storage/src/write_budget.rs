//! The bytes written to the file, and the budget of writes per day. Pure.
//!
//! Writes wear out a disk, so a day has a budget of bytes. It is a token bucket that starts full, fills
//! evenly and holds at most one day's budget. An extent's bytes are reserved when it is allocated and spent
//! as they are written; the unwritten rest returns to the bucket with the extent. Reserved bytes count as
//! bytes in the bucket until they are written, so at most n + 1 budgets are written in any n days. (Bytes
//! that short writes wrote again may exceed this.)

use super::error::NvmeError;

const DAY_S: u64 = 24 * 60 * 60;
const DAY_NS: u128 = DAY_S as u128 * 1_000_000_000;

/// The count and the budget. Times are nanoseconds of one clock that never runs backwards.
#[derive(Debug, Default)]
pub(super) struct WriteBudget {
    written_bytes: u64,
    /// Bytes per 24 hours; 0 if unlimited.
    day_bytes: u64,
    /// Bytes times the nanoseconds of a day, so that filling does not round.
    left: u128,
    /// Bytes reserved and not written yet. The bucket contains them and `left`.
    reserved_bytes: u64,
    at_ns: u64,
}

impl WriteBudget {
    /// Creates a full budget of `day_bytes` per day; 0 is unlimited.
    pub(super) fn new(day_bytes: u64) -> Self {
        Self { day_bytes, left: full(day_bytes), ..Self::default() }
    }

    /// Returns the bytes written so far.
    pub(super) const fn written_bytes(&self) -> u64 {
        self.written_bytes
    }

    /// Bytes per 24 hours; 0 if unlimited.
    pub(super) const fn day_bytes(&self) -> u64 {
        self.day_bytes
    }

    /// Returns the bytes that can be reserved now; 0 if unlimited.
    pub(super) fn left_bytes(&mut self, now_ns: u64) -> u64 {
        self.fill(now_ns);
        u64::try_from(self.left / DAY_NS).unwrap_or(u64::MAX)
    }

    /// Reserves all of `bytes`, or nothing.
    ///
    /// # Errors
    /// `Spent`.
    pub(super) fn reserve(&mut self, bytes: u64, now_ns: u64) -> Result<(), NvmeError> {
        if self.day_bytes == 0 {
            return Ok(());
        }
        let left_bytes = self.left_bytes(now_ns);
        let asked = full(bytes);
        if let Some(left) = self.left.checked_sub(asked) {
            self.left = left;
            self.reserved_bytes += bytes;
            return Ok(());
        }
        let missing_ns = (asked - self.left).div_ceil(u128::from(self.day_bytes));
        let wait_s = missing_ns.div_ceil(1_000_000_000) as u64;
        Err(NvmeError::Spent {
            asked_bytes: bytes,
            left_bytes,
            budget_bytes: self.day_bytes,
            enough_in_s: (bytes <= self.day_bytes).then_some(wait_s),
        })
    }

    /// Counts written bytes, first of the reservation. The excess (a part of a unit that is written again
    /// after a short write) is taken from the rest of the bucket.
    pub(super) fn wrote(&mut self, reserved_bytes: &mut u64, bytes: u64, now_ns: u64) {
        self.fill(now_ns);
        self.written_bytes += bytes;
        let covered = bytes.min(*reserved_bytes);
        *reserved_bytes -= covered;
        self.reserved_bytes = self.reserved_bytes.saturating_sub(covered);
        self.left = self.left.saturating_sub(full(bytes - covered));
    }

    /// Returns reserved bytes that were not written.
    pub(super) fn give_back(&mut self, bytes: u64, now_ns: u64) {
        self.fill(now_ns);
        self.reserved_bytes = self.reserved_bytes.saturating_sub(bytes);
        self.add(full(bytes));
    }

    /// Advances the time by `ns`.
    #[cfg(all(any(test, feature = "faults"), not(loom)))]
    pub(super) fn pass(&mut self, ns: u64) {
        self.add(u128::from(ns) * u128::from(self.day_bytes));
    }

    fn fill(&mut self, now_ns: u64) {
        let passed_ns = now_ns.saturating_sub(self.at_ns);
        self.at_ns = self.at_ns.max(now_ns);
        self.add(u128::from(passed_ns) * u128::from(self.day_bytes));
    }

    fn add(&mut self, more: u128) {
        let room = full(self.day_bytes.saturating_sub(self.reserved_bytes));
        self.left = self.left.saturating_add(more).min(room);
    }
}

/// Converts bytes to the unit of `WriteBudget::left`.
const fn full(bytes: u64) -> u128 {
    bytes as u128 * DAY_NS
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND_NS: u64 = 1_000_000_000;

    #[test]
    fn an_error_states_the_rest_and_the_time_to_wait() {
        let mut writes = WriteBudget::new(86_400);
        writes.reserve(86_000, 0).unwrap();
        writes.wrote(&mut 86_000, 86_000, 0);
        let refused = writes.reserve(1000, 100 * SECOND_NS).unwrap_err();
        let spent = |asked_bytes, left_bytes, enough_in_s| NvmeError::Spent {
            asked_bytes,
            left_bytes,
            budget_bytes: 86_400,
            enough_in_s,
        };
        assert_eq!(refused, spent(1000, 500, Some(500)));
        assert_eq!(
            refused.to_string(),
            "the NVMe tier may write 86400 bytes a day: 500 are left and 1000 are asked for, \
             which it may in 500 s"
        );
        // To the nanosecond.
        assert!(writes.reserve(1000, 600 * SECOND_NS - 1).is_err());
        writes.reserve(1000, 600 * SECOND_NS).unwrap();
        assert_eq!(writes.left_bytes(600 * SECOND_NS), 0);

        let never = writes.reserve(86_401, 600 * SECOND_NS).unwrap_err();
        assert_eq!(never, spent(86_401, 0, None));
        assert!(never.to_string().ends_with("more than a day's"), "{never}");
    }

    #[test]
    fn an_unlimited_budget_still_counts() {
        let mut writes = WriteBudget::new(0);
        writes.reserve(u64::MAX, 0).unwrap();
        writes.wrote(&mut 0, 7, 0);
        assert_eq!((writes.written_bytes(), writes.left_bytes(9)), (7, 0));
    }

    #[test]
    fn a_budget_of_any_size_fills_in_a_day() {
        for day_bytes in [1, 86_399, 1 << 40, u64::MAX] {
            let mut writes = WriteBudget::new(day_bytes);
            writes.reserve(day_bytes, 5).unwrap();
            writes.wrote(&mut { day_bytes }, day_bytes, 5);
            let day_ns = DAY_NS as u64;
            assert_eq!(writes.left_bytes(5 + day_ns / 2), day_bytes / 2);
            assert!(writes.left_bytes(5 + day_ns - 1) < day_bytes);
            assert_eq!(writes.left_bytes(5 + day_ns), day_bytes);
            assert_eq!(writes.left_bytes(u64::MAX), day_bytes);
        }
    }

    #[test]
    fn reserved_bytes_count_as_part_of_the_bucket() {
        let (day, day_ns) = (1000, DAY_NS as u64);
        let mut writes = WriteBudget::new(day);
        let mut asides = [300, 300, 400];
        for bytes in asides {
            writes.reserve(bytes, 0).unwrap();
        }
        // Days later, with nothing written, no further byte may be written.
        assert_eq!(writes.left_bytes(5 * day_ns), 0);
        for aside in &mut asides[..2] {
            writes.wrote(aside, 300, 5 * day_ns);
        }
        assert_eq!(writes.left_bytes(5 * day_ns), 0);
        assert_eq!(writes.left_bytes(7 * day_ns), 600);
        writes.give_back(asides[2], 7 * day_ns);
        assert_eq!(writes.left_bytes(7 * day_ns), day);
    }

    #[derive(Clone, Debug)]
    enum Event {
        /// Seconds pass.
        Pass(u64),
        /// An extent of this size in bytes is requested.
        Ask(u64),
        /// A share (of 256) of the n-th extent is written.
        Write(usize, u64),
        /// The n-th extent is released.
        Release(usize),
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            (0..20_000_u64).prop_map(Event::Pass),
            (1..60_000_u64).prop_map(Event::Ask),
            (0..8_usize, 0..300_u64).prop_map(|(at, share)| Event::Write(at, share)),
            (0..8_usize).prop_map(Event::Release),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(512))]
        /// A model with one byte per second, exact at every second.
        #[test]
        fn the_bucket_equals_a_naive_model(events in prop::collection::vec(event(), 1..60)) {
            let day = DAY_S;
            let mut writes = WriteBudget::new(day);
            let (mut now_s, mut left, mut written) = (0, day, 0);
            // The reservation of each extent, in the bucket and in the model.
            let mut extents: Vec<(u64, u64)> = Vec::new();
            for event in events {
                let now_ns = now_s * SECOND_NS;
                match event {
                    Event::Pass(seconds) => {
                        let aside: u64 = extents.iter().map(|(_, theirs)| theirs).sum();
                        for _ in 0..seconds {
                            now_s += 1;
                            left = (left + 1).min(day - aside);
                        }
                    }
                    Event::Ask(bytes) => {
                        let granted = writes.reserve(bytes, now_ns).is_ok();
                        prop_assert_eq!(granted, bytes <= left);
                        if granted {
                            left -= bytes;
                            extents.push((bytes, bytes));
                        }
                    }
                    Event::Write(at, share) => {
                        let Some((ours, theirs)) = extents.get_mut(at) else { continue };
                        let bytes = *theirs * share / 256;
                        writes.wrote(ours, bytes, now_ns);
                        written += bytes;
                        for _ in 0..bytes {
                            if *theirs > 0 {
                                *theirs -= 1;
                            } else {
                                left = left.saturating_sub(1);
                            }
                        }
                        prop_assert_eq!(*ours, *theirs);
                    }
                    Event::Release(at) => {
                        if at < extents.len() {
                            let (ours, theirs) = extents.swap_remove(at);
                            writes.give_back(ours, now_ns);
                            left += theirs;
                        }
                    }
                }
                prop_assert_eq!(writes.left_bytes(now_s * SECOND_NS), left);
                prop_assert_eq!(writes.written_bytes(), written);
            }
        }

        #[test]
        fn in_any_n_days_at_most_n_and_one_budgets_are_written(
            events in prop::collection::vec(event(), 1..120),
        ) {
            let mut writes = WriteBudget::new(DAY_S);
            let (mut now_s, mut extents, mut written) = (0, Vec::new(), Vec::new());
            for event in events {
                let now_ns = now_s * SECOND_NS;
                match event {
                    Event::Pass(seconds) => now_s += seconds,
                    Event::Ask(bytes) => {
                        extents.extend(writes.reserve(bytes, now_ns).ok().map(|()| bytes));
                    }
                    Event::Write(at, share) => {
                        let Some(aside) = extents.get_mut(at) else { continue };
                        let bytes = *aside * share.min(256) / 256;
                        writes.wrote(aside, bytes, now_ns);
                        written.push((now_s, bytes));
                    }
                    Event::Release(at) => {
                        if at < extents.len() {
                            writes.give_back(extents.swap_remove(at), now_ns);
                        }
                    }
                }
            }
            for (first, &(from_s, _)) in written.iter().enumerate() {
                let mut bytes = 0;
                for &(at_s, more) in &written[first..] {
                    bytes += more;
                    // One byte per second, and one day's budget.
                    prop_assert!(bytes <= DAY_S + (at_s - from_s), "{bytes} from {from_s} to {at_s}");
                }
            }
        }
    }
}
