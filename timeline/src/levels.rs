//! The levels of a snapshot: what each gauge showed over time, made in one pass over the events.

use crate::event::{Event, Gauge};
use crate::names::NameId;
use crate::snapshot::Snapshot;
use std::collections::HashMap;

/// A level over time, as (time from which it holds, bytes). Never empty; times are in order.
pub(crate) type Steps = Vec<(u64, u64)>;

/// What each gauge showed in the window of a snapshot, as far as that is recorded.
#[derive(Debug)]
pub(crate) struct Levels {
    gauges: Vec<Steps>,
    /// [`Gauge::DeviceTagged`] by tag, in the order of the tags' names.
    tags: Vec<(NameId, Steps)>,
}

impl Levels {
    /// Reads the levels of `snapshot`, from the time on from which all changes are there. Each begins with the value before
    /// its first change, or has the current value if it did not change.
    pub(crate) fn of(snapshot: &Snapshot) -> Self {
        let begin_ns = snapshot.levels_begin_ns();
        let mut gauges = vec![Steps::new(); Gauge::ALL.len()];
        let mut tags = HashMap::<NameId, Steps>::new();
        for event in &snapshot.events {
            let Event::Gauge { gauge, tag, at_ns, value_bytes, previous_bytes } = *event else {
                continue;
            };
            let steps = match gauge {
                Gauge::DeviceTagged => tags.entry(tag).or_default(),
                _ => &mut gauges[gauge as usize],
            };
            if steps.is_empty() && at_ns > begin_ns {
                steps.push((begin_ns, previous_bytes));
            }
            steps.push((at_ns, value_bytes));
        }
        for (tag, now_bytes) in &snapshot.tags_now {
            tags.entry(*tag).or_insert_with(|| vec![(begin_ns, *now_bytes)]);
        }
        for (steps, now_bytes) in gauges.iter_mut().zip(snapshot.gauges_now) {
            if steps.is_empty() {
                steps.push((begin_ns, now_bytes));
            }
        }
        let mut tags: Vec<(NameId, Steps)> = tags.into_iter().collect();
        tags.sort_by_key(|(tag, _)| (snapshot.names.get(*tag), *tag));
        if !tags.is_empty() {
            gauges[Gauge::DeviceTagged as usize] = sum(tags.iter().map(|(_, steps)| steps));
        }
        Self { gauges, tags }
    }

    /// Returns the level of `gauge`; of [`Gauge::DeviceTagged`], that of all tags together.
    pub(crate) fn gauge(&self, gauge: Gauge) -> &Steps {
        &self.gauges[gauge as usize]
    }

    /// Returns the level of each tag, in the order of their names.
    pub(crate) fn tags(&self) -> &[(NameId, Steps)] {
        &self.tags
    }
}

/// Returns the value of a level at `at_ns`: after the last change by then.
pub(crate) fn value_at(steps: &Steps, at_ns: u64) -> u64 {
    let after = steps.partition_point(|(from_ns, _)| *from_ns <= at_ns);
    steps.get(after.saturating_sub(1)).map_or(0, |(_, value_bytes)| *value_bytes)
}

/// Returns the sum of several levels. Changes at the same nanosecond are one change.
fn sum<'a>(levels: impl Iterator<Item = &'a Steps>) -> Steps {
    let mut changes = Vec::new();
    for level in levels {
        let mut before_bytes = 0;
        for (at_ns, value_bytes) in level {
            changes.push((*at_ns, i128::from(*value_bytes) - before_bytes));
            before_bytes = i128::from(*value_bytes);
        }
    }
    changes.sort_by_key(|(at_ns, _)| *at_ns);
    let (mut steps, mut total_bytes) = (Steps::new(), 0i128);
    for (at_ns, by_bytes) in changes {
        total_bytes += by_bytes;
        let value_bytes = u64::try_from(total_bytes).unwrap_or(u64::MAX);
        match steps.last_mut() {
            Some(last) if last.0 == at_ns => last.1 = value_bytes,
            _ => steps.push((at_ns, value_bytes)),
        }
    }
    steps
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_level_is_its_last_change_and_a_sum_the_sum_of_them() {
        let (a, b) = (vec![(0, 5), (10, 2), (10, 7)], vec![(0, 1), (10, 0), (20, 4)]);
        assert_eq!([value_at(&a, 9), value_at(&a, 10), value_at(&a, 99)], [5, 7, 7]);
        assert_eq!(sum([&a, &b].into_iter()), [(0, 6), (10, 7), (20, 11)]);
    }
}
