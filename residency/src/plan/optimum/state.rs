//! One moment of a schedule: where each group is, what runs, and what may begin.

use super::super::work::{DormantGroup, StepWork, carried_ns};
use super::GROUPS_SEARCHED_MAX;
use super::bound::View;

/// A direction of a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Link {
    Out,
    Write,
    Read,
    In,
}

/// How many directions there are.
pub(super) const LINKS: usize = 4;

/// Where a group is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Place {
    #[default]
    Unmade,
    /// In device memory, and never elsewhere yet.
    Awake,
    Leaving,
    /// From device memory to the file.
    LeavingDirect,
    Host,
    Writing,
    File,
    Reading,
    /// In host memory, after the file.
    Read,
    Waking,
    /// From the file to device memory.
    WakingDirect,
    /// In device memory for good.
    Back,
    Gone,
}

impl Place {
    /// In device memory, all of it taken.
    pub(super) const fn is_on_device(self) -> bool {
        let is_there = matches!(self, Self::Awake | Self::Back);
        is_there || self.is_leaving() || self.is_coming()
    }

    pub(super) const fn is_leaving(self) -> bool {
        matches!(self, Self::Leaving | Self::LeavingDirect)
    }

    pub(super) const fn is_coming(self) -> bool {
        matches!(self, Self::Waking | Self::WakingDirect)
    }

    /// Asleep, or falling asleep.
    pub(super) const fn is_out(self) -> bool {
        let is_asleep =
            matches!(self, Self::Host | Self::Writing | Self::File | Self::Reading | Self::Read);
        is_asleep || self.is_leaving()
    }

    /// Asleep now, or can still be.
    pub(super) const fn may_be_out(self) -> bool {
        self.is_out() || matches!(self, Self::Unmade | Self::Awake)
    }

    const fn takes_host(self) -> bool {
        let in_flight = matches!(self, Self::Leaving | Self::Writing | Self::Reading);
        in_flight || matches!(self, Self::Host | Self::Read | Self::Waking)
    }

    const fn takes_file(self) -> bool {
        let in_flight = matches!(self, Self::Writing | Self::Reading);
        in_flight || matches!(self, Self::LeavingDirect | Self::File | Self::WakingDirect)
    }

    /// The link its copy is on.
    pub(super) const fn link(self) -> Option<Link> {
        match self {
            Self::Leaving => Some(Link::Out),
            Self::LeavingDirect | Self::Writing => Some(Link::Write),
            Self::Reading | Self::WakingDirect => Some(Link::Read),
            Self::Waking => Some(Link::In),
            _ => None,
        }
    }

    /// Where it is when that copy has ended.
    const fn arrived(self) -> Self {
        match self {
            Self::Leaving => Self::Host,
            Self::LeavingDirect | Self::Writing => Self::File,
            Self::Reading => Self::Read,
            Self::Waking | Self::WakingDirect => Self::Back,
            other => other,
        }
    }
}

/// What the operation whose turn it is does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    Waits,
    Runs,
    /// Over, and its room still counts: it might have begun later.
    Held,
}

/// A moment, all that ends at it having ended (but for an operation that is held).
#[derive(Clone, Debug)]
pub(super) struct State {
    pub now_ns: u64,
    pub operation: usize,
    pub turn: Turn,
    /// 0 unless it runs.
    pub runs_until_ns: u64,
    pub places: [Place; GROUPS_SEARCHED_MAX],
    /// 0 where it is idle.
    pub link_free_ns: [u64; LINKS],
    /// By link: groups (as bits) that could have begun before, with nothing changed since that
    /// would speak for beginning now.
    pub refused: [u16; LINKS],
    /// The same for the operation that waits.
    pub is_refused: bool,
    /// A copy into device memory began at this instant.
    pub has_admitted: bool,
}

/// A work small enough to search, with its figures at hand.
#[derive(Debug)]
pub(super) struct Field<'a> {
    pub work: &'a StepWork,
    /// By link, by group; `None` where there is no link.
    pub copy_ns: [[Option<u64>; GROUPS_SEARCHED_MAX]; LINKS],
}

impl<'a> Field<'a> {
    /// `None` where the sum of all times or bytes is beyond 64 bits.
    pub(super) fn new(work: &'a StepWork) -> Option<Self> {
        let links = &work.links;
        let rates = [
            links.device_to_host_bytes_per_s,
            links.device_to_nvme_bytes_per_s,
            links.nvme_to_device_bytes_per_s,
            links.host_to_device_bytes_per_s,
        ];
        let mut copy_ns = [[None; GROUPS_SEARCHED_MAX]; LINKS];
        let (mut bytes, mut ns) = (0_u64, 0_u64);
        for (at, group) in work.groups.iter().enumerate() {
            bytes = bytes.checked_add(group.bytes)?;
            for (of_link, rate) in copy_ns.iter_mut().zip(rates) {
                of_link[at] = carried_ns(group.bytes, rate);
                ns = ns.checked_add(of_link[at].unwrap_or(0))?;
            }
        }
        for operation in &work.operations {
            ns = ns.checked_add(operation.compute_ns)?;
        }
        Some(Self { work, copy_ns })
    }

    pub(super) const fn start() -> State {
        State {
            now_ns: 0,
            operation: 0,
            turn: Turn::Waits,
            runs_until_ns: 0,
            places: [Place::Unmade; GROUPS_SEARCHED_MAX],
            link_free_ns: [0; LINKS],
            refused: [0; LINKS],
            is_refused: false,
            has_admitted: false,
        }
    }

    pub(super) fn view<'s>(&self, state: &'s State) -> View<'s> {
        View {
            now_ns: state.now_ns,
            operation: state.operation,
            runs_until_ns: (state.turn != Turn::Waits).then_some(state.runs_until_ns),
            link_free_ns: state.link_free_ns,
            places: &state.places[..self.work.groups.len()],
        }
    }

    fn taken(&self, state: &State, counts: impl Fn(Place) -> bool) -> u64 {
        let groups = self.work.groups.iter().zip(state.places);
        groups.filter(|&(_, place)| counts(place)).map(|(group, _)| group.bytes).sum()
    }

    fn has_room(&self, state: &State, bytes: u64) -> bool {
        let taken = self.taken(state, Place::is_on_device);
        taken + bytes <= self.work.operations[state.operation].room_bytes
    }

    fn has_host(&self, state: &State, bytes: u64) -> bool {
        self.taken(state, Place::takes_host) + bytes <= self.work.host_bytes
    }

    fn has_file(&self, state: &State, bytes: u64) -> bool {
        self.taken(state, Place::takes_file) + bytes <= self.work.nvme_bytes
    }

    /// Whether the operation that waits may begin.
    pub(super) fn may_begin(&self, state: &State) -> bool {
        let mut made_bytes = 0;
        for (group, place) in self.work.groups.iter().zip(state.places) {
            if group.made == state.operation {
                made_bytes += group.bytes;
            }
            let is_touched = (group.needed..=group.freed).contains(&state.operation);
            if is_touched && !matches!(place, Place::Awake | Place::Back) {
                return false;
            }
        }
        self.has_room(state, made_bytes)
    }

    /// Whether leaving the operation to wait, though it may begin, could be of use.
    pub(super) fn may_wait(&self, state: &State) -> bool {
        self.work.groups.iter().zip(state.places).any(|(group, place)| {
            let makes = group.made == state.operation && group.bytes > 0;
            makes || (group.needed == state.operation && self.may_leave(state, group, place))
        })
    }

    pub(super) fn begin(&self, state: &mut State) {
        for (group, place) in self.work.groups.iter().zip(&mut state.places) {
            if group.made == state.operation {
                *place = if group.bytes > 0 { Place::Awake } else { Place::Back };
            }
            if group.needed == state.operation {
                *place = Place::Back;
            }
        }
        state.turn = Turn::Runs;
        let compute_ns = self.work.operations[state.operation].compute_ns;
        state.runs_until_ns = state.now_ns.saturating_add(compute_ns);
        state.is_refused = false;
        state.refused[Link::In as usize] = 0;
        if self.work.is_direct {
            state.refused[Link::Read as usize] = 0;
        }
    }

    /// Ends the operation that runs or is held.
    pub(super) fn end(&self, state: &mut State) {
        for (group, place) in self.work.groups.iter().zip(&mut state.places) {
            if group.freed == state.operation {
                *place = Place::Gone;
            }
        }
        state.operation += 1;
        state.turn = Turn::Waits;
        state.runs_until_ns = 0;
    }

    /// Whether the next operation has less room than this one.
    pub(super) fn room_shrinks(&self, state: &State) -> bool {
        let operations = &self.work.operations;
        let next = operations.get(state.operation + 1);
        next.is_some_and(|next| next.room_bytes < operations[state.operation].room_bytes)
    }

    /// Goes on to the next end and lets copies end there; `false` where nothing is under way.
    pub(super) fn advance(&self, state: &mut State) -> bool {
        let groups = self.work.groups.len();
        let on_links = state.places[..groups].iter().filter_map(|place| place.link());
        let ends = on_links.map(|link| state.link_free_ns[link as usize]);
        let runs = (state.turn == Turn::Runs).then_some(state.runs_until_ns);
        let Some(now_ns) = ends.chain(runs).min() else { return false };
        state.now_ns = now_ns;
        state.has_admitted = false;
        for place in &mut state.places[..groups] {
            let Some(link) = place.link() else { continue };
            if state.link_free_ns[link as usize] <= now_ns {
                state.link_free_ns[link as usize] = 0;
                *place = place.arrived();
            }
        }
        true
    }

    pub(super) fn is_idle(&self, state: &State, link: Link) -> bool {
        let groups = self.work.groups.len();
        !state.places[..groups].iter().any(|place| place.link() == Some(link))
    }

    fn may_leave(&self, state: &State, group: &DormantGroup, place: Place) -> bool {
        let is_untouched = group.needed > state.operation
            || (group.needed == state.operation && state.turn == Turn::Waits);
        place == Place::Awake && group.leaves < state.operation && is_untouched
    }

    /// The place in which a copy of group `at` on an idle `link` puts it, if it may begin.
    pub(super) fn copied(&self, state: &State, link: Link, at: usize) -> Option<Place> {
        self.copy_ns[link as usize][at]?;
        let group = &self.work.groups[at];
        let bytes = group.bytes;
        let place = state.places[at];
        let is_direct = self.work.is_direct;
        let (next, may) = match (link, place) {
            (Link::Out, Place::Awake) => {
                (Place::Leaving, self.may_leave(state, group, place) && self.has_host(state, bytes))
            }
            (Link::Write, Place::Awake) if is_direct => {
                let may = self.may_leave(state, group, place) && self.has_file(state, bytes);
                (Place::LeavingDirect, may)
            }
            (Link::Write, Place::Host) if !is_direct => {
                (Place::Writing, self.has_file(state, bytes))
            }
            (Link::Read, Place::File) if is_direct => {
                (Place::WakingDirect, self.has_room(state, bytes))
            }
            (Link::Read, Place::File) => (Place::Reading, self.has_host(state, bytes)),
            (Link::In, Place::Host | Place::Read) => (Place::Waking, self.has_room(state, bytes)),
            _ => return None,
        };
        may.then_some(next)
    }

    /// Begins the copy that [`copied`](Self::copied) allowed.
    pub(super) fn copy(&self, state: &mut State, link: Link, at: usize, next: Place) {
        state.places[at] = next;
        let ns = self.copy_ns[link as usize][at].unwrap_or(0);
        state.link_free_ns[link as usize] = state.now_ns.saturating_add(ns);
        state.refused[link as usize] = 0;
        match next {
            Place::Leaving if !self.work.is_direct => state.refused[Link::Read as usize] = 0,
            Place::Reading => state.refused[Link::Out as usize] = 0,
            Place::Waking if self.work.is_direct => state.refused[Link::Read as usize] = 0,
            Place::WakingDirect => state.refused[Link::In as usize] = 0,
            _ => {}
        }
        if next.is_coming() {
            state.has_admitted = true;
            state.is_refused = false;
        }
    }
}
