//! Ranking prompts, cutting groups, and giving them to workers.

use serde::{Deserialize, Serialize};

use super::{
    History, LengthPredictor, PROMPT_RESPONSES_MAX, PROMPTS_MAX, Predicted, RolloutError,
    RolloutRequest, StepOptions, WORKERS_MAX, groups, tier_sizes,
};
use dormouse_schedule::Span;
use dormouse_schedule::TOKENS_MAX;
use dormouse_schedule::check_range;

/// Prompts of similar length, and the workers that generate them.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RolloutGroup {
    /// Its requests, by number, shortest first.
    pub requests: Vec<u32>,
    /// Its tier.
    pub workers: Span,
    /// Predicted tokens of all its responses.
    pub predicted_tokens: u64,
    /// Predicted tokens of its longest.
    pub longest_tokens: u64,
}

/// Placement of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlacedPrompt {
    /// Predicted tokens of each response.
    pub predicted_tokens: u64,
    /// Responses.
    pub responses: u32,
    /// Group number.
    pub group: u32,
    /// Which worker.
    pub worker: u32,
}

/// One step.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Assignment {
    /// Number of the step.
    pub step: u64,
    /// Workers, some of which may have nothing.
    pub workers: u32,
    /// Groups, shortest first.
    pub groups: Vec<RolloutGroup>,
    /// Each request, by number.
    pub placed: Vec<PlacedPrompt>,
}

impl Assignment {
    /// Assigns a step's requests.
    ///
    /// # Errors
    /// [`RolloutError`]: history or requests that do not hold, more workers than requests, more groups than
    /// workers, workers that groups do not divide and no curve to divide them by.
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
        let cuts = groups::cuts(&works, groups as usize, options.cut);
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

    /// Refuses one that was read from elsewhere and does not hold together.
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

    /// Deals each group to its tier: the longest first, there and back, so that no worker has more
    /// than its share of prompts or of the long ones.
    fn place(&mut self, requests: &[RolloutRequest], predicted: &[Predicted]) {
        for (number, group) in (0_u32..).zip(&self.groups) {
            let tier = group.workers.count();
            for (turn, &request) in (0_u64..).zip(group.requests.iter().rev()) {
                let (round, seat) = (turn / tier, turn % tier);
                let seat = if round.is_multiple_of(2) { seat } else { tier - 1 - seat };
                self.placed[request as usize] = PlacedPrompt {
                    predicted_tokens: predicted[request as usize].tokens,
                    responses: requests[request as usize].responses,
                    group: number,
                    worker: (group.workers.begin + seat) as u32,
                };
            }
        }
    }
}

/// Odd steps ascend; even steps are their mirror image.
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
