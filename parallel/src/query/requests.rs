//! The fields of each query's request, and of answers that are no type of a module.

use serde::{Deserialize, Serialize};

use super::Trees;
use crate::balance::{BalanceOptions, PassKind, Shares};
use crate::context::{KvExchange, KvExchangeOptions, KvShape, ShardOptions, Shards};
use crate::experts::{Accounting, Baseline, Router};
use crate::pipeline::{Pipeline, Stages, TransferTiming};
use crate::rollout::{
    Assignment, Curve, History, LengthPredictor, Migration, MigrationOptions, Progress, Rollout,
    RolloutRequest, StepOptions,
};
use crate::simulate::{Tier, World};
use dormouse_schedule::cost::{Sample, Weighting};
use dormouse_schedule::forest::Forest;
use dormouse_schedule::layout::{LayoutOptions, Packed, Padded, Piece};
use dormouse_schedule::{Machine, ModelShape, NodeId, Plan, PlanError, PlanOptions, Scoring};

#[derive(Deserialize)]
pub(super) struct PlanRequest {
    forest: Trees,
    scoring: Vec<Scoring>,
    options: PlanOptions,
}

impl PlanRequest {
    pub(super) fn plan(self) -> Result<Plan, PlanError> {
        Plan::new(&Forest::try_from(self.forest)?, &self.scoring, &self.options)
    }
}

#[derive(Deserialize)]
pub(super) struct RatesRequest {
    pub(super) model: ModelShape,
    pub(super) machine: Machine,
}

#[derive(Deserialize)]
pub(super) struct FitRequest {
    pub(super) samples: Vec<Sample>,
    #[serde(default)]
    pub(super) weighting: Weighting,
}

#[derive(Deserialize)]
pub(super) struct SharesRequest {
    pub(super) forest: Trees,
    #[serde(default)]
    pub(super) groups: Vec<u32>,
    #[serde(default)]
    pub(super) logit_rows: Vec<u64>,
    pub(super) options: BalanceOptions,
}

#[derive(Deserialize)]
pub(super) struct PartRequest {
    pub(super) forest: Trees,
    pub(super) sequences: Vec<u32>,
}

/// A [`Part`](dormouse_schedule::forest::Part) whose forest is given by its nodes.
#[derive(Serialize)]
pub(super) struct PartAnswer {
    pub(super) forest: Trees,
    pub(super) nodes: Vec<NodeId>,
    pub(super) sequences: Vec<u32>,
}

#[derive(Deserialize)]
pub(super) struct CollectiveOrderRequest {
    pub(super) passes: Vec<Vec<PassKind>>,
}

#[derive(Deserialize)]
pub(super) struct PassesRequest {
    pub(super) shares: Shares,
    pub(super) passes: Vec<Vec<PassKind>>,
}

#[derive(Deserialize)]
pub(super) struct PipelineRequest {
    pub(super) pipeline: Pipeline,
}

#[derive(Deserialize)]
pub(super) struct PipelineOfPlansRequest {
    pub(super) plans: Vec<PlanRequest>,
    pub(super) stages: u32,
    pub(super) virtual_stages: u32,
}

#[derive(Deserialize)]
pub(super) struct TimesRequest {
    pub(super) pipeline: Pipeline,
    pub(super) stages: Stages,
    pub(super) meeting: TransferTiming,
}

#[derive(Deserialize)]
pub(super) struct PlanWorldRequest {
    pub(super) plan: PlanRequest,
    #[serde(default = "host")]
    pub(super) asleep: Tier,
}

const fn host() -> Tier {
    Tier::Host
}

#[derive(Deserialize)]
pub(super) struct StagesRequest {
    pub(super) pipeline: Pipeline,
    pub(super) stages: Stages,
}

#[derive(Deserialize)]
pub(super) struct SimulateRequest {
    pub(super) world: World,
}

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LayoutForm {
    #[default]
    Packed,
    Padded,
}

#[derive(Deserialize)]
pub(super) struct LayoutRequest {
    pub(super) pieces: Vec<Piece>,
    #[serde(default)]
    pub(super) options: LayoutOptions,
    #[serde(default)]
    pub(super) form: LayoutForm,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LayoutAnswer {
    Packed(Packed),
    Padded(Padded),
}

#[derive(Deserialize)]
pub(super) struct PackRequest {
    pub(super) rows: Vec<u64>,
    pub(super) budget_rows: u64,
    pub(super) multiple: u32,
}

#[derive(Deserialize)]
pub(super) struct ContextRequest {
    pub(super) prefix: Vec<Piece>,
    pub(super) microbatch: Vec<Piece>,
    pub(super) shards: ShardOptions,
    pub(super) kv: KvShape,
    #[serde(default)]
    pub(super) exchange: KvExchangeOptions,
}

#[derive(Serialize)]
pub(super) struct ContextAnswer {
    pub(super) prefix: Shards,
    pub(super) microbatch: Shards,
    pub(super) exchange: KvExchange,
}

#[derive(Deserialize)]
pub(super) struct ExpertsRequest {
    pub(super) forest: Trees,
    pub(super) microbatches: Vec<u32>,
    pub(super) baseline: Baseline,
    pub(super) router: Router,
}

#[derive(Deserialize)]
pub(super) struct CoefficientsRequest {
    pub(super) accounting: Accounting,
    pub(super) scope: u32,
    pub(super) counts: Vec<f64>,
}

#[derive(Deserialize)]
pub(super) struct PredictRequest {
    pub(super) history: History,
    pub(super) requests: Vec<RolloutRequest>,
    #[serde(default)]
    pub(super) predictor: LengthPredictor,
}

#[derive(Deserialize)]
pub(super) struct AssignRequest {
    pub(super) history: History,
    pub(super) requests: Vec<RolloutRequest>,
    #[serde(default)]
    pub(super) predictor: LengthPredictor,
    pub(super) options: StepOptions,
}

#[derive(Deserialize)]
pub(super) struct MigrateRequest {
    pub(super) assignment: Assignment,
    pub(super) requests: Vec<RolloutRequest>,
    pub(super) progress: Progress,
    #[serde(default)]
    pub(super) options: MigrationOptions,
}

#[derive(Deserialize)]
pub(super) struct AfterRequest {
    pub(super) progress: Progress,
    pub(super) migrations: Vec<Migration>,
}

#[derive(Serialize)]
pub(super) struct AfterAnswer {
    pub(super) progress: Progress,
    pub(super) deferred: Vec<Rollout>,
}

#[derive(Deserialize)]
pub(super) struct ReportRequest {
    pub(super) assignment: Assignment,
    pub(super) progress: Progress,
    pub(super) curve: Option<Curve>,
    pub(super) strong_permille: u32,
}

#[derive(Deserialize)]
pub(super) struct TiersRequest {
    pub(super) curve: Curve,
    pub(super) groups: Vec<Vec<(u64, u32)>>,
    pub(super) workers: u32,
    #[serde(default)]
    pub(super) slope_permille: u32,
}

#[derive(Deserialize)]
pub(super) struct DrawRequest {
    pub(super) title: String,
    pub(super) pipeline: Pipeline,
    pub(super) stages: Stages,
}

#[derive(Deserialize)]
pub(super) struct DrawRankRequest {
    pub(super) world: World,
    pub(super) rank: usize,
}
