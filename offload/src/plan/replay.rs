//! What a plan comes to: one step played event by event, by the rules the engine follows.

use super::work::{Choice, Group, Placing, Plan, Work, carried_ns};

/// How a step went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// From the begin of the first operation to the end of the last, in nanoseconds.
    pub total_ns: u64,
    /// The part of it in which no operation ran.
    pub stall_ns: u64,
    /// Bytes copied out of device memory (and back in).
    pub slept_bytes: u64,
    /// Bytes of them written to the file.
    pub written_bytes: u64,
}

/// Where one group stands.
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
    Gone,
}

/// A direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    Out,
    Write,
    Read,
    In,
}

const WAYS: [Way; 4] = [Way::Out, Way::Write, Way::Read, Way::In];

/// Plays `plan`. `None` where it never ends: it has no room for something, or no link.
///
/// The rules: groups leave in the order in which they may, those needed last first where that is
/// the same; they move on to the file, are read and wake in the order needed, as soon as there is
/// room that stays theirs until they are freed.
#[must_use]
pub fn replay(work: &Work, plan: &Plan) -> Option<Outcome> {
    Player::new(work, plan)?.play()
}

#[derive(Clone, Default)]
struct Events {
    makes: Vec<usize>,
    lets_leave: Vec<usize>,
    needs: Vec<usize>,
    frees: Vec<usize>,
}

struct Player<'a> {
    work: &'a Work,
    plan: &'a Plan,
    now_ns: u64,
    /// The next operation, or the one that runs.
    operation: usize,
    runs_until_ns: Option<u64>,
    places: Vec<Place>,
    has_slept: Vec<bool>,
    has_been_read: Vec<bool>,
    /// By operation: the groups that it makes and frees; of those that sleep, which may leave after
    /// it and which are first needed by it.
    events: Vec<Events>,
    /// Groups that sleep, in the order in which they leave.
    leaving: Vec<usize>,
    /// The same in the order in which they are needed.
    waking: Vec<usize>,
    /// By [`Way`]: the group on it, and until when.
    ways: [Option<(usize, u64)>; WAYS.len()],
    device_bytes: u64,
    host_bytes: u64,
    file_bytes: u64,
    outcome: Outcome,
}

impl<'a> Player<'a> {
    fn new(work: &'a Work, plan: &'a Plan) -> Option<Self> {
        let groups = work.groups.len();
        if plan.groups.len() != groups {
            return None;
        }
        let sleeps = |&at: &usize| plan.groups.get(at).is_some_and(|p| p.choice != Choice::Keep);
        let mut leaving: Vec<usize> = (0..groups).filter(sleeps).collect();
        let mut waking = leaving.clone();
        leaving.sort_by_key(|&at| {
            (plan.groups[at].sleep_after, std::cmp::Reverse(work.groups[at].needed))
        });
        waking.sort_by_key(|&at| work.groups[at].needed);
        let mut events = vec![Events::default(); work.operations.len()];
        for (at, group) in work.groups.iter().enumerate() {
            events.get_mut(group.made)?.makes.push(at);
            events.get_mut(group.freed)?.frees.push(at);
        }
        for &at in &leaving {
            events.get_mut(plan.groups[at].sleep_after)?.lets_leave.push(at);
            events.get_mut(work.groups[at].needed)?.needs.push(at);
        }
        Some(Self {
            work,
            plan,
            now_ns: 0,
            operation: 0,
            runs_until_ns: None,
            places: vec![Place::Unmade; groups],
            has_slept: vec![false; groups],
            has_been_read: vec![false; groups],
            events,
            leaving,
            waking,
            ways: [None; WAYS.len()],
            device_bytes: 0,
            host_bytes: 0,
            file_bytes: 0,
            outcome: Outcome::default(),
        })
    }

    fn play(mut self) -> Option<Outcome> {
        loop {
            self.end_what_is_over();
            if self.operation == self.work.operations.len() {
                self.outcome.total_ns = self.now_ns;
                self.outcome.stall_ns = self.now_ns - self.work.compute_ns();
                return Some(self.outcome);
            }
            self.begin_operation();
            for way in WAYS {
                self.begin_copy(way);
            }
            // A group that went off the link may have let the operation begin at this moment.
            let ends = self.ways.iter().flatten().map(|&(_, until_ns)| until_ns);
            self.now_ns = ends.chain(self.runs_until_ns).min()?;
        }
    }

    fn end_what_is_over(&mut self) {
        if self.runs_until_ns.is_some_and(|until_ns| until_ns <= self.now_ns) {
            self.runs_until_ns = None;
            for &at in &self.events[self.operation].frees {
                self.places[at] = Place::Gone;
                self.device_bytes -= self.work.groups[at].bytes;
            }
            self.operation += 1;
        }
        for way in WAYS {
            let on_it = &mut self.ways[way as usize];
            if let Some((at, _)) = on_it.take_if(|&mut (_, until_ns)| until_ns <= self.now_ns) {
                self.arrived(way, at);
            }
        }
    }

    /// What the end of a copy gives up.
    fn arrived(&mut self, way: Way, at: usize) {
        let bytes = self.work.groups[at].bytes;
        let is_direct = self.is_direct(at);
        self.places[at] = match way {
            Way::Out => {
                self.device_bytes -= bytes;
                Place::Host
            }
            Way::Write if is_direct => {
                self.device_bytes -= bytes;
                Place::File
            }
            Way::Write => {
                self.host_bytes -= bytes;
                Place::File
            }
            Way::Read if is_direct => {
                self.file_bytes -= bytes;
                Place::Awake
            }
            Way::Read => {
                self.file_bytes -= bytes;
                Place::Host
            }
            Way::In => {
                self.host_bytes -= bytes;
                Place::Awake
            }
        };
    }

    fn begin_operation(&mut self) {
        if self.runs_until_ns.is_some() {
            return;
        }
        let operation = self.work.operations[self.operation];
        let is_touched = |group: &Group| (group.needed..=group.freed).contains(&self.operation);
        let mut places = self.work.groups.iter().zip(&self.places);
        if places.any(|(group, &place)| is_touched(group) && place != Place::Awake) {
            return;
        }
        let makes = &self.events[self.operation].makes;
        let made_bytes = self.sum_bytes(makes);
        if self.device_bytes + made_bytes > operation.room_bytes {
            return;
        }
        for &at in makes {
            self.places[at] = Place::Awake;
        }
        self.device_bytes += made_bytes;
        self.runs_until_ns = Some(self.now_ns + operation.compute_ns);
    }

    fn begin_copy(&mut self, way: Way) {
        if self.ways[way as usize].is_some() {
            return;
        }
        let Some(at) = self.next_on(way) else { return };
        let links = &self.work.links;
        let rate = match way {
            Way::Out => links.out_bytes_per_s,
            Way::Write => links.write_bytes_per_s,
            Way::Read => links.read_bytes_per_s,
            Way::In => links.in_bytes_per_s,
        };
        let bytes = self.work.groups[at].bytes;
        let Some(ns) = carried_ns(bytes, rate) else { return };
        let is_direct = self.is_direct(at);
        let place = match way {
            Way::Out => {
                self.host_bytes += bytes;
                Place::Leaving
            }
            Way::Write => {
                self.file_bytes += bytes;
                self.outcome.written_bytes += bytes;
                if is_direct { Place::Leaving } else { Place::Writing }
            }
            Way::Read if is_direct => {
                self.device_bytes += bytes;
                Place::Waking
            }
            Way::Read => {
                self.has_been_read[at] = true;
                self.host_bytes += bytes;
                Place::Reading
            }
            Way::In => {
                self.device_bytes += bytes;
                Place::Waking
            }
        };
        if place == Place::Leaving {
            self.has_slept[at] = true;
            self.outcome.slept_bytes += bytes;
        }
        self.places[at] = place;
        self.ways[way as usize] = Some((at, self.now_ns + ns));
    }

    /// The group that goes next, if one may.
    fn next_on(&self, way: Way) -> Option<usize> {
        match way {
            Way::Out => self.next_to_leave(false),
            Way::Write => self.next_to_leave(true).or_else(|| self.next_to_write()),
            Way::Read => self.next_to_wake(true).or_else(|| self.next_to_read()),
            Way::In => self.next_to_wake(false),
        }
    }

    fn is_direct(&self, at: usize) -> bool {
        self.work.is_direct && self.plan.groups[at].choice == Choice::Nvme
    }

    /// The first that has not left yet, where it may by now. What nobody has put to sleep by the
    /// time it is needed stays awake.
    fn next_to_leave(&self, direct: bool) -> Option<usize> {
        let is_next = |&at: &usize| {
            let group = &self.work.groups[at];
            self.is_direct(at) == direct && !self.has_slept[at] && self.operation < group.needed
        };
        let at = self.leaving.iter().copied().find(is_next)?;
        let may = self.places[at] == Place::Awake && !self.is_to_leave(at);
        let has_place = if direct { self.fits_file(at) } else { self.fits_host(at) };
        (may && has_place).then_some(at)
    }

    fn fits_host(&self, at: usize) -> bool {
        self.host_bytes + self.work.groups[at].bytes <= self.work.host_bytes
    }

    fn fits_file(&self, at: usize) -> bool {
        self.file_bytes + self.work.groups[at].bytes <= self.work.nvme_bytes
    }

    /// In host memory, meant for the file, and not written yet.
    fn next_to_write(&self) -> Option<usize> {
        let at = self.leaving.iter().copied().find(|&at| self.is_to_be_written(at))?;
        self.fits_file(at).then_some(at)
    }

    fn is_to_be_written(&self, at: usize) -> bool {
        self.places[at] == Place::Host
            && self.plan.groups[at].choice == Choice::Nvme
            && !self.has_been_read[at]
    }

    /// Host memory is for what leaves first, and then for what comes back.
    fn next_to_read(&self) -> Option<usize> {
        let is_leaving = |&at: &usize| {
            let is_to_leave = !self.has_slept[at] && self.operation < self.work.groups[at].needed;
            is_to_leave || self.places[at] == Place::Leaving || self.is_to_be_written(at)
        };
        if self.leaving.iter().any(is_leaving) {
            return None;
        }
        let in_file = |&at: &usize| self.places[at] == Place::File && !self.is_direct(at);
        self.waking.iter().copied().find(in_file).filter(|&at| self.fits_host(at))
    }

    /// The first in the order of need that has its bytes at this link's end, and room here beside
    /// those before it.
    fn next_to_wake(&self, direct: bool) -> Option<usize> {
        let mut wanted = Vec::new();
        for &at in &self.waking {
            let is_here = match self.places[at] {
                Place::File => direct && self.is_direct(at),
                Place::Host => !direct,
                Place::Reading | Place::Writing | Place::Leaving => false,
                Place::Unmade | Place::Awake | Place::Waking | Place::Gone => continue,
            };
            wanted.push(at);
            if self.operation < self.plan.groups[at].wake_from {
                continue;
            }
            if !self.has_room(&wanted) {
                return None;
            }
            if is_here {
                return Some(at);
            }
        }
        None
    }

    /// Whether these groups, in the order of need, are within the room of every operation until the
    /// last is freed, as far as one can know: what is to leave later does so in time.
    fn has_room(&self, wanted: &[usize]) -> bool {
        let Some(&last) = wanted.last() else { return true };
        let mut device_bytes = self.device_bytes + self.sum_bytes(wanted);
        let end = self.work.groups[last].freed + 1;
        let operations = self.work.operations.iter().zip(&self.events).enumerate();
        for (number, (operation, events)) in operations.take(end).skip(self.operation) {
            let is_now = number == self.operation;
            if !(is_now && self.runs_until_ns.is_some()) {
                device_bytes += self.sum_bytes(&events.makes);
            }
            // Whoever sleeps and is needed before comes back too.
            let back = events.needs.iter().filter(|at| !wanted.contains(at));
            let back = back.filter(|&&at| {
                let is_there = matches!(self.places[at], Place::Awake | Place::Waking);
                self.is_to_leave(at) || !is_there
            });
            device_bytes += self.sum_bytes(back);
            if device_bytes > operation.room_bytes {
                return false;
            }
            let left = events.lets_leave.iter().filter(|&&at| self.is_to_leave(at));
            let gone_bytes = self.sum_bytes(events.frees.iter().chain(left));
            device_bytes = device_bytes.saturating_sub(gone_bytes);
            if is_now {
                let leaving =
                    |at: &&usize| self.places[**at] == Place::Leaving && !wanted.contains(at);
                let leaving_bytes = self.sum_bytes(self.leaving.iter().filter(leaving));
                device_bytes = device_bytes.saturating_sub(leaving_bytes);
            }
        }
        true
    }

    fn sum_bytes<'g>(&self, groups: impl IntoIterator<Item = &'g usize>) -> u64 {
        groups.into_iter().map(|&at| self.work.groups[at].bytes).sum()
    }

    /// Sleeps by the plan, and the time has not come yet.
    fn is_to_leave(&self, at: usize) -> bool {
        let Placing { choice, sleep_after, .. } = self.plan.groups[at];
        choice != Choice::Keep && self.operation <= sleep_after.max(self.work.groups[at].leaves)
    }
}
