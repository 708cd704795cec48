//! Plans as text: of a batch of trees, of a flat group.

use serde::Deserialize;
use serde_json::value::RawValue;

use super::{Query, QueryError, Trees};
use dormouse_schedule::{Batch, Machine, ModelShape, Plan, Scoring, Spec};

/// A [`Batch`] with its forest by nodes; what is left out is 0 or false.
#[derive(Deserialize)]
pub(super) struct OfBatch {
    forest: Trees,
    scoring: Vec<Scoring>,
    vocab: u32,
    #[serde(default)]
    microbatch_rows: u32,
    #[serde(default)]
    block_rows: u64,
    #[serde(default)]
    wake_window_layers: u32,
    #[serde(default)]
    last_layer_dead: bool,
    #[serde(default)]
    device_bytes: u64,
    #[serde(default)]
    host_bytes: u64,
    #[serde(default)]
    always_share: bool,
    model: ModelShape,
    machine: Option<Machine>,
}

impl OfBatch {
    pub(super) fn batch(self) -> Result<Batch, QueryError> {
        Ok(Batch {
            forest: self.forest.try_into()?,
            scoring: self.scoring,
            vocab: self.vocab,
            microbatch_rows: self.microbatch_rows,
            block_rows: self.block_rows,
            wake_window_layers: self.wake_window_layers,
            last_layer_dead: self.last_layer_dead,
            device_bytes: self.device_bytes,
            host_bytes: self.host_bytes,
            always_share: self.always_share,
            model: self.model,
            machine: self.machine,
        })
    }
}

impl Query for OfBatch {
    type Answer = Box<RawValue>;

    fn answer(self) -> Result<Box<RawValue>, QueryError> {
        Ok(RawValue::from_string(Plan::of_batch(&self.batch()?)?.to_json())?)
    }
}

#[derive(Deserialize)]
pub(super) struct OfGroup {
    group: Spec,
}

impl Query for OfGroup {
    type Answer = Box<RawValue>;

    fn answer(self) -> Result<Box<RawValue>, QueryError> {
        Ok(RawValue::from_string(Plan::new(self.group)?.to_json())?)
    }
}
