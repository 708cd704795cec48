//! Seconds per feature, and the cost of nodes.
//!
//! Floating-point sums may differ between ranks. So rates are rounded to whole femtoseconds once, and a node's
//! cost to whole picoseconds once. All later sums, comparisons and cuts use 64-bit integers: equal rates give
//! equal cuts on every rank.

use super::error::{COST_MAX_PS, CostError};
use super::features::{FEATURE_NAMES, FEATURES, Features, PerFeature, logit_rows_of};
use super::work::{KernelRates, PASSES, Work};
use crate::forest::Forest;
use crate::model::count;
use crate::{Machine, ModelShape, NodeId, PlanError};

/// Operations per second of a machine of unknown rate; only proportions matter then.
const NOMINAL_FLOPS_PER_S: f64 = 1e15;
const FS_PER_S: f64 = 1e15;
const FS_PER_PS: u128 = 1_000;

/// Seconds per unit of each feature; finite and not negative.
pub type Rates = PerFeature<f64>;

impl Rates {
    /// Returns rates without measurements: operations by the formulas of `predict` at the machine's rates
    /// (10^15/s if unknown), and its overhead per forward or backward ([`PASSES`] of a node or a microbatch).
    /// Nothing is recomputed.
    ///
    /// # Errors
    /// `Count` for an invalid model.
    pub fn counted(model: &ModelShape, machine: &Machine) -> Result<Self, PlanError> {
        model.check(false)?;
        let nominal = KernelRates::uniform(NOMINAL_FLOPS_PER_S);
        let kernels = KernelRates::of(machine).unwrap_or(nominal);
        let seconds = |work: Work| work.flops(model, model.layers.into()).seconds(&kernels);
        let none = Work::default();
        let op_s = machine.op_overhead_ns as f64 * 1e-9;
        Ok(Self {
            nodes: PASSES * op_s,
            microbatches: PASSES * op_s,
            rows: seconds(Work { rows: 1.0, ..none }),
            prefix_pairs: seconds(Work { prefix_pairs: 1.0, ..none }),
            causal_pairs: seconds(Work { causal_pairs: 1.0, ..none }),
            logit_rows: seconds(Work { logit_rows: 1.0, ..none }),
            ..Self::default()
        })
    }

    /// Returns the seconds of counted features.
    #[must_use]
    pub fn seconds(&self, features: &Features) -> f64 {
        self.to_array().iter().zip(features.to_array()).map(|(rate, n)| rate * n as f64).sum()
    }

    /// Rounds to whole femtoseconds.
    fn femtoseconds(self) -> Result<[u64; FEATURES], CostError> {
        let mut rates = [0; FEATURES];
        for (index, seconds) in self.to_array().into_iter().enumerate() {
            if !(seconds.is_finite() && seconds >= 0.0) {
                return Err(CostError::Rate { what: FEATURE_NAMES[index], seen: seconds });
            }
            // The cast saturates, which exceeds the cost limit.
            rates[index] = (seconds * FS_PER_S).round() as u64;
        }
        Ok(rates)
    }

    /// Returns the picoseconds of every node. A leaf pays its part of a microbatch of `microbatch_tokens` rows.
    ///
    /// # Errors
    /// `Rate` for a rate that is negative or not finite, `Plan` for logit rows that do not match the forest (see
    /// [`logit_rows_of`]) and for 0 microbatch tokens, `TooCostly` above [`COST_MAX_PS`].
    pub fn node_costs_ps(
        &self,
        forest: &Forest,
        logit_rows: &[u64],
        microbatch_tokens: u32,
    ) -> Result<Vec<u64>, CostError> {
        let rates = self.femtoseconds()?;
        count("microbatch_tokens", microbatch_tokens, 1, u32::MAX)?;
        // Nine products of at most 120 bits.
        let price = |counts: Features| -> u128 {
            let counts = counts.to_array();
            rates.iter().zip(counts).map(|(rate, n)| u128::from(*rate) * u128::from(n)).sum()
        };
        let microbatch_fs = price(Features { microbatches: 1, ..Features::default() });
        let mut costs = Vec::with_capacity(forest.nodes().len());
        let mut sum = 0_u64;
        for id in 0..forest.nodes().len() as u32 {
            let (id, node) = (NodeId(id), forest.node(NodeId(id)));
            let is_leaf = forest.is_leaf(id);
            let logit_rows = logit_rows_of(forest, logit_rows, id)?;
            let counts = Features::of_node(node, is_leaf, logit_rows);
            let mut cost_fs = price(counts);
            if is_leaf {
                cost_fs += microbatch_fs * u128::from(counts.rows) / u128::from(microbatch_tokens);
            }
            let cost = (cost_fs + FS_PER_PS / 2) / FS_PER_PS;
            let cost = u64::try_from(cost).unwrap_or(u64::MAX);
            sum = sum.saturating_add(cost);
            if sum > COST_MAX_PS {
                return Err(CostError::TooCostly { node: id.0 });
            }
            costs.push(cost);
        }
        Ok(costs)
    }
}
