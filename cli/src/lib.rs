//! The command-line program `dormouse`.
//!
//! One module per command:
//!
//! - `top` shows the live pages that running trainers write (`timeline/src/live`), and `metrics` serves them.
//! - `doctor` checks what a trainer needs of this machine, by doing it (`device/`, `storage/`).
//! - `params` shows the configuration that `libdormouse.so` reads, through its C interface (`library`).
//! - `report` and `diff` say in text what dumps show, from the data in their pages.
//! - `merge` puts dumps and traces of torch.profiler on one clock.
//! - `replay` runs a log of allocations on `alloc/`.
//! - `plan` reads sequences ([`read`]), a model ([`Model`]) and a machine, plans them with
//!   `schedule/` and `parallel/`, and prints a [`Report`]: shared tokens, cost of the plan, work of each
//!   rank and pipeline stage. It computes no plan itself.
//!
//! Not a trainer or a service.
//!
//! # Glossary
//! - *row*: one sequence in a file; *line* in a text file.
//! - *description*: a JSON file of a model or a machine.
//! - *report*: the result as a struct; *figures*: the same as labelled text.
//!
//! # Invariants
//! - **C1** Standard output is written only after the whole report is complete.
//! - **C2** Every refusal names the file, the line or row, the value seen and the values accepted.
//! - **C3** A closed output pipe is not an error, and does not change the exit status of what was looked at.
//! - **C4** An error message is one line of bounded length, regardless of file contents.
//! - **C5** A file with a false size is refused before that much memory is allocated; it never aborts
//!   the process.
//! - **C6** Progress is drawn on standard error alone, if that is a terminal, and never with `--json`.
//!
//! ```text
//!   arguments ─► PlanArgs        model, machine
//!                   │                  │
//!   files ──read──► Sequences ──► schedule/ ──► Report ──► sections or JSON, files in --out
//! ```
#![deny(unsafe_code)]

mod args;
mod doctor;
mod files;
mod library;
mod live;
mod merge;
mod metrics;
mod model;
mod params;
mod plan;
mod progress;
pub mod read;
mod replay;
mod report;
mod sequences;
mod text;
mod top;
mod wire;

use std::ffi::OsString;
use std::io::{self, ErrorKind, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::ExitCode;

use dormouse_parallel::balance::BalanceError;
use dormouse_parallel::pipeline::PipelineError;
use dormouse_parallel::rollout::RolloutError;
use dormouse_schedule::PlanError;

use args::Command;
pub use args::PlanArgs;
pub use files::DescriptionError;
pub use library::LibraryError;
pub use merge::MergeError;
pub use model::{Model, Parameters};
pub use plan::{
    BatchReport, OpCounts, PipelineReport, PlanReport, RankReport, RanksReport, Report,
    ResidencyCounts, RolloutWorkerReport, RolloutsReport,
};
use progress::Progress;
pub use read::ReadError;
pub use replay::ReplayError;
pub use report::DumpError;
pub use sequences::{IDS_MAX, Refusal, Sequences, Tokens, VOCAB_MAX};

/// Exit status if the input was refused, or something looked at is not as it should be.
const REFUSED: u8 = 1;
/// Exit status if the arguments were refused.
const MISUSED: u8 = 2;

/// An error of the program.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Invalid arguments.
    #[error("{}", args::sentence(.0))]
    Usage(#[from] clap::Error),
    /// Invalid sequences.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// An invalid model or machine.
    #[error(transparent)]
    Description(#[from] DescriptionError),
    /// An error of the plan.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// An error of the shares.
    #[error(transparent)]
    Balance(#[from] BalanceError),
    /// An error of the pipeline.
    #[error(transparent)]
    Pipeline(#[from] PipelineError),
    /// Sequences without groups, for an argument that needs them.
    #[error("no sequence has a group; accepted with {with}: a group per sequence")]
    NoGroups {
        /// The argument.
        with: &'static str,
    },
    /// An error of the assignment of rollouts.
    #[error(transparent)]
    Rollouts(#[from] RolloutError),
    /// More parts than layers.
    #[error("{seen} parts for {layers} layers; accepted: at most one part per layer")]
    Parts {
        /// Parts of all stages.
        seen: u64,
        /// Layers of the model.
        layers: u32,
    },
    /// Pipeline stages for a batch without a long enough sequence.
    #[error(
        "all sequences are shorter than {} tokens; accepted with --stages: at least one that is not",
        plan::STAGED_TOKENS_MIN
    )]
    NothingStaged,
    /// The library's parameters cannot be read.
    #[error(transparent)]
    Library(#[from] LibraryError),
    /// Traces cannot be merged.
    #[error(transparent)]
    Merge(#[from] MergeError),
    /// A dump cannot be read.
    #[error(transparent)]
    Dump(#[from] DumpError),
    /// A trace of allocations cannot be replayed.
    #[error(transparent)]
    Replay(#[from] ReplayError),
    /// A parameter that does not exist.
    #[error("{seen} is no parameter; accepted: {accepted}")]
    Param {
        /// The name.
        seen: String,
        /// Names like it.
        accepted: String,
    },
    /// A file cannot be written.
    #[error("{}: {source}", file.display())]
    Write {
        /// The file.
        file: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// An address cannot be listened at.
    #[error("{address}: {source}")]
    Listen {
        /// The address.
        address: SocketAddr,
        /// The cause.
        source: io::Error,
    },
    /// The report cannot be written as JSON.
    #[error("the report cannot be written as JSON: {0}")]
    Json(#[from] serde_json::Error),
    /// Standard output cannot be written.
    #[error("standard output: {0}")]
    Print(io::Error),
}

/// What a command prints to standard output.
#[derive(Debug)]
pub(crate) struct Output {
    pub(crate) text: String,
    /// `false` if what was looked at is not as it should be: exit status 1, without an error message.
    pub(crate) is_good: bool,
}

impl Output {
    pub(crate) fn of(text: String) -> Self {
        Self { text, is_good: true }
    }
}

/// Runs a command that may take a while, and draws on a terminal how long it has.
fn shown<T>(words: &'static str, is_json: bool, run: impl FnOnce() -> T) -> T {
    let _progress = Progress::new(words, is_json);
    run()
}

/// Runs the program with the arguments after its name.
pub fn run(
    arguments: impl IntoIterator<Item = OsString>,
    out: &mut dyn Write,
    err: &mut dyn Write,
) -> ExitCode {
    let done = args::parse(arguments).map_err(Error::Usage);
    let done = done.and_then(|command| match command {
        Command::Plan(args) => plan::run(&args).map(Output::of),
        Command::Top(args) => top::run(&args, out),
        Command::Metrics(args) => metrics::run(&args, out),
        Command::Doctor(args) => doctor::run(&args),
        Command::Params(args) => params::run(&args),
        Command::Report(args) => shown("reading", args.json, || report::run(&args)),
        Command::Diff(args) => shown("reading", args.json, || report::run_diff(&args)),
        Command::Merge(args) => shown("merging", args.json, || merge::run(&args)),
        Command::Replay(args) => shown("replaying", args.json, || replay::run(&args)),
        Command::Completion(args) => Ok(Output::of(args.script())),
        Command::Man(args) => args.page().map(Output::of).map_err(Error::Usage),
    });
    let output = match done {
        // Help and version are not errors.
        Err(Error::Usage(text)) if !text.use_stderr() => Ok(Output::of(text.to_string())),
        done => done,
    };
    let done = output.and_then(|output| {
        let text = output.text.as_bytes();
        match out.write_all(text).and_then(|()| out.flush()) {
            // The reader of a closed pipe can still check the exit status.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(Error::Print(error)),
            _ => Ok(output.is_good),
        }
    });
    match done {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::from(REFUSED),
        Err(Error::Print(error)) if error.kind() == ErrorKind::BrokenPipe => ExitCode::SUCCESS,
        Err(error) => {
            // Standard error may be closed too.
            let _ = writeln!(err, "dormouse: {}", text::line(&error.to_string()));
            ExitCode::from(if matches!(error, Error::Usage(_)) { MISUSED } else { REFUSED })
        }
    }
}
