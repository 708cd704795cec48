//! `dormouse plan`: sequences to a report, through `schedule/` and `parallel/`.

mod bars;
mod figures;
mod flat;
mod forest;
mod memory;
mod out;
mod ranks;
mod report;
mod rollouts;
mod stages;
mod tree_picture;

use std::fs;
use std::path::Path;

use dormouse_parallel::balance::BalanceError;
use dormouse_parallel::pipeline::PipelineError;
use dormouse_schedule::{Machine, ModelShape, Plan, PlanError, PlanOptions};
use serde_json::Value;

pub(crate) use flat::TOKENS_MIN as STAGED_TOKENS_MIN;
pub use report::{
    BatchReport, OpCounts, PipelineReport, PlanReport, RankReport, RanksReport, Report,
    ResidencyCounts, RolloutWorkerReport, RolloutsReport,
};

use crate::files::{fields, object};
use crate::progress::Progress;
use crate::read::{Names, read_with};
use crate::sequences::Described;
use crate::text::as_json;
use crate::{DescriptionError, Error, Model, PlanArgs, Sequences, VOCAB_MAX};

/// Rows of a microbatch if neither given nor limited by the machine's memory.
const MICROBATCH_ROWS: u32 = 1 << 14;

/// The results, for the report and for files.
#[derive(Debug)]
struct Made {
    report: Report,
    described: Described,
    /// Tokens of each sequence.
    tokens: Vec<u64>,
    /// A picture of the trees in text.
    trees: Vec<String>,
    plan: Option<Plan>,
    ranks: Option<ranks::Ranks>,
    stages: Option<stages::Staged>,
    /// A picture of memory over time.
    memory: Option<String>,
}

/// Input of a plan other than the batch.
#[derive(Clone, Copy, Debug)]
struct Setting<'a> {
    args: &'a PlanArgs,
    model: &'a Model,
    machine: Option<Machine>,
}

/// Plans, writes the output files if requested, and returns the text to print.
pub(crate) fn run(args: &PlanArgs) -> Result<String, Error> {
    let model = args.model.as_deref().map(Model::find).transpose()?;
    let machine = args.machine.as_deref().map(machine).transpose()?;
    let vocab = model.as_ref().map_or(VOCAB_MAX, |model| model.vocab);
    let progress = Progress::new("reading", args.json);
    let mut sequences = Sequences::new(vocab);
    let mut ends = Vec::with_capacity(args.files.len());
    for file in &args.files {
        let bytes = fs::metadata(file).map_or(0, |it| it.len());
        progress.begin_file("reading", bytes);
        read_with(file, &args.names(), &mut sequences, &progress)?;
        ends.push(sequences.count());
    }
    progress.begin("planning");
    let made =
        make(args, model, machine, sequences, &ends).map_err(|error| in_file(error, args))?;
    drop(progress);
    let mut text =
        if args.json { as_json(&made.report)? } else { figures::table(&made.report, &made.trees) };
    if let Some(folder) = &args.out {
        let out::Written { page, removed } = out::write(folder, &made)?;
        if !args.json {
            text.push_str(&format!("\nwrote {}\n", folder.display()));
            for file in removed {
                text.push_str(&format!("removed {} of an earlier run\n", file.display()));
            }
            text.push_str(&format!("next: open {} in a browser\n", page.display()));
        }
    }
    Ok(text)
}

/// Reads a machine from a file; missing fields are 0.
fn machine(file: &Path) -> Result<Machine, DescriptionError> {
    let object = object(file, "a file of rates, such as examples/plan/machine.json")?;
    fields(file, object, &Machine::default())
}

/// Adds the file to the error of a number that a file contains.
fn in_file(error: Error, args: &PlanArgs) -> Error {
    let (what, seen, accepted) = match &error {
        Error::Plan(PlanError::Count { what, seen, accepted })
        | Error::Balance(BalanceError::Plan(PlanError::Count { what, seen, accepted }))
        | Error::Pipeline(PipelineError::Count(PlanError::Count { what, seen, accepted })) => {
            (*what, *seen, accepted.clone())
        }
        _ => return error,
    };
    let has = |fields: serde_json::Result<Value>| fields.is_ok_and(|it| it.get(what).is_some());
    let of_machine = args.machine.as_ref();
    let file = of_machine.filter(|_| has(serde_json::to_value(Machine::default())));
    let of_model =
        || args.model.as_ref().filter(|_| has(serde_json::to_value(ModelShape::default())));
    let Some(file) = file.or_else(of_model) else { return error };
    let (file, what, seen) = (file.display().to_string(), what.to_owned(), seen.to_string());
    DescriptionError::Value { file, what, seen, accepted }.into()
}

fn make(
    args: &PlanArgs,
    model: Option<Model>,
    machine: Option<Machine>,
    sequences: Sequences,
    ends: &[usize],
) -> Result<Made, Error> {
    let vocab = model.as_ref().map_or(VOCAB_MAX, |model| model.vocab);
    let forest = forest::of(&sequences, vocab)?;
    let rollouts = args.rollout_workers.map(|workers| rollouts::report(&sequences, ends, workers));
    let described = sequences.without_tokens();
    let (scoring, groups) = (&described.scoring[..], &described.groups[..]);
    let mut made = Made {
        report: Report::of(&forest, groups),
        described: Described::default(),
        tokens: forest.endings().iter().map(|ending| ending.tokens).collect(),
        trees: tree_picture::lines(&forest),
        plan: None,
        ranks: None,
        stages: None,
        memory: None,
    };
    made.report.rollouts = rollouts.transpose()?;
    let Some(model) = model else { return Ok(made) };
    let setting = Setting { args, model: &model, machine };
    let plan = Plan::new(&forest, scoring, &setting.options())?;
    made.report.plan = Some(PlanReport::of(&plan));
    if let Some(ranks) = args.ranks {
        let batch = ranks::Batch { forest: &forest, scoring, groups };
        let divided = ranks::Ranks::new(&setting, ranks, &batch, &plan)?;
        made.report.ranks = Some(divided.report(&plan));
        made.ranks = Some(divided);
    }
    if let Some(stages) = args.stages {
        let staged = stages::stages(&setting, stages, &forest, plan.microbatch_rows())?;
        made.report.pipeline = Some(staged.report()?);
        made.stages = Some(staged);
    }
    if args.out.is_some() {
        made.memory = memory::picture(&setting, &plan)?;
    }
    made.plan = Some(plan);
    made.described = described;
    made.report.model = Some(model);
    made.report.machine = machine;
    Ok(made)
}

impl PlanArgs {
    /// Returns the names of the fields and columns to read.
    fn names(&self) -> Names {
        Names {
            ids: self.column.clone(),
            prompt: self.prompt_column.clone(),
            response: self.response_column.clone(),
            loss_mask: self.loss_mask_column.clone(),
            id: self.id_column.clone(),
        }
    }
}

impl Setting<'_> {
    fn options(&self) -> PlanOptions {
        let args = self.args;
        let device_known = self.machine.is_some_and(|machine| machine.device_bytes > 0);
        let default_rows = if device_known { 0 } else { MICROBATCH_ROWS };
        PlanOptions {
            vocab: self.model.vocab,
            microbatch_rows: args.microbatch_rows.unwrap_or(default_rows),
            block_rows: args.block_rows.unwrap_or(0),
            wake_window_layers: args.window_layers.unwrap_or(0),
            last_layer_dead: !args.last_layer_live,
            always_share: args.always_share,
            model: self.model.shape,
            machine: self.machine,
            ..PlanOptions::default()
        }
    }
}
