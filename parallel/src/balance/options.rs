//! Input of balancing.

use serde::{Deserialize, Serialize};

use super::BalanceError;
use dormouse_schedule::cost::Rates;
use dormouse_schedule::forest::Forest;
use dormouse_schedule::{Machine, ModelShape, check_range};

/// Maximum number of data-parallel ranks.
pub const RANKS_MAX: u32 = 1 << 14;

/// How units are assigned to ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BalanceMethod {
    /// Contiguous runs of units in depth-first order that minimise the largest cost. Keeps sharing.
    #[default]
    Contiguous,
    /// Contiguous runs of units in depth-first order, cut where the running cost passes an even share.
    /// One pass; ignores what is recomputed after a cut.
    Greedy,
    /// Longest processing time first: units by descending cost, each to the least loaded rank, as if
    /// units shared nothing.
    LongestFirst,
}

/// The smallest unit of assignment; units are never split.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum BalanceUnit {
    /// A leaf, with the sequences that end on its path but not on an earlier leaf's.
    #[default]
    Leaf,
    /// A group of sequences whose advantages are normalised together. Groups that share a leaf are merged.
    Group,
    /// A tree: all sequences below one root.
    Tree,
    /// A group, or a leaf if splitting groups finishes sooner; the trainer must then normalise
    /// [`super::Shares::cut_groups`] across ranks.
    GroupOrLeaf,
}

/// Options of balancing. Must be equal on every rank, otherwise plans differ.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct BalanceOptions {
    /// Number of data-parallel ranks, 1 to [`RANKS_MAX`].
    pub ranks: u32,
    /// How units are assigned to ranks.
    pub method: BalanceMethod,
    /// The smallest unit of assignment; units are never split.
    pub unit: BalanceUnit,
    /// Whether ranks may exchange K, V and their gradients of shared nodes where that is faster than
    /// recomputing them. Requires `machine.link_bytes_per_s` and the contiguous method.
    pub exchange: bool,
    /// Whether ops contain collectives (gathered weights, expert parallelism). If so, every rank runs the
    /// same kinds of op in the same order, with dummies where it has none. Assumes plans that always
    /// share, without blocks, with unlimited memory; for others see [`super::Shares::with_passes`].
    pub ops_hold_collectives: bool,
    /// Maximum rows per microbatch: `microbatch_rows` of the ranks' plans.
    pub microbatch_tokens: u32,
    /// Cost rates.
    pub rates: Rates,
    /// The model; determines the bytes of K and V.
    pub model: ModelShape,
    /// The machine; determines the link rate.
    pub machine: Machine,
}

/// The sequences to balance.
#[derive(Clone, Copy, Debug)]
pub struct Workload<'a> {
    /// Prefix trees of the sequences.
    pub forest: &'a Forest,
    /// Group number of each sequence; may be empty unless the unit is a group.
    pub groups: &'a [u32],
    /// Rows with logits of each node; if empty, all rows except those of roots with children.
    pub logit_rows: &'a [u64],
}

impl BalanceOptions {
    pub(super) fn check(&self, batch: &Workload<'_>) -> Result<(), BalanceError> {
        check_range("ranks", self.ranks, 1, RANKS_MAX)?;
        let sequences = batch.forest.endings().len() as u64;
        check_range("sequences", sequences, 1, u64::MAX)?;
        if !batch.groups.is_empty()
            || matches!(self.unit, BalanceUnit::Group | BalanceUnit::GroupOrLeaf)
        {
            check_range("group numbers", batch.groups.len() as u64, sequences, sequences)?;
        }
        if self.exchange {
            let method = match self.method {
                BalanceMethod::Contiguous => None,
                BalanceMethod::Greedy => Some("greedy"),
                BalanceMethod::LongestFirst => Some("longest first"),
            };
            if let Some(method) = method {
                return Err(BalanceError::PrefixExchange { method });
            }
            if self.machine.link_bytes_per_s == 0 {
                return Err(BalanceError::Link);
            }
            self.model.check(false)?;
        }
        Ok(())
    }
}
