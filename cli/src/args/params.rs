//! Arguments of `dormouse params`.

use std::path::PathBuf;

use clap::Args;

use super::OUTPUT;

/// Arguments of `dormouse params`.
#[derive(Args, Clone, Debug)]
pub(crate) struct ParamsArgs {
    /// A parameter to explain, with or without DORMOUSE_.
    #[arg(value_name = "NAME", verbatim_doc_comment)]
    pub(crate) name: Option<String>,
    /// The library. [default: DORMOUSE_LIB, or the one
    /// installed with this program]
    #[arg(long, value_name = "FILE", verbatim_doc_comment)]
    pub(crate) lib: Option<PathBuf>,
    /// Print a file that DORMOUSE_CONFIG can name.
    #[arg(short, long, conflicts_with_all = ["json", "name"], help_heading = OUTPUT)]
    #[arg(verbatim_doc_comment)]
    pub(crate) file: bool,
    /// Print JSON.
    #[arg(short, long, help_heading = OUTPUT, verbatim_doc_comment)]
    pub(crate) json: bool,
}

pub(super) const ABOUT: &str = "\
Shows every parameter of the library with its value and where that came from.

The values are those of a process that starts in this shell: the environment, then the
file that DORMOUSE_CONFIG names, then what is built in or automatic. Automatic values
are those of a runtime that would be created now, each with its reason; a runtime then
revises some of them by what it measures. A program's own options to
dormouse_runtime_create come before all of them and are not known here.";

pub(super) const TAIL: &str = "\
Exit status: 0; 1 if a value is refused, with the reason on standard error, or the name
is unknown; 2 if the arguments were refused.";
