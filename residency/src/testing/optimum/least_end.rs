//! The least time from some moment to the end.

use std::ops::{AddAssign, SubAssign};

use super::moment::link_of;
use crate::plan::location::GroupLocation;
use crate::plan::lower_bound::Bound;
use crate::plan::work::StepWork;
use crate::{LinkDirection, copy_ns};

/// A moment of a schedule.
#[derive(Clone, Copy, Debug)]
pub(super) struct View<'a> {
    pub now_ns: u64,
    /// The one that runs or is waited for.
    pub operation: usize,
    /// Of an operation that has begun; in the past for one that is held.
    pub runs_until_ns: Option<u64>,
    /// When each link's copy ends; `now_ns` or less for an idle one.
    pub link_free_ns: [u64; LinkDirection::ALL.len()],
    /// Of each group.
    pub places: &'a [GroupLocation],
}

/// [`Bound`] for moments other than the start.
#[derive(Debug)]
pub(super) struct LeastEnd<'a> {
    work: &'a StepWork,
    bound: Bound<'a>,
}

impl<'a> LeastEnd<'a> {
    pub(super) fn new(work: &'a StepWork) -> Self {
        Self { work, bound: Bound::new(work) }
    }

    /// No schedule that comes by `view` ends before this; `u64::MAX` where none ends at all.
    pub(super) fn end_ns(&mut self, view: &View<'_>) -> u64 {
        self.bound.begins_ns.fill(0);
        self.arrive(view);
        self.depart(view);
        let may_sleep = |at: usize| {
            let place = view.places[at];
            place.is_out() || matches!(place, GroupLocation::Unmade | GroupLocation::Awake)
        };
        self.bound.end_ns(view.now_ns, view.operation, view.runs_until_ns, may_sleep)
    }

    /// What is asleep now comes in, each link one group at a time, before it is needed.
    fn arrive(&mut self, view: &View<'_>) {
        let mut wakes_ns = view.now_ns.max(view.link_free_ns[LinkDirection::Wake as usize]);
        let mut reads_ns = view.now_ns.max(view.link_free_ns[LinkDirection::Read as usize]);
        for index in 0..self.bound.by_need.len() {
            let at = self.bound.by_need[index];
            let place = view.places[at];
            let group = self.work.groups[at];
            if let Some(link) = link_of(place).filter(|_| place.is_coming()) {
                self.bound.not_before(group.needed, view.link_free_ns[link as usize]);
            }
            if !place.is_out() {
                continue;
            }
            let links = &self.work.links;
            let in_ns =
                copy_ns(group.bytes.into(), links.host_to_device_bytes_per_s).unwrap_or(u64::MAX);
            let read_ns =
                copy_ns(group.bytes.into(), links.nvme_to_device_bytes_per_s).unwrap_or(u64::MAX);
            let is_in_file = matches!(
                place,
                GroupLocation::File | GroupLocation::Writing | GroupLocation::LeavingDirect
            );
            if is_in_file {
                reads_ns = reads_ns.saturating_add(read_ns);
            }
            let by_host = !(is_in_file && self.work.is_direct);
            if by_host {
                wakes_ns = wakes_ns.saturating_add(in_ns);
            }
            let mut arrives_ns = if by_host { wakes_ns } else { reads_ns };
            if by_host && is_in_file {
                arrives_ns = arrives_ns.max(
                    reads_ns.saturating_add(self.bound.least_ns(links.host_to_device_bytes_per_s)),
                );
            }
            if let Some(link) = link_of(place) {
                let rest_ns = if is_in_file { read_ns } else { 0 };
                let rest_ns = rest_ns.saturating_add(if by_host { in_ns } else { 0 });
                let free_ns = view.link_free_ns[link as usize];
                arrives_ns = arrives_ns.max(free_ns.saturating_add(rest_ns));
            }
            self.bound.not_before(group.needed, arrives_ns);
        }
    }

    /// What each operation lacks and is not out yet goes out from now on.
    fn depart(&mut self, view: &View<'_>) {
        let mut out = Departed::default();
        let mut departs_ns = u64::MAX;
        for (at, &place) in view.places.iter().enumerate() {
            out += Departed::of(place, self.work.groups[at].bytes);
            if let Some(link) = link_of(place).filter(|_| place.is_leaving()) {
                departs_ns = departs_ns.min(view.link_free_ns[link as usize]);
            }
        }
        let free_ns = [LinkDirection::Sleep, LinkDirection::Write]
            .map(|link| view.now_ns.max(view.link_free_ns[link as usize]));
        let mut next_need = 0;
        for at in view.operation..self.work.operations.len() {
            while let Some(&group) = self.bound.by_need.get(next_need)
                && self.work.groups[group].needed <= at
            {
                out -= Departed::of(view.places[group], self.work.groups[group].bytes);
                next_need += 1;
            }
            // With a second link out another group may be quicker.
            let is_late = self.bound.short_bytes[at] > out.settled && departs_ns != u64::MAX;
            if is_late && !self.work.is_direct {
                self.bound.not_before(at, departs_ns);
            }
            self.bound.leaves_before(at, [out.all, out.in_file], free_ns);
        }
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
    fn of(place: GroupLocation, bytes: u64) -> Self {
        let counted = |is_so: bool| if is_so { u128::from(bytes) } else { 0 };
        Self {
            all: counted(place.is_out()),
            settled: counted(place.is_out() && !place.is_leaving()),
            in_file: counted(matches!(place, GroupLocation::Writing | GroupLocation::File)),
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
