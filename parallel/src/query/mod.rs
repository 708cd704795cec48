//! Planning as JSON: one function for requests that other languages make at most once per step.
//!
//! A request is `{"version": 1, "query": "shares", …}` with the fields of that query; the reply is
//! `{"version": 1, "answer": …}`. Each query is one call into one module, whose types are the fields and
//! the answer; docs/queries/ has an example of each. Queries are pure and thread-safe. Large or frequently
//! read plans and forests have C types instead.
//!
//! # Invariants
//! - **Q1** An unknown field is refused by name at any depth, so a misspelled option never falls back to
//!   its default.
//! - **Q2** There is no logic here: the modules decide what is accepted and what an answer means.

mod error;
mod fields;
mod forest;

use std::collections::BTreeMap;

use serde::Serialize;
use serde_json::value::RawValue;

use crate::balance::{CollectiveOrder, PassKind, RANKS_MAX, Shares, Workload};
use crate::context::{KvExchange, KvExchangeOptions, ShardOptions, Shards};
use crate::draw::{pipeline_page, rank_svg};
use crate::experts::Accounting;
use crate::pipeline::{Pipeline, PrefixSleep, Stages};
use crate::rollout::{
    Assignment, Curve, History, LengthPredictor, MigrationOptions, Progress, RolloutReport,
    migrate, tier_sizes,
};
use crate::simulate::{SimulatedRank, Tier, World};
use dormouse_schedule::cost::{Fit, Rates, Sample, Weighting};
use dormouse_schedule::forest::Part;
use dormouse_schedule::layout::{LayoutOptions, Packed, Padded, Piece, pack_padded};
use dormouse_schedule::{Plan, Scoring, check_range};
use fields::{Fields, PlanRequest, reply};

pub use error::QueryError;
pub use forest::Trees;

/// Version of requests and replies. Within a version, fields are only added.
pub const QUERY_VERSION: u32 = 1;
/// Maximum request size in bytes; a forest of a million nodes takes about 50 MB.
pub const REQUEST_BYTES_MAX: usize = 1 << 30;

/// Name, description in Markdown, fields, and the function that answers it.
type Query = (
    &'static str,
    &'static str,
    &'static [&'static str],
    fn(&Fields<'_>) -> Result<String, QueryError>,
);

/// All queries, in the order of docs/queries/README.md.
const QUERIES: &[Query] = &[
    (
        "plan",
        "Plans the sequences of a forest, as `dormouse_plan_create` does. `loss` is \
         `\"all_but_first\"`, `{\"from\": 5}` or `{\"spans\": [{\"begin\": 2, \"end\": 4}]}`. \
         Omitted options are 0, false or unknown. A flat group is a tree of depth one; with \
         `runtime_residency` the runtime decides what sleeps.",
        &["forest", "scoring", "options"],
        |q| {
            let (forest, scoring) = (q.forest()?, q.get::<Vec<Scoring>>("scoring")?);
            let plan = Plan::new(&forest, &scoring, &q.get("options")?)?;
            reply(RawValue::from_string(plan.to_json())?)
        },
    ),
    (
        "rates",
        "Computes the cost rates of a model on a machine by counting operations: seconds per unit \
         of each feature.",
        &["model", "machine"],
        |q| reply(Rates::counted(&q.get("model")?, &q.get("machine")?)?),
    ),
    (
        "fit",
        "Fits cost rates to measured steps and reports which rates the samples determine. \
         `weighting` is `\"absolute\"` (the default) or `\"relative\"`.",
        &["samples", "weighting"],
        |q| {
            let samples: Vec<Sample> = q.get("samples")?;
            reply(Fit::new(&samples, q.get_or("weighting", Weighting::default())?)?)
        },
    ),
    (
        "shares",
        "Assigns the leaves of a forest to data-parallel ranks. `groups` (one number per \
         sequence) and `logit_rows` (one per node) are optional.",
        &["forest", "groups", "logit_rows", "options"],
        |q| {
            let (forest, groups) = (q.forest()?, q.get_or::<Vec<u32>>("groups", Vec::new())?);
            let logit_rows = q.get_or::<Vec<u64>>("logit_rows", Vec::new())?;
            let batch = Workload { forest: &forest, groups: &groups, logit_rows: &logit_rows };
            reply(Shares::new(&batch, &q.get("options")?)?)
        },
    ),
    (
        "part",
        "Extracts the part of a forest that a rank computes, given its `sequences`. Sequence i of \
         the part is `sequences[i]` of the whole, and node i is `nodes[i]`. The nodes of the \
         whole are kept as they are: a forest built from the rank's token ids alone would merge \
         nodes and have fewer ops than the other ranks expect. Plan the part with \
         `dormouse_forest_create` by nodes.",
        &["forest", "sequences"],
        |q| {
            /// A [`Part`] whose forest is given by its nodes.
            #[derive(Serialize)]
            struct Answer<N, S> {
                forest: Trees,
                nodes: N,
                sequences: S,
            }
            let sequences: Vec<u32> = q.get("sequences")?;
            let Part { forest, nodes, sequences } = q.forest()?.part_of_sequences(&sequences)?;
            reply(Answer { forest: Trees::from(&forest), nodes, sequences })
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
        &["passes"],
        |q| {
            let passes: Vec<Vec<PassKind>> = q.get("passes")?;
            check_range("ranks", passes.len() as u64, 1, RANKS_MAX.into())?;
            reply(CollectiveOrder::of(&passes))
        },
    ),
    (
        "shares_with_passes",
        "Recomputes the collectives of shares from the passes that the ranks' plans contain, \
         without exchanged nodes. `shares` assumes plans with `always_share`, no `block_rows` and \
         unlimited memory. Plans that run a forward twice or run leaves separately need this \
         query; otherwise ranks deadlock. Kinds may also be named as in ops \
         (`\"prefix_forward\"`, ...).",
        &["shares", "passes"],
        |q| {
            let passes: Vec<Vec<PassKind>> = q.get("passes")?;
            reply(q.get::<Shares>("shares")?.with_passes(&passes)?)
        },
    ),
    (
        "pipeline",
        "Computes the op lists of all pipeline stages. `sleep` is optional and says whether what prefixes save, and \
         `prefix_saved` counts, sleeps between their ops: `\"never\"` (the default), `\"always\"` or `\"chosen\"`: \
         the way that ends sooner, waits for copies at `rates.sleep_bytes_per_s` and `rates.wake_bytes_per_s` \
         included, asleep where only that has room, and awake without both rates. What `prefix_asleep` counts \
         always sleeps. No room bounds what sleeps: host memory is not counted. `report.prefix_saved_asleep` says what was \
         planned. For `world_of_pipeline`, which simulates the \
         waits, add then `prefix_saved` of each stage to its `prefix_asleep`; `report.makespan_ns` is without \
         them.",
        &["pipeline", "sleep"],
        |q| {
            let sleep = q.get_or("sleep", PrefixSleep::default())?;
            reply(q.get::<Pipeline>("pipeline")?.plan_with_sleep(sleep)?.1)
        },
    ),
    (
        "replicas",
        "Assigns the groups of a pipeline to data-parallel replicas of it, and computes the op lists of each \
         within `stage_room_bytes`: the replica that ends last ends as soon as could be found.",
        &["pipeline", "replicas"],
        |q| reply(q.get::<Pipeline>("pipeline")?.plan_replicas(q.get("replicas")?)?),
    ),
    (
        "pipeline_of_plans",
        "Describes the plans of flat groups as a pipeline, with costs by counting. Each plan has the \
         fields of `plan`; its `host_bytes` does not bound the pipeline. Set the pipeline's order and bounds, then pass it to `pipeline`.",
        &["plans", "stages", "virtual_stages"],
        |q| {
            let plans = q.get::<Vec<PlanRequest>>("plans")?.into_iter().map(PlanRequest::plan);
            let plans = plans.collect::<Result<Vec<Plan>, _>>()?;
            reply(Pipeline::of_plans(&plans, q.get("stages")?, q.get("virtual_stages")?)?)
        },
    ),
    (
        "pipeline_times",
        "Computes the start and end of every op in the given lists. `meeting` is \
         `\"overlapped\"`, `\"batched\"` or `\"one_by_one\"`.",
        &["pipeline", "stages", "meeting"],
        |q| {
            let stages: Stages = q.get("stages")?;
            reply(stages.times(&q.get("pipeline")?, q.get("meeting")?)?)
        },
    ),
    (
        "world_of_plan",
        "Describes a plan as one rank for `simulate`. `plan` has the fields of the query `plan`. \
         Each op is one step; a node that sleeps in `\"host\"` (the default) or `\"nvme\"` \
         takes one step per layer, forward and backward.",
        &["plan", "asleep"],
        |q| {
            let plan = q.get::<PlanRequest>("plan")?.plan()?;
            let rank = SimulatedRank::of_plan(&plan, q.get_or("asleep", Tier::Host)?)?;
            reply(World { ranks: vec![rank], ..World::default() })
        },
    ),
    (
        "world_of_pipeline",
        "Describes the op lists of a pipeline as ranks for `simulate`.",
        &["pipeline", "stages"],
        |q| reply(World::of_stages(&q.get("pipeline")?, &q.get("stages")?)?),
    ),
    (
        "simulate",
        "Simulates ranks, memory blocks and links, and reports when each event happens and what \
         waits for what.",
        &["world"],
        |q| reply(q.get::<World>("world")?.run()?),
    ),
    (
        "layout",
        "Lays out the rows of a microbatch, `\"packed\"` (the default) or `\"padded\"`.",
        &["pieces", "options", "form"],
        |q| {
            let pieces: Vec<Piece> = q.get("pieces")?;
            let options = q.get_or("options", LayoutOptions::default())?;
            match &*q.get_or("form", "packed".to_owned())? {
                "packed" => reply(BTreeMap::from([("packed", Packed::of(&pieces, &options)?)])),
                "padded" => reply(BTreeMap::from([("padded", Padded::of(&pieces, &options)?)])),
                seen => Err(QueryError::Form { seen: seen.to_owned() }),
            }
        },
    ),
    (
        "padded_microbatches",
        "Packs sequences into the fewest padded microbatches within a budget of rows.",
        &["rows", "budget_rows", "multiple"],
        |q| {
            let rows: Vec<u64> = q.get("rows")?;
            reply(pack_padded(&rows, q.get("budget_rows")?, q.get("multiple")?)?)
        },
    ),
    (
        "context",
        "Shards a prefix and a microbatch over a context-parallel group and lists the exchange of \
         K, V and gradients. An empty `prefix` means that the microbatch reads none, an empty \
         `microbatch` that its sequences are whole on their ranks and read the prefix. `cut` is \
         `\"contiguous\"`, `\"zigzag\"` or `{\"balanced\": {\"chunks\": 4}}`. `exchange` is \
         optional (`gathered`: `\"kept\"` or `\"again\"`; `reduced`: `\"each_microbatch\"` or \
         `\"before_c\"`; `room_bytes` for K, V and gradients, without it enough; `way`: \
         `\"all_gather\"` or `\"ring\"`, without it chosen). The answer prices an all-gather and a \
         ring, names the way that receives the fewest bytes of those that the room holds, and lists \
         its transfers.",
        &["prefix", "microbatch", "shards", "kv", "exchange"],
        |q| {
            #[derive(Serialize)]
            struct Answer {
                prefix: Shards,
                microbatch: Shards,
                exchange: KvExchange,
            }
            let shards: ShardOptions = q.get("shards")?;
            let prefix = match &q.get::<Vec<Piece>>("prefix")?[..] {
                [] => Shards::none(shards.ranks)?,
                pieces => Shards::of(pieces, &shards)?,
            };
            let microbatch = match &q.get::<Vec<Piece>>("microbatch")?[..] {
                [] if prefix.rows > 0 => Shards::none(shards.ranks)?,
                pieces => Shards::of(pieces, &shards)?,
            };
            let options = q.get_or("exchange", KvExchangeOptions::default())?;
            let exchange = KvExchange::of(&prefix, &microbatch, &q.get("kv")?, &options)?;
            reply(Answer { prefix, microbatch, exchange })
        },
    ),
    (
        "experts",
        "Lists the router statistics to capture and how often each counts in the auxiliary \
         losses. The backward of a microbatch is taken to follow its forward (docs/method.md §7). `microbatches` is the microbatch of each sequence's leaf; for a sequence that is \
         a complete prefix of others, of the first leaf below its end. `baseline.formula` is \
         `\"switch\"`, `\"pooled_layers\"` or `{\"running_counts\": {\"ranks\": 8, \
         \"microbatches\": 4}}`.",
        &["forest", "microbatches", "baseline", "router"],
        |q| {
            let (forest, microbatches) = (q.forest()?, q.get::<Vec<u32>>("microbatches")?);
            let (baseline, router) = (q.get("baseline")?, q.get("router")?);
            reply(Accounting::of(&forest, &microbatches, &baseline, &router)?)
        },
    ),
    (
        "experts_coefficients",
        "Computes the gradient of a scope's auxiliary loss with respect to its weighted sums, \
         from its weighted counts.",
        &["accounting", "scope", "counts"],
        |q| {
            let (accounting, counts): (Accounting, Vec<f64>) =
                (q.get("accounting")?, q.get("counts")?);
            reply(accounting.coefficients(q.get("scope")?, &counts)?)
        },
    ),
    (
        "rollout_predict",
        "Predicts the response length of each prompt from its history. `predictor` is optional.",
        &["history", "requests", "predictor"],
        |q| {
            let predictor = q.get_or("predictor", LengthPredictor::default())?;
            reply(predictor.predict(&q.get("history")?, &q.get::<Vec<_>>("requests")?)?)
        },
    ),
    (
        "rollout_assign",
        "Assigns prompts to rollout workers. `groups` and `slope_permille` are optional: without them, \
         groups, how many prompts each has, and tiers are chosen by trials on the history, never slower there \
         than equal tiers whose groups have equal numbers of prompts. Workers of an odd step ascend by predicted \
         time. An asynchronous trainer gives the prompts of the last worker to the first worker that is free.",
        &["history", "requests", "predictor", "options"],
        |q| {
            let (history, requests) = (q.get("history")?, q.get::<Vec<_>>("requests")?);
            let predictor = q.get_or("predictor", LengthPredictor::default())?;
            reply(Assignment::of(&history, &requests, &predictor, &q.get("options")?)?)
        },
    ),
    (
        "rollout_migrate",
        "Proposes migrations of rollouts that have outgrown their prediction, where they are predicted to \
         save more than they cost. `options` is optional, and in it `curve`, `recompute_permille`, \
         `late_permille`, `next_step` and `predictor`, that of the assignment. So is `history`, which says how much \
         longer rollouts with such predictions went on.",
        &["assignment", "requests", "history", "progress", "options"],
        |q| {
            let (assignment, requests) = (q.get("assignment")?, q.get::<Vec<_>>("requests")?);
            let options = q.get_or("options", MigrationOptions::default())?;
            let history = q.get_or("history", History::default())?;
            reply(migrate(&assignment, &requests, &history, &q.get("progress")?, &options)?)
        },
    ),
    (
        "rollout_after",
        "Applies migrations: returns the rollouts that continue in this step and those deferred \
         to the next. `progress`, with all that was deferred, is the progress of the next \
         `rollout_migrate`, `rollout_after` and `rollout_report`; `deferred` is what these migrations \
         defer.",
        &["progress", "migrations"],
        |q| {
            #[derive(Serialize)]
            struct Answer<D> {
                progress: Progress,
                deferred: D,
            }
            let (before, migrations) =
                (q.get::<Progress>("progress")?, q.get::<Vec<_>>("migrations")?);
            let progress = before.after(&migrations)?;
            let deferred = progress.deferred[before.deferred.len()..].to_vec();
            reply(Answer { progress, deferred })
        },
    ),
    (
        "rollout_report",
        "Compares predicted with actual rollout lengths. `curve` is optional.",
        &["assignment", "progress", "curve", "strong_permille"],
        |q| {
            let (assignment, progress) = (q.get("assignment")?, q.get("progress")?);
            let curve = q.get_or::<Option<Curve>>("curve", None)?;
            let strong_permille = q.get("strong_permille")?;
            reply(RolloutReport::of(&assignment, &progress, curve.as_ref(), strong_permille)?)
        },
    ),
    (
        "tiers",
        "Divides workers among groups of `[predicted tokens, responses]`.",
        &["curve", "groups", "workers", "slope_permille"],
        |q| {
            let (curve, groups) = (q.get("curve")?, q.get::<Vec<_>>("groups")?);
            let slope_permille = q.get_or("slope_permille", 0)?;
            reply(tier_sizes(&curve, &groups, q.get("workers")?, slope_permille)?)
        },
    ),
    (
        "draw",
        "Draws the op lists of a pipeline over time as one HTML page.",
        &["title", "pipeline", "stages"],
        |q| {
            let (title, pipeline) = (q.get::<String>("title")?, q.get("pipeline")?);
            reply(pipeline_page(&title, &pipeline, &q.get("stages")?)?)
        },
    ),
    (
        "draw_rank",
        "Draws the steps and copies of one simulated rank over time as SVG.",
        &["world", "rank"],
        |q| {
            let (world, rank): (World, usize) = (q.get("world")?, q.get("rank")?);
            let most = world.ranks.len().saturating_sub(1);
            let timeline = world.run()?;
            check_range("rank", rank as u64, 0, most as u64)?;
            reply(timeline.ranks.get(rank).map(rank_svg).unwrap_or_default())
        },
    ),
];

/// Returns the name and description of every query.
pub fn queries() -> impl Iterator<Item = (&'static str, &'static str)> {
    QUERIES.iter().map(|(name, description, ..)| (*name, *description))
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
    let fields: Fields<'_> = serde_json::from_str(request)?;
    let version = fields.get("version")?;
    if version != QUERY_VERSION {
        return Err(QueryError::Version { seen: version });
    }
    let seen: String = fields.get("query")?;
    let named = QUERIES.iter().find(|(name, ..)| *name == seen);
    let &(_, _, known, answer) = named.ok_or(QueryError::Unknown { seen })?;
    let is_known = |name: &str| known.contains(&name) || ["version", "query"].contains(&name);
    if let Some(path) = fields.0.keys().find(|name| !is_known(name)) {
        return Err(QueryError::Field { path: path.clone() });
    }
    answer(&fields)
}
