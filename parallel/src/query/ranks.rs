//! Shares of data-parallel ranks, and whether ranks agree on them.

use serde::Deserialize;

use super::{Query, QueryError, Trees};
use crate::agree::Agreement;
use crate::balance::{Kind, Options, Shares, Workload};
use dormouse_schedule::forest::Forest;

#[derive(Deserialize)]
pub(super) struct SharesOf {
    forest: Trees,
    #[serde(default)]
    groups: Vec<u32>,
    #[serde(default)]
    logit_rows: Vec<u64>,
    options: Options,
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
pub(super) struct SharesOfWords {
    shares: Shares,
    words: Vec<Vec<Kind>>,
}

impl Query for SharesOfWords {
    type Answer = Shares;

    fn answer(self) -> Result<Shares, QueryError> {
        Ok(self.shares.with_words(&self.words)?)
    }
}

#[derive(Deserialize)]
pub(super) struct AgreementOf {
    forest: Trees,
    #[serde(default)]
    groups: Vec<u32>,
    #[serde(default)]
    logit_rows: Vec<u64>,
    options: Options,
    budget_bytes: u64,
    shares: Shares,
}

impl Query for AgreementOf {
    type Answer = Agreement;

    fn answer(self) -> Result<Agreement, QueryError> {
        let forest = Forest::try_from(self.forest)?;
        let batch =
            Workload { forest: &forest, groups: &self.groups, logit_rows: &self.logit_rows };
        Ok(Agreement::of(&batch, &self.options, self.budget_bytes, &self.shares))
    }
}

#[derive(Deserialize)]
pub(super) struct Agree {
    ranks: u32,
    agreements: Vec<Agreement>,
}

impl Query for Agree {
    /// Nothing to say: ranks that differ are refused.
    type Answer = ();

    fn answer(self) -> Result<(), QueryError> {
        Ok(Agreement::check(self.ranks, &self.agreements)?)
    }
}
