//! One moment of a schedule: where each group is, what runs, and what may begin.

use super::GROUPS_SEARCHED_MAX;
use super::least_end::View;
use crate::LinkDirection;
use crate::plan::location::GroupLocation;
use crate::plan::work::{DormantGroup, StepWork};

/// How many directions there are.
pub(super) const LINKS: usize = LinkDirection::ALL.len();

/// The link a group's copy is on.
pub(super) const fn link_of(place: GroupLocation) -> Option<LinkDirection> {
    match place {
        GroupLocation::Leaving => Some(LinkDirection::Sleep),
        GroupLocation::LeavingDirect | GroupLocation::Writing => Some(LinkDirection::Write),
        GroupLocation::Reading | GroupLocation::WakingDirect => Some(LinkDirection::Read),
        GroupLocation::Waking => Some(LinkDirection::Wake),
        _ => None,
    }
}

/// What the operation whose turn it is does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum OperationTurn {
    Waits,
    Runs,
    /// Over, and its room still counts: it might have begun later.
    Held,
}

/// A moment, all that ends at it having ended (but for an operation that is held).
#[derive(Clone, Debug)]
pub(super) struct Moment {
    pub now_ns: u64,
    pub operation: usize,
    pub turn: OperationTurn,
    /// 0 unless it runs.
    pub runs_until_ns: u64,
    pub places: [GroupLocation; GROUPS_SEARCHED_MAX],
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
pub(super) struct SearchField<'a> {
    pub work: &'a StepWork,
    /// By link, by group; `None` where there is no link.
    pub copy_ns: [[Option<u64>; GROUPS_SEARCHED_MAX]; LINKS],
}

impl<'a> SearchField<'a> {
    /// `None` where the sum of all times or bytes is beyond 64 bits.
    pub(super) fn new(work: &'a StepWork) -> Option<Self> {
        let mut copy_ns = [[None; GROUPS_SEARCHED_MAX]; LINKS];
        let (mut bytes, mut ns) = (0_u64, 0_u64);
        for (at, group) in work.groups.iter().enumerate() {
            bytes = bytes.checked_add(group.bytes)?;
            for (of_link, took_ns) in copy_ns.iter_mut().zip(work.links.copies_ns(group.bytes)) {
                of_link[at] = took_ns;
                ns = ns.checked_add(took_ns.unwrap_or(0))?;
            }
        }
        for operation in &work.operations {
            ns = ns.checked_add(operation.compute_ns)?;
        }
        Some(Self { work, copy_ns })
    }

    pub(super) const fn start() -> Moment {
        Moment {
            now_ns: 0,
            operation: 0,
            turn: OperationTurn::Waits,
            runs_until_ns: 0,
            places: [GroupLocation::Unmade; GROUPS_SEARCHED_MAX],
            link_free_ns: [0; LINKS],
            refused: [0; LINKS],
            is_refused: false,
            has_admitted: false,
        }
    }

    pub(super) fn view<'s>(&self, state: &'s Moment) -> View<'s> {
        View {
            now_ns: state.now_ns,
            operation: state.operation,
            runs_until_ns: (state.turn != OperationTurn::Waits).then_some(state.runs_until_ns),
            link_free_ns: state.link_free_ns,
            places: &state.places[..self.work.groups.len()],
        }
    }

    fn taken(&self, state: &Moment, counts: impl Fn(GroupLocation) -> bool) -> u64 {
        let groups = self.work.groups.iter().zip(state.places);
        groups.filter(|&(_, place)| counts(place)).map(|(group, _)| group.bytes).sum()
    }

    fn has_room(&self, state: &Moment, bytes: u64) -> bool {
        let taken = self.taken(state, GroupLocation::is_on_device);
        taken + bytes <= self.work.operations[state.operation].room_bytes
    }

    fn has_host(&self, state: &Moment, bytes: u64) -> bool {
        self.taken(state, GroupLocation::takes_host) + bytes <= self.work.host_bytes
    }

    fn has_file(&self, state: &Moment, bytes: u64) -> bool {
        self.taken(state, GroupLocation::takes_file) + bytes <= self.work.nvme_bytes
    }

    /// Whether the operation that waits may begin.
    pub(super) fn may_begin(&self, state: &Moment) -> bool {
        let mut made_bytes = 0;
        for (group, place) in self.work.groups.iter().zip(state.places) {
            if group.made == state.operation {
                made_bytes += group.bytes;
            }
            let is_touched = (group.needed..=group.freed).contains(&state.operation);
            if is_touched && !matches!(place, GroupLocation::Awake | GroupLocation::Back) {
                return false;
            }
        }
        self.has_room(state, made_bytes)
    }

    /// Whether leaving the operation to wait, though it may begin, could be of use.
    pub(super) fn may_wait(&self, state: &Moment) -> bool {
        self.work.groups.iter().zip(state.places).any(|(group, place)| {
            let makes = group.made == state.operation && group.bytes > 0;
            makes || (group.needed == state.operation && self.may_leave(state, group, place))
        })
    }

    pub(super) fn begin(&self, state: &mut Moment) {
        for (group, place) in self.work.groups.iter().zip(&mut state.places) {
            if group.made == state.operation {
                *place = if group.bytes > 0 { GroupLocation::Awake } else { GroupLocation::Back };
            }
            if group.needed == state.operation {
                *place = GroupLocation::Back;
            }
        }
        state.turn = OperationTurn::Runs;
        let compute_ns = self.work.operations[state.operation].compute_ns;
        state.runs_until_ns = state.now_ns.saturating_add(compute_ns);
        state.is_refused = false;
        state.refused[LinkDirection::Wake as usize] = 0;
        if self.work.is_direct {
            state.refused[LinkDirection::Read as usize] = 0;
        }
    }

    /// Ends the operation that runs or is held.
    pub(super) fn end(&self, state: &mut Moment) {
        for (group, place) in self.work.groups.iter().zip(&mut state.places) {
            if group.freed == state.operation {
                *place = GroupLocation::Gone;
            }
        }
        state.operation += 1;
        state.turn = OperationTurn::Waits;
        state.runs_until_ns = 0;
    }

    /// Whether the next operation has less room than this one.
    pub(super) fn room_shrinks(&self, state: &Moment) -> bool {
        let operations = &self.work.operations;
        let next = operations.get(state.operation + 1);
        next.is_some_and(|next| next.room_bytes < operations[state.operation].room_bytes)
    }

    /// Goes on to the next end and lets copies end there; `false` where nothing is under way.
    pub(super) fn advance(&self, state: &mut Moment) -> bool {
        let groups = self.work.groups.len();
        let on_links = state.places[..groups].iter().filter_map(|place| link_of(*place));
        let ends = on_links.map(|link| state.link_free_ns[link as usize]);
        let runs = (state.turn == OperationTurn::Runs).then_some(state.runs_until_ns);
        let Some(now_ns) = ends.chain(runs).min() else { return false };
        state.now_ns = now_ns;
        state.has_admitted = false;
        for place in &mut state.places[..groups] {
            let Some(link) = link_of(*place) else { continue };
            if state.link_free_ns[link as usize] <= now_ns {
                state.link_free_ns[link as usize] = 0;
                *place = place.arrived();
            }
        }
        true
    }

    pub(super) fn is_idle(&self, state: &Moment, link: LinkDirection) -> bool {
        let groups = self.work.groups.len();
        !state.places[..groups].iter().any(|place| link_of(*place) == Some(link))
    }

    fn may_leave(&self, state: &Moment, group: &DormantGroup, place: GroupLocation) -> bool {
        let is_untouched = group.needed > state.operation
            || (group.needed == state.operation && state.turn == OperationTurn::Waits);
        place == GroupLocation::Awake && group.leaves < state.operation && is_untouched
    }

    /// The place in which a copy of group `at` on an idle `link` puts it, if it may begin.
    pub(super) fn copied(
        &self,
        state: &Moment,
        link: LinkDirection,
        at: usize,
    ) -> Option<GroupLocation> {
        self.copy_ns[link as usize][at]?;
        let group = &self.work.groups[at];
        let bytes = group.bytes;
        let place = state.places[at];
        let next = place.begun(link, self.work.is_direct)?;
        let may = match next {
            GroupLocation::Leaving => {
                self.may_leave(state, group, place) && self.has_host(state, bytes)
            }
            GroupLocation::LeavingDirect => {
                self.may_leave(state, group, place) && self.has_file(state, bytes)
            }
            GroupLocation::Writing => self.has_file(state, bytes),
            GroupLocation::Reading => self.has_host(state, bytes),
            _ => self.has_room(state, bytes),
        };
        may.then_some(next)
    }

    /// Begins the copy that [`copied`](Self::copied) allowed.
    pub(super) fn copy(
        &self,
        state: &mut Moment,
        link: LinkDirection,
        at: usize,
        next: GroupLocation,
    ) {
        state.places[at] = next;
        let ns = self.copy_ns[link as usize][at].unwrap_or(0);
        state.link_free_ns[link as usize] = state.now_ns.saturating_add(ns);
        state.refused[link as usize] = 0;
        match next {
            GroupLocation::Leaving if !self.work.is_direct => {
                state.refused[LinkDirection::Read as usize] = 0
            }
            GroupLocation::Reading => state.refused[LinkDirection::Sleep as usize] = 0,
            GroupLocation::Waking if self.work.is_direct => {
                state.refused[LinkDirection::Read as usize] = 0
            }
            GroupLocation::WakingDirect => state.refused[LinkDirection::Wake as usize] = 0,
            _ => {}
        }
        if next.is_coming() {
            state.has_admitted = true;
            state.is_refused = false;
        }
    }
}
