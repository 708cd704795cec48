//! Measured decoding speed of a worker.

use serde::{Deserialize, Serialize};

use super::RolloutError;
use dormouse_schedule::check_range;

/// Maximum points of a curve.
const POINTS_MAX: u64 = 1 << 12;

/// Decoding speed of one worker by batch size.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Curve {
    /// Batch sizes in sequences, ascending from at least 1.
    pub batches: Vec<u32>,
    /// Total tokens per second at each batch size.
    pub tokens_per_s: Vec<f64>,
}

impl Curve {
    /// Checks that a larger batch never decodes a sequence faster.
    ///
    /// # Errors
    /// [`RolloutError::Curve`] for the first invalid point, [`RolloutError::Count`] for no points or
    /// different numbers of batches and speeds.
    pub fn check(&self) -> Result<(), RolloutError> {
        let points = self.batches.len() as u64;
        check_range("points of a curve", points, 1, POINTS_MAX)?;
        check_range("speeds of a curve", self.tokens_per_s.len() as u64, points, points)?;
        let mut before = (0, f64::INFINITY);
        for (index, (&batch, &tokens_per_s)) in
            self.batches.iter().zip(&self.tokens_per_s).enumerate()
        {
            let each = tokens_per_s / f64::from(batch);
            let faster = tokens_per_s.is_finite() && tokens_per_s > 0.0;
            if batch <= before.0 || !faster || each > before.1 {
                return Err(RolloutError::Curve { index, batch, tokens_per_s });
            }
            before = (batch, each);
        }
        Ok(())
    }

    /// Returns the seconds per token of each of `batch` sequences; the curve must be valid. Speed is linear
    /// between points and constant beyond the last; below the first point, so is the time.
    #[must_use]
    pub fn token_s(&self, batch: u64) -> f64 {
        let at = self.batches.partition_point(|point| u64::from(*point) < batch);
        let each = |index: usize| f64::from(self.batches[index]) / self.tokens_per_s[index];
        if at == 0 {
            return each(0);
        }
        let (batch, last) = (batch as f64, self.tokens_per_s[at - 1]);
        if at == self.batches.len() {
            return batch / last;
        }
        let (from, to) = (f64::from(self.batches[at - 1]), f64::from(self.batches[at]));
        batch / (last + (self.tokens_per_s[at] - last) * (batch - from) / (to - from))
    }

    /// Returns the seconds to decode sequences that start together and leave as they end, given as lengths
    /// with their number of sequences, longest first.
    #[must_use]
    pub fn decode_s(&self, longest_first: &[(u64, u32)]) -> f64 {
        let (mut seconds, mut batch) = (0.0, 0);
        let shorter = longest_first.iter().skip(1).map(|(tokens, _)| *tokens).chain([0]);
        for ((tokens, sequences), next) in longest_first.iter().zip(shorter) {
            batch += u64::from(*sequences);
            seconds += tokens.saturating_sub(next) as f64 * self.token_s(batch);
        }
        seconds
    }
}

/// Returns the time of a worker that decodes such sequences: seconds, or without a curve, where every token
/// takes as long, the tokens of the longest. Sorts them, the longest first.
pub(super) fn busy(curve: Option<&Curve>, lengths: &mut [(u64, u32)]) -> f64 {
    lengths.sort_unstable_by(|one, other| other.cmp(one));
    let longest = || lengths.first().map_or(0.0, |(tokens, _)| *tokens as f64);
    curve.map_or_else(longest, |curve| curve.decode_s(lengths))
}
