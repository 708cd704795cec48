//! Two steps of rollouts, with the lengths that earlier ones predict: who takes which share, and how long each
//! worker is busy. Each file is one earlier step; a step has every prompt, with the responses of its last file.

use dormouse_parallel::rollout::{
    Assignment, History, LengthPredictor, PromptHistory, RolloutRequest, StepOptions,
};

use super::report::{RolloutWorkerReport, RolloutsReport};
use crate::{Error, Sequences};

/// Assigns a step to workers. `ends`: sequences up to the end of each file.
pub(super) fn report(
    sequences: &Sequences,
    ends: &[usize],
    workers: u32,
) -> Result<RolloutsReport, Error> {
    let groups = sequences.groups();
    if groups.is_empty() {
        return Err(Error::NoGroups { with: "--rollout-workers" });
    }
    let prompts = groups.iter().max().map_or(0, |last| *last as usize + 1);
    let mut history: Vec<PromptHistory> =
        (0..prompts as u64).map(|prompt| PromptHistory { prompt, steps: Vec::new() }).collect();
    let mut begin = 0;
    for &end in ends {
        let mut step = vec![Vec::new(); prompts];
        for (group, tokens) in
            groups[begin..end].iter().zip(&sequences.response_tokens()[begin..end])
        {
            step[*group as usize].push(*tokens);
        }
        for (one, lengths) in history.iter_mut().zip(step) {
            one.steps.extend((!lengths.is_empty()).then_some(lengths));
        }
        begin = end;
    }
    let request = |one: &PromptHistory| RolloutRequest {
        prompt: one.prompt,
        responses: one.steps.last().map_or(0, Vec::len) as u32,
        ..RolloutRequest::default()
    };
    let requests: Vec<RolloutRequest> = history.iter().map(request).collect();
    // Odd steps ascend: the last share is the longest.
    let options = StepOptions { step: 1, workers, ..StepOptions::default() };
    let history = History { prompts: history };
    let step = Assignment::of(&history, &requests, &LengthPredictor::default(), &options)?;
    Ok(two_steps(&step, ends.len() as u64))
}

/// Both steps have the same shares. The worker that ends the first step earliest takes the longest of the second.
fn two_steps(step: &Assignment, earlier_steps: u64) -> RolloutsReport {
    let mut shares = vec![RolloutWorkerReport::default(); step.workers as usize];
    for one in &step.placed {
        let share = &mut shares[one.worker as usize];
        share.groups = [one.group; 2];
        share.tokens = [share.tokens[0].max(one.predicted_tokens); 2];
    }
    let mut free: Vec<usize> = (0..shares.len()).collect();
    free.sort_by_key(|worker| shares[*worker].tokens[0]);
    let mut workers = shares.clone();
    for (worker, share) in free.iter().zip(free.iter().rev()) {
        workers[*worker].groups[1] = shares[*share].groups[0];
        workers[*worker].tokens[1] = shares[*share].tokens[0];
    }
    let busy = |one: &RolloutWorkerReport| one.tokens.iter().sum::<u64>();
    let longest = shares.iter().map(|share| share.tokens[0]).max().unwrap_or(0);
    RolloutsReport {
        earlier_steps,
        prompts: step.placed.len() as u64,
        responses: step.placed.iter().map(|one| u64::from(one.responses)).sum(),
        groups: step.groups.len() as u64,
        tokens: workers.iter().map(busy).max().unwrap_or(0),
        same_order_tokens: 2 * longest,
        workers,
    }
}
