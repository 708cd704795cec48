//! One door for what is asked once a step or less: JSON in, JSON out.
//!
//! A request is `{"version": 1, "ask": "shares", …}` with the fields of that ask; the answer is
//! `{"version": 1, "answer": …}`. Every ask is one call of one room, whose types are the fields and
//! the answer as they stand: docs/asks.md has an example of each. Pure, from any thread: equal
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

pub use error::AskError;
pub use forest::Trees;

/// Version of the form of requests and answers. Fields are only added within a version.
pub const ASK_VERSION: u32 = 1;
/// Most bytes of a request: a forest of a million nodes has about fifty million.
pub const ASK_BYTES_MAX: usize = 1 << 30;

/// What every request opens with; the rest is the ask's.
#[derive(Deserialize)]
struct Header {
    version: u32,
    ask: String,
}

#[derive(Serialize)]
struct Reply<A> {
    version: u32,
    answer: A,
}

/// What is asked: the fields of a request.
trait Question: DeserializeOwned {
    type Answer: Serialize;

    fn answer(self) -> Result<Self::Answer, AskError>;
}

type Door = fn(&str) -> Result<String, AskError>;

/// Every ask by name.
const ASKS: &[(&str, Door)] = &[
    ("plan", door::<plans::OfBatch>),
    ("plan_group", door::<plans::OfGroup>),
    ("rates", door::<costs::Counted>),
    ("fit", door::<costs::Fitted>),
    ("shares", door::<ranks::SharesOf>),
    ("part", door::<parts::PartOf>),
    ("lockstep", door::<parts::LockstepOf>),
    ("shares_of_words", door::<ranks::SharesOfWords>),
    ("agreement", door::<ranks::AgreementOf>),
    ("agree", door::<ranks::Agree>),
    ("pipeline", door::<stages::StagesOf>),
    ("pipeline_of_groups", door::<stages::PipelineOf>),
    ("pipeline_times", door::<stages::TimesOf>),
    ("world_of_group", door::<stages::WorldOfGroup>),
    ("world_of_batch", door::<stages::WorldOfBatch>),
    ("world_of_pipeline", door::<stages::WorldOfPipeline>),
    ("simulate", door::<stages::Simulated>),
    ("layout", door::<rows::Laid>),
    ("padded_waves", door::<rows::PaddedWaves>),
    ("context", door::<rows::Sharded>),
    ("experts", door::<rows::Accounted>),
    ("experts_coefficients", door::<rows::Coefficients>),
    ("rollout_predict", door::<rollouts::Predict>),
    ("rollout_assign", door::<rollouts::Assign>),
    ("rollout_migrate", door::<rollouts::Migrate>),
    ("rollout_after", door::<rollouts::After>),
    ("rollout_report", door::<rollouts::Reported>),
    ("tiers", door::<rollouts::Tiers>),
    ("draw", door::<pictures::Page>),
    ("draw_rank", door::<pictures::Rank>),
];

/// Names of all asks.
pub fn names() -> impl Iterator<Item = &'static str> {
    ASKS.iter().map(|(name, _)| *name)
}

/// Answers one request.
///
/// # Errors
/// [`AskError`]: a request that is none, an ask that is not there, a field that is missing, unknown
/// or of another type, and whatever the room it goes to refuses.
pub fn ask(request: &str) -> Result<String, AskError> {
    if request.len() > ASK_BYTES_MAX {
        return Err(AskError::Length { seen: request.len() });
    }
    let Header { version, ask } = serde_json::from_str(request)?;
    if version != ASK_VERSION {
        return Err(AskError::Version { seen: version });
    }
    let named = ASKS.iter().find(|(name, _)| *name == ask);
    let (_, door) = named.ok_or(AskError::Unknown { seen: ask })?;
    door(request)
}

fn door<Q: Question>(request: &str) -> Result<String, AskError> {
    let mut unknown = None;
    let question: Q =
        serde_ignored::deserialize(&mut serde_json::Deserializer::from_str(request), |path| {
            let path = path.to_string();
            if !["version", "ask"].contains(&path.as_str()) {
                unknown.get_or_insert(path);
            }
        })?;
    if let Some(path) = unknown {
        return Err(AskError::Field { path });
    }
    let reply = Reply { version: ASK_VERSION, answer: question.answer()? };
    Ok(serde_json::to_string(&reply)?)
}
