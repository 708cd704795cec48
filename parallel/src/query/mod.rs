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

mod error;
mod forest;
mod requests;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::balance::{BalanceError, CollectiveOrder, RANKS_MAX, Shares, Workload};
use crate::context::{KvExchange, Shards};
use crate::draw::{pipeline_page, rank_svg};
use crate::experts::Accounting;
use crate::pipeline::Pipeline;
use crate::rollout::{Assignment, RolloutReport, migrate, tier_sizes};
use crate::simulate::{SimulateError, SimulatedRank, World};
use dormouse_schedule::Plan;
use dormouse_schedule::cost::{Fit, Rates};
use dormouse_schedule::forest::{Forest, Part};
use dormouse_schedule::layout::{Packed, Padded, pack_padded};
use requests::*;

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

type Handler = fn(&str) -> Result<String, QueryError>;

/// Every query: name, description in Markdown, handler. The order is that of docs/queries/README.md.
const QUERIES: &[(&str, &str, Handler)] = &[
    (
        "plan",
        "Plans the sequences of a forest, as `dormouse_plan_create` does. `loss` is \
         `\"all_but_first\"`, `{\"from\": 5}` or `{\"spans\": [{\"begin\": 2, \"end\": 4}]}`. \
         Omitted options are 0, false or unknown. A flat group is a tree of depth one; with \
         `runtime_residency` the runtime decides what sleeps.",
        |text| answer(text, |q: PlanRequest| Ok(RawValue::from_string(q.plan()?.to_json())?)),
    ),
    (
        "rates",
        "Computes the cost rates of a model on a machine by counting operations: seconds per unit \
         of each feature.",
        |text| answer(text, |q: RatesRequest| Ok(Rates::counted(&q.model, &q.machine)?)),
    ),
    (
        "fit",
        "Fits cost rates to measured steps and reports which rates the samples determine. \
         `weighting` is `\"absolute\"` (the default) or `\"relative\"`.",
        |text| answer(text, |q: FitRequest| Ok(Fit::new(&q.samples, q.weighting)?)),
    ),
    (
        "shares",
        "Assigns the leaves of a forest to data-parallel ranks. `groups` (one number per \
         sequence) and `logit_rows` (one per node) are optional.",
        |text| {
            answer(text, |q: SharesRequest| {
                let forest = Forest::try_from(q.forest)?;
                let (groups, logit_rows) = (&q.groups[..], &q.logit_rows[..]);
                Ok(Shares::new(&Workload { forest: &forest, groups, logit_rows }, &q.options)?)
            })
        },
    ),
    (
        "part",
        "Extracts the part of a forest that a rank computes, given its `sequences`. Sequence i of \
         the part is `sequences[i]` of the whole, and node i is `nodes[i]`. The nodes of the \
         whole are kept as they are: a forest built from the rank's token ids alone would merge \
         nodes and have fewer ops than the other ranks expect. Plan the part with \
         `dormouse_forest_create` by nodes.",
        |text| {
            answer(text, |q: PartRequest| {
                let whole = Forest::try_from(q.forest)?;
                let Part { forest, nodes, sequences } = whole.part_of_sequences(&q.sequences)?;
                Ok(PartAnswer { forest: Trees::from(&forest), nodes, sequences })
            })
        },
    ),
    (
        "collective_order",
        "Computes one order of ops for all ranks, for models whose ops contain collectives. \
         `passes` lists the kind of each op of every rank's plan: `\"forward\"` (prefix forward, \
         forward again), `\"microbatch\"` or `\"backward\"`. In the answer, `own` lists the \
         positions in `kinds` of each rank's own ops; at every other position the rank runs a \
         dummy op, one padding row of weight 0. Plans may differ with a rank's memory, so either \
         gather the passes or plan all parts on every rank.",
        |text| {
            answer(text, |q: CollectiveOrderRequest| match u32::try_from(q.passes.len()) {
                Ok(1..=RANKS_MAX) => Ok(CollectiveOrder::of(&q.passes)),
                seen => Err(BalanceError::RankCount { seen: seen.unwrap_or(u32::MAX) }.into()),
            })
        },
    ),
    (
        "shares_with_passes",
        "Recomputes the collectives of shares from the passes that the ranks' plans contain, \
         without exchanged nodes. `shares` assumes plans with `always_share`, no `block_rows` and \
         unlimited memory. Plans that run a forward twice or run leaves separately need this \
         query; otherwise ranks deadlock. Kinds may also be named as in ops \
         (`\"prefix_forward\"`, ...).",
        |text| answer(text, |q: PassesRequest| Ok(q.shares.with_passes(&q.passes)?)),
    ),
    ("pipeline", "Computes the op lists of all pipeline stages.", |text| {
        answer(text, |q: PipelineRequest| Ok(q.pipeline.plan()?))
    }),
    (
        "pipeline_of_plans",
        "Describes the plans of flat groups as a pipeline, with costs by counting. Each plan has the \
         fields of `plan`. Set the pipeline's order and bounds, then pass it to `pipeline`.",
        |text| {
            answer(text, |q: PipelineOfPlansRequest| {
                let plans = q.plans.into_iter().map(PlanRequest::plan);
                let plans = plans.collect::<Result<Vec<Plan>, _>>()?;
                Ok(Pipeline::of_plans(&plans, q.stages, q.virtual_stages)?)
            })
        },
    ),
    (
        "pipeline_times",
        "Computes the start and end of every op in the given lists. `meeting` is \
         `\"overlapped\"`, `\"batched\"` or `\"one_by_one\"`.",
        |text| answer(text, |q: TimesRequest| Ok(q.stages.times(&q.pipeline, q.meeting)?)),
    ),
    (
        "world_of_plan",
        "Describes a plan as one rank for `simulate`. `plan` has the fields of the query `plan`. \
         Each op is one step; a node that sleeps in `\"host\"` (the default) or `\"nvme\"` \
         takes one step per layer, forward and backward.",
        |text| {
            answer(text, |q: PlanWorldRequest| {
                let rank = SimulatedRank::of_plan(&q.plan.plan()?, q.asleep)?;
                Ok(World { ranks: vec![rank], ..World::default() })
            })
        },
    ),
    (
        "world_of_pipeline",
        "Describes the op lists of a pipeline as ranks for `simulate`.",
        |text| answer(text, |q: StagesRequest| Ok(World::of_stages(&q.pipeline, &q.stages)?)),
    ),
    (
        "simulate",
        "Simulates ranks, memory blocks and links, and reports when each event happens and what \
         waits for what.",
        |text| answer(text, |q: SimulateRequest| Ok(q.world.run()?)),
    ),
    (
        "layout",
        "Lays out the rows of a microbatch, `\"packed\"` (the default) or `\"padded\"`.",
        |text| {
            answer(text, |q: LayoutRequest| {
                Ok(match q.form {
                    LayoutForm::Packed => LayoutAnswer::Packed(Packed::of(&q.pieces, &q.options)?),
                    LayoutForm::Padded => LayoutAnswer::Padded(Padded::of(&q.pieces, &q.options)?),
                })
            })
        },
    ),
    (
        "padded_microbatches",
        "Packs sequences into the fewest padded microbatches within a budget of rows.",
        |text| answer(text, |q: PackRequest| Ok(pack_padded(&q.rows, q.budget_rows, q.multiple)?)),
    ),
    (
        "context",
        "Shards a prefix and a microbatch over a context-parallel group and lists the exchange of \
         K, V and gradients. An empty `prefix` means that the microbatch reads none. `cut` is \
         `\"contiguous\"`, `\"zigzag\"` or `{\"balanced\": {\"chunks\": 4}}`. `exchange` is \
         optional (`gathered`: `\"kept\"` or `\"again\"`; `reduced`: `\"each_microbatch\"` or \
         `\"before_c\"`).",
        |text| {
            answer(text, |q: ContextRequest| {
                let prefix = match &q.prefix[..] {
                    [] => Shards::none(q.shards.ranks)?,
                    pieces => Shards::of(pieces, &q.shards)?,
                };
                let microbatch = Shards::of(&q.microbatch, &q.shards)?;
                let exchange = KvExchange::of(&prefix, &microbatch, &q.kv, &q.exchange)?;
                Ok(ContextAnswer { prefix, microbatch, exchange })
            })
        },
    ),
    (
        "experts",
        "Lists the router statistics to capture and how often each counts in the auxiliary \
         losses. `microbatches` is the microbatch of each sequence's leaf; for a sequence that is \
         a complete prefix of others, of the first leaf below its end. `baseline.formula` is \
         `\"switch\"`, `\"pooled_layers\"` or `{\"running_counts\": {\"ranks\": 8, \
         \"microbatches\": 4}}`.",
        |text| {
            answer(text, |q: ExpertsRequest| {
                let forest = Forest::try_from(q.forest)?;
                Ok(Accounting::of(&forest, &q.microbatches, &q.baseline, &q.router)?)
            })
        },
    ),
    (
        "experts_coefficients",
        "Computes the gradient of a scope's auxiliary loss with respect to its weighted sums, \
         from its weighted counts.",
        |text| {
            answer(text, |q: CoefficientsRequest| {
                Ok(q.accounting.coefficients(q.scope, &q.counts)?)
            })
        },
    ),
    (
        "rollout_predict",
        "Predicts the response length of each prompt from its history. `predictor` is optional.",
        |text| {
            answer(text, |q: PredictRequest| Ok(q.predictor.predict(&q.history, &q.requests)?))
        },
    ),
    ("rollout_assign", "Assigns prompts to rollout workers.", |text| {
        answer(text, |q: AssignRequest| {
            Ok(Assignment::of(&q.history, &q.requests, &q.predictor, &q.options)?)
        })
    }),
    (
        "rollout_migrate",
        "Proposes migrations of rollouts that have outgrown their prediction. `options` is \
         optional.",
        |text| {
            answer(text, |q: MigrateRequest| {
                Ok(migrate(&q.assignment, &q.requests, &q.progress, &q.options)?)
            })
        },
    ),
    (
        "rollout_after",
        "Applies migrations: returns the rollouts that continue in this step and those deferred \
         to the next.",
        |text| {
            answer(text, |q: AfterRequest| {
                let (progress, deferred) = q.progress.after(&q.migrations);
                Ok(AfterAnswer { progress, deferred })
            })
        },
    ),
    (
        "rollout_report",
        "Compares predicted with actual rollout lengths. `curve` is optional.",
        |text| {
            answer(text, |q: ReportRequest| {
                let curve = q.curve.as_ref();
                Ok(RolloutReport::of(&q.assignment, &q.progress, curve, q.strong_permille)?)
            })
        },
    ),
    ("tiers", "Divides workers among groups of `[predicted tokens, responses]`.", |text| {
        answer(text, |q: TiersRequest| {
            Ok(tier_sizes(&q.curve, &q.groups, q.workers, q.slope_permille)?)
        })
    }),
    ("draw", "Draws the op lists of a pipeline over time as one HTML page.", |text| {
        answer(text, |q: DrawRequest| Ok(pipeline_page(&q.title, &q.pipeline, &q.stages)?))
    }),
    ("draw_rank", "Draws the steps and copies of one simulated rank over time as SVG.", |text| {
        answer(text, |q: DrawRankRequest| {
            let most = q.world.ranks.len().saturating_sub(1);
            let timeline = q.world.run()?;
            let rank = timeline.ranks.get(q.rank);
            let missing = SimulateError::Count { what: "rank", seen: q.rank, most };
            Ok(rank_svg(rank.ok_or(missing)?))
        })
    }),
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
    let (.., handler) = named.ok_or(QueryError::Unknown { seen: query })?;
    handler(request)
}

/// Parses the fields of a request, calls `answer` and returns the reply.
fn answer<Q: DeserializeOwned, A: Serialize>(
    request: &str,
    answer: impl FnOnce(Q) -> Result<A, QueryError>,
) -> Result<String, QueryError> {
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
    Ok(serde_json::to_string(&Reply { version: QUERY_VERSION, answer: answer(query)? })?)
}
