//! Counts copies: the portions that each scope reads, with multiplicity and normaliser.

use std::collections::BTreeMap;

use super::portions::Cuts;
use super::{
    Accounting, Baseline, ExpertsError, Formula, LastLayer, Portion, Read, Router, ScopeTerms,
    Spanning, VISITS_MAX, refuse,
};
use dormouse_schedule::{check_range, forest::Forest};

impl Accounting {
    /// Computes the accounting of a forest. `microbatches[i]` is the microbatch of sequence i's leaf; for a
    /// sequence that is a complete prefix of others, of the first leaf below its end.
    ///
    /// # Errors
    /// [`ExpertsError`] for numbers out of range and for router features that a shared prefix cannot
    /// reproduce.
    pub fn of(
        forest: &Forest,
        microbatches: &[u32],
        baseline: &Baseline,
        router: &Router,
    ) -> Result<Self, ExpertsError> {
        refuse::router(router)?;
        refuse::baseline(forest, microbatches, baseline)?;
        let cuts = Cuts::of(forest, baseline.feeds_last_token);
        let scopes = scopes(forest, &cuts, microbatches, baseline, router)?;
        let mut portions: Vec<Portion> = cuts
            .all
            .iter()
            .map(|cut| Portion { node: cut.node, rows: cut.rows, copies: 0, z_weight: 0.0 })
            .collect();
        for terms in &scopes {
            let row_weight = router.z_coefficient * terms.weight / terms.tokens as f64;
            for read in &terms.reads {
                let portion = &mut portions[read.portion as usize];
                portion.copies += u64::from(read.copies);
                portion.z_weight += row_weight * f64::from(read.copies);
            }
        }
        let loss = router.aux_coefficient != 0.0;
        Ok(Self {
            formula: baseline.formula,
            layers: router.layers,
            experts: router.experts,
            counts: loss || router.counts_wanted,
            sums: loss,
            portions,
            scopes,
            last_layer: last_layer(router),
        })
    }
}

fn scopes(
    forest: &Forest,
    cuts: &Cuts,
    microbatches: &[u32],
    baseline: &Baseline,
    router: &Router,
) -> Result<Vec<ScopeTerms>, ExpertsError> {
    let tokens_of = |one: &usize| cuts.fed(forest.endings()[*one].tokens);
    let parts = parts(microbatches, baseline)?;
    let mut wholes: BTreeMap<u32, u64> = BTreeMap::new();
    for ((scope, _), members) in &parts {
        *wholes.entry(*scope).or_default() += members.iter().map(tokens_of).sum::<u64>();
    }
    let mut visits = 0;
    let mut scopes = Vec::with_capacity(parts.len());
    for ((scope, microbatch), members) in parts {
        let tokens: u64 = members.iter().map(tokens_of).sum();
        check_range("tokens of a scope", tokens, 1, u64::MAX)?;
        let share = tokens as f64 / wholes[&scope] as f64;
        let weight = baseline.scope_weights[scope as usize] * share;
        let loss_scale = weight * router.aux_coefficient * f64::from(router.experts);
        let (count_scale, probability_scale) = normalisers(scope, tokens, baseline, router);
        let reads = reads(forest, cuts, &members, &mut visits)?;
        scopes.push(ScopeTerms {
            scope,
            microbatch,
            tokens,
            weight,
            loss_scale,
            count_scale,
            probability_scale,
            reads,
        });
    }
    Ok(scopes)
}

/// Groups sequences by scope and microbatch.
fn parts(
    microbatches: &[u32],
    baseline: &Baseline,
) -> Result<BTreeMap<(u32, u32), Vec<usize>>, ExpertsError> {
    let mut parts: BTreeMap<(u32, u32), Vec<usize>> = BTreeMap::new();
    for (sequence, (&scope, &microbatch)) in baseline.scopes.iter().zip(microbatches).enumerate() {
        parts.entry((scope, microbatch)).or_default().push(sequence);
    }
    if baseline.spanning == Spanning::Refuse {
        for (one, other) in parts.keys().zip(parts.keys().skip(1)) {
            if one.0 == other.0 {
                let (scope, first, second) = (one.0, one.1, other.1);
                return Err(ExpertsError::ScopeSpansMicrobatches { scope, first, second });
            }
        }
    }
    Ok(parts)
}

/// Returns the factors of a scope's counts and sums.
fn normalisers(scope: u32, tokens: u64, baseline: &Baseline, router: &Router) -> (f64, f64) {
    let tokens = tokens as f64;
    let (k, layers) = (f64::from(router.top_k), f64::from(router.layers));
    match baseline.formula {
        Formula::Switch => (1.0 / (k * tokens), 1.0 / tokens),
        Formula::PooledLayers => (1.0 / (layers * tokens), 1.0 / (layers * tokens)),
        Formula::RunningCounts { ranks, .. } => {
            let (so_far, tokens) = (f64::from(scope) + 1.0, tokens * f64::from(ranks));
            (1.0 / (so_far * k * tokens), 1.0 / tokens)
        }
    }
}

/// Counts how many of the given sequences read each portion.
fn reads(
    forest: &Forest,
    cuts: &Cuts,
    members: &[usize],
    visits: &mut usize,
) -> Result<Vec<Read>, ExpertsError> {
    let mut fed = Vec::new();
    for sequence in members {
        fed.extend(cuts.of_sequence(forest, *sequence));
        let seen = (*visits + fed.len()) as u64;
        check_range("portions visited by sequences", seen, 0, VISITS_MAX as u64)?;
    }
    *visits += fed.len();
    fed.sort_unstable();
    Ok(fed
        .chunk_by(|one, other| one == other)
        .map(|run| Read { portion: run[0], copies: run.len() as u32 })
        .collect())
}

fn last_layer(router: &Router) -> LastLayer {
    if !router.last_layer {
        LastLayer::Dead
    } else if router.aux_coefficient != 0.0 || router.z_coefficient != 0.0 {
        LastLayer::LiveToRouter
    } else if router.counts_wanted {
        LastLayer::ForwardToRouter
    } else {
        LastLayer::Dead
    }
}
