//! A replay as plain as it can be, which the real one is tested against: nothing is kept but where
//! each group is, everything else is added up anew whenever it is asked for.

use std::cmp::Reverse;

use super::replay::ReplayOutcome;
use super::work::{DormantGroup, ResidencyPlan, StepWork};
use crate::{LinkDirection, Tier};
use Place::{Awake, File, Host, Leaving, Reading, Unmade, Waking, Writing};

/// Where one group stands. One that is freed stays awake.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Unmade,
    Awake,
    Leaving,
    Host,
    Writing,
    File,
    Reading,
    Waking,
}

struct Model<'a> {
    work: &'a StepWork,
    plan: &'a ResidencyPlan,
    now_ns: u64,
    operation: usize,
    runs_until_ns: Option<u64>,
    /// One that is freed stays awake.
    places: Vec<Place>,
    has_slept: Vec<bool>,
    has_been_read: Vec<bool>,
    ways: [Option<(usize, u64)>; LinkDirection::ALL.len()],
    outcome: ReplayOutcome,
}

/// What [`super::replay`] is to say of a valid work and a plan for all its groups.
pub(super) fn play(work: &StepWork, plan: &ResidencyPlan) -> Option<ReplayOutcome> {
    let groups = work.groups.len();
    let mut model = Model {
        work,
        plan,
        now_ns: 0,
        operation: 0,
        runs_until_ns: None,
        places: vec![Unmade; groups],
        has_slept: vec![false; groups],
        has_been_read: vec![false; groups],
        ways: [None; LinkDirection::ALL.len()],
        outcome: ReplayOutcome::default(),
    };
    loop {
        model.end_what_is_over();
        if model.operation == work.operations.len() {
            let (total_ns, compute_ns) = (model.now_ns, work.compute_ns());
            return Some(ReplayOutcome {
                total_ns,
                stall_ns: total_ns - compute_ns,
                ..model.outcome
            });
        }
        if model.runs_until_ns.is_none() && model.may_run() {
            let made = |at: &usize| work.groups[*at].made == model.operation;
            (0..groups).filter(made).for_each(|at| model.places[at] = Awake);
            let compute_ns = work.operations[model.operation].compute_ns;
            model.runs_until_ns = Some(model.now_ns + compute_ns);
        }
        for way in LinkDirection::ALL {
            model.begin_copy(way);
        }
        let ends = model.ways.iter().flatten().map(|&(_, until_ns)| until_ns);
        model.now_ns = ends.chain(model.runs_until_ns).min()?;
    }
}

impl Model<'_> {
    fn end_what_is_over(&mut self) {
        if self.runs_until_ns.is_some_and(|until_ns| until_ns <= self.now_ns) {
            self.runs_until_ns = None;
            self.operation += 1;
        }
        for way in LinkDirection::ALL {
            let on_it = &mut self.ways[way as usize];
            if let Some((at, _)) = on_it.take_if(|&mut (_, until_ns)| until_ns <= self.now_ns) {
                self.places[at] = match self.places[at] {
                    Leaving if self.is_direct(at) => File,
                    Leaving | Reading => Host,
                    Writing => File,
                    Waking => Awake,
                    other => unreachable!("{other:?} is on no link"),
                };
            }
        }
    }

    fn begin_copy(&mut self, way: LinkDirection) {
        if self.ways[way as usize].is_some() {
            return;
        }
        let links = &self.work.links;
        let (next, rate) = match way {
            LinkDirection::Sleep => (self.next_to_leave(false), links.device_to_host_bytes_per_s),
            LinkDirection::Write => {
                let next = self.next_to_leave(true).or_else(|| self.next_to_write());
                (next, links.device_to_nvme_bytes_per_s)
            }
            LinkDirection::Read => {
                let next = self.next_to_wake(true).or_else(|| self.next_to_read());
                (next, links.nvme_to_device_bytes_per_s)
            }
            LinkDirection::Wake => (self.next_to_wake(false), links.host_to_device_bytes_per_s),
        };
        let Some(at) = next else { return };
        let bytes = self.work.groups[at].bytes;
        if rate == 0 {
            return;
        }
        let ns = (bytes * 1_000_000_000).div_ceil(rate);
        self.places[at] = match (self.places[at], way) {
            (Awake, _) => Leaving,
            (Host, LinkDirection::Write) => Writing,
            (File, _) if !self.is_direct(at) => Reading,
            _ => Waking,
        };
        self.has_slept[at] |= self.places[at] == Leaving;
        self.has_been_read[at] |= self.places[at] == Reading;
        self.outcome.slept_bytes += if self.places[at] == Leaving { bytes } else { 0 };
        self.outcome.written_bytes += if way == LinkDirection::Write { bytes } else { 0 };
        self.ways[way as usize] = Some((at, self.now_ns + ns));
    }

    fn is_direct(&self, at: usize) -> bool {
        self.work.is_direct && self.plan.groups[at].choice == Tier::Nvme
    }

    fn bytes(&self, which: impl Fn(usize) -> bool) -> u64 {
        let which = (0..self.places.len()).filter(|&at| which(at));
        which.map(|at| self.work.groups[at].bytes).sum()
    }

    fn device_bytes(&self) -> u64 {
        let is_there = |at: usize| matches!(self.places[at], Awake | Leaving | Waking);
        self.bytes(|at| is_there(at) && self.operation <= self.work.groups[at].freed)
    }

    fn fits_host(&self, at: usize) -> bool {
        let held = |other: usize| {
            let is_there =
                matches!(self.places[other], Leaving | Host | Writing | Reading | Waking);
            is_there && !self.is_direct(other)
        };
        self.bytes(|other| held(other) || other == at) <= self.work.host_bytes
    }

    fn fits_file(&self, at: usize) -> bool {
        let held = |other: usize| match self.places[other] {
            Writing | File | Reading => true,
            Leaving | Waking => self.is_direct(other),
            _ => false,
        };
        self.bytes(|other| held(other) || other == at) <= self.work.nvme_bytes
    }

    fn may_run(&self) -> bool {
        let now = self.operation;
        let touched = |group: &DormantGroup| (group.needed..=group.freed).contains(&now);
        let mut groups = self.work.groups.iter().zip(&self.places);
        let made_bytes = self.bytes(|at| self.work.groups[at].made == now);
        groups.all(|(group, &place)| place == Awake || !touched(group))
            && self.device_bytes() + made_bytes <= self.work.operations[now].room_bytes
    }

    /// Those that sleep by the plan, sorted.
    fn sleepers<K: Ord>(&self, key: impl Fn(usize) -> K) -> Vec<usize> {
        let groups = self.plan.groups.iter().enumerate();
        let sleep = groups.filter(|(_, placing)| placing.choice != Tier::Device);
        let mut found: Vec<usize> = sleep.map(|(at, _)| at).collect();
        found.sort_by_key(|&at| key(at));
        found
    }

    fn in_order_of_need(&self) -> Vec<usize> {
        self.sleepers(|at| self.work.groups[at].needed)
    }

    fn in_order_of_leaving(&self) -> Vec<usize> {
        self.sleepers(|at| (self.may_leave_after(at), Reverse(self.work.groups[at].needed)))
    }

    fn may_leave_after(&self, at: usize) -> usize {
        self.plan.groups[at].sleep_after.max(self.work.groups[at].leaves)
    }

    fn may_leave_later(&self, at: usize) -> bool {
        self.operation <= self.may_leave_after(at)
    }

    fn is_yet_to_sleep(&self, at: usize) -> bool {
        !self.has_slept[at] && self.operation < self.work.groups[at].needed
    }

    fn is_to_be_written(&self, at: usize) -> bool {
        let is_for_file = self.plan.groups[at].choice == Tier::Nvme;
        is_for_file && self.places[at] == Host && !self.has_been_read[at]
    }

    fn next_to_leave(&self, direct: bool) -> Option<usize> {
        let is_next = |&at: &usize| self.is_direct(at) == direct && self.is_yet_to_sleep(at);
        let at = self.in_order_of_leaving().into_iter().find(is_next)?;
        let fits = if direct { self.fits_file(at) } else { self.fits_host(at) };
        (fits && self.places[at] == Awake && !self.may_leave_later(at)).then_some(at)
    }

    fn next_to_write(&self) -> Option<usize> {
        let next = self.in_order_of_leaving().into_iter().find(|&at| self.is_to_be_written(at));
        next.filter(|&at| self.fits_file(at))
    }

    fn next_to_read(&self) -> Option<usize> {
        let is_leaving = |&at: &usize| {
            let is_on_its_way = self.places[at] == Leaving || self.is_to_be_written(at);
            self.is_yet_to_sleep(at) || is_on_its_way
        };
        if self.in_order_of_leaving().iter().any(is_leaving) {
            return None;
        }
        let in_file = |&at: &usize| self.places[at] == File && !self.is_direct(at);
        self.in_order_of_need().into_iter().find(in_file).filter(|&at| self.fits_host(at))
    }

    fn next_to_wake(&self, direct: bool) -> Option<usize> {
        let is_asleep = |at: &usize| !matches!(self.places[*at], Unmade | Awake | Waking);
        let asleep: Vec<usize> = self.in_order_of_need().into_iter().filter(is_asleep).collect();
        for (rank, &at) in asleep.iter().enumerate() {
            if self.operation < self.plan.groups[at].wake_from {
                continue;
            }
            if !self.has_room(&asleep[..=rank]) {
                return None;
            }
            let is_here = match self.places[at] {
                File => direct && self.is_direct(at),
                Host => !direct,
                _ => false,
            };
            if is_here {
                return Some(at);
            }
        }
        None
    }

    /// Whether `back` may all come back now: there is room in each operation until the last of them
    /// is freed, where whatever else is to leave does, and whatever else is needed comes back.
    fn has_room(&self, back: &[usize]) -> bool {
        let Some(&last) = back.last() else { return true };
        let mut device_bytes = self.device_bytes() + self.bytes(|at| back.contains(&at));
        for now in self.operation..=self.work.groups[last].freed {
            let group = |at: usize| &self.work.groups[at];
            let sleeps = |at: usize| self.plan.groups[at].choice != Tier::Device;
            let is_first = now == self.operation;
            if !(is_first && self.runs_until_ns.is_some()) {
                device_bytes += self.bytes(|at| group(at).made == now);
            }
            device_bytes += self.bytes(|at| {
                let is_away =
                    self.may_leave_later(at) || !matches!(self.places[at], Awake | Waking);
                group(at).needed == now && sleeps(at) && is_away && !back.contains(&at)
            });
            if device_bytes > self.work.operations[now].room_bytes {
                return false;
            }
            let goes_bytes = self.bytes(|at| group(at).freed == now)
                + self.bytes(|at| sleeps(at) && self.may_leave_after(at) == now)
                + self.bytes(|at| is_first && self.places[at] == Leaving && !back.contains(&at));
            device_bytes = device_bytes.saturating_sub(goes_bytes);
        }
        true
    }
}
