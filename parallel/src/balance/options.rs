//! What is to be balanced, and how.

use serde::{Deserialize, Serialize};

use super::BalanceError;
use dormouse_schedule::cost::Rates;
use dormouse_schedule::forest::Forest;
use dormouse_schedule::{Machine, ModelShape};

/// Most data-parallel ranks.
pub const RANKS_MAX: u32 = 1 << 14;

/// How units are given to ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// Runs of units in depth-first order, cut where the largest rank is smallest. Keeps sharing.
    #[default]
    Contiguous,
    /// Runs of units in depth-first order, cut where the cost so far passes an even part. One pass:
    /// what is computed again after a cut is not looked at.
    Greedy,
    /// Longest first: units by falling cost, each to the rank with least, as though nothing were
    /// shared between units. First-fit decreasing for a given number of bins.
    LongestFirst,
}

/// What is never cut.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Unit {
    /// A leaf, with the sequences that end on its path and not on an earlier leaf's.
    #[default]
    Leaf,
    /// Sequences whose advantages are normalised together. Groups that share a leaf are one.
    Group,
    /// A tree: everything below one root.
    Tree,
    /// A group, unless cutting between any leaves ends sooner: then the trainer must normalise
    /// [`super::Shares::cut_groups`] across ranks.
    GroupOrLeaf,
}

/// How to balance. Equal on every rank, or plans differ: see `agree`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Options {
    /// Data-parallel ranks, 1 to [`RANKS_MAX`].
    pub ranks: u32,
    /// How units are given to ranks.
    pub method: Method,
    /// What is never cut.
    pub unit: Unit,
    /// Whether ranks may exchange K, V and their gradients where that is quicker than each
    /// computing what they share. Needs `machine.link_bytes_per_s`; contiguous only.
    pub exchange: bool,
    /// Whether ops contain collectives (weights gathered, experts across ranks): then every rank
    /// runs the same kinds of op in the same order, dummies where it has none. Plans share everything
    /// then, cut no blocks and have room for all of it; for others see [`super::Shares::with_words`].
    pub ops_hold_collectives: bool,
    /// Most rows of one microbatch: `microbatch_rows` of the plans that ranks make of their shares.
    pub microbatch_tokens: u32,
    /// What things cost.
    pub rates: Rates,
    /// The model, whose K and V are exchanged.
    pub model: ModelShape,
    /// The machine, over whose link.
    pub machine: Machine,
}

/// What is balanced. Slices may be empty where said.
#[derive(Clone, Copy, Debug)]
pub struct Workload<'a> {
    /// Sequences and what they share.
    pub forest: &'a Forest,
    /// The group of each sequence, any numbers; empty unless groups are kept whole.
    pub groups: &'a [u32],
    /// Rows of each node that have logits; empty for all but those of roots.
    pub logit_rows: &'a [u64],
}

impl Options {
    pub(super) fn check(&self, batch: &Workload<'_>) -> Result<(), BalanceError> {
        if self.ranks == 0 || self.ranks > RANKS_MAX {
            return Err(BalanceError::RankCount { seen: self.ranks });
        }
        let sequences = batch.forest.endings().len();
        if sequences == 0 {
            return Err(BalanceError::Empty);
        }
        let seen = batch.groups.len();
        if seen != sequences && (seen > 0 || matches!(self.unit, Unit::Group | Unit::GroupOrLeaf)) {
            return Err(BalanceError::GroupCount { seen, sequences });
        }
        if self.exchange {
            let method = match self.method {
                Method::Contiguous => None,
                Method::Greedy => Some("greedy"),
                Method::LongestFirst => Some("longest first"),
            };
            if let Some(method) = method {
                return Err(BalanceError::Exchange { method });
            }
            if self.machine.link_bytes_per_s == 0 {
                return Err(BalanceError::Link);
            }
            self.model.check(false)?;
        }
        Ok(())
    }
}
