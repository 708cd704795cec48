//! Progress of a step.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{Assignment, Destination, Migration, RolloutError};
use dormouse_schedule::{TOKENS_MAX, check_range};

/// Progress of one response.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rollout {
    /// Request number.
    pub request: u32,
    /// Response number.
    pub response: u32,
    /// Worker number.
    pub worker: u32,
    /// Tokens so far.
    pub tokens: u64,
    /// Whether it has finished.
    pub finished: bool,
}

/// Progress of a step: every response of every request once, in any order.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The responses.
    pub rollouts: Vec<Rollout>,
}

impl Progress {
    /// Applies migrations: returns the progress of this step and the rollouts deferred to the next.
    #[must_use]
    pub fn after(&self, migrations: &[Migration]) -> (Self, Vec<Rollout>) {
        let moves: BTreeMap<(u32, u32), Destination> =
            migrations.iter().map(|one| ((one.request, one.response), one.to)).collect();
        let (mut here, mut deferred) = (Self::default(), Vec::new());
        for mut one in self.rollouts.iter().copied() {
            match moves.get(&(one.request, one.response)) {
                Some(Destination::NextStep) => deferred.push(one),
                Some(Destination::Worker(worker)) => {
                    one.worker = *worker;
                    here.rollouts.push(one);
                }
                None => here.rollouts.push(one),
            }
        }
        (here, deferred)
    }

    /// Checks that the rollouts are the assignment's responses, each once.
    pub(super) fn check(&self, assignment: &Assignment) -> Result<(), RolloutError> {
        assignment.check()?;
        let asked: u64 = assignment.placed.iter().map(|one| u64::from(one.responses)).sum();
        check_range("rollouts", self.rollouts.len() as u64, asked, asked)?;
        let mut seen: Vec<Vec<bool>> =
            assignment.placed.iter().map(|one| vec![false; one.responses as usize]).collect();
        for (index, one) in self.rollouts.iter().enumerate() {
            check_range("tokens of a rollout", one.tokens, 0, TOKENS_MAX)?;
            let place = seen
                .get_mut(one.request as usize)
                .and_then(|request| request.get_mut(one.response as usize));
            match place {
                Some(seen) if !*seen && one.worker < assignment.workers => *seen = true,
                _ => {
                    let (request, response, worker) = (one.request, one.response, one.worker);
                    return Err(RolloutError::Progress { index, request, response, worker });
                }
            }
        }
        Ok(())
    }
}
