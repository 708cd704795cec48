//! The admission rules of greedy runs, most promising first.

use super::graph::{Graph, PipelineUnit};
use super::lists::StageOpKind;
use super::spec::{MemoryBounds, Pipeline, PipelineOrder};

/// Maximum microbatches that a stage begins before their backwards.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum WarmUp {
    /// The number of stages from this one on, as in 1F1B.
    Stages,
    /// `Stages` plus the number of stages.
    TwoStages,
    /// The caller's bound.
    Bound,
}

/// Decides which op a greedy run starts.
#[derive(Clone, Debug)]
pub(super) struct AdmissionRule {
    /// Kinds by descending priority.
    pub(super) ranks: [StageOpKind; 4],
    pub(super) live_groups_max: u32,
    warm_up: WarmUp,
    /// The caller's bound.
    in_flight_max: u32,
    /// Microbatches pass through parts in turns of `stages` microbatches, as in interleaved 1F1B; otherwise
    /// the deepest part goes first.
    turns: bool,
    /// Interleaved 1F1B: microbatch forwards strictly in the order of their keys, at most
    /// [`Self::parts_max`] in flight, one backward per further forward. A run may stick.
    pub(super) bound_parts: bool,
    stages: u32,
    virtual_stages: u32,
}

impl AdmissionRule {
    pub(super) fn in_flight_max(&self, stage: u32) -> u32 {
        let own = match self.warm_up {
            WarmUp::Stages => self.stages - stage,
            WarmUp::TwoStages => 2 * self.stages - stage,
            WarmUp::Bound => u32::MAX,
        };
        own.min(self.in_flight_max)
    }

    /// Returns the maximum microbatches in flight, counted per part, if `bound_parts`.
    pub(super) fn parts_max(&self, stage: u32) -> u32 {
        2 * (self.stages - stage - 1) + (self.virtual_stages - 1) * self.stages + 1
    }

    /// Returns the sort key among ops of one kind; the smallest goes first.
    pub(super) fn key(&self, graph: &Graph, unit: PipelineUnit) -> [u32; 4] {
        let PipelineUnit { kind, group, index, part } = unit;
        let behind = graph.parts - 1 - part;
        match kind {
            StageOpKind::PrefixForward => [group, behind, index, 0],
            StageOpKind::PrefixBackward => [group, part, graph.chunks(group) - 1 - index, 0],
            _ => {
                let stages = self.stages;
                let forward = kind == StageOpKind::MicrobatchForward;
                let turn = if self.turns { index / stages } else { 0 };
                let depth = if forward == self.turns { part } else { behind };
                [group, turn, depth, index]
            }
        }
    }
}

/// The priorities of 1F1B on a stage that runs one group at a time.
const ONE_GROUP: [StageOpKind; 4] = [
    StageOpKind::PrefixBackward,
    StageOpKind::MicrobatchBackward,
    StageOpKind::MicrobatchForward,
    StageOpKind::PrefixForward,
];

/// Returns all orders of kinds; those that most often give the best lists come first.
fn rankings() -> Vec<[StageOpKind; 4]> {
    use StageOpKind::{
        MicrobatchBackward as B, MicrobatchForward as F, PrefixBackward as C, PrefixForward as A,
    };
    let mut rankings = vec![[A, C, F, B], [A, B, F, C], [F, B, A, C], [A, B, C, F], [B, F, C, A]];
    for first in StageOpKind::ALL {
        for second in StageOpKind::ALL {
            for third in StageOpKind::ALL {
                let rest = |kind: &StageOpKind| ![first, second, third].contains(kind);
                let rest: Vec<_> = StageOpKind::ALL.into_iter().filter(rest).collect();
                if let [fourth] = rest[..]
                    && !rankings.contains(&[first, second, third, fourth])
                {
                    rankings.push([first, second, third, fourth]);
                }
            }
        }
    }
    rankings
}

/// Returns the rules to try within bounds.
pub(super) fn rules(pipeline: &Pipeline, bounds: MemoryBounds) -> Vec<AdmissionRule> {
    let bound = |most: u32| if most == 0 { u32::MAX } else { most };
    let MemoryBounds { live_groups_max, in_flight_max } = bounds;
    let interleaved = pipeline.virtual_stages > 1;
    let rule = |ranks, warm_up, turns, bound_parts| AdmissionRule {
        ranks,
        live_groups_max: match pipeline.order {
            PipelineOrder::GroupByGroup => 1,
            PipelineOrder::Stream => bound(live_groups_max),
        },
        warm_up,
        in_flight_max: bound(in_flight_max),
        turns,
        bound_parts,
        stages: pipeline.stages,
        virtual_stages: pipeline.virtual_stages,
    };
    if pipeline.order == PipelineOrder::GroupByGroup {
        if !interleaved {
            return vec![rule(ONE_GROUP, WarmUp::Stages, false, false)];
        }
        // Interleaved 1F1B, which may stick if stages do not divide microbatches, and a rule that never
        // sticks.
        return vec![
            rule(ONE_GROUP, WarmUp::Bound, true, true),
            rule(ONE_GROUP, WarmUp::TwoStages, true, false),
        ];
    }
    let mut rules = Vec::new();
    let warm_ups = [WarmUp::TwoStages, WarmUp::Stages, WarmUp::Bound];
    let turns: &[bool] = if interleaved { &[true, false] } else { &[false] };
    for ranks in rankings() {
        for warm_up in warm_ups {
            for &turns in turns {
                rules.push(rule(ranks, warm_up, turns, false));
            }
        }
        if interleaved {
            rules.push(rule(ranks, WarmUp::Bound, true, true));
        }
    }
    rules
}
