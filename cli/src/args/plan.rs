//! Command-line arguments. The documentation of each field is its help.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::error::ErrorKind;
use clap::{Args, CommandFactory, Parser, Subcommand, value_parser};
use dormouse_parallel::balance::{BalanceUnit, RANKS_MAX};
use dormouse_parallel::pipeline::{CHUNKS_MAX, PipelineOrder, STAGES_MAX, VIRTUAL_STAGES_MAX};
use dormouse_schedule::{LAYERS_MAX, TOKENS_MAX};

use crate::model;
use crate::read::STANDARD_INPUT;

const PLAN: &str = "Plan";
const RANKS: &str = "Data-parallel ranks";
const STAGES: &str = "Pipeline stages";
const OUTPUT: &str = "Output";

const UNITS: &[(&str, BalanceUnit)] =
    &[("leaf", BalanceUnit::Leaf), ("group", BalanceUnit::Group), ("tree", BalanceUnit::Tree)];
const ORDERS: &[(&str, PipelineOrder)] =
    &[("stream", PipelineOrder::Stream), ("groups", PipelineOrder::GroupByGroup)];

/// Plans the training of language models on sequences that share prefixes.
#[derive(Debug, Parser)]
#[command(name = "dormouse", version, arg_required_else_help = false)]
#[command(disable_help_subcommand = true, args_override_self = true)]
struct Program {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Predicts the cost of a batch of sequences whose shared prefixes run once.
    #[command(long_about = PLAN_ABOUT, after_help = plan_tail())]
    Plan(Box<PlanArgs>),
}

/// Arguments of `dormouse plan`.
#[derive(Args, Clone, Debug, Default, PartialEq)]
pub struct PlanArgs {
    /// Files of sequences; - is standard input.
    #[arg(required = true, value_name = "FILE", verbatim_doc_comment)]
    pub files: Vec<PathBuf>,
    /// The model: one of the names below, a Hugging Face
    /// config.json, or a JSON file of a shape. Without it,
    /// only tokens are counted.
    #[arg(short, long, value_name = "NAME|FILE", verbatim_doc_comment)]
    pub model: Option<PathBuf>,
    /// The machine's rates and memory, a JSON file.
    /// Without it, the report has no seconds.
    #[arg(short = 'M', long, value_name = "FILE", requires = "model", verbatim_doc_comment)]
    pub machine: Option<PathBuf>,
    /// Column of token ids in Parquet and Arrow files.
    #[arg(long, value_name = "NAME", default_value = "input_ids", verbatim_doc_comment)]
    pub column: String,
    /// Maximum rows of a packed microbatch of leaves.
    /// [default: the largest size that fits the machine's
    /// device_bytes, or a smaller one that is predicted
    /// faster; 16384 if device_bytes is unknown]
    #[arg(short = 'b', long, value_name = "N", help_heading = PLAN, verbatim_doc_comment)]
    #[arg(value_parser = value_parser!(u32).range(1..))]
    pub microbatch_rows: Option<u32>,
    /// Maximum shared rows computed at once; longer runs
    /// become chains of blocks. [default: no limit]
    #[arg(long, value_name = "N", help_heading = PLAN, verbatim_doc_comment)]
    #[arg(value_parser = value_parser!(u64).range(1..=TOKENS_MAX))]
    pub block_rows: Option<u64>,
    /// Layers woken ahead of need, at least 2. [default: 3]
    #[arg(long, value_name = "N", help_heading = PLAN, verbatim_doc_comment)]
    #[arg(value_parser = value_parser!(u32).range(1..=LAYERS_MAX.into()))]
    pub window_layers: Option<u32>,
    /// The last layer's output is read on rows that nothing
    /// scores, as by an auxiliary loss or a value head.
    #[arg(long, help_heading = PLAN, verbatim_doc_comment)]
    pub last_layer_live: bool,
    /// Share even if the additional ops take longer than
    /// sharing saves.
    #[arg(long, help_heading = PLAN, verbatim_doc_comment)]
    pub always_share: bool,
    /// Number of ranks to divide the batch over.
    #[arg(short, long, value_name = "N", requires = "model", help_heading = RANKS)]
    #[arg(value_parser = value_parser!(u32).range(1..=RANKS_MAX.into()), verbatim_doc_comment)]
    pub ranks: Option<u32>,
    /// Unit that is never split between ranks. [default: leaf]
    #[arg(long, value_name = "UNIT", requires = "ranks", help_heading = RANKS)]
    #[arg(value_parser = choice(UNITS), verbatim_doc_comment)]
    pub unit: Option<BalanceUnit>,
    /// Allow ranks to exchange K and V of shared prefixes if
    /// that is faster than computing them on each.
    #[arg(long, requires = "ranks", help_heading = RANKS, verbatim_doc_comment)]
    pub exchange: bool,
    /// Ops contain collectives (gathered weights, experts):
    /// all ranks run the same ops, with dummies if needed.
    #[arg(long, requires = "ranks", help_heading = RANKS, verbatim_doc_comment)]
    pub collectives: bool,
    /// Number of pipeline stages. The batch runs as groups:
    /// a prefix, then microbatches of its suffixes. Several
    /// microbatches per group (--microbatch-rows) fill stages.
    #[arg(short, long, value_name = "N", help_heading = STAGES, verbatim_doc_comment)]
    #[arg(requires = "model", requires = "machine")]
    #[arg(value_parser = value_parser!(u32).range(1..=STAGES_MAX.into()))]
    pub stages: Option<u32>,
    /// Parts per stage: 1 is 1F1B, more is interleaved.
    /// [default: 1]
    #[arg(long, value_name = "N", requires = "stages", help_heading = STAGES)]
    #[arg(value_parser = value_parser!(u32).range(1..=VIRTUAL_STAGES_MAX.into()))]
    #[arg(verbatim_doc_comment)]
    pub virtual_stages: Option<u32>,
    /// Chunks per prefix. [default: the number with the
    /// smallest bubble]
    #[arg(long, value_name = "N", requires = "stages", help_heading = STAGES)]
    #[arg(value_parser = value_parser!(u32).range(1..=CHUNKS_MAX.into()), verbatim_doc_comment)]
    pub chunks: Option<u32>,
    /// stream: later prefixes fill the waits of a stage;
    /// groups: one group after another. [default: stream]
    #[arg(long, value_name = "ORDER", requires = "stages", help_heading = STAGES)]
    #[arg(value_parser = choice(ORDERS), verbatim_doc_comment)]
    pub order: Option<PipelineOrder>,
    /// A send blocks its stage until it is received.
    #[arg(long, requires = "stages", help_heading = STAGES, verbatim_doc_comment)]
    pub blocking: bool,
    /// Print the report as JSON instead of a table.
    #[arg(short, long, help_heading = OUTPUT, verbatim_doc_comment)]
    pub json: bool,
    /// Directory for report.json, plan.json, page.html, SVG
    /// pictures, and, with ranks and stages, shares.json
    /// and stages.json.
    #[arg(short, long, value_name = "DIR", requires = "model", help_heading = OUTPUT)]
    #[arg(verbatim_doc_comment)]
    pub out: Option<PathBuf>,
}

/// Parses the arguments after the program's name.
pub(crate) fn parse(
    arguments: impl IntoIterator<Item = OsString>,
) -> Result<Box<PlanArgs>, clap::Error> {
    let all = std::iter::once("dormouse".into()).chain(arguments);
    let Command::Plan(args) = Program::try_parse_from(all)?.command;
    if args.files.iter().filter(|file| file.as_os_str() == STANDARD_INPUT).count() > 1 {
        let text = "standard input is named twice; accepted: - once";
        return Err(Program::command().error(ErrorKind::ArgumentConflict, text));
    }
    Ok(args)
}

/// The text of an error, without usage and hints, on one line.
pub(crate) fn sentence(error: &clap::Error) -> String {
    let text = error.to_string();
    let head = text.split("\n\n").next().unwrap_or(&text);
    let head = head.strip_prefix("error: ").unwrap_or(head);
    head.lines().map(str::trim).collect::<Vec<_>>().join(" ")
}

/// Parses one of several words.
fn choice<T: Copy + Send + Sync + 'static>(
    words: &'static [(&str, T)],
) -> impl TypedValueParser<Value = T> {
    PossibleValuesParser::new(words.iter().map(|(word, _)| *word)).try_map(move |seen| {
        let found = words.iter().find(|(word, _)| *word == seen);
        found.map(|(_, value)| *value).ok_or("unknown")
    })
}

const PLAN_ABOUT: &str = "\
Predicts the cost of a batch of sequences whose shared prefixes run once.

All files together are one batch. A file is JSON lines, Parquet, or Arrow IPC
(file or stream), detected by its first bytes. A pipe accepts JSON lines and
Arrow streams.

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
weight, loss (a position), group and kind.";

fn plan_tail() -> String {
    format!(
        "\
Models known by name:
  {}

A machine is a JSON object with these fields, 0 if unknown: flops_per_s,
device_bytes, sleep_bytes_per_s, wake_bytes_per_s, host_bytes,
nvme_write_bytes_per_s, nvme_read_bytes_per_s, link_bytes_per_s, op_overhead_ns,
prefix_attention_flops_per_s, causal_attention_flops_per_s.
examples/plan contains a machine, models and sequences.

Exit status: 0 if a plan was made, even one that does not pay; 1 if the input was
refused, with the reason on standard error; 2 if the arguments were.",
        model::names()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(arguments: &[&str]) -> Result<Box<PlanArgs>, clap::Error> {
        parse(["plan"].iter().chain(arguments).map(OsString::from))
    }

    /// A value that the flag accepts and that is not its default.
    fn value(flag: &str) -> &'static str {
        match flag {
            "unit" => "group",
            "order" => "groups",
            _ => "7",
        }
    }

    fn plan_command() -> clap::Command {
        Program::command().find_subcommand("plan").unwrap().clone()
    }

    #[test]
    fn every_flag_changes_the_arguments() {
        Program::command().debug_assert();
        // All flags that another flag requires.
        let base = ["f", "--model=m", "--machine=M", "--ranks=2", "--stages=2"];
        let before = parsed(&base).unwrap();
        let command = plan_command();
        let flags: Vec<_> = command.get_opts().collect();
        assert!(flags.len() >= 19, "{}", flags.len());
        for flag in flags {
            let long = flag.get_long().unwrap();
            let mut spellings = vec![format!("--{long}")];
            spellings.extend(flag.get_short().map(|short| format!("-{short}")));
            for spelling in spellings {
                let mut arguments = base.to_vec();
                arguments.push(&spelling);
                if flag.get_action().takes_values() {
                    arguments.push(value(long));
                }
                assert_ne!(parsed(&arguments).unwrap(), before, "{spelling}");
            }
        }
    }

    #[test]
    fn help_fits_a_terminal_and_names_every_flag() {
        let text = plan_command().render_long_help().to_string();
        for flag in plan_command().get_opts() {
            let long = flag.get_long().unwrap();
            assert!(text.contains(&format!("--{long}")), "{long}");
        }
        let program = Program::command().render_long_help().to_string();
        for line in text.lines().chain(program.lines()) {
            assert!(line.chars().count() <= 86, "{line}");
        }
    }

    #[test]
    fn a_flag_without_the_flag_it_requires_is_refused() {
        for (flag, needs) in [
            ("machine", "model"),
            ("ranks", "model"),
            ("stages", "model"),
            ("stages", "machine"),
            ("out", "model"),
            ("unit", "ranks"),
            ("exchange", "ranks"),
            ("collectives", "ranks"),
            ("virtual-stages", "stages"),
            ("chunks", "stages"),
            ("order", "stages"),
            ("blocking", "stages"),
        ] {
            let mut arguments = vec!["f".to_owned()];
            for given in [flag, "model", "machine"] {
                let is_switch = ["exchange", "collectives", "blocking"].contains(&given);
                if given != needs && !arguments.contains(&format!("--{given}")) {
                    arguments.push(format!("--{given}"));
                    arguments.extend((!is_switch).then(|| value(given).to_owned()));
                }
            }
            let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
            let refused = parsed(&arguments).unwrap_err();
            assert_eq!(refused.kind(), ErrorKind::MissingRequiredArgument, "{arguments:?}");
            assert!(sentence(&refused).contains(&format!("--{needs}")), "{}", sentence(&refused));
        }
    }
}
