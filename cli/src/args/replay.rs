//! Arguments of `dormouse replay`.

use std::path::PathBuf;

use clap::{Args, value_parser};

use super::OUTPUT;

/// Arguments of `dormouse replay`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ReplayArgs {
    /// The trace (.csv, .csv.gz, .csv.xz); - is standard input.
    #[arg(value_name = "TRACE", verbatim_doc_comment)]
    pub(crate) file: PathBuf,
    /// Limit on mapped memory, in MiB. [default: none]
    #[arg(long, value_name = "MIB", verbatim_doc_comment)]
    #[arg(value_parser = value_parser!(u64).range(1..=1 << 26))]
    pub(crate) budget_mib: Option<u64>,
    /// Unit of mapping, in KiB: a power of two. That of a GPU
    /// is 2048.
    #[arg(long, value_name = "KIB", default_value_t = 2048, verbatim_doc_comment)]
    #[arg(value_parser = value_parser!(u64).range(4..=1 << 20))]
    pub(crate) page_kib: u64,
    /// Print JSON.
    #[arg(short, long, help_heading = OUTPUT, verbatim_doc_comment)]
    pub(crate) json: bool,
}

pub(super) const ABOUT: &str = "\
Replays a log of allocations on the allocator, and says what it would hold.

A trace is the CSV of RMM's logging_resource_adaptor, or that with the columns of
docs/traces.md. Memory is mapped and never written, so a GPU's trace replays on a small
machine. All calls run on one thread and one stream, in the order of the file.";

pub(super) const TAIL: &str = "\
Exit status: 0; 1 if the trace was refused, or an allocation failed that did not fail in
the trace; 2 if the arguments were refused.";
