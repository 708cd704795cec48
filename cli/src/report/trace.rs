//! Reads a Perfetto trace back into the timeline that it was written from (`timeline/src/pftrace.rs`).
//!
//! A trace holds every event of its timeline. It lacks the budget, the largest blocks, the reason of the dump, the rates
//! of links and the number of lost events, because these are not events. Traces of other programs and cut files are
//! refused.

use std::collections::HashMap;
use std::io::{BufReader, Read};

use dormouse_timeline::{
    ClockAnchor, Event, Gauge, Lane, NameId, Process, Slice, Snapshot, Timeline,
};

use crate::wire::{Field, Fields, packets};

/// Maximum bytes of a trace: about 100 for each of four million events, and as many again.
const TRACE_BYTES_MAX: u64 = 1 << 30;
/// Maximum number of events.
const EVENTS_MAX: usize = 16 << 20;

/// Field numbers of `TracePacket`, and of the messages in it.
mod field {
    pub(super) const CLOCK_SNAPSHOT: u64 = 6;
    pub(super) const TIMESTAMP: u64 = 8;
    pub(super) const TRACK_EVENT: u64 = 11;
    pub(super) const INTERNED_DATA: u64 = 12;
    pub(super) const PREVIOUS_DROPPED: u64 = 42;
    pub(super) const TRACK_DESCRIPTOR: u64 = 60;
    pub(super) const TRACK_NAME: u64 = 2;
    pub(super) const TRACK_PROCESS: u64 = 3;
    pub(super) const EVENT_NAMES: u64 = 2;
    pub(super) const ANNOTATION_NAMES: u64 = 3;
    pub(super) const EVENT_ANNOTATION: u64 = 4;
    pub(super) const EVENT_TYPE: u64 = 9;
    pub(super) const EVENT_NAME: u64 = 10;
    pub(super) const EVENT_TRACK: u64 = 11;
    pub(super) const EVENT_COUNTER: u64 = 30;
}

const CLOCK_REALTIME: u64 = 1;
const CLOCK_MONOTONIC: u64 = 3;
const CLOCK_BOOTTIME: u64 = 6;
const TYPE_BEGIN: u64 = 1;
const TYPE_END: u64 = 2;
const TYPE_INSTANT: u64 = 3;
const TYPE_COUNTER: u64 = 4;

/// A timeline read from a trace.
pub(super) struct Trace {
    pub(super) process: Process,
    pub(super) snapshot: Snapshot,
    /// Whether older events are lost. A trace does not say how many.
    pub(super) has_lost: bool,
}

/// What a track shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Track {
    Lane(Lane),
    Gauge(Gauge),
    Tag(NameId),
    /// A group of tracks.
    Group,
}

/// Reads a trace. The error says what was found.
pub(super) fn read(source: &mut dyn Read) -> Result<Trace, String> {
    let mut limited = BufReader::new(source.take(TRACE_BYTES_MAX + 1));
    let mut reader = Reader::default();
    let mut bytes = 0;
    for packet in packets(&mut limited) {
        let packet = packet.map_err(|error| error.to_string())?;
        bytes += packet.len() as u64;
        reader.packet(&packet)?;
        if bytes > TRACE_BYTES_MAX || reader.events.len() > EVENTS_MAX {
            return Err(format!("more than {TRACE_BYTES_MAX} bytes or {EVENTS_MAX} events"));
        }
    }
    reader.finish()
}

/// What has been read so far.
struct Reader {
    /// Interns names as the recorder did.
    names: Timeline,
    clocks: Vec<ClockAnchor>,
    process: Option<Process>,
    tracks: HashMap<u64, Track>,
    titles: HashMap<u64, String>,
    annotations: HashMap<u64, String>,
    /// The slice that is open on each track.
    open: HashMap<u64, Slice>,
    /// The latest value of each counter.
    values: HashMap<u64, u64>,
    events: Vec<Event>,
    has_lost: bool,
}

impl Default for Reader {
    fn default() -> Self {
        Self {
            names: Timeline::new(0),
            clocks: Vec::new(),
            process: None,
            tracks: HashMap::new(),
            titles: HashMap::new(),
            annotations: HashMap::new(),
            open: HashMap::new(),
            values: HashMap::new(),
            events: Vec::new(),
            has_lost: false,
        }
    }
}

/// Returns the fields of a message.
fn fields(message: &[u8]) -> impl Iterator<Item = Result<(u64, Field<'_>), String>> {
    Fields::of(message).map(|field| field.map_err(|error| error.to_string()))
}

/// Returns the number and the text of a message whose fields 1 and `at` are these.
fn numbered_text(message: &[u8], at: u64) -> Result<(u64, String), String> {
    let (mut number, mut text) = (0, String::new());
    for field in fields(message) {
        match field? {
            (1, Field::Number(found)) => number = found,
            (place, Field::Bytes(found)) if place == at => {
                text = std::str::from_utf8(found).map_err(|error| error.to_string())?.to_owned();
            }
            _ => {}
        }
    }
    Ok((number, text))
}

impl Reader {
    fn packet(&mut self, packet: &[u8]) -> Result<(), String> {
        let (mut at_ns, mut event) = (None, None);
        for field in fields(packet) {
            match field? {
                (field::CLOCK_SNAPSHOT, Field::Bytes(body)) => self.clocks.push(clock(body)?),
                (field::TIMESTAMP, Field::Number(time)) => at_ns = Some(time),
                (field::TRACK_EVENT, Field::Bytes(body)) => event = Some(body),
                (field::INTERNED_DATA, Field::Bytes(body)) => self.intern(body)?,
                (field::PREVIOUS_DROPPED, Field::Number(flag)) => self.has_lost |= flag != 0,
                (field::TRACK_DESCRIPTOR, Field::Bytes(body)) => self.track(body)?,
                _ => {}
            }
        }
        match (at_ns, event) {
            (Some(at_ns), Some(event)) => self.event(at_ns, event),
            (None, Some(_)) => Err("an event without a time".to_owned()),
            (_, None) => Ok(()),
        }
    }

    fn intern(&mut self, body: &[u8]) -> Result<(), String> {
        for field in fields(body) {
            match field? {
                (field::EVENT_NAMES, Field::Bytes(entry)) => {
                    self.titles.extend([numbered_text(entry, 2)?]);
                }
                (field::ANNOTATION_NAMES, Field::Bytes(entry)) => {
                    self.annotations.extend([numbered_text(entry, 2)?]);
                }
                _ => {}
            }
        }
        Ok(())
    }

    fn track(&mut self, body: &[u8]) -> Result<(), String> {
        let (uuid, name) = numbered_text(body, field::TRACK_NAME)?;
        for field in fields(body) {
            if let (field::TRACK_PROCESS, Field::Bytes(_)) = field? {
                self.process = Some(process(&name).ok_or_else(|| foreign(&name))?);
            }
        }
        // The second track of a lane is "layers (2)".
        let lane_title = name.rsplit_once(" (").map_or(name.as_str(), |(title, _)| title);
        let gauge = Gauge::ALL.into_iter().find(|gauge| gauge.title() == name);
        let lane = Lane::ALL.into_iter().find(|lane| lane.title() == lane_title);
        let track = match (lane, gauge, name.strip_prefix("tag ")) {
            (Some(lane), _, _) => Track::Lane(lane),
            (_, Some(gauge), _) => Track::Gauge(gauge),
            (_, _, Some(tag)) => Track::Tag(self.names.intern(tag)),
            (None, None, None) => Track::Group,
        };
        self.tracks.insert(uuid, track);
        Ok(())
    }

    fn event(&mut self, at_ns: u64, body: &[u8]) -> Result<(), String> {
        let (mut kind, mut name, mut uuid, mut value) = (0, 0, 0, None);
        let mut annotations = Vec::new();
        for field in fields(body) {
            match field? {
                (field::EVENT_TYPE, Field::Number(found)) => kind = found,
                (field::EVENT_NAME, Field::Number(found)) => name = found,
                (field::EVENT_TRACK, Field::Number(found)) => uuid = found,
                (field::EVENT_COUNTER, Field::Number(found)) => value = Some(found),
                (field::EVENT_ANNOTATION, Field::Bytes(found)) => annotations.push(found),
                _ => {}
            }
        }
        let track = *self.tracks.get(&uuid).ok_or("an event of a track that is not described")?;
        let annotations = self.annotations(&annotations)?;
        match (track, kind, value) {
            (Track::Gauge(gauge), TYPE_COUNTER, Some(value_bytes)) => {
                self.level(uuid, gauge, NameId::OTHER, at_ns, value_bytes);
            }
            (Track::Tag(tag), TYPE_COUNTER, Some(value_bytes)) => {
                self.level(uuid, Gauge::DeviceTagged, tag, at_ns, value_bytes);
            }
            (Track::Lane(lane), TYPE_BEGIN, None) => {
                let slice = self.slice(lane, name, at_ns, &annotations)?;
                if self.open.insert(uuid, slice).is_some() {
                    return Err("a slice within another of its track".to_owned());
                }
            }
            (Track::Lane(_), TYPE_END, None) => {
                let slice = self.open.remove(&uuid).ok_or("the end of a slice without a begin")?;
                self.events
                    .push(Event::Slice(Slice { end_ns: at_ns.max(slice.start_ns), ..slice }));
            }
            // A slice without a place on the tracks of its lane.
            (Track::Lane(lane), TYPE_INSTANT, None) if annotations.duration_ns.is_some() => {
                let slice = self.slice(lane, name, at_ns, &annotations)?;
                let end_ns = at_ns.saturating_add(annotations.duration_ns.unwrap_or(0));
                self.events.push(Event::Slice(Slice { end_ns, ..slice }));
            }
            (Track::Lane(lane), TYPE_INSTANT, None) => {
                let name = self.name(name)?;
                let value = annotations.value;
                self.events.push(Event::Instant { lane, name, at_ns, value });
            }
            _ => return Err(format!("an event of type {kind} on a track of another kind")),
        }
        Ok(())
    }

    fn level(&mut self, uuid: u64, gauge: Gauge, tag: NameId, at_ns: u64, value_bytes: u64) {
        // The first sample is where the levels begin: before it there is nothing.
        let previous_bytes = self.values.insert(uuid, value_bytes).unwrap_or(value_bytes);
        self.events.push(Event::Gauge { gauge, tag, at_ns, value_bytes, previous_bytes });
    }

    fn slice(
        &self,
        lane: Lane,
        name: u64,
        start_ns: u64,
        annotations: &Annotations,
    ) -> Result<Slice, String> {
        let queued_ns = start_ns.saturating_sub(annotations.queue_ns);
        Ok(Slice {
            layer: annotations.layer.and_then(|layer| u32::try_from(layer).ok()),
            asked_ns: queued_ns.saturating_sub(annotations.room_ns),
            queued_ns,
            bytes: annotations.bytes,
            flow: annotations.region,
            ..Slice::new(lane, self.name(name)?, start_ns, start_ns)
        })
    }

    /// Returns the name in the title with number `iid`: "forward" of "L3 forward". The number says which parts the
    /// title has (`name_iid` of the writer).
    fn name(&self, iid: u64) -> Result<NameId, String> {
        let title = self.titles.get(&iid).ok_or("an event whose name is not in the trace")?;
        let number = iid >> 18;
        let is_microbatch = iid >> 17 & 1 == 1;
        let name = match number.checked_sub(1) {
            None => Some(title.as_str()),
            Some(number) if is_microbatch => title.strip_suffix(&format!(" {number}")),
            Some(layer) => title.strip_prefix(&format!("L{layer} ")),
        };
        let name = name.ok_or_else(|| format!("a name {title:?} that its number denies"))?;
        Ok(self.names.intern(name))
    }

    fn annotations(&self, entries: &[&[u8]]) -> Result<Annotations, String> {
        let mut found = Annotations::default();
        for entry in entries {
            let (mut iid, mut value) = (0, 0);
            for field in fields(entry) {
                match field? {
                    (1, Field::Number(number)) => iid = number,
                    (3, Field::Number(number)) => value = number,
                    _ => {}
                }
            }
            match self.annotations.get(&iid).map(String::as_str) {
                Some("bytes") => found.bytes = value,
                Some("region") => found.region = value,
                Some("value") => found.value = value,
                Some("duration_ns") => found.duration_ns = Some(value),
                Some("waited_for_room_ns") => found.room_ns = value,
                Some("waited_in_queue_ns") => found.queue_ns = value,
                Some("layer") => found.layer = Some(value),
                _ => {}
            }
        }
        Ok(found)
    }

    fn finish(mut self) -> Result<Trace, String> {
        let process = self.process.ok_or_else(|| foreign("without a process"))?;
        let has = |track| self.tracks.values().any(|found| *found == track);
        if !has(Track::Gauge(Gauge::DeviceAwake)) || !has(Track::Lane(Lane::Stall)) {
            return Err(foreign(&process.name));
        }
        // The writer's last packet is its second clock snapshot.
        let (&[started, taken], true) = (self.clocks.as_slice(), self.open.is_empty()) else {
            return Err("a trace that was cut".to_owned());
        };
        // Levels of equal times keep their order.
        self.events.sort_by_key(Event::end_ns);
        let mut snapshot = self.names.snapshot();
        // Every counter has a sample where the recorded levels begin.
        let changes = self.events.iter().filter(|event| matches!(event, Event::Gauge { .. }));
        snapshot.levels_from_ns = changes.map(Event::end_ns).min().unwrap_or(0);
        (snapshot.events, snapshot.started, snapshot.taken) = (self.events, started, taken);
        Ok(Trace { process, snapshot, has_lost: self.has_lost })
    }
}

/// The annotations of an event; 0 for those it lacks.
#[derive(Debug, Default)]
struct Annotations {
    bytes: u64,
    region: u64,
    value: u64,
    duration_ns: Option<u64>,
    room_ns: u64,
    queue_ns: u64,
    layer: Option<u64>,
}

fn foreign(seen: &str) -> String {
    format!("a trace of another program ({seen})")
}

/// Returns the process of a title: "python · rank 3 · pid 42".
fn process(title: &str) -> Option<Process> {
    let (rest, pid) = title.rsplit_once(" · pid ")?;
    let (name, rank) = rest.rsplit_once(" · rank ")?;
    Some(Process { pid: pid.parse().ok()?, name: name.to_owned(), rank: rank.parse().ok()? })
}

fn clock(body: &[u8]) -> Result<ClockAnchor, String> {
    const CLOCKS: u64 = 1;
    let mut anchor = ClockAnchor::default();
    for field in fields(body) {
        let (CLOCKS, Field::Bytes(reading)) = field? else { continue };
        let (mut clock, mut ns) = (0, 0);
        for field in fields(reading) {
            match field? {
                (1, Field::Number(number)) => clock = number,
                (2, Field::Number(number)) => ns = number,
                _ => {}
            }
        }
        match clock {
            CLOCK_REALTIME => anchor.realtime_ns = ns,
            CLOCK_MONOTONIC => anchor.monotonic_ns = ns,
            CLOCK_BOOTTIME => anchor.boottime_ns = ns,
            _ => {}
        }
    }
    Ok(anchor)
}
