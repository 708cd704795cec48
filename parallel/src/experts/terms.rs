//! What is captured, added up and fed back.

use serde::{Deserialize, Serialize};

use super::{ExpertsError, Formula};
use dormouse_schedule::check_range;
use dormouse_schedule::{NodeId, Span};

/// Rows of one node whose statistics are captured together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Portion {
    /// Which node.
    pub node: NodeId,
    /// Positions of its rows. The last of a sequence that ends at the node's end is one past the
    /// node's own rows.
    pub rows: Span,
    /// Sequences of the batch that feed them: their weight in metrics and expert biases.
    pub copies: u64,
    /// Their weight in the z-loss: the loss is `Σ rows z_weight · z`, in each router layer.
    pub z_weight: f64,
}

/// One portion a scope reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Read {
    /// Which portion.
    pub portion: u32,
    /// Sequences of the scope that feed it: the factor of its C and its R.
    pub copies: u32,
}

/// One scope, as the microbatch that runs it adds it up.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScopeTerms {
    /// Which scope of the baseline.
    pub scope: u32,
    /// The microbatch its sequences end in.
    pub microbatch: u32,
    /// M, the dense run's tokens.
    pub tokens: u64,
    /// w: the baseline's, or of a part its share of it by tokens.
    pub weight: f64,
    /// `w λ E`.
    pub loss_scale: f64,
    /// Factor from weighted count C to f.
    pub count_scale: f64,
    /// Factor from weighted sum R to P.
    pub probability_scale: f64,
    /// Portions it reads.
    pub reads: Vec<Read>,
}

/// What the last layer still runs on prefix rows that carry no loss (docs/method.md §4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LastLayer {
    /// Its K and V alone.
    Dead,
    /// Forward up to its router, for counts; no backward but that of K and V.
    ForwardToRouter,
    /// Forward and backward up to its router; experts, final norm and head are dead.
    LiveToRouter,
}

/// Which statistics to capture, what microbatches add up, and what goes back.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accounting {
    /// The formula.
    pub formula: Formula,
    /// Numbers of one statistic: router layers …
    pub layers: u32,
    /// … × experts.
    pub experts: u32,
    /// Whether counts C are captured.
    pub counts: bool,
    /// Whether sums R are captured, each a boundary leaf whose gradient goes back in C.
    pub sums: bool,
    /// Every portion, node after node.
    pub portions: Vec<Portion>,
    /// Every scope, in order; parts of one in the order of microbatches.
    pub scopes: Vec<ScopeTerms>,
    /// What the last layer computes for prefix rows.
    pub last_layer: LastLayer,
}

impl Accounting {
    /// The gradient of a scope's loss by its weighted sums R, from its weighted counts C: both
    /// router layer by router layer, expert by expert. For [`Formula::RunningCounts`] the counts are
    /// those of all microbatches up to this one, on all ranks. The loss is the sum of products of
    /// coefficients and R; a row of a portion gets `copies` times its coefficient.
    ///
    /// `index` counts in [`Accounting::scopes`].
    ///
    /// # Errors
    /// [`ExpertsError::Count`] for an index that is not there, or counts that are not layers ×
    /// experts.
    pub fn coefficients(&self, index: u32, counts: &[f64]) -> Result<Vec<f64>, ExpertsError> {
        let wanted = u64::from(self.layers) * u64::from(self.experts);
        check_range("counts", counts.len() as u64, wanted, wanted)?;
        check_range("scopes up to this one", u64::from(index) + 1, 1, self.scopes.len() as u64)?;
        let terms = &self.scopes[index as usize];
        let scale = terms.loss_scale * terms.count_scale * terms.probability_scale;
        let experts = self.experts.max(1) as usize;
        match self.formula {
            Formula::Switch | Formula::RunningCounts { .. } => {
                Ok(counts.iter().map(|count| scale * count).collect())
            }
            Formula::PooledLayers => {
                let mut pooled = vec![0.0; experts];
                for layer in counts.chunks(experts) {
                    pooled.iter_mut().zip(layer).for_each(|(sum, count)| *sum += count);
                }
                Ok((0..counts.len()).map(|at| scale * pooled[at % experts]).collect())
            }
        }
    }
}
