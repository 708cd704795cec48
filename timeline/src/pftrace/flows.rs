//! Which slices of a region belong to one journey, and which ends it.

use std::collections::HashMap;

/// Part of a slice that matters to its flow.
#[derive(Clone, Copy, Debug)]
pub(super) struct Leg {
    /// The region, never 0.
    pub(super) flow: u64,
    pub(super) start_ns: u64,
    /// Moves bytes away from the device.
    pub(super) outbound: bool,
}

/// What a slice does to the flow it is part of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Step {
    /// The only slice of its journey: there is nothing to join it to.
    Alone,
    /// Begins the journey or carries it on.
    Joins,
    /// Is the last of the journey.
    Ends,
}

/// The step of each leg. A journey begins with an outbound leg (the region falls asleep) and ends
/// with the last leg before the next outbound one that follows an inbound one.
pub(super) fn steps(legs: &[Leg]) -> Vec<Step> {
    let mut by_flow: HashMap<u64, Vec<usize>> = HashMap::new();
    let mut order: Vec<usize> = (0..legs.len()).collect();
    order.sort_by_key(|at| legs.get(*at).map(|leg| leg.start_ns));
    for at in order {
        if let Some(leg) = legs.get(at) {
            by_flow.entry(leg.flow).or_default().push(at);
        }
    }
    let mut steps = vec![Step::Alone; legs.len()];
    for indices in by_flow.values() {
        let outbound = |at: &usize| legs.get(*at).is_some_and(|leg| leg.outbound);
        for journey in indices.chunk_by(|before, after| outbound(before) || !outbound(after)) {
            let Some((last, earlier)) = journey.split_last() else { continue };
            if earlier.is_empty() {
                continue;
            }
            for at in earlier {
                set(&mut steps, *at, Step::Joins);
            }
            set(&mut steps, *last, Step::Ends);
        }
    }
    steps
}

fn set(steps: &mut [Step], at: usize, step: Step) {
    if let Some(place) = steps.get_mut(at) {
        *place = step;
    }
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
    fn a_journey_by_way_of_the_host_is_one_flow() {
        let steps = steps(&legs(&[(7, 0, true), (7, 1, true), (7, 5, false), (7, 6, false)]));
        assert_eq!(steps, [Joins, Joins, Joins, Ends]);
    }

    #[test]
    fn falling_asleep_anew_begins_a_new_flow_and_order_given_does_not_matter() {
        let spec = [(7, 9, false), (7, 1, true), (7, 3, false), (7, 5, true)];
        assert_eq!(steps(&legs(&spec)), [Ends, Joins, Ends, Joins]);
    }

    #[test]
    fn a_slice_with_nobody_to_join_stands_alone() {
        let spec = [(1, 0, true), (2, 1, false), (3, 2, false), (3, 3, true)];
        assert_eq!(steps(&legs(&spec)), [Alone; 4]);
    }
}
