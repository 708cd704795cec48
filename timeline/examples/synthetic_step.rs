//! Writes both dumps of synthetic training steps: a prefix of 24 layers falls asleep after its forward,
//! microbatches run, and it wakes before its backward.
//!
//! ```text
//! cargo run -p dormouse-timeline --example synthetic_step -- [directory] [steps]
//! ```
//! then open `step.html` in a browser and `step.pftrace` at ui.perfetto.dev.

use dormouse_timeline::{Event, Gauge, Lane, NameId, Process, Timeline, html, pftrace};
use std::error::Error;
use std::fs::File;
use std::io::{BufWriter, Write};
use std::path::PathBuf;

const MS: u64 = 1_000_000;
const MIB: u64 = 1 << 20;
const LAYERS: u64 = 24;
const LAYER_BYTES: u64 = 38 * MIB;
const MICROBATCHES: u64 = 8;
const MICROBATCH_BYTES: u64 = 120 * MIB;
const IDLE_BYTES: u64 = 540 * MIB;
const FORWARD_NS: u64 = 11 * MS;
const BACKWARD_NS: u64 = 23 * MS;
const MICROBATCH_NS: u64 = 190 * MS;
const WRITE_NS: u64 = 17 * MS;
const READ_NS: u64 = 29 * MS;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let directory = PathBuf::from(arguments.next().unwrap_or_else(|| "target/synthetic".into()));
    let steps: u64 = arguments.next().map_or(Ok(2), |steps| steps.parse())?;
    std::fs::create_dir_all(&directory)?;

    let timeline = Timeline::new(64);
    let mut step = Step { timeline: &timeline, at_ns: 0, moves: Vec::new(), events: Vec::new() };
    let mut snapshot = timeline.snapshot();
    step.at_ns = snapshot.taken.monotonic_ns;
    for _ in 0..steps {
        step.run();
    }
    snapshot.events = step.finish();
    snapshot.gauges_now = [IDLE_BYTES, IDLE_BYTES + 64 * MIB, 0, 0];
    snapshot.names = timeline.snapshot().names;

    let process = Process::current("synthetic step", 0);
    let mut page = BufWriter::new(File::create(directory.join("step.html"))?);
    html::write(&snapshot, &process, &mut page)?;
    page.flush()?;
    let mut trace = BufWriter::new(File::create(directory.join("step.pftrace"))?);
    pftrace::write(&snapshot, &process, &mut trace)?;
    trace.flush()?;
    Ok(())
}

/// Events are invented with times of their own, so they are made here rather than recorded.
struct Step<'a> {
    timeline: &'a Timeline,
    at_ns: u64,
    /// When, which gauge, by how much.
    moves: Vec<(u64, Gauge, i64)>,
    events: Vec<Event>,
}

impl Step<'_> {
    fn run(&mut self) {
        let began_ns = self.at_ns;
        // A: each layer falls asleep behind the next one's forward; two writers share the disk.
        let mut writers_ns = [0; 2];
        for layer in 0..LAYERS {
            let (from_ns, to_ns) = (self.at_ns, self.at_ns + FORWARD_NS + layer % 3 * MS);
            self.slice(Lane::Layer, &format!("forward {layer}"), from_ns, to_ns, 0, 0);
            self.grow(from_ns, Gauge::DeviceAwake, LAYER_BYTES as i64);
            self.at_ns = to_ns;
            let writer = &mut writers_ns[(layer % 2) as usize];
            let start_ns = to_ns.max(*writer);
            *writer = start_ns + WRITE_NS + layer % 5 * MS;
            let end_ns = *writer;
            let region = layer + 1;
            self.slice(Lane::NvmeWrite, "sleep", start_ns, end_ns, LAYER_BYTES, region);
            self.grow(end_ns, Gauge::DeviceAwake, -(LAYER_BYTES as i64));
            self.grow(end_ns, Gauge::NvmeUsed, LAYER_BYTES as i64);
        }
        self.slice(Lane::Phase, "A prefix forward", began_ns, self.at_ns, 0, 0);
        let microbatches_ns = self.at_ns;
        for _ in 0..MICROBATCHES {
            self.grow(self.at_ns + 10 * MS, Gauge::DeviceAwake, MICROBATCH_BYTES as i64);
            self.at_ns += MICROBATCH_NS;
            self.grow(self.at_ns - 10 * MS, Gauge::DeviceAwake, -(MICROBATCH_BYTES as i64));
        }
        self.slice(Lane::Phase, "B suffixes", microbatches_ns, self.at_ns, 0, 0);
        self.backward();
    }

    /// C: layers wake from the top, four ahead of need, and are freed behind their backward.
    fn backward(&mut self) {
        let began_ns = self.at_ns;
        let mut reader_ns = began_ns - 2 * READ_NS;
        let mut awake_ns = Vec::new();
        for layer in (0..LAYERS).rev() {
            let end_ns = reader_ns + READ_NS / 2 + layer % 6 * 4 * MS;
            self.slice(Lane::NvmeRead, "wake", reader_ns, end_ns, LAYER_BYTES, layer + 1);
            self.grow(reader_ns, Gauge::DeviceAwake, LAYER_BYTES as i64);
            self.grow(end_ns, Gauge::NvmeUsed, -(LAYER_BYTES as i64));
            awake_ns.push(end_ns);
            reader_ns = end_ns;
        }
        for (layer, awake_ns) in (0..LAYERS).rev().zip(awake_ns) {
            if awake_ns > self.at_ns {
                self.slice(Lane::Stall, "wait for wake", self.at_ns, awake_ns, 0, layer + 1);
                self.at_ns = awake_ns;
            }
            let name = format!("backward {layer}");
            self.slice(Lane::Layer, &name, self.at_ns, self.at_ns + BACKWARD_NS, 0, layer + 1);
            self.at_ns += BACKWARD_NS;
            self.grow(self.at_ns, Gauge::DeviceAwake, -(LAYER_BYTES as i64));
        }
        self.slice(Lane::Phase, "C prefix backward", began_ns, self.at_ns, 0, 0);
        let name = self.timeline.intern("step finished");
        self.events.push(Event::Instant { lane: Lane::Notice, name, at_ns: self.at_ns, value: 1 });
        self.at_ns += 40 * MS;
    }

    fn slice(&mut self, lane: Lane, name: &str, start_ns: u64, end_ns: u64, bytes: u64, flow: u64) {
        let name: NameId = self.timeline.intern(name);
        self.events.push(Event::Slice { lane, name, start_ns, end_ns, bytes, flow });
    }

    fn grow(&mut self, at_ns: u64, gauge: Gauge, by_bytes: i64) {
        self.moves.push((at_ns, gauge, by_bytes));
    }

    fn finish(mut self) -> Vec<Event> {
        self.moves.sort_by_key(|(at_ns, ..)| *at_ns);
        let mut levels = [IDLE_BYTES, IDLE_BYTES + 64 * MIB, 0, 0];
        for (at_ns, gauge, by_bytes) in self.moves {
            let previous_bytes = levels[gauge as usize];
            let value_bytes = previous_bytes.saturating_add_signed(by_bytes);
            levels[gauge as usize] = value_bytes;
            self.events.push(Event::Gauge { gauge, at_ns, value_bytes, previous_bytes });
            if gauge == Gauge::DeviceAwake {
                // Pages are kept in the cache for a while, so the mapped level follows in steps.
                let mapped = (value_bytes + 96 * MIB).next_multiple_of(128 * MIB);
                let previous_bytes = std::mem::replace(&mut levels[1], mapped);
                let gauge = Gauge::DeviceMapped;
                let mapped = Event::Gauge { gauge, at_ns, value_bytes: mapped, previous_bytes };
                self.events.push(mapped);
            }
        }
        self.events.sort_by_key(Event::end_ns);
        self.events
    }
}
