//! The least time from some moment to the end, by what must cross the links.
//!
//! While operation `i` runs, what lives beyond its room is asleep: at least `short(i)` bytes. Let
//! `late(i, k)` be the bytes that may be asleep then and are not needed before `k` has begun: all
//! that left before `i`'s turn. Then, with `f(i)` the end of `i` and `s(k)` the begin of `k > i`,
//! - `short(i) − late(i, k)` bytes begin their copy in after `f(i)` and end it by `s(k)`,
//! - `short(k) − late(i, k)` bytes begin their copy out after `f(i)` and end it by `s(k)`.
//!
//! The first is the capacity recursion of `stall_bound_capacity_ns`, the second its mirror image.
//! What of these cannot lie in host memory must be read or written in the same time. All of these
//! are sums of whole groups, hence multiples of whatever all sizes are multiples of.

use std::ops::{AddAssign, SubAssign};

use super::super::work::{StepWork, carried_ns};
use super::state::{LINKS, Link, Place};

/// Operations from whose end the links' needs are looked at; of more, only some.
pub(super) const PIVOTS_MAX: usize = 512;

/// A moment of a schedule.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub now_ns: u64,
    /// The one that runs or is waited for.
    pub operation: usize,
    /// Of an operation that has begun; in the past for one that is held.
    pub runs_until_ns: Option<u64>,
    /// When each link's copy ends; `now_ns` or less for an idle one.
    pub link_free_ns: [u64; LINKS],
    /// Of each group.
    pub places: &'a [Place],
}

/// What does not change from moment to moment.
#[derive(Debug)]
pub(super) struct Bound<'a> {
    work: &'a StepWork,
    /// By operation: the bytes of all groups made and not freed while it runs, less its room.
    short_bytes: Vec<u128>,
    /// What copies can take of host memory and the file.
    host_bytes: u128,
    nvme_bytes: u128,
    by_need: Vec<usize>,
    /// The smallest group that takes any room.
    least_bytes: u64,
    /// By operation: what is known of its begin.
    begins_ns: Vec<u64>,
}

impl<'a> Bound<'a> {
    pub(super) fn new(work: &'a StepWork) -> Self {
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

    /// No schedule that comes by `view` ends before this; `u64::MAX` where none ends at all.
    pub(super) fn end_ns(&mut self, view: &View<'_>) -> u64 {
        let count = self.work.operations.len();
        self.begins_ns.fill(0);
        self.arrive(view);
        self.depart(view);
        let stride = count.div_ceil(PIVOTS_MAX).max(1);
        let mut ends_ns = view.now_ns;
        for at in view.operation..count {
            let running_ns = view.runs_until_ns.filter(|_| at == view.operation);
            ends_ns = if let Some(until_ns) = running_ns {
                until_ns.max(view.now_ns)
            } else {
                let begins_ns = self.begins_ns[at].max(ends_ns);
                begins_ns.saturating_add(self.work.operations[at].compute_ns)
            };
            if ends_ns == u64::MAX || !self.can_hold(at) {
                return u64::MAX;
            }
            if at % stride == 0 && !self.carry_on(at, ends_ns, view) {
                return u64::MAX;
            }
        }
        ends_ns
    }

    /// Whether what must be asleep at `operation` has anywhere to lie.
    fn can_hold(&self, operation: usize) -> bool {
        self.short_bytes[operation] <= self.host_bytes + self.nvme_bytes
    }

    fn not_before(&mut self, operation: usize, ns: u64) {
        if let Some(begins_ns) = self.begins_ns.get_mut(operation) {
            *begins_ns = ns.max(*begins_ns);
        }
    }

    /// What is asleep now comes in, each link one group at a time, before it is needed.
    fn arrive(&mut self, view: &View<'_>) {
        let mut wakes_ns = view.now_ns.max(view.link_free_ns[Link::In as usize]);
        let mut reads_ns = view.now_ns.max(view.link_free_ns[Link::Read as usize]);
        for index in 0..self.by_need.len() {
            let at = self.by_need[index];
            let place = view.places[at];
            let group = self.work.groups[at];
            if let Some(link) = place.link().filter(|_| place.is_coming()) {
                self.not_before(group.needed, view.link_free_ns[link as usize]);
            }
            if !place.is_out() {
                continue;
            }
            let links = &self.work.links;
            let in_ns =
                carried_ns(group.bytes, links.host_to_device_bytes_per_s).unwrap_or(u64::MAX);
            let read_ns =
                carried_ns(group.bytes, links.nvme_to_device_bytes_per_s).unwrap_or(u64::MAX);
            let is_in_file = matches!(place, Place::File | Place::Writing | Place::LeavingDirect);
            if is_in_file {
                reads_ns = reads_ns.saturating_add(read_ns);
            }
            let by_host = !(is_in_file && self.work.is_direct);
            if by_host {
                wakes_ns = wakes_ns.saturating_add(in_ns);
            }
            let mut arrives_ns = if by_host { wakes_ns } else { reads_ns };
            if by_host && is_in_file {
                arrives_ns = arrives_ns
                    .max(reads_ns.saturating_add(self.least_ns(links.host_to_device_bytes_per_s)));
            }
            if let Some(link) = place.link() {
                let rest_ns = if is_in_file { read_ns } else { 0 };
                let rest_ns = rest_ns.saturating_add(if by_host { in_ns } else { 0 });
                let free_ns = view.link_free_ns[link as usize];
                arrives_ns = arrives_ns.max(free_ns.saturating_add(rest_ns));
            }
            self.not_before(group.needed, arrives_ns);
        }
    }

    /// What each operation lacks and is not out yet goes out from now on.
    fn depart(&mut self, view: &View<'_>) {
        let mut out = Departed::default();
        let mut departs_ns = u64::MAX;
        for (at, &place) in view.places.iter().enumerate() {
            out += Departed::of(place, self.work.groups[at].bytes);
            if let Some(link) = place.link().filter(|_| place.is_leaving()) {
                departs_ns = departs_ns.min(view.link_free_ns[link as usize]);
            }
        }
        let free_ns = |link: Link| view.now_ns.max(view.link_free_ns[link as usize]);
        let is_direct = self.work.is_direct;
        let host = self.host_bytes;
        let mut next_need = 0;
        for at in view.operation..self.work.operations.len() {
            while let Some(&group) = self.by_need.get(next_need)
                && self.work.groups[group].needed <= at
            {
                out -= Departed::of(view.places[group], self.work.groups[group].bytes);
                next_need += 1;
            }
            let short = self.short_bytes[at];
            // With a second link out another group may be quicker.
            if short > out.settled && departs_ns != u64::MAX && !is_direct {
                self.not_before(at, departs_ns);
            }
            if short > out.all {
                let mut from_ns = free_ns(Link::Out);
                if is_direct {
                    from_ns = from_ns.min(free_ns(Link::Write));
                }
                self.not_before(at, from_ns.saturating_add(self.out_ns(short - out.all)));
            }
            if short > host + out.in_file && !is_direct {
                let bytes = short - host - out.in_file;
                let write_ns = self.fluid_ns(bytes, self.work.links.device_to_nvme_bytes_per_s);
                self.not_before(at, free_ns(Link::Write).saturating_add(write_ns));
            }
        }
    }

    /// What follows for later operations from the end of `pivot`. `false` where it cannot begin.
    fn carry_on(&mut self, pivot: usize, ends_ns: u64, view: &View<'_>) -> bool {
        let groups = &self.work.groups;
        let may_sleep = |at: usize| groups[at].leaves < pivot && view.places[at].may_be_out();
        let first = self.by_need.partition_point(|&at| groups[at].needed <= pivot);
        let mut late: u128 = 0;
        for &at in &self.by_need[first..] {
            late += if may_sleep(at) { u128::from(groups[at].bytes) } else { 0 };
        }
        let short = self.short_bytes[pivot];
        if short > late {
            return false;
        }
        let host = self.host_bytes;
        let mut next_need = first;
        for at in pivot + 1..self.work.operations.len() {
            while let Some(&group) = self.by_need.get(next_need)
                && groups[group].needed <= at
            {
                late -= if may_sleep(group) { u128::from(groups[group].bytes) } else { 0 };
                next_need += 1;
            }
            let mut carried = 0;
            if short > late {
                carried = self.in_ns(short - late);
                if !self.work.is_direct && short - late > host {
                    let read_ns = self
                        .fluid_ns(short - late - host, self.work.links.nvme_to_device_bytes_per_s);
                    carried =
                        carried.max(read_ns.saturating_add(
                            self.least_ns(self.work.links.host_to_device_bytes_per_s),
                        ));
                }
            }
            let short_then = self.short_bytes[at];
            if short_then > late {
                carried = carried.max(self.out_ns(short_then - late));
                if !self.work.is_direct && short_then - late > host {
                    let bytes = short_then - late - host;
                    let write_ns = self.fluid_ns(bytes, self.work.links.device_to_nvme_bytes_per_s);
                    carried =
                        carried.max(write_ns.saturating_add(
                            self.least_ns(self.work.links.device_to_host_bytes_per_s),
                        ));
                }
            }
            if carried > 0 {
                self.begins_ns[at] = self.begins_ns[at].max(ends_ns.saturating_add(carried));
            }
        }
        true
    }

    fn out_ns(&self, bytes: u128) -> u64 {
        let links = &self.work.links;
        self.both_ns(bytes, links.device_to_host_bytes_per_s, links.device_to_nvme_bytes_per_s)
    }

    fn in_ns(&self, bytes: u128) -> u64 {
        let links = &self.work.links;
        self.both_ns(bytes, links.host_to_device_bytes_per_s, links.nvme_to_device_bytes_per_s)
    }

    /// Device memory's own links together: where the file is direct, what it takes is spared the
    /// other link.
    fn both_ns(&self, bytes: u128, host_rate: u64, file_rate: u64) -> u64 {
        if !self.work.is_direct || file_rate == 0 {
            return self.fluid_ns(bytes, host_rate);
        }
        let together_ns = fluid_ns(bytes, host_rate.saturating_add(file_rate));
        let in_file_ns = self.fluid_ns(bytes.saturating_sub(self.host_bytes), file_rate);
        let in_host_ns = self.fluid_ns(bytes.saturating_sub(self.nvme_bytes), host_rate);
        together_ns.max(in_file_ns).max(in_host_ns).max(self.least_ns(host_rate.max(file_rate)))
    }

    /// How long a link is busy with groups of so many bytes in all, or more.
    fn fluid_ns(&self, bytes: u128, bytes_per_s: u64) -> u64 {
        if bytes == 0 { 0 } else { fluid_ns(bytes, bytes_per_s).max(self.least_ns(bytes_per_s)) }
    }

    /// How long any copy takes.
    fn least_ns(&self, bytes_per_s: u64) -> u64 {
        carried_ns(self.least_bytes, bytes_per_s).unwrap_or(0)
    }
}

/// Bytes out of device memory, or on their way.
#[derive(Clone, Copy, Debug, Default)]
struct Departed {
    all: u128,
    /// Those no longer on their way.
    settled: u128,
    /// Those in the file, or on their way from host memory.
    in_file: u128,
}

impl Departed {
    fn of(place: Place, bytes: u64) -> Self {
        let counted = |is_so: bool| if is_so { u128::from(bytes) } else { 0 };
        Self {
            all: counted(place.is_out()),
            settled: counted(place.is_out() && !place.is_leaving()),
            in_file: counted(matches!(place, Place::Writing | Place::File)),
        }
    }
}

impl AddAssign for Departed {
    fn add_assign(&mut self, more: Self) {
        self.all += more.all;
        self.settled += more.settled;
        self.in_file += more.in_file;
    }
}

impl SubAssign for Departed {
    fn sub_assign(&mut self, less: Self) {
        self.all -= less.all;
        self.settled -= less.settled;
        self.in_file -= less.in_file;
    }
}

const fn gcd(one: u64, other: u64) -> u64 {
    if other == 0 { one } else { gcd(other, one % other) }
}

/// How long so many bytes take; `u64::MAX` where there is no link.
fn fluid_ns(bytes: u128, bytes_per_s: u64) -> u64 {
    if bytes == 0 {
        return 0;
    }
    carried_ns(u64::try_from(bytes).unwrap_or(u64::MAX), bytes_per_s).unwrap_or(u64::MAX)
}
