//! The slabs and their pieces: which bytes serve a request, which slabs are pinned and given up.
//!
//! Pure: it knows slots and units, no addresses, no device and no lock.

use std::collections::BTreeSet;

use super::policy::UsageLevel;
use crate::core::{Fit, NONE, Ranges};

/// The most ranges in all slabs, free ones and pieces: what the bookkeeping may grow to.
pub(super) const RANGES_MAX: u32 = 1 << 22;
/// How many sizes of large requests that had to be pinned are remembered.
const MISSES_REMEMBERED: usize = 16;

/// Whose requests a slab in use serves. Small pieces in large slabs would keep them from becoming
/// idle, so each kind keeps to its own. The number is that of the list of its open ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlabKind {
    Small = 0,
    Large = 1,
}

/// The list of slabs that nothing is in.
const IDLE: u32 = 2;
const LISTS: u32 = 3;

#[derive(Clone, Copy, Debug)]
pub(super) struct SlabEntry {
    /// Its first range, which it keeps for life.
    pub(super) first: u32,
    /// 0 for a vacant slot.
    pub(super) units: u32,
    pub(super) used: u32,
    pub(super) kind: SlabKind,
}

/// A piece of a slab, in a caller's hands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) slab: u32,
    pub(super) start: u32,
    pub(super) units: u32,
    pub(super) range: u32,
    /// Tells it from the pieces that had the same range before.
    pub(super) serial: u64,
}

/// What to do for a request that nothing pinned may serve.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SlabGrowth {
    /// Units to pin.
    pub(super) units: u32,
    /// Slots of slabs to give up first. They are gone from here already.
    pub(super) given_up: Vec<u32>,
}

/// Units, by what they are. All of them but `in_flight` and `peak_used` are pinned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SlabFigures {
    pub(super) used: u64,
    pub(super) peak_used: u64,
    pub(super) pinned: u64,
    pub(super) peak_pinned: u64,
    pub(super) idle: u64,
    /// Being pinned.
    pub(super) in_flight: u64,
    pub(super) slabs: u32,
    pub(super) pieces: u32,
}

/// Every slab.
#[derive(Debug)]
pub(super) struct Slabs {
    pub(super) ranges: Ranges,
    pub(super) slabs: Vec<SlabEntry>,
    vacant: Vec<u32>,
    /// Units and slot of each idle slab.
    pub(super) idle: BTreeSet<(u32, u32)>,
    /// By range: the serial of the piece it is, 0 for others.
    pub(super) serials: Vec<u64>,
    serials_given: u64,
    cap: u64,
    keeps: bool,
    level: UsageLevel,
    /// Free units in slabs in use, and how many of these there are, by `SlabKind`.
    pub(super) open: [u64; 2],
    pub(super) in_use: [u32; 2],
    pub(super) figures: SlabFigures,
    /// Large sizes pinned lately, and where the next is written.
    misses: [u32; MISSES_REMEMBERED],
    miss: usize,
    /// A large size that was missed again: worth preparing another of.
    repeated: Option<u32>,
}

impl Slabs {
    /// No slab; `cap` units at most. Without `keeps` each request has a slab of its own, which is
    /// given up when the piece comes back.
    pub(super) fn new(cap: u64, keeps: bool) -> Self {
        Self::limited(cap, keeps, RANGES_MAX)
    }

    /// [`Slabs::new`] with another limit of ranges.
    pub(super) fn limited(cap: u64, keeps: bool, ranges_max: u32) -> Self {
        Self {
            ranges: Ranges::new(LISTS, ranges_max, 0, false),
            slabs: Vec::new(),
            vacant: Vec::new(),
            idle: BTreeSet::new(),
            serials: Vec::new(),
            serials_given: 0,
            cap,
            keeps,
            level: UsageLevel::default(),
            open: [0; 2],
            in_use: [0; 2],
            figures: SlabFigures::default(),
            misses: [0; MISSES_REMEMBERED],
            miss: 0,
            repeated: None,
        }
    }

    pub(super) fn figures(&self) -> SlabFigures {
        self.figures
    }

    pub(super) fn cap(&self) -> u64 {
        self.cap
    }

    pub(super) fn reset_peaks(&mut self) {
        self.figures.peak_used = self.figures.used;
        self.figures.peak_pinned = self.figures.pinned;
    }

    /// Whether the bookkeeping has room for one more piece, and a slab for it.
    pub(super) fn has_ranges(&self) -> bool {
        self.ranges.can_make(3)
    }

    /// A piece of what is pinned, where that leaves no more open than it may.
    pub(super) fn take(&mut self, units: u32, is_bounce: bool) -> Option<Piece> {
        let room = self.room(is_bounce)?;
        let level = self.level.plus(units);
        let kind = kind(level, units);
        let fit = Fit { units, align_units: 1 };
        if let Some(range) = self.ranges.find(kind as u32, fit) {
            return self.cut(range, units);
        }
        let (least, most) = match kind {
            SlabKind::Small => (units.max(level.slab_units() / 4), level.slab_units() * 2),
            SlabKind::Large => (units, u32::MAX),
        };
        let &(slab_units, slot) = self.idle.range((least, 0)..=(most, NONE)).next()?;
        let open = self.open[SlabKind::Large as usize];
        if u64::from(slab_units) > room {
            return None;
        }
        if kind == SlabKind::Large && !level.may_open(units, slab_units - units, open) {
            return None;
        }
        self.take_from_idle(slot, units, kind)
    }

    /// A piece of what is pinned, whatever that leaves open. It looks at everything: for when the
    /// answer is no otherwise.
    pub(super) fn take_any(&mut self, units: u32, is_bounce: bool) -> Option<Piece> {
        let room = self.room(is_bounce)?;
        let idle = self.idle.range((units, 0)..).next().copied();
        if let Some((_, slot)) = idle.filter(|&(slab_units, _)| u64::from(slab_units) <= room) {
            return self.take_from_idle(slot, units, kind(self.level.plus(units), units));
        }
        let mut best: Option<(u32, u32)> = None;
        for slab in self.slabs.iter().filter(|slab| slab.units > 0 && slab.used > 0) {
            let mut range = slab.first;
            while range != NONE {
                let found = (self.ranges.units(range), range);
                if self.ranges.list(range).is_some() && found.0 >= units {
                    best = best.map_or(Some(found), |best| Some(best.min(found)));
                }
                range = self.ranges.after(range);
            }
        }
        self.cut(best?.1, units)
    }

    /// How to grow for a request of `units`: idle slabs make way until the new one fits under the
    /// cap and, as far as they can, under what policy has pinned. `None` where the cap has no room
    /// even with every idle slab gone; a *bounce* is not held to it. The units are in flight then.
    pub(super) fn grow(&mut self, units: u32, is_bounce: bool) -> Option<SlabGrowth> {
        let level = self.level.plus(units);
        let is_small = kind(level, units) == SlabKind::Small;
        let room = self.room(false).unwrap_or(0);
        if !is_bounce && u64::from(units) > room {
            return None;
        }
        let wanted = if is_small && self.keeps { level.slab_units() } else { units };
        let new = if u64::from(wanted) <= room { wanted } else { self.cut_to(room, units) };
        if !is_small {
            self.note_miss(units);
        }
        let most = self.cap.min(level.pinned_units_max());
        let others = self.figures.in_flight + u64::from(new);
        let given_up = self.give_up_to(most.saturating_sub(others));
        self.figures.in_flight += u64::from(new);
        Some(SlabGrowth { units: new, given_up })
    }

    /// Units that slabs in use may come to beside those that are, with every other given up: all
    /// there are for a bounce. `None` beyond the cap, where nothing else is handed out: a slab that
    /// a bounce pinned there would stay there with it.
    fn room(&self, is_bounce: bool) -> Option<u64> {
        let SlabFigures { pinned, idle, in_flight, .. } = self.figures;
        let room = self.cap.checked_sub(pinned - idle + in_flight);
        if is_bounce { Some(u64::MAX) } else { room }
    }

    /// The growth of a small slab as far as the cap goes.
    fn cut_to(&self, room: u64, units: u32) -> u32 {
        u32::try_from(room).unwrap_or(u32::MAX).max(units)
    }

    /// The same request after the device refused: the least that will do, every idle slab gone.
    pub(super) fn shrink(&mut self, growth: &SlabGrowth, units: u32) -> SlabGrowth {
        self.figures.in_flight -= u64::from(growth.units);
        self.figures.in_flight += u64::from(units);
        SlabGrowth { units, given_up: self.give_up_to(0) }
    }

    /// The pinning of `growth` has ended, in nothing.
    pub(super) fn not_grown(&mut self, growth: &SlabGrowth) {
        self.figures.in_flight -= u64::from(growth.units);
    }

    /// The pinning of `growth` has ended, in a slab of `units`: idle from here, in the slot
    /// returned. `None` at the limit of ranges: the memory is to be given back.
    pub(super) fn grown(&mut self, growth: &SlabGrowth, units: u32) -> Option<u32> {
        self.figures.in_flight -= u64::from(growth.units);
        let slot = self.vacant.last().copied();
        let slot = slot.unwrap_or(u32::try_from(self.slabs.len()).unwrap_or(NONE));
        let first = self.ranges.add_segment(0, units, slot, IDLE)?;
        let slab = SlabEntry { first, units, used: 0, kind: SlabKind::Large };
        match self.vacant.pop() {
            Some(slot) => self.slabs[slot as usize] = slab,
            None => self.slabs.push(slab),
        }
        self.idle.insert((units, slot));
        let figures = &mut self.figures;
        figures.slabs += 1;
        figures.idle += u64::from(units);
        figures.pinned += u64::from(units);
        figures.peak_pinned = figures.peak_pinned.max(figures.pinned);
        Some(slot)
    }

    /// The first `units` of an idle slab that was pinned for them.
    pub(super) fn take_grown(&mut self, slot: u32, units: u32) -> Option<Piece> {
        self.take_from_idle(slot, units, kind(self.level.plus(units), units))
    }

    /// What is worth pinning before it is asked for, if anything; in flight then. It never costs
    /// an idle slab.
    pub(super) fn grow_in_background(&mut self) -> Option<SlabGrowth> {
        let units = self.units_to_prepare()?;
        self.repeated = None;
        self.figures.in_flight += u64::from(units);
        Some(SlabGrowth { units, given_up: Vec::new() })
    }

    /// Units that should be prepared.
    pub(super) fn units_to_prepare(&self) -> Option<u32> {
        let level = self.level;
        let slab = level.slab_units();
        let SlabFigures { pinned, in_flight, .. } = self.figures;
        let fits = |units: u32| {
            let after = pinned + in_flight + u64::from(units);
            after <= self.cap && after <= level.pinned_units_max() && level.may_prepare(units)
        };
        let has_idle = |least, most| self.idle.range((least, 0)..=(most, NONE)).next().is_some();
        // The low-water mark of small slabs: half of the next.
        let is_low = self.open[SlabKind::Small as usize] < u64::from(slab / 2);
        let has_small = self.in_use[SlabKind::Small as usize] > 0;
        if has_small && is_low && !has_idle(slab / 4, slab * 2) && fits(slab) {
            return Some(slab);
        }
        self.repeated.filter(|&units| !has_idle(units, units) && fits(units))
    }

    /// Takes a piece back. `None` for one that is not out: nothing has changed then.
    pub(super) fn give(&mut self, piece: Piece) -> Option<()> {
        if !self.is_out(piece) {
            return None;
        }
        self.serials[piece.range as usize] = 0;
        let slab = &mut self.slabs[piece.slab as usize];
        let (kind, units) = (slab.kind as usize, u64::from(piece.units));
        slab.used -= piece.units;
        self.figures.used -= units;
        self.level.used -= units;
        self.level.given = if self.level.is_low() { 0 } else { self.level.given + units };
        self.figures.pieces -= 1;
        self.open[kind] += units;
        let whole = self.ranges.give(piece.range, kind as u32);
        if slab.used == 0 {
            self.ranges.refile(whole, IDLE);
            self.idle.insert((slab.units, piece.slab));
            self.open[kind] -= u64::from(slab.units);
            self.in_use[kind] -= 1;
            self.figures.idle += u64::from(slab.units);
        }
        Some(())
    }

    /// Whether a piece is out and nobody has promised it back. `None` where not; from here on
    /// nobody else can give it back.
    pub(super) fn hold(&mut self, piece: &mut Piece) -> Option<()> {
        if !self.is_out(*piece) {
            return None;
        }
        self.serials_given += 1;
        piece.serial = self.serials_given;
        self.serials[piece.range as usize] = piece.serial;
        Some(())
    }

    fn is_out(&self, piece: Piece) -> bool {
        piece.serial != 0 && self.serials.get(piece.range as usize) == Some(&piece.serial)
    }

    /// Whether there are idle slabs that should not be: past the cap, or where nothing is kept.
    pub(super) fn has_surplus(&self) -> bool {
        !self.idle.is_empty()
            && (!self.keeps || self.figures.pinned + self.figures.in_flight > self.cap)
    }

    /// Gives those up.
    pub(super) fn give_up_surplus(&mut self) -> Vec<u32> {
        let most = if self.keeps { self.cap.saturating_sub(self.figures.in_flight) } else { 0 };
        self.give_up_to(most)
    }

    /// Gives every idle slab up, and forgets how much was in use once.
    pub(super) fn trim(&mut self) -> Vec<u32> {
        self.level.high = self.level.used;
        self.give_up_to(0)
    }

    pub(super) fn set_cap(&mut self, units: u64) {
        self.cap = units;
    }

    /// Slots of every slab that has a piece out.
    pub(super) fn slots_in_use(&self) -> Vec<u32> {
        let in_use = (0..).zip(&self.slabs).filter(|(_, slab)| slab.units > 0 && slab.used > 0);
        in_use.map(|(slot, _)| slot).collect()
    }

    /// Idle slabs go until no more than `most` units are pinned: the smallest that is enough, or
    /// the largest and then others.
    fn give_up_to(&mut self, most: u64) -> Vec<u32> {
        let mut given_up = Vec::new();
        while self.figures.pinned > most {
            let excess = u32::try_from(self.figures.pinned - most).unwrap_or(NONE);
            let enough = self.idle.range((excess, 0)..).next().or(self.idle.last()).copied();
            let Some((units, slot)) = enough else { break };
            self.idle.remove(&(units, slot));
            let slab = &mut self.slabs[slot as usize];
            let removed = self.ranges.remove_segment(slab.first);
            debug_assert!(removed, "slab {slot} is idle: its line is one free range");
            slab.units = 0;
            self.vacant.push(slot);
            self.figures.slabs -= 1;
            self.figures.idle -= u64::from(units);
            self.figures.pinned -= u64::from(units);
            given_up.push(slot);
        }
        given_up
    }

    fn note_miss(&mut self, units: u32) {
        if self.misses.contains(&units) {
            self.repeated = Some(units);
        } else {
            self.misses[self.miss] = units;
            self.miss = (self.miss + 1) % MISSES_REMEMBERED;
        }
    }

    fn take_from_idle(&mut self, slot: u32, units: u32, kind: SlabKind) -> Option<Piece> {
        let slab = self.slabs[slot as usize];
        if slab.units < units || !self.has_ranges() {
            return None;
        }
        self.idle.remove(&(slab.units, slot));
        self.figures.idle -= u64::from(slab.units);
        self.open[kind as usize] += u64::from(slab.units);
        self.in_use[kind as usize] += 1;
        self.slabs[slot as usize].kind = kind;
        self.ranges.refile(slab.first, kind as u32);
        self.cut(slab.first, units)
    }

    /// Cuts a piece off the free `range` of a slab in use, or about to be.
    fn cut(&mut self, range: u32, units: u32) -> Option<Piece> {
        let range = self.ranges.take(range, Fit { units, align_units: 1 })?;
        let slot = self.ranges.owner(range);
        let slab = &mut self.slabs[slot as usize];
        slab.used += units;
        self.open[slab.kind as usize] -= u64::from(units);
        let figures = &mut self.figures;
        figures.used += u64::from(units);
        figures.pieces += 1;
        figures.peak_used = figures.peak_used.max(figures.used);
        self.level = self.level.plus(units);
        self.serials_given += 1;
        if self.serials.len() <= range as usize {
            self.serials.resize(range as usize + 1, 0);
        }
        self.serials[range as usize] = self.serials_given;
        let (start, serial) = (self.ranges.start(range), self.serials_given);
        Some(Piece { slab: slot, start, units, range, serial })
    }
}

fn kind(level: UsageLevel, units: u32) -> SlabKind {
    if level.is_small(units) { SlabKind::Small } else { SlabKind::Large }
}
