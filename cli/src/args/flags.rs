//! The table of flags.

use std::ffi::OsStr;

use dormouse_parallel::balance::{BalanceUnit, RANKS_MAX};
use dormouse_parallel::pipeline::{CHUNKS_MAX, PipelineOrder, STAGES_MAX, VIRTUAL_STAGES_MAX};
use dormouse_schedule::{LAYERS_MAX, TOKENS_MAX};

use super::{PlanArgs, choice, named, number};

/// Sets a value, or says what is accepted.
type Set = fn(&mut PlanArgs, &OsStr) -> Result<(), String>;

/// Whether a flag takes a value, and what becomes of it.
#[derive(Clone, Copy)]
pub(crate) enum Takes {
    Nothing(fn(&mut PlanArgs)),
    Value { name: &'static str, set: Set },
}

/// One flag.
pub(crate) struct Flag {
    pub(crate) section: &'static str,
    pub(crate) long: &'static str,
    pub(crate) short: Option<char>,
    pub(crate) takes: Takes,
    /// Lines of at most 54 characters.
    pub(crate) help: &'static [&'static str],
}

pub(super) fn long(name: &str) -> Option<&'static Flag> {
    FLAGS.iter().find(|flag| flag.long == name)
}

/// The names of all of them, as they are given.
pub(super) fn longs() -> String {
    FLAGS.iter().map(|flag| format!("--{}", flag.long)).collect::<Vec<_>>().join(", ")
}

pub(super) fn short(name: char) -> Option<&'static Flag> {
    FLAGS.iter().find(|flag| flag.short == Some(name))
}

const INPUT: &str = "what is planned";
const PLAN: &str = "the plan";
const RANKS: &str = "data-parallel ranks";
const STAGES: &str = "pipeline stages";
const OUTPUT: &str = "output";

/// Every flag, in the order of `--help`.
pub(crate) const FLAGS: &[Flag] = &[
    Flag {
        section: INPUT,
        long: "model",
        short: Some('m'),
        takes: Takes::Value {
            name: "NAME|FILE",
            set: |args, value| named(value).map(|name| args.model = Some(name)),
        },
        help: &[
            "The model: one of the names below, a Hugging Face",
            "config.json, or a JSON file of a shape. Without it,",
            "only tokens are counted.",
        ],
    },
    Flag {
        section: INPUT,
        long: "machine",
        short: Some('M'),
        takes: Takes::Value {
            name: "FILE",
            set: |args, value| named(value).map(|file| args.machine = Some(file.into())),
        },
        help: &[
            "The machine's rates and memory, a JSON file.",
            "Without it, the report has no seconds.",
        ],
    },
    Flag {
        section: INPUT,
        long: "column",
        short: None,
        takes: Takes::Value {
            name: "NAME",
            set: |args, value| {
                args.column = Some(value.to_str().ok_or("a name in UTF-8")?.to_owned());
                Ok(())
            },
        },
        help: &["Column of token ids in Parquet and Arrow files.", "[input_ids]"],
    },
    Flag {
        section: PLAN,
        long: "microbatch-rows",
        short: Some('b'),
        takes: Takes::Value {
            name: "N",
            set: |args, value| number(value, 1, u32::MAX).map(|n| args.microbatch_rows = n),
        },
        help: &[
            "Maximum rows of a packed microbatch of leaves.",
            "[the largest size that fits the machine's device_bytes,",
            "or a smaller one that is predicted faster; 16384 if",
            "device_bytes is unknown]",
        ],
    },
    Flag {
        section: PLAN,
        long: "block-rows",
        short: None,
        takes: Takes::Value {
            name: "N",
            set: |args, value| number(value, 1, TOKENS_MAX).map(|n| args.block_rows = n),
        },
        help: &[
            "Maximum shared rows computed at once; longer runs",
            "become chains of blocks. [no limit]",
        ],
    },
    Flag {
        section: PLAN,
        long: "window-layers",
        short: None,
        takes: Takes::Value {
            name: "N",
            set: |args, value| number(value, 1, LAYERS_MAX).map(|n| args.window_layers = n),
        },
        help: &["Layers woken ahead of need; the minimum is 2. [3]"],
    },
    Flag {
        section: PLAN,
        long: "last-layer-live",
        short: None,
        takes: Takes::Nothing(|args| args.last_layer_live = true),
        help: &[
            "The last layer's output is read on rows that nothing",
            "scores, as by an auxiliary loss or a value head.",
        ],
    },
    Flag {
        section: PLAN,
        long: "always-share",
        short: None,
        takes: Takes::Nothing(|args| args.always_share = true),
        help: &["Share even if the additional ops take longer than", "sharing saves."],
    },
    Flag {
        section: RANKS,
        long: "ranks",
        short: Some('r'),
        takes: Takes::Value {
            name: "N",
            set: |args, value| number(value, 1, RANKS_MAX).map(|n| args.ranks = n),
        },
        help: &["Number of ranks to divide the batch over."],
    },
    Flag {
        section: RANKS,
        long: "unit",
        short: None,
        takes: Takes::Value {
            name: "WHAT",
            set: |args, value| {
                let words = [
                    ("leaf", BalanceUnit::Leaf),
                    ("group", BalanceUnit::Group),
                    ("tree", BalanceUnit::Tree),
                ];
                choice(value, &words).map(|unit| args.unit = Some(unit))
            },
        },
        help: &["Unit never split between ranks: leaf, group, tree.", "[leaf]"],
    },
    Flag {
        section: RANKS,
        long: "exchange",
        short: None,
        takes: Takes::Nothing(|args| args.exchange = true),
        help: &[
            "Allow ranks to exchange K and V of shared prefixes if",
            "that is faster than computing them on each.",
        ],
    },
    Flag {
        section: RANKS,
        long: "collectives",
        short: None,
        takes: Takes::Nothing(|args| args.collectives = true),
        help: &[
            "Ops contain collectives (gathered weights, experts):",
            "all ranks run the same ops, with dummies if needed.",
        ],
    },
    Flag {
        section: STAGES,
        long: "stages",
        short: Some('s'),
        takes: Takes::Value {
            name: "N",
            set: |args, value| number(value, 1, STAGES_MAX).map(|n| args.stages = n),
        },
        help: &[
            "Number of pipeline stages. The batch runs as groups:",
            "a prefix, then microbatches of its suffixes. Several",
            "microbatches per group (--microbatch-rows) fill stages.",
        ],
    },
    Flag {
        section: STAGES,
        long: "virtual-stages",
        short: None,
        takes: Takes::Value {
            name: "N",
            set: |args, value| {
                number(value, 1, VIRTUAL_STAGES_MAX).map(|n| args.virtual_stages = n)
            },
        },
        help: &["Parts per stage: 1 is 1F1B, more is interleaved. [1]"],
    },
    Flag {
        section: STAGES,
        long: "chunks",
        short: None,
        takes: Takes::Value {
            name: "N",
            set: |args, value| number(value, 1, CHUNKS_MAX).map(|n| args.chunks = n),
        },
        help: &["Chunks per prefix. [the number with the least bubble]"],
    },
    Flag {
        section: STAGES,
        long: "order",
        short: None,
        takes: Takes::Value {
            name: "HOW",
            set: |args, value| {
                let words =
                    [("stream", PipelineOrder::Stream), ("groups", PipelineOrder::GroupByGroup)];
                choice(value, &words).map(|order| args.order = Some(order))
            },
        },
        help: &[
            "stream: later prefixes fill the waits of a stage;",
            "groups: one group after another. [stream]",
        ],
    },
    Flag {
        section: STAGES,
        long: "blocking",
        short: None,
        takes: Takes::Nothing(|args| args.blocking = true),
        help: &["A send blocks its stage until it is received."],
    },
    Flag {
        section: OUTPUT,
        long: "json",
        short: Some('j'),
        takes: Takes::Nothing(|args| args.json = true),
        help: &["Print the report as JSON instead of a table."],
    },
    Flag {
        section: OUTPUT,
        long: "out",
        short: Some('o'),
        takes: Takes::Value {
            name: "DIR",
            set: |args, value| named(value).map(|folder| args.out = Some(folder.into())),
        },
        help: &[
            "Directory for report.json, plan.json, page.html, SVG",
            "pictures, and, with ranks and stages, shares.json",
            "and stages.json.",
        ],
    },
];
