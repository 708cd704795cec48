//! One handle for what is asked once a step or less: JSON in, JSON out.
//!
//! A request is `{"version": 1, "query": "shares", …}` with the fields of that query; the answer is
//! `{"version": 1, "answer": …}`. Every query is one call of one room, whose types are the fields and
//! the answer as they stand: docs/queries.md has an example of each. Pure, from any thread: equal
//! requests have equal answers.
//!
//! What is asked at every op, or is large, is not asked here: plans and forests have types of their
//! own.
//!
//! # Invariants
//! - **A1** A field that nothing reads is refused by name, however deep: a misspelt option is never
//!   a default. (So the request is read twice and never held as a tree of values: serde's tagged
//!   enums hold one, and drop what they do not know.)
//! - **A2** There is no logic here: what is accepted, and what an answer means, is the room's.

mod costs;
mod error;
mod forest;
mod parts;
mod pictures;
mod plans;
mod ranks;
mod rollouts;
mod rows;
mod stages;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

pub use error::QueryError;
pub use forest::Trees;

/// Version of the form of requests and answers. Fields are only added within a version.
pub const QUERY_VERSION: u32 = 1;
/// Most bytes of a request: a forest of a million nodes has about fifty million.
pub const REQUEST_BYTES_MAX: usize = 1 << 30;

/// What every request opens with; the rest is the query's.
#[derive(Deserialize)]
struct Header {
    version: u32,
    query: String,
}

#[derive(Serialize)]
struct Reply<A> {
    version: u32,
    answer: A,
}

/// What is asked: the fields of a request.
trait Query: DeserializeOwned {
    type Answer: Serialize;

    fn answer(self) -> Result<Self::Answer, QueryError>;
}

type Handler = fn(&str) -> Result<String, QueryError>;

/// Every query by name.
const QUERIES: &[(&str, Handler)] = &[
    ("plan", handle::<plans::OfBatch>),
    ("plan_group", handle::<plans::OfGroup>),
    ("rates", handle::<costs::Counted>),
    ("fit", handle::<costs::Fitted>),
    ("shares", handle::<ranks::SharesOf>),
    ("part", handle::<parts::PartOf>),
    ("lockstep", handle::<parts::LockstepOf>),
    ("shares_of_words", handle::<ranks::SharesOfWords>),
    ("agreement", handle::<ranks::AgreementOf>),
    ("agree", handle::<ranks::Agree>),
    ("pipeline", handle::<stages::StagesOf>),
    ("pipeline_of_groups", handle::<stages::PipelineOf>),
    ("pipeline_times", handle::<stages::TimesOf>),
    ("world_of_group", handle::<stages::WorldOfGroup>),
    ("world_of_batch", handle::<stages::WorldOfBatch>),
    ("world_of_pipeline", handle::<stages::WorldOfPipeline>),
    ("simulate", handle::<stages::Simulated>),
    ("layout", handle::<rows::Laid>),
    ("padded_microbatches", handle::<rows::PaddedMicrobatches>),
    ("context", handle::<rows::Sharded>),
    ("experts", handle::<rows::Accounted>),
    ("experts_coefficients", handle::<rows::Coefficients>),
    ("rollout_predict", handle::<rollouts::Predict>),
    ("rollout_assign", handle::<rollouts::Assign>),
    ("rollout_migrate", handle::<rollouts::Migrate>),
    ("rollout_after", handle::<rollouts::After>),
    ("rollout_report", handle::<rollouts::Reported>),
    ("tiers", handle::<rollouts::Tiers>),
    ("draw", handle::<pictures::Page>),
    ("draw_rank", handle::<pictures::Rank>),
];

/// Names of all queries.
pub fn names() -> impl Iterator<Item = &'static str> {
    QUERIES.iter().map(|(name, _)| *name)
}

/// Answers one request.
///
/// # Errors
/// [`QueryError`]: a request that is none, a query that is not there, a field that is missing, unknown
/// or of another type, and whatever the room it goes to refuses.
pub fn query(request: &str) -> Result<String, QueryError> {
    if request.len() > REQUEST_BYTES_MAX {
        return Err(QueryError::Length { seen: request.len() });
    }
    let Header { version, query } = serde_json::from_str(request)?;
    if version != QUERY_VERSION {
        return Err(QueryError::Version { seen: version });
    }
    let named = QUERIES.iter().find(|(name, _)| *name == query);
    let (_, handle) = named.ok_or(QueryError::Unknown { seen: query })?;
    handle(request)
}

fn handle<Q: Query>(request: &str) -> Result<String, QueryError> {
    let mut unknown = None;
    let query: Q =
        serde_ignored::deserialize(&mut serde_json::Deserializer::from_str(request), |path| {
            let path = path.to_string();
            if !["version", "query"].contains(&path.as_str()) {
                unknown.get_or_insert(path);
            }
        })?;
    if let Some(path) = unknown {
        return Err(QueryError::Field { path });
    }
    let reply = Reply { version: QUERY_VERSION, answer: query.answer()? };
    Ok(serde_json::to_string(&reply)?)
}
