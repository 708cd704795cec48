//! Writes a snapshot as a Perfetto trace, for ui.perfetto.dev or `trace_processor`.
//!
//! The protobuf is encoded by hand (`wire`): the few messages needed are stable and small. Contents in order:
//!
//! ```text
//!   clock snapshot       monotonic, realtime and boottime when the timeline was made
//!   interned names       events carry a number for each name
//!   track descriptors    process ─┬─ memory      a counter for each gauge and tag
//!                                 ├─ transfers   a track for each direction, more where copies overlap
//!                                 ├─ stalls
//!                                 ├─ schedule    phases, microbatches, layers
//!                                 └─ notices
//!   events               by time; begins and ends of one track nest
//!   clock snapshot       when it was read. A file without it has been cut.
//! ```
//!
//! A flow joins the slices that move the same region (sleep, spill, load, wake), and the backward that uses it. It
//! ends before the region falls asleep again.

mod draft;
mod flows;
mod tracks;
mod wire;

use crate::levels::Levels;
use crate::snapshot::{Process, Snapshot};
use crate::{ClockAnchor, Event, Lane, Slice};
use draft::Draft;
use std::collections::BTreeMap;
use std::io::{self, Write};
use tracks::Tracks;
use wire::Message;

/// `Trace.packet`.
const TRACE_PACKET: u32 = 1;
/// All packets form one sequence.
const SEQUENCE_ID: u64 = 1;
const SEQUENCE_STATE_CLEARED: u64 = 1;
const SEQUENCE_NEEDS_STATE: u64 = 2;
const CLOCK_REALTIME: u64 = 1;
const CLOCK_MONOTONIC: u64 = 3;
const CLOCK_BOOTTIME: u64 = 6;

/// Field numbers of `TracePacket`.
mod packet {
    pub(super) const CLOCK_SNAPSHOT: u32 = 6;
    pub(super) const TIMESTAMP: u32 = 8;
    pub(super) const SEQUENCE_ID: u32 = 10;
    pub(super) const TRACK_EVENT: u32 = 11;
    pub(super) const INTERNED_DATA: u32 = 12;
    pub(super) const SEQUENCE_FLAGS: u32 = 13;
    pub(super) const PREVIOUS_DROPPED: u32 = 42;
    pub(super) const TIMESTAMP_CLOCK_ID: u32 = 58;
    pub(super) const TRACK_DESCRIPTOR: u32 = 60;
}

/// Interning ids of the debug annotations: positions in [`ANNOTATIONS`] plus one.
#[derive(Clone, Copy, Debug)]
enum Annotation {
    Bytes = 1,
    BytesPerSecond = 2,
    Region = 3,
    Value = 4,
    DurationNs = 5,
    RoomNs = 6,
    QueueNs = 7,
    Layer = 8,
}

const ANNOTATIONS: [&str; 8] = [
    "bytes",
    "bytes_per_s",
    "region",
    "value",
    "duration_ns",
    "waited_for_room_ns",
    "waited_in_queue_ns",
    "layer",
];

/// Writes `snapshot` of `process` to `out` without flushing it. Uses memory proportional to the number of
/// events.
///
/// # Errors
/// Errors of `out`.
pub fn write(snapshot: &Snapshot, process: &Process, out: &mut dyn Write) -> io::Result<()> {
    let mut packet = Message::default();
    put(out, &mut packet, |packet| clock_snapshot(packet, snapshot.started))?;
    put(out, &mut packet, |packet| state(packet, snapshot))?;
    let levels = Levels::of(snapshot);
    let tracks = Tracks::plan(snapshot, &levels, process);
    for descriptor in tracks.descriptors() {
        put(out, &mut packet, |packet| {
            packet.unsigned(packet::SEQUENCE_ID, SEQUENCE_ID);
            packet.bytes(packet::TRACK_DESCRIPTOR, descriptor.as_bytes());
        })?;
    }
    let draft = Draft::of(snapshot, &levels, &tracks);
    for (at_ns, event) in draft.by_time() {
        put(out, &mut packet, |packet| {
            packet.unsigned(packet::TIMESTAMP, at_ns);
            packet.unsigned(packet::SEQUENCE_ID, SEQUENCE_ID);
            packet.bytes(packet::TRACK_EVENT, event);
            packet.unsigned(packet::SEQUENCE_FLAGS, SEQUENCE_NEEDS_STATE);
            packet.unsigned(packet::TIMESTAMP_CLOCK_ID, CLOCK_MONOTONIC);
        })?;
    }
    put(out, &mut packet, |packet| clock_snapshot(packet, snapshot.taken))
}

/// Builds one packet in `scratch` and appends it to the trace.
fn put(
    out: &mut dyn Write,
    scratch: &mut Message,
    build: impl FnOnce(&mut Message),
) -> io::Result<()> {
    scratch.clear();
    scratch.message(TRACE_PACKET, build);
    out.write_all(scratch.as_bytes())
}

fn clock_snapshot(packet: &mut Message, anchor: ClockAnchor) {
    const CLOCKS: u32 = 1;
    let readings = [
        (CLOCK_BOOTTIME, anchor.boottime_ns),
        (CLOCK_MONOTONIC, anchor.monotonic_ns),
        (CLOCK_REALTIME, anchor.realtime_ns),
    ];
    packet.unsigned(packet::SEQUENCE_ID, SEQUENCE_ID);
    packet.message(packet::CLOCK_SNAPSHOT, |body| {
        for (clock_id, ns) in readings {
            body.message(CLOCKS, |clock| {
                clock.unsigned(1, clock_id);
                clock.unsigned(2, ns);
            });
        }
    });
}

/// Opens the sequence: states whether older events are missing, and interns every name used.
fn state(packet: &mut Message, snapshot: &Snapshot) {
    const EVENT_NAMES: u32 = 2;
    const ANNOTATION_NAMES: u32 = 3;
    let used: BTreeMap<u64, String> = snapshot
        .events
        .iter()
        .filter_map(|event| match event {
            Event::Slice(slice) => Some((name_iid(slice), slice.title(&snapshot.names))),
            Event::Instant { lane, name, at_ns, .. } => {
                let plain = Slice::new(*lane, *name, *at_ns, *at_ns);
                Some((name_iid(&plain), plain.title(&snapshot.names)))
            }
            Event::Gauge { .. } => None,
        })
        .collect();
    packet.unsigned(packet::SEQUENCE_ID, SEQUENCE_ID);
    packet.unsigned(packet::SEQUENCE_FLAGS, SEQUENCE_STATE_CLEARED);
    if snapshot.dropped > 0 {
        packet.unsigned(packet::PREVIOUS_DROPPED, 1);
    }
    packet.message(packet::INTERNED_DATA, |body| {
        for (iid, title) in used {
            body.message(EVENT_NAMES, |entry| {
                entry.unsigned(1, iid);
                entry.text(2, &title);
            });
        }
        for (at, name) in ANNOTATIONS.iter().enumerate() {
            body.message(ANNOTATION_NAMES, |entry| {
                entry.unsigned(1, at as u64 + 1);
                entry.text(2, name);
            });
        }
    });
}

/// Returns the interning id of a slice's title; 0 means none.
fn name_iid(slice: &Slice) -> u64 {
    let number = slice.layer.map_or(0, |layer| u64::from(layer) + 1);
    let is_microbatch = u64::from(slice.lane == Lane::Microbatch);
    number << 18 | is_microbatch << 17 | (u64::from(slice.name.index()) + 1)
}
