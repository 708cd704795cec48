//! The choice whether prefixes sleep between their ops, and the times of ops that wait for their copies.

use std::collections::BTreeMap;

use super::PipelineError;
use super::lists::Stages;
use super::meet::{PipelineTimes, TransferTime};
use super::spec::{Pipeline, StageBytes};
use crate::simulate::{StepTime, TimeSpan, World};

impl Pipeline {
    /// Plans the pipeline with what prefixes save awake, and with it asleep between their ops, and returns the
    /// way that ends sooner in the simulator, awake if both end at once. Asleep, more groups and microbatches
    /// have room, but ops wait for copies. Without both rates of copies nothing falls asleep.
    ///
    /// # Errors
    /// As [`Pipeline::plan`], with what lacks room asleep if it may sleep.
    pub fn plan_with_sleep(self) -> Result<(Self, Stages), PipelineError> {
        let rates = self.rates;
        if rates.sleep_bytes_per_s == 0 || rates.wake_bytes_per_s == 0 {
            let stages = self.plan()?;
            return Ok((self, stages));
        }
        let asleep = self.asleep();
        match (self.plan(), asleep.plan()) {
            (Err(PipelineError::Room { .. }), sleeping) => sleeping.map(|lists| (asleep, lists)),
            (awake, Err(PipelineError::Room { .. })) => awake.map(|lists| (self, lists)),
            (awake, sleeping) => {
                let (awake, sleeping) = (awake?, sleeping?);
                let sooner = asleep.end_ns(&sleeping)? < self.end_ns(&awake)?;
                Ok(if sooner { (asleep, sleeping) } else { (self, awake) })
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
