//! Shares of data-parallel ranks.

use serde::Deserialize;

use super::{Query, QueryError, Trees};
use crate::balance::{BalanceOptions, PassKind, Shares, Workload};
use dormouse_schedule::forest::Forest;

#[derive(Deserialize)]
pub(super) struct SharesOf {
    forest: Trees,
    #[serde(default)]
    groups: Vec<u32>,
    #[serde(default)]
    logit_rows: Vec<u64>,
    options: BalanceOptions,
}

impl Query for SharesOf {
    type Answer = Shares;

    fn answer(self) -> Result<Shares, QueryError> {
        let forest = Forest::try_from(self.forest)?;
        let batch =
            Workload { forest: &forest, groups: &self.groups, logit_rows: &self.logit_rows };
        Ok(Shares::new(&batch, &self.options)?)
    }
}

#[derive(Deserialize)]
pub(super) struct SharesWithPasses {
    shares: Shares,
    passes: Vec<Vec<PassKind>>,
}

impl Query for SharesWithPasses {
    type Answer = Shares;

    fn answer(self) -> Result<Shares, QueryError> {
        Ok(self.shares.with_passes(&self.passes)?)
    }
}
