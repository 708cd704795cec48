//! The choice whether prefixes sleep between their ops, and the times of ops that wait for their copies.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::PipelineError;
use super::lists::Stages;
use super::meet::{PipelineTimes, TransferTime};
use super::spec::{Pipeline, StageBytes};
use crate::simulate::{StepTime, TimeSpan, World};

/// Whether what prefixes save for their backward, [`StageBytes::prefix_saved`], sleeps between their ops. What
/// [`StageBytes::prefix_asleep`] counts always does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PrefixSleep {
    /// It stays awake.
    #[default]
    Never,
    /// It sleeps.
    Always,
    /// The way that ends sooner in the simulator, awake if both end at once. Asleep where only that has room. Without
    /// both rates of copies, awake.
    Chosen,
}

impl Pipeline {
    /// Plans the pipeline with what prefixes save awake or asleep between their ops, and returns the pipeline as it
    /// was planned. Asleep, more groups and microbatches have room, but ops wait for copies.
    ///
    /// # Errors
    /// As [`Pipeline::plan`], with what lacks room asleep if it may sleep.
    pub fn plan_with_sleep(self, sleep: PrefixSleep) -> Result<(Self, Stages), PipelineError> {
        match sleep {
            PrefixSleep::Never => self.planned(false),
            PrefixSleep::Always => self.asleep().planned(true),
            PrefixSleep::Chosen => self.plan_sooner(),
        }
    }

    fn planned(self, prefix_saved_asleep: bool) -> Result<(Self, Stages), PipelineError> {
        let mut stages = self.plan()?;
        stages.report.prefix_saved_asleep = prefix_saved_asleep;
        Ok((self, stages))
    }

    fn plan_sooner(self) -> Result<(Self, Stages), PipelineError> {
        let rates = self.rates;
        if rates.sleep_bytes_per_s == 0 || rates.wake_bytes_per_s == 0 {
            return self.planned(false);
        }
        let asleep = self.asleep();
        match (self.planned(false), asleep.planned(true)) {
            (Err(PipelineError::Room { .. }), sleeping) => sleeping,
            (awake, Err(PipelineError::Room { .. })) => awake,
            (awake, sleeping) => {
                let (awake, sleeping) = (awake?, sleeping?);
                let ends_sooner = sleeping.0.end_ns(&sleeping.1)? < awake.0.end_ns(&awake.1)?;
                Ok(if ends_sooner { sleeping } else { awake })
            }
        }
    }

    /// Returns the times of ops as this pipeline runs them: where prefixes sleep between their ops, with the waits
    /// for copies and for room, otherwise [`Stages::times`]. Sends that block are not simulated.
    ///
    /// # Errors
    /// As [`Stages::times`].
    pub fn expected_times(&self, stages: &Stages) -> Result<PipelineTimes, PipelineError> {
        let planned = stages.times(self, self.timing())?;
        let asleep = (0..self.stages).any(|stage| self.bytes_of(stage).prefix_asleep > 0);
        if self.blocking || !asleep {
            return Ok(planned);
        }
        // A world that does not run to its end has no times.
        let Ok(timeline) = World::of_stages(self, stages)?.run() else { return Ok(planned) };
        let mut places = BTreeMap::new();
        for (stage, list) in (0_u32..).zip(&stages.stages) {
            places.extend((0_u32..).zip(&list.ops).map(|(at, op)| (op.unit(), (stage, at))));
        }
        // Exchanges are numbered by stage and op.
        let senders =
            stages.stages.iter().flat_map(|list| &list.ops).filter(|op| op.sends.is_some());
        let ends = senders
            .filter_map(|op| Some((*places.get(&op.unit())?, *places.get(&op.unit().target()?)?)));
        let mut transfers: Vec<TransferTime> =
            ends.zip(&timeline.exchanges)
                .map(|(((from, from_op), (to, to_op)), &TimeSpan { start_ns, end_ns })| {
                    TransferTime { from, from_op, to, to_op, start_ns, end_ns }
                })
                .collect();
        transfers.sort_by_key(|it| (it.start_ns, it.from, it.to));
        let span = |&StepTime { start_ns, end_ns, .. }: &StepTime| TimeSpan { start_ns, end_ns };
        let ops = timeline.ranks.iter().map(|rank| rank.steps.iter().map(span).collect()).collect();
        Ok(PipelineTimes { ops, transfers, makespan_ns: timeline.total_ns })
    }

    /// Returns the end of lists in the simulator, which waits for room and copies.
    fn end_ns(&self, stages: &Stages) -> Result<u64, PipelineError> {
        // A world that does not run to its end never ends.
        Ok(World::of_stages(self, stages)?.run().map_or(u64::MAX, |timeline| timeline.total_ns))
    }

    /// Returns the pipeline with all that prefixes save asleep between their ops.
    fn asleep(&self) -> Self {
        let asleep = |stage| {
            let bytes = self.bytes_of(stage);
            let prefix_asleep = bytes.prefix_asleep.saturating_add(bytes.prefix_saved);
            StageBytes { prefix_asleep, prefix_saved: 0, ..bytes }
        };
        Self { stage_bytes: (0..self.stages).map(asleep).collect(), ..self.clone() }
    }
}
