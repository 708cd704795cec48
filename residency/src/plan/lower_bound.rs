//! A lower bound on the time of every schedule of a step, from the bytes that must cross the links.
//!
//! While operation `i` runs, at least `short(i)` bytes are asleep: those alive beyond its room. Let
//! `late(i, k)` be the bytes that may be asleep then and are not needed before `k` has begun: all
//! that left before `i` began. Then, with `f(i)` the end of `i` and `s(k)` the begin of `k > i`,
//! - `short(i) − late(i, k)` bytes begin their copy in after `f(i)` and end it by `s(k)`,
//! - `short(k) − late(i, k)` bytes begin their copy out after `f(i)` and end it by `s(k)`.
//!
//! The part of these that host memory cannot hold must be read or written in the same time. All of these
//! are sums of whole groups, hence multiples of the common divisor of all sizes.

use super::work::StepWork;
use crate::{LinkRates, copy_ns};

/// Limit on operations whose end is used as a pivot; of more operations, every n-th is.
const PIVOTS_MAX: usize = 512;

/// Returns a lower bound on the time of every schedule of `work`, in nanoseconds; `u64::MAX` if none ends.
///
/// It considers compute, the bytes that each link must carry between two operations because of room, and the
/// sizes of host memory and the file. It treats copies as divisible, down to the common divisor of all
/// sizes. Quadratic in the operations up to 512 of them, then linear and looser.
#[must_use]
pub fn lower_bound(work: &StepWork) -> u64 {
    if work.validate().is_err() {
        return u64::MAX;
    }
    let mut bound = Bound::new(work);
    for at in 0..work.operations.len() {
        bound.leaves_before(at, [0; 2], [0; 2]);
    }
    bound.end_ns(0, 0, None, |_| true)
}

/// The bound from some moment on: the constants of the work, and a bound on each operation's begin.
#[derive(Debug)]
pub(crate) struct Bound<'a> {
    work: &'a StepWork,
    /// By operation: the bytes of all groups made and not freed while it runs, minus its room.
    pub(crate) short_bytes: Vec<u128>,
    /// Host memory and file that copies can use.
    host_bytes: u128,
    nvme_bytes: u128,
    pub(crate) by_need: Vec<usize>,
    /// The smallest group that takes any room.
    least_bytes: u64,
    /// By operation: a lower bound on its begin.
    pub(crate) begins_ns: Vec<u64>,
}

impl<'a> Bound<'a> {
    pub(crate) fn new(work: &'a StepWork) -> Self {
        let count = work.operations.len();
        let (mut born, mut died) = (vec![0_u128; count], vec![0_u128; count]);
        for group in &work.groups {
            born[group.made] += u128::from(group.bytes);
            died[group.freed] += u128::from(group.bytes);
        }
        let unit = work.groups.iter().fold(0, |unit, group| gcd(unit, group.bytes)).max(1);
        let mut alive = 0;
        let mut short_bytes = Vec::with_capacity(count);
        for (at, operation) in work.operations.iter().enumerate() {
            alive += born[at];
            let short = alive.saturating_sub(u128::from(operation.room_bytes));
            short_bytes.push(short.next_multiple_of(u128::from(unit)));
            alive -= died[at];
        }
        let mut by_need: Vec<usize> = (0..work.groups.len()).collect();
        by_need.sort_by_key(|&at| work.groups[at].needed);
        let smallest = work.groups.iter().map(|group| group.bytes).filter(|&b| b > 0).min();
        Self {
            work,
            short_bytes,
            host_bytes: u128::from(work.host_bytes - work.host_bytes % unit),
            nvme_bytes: u128::from(work.nvme_bytes - work.nvme_bytes % unit),
            by_need,
            least_bytes: smallest.unwrap_or(0),
            begins_ns: vec![0; count],
        }
    }

    /// Notes that no schedule begins `operation` before `ns`.
    pub(crate) fn not_before(&mut self, operation: usize, ns: u64) {
        if let Some(begins_ns) = self.begins_ns.get_mut(operation) {
            *begins_ns = ns.max(*begins_ns);
        }
    }

    /// Bounds the begin of `operation`: the bytes that it lacks beyond `out_bytes` (`file_bytes` of them in
    /// the file) leave by the links out and to the file, which are free at the given times.
    pub(crate) fn leaves_before(
        &mut self,
        operation: usize,
        [out_bytes, file_bytes]: [u128; 2],
        [out_free_ns, write_free_ns]: [u64; 2],
    ) {
        let short = self.short_bytes[operation];
        let LinkRates { device_to_host_bytes_per_s, device_to_nvme_bytes_per_s, .. } =
            self.work.links;
        if short > out_bytes {
            let out_ns = self.both_ns(
                short - out_bytes,
                device_to_host_bytes_per_s,
                device_to_nvme_bytes_per_s,
            );
            let direct_ns = if self.work.is_direct { write_free_ns } else { u64::MAX };
            self.not_before(operation, out_free_ns.min(direct_ns).saturating_add(out_ns));
        }
        let elsewhere = self.host_bytes + file_bytes;
        if short > elsewhere && !self.work.is_direct {
            let write_ns = self.fluid_ns(short - elsewhere, device_to_nvme_bytes_per_s);
            self.not_before(operation, write_free_ns.saturating_add(write_ns));
        }
    }

    /// Returns a lower bound on the end of every schedule that is at operation `first` at `now_ns`. The
    /// operation runs until `running_until_ns` if it has begun, and only groups that satisfy `may_sleep` may
    /// be asleep. `u64::MAX` if no schedule ends.
    pub(crate) fn end_ns(
        &mut self,
        now_ns: u64,
        first: usize,
        running_until_ns: Option<u64>,
        may_sleep: impl Fn(usize) -> bool,
    ) -> u64 {
        let count = self.work.operations.len();
        let stride = count.div_ceil(PIVOTS_MAX).max(1);
        let mut ends_ns = now_ns;
        for at in first..count {
            let running_ns = running_until_ns.filter(|_| at == first);
            ends_ns = if let Some(until_ns) = running_ns {
                until_ns.max(now_ns)
            } else {
                let begins_ns = self.begins_ns[at].max(ends_ns);
                begins_ns.saturating_add(self.work.operations[at].compute_ns)
            };
            let can_hold = self.short_bytes[at] <= self.host_bytes + self.nvme_bytes;
            if ends_ns == u64::MAX || !can_hold {
                return u64::MAX;
            }
            if at % stride == 0 && !self.advance(at, ends_ns, &may_sleep) {
                return u64::MAX;
            }
        }
        ends_ns
    }

    /// Bounds the begin of later operations by the end of `pivot`. `false` if the pivot cannot begin.
    fn advance(&mut self, pivot: usize, ends_ns: u64, may_sleep: impl Fn(usize) -> bool) -> bool {
        let groups = &self.work.groups;
        let asleep_bytes = |at: usize| {
            let is_asleep = groups[at].leaves < pivot && may_sleep(at);
            if is_asleep { u128::from(groups[at].bytes) } else { 0 }
        };
        let first = self.by_need.partition_point(|&at| groups[at].needed <= pivot);
        let mut late: u128 = self.by_need[first..].iter().map(|&at| asleep_bytes(at)).sum();
        let short = self.short_bytes[pivot];
        if short > late {
            return false;
        }
        let links = self.work.links;
        let mut next_need = first;
        for at in pivot + 1..self.work.operations.len() {
            while let Some(&group) = self.by_need.get(next_need)
                && groups[group].needed <= at
            {
                late -= asleep_bytes(group);
                next_need += 1;
            }
            let in_ns = self.cross_ns(
                short.saturating_sub(late),
                links.host_to_device_bytes_per_s,
                links.nvme_to_device_bytes_per_s,
            );
            let out_ns = self.cross_ns(
                self.short_bytes[at].saturating_sub(late),
                links.device_to_host_bytes_per_s,
                links.device_to_nvme_bytes_per_s,
            );
            let carried_ns = in_ns.max(out_ns);
            if carried_ns > 0 {
                self.begins_ns[at] = self.begins_ns[at].max(ends_ns.saturating_add(carried_ns));
            }
        }
        true
    }

    /// Returns the time to copy these bytes out of device memory or into it, and the part that host memory
    /// cannot hold to the file or from it.
    fn cross_ns(&self, bytes: u128, host_rate: u64, file_rate: u64) -> u64 {
        let both_ns = self.both_ns(bytes, host_rate, file_rate);
        if self.work.is_direct || bytes <= self.host_bytes {
            return both_ns;
        }
        let file_ns = self.fluid_ns(bytes - self.host_bytes, file_rate);
        both_ns.max(file_ns.saturating_add(self.least_ns(host_rate)))
    }

    /// Returns the time of device memory's links together: a direct file relieves the host link.
    fn both_ns(&self, bytes: u128, host_rate: u64, file_rate: u64) -> u64 {
        if bytes == 0 || !self.work.is_direct || file_rate == 0 {
            return self.fluid_ns(bytes, host_rate);
        }
        let together_rate = host_rate.saturating_add(file_rate);
        let together_ns = copy_ns(bytes, together_rate).unwrap_or(u64::MAX);
        let in_file_ns = self.fluid_ns(bytes.saturating_sub(self.host_bytes), file_rate);
        let in_host_ns = self.fluid_ns(bytes.saturating_sub(self.nvme_bytes), host_rate);
        together_ns.max(in_file_ns).max(in_host_ns).max(self.least_ns(host_rate.max(file_rate)))
    }

    /// Returns the time that a link is busy with groups of at least this many bytes in total.
    fn fluid_ns(&self, bytes: u128, bytes_per_s: u64) -> u64 {
        if bytes == 0 {
            return 0;
        }
        copy_ns(bytes, bytes_per_s).unwrap_or(u64::MAX).max(self.least_ns(bytes_per_s))
    }

    /// Returns the time of the shortest copy.
    pub(crate) fn least_ns(&self, bytes_per_s: u64) -> u64 {
        copy_ns(self.least_bytes.into(), bytes_per_s).unwrap_or(0)
    }
}

const fn gcd(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { gcd(other, one % other) }
}
