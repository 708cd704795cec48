//! Ranks prompts by predicted length, cuts them into groups and assigns groups to workers.

use serde::{Deserialize, Serialize};

use super::{
    GroupCut, History, LengthPredictor, PROMPT_RESPONSES_MAX, PROMPTS_MAX, Predicted, RolloutError,
    RolloutRequest, StepOptions, WORKERS_MAX, tier_sizes,
};
use dormouse_schedule::{Span, TOKENS_MAX, bisect, check_range};

/// Prompts of similar length and the workers that generate them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutGroup {
    /// Request numbers, shortest first.
    pub requests: Vec<u32>,
    /// The tier: the range of workers.
    pub workers: Span,
    /// Predicted tokens of all responses.
    pub predicted_tokens: u64,
    /// Predicted tokens of the longest response.
    pub longest_tokens: u64,
}

/// Placement of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedPrompt {
    /// Predicted tokens of each response.
    pub predicted_tokens: u64,
    /// Number of responses.
    pub responses: u32,
    /// Group number.
    pub group: u32,
    /// Worker number.
    pub worker: u32,
}

/// The assignment of one step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// Step number.
    pub step: u64,
    /// Number of workers; some may be idle.
    pub workers: u32,
    /// Groups, shortest first.
    pub groups: Vec<RolloutGroup>,
    /// Placement of each request, by number.
    pub placed: Vec<PlacedPrompt>,
}

impl Assignment {
    /// Assigns a step's requests.
    ///
    /// # Errors
    /// [`RolloutError`] for invalid history or requests, more workers than requests, more groups than workers,
    /// or workers that are no multiple of the groups without a curve.
    pub fn of(
        history: &History,
        requests: &[RolloutRequest],
        predictor: &LengthPredictor,
        options: &StepOptions,
    ) -> Result<Self, RolloutError> {
        let predicted = predictor.predict(history, requests)?;
        let (workers, groups) = (options.workers, options.groups);
        let most = WORKERS_MAX.min(requests.len() as u32);
        check_range("workers", workers, 1, most)?;
        check_range("groups", groups, 1, workers)?;
        let mut ranked: Vec<u32> = (0..requests.len() as u32).collect();
        ranked.sort_unstable_by_key(|&request| (predicted[request as usize].tokens, request));
        let work = |request: u32| {
            predicted[request as usize].tokens * u64::from(requests[request as usize].responses)
        };
        let works: Vec<u64> = ranked.iter().map(|&request| work(request)).collect();
        let cuts = group_cuts(&works, groups as usize, options.cut);
        let grouped: Vec<&[u32]> = cuts.windows(2).map(|cut| &ranked[cut[0]..cut[1]]).collect();
        let sizes = tiers(&grouped, requests, &predicted, options)?;
        let mut assignment = Self { step: options.step, workers, ..Self::default() };
        let nowhere = PlacedPrompt { predicted_tokens: 0, responses: 0, group: 0, worker: 0 };
        assignment.placed.resize(requests.len(), nowhere);
        let mut begin = 0;
        for (members, size) in grouped.into_iter().zip(sizes) {
            let ascending = Span { begin, end: begin + u64::from(size) };
            begin = ascending.end;
            assignment.groups.push(RolloutGroup {
                requests: members.to_vec(),
                workers: mirrored(ascending, options),
                predicted_tokens: members.iter().map(|&request| work(request)).sum(),
                longest_tokens: members
                    .last()
                    .map_or(0, |&request| predicted[request as usize].tokens),
            });
        }
        assignment.place(requests, &predicted);
        Ok(assignment)
    }

    /// Checks an assignment that may come from outside.
    pub(super) fn check(&self) -> Result<(), RolloutError> {
        check_range("workers", self.workers, 1, WORKERS_MAX)?;
        check_range("prompts", self.placed.len() as u64, 1, PROMPTS_MAX)?;
        for one in &self.placed {
            check_range("worker of a prompt", one.worker, 0, self.workers - 1)?;
            check_range("responses of a prompt", one.responses, 1, PROMPT_RESPONSES_MAX)?;
            check_range("predicted tokens", one.predicted_tokens, 0, TOKENS_MAX)?;
        }
        for group in &self.groups {
            check_range("last worker of a group", group.workers.end, 0, self.workers.into())?;
        }
        Ok(())
    }

    /// Deals the prompts of each group to its tier, longest first and in alternating direction, so that
    /// prompts and long prompts are spread evenly.
    fn place(&mut self, requests: &[RolloutRequest], predicted: &[Predicted]) {
        for (number, group) in (0_u32..).zip(&self.groups) {
            let tier = group.workers.count();
            for (turn, &request) in (0_u64..).zip(group.requests.iter().rev()) {
                let (round, slot) = (turn / tier, turn % tier);
                let slot = if round.is_multiple_of(2) { slot } else { tier - 1 - slot };
                self.placed[request as usize] = PlacedPrompt {
                    predicted_tokens: predicted[request as usize].tokens,
                    responses: requests[request as usize].responses,
                    group: number,
                    worker: (group.workers.begin + slot) as u32,
                };
            }
        }
    }
}

/// Mirrors a tier in even steps.
fn mirrored(tier: Span, options: &StepOptions) -> Span {
    if options.step.is_multiple_of(2) {
        let workers = u64::from(options.workers);
        Span { begin: workers - tier.end, end: workers - tier.begin }
    } else {
        tier
    }
}

fn tiers(
    grouped: &[&[u32]],
    requests: &[RolloutRequest],
    predicted: &[Predicted],
    options: &StepOptions,
) -> Result<Vec<u32>, RolloutError> {
    let (workers, groups) = (options.workers, options.groups);
    let Some(curve) = &options.curve else {
        if !workers.is_multiple_of(groups) {
            return Err(RolloutError::Tiers { workers, groups });
        }
        return Ok(vec![workers / groups; groups as usize]);
    };
    let lengths = |request: &u32| {
        (predicted[*request as usize].tokens, requests[*request as usize].responses)
    };
    let groups: Vec<Vec<(u64, u32)>> =
        grouped.iter().map(|members| members.iter().map(lengths).collect()).collect();
    tier_sizes(curve, &groups, workers, options.slope_permille)
}

/// Returns the first prompt of each group, and the end. `works[i]` is the predicted tokens of the i-th
/// prompt by rank; each group has at least one.
fn group_cuts(works: &[u64], groups: usize, cut: GroupCut) -> Vec<usize> {
    match cut {
        GroupCut::EqualCount => (0..=groups).map(|group| group * works.len() / groups).collect(),
        GroupCut::EqualWork => equal_work(works, groups),
    }
}

/// Cuts into nonempty runs whose largest sum is smallest, by binary search over the cap.
fn equal_work(works: &[u64], groups: usize) -> Vec<usize> {
    let largest = works.iter().max().copied().unwrap_or(0);
    let fits = |cap| cuts_within(works, groups, cap).last() == Some(&works.len());
    cuts_within(works, groups, bisect(largest, works.iter().sum(), fits))
}

/// Returns cuts in which each run takes all that fits within `cap`, leaving one for each later run.
fn cuts_within(works: &[u64], groups: usize, cap: u64) -> Vec<usize> {
    let mut cuts = vec![0];
    let mut at = 0;
    for group in 1..=groups {
        let last = works.len() - (groups - group);
        let mut sum = 0;
        while at < last && sum + works[at] <= cap {
            sum += works[at];
            at += 1;
        }
        cuts.push(at);
    }
    cuts
}
