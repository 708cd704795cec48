//! What `--help` prints, from the table of flags.

use std::fmt::Write as _;

use super::FLAGS;
use super::flags::{Flag, Takes};
use crate::model;

/// Column at which what a flag does begins.
const INDENT: usize = 26;

/// `dormouse --help`.
pub(super) fn program() -> String {
    format!(
        "{}
Plans the training of language models on sequences that share prefixes.

usage: dormouse plan [flags] FILE...

  plan           Predicts the cost of a batch of sequences whose shared
                 prefixes run once: plan, ranks, pipeline, pictures.

  -h, --help     Prints this text; dormouse plan --help documents plan.
  -V, --version  Prints the version.
",
        version()
    )
}

/// `dormouse --version`.
pub(super) fn version() -> String {
    format!("dormouse {}\n", env!("CARGO_PKG_VERSION"))
}

/// `dormouse plan --help`.
pub(super) fn plan() -> String {
    let mut text = PLAN_HEAD.to_owned();
    let mut section = "";
    for flag in FLAGS {
        if flag.section != section {
            section = flag.section;
            let _ = writeln!(text, "\n{section}:");
        }
        line(&mut text, flag);
    }
    let _ = writeln!(text, "{:INDENT$}Prints this text.", "  -h, --help");
    let names = model::names();
    let _ = write!(text, "\nmodels known by name:\n  {names}\n{PLAN_TAIL}");
    text
}

fn line(text: &mut String, flag: &Flag) {
    let mut head = match flag.short {
        Some(short) => format!("  -{short}, --{}", flag.long),
        None => format!("      --{}", flag.long),
    };
    if let Takes::Value { name, .. } = flag.takes {
        let _ = write!(head, " {name}");
    }
    let mut lines = flag.help.iter();
    if head.len() < INDENT
        && let Some(first) = lines.next()
    {
        let _ = writeln!(text, "{head:INDENT$}{first}");
    } else {
        let _ = writeln!(text, "{head}");
    }
    for more in lines {
        let _ = writeln!(text, "{:INDENT$}{more}", "");
    }
}

const PLAN_HEAD: &str = "\
Predicts the cost of a batch of sequences whose shared prefixes run once.

usage: dormouse plan [flags] FILE...

Each FILE holds sequences; all files together are one batch. A file is JSON
lines, Parquet, or Arrow IPC (file or stream), detected by its first bytes. - is
standard input. A pipe accepts JSON lines and Arrow streams.

JSON lines have one object per line:
  {\"ids\": [5, 9, 3]}                          token ids (or input_ids),
  {\"prompt_ids\": [5, 9], \"response_ids\": [3]} in two parts, or
  {\"length\": 90, \"prompt_length\": 60, \"group\": 7}
      lengths only: the sequences of a group share its prompt.
Optional fields: weight, in the loss (1); loss, the position of the first
label that carries loss, or spans [[60, 70], [80, 90]] (the response if there
is a prompt, else all but the first token); group, a number or a string; kind, a
number: sequences of different kinds share nothing. Other fields are ignored.

Parquet and Arrow files have a column of lists of integers, and optional columns
weight, loss (a position), group and kind.
";

const PLAN_TAIL: &str = "
A machine is a JSON object with these fields, 0 if unknown: flops_per_s,
device_bytes, sleep_bytes_per_s, wake_bytes_per_s, host_bytes,
nvme_write_bytes_per_s, nvme_read_bytes_per_s, link_bytes_per_s, op_overhead_ns.
examples/plan contains a machine, models and sequences.

exit status: 0 if a plan was made, even one that does not pay; 1 if the input was
refused, with the reason on standard error; 2 if the arguments were.
";
