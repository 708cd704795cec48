//! Output files: the report, the plans, pictures.

use std::fs;
use std::path::{Path, PathBuf};

use dormouse_parallel::draw::{page, pipeline_page, stages_svg};

use super::{Made, figures};
use crate::Error;
use crate::text::as_json;

/// Name of the page for a browser.
const PAGE: &str = "page.html";

/// Writes all files into `folder`, which is created if missing; existing files are replaced. Returns the page for a
/// browser.
pub(super) fn write(folder: &Path, made: &Made) -> Result<PathBuf, Error> {
    fs::create_dir_all(folder)
        .map_err(|source| Error::Write { file: folder.to_owned(), source })?;
    let put = |name: &str, text: &str| {
        let file = folder.join(name);
        fs::write(&file, text).map_err(|source| Error::Write { file, source })
    };
    put("report.json", &as_json(&made.report))?;
    let mut pictures = Vec::new();
    if let Some(plan) = &made.plan {
        put("plan.json", &plan.to_json())?;
    }
    if let Some(shares) = &made.shares {
        put("shares.json", &as_json(shares))?;
    }
    if let Some(memory) = &made.memory {
        put("memory.svg", memory)?;
        pictures.push(memory.clone());
    }
    if let Some(staged) = &made.stages {
        put("stages.json", &as_json(&staged.stages))?;
        let times = staged.stages.times(&staged.pipeline, staged.pipeline.timing())?;
        let picture = stages_svg(&staged.stages, &times);
        put("stages.svg", &picture)?;
        pictures.push(picture);
        let page = pipeline_page("dormouse plan: stages", &staged.pipeline, &staged.stages)?;
        put("stages.html", &page)?;
    }
    let sections = figures::sections(&made.report);
    let labelled = sections.into_iter().flat_map(|section| {
        let label = move |(label, value)| (format!("{}: {label}", section.title), value);
        section.figures.into_iter().map(label)
    });
    put(PAGE, &page("dormouse plan", &labelled.collect::<Vec<_>>(), &pictures))?;
    Ok(folder.join(PAGE))
}
