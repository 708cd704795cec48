//! Lists of pipeline stages, and time, simulated.

use serde::Deserialize;

use super::plans::PlanOf;
use super::{Query, QueryError};
use crate::pipeline::{Pipeline, PipelineTimes, Stages, TransferTiming};
use crate::simulate::{SimulatedRank, SleepTier, Timeline, World};
use dormouse_schedule::Plan;

/// Lists that come back from outside.
pub(super) fn held(stages: Stages) -> Result<Stages, QueryError> {
    stages.look_over()?;
    Ok(stages)
}

#[derive(Deserialize)]
pub(super) struct StagesOf {
    pipeline: Pipeline,
}

impl Query for StagesOf {
    type Answer = Stages;

    fn answer(self) -> Result<Stages, QueryError> {
        Ok(self.pipeline.plan()?)
    }
}

#[derive(Deserialize)]
pub(super) struct PipelineOf {
    /// Of flat groups.
    plans: Vec<PlanOf>,
    stages: u32,
    virtual_stages: u32,
}

impl Query for PipelineOf {
    type Answer = Pipeline;

    fn answer(self) -> Result<Pipeline, QueryError> {
        let plans: Result<Vec<Plan>, QueryError> =
            self.plans.into_iter().map(PlanOf::plan).collect();
        Ok(Pipeline::of_plans(&plans?, self.stages, self.virtual_stages)?)
    }
}

#[derive(Deserialize)]
pub(super) struct TimesOf {
    pipeline: Pipeline,
    stages: Stages,
    meeting: TransferTiming,
}

impl Query for TimesOf {
    type Answer = PipelineTimes;

    fn answer(self) -> Result<PipelineTimes, QueryError> {
        Ok(held(self.stages)?.times(&self.pipeline, self.meeting)?)
    }
}

#[derive(Deserialize)]
pub(super) struct WorldOfPlan {
    plan: PlanOf,
    /// The tier of nodes that sleep.
    #[serde(default)]
    asleep: SleepTier,
}

impl Query for WorldOfPlan {
    type Answer = World;

    fn answer(self) -> Result<World, QueryError> {
        let rank = SimulatedRank::of_plan(&self.plan.plan()?, self.asleep)?;
        Ok(World { ranks: vec![rank], ..World::default() })
    }
}

#[derive(Deserialize)]
pub(super) struct WorldOfPipeline {
    pipeline: Pipeline,
    stages: Stages,
}

impl Query for WorldOfPipeline {
    type Answer = World;

    fn answer(self) -> Result<World, QueryError> {
        Ok(World::of_stages(&self.pipeline, &held(self.stages)?)?)
    }
}

#[derive(Deserialize)]
pub(super) struct Simulated {
    world: World,
}

impl Query for Simulated {
    type Answer = Timeline;

    fn answer(self) -> Result<Timeline, QueryError> {
        Ok(self.world.run()?)
    }
}
