//! Groups the slices of a region into round trips from and to the device.

use std::collections::HashMap;

/// The fields of a slice that determine its flow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leg {
    /// The region, never 0.
    pub(super) flow: u64,
    pub(super) start_ns: u64,
    /// Whether the slice moves bytes away from the device.
    pub(super) outbound: bool,
}

/// Position of a slice in its flow.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The only slice of its round trip: no flow is drawn.
    Alone,
    /// Not the last slice of its round trip.
    Joins,
    /// The last slice of its round trip.
    Ends,
}

/// Returns the step of each leg. A round trip starts with an outbound leg (the region falls asleep) and
/// ends before the next outbound leg that follows an inbound one.
pub(super) fn steps(legs: &[Leg]) -> Vec<Step> {
    let mut by_flow: HashMap<u64, Vec<usize>> = HashMap::new();
    let mut order: Vec<usize> = (0..legs.len()).collect();
    order.sort_by_key(|at| legs[*at].start_ns);
    for at in order {
        by_flow.entry(legs[at].flow).or_default().push(at);
    }
    let mut steps = vec![Step::Alone; legs.len()];
    for indices in by_flow.values() {
        let same_trip =
            |before: &usize, after: &usize| legs[*before].outbound || !legs[*after].outbound;
        for trip in indices.chunk_by(same_trip).filter(|trip| trip.len() > 1) {
            trip.iter().for_each(|at| steps[*at] = Step::Joins);
            steps[trip[trip.len() - 1]] = Step::Ends;
        }
    }
    steps
}

#[cfg(test)]
mod tests {
    use super::*;
    use Step::{Alone, Ends, Joins};

    fn legs(spec: &[(u64, u64, bool)]) -> Vec<Leg> {
        let leg = |&(flow, start_ns, outbound): &(u64, u64, bool)| Leg { flow, start_ns, outbound };
        spec.iter().map(leg).collect()
    }

    #[test]
    fn a_round_trip_by_way_of_the_host_is_one_flow() {
        let steps = steps(&legs(&[(7, 0, true), (7, 1, true), (7, 5, false), (7, 6, false)]));
        assert_eq!(steps, [Joins, Joins, Joins, Ends]);
    }

    #[test]
    fn the_next_sleep_starts_a_new_flow_in_any_order_of_legs() {
        let spec = [(7, 9, false), (7, 1, true), (7, 3, false), (7, 5, true)];
        assert_eq!(steps(&legs(&spec)), [Ends, Joins, Ends, Joins]);
    }

    #[test]
    fn a_single_slice_has_no_flow() {
        let spec = [(1, 0, true), (2, 1, false), (3, 2, false), (3, 3, true)];
        assert_eq!(steps(&legs(&spec)), [Alone; 4]);
    }
}
