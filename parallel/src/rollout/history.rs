//! Lengths of earlier responses and predictions from them.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    HISTORY_PROMPTS_MAX, PERMILLE, PROMPT_RESPONSES_MAX, PROMPTS_MAX, ROLLOUTS_MAX, RolloutError,
    RolloutRequest,
};
use dormouse_schedule::{TOKENS_MAX, check_range};

/// Response lengths of one prompt in earlier steps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromptHistory {
    /// The caller's identifier of the prompt.
    pub prompt: u64,
    /// Tokens of its responses per step, oldest step first.
    pub steps: Vec<Vec<u64>>,
}

/// Response lengths of earlier steps.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct History {
    /// Prompts in any order, each once.
    pub prompts: Vec<PromptHistory>,
}

/// Predicts a length as a quantile of the prompt's recent lengths.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LengthPredictor {
    /// Number of recent steps used, at least 1.
    pub last_steps: u32,
    /// The quantile in thousandths (500 is the median), by nearest rank.
    pub quantile_permille: u32,
    /// Predicted length of a new prompt if no prompt of the step is known; otherwise it is the same quantile
    /// of the known prompts' predictions.
    pub unknown_tokens: u64,
}

impl Default for LengthPredictor {
    fn default() -> Self {
        Self { last_steps: 3, quantile_permille: PERMILLE / 2, unknown_tokens: 1 }
    }
}

/// Predicted length of one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Predicted {
    /// Tokens per response.
    pub tokens: u64,
    /// Whether the prompt has a history.
    pub known: bool,
}

impl LengthPredictor {
    /// Predicts the length of each request.
    ///
    /// # Errors
    /// [`RolloutError::Twice`] for a duplicate prompt in the history, [`RolloutError::Count`] for numbers out
    /// of range. Requests may repeat a prompt, as deferred rollouts do.
    pub fn predict(
        &self,
        history: &History,
        requests: &[RolloutRequest],
    ) -> Result<Vec<Predicted>, RolloutError> {
        self.check(requests)?;
        check_range("prompts of a history", history.prompts.len() as u64, 0, HISTORY_PROMPTS_MAX)?;
        let mut known: BTreeMap<u64, u64> = BTreeMap::new();
        for one in &history.prompts {
            let Some(tokens) = self.of_prompt(one)? else { continue };
            if known.insert(one.prompt, tokens).is_some() {
                return Err(RolloutError::Twice { prompt: one.prompt });
            }
        }
        let own = |request: &RolloutRequest| known.get(&request.prompt).copied();
        let others = self.quantile(requests.iter().filter_map(own).collect());
        let unknown = others.unwrap_or(self.unknown_tokens);
        Ok(requests
            .iter()
            .map(|request| Predicted {
                tokens: own(request).unwrap_or(unknown).max(request.begun_tokens),
                known: own(request).is_some(),
            })
            .collect())
    }

    pub(super) fn check(&self, requests: &[RolloutRequest]) -> Result<(), RolloutError> {
        check_range("last_steps", self.last_steps, 1, u32::MAX)?;
        check_range("quantile_permille", self.quantile_permille, 0, PERMILLE)?;
        check_range("unknown_tokens", self.unknown_tokens, 1, TOKENS_MAX)?;
        check_range("prompts", requests.len() as u64, 1, PROMPTS_MAX)?;
        for request in requests {
            check_range("responses of a prompt", request.responses, 1, PROMPT_RESPONSES_MAX)?;
            check_range("prompt_tokens", request.prompt_tokens, 0, TOKENS_MAX)?;
            check_range("begun_tokens", request.begun_tokens, 0, TOKENS_MAX)?;
        }
        let rollouts = requests.iter().map(|request| u64::from(request.responses)).sum();
        Ok(check_range("rollouts", rollouts, 1, ROLLOUTS_MAX)?)
    }

    fn of_prompt(&self, one: &PromptHistory) -> Result<Option<u64>, RolloutError> {
        let recent = self.recent(one);
        for length in recent.iter().flatten() {
            check_range("tokens of an earlier response", *length, 0, TOKENS_MAX)?;
        }
        let skipped = recent.len().saturating_sub(self.last_steps as usize);
        let lengths = recent[skipped..].iter().flatten().copied().collect();
        Ok(self.quantile(lengths).map(|tokens| tokens.max(1)))
    }

    /// Returns the recent steps of a prompt: one more than a prediction reads, so that each is predicted from others.
    fn recent<'a>(&self, one: &'a PromptHistory) -> &'a [Vec<u64>] {
        let count = (self.last_steps as usize).saturating_add(1);
        &one.steps[one.steps.len().saturating_sub(count)..]
    }

    /// Returns the lengths of the recent step `back` before the newest, and their prediction from the other
    /// recent steps. `None` if either has no lengths.
    pub(super) fn held_out<'a>(
        &self,
        one: &'a PromptHistory,
        back: usize,
    ) -> Option<(u64, &'a [u64])> {
        let recent = self.recent(one);
        let held = recent.len().checked_sub(back + 1)?;
        let others = recent.iter().enumerate().filter(|(step, _)| *step != held);
        let tokens = self.quantile(others.flat_map(|(_, lengths)| lengths).copied().collect())?;
        (!recent[held].is_empty()).then_some((tokens.max(1), &recent[held]))
    }

    /// Returns the newest lengths of a prompt, and their own quantile. `None` if it has none.
    pub(super) fn of_step<'a>(&self, one: &'a PromptHistory) -> Option<(u64, &'a [u64])> {
        let lengths = one.steps.iter().rev().find(|lengths| !lengths.is_empty())?;
        self.quantile(lengths.clone()).map(|tokens| (tokens.max(1), &lengths[..]))
    }

    /// Returns the nearest-rank quantile.
    fn quantile(&self, mut values: Vec<u64>) -> Option<u64> {
        values.sort_unstable();
        let rank = (values.len() as u64 * u64::from(self.quantile_permille))
            .div_ceil(PERMILLE.into())
            .max(1);
        values.get(rank as usize - 1).copied()
    }
}
