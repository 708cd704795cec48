//! Which worker generates what.

use serde::{Deserialize, Serialize};

use super::{AskError, Question};
use crate::rollout::{
    Ask, Assignment, Curve, History, Migration, MigrationOptions, Predicted, Predictor, Progress,
    Report, Rollout, StepOptions, migrate, tier_sizes,
};

#[derive(Deserialize)]
pub(super) struct Predict {
    history: History,
    asks: Vec<Ask>,
    #[serde(default)]
    predictor: Predictor,
}

impl Question for Predict {
    type Answer = Vec<Predicted>;

    fn answer(self) -> Result<Vec<Predicted>, AskError> {
        Ok(self.predictor.predict(&self.history, &self.asks)?)
    }
}

#[derive(Deserialize)]
pub(super) struct Assign {
    history: History,
    asks: Vec<Ask>,
    #[serde(default)]
    predictor: Predictor,
    options: StepOptions,
}

impl Question for Assign {
    type Answer = Assignment;

    fn answer(self) -> Result<Assignment, AskError> {
        Ok(Assignment::of(&self.history, &self.asks, &self.predictor, &self.options)?)
    }
}

#[derive(Deserialize)]
pub(super) struct Migrate {
    assignment: Assignment,
    asks: Vec<Ask>,
    progress: Progress,
    #[serde(default)]
    options: MigrationOptions,
}

impl Question for Migrate {
    type Answer = Vec<Migration>;

    fn answer(self) -> Result<Vec<Migration>, AskError> {
        Ok(migrate(&self.assignment, &self.asks, &self.progress, &self.options)?)
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

impl Question for After {
    type Answer = Moved;

    fn answer(self) -> Result<Moved, AskError> {
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

impl Question for Reported {
    type Answer = Report;

    fn answer(self) -> Result<Report, AskError> {
        let Self { assignment, progress, curve, strong_permille } = self;
        Ok(Report::of(&assignment, &progress, curve.as_ref(), strong_permille)?)
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

impl Question for Tiers {
    type Answer = Vec<u32>;

    fn answer(self) -> Result<Vec<u32>, AskError> {
        Ok(tier_sizes(&self.curve, &self.groups, self.workers, self.slope_permille)?)
    }
}
