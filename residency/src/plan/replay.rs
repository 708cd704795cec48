//! How long a plan takes: one step played event by event, by the rules the engine follows.

use std::cmp::Reverse;

use super::location::{GroupLocation, Occupancy};
use super::work::{ResidencyPlan, StepWork};
use crate::{LinkDirection, Tier};

/// How a step went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayOutcome {
    /// From the begin of the first operation to the end of the last, in nanoseconds.
    pub total_ns: u64,
    /// The part of it in which no operation ran.
    pub stall_ns: u64,
    /// Bytes copied out of device memory (and back in).
    pub slept_bytes: u64,
    /// Bytes of them written to the file.
    pub written_bytes: u64,
}

/// What one turn of a replay costs, in operations looked at for room.
const TURN_STEPS: usize = 24;
/// What one group or operation costs before the first turn.
const SETUP_STEPS: usize = 8;

const DIRECTIONS: usize = LinkDirection::ALL.len();

/// Plays `plan`. Returns `None` where it never ends: something has no room, or no link.
///
/// The rules: groups leave in the order in which they may, those needed last first where that is
/// the same; they move on to the file, are read and wake in the order needed, as soon as there is
/// room that stays theirs until they are freed.
#[must_use]
pub fn replay(work: &StepWork, plan: &ResidencyPlan) -> Option<ReplayOutcome> {
    work.validate().ok()?;
    let mut steps_left = u64::MAX;
    Stage::new(work).play(plan, u64::MAX, &mut steps_left)
}

/// What all replays of one work share.
#[derive(Debug)]
pub(super) struct Stage<'a> {
    work: &'a StepWork,
    compute_ns: u64,
    /// By operation: the bytes that it makes, and those that it frees.
    made_bytes: Vec<u64>,
    freed_bytes: Vec<u64>,
    /// By group, then by [`LinkDirection`]: the time of its copy, where there is such a link.
    copies_ns: Vec<[Option<u64>; DIRECTIONS]>,
    /// Groups in the order in which they are needed.
    by_need: Vec<usize>,
}

impl<'a> Stage<'a> {
    /// Of a work that is valid.
    pub(super) fn new(work: &'a StepWork) -> Self {
        let count = work.operations.len();
        let (mut made_bytes, mut freed_bytes) = (vec![0; count], vec![0; count]);
        for group in &work.groups {
            made_bytes[group.made] += group.bytes;
            freed_bytes[group.freed] += group.bytes;
        }
        let copies_ns = work.groups.iter().map(|group| work.links.copies_ns(group.bytes));
        let mut by_need: Vec<usize> = (0..work.groups.len()).collect();
        by_need.sort_by_key(|&at| work.groups[at].needed);
        Self {
            work,
            compute_ns: work.compute_ns(),
            made_bytes,
            freed_bytes,
            copies_ns: copies_ns.collect(),
            by_need,
        }
    }

    /// By operation: the bytes of all groups that are made by then and not freed before.
    pub(super) fn there_bytes(&self) -> impl Iterator<Item = u64> {
        let mut there_bytes = 0;
        let (made, freed) = (self.made_bytes.iter(), self.freed_bytes.iter());
        made.zip(freed).map(move |(made, freed)| {
            let now_bytes = there_bytes + made;
            there_bytes = now_bytes - freed;
            now_bytes
        })
    }

    /// Plays `plan` as [`replay`] does, and takes what that costs from `steps_left`: one for each
    /// operation looked at for room, other things in proportion. `None` also where those do not last, and where it would take
    /// more than `most_ns`.
    pub(super) fn play(
        &self,
        plan: &ResidencyPlan,
        most_ns: u64,
        steps_left: &mut u64,
    ) -> Option<ReplayOutcome> {
        let mut player = Player::new(self, plan, most_ns, *steps_left)?;
        let outcome = player.play();
        *steps_left = player.steps_left;
        outcome
    }
}

struct Player<'a> {
    stage: &'a Stage<'a>,
    work: &'a StepWork,
    plan: &'a ResidencyPlan,
    most_ns: u64,
    steps_left: u64,
    now_ns: u64,
    /// Of the operations that have not begun.
    rest_ns: u64,
    /// The next operation, or the one that runs.
    operation: usize,
    runs_until_ns: Option<u64>,
    /// Of each group; one that is freed stays where it is.
    locations: Vec<GroupLocation>,
    /// Groups that sleep, in the order in which they leave.
    leaving: Vec<usize>,
    /// The same in the order in which they are needed.
    waking: Vec<usize>,
    /// Of the groups, so many are made.
    made: usize,
    /// Of those that leave, so many may have by now.
    let_leave: usize,
    /// Of those that leave, so many have or never will: by way of host memory, and straight.
    left: [usize; 2],
    /// Of those that leave, so many are in the file, or on the way, or will not get there.
    written: usize,
    /// Of those that leave, so many take no more of host memory for it.
    settled: usize,
    /// Of those that wake, so many have or are about to, or never slept.
    woken: usize,
    /// Of those that wake, so many are needed by operations before this one.
    used: usize,
    /// Before this operation none wakes.
    wake_from: usize,
    /// By operation: the bytes that are let leave when it has ended.
    let_leave_bytes: Vec<u64>,
    /// By operation: the bytes needed from it on that come back for it, as far as one can know.
    back_bytes: Vec<u64>,
    /// By [`LinkDirection`]: the group on it, and until when.
    links: [Option<(usize, u64)>; DIRECTIONS],
    taken: Occupancy,
    /// The part of device memory taken that is on its way out.
    leaving_bytes: u64,
    outcome: ReplayOutcome,
}

impl<'a> Player<'a> {
    fn new(
        stage: &'a Stage<'a>,
        plan: &'a ResidencyPlan,
        most_ns: u64,
        steps_left: u64,
    ) -> Option<Self> {
        let work = stage.work;
        let (groups, count) = (work.groups.len(), work.operations.len());
        if plan.groups.len() != groups {
            return None;
        }
        let sleeps = |at: &usize| plan.groups[*at].choice != Tier::Device;
        let mut leaving: Vec<usize> = (0..groups).filter(sleeps).collect();
        leaving.sort_by_key(|&at| (due(work, plan, at), Reverse(work.groups[at].needed)));
        let waking: Vec<usize> = stage.by_need.iter().copied().filter(sleeps).collect();
        let (mut let_leave_bytes, mut back_bytes) = (vec![0; count], vec![0; count]);
        for &at in &leaving {
            *let_leave_bytes.get_mut(due(work, plan, at))? += work.groups[at].bytes;
            back_bytes[work.groups[at].needed] += work.groups[at].bytes;
        }
        let wake_from = waking.iter().map(|&at| plan.groups[at].wake_from).min();
        Some(Self {
            stage,
            work,
            plan,
            most_ns,
            steps_left: steps_left.saturating_sub((SETUP_STEPS * (groups + count)) as u64),
            now_ns: 0,
            rest_ns: stage.compute_ns,
            operation: 0,
            runs_until_ns: None,
            locations: vec![GroupLocation::Unmade; groups],
            leaving,
            waking,
            made: 0,
            let_leave: 0,
            left: [0; 2],
            written: 0,
            settled: 0,
            woken: 0,
            used: 0,
            wake_from: wake_from.unwrap_or_default(),
            let_leave_bytes,
            back_bytes,
            links: [None; DIRECTIONS],
            taken: Occupancy::default(),
            leaving_bytes: 0,
            outcome: ReplayOutcome::default(),
        })
    }

    fn play(&mut self) -> Option<ReplayOutcome> {
        loop {
            self.take_steps(TURN_STEPS);
            self.end_what_is_over();
            // At the end of time nobody knows how long it took.
            if self.steps_left == 0 || self.now_ns == u64::MAX {
                return None;
            }
            if self.operation == self.work.operations.len() {
                self.outcome.total_ns = self.now_ns;
                self.outcome.stall_ns = self.now_ns - self.stage.compute_ns;
                return Some(self.outcome);
            }
            self.begin_operation();
            let ends_ns = self.runs_until_ns.unwrap_or(self.now_ns).saturating_add(self.rest_ns);
            if ends_ns > self.most_ns {
                return None;
            }
            for direction in LinkDirection::ALL {
                self.begin_copy(direction);
            }
            // A group that went off the link may have let the operation begin at this moment.
            let ends = self.links.iter().flatten().map(|&(_, until_ns)| until_ns);
            self.now_ns = ends.chain(self.runs_until_ns).min()?;
        }
    }

    fn take_steps(&mut self, steps: usize) {
        self.steps_left = self.steps_left.saturating_sub(steps as u64);
    }

    fn end_what_is_over(&mut self) {
        if self.runs_until_ns.is_some_and(|until_ns| until_ns <= self.now_ns) {
            self.runs_until_ns = None;
            self.taken.device_bytes -= self.stage.freed_bytes[self.operation];
            self.operation += 1;
            // Whoever may leave and has not is taken to stay.
            while let Some(&at) = self.leaving.get(self.let_leave)
                && due(self.work, self.plan, at) < self.operation
            {
                let group = &self.work.groups[at];
                self.back_bytes[group.needed] -= group.bytes;
                self.let_leave += 1;
            }
        }
        for direction in LinkDirection::ALL {
            let on_it = &mut self.links[direction as usize];
            if let Some((at, _)) = on_it.take_if(|&mut (_, until_ns)| until_ns <= self.now_ns) {
                let from = self.locations[at];
                if from.is_leaving() {
                    self.leaving_bytes -= self.work.groups[at].bytes;
                }
                self.moves(at, from.arrived());
            }
        }
    }

    fn moves(&mut self, at: usize, to: GroupLocation) {
        self.taken.moves(self.locations[at], to, self.work.groups[at].bytes);
        self.locations[at] = to;
    }

    fn begin_operation(&mut self) {
        if self.runs_until_ns.is_some() {
            return;
        }
        // What was needed before is awake until it is freed, as is what does not sleep.
        while let Some(&at) = self.waking.get(self.used)
            && self.work.groups[at].needed <= self.operation
        {
            if !matches!(self.locations[at], GroupLocation::Awake | GroupLocation::Back) {
                return;
            }
            self.used += 1;
        }
        let operation = self.work.operations[self.operation];
        let made_bytes = self.stage.made_bytes[self.operation];
        if self.taken.device_bytes + made_bytes > operation.room_bytes {
            return;
        }
        while let Some(group) = self.work.groups.get(self.made)
            && group.made == self.operation
        {
            self.locations[self.made] = GroupLocation::Awake;
            self.made += 1;
        }
        self.taken.device_bytes += made_bytes;
        self.rest_ns -= operation.compute_ns;
        self.runs_until_ns = Some(self.now_ns.saturating_add(operation.compute_ns));
    }

    fn begin_copy(&mut self, direction: LinkDirection) {
        if self.links[direction as usize].is_some() {
            return;
        }
        let Some(at) = self.next_on(direction) else { return };
        let Some(ns) = self.stage.copies_ns[at][direction as usize] else { return };
        let Some(to) = self.locations[at].begun(direction, self.work.is_direct) else { return };
        let group = &self.work.groups[at];
        let back_bytes = &mut self.back_bytes[group.needed];
        if to.is_leaving() {
            self.outcome.slept_bytes += group.bytes;
            self.leaving_bytes += group.bytes;
            *back_bytes += group.bytes;
        }
        if to.is_coming() {
            *back_bytes -= group.bytes;
        }
        if direction == LinkDirection::Write {
            self.outcome.written_bytes += group.bytes;
        }
        self.moves(at, to);
        self.links[direction as usize] = Some((at, self.now_ns.saturating_add(ns)));
    }

    /// The group that goes next, if one may.
    fn next_on(&mut self, direction: LinkDirection) -> Option<usize> {
        match direction {
            LinkDirection::Sleep => self.next_to_leave(false),
            LinkDirection::Write => self.next_to_leave(true).or_else(|| self.next_to_write()),
            LinkDirection::Read => self.next_to_wake(true).or_else(|| self.next_to_read()),
            LinkDirection::Wake => self.next_to_wake(false),
        }
    }

    fn is_direct(&self, at: usize) -> bool {
        self.work.is_direct && self.plan.groups[at].choice == Tier::Nvme
    }

    /// It has not left yet and still can. What still is awake when it is needed stays awake.
    fn is_to_sleep(&self, at: usize) -> bool {
        let has_not_left =
            matches!(self.locations[at], GroupLocation::Unmade | GroupLocation::Awake);
        has_not_left && self.operation < self.work.groups[at].needed
    }

    /// The first that has not left yet, where it may by now.
    fn next_to_leave(&mut self, direct: bool) -> Option<usize> {
        let mut left = self.left[usize::from(direct)];
        let is_next = |&at: &usize| self.is_direct(at) == direct && self.is_to_sleep(at);
        while self.leaving.get(left).is_some_and(|at| !is_next(at)) {
            left += 1;
        }
        self.left[usize::from(direct)] = left;
        let at = *self.leaving.get(left)?;
        let may = self.locations[at] == GroupLocation::Awake && left < self.let_leave;
        let has_place = if direct { self.fits_file(at) } else { self.fits_host(at) };
        (may && has_place).then_some(at)
    }

    fn fits_host(&self, at: usize) -> bool {
        self.taken.host_bytes + self.work.groups[at].bytes <= self.work.host_bytes
    }

    fn fits_file(&self, at: usize) -> bool {
        self.taken.file_bytes + self.work.groups[at].bytes <= self.work.nvme_bytes
    }

    /// In host memory, meant for the file, and not written yet.
    fn next_to_write(&mut self) -> Option<usize> {
        let is_on_its_way = |at: usize| {
            let is_for_file = self.plan.groups[at].choice == Tier::Nvme && !self.is_direct(at);
            is_for_file && self.is_unsettled(at)
        };
        let mut written = self.written;
        while self.leaving.get(written).is_some_and(|&at| !is_on_its_way(at)) {
            written += 1;
        }
        self.written = written;
        let at = *self.leaving.get(written)?;
        (self.is_to_be_written(at) && self.fits_file(at)).then_some(at)
    }

    fn is_to_be_written(&self, at: usize) -> bool {
        self.locations[at] == GroupLocation::Host && self.plan.groups[at].choice == Tier::Nvme
    }

    /// It is yet to leave, or to be written.
    fn is_unsettled(&self, at: usize) -> bool {
        self.is_to_sleep(at) || self.locations[at].is_leaving() || self.is_to_be_written(at)
    }

    /// Host memory is for what leaves first, and then for what comes back.
    fn next_to_read(&mut self) -> Option<usize> {
        while let Some(&at) = self.leaving.get(self.settled) {
            if self.is_unsettled(at) {
                return None;
            }
            self.settled += 1;
        }
        if self.work.is_direct {
            return None;
        }
        let in_file = |&at: &usize| self.locations[at] == GroupLocation::File;
        let asleep = self.waking.get(self.woken..)?;
        let found = asleep.iter().position(in_file);
        let next = found.map(|index| asleep[index]).filter(|&at| self.fits_host(at));
        self.take_steps(found.map_or(self.waking.len() - self.woken, |index| index + 1));
        next
    }

    /// The first in the order of need that has its bytes at this link's end, and room here beside
    /// those before it.
    fn next_to_wake(&mut self, direct: bool) -> Option<usize> {
        if self.operation < self.wake_from || (direct && !self.work.is_direct) {
            return None;
        }
        while self.waking.get(self.woken).is_some_and(|&at| self.is_done_sleeping(at)) {
            self.woken += 1;
        }
        let is_next = |&at: &usize| {
            let location = self.locations[at];
            let is_here =
                if direct { location == GroupLocation::File } else { location.rests_in_host() };
            is_here && self.operation >= self.plan.groups[at].wake_from
        };
        let found = self.waking[self.woken..].iter().position(is_next);
        self.take_steps(found.map_or(self.waking.len() - self.woken, |index| index + 1));
        let next = self.woken + found?;
        let has_room = self.has_room_up_to(next);
        has_room.then_some(self.waking[next])
    }

    /// It has woken or is about to, or is needed by now and has not slept.
    fn is_done_sleeping(&self, at: usize) -> bool {
        match self.locations[at] {
            GroupLocation::Awake => !self.is_to_sleep(at),
            location => location.is_coming() || location == GroupLocation::Back,
        }
    }

    /// Whether there is room for all asleep that wake no later than this one, which is the first to
    /// go: for each that may, beside those before it.
    fn has_room_up_to(&mut self, next: usize) -> bool {
        let (mut device_bytes, mut leaving_bytes) = (self.taken.device_bytes, self.leaving_bytes);
        let mut looked_at = self.woken;
        let mut has_room = true;
        while has_room && looked_at <= next {
            let at = self.waking[looked_at];
            looked_at += 1;
            if !self.locations[at].is_out() {
                continue;
            }
            let group = &self.work.groups[at];
            device_bytes += group.bytes;
            self.back_bytes[group.needed] -= group.bytes;
            if self.locations[at].is_leaving() {
                leaving_bytes -= group.bytes;
            }
            if self.operation >= self.plan.groups[at].wake_from {
                has_room = self.has_room(device_bytes, leaving_bytes, group.freed);
            }
        }
        for &at in &self.waking[self.woken..looked_at] {
            if self.locations[at].is_out() {
                let group = &self.work.groups[at];
                self.back_bytes[group.needed] += group.bytes;
            }
        }
        has_room
    }

    /// Whether so many bytes, of which some are on their way out, are within the room of every
    /// operation up to `last`, as far as one can know: what is to leave later does so in time, and
    /// whoever sleeps and is needed before comes back too.
    fn has_room(&mut self, mut device_bytes: u64, leaving_bytes: u64, last: usize) -> bool {
        let (stage, ahead) = (self.stage, self.operation..=last);
        if self.runs_until_ns.is_some() {
            // What it makes is there, and is about to be counted.
            device_bytes -= stage.made_bytes[self.operation];
        }
        let comes = stage.made_bytes[ahead.clone()].iter().zip(&self.back_bytes[ahead.clone()]);
        let goes =
            stage.freed_bytes[ahead.clone()].iter().zip(&self.let_leave_bytes[ahead.clone()]);
        let operations = self.work.operations[ahead].iter();
        let mut leaving_bytes = leaving_bytes;
        let mut steps = 0;
        let has_room = operations.zip(comes.zip(goes)).all(|(operation, ((made, back), goes))| {
            steps += 1;
            device_bytes += made + back;
            let has_room = device_bytes <= operation.room_bytes;
            device_bytes = device_bytes.saturating_sub(leaving_bytes + goes.0 + goes.1);
            leaving_bytes = 0;
            has_room
        });
        self.take_steps(steps);
        has_room
    }
}

/// The group may leave when this operation has ended.
fn due(work: &StepWork, plan: &ResidencyPlan, at: usize) -> usize {
    plan.groups[at].sleep_after.max(work.groups[at].leaves)
}
