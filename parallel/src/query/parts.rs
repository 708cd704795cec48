//! A rank's part of a forest, and the order in which ranks run their plans' ops together.

use serde::{Deserialize, Serialize};

use super::{Query, QueryError, Trees};
use crate::balance::{BalanceError, CollectiveOrder, PassKind, RANKS_MAX};
use dormouse_schedule::NodeId;
use dormouse_schedule::forest::{Forest, Part};

#[derive(Deserialize)]
pub(super) struct PartOf {
    forest: Trees,
    sequences: Vec<u32>,
}

/// A [`Part`], its forest by nodes.
#[derive(Serialize)]
pub(super) struct PartTrees {
    forest: Trees,
    nodes: Vec<NodeId>,
    sequences: Vec<u32>,
}

impl Query for PartOf {
    type Answer = PartTrees;

    fn answer(self) -> Result<PartTrees, QueryError> {
        let whole = Forest::try_from(self.forest)?;
        let Part { forest, nodes, sequences } = whole.part_of_sequences(&self.sequences)?;
        Ok(PartTrees { forest: Trees::from(&forest), nodes, sequences })
    }
}

#[derive(Deserialize)]
pub(super) struct CollectiveOrderOf {
    passes: Vec<Vec<PassKind>>,
}

impl Query for CollectiveOrderOf {
    type Answer = CollectiveOrder;

    fn answer(self) -> Result<CollectiveOrder, QueryError> {
        match u32::try_from(self.passes.len()) {
            Ok(1..=RANKS_MAX) => Ok(CollectiveOrder::of(&self.passes)),
            seen => Err(BalanceError::RankCount { seen: seen.unwrap_or(u32::MAX) }.into()),
        }
    }
}
