//! Arguments of `dormouse doctor`.

use std::path::PathBuf;

use clap::Args;

use super::OUTPUT;

/// Arguments of `dormouse doctor`.
#[derive(Args, Clone, Debug)]
pub(crate) struct DoctorArgs {
    /// The Python that runs the trainer. [default: python3]
    #[arg(long, value_name = "FILE", verbatim_doc_comment)]
    pub(crate) python: Option<PathBuf>,
    /// The library. [default: DORMOUSE_LIB, or the one
    /// installed with this program]
    #[arg(long, value_name = "FILE", verbatim_doc_comment)]
    pub(crate) lib: Option<PathBuf>,
    /// Print JSON.
    #[arg(short, long, help_heading = OUTPUT, verbatim_doc_comment)]
    pub(crate) json: bool,
}

pub(super) const ABOUT: &str = "\
Checks what a trainer on this machine needs, and says what to change.

Looks at the library and its settings, the preload library, Python and torch, GPUs and
their link, the disk of DORMOUSE_NVME_DIR (64 MiB are written and read), and the limits
of the system. Run it as the trainer runs: same user, shell, container.";

pub(super) const TAIL: &str = "\
Each line is ok, advice (works, and could be better) or broken.

Exit status: 0; 1 if something is broken; 2 if the arguments were refused.";
