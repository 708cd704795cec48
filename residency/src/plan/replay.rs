//! The duration of a plan: a step simulated event by event, by the rules that the engine follows.

use std::cmp::Reverse;

use super::location::{GroupLocation, Occupancy};
use super::work::{ResidencyPlan, StepWork};
use crate::{LinkDirection, Tier};

/// The result of a replay.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReplayOutcome {
    /// Time from the begin of the first operation to the end of the last, in nanoseconds.
    pub total_ns: u64,
    /// Part of it in which no operation ran.
    pub stall_ns: u64,
    /// Bytes copied out of device memory and back in.
    pub slept_bytes: u64,
    /// Part of these bytes that was written to the file.
    pub written_bytes: u64,
}

/// Cost of one turn of a replay, in operations checked for room.
const TURN_STEPS: usize = 24;
/// Cost of one group or operation before the first turn.
const SETUP_STEPS: usize = 8;

const DIRECTIONS: usize = LinkDirection::ALL.len();

/// Replays `plan`. Returns `None` if it never ends: a group has no room or no link.
///
/// Groups leave in the order in which they may, and at the same operation those needed last first. They move
/// on to the file, are read and wake in the order of need, as soon as there is room until they are freed.
#[must_use]
pub fn replay(work: &StepWork, plan: &ResidencyPlan) -> Option<ReplayOutcome> {
    work.validate().ok()?;
    let mut steps_left = u64::MAX;
    Stage::new(work).play(plan, u64::MAX, &mut steps_left)
}

/// Data that all replays of one work share.
#[derive(Debug)]
pub(super) struct Stage<'a> {
    work: &'a StepWork,
    compute_ns: u64,
    /// By operation: the bytes that it makes and those that it frees.
    made_bytes: Vec<u64>,
    freed_bytes: Vec<u64>,
    /// By group, then by [`LinkDirection`]: the time of its copy; `None` without that link.
    copies_ns: Vec<[Option<u64>; DIRECTIONS]>,
    /// Groups in the order of need.
    by_need: Vec<usize>,
}

impl<'a> Stage<'a> {
    /// Creates the stage of a valid work.
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

    /// Returns, by operation, the bytes of all groups that are made and not freed.
    pub(super) fn there_bytes(&self) -> impl Iterator<Item = u64> {
        let mut there_bytes = 0;
        let (made, freed) = (self.made_bytes.iter(), self.freed_bytes.iter());
        made.zip(freed).map(move |(made, freed)| {
            let now_bytes = there_bytes + made;
            there_bytes = now_bytes - freed;
            now_bytes
        })
    }

    /// Replays `plan` as [`replay`] does, and subtracts the cost from `steps_left`: one step per operation
    /// checked for room, other work in proportion. `None` also if the steps run out or the plan takes more
    /// than `most_ns`.
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
    /// Compute time of the operations that have not begun.
    rest_ns: u64,
    /// The next operation, or the one that runs.
    operation: usize,
    runs_until_ns: Option<u64>,
    /// Location of each group. A freed group keeps its last one.
    locations: Vec<GroupLocation>,
    /// Groups that sleep, in the order in which they leave.
    leaving: Vec<usize>,
    /// The same groups in the order of need.
    waking: Vec<usize>,
    /// Number of groups that are made.
    made: usize,
    /// Length of the prefix of `leaving` that may have left by now.
    let_leave: usize,
    /// Lengths of the prefix of `leaving` that has left or stays: through host memory, and direct.
    left: [usize; 2],
    /// Length of the prefix of `leaving` that is written, being written, or never will be.
    written: usize,
    /// Length of the prefix of `leaving` that needs no more host memory to leave.
    settled: usize,
    /// Length of the prefix of `waking` that has woken, is about to, or never slept.
    woken: usize,
    /// Length of the prefix of `waking` that operations before this one need.
    used: usize,
    /// No group wakes before this operation.
    wake_from: usize,
    /// By operation: the bytes that may leave when it has ended.
    let_leave_bytes: Vec<u64>,
    /// By operation: the bytes expected to come back for it.
    back_bytes: Vec<u64>,
    /// By [`LinkDirection`]: the group being copied, and the end of its copy.
    links: [Option<(usize, u64)>; DIRECTIONS],
    taken: Occupancy,
    /// Part of the device memory taken that is being copied out.
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
            // Time has saturated.
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
            // The copy that ended may have let the operation begin at this moment.
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
            // A group that may leave and has not is expected to stay.
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
        // Groups needed earlier are awake until they are freed, as are those that do not sleep.
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

    /// Returns the next group to copy, if one may.
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

    /// Returns true if the group has not left yet and still can. A group that is awake when it is needed stays.
    fn is_to_sleep(&self, at: usize) -> bool {
        let has_not_left =
            matches!(self.locations[at], GroupLocation::Unmade | GroupLocation::Awake);
        has_not_left && self.operation < self.work.groups[at].needed
    }

    /// Returns the first group that has not left, if it may by now.
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

    /// Returns the first group in host memory that is meant for the file and not written yet.
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

    /// Returns true if the group has yet to leave or to be written.
    fn is_unsettled(&self, at: usize) -> bool {
        self.is_to_sleep(at) || self.locations[at].is_leaving() || self.is_to_be_written(at)
    }

    /// Returns the next group to read into host memory. Groups that leave have precedence there.
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

    /// Returns the first group in the order of need whose bytes are at this link, if it has room beside those
    /// before it.
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

    /// Returns true if the group has woken, is about to, or is needed by now and has not slept.
    fn is_done_sleeping(&self, at: usize) -> bool {
        match self.locations[at] {
            GroupLocation::Awake => !self.is_to_sleep(at),
            location => location.is_coming() || location == GroupLocation::Back,
        }
    }

    /// Returns true if there is room for all sleeping groups that wake no later than this one: for each that
    /// may wake, beside those before it.
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

    /// Returns true if these bytes, some of which are leaving, are within the room of every operation up to
    /// `last`. It assumes that later groups leave in time, and that groups needed earlier come back too.
    fn has_room(&mut self, mut device_bytes: u64, leaving_bytes: u64, last: usize) -> bool {
        let (stage, ahead) = (self.stage, self.operation..=last);
        if self.runs_until_ns.is_some() {
            // The bytes that it makes are in device memory already, and are counted below.
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

/// Returns the operation at whose end the group may leave.
fn due(work: &StepWork, plan: &ResidencyPlan, at: usize) -> usize {
    plan.groups[at].sleep_after.max(work.groups[at].leaves)
}
