//! Rows of microbatches: laid out, cut for a context group, counted for routers.

use serde::{Deserialize, Serialize};

use super::{Query, QueryError, Trees};
use crate::context::{KvExchange, KvExchangeOptions, KvShape, ShardOptions, Shards};
use crate::experts::{Accounting, Baseline, Router};
use dormouse_schedule::forest::Forest;
use dormouse_schedule::layout::{
    LayoutOptions, Packed, Padded, PaddedMicrobatch, Piece, pack_padded,
};

#[derive(Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Form {
    #[default]
    Packed,
    Padded,
}

#[derive(Deserialize)]
pub(super) struct Laid {
    pieces: Vec<Piece>,
    #[serde(default)]
    options: LayoutOptions,
    #[serde(default)]
    form: Form,
}

#[derive(Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Layout {
    Packed(Packed),
    Padded(Padded),
}

impl Query for Laid {
    type Answer = Layout;

    fn answer(self) -> Result<Layout, QueryError> {
        Ok(match self.form {
            Form::Packed => Layout::Packed(Packed::of(&self.pieces, &self.options)?),
            Form::Padded => Layout::Padded(Padded::of(&self.pieces, &self.options)?),
        })
    }
}

#[derive(Deserialize)]
pub(super) struct PaddedMicrobatches {
    rows: Vec<u64>,
    budget_rows: u64,
    multiple: u32,
}

impl Query for PaddedMicrobatches {
    type Answer = Vec<PaddedMicrobatch>;

    fn answer(self) -> Result<Vec<PaddedMicrobatch>, QueryError> {
        Ok(pack_padded(&self.rows, self.budget_rows, self.multiple)?)
    }
}

#[derive(Deserialize)]
pub(super) struct Sharded {
    /// None of what reads none.
    prefix: Vec<Piece>,
    microbatch: Vec<Piece>,
    shards: ShardOptions,
    kv: KvShape,
    #[serde(default)]
    exchange: KvExchangeOptions,
}

#[derive(Serialize)]
pub(super) struct Context {
    prefix: Shards,
    microbatch: Shards,
    exchange: KvExchange,
}

impl Query for Sharded {
    type Answer = Context;

    fn answer(self) -> Result<Context, QueryError> {
        let prefix = match &self.prefix[..] {
            [] => Shards::none(self.shards.ranks)?,
            pieces => Shards::of(pieces, &self.shards)?,
        };
        let microbatch = Shards::of(&self.microbatch, &self.shards)?;
        let exchange = KvExchange::of(&prefix, &microbatch, &self.kv, &self.exchange)?;
        Ok(Context { prefix, microbatch, exchange })
    }
}

#[derive(Deserialize)]
pub(super) struct Accounted {
    forest: Trees,
    microbatches: Vec<u32>,
    baseline: Baseline,
    router: Router,
}

impl Query for Accounted {
    type Answer = Accounting;

    fn answer(self) -> Result<Accounting, QueryError> {
        let forest = Forest::try_from(self.forest)?;
        Ok(Accounting::of(&forest, &self.microbatches, &self.baseline, &self.router)?)
    }
}

#[derive(Deserialize)]
pub(super) struct Coefficients {
    accounting: Accounting,
    scope: u32,
    counts: Vec<f64>,
}

impl Query for Coefficients {
    type Answer = Vec<f64>;

    fn answer(self) -> Result<Vec<f64>, QueryError> {
        Ok(self.accounting.coefficients(self.scope, &self.counts)?)
    }
}
