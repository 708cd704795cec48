//! Lanes into sub-tracks: slices that overlap are drawn beside each other, never across.

use crate::snapshot::Slice;

/// Most sub-tracks one lane is split into. More copies than this at one time are still all shown,
/// the surplus as marks without length.
pub(crate) const SUBTRACKS_MAX: usize = 32;

/// Where one slice is drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// Sub-track, from 0.
    pub(crate) track: usize,
    /// No sub-track was free: show it without length, at its start.
    pub(crate) crowded: bool,
}

/// A place for each of `slices`, which are in order of their starts, and the number of sub-tracks.
///
/// First fit, which for intervals in order of start uses no more sub-tracks than overlap at once.
pub(crate) fn place(slices: &[Slice]) -> (Vec<Place>, usize) {
    let mut free_from_ns: Vec<u64> = Vec::new();
    let mut places = Vec::with_capacity(slices.len());
    for slice in slices {
        let free = free_from_ns.iter().position(|from_ns| *from_ns <= slice.start_ns);
        let place = match free {
            Some(track) => Place { track, crowded: false },
            None if free_from_ns.len() < SUBTRACKS_MAX => {
                free_from_ns.push(0);
                Place { track: free_from_ns.len() - 1, crowded: false }
            }
            None => Place { track: SUBTRACKS_MAX - 1, crowded: true },
        };
        if !place.crowded
            && let Some(from_ns) = free_from_ns.get_mut(place.track)
        {
            *from_ns = slice.end_ns;
        }
        places.push(place);
    }
    (places, free_from_ns.len())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::NameId;
    use proptest::prelude::*;

    fn slices(mut times: Vec<(u64, u64)>) -> Vec<Slice> {
        times.sort_unstable();
        let slice =
            |(start_ns, end_ns)| Slice { name: NameId::OTHER, start_ns, end_ns, bytes: 0, flow: 0 };
        times.into_iter().map(slice).collect()
    }

    /// The most slices that share a moment, by looking at each moment.
    fn overlap_max(slices: &[Slice]) -> usize {
        let at = |ns: u64| slices.iter().filter(|s| s.start_ns <= ns && ns < s.end_ns).count();
        slices.iter().map(|s| at(s.start_ns)).max().unwrap_or(0)
    }

    #[test]
    fn one_after_the_other_shares_a_track() {
        let (places, tracks) = place(&slices(vec![(0, 5), (5, 5), (5, 9)]));
        assert_eq!(tracks, 1);
        assert!(places.iter().all(|place| *place == Place { track: 0, crowded: false }));
    }

    #[test]
    fn a_crowd_is_cut_at_the_named_limit_and_nothing_is_lost() {
        let (places, tracks) = place(&slices(vec![(0, 10); SUBTRACKS_MAX + 3]));
        assert_eq!(tracks, SUBTRACKS_MAX);
        assert_eq!(places.len(), SUBTRACKS_MAX + 3);
        assert_eq!(places.iter().filter(|place| place.crowded).count(), 3);
    }

    proptest! {
        #[test]
        fn slices_of_one_track_never_overlap_and_no_track_is_wasted(
            times in proptest::collection::vec((0u64..60, 0u64..20), 0..80)
        ) {
            let slices = slices(times.into_iter().map(|(from, len)| (from, from + len)).collect());
            let (places, tracks) = place(&slices);
            prop_assert!(tracks <= SUBTRACKS_MAX);
            prop_assert!(tracks <= overlap_max(&slices) + 1);
            for (i, (a, at)) in slices.iter().zip(&places).enumerate() {
                prop_assert!(at.track < tracks);
                for (b, bt) in slices.iter().zip(&places).skip(i + 1) {
                    let apart = a.end_ns <= b.start_ns || b.end_ns <= a.start_ns;
                    prop_assert!(apart || at.crowded || bt.crowded || at.track != bt.track);
                }
            }
        }
    }
}
