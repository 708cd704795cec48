//! Arguments of `dormouse plan`.

use std::path::PathBuf;

use clap::{Args, value_parser};
use dormouse_parallel::balance::{BalanceUnit, RANKS_MAX};
use dormouse_parallel::pipeline::{CHUNKS_MAX, PipelineOrder, STAGES_MAX, VIRTUAL_STAGES_MAX};
use dormouse_parallel::rollout::WORKERS_MAX;
use dormouse_schedule::{LAYERS_MAX, TOKENS_MAX};

use super::choice;
use crate::model;
use crate::text::wrapped;

const FILES: &str = "Columns";
const PLAN: &str = "Plan";
const RANKS: &str = "Data-parallel ranks";
const STAGES: &str = "Pipeline stages";
const ROLLOUTS: &str = "Rollouts";
const OUTPUT: &str = "Output";
/// Width of the list of models.
const TAIL_WIDTH: usize = 76;

const UNITS: &[(&str, BalanceUnit)] =
    &[("leaf", BalanceUnit::Leaf), ("group", BalanceUnit::Group), ("tree", BalanceUnit::Tree)];
const ORDERS: &[(&str, PipelineOrder)] =
    &[("stream", PipelineOrder::Stream), ("groups", PipelineOrder::GroupByGroup)];

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
    /// Column or field of token ids.
    /// [default: input_ids; in JSON lines also ids]
    #[arg(long, value_name = "NAME", help_heading = FILES, verbatim_doc_comment)]
    pub column: Option<String>,
    /// Column or field of a prompt's ids, if they are apart
    /// from the response's. [default: prompt_ids]
    #[arg(long, value_name = "NAME", help_heading = FILES, verbatim_doc_comment)]
    #[arg(conflicts_with = "column")]
    pub prompt_column: Option<String>,
    /// Column or field of the response's ids.
    /// [default: response_ids]
    #[arg(long, value_name = "NAME", help_heading = FILES, verbatim_doc_comment)]
    #[arg(conflicts_with = "column")]
    pub response_column: Option<String>,
    /// Column or field of 0 or 1 for each token, or each of
    /// the response: those that carry loss. [default: none]
    #[arg(long, value_name = "NAME", help_heading = FILES, verbatim_doc_comment)]
    pub loss_mask_column: Option<String>,
    /// Column or field of your name of a sequence, a number
    /// or a string, for files in --out. [default: none]
    #[arg(long, value_name = "NAME", help_heading = FILES, verbatim_doc_comment)]
    pub id_column: Option<String>,
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
    #[arg(value_parser = value_parser!(u32).range(2..=LAYERS_MAX.into()))]
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
    /// Draw two steps of rollouts on N workers. Each file has
    /// the responses of one earlier step, by group, from which
    /// the lengths of the next ones are predicted.
    #[arg(long, value_name = "N", help_heading = ROLLOUTS, verbatim_doc_comment)]
    #[arg(value_parser = value_parser!(u32).range(1..=WORKERS_MAX.into()))]
    pub rollout_workers: Option<u32>,
    /// Print the report as JSON instead of a table.
    #[arg(short, long, help_heading = OUTPUT, verbatim_doc_comment)]
    pub json: bool,
    /// Directory for report.json, plan.json, page.html, SVG
    /// pictures, a file rank-N.plan for each rank, which
    /// dormouse.RankPlan.load reads, and, with ranks and
    /// stages, shares.json and stages.json. Plans of ranks that
    /// this run does not have are removed.
    #[arg(short, long, value_name = "DIR", requires = "model", help_heading = OUTPUT)]
    #[arg(verbatim_doc_comment)]
    pub out: Option<PathBuf>,
}

pub(super) const ABOUT: &str = "\
Predicts the cost of a batch of sequences whose shared prefixes run once.

All files together are one batch. A file is JSON lines, also compressed by gzip,
Parquet, or Arrow IPC (file or stream), detected by its first bytes. A pipe
accepts JSON lines and Arrow streams.

JSON lines have one object per line:
  {\"ids\": [5, 9, 3]}                          token ids (or input_ids),
  {\"prompt_ids\": [5, 9], \"response_ids\": [3]} in two parts, or
  {\"length\": 90, \"prompt_length\": 60, \"group\": 7}
      lengths only: the sequences of a group share its prompt.
Optional fields: weight, in the loss (1); loss, the position of the first
label that carries loss, or spans [[60, 70], [80, 90]] (the response if there
is a prompt, else all but the first token); group, a number or a string; kind, a
number: sequences of different kinds share nothing. Other fields are ignored.

Parquet and Arrow files have a column of lists of integers, or one of prompts and
one of responses, and optional columns weight, loss (a position), group and kind.";

pub(super) fn tail() -> String {
    let names: Vec<&str> = model::names().collect();
    let names = wrapped(&names.join(", "), TAIL_WIDTH).join("\n  ");
    format!(
        "\
Models known by name:
  {names}

A config.json is one of llama, qwen2, qwen3, mixtral, qwen2_moe, qwen3_moe, olmoe,
gpt_oss, deepseek_v2 or deepseek_v3.

A machine is a JSON object with these fields, 0 if unknown: flops_per_s,
device_bytes, sleep_bytes_per_s, wake_bytes_per_s, host_bytes,
nvme_write_bytes_per_s, nvme_read_bytes_per_s, link_bytes_per_s, op_overhead_ns,
prefix_attention_flops_per_s, causal_attention_flops_per_s.
examples/plan contains a machine, models and sequences.

Exit status: 0 if a plan was made, even one that does not pay; 1 if the input was
refused, with the reason on standard error; 2 if the arguments were."
    )
}
