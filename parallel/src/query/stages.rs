//! Lists of pipeline stages, and time, simulated.

use serde::Deserialize;

use super::plans::OfBatch;
use super::{Query, QueryError};
use crate::pipeline::{Pipeline, PipelineTimes, Stages, TransferTiming};
use crate::simulate::{PrefixSleep, SimulatedRank, SleepTier, Timeline, World};
use dormouse_schedule::{Plan, PlanError, Spec};

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
    groups: Vec<Spec>,
    stages: u32,
    virtual_stages: u32,
}

impl Query for PipelineOf {
    type Answer = Pipeline;

    fn answer(self) -> Result<Pipeline, QueryError> {
        let plans: Result<Vec<Plan>, PlanError> = self.groups.into_iter().map(Plan::new).collect();
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
pub(super) struct WorldOfGroup {
    group: Spec,
    /// Tier of the prefix's saved bytes; awake if omitted.
    asleep: Option<SleepTier>,
}

impl Query for WorldOfGroup {
    type Answer = World;

    fn answer(self) -> Result<World, QueryError> {
        let asleep = self.asleep.map_or(PrefixSleep::Never, PrefixSleep::In);
        let rank = SimulatedRank::flat_group(&Plan::new(self.group)?, asleep)?;
        Ok(World { ranks: vec![rank], ..World::default() })
    }
}

#[derive(Deserialize)]
pub(super) struct WorldOfBatch {
    batch: OfBatch,
    /// Tier of sleeping nodes.
    #[serde(default)]
    asleep: SleepTier,
}

impl Query for WorldOfBatch {
    type Answer = World;

    fn answer(self) -> Result<World, QueryError> {
        let batch = self.batch.batch()?;
        let rank = SimulatedRank::of_batch(&batch, &Plan::of_batch(&batch)?, self.asleep)?;
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
