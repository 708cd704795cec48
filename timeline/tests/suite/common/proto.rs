//! A reader of protobuf and of the written part of Perfetto's format, independent of the writer.

use std::collections::HashMap;

#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    Number(u64),
    Fixed(u64),
    Bytes(Vec<u8>),
}

/// The fields of one message in the order they came.
pub type Fields = Vec<(u64, Value)>;

/// Reads a whole message, or panics saying where it is malformed.
pub fn parse(mut bytes: &[u8]) -> Fields {
    let mut fields = Vec::new();
    while !bytes.is_empty() {
        let key = varint(&mut bytes);
        let value = match key & 7 {
            0 => Value::Number(varint(&mut bytes)),
            1 => Value::Fixed(u64::from_le_bytes(take(&mut bytes, 8).try_into().unwrap())),
            2 => {
                let length = varint(&mut bytes) as usize;
                Value::Bytes(take(&mut bytes, length).to_vec())
            }
            wire => panic!("wire type {wire} of field {}", key >> 3),
        };
        assert_ne!(key >> 3, 0, "field numbers begin at 1");
        fields.push((key >> 3, value));
    }
    fields
}

fn take<'a>(bytes: &mut &'a [u8], length: usize) -> &'a [u8] {
    assert!(length <= bytes.len(), "{length} bytes wanted, {} left", bytes.len());
    let (head, tail) = bytes.split_at(length);
    *bytes = tail;
    head
}

fn varint(bytes: &mut &[u8]) -> u64 {
    let mut value = 0u64;
    for shift in (0..70).step_by(7) {
        let byte = take(bytes, 1)[0];
        value |= u64::from(byte & 0x7f).checked_shl(shift).unwrap_or(0);
        if byte < 0x80 {
            return value;
        }
    }
    panic!("varint longer than ten bytes");
}

pub fn number(fields: &Fields, field: u64) -> Option<u64> {
    fields.iter().find(|(its, _)| *its == field).map(|(_, value)| match value {
        Value::Number(number) => *number,
        other => panic!("field {field} is {other:?}, not a number"),
    })
}

pub fn fixed(fields: &Fields, field: u64) -> Vec<u64> {
    let of_field = fields.iter().filter(|(its, _)| *its == field);
    of_field
        .map(|(_, value)| match value {
            Value::Fixed(number) => *number,
            other => panic!("field {field} is {other:?}, not fixed64"),
        })
        .collect()
}

pub fn text(fields: &Fields, field: u64) -> Option<String> {
    blobs(fields, field).next().map(|bytes| String::from_utf8(bytes.to_vec()).unwrap())
}

pub fn message(fields: &Fields, field: u64) -> Option<Fields> {
    blobs(fields, field).next().map(parse)
}

pub fn messages(fields: &Fields, field: u64) -> Vec<Fields> {
    blobs(fields, field).map(parse).collect()
}

fn blobs(fields: &Fields, field: u64) -> impl Iterator<Item = &[u8]> {
    fields.iter().filter(move |(its, _)| *its == field).map(move |(_, value)| match value {
        Value::Bytes(bytes) => bytes.as_slice(),
        other => panic!("field {field} is {other:?}, not bytes"),
    })
}

#[derive(Clone, Debug)]
pub struct Track {
    pub name: String,
    pub parent: Option<u64>,
    pub pid: Option<u64>,
    pub counter_unit: Option<u64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    Begin,
    End,
    Instant,
    Counter(u64),
}

#[derive(Clone, Debug)]
pub struct TrackEvent {
    pub at_ns: u64,
    pub kind: Kind,
    pub track: u64,
    pub name: Option<String>,
    pub flows: Vec<u64>,
    pub last_flows: Vec<u64>,
    pub notes: HashMap<String, u64>,
}

/// A trace as a viewer would hold it.
#[derive(Debug, Default)]
pub struct Trace {
    /// Readings by clock id, one map for each snapshot.
    pub clocks: Vec<HashMap<u64, u64>>,
    pub tracks: HashMap<u64, Track>,
    /// In the order of the file.
    pub events: Vec<TrackEvent>,
    pub packets_lost: bool,
}

/// Reads a trace and checks what holds for every packet of every trace.
pub fn trace(bytes: &[u8]) -> Trace {
    let mut trace = Trace::default();
    let mut names = HashMap::new();
    let mut note_names = HashMap::new();
    let mut state_cleared = false;
    for (field, packet) in parse(bytes) {
        assert_eq!(field, 1, "a trace is packets and nothing else");
        let Value::Bytes(packet) = packet else { panic!("a packet is a message") };
        let packet = parse(&packet);
        assert_eq!(number(&packet, 10), Some(1), "every packet says its sequence");
        if number(&packet, 13) == Some(1) {
            assert!(!state_cleared, "cleared twice");
            state_cleared = true;
        }
        trace.packets_lost |= number(&packet, 42) == Some(1);
        if let Some(clocks) = message(&packet, 6) {
            let read = |clock: &Fields| (number(clock, 1).unwrap(), number(clock, 2).unwrap());
            trace.clocks.push(messages(&clocks, 1).iter().map(read).collect());
        }
        if let Some(interned) = message(&packet, 12) {
            names.extend(entries(&interned, 2));
            note_names.extend(entries(&interned, 3));
        }
        if let Some(track) = message(&packet, 60) {
            let (uuid, track) = descriptor(&track);
            assert_ne!(uuid, 0);
            assert!(trace.tracks.insert(uuid, track).is_none(), "track {uuid} described twice");
        }
        if let Some(event) = message(&packet, 11) {
            assert_eq!(number(&packet, 58), Some(3), "times are of the monotonic clock");
            assert_eq!(number(&packet, 13), Some(2), "events need the interned names");
            assert!(state_cleared && !trace.clocks.is_empty());
            let at_ns = number(&packet, 8).expect("events have a time");
            let event = track_event(at_ns, &event, &names, &note_names);
            assert!(trace.tracks.contains_key(&event.track), "tracks are described before use");
            trace.events.push(event);
        }
    }
    trace
}

fn entries(interned: &Fields, field: u64) -> Vec<(u64, String)> {
    let entry = |entry: &Fields| (number(entry, 1).unwrap(), text(entry, 2).unwrap());
    messages(interned, field).iter().map(entry).collect()
}

fn descriptor(fields: &Fields) -> (u64, Track) {
    let process = message(fields, 3);
    let track = Track {
        name: text(fields, 2).expect("tracks have names"),
        parent: number(fields, 5),
        pid: process.and_then(|process| number(&process, 1)),
        counter_unit: message(fields, 8).and_then(|counter| number(&counter, 3)),
    };
    (number(fields, 1).expect("tracks have ids"), track)
}

fn track_event(
    at_ns: u64,
    fields: &Fields,
    names: &HashMap<u64, String>,
    note_names: &HashMap<u64, String>,
) -> TrackEvent {
    let kind = match number(fields, 9) {
        Some(1) => Kind::Begin,
        Some(2) => Kind::End,
        Some(3) => Kind::Instant,
        Some(4) => Kind::Counter(number(fields, 30).expect("counters have a value")),
        other => panic!("event type {other:?}"),
    };
    let note = |note: &Fields| {
        let name = note_names[&number(note, 1).unwrap()].clone();
        (name, number(note, 3).unwrap())
    };
    TrackEvent {
        at_ns,
        kind,
        track: number(fields, 11).expect("events have a track"),
        name: number(fields, 10).map(|iid| names[&iid].clone()),
        flows: fixed(fields, 47),
        last_flows: fixed(fields, 48),
        notes: messages(fields, 4).iter().map(note).collect(),
    }
}
