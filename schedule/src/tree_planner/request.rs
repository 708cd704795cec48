//! The inputs of a plan: a forest, its scoring and the options.

use serde::{Deserialize, Serialize};

use crate::forest::Forest;
use crate::limits::{NODES_MAX, TOKENS_MAX, WAKE_WINDOW_LAYERS, WAKE_WINDOW_LAYERS_MIN};
use crate::model::count;
use crate::{Machine, ModelShape, PlanError, Span};

/// Which tokens of a sequence are labels that carry loss. A token's position is its index.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Loss {
    /// All tokens but the first, which no row predicts.
    #[default]
    AllButFirst,
    /// Tokens from this position on; none if it is the sequence's length.
    From(u64),
    /// Tokens in ascending spans, for example several turns.
    Spans(Vec<Span>),
}

/// The contribution of a sequence to the loss.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Scoring {
    /// Its labels.
    pub loss: Loss,
    /// Its weight α, finite.
    pub weight: f64,
}

impl Scoring {
    /// Returns the spans of its labels in order. `one` stores a span that is not in a list.
    pub(crate) fn spans<'a>(&'a self, tokens: u64, one: &'a mut Span) -> &'a [Span] {
        let begin = match &self.loss {
            Loss::AllButFirst => 1,
            Loss::From(first) => (*first).max(1),
            Loss::Spans(spans) => return spans,
        };
        *one = Span { begin, end: tokens.max(begin) };
        std::slice::from_ref(one)
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

/// The options of a plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PlanOptions {
    /// Size of the vocabulary, which is the number of logits of a row.
    pub vocab: u32,
    /// Maximum rows of a microbatch. 0 selects the largest size that fits `device_bytes`, or a smaller
    /// one, down to an eighth, if the machine's rates predict a shorter step.
    pub microbatch_rows: u32,
    /// Maximum rows computed at once: a longer node runs as a chain of blocks. 0 for no limit.
    pub block_rows: u64,
    /// Layers woken ahead of need. 0 selects the default; the minimum is 2, since a layer falls asleep
    /// when the next one is done.
    pub wake_window_layers: u32,
    /// Whether the last layer needs no output on rows without labels (docs/method.md §4).
    pub last_layer_dead: bool,
    /// Device memory budget in bytes for what a plan counts; 0 selects the machine's.
    pub device_bytes: u64,
    /// Host memory budget in bytes for sleeping tensors; 0 selects the machine's.
    pub host_bytes: u64,
    /// Whether to share even if the additional ops take longer than sharing saves.
    pub always_share: bool,
    /// Whether the runtime decides what sleeps: any shared node may sleep, and subtrees run in the given order.
    /// Memory budgets then set the verdict and refuse no plan.
    pub runtime_residency: bool,
    /// The model.
    pub model: ModelShape,
    /// The machine, if known.
    pub machine: Option<Machine>,
}

/// A checked forest with its scoring and options.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Request<'a> {
    pub(crate) forest: &'a Forest,
    pub(crate) scoring: &'a [Scoring],
    pub(crate) options: &'a PlanOptions,
    /// Device memory in bytes, if it is a limit.
    pub(crate) device_bytes: Option<u64>,
    /// Host memory in bytes, if it is a limit.
    pub(crate) host_bytes: Option<u64>,
}

impl PlanOptions {
    /// Returns the machine with the memory budgets of the plan. Unknown rates are 0.
    #[must_use]
    pub fn planned_machine(&self) -> Machine {
        let machine = self.machine.unwrap_or_default();
        let or = |own: u64, machines: u64| if own > 0 { own } else { machines };
        Machine {
            device_bytes: or(self.device_bytes, machine.device_bytes),
            host_bytes: or(self.host_bytes, machine.host_bytes),
            ..machine
        }
    }

    /// Returns the number of layers of a sleeping node that are awake at once.
    #[must_use]
    pub fn window_layers(&self) -> u32 {
        let window = match self.wake_window_layers {
            0 => WAKE_WINDOW_LAYERS,
            layers => layers.max(WAKE_WINDOW_LAYERS_MIN),
        };
        window.min(self.model.layers)
    }
}

/// Checks that every sequence of a forest has a scoring.
fn check_number(forest: &Forest, scoring: &[Scoring]) -> Result<(), PlanError> {
    let sequences = forest.endings().len();
    if scoring.len() == sequences {
        return Ok(());
    }
    let accepted = format!("{sequences}, one for each sequence");
    Err(PlanError::Count { what: "scoring", seen: scoring.len() as u64, accepted })
}

/// Checks that every scoring fits its sequence.
fn check_labels(forest: &Forest, scoring: &[Scoring]) -> Result<(), PlanError> {
    let mut both = scoring.iter().zip(forest.endings()).enumerate();
    both.try_for_each(|(sequence, (scoring, ending))| scoring.check(sequence, ending.tokens))
}

/// Checks the scoring of a forest.
pub(crate) fn check_scoring(forest: &Forest, scoring: &[Scoring]) -> Result<(), PlanError> {
    check_number(forest, scoring)?;
    check_labels(forest, scoring)
}

fn known(bytes: u64) -> Option<u64> {
    (bytes > 0).then_some(bytes)
}

impl<'a> Request<'a> {
    /// Checks every value.
    pub(crate) fn new(
        forest: &'a Forest,
        scoring: &'a [Scoring],
        options: &'a PlanOptions,
    ) -> Result<Self, PlanError> {
        count("sequences", forest.endings().len() as u64, 1, NODES_MAX as u64)?;
        check_number(forest, scoring)?;
        count("vocab", options.vocab, 1, u32::MAX)?;
        options.model.check(options.last_layer_dead)?;
        let Machine { device_bytes, host_bytes, .. } = options.planned_machine();
        let device_bytes = known(device_bytes).filter(|_| !options.runtime_residency);
        if options.microbatch_rows == 0 && device_bytes.is_none() {
            let accepted = match options.runtime_residency {
                true => format!("1 to {} with runtime_residency", u32::MAX),
                false => format!("1 to {}, or 0 with device_bytes", u32::MAX),
            };
            return Err(PlanError::Count { what: "microbatch_rows", seen: 0, accepted });
        }
        count("block_rows", options.block_rows, 0, TOKENS_MAX)?;
        check_labels(forest, scoring)?;
        Ok(Self { forest, scoring, options, device_bytes, host_bytes: known(host_bytes) })
    }
}
