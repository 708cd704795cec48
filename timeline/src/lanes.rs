//! Assigns the slices of a lane to sub-tracks, so that slices of one sub-track never overlap.

use crate::event::Slice;

/// Maximum sub-tracks of a lane. Slices beyond it are shown as marks without length.
pub(crate) const SUBTRACKS_MAX: usize = 32;

/// Returns the sub-track of each of `slices`, which are ordered by start, and the number of sub-tracks.
/// `None` means that no sub-track was free: the slice is shown without length, at its start.
///
/// First fit uses no more sub-tracks than there are slices that overlap at one time.
pub(crate) fn place(slices: &[Slice]) -> (Vec<Option<usize>>, usize) {
    let mut free_from_ns: Vec<u64> = Vec::new();
    let place = |slice: &Slice| {
        let free = free_from_ns.iter().position(|from_ns| *from_ns <= slice.start_ns);
        if free.is_none() && free_from_ns.len() < SUBTRACKS_MAX {
            free_from_ns.push(slice.end_ns);
            return Some(free_from_ns.len() - 1);
        }
        free.inspect(|track| free_from_ns[*track] = slice.end_ns)
    };
    let tracks = slices.iter().map(place).collect();
    (tracks, free_from_ns.len())
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::{Lane, NameId};
    use proptest::prelude::*;

    fn slices(mut times: Vec<(u64, u64)>) -> Vec<Slice> {
        times.sort_unstable();
        let slice = |(start_ns, end_ns)| Slice::new(Lane::Layer, NameId::OTHER, start_ns, end_ns);
        times.into_iter().map(slice).collect()
    }

    /// Maximum slices that overlap at one time, counted at each start.
    fn overlap_max(slices: &[Slice]) -> usize {
        let at = |ns: u64| slices.iter().filter(|s| s.start_ns <= ns && ns < s.end_ns).count();
        slices.iter().map(|s| at(s.start_ns)).max().unwrap_or(0)
    }

    #[test]
    fn consecutive_slices_share_a_sub_track() {
        let (places, tracks) = place(&slices(vec![(0, 5), (5, 5), (5, 9)]));
        assert_eq!(tracks, 1);
        assert_eq!(places, [Some(0); 3]);
    }

    #[test]
    fn slices_beyond_the_limit_have_no_sub_track() {
        let (places, tracks) = place(&slices(vec![(0, 10); SUBTRACKS_MAX + 3]));
        assert_eq!(tracks, SUBTRACKS_MAX);
        assert_eq!(places.len(), SUBTRACKS_MAX + 3);
        assert_eq!(places.iter().filter(|place| place.is_none()).count(), 3);
    }

    proptest! {
        #[test]
        fn slices_of_a_sub_track_never_overlap_and_no_sub_track_is_wasted(
            times in proptest::collection::vec((0u64..60, 0u64..20), 0..80)
        ) {
            let slices = slices(times.into_iter().map(|(from, len)| (from, from + len)).collect());
            let (places, tracks) = place(&slices);
            prop_assert!(tracks <= SUBTRACKS_MAX);
            prop_assert!(tracks <= overlap_max(&slices) + 1);
            for (i, (a, at)) in slices.iter().zip(&places).enumerate() {
                prop_assert!(at.is_none_or(|track| track < tracks));
                for (b, bt) in slices.iter().zip(&places).skip(i + 1) {
                    let apart = a.end_ns <= b.start_ns || b.end_ns <= a.start_ns;
                    prop_assert!(apart || at.is_none() || at != bt);
                }
            }
        }
    }
}
