//! Assignment of rollouts to workers.

use serde::{Deserialize, Serialize};

use super::{Query, QueryError};
use crate::rollout::{
    Assignment, Curve, History, LengthPredictor, Migration, MigrationOptions, Predicted, Progress,
    Rollout, RolloutReport, RolloutRequest, StepOptions, migrate, tier_sizes,
};

#[derive(Deserialize)]
pub(super) struct Predict {
    history: History,
    requests: Vec<RolloutRequest>,
    #[serde(default)]
    predictor: LengthPredictor,
}

impl Query for Predict {
    type Answer = Vec<Predicted>;

    fn answer(self) -> Result<Vec<Predicted>, QueryError> {
        Ok(self.predictor.predict(&self.history, &self.requests)?)
    }
}

#[derive(Deserialize)]
pub(super) struct Assign {
    history: History,
    requests: Vec<RolloutRequest>,
    #[serde(default)]
    predictor: LengthPredictor,
    options: StepOptions,
}

impl Query for Assign {
    type Answer = Assignment;

    fn answer(self) -> Result<Assignment, QueryError> {
        Ok(Assignment::of(&self.history, &self.requests, &self.predictor, &self.options)?)
    }
}

#[derive(Deserialize)]
pub(super) struct Migrate {
    assignment: Assignment,
    requests: Vec<RolloutRequest>,
    progress: Progress,
    #[serde(default)]
    options: MigrationOptions,
}

impl Query for Migrate {
    type Answer = Vec<Migration>;

    fn answer(self) -> Result<Vec<Migration>, QueryError> {
        Ok(migrate(&self.assignment, &self.requests, &self.progress, &self.options)?)
    }
}

#[derive(Deserialize)]
pub(super) struct After {
    progress: Progress,
    migrations: Vec<Migration>,
}

#[derive(Serialize)]
pub(super) struct Moved {
    progress: Progress,
    deferred: Vec<Rollout>,
}

impl Query for After {
    type Answer = Moved;

    fn answer(self) -> Result<Moved, QueryError> {
        let (progress, deferred) = self.progress.after(&self.migrations);
        Ok(Moved { progress, deferred })
    }
}

#[derive(Deserialize)]
pub(super) struct Reported {
    assignment: Assignment,
    progress: Progress,
    curve: Option<Curve>,
    strong_permille: u32,
}

impl Query for Reported {
    type Answer = RolloutReport;

    fn answer(self) -> Result<RolloutReport, QueryError> {
        let Self { assignment, progress, curve, strong_permille } = self;
        Ok(RolloutReport::of(&assignment, &progress, curve.as_ref(), strong_permille)?)
    }
}

#[derive(Deserialize)]
pub(super) struct Tiers {
    curve: Curve,
    /// Each prompt's predicted tokens and its responses, by group.
    groups: Vec<Vec<(u64, u32)>>,
    workers: u32,
    #[serde(default)]
    slope_permille: u32,
}

impl Query for Tiers {
    type Answer = Vec<u32>;

    fn answer(self) -> Result<Vec<u32>, QueryError> {
        Ok(tier_sizes(&self.curve, &self.groups, self.workers, self.slope_permille)?)
    }
}
