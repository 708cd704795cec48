//! Compares runs that stop at limits with whole runs.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use proptest::prelude::*;

use super::exchange::{TransferPlace, lists};
use super::graph::Graph;
use super::greedy::{Limits, run};
use super::peaks::peak;
use super::rules::rules;
use super::spec::{Pipeline, PipelineGroup, PipelineMicrobatch, StageBytes, StageShare};

prop_compose! {
    fn group()(prefix_rows in 1_u64..9, ns in 0_u64..20, microbatches in prop::collection::vec((1_u64..5, 0_u64..20), 1..5)) -> PipelineGroup {
        let share = |ns| StageShare { linear_ns: ns, pairs_ns: 0 };
        let microbatch = |(rows, ns)| PipelineMicrobatch { rows, forward_ns: ns, backward_ns: 2 * ns };
        let microbatches = microbatches.into_iter().map(microbatch).collect();
        PipelineGroup { prefix_rows, forward: share(ns), backward: share(2 * ns), microbatches }
    }
}

prop_compose! {
    /// Bytes of a row are small, or so large that peaks saturate.
    fn pipeline()(
        stages in 1_u32..5,
        virtual_stages in 1_u32..3,
        groups in prop::collection::vec(group(), 1..5),
        own in prop::collection::vec(prop::array::uniform8(prop_oneof![9 => 0_u64..9, 1 => Just(u64::MAX / 3)]), 5),
    ) -> Pipeline {
        let bytes = |it: [u64; 8]| StageBytes {
            boundary: it[0],
            prefix_saved: it[1],
            prefix_asleep: it[2],
            prefix_working: it[3],
            microbatch_saved: it[4],
            microbatch_working: it[5],
            fixed: it[6],
            microbatch_logits: it[7],
        };
        let stage_bytes = own.into_iter().take(stages as usize).map(bytes).collect();
        Pipeline { stages, virtual_stages, groups, stage_bytes, ..Pipeline::default() }
    }
}

proptest! {
    /// A run within limits is the whole run. One byte or nanosecond less stops it.
    #[test]
    fn a_run_stops_at_its_peak_and_end(case in pipeline(), chunks in 1_u32..4, pick in any::<prop::sample::Index>()) {
        let graph = Graph::new(&case, chunks).unwrap();
        let all = rules(&case, case.bounds);
        let rule = &all[pick.index(all.len())];
        let free = Limits { end_ns_max: u64::MAX, peaks_max: Vec::new() };
        let Some(starts) = run(&graph, rule, &free) else { return Ok(()) };
        let end_ns_max = starts.iter().zip(&graph.op_ns).map(|(start, ns)| start + ns).max().unwrap();
        let (stages, _) = lists(&case, &graph, &starts, TransferPlace::Early);
        let peaks_max = (0..).zip(&stages).map(|(stage, list)| {
            let bytes = case.bytes_of(stage);
            (bytes, peak(&list.ops, &case, stage).bytes)
        });
        let limits = Limits { end_ns_max, peaks_max: peaks_max.collect() };
        prop_assert_eq!(run(&graph, rule, &limits), Some(starts));
        for stage in 0..limits.peaks_max.len() {
            let mut less = limits.clone();
            let (bytes, peak_max) = &mut less.peaks_max[stage];
            // What a stage always holds is no op's.
            if *peak_max > bytes.fixed {
                *peak_max -= 1;
                prop_assert_eq!(run(&graph, rule, &less), None, "stage {}", stage);
            }
        }
        let sooner = Limits { end_ns_max: end_ns_max - 1, ..limits };
        prop_assert_eq!(run(&graph, rule, &sooner), None);
    }
}
