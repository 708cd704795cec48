//! Pictures of plans and timelines: SVG and HTML as text, for a browser, with nothing fetched.
//!
//! [`stages_svg`] draws a pipeline's lists over time, [`rank_svg`] one rank's steps and links,
//! [`memory_svg`] bytes over time, and [`page()`] puts pictures and figures into one HTML file.
//! [`pipeline_page`] does all of it for a pipeline. Colours are told apart by colour-blind readers
//! and follow the reader's light or dark preference; every box says what it is when pointed at, and
//! what is idle shows as the hatched ground. All text from outside is escaped.

mod axis;
mod memory;
mod page;
mod rows;
mod text;

use crate::pipeline::{Pipeline, PipelineError, PipelineTimes, StageOp, Stages};
use crate::simulate::{LinkDirection, RankTimeline, World};

pub use memory::{Series, memory_svg};
pub use page::page;
use rows::{Bar, Row};
use text::time;
pub use text::{bytes, percent};

/// Bars of one picture; what comes later in its rows is left out, and the picture says so.
pub const BARS_MAX: usize = 20_000;

/// Class, and words of the legend, of each kind of op.
const PHASES: [(&str, &str); 4] = [
    ("a", "A prefix forward"),
    ("f", "B microbatch forward"),
    ("b", "B microbatch backward"),
    ("c", "C prefix backward"),
];
/// Class, and words of the legend, of a rank's rows.
const WORK: [(&str, &str); 2] = [("f", "step"), ("a", "copy")];

/// A pipeline's ops over time, a row for each stage, with a legend and an axis.
///
/// Shades tell neighbouring groups apart. `times` are of the same lists: [`Stages::times`].
#[must_use]
pub fn stages_svg(stages: &Stages, times: &PipelineTimes) -> String {
    let row = |(number, (list, times)): (usize, (&crate::pipeline::StageList, &Vec<_>))| {
        let bar = |(op, time): (&StageOp, &crate::pipeline::TimeSpan)| Bar {
            class: format!("{} g{}", PHASES[op.kind as usize].0, op.group % 3),
            label: format!("{}.{}", op.group, op.index),
            words: op_label(op),
            start_ns: time.start_ns,
            end_ns: time.end_ns,
        };
        Row { name: format!("stage {number}"), bars: list.ops.iter().zip(times).map(bar).collect() }
    };
    let rows: Vec<Row> = stages.stages.iter().zip(&times.ops).enumerate().map(row).collect();
    rows::svg("Ops of each stage over time", &rows, &PHASES, times.makespan_ns)
}

fn op_label(op: &StageOp) -> String {
    let what = if op.kind.is_prefix() { "chunk" } else { "microbatch" };
    let way = if op.kind.is_forward() { "forward" } else { "backward" };
    let StageOp { index, group, part, rows, .. } = op;
    format!("{what} {index} {way} of group {group}, part {part}, {} rows", rows.count())
}

/// One rank's steps and copies over time: a row for the steps, one for each link.
#[must_use]
pub fn rank_svg(rank: &RankTimeline) -> String {
    let step = |(number, step): (usize, &crate::simulate::StepTime)| Bar {
        class: "f g0".to_owned(),
        label: number.to_string(),
        words: format!(
            "step {number}, reached {} before it starts",
            time(step.start_ns.saturating_sub(step.reached_ns))
        ),
        start_ns: step.start_ns,
        end_ns: step.end_ns,
    };
    let mut rows = vec![Row {
        name: "compute".to_owned(),
        bars: rank.steps.iter().enumerate().map(step).collect(),
    }];
    for link in LinkDirection::ALL {
        let copies = rank.copies.iter().filter(|copy| copy.link == link);
        let bar = |copy: &crate::simulate::CopyTime| Bar {
            class: "a g0".to_owned(),
            label: copy.block.to_string(),
            words: format!("block {} over the {} link", copy.block, link_name(link)),
            start_ns: copy.start_ns,
            end_ns: copy.end_ns,
        };
        rows.push(Row { name: link_name(link).to_owned(), bars: copies.map(bar).collect() });
    }
    rows::svg("Steps and copies over time", &rows, &WORK, rank.end_ns)
}

const fn link_name(link: LinkDirection) -> &'static str {
    match link {
        LinkDirection::Sleep => "sleep",
        LinkDirection::Write => "write",
        LinkDirection::Read => "read",
        LinkDirection::Wake => "wake",
    }
}

/// A page of a pipeline: figures, ops over time, what each stage holds over time.
///
/// # Errors
/// What [`Stages::check`] says of lists that do not carry the pipeline out.
pub fn pipeline_page(
    title: &str,
    pipeline: &Pipeline,
    stages: &Stages,
) -> Result<String, PipelineError> {
    let times = stages.times(pipeline, pipeline.timing())?;
    let report = &stages.report;
    let mut figures = vec![
        ("bubble".to_owned(), percent(report.bubble)),
        ("least bubble of these chunks, at least".to_owned(), percent(report.bubble_bound)),
        ("makespan".to_owned(), time(times.makespan_ns)),
        ("ideal work of the busiest stage".to_owned(), time(report.ideal_ns)),
        ("chunks of a prefix".to_owned(), report.chunks.to_string()),
    ];
    for (number, stage) in stages.stages.iter().enumerate() {
        let peak = &stage.peak;
        let held = format!(
            "{} groups alive, {} microbatches in flight, {}",
            peak.live_groups,
            peak.in_flight,
            bytes(peak.bytes)
        );
        figures.push((format!("stage {number} holds at most"), held));
    }
    let mut pictures = vec![stages_svg(stages, &times)];
    // Memory over time, where transfers run beside compute: a simulation of its own.
    if let Ok(timeline) = World::of_stages(pipeline, stages)?.run() {
        let series = timeline.ranks.iter().enumerate().map(|(number, rank)| Series {
            name: format!("stage {number}"),
            points: rank.bytes.iter().map(|sample| (sample.ns, sample.device_bytes)).collect(),
        });
        pictures.push(memory_svg(&series.collect::<Vec<_>>(), timeline.total_ns));
    }
    Ok(page(title, &figures, &pictures))
}
