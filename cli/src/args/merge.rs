//! Arguments of `dormouse merge`.

use std::path::PathBuf;

use clap::Args;

use super::OUTPUT;

/// Arguments of `dormouse merge`.
#[derive(Args, Clone, Debug)]
pub(crate) struct MergeArgs {
    /// Dumps of dormouse (.pftrace), and traces of
    /// torch.profiler (.json, .json.gz), of one run.
    #[arg(required = true, value_name = "TRACE", verbatim_doc_comment)]
    pub(crate) files: Vec<PathBuf>,
    /// The file to write, a ZIP.
    #[arg(short, long, value_name = "OUT.zip", required = true, help_heading = OUTPUT)]
    #[arg(verbatim_doc_comment)]
    pub(crate) out: PathBuf,
    /// Print JSON.
    #[arg(short, long, help_heading = OUTPUT, verbatim_doc_comment)]
    pub(crate) json: bool,
}

pub(super) const ABOUT: &str = "\
Joins dumps of dormouse and traces of torch.profiler on one clock.

The ZIP opens in https://ui.perfetto.dev. The traces in it are unchanged; its manifest
says how their clocks relate: dumps have the Unix time of their clock, and a Kineto
trace counts microseconds from its baseTimeNanoseconds, which is Unix time.";

pub(super) const TAIL: &str = "\
Exit status: 0; 1 if a trace was refused, or no two traces are of the same time; 2 if the
arguments were refused.";
