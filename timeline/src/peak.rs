//! What set the peak: its moment, and whose bytes they were.

use crate::event::{Event, Gauge, Lane, Slice};
use crate::levels::{Levels, value_at};
use crate::names::NameId;
use crate::snapshot::Snapshot;

/// Where the trainer was at a moment, by its own thread: a GPU may have been behind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Moment {
    /// Time.
    pub at_ns: u64,
    /// The phase.
    pub phase: Option<NameId>,
    /// The microbatch of the phase, from 1.
    pub microbatch: Option<u64>,
    /// The layer that began last, or whose gradients arrived last.
    pub layer: Option<u32>,
}

/// Whose device bytes some are.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Owner {
    /// A role.
    Role(Gauge),
    /// A tag.
    Tag(NameId),
    /// Everything else that is allocated.
    Other,
}

impl Owner {
    /// Returns the title shown in dumps.
    pub fn title(self, snapshot: &Snapshot) -> String {
        match self {
            Self::Role(gauge) => gauge.title().to_owned(),
            Self::Tag(tag) => format!("tag {}", snapshot.names.get(tag)),
            Self::Other => "other".to_owned(),
        }
    }
}

/// The largest number of device bytes in the window, awake.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peak {
    /// When; the last of several moments.
    pub moment: Moment,
    /// Device bytes handed out and awake.
    pub bytes: u64,
    /// Device bytes mapped beside them: cached, or staged for a wake.
    pub beside_bytes: u64,
    /// `bytes` by owner, without owners of none; tags by name, what is left last.
    pub owners: Vec<(Owner, u64)>,
}

/// Roles with a level of their own.
const ROLES: [Gauge; 3] = [Gauge::DeviceBoundary, Gauge::DeviceBoundaryGrad, Gauge::DeviceDormant];

impl Peak {
    /// Finds the peak. `None` if no device bytes were recorded.
    pub fn of(snapshot: &Snapshot) -> Option<Self> {
        Self::with(snapshot, &Levels::of(snapshot))
    }

    pub(crate) fn with(snapshot: &Snapshot, levels: &Levels) -> Option<Self> {
        let awake = levels.gauge(Gauge::DeviceAwake).iter();
        // The last of equal ones: a page opens on the last step.
        let (at_ns, bytes) = *awake.max_by_key(|(_, bytes)| *bytes)?;
        if bytes == 0 {
            return None;
        }
        let roles = ROLES.map(|role| (Owner::Role(role), value_at(levels.gauge(role), at_ns)));
        let tags = levels.tags().iter();
        let tags = tags.map(|(tag, steps)| (Owner::Tag(*tag), value_at(steps, at_ns)));
        let mut owners: Vec<(Owner, u64)> = roles.into_iter().chain(tags).collect();
        let owned: u64 = owners.iter().map(|(_, bytes)| bytes).sum();
        owners.push((Owner::Other, bytes.saturating_sub(owned)));
        owners.retain(|(_, bytes)| *bytes > 0);
        let mapped_bytes = value_at(levels.gauge(Gauge::DeviceMapped), at_ns);
        let beside_bytes = mapped_bytes.saturating_sub(bytes);
        Some(Self { moment: Moment::of(snapshot, at_ns), bytes, beside_bytes, owners })
    }
}

impl Moment {
    /// Returns where the trainer was at `at_ns`: what began last by then and had not ended.
    pub fn of(snapshot: &Snapshot, at_ns: u64) -> Self {
        let mut moment = Self { at_ns, ..Self::default() };
        let (mut phase_began_ns, mut microbatch_began_ns) = (0, 0);
        let (mut phase_ended_ns, mut layer) = (0, None);
        for event in &snapshot.events {
            match *event {
                Event::Slice(Slice { lane: Lane::Phase, name, start_ns, end_ns, .. }) => {
                    if end_ns < at_ns {
                        phase_ended_ns = phase_ended_ns.max(end_ns);
                    } else if start_ns <= at_ns && start_ns >= phase_began_ns {
                        (phase_began_ns, moment.phase) = (start_ns, Some(name));
                    }
                }
                Event::Instant { lane, name, at_ns: began_ns, value } if began_ns <= at_ns => {
                    match lane {
                        Lane::Phase if began_ns >= phase_began_ns => {
                            (phase_began_ns, moment.phase) = (began_ns, Some(name));
                        }
                        Lane::Microbatch => {
                            (microbatch_began_ns, moment.microbatch) = (began_ns, Some(value));
                        }
                        Lane::Layer => layer = Some((began_ns, value)),
                        _ => {}
                    }
                }
                _ => {}
            }
        }
        if phase_began_ns < phase_ended_ns {
            return Self { at_ns, ..Self::default() };
        }
        if microbatch_began_ns < phase_began_ns {
            moment.microbatch = None;
        }
        let since_ns = phase_began_ns.max(microbatch_began_ns);
        let layer = layer.filter(|(began_ns, _)| *began_ns >= since_ns);
        moment.layer = layer.and_then(|(_, layer)| u32::try_from(layer).ok());
        moment
    }

    /// Returns where that was: "B: suffixes, microbatch 2, layer 11"; empty if nothing is known.
    pub fn place(&self, snapshot: &Snapshot) -> String {
        let phase = self.phase.map(|name| format!("phase {}", snapshot.names.get(name)));
        let microbatch = self.microbatch.map(|number| format!("microbatch {number}"));
        let layer = self.layer.map(|layer| format!("layer {layer}"));
        let parts: Vec<String> = [phase, microbatch, layer].into_iter().flatten().collect();
        parts.join(", ")
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::Timeline;

    struct Story {
        timeline: Timeline,
        events: Vec<Event>,
    }

    impl Story {
        fn begin(&mut self, lane: Lane, name: &str, at_ns: u64, value: u64) {
            let name = self.timeline.intern(name);
            self.events.push(Event::Instant { lane, name, at_ns, value });
        }

        fn phase(&mut self, name: &str, start_ns: u64, end_ns: u64) {
            let name = self.timeline.intern(name);
            self.events.push(Event::Slice(Slice::new(Lane::Phase, name, start_ns, end_ns)));
        }

        fn level(&mut self, gauge: Gauge, tag: NameId, at_ns: u64, value_bytes: u64) {
            let previous_bytes = 0;
            self.events.push(Event::Gauge { gauge, tag, at_ns, value_bytes, previous_bytes });
        }

        fn told(mut self) -> Snapshot {
            let mut snapshot = self.timeline.snapshot();
            self.events.sort_by_key(Event::end_ns);
            snapshot.events = self.events;
            snapshot
        }
    }

    fn story() -> Story {
        Story { timeline: Timeline::new(0), events: Vec::new() }
    }

    /// Phase A is over, B is not: its slice does not exist yet where memory runs out.
    #[test]
    fn the_peak_of_an_open_phase_is_placed_by_what_began_last() {
        let mut story = story();
        story.phase("A", 0, 100);
        story.begin(Lane::Layer, "forward", 50, 23);
        story.begin(Lane::Phase, "B", 100, 0);
        story.begin(Lane::Microbatch, "microbatch", 110, 1);
        story.begin(Lane::Layer, "gradient", 140, 3);
        story.begin(Lane::Microbatch, "microbatch", 150, 2);
        story.level(Gauge::DeviceAwake, NameId::OTHER, 120, 500);
        story.level(Gauge::DeviceAwake, NameId::OTHER, 160, 500);
        story.level(Gauge::DeviceAwake, NameId::OTHER, 180, 100);
        story.begin(Lane::Layer, "gradient", 170, 11);
        let snapshot = story.told();
        let peak = Peak::of(&snapshot).unwrap();
        assert_eq!((peak.bytes, peak.moment.at_ns), (500, 160), "the last of equal ones");
        assert_eq!(peak.moment.place(&snapshot), "phase B, microbatch 2");
        let later = Moment::of(&snapshot, 175);
        assert_eq!(later.place(&snapshot), "phase B, microbatch 2, layer 11");
        assert_eq!(Moment::of(&snapshot, 60).place(&snapshot), "phase A, layer 23");
        assert_eq!(Moment::of(&snapshot, 145).layer, Some(3));
    }

    #[test]
    fn between_two_steps_there_is_no_place() {
        let mut story = story();
        story.begin(Lane::Phase, "C", 10, 0);
        story.begin(Lane::Layer, "backward", 20, 4);
        story.phase("C", 10, 30);
        let snapshot = story.told();
        assert_eq!(Moment::of(&snapshot, 25).place(&snapshot), "phase C, layer 4");
        assert_eq!(Moment::of(&snapshot, 31).place(&snapshot), "");
    }

    #[test]
    fn owners_sum_to_the_peak() {
        let mut story = story();
        let weights = story.timeline.intern("weights");
        let none = NameId::OTHER;
        story.level(Gauge::DeviceAwake, none, 10, 1000);
        story.level(Gauge::DeviceMapped, none, 10, 1200);
        story.level(Gauge::DeviceBoundary, none, 5, 100);
        story.level(Gauge::DeviceDormant, none, 6, 300);
        story.level(Gauge::DeviceDormant, none, 11, 900);
        story.level(Gauge::DeviceTagged, weights, 7, 250);
        let snapshot = story.told();
        let peak = Peak::of(&snapshot).unwrap();
        let owners = [
            (Owner::Role(Gauge::DeviceBoundary), 100),
            (Owner::Role(Gauge::DeviceDormant), 300),
            (Owner::Tag(weights), 250),
            (Owner::Other, 350),
        ];
        assert_eq!(peak.owners, owners);
        assert_eq!(peak.beside_bytes, 200);
        assert_eq!(Owner::Tag(weights).title(&snapshot), "tag weights");
    }

    #[test]
    fn nothing_recorded_has_no_peak() {
        assert_eq!(Peak::of(&Timeline::new(0).snapshot()), None);
    }
}
