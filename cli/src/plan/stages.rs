//! Op lists of pipeline stages.

use dormouse_parallel::pipeline::{Pipeline, PipelineError, PrefixSleep, Stages, TimeSpan};
use dormouse_schedule::forest::Forest;
use dormouse_schedule::{Loss, Plan, PlanOptions, Scoring};

use super::Setting;
use super::flat::{Group, groups};
use super::report::PipelineReport;
use crate::Error;

/// A pipeline and its op lists.
#[derive(Debug)]
pub(super) struct Staged {
    pub(super) pipeline: Pipeline,
    pub(super) stages: Stages,
}

pub(super) fn stages(
    setting: &Setting<'_>,
    stages: u32,
    forest: &Forest,
    microbatch_rows: u32,
) -> Result<Staged, Error> {
    let args = setting.args;
    let virtual_stages = args.virtual_stages.unwrap_or(1);
    let seen = u64::from(stages) * u64::from(virtual_stages);
    let layers = setting.model.shape.layers;
    if seen > layers.into() {
        return Err(Error::Parts { seen, layers });
    }
    // Each stage decides what it keeps.
    let (always_share, runtime_residency) = (true, true);
    let whole = setting.options();
    let options =
        PlanOptions { microbatch_rows, block_rows: 0, always_share, runtime_residency, ..whole };
    let plan = |group: &Group| {
        let scored = Scoring { loss: Loss::From(group.prompt), weight: 1.0 };
        let scoring = vec![scored; group.responses.len()];
        Plan::new(&Forest::group(group.prompt, &group.responses)?, &scoring, &options)
    };
    let plans = groups(forest).iter().map(plan).collect::<Result<Vec<Plan>, _>>()?;
    if plans.is_empty() {
        return Err(Error::NothingStaged);
    }
    let mut pipeline = Pipeline::of_plans(&plans, stages, virtual_stages)?;
    pipeline.order = args.order.unwrap_or_default();
    pipeline.chunks = args.chunks.unwrap_or(0);
    pipeline.blocking = args.blocking;
    let (pipeline, stages) = pipeline.plan_with_sleep(PrefixSleep::Chosen)?;
    Ok(Staged { pipeline, stages })
}

impl Staged {
    pub(super) fn report(&self) -> Result<PipelineReport, PipelineError> {
        let peaks = self.stages.stages.iter().map(|stage| stage.peak);
        let times = self.pipeline.expected_times(&self.stages)?;
        let busy = |ops: &Vec<TimeSpan>| ops.iter().map(|op| op.end_ns - op.start_ns).sum();
        Ok(PipelineReport {
            groups: self.pipeline.groups.len() as u64,
            virtual_stages: self.pipeline.virtual_stages,
            report: self.stages.report,
            end_ns: times.makespan_ns,
            bubble: self.stages.bubble_of(times.makespan_ns),
            busy_ns: times.ops.iter().map(busy).collect(),
            peaks: peaks.collect(),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use dormouse_schedule::Machine;
    use dormouse_schedule::NodeId;
    use dormouse_schedule::forest::{Ending, NO_PARENT};

    use super::*;
    use crate::{Model, PlanArgs};

    #[test]
    fn the_picture_has_the_reported_makespan() {
        let model = Model::find(Path::new("llama3-8b")).unwrap();
        let machine = Machine {
            flops_per_s: 400_000_000_000_000,
            link_bytes_per_s: 1_000_000_000,
            ..Machine::default()
        };
        let ending = |node| Ending { node: NodeId(node), tokens: 3_000 };
        let forest = Forest::from_nodes_with(
            &[NO_PARENT, 0, 0, 0],
            &[2_000, 1_000, 1_000, 1_000],
            &[ending(1), ending(2), ending(3)],
        );
        let forest = forest.unwrap();
        let mut ends = Vec::new();
        for blocking in [false, true] {
            let args = PlanArgs { blocking, ..PlanArgs::default() };
            let setting = Setting { args: &args, model: &model, machine: Some(machine) };
            let staged = stages(&setting, 4, &forest, 1_000).unwrap();
            let times = staged.stages.times(&staged.pipeline, staged.pipeline.timing()).unwrap();
            let report = staged.report().unwrap();
            assert_eq!(times.makespan_ns, report.report.makespan_ns, "{blocking}");
            assert_eq!(times.makespan_ns, report.end_ns, "{blocking}: nothing sleeps");
            ends.push(times.makespan_ns);
        }
        assert!(ends[0] < ends[1], "sends that block take longer: {ends:?}");
    }

    /// 82 prompts of 16,000 tokens, 70 GB each on a stage with 10 layers of a 70-billion-weight model. Without a limit
    /// a stage holds all of them: 5.5 TiB. A stage of 40 GB gets a plan that fits it.
    #[test]
    fn stages_hold_no_more_than_their_memory() {
        const ROOM_BYTES: u64 = 40_000_000_000;
        const PROMPT_TOKENS: u64 = 16_000;
        let (stage_count, group_count) = (8, 82);
        let model = Model::find(Path::new("llama3-70b")).unwrap();
        let (mut parents, mut tokens, mut endings) = (Vec::new(), Vec::new(), Vec::new());
        for group in 0..group_count {
            let prompt = 3 * group;
            parents.extend([NO_PARENT, prompt, prompt]);
            tokens.extend([PROMPT_TOKENS, 1_750, 2_000]);
            endings.extend([prompt + 1, prompt + 2].map(|node| Ending {
                node: NodeId(node),
                tokens: PROMPT_TOKENS + tokens[node as usize],
            }));
        }
        let forest = Forest::from_nodes_with(&parents, &tokens, &endings).unwrap();
        let peaks = |device_bytes: u64| {
            let machine = Machine {
                flops_per_s: 400_000_000_000_000,
                sleep_bytes_per_s: 50_000_000_000,
                wake_bytes_per_s: 50_000_000_000,
                host_bytes: 200_000_000_000,
                device_bytes,
                ..Machine::default()
            };
            let args = PlanArgs::default();
            let setting = Setting { args: &args, model: &model, machine: Some(machine) };
            let staged = stages(&setting, stage_count, &forest, 1_024).unwrap();
            let peaks = staged.report().unwrap().peaks;
            assert_eq!(peaks.len(), stage_count as usize);
            peaks.into_iter().map(|peak| peak.bytes).collect::<Vec<u64>>()
        };
        let unlimited = peaks(0);
        assert!(unlimited.iter().all(|bytes| *bytes > 5 << 40), "{unlimited:?}");
        let limited = peaks(ROOM_BYTES);
        assert!(limited.iter().all(|bytes| *bytes <= ROOM_BYTES), "{limited:?}");
    }
}
