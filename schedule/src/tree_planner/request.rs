//! What is asked for: a forest, what of it is scored, and how to run it.

use serde::{Deserialize, Serialize};

use crate::forest::Forest;
use crate::limits::{NODES_MAX, TOKENS_MAX, WAKE_WINDOW_LAYERS, WAKE_WINDOW_LAYERS_MIN};
use crate::model::count;
use crate::{Machine, ModelShape, PlanError, Span, Spec};

/// Which tokens of a sequence are labels that carry loss. A token's position is its index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// All but the first, which no row predicts.
    #[default]
    AllButFirst,
    /// Those from this position on; none where it is the sequence's length.
    From(u64),
    /// Those in spans after one another, as several turns have.
    Spans(Vec<Span>),
}

/// What one sequence contributes to the loss.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scoring {
    /// Its labels.
    pub loss: Loss,
    /// Its weight α: finite, of any sign.
    pub weight: f64,
}

impl Scoring {
    /// Its labels' runs of positions, in order, none empty.
    pub(crate) fn spans(&self, tokens: u64) -> SpanList<'_> {
        match &self.loss {
            Loss::AllButFirst => SpanList::One(Span { begin: 1, end: tokens.max(1) }),
            Loss::From(first) => {
                let first = (*first).max(1);
                SpanList::One(Span { begin: first, end: tokens.max(first) })
            }
            Loss::Spans(spans) => SpanList::Many(spans),
        }
    }

    fn check(&self, sequence: usize, tokens: u64) -> Result<(), PlanError> {
        if !self.weight.is_finite() {
            return Err(PlanError::Weight { index: sequence, seen: self.weight });
        }
        let refuse = |begin, end| Err(PlanError::Labels { sequence, begin, end, tokens });
        match &self.loss {
            Loss::AllButFirst => Ok(()),
            Loss::From(first) if *first > tokens => refuse(*first, tokens),
            Loss::From(_) => Ok(()),
            Loss::Spans(spans) => {
                let mut before = 1;
                for span in spans {
                    if span.begin < before || span.end <= span.begin || span.end > tokens {
                        return refuse(span.begin, span.end);
                    }
                    before = span.end;
                }
                Ok(())
            }
        }
    }
}

/// One span without a list of its own, or a list.
#[derive(Clone, Copy, Debug)]
pub(crate) enum SpanList<'a> {
    One(Span),
    Many(&'a [Span]),
}

impl SpanList<'_> {
    pub(crate) fn as_slice(&self) -> &[Span] {
        match self {
            Self::One(span) => std::slice::from_ref(span),
            Self::Many(spans) => spans,
        }
    }
}

/// A rollout batch over prefix trees and how to run it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Batch {
    /// Which sequences share what.
    pub forest: Forest,
    /// One for each sequence of the forest.
    pub scoring: Vec<Scoring>,
    /// Token ids are below this; also the logits of a row.
    pub vocab: u32,
    /// Most rows of one microbatch; 0 takes the most that fit, which needs a budget of device memory. Where
    /// the machine says what operations and an op cost, it may take fewer, down to an eighth: those
    /// with which all is predicted to take least time, as less need sleep or run twice.
    pub microbatch_rows: u32,
    /// Longest run of rows computed at once: longer nodes run as chains of blocks; 0 for any.
    pub block_rows: u64,
    /// Layers woken ahead of need; 0 leaves it to the plan, and 1 is 2: a layer falls asleep when the
    /// next is done.
    pub wake_window_layers: u32,
    /// The last layer needs no output on rows that nothing scores (docs/method.md §4).
    pub last_layer_dead: bool,
    /// Bytes of device memory for what a plan counts; 0 for the machine's.
    pub device_bytes: u64,
    /// Bytes of host memory for what sleeps; 0 for the machine's.
    pub host_bytes: u64,
    /// Share also where the ops that sharing costs take longer than what it saves.
    pub always_share: bool,
    /// The model.
    pub model: ModelShape,
    /// The machine, where known.
    pub machine: Option<Machine>,
}

/// A batch or a flat group, checked, in the terms the planner works with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) forest: &'a Forest,
    pub(crate) scoring: &'a [Scoring],
    pub(crate) model: &'a ModelShape,
    pub(crate) machine: Machine,
    pub(crate) vocab: u32,
    pub(crate) microbatch_rows: u32,
    pub(crate) block_rows: u64,
    pub(crate) window: u32,
    pub(crate) last_layer_dead: bool,
    /// Bytes of the device, where there is a limit.
    pub(crate) device_bytes: Option<u64>,
    /// Bytes of the host, where there is a limit.
    pub(crate) host_bytes: Option<u64>,
    pub(crate) always_share: bool,
    /// The runtime decides what sleeps: every node may, in the order given, and none must.
    pub(crate) open: bool,
}

fn window(asked: u32, model: &ModelShape) -> u32 {
    let window = if asked == 0 { WAKE_WINDOW_LAYERS } else { asked.max(WAKE_WINDOW_LAYERS_MIN) };
    window.min(model.layers)
}

fn known(bytes: u64) -> Option<u64> {
    (bytes > 0).then_some(bytes)
}

impl<'a> Request<'a> {
    /// A flat group, of which the caller made the forest and the scoring.
    pub(crate) fn flat(spec: &'a Spec, forest: &'a Forest, scoring: &'a [Scoring]) -> Self {
        Self {
            forest,
            scoring,
            model: &spec.model,
            machine: spec.machine.unwrap_or_default(),
            vocab: spec.vocab,
            microbatch_rows: spec.microbatch_tokens,
            block_rows: 0,
            window: window(spec.wake_window_layers, &spec.model),
            last_layer_dead: spec.last_layer_dead,
            device_bytes: None,
            host_bytes: None,
            always_share: true,
            open: true,
        }
    }
}

impl Batch {
    /// Every reason to refuse, in the order a reader would look for them.
    pub(crate) fn request(&self) -> Result<Request<'_>, PlanError> {
        let machine = self.machine.unwrap_or_default();
        let endings = self.forest.endings();
        if endings.is_empty() || endings.len() > NODES_MAX {
            return refuse("sequences", endings.len(), format!("1 to {NODES_MAX}"));
        }
        if self.scoring.len() != endings.len() {
            let accepted = format!("{}, one a sequence", endings.len());
            return refuse("scoring", self.scoring.len(), accepted);
        }
        count("vocab", self.vocab, 1, u32::MAX)?;
        self.model.check(self.last_layer_dead)?;
        let device_bytes = known(self.device_bytes).or(known(machine.device_bytes));
        if self.microbatch_rows == 0 && device_bytes.is_none() {
            let accepted = format!("1 to {}, or 0 with device_bytes", u32::MAX);
            return Err(PlanError::Count { what: "microbatch_rows", seen: 0, accepted });
        }
        count("block_rows", self.block_rows, 0, TOKENS_MAX)?;
        for (sequence, (scoring, ending)) in self.scoring.iter().zip(endings).enumerate() {
            scoring.check(sequence, ending.tokens)?;
        }
        Ok(Request {
            forest: &self.forest,
            scoring: &self.scoring,
            model: &self.model,
            machine,
            vocab: self.vocab,
            microbatch_rows: self.microbatch_rows,
            block_rows: self.block_rows,
            window: window(self.wake_window_layers, &self.model),
            last_layer_dead: self.last_layer_dead,
            device_bytes,
            host_bytes: known(self.host_bytes).or(known(machine.host_bytes)),
            always_share: self.always_share,
            open: false,
        })
    }
}

fn refuse<T>(what: &'static str, seen: usize, accepted: String) -> Result<T, PlanError> {
    Err(PlanError::Count { what, seen: seen as u64, accepted })
}
