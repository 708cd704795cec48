//! Seconds of one of each feature, and what nodes cost by them.
//!
//! # Integers
//! Ranks that cut by floating-point sums may cut differently. So rates become whole femtoseconds
//! once, a node's cost is a sum of integer products rounded to whole picoseconds once, and every
//! later sum, comparison and cut is in 64-bit integers: equal rates give equal cuts on every rank.

use serde::{Deserialize, Serialize};

use super::CostError;
use super::features::{Features, logit_rows_of};
use super::order::{FEATURE_NAMES, FEATURES};
use crate::forest::Forest;
use crate::{Machine, ModelShape, NodeId, PlanError};

/// Most picoseconds a forest may cost, about 53 days: twice that still fits 64 bits.
pub const COST_MAX_PS: u64 = 1 << 62;
/// Operations per second of a machine that does not say: only proportions matter then.
const NOMINAL_FLOPS_PER_S: f64 = 1e15;
const FS_PER_S: f64 = 1e15;
const FS_PER_PS: u128 = 1_000;

/// Seconds of one of each of [`Features`]; finite and not negative.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Rates {
    /// A step, whatever it holds. Ranks pay it alike, so shares leave it out.
    pub steps: f64,
    /// A node that has children.
    pub nodes: f64,
    /// A leaf.
    pub leaves: f64,
    /// A microbatch.
    pub microbatches: f64,
    /// A row.
    pub rows: f64,
    /// A row run forward once more.
    pub forward_only_rows: f64,
    /// A pair of a query and a key of the prefix.
    pub prefix_pairs: f64,
    /// A pair of a query and a key of the same node.
    pub causal_pairs: f64,
    /// A row with logits.
    pub logit_rows: f64,
}

impl Rates {
    /// Counted, where nothing was measured: operations by `predict`'s formulas over the machine's
    /// rate (10^15 a second where it does not say), and its overhead for each op: a node with
    /// children is two, a microbatch one. Nothing is recomputed.
    ///
    /// # Errors
    /// `Count` for a model that is not one.
    pub fn counted(model: &ModelShape, machine: &Machine) -> Result<Self, PlanError> {
        model.check(false)?;
        let flops_per_s = match machine.flops_per_s {
            0 => NOMINAL_FLOPS_PER_S,
            rate => rate as f64,
        };
        let layers = f64::from(model.layers);
        let work = |rows, logit_rows, pairs| {
            super::Work { rows, logit_rows, pairs }.flops(model, layers) / flops_per_s
        };
        let op_s = machine.op_overhead_ns as f64 * 1e-9;
        Ok(Self {
            nodes: 2.0 * op_s,
            microbatches: op_s,
            rows: work(1.0, 0.0, 0.0),
            prefix_pairs: work(0.0, 0.0, 1.0),
            causal_pairs: work(0.0, 0.0, 1.0),
            logit_rows: work(0.0, 1.0, 0.0),
            ..Self::default()
        })
    }

    /// Only rows count, each as a second's billionth: what balancing by tokens sees.
    #[must_use]
    pub fn rows_only() -> Self {
        Self { rows: 1e-9, ..Self::default() }
    }

    /// Seconds of what was counted.
    #[must_use]
    pub fn seconds(&self, features: &Features) -> f64 {
        self.to_array().iter().zip(features.to_array()).map(|(rate, n)| rate * n as f64).sum()
    }

    /// Whole femtoseconds.
    fn femtoseconds(self) -> Result<[u64; FEATURES], CostError> {
        let mut rates = [0; FEATURES];
        for (index, seconds) in self.to_array().into_iter().enumerate() {
            if !(seconds.is_finite() && seconds >= 0.0) {
                return Err(CostError::Rate { what: FEATURE_NAMES[index], seen: seconds });
            }
            // A cast stops at the largest number, which no forest passes the limit with.
            rates[index] = (seconds * FS_PER_S).round() as u64;
        }
        Ok(rates)
    }

    /// Picoseconds of every node, leaves charged for their part of a microbatch of `microbatch_tokens` rows.
    ///
    /// # Errors
    /// `Rate` for a rate that is not finite or negative, `Plan` for logit rows that do not fit the
    /// forest (see [`logit_rows_of`]) and for no microbatch tokens, `TooCostly` above [`COST_MAX_PS`].
    pub fn node_costs_ps(
        &self,
        forest: &Forest,
        logit_rows: &[u64],
        microbatch_tokens: u32,
    ) -> Result<Vec<u64>, CostError> {
        let rates = self.femtoseconds()?;
        if microbatch_tokens == 0 {
            let accepted = "1 or more".to_owned();
            return Err(PlanError::Count { what: "microbatch_tokens", seen: 0, accepted }.into());
        }
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
            let counts = Features::of_node(node, is_leaf, logit_rows_of(forest, logit_rows, id)?);
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
