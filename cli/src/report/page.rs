//! Reads the data of a dump's page (`timeline/src/html/data.rs`). A trace is read as the page of the same timeline.

use std::fs::File;
use std::io::{self, BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use dormouse_timeline::html;
use serde::Deserialize;

use super::trace;
use crate::wire::PACKET_TAG;

/// Maximum bytes of a page: 40 for each of two million events, and as many again.
const PAGE_BYTES_MAX: u64 = 256 << 20;
const DATA_BEGIN: &str = "<script type=\"application/json\" id=\"data\">";
const DATA_END: &str = "</script>";
/// Versions of the data that this program reads.
const VERSIONS: std::ops::RangeInclusive<u32> = 1..=2;
/// Titles of lanes.
const STALLS: &str = "stalls";

/// A page that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum DumpError {
    /// The file cannot be read.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is neither the page nor the trace of a dump, or damaged.
    #[error("{}: {seen}; accepted: the .html page or the .pftrace of a dump", file.display())]
    Format {
        /// The file.
        file: PathBuf,
        /// What was found.
        seen: String,
    },
    /// The page is of another release.
    #[error("{}: data of version {seen}; accepted: {} to {}", file.display(), VERSIONS.start(), VERSIONS.end())]
    Version {
        /// The file.
        file: PathBuf,
        /// Its version.
        seen: u32,
    },
}

/// The data of a page, as far as a report needs it. What older versions lack is empty.
#[derive(Debug, Deserialize)]
pub(super) struct Page {
    version: u32,
    pub(super) pid: u32,
    pub(super) rank: u32,
    pub(super) process: String,
    pub(super) window_ns: u64,
    pub(super) dropped: u64,
    #[serde(default)]
    pub(super) levels_from_ns: u64,
    #[serde(default)]
    pub(super) budget_bytes: u64,
    pub(super) lanes: Vec<Lane>,
    #[serde(default)]
    pub(super) peak: Option<Peak>,
    #[serde(default)]
    pub(super) stalls: Vec<Stall>,
    pub(super) totals: Totals,
    /// What the file does not say, if it is a trace.
    #[serde(skip)]
    pub(super) lacks: Vec<&'static str>,
}

/// What no trace says.
const LACKS: [&str; 2] =
    ["the budget", "the rates of links (bounds are by the fastest copies shown)"];
/// What a trace does not say that has lost some.
const LACKS_LOST: &str = "how many older events are lost";

/// Slices by column. Starts are differences from version 2 on; a column of zeros is empty.
#[derive(Debug, Deserialize)]
pub(super) struct Lane {
    pub(super) title: String,
    pub(super) copy: bool,
    start_ns: Vec<u64>,
    #[serde(default)]
    layer: Vec<u64>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Peak {
    pub(super) at_ns: u64,
    pub(super) bytes: u64,
    pub(super) beside_bytes: u64,
    pub(super) place: String,
    pub(super) owners: Vec<Owner>,
}

#[derive(Debug, Deserialize)]
pub(super) struct Owner {
    pub(super) title: String,
    pub(super) bytes: u64,
}

#[derive(Debug, Deserialize)]
pub(super) struct Stall {
    pub(super) from_ns: u64,
    pub(super) to_ns: u64,
    pub(super) cause: String,
    pub(super) bound_ns: Option<u64>,
}

/// Totals in the order of the lanes and gauges. The first gauge is the awake device bytes.
#[derive(Debug, Deserialize)]
pub(super) struct Totals {
    pub(super) lanes: Vec<LaneTotals>,
    pub(super) peak_bytes: Vec<u64>,
    pub(super) phases: Vec<Phase>,
}

#[derive(Debug, Default, Clone, Copy, Deserialize)]
pub(super) struct LaneTotals {
    pub(super) count: u64,
    pub(super) bytes: u64,
    pub(super) busy_ns: u64,
}

#[derive(Debug, Deserialize)]
pub(super) struct Phase {
    pub(super) name: String,
    pub(super) count: u64,
    pub(super) busy_ns: u64,
    pub(super) stall_ns: u64,
    /// `None`: not recorded.
    pub(super) peak_bytes: Vec<Option<u64>>,
}

impl Page {
    /// Reads the page or the trace at `file`.
    pub(super) fn read(file: &Path) -> Result<Self, DumpError> {
        let io = |source| DumpError::Io { file: file.to_owned(), source };
        let format = |seen: String| DumpError::Format { file: file.to_owned(), seen };
        let mut opened = BufReader::new(File::open(file).map_err(io)?);
        let mut bytes = Vec::new();
        if opened.fill_buf().map_err(io)?.first() == Some(&PACKET_TAG) {
            let trace = trace::read(&mut opened).map_err(format)?;
            html::write(&trace.snapshot, &trace.process, &mut bytes).map_err(io)?;
            let lost = trace.has_lost.then_some(LACKS_LOST);
            let page = Self::of(file, &bytes)?;
            return Ok(Self { lacks: LACKS.into_iter().chain(lost).collect(), ..page });
        }
        opened.take(PAGE_BYTES_MAX + 1).read_to_end(&mut bytes).map_err(io)?;
        if bytes.len() as u64 > PAGE_BYTES_MAX {
            return Err(format(format!("more than {PAGE_BYTES_MAX} bytes")));
        }
        Self::of(file, &bytes)
    }

    /// Reads the bytes of a page.
    fn of(file: &Path, bytes: &[u8]) -> Result<Self, DumpError> {
        let format = |seen: String| DumpError::Format { file: file.to_owned(), seen };
        let text = std::str::from_utf8(bytes).map_err(|error| format(error.to_string()))?;
        let data = text.split_once(DATA_BEGIN).and_then(|(_, after)| after.split_once(DATA_END));
        let (data, _) = data.ok_or_else(|| format("no data of dormouse".to_owned()))?;
        let version: Version =
            serde_json::from_str(data).map_err(|error| format(error.to_string()))?;
        if !VERSIONS.contains(&version.version) {
            return Err(DumpError::Version { file: file.to_owned(), seen: version.version });
        }
        serde_json::from_str(data).map_err(|error| format(error.to_string()))
    }

    /// Returns the layer of a wait that began at `from_ns`.
    pub(super) fn layer_of(&self, from_ns: u64) -> Option<u64> {
        let lane = self.lanes.iter().find(|lane| lane.title == STALLS)?;
        let mut at_ns = 0;
        let at = lane.start_ns.iter().position(|start| {
            at_ns = if self.version == 1 { *start } else { at_ns + start };
            at_ns == from_ns
        })?;
        lane.layer.get(at)?.checked_sub(1)
    }

    /// Returns the totals of each lane with its title.
    pub(super) fn lanes(&self) -> impl Iterator<Item = (&Lane, LaneTotals)> {
        self.lanes.iter().zip(self.totals.lanes.iter().copied())
    }

    /// Returns the totals of the waits.
    pub(super) fn waits(&self) -> LaneTotals {
        self.lanes()
            .find(|(lane, _)| lane.title == STALLS)
            .map(|(_, totals)| totals)
            .unwrap_or_default()
    }

    /// Returns the most device bytes awake.
    pub(super) fn peak_bytes(&self) -> u64 {
        self.totals.peak_bytes.first().copied().unwrap_or(0)
    }
}

#[derive(Deserialize)]
struct Version {
    version: u32,
}
