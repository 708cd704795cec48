//! Output files: the report, the plans, the plan file of each rank, pictures.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use dormouse_parallel::draw::{page, pipeline_page, stages_svg, text_block};
use dormouse_schedule::{FileSequence, PlanFile};

use super::{Made, figures};
use crate::Error;
use crate::sequences::Described;
use crate::text::as_json;

/// Name of the page for a browser.
const PAGE: &str = "page.html";

/// Returns the name of a rank's plan file.
fn rank_file(rank: u32) -> String {
    format!("rank-{rank}.plan")
}

/// Returns whether a plan file of a rank has this name.
fn is_rank_file(name: &str) -> bool {
    let rank = || name.strip_prefix("rank-")?.strip_suffix(".plan")?.parse().ok();
    // Not other spellings of a number.
    rank().is_some_and(|rank| name == rank_file(rank))
}

/// What was written.
#[derive(Debug)]
pub(super) struct Written {
    /// The page for a browser.
    pub(super) page: PathBuf,
    /// Plan files of an earlier run that were removed.
    pub(super) removed: Vec<PathBuf>,
}

impl Made {
    /// Returns the plan files of all ranks that have sequences.
    fn files(&self) -> impl Iterator<Item = PlanFile> + '_ {
        let ranks = self.ranks.as_ref();
        let count = ranks.map_or(1, |ranks| ranks.plans.len() as u32);
        let all = || (0..self.described.scoring.len() as u32).collect();
        let own = move |rank: u32| match ranks {
            None => self.plan.as_ref().map(|plan| (all(), plan)),
            Some(ranks) => {
                let share = ranks.shares.shares.get(rank as usize)?;
                let plan = ranks.plans.get(rank as usize)?.as_ref()?;
                Some((share.sequences.clone(), plan))
            }
        };
        (0..count).filter_map(move |rank| {
            let (sequences, plan) = own(rank)?;
            let sequences = sequences.into_iter().map(|number| self.sequence(number)).collect();
            Some(PlanFile { rank, ranks: count, sequences, plan: plan.clone() })
        })
    }

    fn sequence(&self, number: u32) -> FileSequence {
        let at = number as usize;
        let Described { names, checksums, .. } = &self.described;
        FileSequence {
            number,
            name: names.get(at).map(Into::into),
            tokens: self.tokens.get(at).copied().unwrap_or(0),
            crc32: checksums.get(at).copied(),
        }
    }
}

/// Writes all files into `folder`, which is created if missing; existing files are replaced. Plan files of ranks that
/// this run does not have are removed: a rank would take the plan of another batch for its own.
pub(super) fn write(folder: &Path, made: &Made) -> Result<Written, Error> {
    let in_folder = |source| Error::Write { file: folder.to_owned(), source };
    fs::create_dir_all(folder).map_err(in_folder)?;
    let put = |name: &str, text: &str| {
        let file = folder.join(name);
        fs::write(&file, text).map_err(|source| Error::Write { file, source })
    };
    put("report.json", &as_json(&made.report)?)?;
    let mut pictures = Vec::new();
    if let Some(plan) = &made.plan {
        put("plan.json", &plan.to_json())?;
    }
    if let Some(ranks) = &made.ranks {
        put("shares.json", &as_json(&ranks.shares)?)?;
    }
    let mut rank_files = BTreeSet::new();
    for file in made.files() {
        let name = rank_file(file.rank);
        put(&name, &file.to_text())?;
        rank_files.insert(name);
    }
    if let Some(memory) = &made.memory {
        put("memory.svg", memory)?;
        pictures.push(memory.clone());
    }
    if let Some(staged) = &made.stages {
        put("stages.json", &as_json(&staged.stages)?)?;
        let times = staged.pipeline.expected_times(&staged.stages)?;
        let picture = stages_svg(&staged.stages, &times);
        put("stages.svg", &picture)?;
        pictures.push(picture);
        let page = pipeline_page("dormouse plan: stages", &staged.pipeline, &staged.stages)?;
        put("stages.html", &page)?;
    }
    let sections = figures::sections(&made.report, &made.trees);
    let drawn = sections.iter().filter(|section| !section.picture.is_empty());
    pictures.splice(0..0, drawn.map(|section| text_block(&section.picture)));
    let labelled = sections.into_iter().flat_map(|section| {
        let label = move |(label, value)| (format!("{}: {label}", section.title), value);
        section.figures.into_iter().map(label)
    });
    put(PAGE, &page("dormouse plan", &labelled.collect::<Vec<_>>(), &pictures))?;
    let removed = earlier_plans(folder, &rank_files).map_err(in_folder)?;
    for file in &removed {
        fs::remove_file(file).map_err(|source| Error::Write { file: file.clone(), source })?;
    }
    Ok(Written { page: folder.join(PAGE), removed })
}

/// Returns the plan files of ranks in `folder` that this run has not written, by name.
fn earlier_plans(folder: &Path, written: &BTreeSet<String>) -> io::Result<Vec<PathBuf>> {
    let mut files = Vec::new();
    for entry in fs::read_dir(folder)? {
        let entry = entry?;
        let name = entry.file_name();
        let Some(name) = name.to_str() else { continue };
        if is_rank_file(name) && !written.contains(name) && !entry.file_type()?.is_dir() {
            files.push(entry.path());
        }
    }
    files.sort_unstable();
    Ok(files)
}
