//! Encodes the events of a trace in any order and returns them by time.

use super::flows::{self, Leg, Step};
use super::tracks::Tracks;
use super::wire::Message;
use super::{Annotation, name_iid};
use crate::event::{Event, Gauge, Lane, Slice};
use crate::lanes::SUBTRACKS_MAX;
use crate::levels::{Levels, Steps};
use crate::snapshot::Snapshot;
use crate::totals::rate_bytes_per_s;
use std::collections::HashMap;
use std::ops::Range;

const TYPE_BEGIN: u64 = 1;
const TYPE_END: u64 = 2;
const TYPE_INSTANT: u64 = 3;
const TYPE_COUNTER: u64 = 4;

/// Field numbers of `TrackEvent`.
mod field {
    pub(super) const ANNOTATION: u32 = 4;
    pub(super) const TYPE: u32 = 9;
    pub(super) const NAME_IID: u32 = 10;
    pub(super) const TRACK_UUID: u32 = 11;
    pub(super) const COUNTER_VALUE: u32 = 30;
    pub(super) const FLOW_ID: u32 = 47;
    pub(super) const LAST_FLOW_ID: u32 = 48;
}

/// Encoded `TrackEvent`s, with the time and byte range of each.
#[derive(Debug, Default)]
pub(super) struct Draft {
    encoded: Message,
    events: Vec<(u64, Range<usize>)>,
}

impl Draft {
    pub(super) fn of(snapshot: &Snapshot, levels: &Levels, tracks: &Tracks) -> Self {
        let mut draft = Self::default();
        for gauge in Gauge::ALL.into_iter().filter(|gauge| *gauge != Gauge::DeviceTagged) {
            draft.counter(snapshot, tracks.gauge_uuid(gauge), levels.gauge(gauge));
        }
        for (tag, steps) in levels.tags() {
            draft.counter(snapshot, tracks.tag_uuid(*tag), steps);
        }
        let slices = || {
            let of_lane = |lane| tracks.slices(lane).iter().map(move |placed| (lane, placed));
            Lane::ALL.into_iter().flat_map(of_lane)
        };
        let with_flow = slices().filter(|(_, (slice, _))| slice.flow != 0);
        let legs = with_flow.map(|(lane, (slice, _))| Leg {
            flow: slice.flow,
            start_ns: slice.start_ns,
            outbound: lane.is_outbound(),
        });
        let mut steps = flows::steps(&legs.collect::<Vec<_>>()).into_iter();
        let mut uses = Uses::of(snapshot, tracks.slices(Lane::Layer));
        let mut placed = Vec::new();
        for (lane, (slice, sub)) in slices() {
            let step = if slice.flow == 0 { None } else { steps.next() };
            let step = step.unwrap_or(Step::Alone);
            let is_used = step != Step::Joins && uses.end_there(slice);
            placed.push((lane, slice, *sub, if is_used { Step::Joins } else { step }));
        }
        let mut layers = uses.ends.into_iter();
        for (lane, slice, sub, step) in placed {
            let ends = if lane == Lane::Layer { layers.next() } else { None };
            draft.slice(tracks, slice, sub, step, &ends.unwrap_or_default());
        }
        for event in &snapshot.events {
            if let Event::Instant { lane, name, at_ns, value } = *event {
                draft.event(at_ns, TYPE_INSTANT, tracks.lane_uuid(lane, 0), |body| {
                    body.unsigned(field::NAME_IID, name_iid(&Slice::new(lane, name, at_ns, at_ns)));
                    annotate(body, Annotation::Value, value);
                });
            }
        }
        // Stable: events of one track at the same time keep their order, in which a slice ends before the
        // next begins.
        draft.events.sort_by_key(|(at_ns, _)| *at_ns);
        draft
    }

    /// Returns every event with its time, oldest first.
    pub(super) fn by_time(&self) -> impl Iterator<Item = (u64, &[u8])> {
        let bytes = self.encoded.as_bytes();
        self.events.iter().map(|(at_ns, range)| (*at_ns, &bytes[range.clone()]))
    }

    fn counter(&mut self, snapshot: &Snapshot, uuid: u64, steps: &Steps) {
        let (_, end_ns) = snapshot.window_ns();
        // Repeated at the end of the window, so that the last step has a length.
        let last = steps.last().map(|(_, bytes)| (end_ns, *bytes));
        for (at_ns, bytes) in steps.iter().copied().chain(last) {
            self.event(at_ns, TYPE_COUNTER, uuid, |body| {
                // The field is signed; no gauge reaches 8 EiB.
                body.unsigned(field::COUNTER_VALUE, bytes.min(i64::MAX as u64));
            });
        }
    }

    fn slice(
        &mut self,
        tracks: &Tracks,
        slice: &Slice,
        sub: Option<usize>,
        step: Step,
        ends: &[u64],
    ) {
        let uuid = tracks.lane_uuid(slice.lane, sub.unwrap_or(SUBTRACKS_MAX - 1));
        let begin = if sub.is_some() { TYPE_BEGIN } else { TYPE_INSTANT };
        self.event(slice.start_ns, begin, uuid, |body| {
            body.unsigned(field::NAME_IID, name_iid(slice));
            if slice.bytes > 0 {
                annotate(body, Annotation::Bytes, slice.bytes);
                let rate = rate_bytes_per_s(slice.bytes, slice.duration_ns());
                annotate(body, Annotation::BytesPerSecond, rate);
            }
            if slice.flow > 0 {
                annotate(body, Annotation::Region, slice.flow);
            }
            if slice.queued_ns > slice.asked_ns {
                annotate(body, Annotation::RoomNs, slice.queued_ns - slice.asked_ns);
            }
            if slice.start_ns > slice.queued_ns {
                annotate(body, Annotation::QueueNs, slice.start_ns - slice.queued_ns);
            }
            if let Some(layer) = slice.layer {
                annotate(body, Annotation::Layer, layer.into());
            }
            let flow_id = tracks.flow_id(slice.flow);
            match step {
                Step::Alone => {}
                Step::Joins => body.fixed64(field::FLOW_ID, flow_id),
                Step::Ends => body.fixed64(field::LAST_FLOW_ID, flow_id),
            }
            ends.iter().for_each(|flow| body.fixed64(field::LAST_FLOW_ID, tracks.flow_id(*flow)));
            if sub.is_none() {
                annotate(body, Annotation::DurationNs, slice.duration_ns());
            }
        });
        if sub.is_some() {
            self.event(slice.end_ns, TYPE_END, uuid, |_| {});
        }
    }

    fn event(&mut self, at_ns: u64, kind: u64, track_uuid: u64, fill: impl FnOnce(&mut Message)) {
        let start = self.encoded.len();
        self.encoded.unsigned(field::TYPE, kind);
        self.encoded.unsigned(field::TRACK_UUID, track_uuid);
        fill(&mut self.encoded);
        self.events.push((at_ns, start..self.encoded.len()));
    }
}

/// The backwards that use what has woken: flows end there.
struct Uses<'a> {
    layers: &'a [(Slice, Option<usize>)],
    /// Backwards of each layer, as places in `layers`, by start.
    backwards: HashMap<u32, Vec<usize>>,
    /// The flows that end at each slice of `layers`.
    ends: Vec<Vec<u64>>,
}

impl<'a> Uses<'a> {
    fn of(snapshot: &Snapshot, layers: &'a [(Slice, Option<usize>)]) -> Self {
        let mut backwards = HashMap::<u32, Vec<usize>>::new();
        for (at, (slice, _)) in layers.iter().enumerate() {
            if let Some(layer) = slice.layer
                && snapshot.names.get(slice.name) == "backward"
            {
                backwards.entry(layer).or_default().push(at);
            }
        }
        Self { layers, backwards, ends: vec![Vec::new(); layers.len()] }
    }

    /// Ends the flow of `leg`, the last of its round trip, at the backward that uses it. False if there is none.
    fn end_there(&mut self, leg: &Slice) -> bool {
        let is_inbound = leg.lane.is_copy() && !leg.lane.is_outbound() && leg.flow != 0;
        let of_layer =
            leg.layer.filter(|_| is_inbound).and_then(|layer| self.backwards.get(&layer));
        let Some(of_layer) = of_layer else { return false };
        let from = of_layer.partition_point(|at| self.layers[*at].0.start_ns <= leg.start_ns);
        let used = of_layer[from..].iter().find(|at| self.layers[**at].0.end_ns >= leg.end_ns);
        used.map(|at| self.ends[*at].push(leg.flow)).is_some()
    }
}

fn annotate(body: &mut Message, annotation: Annotation, value: u64) {
    body.message(field::ANNOTATION, |entry| {
        entry.unsigned(1, annotation as u64);
        entry.unsigned(3, value);
    });
}
