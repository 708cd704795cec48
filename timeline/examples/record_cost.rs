//! Measures what recording costs, and the memory of full rings of the default capacity.
//!
//! ```text
//! cargo run --release -p dormouse-timeline --example record_cost
//! ```
//! prints one JSON object: nanoseconds of a slice, an instant and a gauge (the last two read the clock), and the
//! resident bytes that two full rings add.

use dormouse_timeline::{Gauge, Lane, Slice, Timeline, now_ns};
use std::error::Error;
use std::hint::black_box;

/// The default of `DORMOUSE_TRACE_EVENTS_MAX`.
const CAPACITY_EVENTS: usize = 65_536;
const EVENTS: u64 = 1_000_000;
const ROUNDS: usize = 9;

fn main() -> Result<(), Box<dyn Error>> {
    let before_bytes = resident_bytes()?;
    let timeline = Timeline::new(CAPACITY_EVENTS);
    let name = timeline.intern("read");
    let slice = Slice { layer: Some(11), ..Slice::new(Lane::NvmeRead, name, 5, 9) };
    let slice_ns = median_ns(|at| timeline.slice(Slice { bytes: at, ..black_box(slice) }));
    let instant_ns = median_ns(|at| timeline.instant(Lane::Notice, name, at));
    let gauge_ns = median_ns(|at| timeline.gauge(Gauge::DeviceAwake, at));
    let ring_bytes = resident_bytes()?.saturating_sub(before_bytes);
    println!(
        "{{\"slice_ns\": {slice_ns}, \"instant_ns\": {instant_ns}, \"gauge_ns\": {gauge_ns}, \
         \"ring_bytes\": {ring_bytes}}}"
    );
    Ok(())
}

/// Returns the median over the rounds of the mean time of one event.
fn median_ns(record: impl Fn(u64)) -> f64 {
    let mut rounds = [0.0; ROUNDS];
    for round in &mut rounds {
        let began_ns = now_ns();
        (0..EVENTS).for_each(&record);
        *round = (now_ns() - began_ns) as f64 / EVENTS as f64;
    }
    rounds.sort_by(f64::total_cmp);
    rounds[ROUNDS / 2]
}

fn resident_bytes() -> Result<u64, Box<dyn Error>> {
    let status = std::fs::read_to_string("/proc/self/status")?;
    let line = status.lines().find(|line| line.starts_with("VmRSS:")).ok_or("no VmRSS")?;
    let kib: u64 = line.split_whitespace().nth(1).ok_or("no figure in VmRSS")?.parse()?;
    Ok(kib * 1024)
}
