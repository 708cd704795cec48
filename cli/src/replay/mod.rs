//! `dormouse replay`: a log of allocations on the allocator, over memory that is mapped and never written.

mod trace;

use std::io;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use dormouse_alloc::{AllocError, Allocator, Config, Request};
use dormouse_device::DeviceError;
use dormouse_device::host::{HostConfig, HostDevice};
use dormouse_parallel::draw::{bytes, percent};
use dormouse_timeline::Timeline;
use serde::Serialize;

use crate::args::ReplayArgs;
use crate::text::{as_json, count};
use crate::{Error, Output};
use trace::{Call, TRACE_BYTES_MAX, Trace};

/// Unit of block sizes, as on a GPU.
const GRANULE_BYTES: usize = 512;
/// Addresses reserved, in peaks of the trace: fragmentation may need more than one.
const RESERVE_PER_PEAK: u64 = 16;
const RESERVE_BYTES_MIN: u64 = 1 << 30;
const RESERVE_BYTES_MAX: u64 = 32 << 40;
/// Events that the timeline keeps; nobody reads them.
const TIMELINE_EVENTS: usize = 64;

/// A trace that cannot be replayed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ReplayError {
    /// The file cannot be read.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file has too many bytes, decompressed.
    #[error("{} is longer than {TRACE_BYTES_MAX} bytes; accepted: at most that", file.display())]
    Length {
        /// The file.
        file: PathBuf,
    },
    /// A line of the file is refused.
    #[error("{} line {line}: {seen:?}; accepted: {accepted}", file.display())]
    Line {
        /// The file.
        file: PathBuf,
        /// The line, from 1; 0: the file as a whole.
        line: u64,
        /// The line's text.
        seen: String,
        /// What is accepted.
        accepted: &'static str,
    },
    /// The addresses cannot be reserved.
    #[error(transparent)]
    Device(#[from] DeviceError),
    /// The allocator refuses its settings, or fails other than for lack of memory.
    #[error(transparent)]
    Alloc(#[from] AllocError),
}

/// What a replay found.
#[derive(Debug, Serialize)]
struct Replayed {
    calls: u64,
    /// Allocations that failed where the trace was recorded.
    failures_recorded: u64,
    /// Allocations that failed here.
    failures: u64,
    requested_peak_bytes: u64,
    mapped_peak_bytes: u64,
    /// Peak of mapped memory beyond that of requested memory, as a share of it. `None` after a failure.
    overhead: Option<f64>,
    /// Calls of the device.
    maps: u64,
    unmaps: u64,
    ns_per_call: f64,
}

/// Replays a trace.
pub(crate) fn run(args: &ReplayArgs) -> Result<Output, Error> {
    let trace = trace::read(&args.file)?;
    let replayed = replay(&trace, args)?;
    let is_good = replayed.failures == 0;
    let text = if args.json { as_json(&replayed)? } else { table(&replayed) };
    Ok(Output { text, is_good })
}

fn replay(trace: &Trace, args: &ReplayArgs) -> Result<Replayed, ReplayError> {
    let reserve_bytes = trace
        .peak_bytes
        .saturating_mul(RESERVE_PER_PEAK)
        .clamp(RESERVE_BYTES_MIN, RESERVE_BYTES_MAX);
    let page_bytes = (args.page_kib << 10) as usize;
    let config = HostConfig {
        reserve_bytes: reserve_bytes as usize,
        capacity_bytes: reserve_bytes,
        page_bytes,
    };
    let device = Arc::new(HostDevice::new(config)?);
    let budget_bytes = args.budget_mib.map_or(reserve_bytes, |mib| mib << 20);
    let mut config = Config::new(GRANULE_BYTES, budget_bytes);
    config.segment_bytes = config.segment_bytes.max(page_bytes);
    (config.moves_pages, config.thread_cache) = (true, true);
    let allocator = Allocator::new(device, config, Arc::new(Timeline::new(TIMELINE_EVENTS)))?;
    let mut addresses = Vec::with_capacity(trace.blocks);
    let mut failures = 0;
    let started = Instant::now();
    for call in &trace.calls {
        match *call {
            Call::Allocate { bytes } => match allocator.allocate(&Request::new(bytes as usize)) {
                Ok(block) => addresses.push(Some(block.range.start)),
                Err(AllocError::OutOfMemory(_) | AllocError::NoAddresses { .. }) => {
                    failures += 1;
                    addresses.push(None);
                }
                Err(error) => return Err(error.into()),
            },
            Call::Free { block } => {
                // The block of a failed allocation has no address.
                if let Some(address) = addresses.get(block).copied().flatten() {
                    let _done = allocator.free(address, 0)?;
                }
            }
        }
    }
    let elapsed = started.elapsed();
    let stats = allocator.stats();
    let (requested, mapped) = (trace.peak_bytes, stats.mapped_bytes.peak);
    let calls = trace.calls.len() as u64;
    Ok(Replayed {
        calls,
        failures_recorded: trace.failures,
        failures,
        requested_peak_bytes: requested,
        mapped_peak_bytes: mapped,
        overhead: (failures == 0).then(|| mapped as f64 / requested.max(1) as f64 - 1.0),
        maps: stats.maps,
        unmaps: stats.unmaps,
        ns_per_call: elapsed.as_nanos() as f64 / calls.max(1) as f64,
    })
}

fn table(it: &Replayed) -> String {
    let more = it.overhead.map(|share| format!(", {} more", percent(share))).unwrap_or_default();
    let rows = [
        ("calls", count(it.calls)),
        (
            "failed",
            format!(
                "{} here, {} where it was recorded",
                count(it.failures),
                count(it.failures_recorded)
            ),
        ),
        ("peak requested", bytes(it.requested_peak_bytes)),
        ("peak mapped", bytes(it.mapped_peak_bytes) + &more),
        ("device calls", format!("{} maps, {} unmaps", count(it.maps), count(it.unmaps))),
        ("cost", format!("{:.0} ns per call", it.ns_per_call)),
    ];
    rows.iter().map(|(label, value)| format!("{label:16}{value}\n")).collect()
}
