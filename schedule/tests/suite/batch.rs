//! The inputs of a plan in one struct.
#![allow(dead_code, reason = "each test file uses some of it")]

use std::ops::{Deref, DerefMut};

use dormouse_schedule::forest::{Forest, TokenInt};
use dormouse_schedule::{Loss, Plan, PlanError, PlanOptions, Scoring};

/// A forest, its scoring and its options.
#[derive(Clone, Debug, Default)]
pub(crate) struct Batch {
    pub(crate) forest: Forest,
    pub(crate) scoring: Vec<Scoring>,
    pub(crate) options: PlanOptions,
}

impl Batch {
    pub(crate) fn plan(&self) -> Result<Plan, PlanError> {
        Plan::new(&self.forest, &self.scoring, &self.options)
    }

    /// The same with other options.
    pub(crate) fn with(&self, change: impl FnOnce(&mut PlanOptions)) -> Self {
        let mut changed = self.clone();
        change(&mut changed.options);
        changed
    }
}

/// The forest of sequences in separate buffers.
pub(crate) fn from_slices<I: TokenInt>(
    sequences: &[&[I]],
    kinds: &[u64],
    vocab: u32,
) -> Result<Forest, PlanError> {
    let mut offsets = vec![0];
    for ids in sequences {
        offsets.push(offsets[offsets.len() - 1] + ids.len() as u64);
    }
    Forest::from_ids(&sequences.concat(), &offsets, kinds, vocab)
}

/// A prompt and its responses, each with its length and weight; the runtime decides residency.
#[derive(Clone, Debug, Default)]
pub(crate) struct FlatGroup {
    pub(crate) prompt: u64,
    pub(crate) responses: Vec<(u64, f64)>,
    pub(crate) options: PlanOptions,
}

impl FlatGroup {
    pub(crate) fn plan(&self) -> Result<Plan, PlanError> {
        let runtime_residency = true;
        self.planned(&PlanOptions { runtime_residency, always_share: true, ..self.options })
    }

    /// With nothing asleep.
    pub(crate) fn awake(&self) -> Result<Plan, PlanError> {
        self.planned(&PlanOptions { always_share: true, ..self.options })
    }

    fn planned(&self, options: &PlanOptions) -> Result<Plan, PlanError> {
        let lengths: Vec<u64> = self.responses.iter().map(|(length, _)| *length).collect();
        let scored = |weight: f64| Scoring { loss: Loss::From(self.prompt), weight };
        let scoring: Vec<Scoring> = self.responses.iter().map(|it| scored(it.1)).collect();
        Plan::new(&Forest::group(self.prompt, &lengths)?, &scoring, options)
    }
}

impl Deref for Batch {
    type Target = PlanOptions;

    fn deref(&self) -> &PlanOptions {
        &self.options
    }
}

impl DerefMut for Batch {
    fn deref_mut(&mut self) -> &mut PlanOptions {
        &mut self.options
    }
}

impl Deref for FlatGroup {
    type Target = PlanOptions;

    fn deref(&self) -> &PlanOptions {
        &self.options
    }
}

impl DerefMut for FlatGroup {
    fn deref_mut(&mut self) -> &mut PlanOptions {
        &mut self.options
    }
}
