//! Plans as text.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Query, QueryError, Trees};
use dormouse_schedule::forest::Forest;
use dormouse_schedule::{Plan, PlanOptions, Scoring};

/// The arguments of [`Plan::new`], the forest by nodes; options left out are 0 or false.
#[derive(Deserialize)]
pub(super) struct PlanOf {
    forest: Trees,
    scoring: Vec<Scoring>,
    options: PlanOptions,
}

impl PlanOf {
    pub(super) fn plan(self) -> Result<Plan, QueryError> {
        Ok(Plan::new(&Forest::try_from(self.forest)?, &self.scoring, &self.options)?)
    }
}

impl Query for PlanOf {
    type Answer = Box<RawValue>;

    fn answer(self) -> Result<Box<RawValue>, QueryError> {
        Ok(RawValue::from_string(self.plan()?.to_json())?)
    }
}
