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
    /// Worker number; of a deferred rollout, the one that it left.
    pub worker: u32,
    /// Tokens so far.
    pub tokens: u64,
    /// Whether it has finished.
    pub finished: bool,
}

/// Progress of a step: every response of every request once, in any order, either here or deferred.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The responses of this step.
    pub rollouts: Vec<Rollout>,
    /// The responses that migrations deferred to the next step, with their tokens at that time.
    #[serde(default)]
    pub deferred: Vec<Rollout>,
}

impl Progress {
    /// Applies migrations: returns the progress that follows, with what they defer behind what is deferred.
    ///
    /// # Errors
    /// [`RolloutError::Migration`] for a migration of a rollout that is not unfinished on the worker that it
    /// leaves, or a second one of the same rollout.
    pub fn after(&self, migrations: &[Migration]) -> Result<Self, RolloutError> {
        let mut moves: BTreeMap<(u32, u32), (usize, &Migration)> = BTreeMap::new();
        let refused = |(index, one): (usize, &Migration)| RolloutError::Migration {
            index,
            request: one.request,
            response: one.response,
        };
        for (index, one) in migrations.iter().enumerate() {
            if moves.insert((one.request, one.response), (index, one)).is_some() {
                return Err(refused((index, one)));
            }
        }
        let mut after = Self { rollouts: Vec::new(), deferred: self.deferred.clone() };
        for mut one in self.rollouts.iter().copied() {
            match moves.get(&(one.request, one.response)).map(|(_, migration)| *migration) {
                Some(migration) if one.finished || one.worker != migration.from => {}
                Some(Migration { to: Destination::NextStep, .. }) => {
                    moves.remove(&(one.request, one.response));
                    after.deferred.push(one);
                    continue;
                }
                Some(Migration { to: Destination::Worker(worker), .. }) => {
                    one.worker = *worker;
                    moves.remove(&(one.request, one.response));
                }
                None => {}
            }
            after.rollouts.push(one);
        }
        let first = moves.into_values().min_by_key(|(index, _)| *index);
        first.map_or(Ok(after), |one| Err(refused(one)))
    }

    /// All responses.
    pub(super) fn all(&self) -> impl Iterator<Item = &Rollout> {
        self.rollouts.iter().chain(&self.deferred)
    }

    /// Checks that the rollouts are the assignment's responses, each once.
    pub(super) fn check(&self, assignment: &Assignment) -> Result<(), RolloutError> {
        assignment.check()?;
        let asked: u64 = assignment.placed.iter().map(|one| u64::from(one.responses)).sum();
        check_range("rollouts", self.all().count() as u64, asked, asked)?;
        let mut seen: Vec<Vec<bool>> =
            assignment.placed.iter().map(|one| vec![false; one.responses as usize]).collect();
        for (index, one) in self.all().enumerate() {
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
