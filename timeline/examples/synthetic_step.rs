//! Writes both dumps of synthetic training steps: a prefix of 24 layers falls asleep after its forward,
//! microbatches run, and it wakes before its backward, which waits for some of it.
//!
//! ```text
//! cargo run -p dormouse-timeline --example synthetic_step -- [directory] [steps] [pause in ms]
//! ```
//! then open `step.html` in a browser and `step.pftrace` at ui.perfetto.dev.

use dormouse_timeline::{
    Event, Gauge, Lane, LiveBlock, NameId, Process, Slice, Timeline, html, pftrace,
};
use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;
use std::time::Instant;

const MS: u64 = 1_000_000;
const MIB: u64 = 1 << 20;
const LAYERS: u64 = 24;
const LAYER_BYTES: u64 = 38 * MIB;
const BOUNDARY_BYTES: u64 = 4 * MIB;
const MICROBATCHES: u64 = 8;
/// Allocations of a microbatch, up and down again.
const MICROBATCH_PARTS: u64 = 12;
const PART_BYTES: u64 = 24 * MIB;
const WEIGHTS_BYTES: u64 = 420 * MIB;
const OPTIMIZER_BYTES: u64 = 210 * MIB;
const IDLE_BYTES: u64 = WEIGHTS_BYTES + OPTIMIZER_BYTES + 60 * MIB;
const FORWARD_NS: u64 = 11 * MS;
const BACKWARD_NS: u64 = 23 * MS;
const MICROBATCH_NS: u64 = 190 * MS;
const WRITE_NS: u64 = 17 * MS;
const READ_NS: u64 = 29 * MS;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let directory = PathBuf::from(arguments.next().unwrap_or_else(|| "target/synthetic".into()));
    let mut number = |default| arguments.next().map_or(Ok(default), |text| text.parse::<u64>());
    let (steps, pause_ms) = (number(3)?, number(400)?);
    std::fs::create_dir_all(&directory)?;

    let timeline = Timeline::new(64);
    let mut snapshot = timeline.snapshot();
    let mut step = Step::new(&timeline, snapshot.taken.monotonic_ns);
    for _ in 0..steps {
        step.run();
        step.at_ns += pause_ms * MS;
    }
    let last_ns = step.at_ns;
    snapshot.events = step.finish();
    snapshot.gauges_now = [IDLE_BYTES, IDLE_BYTES + 64 * MIB, 0, 0, 0, 0, 0, 0];
    snapshot.names = timeline.snapshot().names;
    snapshot.facts.budget_bytes = 2048 * MIB;
    snapshot.facts.bytes_per_s[Lane::NvmeWrite as usize] = 2300 * MIB;
    snapshot.facts.bytes_per_s[Lane::NvmeRead as usize] = 2600 * MIB;
    snapshot.facts.blocks_at_ns = last_ns - pause_ms * MS - 600 * MS;
    snapshot.facts.blocks = (0..20).map(block).collect();
    snapshot.facts.blocks_total = (1893, 1610 * MIB);

    let process = Process::current("synthetic step", 0);
    let began = Instant::now();
    let mut page = BufWriter::new(File::create(directory.join("step.html"))?);
    html::write(&snapshot, &process, &mut page)?;
    page.flush()?;
    let page_s = began.elapsed().as_secs_f64();
    let mut trace = BufWriter::new(File::create(directory.join("step.pftrace"))?);
    pftrace::write(&snapshot, &process, &mut trace)?;
    trace.flush()?;
    let page_bytes = std::fs::metadata(directory.join("step.html"))?.len();
    println!(
        "{{\"events\": {}, \"page_s\": {page_s}, \"page_bytes\": {page_bytes}}}",
        snapshot.events.len()
    );
    Ok(())
}

fn block(at: u64) -> LiveBlock {
    let (role, tag, layer) = match at % 4 {
        0 => ("tagged", "weights", None),
        1 => ("saved activations", "prefix", Some(23 - at as u32 / 4)),
        2 => ("other", "", None),
        _ => ("tagged", "optimizer", None),
    };
    LiveBlock {
        address: 0x7f3c_0000_0000 + at * LAYER_BYTES,
        bytes: (64 - 3 * at) * MIB,
        role: role.to_owned(),
        tag: tag.to_owned(),
        layer,
        stream: 0,
    }
}

/// A level that is recorded: a gauge, or that of a tag.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Level {
    Of(Gauge),
    Tag(NameId),
}

/// Events are invented with times of their own, so they are made here rather than recorded.
struct Step<'a> {
    timeline: &'a Timeline,
    at_ns: u64,
    /// When, which level, by how much.
    moves: Vec<(u64, Level, i64)>,
    events: Vec<Event>,
}

impl<'a> Step<'a> {
    fn new(timeline: &'a Timeline, at_ns: u64) -> Self {
        let mut step = Self { timeline, at_ns, moves: Vec::new(), events: Vec::new() };
        for (tag, bytes) in [("weights", WEIGHTS_BYTES), ("optimizer", OPTIMIZER_BYTES)] {
            step.moves.push((at_ns, Level::Tag(timeline.intern(tag)), bytes as i64));
        }
        step.grow(at_ns, Gauge::DeviceAwake, IDLE_BYTES as i64);
        step
    }

    fn run(&mut self) {
        let began_ns = self.at_ns;
        self.begin(Lane::Phase, "A: prefix forward", 0);
        // A: each layer falls asleep behind the next one's forward; two writers share the disk.
        let mut writers_ns = [0; 2];
        for layer in 0..LAYERS {
            let (from_ns, to_ns) = (self.at_ns, self.at_ns + FORWARD_NS + layer % 3 * MS);
            self.begin(Lane::Layer, "forward", layer);
            self.slice(Lane::Layer, "forward", Some(layer), from_ns, to_ns, |slice| slice);
            self.grow(from_ns, Gauge::DeviceAwake, (LAYER_BYTES + 2 * BOUNDARY_BYTES) as i64);
            self.grow(from_ns, Gauge::DeviceDormant, LAYER_BYTES as i64);
            self.grow(from_ns, Gauge::DeviceBoundary, BOUNDARY_BYTES as i64);
            self.grow(from_ns, Gauge::DeviceBoundaryGrad, BOUNDARY_BYTES as i64);
            self.at_ns = to_ns;
            let writer = &mut writers_ns[(layer % 2) as usize];
            let start_ns = to_ns.max(*writer);
            *writer = start_ns + WRITE_NS + layer % 5 * MS;
            let end_ns = *writer;
            self.slice(Lane::NvmeWrite, "write", Some(layer), start_ns, end_ns, |slice| Slice {
                asked_ns: to_ns,
                queued_ns: to_ns,
                bytes: LAYER_BYTES,
                flow: layer + 1,
                ..slice
            });
            self.leave(end_ns, LAYER_BYTES as i64);
            self.grow(end_ns, Gauge::NvmeUsed, LAYER_BYTES as i64);
        }
        self.slice(Lane::Phase, "A: prefix forward", None, began_ns, self.at_ns, |slice| slice);
        let microbatches_ns = self.at_ns;
        self.begin(Lane::Phase, "B: suffixes", 0);
        for number in 1..=MICROBATCHES {
            self.microbatch(number);
        }
        self.slice(Lane::Phase, "B: suffixes", None, microbatches_ns, self.at_ns, |slice| slice);
        self.backward();
    }

    fn microbatch(&mut self, number: u64) {
        let from_ns = self.at_ns;
        self.begin(Lane::Microbatch, "microbatch", number);
        let part_ns = MICROBATCH_NS / (2 * MICROBATCH_PARTS + 1);
        for part in 1..=2 * MICROBATCH_PARTS {
            self.at_ns += part_ns;
            let is_up = part <= MICROBATCH_PARTS;
            if !is_up {
                self.begin(Lane::Layer, "gradient", (2 * MICROBATCH_PARTS - part) * 2);
            }
            let bytes = PART_BYTES + if number == 3 { 6 * MIB } else { 0 };
            let bytes = bytes as i64;
            self.grow(self.at_ns, Gauge::DeviceAwake, if is_up { bytes } else { -bytes });
        }
        self.at_ns = from_ns + MICROBATCH_NS;
        let end_ns = self.at_ns;
        let layer = Some(number);
        self.slice(Lane::Microbatch, "microbatch", layer, from_ns, end_ns, |slice| slice);
    }

    /// C: layers wake from the top, four ahead of need, and are freed behind their backward.
    fn backward(&mut self) {
        let began_ns = self.at_ns;
        self.begin(Lane::Phase, "C: prefix backward", 0);
        let asked_ns = began_ns - 2 * READ_NS;
        let mut reader_ns = asked_ns;
        let mut awake_ns = Vec::new();
        for layer in (0..LAYERS).rev() {
            // One read of the file is slow.
            let slow_ns = if layer == 11 { 160 * MS } else { 0 };
            let end_ns = reader_ns + READ_NS / 2 + layer % 6 * 4 * MS + slow_ns;
            let queued_ns = asked_ns.max(reader_ns.saturating_sub(2 * READ_NS));
            let room_ns =
                if layer % 7 == 3 { queued_ns.saturating_sub(25 * MS) } else { queued_ns };
            self.slice(Lane::NvmeRead, "read", Some(layer), reader_ns, end_ns, |slice| Slice {
                asked_ns: room_ns,
                queued_ns,
                bytes: LAYER_BYTES,
                flow: layer + 1,
                ..slice
            });
            self.leave(reader_ns, -(LAYER_BYTES as i64));
            self.grow(end_ns, Gauge::NvmeUsed, -(LAYER_BYTES as i64));
            awake_ns.push(end_ns);
            reader_ns = end_ns;
        }
        for (layer, awake_ns) in (0..LAYERS).rev().zip(awake_ns) {
            if awake_ns > self.at_ns {
                let from_ns = self.at_ns;
                let number = Some(layer);
                self.slice(Lane::Stall, "wait for wake", number, from_ns, awake_ns, |slice| slice);
                self.at_ns = awake_ns;
            }
            self.begin(Lane::Layer, "backward", layer);
            let (from_ns, to_ns) = (self.at_ns, self.at_ns + BACKWARD_NS);
            self.slice(Lane::Layer, "backward", Some(layer), from_ns, to_ns, |slice| slice);
            self.at_ns = to_ns;
            self.grow(to_ns, Gauge::DeviceAwake, -((LAYER_BYTES + 2 * BOUNDARY_BYTES) as i64));
            self.grow(to_ns, Gauge::DeviceDormant, -(LAYER_BYTES as i64));
            self.grow(to_ns, Gauge::DeviceBoundary, -(BOUNDARY_BYTES as i64));
            self.grow(to_ns, Gauge::DeviceBoundaryGrad, -(BOUNDARY_BYTES as i64));
        }
        self.slice(Lane::Phase, "C: prefix backward", None, began_ns, self.at_ns, |slice| slice);
        self.begin(Lane::Notice, "step finished", 1);
    }

    /// Saved activations leave the device.
    fn leave(&mut self, at_ns: u64, bytes: i64) {
        self.grow(at_ns, Gauge::DeviceAwake, -bytes);
        self.grow(at_ns, Gauge::DeviceDormant, -bytes);
    }

    fn begin(&mut self, lane: Lane, name: &str, value: u64) {
        let name = self.timeline.intern(name);
        self.events.push(Event::Instant { lane, name, at_ns: self.at_ns, value });
    }

    fn slice(
        &mut self,
        lane: Lane,
        name: &str,
        layer: Option<u64>,
        start_ns: u64,
        end_ns: u64,
        with: impl FnOnce(Slice) -> Slice,
    ) {
        let layer = layer.and_then(|layer| u32::try_from(layer).ok());
        let slice = Slice::new(lane, self.timeline.intern(name), start_ns, end_ns);
        self.events.push(Event::Slice(with(Slice { layer, ..slice })));
    }

    fn grow(&mut self, at_ns: u64, gauge: Gauge, by_bytes: i64) {
        self.moves.push((at_ns, Level::Of(gauge), by_bytes));
    }

    fn finish(mut self) -> Vec<Event> {
        self.moves.sort_by_key(|(at_ns, ..)| *at_ns);
        let mut levels = std::collections::BTreeMap::new();
        let mut set = |at_ns, level, to: &dyn Fn(u64) -> u64| {
            let value: &mut u64 = levels.entry(level).or_default();
            let previous_bytes = std::mem::replace(value, to(*value));
            let (gauge, tag) = match level {
                Level::Of(gauge) => (gauge, NameId::OTHER),
                Level::Tag(tag) => (Gauge::DeviceTagged, tag),
            };
            let value_bytes = *value;
            (Event::Gauge { gauge, tag, at_ns, value_bytes, previous_bytes }, value_bytes)
        };
        for (at_ns, level, by_bytes) in self.moves {
            let (event, value_bytes) =
                set(at_ns, level, &|was| was.saturating_add_signed(by_bytes));
            self.events.push(event);
            if level == Level::Of(Gauge::DeviceAwake) {
                // Pages are kept in the cache for a while, so the mapped level follows in steps.
                let mapped = (value_bytes + 96 * MIB).next_multiple_of(128 * MIB);
                self.events.push(set(at_ns, Level::Of(Gauge::DeviceMapped), &|_| mapped).0);
            }
        }
        self.events.sort_by_key(Event::end_ns);
        self.events
    }
}
