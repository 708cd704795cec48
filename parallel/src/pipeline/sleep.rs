//! The choice whether prefixes sleep between their ops.

use super::PipelineError;
use super::lists::Stages;
use super::spec::{Pipeline, StageBytes};
use crate::simulate::World;

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
