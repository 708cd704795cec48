//! Planning as JSON: one function for what a caller in another language requests once per step or less.
//!
//! A request is `{"version": 1, "query": "shares", …}` with the fields of that query; the reply is
//! `{"version": 1, "answer": …}`. Each query is one call into one module, whose types are the fields and
//! the answer; docs/queries/ has an example of each. Queries are pure and may run on any thread: equal
//! requests have equal answers. Plans and forests that are large or read at every op have C types.
//!
//! # Invariants
//! - **Q1** An unknown field is refused by name at any depth, so a misspelled option never falls back to
//!   its default. The request is therefore parsed twice from its text: serde's tagged enums would buffer
//!   it and drop unknown fields.
//! - **Q2** There is no logic here: the modules decide what is accepted and what an answer means.

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

/// Version of requests and replies. Within a version, fields are only added.
pub const QUERY_VERSION: u32 = 1;
/// Maximum request size in bytes; a forest of a million nodes takes about 50 MB.
pub const REQUEST_BYTES_MAX: usize = 1 << 30;

/// The common fields of a request.
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

/// The fields of one query.
trait Query: DeserializeOwned {
    type Answer: Serialize;

    fn answer(self) -> Result<Self::Answer, QueryError>;
}

type Handler = fn(&str) -> Result<String, QueryError>;

/// Every query: name, description in Markdown, handler. The order is that of docs/queries/README.md.
const QUERIES: &[(&str, &str, Handler)] = &[
    (
        "plan",
        "Plans the sequences of a forest, as `dormouse_plan_create` does. `loss` is \
         `\"all_but_first\"`, `{\"from\": 5}` or `{\"spans\": [{\"begin\": 2, \"end\": 4}]}`. \
         Omitted options are 0, false or unknown. A flat group is a tree of depth one; with \
         `runtime_residency` the runtime decides what sleeps.",
        handle::<plans::PlanOf>,
    ),
    (
        "rates",
        "Computes the cost rates of a model on a machine by counting operations: seconds per unit \
         of each feature.",
        handle::<costs::Counted>,
    ),
    (
        "fit",
        "Fits cost rates to measured steps and reports which rates the samples determine. \
         `weighting` is `\"absolute\"` (the default) or `\"relative\"`.",
        handle::<costs::Fitted>,
    ),
    (
        "shares",
        "Assigns the leaves of a forest to data-parallel ranks. `groups` (one number per \
         sequence) and `logit_rows` (one per node) are optional.",
        handle::<ranks::SharesOf>,
    ),
    (
        "part",
        "Extracts the part of a forest that a rank computes, given its `sequences`. Sequence i of \
         the part is `sequences[i]` of the whole, and node i is `nodes[i]`. The nodes of the \
         whole are kept as they are: a forest built from the rank's token ids alone would merge \
         nodes and have fewer ops than the other ranks expect. Plan the part with \
         `dormouse_forest_create` by nodes.",
        handle::<parts::PartOf>,
    ),
    (
        "collective_order",
        "Computes one order of ops for all ranks, for models whose ops contain collectives. \
         `passes` lists the kind of each op of every rank's plan: `\"forward\"` (prefix forward, \
         forward again), `\"microbatch\"` or `\"backward\"`. In the answer, `own` lists the \
         positions in `kinds` of each rank's own ops; at every other position the rank runs a \
         dummy op, one padding row of weight 0. Plans may differ with a rank's memory, so either \
         gather the passes or plan all parts on every rank.",
        handle::<parts::CollectiveOrderOf>,
    ),
    (
        "shares_with_passes",
        "Recomputes the collectives of shares from the passes that the ranks' plans contain, \
         without exchanged nodes. `shares` assumes plans with `always_share`, no `block_rows` and \
         unlimited memory. Plans that run a forward twice or run leaves separately need this \
         query; otherwise ranks deadlock. Kinds may also be named as in ops \
         (`\"prefix_forward\"`, ...).",
        handle::<ranks::SharesWithPasses>,
    ),
    ("pipeline", "Computes the op lists of all pipeline stages.", handle::<stages::StagesOf>),
    (
        "pipeline_of_plans",
        "Describes the plans of flat groups as a pipeline, with costs by counting. Each plan has the \
         fields of `plan`. Set the pipeline's order and bounds, then pass it to `pipeline`.",
        handle::<stages::PipelineOf>,
    ),
    (
        "pipeline_times",
        "Computes the start and end of every op in the given lists. `meeting` is \
         `\"overlapped\"`, `\"batched\"` or `\"one_by_one\"`.",
        handle::<stages::TimesOf>,
    ),
    (
        "world_of_plan",
        "Describes a plan as one rank for `simulate`. `plan` has the fields of the query `plan`. \
         Each op is one step; a node that sleeps in `\"host\"` (the default) or `\"file\"` \
         takes one step per layer, forward and backward.",
        handle::<stages::WorldOfPlan>,
    ),
    (
        "world_of_pipeline",
        "Describes the op lists of a pipeline as ranks for `simulate`.",
        handle::<stages::WorldOfPipeline>,
    ),
    (
        "simulate",
        "Simulates ranks, memory blocks and links, and reports when each event happens and what \
         waits for what.",
        handle::<stages::Simulated>,
    ),
    (
        "layout",
        "Lays out the rows of a microbatch, `\"packed\"` (the default) or `\"padded\"`.",
        handle::<rows::Laid>,
    ),
    (
        "padded_microbatches",
        "Packs sequences into the fewest padded microbatches within a budget of rows.",
        handle::<rows::PaddedMicrobatches>,
    ),
    (
        "context",
        "Shards a prefix and a microbatch over a context-parallel group and lists the exchange of \
         K, V and gradients. An empty `prefix` means that the microbatch reads none. `cut` is \
         `\"contiguous\"`, `\"zigzag\"` or `{\"balanced\": {\"chunks\": 4}}`. `exchange` is \
         optional (`gathered`: `\"kept\"` or `\"again\"`; `reduced`: `\"each_microbatch\"` or \
         `\"before_c\"`).",
        handle::<rows::Sharded>,
    ),
    (
        "experts",
        "Lists the router statistics to capture and how often each counts in the auxiliary \
         losses. `microbatches` is the microbatch of each sequence's leaf; for a sequence that is \
         a complete prefix of others, of the first leaf below its end. `baseline.formula` is \
         `\"switch\"`, `\"pooled_layers\"` or `{\"running_counts\": {\"ranks\": 8, \
         \"microbatches\": 4}}`.",
        handle::<rows::Accounted>,
    ),
    (
        "experts_coefficients",
        "Computes the gradient of a scope's auxiliary loss with respect to its weighted sums, \
         from its weighted counts.",
        handle::<rows::Coefficients>,
    ),
    (
        "rollout_predict",
        "Predicts the response length of each prompt from its history. `predictor` is optional.",
        handle::<rollouts::Predict>,
    ),
    ("rollout_assign", "Assigns prompts to rollout workers.", handle::<rollouts::Assign>),
    (
        "rollout_migrate",
        "Proposes migrations of rollouts that have outgrown their prediction. `options` is \
         optional.",
        handle::<rollouts::Migrate>,
    ),
    (
        "rollout_after",
        "Applies migrations: returns the rollouts that continue in this step and those deferred \
         to the next.",
        handle::<rollouts::After>,
    ),
    (
        "rollout_report",
        "Compares predicted with actual rollout lengths. `curve` is optional.",
        handle::<rollouts::Reported>,
    ),
    (
        "tiers",
        "Divides workers among groups of `[predicted tokens, responses]`.",
        handle::<rollouts::Tiers>,
    ),
    (
        "draw",
        "Draws the op lists of a pipeline over time as one HTML page.",
        handle::<pictures::Page>,
    ),
    (
        "draw_rank",
        "Draws the steps and copies of one simulated rank over time as SVG.",
        handle::<pictures::Rank>,
    ),
];

/// Returns the name and description of every query.
pub fn queries() -> impl Iterator<Item = (&'static str, &'static str)> {
    QUERIES.iter().map(|(name, description, _)| (*name, *description))
}

/// Answers a request.
///
/// # Errors
/// [`QueryError`]: malformed JSON, an unknown query, a field that is missing, unknown or of the wrong
/// type, or the error of the module that answers the query.
pub fn query(request: &str) -> Result<String, QueryError> {
    if request.len() > REQUEST_BYTES_MAX {
        return Err(QueryError::Length { seen: request.len() });
    }
    let Header { version, query } = serde_json::from_str(request)?;
    if version != QUERY_VERSION {
        return Err(QueryError::Version { seen: version });
    }
    let named = QUERIES.iter().find(|(name, ..)| *name == query);
    let (.., handle) = named.ok_or(QueryError::Unknown { seen: query })?;
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
