//! Checks of routers and baselines: refuses what a shared prefix cannot reproduce.

use super::{Baseline, Formula, Router, STATISTICS_MAX, Selection};
use dormouse_schedule::forest::Forest;
use dormouse_schedule::{PlanError, check_range};

/// An error of router accounting.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
#[non_exhaustive]
pub enum ExpertsError {
    /// A number is out of range.
    #[error(transparent)]
    Count(#[from] PlanError),
    /// A coefficient or weight is not finite.
    #[error("{what} is {seen}; accepted: finite numbers")]
    NotFinite {
        /// Name of the value.
        what: &'static str,
        /// The value seen.
        seen: f64,
    },
    /// A scope spans several microbatches, each of whose backwards follows its forward.
    #[error(
        "scope {scope} spans microbatches {first} and {second}, so the backward of one begins before the other is \
         counted; accepted: one microbatch per scope, or the approximation cut_at_microbatches; a trainer that \
         runs all forwards before its backwards counts first and needs neither"
    )]
    ScopeSpansMicrobatches {
        /// Scope number.
        scope: u32,
        /// Microbatch of one of its sequences.
        first: u32,
        /// Microbatch of another.
        second: u32,
    },
    /// Running counts require the microbatches of the baseline.
    #[error(
        "sequence {sequence} runs in microbatch {microbatch}; accepted: {dense_microbatch}, as in the dense run, \
         because a global-batch loss depends on the order of microbatches"
    )]
    NotTheDenseMicrobatches {
        /// Sequence number.
        sequence: u32,
        /// Its microbatch in the baseline.
        dense_microbatch: u32,
        /// Its microbatch.
        microbatch: u32,
    },
    /// A feature of the router that a shared prefix cannot reproduce.
    #[error("{0}")]
    Router(&'static str),
}

/// Checks a router.
pub(super) fn router(router: &Router) -> Result<(), ExpertsError> {
    let selected = |selection| router.selection == selection;
    let refused = [
        (
            selected(Selection::ExpertChoice),
            "expert choice: experts choose among all copies of a row; accepted: top_k",
        ),
        (
            selected(Selection::Sinkhorn),
            "sinkhorn: a row's experts depend on all rows of the baseline's microbatch; \
             accepted: top_k",
        ),
        (
            selected(Selection::BalancedAssignment),
            "balanced assignment: a row's experts depend on all copies of a row; accepted: top_k",
        ),
        (
            router.capacity_limit,
            "capacity limit: the rows that an expert accepts depend on every copy of a row; \
             accepted: none",
        ),
        (
            router.drops_tokens,
            "token dropping: a shared row is dropped for all its sequences or for none; \
             accepted: none",
        ),
        (
            router.jitter,
            "router jitter: the baseline draws different noise for every copy of a row; \
             accepted: none",
        ),
        (
            router.counts_padding,
            "statistics that count padding: the baseline's padding rows do not run; \
             accepted: none",
        ),
    ];
    if let Some((_, reason)) = refused.into_iter().find(|(is_set, _)| *is_set) {
        return Err(ExpertsError::Router(reason));
    }
    finite("aux_coefficient", router.aux_coefficient)?;
    finite("z_coefficient", router.z_coefficient)?;
    check_range("experts", router.experts, 1, u32::MAX)?;
    check_range("top_k", router.top_k, 1, router.experts)?;
    check_range("router layers", router.layers, 1, dormouse_schedule::LAYERS_MAX)?;
    let statistics = u64::from(router.experts) * u64::from(router.layers);
    Ok(check_range("experts of all router layers", statistics, 1, STATISTICS_MAX)?)
}

/// Checks scopes and microbatches.
pub(super) fn baseline(
    forest: &Forest,
    of_sequence: &[u32],
    baseline: &Baseline,
) -> Result<(), ExpertsError> {
    let sequences = forest.endings().len() as u64;
    check_range("microbatches of sequences", of_sequence.len() as u64, sequences, sequences)?;
    check_range("scopes of sequences", baseline.scopes.len() as u64, sequences, sequences)?;
    let last_scope = baseline.scopes.iter().max().map_or(0, |scope| u64::from(*scope));
    check_range("scope_weights", baseline.scope_weights.len() as u64, last_scope + 1, u64::MAX)?;
    for weight in &baseline.scope_weights {
        finite("a scope's weight", *weight)?;
    }
    if let Formula::RunningCounts { ranks, microbatches } = baseline.formula {
        check_range("ranks of a global batch", ranks, 1, u32::MAX)?;
        check_range("microbatches", u64::from(microbatches), last_scope + 1, last_scope + 1)?;
        for (sequence, (&dense_microbatch, &microbatch)) in
            (0..).zip(baseline.scopes.iter().zip(of_sequence))
        {
            if dense_microbatch != microbatch {
                return Err(ExpertsError::NotTheDenseMicrobatches {
                    sequence,
                    dense_microbatch,
                    microbatch,
                });
            }
        }
    }
    Ok(())
}

fn finite(what: &'static str, seen: f64) -> Result<(), ExpertsError> {
    if seen.is_finite() { Ok(()) } else { Err(ExpertsError::NotFinite { what, seen }) }
}
