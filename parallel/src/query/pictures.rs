//! Pictures, as text for a browser.

use serde::Deserialize;

use super::stages::held;
use super::{Query, QueryError};
use crate::draw::{pipeline_page, rank_svg};
use crate::pipeline::{Pipeline, Stages};
use crate::simulate::{SimulateError, World};

#[derive(Deserialize)]
pub(super) struct Page {
    title: String,
    pipeline: Pipeline,
    stages: Stages,
}

impl Query for Page {
    type Answer = String;

    fn answer(self) -> Result<String, QueryError> {
        Ok(pipeline_page(&self.title, &self.pipeline, &held(self.stages)?)?)
    }
}

#[derive(Deserialize)]
pub(super) struct Rank {
    world: World,
    rank: usize,
}

impl Query for Rank {
    type Answer = String;

    fn answer(self) -> Result<String, QueryError> {
        let most = self.world.ranks.len().saturating_sub(1);
        let timeline = self.world.run()?;
        let rank = timeline.ranks.get(self.rank);
        let rank = rank.ok_or(SimulateError::Count { what: "rank", seen: self.rank, most })?;
        Ok(rank_svg(rank))
    }
}
