//! Arguments of `dormouse metrics`.

use std::net::SocketAddr;
use std::path::PathBuf;

use clap::{Args, value_parser};

use super::OUTPUT;

/// Arguments of `dormouse metrics`.
#[derive(Args, Clone, Debug)]
pub(crate) struct MetricsArgs {
    /// Pages of trainers (DORMOUSE_STATS_FILE), or directories
    /// of pages. [default: those of your running trainers]
    #[arg(value_name = "PAGE|DIR", verbatim_doc_comment)]
    pub(crate) pages: Vec<PathBuf>,
    /// Keep the metrics in this file, which only you can read.
    #[arg(short, long, value_name = "FILE", help_heading = OUTPUT, verbatim_doc_comment)]
    pub(crate) out: Option<PathBuf>,
    /// Time between two updates of the file, in milliseconds.
    #[arg(short, long, value_name = "MS", default_value_t = 10_000, help_heading = OUTPUT)]
    #[arg(value_parser = value_parser!(u64).range(100..=3_600_000), verbatim_doc_comment)]
    pub(crate) interval_ms: u64,
    /// Serve the metrics at http://ADDRESS/metrics. Only
    /// addresses of this machine's loopback are accepted.
    #[arg(short, long, value_name = "ADDRESS", conflicts_with = "out", help_heading = OUTPUT)]
    #[arg(value_parser = loopback, verbatim_doc_comment)]
    pub(crate) listen: Option<SocketAddr>,
}

/// Parses an address that only this machine reaches.
fn loopback(text: &str) -> Result<SocketAddr, String> {
    let accepted = "accepted: an address and port of this machine, such as 127.0.0.1:9464";
    match text.parse::<SocketAddr>() {
        Ok(address) if address.ip().is_loopback() => Ok(address),
        Ok(_) => Err(format!("other machines reach it; {accepted}")),
        Err(_) => Err(accepted.to_owned()),
    }
}

pub(super) const ABOUT: &str = "\
Prints the figures of running trainers as OpenMetrics.

Without --out and --listen they are printed once. --out is for the text files that
Prometheus' node exporter collects; --listen is for Prometheus itself, and for wandb
(x_stats_open_metrics_endpoints).";

pub(super) const TAIL: &str = "\
Exit status: 0; 1 if the file could not be written or the address not used; 2 if the
arguments were refused.";
