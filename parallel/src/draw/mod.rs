//! Pictures of plans and timelines as self-contained SVG and HTML.
//!
//! [`stages_svg`] draws a pipeline's op lists over time, [`rank_svg`] one rank's steps and copies,
//! [`memory_svg`] bytes over time; [`page()`] combines pictures and figures in one HTML file, and
//! [`pipeline_page`] does so for a pipeline. Colours are colour-blind safe and follow the light or dark
//! preference; bars have tooltips. Time between bars is hatched as idle, time whose bars are left out is not. All
//! input text is escaped.

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
pub use text::{bytes, percent, text_block};

/// Maximum bars per picture; later bars of each row are omitted, with a note.
pub const BARS_MAX: usize = 20_000;

/// Class and legend of each kind of op.
const PHASES: [(&str, &str); 4] = [
    ("a", "A prefix forward"),
    ("f", "B microbatch forward"),
    ("b", "B microbatch backward"),
    ("c", "C prefix backward"),
];
/// Class and legend of a rank's rows.
const WORK: [(&str, &str); 2] = [("f", "step"), ("a", "copy")];

/// Draws a pipeline's ops over time, one row per stage. Neighbouring groups differ in shade. `times` must be
/// [`Stages::times`] or [`Pipeline::expected_times`] of the same lists.
#[must_use]
pub fn stages_svg(stages: &Stages, times: &PipelineTimes) -> String {
    let row = |(number, (list, times)): (usize, (&crate::pipeline::StageList, &Vec<_>))| {
        let bar = |(op, time): (&StageOp, &crate::pipeline::TimeSpan)| Bar {
            class: format!("{} g{}", PHASES[op.kind as usize].0, op.group % 3),
            label: format!("{}.{}", op.group, op.index),
            tooltip: format!("{}, {} rows", op.unit(), op.rows.count()),
            start_ns: time.start_ns,
            end_ns: time.end_ns,
        };
        Row { name: format!("stage {number}"), bars: list.ops.iter().zip(times).map(bar).collect() }
    };
    let rows: Vec<Row> = stages.stages.iter().zip(&times.ops).enumerate().map(row).collect();
    rows::svg("Ops of each stage over time", &rows, &PHASES, times.makespan_ns)
}

/// Draws one rank's steps and copies over time: one row for the steps and one per link.
#[must_use]
pub fn rank_svg(rank: &RankTimeline) -> String {
    let step = |(number, step): (usize, &crate::simulate::StepTime)| Bar {
        class: "f g0".to_owned(),
        label: number.to_string(),
        tooltip: format!(
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
            tooltip: format!("block {} over the {} link", copy.block, link_name(link)),
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

/// Returns a page of a pipeline: figures, ops over time, memory of each stage over time.
///
/// # Errors
/// As [`Pipeline::expected_times`].
pub fn pipeline_page(
    title: &str,
    pipeline: &Pipeline,
    stages: &Stages,
) -> Result<String, PipelineError> {
    let times = pipeline.expected_times(stages)?;
    let report = &stages.report;
    let mut figures = vec![
        ("bubble".to_owned(), percent(stages.bubble_of(times.makespan_ns))),
        ("lower bound of the bubble".to_owned(), percent(report.bubble_bound)),
        ("makespan".to_owned(), time(times.makespan_ns)),
        ("ideal work of the busiest stage".to_owned(), time(report.ideal_ns)),
        ("chunks per prefix".to_owned(), report.chunks.to_string()),
    ];
    for (number, stage) in stages.stages.iter().enumerate() {
        let peak = &stage.peak;
        let held = format!(
            "{} groups alive, {} microbatches in flight, {}",
            peak.live_groups,
            peak.in_flight,
            bytes(peak.bytes)
        );
        figures.push((format!("stage {number}, peak"), held));
    }
    let mut pictures = vec![stages_svg(stages, &times)];
    // Memory over time is simulated with overlapped transfers.
    if let Ok(timeline) = World::of_stages(pipeline, stages)?.run() {
        let series = timeline.ranks.iter().enumerate().map(|(number, rank)| Series {
            name: format!("stage {number}"),
            points: rank.bytes.iter().map(|sample| (sample.ns, sample.device_bytes)).collect(),
        });
        pictures.push(memory_svg(&series.collect::<Vec<_>>(), timeline.total_ns));
    }
    Ok(page(title, &figures, &pictures))
}
