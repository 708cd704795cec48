//! Size classes of small blocks: exact up to 32 granules, then steps of a sixteenth.

use super::{DEPTH, DEPTH_UNITS};

/// The largest block that has a class, in granules.
pub(crate) const CLASS_UNITS_MAX: u32 = 2048;
/// Number of classes.
pub(super) const CLASSES: usize = 128;

/// Sizes up to this number of granules have a class each; a power of two.
const EXACT_UNITS: u32 = 32;
/// Classes per doubling above that; a power of two.
const STEPS: u32 = 16;

/// Returns the class of `units` (1 to [`CLASS_UNITS_MAX`]).
#[inline]
pub(super) const fn class_of(units: u32) -> u32 {
    debug_assert!(units > 0 && units <= CLASS_UNITS_MAX);
    let last = units - 1;
    if last < EXACT_UNITS {
        return last;
    }
    // `last` is in [32 << k, 64 << k): 16 steps of 2 << k.
    let doubling = last.ilog2() - EXACT_UNITS.ilog2();
    let step = (last >> (doubling + 1)) - STEPS;
    EXACT_UNITS + doubling * STEPS + step
}

/// Returns the units of the blocks of `class`, the largest size it serves.
#[inline]
pub(super) const fn class_units(class: u32) -> u32 {
    if class < EXACT_UNITS {
        return class + 1;
    }
    let (doubling, step) = ((class - EXACT_UNITS) / STEPS, (class - EXACT_UNITS) % STEPS);
    (STEPS + step + 1) << (doubling + 1)
}

/// By units less one: the class. A table is faster than the computation, and every request needs it.
static CLASS_OF: [u8; CLASS_UNITS_MAX as usize] = {
    let mut table = [0; CLASS_UNITS_MAX as usize];
    let mut units = 1;
    while units <= CLASS_UNITS_MAX {
        // Below `CLASSES`.
        table[units as usize - 1] = class_of(units) as u8;
        units += 1;
    }
    table
};

/// By class: its units.
static CLASS_UNITS: [u16; CLASSES] = {
    let mut table = [0; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        // At most `CLASS_UNITS_MAX`.
        table[class] = class_units(class as u32) as u16;
        class += 1;
    }
    table
};

/// By class: the limit of the cached blocks.
static CLASS_DEPTH: [u8; CLASSES] = {
    let mut table = [0; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        let fitting = DEPTH_UNITS / class_units(class as u32);
        // At most `DEPTH`.
        table[class] = match fitting as usize {
            0 => 1,
            DEPTH.. => DEPTH as u8,
            fitting => fitting as u8,
        };
        class += 1;
    }
    table
};

/// Limit of the granules of a block beyond the whole granules of its request.
pub(super) const SLACK_UNITS_MAX: u32 = 256;
/// Limit of the classes above its own that may serve a request.
const CLASSES_ABOVE: usize = 3;

/// By class: the largest class that serves its requests if it is empty, at most a quarter larger.
static CLASS_LAST: [u8; CLASSES] = {
    let mut table = [0; CLASSES];
    let mut class = 0;
    while class < CLASSES {
        let most = class_units(class as u32) * 5 / 4;
        let mut last = class;
        while last < CLASSES - 1
            && last < class + CLASSES_ABOVE
            && class_units(last as u32 + 1) <= most
        {
            last += 1;
        }
        // Below `CLASSES`.
        table[class] = last as u8;
        class += 1;
    }
    table
};

/// Returns the classes above `class` that serve its requests if it is empty.
#[inline]
pub(super) fn classes_above(class: u32) -> std::ops::RangeInclusive<u32> {
    class + 1..=CLASS_LAST[class as usize % CLASSES].into()
}

/// Returns the limit of the cached blocks of `class`.
#[inline]
pub(super) fn class_depth(class: u32) -> u8 {
    CLASS_DEPTH[class as usize % CLASSES]
}

/// Returns [`class_of`] of `last_unit + 1`, at most [`CLASS_UNITS_MAX`].
#[inline]
pub(super) fn class_of_units(last_unit: u32) -> u32 {
    CLASS_OF[last_unit as usize % CLASS_OF.len()].into()
}

/// Returns [`class_units`] of `class`.
#[inline]
pub(super) fn units_of_class(class: u32) -> u32 {
    CLASS_UNITS[class as usize % CLASSES].into()
}

/// Returns the units of a small block for a request of `units`.
#[inline]
pub(crate) const fn class_round(units: u32) -> u32 {
    class_units(class_of(units))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_size_fits_its_class_and_wastes_a_sixteenth_at_most() {
        for units in 1..=CLASS_UNITS_MAX {
            let class = class_of(units);
            assert!((class as usize) < CLASSES);
            let rounded = class_units(class);
            assert!(rounded >= units && rounded - units <= units / 16, "{units} in {rounded}");
            assert_eq!(class_of(rounded), class, "{units}: rounding is stable");
            assert_eq!((class_of_units(units - 1), units_of_class(class)), (class, rounded));
            assert!(
                class == 0 || class_units(class - 1) < units,
                "{units}: a smaller class would do"
            );
        }
        for class in 0..CLASSES as u32 {
            let above = classes_above(class);
            assert!(above.end() - class <= CLASSES_ABOVE as u32, "{class}: {above:?}");
            let fits = |&other: &u32| class_units(other) * 4 <= class_units(class) * 5;
            assert!(above.clone().all(|other| fits(&other)), "{class}: {above:?}");
        }
        assert!(classes_above(2).is_empty(), "4 units are a third more than 3");
        assert_eq!(classes_above(3), 4..=4);
        assert_eq!(classes_above(40), 41..=43);
        assert!(classes_above(CLASSES as u32 - 1).is_empty());
        for units in 1..=CLASS_UNITS_MAX {
            let class = class_of(units);
            let most = class_units(classes_above(class).last().unwrap_or(class));
            assert!(most - (units - 1) <= SLACK_UNITS_MAX, "{most} for {units}");
        }
        let depths = (0..CLASSES as u32).map(class_depth);
        assert!(depths.clone().all(|depth| (1..=DEPTH).contains(&depth.into())));
        let units: u32 =
            (0..).zip(depths).map(|(class, depth)| units_of_class(class) * u32::from(depth)).sum();
        assert!(
            units << 9 <= 36 << 20,
            "{units} granules of a stream: at 512 bytes 36 MiB at most"
        );
        assert_eq!(class_of(CLASS_UNITS_MAX) as usize, CLASSES - 1);
        assert_eq!(class_units(CLASSES as u32 - 1), CLASS_UNITS_MAX);
    }
}
