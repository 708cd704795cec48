//! Arguments of `dormouse top`.

use std::path::PathBuf;

use clap::{Args, value_parser};

use super::{OUTPUT, choice};

const ORDERS: &[(&str, Order)] = &[
    ("rank", Order::Rank),
    ("device", Order::Device),
    ("stall", Order::Stall),
    ("pid", Order::Pid),
];

/// Order of the processes shown.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) enum Order {
    /// By rank.
    #[default]
    Rank,
    /// Most device bytes first.
    Device,
    /// Most stalled first.
    Stall,
    /// By process.
    Pid,
}

impl Order {
    /// Returns the word for this order.
    pub(crate) fn word(self) -> &'static str {
        ORDERS.iter().find(|(_, order)| *order == self).map_or("", |(word, _)| word)
    }
}

/// Arguments of `dormouse top`.
#[derive(Args, Clone, Debug)]
pub(crate) struct TopArgs {
    /// Pages of trainers (DORMOUSE_STATS_FILE), or directories
    /// of pages. [default: those of your running trainers]
    #[arg(value_name = "PAGE|DIR", verbatim_doc_comment)]
    pub(crate) pages: Vec<PathBuf>,
    /// Time between two readings, in milliseconds.
    #[arg(short, long, value_name = "MS", default_value_t = 1000, verbatim_doc_comment)]
    #[arg(value_parser = value_parser!(u64).range(100..=3_600_000))]
    pub(crate) interval_ms: u64,
    /// Order of the processes. [default: rank]
    #[arg(short, long, value_name = "ORDER", value_parser = choice(ORDERS), verbatim_doc_comment)]
    pub(crate) sort: Option<Order>,
    /// Print once, without a terminal: two readings, one
    /// interval apart.
    #[arg(long, help_heading = OUTPUT, verbatim_doc_comment)]
    pub(crate) once: bool,
    /// Print once, as JSON.
    #[arg(short, long, help_heading = OUTPUT, verbatim_doc_comment)]
    pub(crate) json: bool,
}

pub(super) const ABOUT: &str = "\
Shows the memory and copies of running trainers.

A trainer writes its figures to a page of shared memory, ten times a second. Without
arguments, the pages of your own processes are shown (/dev/shm/dormouse.<uid>.<pid>).
DORMOUSE_STATS_FILE places a trainer's page elsewhere; it can be named here.";

pub(super) const TAIL: &str = "\
Keys: r, d, s, p sort by rank, device bytes, stall, pid; arrows and page keys scroll;
q quits.

Exit status: 0; 1 if nothing was found, or a page named could not be read; 2 if the
arguments were refused. Without a terminal, top prints once.";
