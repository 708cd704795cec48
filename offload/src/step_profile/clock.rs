//! Times of the trainer's marks: by the host's clock on the host device, by events of the stream on a GPU,
//! which passes a mark long after the trainer has made it.

use std::collections::VecDeque;
use std::time::Duration;

use dormouse_device::Device;
use dormouse_timeline::{Lane, Slice, Timeline};

use super::{Part, PerPart};

/// Limit on points that a stream has not passed yet; points beyond it have the host's time.
const TO_COME_MAX: usize = 1 << 13;

/// A point of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum MarkPoint {
    /// A layer's forward begins.
    ForwardBegin,
    /// A layer's forward ends.
    ForwardEnd(u32),
    /// A layer's backward is due and waits for its bytes.
    BackwardDue(u32),
    /// That wait failed; the backward can become due again.
    BackwardFailed(u32),
    /// A layer's backward begins.
    BackwardBegin(u32),
    /// A layer's backward ends.
    BackwardEnd(u32),
    /// A part of the step begins, and the one before it ends.
    Began(Part),
}

/// The time of a point.
#[derive(Debug)]
pub(crate) enum MarkTime<D: Device> {
    /// Nanoseconds of the timeline.
    At(u64),
    /// The time at which the stream passes this timed event.
    Reached(D::Event),
}

/// One layer's times, in nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LayerTimes {
    pub(crate) forward_ns: u64,
    pub(crate) backward_ns: u64,
    /// Time from the backward being due to its begin or failure.
    pub(crate) stall_ns: u64,
    /// Time at which its backward would have been due without the stalls before.
    pub(crate) unstalled_due_ns: Option<u64>,
}

/// What has ended, for the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// The forward of a layer.
    Forward(u32),
    /// The backward of a layer.
    Backward(u32),
    /// A wait for the backward of a layer.
    Wait(u32),
    /// A microbatch, by its number from 1.
    Microbatch(u32),
}

/// An interval that has ended, for the timeline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct EndedSpan {
    pub(crate) what: Ended,
    pub(crate) begin_ns: u64,
    pub(crate) end_ns: u64,
}

/// The times of a step, as far as they are known. Pure.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Times {
    layers: Vec<LayerTimes>,
    /// Durations of the microbatches. Those of forward and backward are by layer.
    pub(super) parts_ns: PerPart,
    opened_ns: u64,
    due_ns: u64,
    /// Stall of all layers so far.
    stalled_ns: u64,
    part: Part,
    part_began_ns: u64,
    /// Number of microbatches begun, and the begin of the last, unless it has ended.
    microbatches: u32,
    microbatch_began_ns: Option<u64>,
}

impl Times {
    pub(crate) fn layer(&self, layer: usize) -> LayerTimes {
        self.layers.get(layer).copied().unwrap_or_default()
    }

    fn of(&mut self, layer: u32) -> &mut LayerTimes {
        let at = layer as usize;
        if self.layers.len() <= at {
            self.layers.resize(at + 1, LayerTimes::default());
        }
        &mut self.layers[at]
    }

    /// Records that `point` was reached at `ns`. Returns the span that it ends, if any.
    pub(crate) fn came_to(&mut self, point: MarkPoint, ns: u64) -> Option<EndedSpan> {
        let (begin_ns, took_ns) = (self.opened_ns, ns.saturating_sub(self.opened_ns));
        let ended = |what, begin_ns| Some(EndedSpan { what, begin_ns, end_ns: ns });
        match point {
            MarkPoint::ForwardBegin => self.opened_ns = ns,
            MarkPoint::ForwardEnd(layer) => {
                self.of(layer).forward_ns = took_ns;
                return ended(Ended::Forward(layer), begin_ns);
            }
            MarkPoint::BackwardDue(layer) => {
                self.of(layer).unstalled_due_ns = Some(ns.saturating_sub(self.stalled_ns));
                self.due_ns = ns;
            }
            MarkPoint::BackwardFailed(layer) | MarkPoint::BackwardBegin(layer) => {
                let due_ns = self.due_ns;
                self.waited(layer, ns);
                if matches!(point, MarkPoint::BackwardBegin(_)) {
                    self.opened_ns = ns;
                }
                if ns > due_ns {
                    return ended(Ended::Wait(layer), due_ns);
                }
            }
            MarkPoint::BackwardEnd(layer) => {
                self.of(layer).backward_ns = took_ns;
                return ended(Ended::Backward(layer), begin_ns);
            }
            MarkPoint::Began(part) => {
                let before = self.begin(part, ns);
                return before.and_then(|(number, at)| ended(Ended::Microbatch(number), at));
            }
        }
        None
    }

    /// The backward of `layer` waited until `ns`.
    fn waited(&mut self, layer: u32, ns: u64) {
        let stall_ns = ns.saturating_sub(self.due_ns);
        self.of(layer).stall_ns += stall_ns;
        self.stalled_ns += stall_ns;
    }

    /// Begins a part. Returns number and begin of the microbatch that this ends, if any.
    fn begin(&mut self, part: Part, ns: u64) -> Option<(u32, u64)> {
        let took_ns = ns.saturating_sub(self.part_began_ns);
        if matches!(self.part, Part::Microbatch | Part::LastMicrobatch(_))
            && let Some(so_far_ns) = self.parts_ns.of(self.part)
        {
            *so_far_ns += took_ns;
        }
        self.parts_ns.begin(part);
        (self.part, self.part_began_ns) = (part, ns);
        if matches!(part, Part::LastMicrobatch(1..)) {
            return None;
        }
        let before = self.microbatch_began_ns.take().map(|began_ns| (self.microbatches, began_ns));
        if matches!(part, Part::Microbatch | Part::LastMicrobatch(_)) {
            self.microbatches = self.microbatches.saturating_add(1);
            self.microbatch_began_ns = Some(ns);
        }
        before
    }
}

/// The points of one step in their order, and their times.
#[derive(Debug)]
pub(crate) struct Clock<D: Device> {
    times: Times,
    /// Points that were not reached at the last check.
    to_come: VecDeque<(MarkPoint, MarkTime<D>)>,
}

impl<D: Device> Default for Clock<D> {
    fn default() -> Self {
        Self { times: Times::default(), to_come: VecDeque::new() }
    }
}

impl<D: Device> Clock<D> {
    pub(crate) const fn times(&self) -> &Times {
        &self.times
    }

    /// Returns true if every point so far was reached.
    pub(crate) fn is_settled(&self) -> bool {
        self.to_come.is_empty()
    }

    /// Returns the time of this point of `stream`.
    pub(crate) fn moment(&self, device: &D, stream: &D::Stream, now_ns: u64) -> MarkTime<D> {
        if !device.is_stream_ordered() || self.to_come.len() >= TO_COME_MAX {
            return MarkTime::At(now_ns);
        }
        // Statistics only: if the stream takes no event, for example during a capture, the host's time is
        // used.
        device.record_timed(stream).map_or(MarkTime::At(now_ns), MarkTime::Reached)
    }

    /// Adds `point`, which the trainer has reached or its stream will reach.
    pub(crate) fn came_to(&mut self, point: MarkPoint, moment: MarkTime<D>, timeline: &Timeline) {
        match moment {
            MarkTime::At(ns) if self.to_come.is_empty() => self.reached(point, ns, false, timeline),
            moment => self.to_come.push_back((point, moment)),
        }
    }

    fn reached(&mut self, point: MarkPoint, ns: u64, is_on_stream: bool, timeline: &Timeline) {
        let Some(EndedSpan { what, begin_ns, end_ns }) = self.times.came_to(point, ns) else {
            return;
        };
        let (lane, name, number) = match what {
            Ended::Forward(layer) => (Lane::Layer, "forward", layer),
            Ended::Backward(layer) => (Lane::Layer, "backward", layer),
            Ended::Microbatch(number) => (Lane::Microbatch, "microbatch", number),
            Ended::Wait(layer) if is_on_stream => (Lane::Stall, "wait for wake", layer),
            // The engine records the waits of threads.
            Ended::Wait(_) => return,
        };
        let slice = Slice::new(lane, timeline.intern(name), begin_ns, end_ns);
        timeline.slice(Slice { layer: Some(number), ..slice });
    }

    /// Reads the times of the points reached by now. Costs two device calls per point.
    pub(crate) fn settle(&mut self, device: &D, timeline: &Timeline) {
        let is_reached = |moment: &MarkTime<D>| match moment {
            MarkTime::At(_) => true,
            // A lost device reaches nothing more.
            MarkTime::Reached(event) => device.query(event).unwrap_or(true),
        };
        let reached = self.to_come.iter().take_while(|(_, moment)| is_reached(moment)).count();
        let reached: Vec<_> = self.to_come.drain(..reached).collect();
        let last = reached.iter().rev().find_map(|(_, moment)| match moment {
            MarkTime::Reached(event) => Some(event.clone()),
            MarkTime::At(_) => None,
        });
        let age = |event: &D::Event| device.age(event).unwrap_or_default();
        let last_age = last.as_ref().map(age).unwrap_or_default();
        let last_ns = before(timeline.now_ns(), last_age);
        for (point, moment) in reached {
            let is_on_stream = matches!(moment, MarkTime::Reached(_));
            let ns = match (moment, &last) {
                (MarkTime::At(ns), _) => ns,
                (MarkTime::Reached(event), Some(last)) => match device.between(&event, last) {
                    Some(by) => before(last_ns, by),
                    // A later event of another stream.
                    None => before(timeline.now_ns(), age(&event)),
                },
                (MarkTime::Reached(_), None) => last_ns,
            };
            self.reached(point, ns, is_on_stream, timeline);
        }
    }

    /// Moves the points not reached yet to a new clock, with a copy of the times, when the prefix ends.
    pub(crate) fn hand_over(&mut self) -> Self {
        Self { times: self.times.clone(), to_come: std::mem::take(&mut self.to_come) }
    }

    /// Blocks until every point is reached.
    pub(crate) fn wait(&self, device: &D) {
        for (_, moment) in &self.to_come {
            if let MarkTime::Reached(event) = moment {
                // A lost device reaches nothing more.
                let _ = device.synchronize(event);
            }
        }
    }
}

/// Returns the time `by` before `ns`, in nanoseconds of one timeline.
pub(crate) fn before(ns: u64, by: Duration) -> u64 {
    ns.saturating_sub(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX))
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use crate::step_profile::MICROBATCHES_MAX;

    fn play(points: &[(MarkPoint, u64)]) -> (Times, Vec<EndedSpan>) {
        let mut times = Times::default();
        let spans = points.iter().filter_map(|&(point, ns)| times.came_to(point, ns)).collect();
        (times, spans)
    }

    #[test]
    fn layers_have_their_times_and_waits() {
        use MarkPoint::*;
        let (times, spans) = play(&[
            (ForwardBegin, 10),
            (ForwardEnd(0), 14),
            (ForwardBegin, 15),
            (ForwardEnd(1), 21),
            (BackwardDue(1), 50),
            (BackwardBegin(1), 57),
            (BackwardEnd(1), 60),
            (BackwardDue(0), 61),
            (BackwardBegin(0), 61),
            (BackwardEnd(0), 70),
        ]);
        let layer = |forward_ns, backward_ns, stall_ns, due_ns| LayerTimes {
            forward_ns,
            backward_ns,
            stall_ns,
            unstalled_due_ns: Some(due_ns),
        };
        assert_eq!([times.layer(0), times.layer(1)], [layer(4, 9, 0, 54), layer(6, 3, 7, 50)]);
        assert_eq!(times.layer(2), LayerTimes::default());
        let span = |what, begin_ns, end_ns| EndedSpan { what, begin_ns, end_ns };
        assert_eq!(
            spans,
            [
                span(Ended::Forward(0), 10, 14),
                span(Ended::Forward(1), 15, 21),
                span(Ended::Wait(1), 50, 57),
                span(Ended::Backward(1), 57, 60),
                span(Ended::Backward(0), 61, 70)
            ]
        );
    }

    #[test]
    fn a_failed_wait_counts_as_stall_and_the_time_until_the_next_does_not() {
        use MarkPoint::*;
        let (times, _) = play(&[
            (BackwardDue(1), 50),
            (BackwardFailed(1), 57),
            (BackwardDue(1), 67),
            (BackwardBegin(1), 70),
            (BackwardEnd(1), 80),
            (BackwardDue(0), 85),
            (BackwardBegin(0), 85),
        ]);
        let [below, top] = [0, 1].map(|at| times.layer(at));
        assert_eq!((top.stall_ns, top.unstalled_due_ns), (10, Some(60)));
        assert_eq!((below.stall_ns, below.unstalled_due_ns), (0, Some(75)));
    }

    #[test]
    fn each_part_lasts_until_the_next() {
        use MarkPoint::Began;
        let (times, spans) = play(&[
            (Began(Part::Microbatch), 100),
            (Began(Part::Microbatch), 130),
            (Began(Part::LastMicrobatch(0)), 135),
            (Began(Part::LastMicrobatch(4)), 145),
            (Began(Part::Backward), 146),
        ]);
        assert_eq!(times.parts_ns.microbatches, [30, 5]);
        assert_eq!((times.parts_ns.last_microbatch[0], times.parts_ns.last_microbatch[4]), (10, 1));
        assert_eq!(times.parts_ns.last_microbatch.iter().sum::<u64>(), 11);
        let span = |number, begin_ns, end_ns| EndedSpan {
            what: Ended::Microbatch(number),
            begin_ns,
            end_ns,
        };
        assert_eq!(spans, [span(1, 100, 130), span(2, 130, 135), span(3, 135, 146)]);
    }

    #[test]
    fn microbatches_beyond_the_limit_count_with_the_last() {
        let many = MICROBATCHES_MAX as u64 + 3;
        let points: Vec<_> = (0..many).map(|at| (MarkPoint::Began(Part::Microbatch), at)).collect();
        let (mut times, _) = play(&points);
        times.came_to(MarkPoint::Began(Part::Backward), many);
        assert_eq!(
            (times.parts_ns.microbatches.len(), times.parts_ns.microbatches.last()),
            (MICROBATCHES_MAX, Some(&4))
        );
        assert_eq!(times.parts_ns.microbatches.iter().sum::<u64>(), many);
    }
}
