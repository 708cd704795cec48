//! What rollouts have left, as draws from what earlier ones had left.
//!
//! A *case* is an earlier response: its length, and what was predicted from the other steps of its prompt. A
//! rollout goes on as the cases that were longer than it is, and of these as those with the nearest predictions.
//! Where predictions were good, such cases end soon; where lengths had nothing to do with them, they are like all
//! others. A mean of what is left would not do: a worker ends with its last rollout, and the last of several takes
//! longer than each does in the mean.

use super::{
    HISTORY_PROMPTS_MAX, History, LengthPredictor, PERMILLE, PromptHistory, Rollout, RolloutError,
};
use dormouse_schedule::{TOKENS_MAX, check_range};

/// Draws of what a rollout has left; what is predicted to save is their mean.
pub(super) const DRAWS: usize = 16;
/// Cases from which the draws of a rollout are.
const CASES: usize = 64;

/// What is drawn, one of each.
pub(super) type Drawn<T> = [T; DRAWS];

/// Tokens that rollouts have left.
pub(super) struct Remaining {
    /// Prediction and length of each case, by prediction.
    cases: Vec<(u64, u64)>,
    growth_permille: u32,
}

impl Remaining {
    pub(super) fn of(
        history: &History,
        predictor: &LengthPredictor,
        growth_permille: u32,
    ) -> Result<Self, RolloutError> {
        check_range("prompts of a history", history.prompts.len() as u64, 0, HISTORY_PROMPTS_MAX)?;
        for length in history.prompts.iter().flat_map(|one| one.steps.iter().flatten()) {
            check_range("tokens of an earlier response", *length, 0, TOKENS_MAX)?;
        }
        let mut cases: Vec<_> =
            history.prompts.iter().flat_map(|one| cases(one, predictor)).collect();
        cases.sort_unstable();
        Ok(Self { cases, growth_permille })
    }

    /// Returns what a rollout has left. If no case is longer than it, that is what it was predicted, or one token;
    /// without cases, it grows by `growth_permille`.
    pub(super) fn tokens(&self, predicted: u64, rollout: &Rollout) -> Drawn<u64> {
        let tokens = rollout.tokens;
        let mut left: Vec<u64> = self.longer(predicted, tokens).map(|it| it - tokens).collect();
        if left.is_empty() {
            let growth = u128::from(self.growth_permille - PERMILLE);
            let grown = (u128::from(tokens) * growth / u128::from(PERMILLE)) as u64;
            let beyond = if self.cases.is_empty() { grown } else { 1 };
            return [predicted.checked_sub(tokens).filter(|it| *it > 0).unwrap_or(beyond.max(1));
                DRAWS];
        }
        left.sort_unstable();
        let mut draws = [0; DRAWS];
        for (draw, at) in draws.iter_mut().zip(0..) {
            *draw = left[(2 * at + 1) * left.len() / (2 * DRAWS)];
        }
        shuffle(&mut draws, (u64::from(rollout.request) << 32) | u64::from(rollout.response));
        draws
    }

    /// Lengths of the cases longer than `tokens` with the nearest predictions, by rank.
    fn longer(&self, predicted: u64, tokens: u64) -> impl Iterator<Item = u64> {
        let below = self.cases.partition_point(|(it, _)| *it < predicted);
        let equal = self.cases[below..].partition_point(|(it, _)| *it == predicted);
        let (before, after) = self.cases.split_at(below + equal / 2);
        let longer = move |(_, length): &&(u64, u64)| *length > tokens;
        let mut before =
            before.iter().rev().zip(1_usize..).filter(move |(it, _)| longer(it)).peekable();
        let mut after = after.iter().zip(1_usize..).filter(move |(it, _)| longer(it)).peekable();
        let nearest = move || match (before.peek(), after.peek()) {
            (Some((_, one)), Some((_, other))) if one < other => before.next(),
            (_, Some(_)) => after.next(),
            _ => before.next(),
        };
        std::iter::from_fn(nearest).take(CASES).map(|((_, length), _)| *length)
    }
}

/// Each recent response of a prompt with its prediction from the other steps; of a single step, from its own.
fn cases(one: &PromptHistory, predictor: &LengthPredictor) -> Vec<(u64, u64)> {
    let back = 0..one.steps.len().min(predictor.last_steps as usize + 1);
    let held = back.filter_map(|back| predictor.held_out(one, back));
    let of = |(predicted, lengths): (u64, &[u64])| -> Vec<_> {
        lengths.iter().map(|length| (predicted, *length)).collect()
    };
    let cases: Vec<_> = held.flat_map(of).collect();
    let own = || predictor.of_step(one).map_or_else(Vec::new, of);
    if cases.is_empty() { own() } else { cases }
}

/// Shuffles draws, in the same way for the same seed: those of two rollouts have nothing to do with each other.
fn shuffle(draws: &mut Drawn<u64>, seed: u64) {
    let mut state = seed;
    for last in (1..DRAWS).rev() {
        // splitmix64.
        state = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = (state ^ (state >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        draws.swap(last, ((mixed ^ (mixed >> 31)) % (last as u64 + 1)) as usize);
    }
}
