//! `dormouse merge`: several traces in one ZIP, with a manifest that puts them on one clock.
//!
//! ```text
//!   dump      CLOCK_MONOTONIC ──its clock snapshots──► CLOCK_REALTIME ─┐
//!                                                                      ├─► the viewer's axis, Unix time
//!   Kineto    µs since its base ──offset_ns = the base──► Unix time ───┘
//! ```

mod kineto;
mod manifest;
mod perfetto;

use std::fs::{self, File};
use std::io::{self, BufReader, BufWriter, Read, Write};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use serde::Serialize;
use zip::write::SimpleFileOptions;
use zip::{CompressionMethod, ZipWriter};

use crate::args::MergeArgs;
use crate::text::{as_json, lossy, seconds};
use crate::wire::PACKET_TAG;
use crate::{Error, Output};

/// Maximum bytes of a trace, decompressed.
const TRACE_BYTES_MAX: u64 = 64 << 30;
/// First bytes of a gzip file.
const GZIP_MAGIC: [u8; 2] = [0x1f, 0x8b];

/// A trace that cannot be merged.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum MergeError {
    /// The file cannot be read.
    #[error("{}: {source}", file.display())]
    Io {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The file is no trace.
    #[error("{}: {seen}; accepted: a .pftrace of dormouse, or a JSON trace of torch.profiler", file.display())]
    Format {
        /// The file.
        file: PathBuf,
        /// What was found.
        seen: String,
    },
    /// The archive would replace a trace.
    #[error("--out {} is the trace {}; accepted: another file", out.display(), file.display())]
    Replaces {
        /// The archive.
        out: PathBuf,
        /// The trace.
        file: PathBuf,
    },
    /// No dump among the files.
    #[error("no file is a .pftrace of dormouse; accepted: at least one")]
    NoDump,
    /// The archive cannot be written.
    #[error("{}: {source}", file.display())]
    Write {
        /// The archive.
        file: PathBuf,
        /// The cause.
        source: zip::result::ZipError,
    },
}

/// What a trace is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Dump,
    Kineto,
}

/// A trace, on the clock of Unix time.
#[derive(Clone, Debug, Serialize)]
struct Trace {
    #[serde(serialize_with = "lossy")]
    file: PathBuf,
    /// Its name in the archive.
    entry: String,
    kind: Kind,
    /// Added to the times of the trace; 0 for a dump, which has clock snapshots.
    offset_ns: u64,
    first_unix_ns: Option<i128>,
    last_unix_ns: Option<i128>,
}

/// What was merged.
#[derive(Debug, Serialize)]
struct Merged {
    #[serde(serialize_with = "lossy")]
    out: PathBuf,
    traces: Vec<Trace>,
    /// Whether at least two traces share a moment.
    overlap: bool,
}

/// Writes the archive.
pub(crate) fn run(args: &MergeArgs) -> Result<Output, Error> {
    // By what they are: a link, or another spelling of a path, is the same file.
    let identity = |path: &Path| fs::metadata(path).ok().map(|found| (found.dev(), found.ino()));
    let existing = identity(&args.out);
    if let Some(file) =
        args.files.iter().find(|file| existing.is_some() && identity(file) == existing)
    {
        return Err(MergeError::Replaces { out: args.out.clone(), file: file.clone() }.into());
    }
    let mut traces = Vec::new();
    for (number, file) in args.files.iter().enumerate() {
        traces.push(examine(file, number)?);
    }
    if traces.iter().all(|trace| trace.kind != Kind::Dump) {
        return Err(MergeError::NoDump.into());
    }
    write(&args.out, &traces)?;
    let overlap = traces.len() < 2 || overlap(&traces);
    let merged = Merged { out: args.out.clone(), traces, overlap };
    let text = if args.json { as_json(&merged)? } else { table(&merged) };
    Ok(Output { text, is_good: overlap })
}

/// Reads a trace once, for its kind and its time.
fn examine(file: &Path, number: usize) -> Result<Trace, MergeError> {
    let io = |source| MergeError::Io { file: file.to_owned(), source };
    let format = |seen: String| MergeError::Format { file: file.to_owned(), seen };
    let mut reader = BufReader::new(open(file)?);
    let first = io::BufRead::fill_buf(&mut reader).map_err(io)?.first().copied();
    let stem = file.file_name().map_or_else(|| "trace".into(), |name| name.to_string_lossy());
    let stem = stem.strip_suffix(".gz").unwrap_or(&stem);
    let entry = format!("{number}-{stem}");
    let (kind, offset_ns, span) = match first {
        Some(PACKET_TAG) => (Kind::Dump, 0, perfetto::span(&mut reader).map_err(format)?),
        Some(_) => {
            let trace = kineto::read(reader).map_err(|error| format(error.to_string()))?;
            (Kind::Kineto, trace.base_ns, trace.span_ns())
        }
        None => return Err(format("the file is empty".to_owned())),
    };
    let (first_unix_ns, last_unix_ns) = span.unzip();
    Ok(Trace { file: file.to_owned(), entry, kind, offset_ns, first_unix_ns, last_unix_ns })
}

/// Opens a trace, decompressed if it is gzip.
fn open(file: &Path) -> Result<Box<dyn Read>, MergeError> {
    let io = |source| MergeError::Io { file: file.to_owned(), source };
    let mut opened = BufReader::new(File::open(file).map_err(io)?);
    let is_gzip = io::BufRead::fill_buf(&mut opened).map_err(io)?.starts_with(&GZIP_MAGIC);
    Ok(match is_gzip {
        true => Box::new(flate2::bufread::MultiGzDecoder::new(opened).take(TRACE_BYTES_MAX)),
        false => Box::new(opened.take(TRACE_BYTES_MAX)),
    })
}

/// Writes the archive aside and renames it.
fn write(out: &Path, traces: &[Trace]) -> Result<(), MergeError> {
    let mut aside = out.as_os_str().to_owned();
    aside.push(format!(".{}.tmp", std::process::id()));
    let aside = Path::new(&aside);
    let failed = |source| MergeError::Write { file: out.to_owned(), source };
    let written =
        fill(aside, traces).and_then(|()| fs::rename(aside, out).map_err(|it| failed(it.into())));
    if written.is_err() {
        // Absent if it could not be created.
        let _ = fs::remove_file(aside);
    }
    written
}

fn fill(aside: &Path, traces: &[Trace]) -> Result<(), MergeError> {
    let failed = |source| MergeError::Write { file: aside.to_owned(), source };
    let file = File::create(aside).map_err(|error| failed(error.into()))?;
    let mut archive = ZipWriter::new(BufWriter::new(file));
    let options = SimpleFileOptions::default()
        .compression_method(CompressionMethod::Deflated)
        .large_file(true);
    archive.start_file(manifest::NAME, options).map_err(failed)?;
    archive.write_all(manifest::of(traces).as_bytes()).map_err(|error| failed(error.into()))?;
    for trace in traces {
        archive.start_file(&trace.entry, options).map_err(failed)?;
        let mut source = open(&trace.file)?;
        io::copy(&mut source, &mut archive).map_err(|error| failed(error.into()))?;
    }
    let mut file = archive.finish().map_err(failed)?;
    file.flush().map_err(|error| failed(error.into()))
}

/// Whether two traces share a moment.
fn overlap(traces: &[Trace]) -> bool {
    let spans: Vec<_> =
        traces.iter().filter_map(|it| it.first_unix_ns.zip(it.last_unix_ns)).collect();
    let pairs =
        spans.iter().enumerate().flat_map(|(at, a)| spans.iter().skip(at + 1).map(move |b| (a, b)));
    pairs.into_iter().any(|(a, b)| a.0 <= b.1 && b.0 <= a.1)
}

fn table(merged: &Merged) -> String {
    let mut text = String::new();
    for trace in &merged.traces {
        let kind = match trace.kind {
            Kind::Dump => "dormouse",
            Kind::Kineto => "torch.profiler",
        };
        let length = match (trace.first_unix_ns, trace.last_unix_ns) {
            (Some(first), Some(last)) => seconds((last - first) as f64 / 1e9),
            _ => "no events".to_owned(),
        };
        text.push_str(&format!("{kind:15} {length:>12}  {}\n", trace.file.display()));
    }
    if !merged.overlap {
        text.push_str("no two traces are of the same time: are they of one run?\n");
    }
    text.push_str(&format!(
        "wrote {}\nnext: open it in https://ui.perfetto.dev\n",
        merged.out.display()
    ));
    text
}
