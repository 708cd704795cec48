//! What comes next, by what came next before.

use crate::limits::{EPOCH_DECAY, PATH_SHARE_MIN, REWARD_WEIGHT_MIN, VOTES_MAX};
use crate::prompt::{Extremes, Prompt};

/// How votes are weighed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Weighing {
    /// Each occurrence has the same weight.
    Count,
    /// An occurrence weighs as much as its response: from [`REWARD_WEIGHT_MIN`] for the least reward of the
    /// prompt to 1 more for the greatest, times [`EPOCH_DECAY`] for each epoch before the latest.
    #[default]
    Reward,
}

/// Tokens that may come next.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Draft {
    /// The tokens; none if too few match.
    pub tokens: Vec<u32>,
    /// Number of equal tokens at the end of the sequence and of what was found.
    pub matched_tokens: usize,
}

/// An occurrence that agrees with the draft so far.
#[derive(Clone, Copy, Debug)]
struct Vote {
    position: u32,
    /// End of its response.
    end: u32,
    weight: f32,
}

impl Prompt {
    /// Drafts at most `tokens_max` tokens after `end`, the last tokens of a sequence.
    pub(crate) fn draft(&self, end: &[u32], tokens_max: usize, weighing: Weighing) -> Draft {
        let Some(found) = self.longest_matches(end) else { return Draft::default() };
        let mut votes = self.votes(&found.positions, weighing);
        let all: f32 = votes.iter().map(|it| it.weight).sum();
        let mut tokens = Vec::with_capacity(tokens_max);
        while tokens.len() < tokens_max {
            let Some((token, weight)) = self.most_voted(&votes) else { break };
            if weight < PATH_SHARE_MIN * all {
                break;
            }
            tokens.push(token);
            votes.retain_mut(|it| {
                let agrees = self.next_of(it) == Some(token);
                it.position += 1;
                agrees
            });
        }
        Draft { tokens, matched_tokens: found.tokens }
    }

    fn votes(&self, positions: &[&[u32]], weighing: Weighing) -> Vec<Vote> {
        let count: usize = positions.iter().map(|run| run.len()).sum();
        let step = count.div_ceil(VOTES_MAX).max(1);
        let weigher = self.weigher(weighing);
        let mut votes = Vec::with_capacity(VOTES_MAX);
        // Of the positions of all runs, one after another, each `step`-th.
        let mut before = 0_usize;
        for run in positions {
            let first = before.next_multiple_of(step) - before;
            before += run.len();
            for &position in run.get(first..).unwrap_or_default().iter().step_by(step) {
                if let Some(response) = self.response_of(position) {
                    let weight = weigher(response.reward, response.epoch);
                    votes.push(Vote { position, end: response.end, weight });
                }
            }
        }
        votes
    }

    fn weigher(&self, weighing: Weighing) -> impl Fn(f32, u32) -> f32 {
        let Extremes { least_reward: least, greatest_reward: greatest, latest_epoch } =
            self.extremes;
        move |reward, epoch| match weighing {
            Weighing::Count => 1.0,
            Weighing::Reward => {
                // In f64: the distance of two rewards may be more than an f32 has.
                let over_least = |reward: f32| f64::from(reward) - f64::from(least);
                let span = over_least(greatest);
                let above = if span > 0.0 { (over_least(reward) / span) as f32 } else { 1.0 };
                let age = i32::try_from(latest_epoch - epoch).unwrap_or(i32::MAX);
                (REWARD_WEIGHT_MIN + above) * EPOCH_DECAY.powi(age)
            }
        }
    }

    /// Returns the token with most weight, and its weight; of equals, that of the latest occurrence. `None` if
    /// most of the weight is of responses that end.
    fn most_voted(&self, votes: &[Vote]) -> Option<(u32, f32)> {
        let mut sums: [(Option<u32>, f32, u32); VOTES_MAX] = [(None, 0.0, 0); VOTES_MAX];
        let mut count = 0;
        for vote in votes.iter().take(VOTES_MAX) {
            let next = self.next_of(vote);
            let index = sums[..count].iter().position(|(it, ..)| *it == next).unwrap_or(count);
            count = count.max(index + 1);
            let (token, weight, latest) = &mut sums[index];
            *token = next;
            *weight += vote.weight;
            *latest = vote.position.max(*latest);
        }
        let most = sums[..count].iter().max_by(|a, b| a.1.total_cmp(&b.1).then(a.2.cmp(&b.2)))?;
        Some((most.0?, most.1))
    }

    /// Returns the token of an occurrence; `None` at the end of its response.
    fn next_of(&self, vote: &Vote) -> Option<u32> {
        (vote.position < vote.end)
            .then(|| self.tokens.get(vote.position as usize).copied())
            .flatten()
    }
}
