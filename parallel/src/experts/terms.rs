//! Result of router accounting.

use serde::{Deserialize, Serialize};

use super::{ExpertsError, Formula};
use dormouse_schedule::{NodeId, Span, check_range};

/// Rows of one node whose statistics are captured together.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Portion {
    /// Node number.
    pub node: NodeId,
    /// Positions of its rows. The last row of a sequence that ends with the node lies after the node's rows.
    pub rows: Span,
    /// Number of sequences that use them: their weight in metrics and expert biases.
    pub copies: u64,
    /// Weight in the z-loss `Σ rows z_weight · z` of each router layer.
    pub z_weight: f64,
}

/// A portion that a scope reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Read {
    /// Portion number.
    pub portion: u32,
    /// Number of the scope's sequences that use it: the factor of its C and R.
    pub copies: u32,
}

/// The terms that a microbatch sums for a scope.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ScopeTerms {
    /// Scope number in the baseline.
    pub scope: u32,
    /// Microbatch in which its sequences end.
    pub microbatch: u32,
    /// Tokens M in the dense run.
    pub tokens: u64,
    /// Weight w: the baseline's, or its share by tokens for a part of a scope.
    pub weight: f64,
    /// `w λ E`.
    pub loss_scale: f64,
    /// Factor of the weighted count C.
    pub count_scale: f64,
    /// Factor of the weighted sum R.
    pub probability_scale: f64,
    /// Portions it reads.
    pub reads: Vec<Read>,
}

/// Computation of the last layer on prefix rows without loss (docs/method.md §4).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LastLayer {
    /// Only K and V.
    Dead,
    /// Forward up to the router, for counts; backward only of K and V.
    ForwardToRouter,
    /// Forward and backward up to the router; experts, final norm and head are dead.
    LiveToRouter,
}

/// Statistics to capture and the terms of each scope.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Accounting {
    /// The formula.
    pub formula: Formula,
    /// Router layers.
    pub layers: u32,
    /// Experts per layer; a statistic has layers × experts numbers.
    pub experts: u32,
    /// Whether counts C are captured.
    pub counts: bool,
    /// Whether sums R are captured, as boundary leaves.
    pub sums: bool,
    /// All portions, by node.
    pub portions: Vec<Portion>,
    /// All scopes in order; parts of a scope by microbatch.
    pub scopes: Vec<ScopeTerms>,
    /// Computation of the last layer on prefix rows.
    pub last_layer: LastLayer,
}

impl Accounting {
    /// Returns the gradient of a scope's loss with respect to its weighted sums R, from its weighted counts C;
    /// both by layer, then expert. For [`Formula::RunningCounts`], counts include all microbatches up to this
    /// one on all ranks. The gradient of a portion's row is `copies` times the coefficient. `index` is a
    /// position in [`Accounting::scopes`].
    ///
    /// # Errors
    /// [`ExpertsError::Count`] for an unknown index or a number of counts other than layers × experts.
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
