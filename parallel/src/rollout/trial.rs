//! Trials: recent steps of the history, each predicted from the others.
//!
//! A trial has the errors that predictions have had, so that a choice that only right predictions make good
//! does not win in it.

use std::collections::BTreeMap;

use super::{History, LengthPredictor, Predicted, PromptHistory, RolloutRequest};

/// One step of the history, as the requests of a step to assign.
pub(super) struct Trial {
    /// Predicted tokens of each request.
    pub predicted: Vec<u64>,
    /// The lengths that its responses took.
    pub lengths: Vec<Vec<u64>>,
}

impl Trial {
    /// Returns the trials of the recent steps, newest first: those in which at least half the requests have a
    /// length, and lengths in another step to predict it from. The other requests take what is predicted.
    pub(super) fn all(
        predictor: &LengthPredictor,
        history: &History,
        requests: &[RolloutRequest],
        predicted: &[Predicted],
    ) -> Vec<Self> {
        let steps: BTreeMap<u64, &PromptHistory> =
            history.prompts.iter().map(|one| (one.prompt, one)).collect();
        let longest = steps.values().map(|one| one.steps.len()).max().unwrap_or(0);
        let recent = longest.min(predictor.last_steps as usize);
        let trial = |back| {
            let (mut trial, mut tried) = (Self::with_capacity(requests.len()), 0);
            for (request, predicted) in requests.iter().zip(predicted) {
                let one = steps.get(&request.prompt);
                let held = one.and_then(|one| predictor.held_out(one, back));
                tried += usize::from(held.is_some());
                let as_predicted =
                    || (predicted.tokens, vec![predicted.tokens; request.responses as usize]);
                let (tokens, lengths) = held.map_or_else(as_predicted, |(tokens, lengths)| {
                    let every = lengths.iter().copied().cycle().take(request.responses as usize);
                    (tokens, every.collect())
                });
                trial.predicted.push(tokens);
                trial.lengths.push(lengths);
            }
            (2 * tried >= requests.len()).then_some(trial)
        };
        (0..recent).filter_map(trial).collect()
    }

    fn with_capacity(requests: usize) -> Self {
        Self { predicted: Vec::with_capacity(requests), lengths: Vec::with_capacity(requests) }
    }
}
