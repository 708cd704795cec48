//! Ranks agree on a plan before they follow it.
//!
//! Ranks whose collectives differ wait for each other for ever. So everything that contains a
//! collective (how many ops, of which kinds, in which order, dummies, exchanges) is made from inputs
//! that all ranks share, and before the first op each rank sends an [`Agreement`], a few digests,
//! to every other one; [`Agreement::check`] says which ranks differ and in what. Memory differs by
//! rank, so its budget is agreed first: the least of all ranks' ([`agreed_budget`]).
//!
//! Ops are those of [`Shares`]: of plans with room for everything, or of the words of plans that were
//! made ([`Shares::with_words`]).
//!
//! Digests are of parts, because where parts first differ says what to mend: another version of
//! this library, another batch, other options, or, all those being equal, a plan that was not made
//! the same way, which is a defect of ours.
//!
//! ```text
//!   budgets of all ranks ──► agreed_budget ──┐
//!   Workload, Options, Shares ──────────────────┴─► Agreement ──all-gather──► check ──► first op
//! ```

mod digest;
mod encode;

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

pub use digest::{Digest, Encoder, NoDigest};

use crate::balance::{Options, SHARES_VERSION, Shares, Workload};
use dormouse_schedule::PLAN_VERSION;

/// Version of what is encoded, and how.
pub const AGREE_VERSION: u32 = 1;
/// Ranks an error message names before it only counts them.
const RANKS_NAMED_MAX: usize = 8;

/// What ranks must have alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Part {
    /// This library, and the versions of its forms.
    Version,
    /// The forest, its groups, its rows with logits.
    Inputs,
    /// How to plan it, and the agreed budget.
    Options,
    /// The plan's collectives and every rank's part in them.
    Collectives,
}

impl fmt::Display for Part {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Version => "version",
            Self::Inputs => "inputs",
            Self::Options => "options",
            Self::Collectives => "collectives",
        })
    }
}

/// What one rank has, part by part. 64 bytes to gather from every rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Agreement {
    /// Of this library.
    pub version: Digest,
    /// Of the batch.
    pub inputs: Digest,
    /// Of the options and the agreed budget.
    pub options: Digest,
    /// Of everything ranks do together.
    pub collectives: Digest,
}

/// One part in which ranks differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// Which part.
    pub part: Part,
    /// What most ranks have; of equally many, what the lowest rank has.
    pub accepted: Digest,
    /// The others, and what they have.
    pub seen: Vec<(u32, Digest)>,
}

impl fmt::Display for Difference {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: accepted: {}; seen:", self.part, self.accepted)?;
        for (rank, digest) in self.seen.iter().take(RANKS_NAMED_MAX) {
            write!(f, " {digest} on rank {rank}")?;
        }
        match self.seen.len().saturating_sub(RANKS_NAMED_MAX) {
            0 => Ok(()),
            more => write!(f, " and {more} more ranks"),
        }
    }
}

/// Why ranks may not start.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Disagreement {
    /// Nobody was asked.
    #[error("0 ranks' agreements; accepted: 1 or more")]
    Nobody,
    /// Not as many as there are shares for.
    #[error("{seen} ranks' agreements; accepted: {accepted}, one a rank")]
    RankCount {
        /// How many.
        seen: usize,
        /// How many ranks the plan is for.
        accepted: u32,
    },
    /// Plans that would hang.
    #[error("ranks differ in {}", .0.iter().map(ToString::to_string).collect::<Vec<_>>().join("; "))]
    Differ(Vec<Difference>),
}

impl Agreement {
    /// What this rank has. `budget_bytes` is the agreed one, see [`agreed_budget`].
    #[must_use]
    pub fn of(batch: &Workload<'_>, options: &Options, budget_bytes: u64, shares: &Shares) -> Self {
        Self {
            version: version(),
            inputs: encode::inputs(batch),
            options: encode::options(options, budget_bytes),
            collectives: encode::collectives(shares),
        }
    }

    /// Whether the agreements of `ranks` ranks, in order of rank, are alike.
    ///
    /// # Errors
    /// `Differ` names every part in which ranks differ, in the order to mend them, and the ranks
    /// that differ from most; `Nobody`; `RankCount` for agreements that are not one a rank.
    pub fn check(ranks: u32, all: &[Self]) -> Result<(), Disagreement> {
        if all.is_empty() {
            return Err(Disagreement::Nobody);
        }
        if all.len() != ranks as usize {
            return Err(Disagreement::RankCount { seen: all.len(), accepted: ranks });
        }
        let parts = [Part::Version, Part::Inputs, Part::Options, Part::Collectives];
        let differences: Vec<Difference> = parts
            .into_iter()
            .filter_map(|part| {
                let digests: Vec<Digest> =
                    all.iter().map(|agreement| agreement.part(part)).collect();
                difference(part, &digests)
            })
            .collect();
        if differences.is_empty() { Ok(()) } else { Err(Disagreement::Differ(differences)) }
    }

    /// One part's digest.
    #[must_use]
    pub const fn part(&self, part: Part) -> Digest {
        match part {
            Part::Version => self.version,
            Part::Inputs => self.inputs,
            Part::Options => self.options,
            Part::Collectives => self.collectives,
        }
    }
}

/// The least of all ranks' budgets, bytes: what a plan for all of them may use. `None` of none.
#[must_use]
pub fn agreed_budget(budgets_bytes: &[u64]) -> Option<u64> {
    budgets_bytes.iter().copied().min()
}

fn version() -> Digest {
    let mut encoder = Encoder::new("version");
    encoder.text(env!("CARGO_PKG_VERSION"));
    encoder.number(AGREE_VERSION).number(PLAN_VERSION).number(SHARES_VERSION);
    encoder.digest()
}

fn difference(part: Part, digests: &[Digest]) -> Option<Difference> {
    let mut counts: BTreeMap<Digest, usize> = BTreeMap::new();
    for digest in digests {
        *counts.entry(*digest).or_default() += 1;
    }
    let most = counts.values().copied().max()?;
    let accepted = *digests.iter().find(|digest| counts[*digest] == most)?;
    let ranks = (0_u32..).zip(digests.iter().copied());
    let seen: Vec<(u32, Digest)> = ranks.filter(|(_, digest)| *digest != accepted).collect();
    (!seen.is_empty()).then_some(Difference { part, accepted, seen })
}
