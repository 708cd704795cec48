//! Arguments of `dormouse report` and `dormouse diff`.

use std::path::PathBuf;

use clap::Args;

use super::OUTPUT;

/// Arguments of `dormouse report`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ReportArgs {
    /// A dump: the page for a browser (.html), or the trace for Perfetto (.pftrace).
    #[arg(value_name = "DUMP", verbatim_doc_comment)]
    pub(crate) file: PathBuf,
    /// Print JSON.
    #[arg(short, long, help_heading = OUTPUT, verbatim_doc_comment)]
    pub(crate) json: bool,
}

/// Arguments of `dormouse diff`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DiffArgs {
    /// A dump: the page for a browser (.html), or the trace for Perfetto (.pftrace).
    #[arg(value_name = "BEFORE", verbatim_doc_comment)]
    pub(crate) before: PathBuf,
    /// Another dump.
    #[arg(value_name = "AFTER", verbatim_doc_comment)]
    pub(crate) after: PathBuf,
    /// Print JSON.
    #[arg(short, long, help_heading = OUTPUT, verbatim_doc_comment)]
    pub(crate) json: bool,
}

pub(super) const REPORT_ABOUT: &str = "\
Says in text what a dump shows: the peak and whose bytes it was, phases, copies, waits.

Dumps are written into DORMOUSE_DUMP_DIR, and by calls of the library. The page has all
of them in pictures. A trace lacks the budget and the rates of links.";

pub(super) const TAIL: &str = "\
Exit status: 0; 1 if a file was refused; 2 if the arguments were refused.";
