//! Readable steps: `tests/testdata/rollout/`.

use std::fmt::Write as _;

use dormouse_parallel::rollout::{
    Assignment, Destination, GroupCut, History, LengthPredictor, MigrationOptions, Progress,
    PromptHistory, Rollout, RolloutReport, RolloutRequest, StepOptions, migrate,
};

use crate::rollout::curve;
use crate::{lines, number, scenarios};

#[test]
fn rollout_scenarios() {
    scenarios("rollout", 6, run);
}

#[derive(Default)]
struct Input {
    history: History,
    requests: Vec<RolloutRequest>,
    predictor: LengthPredictor,
    options: StepOptions,
    migration: MigrationOptions,
    /// RolloutRequest, response, tokens, finished.
    progress: Vec<(u32, u32, u64, bool)>,
}

fn parse(input: &str) -> Input {
    let mut all = Input::default();
    all.options.step = 1;
    all.options.slope_permille = Some(0);
    for (key, words) in lines(input) {
        match key {
            "step" => all.options.step = number(&words, 0),
            "workers" => all.options.workers = number(&words, 0),
            "groups" => all.options.groups = Some(number(&words, 0)),
            "equal_work" => all.options.cut = GroupCut::EqualWork,
            "curve" => all.options.curve = Some(curve()),
            "slope" => all.options.slope_permille = Some(number(&words, 0)),
            "quantile" => all.predictor.quantile_permille = number(&words, 0),
            "unknown" => all.predictor.unknown_tokens = number(&words, 0),
            "tail" => all.migration.tail_permille = number(&words, 0),
            "prompt" => prompt(&mut all, &words),
            "progress" => {
                let done = words.get(3) == Some(&"done");
                let one = (number(&words, 0), number(&words, 1), number(&words, 2), done);
                all.progress.push(one);
            }
            other => panic!("unknown line {other:?}"),
        }
    }
    all
}

/// `NAME RESPONSES took LENGTHS/LENGTHS…`, `… new`, or `… begun TOKENS`.
fn prompt(all: &mut Input, words: &[&str]) {
    let prompt = number(words, 0);
    let mut request =
        RolloutRequest { prompt, responses: number(words, 1), prompt_tokens: 100, begun_tokens: 0 };
    match words[2] {
        "took" => {
            let step = |step: &str| step.split(',').map(|length| length.parse().unwrap()).collect();
            let steps = words[3].split('/').map(step).collect();
            all.history.prompts.push(PromptHistory { prompt, steps });
        }
        "begun" => request.begun_tokens = number(words, 3),
        _ => {}
    }
    all.requests.push(request);
}

fn run(input: &str) -> String {
    let all = parse(input);
    let step = match Assignment::of(&all.history, &all.requests, &all.predictor, &all.options) {
        Ok(step) => step,
        Err(error) => return format!("refused: {error}\n"),
    };
    let mut text = String::new();
    for group in &step.groups {
        write!(
            text,
            "workers {}..{}, {} tokens, longest {}:",
            group.workers.begin, group.workers.end, group.predicted_tokens, group.longest_tokens
        )
        .unwrap();
        for request in &group.requests {
            let placed = step.placed[*request as usize];
            let prompt = all.requests[*request as usize].prompt;
            write!(text, " {prompt} ({}) on {}", placed.predicted_tokens, placed.worker).unwrap();
        }
        text.push('\n');
    }
    if !all.progress.is_empty() {
        moves(&mut text, &all, &step);
    }
    text
}

fn moves(text: &mut String, all: &Input, step: &Assignment) {
    let rollout = |&(request, response, tokens, finished): &(u32, u32, u64, bool)| {
        let worker = step.placed[request as usize].worker;
        Rollout { request, response, worker, tokens, finished }
    };
    let progress =
        Progress { rollouts: all.progress.iter().map(rollout).collect(), ..Progress::default() };
    for one in migrate(step, &all.requests, &History::default(), &progress, &all.migration).unwrap()
    {
        let to = match one.to {
            Destination::Worker(worker) => format!("moves from {} to worker {worker}", one.from),
            Destination::NextStep => format!("waits for the next step, leaving {}", one.from),
        };
        writeln!(
            text,
            "response {} of request {} at {} tokens {to}, {} computed again",
            one.response, one.request, one.tokens, one.recompute_tokens
        )
        .unwrap();
    }
    let report = RolloutReport::of(step, &progress, all.options.curve.as_ref(), 300).unwrap();
    for (number, one) in report.workers.iter().enumerate() {
        writeln!(
            text,
            "worker {number}: {} tokens of {} predicted, idle {:.3}",
            one.actual_tokens, one.predicted_tokens, one.idle_share
        )
        .unwrap();
    }
    writeln!(
        text,
        "imbalance {:.3} of {:.3} predicted, idle {:.3}, ranks moved {:.3}, strongly {:.3}",
        report.actual_imbalance,
        report.predicted_imbalance,
        report.idle_share,
        report.rank_shift.mean,
        report.rank_shift.strong_share
    )
    .unwrap();
}
