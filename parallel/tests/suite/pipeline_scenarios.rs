//! Readable scenarios: `tests/testdata/pipeline/*.txt`, each a pipeline and the lists expected of it.
//!
//! A list reads left to right: `A`, `F`, `B`, `C` are prefix forward, microbatch forward, microbatch backward and
//! prefix backward, then group.index, and `/part` where a stage has several; `(>1 F0.2 <1 B0.0)` is
//! one batch: sends microbatch 2's activation to stage 1, receives microbatch 0's gradient from it.
//!
//! `tests/testdata/replicas/*.txt` are pipelines with `replicas` of them.
//!
//! `UPDATE=1 cargo test -p dormouse-parallel` rewrites the expectations; read the diff.

use std::fmt::Write as _;

use dormouse_parallel::pipeline::*;

fn parse(text: &str) -> Pipeline {
    let mut pipeline = Pipeline {
        stages: 2,
        virtual_stages: 1,
        row_bytes: RowBytes { activation: 1, boundary: 1, prefix_saved: 10, microbatch_saved: 10 },
        ..Pipeline::default()
    };
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        let (key, value) = line.split_once(' ').unwrap();
        let numbers: Vec<u64> = value.split(' ').filter_map(|word| word.parse().ok()).collect();
        let small = || numbers[0] as u32;
        match key {
            "stages" => pipeline.stages = small(),
            "virtual_stages" => pipeline.virtual_stages = small(),
            "chunks" => pipeline.chunks = small(),
            "chunk_rows_multiple" => pipeline.chunk_rows_multiple = small(),
            "chunk_rows_min" => pipeline.chunk_rows_min = small(),
            "live_groups_max" => pipeline.bounds.live_groups_max = small(),
            "in_flight_max" => pipeline.bounds.in_flight_max = small(),
            "op_overhead_ns" => pipeline.rates.op_overhead_ns = numbers[0],
            "transfer_latency_ns" => pipeline.rates.transfer_latency_ns = numbers[0],
            "replicas" => {}
            "room" => pipeline.stage_room_bytes = numbers,
            "blocking" => pipeline.blocking = value == "true",
            "order" if value == "stream" => pipeline.order = PipelineOrder::Stream,
            "order" if value == "group_by_group" => pipeline.order = PipelineOrder::GroupByGroup,
            "prefix_permille" => {
                pipeline.prefix_permille = numbers.iter().map(|n| *n as u32).collect();
            }
            // prefix_rows, prefix forward, microbatches, microbatch forward; backward is twice forward.
            "group" => {
                let [rows, prefix_ns, microbatches, microbatch_ns] = numbers[..] else {
                    panic!("{line}")
                };
                let share = |ns| StageShare { linear_ns: ns, pairs_ns: 0 };
                let microbatch = PipelineMicrobatch {
                    rows: 1,
                    forward_ns: microbatch_ns,
                    backward_ns: 2 * microbatch_ns,
                };
                pipeline.groups.push(PipelineGroup {
                    prefix_rows: rows,
                    forward: share(prefix_ns),
                    backward: share(2 * prefix_ns),
                    microbatches: vec![microbatch; microbatches as usize],
                });
            }
            _ => panic!("unknown line {line:?}"),
        }
    }
    pipeline
}

fn op_name(pipeline: &Pipeline, op: &StageOp) -> String {
    let letter = ['A', 'F', 'B', 'C'][op.kind as usize];
    let name = format!("{letter}{}.{}", op.group, op.index);
    if pipeline.virtual_stages > 1 { format!("{name}/{}", op.part) } else { name }
}

fn list(pipeline: &Pipeline, stage: &StageList) -> String {
    let mut text = String::new();
    let mut open = None;
    for step in &stage.steps {
        let op = &stage.ops[step.op as usize];
        let batch = (step.kind != StageStepKind::Compute).then_some(step.batch);
        if open.is_some() && open != batch {
            text += ")";
        }
        text += if batch.is_some() && open != batch { " (" } else { " " };
        open = batch;
        match step.kind {
            StageStepKind::Compute => {}
            StageStepKind::Send => write!(text, ">{} ", op.sends.unwrap().peer).unwrap(),
            StageStepKind::Receive => write!(text, "<{} ", op.receives.unwrap().peer).unwrap(),
        }
        text += &op_name(pipeline, op);
    }
    if open.is_some() { text + ")" } else { text }
}

fn print(pipeline: &Pipeline) -> String {
    let stages = match pipeline.plan() {
        Ok(stages) => stages,
        Err(error) => return format!("refused: {error}\n"),
    };
    stages.check(pipeline).unwrap();
    let mut text = String::new();
    for (number, stage) in stages.stages.iter().enumerate() {
        writeln!(text, "stage {number}:{}", list(pipeline, stage)).unwrap();
        let p = stage.peak;
        writeln!(
            text,
            "    at most {} groups, {} microbatches ({} with parts); bytes {} boundary, {} prefix, {} microbatch, \
             {} in all; gradients reduced after op {}",
            p.live_groups,
            p.in_flight,
            p.in_flight_parts,
            p.boundary_bytes,
            p.prefix_bytes,
            p.microbatch_bytes,
            p.bytes,
            stage.sync_after_op
        )
        .unwrap();
    }
    let r = stages.report;
    write!(
        text,
        "{} chunks; bubble {:.4}, at least {:.4}; {} ns of which ideally {};",
        r.chunks, r.bubble, r.bubble_bound, r.makespan_ns, r.ideal_ns
    )
    .unwrap();
    for meeting in TransferTiming::ALL {
        let times = stages.times(pipeline, meeting).unwrap();
        write!(text, " {meeting:?} {}", times.makespan_ns).unwrap();
    }
    text + "\n"
}

/// Prints which replica runs which groups, until when, and what its stages hold at most.
fn print_replicas(input: &str) -> String {
    let pipeline = parse(input);
    let replicas = input.lines().find_map(|line| line.strip_prefix("replicas ")).unwrap();
    let found = match pipeline.plan_replicas(replicas.parse().unwrap()) {
        Ok(found) => found,
        Err(error) => return format!("refused: {error}\n"),
    };
    let mut text = String::new();
    for (number, replica) in found.replicas.iter().enumerate() {
        replica.stages.check(&pipeline.of_groups(&replica.groups)).unwrap();
        let peaks = replica.stages.stages.iter().map(|stage| stage.peak.bytes.to_string());
        let (groups, peaks) = (&replica.groups, peaks.collect::<Vec<_>>().join(" "));
        let end_ns = replica.stages.report.makespan_ns;
        writeln!(text, "replica {number}: groups {groups:?}, {end_ns} ns; bytes {peaks}").unwrap();
    }
    let (end_ns, bound_ns, tried) = (found.makespan_ns, found.bound_ns, found.tried);
    text + &format!("{end_ns} ns, at least {bound_ns}; {tried} changes tried\n")
}

#[test]
fn replicas() {
    crate::scenarios("replicas", 3, print_replicas);
}

#[test]
fn scenarios() {
    crate::scenarios("pipeline", 11, |input| print(&parse(input)));
}
