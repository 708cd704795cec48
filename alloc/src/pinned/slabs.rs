//! The slabs and their pieces: which units serve a request, which slabs are pinned and unpinned.
//!
//! Pure: slots and units, no addresses, devices or locks.

use std::collections::BTreeSet;

use super::policy::UsageLevel;
use crate::core::{Fit, NONE, Ranges};

#[cfg(any(test, feature = "checks"))]
mod testing;

/// Limit of the ranges (pieces and free ranges) in all slabs.
pub(super) const RANGES_MAX: u32 = 1 << 22;
/// Number of remembered sizes of large requests: about as many as a layer has.
const SIZES_REMEMBERED: usize = 16;

/// The requests that a slab in use serves: small pieces would keep large slabs from becoming idle. The value
/// is the list of its open ranges.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SlabKind {
    Small = 0,
    Large = 1,
}

/// The list of idle slabs.
const IDLE: u32 = 2;
const LISTS: u32 = 3;

#[derive(Clone, Copy, Debug)]
struct SlabEntry {
    /// Its first range, the same for life.
    first: u32,
    /// 0 for a vacant slot.
    units: u32,
    used: u32,
    kind: SlabKind,
}

/// An allocated piece of a slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Piece {
    pub(super) slab: u32,
    pub(super) start: u32,
    pub(super) units: u32,
    pub(super) range: u32,
    /// Distinguishes it from earlier pieces with the same range.
    pub(super) serial: u64,
}

/// Sizes of large requests, the oldest of which are forgotten.
#[derive(Clone, Copy, Debug, Default)]
struct Sizes {
    /// 0: none yet.
    units: [u32; SIZES_REMEMBERED],
    /// Position of the next one.
    next: usize,
}

impl Sizes {
    fn has(&self, units: u32) -> bool {
        self.units.contains(&units)
    }

    /// Returns false if the size was remembered already.
    fn add(&mut self, units: u32) -> bool {
        let is_new = !self.has(units);
        if is_new {
            self.units[self.next] = units;
            self.next = (self.next + 1) % SIZES_REMEMBERED;
        }
        is_new
    }
}

/// A slab to pin.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct SlabGrowth {
    /// Units to pin.
    pub(super) units: u32,
    /// Slots of slabs to unpin first. They are already removed.
    pub(super) given_up: Vec<u32>,
}

/// Statistics in units.
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

/// All slabs.
#[derive(Debug)]
pub(super) struct Slabs {
    ranges: Ranges,
    slabs: Vec<SlabEntry>,
    vacant: Vec<u32>,
    /// Units and slot of each idle slab.
    idle: BTreeSet<(u32, u32)>,
    /// By range: the serial of its piece, or 0.
    serials: Vec<u64>,
    serials_given: u64,
    cap: u64,
    keeps: bool,
    level: UsageLevel,
    /// By `SlabKind`: free units in slabs in use, and the number of these slabs.
    open: [u64; 2],
    in_use: [u32; 2],
    /// Since the usage was last low, a large request was refused although open ranges had its units.
    is_short: bool,
    /// Large sizes requested since then.
    asked: Sizes,
    /// Those of the rise before, if it was short. Requests of these sizes open no more than outside of a rise.
    tight: Sizes,
    figures: SlabFigures,
    /// Large sizes pinned recently.
    misses: Sizes,
    /// A large size that was pinned twice, of which another slab is pinned in advance.
    repeated: Option<u32>,
}

impl Slabs {
    /// Without `keeps` each request has its own slab, which is unpinned when the piece is freed.
    pub(super) fn new(cap: u64, keeps: bool, ranges_max: u32) -> Self {
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
            is_short: false,
            asked: Sizes::default(),
            tight: Sizes::default(),
            figures: SlabFigures::default(),
            misses: Sizes::default(),
            repeated: None,
        }
    }

    pub(super) fn figures(&self) -> SlabFigures {
        self.figures
    }

    pub(super) fn reset_peaks(&mut self) {
        self.figures.peak_used = self.figures.used;
        self.figures.peak_pinned = self.figures.pinned;
    }

    /// Whether one more piece, in a new slab, fits the limit of ranges.
    pub(super) fn has_ranges(&mut self) -> bool {
        self.ranges.can_make(3)
    }

    /// Takes a piece of a pinned slab, if the policy allows what remains open.
    pub(super) fn take(&mut self, units: u32, is_bounce: bool) -> Option<Piece> {
        let room = self.room(is_bounce)?;
        let level = self.level.plus(units);
        let kind = kind(level, units);
        if kind == SlabKind::Large {
            self.asked.add(units);
        }
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
        let level = if self.tight.has(units) { level.settled() } else { level };
        if kind == SlabKind::Large && !level.may_open(units, slab_units - units, open) {
            return None;
        }
        self.take_from_idle(slot, units, kind)
    }

    /// Takes a piece of any pinned slab. Searches all ranges, before a request is refused.
    pub(super) fn take_any(&mut self, units: u32, is_bounce: bool) -> Option<Piece> {
        let piece = self.search_all(units, is_bounce);
        let is_large = kind(self.level.plus(units), units) == SlabKind::Large;
        let has_units = self.open[SlabKind::Large as usize] >= u64::from(units);
        self.is_short |= piece.is_none() && is_large && has_units;
        piece
    }

    fn search_all(&mut self, units: u32, is_bounce: bool) -> Option<Piece> {
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

    /// Starts to pin a slab for a request of `units`. Idle slabs are unpinned until it fits under the cap, within
    /// `limit` units in all and, if possible, under the policy's limit. `None`, and nothing is unpinned, if the cap or
    /// `limit` has no room even without idle slabs, except for a *bounce*. The units are in flight then.
    pub(super) fn grow(&mut self, units: u32, is_bounce: bool, limit: u64) -> Option<SlabGrowth> {
        let level = self.level.plus(units);
        let is_small = kind(level, units) == SlabKind::Small;
        let cap = self.cap.min(limit);
        let room = self.room_under(cap).unwrap_or(0);
        if !is_bounce && u64::from(units) > room {
            return None;
        }
        let wanted = if is_small && self.keeps { level.slab_units() } else { units };
        // A slab for small requests is shortened to the cap.
        let cut = || u32::try_from(room).unwrap_or(u32::MAX).max(units);
        let new = if u64::from(wanted) <= room { wanted } else { cut() };
        if !is_small && !self.misses.add(units) {
            self.repeated = Some(units);
        }
        let most = cap.min(level.pinned_units_max());
        let others = self.figures.in_flight + u64::from(new);
        let given_up = self.give_up_to(most.saturating_sub(others));
        self.figures.in_flight += u64::from(new);
        Some(SlabGrowth { units: new, given_up })
    }

    /// Returns the units by which slabs in use may grow if all idle ones are unpinned: unlimited for a
    /// bounce. `None` beyond the cap, where only bounces are allocated: another piece would keep the slab of
    /// a bounce pinned.
    fn room(&self, is_bounce: bool) -> Option<u64> {
        if is_bounce { Some(u64::MAX) } else { self.room_under(self.cap) }
    }

    fn room_under(&self, cap: u64) -> Option<u64> {
        let SlabFigures { pinned, idle, in_flight, .. } = self.figures;
        cap.checked_sub(pinned - idle + in_flight)
    }

    /// After the device has refused `growth`: returns the smallest growth, with all idle slabs unpinned.
    pub(super) fn shrink(&mut self, growth: &SlabGrowth, units: u32) -> SlabGrowth {
        self.figures.in_flight -= u64::from(growth.units);
        self.figures.in_flight += u64::from(units);
        SlabGrowth { units, given_up: self.give_up_to(0) }
    }

    /// Ends a failed `growth`.
    pub(super) fn not_grown(&mut self, growth: &SlabGrowth) {
        self.figures.in_flight -= u64::from(growth.units);
    }

    /// Ends a successful `growth`: adds an idle slab of `units` and returns its slot. `None` at the limit of
    /// ranges: the caller unpins the memory.
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

    /// Takes the first `units` of an idle slab that was pinned for them.
    pub(super) fn take_grown(&mut self, slot: u32, units: u32) -> Option<Piece> {
        self.take_from_idle(slot, units, kind(self.level.plus(units), units))
    }

    /// Starts to pin a slab in advance, if useful. Never unpins an idle slab.
    pub(super) fn grow_in_background(&mut self) -> Option<SlabGrowth> {
        let units = self.units_to_prepare()?;
        self.repeated = None;
        self.figures.in_flight += u64::from(units);
        Some(SlabGrowth { units, given_up: Vec::new() })
    }

    /// Returns the units to pin in advance.
    pub(super) fn units_to_prepare(&self) -> Option<u32> {
        let level = self.level;
        let slab = level.slab_units();
        let SlabFigures { pinned, in_flight, .. } = self.figures;
        let fits = |units: u32| {
            let after = pinned + in_flight + u64::from(units);
            after <= self.cap && after <= level.pinned_units_max() && level.may_prepare(units)
        };
        let has_idle = |least, most| self.idle.range((least, 0)..=(most, NONE)).next().is_some();
        // The low-water mark of small slabs: half of the next one.
        let is_low = self.open[SlabKind::Small as usize] < u64::from(slab / 2);
        let has_small = self.in_use[SlabKind::Small as usize] > 0;
        if has_small && is_low && !has_idle(slab / 4, slab * 2) && fits(slab) {
            return Some(slab);
        }
        self.repeated.filter(|&units| !has_idle(units, units) && fits(units))
    }

    /// Frees a piece. `None` for one that is not allocated: nothing is changed.
    pub(super) fn give(&mut self, piece: Piece) -> Option<()> {
        let serial = self.serials.get_mut(piece.range as usize);
        *serial.filter(|serial| piece.serial != 0 && **serial == piece.serial)? = 0;
        let slab = &mut self.slabs[piece.slab as usize];
        let (kind, units) = (slab.kind as usize, u64::from(piece.units));
        slab.used -= piece.units;
        self.figures.used -= units;
        let was_low = self.level.is_low();
        self.level.used -= units;
        self.level.given = if self.level.is_low() { 0 } else { self.level.given + units };
        if self.level.is_low() && !was_low {
            // The next rise begins.
            let asked = std::mem::take(&mut self.asked);
            self.tight = if std::mem::take(&mut self.is_short) { asked } else { Sizes::default() };
        }
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

    /// Whether idle slabs must be unpinned: beyond the cap, or all if nothing is kept.
    pub(super) fn has_surplus(&self) -> bool {
        !self.idle.is_empty()
            && (!self.keeps || self.figures.pinned + self.figures.in_flight > self.cap)
    }

    /// Removes these slabs. Returns their slots.
    pub(super) fn give_up_surplus(&mut self) -> Vec<u32> {
        let most = if self.keeps { self.cap.saturating_sub(self.figures.in_flight) } else { 0 };
        self.give_up_to(most)
    }

    pub(super) fn set_cap(&mut self, units: u64) {
        self.cap = units;
    }

    /// Returns the slots of all slabs with pieces.
    pub(super) fn slots_in_use(&self) -> Vec<u32> {
        let in_use = (0..).zip(&self.slabs).filter(|(_, slab)| slab.units > 0 && slab.used > 0);
        in_use.map(|(slot, _)| slot).collect()
    }

    /// Removes idle slabs until at most `most` units are pinned: the smallest sufficient one, or the largest
    /// and then others. Returns their slots.
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

    /// Takes a piece of the free `range` of a slab in use.
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
