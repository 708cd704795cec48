//! What a dump says about its time: its clock snapshots and its first and last event.
//!
//! The packets are read one at a time, with the fields that `timeline/src/pftrace.rs` writes.

use std::io::Read;

use crate::wire::{Field, Fields, packets};

/// Clock snapshots of a whole dump: its first packet and its last.
const SNAPSHOTS: u32 = 2;
const CLOCK_SNAPSHOT: u64 = 6;
const TIMESTAMP: u64 = 8;
const CLOCKS: u64 = 1;
const CLOCK_REALTIME: u64 = 1;
const CLOCK_MONOTONIC: u64 = 3;

/// Returns the Unix times of the first and the last event; `None` without events. The error says what was found.
pub(super) fn span(reader: &mut dyn Read) -> Result<Option<(i128, i128)>, String> {
    let mut realtime_minus_monotonic = None;
    let mut snapshots = 0;
    let mut times: Option<(u64, u64)> = None;
    for packet in packets(reader) {
        let packet = packet.map_err(|error| error.to_string())?;
        for field in Fields::of(&packet) {
            match field.map_err(|error| error.to_string())? {
                (CLOCK_SNAPSHOT, Field::Bytes(snapshot)) => {
                    snapshots += 1;
                    realtime_minus_monotonic = difference(snapshot)?.or(realtime_minus_monotonic);
                }
                (TIMESTAMP, Field::Number(at)) => {
                    let (first, last) = times.unwrap_or((at, at));
                    times = Some((first.min(at), last.max(at)));
                }
                _ => {}
            }
        }
    }
    let difference = realtime_minus_monotonic
        .ok_or("a trace without the clocks MONOTONIC and REALTIME, so not one of dormouse")?;
    if snapshots < SNAPSHOTS {
        return Err("a trace that was cut".to_owned());
    }
    Ok(times.map(|(first, last)| (i128::from(first) + difference, i128::from(last) + difference)))
}

/// Returns what separates Unix time from the clock of events in a clock snapshot; `None` if it lacks either.
fn difference(snapshot: &[u8]) -> Result<Option<i128>, String> {
    let (mut realtime, mut monotonic) = (None, None);
    for field in Fields::of(snapshot) {
        let (CLOCKS, Field::Bytes(clock)) = field.map_err(|error| error.to_string())? else {
            continue;
        };
        let (mut id, mut at) = (0, 0);
        for field in Fields::of(clock) {
            match field.map_err(|error| error.to_string())? {
                (1, Field::Number(number)) => id = number,
                (2, Field::Number(number)) => at = number,
                _ => {}
            }
        }
        match id {
            CLOCK_REALTIME => realtime = Some(i128::from(at)),
            CLOCK_MONOTONIC => monotonic = Some(i128::from(at)),
            _ => {}
        }
    }
    Ok(realtime.zip(monotonic).map(|(realtime, monotonic)| realtime - monotonic))
}
